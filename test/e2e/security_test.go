package e2e_test

import (
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// newToken makes a token by the command, as an operator would.
func newToken(t *testing.T, file, name, scopes, sessions string) string {
	t.Helper()
	r := harness.Run(t, "appender", "token", "new", "--name", name, "--scopes", scopes, "--sessions", sessions, "--append", file)
	secret := strings.TrimSpace(r.Stdout)
	if r.Code != 0 || !strings.HasPrefix(secret, "plmp_") {
		t.Fatalf("token new: exit code %d\n%s", r.Code, r.Output())
	}
	return secret
}

// statusOf makes a request with a token.
func statusOf(t *testing.T, method, url, token, body string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode
}

func TestTokensFromTheCommandOpenBothProgramsAndNoSecretIsLogged(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "tokens")
	alice := newToken(t, file, "alice", "append,read", "a-*")
	admin := newToken(t, file, "admin", "admin", "*")
	a := harness.Appender{Args: []string{"--token-file", file, "--log-level", "debug", "--admin-listen", "127.0.0.1:0"}}.Start(t)
	p := harness.Projector{NATS: strings.Replace(a.NATS, "nats://", "nats://user:natssecret@", 1), Args: []string{"--token-file", file, "--access-log", "--log-level", "debug"}}.Start(t)
	event := string(note("n"))
	for _, c := range []struct {
		method, url, token, body string
		want                     int
	}{
		{"POST", a.HTTP + "/v1/sessions/a-1/events", alice, event, 201},
		{"POST", a.HTTP + "/v1/sessions/b-1/events", alice, event, 403},
		{"POST", a.HTTP + "/v1/sessions/a-1/events", "", event, 401},
		{"POST", a.HTTP + "/v1/sessions/a-1/events", alice + "x", event, 401},
		{"GET", p.HTTP + "/v1/sessions/a-1/messages?minSeq=0", alice, "", 200},
		{"GET", p.HTTP + "/v1/sessions/b-1/messages", alice, "", 403},
		{"GET", p.HTTP + "/v1/status", alice, "", 403},
		{"GET", p.HTTP + "/v1/status", admin, "", 200},
		{"GET", p.HTTP + "/metrics", "", "", 401},
	} {
		if got := statusOf(t, c.method, c.url, c.token, c.body); got != c.want {
			t.Errorf("%s %s: status %d, want %d", c.method, c.url, got, c.want)
		}
	}
	// A line that is added counts after SIGHUP, one that is taken away no longer.
	bob := newToken(t, file, "bob", "read", "*")
	lines, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	kept := strings.SplitAfter(string(lines), "\n")[1:] // without alice
	if err := os.WriteFile(file, []byte(strings.Join(kept, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := p.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(time.Minute)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for statusOf(t, "GET", p.HTTP+"/v1/sessions", bob, "") != 200 || statusOf(t, "GET", p.HTTP+"/v1/sessions", alice, "") != 401 {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatal("the token file was not read again")
		}
	}
	for name, url := range map[string]string{"appender": a.HTTP, "projector": p.HTTP} {
		if r := harness.Run(t, name, "health", "--url", url); r.Code != 0 {
			t.Errorf("%s health: exit code %d\n%s", name, r.Code, r.Output())
		}
		if r := harness.Run(t, name, "health", "--url", "http://127.0.0.1:1"); r.Code != 1 {
			t.Errorf("%s health of nothing: exit code %d\n%s", name, r.Code, r.Output())
		}
		r := harness.Run(t, name, "doctor", "--nats", a.NATS, "--json")
		var report struct{ Status string }
		if err := json.Unmarshal([]byte(r.Stdout), &report); err != nil || r.Code != 0 || report.Status == "fail" {
			t.Errorf("%s doctor: exit code %d, %v\n%s", name, r.Code, err, r.Output())
		}
	}
	for name, logged := range map[string]string{"appender": a.Stderr() + a.Stdout(), "projector": p.Stderr() + p.Stdout()} {
		for _, secret := range []string{alice, admin, bob, "natssecret"} {
			if strings.Contains(logged, secret) {
				t.Errorf("%s logged a secret", name)
			}
		}
		if !strings.Contains(logged, "forbidden") {
			t.Errorf("%s did not log the refusals", name)
		}
	}
}

func TestNobodyServesBeyondLoopbackWithoutSayingSo(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"appender":  {"serve", "--listen", "0.0.0.0:0", "--nats-listen", "127.0.0.1:0", "--data", t.TempDir()},
		"projector": {"serve", "--listen", "0.0.0.0:0", "--nats", harness.Appender{}.Start(t).NATS},
	} {
		if r := harness.Run(t, name, args...); r.Code != 2 || !strings.Contains(r.Stderr, "--insecure-no-auth") {
			t.Errorf("%s: exit code %d\n%s", name, r.Code, r.Output())
		}
	}
	a := harness.Appender{Listen: "0.0.0.0:0", Args: []string{"--insecure-no-auth"}}.Start(t)
	if got := statusOf(t, "GET", a.HTTP+"/readyz", "", ""); got != 200 {
		t.Errorf("status %d", got)
	}
	for _, args := range [][]string{
		{"--admin-listen", "0.0.0.0:6060"}, {"--rate", "5"}, {"--jwt-audience", "x"}, {"--token-file", "/nonexistent"}, {"--http-cert", "/nonexistent"}, {"--http-client-ca", "/nonexistent"},
	} {
		r := harness.Run(t, "appender", append([]string{"serve", "--listen", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0", "--data", t.TempDir()}, args...)...)
		if r.Code == 0 || strings.Contains(r.Stderr, "panic") || strings.Contains(r.Stdout, "ready") {
			t.Errorf("%v: exit code %d\n%s", args, r.Code, r.Output())
		}
	}
}
