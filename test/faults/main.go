// Command faults lets clients work on a cluster of three NATS servers, two appenders and three
// projectors, all real processes, while a schedule drawn from a seed kills, freezes and restarts
// them, cuts and slows their networks and disks, sets their clocks wrong and moves the stream's
// leader. Then it holds everything that was acknowledged against what is stored and served. It
// talks to the programs only from outside: command line, HTTP and NATS.
//
// As root on Linux each process has a network namespace and each server a disk of its own.
// Elsewhere, and with -plain, all are on loopback with TCP proxies between them, and what needs a
// disk is left out.
//
// The same seed gives the same schedule. It prints what was done, how often each fault and each
// check came, and what was found, and ends with code 1 when anything was found.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// Bounds of every wait.
const (
	callTime   = 90 * time.Second // one call with all its retries
	fullTime   = 10 * time.Second // more for a server to find its disk full
	healTime   = 2 * time.Minute  // from the last fault until all is projected
	verifyTime = 3 * time.Minute
	checkTime  = 3 * time.Minute
)

// config is what the flags say.
type config struct {
	duration time.Duration
	sessions int
	workers  int
	pause    time.Duration
	seed     uint64
	plain    bool
	upgrade  string
	old      string
	compose  bool
	dry      bool
}

func main() {
	var c config
	flag.DurationVar(&c.duration, "duration", time.Minute, "how long load and faults last")
	flag.IntVar(&c.sessions, "sessions", 12, "sessions at the start; forks add some")
	flag.IntVar(&c.workers, "workers", 8, "callers at the same time")
	flag.DurationVar(&c.pause, "pause", 30*time.Millisecond, "mean pause of a caller between two calls")
	flag.Uint64Var(&c.seed, "seed", uint64(time.Now().UnixNano()), "seed of schedule and load; the time unless given")
	flag.BoolVar(&c.plain, "plain", false, "TCP proxies on loopback and no disks, as without root or Linux")
	flag.StringVar(&c.upgrade, "upgrade", "", "instead of faults: version (programs of an earlier commit are replaced one by one, and come back) or fold (snapshots of another version of the fold are built and switched to, and back)")
	flag.StringVar(&c.old, "old", "", "commit whose programs -upgrade version begins with; the latest tag, or ten commits ago, unless given")
	flag.BoolVar(&c.compose, "compose", false, "instead of processes and a schedule: the containers of deploy/compose.yaml, parts of which are taken away one after the other; for as long as that takes")
	flag.BoolVar(&c.dry, "schedule", false, "print the schedule and do nothing")
	flag.Parse()
	if flag.NArg() > 0 || c.sessions < 1 || c.workers < 1 || c.duration <= 0 || c.pause <= 0 || !slices.Contains([]string{"", toVersion, toFold}, c.upgrade) {
		fmt.Fprintln(os.Stderr, "faults: expected no arguments, positive numbers and a way to upgrade that there is; -h shows what there is")
		os.Exit(2)
	}
	if _, err := exec.LookPath("ip"); err == nil && !c.dry && !c.plain && !c.compose && !alone() {
		if code, ok := isolate(append(os.Args[1:], fmt.Sprintf("-seed=%d", c.seed))); ok {
			os.Exit(code)
		}
	}
	os.Exit(run(c))
}

func run(c config) int {
	plan := newSchedule(c.seed, c.duration)
	if c.dry {
		for _, f := range plan {
			fmt.Println(f)
		}
		return 0
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	s := &suite{config: c, started: time.Now(), Tally: new(load.Tally)}
	do := func(ctx context.Context) error { return s.run(ctx, plan) }
	if c.compose {
		do = s.runCompose
	}
	err := do(ctx)
	if s.stack != nil {
		err = errors.Join(err, s.stack.close(s))
	}
	if errors.Is(err, errNoHistory) || errors.Is(err, errNoEngine) {
		s.say("left out: %v", err)
		return 0
	}
	if err != nil {
		s.Finding("%v", err)
	}
	s.say("seed %d done", c.seed)
	s.Print(os.Stdout)
	if s.Found() > 0 {
		if dir, err := s.keepLogs(); err == nil {
			fmt.Println("what the programs said last:", dir)
		} else {
			fmt.Println("what the programs said last could not be kept:", err)
		}
		if c.compose {
			fmt.Println("again: make e2e-compose")
			return 1
		}
		how := fmt.Sprintf("-duration %v -plain=%v", c.duration, c.plain)
		if c.upgrade != "" {
			how += fmt.Sprintf(" -upgrade %s -old '%s'", c.upgrade, c.old)
		}
		fmt.Printf("again: make e2e SEED=%d ARGS=\"%s\"\n", c.seed, how)
		return 1
	}
	return 0
}

// suite is one run.
type suite struct {
	config
	started time.Time
	target  target
	stack   *stack // nil for containers
	callers *callers
	logs    map[string]string // what the programs said last, and of themselves, by name
	*load.Tally
}

// keep keeps what programs said, to be written after a finding. What was kept first stays.
func (s *suite) keep(logs map[string]string) {
	if s.logs == nil {
		s.logs = map[string]string{}
	}
	for name, text := range logs {
		if s.logs[name] == "" {
			s.logs[name] = text
		}
	}
}

// keepLogs writes what the programs said where somebody can look for the cause of a finding.
func (s *suite) keepLogs() (dir string, err error) {
	root, err := harness.RepoRoot()
	if err != nil {
		return "", err
	}
	dir = filepath.Join(root, "bin", "faults-logs", fmt.Sprintf("%d-%s", s.seed, s.started.Format("20060102-150405")))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	for name, text := range s.logs {
		if err := os.WriteFile(filepath.Join(dir, name+".log"), []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	return dir, nil
}

// say prints a line of progress.
func (s *suite) say(format string, args ...any) {
	fmt.Printf("%6.1fs  %s\n", time.Since(s.started).Seconds(), fmt.Sprintf(format, args...))
}

// run is everything: load and faults, then the checks.
func (s *suite) run(ctx context.Context, plan []fault) error {
	s.say("seed %d; building the programs", s.seed)
	var err error
	if s.stack, err = newStack(ctx, s.config, s.say); err != nil {
		return err
	}
	s.target = s.stack
	if err := s.stack.start(ctx); err != nil {
		return err
	}
	what := fmt.Sprintf("%d faults in %v", len(plan), s.duration)
	if s.upgrade != "" {
		what = "upgrade of the " + s.upgrade
	}
	s.say("three servers, %d appenders and %d projectors run; %d callers on %d sessions, %s", appenders, projectors, s.workers, s.sessions, what)
	do := func(ctx context.Context) error { return s.inflict(ctx, plan) }
	switch s.upgrade {
	case toVersion:
		do = s.upgradeVersion
	case toFold:
		do = s.upgradeFold
	}
	return s.under(ctx, do)
}

// under has something done while clients work, and checks.
func (s *suite) under(ctx context.Context, do func(context.Context) error) error {
	s.callers = newCallers(s)
	stopLoad := s.callers.start(ctx)
	if err := do(ctx); err != nil {
		s.Finding("%v", err)
	}
	s.say("all is mended; stopping the load")
	stopLoad()
	if ctx.Err() != nil {
		return errors.New("interrupted; nothing was checked")
	}
	return s.check(ctx)
}
