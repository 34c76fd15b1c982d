package platform

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
)

// countingListener counts what is written to its connections.
type countingListener struct {
	net.Listener
	writes atomic.Int64
}

type countingConn struct {
	net.Conn
	l *countingListener
}

func (l *countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return countingConn{c, l}, err
}

func (c countingConn) Write(b []byte) (int, error) {
	c.l.writes.Add(1)
	return c.Conn.Write(b)
}

// body is n bytes that differ along the way.
func body(n int) string { return strings.Repeat("0123456789abcdefghijklmnopqrstuvwxyz-", n/37+1)[:n] }

// An answer is whole whatever its size, and one that is short is one write, on a connection that is used again and again.
func TestHTTPSendsAShortAnswerInOnePiece(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &countingListener{Listener: ln}
	srv := &http.Server{ConnContext: withConn, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, _ := strconv.Atoi(r.URL.Query().Get("n"))
		if r.URL.Query().Has("length") {
			w.Header().Set("Content-Length", strconv.Itoa(n))
		}
		SendTogether(r.Context(), w, func() {
			for rest := body(n); rest != ""; {
				piece := rest[:min(len(rest), 3000)]
				_, _ = io.WriteString(w, piece)
				rest = rest[len(piece):]
			}
		})
	})}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(gatheringListener{l}) }()
	defer func() { _ = srv.Close(); <-done }()
	conn, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	answers := bufio.NewReader(conn)
	for _, method := range []string{http.MethodGet, http.MethodHead} {
		for _, n := range []int{0, 1, 2047, 2048, 2049, 3900, 4095, 4096, 4097, 5000, 8192, 12_000, 60_000, 65_536, 70_000, 300_000} {
			for _, query := range []string{"&length", ""} {
				before := l.writes.Load()
				fmt.Fprintf(conn, "%s /?n=%d%s HTTP/1.1\r\nHost: x\r\n\r\n", method, n, query)
				req := &http.Request{Method: method}
				resp, err := http.ReadResponse(answers, req)
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(resp.Body)
				want := body(n)
				if method == http.MethodHead {
					want = ""
				}
				if err != nil || string(got) != want {
					t.Fatalf("%s of %d bytes%s: found %d bytes, %v", method, n, query, len(got), err)
				}
				if writes := l.writes.Load() - before; query != "" && n <= 60_000 && writes != 1 {
					t.Errorf("%s of %d bytes: expected one write, found %d", method, n, writes)
				}
			}
		}
	}
}

// What was gathered is sent when the answer breaks off, and the connection ends.
func TestHTTPSendsWhatWasWrittenBeforeAnAnswerBrokeOff(t *testing.T) {
	t.Parallel()
	h := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "20000")
		SendTogether(r.Context(), w, func() {
			_, _ = io.WriteString(w, body(10_000))
			panic(http.ErrAbortHandler)
		})
	})
	resp, err := http.Get(h.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); !errors.Is(err, io.ErrUnexpectedEOF) || len(got) == 0 || !strings.HasPrefix(body(10_000), string(got)) {
		t.Errorf("expected a part and an error, found %d bytes, %v", len(got), err)
	}
}

// failingConn takes nothing.
type failingConn struct {
	net.Conn
	closed bool
}

func (c *failingConn) Write([]byte) (int, error) {
	if c.closed {
		return 0, net.ErrClosed
	}
	return 0, errors.New("nobody reads")
}

func (c *failingConn) Close() error {
	c.closed = true
	return nil
}

// net/http was told that the bytes are written: so nothing may follow them when they are not.
func TestHTTPEndsAConnectionThatDoesNotTakeWhatWasGathered(t *testing.T) {
	t.Parallel()
	inner := new(failingConn)
	c := &gatheringConn{Conn: inner}
	c.gather()
	if n, err := c.Write([]byte("an answer")); n != 9 || err != nil {
		t.Fatal(n, err)
	}
	c.send()
	if _, err := c.Write([]byte("another")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("expected a closed connection, found %v", err)
	}
}

func TestHTTPSendsTogetherWithoutAConnection(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	SendTogether(context.Background(), w, func() { _, _ = io.WriteString(w, "ok") })
	if w.Body.String() != "ok" || w.Flushed {
		t.Errorf("found %q, flushed %t", w.Body, w.Flushed)
	}
}
