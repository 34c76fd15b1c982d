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
)

// bench is what the command line asks for.
type bench struct {
	Rounds     int           `help:"Rounds; each runs every case once, and its baseline beside it." default:"5"`
	Events     int           `help:"Events of the log that is projected." default:"300000"`
	Sessions   int           `help:"Sessions that they belong to." default:"1000"`
	Time       time.Duration `help:"How long reads are measured in a round, and their baseline." default:"500ms"`
	Readers    int           `help:"Concurrent readers." default:"200"`
	JSON       bool          `help:"Print one JSON object a line instead of a table." env:"BENCH_JSON"`
	Only       string        `help:"Measure this part alone: project, fold or read." enum:",project,fold,read" default:""`
	Profile    string        `help:"Write a CPU profile of --case, which then runs alone, all its rounds." placeholder:"FILE"`
	MemProfile string        `help:"Write a profile of what was allocated, likewise." placeholder:"FILE" name:"memprofile"`
	Case       string        `help:"The case to profile: packed1, packed10, bare1, bare10 (their baselines), read/go, read/http or raw, the last three with a surface size behind a slash." placeholder:"NAME"`
	Telemetry  bool          `help:"Measure instead what traces and metrics cost, sent to a collector in this process: in turns with and without."`
	Flat       bool          `help:"Measure instead how many bytes are written to KV an event, by the session's length."`
	Longest    int           `help:"Events of the longest session that bytes written to KV are counted of." default:"1000000"`

	out, progress io.Writer
}

// timeLimit ends a run that hangs.
const timeLimit = 20 * time.Minute

func (b *bench) run(ctx context.Context) (err error) {
	if err := b.validate(); err != nil {
		return rig.Usage(err)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeLimit, fmt.Errorf("the run took more than %s", timeLimit))
	defer cancel()
	switch {
	case b.Flat:
		return b.flat(ctx)
	case b.Telemetry:
		return b.telemetry(ctx)
	}
	b.profiles().Hold() // until the case runs
	var lines []line
	if b.wants("fold") && b.Case == "" {
		b.say("folding")
		if lines, err = foldLines(ctx, b.Rounds); err != nil {
			return err
		}
		b.say("bytes written to KV")
		flat, err := flatLine(ctx, b.Longest)
		if err != nil {
			return err
		}
		lines = append(lines, flat)
	}
	if b.wants("project") || b.wants("read") {
		r, err := newBed(ctx)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, r.Close()) }()
		if b.Case != "" {
			return b.profile(ctx, r)
		}
		if b.wants("project") {
			got, err := b.project(ctx, r)
			if err != nil {
				return err
			}
			lines = slices.Concat(got, lines)
		}
		if b.wants("read") {
			got, err := b.read(ctx, r)
			if err != nil {
				return err
			}
			lines = append(lines, got...)
		}
	}
	if b.JSON {
		return printJSON(b.out, lines)
	}
	return b.printTable(lines)
}

func (b *bench) wants(part string) bool { return b.Only == "" || b.Only == part }

func (b *bench) validate() error {
	switch {
	case b.Rounds < 1 || b.Time <= 0 || b.Readers < 1:
		return errors.New("expected at least one round, one reader and a positive --time")
	case b.Sessions < 1 || b.Events < 10*b.Sessions || b.Events%(10*b.Sessions) != 0:
		return fmt.Errorf("expected --events to be a multiple of 10 for each of the %d sessions, found %d", b.Sessions, b.Events)
	case b.profiles().Wanted() != (b.Case != ""):
		return errors.New("a profile is of one case: expected --case together with --profile or --memprofile")
	case b.Telemetry && (b.Flat || b.Case != "" || b.Only != ""):
		return errors.New("--telemetry goes without --flat, --case and --only")
	case b.Longest < 1000:
		return errors.New("expected --longest of at least 1000")
	}
	return nil
}

// say reports progress; results go to stdout alone.
func (b *bench) say(format string, args ...any) { fmt.Fprintf(b.progress, "# "+format+"\n", args...) }

// profile runs one case under the profilers that were asked for.
func (b *bench) profile(ctx context.Context, r *bed) error {
	var once func() error
	part, size, _ := strings.Cut(b.Case, "/")
	switch part {
	case "packed1", "packed10", "bare1", "bare10":
		per := map[string]int{"packed1": 1, "packed10": 10, "bare1": 1, "bare10": 10}[part]
		l, err := r.newLog(ctx, fmt.Sprintf("packed%d", per), per, b.Sessions, b.Events/b.Sessions, false)
		if err != nil {
			return err
		}
		var wrote *span // by a projection
		once = func() error {
			run := func() (*span, error) { return r.projectOnce(ctx, l, nil) }
			if strings.HasPrefix(part, "bare") && wrote != nil {
				run = func() (*span, error) { return r.bare(ctx, l, true, wrote.puts, wrote.bytes) }
			}
			s, err := run()
			if err == nil && wrote == nil {
				wrote = s
			}
			if err == nil {
				b.say("%.0f events/s, %s of processor time an event, %d KV writes of %d bytes", s.rate(), s.cpuPer(), s.puts, s.bytes)
			}
			return err
		}
	case "read", "raw":
		if part == "read" {
			part, size, _ = strings.Cut(size, "/")
		}
		var n int
		if _, err := fmt.Sscan(size, &n); err != nil || n < 1 {
			return rig.Usage(fmt.Errorf("--case %s: expected read/go/<surface size>, read/http/<surface size> or raw/<surface size>", b.Case))
		}
		s, err := r.newShelf(ctx, n)
		if err != nil {
			return err
		}
		read, ok := map[string]func(context.Context, int, *target) error{"go": s.readGo, "http": s.readHTTP, "raw": s.readRaw}[part]
		if !ok {
			return rig.Usage(fmt.Errorf("--case %s: expected read/go, read/http or raw", b.Case))
		}
		once = func() error {
			m, err := s.measure(ctx, b.Readers, b.Time, read)
			if err == nil {
				b.say("p50 %s, p99 %s, %.0f µs of processor time a read", m.quantile(0.5), m.quantile(0.99), m.cpuPer)
			}
			return err
		}
	default:
		return rig.Usage(fmt.Errorf("there is no case %q", b.Case))
	}
	if err := once(); err != nil { // warms up
		return err
	}
	return b.profiles().Run(func() error {
		for range b.Rounds {
			if err := once(); err != nil {
				return err
			}
		}
		return nil
	})
}

func (b *bench) profiles() rig.Profiles { return rig.Profiles{CPU: b.Profile, Mem: b.MemProfile} }
