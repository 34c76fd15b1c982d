package platform

import (
	"context"
	"net"
	"net/http"
	"sync"
)

// togetherMost is how many bytes of an answer are gathered at most. What goes beyond is sent as it comes.
const togetherMost = 64 << 10

// SendTogether sends what write writes to w in one piece, header included, if it is short. net/http sends
// an answer 4 KB at a time, and each piece costs a system call here and one where it is read. Whatever
// happens, all that was written is sent when SendTogether returns. It is for answers that are ready: what
// is gathered waits for the rest. Answers over TLS and such as do not go to a connection are just written.
func SendTogether(ctx context.Context, w http.ResponseWriter, write func()) {
	c, _ := ctx.Value(connKey{}).(*gatheringConn)
	if c == nil {
		write()
		return
	}
	c.gather()
	defer c.send()
	write()
	_ = http.NewResponseController(w).Flush() // the rest, which net/http would keep until the handler returns; a failed write fails those behind it
}

// connKey is the key of a *gatheringConn in the context of the requests that come on it.
type connKey struct{}

// gatheringConn is a connection that can hold back what is written to it. One goroutine writes at a
// time, as net/http does.
type gatheringConn struct {
	net.Conn
	held *[]byte // nil while nothing is held back
}

// heldBytes are the buffers of connections that hold something back.
var heldBytes = sync.Pool{New: func() any { b := make([]byte, 0, togetherMost); return &b }}

func (c *gatheringConn) gather() {
	if c.held == nil {
		c.held = heldBytes.Get().(*[]byte)
	}
}

// send ends gathering. After a failure part of an answer may be on its way, so the connection ends.
func (c *gatheringConn) send() {
	if c.held == nil {
		return
	}
	b := c.held
	c.held = nil
	if len(*b) > 0 {
		if _, err := c.Conn.Write(*b); err != nil {
			_ = c.Close()
		}
	}
	*b = (*b)[:0]
	heldBytes.Put(b)
}

func (c *gatheringConn) Write(b []byte) (int, error) {
	if c.held != nil && len(*c.held)+len(b) <= cap(*c.held) {
		*c.held = append(*c.held, b...)
		return len(b), nil
	}
	c.send() // too long
	return c.Conn.Write(b)
}

// CloseWrite lets net/http end a connection so that its last answer can still be read.
func (c *gatheringConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// gatheringListener accepts connections that can gather.
type gatheringListener struct{ net.Listener }

func (l gatheringListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &gatheringConn{Conn: c}, nil
}

// withConn puts a connection that can gather into the context of its requests.
func withConn(ctx context.Context, c net.Conn) context.Context {
	if g, ok := c.(*gatheringConn); ok {
		return context.WithValue(ctx, connKey{}, g)
	}
	return ctx
}
