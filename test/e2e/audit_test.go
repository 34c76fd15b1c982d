package e2e_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// run runs a command that must end with an exit code.
func run(t *testing.T, code int, name string, args ...string) string {
	t.Helper()
	r := harness.Run(t, name, args...)
	if r.Code != code {
		t.Fatalf("%s %s: exit code %d, want %d\n%s", name, strings.Join(args, " "), r.Code, code, r.Output())
	}
	return r.Output()
}

// A session's past is told over HTTP and on the command line, attested, archived, verified without
// the store, and erased.
func TestHistoryArchiveAndErasure(t *testing.T) {
	t.Parallel()
	s := startStack(t, "")
	ctx := t.Context()
	nats := "--nats=" + s.nats
	mustAppend(t, s.appender, "told", notes("alpha", "beta", "gamma"))
	summary := json.RawMessage(`{"type":"user/message","surfaceOp":{"op":"replace","startSeq":0,"endSeq":1},"sourceEventSeqs":[0,1],"data":{"id":"s","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"a summary"}]}}`)
	mustAppend(t, s.appender, "told", []json.RawMessage{summary})

	get := func(call string, options ...harness.Option) map[string]any {
		t.Helper()
		a, err := s.projector.Do(ctx, http.MethodGet, harness.SessionPath("told", "/"+call), nil, options...)
		var out map[string]any
		if err == nil && a.Status == http.StatusOK {
			err = json.Unmarshal(a.Body, &out)
		}
		if err != nil || a.Status != http.StatusOK {
			t.Fatalf("%s: %v, status %d: %s", call, err, a.Status, a.Body)
		}
		return out
	}
	if x := get("explain", harness.Query("seq", "3")); x["onSurface"] != true || len(x["from"].([]any)) != 3 {
		t.Errorf("explain: %v", x)
	}
	if d := get("diff", harness.Query("from", "2"), harness.Query("to", "3")); len(d["went"].([]any)) != 2 || len(d["came"].([]any)) != 1 {
		t.Errorf("diff: %v", d)
	}
	if b := get("blame", harness.Query("text", "beta")); len(b["events"].([]any)) != 1 || b["spans"].([]any)[0].(map[string]any)["to"] != 3.0 {
		t.Errorf("blame: %v", b)
	}
	if u := get("usage"); u["messages"] != 0.0 {
		t.Errorf("usage: %v", u)
	}
	for path, options := range map[string][]harness.Option{
		"explain": nil, "diff": {harness.Query("from", "3"), harness.Query("to", "1")}, "blame": {harness.Query("text", "")},
	} {
		a, err := s.projector.Do(ctx, http.MethodGet, harness.SessionPath("told", "/"+path), nil, options...)
		if err != nil || a.Status != http.StatusBadRequest {
			t.Errorf("%s with bad parameters: %v, status %d: %s", path, err, a.Status, a.Body)
		}
	}
	for args, want := range map[string]string{
		"explain told 0":                          "shadowed by 3",
		"diff told 2 3":                           "1 nodes came, 2 went",
		"blame told beta":                         "from seq 1 until seq 3",
		"replay told --speed=max --from=2":        `"seq":2`,
		"usage --all":                             "1 sessions: 0 assistant messages",
		"explain told 3 --json":                   `"replaced":[0,1]`,
		"verify told --json --workers=2":          `"findings":[]`,
		"diff told --json -- -1 0":                `"came":[{"seq":0`,
		"usage told --json":                       `"messages":0`,
		"blame told --json beta":                  `"spans":[{"from":1,"to":3}]`,
		"replay told --speed=1000x --max-gap=1ms": `"seq":3`,
	} {
		words := strings.Fields(args)
		if got := run(t, 0, "projector", append([]string{words[0], nats}, words[1:]...)...); !strings.Contains(got, want) {
			t.Errorf("%s: %q is not in %s", args, want, got)
		}
	}

	dir := t.TempDir()
	archive := filepath.Join(dir, "all.tar.zst")
	run(t, 0, "projector", "export", nats, "--all", "--archive", "-o", archive)
	run(t, 0, "projector", "verify", archive)
	run(t, 0, "projector", "export", nats, "--all", filepath.Join(dir, "files"))
	run(t, 0, "projector", "verify", filepath.Join(dir, "files", "told.jsonl"))
	run(t, 2, "projector", "verify", archive, "told")
	run(t, 2, "projector", "export", nats)
	other := harness.Appender{}.Start(t)
	if got := run(t, 0, "appender", "import", "--nats", other.NATS, archive); !strings.Contains(got, "4 imported") {
		t.Errorf("import of the archive: %s", got)
	}

	run(t, 2, "appender", "erase", nats, "told")
	if got := run(t, 0, "appender", "erase", nats, "told", "--reason=asked for", "--by=ann", "--finish"); !strings.Contains(got, "erased at") || !strings.Contains(got, "finished") {
		t.Errorf("erase: %s", got)
	}
	_, err := s.appender.AppendEvents(ctx, "told", notes("late"))
	refused(t, err, http.StatusGone, "session-erased")
	_, _, err = s.appender.Create(ctx, "told", nil)
	refused(t, err, http.StatusGone, "session-erased")
	_, err = s.projector.Messages(ctx, "told")
	refused(t, err, http.StatusGone, "session-erased")
	if page, err := s.projector.Sessions(ctx); err != nil || len(page.Sessions) != 0 {
		t.Errorf("sessions: %v, %+v", err, page)
	}
	if got := run(t, 0, "projector", "verify", nats, "--all"); !strings.Contains(got, "session told was erased at") || !strings.Contains(got, "by ann: asked for") {
		t.Errorf("verify: %s", got)
	}
}

var publicKey = regexp.MustCompile(`U[A-Z2-7]{55}`)

// An appender that was given a key signs while it serves and when it stops, and verify checks it.
func TestCheckpointsAreSignedByTheProgram(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	seed := filepath.Join(dir, "seed")
	key := publicKey.FindString(run(t, 0, "appender", "keygen", seed))
	if key == "" {
		t.Fatal("keygen printed no public key")
	}
	run(t, 1, "appender", "keygen", seed)
	main := harness.Appender{}.Start(t)
	signer := harness.Appender{NATS: main.NATS, Args: []string{"--attest-key", seed, "--attest-every", "100ms"}}.Start(t)
	mustAppend(t, main.Client(), "signed", notes("one"))
	verify := func(want string) error {
		got := run(t, 0, "projector", "verify", "--nats", main.NATS, "--log-only", "--all", "--trusted-key", key)
		if !strings.Contains(got, want) {
			return fmt.Errorf("%q is not in %s", want, got)
		}
		return nil
	}
	harness.Until(t, 30*time.Second, "the checkpoint", func() error { return verify("attested to their last event: 1 sessions") })
	mustAppend(t, main.Client(), "signed", notes("two"))
	signer.Term(t)
	if err := verify("attested to their last event: 1 sessions"); err != nil {
		t.Errorf("after the signer stopped: %v", err)
	}
	run(t, 2, "projector", "verify", "--nats", main.NATS, "--all", "--trusted-key", "nonsense")
}
