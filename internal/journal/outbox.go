package journal

import (
	"runtime"
	"sync"

	"github.com/nats-io/nats.go"
)

// Outbox hands messages to a connection, those that are ready at the same time together. The
// client wakes its flusher at the first message in an empty buffer, and on a busy machine that
// one runs before anybody else: each message would be a write of its own. So the first sender
// lets all go before it who are about to send too, and then hands over what they left: one
// write, and fewer reads at the other end. It is safe for concurrent use.
type Outbox struct {
	conn   *nats.Conn
	failed func(*nats.Msg, error)
	ready  func() error // its error fails what would be sent together; nil: all is sent

	mu    sync.Mutex // guards all below
	queue []*nats.Msg
	spare []*nats.Msg // for the next queue
}

// enoughTogether is how many messages do not wait for more: with many senders the other end would
// have nothing to do meanwhile.
const enoughTogether = 10

// NewOutbox returns an outbox for a connection. failed hears of a message that the connection
// did not take.
func NewOutbox(conn *nats.Conn, failed func(*nats.Msg, error)) *Outbox {
	return &Outbox{conn: conn, failed: failed}
}

// Publish publishes a message, or leaves it to another call that is about to. The message is
// the outbox's until then.
func (o *Outbox) Publish(m *nats.Msg) {
	o.mu.Lock()
	o.queue = append(o.queue, m)
	if n := len(o.queue); n < enoughTogether {
		o.mu.Unlock()
		if n > 1 {
			return
		}
		runtime.Gosched()
		o.mu.Lock()
	}
	all := o.queue
	o.queue, o.spare = o.spare, nil
	o.mu.Unlock()
	var away error
	if o.ready != nil {
		away = o.ready()
	}
	for _, m := range all {
		err := away
		if err == nil {
			err = o.conn.PublishMsg(m)
		}
		if err != nil {
			o.failed(m, err)
		}
	}
	clear(all)
	o.mu.Lock()
	o.spare = all[:0]
	o.mu.Unlock()
}
