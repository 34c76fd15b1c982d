package main

import (
	"context"
	"fmt"
	"text/tabwriter"

	"palimpsest/bench/rig"
	"palimpsest/internal/events"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

// flatSpan is how many of a session's last events are measured, at most.
const flatSpan = 5000

// kvbytes/flat is at this size of events, of which a hundred fill pages, and the projector's
// default for events a flush.
const flatData, flatEvery = 4096, 256

// written is how many bytes of heads and pages are written to KV an event, over the last
// events of a session of some length, when every so many events are flushed.
func written(ctx context.Context, length, size, every int) (float64, error) {
	v := events.DefaultVocabulary()
	a := newAuthor("flat", nil)
	s := snapshot.New(a.session, events.Format3, surface.KeepBodies)
	total := 0
	upTo := func(n, every int) error {
		for left := n - int(s.Next); left > 0; left = n - int(s.Next) {
			c := a.commit(min(every, left), size)
			c.StreamSeq = s.StreamSeq + 1
			if err := s.Fold(c, v, nil); err != nil {
				return err
			}
			f, err := s.Flush()
			if err != nil {
				return err
			}
			total += len(f.Head.Value)
			for _, p := range f.Pages {
				total += len(p.Value)
			}
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
		}
		return nil
	}
	span := min(length, flatSpan)
	if err := upTo(length-span, 1000); err != nil { // how it got there does not matter: the cuts follow from the log
		return 0, err
	}
	total = 0
	err := upTo(length, every)
	return float64(total) / float64(span), err
}

// shortest is the length that all others are compared with.
const shortest = 100

// flatLine is kvbytes/flat, of the longest session beside the shortest.
func flatLine(ctx context.Context, longest int) (line, error) {
	first, err := written(ctx, shortest, flatData, flatEvery)
	if err != nil {
		return line{}, err
	}
	last, err := written(ctx, longest, flatData, flatEvery)
	return flatAs("kvbytes/flat", first, last), err
}

func flatAs(name string, first, last float64) line {
	return line{Name: name, Value: rig.Round(last, 1), Unit: "bytes/event", Baseline: rig.Round(first, 1), Ratio: rig.Round(last/first, 1000)}
}

// flat measures bytes by length, at different sizes of events and of flushes.
func (b *bench) flat(ctx context.Context) error {
	t := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	lengths := []int{shortest, 1000, b.Longest / 100, b.Longest}
	if !b.JSON {
		fmt.Fprintf(b.out, "Bytes of heads and pages written to KV an event, over the last %d events of a session, or all of a shorter one.\n\n", flatSpan)
		fmt.Fprint(t, "data\tevents a flush\t")
		for _, n := range lengths {
			fmt.Fprintf(t, "%d\t", n)
		}
		fmt.Fprintln(t, "last/first\tlast/second\t")
	}
	var out []line
	for _, size := range []int{dataBytes, flatData} {
		for _, every := range []int{1, 16, flatEvery} {
			var per []float64
			for _, n := range lengths {
				b.say("%d bytes of data, a flush every %d events, %d events", size, every, n)
				w, err := written(ctx, n, size, every)
				if err != nil {
					return err
				}
				per = append(per, w)
			}
			last := per[len(per)-1]
			if !b.JSON {
				fmt.Fprintf(t, "%d\t%d\t", size, every)
				for _, w := range per {
					fmt.Fprintf(t, "%.0f\t", w)
				}
				fmt.Fprintf(t, "%.2f\t%.2f\t\n", last/per[0], last/per[1])
			}
			if size == flatData && every == flatEvery {
				out = append(out, flatAs("kvbytes/flat", per[0], last))
			}
			out = append(out, flatAs(fmt.Sprintf("kvbytes/data%d/every%d", size, every), per[0], last))
		}
	}
	if b.JSON {
		return printJSON(b.out, out)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(b.out, `
kvbytes/flat is that of %d bytes of data and a flush every %d events, the projector's own. A session whose messages do not fill a page
yet, as 100 events with %d bytes do not, has a smaller head than it will have, so that it writes less than any later one.
`, flatData, flatEvery, dataBytes)
	return err
}
