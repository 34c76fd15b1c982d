package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"palimpsest/bench/rig"
)

// result is a case's samples, each with the baseline that ran just before it.
type result struct {
	load          *load
	samples, base []*sample
}

func (r *result) value() float64    { return rig.Median(r.samples, (*sample).rate) }
func (r *result) baseline() float64 { return rig.Median(r.base, (*sample).rate) }
func (r *result) ratio() float64    { return r.value() / r.baseline() }
func (r *result) byCPU() float64    { return rig.Median(r.base, cpu) / rig.Median(r.samples, cpu) }

func cpu(s *sample) float64 { return rig.Us(s.cpu) }

// spread is the least and the largest ratio of a round.
func (r *result) spread() (low, high float64) {
	var all []float64
	for i, s := range r.samples {
		all = append(all, s.rate()/r.base[i].rate())
	}
	return slices.Min(all), slices.Max(all)
}

// line is what a program reads.
type line struct {
	Name     string  `json:"name"`
	Value    float64 `json:"value"`
	Unit     string  `json:"unit"`
	Baseline float64 `json:"baseline"`
	Ratio    float64 `json:"ratio"`
}

func printJSON(w io.Writer, results []result) error {
	enc := json.NewEncoder(w)
	for i := range results {
		if r := &results[i]; r.load.listed {
			if err := enc.Encode(line{r.load.name, rig.Round(r.value(), 1), "events/s", rig.Round(r.baseline(), 1), rig.Round(r.ratio(), 1000)}); err != nil {
				return err
			}
		}
	}
	return nil
}

func printTable(w io.Writer, durability string, raw *load, results []result) error {
	fmt.Fprintf(w, "Appends of user/message events with %d bytes of data; durability %s; medians of %d rounds of %s.\n",
		dataBytes, durability, len(results[0].samples), results[0].samples[0].span.Round(time.Millisecond))
	fmt.Fprintf(w, "Baseline: %s, the same bytes. The baseline runs before a case in each of its rounds, at the same server.\n\n", raw.about)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "case\tevents/s\tbaseline\tratio\tin rounds\tp50\tp99\tcpu µs\tratio\tallocs\tbytes\t")
	var all []*sample
	for i := range results {
		all = append(all, results[i].base...)
	}
	row(t, raw.name, all, "", "1.00", "", "1.00")
	for i := range results {
		r := &results[i]
		low, high := r.spread()
		row(t, r.load.name, r.samples, fmt.Sprintf("%.0f", r.baseline()), fmt.Sprintf("%.2f", r.ratio()), fmt.Sprintf("%.2f–%.2f", low, high), fmt.Sprintf("%.2f", r.byCPU()))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(w)
	for i := range results {
		fmt.Fprintf(w, "%s: %s\n", results[i].load.name, results[i].load.about)
	}
	_, err := fmt.Fprint(w, `
p50 and p99 are of calls; a call of append/http/ndjson100 is 100 events. cpu and allocs: processor time (which, unlike
events/s, depends little on what else the machine does) and heap objects an event, of the whole process: client,
appender, server and what measures. bytes: growth of the stream's size an event.
`)
	return err
}

func row(w io.Writer, name string, s []*sample, baseline, ratio, spread, byCPU string) {
	quantile := func(q float64) time.Duration {
		return time.Duration(rig.Median(s, func(s *sample) float64 { return float64(s.times.quantile(q)) })).Round(time.Microsecond)
	}
	fmt.Fprintf(w, "%s\t%.0f\t%s\t%s\t%s\t%s\t%s\t%.1f\t%s\t%.1f\t%.0f\t\n", name, rig.Median(s, (*sample).rate), baseline, ratio, spread,
		quantile(0.5), quantile(0.99),
		rig.Median(s, cpu), byCPU, rig.Median(s, func(s *sample) float64 { return s.allocs }), rig.Median(s, func(s *sample) float64 { return s.stored }))
}
