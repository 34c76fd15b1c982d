package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/bench/rig"
	"palimpsest/internal/events"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/telemetry"
)

const (
	scratch     = "SCRATCH" // bucket of the bare writes
	bareWriters = 8
)

// span is one run over a log.
type span struct {
	events int
	took   time.Duration
	cpu    time.Duration // user and system, of the whole process
	// Of a projection, what it wrote to SURFACES.
	puts, bytes int
}

func (s *span) rate() float64         { return float64(s.events) / s.took.Seconds() }
func (s *span) cpuPer() time.Duration { return s.cpu / time.Duration(s.events) }
func cpuOf(s *span) float64           { return float64(s.cpu) / float64(s.events) }

// clock measures a run of f.
func clock(n int, f func() error) (*span, error) {
	runtime.GC() // so that nobody pays for the garbage of the one before
	cpu, start := rig.CPUTime(), time.Now()
	err := f()
	return &span{events: n, took: time.Since(start), cpu: rig.CPUTime() - cpu}, err
}

// project measures both packings in turns with their baselines.
func (b *bench) project(ctx context.Context, r *bed) ([]line, error) {
	var out []line
	for _, per := range []int{1, 10} {
		name := fmt.Sprintf("packed%d", per)
		b.say("%s: making a log of %d events", name, b.Events)
		l, err := r.newLog(ctx, name, per, b.Sessions, b.Events/b.Sessions, false)
		if err != nil {
			return nil, err
		}
		var ours, base, alone, unfiltered []*span
		for round := range b.Rounds {
			b.say("%s: round %d of %d", name, round+1, b.Rounds)
			s, err := r.projectOnce(ctx, l, nil)
			if err != nil {
				return nil, err
			}
			ours = append(ours, s)
			for _, c := range []struct {
				into        *[]*span
				filtered    bool
				puts, bytes int
			}{{&base, true, s.puts, s.bytes}, {&alone, true, 0, 0}, {&unfiltered, false, 0, 0}} {
				got, err := r.bare(ctx, l, c.filtered, c.puts, c.bytes)
				if err != nil {
					return nil, err
				}
				*c.into = append(*c.into, got)
			}
		}
		rate := rig.Median(base, (*span).rate)
		per := func(name, about string, s []*span) line {
			v := rig.Median(s, (*span).rate)
			return line{Name: name, Value: rig.Round(v, 1), Unit: "events/s", Baseline: rig.Round(rate, 1), Ratio: rig.Round(v/rate, 1000),
				CPURatio: rig.Round(rig.Median(base, cpuOf)/rig.Median(s, cpuOf), 1000), about: about, us: rig.Median(s, cpuOf) / 1000}
		}
		wrote := func(f func(*span) int) float64 {
			return rig.Median(ours, func(s *span) float64 { return float64(f(s)) })
		}
		out = append(out,
			per("project/"+name, fmt.Sprintf("read, folded, in heads and checkpointed; %.0f KV writes, %.0f bytes an event", wrote(func(s *span) int { return s.puts }), wrote(func(s *span) int { return s.bytes })/float64(l.events)), ours),
			per("consumers/"+name, "32 bare ordered consumers of one partition each, no writes", alone),
			per("unfiltered/"+name, "one bare ordered consumer without a filter, no writes", unfiltered))
	}
	return out, nil
}

// projectOnce projects a log from nothing: the span ends when every event is in a head and
// covered by a checkpoint. tel may be nil.
func (r *bed) projectOnce(ctx context.Context, l *recorded, tel *telemetry.Telemetry) (*span, error) {
	buckets, err := r.emptyBuckets(ctx, l)
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	at := map[int]uint64{}
	open := len(l.ends)
	done := make(chan struct{})
	w := projection.NewWorker(l.journal, buckets, projection.NewHeads(), projection.Config{Logger: quiet, Telemetry: tel, Signals: projection.Signals{
		Checkpointed: func(p int, upTo uint64) {
			mu.Lock()
			defer mu.Unlock()
			end := l.ends[p]
			if at[p] < end && upTo >= end {
				if open--; open == 0 {
					close(done)
				}
			}
			at[p] = upTo
		},
	}})
	s, err := clock(l.events, func() error {
		if err := w.Start(ctx); err != nil {
			return err
		}
		select {
		case <-done:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	})
	if serr := w.Stop(ctx); err == nil {
		err = serr
	}
	if err != nil {
		return nil, err
	}
	st := w.Stats()
	s.puts, s.bytes = int(st.Writes.Load()), int(st.WrittenBytes.Load())
	if n := int(st.Events.Load()); n != l.events {
		return nil, fmt.Errorf("log %s: expected %d events to be folded, found %d", l.name, l.events, n)
	}
	return s, l.check(ctx, buckets.Snapshots)
}

// check compares every head with the end of its session's log.
func (l *recorded) check(ctx context.Context, s *snapshot.Store) error {
	for _, a := range l.authors {
		h, _, err := s.Head(ctx, a.session)
		if err != nil {
			return err
		}
		if h == nil || h.Seq != a.next-1 || h.Digest != a.digest.String() {
			return fmt.Errorf("session %s: expected a head at seq %d with digest %s, found %+v", a.session, a.next-1, a.digest, h)
		}
	}
	return nil
}

// emptyBuckets makes the projection's buckets anew.
func (r *bed) emptyBuckets(ctx context.Context, l *recorded) (*projection.Buckets, error) {
	js := l.journal.JetStream()
	for _, name := range []string{snapshot.GenerationsBucket, snapshot.Bucket, projection.CheckpointsBucket, projection.QuarantineBucket} {
		if err := js.DeleteKeyValue(ctx, name); err != nil && !errors.Is(err, jetstream.ErrBucketNotFound) {
			return nil, err
		}
	}
	return projection.OpenBuckets(ctx, js, 1)
}

// bare reads a log with bare ordered consumers, while as many KV values as a projection wrote,
// with as many bytes in all, are put into a bucket of the same kind.
func (r *bed) bare(ctx context.Context, l *recorded, filtered bool, puts, bytes int) (*span, error) {
	if err := r.js.DeleteKeyValue(ctx, scratch); err != nil && !errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, err
	}
	kv, err := r.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: scratch, History: 1, Storage: jetstream.FileStorage, Compression: true})
	if err != nil {
		return nil, err
	}
	stream, err := r.js.Stream(ctx, l.journal.Config().Stream)
	if err != nil {
		return nil, err
	}
	return clock(l.events, func() error {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		var wg sync.WaitGroup
		if filtered {
			for p, n := range l.parts {
				wg.Go(func() {
					if err := consume(ctx, stream, []string{fmt.Sprintf("%s.%d.*", l.journal.Config().Prefix, p)}, n); err != nil {
						cancel(err)
					}
				})
			}
		} else {
			wg.Go(func() {
				if err := consume(ctx, stream, nil, l.commits); err != nil {
					cancel(err)
				}
			})
		}
		if puts > 0 {
			var next atomic.Int64
			for range bareWriters {
				wg.Go(func() {
					if err := putAll(ctx, kv, &next, puts, bytes/puts, len(l.authors)); err != nil {
						cancel(err)
					}
				})
			}
		}
		wg.Wait()
		return context.Cause(ctx)
	})
}

// consume reads n messages.
func consume(ctx context.Context, s jetstream.Stream, filters []string, n int) error {
	cons, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{FilterSubjects: filters, InactiveThreshold: 30 * time.Second})
	if err != nil {
		return err
	}
	done := make(chan struct{})
	run, err := cons.Consume(func(jetstream.Msg) {
		if n--; n == 0 {
			close(done)
		}
	})
	if err != nil {
		return err
	}
	defer func() {
		run.Stop()
		<-run.Closed()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// putAll puts values of a size under as many keys as there are sessions, until next reaches puts.
func putAll(ctx context.Context, kv jetstream.KeyValue, next *atomic.Int64, puts, size, keys int) error {
	var value []byte // looks like a head: lines of a log
	for seq := 0; len(value) < size; seq++ {
		value = appendEvent(value, seq, dataBytes)
	}
	value = value[:size]
	for i := next.Add(1); i <= int64(puts); i = next.Add(1) {
		if _, err := kv.Put(ctx, events.Token(fmt.Sprintf("scratch-%05d", int(i)%keys)), value); err != nil {
			return err
		}
	}
	return nil
}
