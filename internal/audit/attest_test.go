package audit_test

import (
	"crypto/ed25519"
	"encoding/base32"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
)

// attester signs with a new key.
func (w *world) attester(t *testing.T) *audit.Attester {
	t.Helper()
	w.keyFile = filepath.Join(t.TempDir(), "attest.seed")
	public, err := audit.NewKeyFile(w.keyFile)
	if err != nil {
		t.Fatal(err)
	}
	at, err := audit.NewAttester(journaltest.Context(t), w.log, w.headers, w.key(t), audit.AttestConfig{Now: func() time.Time { return time.UnixMilli(1767225600000) }})
	if err != nil || at.PublicKey() != public {
		t.Fatalf("%v, public key %s", err, at.PublicKey())
	}
	return at
}

func (w *world) key(t *testing.T) nkeys.KeyPair {
	t.Helper()
	key, err := audit.ReadKeyFile(w.keyFile)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func (w *world) round(t *testing.T, at *audit.Attester, want int) {
	t.Helper()
	if n, err := at.Round(journaltest.Context(t)); err != nil || n != want {
		t.Errorf("attested %d sessions, want %d: %v", n, want, err)
	}
}

func findings(r *audit.Report, check string) (out []string) {
	for _, f := range r.Findings {
		if f.Check == check {
			out = append(out, fmt.Sprintf("%s@%d", f.Session, *f.Seq))
		}
	}
	return out
}

// Whatever changed since is signed in each round, and verify says up to where that reaches.
func TestAttestationsReachTheLogsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append("a", user("zero"), user("one"))
	w.append("b", user("zero"))
	at := w.attester(t)
	w.round(t, at, 2)
	w.round(t, at, 0)
	w.append("a", user("two"))
	w.append("a", user("three"))
	w.round(t, at, 1)
	w.append("a", user("four"))
	w.append("c", user("zero"))
	w.stop()
	o := audit.Options{LogOnly: true, Trusted: []string{at.PublicKey()}}
	r := w.all(o)
	if !r.OK() || r.Attested != 1 || r.PartlyAttested != 1 || r.Unattested != 1 {
		t.Errorf("%+v", r)
	}
	s, err := w.Session(journaltest.Context(t), "a", o)
	if err != nil || s.AttestedSeq == nil || *s.AttestedSeq != 3 || s.LastSeq != 4 {
		t.Errorf("%v, %+v", err, s)
	}
	// Who goes on later signs what is new, once.
	again, err := audit.NewAttester(journaltest.Context(t), w.log, w.headers, w.key(t), audit.AttestConfig{})
	if err != nil {
		t.Fatal(err)
	}
	w.round(t, again, 2)
	if r := w.all(audit.Options{LogOnly: true, Trusted: []string{at.PublicKey(), again.PublicKey()}}); !r.OK() || r.Attested != 3 {
		t.Errorf("%+v", r)
	}
	// Who trusts somebody else is told that nothing is attested.
	other := filepath.Join(t.TempDir(), "other")
	public, err := audit.NewKeyFile(other)
	if err != nil {
		t.Fatal(err)
	}
	if r := w.all(audit.Options{LogOnly: true, Trusted: []string{public}}); !r.OK() || r.Unattested != 3 {
		t.Errorf("%+v", r)
	}
}

// An attestation is checked with nothing but the documentation: the seven lines, and ed25519.
func TestAttestationIsCheckedByHand(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append("café 1", user("zero"))
	at := w.attester(t)
	w.round(t, at, 1)
	s, err := w.js.Stream(journaltest.Context(t), "ATTESTATIONS")
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.GetLastMsgForSubject(journaltest.Context(t), "attestations.caf=C3=A9=201")
	if err != nil {
		t.Fatal(err)
	}
	var a map[string]any
	if err := json.Unmarshal(m.Data, &a); err != nil {
		t.Fatal(err)
	}
	signed := fmt.Sprintf("palimpsest-attestation/1\ncaf=C3=A9=201\n%v\n%v\n%s\n%s\n2026-01-01T00:00:00.000Z\n", a["seq"], a["streamSeq"], a["digest"], a["chain"])
	raw, err := base32.StdEncoding.WithPadding(base32.NoPadding).DecodeString(a["key"].(string))
	if err != nil || len(raw) != 35 {
		t.Fatalf("%v, %d bytes", err, len(raw))
	}
	sig, err := base64.StdEncoding.DecodeString(a["sig"].(string))
	if err != nil || !ed25519.Verify(raw[1:33], []byte(signed), sig) {
		t.Errorf("the signature over %q does not verify: %v", signed, err)
	}
}

// An operator who rewrites history with all that hangs on it, digests, chain and heads, is found
// out by who trusts the key. Without it, nothing is to be seen.
func TestConsistentRewriteIsFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, id := range []string{"changed", "cut", "merged", "good"} {
		w.append(id, user("zero"))
		w.append(id, user("secret plan"))
		w.append(id, user("two"))
	}
	at := w.attester(t)
	w.round(t, at, 4)
	ctx := journaltest.Context(t)
	kept, err := w.Attestations(ctx, "")
	if err != nil || len(kept) != 4 {
		t.Fatalf("%v, attestations of %d sessions", err, len(kept))
	}
	w.settle("good")

	// The new history, written as an appender would have written it.
	writers := map[string]*journaltest.Writer{}
	w.rewrite(func(ms []*jetstream.RawStreamMsg) {
		for _, m := range ms {
			c, err := events.ParseCommit(m.Header, m.Data, m.Sequence)
			if err != nil {
				t.Fatal(err)
			}
			h, err := w.headers.Get(ctx, c.Session)
			if err != nil {
				t.Fatal(err)
			}
			wr := writers[c.Session]
			if wr == nil {
				wr = journaltest.NewWriter(c.Session, h.Raw)
				writers[c.Session] = wr
			}
			lines := strings.Split(strings.TrimSuffix(string(m.Data), "\n"), "\n")
			switch {
			case c.Session == "good":
				continue
			case c.Session == "changed" && c.First == 1:
				lines[0] = strings.Replace(lines[0], "secret", "public", 1)
			case c.Session == "cut" && c.First == 2, c.Session == "merged" && c.First == 0:
				m.Subject = ""
				continue
			case c.Session == "merged" && c.First == 1:
				lines = []string{line("user/message", 0, `,"surfaceOp":"append"`, message("zero")), lines[0]}
			}
			n := wr.Lines(c.ID, lines...)
			m.Data, m.Header = n.Body, n.Header()
		}
	})
	// The heads are made anew from it.
	for _, b := range []string{"SURFACES", "CHECKPOINTS"} {
		s, err := w.js.Stream(ctx, "KV_"+b)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Purge(ctx); err != nil {
			t.Fatal(err)
		}
	}
	w.project(t, "changed", "cut", "merged", "good")

	if r := w.all(audit.Options{}); !r.OK() {
		t.Errorf("without a key something was found: %v", r.Findings)
	}
	r := w.all(audit.Options{Trusted: []string{at.PublicKey()}})
	if got, want := findings(r, audit.CheckAttested), []string{"changed@2", "cut@2", "merged@2"}; !slices.Equal(got, want) || len(r.Findings) != len(want) || r.Attested != 1 {
		t.Errorf("found %v, want %v alone", r.Findings, want)
	}
	// Nor does it help to take the attestations away, when the auditor has kept a copy.
	s, err := w.js.Stream(ctx, "ATTESTATIONS")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Purge(ctx); err != nil {
		t.Fatal(err)
	}
	r = w.all(audit.Options{Trusted: []string{at.PublicKey()}, Copies: kept})
	if got := findings(r, audit.CheckAttested); len(got) != 3 {
		t.Errorf("with copies: found %v", r.Findings)
	}
	// A forged one is a finding, too.
	forged := *kept["good"][0]
	forged.Digest = strings.Repeat("0", 64)
	r = w.all(audit.Options{Trusted: []string{at.PublicKey()}, Copies: map[string][]*audit.Attestation{"good": {&forged}}})
	if got := findings(r, audit.CheckAttested); !slices.Equal(got, []string{"good@2"}) {
		t.Errorf("a forged attestation: %v", r.Findings)
	}
}

// What does not continue what was signed is not signed.
func TestAttesterSignsNoOtherHistory(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append("s", user("zero"))
	w.append("s", user("one"))
	at := w.attester(t)
	w.round(t, at, 1)
	w.stop()
	w.rewrite(func(ms []*jetstream.RawStreamMsg) {
		h, _ := w.headers.Get(journaltest.Context(t), "s")
		wr := journaltest.NewWriter("s", h.Raw)
		for _, m := range ms {
			lines := strings.Split(strings.TrimSuffix(strings.Replace(string(m.Data), "one", "two", 1), "\n"), "\n")
			n := wr.Lines(fmt.Sprint("new-", m.Sequence), lines...)
			m.Data, m.Header = n.Body, n.Header()
		}
	})
	w.store("s", func(seq events.Seq) string { return evil(seq) }, nil)
	w.round(t, at, 0)
}

// A seed that others can read is not used, and none is written over.
func TestKeyFilesAreGuarded(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "key")
	if _, err := audit.NewKeyFile(path); err != nil {
		t.Fatal(err)
	}
	if _, err := audit.NewKeyFile(path); err == nil || !strings.Contains(err.Error(), "exists already") {
		t.Errorf("it was written over: %v", err)
	}
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := audit.ReadKeyFile(path); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("a seed that all can read: %v", err)
	}
	if err := os.WriteFile(path+"2", []byte("SUAX"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := audit.ReadKeyFile(path + "2"); err == nil || !strings.Contains(err.Error(), "nkey seed") {
		t.Errorf("no seed: %v", err)
	}
}

// Rounds go on while sessions are appended to, and the last one reaches the end.
func TestRoundsGoOnUnderAppends(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	at := w.attester(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := range 300 {
			w.append(fmt.Sprintf("s%d", n%7), user("x"))
		}
	}()
	slowest := time.Duration(0)
	for moving := true; moving; {
		select {
		case <-done:
			moving = false
		default:
		}
		began := time.Now()
		if _, err := at.Round(journaltest.Context(t)); err != nil {
			t.Fatal(err)
		}
		slowest = max(slowest, time.Since(began))
	}
	t.Logf("the slowest round took %v", slowest)
	if r := w.all(audit.Options{LogOnly: true, Trusted: []string{at.PublicKey()}}); !r.OK() || r.Attested != 7 {
		t.Errorf("%+v", r)
	}
}
