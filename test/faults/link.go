package main

import (
	"net"
	"sync"
	"time"
)

// slowDelay is added to whatever passes a slow link.
const slowDelay = 80 * time.Millisecond

// link is a TCP connection's way that can be cut and slowed: what listens at addr passes on to
// target. It works wherever there is loopback, with no rights and no network of its own.
type link struct {
	addr, target string
	ln           net.Listener
	wg           sync.WaitGroup
	done         chan struct{} // closed when the link ends

	mu    sync.Mutex // guards all below
	open  chan struct{}
	delay time.Duration
	conns map[net.Conn]bool
}

func newLink(target string) (*link, error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	l := &link{addr: ln.Addr().String(), target: target, ln: ln, done: make(chan struct{}), open: make(chan struct{}), conns: map[net.Conn]bool{}}
	close(l.open)
	l.wg.Go(l.accept)
	return l, nil
}

func (l *link) accept() {
	for {
		c, err := l.ln.Accept()
		if err != nil {
			return
		}
		l.wg.Go(func() { l.serve(c) })
	}
}

// serve passes one connection on, once the link is open.
func (l *link) serve(near net.Conn) {
	defer near.Close()
	if !l.hold(near) {
		return
	}
	defer l.forget(near)
	if !l.wait() {
		return
	}
	far, err := net.DialTimeout("tcp", l.target, 2*time.Second)
	if err != nil {
		return
	}
	defer far.Close()
	if !l.hold(far) {
		return
	}
	defer l.forget(far)
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
		both.Go(func() {
			l.pump(way[0], way[1])
			_ = near.Close() // the other way ends with this one
			_ = far.Close()
		})
	}
	both.Wait()
}

// pump copies. What was sent while the link is cut waits, as packets that are sent again do.
func (l *link) pump(from, to net.Conn) {
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		if n > 0 {
			if !l.wait() {
				return
			}
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// wait returns when the link is open and its delay is over; false when it ended.
func (l *link) wait() bool {
	for {
		l.mu.Lock()
		open, delay := l.open, l.delay
		l.mu.Unlock()
		select {
		case <-l.done:
			return false
		case <-open:
		}
		if delay == 0 {
			return true
		}
		t := time.NewTimer(delay)
		select {
		case <-l.done:
			t.Stop()
			return false
		case <-t.C:
		}
		l.mu.Lock()
		same := l.open == open
		l.mu.Unlock()
		if same { // it was not cut meanwhile
			return true
		}
	}
}

func (l *link) hold(c net.Conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns == nil {
		return false
	}
	l.conns[c] = true
	return true
}

func (l *link) forget(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c) // of nil, at the end, it does nothing
}

// cut lets nothing pass any more, and tells nobody.
func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.open:
		l.open = make(chan struct{})
	default: // is cut
	}
}

// slow delays each piece that passes.
func (l *link) slow(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = d
}

// mend ends cut and slow.
func (l *link) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = 0
	select {
	case <-l.open:
	default:
		close(l.open)
	}
}

// reset closes the connections that there are.
func (l *link) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.conns {
		_ = c.Close() // whoever uses it sees the error
	}
}

func (l *link) close() {
	_ = l.ln.Close() // nobody comes any more
	close(l.done)
	l.reset()
	l.mu.Lock()
	l.conns = nil // and nobody is held any more
	l.mu.Unlock()
	l.wg.Wait()
}
