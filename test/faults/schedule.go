package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/test/load"
)

// fault is one entry of the schedule: what is done to whom, when, and for how long.
type fault struct {
	after time.Duration // from the start
	kind  string
	who   []string
	hold  time.Duration // until it is undone
	clock time.Duration // how far the clock is off, for a wrong one
}

func (f fault) String() string {
	if f.kind == misdated {
		return fmt.Sprintf("at %5.1fs SIGTERM and start with a clock that is off by %v: %s", f.after.Seconds(), f.clock, strings.Join(f.who, ","))
	}
	return fmt.Sprintf("at %5.1fs %s %s for %v", f.after.Seconds(), f.kind, strings.Join(f.who, ","), f.hold)
}

// Kinds of faults. Names are those of the counts.
const (
	killed   = "kill -9"
	stopped  = "SIGTERM and start"
	frozen   = "SIGSTOP"
	isolated = "network cut"
	reset    = "connections reset"
	slowed   = "slow network"
	dragged  = "slow server" // it stands still for 40 of 50 ms
	moved    = "leader step-down"
	full     = "disk full"
	sluggish = "slow disk"
	misdated = "wrong clock"
	outage   = "kill -9 of all servers"
)

var (
	serverNames  = []string{"n0", "n1", "n2"}
	serverKinds  = []string{killed, killed, stopped, frozen, isolated, isolated, reset, slowed, dragged, moved, moved, full, full, sluggish, sluggish, misdated, outage}
	programNames = []string{"a0", "a1", "p0", "p1", "p2"}
	programKinds = []string{killed, killed, killed, stopped, frozen, isolated, reset, slowed, misdated}

	// clocks are how far a wrong clock is off. Two of them and a call with all its retries together
	// stay below the 10 minutes for which an Idempotency-Key is recognised.
	clocks = []time.Duration{-3 * time.Minute, -20 * time.Second, -2 * time.Second, 2 * time.Second, 20 * time.Second, 3 * time.Minute}
)

// newSchedule draws the schedule of a seed. At a time, one server is away or a quorum is lost,
// and up to two programs have trouble of their own; then all is mended for a while.
func newSchedule(seed uint64, length time.Duration) (out []fault) {
	r := rand.New(rand.NewPCG(seed, 1))
	tenths := func(from, to int) time.Duration {
		return time.Duration(from+r.IntN(to-from)) * 100 * time.Millisecond
	}
	for at := 2 * time.Second; ; {
		var round []fault
		if r.IntN(5) > 0 {
			f := fault{kind: serverKinds[r.IntN(len(serverKinds))], who: []string{serverNames[r.IntN(3)]}, hold: tenths(5, 50)}
			if r.IntN(8) == 0 && f.kind != full && f.kind != misdated { // two of three
				f.who = []string{f.who[0], serverNames[(int(f.who[0][1]-'0')+1)%3]}
			}
			switch f.kind {
			case moved:
				f.who, f.hold = []string{[]string{"SESSIONS", "SESSIONS", "KV_SURFACES", "KV_WORKERS", "KV_CHECKPOINTS"}[r.IntN(5)]}, 0
			case misdated:
				f.clock, f.hold = clocks[r.IntN(len(clocks))], 0
			case outage:
				f.who = serverNames
			}
			round = append(round, f)
		}
		for _, i := range r.Perm(len(programNames))[:r.IntN(3)] {
			f := fault{kind: programKinds[r.IntN(len(programKinds))], who: []string{programNames[i]}, hold: tenths(2, 40)}
			switch {
			case f.kind == frozen && r.IntN(3) == 0: // longer than a lease
				f.hold = 12 * time.Second
			case f.kind == misdated:
				f.clock, f.hold = clocks[r.IntN(len(clocks))], 0
			}
			round = append(round, f)
		}
		longest := time.Duration(0)
		for i := range round {
			round[i].after = at + tenths(0, 10)
			longest = max(longest, round[i].after-at+round[i].hold)
		}
		if at+longest > length-time.Second {
			return out
		}
		out = append(out, round...)
		at += longest + tenths(10, 40)
	}
}

// inflict does what the schedule says, and mends it. An error says that a program did not come
// back.
func (s *suite) inflict(ctx context.Context, plan []fault) error {
	begun := time.Now()
	errs := make(chan error, len(plan))
	for _, f := range plan {
		go func() { errs <- s.one(ctx, begun, f) }()
	}
	var first error
	for range plan {
		if err := <-errs; err != nil && first == nil {
			first = err
		}
	}
	load.Wait(ctx, time.Until(begun.Add(s.duration)))
	return first
}

// one inflicts one fault at its time.
func (s *suite) one(ctx context.Context, begun time.Time, f fault) error {
	if !load.Wait(ctx, time.Until(begun.Add(f.after))) {
		return nil
	}
	var parts []*process
	if f.kind != moved {
		for _, name := range slices.Sorted(slices.Values(f.who)) { // in one order, so that nobody waits in a circle
			p := s.stack.processes[name]
			p.trouble.Lock() // the one from before may take longer than planned
			defer p.trouble.Unlock()
			parts = append(parts, p)
		}
	}
	s.say("%s", f)
	if why := s.stack.leftOut(f.kind); why != "" {
		s.say("left out: %s: %s", f.kind, why)
		s.Add("left out: "+f.kind, 1)
		return nil
	}
	s.Add("fault: "+f.kind, 1)
	if len(f.who) > 1 {
		s.Add("fault: quorum lost", 1)
	}
	if f.kind == moved {
		return s.stepDown(ctx, f.who[0])
	}
	for _, p := range parts {
		if err := s.begin(p, f); err != nil {
			return err
		}
	}
	if f.kind == dragged {
		drag(ctx, parts, f.hold)
	} else {
		load.Wait(ctx, f.hold)
	}
	// All are mended before any is waited for: one server alone does not get ready.
	for _, p := range parts {
		if err := s.mend(ctx, p, f); err != nil {
			return err
		}
	}
	switch f.kind {
	case killed, stopped, full, misdated, outage:
		for _, p := range parts {
			if err := p.Ready(ctx); err != nil {
				return err
			}
			s.Add("check: came back after "+f.kind, 1)
		}
	}
	return nil
}

// begin does a fault to one process.
func (s *suite) begin(p *process, f fault) error {
	net := s.stack.net
	switch f.kind {
	case killed, outage:
		p.Kill()
	case stopped, misdated:
		if err := p.Term(); err != nil {
			s.Finding("%v", err)
		}
	case frozen:
		return p.Signal(syscall.SIGSTOP)
	case isolated:
		return net.cut(p)
	case reset:
		return net.reset(p)
	case slowed:
		return net.slow(p)
	case full:
		p.noted = p.Stderr.Seen(noSpace)
		return p.disk.fill()
	case sluggish:
		return p.disk.slow(p.Pid())
	}
	return nil
}

// mend undoes it.
func (s *suite) mend(ctx context.Context, p *process, f fault) error {
	net := s.stack.net
	switch f.kind {
	case killed, stopped, outage:
		return p.launch(0)
	case misdated:
		return p.launch(f.clock)
	case frozen:
		return p.Signal(syscall.SIGCONT)
	case isolated:
		return net.join(p)
	case slowed:
		return net.quick(p)
	case sluggish:
		s.Add("writes to slow disks", p.disk.written()-p.disk.before)
		return p.disk.quick()
	case full:
		for late := time.Now().Add(fullTime); p.Stderr.Seen(noSpace) == p.noted && time.Now().Before(late); {
			if !load.Wait(ctx, 50*time.Millisecond) {
				break
			}
		}
		if n := p.Stderr.Seen(noSpace) - p.noted; n > 0 {
			s.Add("check: a server with a full disk said so", 1)
			s.Add("errors of servers about a full disk", n)
		} else {
			s.Add("full disks that a server wrote nothing to", 1)
		}
		if err := p.disk.free(); err != nil {
			return err
		}
		p.Kill() // a server whose disk was full needs a new start
		return p.launch(0)
	}
	return nil
}

// drag lets processes run for 10 of 50 ms.
func drag(ctx context.Context, parts []*process, hold time.Duration) {
	for end := time.Now().Add(hold); time.Now().Before(end) && ctx.Err() == nil; {
		for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGCONT} {
			for _, p := range parts {
				_ = p.Signal(sig) // one that ended is found at the end
			}
			load.Wait(context.WithoutCancel(ctx), map[syscall.Signal]time.Duration{syscall.SIGSTOP: 40 * time.Millisecond, syscall.SIGCONT: 10 * time.Millisecond}[sig])
		}
	}
}

// stepDown has a stream choose another leader.
func (s *suite) stepDown(ctx context.Context, stream string) error {
	nc, err := nats.Connect(s.stack.direct(), nats.Timeout(2*time.Second))
	if err != nil {
		s.Add("leader step-down that nobody answered", 1)
		return nil
	}
	defer nc.Close()
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if _, err := nc.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+stream, nil); err != nil {
		s.Add("leader step-down that nobody answered", 1)
	}
	return nil
}
