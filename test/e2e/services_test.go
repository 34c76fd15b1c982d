package e2e_test

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"palimpsest/test/e2e/harness"
)

// askLimit is far above what any request takes.
const askLimit = time.Minute

// bus talks to the NATS services with the bare client.
type bus struct{ nc *nats.Conn }

func openBus(t *testing.T, url string) bus {
	t.Helper()
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return bus{nc}
}

// request sends one request; header is names and values in turn.
func (b bus) request(ctx context.Context, subject string, body []byte, header ...string) (*nats.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	m := &nats.Msg{Subject: subject, Data: body, Header: nats.Header{}}
	for i := 0; i < len(header); i += 2 {
		m.Header[header[i]] = []string{header[i+1]}
	}
	return b.nc.RequestMsgWithContext(ctx, m)
}

func subjectOf(op, session string) string { return "palimpsest." + op + "." + harness.Token(session) }

// ask sends a request about a session and returns the answer to it, which must be no error.
func (b bus) ask(t *testing.T, out any, status, op, session, body string, header ...string) *nats.Msg {
	t.Helper()
	m, err := b.request(t.Context(), subjectOf(op, session), []byte(body), header...)
	if err != nil {
		t.Fatalf("%s %s: %v", op, session, err)
	}
	if code := m.Header.Get("Nats-Service-Error-Code"); code != "" || m.Header.Get("Palimpsest-Status") != status || m.Header.Get("Content-Type") != harness.TypeJSON {
		t.Fatalf("%s %s: header %v, want status %s: %s", op, session, m.Header, status, m.Data)
	}
	if out != nil {
		if err := json.Unmarshal(m.Data, out); err != nil {
			t.Fatalf("%s %s: %s: %v", op, session, m.Data, err)
		}
	}
	return m
}

// refused sends a request that must be answered with an error.
func (b bus) refused(t *testing.T, status int, code, subject, body string, header ...string) harness.Problem {
	t.Helper()
	m, err := b.request(t.Context(), subject, []byte(body), header...)
	if err != nil {
		t.Fatalf("%s: %v", subject, err)
	}
	a := harness.Answer{Status: status, Header: http.Header(m.Header), Body: m.Data}
	p, err := a.Problem() // the document must say the same status
	if err != nil {
		t.Fatalf("%s: header %v: %v", subject, m.Header, err)
	}
	if m.Header.Get("Nats-Service-Error-Code") != fmt.Sprint(status) || m.Header.Get("Nats-Service-Error") != p.Title || p.Code != code {
		t.Fatalf("%s: header %v with %s, want %d %s", subject, m.Header, m.Data, status, code)
	}
	return p
}

// post sends a POST about a session over HTTP and decodes the answer, which must have that status.
func post(t *testing.T, c *harness.Client, out any, status int, session, call, body string, options ...harness.Option) harness.Answer {
	t.Helper()
	a, err := c.Do(t.Context(), http.MethodPost, harness.SessionPath(session, call), []byte(body), options...)
	if err != nil {
		t.Fatalf("POST %s of %q: %v", call, session, err)
	}
	if a.Status != status {
		t.Fatalf("POST %s of %q: status %d, want %d: %s", call, session, a.Status, status, a.Body)
	}
	if out != nil {
		if err := json.Unmarshal(a.Body, out); err != nil {
			t.Fatalf("POST %s of %q: %s: %v", call, session, a.Body, err)
		}
	}
	return a
}

// problemDocument is a problem with what the harness does not read of it.
type problemDocument struct {
	harness.Problem
	Epoch *int64 `json:"epoch"`
}

// refusedPost sends a POST that must be refused.
func refusedPost(t *testing.T, c *harness.Client, status int, code, session, call, body string, options ...harness.Option) problemDocument {
	t.Helper()
	var p problemDocument
	a := post(t, c, &p, status, session, call, body, options...)
	if _, err := a.Problem(); err != nil || p.Code != code {
		t.Fatalf("POST %s of %q: %s (%v), want %s", call, session, a.Body, err, code)
	}
	return p
}

// receipt is a receipt with all its members.
type receipt struct {
	harness.Receipt
	Writer   string   `json:"writer"`
	Epoch    int64    `json:"epoch"`
	Repaired bool     `json:"repaired"`
	Warnings []string `json:"warnings"`
}

// forked is the answer to a fork.
type forked struct {
	Session string          `json:"session"`
	Parent  string          `json:"parent"`
	At      int64           `json:"at"`
	LastSeq int64           `json:"lastSeq"`
	Created bool            `json:"created"`
	Header  json.RawMessage `json:"header"`
}

func epoch(n int64) harness.Option { return harness.With("Palimpsest-Writer-Epoch", fmt.Sprint(n)) }

func key(k string) harness.Option { return harness.With("Idempotency-Key", k) }

// next holds a session to its next seq.
func next(t *testing.T, c *harness.Client, session string, want int64) {
	t.Helper()
	if got, err := c.NextSeq(t.Context(), session); err != nil || got != want {
		t.Errorf("next seq of %q is %d (%v), want %d", session, got, err, want)
	}
}

// toolTurn is a turn of eight events with one tool call: nodes 2, 3 and 5 of it.
func toolTurn(turn int) []json.RawMessage {
	at := fmt.Sprintf(`"turn":%d,"step":1`, turn)
	call := fmt.Sprintf("call-%d", turn)
	return []json.RawMessage{
		fmt.Appendf(nil, `{"type":"turn/start","data":{"turn":%d}}`, turn),
		fmt.Appendf(nil, `{"type":"step/start","data":{%s}}`, at),
		note(fmt.Sprintf("ask-%d", turn)),
		calling(turn, call),
		fmt.Appendf(nil, `{"type":"tool/call","data":{%s,"callId":%q,"name":"shell","arguments":"{}"}}`, at, call),
		result(turn, call),
		fmt.Appendf(nil, `{"type":"step/end","data":{%s}}`, at),
		fmt.Appendf(nil, `{"type":"turn/end","data":{"turn":%d,"reason":{"kind":"completed"}}}`, turn),
	}
}

// calling is an assistant's message that calls a tool.
func calling(turn int, call string) json.RawMessage {
	return fmt.Appendf(nil, `{"type":"assistant/message","surfaceOp":"append","data":{"turn":%d,"step":1,"message":{"id":"a-%d","role":"assistant","source":{"kind":"model","provider":"p","model":"m"},"content":[{"type":"tool-call","id":%q,"name":"shell","arguments":"{}"}]},"stream":[]}}`, turn, turn, call)
}

// result is a tool's result.
func result(turn int, call string) json.RawMessage {
	return fmt.Appendf(nil, `{"type":"tool/result","surfaceOp":"append","data":{"turn":%d,"step":1,"message":{"id":"r-%d","role":"user","source":{"kind":"tool","callId":%q},"content":[{"type":"tool-result","toolCallId":%q,"isError":false,"content":[{"type":"text","text":"<&> 1.10"}]}]},"n":1.10}}`, turn, turn, call, call)
}

// cloudEvent is a note as a CloudEvent.
func cloudEvent(id string) string {
	return fmt.Sprintf(`{"specversion":"1.0","id":%q,"source":"/sessions/x","type":"palimpsest.session.v3.user/message","datacontenttype":"application/json","surfaceop":"append","data":{"id":%q,"role":"user","source":{"kind":"user"},"content":[{"type":"text","text":%q}]}}`, id, id, id)
}

// TestServices asks over NATS for all that can be asked for over HTTP.
func TestServices(t *testing.T) {
	t.Parallel()
	s := startStack(t, "off")
	b := openBus(t, s.nats)
	for name, run := range map[string]func(*testing.T, stack, bus){
		"every form of append":              serviceAppends,
		"create":                            serviceCreates,
		"writer":                            serviceFences,
		"repair":                            serviceRepairs,
		"fork":                              serviceForks,
		"compact and prune":                 serviceCompacts,
		"status":                            serviceStatus,
		"an error carries the problem":      serviceProblems,
		"a retry over the other way":        serviceAndHTTPAreOne,
		"session ids as tokens":             serviceTokens,
		"an answer to everybody, all alike": serviceUnderLoad,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, s, b)
		})
	}
}

func serviceAppends(t *testing.T, s stack, b bus) {
	const session = "nats-forms"
	var ids []string
	for _, c := range []struct {
		name, body string
		ids        []string
		header     []string
	}{
		{"one event", string(note("one")), []string{"one"}, nil},
		{"an array", string(harness.Array(notes("a0", "a1"))), []string{"a0", "a1"}, []string{"Content-Type", harness.TypeJSON}},
		{"an object", `{"events":` + string(harness.Array(notes("o0"))) + `,"expectedSeq":3}`, []string{"o0"}, nil},
		{"NDJSON", string(note("n0")) + "\n" + string(note("n1")) + "\n", []string{"n0", "n1"}, []string{"Content-Type", harness.TypeNDJSON}},
		{"a CloudEvent", cloudEvent("c0"), []string{"c0"}, []string{"content-type", harness.TypeEvent}},
		{"a batch of CloudEvents", "[" + cloudEvent("c1") + "," + cloudEvent("c2") + "]", []string{"c1", "c2"}, []string{"Content-Type", harness.TypeEventBatch + "; charset=utf-8"}},
		{"If-Match", string(note("m")), []string{"m"}, []string{"If-Match", `"9"`}},
		{"an idempotency key", string(note("k")), []string{"k"}, []string{"idempotency-key", "k1"}},
	} {
		first := int64(len(ids))
		ids = append(ids, c.ids...)
		var r harness.Receipt
		m := b.ask(t, &r, "201", "append", session, c.body, c.header...)
		if r.Session != session || r.FirstSeq != first || r.LastSeq != int64(len(ids)-1) || r.Duplicate || r.Commit == "" || len(r.Digest) != 64 {
			t.Errorf("%s: receipt %s", c.name, m.Data)
		}
		if want := fmt.Sprintf(`"%d"`, len(ids)); m.Header.Get("ETag") != want {
			t.Errorf("%s: ETag %s, want %s", c.name, m.Header.Get("ETag"), want)
		}
	}
	var again harness.Receipt
	b.ask(t, &again, "201", "append", session, string(note("k")), "Idempotency-Key", "k1")
	if !again.Duplicate || again.FirstSeq != int64(len(ids)-1) {
		t.Errorf("the same key again: %+v", again)
	}
	if err := matchesFold(t.Context(), s.projector, session, int64(len(ids)-1)); err != nil {
		t.Error(err)
	}
	events, err := s.projector.Events(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range events {
		if id, err := noteID(e); err != nil || id != ids[i] {
			t.Errorf("event %d is %s (%v), want %s", i, id, err, ids[i])
		}
	}
}

func serviceCreates(t *testing.T, s stack, b bus) {
	header := `{"version":3,"createdAt":1767225600000,"isSeeded":false,"delegationDepth":0,"x-rate":1.10}`
	var made struct {
		Session string
		Created bool
		Header  json.RawMessage
	}
	b.ask(t, &made, "201", "create", "nats-created", `{"header":`+header+`}`)
	if made.Session != "nats-created" || !made.Created || !bytes.Contains(made.Header, []byte("1.10")) {
		t.Errorf("created %+v %s", made, made.Header)
	}
	b.ask(t, &made, "200", "create", "nats-created", `{"id":"nats-created","header":`+header+`}`)
	if made.Created {
		t.Error("created again")
	}
	b.refused(t, http.StatusConflict, "session-exists", subjectOf("create", "nats-created"), `{"header":{"cwd":"/x"}}`)
	b.refused(t, http.StatusBadRequest, "bad-request", subjectOf("create", "nats-created"), `{"id":"another"}`)
	b.ask(t, &made, "201", "create", "nats-default", "")
	status, err := s.appender.Status(t.Context(), "nats-default")
	if err != nil || !bytes.Equal(status.Header, made.Header) {
		t.Errorf("header %s over HTTP (%v), %s when it was created", status.Header, err, made.Header)
	}
}

func serviceFences(t *testing.T, s stack, b bus) {
	const session = "nats-fenced"
	subject := subjectOf("append", session)
	var r receipt
	b.ask(t, &r, "201", "writer", session, `{"writer":"one"}`)
	if r.Epoch != 1 || r.Writer != "one" || r.FirstSeq != 0 {
		t.Errorf("answer %+v", r)
	}
	b.refused(t, http.StatusConflict, "fenced", subject, string(note("x")))
	b.ask(t, nil, "201", "append", session, string(note("a")), "palimpsest-writer-epoch", "1")
	b.ask(t, nil, "201", "append", session, `{"events":`+string(harness.Array(notes("b")))+`,"epoch":1}`)
	b.ask(t, &r, "201", "writer", session, `{"writer":"two","expectedSeq":3}`)
	if r.Epoch != 2 {
		t.Errorf("answer %+v", r)
	}
	b.refused(t, http.StatusConflict, "fenced", subject, string(note("x")), "Palimpsest-Writer-Epoch", "1")
	b.refused(t, http.StatusConflict, "seq-conflict", subjectOf("writer", session), `{"writer":"three"}`, "If-Match", `"3"`)
	next(t, s.appender, session, 4)
}

func serviceRepairs(t *testing.T, s stack, b bus) {
	const session = "nats-repaired"
	mustAppend(t, s.appender, session, toolTurn(1)[:5])
	var r receipt
	b.ask(t, &r, "201", "repair", session, "")
	if !r.Repaired || r.FirstSeq != 5 || r.LastSeq != 7 {
		t.Errorf("answer %+v", r)
	}
	r = receipt{}
	b.ask(t, &r, "200", "repair", session, "{}")
	if r.Repaired || r.Session != session {
		t.Errorf("the second answer %+v", r)
	}
	b.refused(t, http.StatusNotFound, "session-not-found", subjectOf("repair", "nobody"), "")
}

func serviceForks(t *testing.T, s stack, b bus) {
	mustAppend(t, s.appender, "nats-parent", toolTurn(1))
	var f forked
	b.ask(t, &f, "201", "fork", "nats-parent", `{"id":"nats child","at":7}`)
	if f.Session != "nats child" || f.Parent != "nats-parent" || f.At != 7 || f.LastSeq != 8 || !f.Created {
		t.Errorf("answer %+v", f)
	}
	b.ask(t, &f, "200", "fork", "nats-parent", `{"id":"nats child","at":7}`)
	if f.Created {
		t.Error("forked again")
	}
	p := b.refused(t, http.StatusConflict, "open-turn", subjectOf("fork", "nats-parent"), `{"id":"c","at":4}`)
	if p.Seq == nil || *p.Seq != 4 {
		t.Errorf("seq %s, want 4", deref(p.Seq))
	}
	b.refused(t, http.StatusNotFound, "session-not-found", subjectOf("fork", "nobody"), `{"id":"c"}`)
}

func serviceCompacts(t *testing.T, s stack, b bus) {
	const session = "nats-compacted"
	mustAppend(t, s.appender, session, toolTurn(1))
	b.refused(t, http.StatusUnprocessableEntity, "splits-tool-pair", subjectOf("compact", session), `{"startSeq":2,"endSeq":3,"summary":"s"}`)
	var r receipt
	b.ask(t, &r, "201", "prune", session, `{"seq":5,"expectedSeq":8}`)
	if r.FirstSeq != 8 || r.LastSeq != 8 {
		t.Errorf("answer %+v", r)
	}
	b.ask(t, &r, "201", "compact", session, `{"startSeq":2,"endSeq":8,"summary":"s"}`, "If-Match", `"9"`)
	if r.FirstSeq != 9 || r.LastSeq != 12 {
		t.Errorf("answer %+v", r)
	}
	if err := matchesFold(t.Context(), s.projector, session, 12); err != nil {
		t.Error(err)
	}
}

func serviceStatus(t *testing.T, s stack, b bus) {
	const session = "nats-status"
	mustAppend(t, s.appender, session, toolTurn(1)[:5])
	a, err := s.appender.Do(t.Context(), http.MethodGet, harness.SessionPath(session, ""), nil)
	if err != nil {
		t.Fatal(err)
	}
	m := b.ask(t, nil, "200", "status", session, "")
	if err := harness.SameJSON(m.Data, a.Body); err != nil {
		t.Errorf("over NATS %s, over HTTP %s: %v", m.Data, a.Body, err)
	}
	if got := m.Header.Get("ETag"); got != `"5"` {
		t.Errorf("ETag %s", got)
	}
}

// serviceProblems holds each error over NATS to the document that HTTP answers.
func serviceProblems(t *testing.T, s stack, b bus) {
	const session = "nats-problems"
	mustAppend(t, s.appender, session, notes("a", "b"))
	for _, c := range []struct {
		status             int
		code, op, id, body string
		header             []string
	}{
		{422, "rule-violation", "append", session, `[` + string(note("x")) + `,{"type":"acme/unheard-of","data":1}]`, nil},
		{400, "rule-violation", "append", session, `{"type":`, nil},
		{400, "bad-request", "append", session, `[]`, nil},
		{409, "seq-conflict", "append", session, string(note("x")), []string{"If-Match", `"7"`}},
		{415, "unsupported-media-type", "append", session, string(note("x")), []string{"Content-Type", "text/plain"}},
		{415, "unsupported-media-type", "append", session, string(note("x")), []string{"Content-Type", "application/json; charset=latin1"}},
		{415, "unsupported-media-type", "append", session, "\x1f\x8b\x08", []string{"Content-Encoding", "gzip"}},
		{400, "bad-request", "append", session, string(note("x")), []string{"If-Match", "7"}},
		{400, "bad-request", "append", session, string(note("x")), []string{"Palimpsest-Writer-Epoch", "x"}},
		{409, "fenced", "append", session, string(note("x")), []string{"Palimpsest-Writer-Epoch", "9"}},
		{400, "bad-request", "append", session, string(note("x")), []string{"Idempotency-Key", strings.Repeat("k", 256)}},
		{400, "bad-request", "append", session, cloudEvent("x")[1:], []string{"Content-Type", harness.TypeEvent}},
		{422, "rule-violation", "prune", session, `{"seq":77}`, nil},
		{422, "rule-violation", "compact", session, `{"startSeq":1,"endSeq":0,"summary":"s"}`, nil},
		{400, "bad-request", "compact", session, `{"startSeq":0,"endSeq":1,"summary":""}`, nil},
		{400, "bad-request", "compact", session, `{"startSeq":0,"endSeq":1,"summary":[]}`, nil},
		{400, "bad-request", "compact", session, `{"startSeq":0,"endSeq":1,"summary":" \n"}`, nil},
		{400, "bad-request", "compact", session, `{"startSeq":0,"endSeq":1,"summary":["x"]}`, nil},
		{400, "bad-request", "compact", session, `{"startSeq":0,"endSeq":1,"summary":[{}]}`, nil},
		{400, "bad-request", "compact", session, `{"startSeq":0,"endSeq":1,"summary":[{"type":"text","text":5}]}`, nil},
		{400, "bad-request", "compact", session, `{"startSeq":0,"endSeq":1,"summary":[{"type":"text"}]}`, nil},
		{400, "bad-request", "compact", session, `{"startSeq":0,"endSeq":1,"summary":[{"type":"text","text":""},{"type":"text","text":" "}]}`, nil},
		{400, "bad-request", "compact", session, `{"startSeq":0,"endSeq":1,"summary":7}`, nil},
		{400, "bad-request", "compact", session, `{"startSeq":0,"endSeq":1}`, nil},
		{400, "bad-request", "writer", session, `{"writer":""}`, nil},
		{400, "bad-request", "writer", session, `{"writer":"w","epoch":1}`, nil},
		{400, "bad-request", "fork", session, `{"id":"` + session + `"}`, nil},
		{404, "session-not-found", "status", "nobody", ``, nil},
	} {
		if c.code == "bad-request" && strings.HasPrefix(c.body, `"specversion"`) {
			c.code = "rule-violation" // no JSON at all
		}
		want := b.refused(t, c.status, c.code, subjectOf(c.op, c.id), c.body, c.header...)
		method, call, options := http.MethodPost, "/"+c.op, []harness.Option{}
		switch c.op {
		case "append":
			call = "/events"
		case "status":
			method, call = http.MethodGet, ""
		}
		for i := 0; i < len(c.header); i += 2 {
			options = append(options, harness.With(c.header[i], c.header[i+1]))
		}
		a, err := s.appender.Do(t.Context(), method, harness.SessionPath(c.id, call), []byte(c.body), options...)
		if err != nil {
			t.Fatal(err)
		}
		got, err := a.Problem()
		if err != nil {
			t.Fatal(err)
		}
		g, _ := json.Marshal(got)
		w, _ := json.Marshal(want)
		if !bytes.Equal(g, w) {
			t.Errorf("%s %s:\n HTTP %s\n NATS %s", c.op, c.body, g, w)
		}
	}
	for _, token := range []string{"a=2fb", "a=", "=41", "=zz", "caf\xc3\xa9", "=2E", "=2E=2E"} {
		b.refused(t, http.StatusBadRequest, "session-id-malformed", "palimpsest.append."+token, string(note("x")))
	}
	next(t, s.appender, session, 2)
}

func serviceAndHTTPAreOne(t *testing.T, s stack, b bus) {
	const session = "nats-and-http"
	over := mustAppend(t, s.appender, session, notes("a", "b"), harness.ExpectedSeq(0))
	var r harness.Receipt
	b.ask(t, &r, "201", "append", session, string(note("a"))+"\n"+string(note("b")), "Content-Type", harness.TypeNDJSON, "If-Match", `"0"`)
	if !r.Duplicate || r.Commit != over.Commit || r.Digest != over.Digest {
		t.Errorf("over NATS %+v, over HTTP %+v", r, over)
	}
	b.ask(t, &r, "201", "append", session, string(note("c")), "Idempotency-Key", "one and the same")
	if again := mustAppend(t, s.appender, session, notes("c"), key("one and the same")); !again.Duplicate || again.Commit != r.Commit {
		t.Errorf("over HTTP %+v, over NATS %+v", again, r)
	}
	next(t, s.appender, session, 3)
}

func serviceTokens(t *testing.T, s stack, b bus) {
	for _, session := range []string{"a.b", "*", ">", "a/b", "a b", "=41", "100%", "東京 🙂", "...", "-_-", strings.Repeat("é", 100)} {
		var r harness.Receipt
		b.ask(t, &r, "201", "append", session, string(note("a")))
		if r.Session != session {
			t.Errorf("%q: receipt for %q", session, r.Session)
		}
		next(t, s.appender, session, 1)
		b.ask(t, nil, "200", "status", session, "")
	}
	b.refused(t, http.StatusBadRequest, "session-id-malformed", subjectOf("append", strings.Repeat("é", 101)), string(note("x")))
}

// serviceUnderLoad has many callers at once: each gets the answer to its own request.
func serviceUnderLoad(t *testing.T, s stack, b bus) {
	const callers, each, session = 32, 20, "nats-load"
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			for n := range each {
				id := fmt.Sprintf("w%d-%d", i, n)
				m, err := b.request(t.Context(), subjectOf("append", session), note(id), "Idempotency-Key", id)
				if err != nil || m.Header.Get("Palimpsest-Status") != "201" {
					t.Errorf("%s: %v %v", id, m, err)
					return
				}
				var r harness.Receipt
				if err := json.Unmarshal(m.Data, &r); err != nil || r.FirstSeq != r.LastSeq || r.Duplicate {
					t.Errorf("%s: %s, %v", id, m.Data, err)
				}
				if n == each-1 { // the same again finds the same place
					again, err := b.request(t.Context(), subjectOf("append", session), note(id), "Idempotency-Key", id)
					if err != nil {
						t.Error(err)
						return
					}
					var a harness.Receipt
					if err := json.Unmarshal(again.Data, &a); err != nil || !a.Duplicate || a.FirstSeq != r.FirstSeq || a.Commit != r.Commit || a.Digest != r.Digest {
						t.Errorf("%s: first %+v, again %+v", id, r, a)
					}
				}
			}
		})
	}
	wg.Wait()
	next(t, s.appender, session, callers*each)
}

// endpoint is what a service says of one of its endpoints.
type endpoint struct {
	Name       string `json:"name"`
	Subject    string `json:"subject"`
	QueueGroup string `json:"queue_group"`
	Requests   int    `json:"num_requests"`
	Errors     int    `json:"num_errors"`
	Processing int64  `json:"processing_time"`
	LastError  string `json:"last_error"`
}

// instance is what a service says of itself.
type instance struct {
	Name      string     `json:"name"`
	ID        string     `json:"id"`
	Version   string     `json:"version"`
	Type      string     `json:"type"`
	Endpoints []endpoint `json:"endpoints"`
}

// There are several of a name, each of which works on one request at a time: they are added up.
func (i instance) endpoint(name string) endpoint {
	var sum endpoint
	for _, e := range i.Endpoints {
		if e.Name != name {
			continue
		}
		e.Requests += sum.Requests
		e.Errors += sum.Errors
		e.Processing += sum.Processing
		e.LastError = cmp.Or(e.LastError, sum.LastError)
		sum = e
	}
	return sum
}

// discover asks all services and returns the answers of as many as there should be.
func (b bus) discover(t *testing.T, subject string, count int) []instance {
	t.Helper()
	inbox := nats.NewInbox()
	sub, err := b.nc.SubscribeSync(inbox)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := b.nc.PublishRequest(subject, inbox, nil); err != nil {
		t.Fatal(err)
	}
	var out []instance
	for range count {
		m, err := sub.NextMsg(askLimit)
		if err != nil {
			t.Fatalf("%s: %d of %d answers: %v", subject, len(out), count, err)
		}
		var i instance
		if err := json.Unmarshal(m.Data, &i); err != nil {
			t.Fatalf("%s: %s: %v", subject, m.Data, err)
		}
		out = append(out, i)
	}
	return out
}

const serviceName = "palimpsest-appender"

var serviceOps = []string{"append", "compact", "create", "fork", "prune", "repair", "status", "writer"}

func TestServicesAreFound(t *testing.T) {
	t.Parallel()
	appender := harness.Appender{}.Start(t)
	b := openBus(t, appender.NATS)
	for _, verb := range []string{"PING", "INFO", "STATS"} {
		for _, subject := range []string{"$SRV." + verb, "$SRV." + verb + "." + serviceName} {
			i := b.discover(t, subject, 1)[0]
			if i.Name != serviceName || i.Version == "" || i.Type != "io.nats.micro.v1."+strings.ToLower(verb)+"_response" {
				t.Errorf("%s: %+v", subject, i)
			}
			if by := b.discover(t, subject[:len("$SRV.")+len(verb)]+"."+serviceName+"."+i.ID, 1)[0]; by.ID != i.ID {
				t.Errorf("%s by id: %+v", verb, by)
			}
		}
	}
	info := b.discover(t, "$SRV.INFO", 1)[0]
	var names []string
	for _, e := range info.Endpoints {
		names = append(names, e.Name)
		if e.Subject != "palimpsest."+e.Name+".*" || e.QueueGroup != serviceName {
			t.Errorf("endpoint %+v", e)
		}
	}
	slices.Sort(names)
	if names = slices.Compact(names); !slices.Equal(names, serviceOps) {
		t.Errorf("endpoints %q, want %q", names, serviceOps)
	}

	b.ask(t, nil, "201", "append", "counted", string(note("a")))
	b.ask(t, nil, "201", "append", "counted", string(note("b")))
	b.refused(t, http.StatusConflict, "seq-conflict", subjectOf("append", "counted"), string(note("c")), "If-Match", `"0"`)
	harness.Until(t, askLimit, "the requests are counted", func() error {
		stats := b.discover(t, "$SRV.STATS."+serviceName, 1)[0]
		if e := stats.endpoint("append"); e.Requests != 3 {
			return fmt.Errorf("%+v", e)
		}
		return nil
	})
}

// A refused request is an error in the statistics, and a request's time is that of its work.
// Many at once, so that a race detector sees whether the counting is safe.
func TestServiceStatisticsTellTheTruth(t *testing.T) {
	t.Parallel()
	appender := harness.Appender{}.Start(t)
	b := openBus(t, appender.NATS)
	const callers, good, bad = 16, 5, 50
	var worked atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			for n := range good + bad {
				body, code := string(note(fmt.Sprint(n))), ""
				if n >= good {
					body, code = "[]", "400"
				}
				begun := time.Now()
				m, err := b.request(t.Context(), subjectOf("append", fmt.Sprintf("measured-%d", i)), []byte(body))
				if err != nil || m.Header.Get("Nats-Service-Error-Code") != code {
					t.Errorf("%+v %v, want code %q", m, err, code)
				}
				worked.Add(int64(time.Since(begun)))
			}
		})
	}
	wg.Wait()
	harness.Until(t, 10*time.Second, "the statistics", func() error {
		e := b.discover(t, "$SRV.STATS."+serviceName, 1)[0].endpoint("append")
		if e.Requests != callers*(good+bad) || e.Errors != callers*bad || !strings.Contains(e.LastError, "400") || e.Processing < worked.Load()/100 {
			return fmt.Errorf("%+v; %d of %d requests were refused, all took %v", e, callers*bad, callers*(good+bad), time.Duration(worked.Load()))
		}
		return nil
	})
}

// Two appenders share the requests, and when one goes the other has them all.
func TestServicesShareTheRequests(t *testing.T) {
	t.Parallel()
	url := harness.StandaloneNATS(t)
	first := harness.Appender{NATS: url}.Start(t)
	second := harness.Appender{NATS: url}.Start(t)
	harness.Projector{NATS: url}.Start(t)
	b := openBus(t, url)
	const sessions, rounds = 10, 20
	write := func(round int) {
		t.Helper()
		var wg sync.WaitGroup
		for i := range sessions {
			wg.Go(func() {
				session := fmt.Sprintf("shared-%d", i)
				m, err := b.request(t.Context(), subjectOf("append", session), note(fmt.Sprint(round)), "If-Match", fmt.Sprintf(`"%d"`, round))
				if err != nil || m.Header.Get("Palimpsest-Status") != "201" {
					t.Errorf("round %d of %s: %+v %v", round, session, m, err)
				}
			})
		}
		wg.Wait()
	}
	for round := range rounds {
		write(round)
	}
	harness.Until(t, askLimit, "both have answered, and all in all once each", func() error {
		all := 0
		for _, i := range b.discover(t, "$SRV.STATS."+serviceName, 2) {
			n := i.endpoint("append").Requests
			if all += n; n < sessions*rounds/10 {
				return fmt.Errorf("one of two answered %d of %d requests", n, sessions*rounds)
			}
		}
		if all != sessions*rounds {
			return fmt.Errorf("%d requests were answered, %d asked", all, sessions*rounds)
		}
		return nil
	})
	both := b.discover(t, "$SRV.PING."+serviceName, 2)
	first.Kill()
	harness.Until(t, askLimit, "the server knows that one is gone", func() error {
		for _, i := range both {
			if _, err := b.nc.Request("$SRV.PING."+serviceName+"."+i.ID, nil, time.Second); errors.Is(err, nats.ErrNoResponders) {
				return nil
			}
		}
		return errors.New("both are there")
	})
	for round := rounds; round < rounds+5; round++ {
		write(round)
	}
	second.Term(t)
	if _, err := b.nc.Request(subjectOf("status", "shared-0"), nil, askLimit); !errors.Is(err, nats.ErrNoResponders) {
		t.Errorf("asked nobody: %v", err)
	}
	verifyAll(t, url)
}

// An appender that is told to stop answers the requests that it was sent.
func TestServicesAnswerWhatTheyTookBeforeTheyStop(t *testing.T) {
	t.Parallel()
	url := harness.StandaloneNATS(t)
	stopped := harness.Appender{NATS: url}.Start(t)
	harness.Appender{NATS: url}.Start(t)
	harness.Projector{NATS: url}.Start(t)
	b := openBus(t, url)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var count, away atomic.Int64
	var wg sync.WaitGroup
	const callers = 16
	for i := range callers {
		wg.Go(func() {
			session := fmt.Sprintf("drained-%d", i)
			for n := 0; ctx.Err() == nil; n++ {
				m, err := b.request(t.Context(), subjectOf("append", session), note(fmt.Sprint(n)), "If-Match", fmt.Sprintf(`"%d"`, n))
				switch {
				case err != nil:
					t.Errorf("request %d of %s was not answered: %v", n, session, err)
					return
				case m.Header.Get("Nats-Service-Error-Code") == "503": // told to ask another
					away.Add(1)
					n--
				case m.Header.Get("Palimpsest-Status") != "201":
					t.Errorf("request %d of %s: %v %s", n, session, m.Header, m.Data)
					return
				}
				count.Add(1)
			}
		})
	}
	reach := func(n int64) {
		harness.Until(t, askLimit, fmt.Sprintf("%d answers", n), func() error {
			if got := count.Load(); got < n && !t.Failed() {
				return fmt.Errorf("%d", got)
			}
			return nil
		})
	}
	reach(200)
	stopped.Term(t)
	reach(count.Load() + 200)
	cancel()
	wg.Wait()
	t.Logf("%d answers, %d of them 503", count.Load(), away.Load())
	verifyAll(t, url)
}

// Whoever a stop cuts off is told to ask another, not that the program is broken.
func TestStopAnswersWhatItCutsOff(t *testing.T) {
	t.Parallel()
	url := harness.StandaloneNATS(t)
	log := harness.OpenLog(t, url)
	helper := harness.Appender{NATS: url}.Start(t).Client()
	const parent, count = "cut-by-stop", 4000
	lines := harness.NewScript(59, 1500).Next(count)
	end := lastTurnEnd(lines)
	for chunk := range slices.Chunk(lines, 400) {
		mustAppend(t, helper, parent, chunk)
	}
	type outcome struct {
		answer harness.Answer
		err    error
	}
	send := func(c *harness.Client, method, path, body string) <-chan outcome {
		answered := make(chan outcome, 1)
		go func() {
			a, err := c.Do(t.Context(), method, path, []byte(body))
			answered <- outcome{a, err}
		}()
		return answered
	}
	told := func(what string, o outcome) {
		t.Helper()
		if o.err == nil && o.answer.Status/100 != 2 && (o.answer.Status != http.StatusServiceUnavailable || o.answer.Header.Get("Retry-After") == "") {
			t.Errorf("%s: status %d, Retry-After %q, want 503 with one: %s", what, o.answer.Status, o.answer.Header.Get("Retry-After"), o.answer.Body)
		}
	}

	appender := harness.Appender{NATS: url}.Start(t)
	forking := send(appender.Client(), http.MethodPost, harness.SessionPath(parent, "/fork"), fmt.Sprintf(`{"id":"cut-child","at":%d}`, end))
	harness.Until(t, askLimit, "the fork has begun", func() error {
		if n, err := log.Count(t.Context(), "cut-child"); err != nil || n == 0 {
			return fmt.Errorf("%d commits (%v)", n, err)
		}
		return nil
	})
	appender.Term(t)
	told("a fork", <-forking)

	projector := harness.Projector{NATS: url}.Start(t)
	c := projector.Client()
	if _, err := c.Messages(t.Context(), parent, harness.MinSeq(count-1)); err != nil {
		t.Fatal(err)
	}
	waiting := send(c, http.MethodGet, harness.SessionPath(parent, "/messages?minSeq=1000000&timeout=1m"), "")
	for range 20 { // answers to others, so that it surely waits
		if _, err := c.Status(t.Context(), parent); err != nil {
			t.Fatal(err)
		}
	}
	projector.Term(t)
	told("a read that waits", <-waiting)
}

// lastTurnEnd is the seq of the last turn/end.
func lastTurnEnd(lines []json.RawMessage) int {
	end := 0
	for i, line := range lines {
		if e, err := harness.ParseEvent(line); err == nil && e.Type == "turn/end" {
			end = i
		}
	}
	return end
}

// TestWriter walks through the writer fence over HTTP.
func TestWriter(t *testing.T) {
	t.Parallel()
	s := startStack(t, "off")
	for name, run := range map[string]func(*testing.T, stack){
		"a stale epoch is refused":          staleEpoch,
		"epoch and expectedSeq":             epochAndExpectedSeq,
		"a retry of a writer replaced":      retryOfReplacedWriter,
		"what is no writer":                 malformedWriters,
		"repair fences first":               repairFencesFirst,
		"a fork has no writer":              forkHasNoWriter,
		"one of many takers has the latest": manyTakers,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, s)
		})
	}
}

func takeWriter(t *testing.T, c *harness.Client, session, name string, want int64, options ...harness.Option) receipt {
	t.Helper()
	var r receipt
	post(t, c, &r, http.StatusCreated, session, "/writer", fmt.Sprintf(`{"writer":%q}`, name), options...)
	if r.Epoch != want || r.Writer != name || r.FirstSeq != r.LastSeq || r.Session != session || r.Commit == "" {
		t.Fatalf("writer %s of %q: %+v, want epoch %d", name, session, r, want)
	}
	return r
}

func staleEpoch(t *testing.T, s stack) {
	const session = "stale"
	mustAppend(t, s.appender, session, notes("before"))
	takeWriter(t, s.appender, session, "one", 1)
	p := refusedPost(t, s.appender, http.StatusConflict, "fenced", session, "/events", string(note("x")))
	if p.Epoch == nil || *p.Epoch != 1 || p.Session != session {
		t.Errorf("problem %+v", p)
	}
	mustAppend(t, s.appender, session, notes("a"), epoch(1))
	if _, err := s.appender.Append(t.Context(), session, []byte(`{"events":`+string(harness.Array(notes("b")))+`,"epoch":1}`)); err != nil {
		t.Error(err)
	}
	refusedPost(t, s.appender, http.StatusBadRequest, "bad-request", session, "/events", `{"events":`+string(harness.Array(notes("x")))+`,"epoch":1}`, epoch(2))
	takeWriter(t, s.appender, session, "two", 2)
	for _, stale := range []int64{0, 1, 3} {
		p := refusedPost(t, s.appender, http.StatusConflict, "fenced", session, "/events", string(note("x")), epoch(stale))
		if p.Epoch == nil || *p.Epoch != 2 {
			t.Errorf("epoch %d: problem %+v", stale, p)
		}
	}
	// The writer is in the log, as an ignorable event.
	if _, err := s.projector.Messages(t.Context(), session, harness.MinSeq(4)); err != nil {
		t.Fatal(err)
	}
	events, err := s.projector.Events(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	if e := events[4]; e.Type != "session/writer" || !e.Ignorable || harness.SameJSON(e.Data, []byte(`{"writer":"two","epoch":2}`)) != nil {
		t.Errorf("event 4: %s", e.Line)
	}
	for _, program := range []*harness.Client{s.appender, s.projector} {
		var status struct{ Writer struct{ Epoch int64 } }
		a, err := program.Do(t.Context(), http.MethodGet, harness.SessionPath(session, ""), nil)
		if err != nil || json.Unmarshal(a.Body, &status) != nil || status.Writer.Epoch != 2 {
			t.Errorf("status %s (%v)", a.Body, err)
		}
	}
	// By hand it cannot be appended.
	for _, event := range []string{`{"type":"session/writer","data":{"writer":"me","epoch":3}}`, `{"type":"session/writer","ignorable":true,"data":{"writer":"me","epoch":3}}`} {
		refusedPost(t, s.appender, http.StatusConflict, "fenced", session, "/events", event, epoch(2))
	}
	next(t, s.appender, session, 5)
}

func epochAndExpectedSeq(t *testing.T, s stack) {
	const session = "epoch-and-seq"
	takeWriter(t, s.appender, session, "one", 1, harness.ExpectedSeq(0))
	mustAppend(t, s.appender, session, notes("a"), epoch(1), harness.ExpectedSeq(1))
	p := refusedPost(t, s.appender, http.StatusConflict, "seq-conflict", session, "/events", string(note("x")), epoch(1), harness.ExpectedSeq(1))
	if p.ActualSeq == nil || *p.ActualSeq != 2 {
		t.Errorf("problem %+v", p)
	}
	// Who knows the next seq needs no epoch, and cannot have overlooked anything.
	mustAppend(t, s.appender, session, notes("b"), harness.ExpectedSeq(2))
	takeWriter(t, s.appender, session, "two", 2, harness.ExpectedSeq(3))
	refusedPost(t, s.appender, http.StatusConflict, "fenced", session, "/events", string(note("x")), epoch(1), harness.ExpectedSeq(4))
	refusedPost(t, s.appender, http.StatusConflict, "seq-conflict", session, "/writer", `{"writer":"three","expectedSeq":3}`)
	refusedPost(t, s.appender, http.StatusConflict, "seq-conflict", session, "/writer", `{"writer":"three"}`, harness.With("If-Match", `"5"`))
	mustAppend(t, s.appender, session, notes("c"), epoch(2), harness.ExpectedSeq(4))
	next(t, s.appender, session, 5)
}

func retryOfReplacedWriter(t *testing.T, s stack) {
	const session = "replaced"
	takeWriter(t, s.appender, session, "one", 1)
	first := mustAppend(t, s.appender, session, notes("a", "b"), epoch(1), harness.ExpectedSeq(1))
	keyed := mustAppend(t, s.appender, session, notes("c"), epoch(1), key("k"))
	takeWriter(t, s.appender, session, "two", 2)
	mustAppend(t, s.appender, session, notes("d"), epoch(2))
	// What it had stored it still hears of.
	again := mustAppend(t, s.appender, session, notes("a", "b"), epoch(1), harness.ExpectedSeq(1))
	if !again.Duplicate || again.Commit != first.Commit || again.LastSeq != first.LastSeq {
		t.Errorf("first %+v, again %+v", first, again)
	}
	if again := mustAppend(t, s.appender, session, notes("c"), epoch(1), key("k")); !again.Duplicate || again.Commit != keyed.Commit {
		t.Errorf("first %+v, again %+v", keyed, again)
	}
	// What it had not is refused, and equal events of another writer are not its own.
	refusedPost(t, s.appender, http.StatusConflict, "fenced", session, "/events", string(harness.Array(notes("a", "x"))), epoch(1), harness.ExpectedSeq(1))
	refusedPost(t, s.appender, http.StatusConflict, "fenced", session, "/events", string(note("d")), epoch(1), harness.ExpectedSeq(5))
	next(t, s.appender, session, 6)
}

func malformedWriters(t *testing.T, s stack) {
	const session = "no-writers"
	for _, body := range []string{``, `{}`, `{"writer":""}`, `{"writer":1}`, `{"writer":null}`, `{"writer":"w","name":"x"}`, `{"writer":"w","expectedSeq":-1}`, `[]`, `"w"`, `{"writer":"` + strings.Repeat("w", 201) + `"}`} {
		refusedPost(t, s.appender, http.StatusBadRequest, "bad-request", session, "/writer", body)
	}
	_, err := s.appender.Status(t.Context(), session)
	refused(t, err, http.StatusNotFound, "session-not-found")
}

func repairFencesFirst(t *testing.T, s stack) {
	const session = "repair-fences"
	takeWriter(t, s.appender, session, "crashed", 1)
	mustAppend(t, s.appender, session, toolTurn(1)[:5], epoch(1))
	var r receipt
	post(t, s.appender, &r, http.StatusCreated, session, "/repair", "")
	if r.FirstSeq != 6 || r.LastSeq != 9 || !r.Repaired {
		t.Errorf("answer %+v", r)
	}
	refusedPost(t, s.appender, http.StatusConflict, "fenced", session, "/events", string(note("late")), epoch(1))
	refusedPost(t, s.appender, http.StatusConflict, "fenced", session, "/events", string(note("late")), epoch(1), harness.ExpectedSeq(10))
	// A session that is whole is left to its writer.
	post(t, s.appender, &r, http.StatusOK, session, "/repair", "")
	takeWriter(t, s.appender, session, "new", 3)
	post(t, s.appender, &r, http.StatusOK, session, "/repair", "")
	mustAppend(t, s.appender, session, notes("a"), epoch(3))
	if err := matchesFold(t.Context(), s.projector, session, 11); err != nil {
		t.Error(err)
	}
}

func forkHasNoWriter(t *testing.T, s stack) {
	takeWriter(t, s.appender, "fenced-parent", "one", 1)
	mustAppend(t, s.appender, "fenced-parent", notes("a"), epoch(1))
	post(t, s.appender, nil, http.StatusCreated, "fenced-parent", "/fork", `{"id":"free-child"}`)
	mustAppend(t, s.appender, "free-child", notes("b"))
	refusedPost(t, s.appender, http.StatusConflict, "fenced", "free-child", "/events", string(note("x")), epoch(1))
	takeWriter(t, s.appender, "free-child", "two", 1)
}

func manyTakers(t *testing.T, s stack) {
	const session, takers = "taken", 12
	other := harness.Appender{NATS: s.nats}.Start(t).Client()
	var wg sync.WaitGroup
	got := make([]receipt, takers)
	for i := range takers {
		c := []*harness.Client{s.appender, other}[i%2]
		wg.Go(func() {
			a, err := c.Do(t.Context(), http.MethodPost, harness.SessionPath(session, "/writer"), fmt.Appendf(nil, `{"writer":"w%d"}`, i))
			if err != nil || a.Status != http.StatusCreated || json.Unmarshal(a.Body, &got[i]) != nil {
				t.Errorf("taker %d: %d %s %v", i, a.Status, a.Body, err)
			}
		})
	}
	wg.Wait()
	slices.SortFunc(got, func(a, b receipt) int { return int(a.Epoch - b.Epoch) })
	for i, r := range got {
		if r.Epoch != int64(i+1) || r.FirstSeq != int64(i) {
			t.Errorf("epoch %d at seq %d, want %d at %d", r.Epoch, r.FirstSeq, i+1, i)
		}
		_, err := other.Append(t.Context(), session, note("x"), epoch(r.Epoch), harness.ExpectedSeq(takers))
		if last := i == takers-1; last != (err == nil) {
			t.Errorf("epoch %d of %d: %v", r.Epoch, takers, err)
		}
	}
}

// A fence, a key and a retry with expectedSeq hold over a crash of the appender, and before
// another one that never saw them.
func TestWhatAnAppenderKnowsIsInTheLog(t *testing.T) {
	t.Parallel()
	options := harness.Appender{Data: t.TempDir()}
	appender := options.Start(t)
	c := appender.Client()
	ordered := mustAppend(t, c, "ordered", notes("a", "b"), harness.ExpectedSeq(0))
	mustAppend(t, c, "ordered", notes("c"))
	keyed := mustAppend(t, c, "keyed", notes("a", "b"), key("k"))
	mustAppend(t, c, "keyed", notes("c"))
	both := mustAppend(t, c, "both", notes("a"), key("k"), harness.ExpectedSeq(0))
	mustAppend(t, c, "both", notes("b"))
	takeWriter(t, c, "fenced", "one", 1)
	takeWriter(t, c, "fenced", "two", 2)
	fenced := mustAppend(t, c, "fenced", notes("a"), epoch(2), harness.ExpectedSeq(2))

	holds := func(c *harness.Client) {
		t.Helper()
		same := func(what string, got, want harness.Receipt) {
			t.Helper()
			want.Duplicate = true
			if got != want {
				t.Errorf("%s: again %+v, at first %+v", what, got, want)
			}
		}
		same("expectedSeq", mustAppend(t, c, "ordered", notes("a", "b"), harness.ExpectedSeq(0)), ordered)
		refusedPost(t, c, http.StatusConflict, "seq-conflict", "ordered", "/events", string(harness.Array(notes("a", "x"))), harness.ExpectedSeq(0))
		refusedPost(t, c, http.StatusConflict, "seq-conflict", "ordered", "/events", string(harness.Array(notes("a", "b", "c", "d"))), harness.ExpectedSeq(0))
		same("key", mustAppend(t, c, "keyed", notes("a", "b"), key("k")), keyed)
		for _, others := range [][]json.RawMessage{notes("a"), notes("a", "x"), notes("b", "a"), notes("a", "b", "c")} {
			p := refusedPost(t, c, http.StatusUnprocessableEntity, "key-reused", "keyed", "/events", string(harness.Array(others)), key("k"))
			if p.Seq == nil || *p.Seq != 0 {
				t.Errorf("problem %+v", p)
			}
		}
		same("key and expectedSeq", mustAppend(t, c, "both", notes("a"), key("k"), harness.ExpectedSeq(0)), both)
		same("expectedSeq alone, later", mustAppend(t, c, "both", notes("a"), harness.ExpectedSeq(0)), both)
		refusedPost(t, c, http.StatusConflict, "seq-conflict", "both", "/events", string(note("a")), key("another"), harness.ExpectedSeq(0))
		refusedPost(t, c, http.StatusUnprocessableEntity, "key-reused", "both", "/events", string(note("x")), key("k"), harness.ExpectedSeq(0))
		same("epoch", mustAppend(t, c, "fenced", notes("a"), epoch(2), harness.ExpectedSeq(2)), fenced)
		refusedPost(t, c, http.StatusConflict, "fenced", "fenced", "/events", string(note("x")))
		refusedPost(t, c, http.StatusConflict, "fenced", "fenced", "/events", string(note("x")), epoch(1))
	}
	holds(c)
	holds(harness.Appender{NATS: appender.NATS}.Start(t).Client())
	options.NATSListen = harness.HostPort(appender.NATS)
	appender.Kill()
	appender = options.Start(t)
	holds(appender.Client())
	// A key is its session's own.
	if r := mustAppend(t, appender.Client(), "another", notes("x"), key("k")); r.Duplicate {
		t.Errorf("the key of another session: %+v", r)
	}
	for session, want := range map[string]int64{"ordered": 3, "keyed": 3, "both": 2, "fenced": 3} {
		next(t, appender.Client(), session, want)
	}
	for _, k := range []string{strings.Repeat("k", 256), "caf\u00e9", "tab\there"} {
		refusedPost(t, appender.Client(), http.StatusBadRequest, "bad-request", "keyed", "/events", string(note("x")), key(k))
	}
	harness.Projector{NATS: appender.NATS}.Start(t)
	verifyAll(t, appender.NATS)
}

// Of many requests with one key, to two appenders at once, one is stored, and all hear where.
func TestOneKeyAtOnce(t *testing.T) {
	t.Parallel()
	url := harness.StandaloneNATS(t)
	clients := []*harness.Client{harness.Appender{NATS: url}.Start(t).Client(), harness.Appender{NATS: url}.Start(t).Client()}
	const rounds, callers, session = 10, 12, "at-once"
	for round := range int64(rounds) {
		got := make([]harness.Receipt, callers)
		var wg sync.WaitGroup
		for i := range callers {
			wg.Go(func() {
				r, err := clients[i%2].Append(t.Context(), session, note(fmt.Sprint(round)), key(fmt.Sprint(round)))
				if err != nil {
					t.Error(err)
				}
				got[i] = r
			})
		}
		wg.Wait()
		stored := 0
		for _, r := range got {
			if !r.Duplicate {
				stored++
			}
			if r.FirstSeq != round || r.Commit != got[0].Commit || r.Digest != got[0].Digest {
				t.Errorf("round %d: %+v and %+v", round, r, got[0])
			}
		}
		if stored != 1 {
			t.Errorf("round %d: %d callers were told that theirs is the original", round, stored)
		}
	}
	next(t, clients[0], session, rounds)
}

// TestFork walks through forks over HTTP.
func TestFork(t *testing.T) {
	t.Parallel()
	s := startStack(t, "off")
	for name, run := range map[string]func(*testing.T, stack){
		"at every legal seq, byte for byte": forksAtEverySeq,
		"a fork of a fork":                  forkOfAFork,
		"the same request again":            sameForkAgain,
		"a large parent":                    forkOfALargeParent,
		"the header":                        forkHeaders,
		"what is no fork":                   malformedForks,
		"many at once":                      oneForkAtOnce,
		"format 4":                          forkOfFormat4,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, s)
		})
	}
}

// rawMessages are a session's messages as they come over the wire.
func rawMessages(t *testing.T, s stack, session string, seq int64) []byte {
	t.Helper()
	m, err := s.projector.Messages(t.Context(), session, harness.MinSeq(seq))
	if err != nil {
		t.Fatal(err)
	}
	if m.Seq != seq {
		t.Fatalf("messages of %q as of seq %d, want %d", session, m.Seq, seq)
	}
	return harness.Array(m.Messages)
}

// children lists the sessions that name a parent.
func children(t *testing.T, s stack, parent string) []string {
	t.Helper()
	var out []string
	options := []harness.Option{harness.Query("parent", parent), harness.Query("limit", "3")}
	for {
		page, err := s.projector.Sessions(t.Context(), options...)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page.Sessions {
			out = append(out, e.Session)
		}
		if page.Cursor == "" {
			return out
		}
		options = append(options, harness.Query("cursor", page.Cursor))
	}
}

func forksAtEverySeq(t *testing.T, s stack) {
	const parent, count = "trunk", 64
	lines := harness.NewScript(41, 20).Next(count)
	asOf := make([][]byte, count)
	open := map[int]bool{}
	turn := false
	for i, line := range lines {
		mustAppend(t, s.appender, parent, []json.RawMessage{line})
		asOf[i] = rawMessages(t, s, parent, int64(i))
		e, err := harness.ParseEvent(line)
		if err != nil {
			t.Fatal(err)
		}
		switch e.Type {
		case "turn/start":
			turn = true
		case "turn/end":
			turn = false
		}
		open[i] = turn
	}
	var want []string
	legal := 0
	for i := range count {
		child := fmt.Sprintf("trunk-%02d", i)
		body := fmt.Sprintf(`{"id":%q,"at":%d}`, child, i)
		if open[i] {
			if p := refusedPost(t, s.appender, http.StatusConflict, "open-turn", parent, "/fork", body); p.Seq == nil || *p.Seq != int64(i) {
				t.Errorf("at %d: problem %+v", i, p)
			}
			continue
		}
		legal++
		want = append(want, child)
		var f forked
		post(t, s.appender, &f, http.StatusCreated, parent, "/fork", body)
		if f.Session != child || f.Parent != parent || f.At != int64(i) || f.LastSeq != int64(i)+1 || !f.Created {
			t.Errorf("at %d: %+v", i, f)
		}
		if got := rawMessages(t, s, child, int64(i)+1); !bytes.Equal(got, asOf[i]) {
			t.Errorf("at %d: messages\n%s\nthe parent had\n%s", i, got, asOf[i])
		}
		commits, err := harness.OpenLog(t, s.nats).Commits(t.Context(), child)
		if err != nil {
			t.Fatal(err)
		}
		stored, err := harness.CheckChain(child, f.Header, commits)
		if err != nil {
			t.Errorf("at %d: %v", i, err)
			continue
		}
		for seq := range i + 1 {
			if !bytes.Equal(stored[seq], lines[seq]) {
				t.Errorf("at %d: line %d is %s, the parent's %s", i, seq, stored[seq], lines[seq])
			}
		}
		if e, err := harness.ParseEvent(stored[i+1]); err != nil || e.Type != "session/end-seed" || harness.SameJSON(e.Data, []byte(`{"inherited":true}`)) != nil {
			t.Errorf("at %d: the last event is %s", i, stored[i+1])
		}
	}
	if legal < 3 {
		t.Errorf("%d legal places only", legal)
	}
	if got := children(t, s, parent); !slices.Equal(got, want) {
		t.Errorf("children %q, want %q", got, want)
	}
	if got := rawMessages(t, s, parent, count-1); !bytes.Equal(got, asOf[count-1]) {
		t.Error("the parent has changed")
	}
}

func forkOfAFork(t *testing.T, s stack) {
	mustAppend(t, s.appender, "grand", toolTurn(1))
	post(t, s.appender, nil, http.StatusCreated, "grand", "/fork", `{"id":"parent"}`)
	mustAppend(t, s.appender, "parent", toolTurn(2)) // 9..16
	want := rawMessages(t, s, "parent", 16)
	var f forked
	post(t, s.appender, &f, http.StatusCreated, "parent", "/fork", `{"id":"child"}`)
	if f.Parent != "parent" || f.At != 16 {
		t.Errorf("answer %+v", f)
	}
	if got := rawMessages(t, s, "child", 17); !bytes.Equal(got, want) {
		t.Errorf("messages\n%s\nwant\n%s", got, want)
	}
	// Below the parent's own fork, too: what it inherited.
	post(t, s.appender, &f, http.StatusCreated, "parent", "/fork", `{"id":"early child","at":7}`)
	if got, want := rawMessages(t, s, "early child", 8), rawMessages(t, s, "grand", 7); !bytes.Equal(got, want) {
		t.Errorf("messages\n%s\nwant\n%s", got, want)
	}
	mustAppend(t, s.appender, "child", toolTurn(3))
	if err := matchesFold(t.Context(), s.projector, "child", 25); err != nil {
		t.Error(err)
	}
	for parent, want := range map[string][]string{"grand": {"parent"}, "parent": {"child", "early child"}, "child": nil} {
		if got := children(t, s, parent); !slices.Equal(got, want) {
			t.Errorf("children of %s: %q, want %q", parent, got, want)
		}
	}
}

func sameForkAgain(t *testing.T, s stack) {
	mustAppend(t, s.appender, "again", toolTurn(1))
	mustAppend(t, s.appender, "again", notes("x"))
	var first, second forked
	const body = `{"id":"again-child","at":7,"header":{"cwd":"/w","n":1.10}}`
	a := post(t, s.appender, &first, http.StatusCreated, "again", "/fork", body)
	if got := a.Header.Get("Location"); got != "/v1/sessions/again-child" {
		t.Errorf("Location %s", got)
	}
	mustAppend(t, s.appender, "again-child", notes("goes on"))
	mustAppend(t, s.appender, "again", notes("goes on, too"))
	post(t, s.appender, &second, http.StatusOK, "again", "/fork", body)
	if second.Created || !bytes.Equal(first.Header, second.Header) || first.LastSeq != second.LastSeq || second.At != 7 {
		t.Errorf("first %+v, again %+v", first, second)
	}
	for _, other := range []string{`{"id":"again-child","at":8}`, `{"id":"again-child","at":7}`, `{"id":"again-child","at":7,"header":{"cwd":"/x","n":1.10}}`} {
		refusedPost(t, s.appender, http.StatusConflict, "session-exists", "again", "/fork", other)
	}
	mustAppend(t, s.appender, "bystander", notes("x"))
	refusedPost(t, s.appender, http.StatusConflict, "session-exists", "again", "/fork", `{"id":"bystander","at":7}`)
	next(t, s.appender, "again-child", 10)
	next(t, s.appender, "bystander", 1)
}

// forkOfALargeParent looks at the child all the while: it is not there, or it is whole.
func forkOfALargeParent(t *testing.T, s stack) {
	const parent, child, count = "large", "large child", 3000
	lines := harness.NewScript(43, 300).Next(count)
	end := lastTurnEnd(lines)
	for chunk := range slices.Chunk(lines, 500) {
		mustAppend(t, s.appender, parent, chunk)
	}
	whole := func(status harness.Status, err error) error {
		if p := harness.AsRefused(err); p != nil && (p.Code == "session-not-found" || p.Code == "session-pending") {
			return nil
		}
		if err != nil || *status.NextSeq != int64(end)+2 {
			return fmt.Errorf("next seq %s (%v) of %d", deref(status.NextSeq), err, end+2)
		}
		return nil
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	looks := new(atomic.Int64)
	for _, program := range []*harness.Client{s.appender, s.projector} {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				status, err := program.Status(t.Context(), child)
				if program == s.projector && err == nil && *status.NextSeq < int64(end)+2 {
					continue // whole, and projected so far
				}
				if err := whole(status, err); err != nil {
					t.Errorf("seen while it was made: %v", err)
					return
				}
				looks.Add(1)
			}
		})
	}
	var f forked
	post(t, s.appender, &f, http.StatusCreated, parent, "/fork", fmt.Sprintf(`{"id":%q,"at":%d}`, child, end))
	close(done)
	wg.Wait()
	if f.LastSeq != int64(end)+1 {
		t.Errorf("answer %+v", f)
	}
	if count, err := harness.OpenLog(t, s.nats).Count(t.Context(), child); err != nil || count < 2 {
		t.Errorf("%d commits (%v), want several", count, err)
	}
	events, err := s.projector.Events(t.Context(), child)
	if err != nil || len(events) != end+2 {
		t.Fatalf("%d events (%v), want %d", len(events), err, end+2)
	}
	for i := range end + 1 {
		if !bytes.Equal(events[i].Line, lines[i]) {
			t.Fatalf("line %d is %s, the parent's %s", i, events[i].Line, lines[i])
		}
	}
	if err := matchesFold(t.Context(), s.projector, child, int64(end)+1); err != nil {
		t.Error(err)
	}
	mustAppend(t, s.appender, child, notes("goes on"), harness.ExpectedSeq(int64(end)+2))
	t.Logf("%d events, looked at %d times meanwhile", end+2, looks.Load())
}

func forkHeaders(t *testing.T, s stack) {
	const parent = "with a header"
	if _, _, err := s.appender.Create(t.Context(), parent, json.RawMessage(`{"version":3,"id":"with a header","createdAt":1,"isSeeded":false,"delegationDepth":2,"cwd":"/p","origin":"o","agentPreset":"standard","x":1}`)); err != nil {
		t.Fatal(err)
	}
	mustAppend(t, s.appender, parent, notes("a"))
	var f forked
	post(t, s.appender, &f, http.StatusCreated, parent, "/fork", `{"id":"header-1"}`)
	var h map[string]json.RawMessage
	if err := json.Unmarshal(f.Header, &h); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"version": "3", "id": `"header-1"`, "parentSession": `"with a header"`, "isSeeded": "true", "delegationDepth": "2", "cwd": `"/p"`, "agentPreset": `"standard"`} {
		if string(h[name]) != want {
			t.Errorf("%s is %s, want %s, in %s", name, h[name], want, f.Header)
		}
	}
	post(t, s.appender, &f, http.StatusCreated, parent, "/fork", `{"id":"header-2","header":{"delegationDepth":3,"cwd":"/c","createdAt":7,"x-n":1.10}}`)
	for _, want := range []string{`"delegationDepth":3`, `"cwd":"/c"`, `"createdAt":7`, `"x-n":1.10`} {
		if !bytes.Contains(f.Header, []byte(want)) {
			t.Errorf("header %s lacks %s", f.Header, want)
		}
	}
	for _, given := range []string{`{"id":"x"}`, `{"version":4}`, `{"parentSession":"x"}`, `{"isSeeded":false}`} {
		refusedPost(t, s.appender, http.StatusUnprocessableEntity, "header-malformed", parent, "/fork", `{"id":"header-3","header":`+given+`}`)
	}
	if got := children(t, s, parent); !slices.Equal(got, []string{"header-1", "header-2"}) {
		t.Errorf("children %q", got)
	}
}

func malformedForks(t *testing.T, s stack) {
	const parent = "no-forks"
	if _, _, err := s.appender.Create(t.Context(), "childless", nil); err != nil {
		t.Fatal(err)
	}
	mustAppend(t, s.appender, parent, notes("a"))
	for _, c := range []struct {
		status     int
		code       string
		from, body string
	}{
		{400, "bad-request", parent, `{"id":"c","at":1}`},
		{400, "bad-request", parent, `{"id":"c","at":-1}`},
		{400, "bad-request", parent, `{"id":"c","at":"0"}`},
		{400, "bad-request", parent, `{"id":"no-forks","at":0}`},
		{400, "bad-request", parent, `{"id":1}`},
		{400, "bad-request", parent, `{"id":"c","parent":"x"}`},
		{400, "session-id-malformed", parent, `{"id":""}`},
		{400, "session-id-malformed", parent, `{"id":".."}`},
		{400, "bad-request", "childless", `{"id":"c"}`},
		{400, "bad-request", "childless", `{"id":"c","at":0}`},
		{404, "session-not-found", "nobody", `{"id":"c"}`},
	} {
		refusedPost(t, s.appender, c.status, c.code, c.from, "/fork", c.body)
	}
	_, err := s.appender.Status(t.Context(), "c")
	refused(t, err, http.StatusNotFound, "session-not-found")
	var f forked
	post(t, s.appender, &f, http.StatusCreated, parent, "/fork", ``)
	if f.Session == "" || f.At != 0 {
		t.Errorf("a fork without a word: %+v", f)
	}
}

func oneForkAtOnce(t *testing.T, s stack) {
	const parent, callers = "crowded-parent", 8
	other := harness.Appender{NATS: s.nats}.Start(t).Client()
	lines := harness.NewScript(47, 2000).Next(600)
	mustAppend(t, s.appender, parent, lines)
	at := lastTurnEnd(lines)
	var created atomic.Int64
	var wg sync.WaitGroup
	for i := range callers {
		c := []*harness.Client{s.appender, other}[i%2]
		wg.Go(func() {
			a, err := c.Do(t.Context(), http.MethodPost, harness.SessionPath(parent, "/fork"), fmt.Appendf(nil, `{"id":"crowded-child","at":%d}`, at))
			switch {
			case err != nil:
				t.Error(err)
			case a.Status == http.StatusCreated:
				created.Add(1)
			case a.Status != http.StatusOK:
				t.Errorf("status %d: %s", a.Status, a.Body)
			}
		})
	}
	wg.Wait()
	if n := created.Load(); n != 1 {
		t.Errorf("%d callers were told that they made it", n)
	}
	if err := matchesFold(t.Context(), s.projector, "crowded-child", int64(at)+1); err != nil {
		t.Error(err)
	}
}

func forkOfFormat4(t *testing.T, s stack) {
	if _, _, err := s.appender.Create(t.Context(), "four", harness.NewHeader("four", 4)); err != nil {
		t.Fatal(err)
	}
	mustAppend(t, s.appender, "four", []json.RawMessage{
		json.RawMessage(`{"type":"developer/message","surfaceOp":"append","data":{"message":{"id":"d","role":"developer","source":{"kind":"tool-registry"},"content":[{"type":"tool-addition","toolName":"x"}]}}}`),
		note("a"),
	})
	var f forked
	post(t, s.appender, &f, http.StatusCreated, "four", "/fork", `{"id":"four-child"}`)
	if !bytes.Contains(f.Header, []byte(`"version":4`)) {
		t.Errorf("header %s", f.Header)
	}
	if got, want := rawMessages(t, s, "four-child", 2), rawMessages(t, s, "four", 1); !bytes.Equal(got, want) {
		t.Errorf("messages %s, want %s", got, want)
	}
}

// A fork that a crash cuts off is not seen, and the same request completes it.
func TestForkCutOffByACrash(t *testing.T) {
	t.Parallel()
	url := harness.StandaloneNATS(t)
	log := harness.OpenLog(t, url)
	survivor := harness.Appender{NATS: url}.Start(t).Client()
	projector := harness.Projector{NATS: url}.Start(t).Client()
	const parent, count = "cut", 4000
	lines := harness.NewScript(53, 1500).Next(count)
	end := lastTurnEnd(lines)
	for chunk := range slices.Chunk(lines, 400) {
		mustAppend(t, survivor, parent, chunk)
	}
	cut := 0
	for round := range 3 {
		child := fmt.Sprintf("cut-%d", round)
		body := fmt.Sprintf(`{"id":%q,"at":%d}`, child, end)
		doomed := harness.Appender{NATS: url}.Start(t)
		answered := make(chan error, 1)
		go func() {
			_, err := doomed.Client().Do(t.Context(), http.MethodPost, harness.SessionPath(parent, "/fork"), []byte(body))
			answered <- err
		}()
		harness.Until(t, askLimit, "the first commits of the child", func() error {
			if n, err := log.Count(t.Context(), child); err != nil || n < uint64(round)+1 {
				return fmt.Errorf("%d commits (%v)", n, err)
			}
			return nil
		})
		doomed.Kill()
		want := http.StatusOK
		if err := <-answered; err != nil {
			want = http.StatusCreated
			if status, err := survivor.Status(t.Context(), child); err == nil {
				want = http.StatusOK // all but the answer was done
				t.Logf("the child is there with %s events", deref(status.NextSeq))
			} else {
				cut++
				refused(t, err, http.StatusNotFound, "session-not-found")
				refusedPost(t, survivor, http.StatusConflict, "session-pending", child, "/events", string(note("x")))
				_, err := projector.Messages(t.Context(), child)
				refused(t, err, http.StatusNotFound, "session-not-found")
				if slices.Contains(children(t, stack{projector: projector}, parent), child) {
					t.Error("it is listed")
				}
			}
		}
		var f forked
		post(t, survivor, &f, want, parent, "/fork", body)
		if f.LastSeq != int64(end)+1 {
			t.Errorf("answer %+v", f)
		}
		next(t, survivor, child, int64(end)+2)
		if err := matchesFold(t.Context(), projector, child, int64(end)+1); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d of 3 forks were cut off", cut)
	verifyAll(t, url)
}

// TestCompact walks through compaction and pruning over HTTP.
func TestCompact(t *testing.T) {
	t.Parallel()
	s := startStack(t, "off")
	for name, run := range map[string]func(*testing.T, stack){
		"one commit of ordinary events":     compactionIsOrdinary,
		"a tool pair is kept together":      compactionKeepsPairs,
		"call ids that come again":          compactionAndRepeatedCallIDs,
		"calls of an open step":             compactionAndOpenStep,
		"the system head is protected":      compactionAndSystemHead,
		"what is no compaction":             malformedCompactions,
		"conditions":                        compactionConditions,
		"prune":                             prunes,
		"prune in format 4":                 pruneOfFormat4,
		"what is no prune":                  malformedPrunes,
		"a large surface, compacted in one": compactionOfALargeSurface,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, s)
		})
	}
}

// nodesAre holds a session's surface to a list of nodes.
func nodesAre(t *testing.T, s stack, session string, last int64, want ...int64) {
	t.Helper()
	v, err := s.projector.Surface(t.Context(), session, harness.MinSeq(last))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(v.Seqs(), want) {
		t.Errorf("nodes of %q: %v, want %v", session, v.Seqs(), want)
	}
	if err := matchesFold(t.Context(), s.projector, session, last); err != nil {
		t.Error(err)
	}
}

func compactionIsOrdinary(t *testing.T, s stack) {
	const session = "compacted"
	mustAppend(t, s.appender, session, toolTurn(1))
	mustAppend(t, s.appender, session, toolTurn(2)[:2]) // a turn is open
	log := harness.OpenLog(t, s.nats)
	before, err := log.Count(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	var r receipt
	post(t, s.appender, &r, http.StatusCreated, session, "/compact", `{"startSeq":2,"endSeq":5,"summary":"a <summary>","provider":"p","usage":{"cost":1.10}}`)
	if r.FirstSeq != 10 || r.LastSeq != 13 {
		t.Errorf("answer %+v", r)
	}
	if after, err := log.Count(t.Context(), session); err != nil || after != before+1 {
		t.Errorf("%d commits (%v), %d before", after, err, before)
	}
	nodesAre(t, s, session, 13, 12)
	events, err := s.projector.Events(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	var types []string
	for _, e := range events[10:] {
		types = append(types, e.Type)
	}
	if !slices.Equal(types, []string{"compaction/start", "compaction/summary", "user/message", "compaction/end"}) {
		t.Errorf("events %q", types)
	}
	var summary struct {
		CompactionID  string           `json:"compactionId"`
		Summary       json.RawMessage  `json:"summary"`
		ShadowedRange map[string]int64 `json:"shadowedRange"`
		ShadowedSeqs  []int64          `json:"shadowedSeqs"`
		Provider      string           `json:"provider"`
	}
	if err := json.Unmarshal(events[11].Data, &summary); err != nil || summary.CompactionID == "" || summary.Provider != "p" ||
		summary.ShadowedRange["start"] != 2 || summary.ShadowedRange["end"] != 5 || !slices.Equal(summary.ShadowedSeqs, []int64{2, 3, 5}) ||
		string(summary.Summary) != `[{"type":"text","text":"a <summary>"}]` || !bytes.Contains(events[11].Data, []byte(`"cost":1.10`)) {
		t.Errorf("compaction/summary %s (%v)", events[11].Data, err)
	}
	if string(events[12].Sources) != "[10,11,2,3,5]" {
		t.Errorf("sources %s", events[12].Sources)
	}
	for _, i := range []int{10, 13} {
		var data struct {
			CompactionID string `json:"compactionId"`
			Turn         *int64 `json:"turn"`
		}
		if err := json.Unmarshal(events[i].Data, &data); err != nil || data.CompactionID != summary.CompactionID || data.Turn == nil || *data.Turn != 2 {
			t.Errorf("event %d: %s (%v)", i, events[i].Data, err)
		}
	}
	// What stands there can be compacted again, and blocks are kept token for token.
	post(t, s.appender, &r, http.StatusCreated, session, "/compact", `{"startSeq":12,"endSeq":12,"summary":[{"type":"text","text":"\u00e9","n":1.10}]}`)
	nodesAre(t, s, session, 17, 16)
	if got := rawMessages(t, s, session, 17); !bytes.Contains(got, []byte(`[{"type":"text","text":"\u00e9","n":1.10}]`)) {
		t.Errorf("messages %s", got)
	}
	// By hand: the same events are as good.
	mustAppend(t, s.appender, session, []json.RawMessage{
		json.RawMessage(`{"type":"user/message","surfaceOp":{"op":"replace","startSeq":16,"endSeq":16},"sourceEventSeqs":[16],"data":{"id":"hand","role":"user","source":{"kind":"plugin"},"content":[{"type":"text","text":"by hand"}]}}`),
	})
	nodesAre(t, s, session, 18, 18)
}

func compactionKeepsPairs(t *testing.T, s stack) {
	const session = "pairs"
	for turn := range 3 {
		mustAppend(t, s.appender, session, toolTurn(turn+1)) // nodes 2 3 5, 10 11 13, 18 19 21
	}
	for _, split := range [][3]int64{{2, 3, 3}, {3, 3, 3}, {5, 10, 3}, {5, 5, 3}, {10, 11, 11}, {5, 11, 3}} {
		p := refusedPost(t, s.appender, http.StatusUnprocessableEntity, "splits-tool-pair", session, "/compact", fmt.Sprintf(`{"startSeq":%d,"endSeq":%d,"summary":"s"}`, split[0], split[1]))
		if p.Seq == nil || *p.Seq != split[2] || p.Session != session {
			t.Errorf("range %v: problem %+v", split, p)
		}
	}
	refusedPost(t, s.appender, http.StatusBadRequest, "bad-request", session, "/compact", `{"startSeq":2,"endSeq":3,"summary":"s","allow":["everything"]}`)
	refusedPost(t, s.appender, http.StatusBadRequest, "bad-request", session, "/compact", `{"startSeq":2,"endSeq":3,"summary":"s","allow":true}`)
	next(t, s.appender, session, 24)
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":2,"endSeq":5,"summary":"whole"}`)
	nodesAre(t, s, session, 27, 26, 10, 11, 13, 18, 19, 21)
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":26,"endSeq":11,"summary":"split","allow":["splits-tool-pair"]}`)
	nodesAre(t, s, session, 31, 30, 13, 18, 19, 21)
	// The half that is left over has no other half any more.
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":13,"endSeq":13,"summary":"rest"}`)
	nodesAre(t, s, session, 35, 30, 34, 18, 19, 21)
	// A pruned result is still its call's.
	post(t, s.appender, nil, http.StatusCreated, session, "/prune", `{"seq":21}`)
	refusedPost(t, s.appender, http.StatusUnprocessableEntity, "splits-tool-pair", session, "/compact", `{"startSeq":18,"endSeq":19,"summary":"s"}`)
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":30,"endSeq":36,"summary":"all"}`)
	nodesAre(t, s, session, 40, 39)
}

// Providers count their calls from the start in each answer: an id alone is no pair.
func compactionAndRepeatedCallIDs(t *testing.T, s stack) {
	const session = "repeated"
	mustAppend(t, s.appender, session, []json.RawMessage{
		note("ask"), calling(1, "call_0"), result(1, "call_0"), // 0 1 2
		calling(2, "call_0"), result(2, "call_0"), // 3 4
		calling(3, "call_0"), // 5, without an answer so far
	})
	for _, split := range [][2]int64{{0, 1}, {1, 1}, {2, 2}, {3, 3}, {0, 3}, {5, 5}, {0, 5}} {
		refusedPost(t, s.appender, http.StatusUnprocessableEntity, "splits-tool-pair", session, "/compact", fmt.Sprintf(`{"startSeq":%d,"endSeq":%d,"summary":"s"}`, split[0], split[1]))
	}
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":3,"endSeq":4,"summary":"the second"}`)
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":1,"endSeq":2,"summary":"the first"}`)
	nodesAre(t, s, session, 13, 0, 12, 8, 5)
	// A call waits for its result until the model speaks again: then it was left alone for good.
	mustAppend(t, s.appender, session, []json.RawMessage{calling(4, "call_1")}) // 14
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":5,"endSeq":5,"summary":"the third"}`)
	p := refusedPost(t, s.appender, http.StatusUnprocessableEntity, "splits-tool-pair", session, "/compact", `{"startSeq":8,"endSeq":14,"summary":"s"}`)
	if p.Seq == nil || *p.Seq != 14 || !strings.Contains(p.Detail, "no result yet") {
		t.Errorf("the refusal: %+v", p)
	}
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":8,"endSeq":14,"summary":"s","allow":["splits-tool-pair"]}`)
	nodesAre(t, s, session, 22, 0, 12, 21)
}

// Two messages of one step may call: both wait while the step is open, and neither once it is closed.
func compactionAndOpenStep(t *testing.T, s stack) {
	const session = "open step"
	mustAppend(t, s.appender, session, []json.RawMessage{
		note("ask"), // 0
		json.RawMessage(`{"type":"turn/start","data":{"turn":1}}`), json.RawMessage(`{"type":"step/start","data":{"turn":1,"step":1}}`),
		calling(1, "first"), calling(1, "second"), // 3 4
	})
	refusedPost(t, s.appender, http.StatusUnprocessableEntity, "splits-tool-pair", session, "/compact", `{"startSeq":0,"endSeq":3,"summary":"s"}`)
	mustAppend(t, s.appender, session, []json.RawMessage{json.RawMessage(`{"type":"step/end","data":{"turn":1,"step":1}}`)})
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":0,"endSeq":3,"summary":"s"}`)
	nodesAre(t, s, session, 9, 8, 4)
}

func compactionAndSystemHead(t *testing.T, s stack) {
	const session = "head"
	mustAppend(t, s.appender, session, append([]json.RawMessage{
		json.RawMessage(`{"type":"system/message","surfaceOp":"append","data":{"message":{"id":"sys","role":"system","source":{"kind":"plugin","plugin":"prompt"},"content":[{"type":"text","text":"be kind"}]}}}`),
	}, notes("a", "b")...))
	for _, span := range [][2]int{{0, 0}, {0, 1}, {0, 2}} {
		p := refusedPost(t, s.appender, http.StatusUnprocessableEntity, "rule-violation", session, "/compact", fmt.Sprintf(`{"startSeq":%d,"endSeq":%d,"summary":"s"}`, span[0], span[1]))
		if p.Rule != "system-head-protected" {
			t.Errorf("%v: rule %s", span, p.Rule)
		}
	}
	next(t, s.appender, session, 3)
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":1,"endSeq":2,"summary":"s"}`)
	nodesAre(t, s, session, 6, 0, 5)
}

func malformedCompactions(t *testing.T, s stack) {
	const session = "no-compactions"
	mustAppend(t, s.appender, session, notes("a", "b", "c"))
	for _, c := range []struct {
		status           int
		code, rule, body string
	}{
		{400, "bad-request", "", `{"startSeq":0,"endSeq":1}`},
		{400, "bad-request", "", `{"startSeq":0,"summary":"s"}`},
		{400, "bad-request", "", `{"endSeq":0,"summary":"s"}`},
		{400, "bad-request", "", `{"startSeq":0,"endSeq":1,"summary":5}`},
		{400, "bad-request", "", `{"startSeq":0,"endSeq":1,"summary":null}`},
		{400, "bad-request", "", `{"startSeq":0,"endSeq":1,"summary":{"type":"text"}}`},
		{400, "bad-request", "", `{"startSeq":-1,"endSeq":1,"summary":"s"}`},
		{400, "bad-request", "", `{"startSeq":"0","endSeq":1,"summary":"s"}`},
		{400, "bad-request", "", `{"startSeq":0,"endSeq":1,"summary":"s","compactionId":"mine"}`},
		{400, "bad-request", "", `[]`},
		{422, "rule-violation", "replace-endpoint-not-on-surface", `{"startSeq":0,"endSeq":7,"summary":"s"}`},
		{422, "rule-violation", "replace-endpoint-not-on-surface", `{"startSeq":9,"endSeq":1,"summary":"s"}`},
		{422, "rule-violation", "replace-range-inverted", `{"startSeq":1,"endSeq":0,"summary":"s"}`},
	} {
		if p := refusedPost(t, s.appender, c.status, c.code, session, "/compact", c.body); p.Rule != c.rule {
			t.Errorf("%s: rule %q, want %q", c.body, p.Rule, c.rule)
		}
	}
	next(t, s.appender, session, 3)
}

func compactionConditions(t *testing.T, s stack) {
	const session = "conditions"
	mustAppend(t, s.appender, session, notes("a", "b"))
	mustAppend(t, s.appender, session, toolTurn(1)) // result at 7
	for _, call := range []struct{ path, body string }{{"/compact", `{"startSeq":0,"endSeq":1,"summary":"s"%s}`}, {"/prune", `{"seq":7%s}`}} {
		p := refusedPost(t, s.appender, http.StatusConflict, "seq-conflict", session, call.path, fmt.Sprintf(call.body, `,"expectedSeq":3`))
		if p.ActualSeq == nil || *p.ActualSeq != 10 {
			t.Errorf("%s: problem %+v", call.path, p)
		}
		refusedPost(t, s.appender, http.StatusConflict, "seq-conflict", session, call.path, fmt.Sprintf(call.body, ""), harness.ExpectedSeq(11))
		refusedPost(t, s.appender, http.StatusConflict, "seq-conflict", session, call.path, fmt.Sprintf(call.body, ""), harness.With("If-Match", `"0"`))
		refusedPost(t, s.appender, http.StatusBadRequest, "bad-request", session, call.path, fmt.Sprintf(call.body, `,"expectedSeq":3`), harness.ExpectedSeq(11))
	}
	takeWriter(t, s.appender, session, "w", 1)
	for _, call := range []struct{ path, body string }{{"/compact", `{"startSeq":0,"endSeq":1,"summary":"s"%s}`}, {"/prune", `{"seq":7%s}`}} {
		refusedPost(t, s.appender, http.StatusConflict, "fenced", session, call.path, fmt.Sprintf(call.body, ""))
		refusedPost(t, s.appender, http.StatusConflict, "fenced", session, call.path, fmt.Sprintf(call.body, `,"epoch":2`))
	}
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", `{"startSeq":0,"endSeq":1,"summary":"s","epoch":1,"expectedSeq":11}`)
	post(t, s.appender, nil, http.StatusCreated, session, "/prune", `{"seq":7}`, epoch(1), harness.ExpectedSeq(15))
	nodesAre(t, s, session, 15, 13, 4, 5, 15)
	// A range cannot be compacted twice, nor a result pruned twice, by a retry.
	refusedPost(t, s.appender, http.StatusUnprocessableEntity, "rule-violation", session, "/compact", `{"startSeq":0,"endSeq":1,"summary":"s","epoch":1}`)
	refusedPost(t, s.appender, http.StatusUnprocessableEntity, "rule-violation", session, "/prune", `{"seq":7,"epoch":1}`)
}

func prunes(t *testing.T, s stack) {
	const session = "pruned"
	mustAppend(t, s.appender, session, toolTurn(1))
	original := result(1, "call-1")
	e, err := harness.ParseEvent(original)
	if err != nil {
		t.Fatal(err)
	}
	const old = `[{"type":"text","text":"<&> 1.10"}]`
	seq := int64(5)
	for i, c := range []struct{ given, want string }{
		{``, fmt.Sprintf(`[{"type":"text","text":"[pruned: %d bytes]"}]`, len(old))},
		{`,"content":"<short>"`, `[{"type":"text","text":"<short>"}]`},
		{`,"content":[ {"type":"text", "text":"\u00e9","n":1.10} ]`, `[{"type":"text","text":"\u00e9","n":1.10}]`},
		{`,"content":[]`, `[]`},
	} {
		var r receipt
		post(t, s.appender, &r, http.StatusCreated, session, "/prune", fmt.Sprintf(`{"seq":%d%s}`, seq, c.given))
		if want := int64(8 + i); r.FirstSeq != want || r.LastSeq != want {
			t.Fatalf("answer %+v", r)
		}
		nodesAre(t, s, session, r.LastSeq, 2, 3, r.LastSeq)
		events, err := s.projector.Events(t.Context(), session)
		if err != nil {
			t.Fatal(err)
		}
		// All but the content is as it was, token for token.
		want := bytes.Replace(e.Data, []byte(old), []byte(c.want), 1)
		if got := events[r.LastSeq]; !bytes.Equal(got.Data, want) || string(got.Sources) != fmt.Sprintf("[%d]", seq) {
			t.Errorf("%s: pruned to\n%s with sources %s, want\n%s", c.given, got.Data, got.Sources, want)
		}
		seq = r.LastSeq
	}
}

func pruneOfFormat4(t *testing.T, s stack) {
	const session = "pruned-4"
	if _, _, err := s.appender.Create(t.Context(), session, harness.NewHeader(session, 4)); err != nil {
		t.Fatal(err)
	}
	mustAppend(t, s.appender, session, []json.RawMessage{
		json.RawMessage(`{"type":"assistant/message","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"a","role":"assistant","source":{"kind":"model","provider":"p","model":"m"},"content":[{"type":"tool-call","id":"c1","name":"x","arguments":"{}"}]},"stream":[]}}`),
		json.RawMessage(`{"type":"tool/result","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"r","role":"tool","toolCallId":"c1","isError":false,"source":{"kind":"tool","callId":"c1"},"content":[{"type":"text","text":"long"}]}}}`),
	})
	refusedPost(t, s.appender, http.StatusUnprocessableEntity, "splits-tool-pair", session, "/compact", `{"startSeq":1,"endSeq":1,"summary":"s"}`)
	post(t, s.appender, nil, http.StatusCreated, session, "/prune", `{"seq":1,"content":"short"}`)
	v, err := s.projector.Surface(t.Context(), session, harness.MinSeq(2))
	if err != nil || !slices.Equal(v.Seqs(), []int64{0, 2}) {
		t.Errorf("nodes %v (%v)", v.Seqs(), err)
	}
	m, err := s.projector.Messages(t.Context(), session)
	if err != nil || string(m.Messages[1]) != `{"id":"r","role":"tool","toolCallId":"c1","isError":false,"source":{"kind":"tool","callId":"c1"},"content":[{"type":"text","text":"short"}]}` {
		t.Errorf("messages %s (%v)", m.Messages, err)
	}
}

func malformedPrunes(t *testing.T, s stack) {
	const session = "no-prunes"
	mustAppend(t, s.appender, session, toolTurn(1))
	for _, c := range []struct {
		status           int
		code, rule, body string
	}{
		{400, "bad-request", "", ``},
		{400, "bad-request", "", `{}`},
		{400, "bad-request", "", `{"seq":-1}`},
		{400, "bad-request", "", `{"seq":5,"content":1}`},
		{400, "bad-request", "", `{"seq":5,"content":null}`},
		{400, "bad-request", "", `{"seq":5,"text":"x"}`},
		{422, "rule-violation", "replace-endpoint-not-on-surface", `{"seq":4}`},
		{422, "rule-violation", "replace-endpoint-not-on-surface", `{"seq":70}`},
		{422, "rule-violation", "tool-result-rewrite-target", `{"seq":2}`},
		{422, "rule-violation", "tool-result-rewrite-target", `{"seq":3}`},
	} {
		if p := refusedPost(t, s.appender, c.status, c.code, session, "/prune", c.body); p.Rule != c.rule {
			t.Errorf("%s: rule %q, want %q", c.body, p.Rule, c.rule)
		}
	}
	next(t, s.appender, session, 8)
}

func compactionOfALargeSurface(t *testing.T, s stack) {
	const session, count = "many-nodes", 2000
	var all []json.RawMessage
	for i := range count {
		all = append(all, note(fmt.Sprint(i)))
	}
	mustAppend(t, s.appender, session, all)
	post(t, s.appender, nil, http.StatusCreated, session, "/compact", fmt.Sprintf(`{"startSeq":1,"endSeq":%d,"summary":"s"}`, count-2))
	nodesAre(t, s, session, count+3, 0, count+2, count-1)
	events, err := s.projector.EventPage(t.Context(), session, harness.Query("from", fmt.Sprint(count+2)), harness.Query("limit", "1"))
	if err != nil || len(events.Events) != 1 || bytes.Count(events.Events[0], []byte(",")) < count {
		t.Errorf("%v: the message does not cite what it replaced", err)
	}
}

// configured builds the appender once and starts it with flags that are not the harness's.
type configured struct{ program string }

func buildConfigured(t *testing.T) configured {
	t.Helper()
	root, err := harness.RepoRoot()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"build"}
	if harness.Race() {
		args = append(args, "-race")
	}
	c := configured{filepath.Join(t.TempDir(), "appender")}
	cmd := exec.CommandContext(t.Context(), "go", append(args, "-o", c.program, "./cmd/appender")...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return c
}

// start runs an appender until the test ends and returns a client and the URL of its NATS.
func (c configured) start(t *testing.T, flags ...string) (*harness.Client, string) {
	t.Helper()
	args := append([]string{"serve", "--listen", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--data", t.TempDir()}, flags...)
	cmd := exec.CommandContext(t.Context(), c.program, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Kill)
		_ = cmd.Wait()
		if t.Failed() || strings.Contains(stderr.String(), "DATA RACE") || strings.Contains(stderr.String(), "panic") {
			t.Errorf("appender %s wrote to stderr:\n%s", strings.Join(flags, " "), stderr.String())
		}
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	var ready struct{ HTTP, NATS string }
	if err != nil || json.Unmarshal([]byte(line), &ready) != nil {
		t.Fatalf("appender %s was not ready: %q %v", strings.Join(flags, " "), line, err)
	}
	return harness.NewClient(ready.HTTP), ready.NATS
}

// TestLimits holds the appender to limits that its flags make small.
func TestLimits(t *testing.T) {
	t.Parallel()
	c := buildConfigured(t)
	for name, run := range map[string]func(*testing.T, configured){
		"the size of an event":               limitOfEvent,
		"the size of a commit":               limitOfCommit,
		"the size of a request":              limitOfBody,
		"the size of a header":               limitOfHeader,
		"the events of a session":            limitOfEvents,
		"the bytes of a session":             limitOfBytes,
		"warnings begin at 80 %, no earlier": warningsBegin,
		"callers merged into a commit":       limitOfGroups,
		"the window of keys":                 windowOfKeys,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, c)
		})
	}
}

// sized is a note whose canonical line has so many bytes, at a seq of one digit.
func sized(t *testing.T, size int) json.RawMessage {
	t.Helper()
	e := harness.Event{Type: "todo/write", Seq: 0, Time: 1767225600000, Data: json.RawMessage(`""`)}
	fill := size - len(e.Canonical())
	if fill < 0 {
		t.Fatalf("an event cannot have %d bytes", size)
	}
	return fmt.Appendf(nil, `{"type":"todo/write","time":1767225600000,"data":%q}`, strings.Repeat("x", fill))
}

func tooLarge(t *testing.T, c *harness.Client, session, body string, options ...harness.Option) problemDocument {
	t.Helper()
	return refusedPost(t, c, http.StatusRequestEntityTooLarge, "too-large", session, "/events", body, options...)
}

func limitOfEvent(t *testing.T, built configured) {
	c, _ := built.start(t, "--max-event", "1000")
	mustAppend(t, c, "event", []json.RawMessage{sized(t, 1000)})
	p := tooLarge(t, c, "event", string(sized(t, 1001)))
	if !strings.Contains(p.Detail, "1001") || !strings.Contains(p.Detail, "1000") {
		t.Errorf("detail %q names no numbers", p.Detail)
	}
	p = tooLarge(t, c, "event", string(harness.Array(append(notes("a"), sized(t, 1001)))))
	if p.Index == nil || *p.Index != 1 || p.Session != "event" {
		t.Errorf("problem %+v", p)
	}
	next(t, c, "event", 1)
}

func limitOfCommit(t *testing.T, built configured) {
	c, _ := built.start(t, "--max-commit", "2000")
	full := []json.RawMessage{sized(t, 999), sized(t, 999)} // with line ends
	if r, err := c.AppendEvents(t.Context(), "commit", full); err != nil || r.LastSeq != 1 {
		t.Errorf("%+v %v", r, err)
	}
	tooLarge(t, c, "commit", string(harness.Array([]json.RawMessage{sized(t, 999), sized(t, 1000)})))
	tooLarge(t, c, "commit", string(sized(t, 2000)))
	next(t, c, "commit", 2)
	// A compaction is a commit as well.
	var many []json.RawMessage
	for i := range 10 {
		many = append(many, note(fmt.Sprint(i)))
	}
	mustAppend(t, c, "commit-compact", many)
	refusedPost(t, c, http.StatusRequestEntityTooLarge, "too-large", "commit-compact", "/compact", fmt.Sprintf(`{"startSeq":0,"endSeq":9,"summary":%q}`, strings.Repeat("s", 1500)))
	next(t, c, "commit-compact", 10)
	var r receipt
	post(t, c, &r, http.StatusCreated, "commit-warned", "/events", string(sized(t, 1600)))
	if len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "1601") || !strings.Contains(r.Warnings[0], "2000") {
		t.Errorf("warnings %q", r.Warnings)
	}
	r = receipt{}
	post(t, c, &r, http.StatusCreated, "commit-unwarned", "/events", string(sized(t, 1500)))
	if r.Warnings != nil {
		t.Errorf("warnings %q", r.Warnings)
	}
}

func limitOfBody(t *testing.T, built configured) {
	c, _ := built.start(t, "--max-body", "1000")
	body := string(note("a"))
	mustBody := body + strings.Repeat(" ", 1000-len(body))
	post(t, c, nil, http.StatusCreated, "body", "/events", mustBody)
	p := tooLarge(t, c, "body", mustBody+" ")
	if !strings.Contains(p.Detail, "1000") {
		t.Errorf("detail %q", p.Detail)
	}
	next(t, c, "body", 1)
}

func limitOfHeader(t *testing.T, built configured) {
	c, _ := built.start(t, "--max-header", "300")
	header := func(size int, id string) string {
		h := fmt.Sprintf(`{"version":3,"id":%q,"createdAt":1,"isSeeded":false,"delegationDepth":0,"x":""}`, id)
		return strings.Replace(h, `""`, `"`+strings.Repeat("x", size-len(h))+`"`, 1)
	}
	create := func(status int, id string, size int) {
		t.Helper()
		a, err := c.Do(t.Context(), http.MethodPost, "/v1/sessions", []byte(`{"header":`+header(size, id)+`}`))
		if err != nil || a.Status != status {
			t.Errorf("a header of %d bytes: %d (%v) %s", size, a.Status, err, a.Body)
		}
	}
	create(http.StatusCreated, "h300", 300)
	create(http.StatusRequestEntityTooLarge, "h301", 301)
	mustAppend(t, c, "parent", notes("a"))
	refusedPost(t, c, http.StatusRequestEntityTooLarge, "too-large", "parent", "/fork", `{"id":"child","header":{"x":"`+strings.Repeat("x", 300)+`"}}`)
	_, err := c.Status(t.Context(), "child")
	refused(t, err, http.StatusNotFound, "session-not-found")
}

func limitOfEvents(t *testing.T, built configured) {
	c, url := built.start(t, "--max-session-events", "20")
	const session = "events"
	warned := map[int64]bool{}
	for n := range int64(20) {
		var r receipt
		post(t, c, &r, http.StatusCreated, session, "/events", string(note(fmt.Sprint(n))))
		warned[n+1] = len(r.Warnings) > 0
		if n == 15 && (len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], "16") || !strings.Contains(r.Warnings[0], "20")) {
			t.Errorf("warnings %q", r.Warnings)
		}
	}
	for n, got := range warned {
		if got != (n >= 16) {
			t.Errorf("warned at %d events: %t", n, got)
		}
	}
	tooLarge(t, c, session, string(note("x")))
	refusedPost(t, c, http.StatusRequestEntityTooLarge, "too-large", session, "/compact", `{"startSeq":0,"endSeq":1,"summary":"s"}`)
	next(t, c, session, 20)
	// All or nothing.
	mustAppend(t, c, "half", notes("a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s"))
	tooLarge(t, c, "half", string(harness.Array(notes("x", "y"))))
	next(t, c, "half", 19)
	// A retry of what is stored is answered all the same.
	if r := mustAppend(t, c, session, notes("19"), harness.ExpectedSeq(19)); !r.Duplicate {
		t.Errorf("retry %+v", r)
	}
	harness.Projector{NATS: url}.Start(t)
	verifyAll(t, url)
}

func limitOfBytes(t *testing.T, built configured) {
	c, _ := built.start(t, "--max-session-bytes", "5000")
	const session = "bytes"
	for n, warned := range []bool{false, false, false, true, true} {
		var r receipt
		post(t, c, &r, http.StatusCreated, session, "/events", string(sized(t, 999)))
		if got := len(r.Warnings) > 0; got != warned {
			t.Errorf("warned at %d bytes: %q", 1000*(n+1), r.Warnings)
		}
	}
	p := tooLarge(t, c, session, string(sized(t, 200)))
	if !strings.Contains(p.Detail, "5201") || !strings.Contains(p.Detail, "5000") {
		t.Errorf("detail %q", p.Detail)
	}
	next(t, c, session, 5)
}

// warningsBegin has a limit that ten does not divide.
func warningsBegin(t *testing.T, built configured) {
	c, _ := built.start(t, "--max-session-events", "9")
	for n := range int64(9) {
		var r receipt
		post(t, c, &r, http.StatusCreated, "nine", "/events", string(note(fmt.Sprint(n))))
		if got, want := len(r.Warnings) > 0, (n+1)*10 >= 9*8; got != want {
			t.Errorf("%d of 9 events: warned %t, want %t", n+1, got, want)
		}
	}
}

// limitOfGroups has many callers whose appends fit a commit one by one, but not all together.
func limitOfGroups(t *testing.T, built configured) {
	c, url := built.start(t, "--max-commit", "4000")
	small := smallNATS(t, 64<<10)
	joined := harness.Appender{NATS: small}.Start(t).Client()
	for name, c := range map[string]struct {
		c    *harness.Client
		log  *harness.Log
		size int
		most int
	}{
		"by flag":   {c, harness.OpenLog(t, url), 1500, 4000},
		"by server": {joined, harness.OpenLog(t, small), 20_000, 64 << 10},
	} {
		t.Run(name, func(t *testing.T) {
			const callers, session = 32, "merged"
			var wg sync.WaitGroup
			for range callers {
				wg.Go(func() {
					if _, err := c.c.Append(t.Context(), session, sized(t, c.size)); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			commits, err := c.log.Commits(t.Context(), session)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%d events in %d commits", callers, len(commits))
			for _, commit := range commits {
				if len(commit.Body) > c.most {
					t.Errorf("a commit of %d events has %d bytes, at most %d are allowed", len(commit.Lines()), len(commit.Body), c.most)
				}
			}
			next(t, c.c, session, callers)
		})
	}
}

// smallNATS is a stock server that takes small messages only.
func smallNATS(t *testing.T, most int32) string {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true, MaxPayload: most})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(askLimit) {
		t.Fatal("nats-server was not ready")
	}
	return s.ClientURL()
}

func windowOfKeys(t *testing.T, built configured) {
	const session, window = "window", 5 * time.Second
	c, _ := built.start(t, "--key-window", window.String())
	begun := time.Now()
	first := mustAppend(t, c, session, notes("a"), key("k"))
	if again := mustAppend(t, c, session, notes("a"), key("k")); !again.Duplicate || again.Commit != first.Commit {
		t.Errorf("first %+v, again %+v", first, again)
	}
	// Once the window is over, the key is one like any other.
	harness.Until(t, askLimit, "the end of the window", func() error {
		_, err := c.AppendEvents(t.Context(), session, notes("other"), key("k"))
		if p := harness.AsRefused(err); p == nil || p.Code != "key-reused" {
			if err != nil {
				t.Fatal(err)
			}
			return nil
		}
		return err
	})
	if took := time.Since(begun); took < window {
		t.Errorf("the key was forgotten after %v, it is to be known for %v", took, window)
	}
	next(t, c, session, 2)
	// With an expectedSeq a retry is recognised for ever.
	if r := mustAppend(t, c, session, notes("a"), key("k"), harness.ExpectedSeq(0)); !r.Duplicate || r.Commit != first.Commit {
		t.Errorf("first %+v, with expectedSeq %+v", first, r)
	}
}
