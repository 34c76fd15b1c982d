package e2e_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// untouched holds a session to what it was: same next seq, same digest, same
// number of messages in the stream.
type untouched struct {
	client  *harness.Client
	log     *harness.Log
	session string

	next   int64
	digest string
	count  uint64
}

func watchUntouched(t *testing.T, client *harness.Client, log *harness.Log, session string) untouched {
	t.Helper()
	u := untouched{client: client, log: log, session: session}
	var err error
	if u.next, u.digest, u.count, err = u.state(t.Context()); err != nil {
		t.Fatal(err)
	}
	return u
}

func (u untouched) state(ctx context.Context) (next int64, digest string, count uint64, err error) {
	status, err := u.client.Status(ctx, u.session)
	if err != nil {
		return 0, "", 0, err
	}
	count, err = u.log.Count(ctx, u.session)
	return *status.NextSeq, status.Digest, count, err
}

func (u untouched) check(t *testing.T) {
	t.Helper()
	next, digest, count, err := u.state(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if next != u.next || digest != u.digest || count != u.count {
		t.Errorf("the log changed: next seq %d, digest %s, %d messages; before: %d, %s, %d", next, digest, count, u.next, u.digest, u.count)
	}
}

// clientProblem holds an answer to a problem document that blames the caller.
func clientProblem(t *testing.T, a harness.Answer, err error) harness.Problem {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	if a.Status < 400 || a.Status > 499 {
		t.Fatalf("status %d, want 4xx: %.300s", a.Status, a.Body)
	}
	p, err := a.Problem()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestBadBodiesAreRefusedAndLeaveNothing(t *testing.T) {
	t.Parallel()
	s := startStack(t, "off")
	log := harness.OpenLog(t, s.nats)
	good := string(note("good"))
	nested := func(depth int) string {
		return `{"type":"turn/start","data":` + strings.Repeat("[", depth) + strings.Repeat("]", depth) + `}`
	}
	for _, c := range []struct {
		name        string
		contentType string
		body        string
		rule        string // "" for any
		index       int    // -1 for any
	}{
		{"nothing", harness.TypeJSON, ``, "", -1},
		{"white space", harness.TypeJSON, " \n\t ", "", -1},
		{"truncated event", harness.TypeJSON, good[:len(good)-20], "json-malformed", -1},
		{"truncated array", harness.TypeJSON, `[` + good + `,` + good[:40], "", -1},
		{"two values", harness.TypeJSON, good + good, "", -1},
		{"a number", harness.TypeJSON, `7`, "", -1},
		{"a string", harness.TypeJSON, `"user/message"`, "", -1},
		{"null", harness.TypeJSON, `null`, "", -1},
		{"an array of numbers", harness.TypeJSON, `[1,2]`, "", -1},
		{"an empty array", harness.TypeJSON, `[]`, "", -1},
		{"an empty object", harness.TypeJSON, `{}`, "", -1},
		{"events that is no array", harness.TypeJSON, `{"events":7}`, "", -1},
		{"plain text", "text/plain", good, "", -1},
		{"a form", "application/x-www-form-urlencoded", "type=turn/start", "", -1},
		{"no such media type", "nonsense", good, "", -1},
		{"NUL bytes", harness.TypeJSON, "\x00\x00\x00", "json-malformed", -1},
		{"NUL in a string", harness.TypeJSON, "{\"type\":\"turn/start\",\"data\":{\"t\":\"a\x00b\"}}", "json-malformed", -1},
		{"NUL after the event", harness.TypeJSON, good + "\x00", "", -1},
		{"invalid UTF-8", harness.TypeJSON, "{\"type\":\"turn/start\",\"data\":{\"t\":\"a\xff\xfeb\"}}", "json-malformed", -1},
		{"overlong UTF-8", harness.TypeJSON, "{\"type\":\"turn/start\",\"data\":{\"t\":\"\xc0\x80\"}}", "json-malformed", -1},
		{"a surrogate in UTF-8", harness.TypeJSON, "{\"type\":\"turn/start\",\"data\":{\"t\":\"\xed\xa0\xbd\"}}", "json-malformed", -1},
		{"a byte order mark", harness.TypeJSON, "\xef\xbb\xbf" + good, "", -1},
		{"10,000 levels", harness.TypeJSON, nested(10_000), "json-malformed", -1},
		{"10,000 levels, never closed", harness.TypeJSON, `{"type":"turn/start","data":` + strings.Repeat(`{"a":`, 10_000), "json-malformed", -1},
		{"NDJSON cut in the second line", harness.TypeNDJSON, good + "\n" + good[:50], "json-malformed", 1},
		{"a CloudEvent without type", harness.TypeEvent, `{"specversion":"1.0","id":"1","source":"/x","data":{}}`, "", -1},
		{"a CloudEvent of another type", harness.TypeEvent, `{"specversion":"1.0","id":"1","source":"/x","type":"com.example.other","data":{}}`, "", -1},
		{"a truncated CloudEvents batch", harness.TypeEventBatch, `[{"specversion":"1.0"`, "", -1},
		{"third event of an unknown type", harness.TypeJSON, `[` + good + `,` + good + `,{"type":"acme/metric","data":{}}]`, "unknown-type", 2},
		{"third event without data", harness.TypeJSON, `[` + good + `,` + good + `,{"type":"turn/start"},` + good + `]`, "envelope-malformed", 2},
		{"third event replaces what is not there", harness.TypeJSON, `[` + good + `,` + good + `,{"type":"user/message","surfaceOp":{"op":"replace","startSeq":999,"endSeq":999},"sourceEventSeqs":[1],"data":{"id":"x","role":"user","source":{"kind":"user"},"content":[]}}]`, "replace-endpoint-not-earlier", 2},
		{"third event of an object", harness.TypeJSON, `{"events":[` + good + `,` + good + `,{"type":"user/message","data":{}}]}`, "surface-op-required", 2},
		{"third line of NDJSON", harness.TypeNDJSON, good + "\n" + good + "\n" + `{"type":"turn/start","data":{},"note":1}` + "\n", "envelope-malformed", 2},
		{"third seq repeats the second", harness.TypeJSON, `[` + withSeq(good, 2) + `,` + withSeq(good, 3) + `,` + withSeq(good, 3) + `]`, "seq-not-contiguous", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			session := "bad " + c.name
			mustAppend(t, s.appender, session, notes("first", "second"))
			before := watchUntouched(t, s.appender, log, session)
			a, err := s.appender.Do(t.Context(), http.MethodPost, harness.SessionPath(session, "/events"), []byte(c.body), harness.ContentType(c.contentType))
			p := clientProblem(t, a, err)
			if c.rule != "" && p.Rule != c.rule {
				t.Errorf("rule %q, want %q: %s", p.Rule, c.rule, a.Body)
			}
			if c.index >= 0 && (p.Index == nil || *p.Index != c.index) {
				t.Errorf("index %v, want %d: %s", p.Index, c.index, a.Body)
			}
			before.check(t)
			// The session is none the worse for it.
			if r := mustAppend(t, s.appender, session, notes("third")); r.FirstSeq != 2 {
				t.Errorf("the next event got seq %d, want 2", r.FirstSeq)
			}
		})
	}
}

// withSeq puts a seq into an event that has none.
func withSeq(event string, seq int) string {
	return strings.Replace(event, "{", fmt.Sprintf(`{"seq":%d,`, seq), 1)
}

func TestBadQueriesAndPathsAreRefused(t *testing.T) {
	t.Parallel()
	s := startStack(t, "off")
	mustAppend(t, s.appender, "there", notes("first"))
	if _, err := s.projector.Messages(t.Context(), "there", harness.MinSeq(0)); err != nil {
		t.Fatal(err)
	}
	good := []byte(note("x"))
	for encoding, status := range map[string]int{"gzip": http.StatusUnsupportedMediaType, "br, identity": http.StatusUnsupportedMediaType, "identity": http.StatusCreated} {
		a, err := s.appender.Do(t.Context(), http.MethodPost, "/v1/sessions/encoded/events", good, harness.ContentType(harness.TypeJSON), harness.With("Content-Encoding", encoding))
		if err != nil || a.Status != status || status != http.StatusCreated && !strings.Contains(string(a.Body), "expected none, or identity, found") {
			t.Errorf("a body in encoding %s: %v, %d %s", encoding, err, a.Status, a.Body)
		}
	}
	for _, c := range []struct {
		client *harness.Client
		method string
		path   string
		body   []byte
	}{
		{s.appender, http.MethodPost, "/v1/sessions/there/events?expectedSeq=two", good},
		{s.appender, http.MethodPost, "/v1/sessions/there/events?expectedSeq=-1", good},
		{s.appender, http.MethodPost, "/v1/sessions/there/events?expectedSeq=1.5", good},
		{s.appender, http.MethodPost, "/v1/sessions", []byte(`{"id":7}`)},
		{s.appender, http.MethodPost, "/v1/sessions", []byte(`{"id":"own parent","header":{"parentSession":"own parent"}}`)},
		{s.appender, http.MethodPost, "/v1/sessions", []byte(`{"id":"x","header":[]}`)},
		{s.appender, http.MethodPost, "/v1/sessions", []byte(`{"id":"x","header":{"version":99,"id":"x","createdAt":0,"isSeeded":false,"delegationDepth":0}}`)},
		{s.appender, http.MethodPost, "/v1/sessions", []byte(`{"id":"x"`)},
		{s.appender, http.MethodGet, "/v1/nowhere", nil},
		{s.appender, http.MethodDelete, "/v1/sessions/there", nil},
		{s.projector, http.MethodGet, "/v1/nowhere", nil},
		{s.projector, http.MethodPost, "/v1/sessions/there/messages", []byte(`{}`)},
		{s.projector, http.MethodGet, "/v1/sessions/there/messages?minSeq=x", nil},
		{s.projector, http.MethodGet, "/v1/sessions/there/messages?minSeq=0&timeout=soon", nil},
		{s.projector, http.MethodGet, "/v1/sessions/there/messages?fresh=perhaps", nil},
		{s.projector, http.MethodGet, "/v1/sessions/there/events?from=-5", nil},
		{s.projector, http.MethodGet, "/v1/sessions/there/events?from=x", nil},
		{s.projector, http.MethodGet, "/v1/sessions/there/events?limit=-1", nil},
		{s.projector, http.MethodGet, "/v1/sessions?limit=many", nil},
	} {
		t.Run(c.method+" "+c.path, func(t *testing.T) {
			t.Parallel()
			a, err := c.client.Do(t.Context(), c.method, c.path, c.body)
			clientProblem(t, a, err)
			if c.method == http.MethodDelete {
				if got := a.Header.Get("Allow"); got != "GET, HEAD" {
					t.Errorf("Allow: %q", got)
				}
			}
		})
	}
}

// Ids that the contract forbids are refused on every call; ids that only look
// dangerous are ids like any other.
func TestSessionIDs(t *testing.T) {
	t.Parallel()
	s := startStack(t, "off")
	log := harness.OpenLog(t, s.nats)
	for name, id := range map[string]string{
		"300 bytes":         strings.Repeat("x", 300),
		"201 bytes":         strings.Repeat("x", 201),
		"201 bytes of text": strings.Repeat("é", 100) + "x",
		"dot":               ".",
		"dot dot":           "..",
		"NUL":               "a\x00b",
		"line break":        "a\nb",
		"delete":            "a\x7fb",
		"invalid UTF-8":     "a\xffb",
	} {
		t.Run("refused/"+name, func(t *testing.T) {
			t.Parallel()
			body, err := json.Marshal(map[string]string{"id": id})
			if err != nil {
				t.Fatal(err)
			}
			if name != "invalid UTF-8" { // which a JSON string cannot hold
				a, err := s.appender.Do(t.Context(), http.MethodPost, "/v1/sessions", body)
				clientProblem(t, a, err)
			}
			a, err := s.appender.Do(t.Context(), http.MethodPost, harness.SessionPath(id, "/events"), note("x"))
			clientProblem(t, a, err)
			for _, client := range []*harness.Client{s.appender, s.projector} {
				a, err := client.Do(t.Context(), http.MethodGet, harness.SessionPath(id, ""), nil)
				clientProblem(t, a, err)
			}
			a, err = s.projector.Do(t.Context(), http.MethodGet, harness.SessionPath(id, "/messages"), nil)
			clientProblem(t, a, err)
			if name == "300 bytes" || name == "201 bytes" {
				if n, err := log.Count(t.Context(), id); err != nil || n != 0 {
					t.Errorf("%d messages (%v) under a refused id", n, err)
				}
			}
		})
	}
	for name, id := range map[string]string{
		"200 bytes":     strings.Repeat("x", 200),
		"spaces":        "a b  c",
		"dots":          "a.b.c",
		"dots alone":    "...",
		"slashes":       "a/b/../c",
		"star":          "*",
		"greater":       ">",
		"wildcards":     "a.*.>",
		"percent":       "100%41",
		"equals":        "a=2Eb",
		"question":      "a?b#c",
		"quotes":        `a"b'c\d`,
		"plus":          "a+b",
		"no ASCII":      "сессия 東京 🙂",
		"like a number": "0",
		"upper case":    "CaSe",
		"lower case":    "case",
	} {
		t.Run("accepted/"+name, func(t *testing.T) {
			t.Parallel()
			mustAppend(t, s.appender, id, notes(name+"-0", name+"-1"))
			messages, err := s.projector.Messages(t.Context(), id, harness.MinSeq(1))
			if err != nil {
				t.Fatal(err)
			}
			if len(messages.Messages) != 2 || !bytes.Contains(messages.Messages[1], []byte(name+"-1")) {
				t.Errorf("messages of %q: %s", id, messages.Messages)
			}
			events, err := s.projector.Events(t.Context(), id)
			if err != nil || len(events) != 2 {
				t.Errorf("%d events (%v), want 2", len(events), err)
			}
			if n, err := log.Count(t.Context(), id); err != nil || n != 1 {
				t.Errorf("%d messages (%v) on %s, want 1", n, err, harness.Subject(id))
			}
			exported, err := s.projector.Export(t.Context(), id)
			if err != nil {
				t.Fatal(err)
			}
			line, _, _ := bytes.Cut(exported, []byte("\n"))
			var header struct{ ID string }
			if err := json.Unmarshal(line, &header); err != nil || header.ID != id {
				t.Errorf("the export of %q is headed %s (%v)", id, line, err)
			}
		})
	}
}

// A body beyond any limit is refused while most of it is still unsent.
func TestOversizeBodiesAreRefusedUnread(t *testing.T) {
	t.Parallel()
	const size = 50 << 20
	// What may have left the sender when the answer comes: the limit and the
	// buffers of two sockets.
	const allowed = 40 << 20
	s := startStack(t, "off")
	log := harness.OpenLog(t, s.nats)
	mustAppend(t, s.appender, "oversize", notes("first"))
	before := watchUntouched(t, s.appender, log, "oversize")

	for _, c := range []struct {
		name, path, contentType string
		chunked                 bool
	}{
		{"events with a length", "/v1/sessions/oversize/events", harness.TypeJSON, false},
		{"events in chunks", "/v1/sessions/oversize/events", harness.TypeJSON, true},
		{"NDJSON in chunks", "/v1/sessions/oversize/events", harness.TypeNDJSON, true},
		{"a CloudEvent in chunks", "/v1/sessions/oversize/events", harness.TypeEvent, true},
		{"a session with a length", "/v1/sessions", harness.TypeJSON, false},
		{"a session in chunks", "/v1/sessions", harness.TypeJSON, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			length := fmt.Sprintf("Content-Length: %d", size)
			if c.chunked {
				length = "Transfer-Encoding: chunked"
			}
			head := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\n%s\r\n\r\n", c.path, c.contentType, length)
			answer, sent, err := pour(harness.HostPort(s.appender.Base), head, size, c.chunked)
			if err != nil {
				t.Fatal(err)
			}
			p, err := answer.Problem()
			if err != nil {
				t.Fatal(err)
			}
			if p.Status != http.StatusRequestEntityTooLarge || p.Code != "too-large" {
				t.Errorf("answered %d %s, want 413 too-large", p.Status, p.Code)
			}
			if sent > allowed {
				t.Errorf("%d bytes were taken before the refusal", sent)
			}
		})
	}
	before.check(t)
}

// pour sends a request with an endless text and stops when it is answered.
func pour(address, head string, size int, chunked bool) (harness.Answer, int64, error) {
	conn, err := net.DialTimeout("tcp", address, 10*time.Second)
	if err != nil {
		return harness.Answer{}, 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return harness.Answer{}, 0, err
	}
	var sent atomic.Int64
	writing := make(chan struct{})
	go func() {
		defer close(writing)
		if _, err := io.WriteString(conn, head); err != nil {
			return
		}
		send := func(b []byte) bool {
			if chunked {
				b = fmt.Appendf(nil, "%x\r\n%s\r\n", len(b), b)
			}
			n, err := conn.Write(b)
			sent.Add(int64(n))
			return err == nil
		}
		if !send([]byte(`{"id":"`)) {
			return
		}
		filler := bytes.Repeat([]byte("x"), 64<<10)
		for sent.Load() < int64(size)-int64(len(filler)) {
			if !send(filler) {
				return // answered and closed, as it should be
			}
		}
	}()
	res, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodPost})
	taken := sent.Load()
	var body []byte
	if err == nil {
		body, err = io.ReadAll(res.Body)
		if len(body) > 0 {
			err = nil // a reset behind the answer is fair
		}
	}
	_ = conn.Close()
	<-writing
	if err != nil {
		return harness.Answer{}, taken, fmt.Errorf("after %d bytes: %w", taken, err)
	}
	return harness.Answer{Status: res.StatusCode, Header: res.Header, Body: body}, taken, nil
}

// TestWrongFlagsAreNamedAtOnce: what no server can mend is said before one is asked.
func TestWrongFlagsAreNamedAtOnce(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		args []string
		want string
	}{
		{"projector", []string{"verify", "nope.jsonl"}, "there is no file nope.jsonl"},
		{"projector", []string{"verify", "s", "nope.tar.zst"}, "there is no file nope.tar.zst"},
		{"projector", []string{"serve", "--listen", "127.0.0.1:99999"}, "--listen: found \"127.0.0.1:99999\", expected host:port"},
		{"projector", []string{"serve", "--feed-every=-5ms"}, "--feed-every: expected more than 0, found -5ms"},
		{"appender", []string{"serve", "--listen", "127.0.0.1:99999"}, "--listen: found \"127.0.0.1:99999\", expected host:port"},
		{"appender", []string{"serve", "--attest-every=-1s"}, "--attest-every: expected more than 0, found -1s"},
		{"projector", []string{"status", "--url", "https://127.0.0.1:1", "--ca-file", "nope"}, "--ca-file: open nope"},
	} {
		r := harness.Run(t, c.name, append(c.args, "--nats", "nats://127.0.0.1:1")...)
		if r.Code != 2 || !strings.Contains(r.Stderr, c.want) {
			t.Errorf("%s %v: exit code %d, want 2 and %s\n%s", c.name, c.args, r.Code, c.want, r.Output())
		}
	}
	if r := harness.Run(t, "projector", "verify", "--ids", "nope.jsonl", "--nats", harness.Appender{}.Start(t).NATS); r.Code != 1 || !strings.Contains(r.Stderr, "nope.jsonl") {
		t.Errorf("an id that ends as a file does: exit code %d\n%s", r.Code, r.Output())
	}
}
