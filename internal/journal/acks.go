package journal

import (
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
)

// acks sends messages over one connection and hands each its answer. All answers come to one
// inbox, and a sender waits on a channel that is used again: that costs less than a request of
// the client library, which keeps a map of its own under the lock that publishing takes too, and
// a timer for each.
type acks struct {
	conn    *nats.Conn
	out     *Outbox
	prefix  string
	timeout time.Duration
	flying  atomic.Int64 // messages without an answer yet

	mu      sync.Mutex                // guards free, and waiters against being grown twice
	free    []*waiter                 // those that nobody uses
	waiters atomic.Pointer[[]*waiter] // all, by their slots

	timer    *time.Timer // calls sweep
	sweeping atomic.Bool // the timer runs
	sweeps   atomic.Int64

	opening sync.Mutex // held while the inbox is subscribed to
	opened  atomic.Bool
}

// waiter is a sender that waits for an answer, and is used again.
type waiter struct {
	ch   chan answer // with room for one
	slot uint64
	uses uint64
	// id is that of the message that is waited for, 0 when none is. Who sets it to 0 answers.
	id   atomic.Uint64
	sent atomic.Int64 // after which sweep
}

// answer is what came back for a message, or why it could not be sent.
type answer struct {
	msg *nats.Msg
	err error
}

const (
	// slotBits are those of an id that say the waiter's slot. The others count its uses, so that no id
	// comes twice: a late answer finds nobody who waits for it.
	slotBits = 24
	// patience is how many sweeps pass before a message without an answer is given up.
	patience = 16
)

// newAcks returns acks that wait for an answer for so long, or up to a sixteenth less.
func newAcks(conn *nats.Conn, timeout time.Duration) *acks {
	a := &acks{conn: conn, prefix: conn.NewInbox() + ".", timeout: timeout}
	a.out = NewOutbox(conn, func(m *nats.Msg, err error) { a.answer(m.Reply, answer{err: err}) })
	// The client would keep a message until there is a connection again, to a server that has lost what the
	// message is to follow, maybe: it is looked at first then.
	a.out.ready = func() error {
		if conn.IsConnected() {
			return nil
		}
		return nats.ErrConnectionReconnecting
	}
	a.waiters.Store(new([]*waiter))
	a.timer = time.AfterFunc(time.Hour, a.sweep)
	a.timer.Stop()
	return a
}

// open subscribes to the inbox. The subscription lives as long as the connection.
func (a *acks) open() error {
	if a.opened.Load() {
		return nil
	}
	a.opening.Lock()
	defer a.opening.Unlock()
	if a.opened.Load() {
		return nil
	}
	sub, err := a.conn.Subscribe(a.prefix+"*", a.answered)
	if err != nil {
		return err
	}
	// Answers are small, and there are no more of them than senders wait.
	if err := sub.SetPendingLimits(-1, -1); err != nil {
		return err
	}
	a.opened.Store(true)
	return nil
}

func (a *acks) answered(m *nats.Msg) { a.answer(m.Subject, answer{msg: m}) }

// answer hands an answer to the sender whose reply subject it came to.
func (a *acks) answer(subject string, got answer) {
	id, err := strconv.ParseUint(subject[len(a.prefix):], 36, 64)
	if err != nil {
		return // nobody of ours waits for that
	}
	if slot, all := id&(1<<slotBits-1), *a.waiters.Load(); slot < uint64(len(all)) {
		all[slot].answer(id, got)
	}
}

// answer hands the waiter the answer to a message, unless it does not wait for that (any more).
func (w *waiter) answer(id uint64, got answer) {
	if w.id.CompareAndSwap(id, 0) {
		w.ch <- got
	}
}

// take returns a waiter that nobody uses.
func (a *acks) take() *waiter {
	a.mu.Lock()
	defer a.mu.Unlock()
	if last := len(a.free) - 1; last >= 0 {
		w := a.free[last]
		a.free = a.free[:last]
		return w
	}
	all := *a.waiters.Load()
	w := &waiter{ch: make(chan answer, 1), slot: uint64(len(all))}
	all = append(all, w) // who has the shorter slice does not see it
	a.waiters.Store(&all)
	return w
}

func (a *acks) give(w *waiter) {
	a.mu.Lock()
	a.free = append(a.free, w)
	a.mu.Unlock()
}

// watch has sweep called from now on.
func (a *acks) watch() {
	if !a.sweeping.Load() && a.sweeping.CompareAndSwap(false, true) {
		a.timer.Reset(a.timeout / (patience + 1))
	}
}

// sweep gives up the messages that are without an answer for too long. It is called again while there are
// others.
func (a *acks) sweep() {
	now, more := a.sweeps.Add(1), false
	for _, w := range *a.waiters.Load() {
		switch id := w.id.Load(); {
		case id == 0:
		case now-w.sent.Load() > patience:
			w.answer(id, answer{err: nats.ErrTimeout})
		default:
			more = true
		}
	}
	if more {
		a.timer.Reset(a.timeout / (patience + 1))
		return
	}
	a.sweeping.Store(false)
	if a.flying.Load() > 0 { // since a moment ago, maybe
		a.watch()
	}
}

// send sends a message and waits for its answer. It sets the message's reply subject, and
// after a timeout the message may still be in use.
func (a *acks) send(msg *nats.Msg) (*nats.Msg, error) {
	if err := a.open(); err != nil {
		return nil, err
	}
	a.flying.Add(1)
	defer a.flying.Add(-1)
	w := a.take()
	w.uses++
	id := w.uses<<slotBits | w.slot
	w.sent.Store(a.sweeps.Load())
	w.id.Store(id)
	a.watch()
	var reply [64]byte
	msg.Reply = string(strconv.AppendUint(append(reply[:0], a.prefix...), id, 36))
	a.out.Publish(msg)
	got := <-w.ch
	a.give(w)
	if m := got.msg; m != nil && len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		return nil, nats.ErrNoResponders
	}
	return got.msg, got.err
}
