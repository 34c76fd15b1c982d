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
)

// fault is one entry of the schedule: what is done to whom, when, and for how long.
type fault struct {
	after time.Duration // from the start
	kind  string
	who   []string
	hold  time.Duration // until it is undone
}

func (f fault) String() string {
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
	moved    = "leader step-down"
	full     = "disk full"
)

var (
	serverNames  = []string{"n0", "n1", "n2"}
	serverKinds  = []string{killed, killed, stopped, frozen, isolated, isolated, reset, slowed, moved, moved}
	programNames = []string{"a0", "a1", "p0", "p1", "p2"}
	programKinds = []string{killed, killed, killed, stopped, frozen, isolated, reset, slowed}
)

// newSchedule draws the schedule of a seed. At a time, one server is away or a quorum is lost,
// and up to two programs have trouble of their own; then all is mended for a while.
// With disk, servers' disks fill up, too.
func newSchedule(seed uint64, length time.Duration, disk bool) (out []fault) {
	serverKinds := serverKinds
	if disk {
		serverKinds = append(slices.Clone(serverKinds), full, full, full)
	}
	r := rand.New(rand.NewPCG(seed, 1))
	tenths := func(from, to int) time.Duration {
		return time.Duration(from+r.IntN(to-from)) * 100 * time.Millisecond
	}
	for at := 2 * time.Second; ; {
		var round []fault
		if r.IntN(5) > 0 {
			f := fault{kind: serverKinds[r.IntN(len(serverKinds))], who: []string{serverNames[r.IntN(3)]}, hold: tenths(5, 50)}
			if r.IntN(8) == 0 && f.kind != moved && f.kind != full { // two of three
				f.who = []string{f.who[0], serverNames[(int(f.who[0][1]-'0')+1)%3]}
			}
			if f.kind == moved {
				f.who, f.hold = []string{[]string{"SESSIONS", "SESSIONS", "KV_SURFACES", "KV_WORKERS", "KV_CHECKPOINTS"}[r.IntN(5)]}, 0
			}
			round = append(round, f)
		}
		for _, i := range r.Perm(len(programNames))[:r.IntN(3)] {
			f := fault{kind: programKinds[r.IntN(len(programKinds))], who: []string{programNames[i]}, hold: tenths(2, 40)}
			if f.kind == frozen && r.IntN(3) == 0 { // longer than a lease
				f.hold = 12 * time.Second
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
	wait(ctx, time.Until(begun.Add(s.duration)))
	return first
}

// one inflicts one fault at its time.
func (s *suite) one(ctx context.Context, begun time.Time, f fault) error {
	if !wait(ctx, time.Until(begun.Add(f.after))) {
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
	s.add("fault: "+f.kind, 1)
	if len(f.who) > 1 {
		s.add("fault: quorum lost", 1)
	}
	if f.kind == moved {
		return s.stepDown(ctx, f.who[0])
	}
	for _, p := range parts {
		switch f.kind {
		case killed:
			p.kill()
		case stopped:
			if err := p.term(); err != nil {
				s.finding("%v", err)
			}
		case frozen:
			if err := p.signal(syscall.SIGSTOP); err != nil {
				return err
			}
		case isolated:
			for _, l := range p.links {
				l.cut()
			}
		case reset:
			for _, l := range p.links {
				l.reset()
			}
		case slowed:
			for _, l := range p.links {
				l.slow(80 * time.Millisecond)
			}
		case full:
			if err := fillDisk(p.store); err != nil {
				return err
			}
		}
	}
	wait(ctx, f.hold)
	// All are mended before any is waited for: one server alone does not get ready.
	for _, p := range parts {
		if f.kind == full { // a server whose disk was full needs a new start
			if err := freeDisk(p.store); err != nil {
				return err
			}
			p.kill()
		}
		switch f.kind {
		case killed, stopped, full:
			if err := p.launch(); err != nil {
				return err
			}
		case frozen:
			if err := p.signal(syscall.SIGCONT); err != nil {
				return err
			}
		case isolated, slowed:
			for _, l := range p.links {
				l.mend()
			}
		}
	}
	if f.kind == killed || f.kind == stopped || f.kind == full {
		for _, p := range parts {
			if err := p.ready(ctx, s.tally); err != nil {
				return err
			}
		}
	}
	return nil
}

// stepDown has a stream choose another leader.
func (s *suite) stepDown(ctx context.Context, stream string) error {
	nc, err := nats.Connect(s.stack.direct(), nats.Timeout(2*time.Second))
	if err != nil {
		s.add("leader step-down that nobody answered", 1)
		return nil
	}
	defer nc.Close()
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if _, err := nc.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+stream, nil); err != nil {
		s.add("leader step-down that nobody answered", 1)
	}
	return nil
}

// wait reports false when ctx ended first.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
