package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"text/tabwriter"
	"time"

	"palimpsest/bench/rig"
	"palimpsest/internal/appender"
)

const (
	buildBatch  = 1000     // events of an append that makes a session long
	flatRounds  = 11       // of the medians
	flatAppends = 150      // to each session in a round
	flatBatches = 10       // appends of a batch to each session in a round
	flatCache   = 64 << 20 // CacheBytes of the appender whose memory is measured
)

// span is a session of some length, with the times of appends to it.
type span struct {
	target *target
	length int
	laps   []lap
}

// lap is what one round found of a session.
type lap struct {
	p50, p99 time.Duration // of appends of one event
	batch    time.Duration // median of an event's part of a batch
}

func (s *span) of(f func(lap) time.Duration) time.Duration {
	return time.Duration(rig.Median(s.laps, func(l lap) float64 { return float64(f(l)) }))
}

func (s *span) p50() time.Duration   { return s.of(func(l lap) time.Duration { return l.p50 }) }
func (s *span) p99() time.Duration   { return s.of(func(l lap) time.Duration { return l.p99 }) }
func (s *span) batch() time.Duration { return s.of(func(l lap) time.Duration { return l.batch }) }

// flat measures whether an append takes longer the longer its session is, and what many
// sessions take of memory.
func (b *bench) flat(ctx context.Context, r *bed) error {
	spans, err := b.lengths(ctx, r)
	if err != nil {
		return err
	}
	first, last := &spans[0], &spans[len(spans)-1]
	ratio := func(a, b time.Duration) float64 { return float64(a) / float64(b) }
	if b.JSON {
		l := line{"append/flat/1M", rig.Round(rig.Us(last.p50()), 10), "µs", rig.Round(rig.Us(first.p50()), 10), rig.Round(ratio(last.p50(), first.p50()), 1000)}
		if err := json.NewEncoder(b.out).Encode(l); err != nil {
			return err
		}
		return b.memory(ctx, r, b.progress)
	}
	fmt.Fprintf(b.out, "Appends to sessions of four lengths in turn, one at a time; durability %s; medians of %d rounds.\n\n", b.Durability, flatRounds)
	t := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "length\tone event p50\tp99\tratio\t%d events, an event\tratio\t\n", lines)
	for i := range spans {
		s := &spans[i]
		fmt.Fprintf(t, "%d\t%.1f µs\t%.0f µs\t%.2f\t%.2f µs\t%.2f\t\n", s.length, rig.Us(s.p50()), rig.Us(s.p99()), ratio(s.p50(), first.p50()), rig.Us(s.batch()), ratio(s.batch(), first.batch()))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(b.out, "\nappend/flat/1M: the last to the first is %.2f\n", ratio(last.p50(), first.p50()))
	return b.memory(ctx, r, b.out)
}

// lengths makes sessions of four lengths and appends to them in turn.
func (b *bench) lengths(ctx context.Context, r *bed) ([]span, error) {
	targets := r.newTargets("flat", 4)
	spans := make([]span, len(targets))
	for i, n := len(spans)-1, b.Longest; i >= 0; i, n = i-1, n/10 {
		spans[i] = span{target: targets[i], length: n}
	}
	for i := range spans {
		s := &spans[i]
		b.say("making a session of %d events", s.length)
		for left := s.length; left > 0; left -= buildBatch {
			if _, err := appendTo(r.appender, s.target, repeat(userMessage, min(left, buildBatch)))(ctx); err != nil {
				return nil, err
			}
		}
	}
	b.say("appending to them in turn")
	for range flatRounds {
		runtime.GC()
		one, err := inTurns(ctx, r, spans, flatAppends, repeat(userMessage, 1))
		if err != nil {
			return nil, err
		}
		many, err := inTurns(ctx, r, spans, flatBatches, repeat(userMessage, lines))
		if err != nil {
			return nil, err
		}
		for k := range spans {
			spans[k].laps = append(spans[k].laps, lap{one[k].quantile(0.5), one[k].quantile(0.99), many[k].quantile(0.5) / lines})
		}
	}
	return spans, nil
}

// inTurns appends n times to each session and returns how long that took, for each.
func inTurns(ctx context.Context, r *bed, spans []span, n int, evs [][]byte) ([]histogram, error) {
	times := make([]histogram, len(spans))
	for i := range n {
		for k := range spans { // each comes first as often as the others
			k = (k + i) % len(spans)
			start := time.Now()
			if _, err := appendTo(r.appender, spans[k].target, evs)(ctx); err != nil {
				return nil, err
			}
			times[k].add(time.Since(start))
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
	}
	return times, nil
}

// memory touches many sessions through an appender with a small cache.
func (b *bench) memory(ctx context.Context, r *bed, out io.Writer) error {
	b.say("touching %d sessions", b.Sessions)
	targets := r.newTargets("touched", b.Sessions)
	before := heap()
	a := appender.New(r.journal, r.headers, r.snaps, appender.Config{CacheBytes: flatCache})
	calls := make([]call, len(targets))
	for i, t := range targets {
		calls[i] = appendTo(a, t, [][]byte{userMessage})
	}
	start := time.Now()
	if err := each(ctx, calls); err != nil {
		return err
	}
	took := time.Since(start)
	n, counted := a.Sessions()
	clear(calls) // which hold the appender
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	with := heap()
	if err := a.Close(ctx); err != nil {
		return err
	}
	runtime.KeepAlive(a) // up to here
	without := heap()
	held := int64(with) - int64(without)
	const mib = 1 << 20
	fmt.Fprintf(out, `
%d sessions touched in %s by an appender with CacheBytes %d MiB: %d of them in memory, %.1f MiB by its own count.
Heap in use, MiB: %.1f before; %.1f after; %.1f after a collection; %.1f without the appender, which so held %.1f.
What is left is the server's, which is in the same process: its subjects, headers and message ids.
`, len(targets), took.Round(time.Millisecond), flatCache/mib, n, float64(counted)/mib,
		float64(before)/mib, float64(m.HeapInuse)/mib, float64(with)/mib, float64(without)/mib, float64(held)/mib)
	if counted > flatCache {
		return fmt.Errorf("the appender counts %d bytes of sessions, at most %d were expected", counted, flatCache)
	}
	return nil
}

// heap is the heap in use, in bytes, after a collection.
func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // the first only queues what has a finalizer or a pool
	runtime.ReadMemStats(&m)
	return m.HeapInuse
}
