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
// the client library, which keeps a map of its own under the lock that publishing takes too.
type acks struct {
	conn   *nats.Conn
	out    *Outbox
	prefix string
	next   atomic.Uint64
	flying atomic.Int64 // messages without an answer yet
	pool   sync.Pool    // of *waiter
	shards [16]ackShard

	opening sync.Mutex // held while the inbox is subscribed to
	opened  atomic.Bool
}

type ackShard struct {
	mu      sync.Mutex
	waiting map[uint64]*waiter
}

// waiter is a sender that waits for an answer, and is used again.
type waiter struct {
	ch    chan answer // with room for one
	id    uint64      // of the message; read by the timer, which does not run while it changes
	timer *time.Timer
}

// answer is what came back for a message, or why it could not be sent.
type answer struct {
	msg *nats.Msg
	err error
}

func newAcks(conn *nats.Conn) *acks {
	a := &acks{conn: conn, prefix: conn.NewInbox() + "."}
	a.out = NewOutbox(conn, func(m *nats.Msg, err error) { a.answer(m.Reply, answer{err: err}) })
	a.pool.New = func() any {
		w := &waiter{ch: make(chan answer, 1)}
		w.timer = time.AfterFunc(time.Hour, func() {
			if a.remove(w.id) != nil { // else an answer is on its way
				w.ch <- answer{err: nats.ErrTimeout}
			}
		})
		w.timer.Stop()
		return w
	}
	for i := range a.shards {
		a.shards[i].waiting = map[uint64]*waiter{}
	}
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
	if w := a.remove(id); w != nil {
		w.ch <- got
	}
}

// remove returns the sender that waits under a number, nil when it waits no more.
func (a *acks) remove(id uint64) *waiter {
	s := &a.shards[id%uint64(len(a.shards))]
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.waiting[id]
	delete(s.waiting, id)
	return w
}

// send sends a message and waits for its answer. It sets the message's reply subject, and
// after a timeout the message may still be in use.
func (a *acks) send(msg *nats.Msg, timeout time.Duration) (*nats.Msg, error) {
	if err := a.open(); err != nil {
		return nil, err
	}
	a.flying.Add(1)
	defer a.flying.Add(-1)
	w := a.pool.Get().(*waiter)
	w.id = a.next.Add(1)
	s := &a.shards[w.id%uint64(len(a.shards))]
	s.mu.Lock()
	s.waiting[w.id] = w
	s.mu.Unlock()
	var reply [64]byte
	msg.Reply = string(strconv.AppendUint(append(reply[:0], a.prefix...), w.id, 36))
	w.timer.Reset(timeout)
	a.out.Publish(msg)
	got := <-w.ch // an answer, a failed send or the timer's: each takes the waiter out of waiting first
	if w.timer.Stop() {
		a.pool.Put(w) // else the timer's function runs, or did: it must not see the next message's id
	}
	if m := got.msg; m != nil && len(m.Data) == 0 && m.Header.Get("Status") == "503" {
		return nil, nats.ErrNoResponders
	}
	return got.msg, got.err
}
