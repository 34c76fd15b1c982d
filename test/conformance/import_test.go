package conformance_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"palimpsest/test/conformance"
	"palimpsest/test/e2e/harness"
)

// importStack is a log to import into, with both programs on it.
type importStack struct {
	nats                string
	appender, projector *harness.Client
}

func startImportStack(t *testing.T) importStack {
	t.Helper()
	appender := harness.Appender{Invariants: "off"}.Start(t)
	projector := harness.Projector{NATS: appender.NATS}.Start(t)
	return importStack{nats: appender.NATS, appender: appender.Client(), projector: projector.Client()}
}

func (s importStack) run(t *testing.T, args ...string) harness.Result {
	t.Helper()
	return harness.Run(t, "appender", append([]string{"import", "--nats", s.nats}, args...)...)
}

func caseFile(name string) string { return filepath.Join("cases", name+".jsonl") }

// imported is a session file and what the log makes of it.
type imported struct {
	session  string
	events   []harness.Event // of the file, numbered and dated
	stored   []harness.Event
	folded   harness.Surface
	messages []json.RawMessage
	nodes    []int64
}

// check reads a session back and holds it to the file it came from: the same
// events as canonical lines, the same header, and what a dumb fold of the file
// gives. The id is the header's unless given.
func (s importStack) check(ctx context.Context, file []byte, id string) (imported, error) {
	header, events, err := harness.ReadSessionFile(file)
	if err != nil {
		return imported{}, err
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(header, &members); err != nil {
		return imported{}, err
	}
	if id == "" {
		if err := json.Unmarshal(members["id"], &id); err != nil {
			return imported{}, err
		}
	} else if members["id"], err = json.Marshal(id); err != nil {
		return imported{}, err
	}
	got := imported{session: id, events: events}
	messages, err := s.projector.Messages(ctx, id, harness.MinSeq(int64(len(events)-1)))
	if err != nil {
		return got, err
	}
	got.messages = messages.Messages
	view, err := s.projector.Surface(ctx, id)
	if err != nil {
		return got, err
	}
	got.nodes = view.Seqs()
	if got.stored, err = s.projector.Events(ctx, id); err != nil {
		return got, err
	}
	if err := sameEvents(got.stored, events); err != nil {
		return got, fmt.Errorf("events: %w", err)
	}

	exported, err := s.projector.Export(ctx, id)
	if err != nil {
		return got, err
	}
	exportedHeader, exportedEvents, err := harness.ReadSessionFile(exported)
	if err != nil {
		return got, fmt.Errorf("export: %w", err)
	}
	if err := sameEvents(exportedEvents, events); err != nil {
		return got, fmt.Errorf("export: %w", err)
	}
	wantHeader, err := json.Marshal(members)
	if err != nil {
		return got, err
	}
	if err := harness.SameJSON(exportedHeader, wantHeader); err != nil {
		return got, fmt.Errorf("header line of the export: %w", err)
	}

	var format struct{ Version int }
	if err := json.Unmarshal(header, &format); err != nil {
		return got, err
	}
	if got.folded, err = harness.Fold(format.Version, events); err != nil {
		return got, err
	}
	if !slices.Equal(got.nodes, got.folded.Nodes) {
		return got, fmt.Errorf("nodes %v, want %v", got.nodes, got.folded.Nodes)
	}
	if messages.ReplaceGeneration != got.folded.Generation {
		return got, fmt.Errorf("replaceGeneration %d, want %d", messages.ReplaceGeneration, got.folded.Generation)
	}
	if err := harness.SameMessages(got.messages, got.folded.Messages); err != nil {
		return got, fmt.Errorf("messages: %w", err)
	}
	return got, nil
}

func sameEvents(got, want []harness.Event) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d events, want %d", len(got), len(want))
	}
	for i := range want {
		if line := want[i].Canonical(); !bytes.Equal(got[i].Line, line) {
			return fmt.Errorf("event %d:\n got %s\nwant %s", i, got[i].Line, line)
		}
	}
	return nil
}

// absent says why a session is in the log when it must not be.
func (s importStack) absent(ctx context.Context, session string) error {
	for _, program := range []*harness.Client{s.appender, s.projector} {
		_, err := program.Status(ctx, session)
		if err == nil {
			return fmt.Errorf("session %s is there", session)
		}
		if p := harness.AsRefused(err); p == nil || p.Code != "session-not-found" {
			return err
		}
	}
	return nil
}

func sessionOf(t *testing.T, file []byte) string {
	t.Helper()
	line, _, _ := bytes.Cut(file, []byte("\n"))
	var header struct{ ID string }
	if err := json.Unmarshal(line, &header); err != nil {
		t.Fatal(err)
	}
	return header.ID
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	file, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// says holds an import's output to patterns: whoever reads it must find what
// was wrong without opening the file.
func says(t *testing.T, r harness.Result, patterns ...string) {
	t.Helper()
	for _, p := range patterns {
		if !regexp.MustCompile(p).MatchString(r.Output()) {
			t.Errorf("the output does not say %s:\n%s", p, r.Output())
		}
	}
}

func TestImportRefusesWithTheReason(t *testing.T) {
	t.Parallel()
	stack := startImportStack(t)
	for _, c := range []struct {
		file string
		says []string
	}{
		{"01-duplicate-seq-two-writers", []string{`seq-not-contiguous`, `\b10\b`, `\b8\b`, `\b7\b`}},               // line, expected, found
		{"03-two-branches-same-seqs", []string{`seq-not-contiguous`, `\b(13|15)\b`, `\b16\b`, `\b7\b`}},            // end of one branch, start of the other
		{"04-unknown-event-type", []string{`unknown-type`, `demo-plugin/usage`, `\b4\b`}},                          // type and seq
		{"06-replace-old-keys-in-v3", []string{`replace-malformed`, `\bstart\b`, `\bend\b`, `startSeq`, `endSeq`}}, // keys found, keys wanted
		{"07-compaction-swallows-system-head", []string{`system-head-protected`}},
		{"20b-replace-end-before-start", []string{`replace-range-inverted`}},
		{"20d-source-misses-shadowed-node", []string{`replace-sources-incomplete`, `\b4\b`}}, // the seq left out
		{"22-seq-encoding-2", []string{`envelope-malformed`}},
		{"22-seq-encoding-5", []string{`envelope-malformed`}},
		{"23-source-points-forward", []string{`sources-not-earlier`}},
		{"24-seq-hole", []string{`seq-not-contiguous`, `\b6\b`, `\b9\b`}},
	} {
		t.Run(c.file, func(t *testing.T) {
			t.Parallel()
			file := caseFile(c.file)
			r := stack.run(t, "--id-from", "header", file)
			if r.Code != 1 {
				t.Errorf("exit code %d, want 1", r.Code)
			}
			says(t, r, append(c.says, regexp.QuoteMeta(filepath.Base(file)))...)
			if err := stack.absent(t.Context(), sessionOf(t, readFile(t, file))); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestImportAcceptsWhatOnlyLooksWrong(t *testing.T) {
	t.Parallel()
	stack := startImportStack(t)
	for _, c := range []struct {
		file  string
		point func(*testing.T, imported)
	}{
		{"05-unknown-event-type-ignorable", func(t *testing.T, f imported) {
			if f.stored[4].Type != "demo-plugin/usage" || slices.Contains(f.nodes, 4) {
				t.Errorf("event 4 is %s, nodes %v", f.stored[4].Line, f.nodes)
			}
		}},
		{"07c-second-system-appended", wantNodes(2, 3, 4, 9, 10)},
		{"08-extra-members-in-summary", func(t *testing.T, f imported) {
			if line := f.stored[6].Line; !bytes.Contains(line, []byte(`"tier":2,"topic":"fruit","blockId":"b9"`)) {
				t.Errorf("unknown members are gone: %s", line)
			}
		}},
		{"10-user-before-step-no-system", func(t *testing.T, f imported) {
			if len(f.messages) == 0 {
				t.Error("no messages")
			}
		}},
		{"12b-unicode-line-separators", func(t *testing.T, f imported) {
			for _, separator := range []string{"\u2028", "\u2029", "\u0085"} {
				if !bytes.Contains(f.stored[3].Line, []byte(separator)) || !bytes.Contains(f.messages[1], []byte(separator)) {
					t.Errorf("%+q is gone: %+q", separator, f.stored[3].Line)
				}
			}
		}},
		{"18-keep-what-lies-outside-range", wantNodes(2, 11, 5, 6, 7, 8)},
		{"20-replace-range-numerically-backwards", wantNodes(2, 13)},
		{"21-prune-tool-result-in-place", func(t *testing.T, f imported) {
			wantNodes(2, 3, 4, 8, 7)(t, f)
			if !bytes.Contains(f.messages[3], []byte(`"callId":"c1"`)) || !bytes.Contains(f.messages[3], []byte("[pruned")) {
				t.Errorf("in the place of the pruned result: %s", f.messages[3])
			}
			if !bytes.Contains(f.stored[6].Line, []byte("xxxxx")) {
				t.Error("the original is not in the log")
			}
		}},
		{"22-seq-encoding-0", func(t *testing.T, f imported) {
			if f.stored[2].Seq != 2 || bytes.Contains(f.stored[2].Line, []byte("2.0")) {
				t.Errorf("event 2 is %s", f.stored[2].Line)
			}
		}},
		{"26-empty-assistant-message", func(t *testing.T, f imported) {
			wantNodes(2, 3, 4)(t, f)
			if len(f.messages) != 2 {
				t.Errorf("%d messages, want 2", len(f.messages))
			}
		}},
		{"28-crlf-lines", func(t *testing.T, f imported) {
			for _, e := range f.stored {
				if bytes.ContainsRune(e.Line, '\r') {
					t.Errorf("a line kept its carriage return: %q", e.Line)
				}
			}
		}},
		{"30-large-request-header", func(*testing.T, imported) {}},
	} {
		t.Run(c.file, func(t *testing.T) {
			t.Parallel()
			file := caseFile(c.file)
			if r := stack.run(t, "--id-from", "header", file); r.Code != 0 {
				t.Fatalf("exit code %d:\n%s", r.Code, r.Output())
			}
			f, err := stack.check(t.Context(), readFile(t, file), "")
			if err != nil {
				t.Fatal(err)
			}
			c.point(t, f)
		})
	}

	t.Run("15-forked-child-inherited-prefix", func(t *testing.T) {
		t.Parallel()
		file := caseFile("15-forked-child-inherited-prefix")
		r := stack.run(t, "--id-from", "header", "--json", file)
		if r.Code != 0 {
			t.Fatalf("exit code %d:\n%s", r.Code, r.Output())
		}
		report := importReport(t, r)
		if len(report.Files) != 1 || report.Files[0].InheritedThrough == nil || *report.Files[0].InheritedThrough != 14 {
			t.Errorf("the inherited part ends at seq 14; the report says %s", r.Stdout)
		}
		if _, err := stack.check(t.Context(), readFile(t, file), ""); err != nil {
			t.Error(err)
		}
	})

	t.Run("a last event without a line end", func(t *testing.T) {
		t.Parallel()
		whole := readFile(t, caseFile("26-empty-assistant-message"))
		file := filepath.Join(t.TempDir(), "no-line-end.jsonl")
		if err := os.WriteFile(file, bytes.TrimSuffix(whole, []byte("\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		if r := stack.run(t, "--id-from", "filename", file); r.Code != 0 {
			t.Fatalf("exit code %d:\n%s", r.Code, r.Output())
		}
		if _, err := stack.check(t.Context(), whole, harness.SessionOfFile(file)); err != nil {
			t.Error(err)
		}
	})
}

func wantNodes(seqs ...int64) func(*testing.T, imported) {
	return func(t *testing.T, f imported) {
		t.Helper()
		if !slices.Equal(f.nodes, seqs) {
			t.Errorf("nodes %v, want %v", f.nodes, seqs)
		}
	}
}

func importReport(t *testing.T, r harness.Result) harness.ImportReport {
	t.Helper()
	var report harness.ImportReport
	if err := json.Unmarshal([]byte(r.Stdout), &report); err != nil {
		t.Fatalf("the report is no JSON: %v\n%s", err, r.Stdout)
	}
	return report
}

func TestImportOfABadFileDoesNotHideTheOthers(t *testing.T) {
	t.Parallel()
	stack := startImportStack(t)
	names := []string{"11-list-0", "11-list-1", "11-list-2"}
	r := stack.run(t, "--id-from", "header", "--json", caseFile(names[0]), caseFile(names[1]), caseFile(names[2]))
	if r.Code != 1 {
		t.Errorf("exit code %d, want 1", r.Code)
	}
	done := importReport(t, r).Imported()
	if want := map[string]bool{"11-list-0.jsonl": true, "11-list-1.jsonl": false, "11-list-2.jsonl": true}; !reflect.DeepEqual(done, want) {
		t.Errorf("imported %v, want %v", done, want)
	}
	for _, name := range []string{names[0], names[2]} {
		if _, err := stack.check(t.Context(), readFile(t, caseFile(name)), ""); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	// The incomplete last line is reported, and dropped only when told to.
	cut := readFile(t, caseFile(names[1]))
	if err := stack.absent(t.Context(), sessionOf(t, cut)); err != nil {
		t.Error(err)
	}
	r = stack.run(t, "--id-from", "header", "--repair-tail", caseFile(names[1]))
	if r.Code != 0 {
		t.Fatalf("with --repair-tail: exit code %d\n%s", r.Code, r.Output())
	}
	says(t, r, `11-list-1\.jsonl`, `(?i)tail`)
	whole := cut[:bytes.LastIndexByte(cut, '\n')+1]
	if _, err := stack.check(t.Context(), whole, ""); err != nil {
		t.Error(err)
	}
}

func TestImportWarnsOfLifecycleRulesUnlessEnforced(t *testing.T) {
	t.Parallel()
	stack := startImportStack(t)
	file := caseFile("17-result-without-call")
	session := sessionOf(t, readFile(t, file))

	r := stack.run(t, "--id-from", "header", "--invariants", "enforce", file)
	if r.Code != 1 {
		t.Errorf("enforced: exit code %d, want 1", r.Code)
	}
	says(t, r, `tool-result-without-call`, `\b5\b`)
	if err := stack.absent(t.Context(), session); err != nil {
		t.Error(err)
	}

	r = stack.run(t, "--id-from", "header", file)
	if r.Code != 0 {
		t.Errorf("observed: exit code %d, want 0", r.Code)
	}
	says(t, r, `tool-result-without-call`, `\b5\b`)
	if _, err := stack.check(t.Context(), readFile(t, file), ""); err != nil {
		t.Error(err)
	}
}

func TestImportOfACrashedSessionCanBeRepaired(t *testing.T) {
	t.Parallel()
	stack := startImportStack(t)
	file := caseFile("16-crash-tail-open-call")
	if r := stack.run(t, "--id-from", "header", file); r.Code != 0 {
		t.Fatalf("exit code %d:\n%s", r.Code, r.Output())
	}
	f, err := stack.check(t.Context(), readFile(t, file), "")
	if err != nil {
		t.Fatal(err)
	}
	if err := stack.appender.Repair(t.Context(), f.session); err != nil {
		t.Fatal(err)
	}
	if _, err := stack.projector.Messages(t.Context(), f.session, harness.MinSeq(9)); err != nil {
		t.Fatal(err)
	}
	events, err := stack.projector.Events(t.Context(), f.session)
	if err != nil {
		t.Fatal(err)
	}
	// c1 was recorded and its outcome is unknown, c2 never began.
	want := []string{
		`{"type":"tool/result","seq":6,"time":1800000000050,"surfaceOp":"append","sourceEventSeqs":[5],"data":{"turn":1,"step":1,"message":{"id":"interrupted-tool-result-c1-6","role":"user","source":{"kind":"tool","callId":"c1"},"content":[{"type":"tool-result","toolCallId":"c1","isError":true,"content":[{"type":"text","text":"*"}]}]},"error":{"name":"ToolOutcomeUnknownError","code":"TOOL_OUTCOME_UNKNOWN"}}}`,
		`{"type":"tool/result","seq":7,"time":1800000000050,"surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"interrupted-tool-result-c2-7","role":"user","source":{"kind":"tool","callId":"c2"},"content":[{"type":"tool-result","toolCallId":"c2","isError":true,"content":[{"type":"text","text":"*"}]}]},"error":{"name":"ToolNotStartedError","code":"TOOL_NOT_STARTED"}}}`,
		`{"type":"step/end","seq":8,"time":1800000000050,"data":{"turn":1,"step":1}}`,
		`{"type":"turn/end","seq":9,"time":1800000000050,"data":{"turn":1,"reason":{"kind":"interrupted"}}}`,
	}
	if len(events) != 6+len(want) {
		t.Fatalf("%d events after the repair, want %d", len(events), 6+len(want))
	}
	for i, e := range events[6:] {
		line, err := withoutText(e)
		if err != nil {
			t.Fatal(err)
		}
		if err := harness.SameJSON(line, []byte(want[i])); err != nil {
			t.Errorf("closer %d: %v", i, err)
		}
	}
}

func TestImportOfAnExportIsAFixedPoint(t *testing.T) {
	t.Parallel()
	stack := startImportStack(t)
	file := caseFile("18-keep-what-lies-outside-range")
	if r := stack.run(t, "--id-from", "header", file); r.Code != 0 {
		t.Fatalf("exit code %d:\n%s", r.Code, r.Output())
	}
	f, err := stack.check(t.Context(), readFile(t, file), "")
	if err != nil {
		t.Fatal(err)
	}
	first, err := stack.projector.Export(t.Context(), f.session)
	if err != nil {
		t.Fatal(err)
	}
	again := filepath.Join(t.TempDir(), "again.jsonl")
	if err := os.WriteFile(again, first, 0o600); err != nil {
		t.Fatal(err)
	}
	if r := stack.run(t, "--id-from", "filename", again); r.Code != 0 {
		t.Fatalf("exit code %d:\n%s", r.Code, r.Output())
	}
	if _, err := stack.check(t.Context(), first, "again"); err != nil {
		t.Fatal(err)
	}
	second, err := stack.projector.Export(t.Context(), "again")
	if err != nil {
		t.Fatal(err)
	}
	_, firstEvents, _ := bytes.Cut(first, []byte("\n"))
	_, secondEvents, _ := bytes.Cut(second, []byte("\n"))
	if !bytes.Equal(firstEvents, secondEvents) {
		t.Errorf("the second export differs:\n%s\n%s", firstEvents, secondEvents)
	}
}

// recorded is what expected.json gives for a recorded file of format 3.
type recorded struct {
	Events       int                       `json:"events"`
	Nodes        []int64                   `json:"nodes"`
	Replacements []conformance.Replacement `json:"replacements"`
	MessageIDs   []string                  `json:"messageIds"`
}

// TestImportOfRecordedSessions needs the recorded sessions, which lie beside
// the checkout and are not part of it.
func TestImportOfRecordedSessions(t *testing.T) {
	t.Parallel()
	root, err := harness.RepoRoot()
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(root, "..", "shared", "sessions")
	if _, err := os.Stat(folder); err != nil {
		t.Skipf("no recorded sessions: %v", err)
	}
	var expected map[string]recorded
	if err := json.Unmarshal(readFile(t, filepath.Join(folder, "expected.json")), &expected); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(folder, "v[34]-*.jsonl"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no v3-* or v4-* files in %s (%v)", folder, err)
	}
	stack := startImportStack(t)
	r := stack.run(t, append([]string{"--id-from", "filename", "--json"}, files...)...)
	if r.Code != 0 {
		t.Errorf("exit code %d:\n%s", r.Code, r.Output())
	}
	done := importReport(t, r).Imported()
	seen := 0
	for _, file := range files {
		name := filepath.Base(file)
		if !done[name] {
			t.Errorf("%s is not reported as imported", name)
			continue
		}
		f, err := stack.check(t.Context(), readFile(t, file), harness.SessionOfFile(file))
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if strings.HasPrefix(name, "v4-") {
			continue // checked against the fold alone
		}
		want, ok := expected[name]
		if !ok {
			t.Errorf("%s is not in expected.json", name)
			continue
		}
		seen++
		if err := want.compare(f); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if seen != len(expected) {
		t.Errorf("%d files compared, expected.json has %d", seen, len(expected))
	}
	t.Logf("recorded sessions %d, of format 3 with expectations %d", len(files), seen)
}

func (want recorded) compare(f imported) error {
	if len(f.stored) != want.Events {
		return fmt.Errorf("%d events, want %d", len(f.stored), want.Events)
	}
	if !slices.Equal(f.nodes, want.Nodes) {
		return fmt.Errorf("nodes %v, want %v", f.nodes, want.Nodes)
	}
	if err := sameReplacements(f.folded.Replacements, want.Replacements); err != nil {
		return err
	}
	ids := make([]string, len(f.messages))
	for i, raw := range f.messages {
		var m struct{ ID string }
		if err := json.Unmarshal(raw, &m); err != nil {
			return err
		}
		ids[i] = m.ID
	}
	if !slices.Equal(ids, want.MessageIDs) {
		return fmt.Errorf("message ids %v, want %v", ids, want.MessageIDs)
	}
	return nil
}
