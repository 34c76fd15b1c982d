package journal

import (
	"runtime"
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
	prefix string
	next   atomic.Uint64
	pool   sync.Pool // of *waiter
	shards [16]ackShard

	mu  sync.Mutex
	sub *nats.Subscription // nil until the first message is sent

	out   sync.Mutex // guards queue
	queue []outgoing // what goes to the connection next
}

type ackShard struct {
	mu      sync.Mutex
	waiting map[uint64]*waiter
}

// waiter is a sender that waits for an answer, and is used again.
type waiter struct {
	ch    chan answer // with room for one
	timer *time.Timer
}

// answer is what came back for a message, or why it could not be sent.
type answer struct {
	msg *nats.Msg
	err error
}

// outgoing is a message with the number of its sender.
type outgoing struct {
	msg *nats.Msg
	id  uint64
}

func newAcks(conn *nats.Conn) *acks {
	a := &acks{conn: conn, prefix: conn.NewInbox() + "."}
	a.pool.New = func() any {
		w := &waiter{ch: make(chan answer, 1), timer: time.NewTimer(time.Hour)}
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
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sub != nil {
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
	a.sub = sub
	return nil
}

func (a *acks) answered(m *nats.Msg) {
	id, err := strconv.ParseUint(m.Subject[len(a.prefix):], 36, 64)
	if err != nil {
		return // nobody of ours waits for that
	}
	if w := a.remove(id); w != nil {
		w.ch <- answer{msg: m}
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
	id := a.next.Add(1)
	w := a.pool.Get().(*waiter)
	s := &a.shards[id%uint64(len(a.shards))]
	s.mu.Lock()
	s.waiting[id] = w
	s.mu.Unlock()
	msg.Reply = a.prefix + strconv.FormatUint(id, 36)
	w.timer.Reset(timeout)
	a.publish(outgoing{msg, id})
	select {
	case got := <-w.ch:
		w.timer.Stop()
		a.pool.Put(w)
		if m := got.msg; m != nil && len(m.Data) == 0 && m.Header.Get("Status") == "503" {
			return nil, nats.ErrNoResponders
		}
		return got.msg, got.err
	case <-w.timer.C:
		if a.remove(id) != nil { // else an answer is on its way into the channel: leave that one to it
			a.pool.Put(w)
		}
		return nil, nats.ErrTimeout
	}
}

// publish hands a message to the connection. The client wakes its flusher at the first message
// in an empty buffer, and on a busy machine that one runs before anybody else: each message
// would be a write of its own. So the first sender lets all go before it who are about to send
// too, and then hands over what they left: one write, and fewer reads at the other end.
func (a *acks) publish(o outgoing) {
	a.out.Lock()
	a.queue = append(a.queue, o)
	first := len(a.queue) == 1
	a.out.Unlock()
	if !first {
		return
	}
	runtime.Gosched()
	a.out.Lock()
	all := a.queue
	a.queue = nil
	a.out.Unlock()
	for _, o := range all {
		if err := a.conn.PublishMsg(o.msg); err != nil {
			if w := a.remove(o.id); w != nil {
				w.ch <- answer{err: err}
			}
		}
	}
}
