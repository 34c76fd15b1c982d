// Package journaltest gives tests of the log a real server, connections to it, and a reader of
// the log that shares no code with the journal: it reads with the bare client and computes
// both chains anew.
package journaltest

import (
	"context"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/platform"
)

// Deadline is far above what any wait takes, so that a test that hangs says where.
const Deadline = 60 * time.Second

// Context ends with the test, or at the deadline.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Deadline)
	t.Cleanup(cancel)
	return ctx
}

// Await fails the test when signal does not come.
func Await[T any](t testing.TB, what string, signal <-chan T) T {
	t.Helper()
	select {
	case v := <-signal:
		return v
	case <-time.After(Deadline):
		t.Fatalf("waited %s for %s", Deadline, what)
		panic("unreachable")
	}
}

// Eventually polls until condition holds.
func Eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	deadline := time.After(Deadline)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited %s for %s", Deadline, what)
		}
	}
}

// Server is an embedded server with a file store that can be stopped and started again under
// the same address.
type Server struct {
	t   testing.TB
	cfg platform.EmbedConfig

	mu  sync.Mutex // guards the two below
	srv *platform.Server
	url string
}

// Start starts a server on a free port with its store in a temporary directory. It stops with
// the test. change, when given, changes its configuration.
func Start(t testing.TB, change ...func(*platform.EmbedConfig)) *Server {
	t.Helper()
	s := &Server{t: t, cfg: platform.EmbedConfig{DataDir: t.TempDir(), Listen: "127.0.0.1:0", Logger: slog.New(slog.DiscardHandler)}}
	for _, c := range change {
		c(&s.cfg)
	}
	s.Up()
	t.Cleanup(s.Down)
	return s
}

// Up starts the server when it is down.
func (s *Server) Up() {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.srv != nil {
		return
	}
	srv, err := platform.StartServer(s.cfg)
	if err != nil {
		s.t.Errorf("start the server: %v", err) // not Fatal: hooks call it on other goroutines
		return
	}
	s.srv, s.url = srv, srv.ClientURL()
	if _, port, err := net.SplitHostPort(s.url[len("nats://"):]); err == nil {
		s.cfg.Listen = "127.0.0.1:" + port
	}
}

// Down stops the server when it is up.
func (s *Server) Down() {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.srv == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), Deadline)
	defer cancel()
	if err := s.srv.Shutdown(ctx); err != nil {
		s.t.Errorf("stop the server: %v", err)
	}
	s.srv = nil
}

// Restart stops the server and starts it again.
func (s *Server) Restart() {
	s.t.Helper()
	s.Down()
	s.Up()
}

// URL is where the server listens, or listened.
func (s *Server) URL() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.url
}

// Addr is URL as host:port.
func (s *Server) Addr() string { return s.URL()[len("nats://"):] }

// Conn opens a connection that closes with the test. Unlike the server's, its end is reached by
// TCP, as in production.
func (s *Server) Conn(t testing.TB) *nats.Conn {
	t.Helper()
	return Dial(t, s.URL())
}

// Dial opens a connection to url that closes with the test.
func Dial(t testing.TB, url string) *nats.Conn {
	t.Helper()
	nc, err := platform.Connect(Context(t), platform.ConnConfig{URL: url, Name: "test", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// JetStream is a JetStream context of a connection of its own.
func (s *Server) JetStream(t testing.TB) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(s.Conn(t))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// StreamDir is the directory in which the store keeps a stream.
func (s *Server) StreamDir(stream string) string {
	return filepath.Join(s.cfg.DataDir, "jetstream", "$G", "streams", stream)
}

// SaveStream copies what the store holds of a stream; the server must be down. The function
// that it returns puts the copy back, as a power cut does that takes the newest writes: the
// server must be down then too.
func (s *Server) SaveStream(stream string) (restore func()) {
	s.t.Helper()
	from, to := s.StreamDir(stream), filepath.Join(s.t.TempDir(), "saved-"+strconv.Itoa(os.Getpid()))
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		s.t.Fatal(err)
	}
	return func() {
		s.t.Helper()
		if err := os.RemoveAll(from); err != nil {
			s.t.Fatal(err)
		}
		if err := os.CopyFS(from, os.DirFS(to)); err != nil {
			s.t.Fatal(err)
		}
	}
}

// Proxy stands between a client and the server and can lose what goes through it.
type Proxy struct {
	ln     net.Listener
	target string
	wg     sync.WaitGroup

	mu    sync.Mutex // guards all below
	conns map[net.Conn]bool
	lose  func(up bool, b []byte) bool
	done  bool
}

// StartProxy starts a proxy in front of the server; it stops with the test.
func (s *Server) StartProxy(t testing.TB) *Proxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{ln: ln, target: s.Addr(), conns: map[net.Conn]bool{}}
	p.wg.Add(1)
	go p.accept()
	t.Cleanup(func() {
		ln.Close()
		p.mu.Lock()
		p.done = true
		p.mu.Unlock()
		p.cut()
		p.wg.Wait()
	})
	return p
}

// URL is where the proxy listens.
func (p *Proxy) URL() string { return "nats://" + p.ln.Addr().String() }

// LoseWhen arms the proxy: the first piece of traffic (up: from client to server) for which
// lose says so is lost, and all connections with it.
func (p *Proxy) LoseWhen(lose func(up bool, b []byte) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lose = lose
}

// Armed reports whether what LoseWhen waits for is still to come.
func (p *Proxy) Armed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lose != nil
}

func (p *Proxy) accept() {
	defer p.wg.Done()
	for {
		client, err := p.ln.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			client.Close()
			continue
		}
		p.mu.Lock()
		if p.done {
			client.Close()
			server.Close()
		}
		p.conns[client], p.conns[server] = true, true
		p.wg.Add(2)
		p.mu.Unlock()
		go p.pipe(client, server, true)
		go p.pipe(server, client, false)
	}
}

func (p *Proxy) pipe(from, to net.Conn, up bool) {
	defer p.wg.Done()
	defer p.forget(from, to)
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		p.mu.Lock()
		lost := n > 0 && p.lose != nil && p.lose(up, b[:n])
		if lost {
			p.lose = nil
		}
		p.mu.Unlock()
		if lost {
			p.cut()
			return
		}
		if n > 0 {
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (p *Proxy) forget(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		c.Close()
		delete(p.conns, c)
	}
}

func (p *Proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.Close()
	}
}
