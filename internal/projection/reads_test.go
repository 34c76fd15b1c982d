package projection_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"palimpsest/internal/api"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

// serving is a projector's HTTP API.
type serving struct {
	t      testing.TB
	url    string
	routes http.Handler
	stop   func()
	client *http.Client
}

func (w *world) serve(k *worker) *serving {
	w.t.Helper()
	hs, _ := w.hubs()
	base, stop := context.WithCancel(context.Background())
	routes := api.NewProjector(w.reader, k.Worker, hs, audit.New(w.log, w.headers, w.buckets), api.ProjectorConfig{Fleet: w.fleet()})
	srv := httptest.NewUnstartedServer(routes)
	srv.Config.BaseContext = func(net.Listener) context.Context { return base }
	srv.Start()
	transport := &http.Transport{}
	w.t.Cleanup(func() {
		stop()
		transport.CloseIdleConnections()
		srv.Close()
	})
	return &serving{w.t, srv.URL, routes, stop, &http.Client{Transport: transport}}
}

func (s *serving) do(method, path string, header ...string) *http.Response {
	s.t.Helper()
	r, err := http.NewRequestWithContext(journaltest.Context(s.t), method, s.url+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp, err := s.client.Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// body is the whole body of an answer of a given status.
func (s *serving) body(method, path string, status int) string {
	s.t.Helper()
	resp := s.do(method, path)
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil || resp.StatusCode != status {
		s.t.Fatalf("%s %s: %d %s, %v; want %d", method, path, resp.StatusCode, b.Bytes(), err, status)
	}
	return b.String()
}

// send posts JSON and returns the body of an answer of a given status.
func (s *serving) send(path, body string, status int) string {
	s.t.Helper()
	r, err := http.NewRequestWithContext(journaltest.Context(s.t), http.MethodPost, s.url+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/json")
	resp, err := s.client.Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil || resp.StatusCode != status {
		s.t.Fatalf("POST %s %s: %d %s, %v; want %d", path, body, resp.StatusCode, b.Bytes(), err, status)
	}
	return b.String()
}

func TestFeedOverHTTP(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	srv := w.serve(k)
	k.wrote("a", w.append("a", user("x")))
	k.wrote("b", w.append("b", turnStart))
	open := func(path string, header ...string) *stream {
		t.Helper()
		resp := srv.do("GET", path, header...)
		return &stream{t, resp, bufio.NewScanner(resp.Body)}
	}
	session := func(s *stream) (sse, projection.FeedChange) {
		t.Helper()
		e, ok := s.next()
		var c projection.FeedChange
		if err := json.Unmarshal([]byte(e.data), &c); !ok || e.event != "session" || err != nil || e.id != strconv.FormatUint(c.Rev, 10) {
			t.Fatalf("expected a session, found %+v, %v", e, err)
		}
		return e, c
	}
	all := open("/v1/feed")
	if e, _ := all.next(); e.event != "hello" || e.id != "" || e.data != fmt.Sprintf(`{"from":0,"newest":%d}`, 2) {
		t.Fatalf("hello: %+v", e)
	}
	_, a := session(all)
	e, b := session(all)
	if a.Session != "a" || b.Session != "b" || b.OpenTurn == nil || *b.OpenTurn != 7 || b.Seq != 0 {
		t.Errorf("told %+v, then %+v", a, b)
	}
	// Resumed, with a filter too.
	late, filtered := open("/v1/feed", "Last-Event-ID", e.id), open("/v1/feed?state=open")
	late.next()
	filtered.next()
	if _, c := session(filtered); c.Session != "b" {
		t.Errorf("open is %+v", c)
	}
	w.append("b", turnEnd)
	for _, s := range []*stream{all, late, filtered} {
		if _, c := session(s); c.Session != "b" || c.Seq != 1 || c.OpenTurn != nil || c.Left != (s == filtered) {
			t.Errorf("told %+v (filtered %t)", c, s == filtered)
		}
	}
	reset := open("/v1/feed?from=99")
	if e, _ := reset.next(); e.data != fmt.Sprintf(`{"from":0,"newest":%d,"reset":true}`, 3) {
		t.Errorf("from beyond the end: %+v", e)
	}
	for path, word := range map[string]string{
		"/v1/feed?from=x": "from", "/v1/feed?state=busy": "open, idle or quarantined", "/v1/feed?since=soon": "since", "/v1/feed?agent=": "agent",
		"/v1/feed?colour=red": "colour", "/v1/sessions?parent=..": "session id", "/v1/sessions?since=-1": "since", "/v1/sessions?cursor=!": "cursor",
	} {
		if got := srv.body("GET", path, 400); !strings.Contains(got, word) {
			t.Errorf("%s: %s", path, got)
		}
	}
	srv.stop()
	for _, s := range []*stream{all, late, filtered} {
		if e, _ := s.next(); e.event != "end" || !strings.Contains(e.data, `"stopping"`) {
			t.Errorf("at the end: %+v", e)
		}
	}
}

func TestSessionsOverHTTPTellStateAndHeader(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	srv := w.serve(k)
	w.create("s", `{"createdAt":77,"mine":1.10}`)
	k.wrote("s", w.append("s", `{"type":"turn/start","data":{"turn":3},"time":1767225604000}`))
	want := `{"sessions":[{"session":"s","rev":1,"state":"open","seq":0,"time":1767225604000,"openTurn":3,"openStep":null,"nodes":0,"logBytes":69,` +
		`"header":{"createdAt":77,"mine":1.10,"version":3,"id":"s","isSeeded":false,"delegationDepth":0}}]}` + "\n"
	if got := srv.body("GET", "/v1/sessions?state=open&since=2026-01-01T00:00:04Z&limit=5", 200); got != want {
		t.Errorf("got  %swant %s", got, want)
	}
	if got := srv.body("GET", "/v1/sessions?since=1767225604001", 200); got != `{"sessions":[]}`+"\n" {
		t.Errorf("since later: %s", got)
	}
}

// services starts the projector's NATS services with small replies.
func (w *world) services(srv *serving, replyBytes int) *nats.Conn {
	w.t.Helper()
	s := api.NewProjectorServices(w.srv.Conn(w.t), srv.routes, api.ServiceConfig{ReplyBytes: replyBytes, Parallel: 2})
	if err := s.Start(journaltest.Context(w.t)); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if err := s.Stop(journaltest.Context(w.t)); err != nil {
			w.t.Error(err)
		}
	})
	return w.srv.Conn(w.t)
}

func request(t testing.TB, nc *nats.Conn, subject, body string) *nats.Msg {
	t.Helper()
	m, err := nc.RequestWithContext(journaltest.Context(t), subject, []byte(body))
	if err != nil {
		t.Fatalf("%s: %v", subject, err)
	}
	return m
}

// joined reads all pages of a list and joins them to one answer.
func joined(t testing.TB, nc *nats.Conn, subject, list, body string, between func(page int)) (answer string, pages int) {
	t.Helper()
	var items []json.RawMessage
	var last map[string]json.RawMessage
	for {
		m := request(t, nc, subject, body)
		if code := m.Header.Get(micro.ErrorCodeHeader); code != "" {
			t.Fatalf("%s %s: %s %s", subject, body, code, m.Data)
		}
		last = map[string]json.RawMessage{}
		var page []json.RawMessage
		if err := json.Unmarshal(m.Data, &last); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(last[list], &page); err != nil {
			t.Fatal(err)
		}
		items = append(items, page...)
		pages++
		if last["more"] == nil {
			break
		}
		body = fmt.Sprintf(`{"cursor":%s}`, last["cursor"])
		between(pages)
	}
	whole, err := json.Marshal(items)
	if err != nil {
		t.Fatal(err)
	}
	last[list] = whole
	b, err := json.Marshal(last)
	if err != nil {
		t.Fatal(err)
	}
	return string(b), pages
}

// sorted is a JSON object with its members sorted, as json.Marshal writes a map.
func sorted(t testing.TB, body string) string {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(body), &m); err != nil {
		t.Fatal(err)
	}
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestMessagesOverNATSArePagesOfOneSnapshot(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	srv := w.serve(k)
	nc := w.services(srv, 1<<20-4096) // what a stock server's max_payload allows
	const session, path = "a b", "/v1/sessions/a%20b"
	var lines []string
	for range 40 {
		lines = append(lines, user(strings.Repeat("x", 90<<10)))
	}
	for len(lines) > 0 {
		w.append(session, lines[:8]...)
		lines = lines[8:]
	}
	call := w.append(session, `{"type":"assistant/message","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"a","role":"assistant","source":{"kind":"model","provider":"p","model":"m"},"content":[{"type":"tool-call","id":"c1","name":"clock","arguments":"{}"}]}}}`)
	k.wrote(session, call)
	for list, tail := range map[string]string{"messages": "/messages", "nodes": "/surface"} {
		subject := "palimpsest." + tail[1:] + ".a=20b"
		want := sorted(t, srv.body("GET", path+tail, 200))
		got, pages := joined(t, nc, subject, list, "", func(int) {})
		if got != want || list == "messages" && pages < 4 {
			t.Errorf("%s: %d pages joined to %d bytes, HTTP has %d", subject, pages, len(got), len(want))
		}
	}
	want := sorted(t, srv.body("GET", path+"/messages?format=openai", 200))
	if got, pages := joined(t, nc, "palimpsest.messages.a=20b", "messages", `{"format":"openai"}`, func(int) {}); got != want || pages < 4 {
		t.Errorf("openai: %d pages joined to %d bytes, HTTP has %d", pages, len(got), len(want))
	}
	// Anthropic's form has neighbours of one role as one message, which here fits no reply.
	if m := request(t, nc, "palimpsest.messages.a=20b", `{"format":"anthropic"}`); m.Header.Get(micro.ErrorCodeHeader) != "413" {
		t.Errorf("anthropic: %v %d bytes", m.Header, len(m.Data))
	}
	// The session goes on, and what was listed is replaced: the pages are those of the first.
	want = sorted(t, srv.body("GET", path+"/messages", 200))
	got, _ := joined(t, nc, "palimpsest.messages.a=20b", "messages", `{"minSeq":"40"}`, func(page int) {
		nodes := []events.Seq{0, 1, 2}
		if page > 1 {
			nodes = []events.Seq{events.Seq(39 + page), events.Seq(1 + page)}
		}
		k.wrote(session, w.append(session, replace(nodes, "summary")))
	})
	if got != want {
		t.Errorf("pages of a session that goes on joined to %d bytes, want %d", len(got), len(want))
	}
}

func TestReadsOverNATSRefuseAsOverHTTP(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	srv := w.serve(k)
	nc := w.services(srv, 1000)
	k.wrote("s", w.append("s", user("one"), user(strings.Repeat("x", 2000))))
	for _, c := range []struct{ subject, body, code, part string }{
		{"messages.nowhere", "", "404", `"session-not-found"`},
		{"messages.=2E", "", "400", `"session-id-malformed"`},
		{"messages.s", `[1]`, "400", "JSON object of parameters"},
		{"messages.s", `{"colour":"red"}`, "400", `unknown parameter`},
		{"messages.s", `{"minSeq":{}}`, "400", "minSeq"},
		{"messages.s", `{"minSeq":99,"timeout":"1ms"}`, "504", `"not-yet-projected"`},
		{"messages.s", `{"cursor":"x"}`, "400", "cursor"},
		{"messages.s", `{"cursor":"eyJzZXEiOjEsImluZGV4Ijo5fQ","fresh":true}`, "400", "cursor"},
		{"messages.s", `{"cursor":"eyJzZXEiOjEsImluZGV4Ijo5fQ"}`, "400", "item 9"},
		{"messages.s", `{"cursor":"eyJzZXEiOjEsImluZGV4IjoxfQ"}`, "413", `"too-large"`}, // item 1 alone is larger than a reply
		{"sessions", `{"state":"busy"}`, "400", "state"},
	} {
		m := request(t, nc, "palimpsest."+c.subject, c.body)
		var p api.Problem
		if got := m.Header.Get(micro.ErrorCodeHeader); got != c.code || json.Unmarshal(m.Data, &p) != nil || !strings.Contains(string(m.Data), c.part) || strconv.Itoa(p.Status) != c.code {
			t.Errorf("%s %s: %s %s, want %s with %s", c.subject, c.body, got, m.Data, c.code, c.part)
		}
	}
	m := request(t, nc, "palimpsest.session.s", "")
	if http := srv.body("GET", "/v1/sessions/s", 200); string(m.Data)+"\n" != http || m.Header.Get("ETag") != `"2"` || m.Header.Get("Palimpsest-Status") != "200" {
		t.Errorf("session: %v %s, over HTTP %s", m.Header, m.Data, http)
	}
}

func TestSessionsOverNATSFitTheReply(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	nc := w.services(w.serve(k), 2000)
	var want []string
	for i := range 30 {
		id := fmt.Sprintf("s %02d", i)
		w.create(id, "")
		want = append(want, id)
	}
	var got []string
	for body, pages := "", 0; ; pages++ {
		m := request(t, nc, "palimpsest.sessions", body)
		var page struct {
			Sessions []struct{ Session string }
			More     bool
			Cursor   string
		}
		if err := json.Unmarshal(m.Data, &page); err != nil || len(m.Data) > 2000 {
			t.Fatalf("%d bytes, %v: %s", len(m.Data), err, m.Data)
		}
		for _, s := range page.Sessions {
			got = append(got, s.Session)
		}
		if !page.More {
			if pages < 3 {
				t.Errorf("%d pages", pages)
			}
			break
		}
		body = fmt.Sprintf(`{"cursor":"%s"}`, page.Cursor)
	}
	if strings.Join(got, ",") != strings.Join(want, ",") {
		t.Errorf("listed %q", got)
	}
}

func TestProjectorServicesAreFoundAndStopWhileSomebodyWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	srv := w.serve(k)
	s := api.NewProjectorServices(w.srv.Conn(t), srv.routes, api.ServiceConfig{Parallel: 1})
	if err := s.Start(journaltest.Context(t)); err != nil {
		t.Fatal(err)
	}
	nc := w.srv.Conn(t)
	var info micro.Info
	if err := json.Unmarshal(request(t, nc, "$SRV.INFO.palimpsest-projector", "").Data, &info); err != nil || len(info.Endpoints) != 5 || info.Endpoints[0].QueueGroup != "palimpsest-projector" {
		t.Errorf("%+v, %v", info, err)
	}
	var st struct{ CaughtUp *bool }
	if err := json.Unmarshal(request(t, nc, "palimpsest.status", "").Data, &st); err != nil || st.CaughtUp == nil {
		t.Errorf("status: %+v, %v", st, err)
	}
	var stats micro.Stats
	if err := json.Unmarshal(request(t, nc, "$SRV.STATS.palimpsest-projector", "").Data, &stats); err != nil || stats.Endpoints[4].NumRequests != 1 {
		t.Errorf("%+v, %v", stats, err)
	}
	w.append("s", user("x"))
	answer := make(chan *nats.Msg, 1)
	sub, err := nc.ChanSubscribe("answer", answer)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := nc.PublishRequest("palimpsest.messages.s", "answer", []byte(`{"minSeq":99,"timeout":"60s"}`)); err != nil {
		t.Fatal(err)
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(journaltest.Context(t), 30*time.Second)
	defer cancel()
	if err := s.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if m := journaltest.Await(t, "an answer", answer); m.Header.Get(micro.ErrorCodeHeader) != "503" {
		t.Errorf("%v %s", m.Header, m.Data)
	}
}
