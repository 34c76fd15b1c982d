package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"palimpsest/bench/rig"
	"palimpsest/internal/platform"
)

// bench is what the command line asks for.
type bench struct {
	Rounds     int           `help:"Rounds of each case; each runs it once, and the baseline before it." default:"6"`
	Cold       int           `help:"Rounds of each before those, which do not count: what is new takes twice the processor time." default:"2"`
	Time       time.Duration `help:"How long a case is measured in a round, and the baseline before it." default:"600ms"`
	Warmup     time.Duration `help:"How long each runs before it is measured." default:"100ms"`
	Durability string        `help:"When the server syncs to disk: interval (each second) or always (before each ack)." enum:"interval,always" default:"interval" env:"BENCH_DURABILITY"`
	JSON       bool          `help:"Print one JSON object a line instead of a table." env:"BENCH_JSON"`
	Case       string        `help:"Run this case alone." placeholder:"NAME"`
	Profile    string        `help:"Write a CPU profile of --case, which then runs once for all its rounds, without the baseline." placeholder:"FILE"`
	MemProfile string        `help:"Write a profile of what was allocated, likewise." placeholder:"FILE" name:"memprofile"`
	Telemetry  bool          `help:"Measure instead what traces and metrics cost, sent to a collector in this process: in turns with and without."`
	Flat       bool          `help:"Measure instead how an append depends on the session's length, and the memory of many sessions."`
	Longest    int           `help:"With --flat: events of the longest session." default:"1000000"`
	Sessions   int           `help:"With --flat: sessions that are touched for the memory." default:"100000"`

	out, progress io.Writer
}

// timeLimit ends a run that hangs.
const timeLimit = 15 * time.Minute

func (b *bench) run(ctx context.Context) (err error) {
	if err := b.validate(); err != nil {
		return rig.Usage(err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeLimit, fmt.Errorf("the run took more than %s", timeLimit))
	defer cancel()
	b.profiles().Hold() // until the case runs
	if b.Telemetry {
		return b.telemetry(ctx)
	}
	r, err := newBed(ctx, platform.Durability(b.Durability), nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	switch {
	case b.Flat:
		err = b.flat(ctx, r)
	default:
		err = b.compare(ctx, r)
	}
	if err != nil {
		return err
	}
	b.say("checking every log")
	return r.verify(ctx)
}

func (b *bench) validate() error {
	switch {
	case b.Rounds < 1 || b.Cold < 0 || b.Time <= 0 || b.Warmup < 0:
		return errors.New("expected at least one round, a positive --time and no negative --cold and --warmup")
	case b.profiles().Wanted() && b.Case == "":
		return errors.New("a profile is of one case; name it with --case")
	case b.Flat && b.Case != "":
		return errors.New("--flat has no cases; leave --case out")
	case b.Telemetry && (b.Flat || b.Case != ""):
		return errors.New("--telemetry goes without --flat and --case")
	case b.Longest < 1000 || b.Sessions < 1:
		return errors.New("expected --longest of at least 1000 and --sessions of at least 1")
	}
	return nil
}

// say reports progress; results go to stdout alone.
func (b *bench) say(format string, args ...any) { fmt.Fprintf(b.progress, "# "+format+"\n", args...) }

// compare runs each case in turns with the baseline and reports their medians. The first case does what
// the baseline does, on a store that is as empty. Batches, the last, come second: the ids that many small messages
// leave in the server's duplicate window are looked through by the garbage collector, and whoever allocates
// much, as batches do, pays for those of the others.
func (b *bench) compare(ctx context.Context, r *bed) error {
	chosen, err := pick(b.Case)
	if err != nil {
		return err
	}
	raw, err := r.rawPublishes(ctx)
	if err != nil {
		return err
	}
	results := make([]result, len(chosen))
	order := make([]int, len(chosen))
	for i := range order {
		order[i] = i
	}
	if last := len(order) - 1; last > 1 {
		order = slices.Insert(order[:last], 1, last)
	}
	for _, i := range order {
		k, c := chosen[i], raw
		if k.fill != nil {
			if c, err = r.load(ctx, k); err != nil {
				return err
			}
		}
		if b.profiles().Wanted() {
			return b.profile(ctx, r, c)
		}
		b.say("%s: %d rounds", c.name, b.Rounds)
		res := &results[i]
		res.load = c
		for round := range b.Cold + b.Rounds {
			base, err := r.measure(ctx, raw, b.Warmup, b.Time)
			if err != nil {
				return err
			}
			s, err := r.measure(ctx, c, b.Warmup, b.Time)
			if err != nil {
				return err
			}
			if round >= b.Cold {
				res.base = append(res.base, base)
				res.samples = append(res.samples, s)
			}
		}
	}
	if b.JSON {
		return printJSON(b.out, results)
	}
	return printTable(b.out, b.Durability, raw, results)
}

// pick returns the case of a name, all for "". The baseline can be named, too.
func pick(name string) ([]kind, error) {
	all := kinds()
	if name == "" {
		return all, nil
	}
	var names []string
	for _, k := range append(all, kind{name: rawName}) {
		if k.name == name {
			return []kind{k}, nil
		}
		names = append(names, k.name)
	}
	return nil, rig.Usage(fmt.Errorf("there is no case %q; expected one of %s", name, strings.Join(names, ", ")))
}

// profile runs one case under the profilers that were asked for.
func (b *bench) profile(ctx context.Context, r *bed, c *load) error {
	if _, err := r.measure(ctx, c, b.Warmup, b.Warmup); err != nil {
		return err
	}
	return b.profiles().Run(func() error {
		s, err := r.measure(ctx, c, 0, b.Time*time.Duration(b.Rounds))
		if err == nil {
			fmt.Fprintf(b.out, "%s: %.0f events/s, %.1f allocations an event\n", c.name, s.rate(), s.allocs)
		}
		return err
	})
}

func (b *bench) profiles() rig.Profiles { return rig.Profiles{CPU: b.Profile, Mem: b.MemProfile} }
