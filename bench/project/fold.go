package main

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"palimpsest/bench/rig"
	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

const (
	foldCommit = 64  // events of a commit that is folded
	foldLaps   = 100 // commits of a sample
)

var foldSizes = []int{100, 10_000, 1_000_000}

// folding is a session whose surface keeps its size while events are folded into it.
type folding struct {
	size    int
	state   *session.State
	replace bool
}

// newFolding makes a session with size nodes as loading a head does: without their messages.
func newFolding(size int, replace bool) *folding {
	nodes := make([]surface.Node, size)
	for i := range nodes {
		nodes[i] = surface.Node{Seq: events.Seq(i), Kind: events.KindUser, Size: dataBytes}
	}
	return &folding{size, &session.State{
		ID: "fold", Format: events.Format3, Next: events.Seq(size), Life: lifecycle.New(),
		Surface: surface.Restore(events.Format3, surface.KeepBodies, 0, nodes),
	}, replace}
}

// commit is the next one: appended user messages, or such as replace each the newest node.
func (f *folding) commit() *events.Commit {
	c := &events.Commit{ID: "c", Session: f.state.ID, Format: f.state.Format, First: f.state.Next, Last: f.state.Next + foldCommit - 1}
	data := func(seq events.Seq) []byte {
		const head, tail = `{"id":"u","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"`, `"}]}`
		return []byte(head + padding[:dataBytes-len(head)-len(tail)-int(seq%2)] + tail)
	}
	for seq := c.First; seq <= c.Last; seq++ {
		op := `"append"`
		if f.replace {
			op = fmt.Sprintf(`{"op":"replace","startSeq":%d,"endSeq":%d},"sourceEventSeqs":[%d]`, seq-1, seq-1, seq-1)
		}
		c.Body = fmt.Appendf(c.Body, `{"type":"user/message","seq":%d,"time":1767225604000,"surfaceOp":%s,"data":%s}`+"\n", seq, op, data(seq))
	}
	return c
}

// sample is the processor time and the heap objects of folding an event.
func (f *folding) sample(v *events.Vocabulary) (ns, allocs float64, err error) {
	var spent time.Duration
	var objects uint64
	var m0, m1 runtime.MemStats
	for range foldLaps {
		c := f.commit()
		runtime.ReadMemStats(&m0)
		start := time.Now()
		err := f.state.FoldCommit(c, v, nil)
		spent += time.Since(start)
		runtime.ReadMemStats(&m1)
		objects += m1.Mallocs - m0.Mallocs
		if err != nil {
			return 0, 0, err
		}
		if !f.replace { // the size stays what it is
			f.state.Surface.Truncate(events.Seq(f.size) - 1)
			f.state.Next = events.Seq(f.size)
		}
		if n := f.state.Surface.Len(); n != f.size {
			return 0, 0, fmt.Errorf("expected a surface of %d nodes, found %d", f.size, n)
		}
	}
	const n = foldLaps * foldCommit
	return float64(spent) / n, float64(objects) / n, nil
}

// foldLines measures the fold alone, at surfaces of different sizes in turn.
func foldLines(ctx context.Context, rounds int) ([]line, error) {
	v := events.DefaultVocabulary()
	var out []line
	for _, replace := range []bool{false, true} {
		name, about := "fold/append", "a session's state takes in a commit of 64 user messages"
		if replace {
			name, about = "fold/replace", "the same, each in the place of the newest node"
		}
		type lap struct{ ns, allocs float64 }
		laps := make([][]lap, len(foldSizes))
		fs := make([]*folding, len(foldSizes))
		for i, size := range foldSizes {
			fs[i] = newFolding(size, replace)
		}
		for round := range rounds + 1 {
			for i, f := range fs {
				runtime.GC()
				ns, allocs, err := f.sample(v)
				if err != nil {
					return nil, fmt.Errorf("%s at %d nodes: %w", name, f.size, err)
				}
				if round > 0 { // the first warms up
					laps[i] = append(laps[i], lap{ns, allocs})
				}
			}
			if ctx.Err() != nil {
				return nil, context.Cause(ctx)
			}
		}
		at := func(i int) float64 { return rig.Median(laps[i], func(l lap) float64 { return l.ns }) }
		last := len(laps) - 1
		allocs := rig.Round(rig.Median(laps[last], func(l lap) float64 { return l.allocs }), 10)
		out = append(out, line{
			Name: name, Value: rig.Round(at(last), 1), Unit: "ns/event", Baseline: rig.Round(at(0), 1), Ratio: rig.Round(at(last)/at(0), 1000), Allocs: &allocs,
			about: fmt.Sprintf("%s; %.0f ns at %d nodes, %.0f at %d, %.0f at %d", about, at(0), foldSizes[0], at(1), foldSizes[1], at(2), foldSizes[2]),
		})
	}
	return out, nil
}
