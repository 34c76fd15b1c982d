package e2e_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// numbersIn answers the whole numbers of a text, grouped or not.
func numbersIn(text string) []string { return regexp.MustCompile(`\d[\d,_]*`).FindAllString(text, -1) }

// The stream is open to anyone with a NATS client and a CloudEvents library:
// each message is a valid event, and the bodies one after another are the
// exported session file.
func TestStreamIsReadableWithTheBareClient(t *testing.T) {
	t.Parallel()
	s := startStack(t, "enforce")
	// Ids that need escaping in subjects and in headers.
	for _, session := range []string{"plain", "a.b/c d*>é"} {
		t.Run(session, func(t *testing.T) {
			t.Parallel()
			header := []byte(fmt.Sprintf(`{"version":3,"id":%q,"createdAt":1767225600000,"isSeeded":false,"delegationDepth":0,"x-rate":1.10}`, session))
			if _, _, err := s.appender.Create(t.Context(), session, header); err != nil {
				t.Fatal(err)
			}
			begun := time.Now().Add(-time.Second)
			script := harness.NewScript(3, 30)
			var receipts []harness.Receipt
			for _, n := range []int{1, 4, 25, 30} {
				receipts = append(receipts, mustAppend(t, s.appender, session, script.Next(n)))
			}
			log := harness.OpenLog(t, s.nats)
			commits, err := log.Commits(t.Context(), session)
			if err != nil {
				t.Fatal(err)
			}
			if len(commits) != len(receipts) {
				t.Fatalf("%d messages for %d appends", len(commits), len(receipts))
			}
			kept, err := log.Value(t.Context(), harness.HeaderBucket, harness.Token(session))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(kept, header) {
				t.Errorf("the header is kept as %s, given as %s", kept, header)
			}
			if _, err := harness.CheckChain(session, kept, commits); err != nil {
				t.Error(err)
			}
			var bodies []byte
			for i, c := range commits {
				if err := c.Event.Validate(); err != nil {
					t.Errorf("message %d is no valid CloudEvent: %v", i, err)
				}
				want := map[string]string{
					"specversion":     "1.0",
					"id":              receipts[i].Commit,
					"source":          "/sessions/" + harness.Token(session),
					"type":            "palimpsest.session.commit.v1",
					"subject":         session,
					"datacontenttype": harness.TypeNDJSON,
					"format":          "3",
					"actor":           "-",
					"digest":          receipts[i].Digest,
					"firstseq":        fmt.Sprint(receipts[i].FirstSeq),
					"lastseq":         fmt.Sprint(receipts[i].LastSeq),
				}
				for name, value := range want {
					if c.Attribute[name] != value {
						t.Errorf("message %d: ce-%s is %q, want %q", i, name, c.Attribute[name], value)
					}
				}
				if c.MsgID != receipts[i].Commit {
					t.Errorf("message %d: Nats-Msg-Id %q, commit id %q", i, c.MsgID, receipts[i].Commit)
				}
				if at := c.Event.Time(); at.Before(begun) || at.After(time.Now().Add(time.Second)) {
					t.Errorf("message %d: ce-time %v", i, at)
				}
				bodies = append(bodies, c.Body...)
			}

			exported, err := s.projector.Export(t.Context(), session)
			if err != nil {
				t.Fatal(err)
			}
			line, events, _ := bytes.Cut(exported, []byte("\n"))
			if !bytes.Equal(events, bodies) {
				t.Errorf("the bodies are not the exported file:\n%s\n%s", bodies, events)
			}
			if err := sameHeaderLine(line, header); err != nil {
				t.Errorf("header line of the export: %v", err)
			}
			checkDigestScript(t, s, session, exported, receipts[len(receipts)-1].Digest)
		})
	}
}

// sameHeaderLine compares the header line of a session file with a header.
func sameHeaderLine(line, header []byte) error {
	if !bytes.Contains(line, []byte("1.10")) {
		return fmt.Errorf("a number changed: %s", line)
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(header, &members); err != nil {
		return err
	}
	members["type"] = json.RawMessage(`"session"`)
	want, err := json.Marshal(members)
	if err != nil {
		return err
	}
	return harness.SameJSON(line, want)
}

// checkDigestScript recomputes the digest with a script that knows nothing of
// the product.
func checkDigestScript(t *testing.T, s stack, session string, exported []byte, want string) {
	t.Helper()
	for _, program := range []*harness.Client{s.appender, s.projector} {
		status, err := program.Status(t.Context(), session)
		if err != nil {
			t.Fatal(err)
		}
		if status.Digest != want {
			t.Errorf("the status gives the digest %s, the last commit %s", status.Digest, want)
		}
	}
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 to recompute the digest with")
	}
	file := filepath.Join(t.TempDir(), "session.jsonl")
	if err := os.WriteFile(file, exported, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), python, "digest.py", session, file).CombinedOutput()
	if err != nil {
		t.Fatalf("digest.py: %v\n%s", err, out)
	}
	if got := strings.TrimSpace(string(out)); got != want {
		t.Errorf("digest.py prints %s, the last commit has %s", got, want)
	}
}

// The verifier must find what was done behind the product's back, or its
// silence elsewhere means nothing.
func TestVerifyFindsWhatWasTamperedWith(t *testing.T) {
	t.Parallel()
	prepare := func(t *testing.T) (stack, *harness.Log) {
		s := startStack(t, "enforce")
		for _, session := range []string{"victim", "bystander"} {
			script := harness.NewScript(5, 30)
			for range 10 {
				mustAppend(t, s.appender, session, script.Next(6))
			}
			if _, err := s.projector.Messages(t.Context(), session, harness.MinSeq(59)); err != nil {
				t.Fatal(err)
			}
		}
		verifyAll(t, s.nats)
		return s, harness.OpenLog(t, s.nats)
	}
	finds := func(t *testing.T, s stack) {
		t.Helper()
		for _, args := range [][]string{{"--all"}, {"victim"}} {
			r := harness.Run(t, "projector", slices.Concat([]string{"verify", "--nats", s.nats}, args)...)
			if r.Code != 1 {
				t.Errorf("verify %v: exit code %d, want 1\n%s", args, r.Code, r.Output())
			}
			if !strings.Contains(r.Output(), "victim") {
				t.Errorf("verify %v does not name the session:\n%s", args, r.Output())
			}
		}
		if r := harness.Run(t, "projector", "verify", "--nats", s.nats, "bystander"); r.Code != 0 {
			t.Errorf("verify of the other session: exit code %d\n%s", r.Code, r.Output())
		}
	}

	t.Run("a message deleted from the stream", func(t *testing.T) {
		t.Parallel()
		s, log := prepare(t)
		commits, err := log.Commits(t.Context(), "victim")
		if err != nil {
			t.Fatal(err)
		}
		if err := log.Delete(t.Context(), commits[4].StreamSeq); err != nil {
			t.Fatal(err)
		}
		finds(t, s)
	})
	t.Run("a head that says something else", func(t *testing.T) {
		t.Parallel()
		s, log := prepare(t)
		value, err := log.Value(t.Context(), harness.SurfaceBucket, "victim")
		if err != nil {
			t.Fatal(err)
		}
		changed := regexp.MustCompile(`"replaceGeneration":(\d+)`).ReplaceAll(value, []byte(`"replaceGeneration":9${1}`))
		if bytes.Equal(changed, value) {
			t.Fatalf("no replaceGeneration in the head %s", value)
		}
		if err := log.Put(t.Context(), harness.SurfaceBucket, "victim", changed); err != nil {
			t.Fatal(err)
		}
		finds(t, s)
	})
}
