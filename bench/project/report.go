package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// line is what a program reads. For rates a ratio is value by baseline and cpuRatio the
// baseline's processor time an event by the value's, so that more is better; for times and bytes
// less is better, and cpuRatio is the value's processor time by the baseline's.
type line struct {
	Name     string  `json:"name"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
	Baseline float64 `json:"baseline"`
	Ratio    float64 `json:"ratio"`
	CPURatio float64 `json:"cpuRatio,omitempty"`
	// Of reads, and their baseline, in the unit of value.
	P99         float64 `json:"p99,omitempty"`
	P99Baseline float64 `json:"p99Baseline,omitempty"`
	P99Ratio    float64 `json:"p99Ratio,omitempty"`
	// Of folds, heap objects an event.
	Allocs *float64 `json:"allocs,omitempty"`

	about string
	us    float64 // processor time an event or read
}

func printJSON(w io.Writer, lines []line) error {
	enc := json.NewEncoder(w)
	for _, l := range lines {
		if err := enc.Encode(l); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) printTable(lines []line) error {
	fmt.Fprintf(b.out, "%d events with %d bytes of data over %d sessions, two in five on the surface; %d readers; medians of %d rounds.\n", b.Events, dataBytes, b.Sessions, b.Readers, b.Rounds)
	fmt.Fprint(b.out, `Each case runs in turns with its baseline. Of a projection that is 32 bare ordered consumers with one filter each over the same
log, beside 8 bare writers that put as many KV values with as many bytes as the projection did. Of a read it is bare KV gets of
the same keys. Of a fold it is the smallest surface, of bytes written to KV (see --flat) a session of 100 events.

`)
	t := tabwriter.NewWriter(b.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "case\tvalue\tunit\tbaseline\tratio\tp99\tbaseline\tratio\tcpu µs\tcpu ratio\tallocs\t")
	some := func(v float64, format string) string {
		if v == 0 {
			return ""
		}
		return fmt.Sprintf(format, v)
	}
	for _, l := range lines {
		allocs := ""
		if l.Allocs != nil {
			allocs = fmt.Sprintf("%.1f", *l.Allocs)
		}
		fmt.Fprintf(t, "%s\t%.0f\t%s\t%.0f\t%.2f\t%s\t%s\t%s\t%s\t%s\t%s\t\n", l.Name, l.Value, l.Unit, l.Baseline, l.Ratio,
			some(l.P99, "%.0f"), some(l.P99Baseline, "%.0f"), some(l.P99Ratio, "%.2f"), some(l.us, "%.2f"), some(l.CPURatio, "%.2f"), allocs)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(b.out)
	for _, l := range lines {
		if l.about != "" {
			fmt.Fprintf(b.out, "%s: %s\n", l.Name, l.about)
		}
	}
	_, err := fmt.Fprint(b.out, `
cpu is processor time an event or a read of the whole process: client, server and what measures. It depends little on what else
the machine does. cpu ratio compares it with the baseline's; for events/s more is better, for times less.
`)
	return err
}
