package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// fleet is all agents, and the callers that work for them.
type fleet struct {
	s             *soak
	writes, reads *harness.Client
	marks         atomic.Int64
	begun         time.Time
	stopping      chan struct{} // closed when no caller begins anything new

	mu     sync.Mutex // guards the two below
	agents []*agent
	shared []*commons
}

func newFleet(s *soak) *fleet {
	f := &fleet{s: s, writes: harness.NewClient("http://" + s.stack.listen), reads: harness.NewClient("http://" + s.stack.projectorListens), begun: time.Now(), stopping: make(chan struct{})}
	for i := range s.sessions {
		if i%10 == 9 {
			f.shared = append(f.shared, &commons{s: s, ledger: newLedger(fmt.Sprintf("shared %d", i))})
		} else {
			f.agents = append(f.agents, newAgent(s, newLedger(fmt.Sprintf("agent %d", i))))
		}
	}
	return f
}

// mark names an event that was never sent before.
func (f *fleet) mark() string { return fmt.Sprintf("m-%d", f.marks.Add(1)) }

func (f *fleet) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.agents) + len(f.shared)
}

// ledgers are those of all sessions.
func (f *fleet) ledgers() (out []*ledger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.agents {
		out = append(out, a.ledger)
	}
	for _, c := range f.shared {
		out = append(out, c.ledger)
	}
	return out
}

// adopt takes a fork in.
func (f *fleet) adopt(a *agent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.agents = append(f.agents, a)
}

// full says that there are enough sessions for now: twice as many as at the start in the end.
func (f *fleet) full() bool {
	share := min(1, float64(time.Since(f.begun))/float64(f.s.duration))
	return f.count() >= f.s.sessions+int(share*float64(f.s.sessions))
}

// someAgent is any agent, nil when there is none.
func (f *fleet) someAgent(r *rand.Rand) *agent {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.agents) == 0 {
		return nil
	}
	return f.agents[r.IntN(len(f.agents))]
}

// someShared is any shared session, nil when there is none.
func (f *fleet) someShared(r *rand.Rand) *commons {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.shared) == 0 {
		return nil
	}
	return f.shared[r.IntN(len(f.shared))]
}

// start starts the callers. The function that it returns lets them finish what they have begun.
func (f *fleet) start(ctx context.Context) (stop func()) {
	var wg sync.WaitGroup
	for i := range f.s.workers {
		r := rand.New(rand.NewPCG(f.s.seed, uint64(100+i)))
		wg.Go(func() { f.work(ctx, r) })
	}
	return func() {
		close(f.stopping)
		wg.Wait()
	}
}

// work is one caller.
func (f *fleet) work(ctx context.Context, r *rand.Rand) {
	for {
		select {
		case <-f.stopping:
			return
		default:
		}
		switch n := r.IntN(100); {
		case n < 15:
			if c := f.someShared(r); c != nil {
				c.act(ctx, r)
			}
		case n < 17: // somebody thinks that an agent is dead
			if a := f.someAgent(r); a != nil && a.begun.Load() {
				a.repair(ctx)
			}
		default:
			if a := f.someAgent(r); a != nil && a.mu.TryLock() {
				for range 1 + r.IntN(5) {
					a.act(ctx, r)
				}
				a.mu.Unlock()
			}
		}
		if !load.Wait(ctx, rand.N(2*f.s.pause+1)) {
			return
		}
	}
}
