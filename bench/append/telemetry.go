package main

import (
	"context"
	"errors"
	"fmt"

	"palimpsest/bench/rig"
	"palimpsest/internal/platform"
	"palimpsest/internal/telemetry"
)

// telemetry measures the listed cases on two servers in turns, one of whose appenders has traces
// and metrics.
func (b *bench) telemetry(ctx context.Context) error {
	return rig.WithTelemetry(ctx, "bench-appender", func(tel *telemetry.Telemetry) error { return b.overhead(ctx, tel) })
}

func (b *bench) overhead(ctx context.Context, tel *telemetry.Telemetry) (err error) {
	b.say("making sessions")
	without, err := newBed(ctx, platform.Durability(b.Durability), nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, without.Close()) }()
	with, err := newBed(ctx, platform.Durability(b.Durability), tel)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, with.Close()) }()
	var off, on []*load
	for _, k := range kinds() {
		if !k.listed {
			continue
		}
		for _, side := range []struct {
			r  *bed
			to *[]*load
		}{{without, &off}, {with, &on}} {
			l, err := side.r.load(ctx, k)
			if err != nil {
				return err
			}
			*side.to = append(*side.to, l)
		}
	}
	samples := make([][2][]*sample, len(off)) // off, on
	for round := range b.Rounds {
		b.say("round %d of %d", round+1, b.Rounds)
		for i := range off {
			for k := range 2 {
				k = (k + round) % 2 // each comes first as often as the other
				s, err := []*bed{without, with}[k].measure(ctx, [][]*load{off, on}[k][i], b.Warmup, b.Time)
				if err != nil {
					return err
				}
				samples[i][k] = append(samples[i][k], s)
			}
		}
	}
	var out []rig.Overhead
	for i, s := range samples {
		out = append(out, rig.NewOverhead("telemetry/"+off[i].name, rig.Median(s[1], (*sample).rate), rig.Median(s[0], (*sample).rate), rig.Median(s[1], cpu), rig.Median(s[0], cpu)))
	}
	for _, r := range []*bed{without, with} {
		if err := r.verify(ctx); err != nil {
			return err
		}
	}
	return rig.PrintOverheads(b.out, b.JSON, fmt.Sprintf("Appends with traces and metrics over OTLP to a collector in this process, and without, in turns; medians of %d rounds of %s.", b.Rounds, b.Time), out)
}
