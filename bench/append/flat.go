package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"time"

	"palimpsest/internal/appender"
)

const (
	buildBatch  = 1000     // events of an append that makes a session long
	flatRounds  = 11       // of the medians
	flatAppends = 200      // to each session in a round
	flatCache   = 64 << 20 // CacheBytes of the appender whose memory is measured
)

// span is a session of some length, with the times of appends to it.
type span struct {
	target *target
	length int
	rounds []round1
}

// round1 is what one round found of a session.
type round1 struct{ p50, p99 time.Duration }

// flat measures whether an append takes longer the longer its session is, and what many
// sessions take of memory.
func (b *bench) flat(ctx context.Context, r *rig) error {
	spans, err := b.lengths(ctx, r)
	if err != nil {
		return err
	}
	first, last := &spans[0], &spans[len(spans)-1]
	if b.JSON {
		v, base := us(last.p50()), us(first.p50())
		if err := json.NewEncoder(b.out).Encode(line{"append/flat/1M", round(v, 10), "µs", round(base, 10), round(v/base, 1000)}); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(b.out, "One append of one event after another, to sessions of four lengths in turn; durability %s; medians of %d rounds of %d appends each.\n\n",
			b.Durability, flatRounds, flatAppends)
		fmt.Fprintf(b.out, "%12s %10s %10s %8s\n", "length", "p50", "p99", "ratio")
		for i := range spans {
			s := &spans[i]
			fmt.Fprintf(b.out, "%12d %10s %10s %8.2f\n", s.length, s.p50().Round(100*time.Nanosecond), s.p99().Round(time.Microsecond), float64(s.p50())/float64(first.p50()))
		}
		fmt.Fprintf(b.out, "\nappend/flat/1M: the last to the first is %.2f\n", float64(last.p50())/float64(first.p50()))
	}
	out := b.out
	if b.JSON {
		out = b.progress
	}
	return b.memory(ctx, r, out)
}

func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func (s *span) p50() time.Duration {
	return time.Duration(median(s.rounds, func(r round1) float64 { return float64(r.p50) }))
}

func (s *span) p99() time.Duration {
	return time.Duration(median(s.rounds, func(r round1) float64 { return float64(r.p99) }))
}

// lengths makes sessions of four lengths and appends to them in turn.
func (b *bench) lengths(ctx context.Context, r *rig) ([]span, error) {
	targets := r.newTargets("flat", 4)
	spans := make([]span, len(targets))
	for i, n := 0, b.Longest; i < len(spans); i, n = i+1, n/10 {
		spans[len(spans)-1-i] = span{target: targets[i], length: max(n, 1)}
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
	one := [][]byte{userMessage}
	for range flatRounds {
		runtime.GC()
		times := make([]histogram, len(spans))
		for i := range flatAppends {
			for k := range spans { // each comes first as often as the others
				k = (k + i) % len(spans)
				start := time.Now()
				if _, err := appendTo(r.appender, spans[k].target, one)(ctx); err != nil {
					return nil, err
				}
				times[k].add(time.Since(start))
			}
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
		}
		for k := range spans {
			spans[k].rounds = append(spans[k].rounds, round1{times[k].quantile(0.5), times[k].quantile(0.99)})
		}
	}
	return spans, nil
}

// memory touches many sessions through an appender with a small cache.
func (b *bench) memory(ctx context.Context, r *rig, out io.Writer) error {
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
	clear(calls)
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	with := heap()
	if err := a.Close(ctx); err != nil {
		return err
	}
	runtime.KeepAlive(a)
	a = nil
	without := heap()
	held := int64(with) - int64(without)
	const mib = 1 << 20
	fmt.Fprintf(out, `
%d sessions touched in %s by an appender with CacheBytes %d MiB: %d of them in memory, %.1f MiB by its own count.
Heap in use, MiB: %.1f before; %.1f after; %.1f after a collection; %.1f without the appender, which so held %.1f.
What is left is the server's, which is in the same process: its subjects, headers and message ids.
`, len(targets), took.Round(time.Millisecond), flatCache/mib, n, float64(counted)/mib,
		float64(before)/mib, float64(m.HeapInuse)/mib, float64(with)/mib, float64(without)/mib, float64(held)/mib)
	if slices.Max([]int{counted, 0}) > flatCache {
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
