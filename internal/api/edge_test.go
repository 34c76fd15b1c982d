package api_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/api"
	"palimpsest/internal/auth"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
)

// token is a secret and the line that knows it.
func token(t testing.TB, name string, grants ...auth.Grant) (secret, line string) {
	t.Helper()
	secret, e, err := auth.NewToken(name, grants, time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	return secret, e.Line() + "\n"
}

func grant(patterns string, scopes ...auth.Scope) auth.Grant {
	g := auth.Grant{Scopes: scopes}
	for _, p := range strings.Fields(patterns) {
		g.Sessions = append(g.Sessions, auth.Pattern(p))
	}
	return g
}

func authenticator(t testing.TB, lines ...string) *auth.Authenticator {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(path, []byte(strings.Join(lines, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	a, err := auth.New(auth.Config{TokenFile: path})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv.URL
}

// ask makes a request and returns status and body.
func ask(t *testing.T, method, url, secret, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(journaltest.Context(t), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if secret != "" {
		req.Header.Set("Authorization", "Bearer "+secret)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.Header.Get("Content-Type") == "text/event-stream" { // has no end
		return resp.StatusCode, ""
	}
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	http.DefaultClient.CloseIdleConnections()
	return resp.StatusCode, string(b)
}

const userEvent = `{"type":"user/message","surfaceOp":"append","data":{"id":"m","role":"user","content":[{"type":"text","text":"x"}],"source":{"kind":"user"}}}`

// matrix says which scopes open a call on a session that the caller's pattern covers. What is
// not about one session needs the pattern * too.
var matrix = map[string]struct {
	scopes string // any of them; "any": whoever is recognised; "all": everybody
	body   string // %s is the session
	on     string // session (default), body, list, service
}{
	"POST /v1/sessions":              {"append", `{"id":"%s"}`, "body"},
	"POST /v1/sessions/{id}/events":  {"append", userEvent, ""},
	"POST /v1/sessions/{id}/writer":  {"append", `{"writer":"w"}`, ""},
	"POST /v1/sessions/{id}/compact": {"append", `{"startSeq":0,"endSeq":0,"summary":"s"}`, ""},
	"POST /v1/sessions/{id}/prune":   {"append", `{"seq":0}`, ""},
	"POST /v1/sessions/{id}/fork":    {"read+append", `{"id":"%s-child"}`, ""},
	"POST /v1/sessions/{id}/repair":  {"repair", `{}`, ""},
	"POST /v1/sessions/{id}/retry":   {"repair", ``, ""},
	"POST /v1/sessions/{id}/skip":    {"repair", `{"by":"op","reason":"r"}`, ""},
	"POST /v1/sessions/{id}/erase":   {"erase", `{}`, ""},
	"DELETE /v1/sessions/{id}":       {"erase", ``, ""},
	"GET /v1/sessions/{id}":          {"read append", ``, ""},
	"GET /v1/sessions":               {"any", ``, "list"},
	"GET /v1/feed":                   {"read", ``, "service"},
	"GET /v1/usage":                  {"read", ``, "service"},
	"GET /v1/workers":                {"admin", ``, "service"},
	"GET /v1/status":                 {"admin", ``, "service"},
	"GET /metrics":                   {"any", ``, "list"},
	"GET /healthz":                   {"all", ``, "list"},
	"GET /readyz":                    {"all", ``, "list"},
}

func init() {
	for _, tail := range []string{"messages", "surface", "transcript", "events", "export", "watch", "verify", "explain", "diff", "blame", "usage"} {
		row := matrix["GET /v1/sessions/{id}"]
		row.scopes = "read"
		matrix["GET /v1/sessions/{id}/"+tail] = row
	}
}

func TestEachScopeOpensItsCallsOnItsSessionsAndNothingElse(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	secrets := map[string]string{}
	var lines []string
	for _, scopes := range [][]auth.Scope{{auth.Append}, {auth.Read}, {auth.Repair}, {auth.Erase}, {auth.Admin}, {auth.Read, auth.Append}} {
		for _, patterns := range []string{"own-*", "*"} {
			name := fmt.Sprint(scopes, patterns)
			secret, line := token(t, name, grant(patterns, scopes...))
			secrets[name], lines = secret, append(lines, line)
		}
	}
	edge := func() *api.Edge { return &api.Edge{Auth: authenticator(t, lines...)} }
	programs := []struct {
		name, url string
		routes    []string
	}{
		{"a", serve(t, w.appenderAPI(edge())), api.Routes(w.appenderAPI(nil))},
		{"p", serve(t, w.projectorAPI(edge())), api.Routes(w.projectorAPI(nil))},
	}
	n := 0
	for _, p := range programs {
		for _, route := range p.routes {
			row, ok := matrix[route]
			if !ok {
				t.Errorf("%s is in no row of the matrix: say in it, and in the table of rights, which scope opens it", route)
				continue
			}
			method, path, _ := strings.Cut(route, " ")
			for _, scopes := range [][]auth.Scope{nil, {auth.Append}, {auth.Read}, {auth.Repair}, {auth.Erase}, {auth.Admin}, {auth.Read, auth.Append}} {
				for _, patterns := range []string{"own-*", "*"} {
					for _, session := range []string{"own-" + p.name, "foreign-" + p.name} { // a watch of one that is there would not end
						want := expected(row.scopes, row.on, scopes, patterns, session)
						body := row.body
						if strings.Contains(body, "%s") {
							body = fmt.Sprintf(body, session)
						}
						url := p.url + strings.Replace(path, "{id}", session, 1)
						status, answer := ask(t, method, url, secrets[fmt.Sprint(scopes, patterns)], body)
						got := "in"
						if status == 401 || status == 403 {
							got = fmt.Sprint(status)
						}
						if status >= 500 && status != 503 && status != 504 {
							t.Errorf("%s: status %d: %s", route, status, answer)
						}
						if got != want {
							t.Errorf("%s on %s with %v on %s: status %d, want %s: %s", route, session, scopes, patterns, status, want, answer)
						}
						n++
					}
				}
			}
		}
	}
	t.Logf("%d combinations", n)
}

// expected is the right answer, from the matrix alone.
func expected(needs, on string, scopes []auth.Scope, patterns, session string) string {
	if needs == "all" {
		return "in"
	}
	if scopes == nil {
		return "401"
	}
	covered := patterns == "*" || on == "list" || on != "service" && strings.HasPrefix(session, "own-")
	has := func(s string) bool {
		return slices.Contains(scopes, auth.Scope(s)) || slices.Contains(scopes, auth.Admin)
	}
	open := needs == "any"
	for _, s := range strings.Fields(needs) {
		all := true
		for _, part := range strings.Split(s, "+") {
			all = all && has(part)
		}
		open = open || all
	}
	if open && covered {
		return "in"
	}
	return "403"
}

func TestARefusalDoesNotTellWhetherThereIsSuchASession(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	ctx := journaltest.Context(t)
	if _, _, err := w.appender.Create(ctx, "foreign-q1", nil); err != nil {
		t.Fatal(err)
	}
	secret, line := token(t, "alice", grant("own-*", auth.Append, auth.Read, auth.Repair, auth.Erase))
	e := &api.Edge{Auth: authenticator(t, line)}
	a, p := serve(t, w.appenderAPI(e)), serve(t, w.projectorAPI(&api.Edge{Auth: e.Auth}))
	for _, c := range []struct{ method, url, body string }{
		{"GET", a + "/v1/sessions/foreign-%s", ""},
		{"POST", a + "/v1/sessions/foreign-%s/events", userEvent},
		{"POST", a + "/v1/sessions", `{"id":"foreign-%s"}`},
		{"POST", a + "/v1/sessions", `{"header":{"version":3,"id":"foreign-%s"}}`},
		{"POST", a + "/v1/sessions", `{"id":"own-1","header":{"parentSession":"foreign-%s"}}`},
		{"POST", a + "/v1/sessions/foreign-%s/fork", `{"id":"own-2"}`},
		{"GET", p + "/v1/sessions/foreign-%s/messages", ""},
		{"GET", p + "/v1/sessions/foreign-%s/watch", ""},
		{"HEAD", p + "/v1/sessions/foreign-%s/export", ""},
	} {
		answers := map[string]bool{}
		for _, which := range []string{"q1", "q2"} {
			fill := func(s string) string { return strings.ReplaceAll(s, "%s", which) }
			status, body := ask(t, c.method, fill(c.url), secret, fill(c.body))
			if status != http.StatusForbidden {
				t.Errorf("%s %s %s: status %d, want 403: %s", c.method, fill(c.url), fill(c.body), status, body)
			}
			answers[strings.ReplaceAll(body, which, "")] = true
		}
		if len(answers) != 1 {
			t.Errorf("%s %s: the answers differ: %v", c.method, c.url, answers)
		}
	}
}

func TestListsHoldWhatTheCallerMayReadAndCursorsNameNothingElse(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	ctx := journaltest.Context(t)
	for i := range 4 {
		for _, kind := range []string{"own", "foreign", "zother"} {
			if _, _, err := w.appender.Create(ctx, fmt.Sprintf("%s-%d", kind, i), nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	secret, line := token(t, "alice", grant("own-*", auth.Read), grant("zother-*", auth.Append))
	url := serve(t, w.projectorAPI(&api.Edge{Auth: authenticator(t, line)}))
	var got []string
	pages := 0
	for cursor := ""; ; pages++ {
		status, body := ask(t, "GET", url+"/v1/sessions?limit=3&cursor="+cursor, secret, "")
		var page struct {
			Sessions []struct{ Session string }
			Cursor   string
		}
		if err := json.Unmarshal([]byte(body), &page); err != nil || status != 200 {
			t.Fatalf("status %d, %v: %s", status, err, body)
		}
		for _, s := range page.Sessions {
			got = append(got, s.Session)
		}
		if cursor = page.Cursor; cursor == "" {
			break
		}
	}
	if want := []string{"own-0", "own-1", "own-2", "own-3"}; !slices.Equal(got, want) || pages > 1 {
		t.Errorf("found %v after %d pages, want %v", got, pages+1, want)
	}
}

func TestTheCallerIsTheActorOfTheCommit(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	secret, line := token(t, `al ice "é"`, grant("*", auth.Append, auth.Read, auth.Repair))
	url := serve(t, w.appenderAPI(&api.Edge{Auth: authenticator(t, line)}))
	call := func(path, body string) {
		t.Helper()
		if status, answer := ask(t, "POST", url+"/v1/sessions/"+path, secret, body); status != 201 && status != 200 {
			t.Fatalf("%s: status %d: %s", path, status, answer)
		}
	}
	call("s/events", userEvent)
	call("s/writer", `{"writer":"w"}`)
	call("s/events?expectedSeq=2", `[{"type":"turn/start","data":{"turn":1}}]`)
	call("s/repair", `{}`)
	call("s/fork", `{"id":"c","at":0}`)
	if _, err := w.appender.Append(journaltest.Context(t), appendOf("free")); err != nil {
		t.Fatal(err)
	}
	for session, want := range map[string]string{"s": `al ice "é"`, "c": `al ice "é"`, "free": events.NoActor} {
		n := 0
		err := w.log.ReadToEnd(journaltest.Context(t), session, 0, func(c *events.Commit) error {
			n++
			if c.Actor != want {
				t.Errorf("%s: commit of seq %d to %d: actor %q, want %q", session, c.First, c.Last, c.Actor, want)
			}
			return nil
		})
		if err != nil || n == 0 {
			t.Errorf("%s: %d commits, %v", session, n, err)
		}
	}
}

func TestACallerBeyondItsRateIsToldToWaitAndOthersAreNot(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	slow, slowLine := token(t, "slow", grant("*", auth.Read))
	fast, fastLine := token(t, "fast", grant("*", auth.Read))
	fastLine = strings.Replace(fastLine, `"grants"`, `"rate":1000,"burst":1000,"grants"`, 1)
	url := serve(t, w.projectorAPI(&api.Edge{Auth: authenticator(t, slowLine, fastLine), Rate: 0.001, Burst: 2}))
	var got []int
	for range 4 {
		status, _ := ask(t, "GET", url+"/v1/sessions", slow, "")
		got = append(got, status)
	}
	if want := []int{200, 200, 429, 429}; !slices.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
	for range 4 {
		if status, body := ask(t, "GET", url+"/v1/sessions", fast, ""); status != 200 {
			t.Errorf("another caller: status %d: %s", status, body)
		}
	}
	if _, metrics := ask(t, "GET", url+"/metrics", fast, ""); !strings.Contains(metrics, "palimpsest_http_rate_limited_total 2") {
		t.Error("the refusals are not in the metrics")
	}
}

func TestUnreadableCredentialsAreRefusedWithoutTheirText(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	_, line := token(t, "alice", grant("*", auth.Read))
	url := serve(t, w.projectorAPI(&api.Edge{Auth: authenticator(t, line)}))
	for _, given := range [][]string{nil, {""}, {"Bearer"}, {"Bearer "}, {"Basic c2VjcmV0"}, {"Bearer secret"}, {"Bearer a.b.c"}, {"Bearer x", "Bearer y"}, {strings.Repeat("secret", 1000)}} {
		req, err := http.NewRequestWithContext(journaltest.Context(t), "GET", url+"/v1/sessions", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header["Authorization"] = given
		resp, err := http.DefaultTransport.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != 401 || !strings.HasPrefix(resp.Header.Get("WWW-Authenticate"), "Bearer") || strings.Contains(string(body), "secret") {
			t.Errorf("%.40q: status %d, WWW-Authenticate %q: %s", given, resp.StatusCode, resp.Header.Get("WWW-Authenticate"), body)
		}
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

// A body that never comes must not hold a connection, whoever refuses the request.
func TestARefusedRequestWhoseBodyStallsIsCutOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	_, line := token(t, "alice", grant("*", auth.Read))
	guarded, open := serve(t, w.appenderAPI(&api.Edge{Auth: authenticator(t, line)})), serve(t, w.projectorAPI(nil))
	for name, c := range map[string]struct{ url, request, status string }{
		"no token":        {guarded, "POST /v1/sessions/s/events HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", "401"},
		"GET with a body": {open, "GET /v1/sessions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", "400"},
	} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(journaltest.Deadline)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, c.request); err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(conn) // ends when the server closes
		if err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 "+c.status) {
			t.Errorf("%s: %v, answer %.60q", name, err, b)
		}
	}
}

func TestReadsAreRecordedWithActorAndOutcome(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	ctx := journaltest.Context(t)
	if _, err := w.appender.Append(ctx, appendOf("own-1")); err != nil {
		t.Fatal(err)
	}
	secret, line := token(t, "alice", grant("own-*", auth.Read))
	l := api.NewAccessLog(w.js, api.AccessConfig{})
	if err := l.Start(ctx); err != nil {
		t.Fatal(err)
	}
	url := serve(t, w.projectorAPI(&api.Edge{Auth: authenticator(t, line), Access: l}))
	for _, c := range []struct {
		path string
		want int
	}{
		{"/v1/sessions/own-1/export", 200}, {"/v1/sessions/own-1/events?limit=1", 200}, {"/v1/sessions/own-2/messages", 404},
		{"/v1/sessions", 200}, {"/v1/sessions/foreign/export", 403}, {"/healthz", 200},
	} {
		if status, body := ask(t, "GET", url+c.path, secret, ""); status != c.want {
			t.Errorf("%s: status %d, want %d: %s", c.path, status, c.want, body)
		}
	}
	if err := l.Stop(ctx); err != nil { // stores what waits
		t.Fatal(err)
	}
	var got []string
	s, err := w.js.Stream(ctx, "ACCESS")
	if err != nil {
		t.Fatal(err)
	}
	for seq := uint64(1); seq <= s.CachedInfo().State.LastSeq; seq++ {
		var m *jetstream.RawStreamMsg
		if m, err = s.GetMsg(ctx, seq); err != nil {
			t.Fatal(err)
		}
		var a api.Access
		if err := json.Unmarshal(m.Data, &a); err != nil {
			t.Fatal(err)
		}
		if a.Status == 200 && a.Bytes == 0 || a.Remote == "" || a.Time == "" {
			t.Errorf("incomplete: %s", m.Data)
		}
		got = append(got, fmt.Sprintf("%s %s %s%s %d", m.Subject, a.Actor, a.Path, a.Query, a.Status))
	}
	want := []string{
		"access.session.own-1 alice /v1/sessions/own-1/export 200", "access.session.own-1 alice /v1/sessions/own-1/eventslimit=1 200",
		"access.session.own-2 alice /v1/sessions/own-2/messages 404", "access.list alice /v1/sessions 200",
	}
	if !slices.Equal(got, want) {
		t.Errorf("found\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// What waits when the program stops is stored, and so is what is being stored then.
func TestNoReadGoesUnrecordedAtTheEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	ctx := journaltest.Context(t)
	l := api.NewAccessLog(w.js, api.AccessConfig{})
	if err := l.Start(ctx); err != nil {
		t.Fatal(err)
	}
	const n = 300
	for range n {
		l.Add(api.Access{Session: "s", Actor: "alice", Path: "/v1/sessions/s/messages", Status: 200})
	}
	if err := l.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	s, err := w.js.Stream(ctx, "ACCESS")
	if err != nil {
		t.Fatal(err)
	}
	if got := s.CachedInfo().State.Msgs; got != n {
		t.Errorf("%d of %d records were stored", got, n)
	}
}

// A body that comes bit by bit, and never to its end, holds a connection for as long as one may.
func TestABodyThatDoesNotEndIsCutOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	url := serve(t, api.NewAppender(w.appender, api.AppenderConfig{BodyTime: 100 * time.Millisecond}))
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(journaltest.Deadline)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(conn, "POST /v1/sessions/s/events HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	answered := make(chan string, 1)
	go func() {
		b, err := io.ReadAll(conn)
		if errors.Is(err, os.ErrDeadlineExceeded) { // else a reset, if what was sent meanwhile was not read
			t.Errorf("the connection was still open after %v", journaltest.Deadline)
		}
		answered <- string(b)
	}()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case got := <-answered:
			if got != "" && !strings.HasPrefix(got, "HTTP/1.1 400") {
				t.Errorf("answer %.100q, want 400 or none", got)
			}
			return
		case <-tick.C:
			_, _ = io.WriteString(conn, " ") // fails once the server has hung up
		}
	}
}
