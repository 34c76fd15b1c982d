package main

import (
	"context"
	"errors"
	"fmt"

	"palimpsest/bench/rig"
	"palimpsest/internal/telemetry"
)

// telemetry projects a log whose commits are traced, in turns with traces and metrics and without.
func (b *bench) telemetry(ctx context.Context) error {
	return rig.WithTelemetry(ctx, "bench-projector", func(tel *telemetry.Telemetry) error { return b.overhead(ctx, tel) })
}

func (b *bench) overhead(ctx context.Context, tel *telemetry.Telemetry) (err error) {
	r, err := newBed(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	var out []rig.Overhead
	for _, per := range []int{1, 10} {
		name := fmt.Sprintf("packed%d", per)
		b.say("%s: making a log of %d events", name, b.Events)
		l, err := r.newLog(ctx, name, per, b.Sessions, b.Events/b.Sessions, true)
		if err != nil {
			return err
		}
		var spans [2][]*span // without, with
		for round := range b.Rounds {
			b.say("%s: round %d of %d", name, round+1, b.Rounds)
			for k := range 2 {
				k = (k + round) % 2 // each comes first as often as the other
				s, err := r.projectOnce(ctx, l, []*telemetry.Telemetry{nil, tel}[k])
				if err != nil {
					return err
				}
				spans[k] = append(spans[k], s)
			}
		}
		out = append(out, rig.NewOverhead("telemetry/project/"+name, rig.Median(spans[1], (*span).rate), rig.Median(spans[0], (*span).rate), rig.Median(spans[1], cpuOf), rig.Median(spans[0], cpuOf)))
	}
	return rig.PrintOverheads(b.out, b.JSON, fmt.Sprintf("Projections of %d events over %d sessions with traces and metrics over OTLP to a collector in this process, and without, in turns; medians of %d rounds.", b.Events, b.Sessions, b.Rounds), out)
}
