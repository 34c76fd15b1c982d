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
	prefix string
	next   atomic.Uint64
	chans  sync.Pool // of chan *nats.Msg with room for one
	shards [16]ackShard

	mu  sync.Mutex
	sub *nats.Subscription // nil until the first message is sent
}

type ackShard struct {
	mu      sync.Mutex
	waiting map[uint64]chan *nats.Msg
}

func newAcks(conn *nats.Conn) *acks {
	a := &acks{conn: conn, prefix: conn.NewInbox() + "."}
	a.chans.New = func() any { return make(chan *nats.Msg, 1) }
	for i := range a.shards {
		a.shards[i].waiting = map[uint64]chan *nats.Msg{}
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
	s := &a.shards[id%uint64(len(a.shards))]
	s.mu.Lock()
	ch := s.waiting[id]
	delete(s.waiting, id)
	s.mu.Unlock()
	if ch != nil {
		ch <- m
	}
}

// send sends a message and waits for its answer. It sets the message's reply subject.
func (a *acks) send(msg *nats.Msg, timeout time.Duration) (*nats.Msg, error) {
	if err := a.open(); err != nil {
		return nil, err
	}
	id := a.next.Add(1)
	s := &a.shards[id%uint64(len(a.shards))]
	ch := a.chans.Get().(chan *nats.Msg)
	s.mu.Lock()
	s.waiting[id] = ch
	s.mu.Unlock()
	msg.Reply = a.prefix + strconv.FormatUint(id, 36)
	err := a.conn.PublishMsg(msg)
	if err == nil {
		timer := time.NewTimer(timeout)
		defer timer.Stop()
		select {
		case m := <-ch:
			a.chans.Put(ch)
			if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
				return nil, nats.ErrNoResponders
			}
			return m, nil
		case <-timer.C:
			err = nats.ErrTimeout
		}
	}
	s.mu.Lock()
	_, waits := s.waiting[id]
	delete(s.waiting, id)
	s.mu.Unlock()
	if waits { // else an answer is on its way into the channel: leave that one to it
		a.chans.Put(ch)
	}
	return nil, err
}
