package projection

import (
	"context"
	"testing"
	"time"
)

// Many writes may end while a fold looks for what to write next, more than written holds. When the
// lease ends then, nobody takes the rest: they must not keep the worker from stopping.
func TestAWriteThatEndsBehindItsFoldIsNotWaitedFor(t *testing.T) {
	p := &partition{written: make(chan result, 1), done: make(chan struct{})}
	p.tell(result{}) // the fold may come back for it
	told := make(chan struct{})
	go func() {
		defer close(told)
		p.tell(result{})
	}()
	select {
	case <-told:
		t.Fatal("the second is told before the fold takes the first or ends")
	default:
	}
	close(p.done)
	<-told
	if n := len(p.written); n != 1 {
		t.Errorf("%d outcomes wait, want 1", n)
	}
}

// What comes for a partition that stops is not dealt with, so it must not pass what others have: the
// checkpoint would step over it.
func TestAPartitionThatStopsPassesNothing(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithCancel(context.Background())
	p := new(partition)
	pass := func(streamSeq uint64) uint64 {
		p.pass(ctx, witness{StreamSeq: streamSeq, ID: "c"}, 0)
		return p.read.Load()
	}
	if got := pass(2 * much); got != 2*much {
		t.Fatalf("read up to %d, want %d", got, 2*much)
	}
	stop()
	if got := pass(4 * much); got != 2*much {
		t.Errorf("read up to %d when stopped, want %d", got, 2*much)
	}
}

// TestFlushesAreSeldomerTheMoreIsToBeRead: near the end of the log a head is new, far from it, it is not written for nothing.
func TestFlushesAreSeldomerTheMoreIsToBeRead(t *testing.T) {
	t.Parallel()
	p := &partition{w: &Worker{cfg: Config{FlushAfter: time.Millisecond, FlushBehind: time.Second}}}
	for pending, want := range map[uint64]time.Duration{0: time.Millisecond, much: time.Millisecond, much + 1: time.Second, farBehind: time.Second, farBehind + 1: 10 * time.Second} {
		p.pending = pending
		if got := p.flushAfter(); got != want {
			t.Errorf("with %d messages to read: a flush after %v, want %v", pending, got, want)
		}
	}
}
