package main

import (
	"context"
	"errors"
	"math/bits"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"palimpsest/bench/rig"
)

// load is what a case does: each of its calls is repeated by a goroutine of its own, one at a time.
type load struct {
	name  string
	about string
	calls []call
	// stream is where the load ends up.
	stream string
	// after is done behind each measurement.
	after []func(ctx context.Context) error
	// listed says that the case is one of those that are printed as JSON.
	listed bool
}

// call does one thing and returns how many events were acknowledged.
type call func(ctx context.Context) (events int, err error)

// sample is one measurement of a load.
type sample struct {
	events int
	span   time.Duration
	times  histogram // of calls
	// Of the whole process, client, appender and server, per event:
	allocs float64       // heap objects
	cpu    time.Duration // user and system
	stored float64       // bytes of the stream per event
}

func (s *sample) rate() float64 { return float64(s.events) / s.span.Seconds() }

// worker is what one goroutine counts, so that measuring shares nothing and allocates nothing.
type worker struct {
	all, events int
	times       histogram
	err         error
}

const (
	warming int32 = iota
	measuring
	over
)

// measure runs a load: first unmeasured, then measured. What the calls have begun is always
// finished, so that what was acknowledged is known.
func (r *bed) measure(ctx context.Context, l *load, warmup, span time.Duration) (s *sample, err error) {
	defer func() {
		for _, f := range l.after {
			err = errors.Join(err, f(ctx))
		}
	}()
	before, err := r.stored(ctx, l.stream)
	if err != nil {
		return nil, err
	}
	runtime.GC() // so that nobody pays for the garbage of the one before
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	var phase atomic.Int32
	var seen atomic.Bool // that a call was measured
	var wg sync.WaitGroup
	workers := make([]worker, len(l.calls))
	for i, do := range l.calls {
		wg.Go(func() {
			w := &workers[i]
			for phase.Load() != over && running.Err() == nil {
				start := time.Now()
				n, err := do(running)
				if err != nil {
					w.err = err
					cancel()
					return
				}
				w.all += n
				if phase.Load() == measuring {
					w.events += n
					w.times.add(time.Since(start))
					if !seen.Load() {
						seen.Store(true)
					}
				}
			}
		})
	}
	var m0, m1 runtime.MemStats
	pause(running, warmup)
	runtime.ReadMemStats(&m0)
	cpu := rig.CPUTime()
	start := time.Now()
	phase.Store(measuring)
	pause(running, span)
	for !seen.Load() && running.Err() == nil { // a machine that is very busy
		pause(running, span)
	}
	phase.Store(over)
	s = &sample{span: time.Since(start)}
	cpu = rig.CPUTime() - cpu
	runtime.ReadMemStats(&m1)
	wg.Wait()

	all := 0
	var errs []error
	for i := range workers {
		w := &workers[i]
		s.events += w.events
		s.times.merge(&w.times)
		all += w.all
		if w.err != nil && !errors.Is(w.err, context.Canceled) {
			errs = append(errs, w.err)
		}
	}
	if len(errs) > 0 {
		return nil, errs[0]
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	after, err := r.stored(ctx, l.stream)
	if err != nil {
		return nil, err
	}
	s.allocs = float64(m1.Mallocs-m0.Mallocs) / float64(s.events)
	s.cpu = cpu / time.Duration(s.events)
	s.stored = float64(after-before) / float64(all)
	return s, nil
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// histogram counts durations in buckets that are 1 % wide.
type histogram struct {
	counts [64 << subBits]uint32
	n      int
}

const subBits = 7

// bucket is the position of the highest bit, and the next subBits bits behind it.
func bucket(d time.Duration) int {
	v := uint64(max(d, 1))
	if v < 1<<subBits {
		return int(v)
	}
	shift := bits.Len64(v) - 1 - subBits
	return (shift+1)<<subBits | int(v>>shift)&(1<<subBits-1)
}

// lowest is the shortest duration of a bucket.
func lowest(bucket int) time.Duration {
	if bucket < 1<<subBits {
		return time.Duration(bucket)
	}
	shift := bucket>>subBits - 1
	return time.Duration(1<<subBits|bucket&(1<<subBits-1)) << shift
}

func (h *histogram) add(d time.Duration) {
	h.counts[bucket(d)]++
	h.n++
}

func (h *histogram) merge(o *histogram) {
	for i, n := range o.counts {
		h.counts[i] += n
	}
	h.n += o.n
}

// quantile is the duration that a share q of the calls did not exceed, to 1 %.
func (h *histogram) quantile(q float64) time.Duration {
	rank := int(q * float64(h.n))
	for i, n := range h.counts {
		if rank -= int(n); rank < 0 {
			return lowest(i)
		}
	}
	return 0
}
