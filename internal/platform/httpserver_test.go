package platform

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

func startHTTP(t *testing.T, handler http.HandlerFunc) *HTTPServer {
	t.Helper()
	h := Serve(HTTPConfig{Listen: "127.0.0.1:0", Handler: handler})
	if err := h.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Stop(testContext(t)) })
	return h
}

type answer struct {
	status int
	body   string
	err    error
}

func get(t *testing.T, url string) <-chan answer {
	t.Helper()
	answers := make(chan answer, 1)
	req, err := http.NewRequestWithContext(testContext(t), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Do(req)
		if err != nil {
			answers <- answer{err: err}
			return
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		answers <- answer{resp.StatusCode, string(body), err}
	}()
	return answers
}

func TestHTTPStopLetsARequestInFlightFinish(t *testing.T) {
	t.Parallel()
	entered, release := make(chan struct{}), make(chan struct{})
	h := startHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
		close(entered)
		<-release
		fmt.Fprint(w, "committed")
	})
	response := get(t, h.URL())
	await(t, "the request", entered)
	stopped := make(chan error, 1)
	go func() { stopped <- h.Stop(testContext(t)) }()
	eventually(t, "the listener to close", func() bool {
		conn, err := net.DialTimeout("tcp", h.Addr().String(), time.Second)
		if err == nil {
			conn.Close()
		}
		return err != nil
	})
	select {
	case err := <-stopped:
		t.Fatalf("Stop returned %v with a request in flight", err)
	default:
	}
	close(release)
	if got := await(t, "the response", response); got.err != nil || got.body != "committed" {
		t.Errorf("the request in flight got %+v", got)
	}
	if err := await(t, "Stop", stopped); err != nil {
		t.Errorf("Stop = %v", err)
	}
	if err := h.Stop(testContext(t)); err != nil {
		t.Errorf("second Stop = %v", err)
	}
}

func TestHTTPStopEndsLongPolls(t *testing.T) {
	t.Parallel()
	entered := make(chan struct{})
	h := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		close(entered)
		<-r.Context().Done()
		fmt.Fprint(w, context.Cause(r.Context()))
	})
	response := get(t, h.URL())
	await(t, "the request", entered)
	if err := h.Stop(testContext(t)); err != nil {
		t.Errorf("Stop = %v", err)
	}
	if got := await(t, "the response", response); got.err != nil || got.body != ErrStopping.Error() {
		t.Errorf("the long poll got %+v", got)
	}
}

func TestHTTPStopCutsOffWhatDoesNotEnd(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		drain time.Duration
		stop  func(context.Context) (context.Context, context.CancelFunc)
	}{
		{"its own time is up", time.Millisecond, func(ctx context.Context) (context.Context, context.CancelFunc) { return context.WithCancel(ctx) }},
		{"the caller's time is up", 0, func(ctx context.Context) (context.Context, context.CancelFunc) {
			return context.WithTimeout(ctx, time.Millisecond)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			entered, release := make(chan struct{}), make(chan struct{})
			h := Serve(HTTPConfig{Listen: "127.0.0.1:0", DrainTimeout: c.drain, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
				close(entered)
				<-release
			})})
			if err := h.Start(testContext(t)); err != nil {
				t.Fatal(err)
			}
			response := get(t, h.URL())
			await(t, "the request", entered)
			ctx, cancel := c.stop(testContext(t))
			defer cancel()
			if err := h.Stop(ctx); err == nil {
				t.Error("Stop did not say that a request was cut off")
			}
			if got := await(t, "the response", response); got.err == nil {
				t.Errorf("the request got %+v, want a broken connection", got)
			}
			close(release)
			await(t, "the end of the server", h.Done())
		})
	}
}

func TestHTTPThatCannotStart(t *testing.T) {
	t.Parallel()
	taken := startHTTP(t, func(http.ResponseWriter, *http.Request) {})
	ok := http.NotFoundHandler()
	for _, c := range []struct {
		name string
		cfg  HTTPConfig
		want string
	}{
		{"port taken", HTTPConfig{Listen: taken.Addr().String(), Handler: ok}, "address already in use; stop what listens there"},
		{"no port", HTTPConfig{Listen: "localhost", Handler: ok}, `found "localhost", expected host:port`},
		{"no handler", HTTPConfig{Listen: "127.0.0.1:0"}, "handler is missing"},
		{"half of TLS", HTTPConfig{Listen: "127.0.0.1:0", Handler: ok, CertFile: "cert.pem"}, "expected both or neither"},
		{"TLS files missing", HTTPConfig{Listen: "127.0.0.1:0", Handler: ok, CertFile: "no-cert.pem", KeyFile: "no-key.pem"}, "no-cert.pem"},
		{"negative drain", HTTPConfig{Listen: "127.0.0.1:0", Handler: ok, DrainTimeout: -1}, "drain timeout"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := Serve(c.cfg)
			if err := h.Start(testContext(t)); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("Start = %v, want it to say %q", err, c.want)
			}
			if h.URL() != "" {
				t.Errorf("URL of a server that does not run is %q", h.URL())
			}
		})
	}
}

func TestHTTPNeverStarted(t *testing.T) {
	t.Parallel()
	h := Serve(HTTPConfig{Listen: "127.0.0.1:0", Handler: http.NotFoundHandler()})
	for range 2 {
		if err := h.Stop(testContext(t)); err != nil {
			t.Errorf("Stop = %v", err)
		}
	}
	if err := h.Start(testContext(t)); !errors.Is(err, ErrStopping) {
		t.Errorf("Start after Stop = %v", err)
	}
}

func TestHTTPRefusesAHeaderThatIsTooLarge(t *testing.T) {
	t.Parallel()
	h := startHTTP(t, func(http.ResponseWriter, *http.Request) {})
	conn, err := net.Dial("tcp", h.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(testDeadline)); err != nil {
		t.Fatal(err)
	}
	go func() { // the server may answer and close before it has read everything
		_, _ = fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: x\r\nX-Long: %s\r\n\r\n", strings.Repeat("a", 2*(64<<10)))
	}()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("status %d, want %d", resp.StatusCode, http.StatusRequestHeaderFieldsTooLarge)
	}
}

// serveHTTP is startHTTP with limits of its own.
func serveHTTP(t *testing.T, cfg HTTPConfig) *HTTPServer {
	t.Helper()
	cfg.Listen = "127.0.0.1:0"
	h := Serve(cfg)
	if err := h.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Stop(testContext(t)) })
	return h
}

func dialHTTP(t *testing.T, h *HTTPServer) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", h.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(testDeadline)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// A client that sends its header bit by bit, and never to its end, does not hold a connection.
func TestHTTPCutsOffAHeaderThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	h := serveHTTP(t, HTTPConfig{HeaderTimeout: 100 * time.Millisecond, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		t.Error("a request without the end of its header was handled")
	})})
	conn := dialHTTP(t, h)
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n"); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() {
		_, err := io.ReadAll(conn)
		closed <- err
	}()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case err := <-closed:
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the connection was still open after %v", testDeadline)
			}
			return
		case <-tick.C:
			_, _ = io.WriteString(conn, "X-Slow: 1\r\n") // fails once the server has hung up
		}
	}
}

func TestHTTPClosesAConnectionThatIsIdle(t *testing.T) {
	t.Parallel()
	h := serveHTTP(t, HTTPConfig{IdleTimeout: 50 * time.Millisecond, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "here") })})
	conn := dialHTTP(t, h)
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(conn) // to the server's hanging up
	if err != nil || !strings.HasSuffix(string(b), "here") || strings.Contains(string(b), "Connection: close") {
		t.Errorf("found %q, %v; want an answer on a connection that is kept, and then its end", b, err)
	}
}

func TestHTTPCutsOffAnAnswerThatNobodyReads(t *testing.T) {
	t.Parallel()
	ended := make(chan error, 1)
	h := serveHTTP(t, HTTPConfig{WriteTimeout: 100 * time.Millisecond, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		piece := make([]byte, 1<<20)
		for {
			if _, err := w.Write(piece); err != nil {
				ended <- err
				return
			}
		}
	})})
	conn := dialHTTP(t, h)
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if err := await(t, "the end of the answer", ended); err == nil {
		t.Error("the answer ended without an error")
	}
}
