// Command soak lets a fleet of agents work on real programs for a time, kills the appender
// under them again and again, and then holds everything that was acknowledged against what is
// stored. It talks to the programs only from outside: command line, HTTP and NATS.
//
// It prints what was done and what was found, and ends with code 1 when anything was found.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"

	"palimpsest/test/load"
)

// Bounds of every wait.
const (
	callTime    = 3 * time.Minute // one call with all its retries
	projectTime = 3 * time.Minute // from the end of the load until all is projected
	verifyTime  = 10 * time.Minute
	judgeTime   = 10 * time.Minute
)

// config is what the flags say.
type config struct {
	duration   time.Duration
	sessions   int
	seed       uint64
	crashEvery time.Duration
	workers    int
	pause      time.Duration
}

func main() {
	var c config
	flag.DurationVar(&c.duration, "duration", 10*time.Minute, "how long the load lasts")
	flag.IntVar(&c.sessions, "sessions", 500, "sessions at the start; forks add up to as many")
	flag.Uint64Var(&c.seed, "seed", uint64(time.Now().UnixNano()), "seed of the random choices; the time unless given")
	flag.DurationVar(&c.crashEvery, "crash-every", 30*time.Second, "mean time between kills of the appender; 0: never")
	flag.IntVar(&c.workers, "workers", 24, "callers at the same time")
	flag.DurationVar(&c.pause, "pause", 20*time.Millisecond, "mean pause of a caller between two calls")
	flag.Parse()
	if flag.NArg() > 0 || c.sessions < 1 || c.workers < 1 || c.duration <= 0 {
		fmt.Fprintln(os.Stderr, "soak: expected no arguments and positive numbers; -h shows what there is")
		os.Exit(2)
	}
	os.Exit(run(c))
}

func run(c config) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	s, err := newSoak(c)
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
		return 1
	}
	err = s.run(ctx)
	if end := s.close(); end != nil {
		s.Finding("at the end: %v", end)
	}
	if err != nil {
		s.Finding("%v", err)
	}
	return s.report()
}

// soak is one run.
type soak struct {
	config
	started time.Time
	stack   *stack
	fleet   *fleet
	*load.Tally
}

func newSoak(c config) (*soak, error) {
	s := &soak{config: c, started: time.Now(), Tally: new(load.Tally)}
	var err error
	s.stack, err = newStack()
	return s, err
}

// say prints a line of progress.
func (s *soak) say(format string, args ...any) {
	fmt.Printf("%6.1fs  %s\n", time.Since(s.started).Seconds(), fmt.Sprintf(format, args...))
}

// run is the whole soak: load and crashes, then the checks.
func (s *soak) run(ctx context.Context) error {
	s.say("seed %d; building the programs", s.seed)
	if err := s.stack.build(ctx); err != nil {
		return err
	}
	if err := s.stack.start(ctx, s.stack.appender); err != nil {
		return err
	}
	if err := s.stack.start(ctx, s.stack.projector); err != nil {
		return err
	}
	s.fleet = newFleet(s)
	s.say("%d callers on %d sessions for %v, a crash about every %v", s.workers, s.sessions, s.duration, s.crashEvery)
	stopLoad := s.fleet.start(ctx)
	err := s.crashes(ctx)
	s.say("stopping the load")
	stopLoad()
	if err != nil {
		return err
	}
	if ctx.Err() != nil {
		return errors.New("interrupted; nothing was checked")
	}
	return s.judge(ctx)
}

// crashes kills the appender every now and then until the time is over.
func (s *soak) crashes(ctx context.Context) error {
	random := rand.New(rand.NewPCG(s.seed, 1))
	next := func() time.Duration { // crash-every on the average
		if s.crashEvery <= 0 {
			return 2 * s.duration
		}
		return s.crashEvery/2 + time.Duration(random.Int64N(int64(s.crashEvery)+1))
	}
	over, crash, progress := time.NewTimer(s.duration), time.NewTimer(next()), time.NewTicker(10*time.Second)
	defer over.Stop()
	defer crash.Stop()
	defer progress.Stop()
	for {
		select {
		case <-progress.C:
			s.say("%d calls, %d events acknowledged, %d sessions, %d crashes, %d findings",
				s.Get("calls"), s.Get("events acknowledged"), s.fleet.count(), s.Get("crashes"), s.Found())
		case <-crash.C:
			begun := time.Now()
			s.stack.appender.Kill()
			s.Add("crashes", 1)
			if err := s.stack.start(ctx, s.stack.appender); err != nil {
				return fmt.Errorf("after crash %d: %w", s.Get("crashes"), err)
			}
			s.Add("milliseconds away", time.Since(begun).Milliseconds())
			crash.Reset(next())
		case <-s.stack.appender.Ended():
			return s.stack.appender.EndedBy()
		case <-s.stack.projector.Ended():
			return s.stack.projector.EndedBy()
		case <-over.C:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

// close ends what was started and removes what was made.
func (s *soak) close() error {
	err := s.stack.stop()
	for _, p := range []*load.Process{s.stack.appender, s.stack.projector} {
		p.CheckTroubles(s.Tally)
	}
	return errors.Join(err, s.stack.remove())
}

// report prints what was done and found, and returns the exit code.
func (s *soak) report() int {
	s.say("done")
	s.Print(os.Stdout)
	if s.Found() > 0 {
		return 1
	}
	return 0
}
