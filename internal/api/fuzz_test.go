package api_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"palimpsest/internal/api"
	"palimpsest/internal/auth"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/platform"
)

// scope is a test that may end, with its cleanups, before the one that began it.
type scope struct {
	testing.TB
	mu       sync.Mutex // guards cleanups
	cleanups []func()
}

func (s *scope) Cleanup(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cleanups = append(s.cleanups, f)
}

func (s *scope) TempDir() string {
	dir, err := os.MkdirTemp("", "palimpsest-fuzz-")
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func (s *scope) end() {
	for {
		s.mu.Lock()
		n := len(s.cleanups)
		if n == 0 {
			s.mu.Unlock()
			return
		}
		f := s.cleanups[n-1]
		s.cleanups = s.cleanups[:n-1]
		s.mu.Unlock()
		f()
	}
}

// complaints keeps what the servers log that they must never log.
type complaints struct {
	slog.Handler
	mu   sync.Mutex // guards said
	said []string
}

func (c *complaints) Enabled(context.Context, slog.Level) bool { return true }

func (c *complaints) Handle(_ context.Context, r slog.Record) error {
	if !strings.Contains(r.Message, "panic") {
		return nil
	}
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		text += fmt.Sprintf(" %s=%v", a.Key, a.Value)
		return true
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.said = append(c.said, text)
	return nil
}

func (c *complaints) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.said
	c.said = nil
	return out
}

// fuzzed is both programs behind real HTTP servers, each once with callers that are asked who
// they are and once without.
type fuzzed struct {
	*scope
	routes     []string     // of the appender, then of the projector
	appends    int          // how many of them are the appender's
	address    [2][2]string // program, guarded
	secret     string
	complaints *complaints
	requests   int
	goroutines int // when it was opened
}

const fuzzBody = 64 << 10 // bytes of a request's body, at the most

func openFuzzed(t testing.TB) *fuzzed {
	t.Helper()
	f := &fuzzed{scope: &scope{TB: t}, complaints: &complaints{Handler: slog.DiscardHandler}}
	log := slog.New(f.complaints)
	w := newWorld(f.scope, nil)
	secret, line := token(f.scope, "alice", grant("own-*", auth.Append, auth.Read, auth.Repair))
	f.secret = secret
	for guarded, edge := range []func() *api.Edge{
		func() *api.Edge { return nil },
		func() *api.Edge { return &api.Edge{Auth: authenticator(f.scope, line), Logger: log} },
	} {
		programs := []http.Handler{
			api.NewAppender(w.appender, api.AppenderConfig{Edge: edge(), MaxBody: fuzzBody, Logger: log}),
			api.NewProjector(w.reader, w.worker, w.hubs, w.auditor, api.ProjectorConfig{Edge: edge(), Logger: log, WaitDefault: 5 * time.Millisecond, WaitMost: 20 * time.Millisecond}),
		}
		for program, h := range programs {
			srv := platform.Serve(platform.HTTPConfig{Listen: "127.0.0.1:0", Handler: h, Logger: log})
			if err := srv.Start(journaltest.Context(f.scope)); err != nil {
				t.Fatal(err)
			}
			f.Cleanup(func() {
				// The test that opened it is over: it must not be asked for anything.
				if err := srv.Stop(journaltest.Context(f.scope)); err != nil {
					f.Errorf("requests are left: %v", err)
				}
			})
			f.address[program][guarded] = srv.Addr().String()
			if guarded == 0 {
				f.routes = append(f.routes, slices.Sorted(slices.Values(api.Routes(h)))...)
				if program == 0 {
					f.appends = len(f.routes)
				}
			}
		}
	}
	for _, id := range []string{"own-1", "s"} {
		for range 3 {
			if _, err := w.appender.Append(journaltest.Context(f.scope), appendOf(id)); err != nil {
				t.Fatal(err)
			}
		}
	}
	f.goroutines = runtime.NumGoroutine()
	return f
}

// close ends all servers, and reports how many goroutines there were before and how many and how
// much memory are left.
func (f *fuzzed) close(t testing.TB) (grown, goroutines int, heap uint64) {
	t.Helper()
	f.TB = t
	// A client that is gone is noticed by and by.
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.Now().Add(journaltest.Deadline / 2)
	for grown = runtime.NumGoroutine() - f.goroutines; grown > mostGrown && time.Now().Before(deadline); grown = runtime.NumGoroutine() - f.goroutines {
		<-tick.C
	}
	f.end()
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return grown, runtime.NumGoroutine(), m.HeapAlloc
}

// Ways to send a body.
const (
	exact     = iota // with its length
	chunked          // in chunks
	cutShort         // with a length that is too long, and then the end
	cutChunks        // in chunks without the last
	tooShort         // with a length that is too short
	announced        // with a length beyond all bounds, and then the end
	zipped           // as gzip
	zstandard        // as zstd
	framings
)

var fuzzMethods = []string{"", "", "", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "get", "POST\x00", "X"}

// request writes a request: as bytes, since no client sends most of these. over says that the end of
// the connection comes in the place of what is missing.
func (f *fuzzed) request(route, how uint16, id, query, headers string, body []byte) (address, method string, request []byte, over bool) {
	n := int(route) % len(f.routes)
	method, path, _ := strings.Cut(f.routes[n], " ")
	program := 0
	if n >= f.appends {
		program = 1
	}
	framing := int(how) % framings
	guarded := int(how>>4) & 1
	if m := fuzzMethods[int(how>>5)%len(fuzzMethods)]; m != "" {
		method = m
	}
	line := strings.NewReplacer("\r", "%0D", "\n", "%0A", " ", "%20")
	path = strings.Replace(path, "{id}", line.Replace(id), 1)
	if query != "" {
		path += "?" + line.Replace(query)
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n", method, path)
	for h := range strings.SplitSeq(headers, "\n") {
		if h = strings.TrimRight(h, "\r"); h != "" {
			b.WriteString(strings.ReplaceAll(h, "@token", f.secret) + "\r\n")
		}
	}
	chunks := func() {
		b.WriteString("Transfer-Encoding: chunked\r\n\r\n")
		for part := range slices.Chunk(body, 1+len(body)/3) {
			fmt.Fprintf(&b, "%x\r\n%s\r\n", len(part), part)
		}
	}
	length := func(n int) { fmt.Fprintf(&b, "Content-Length: %d\r\n\r\n", n); b.Write(body) }
	switch framing {
	case exact:
		if len(body) == 0 {
			b.WriteString("\r\n")
		} else {
			length(len(body))
		}
	case chunked:
		chunks()
		b.WriteString("0\r\n\r\n")
	case cutChunks:
		chunks()
	case cutShort:
		length(len(body) + 10)
	case tooShort:
		length(len(body) / 2)
	case announced:
		length(1 << 40)
	case zipped:
		var z bytes.Buffer
		w := gzip.NewWriter(&z)
		_, _ = w.Write(body) // to memory
		_ = w.Close()
		body = z.Bytes()
		b.WriteString("Content-Encoding: gzip\r\n")
		length(len(body))
	case zstandard:
		body = zstdEncoder().EncodeAll(body, nil)
		b.WriteString("Content-Encoding: zstd\r\n")
		length(len(body))
	}
	over = framing == cutShort || framing == cutChunks || framing == announced || framed.MatchString(headers)
	return f.address[program][guarded], method, b.Bytes(), over
}

// framed are headers that may say that a body is longer than it is.
var framed = regexp.MustCompile(`(?i)content-length|transfer-encoding`)

var zstdEncoder = sync.OnceValue(func() *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		panic(err)
	}
	return e
})

// ask sends a request, and then the end when it is over before it is whole, and judges the answer.
func (f *fuzzed) ask(t *testing.T, address, method string, request []byte, over bool) {
	f.requests++
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(journaltest.Deadline))
	sent := make(chan struct{})
	go func() { // the answer may come before the request is read
		defer close(sent)
		_, _ = conn.Write(request)
		if over { // to others a client that has no more to say looks like one that is gone
			_ = conn.(*net.TCPConn).CloseWrite()
		}
	}()
	defer func() { <-sent }()
	defer conn.Close()
	r := bufio.NewReader(conn)
	var resp *http.Response
	for {
		if resp, err = http.ReadResponse(r, &http.Request{Method: method}); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("no answer within %v to\n%q", journaltest.Deadline, request)
			}
			break // a server may hang up on what it cannot read
		}
		if resp.StatusCode >= 200 || resp.StatusCode == http.StatusSwitchingProtocols {
			break
		}
	}
	for _, said := range f.complaints.take() {
		t.Errorf("the server's log: %s\nafter %q", said, request)
	}
	if err != nil {
		return
	}
	// Its body is not closed, which would read it to its end: the connection is.
	if resp.Header.Get("Content-Type") == "text/event-stream" { // has no end
		return
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the answer has no end within %v: %q", journaltest.Deadline, request)
	}
	own := resp.Header.Get("X-Content-Type-Options") == "nosniff" // the server itself answers what is no HTTP
	problem := resp.Header.Get("Content-Type") == "application/problem+json"
	var p api.Problem
	if problem && method != http.MethodHead {
		if err := json.Unmarshal(body, &p); err != nil || p.Status != resp.StatusCode || p.Code == "" || p.Detail == "" {
			t.Errorf("status %d with an unreadable problem (%v): %s\nafter %q", resp.StatusCode, err, body, request)
		}
	}
	switch s := resp.StatusCode; {
	case s >= 500 && s != http.StatusServiceUnavailable && own && p.Code != "not-yet-projected":
		t.Errorf("status %d: %s\nafter %q", s, body, request)
	case s >= 500 && !own && s != http.StatusNotImplemented && s != http.StatusHTTPVersionNotSupported:
		t.Errorf("status %d: %s\nafter %q", s, body, request)
	case s >= 400 && own && !problem && s != http.StatusNotModified:
		t.Errorf("status %d without a problem: %s\nafter %q", s, body, request)
	}
}

// mostGrown is how many goroutines more than at the start may run while nobody asks anything.
const mostGrown = 32

// fuzzRound is after how many requests all is ended, looked at for leaks, and begun anew.
const fuzzRound = 4000

// FuzzHTTP sends both programs what no client would. Nothing may panic, answer a 5xx but 503 (and
// 504 for what is not yet projected), or leak. PALIMPSEST_FUZZ_LOG names a file that takes the
// figures of each round.
func FuzzHTTP(f *testing.F) {
	now := openFuzzed(f)
	for _, s := range fuzzSeeds {
		if !slices.Contains(now.routes, s.route) {
			f.Errorf("there is no route %s", s.route)
		}
	}
	for i, route := range now.routes { // each in another framing, and asked as somebody every other time
		f.Add(uint16(i), uint16(exact), "own-1", "", "Authorization: Bearer @token", []byte(nil))
		f.Add(uint16(i), uint16(i%framings|i%2<<4), "s", "", "Authorization: Bearer @token", []byte(userEvent))
		for _, s := range fuzzSeeds {
			if s.route == route {
				f.Add(uint16(i), s.how, s.id, s.query, s.headers, []byte(s.body))
			}
		}
	}
	var rounds, requests, goroutines int
	var heap uint64
	end := func(t testing.TB) {
		rounds++
		requests += now.requests
		grown, left, bytes := now.close(t)
		now = nil
		if path := os.Getenv("PALIMPSEST_FUZZ_LOG"); path != "" {
			out, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(out, "process %d, round %d: %d requests so far; goroutines %+d while it served, %d after; heap %d KiB\n", os.Getpid(), rounds, requests, grown, left, bytes>>10)
			_ = out.Close()
		}
		if rounds == 1 { // what is made once has been made
			goroutines, heap = left, bytes
			return
		}
		if grown > mostGrown {
			t.Errorf("%d goroutines more than before %d requests, while nobody asks anything", grown, fuzzRound)
		}
		if left > goroutines+4 || bytes > heap+32<<20 {
			t.Errorf("after round %d %d goroutines and %d bytes of heap are left, after the first %d and %d", rounds, left, bytes, goroutines, heap)
		}
	}
	f.Cleanup(func() {
		if now != nil {
			end(f)
		}
	})
	f.Fuzz(func(t *testing.T, route, how uint16, id, query, headers string, body []byte) {
		if now != nil && now.requests >= fuzzRound {
			end(t)
		}
		if now == nil {
			now = openFuzzed(t)
		}
		now.TB = t // what is said from now on is said of this input
		address, method, request, over := now.request(route, how, id, query, headers, body)
		now.ask(t, address, method, request, over)
	})
}

// as asks with another method than that of the route, by its place in fuzzMethods.
func as(method string) uint16 { return uint16(slices.Index(fuzzMethods, method)) << 5 }

// fuzzSeeds are what the fuzzer begins with.
var fuzzSeeds = func() []fuzzSeed {
	const root = "/v1/sessions/{id}"
	const appends, fork, compact = "POST " + root + "/events", "POST " + root + "/fork", "POST " + root + "/compact"
	const cloudEvent = `{"specversion":"1.0","id":"x/0","source":"/sessions/x","type":"palimpsest.session.v3.user/message","sequence":"00000000000000000000","surfaceop":"append","data":{"id":"m","role":"user","content":[],"source":{"kind":"user"}}}`
	deep := strings.Repeat(`[`, 600)
	long := strings.Repeat("x", 70<<10)
	return []fuzzSeed{
		// Bodies, types and encodings.
		{appends, exact, "own-1", "expectedSeq=3", "Content-Type: application/json\nIdempotency-Key: k", "[" + userEvent + "," + userEvent + "]"},
		{appends, exact, "own-1", "", "", `{"events":[` + userEvent + `],"expectedSeq":0,"epoch":1}`},
		{appends, exact, "own-1", "", "", `{"events":1e99}`},
		{appends, exact, "n", "", "Content-Type: application/x-ndjson", userEvent + "\n\n\r\n" + userEvent},
		{appends, chunked, "n", "", "Content-Type: application/x-ndjson; charset=latin1", userEvent},
		{appends, exact, "c", "", "Content-Type: application/cloudevents+json", cloudEvent},
		{appends, chunked, "c", "", "Content-Type: application/cloudevents-batch+json", "[" + cloudEvent + ",{}]"},
		{appends, exact, "c", "", "ce-specversion: 1.0\nce-type: t\nce-id: i\nce-source: s", "{}"},
		{appends, exact, "c", "", "Content-Type: multipart/form-data; boundary=", "--"},
		{appends, exact, "c", "", "Content-Type: ;;;=", "{}"},
		{appends, exact, "d", "", "", `{"type":"turn/start","data":` + deep},
		{appends, exact, "d", "", "", "{\"type\":\"\xff\xfe\",\"data\":{}}"},
		{appends, exact, "d", "", "", `{"type":"user/message","seq":-0,"time":1e400,"surfaceOp":{"op":"replace","startSeq":0,"endSeq":9007199254740993},"data":{"id":"\ud800"}}`},
		{appends, exact, "d", "", "", `{"type":"note","ignorable":true,"data":null}` + "\x00"},
		{appends, exact, "l", "", "", long},
		{appends, chunked, "l", "", "", long},
		{appends, zipped, "l", "", "", userEvent},
		{appends, zstandard, "l", "", "", userEvent},
		{appends, announced, "l", "", "", "{"},
		{appends, cutShort, "l", "", "", userEvent},
		{appends, cutChunks, "l", "", "", userEvent},
		{appends, tooShort, "l", "", "", userEvent},
		{appends, exact, "l", "", "Transfer-Encoding: gzip, chunked", "x"},
		{appends, exact, "l", "", "Content-Length: -1\nContent-Length: 5", "x"},
		{appends, exact, "l", "", "Expect: 100-continue", userEvent},
		// Conditions.
		{appends, exact, "own-1", "", "If-Match: \"3\"", userEvent},
		{appends, exact, "own-1", "expectedSeq=3", "If-Match: \"4\"", userEvent},
		{appends, exact, "own-1", "", "If-Match: *", userEvent},
		{appends, exact, "own-1", "", "If-Match: \"99999999999999999999\"\nPalimpsest-Writer-Epoch: -1", userEvent},
		{appends, exact, "own-1", "", "Idempotency-Key:\nIdempotency-Key: a", userEvent},
		{appends, exact, "own-1", "", "traceparent: 00-zz\ntracestate: " + strings.Repeat("a", 5000), userEvent},
		{appends, exact, "own-1", "", "Idempotency-Key: \x01\xff" + strings.Repeat("k", 3000), userEvent},
		// Other appends.
		{"POST /v1/sessions", exact, "", "", "", `{"id":"own-9","header":{"version":3,"id":"other","createdAt":1,"parentSession":null,"isSeeded":1}}`},
		{"POST /v1/sessions", exact, "", "", "", `{"id":"..","header":[]}`},
		{"POST /v1/sessions", exact, "", "", "", `{"header":{"version":4,"delegationDepth":-1e3,"cwd":"` + "\u2028" + `"}}`},
		{fork, exact, "own-1", "", "", `{"id":"own-1","at":0}`},
		{fork, exact, "own-1", "", "", `{"id":"own-8","at":9007199254740991}`},
		{fork, exact, "own-1", "", "", `{"id":"own-7","at":1,"header":{"id":3}}`},
		{compact, exact, "own-1", "", "", `{"startSeq":0,"endSeq":1,"summary":[{"type":"text"}],"allow":[1],"x":` + deep + `}`},
		{compact, exact, "own-1", "", "", `{"startSeq":2,"endSeq":0,"summary":"","shadowedSeqs":[]}`},
		{compact, exact, "own-1", "", "", ``},
		{"POST " + root + "/prune", exact, "own-1", "", "", `{"seq":0,"content":{}}`},
		{"POST " + root + "/prune", exact, "own-1", "", "", `{"seq":2.0,"content":null,"epoch":2}`},
		{"POST " + root + "/writer", exact, "own-1", "", "", `{"writer":"` + strings.Repeat("w", 300) + `"}`},
		{"POST " + root + "/skip", exact, "own-1", "", "", `{"by":1}`},
		{"POST " + root + "/repair", exact, "own-1", "", "", `[]`},
		// Ids and paths.
		{appends, exact, "%00", "", "", userEvent},
		{appends, exact, "%zz", "", "", userEvent},
		{appends, exact, "%2e%2e", "", "", userEvent},
		{appends, exact, "a%2Fb", "", "", userEvent},
		{appends, exact, strings.Repeat("é", 300), "", "", userEvent},
		{"GET " + root, exact, "..//../%ff", "", "", ""},
		{"GET " + root, exact, "x/../../metrics#", "?&&==", "", ""},
		// Reads.
		{"GET " + root + "/messages", exact, "s", "minSeq=2&timeout=1ms", "If-None-Match: W/\"2\", *", ""},
		{"GET " + root + "/messages", exact, "s", "minSeq=999&timeout=-1s", "", ""},
		{"GET " + root + "/messages", exact, "s", "minSeq=999&timeout=2ms&format=openai&fresh=true", "", ""},
		{"GET " + root + "/messages", exact, "s", "at=1&fresh=false", "Range: bytes=0-0,-5", ""},
		{"GET " + root + "/messages", exact, "s", "at=1&at=2&nothing=%", "Accept: x/y;q=2", ""},
		{"GET " + root + "/messages", exact, "s", "format=anthropic", "Accept-Encoding: gzip, zstd, br", ""},
		{"GET " + root + "/events", exact, "s", "from=1&to=0&limit=1&type=,user/message&format=cloudevents", "", ""},
		{"GET " + root + "/events", exact, "s", "from=9007199254740992&limit=0", "", ""},
		{"GET " + root + "/transcript", exact, "s", "limit=10001", "", ""},
		{"GET " + root + "/surface", exact, "s", "at=9007199254740991", "", ""},
		{"GET " + root + "/watch", exact, "s", "from=0", "Last-Event-ID: 1", ""},
		{"GET " + root + "/watch", exact, "s", "from=9007199254740991", "Last-Event-ID: x\x00", ""},
		{"GET " + root + "/watch", exact, "nobody", "", "Last-Event-ID: -1", ""},
		{"GET /v1/feed", exact, "", "from=1&state=open", "Last-Event-ID: 18446744073709551616", ""},
		{"GET /v1/feed", exact, "", "since=yesterday&agent=%00&parent=..", "", ""},
		{"GET /v1/sessions", exact, "", "limit=1&cursor=b3duLTE&since=2026-01-01T00:00:00Z", "", ""},
		{"GET /v1/sessions", exact, "", "cursor=%ff&state=asleep", "", ""},
		{"GET " + root + "/explain", exact, "s", "seq=1&depth=0", "", ""},
		{"GET " + root + "/diff", exact, "s", "from=2&to=1", "", ""},
		{"GET " + root + "/blame", exact, "s", "text=x&q=(", "", ""},
		{"GET " + root + "/export", exact | as("HEAD"), "s", "", "", ""},
		{"GET " + root + "/verify", exact, "s", "x=1", "", ""},
		{"GET /v1/usage", exact, "", "since=1", "", ""},
		// Callers and methods.
		{appends, exact | 1<<4, "own-1", "", "Authorization: Bearer plmp_wrong", userEvent},
		{appends, exact | 1<<4, "own-1", "", "Authorization: Basic eDp5\nAuthorization: Bearer @token", userEvent},
		{appends, exact | 1<<4, "own-1", "", "Authorization: Bearer eyJhbGciOiJub25lIn0.e30.", userEvent},
		{appends, cutShort | 1<<4, "foreign", "", "Authorization: bearer  @token", userEvent},
		{"GET /v1/workers", exact | 1<<4, "", "", "Authorization: Bearer @token", ""},
		{"GET /metrics", exact | as("OPTIONS"), "", "", "Origin: http://x", ""},
		{"GET /healthz", exact | as("CONNECT"), "", "", "", ""},
		{"GET /readyz", exact | as("TRACE"), "", "", "Upgrade: websocket\nConnection: upgrade", ""},
		{"POST " + root + "/retry", exact | as("POST\x00"), "s", "", "", ""},
	}
}()

// fuzzSeed is one request: route is one of the programs'.
type fuzzSeed struct {
	route                    string
	how                      uint16
	id, query, headers, body string
}
