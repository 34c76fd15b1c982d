package conformance_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/klauspost/compress/zstd"

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
	return s.hold(ctx, header, events, id)
}

// hold is check for a header and events that were read already.
func (s importStack) hold(ctx context.Context, header json.RawMessage, events []harness.Event, id string) (imported, error) {
	var members map[string]json.RawMessage
	err := json.Unmarshal(header, &members)
	if err != nil {
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
		line := want[i].Canonical()
		if bytes.Contains(line, []byte(madeUpID)) && harness.SameJSON(got[i].Line, line) == nil {
			continue // a message that was put together: in which order is open
		}
		if !bytes.Equal(got[i].Line, line) {
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

// fullReport is what --json prints beside the part that the harness knows.
type fullReport struct {
	harness.ImportReport
	Files []struct {
		File, Session, Status string
		Created               bool
		Imported, Present     int64
		InheritedThrough      *int64
		Problems              []struct{ Detail string }
	} `json:"files"`
	Summary struct {
		Files, Imported, Unchanged, Refused, Ignored int
		EventsImported, EventsPresent                int64
	}
}

func importReport(t *testing.T, r harness.Result) fullReport {
	t.Helper()
	var report fullReport
	err := json.Unmarshal([]byte(r.Stdout), &report)
	if err == nil {
		err = json.Unmarshal([]byte(r.Stdout), &report.ImportReport)
	}
	if err != nil {
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
// the checkout and are not part of it. All are imported in one call, together
// with the cases, and then once more.
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
	files, err := filepath.Glob(filepath.Join(folder, "v*.jsonl"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no v*.jsonl in %s (%v)", folder, err)
	}
	cases, err := filepath.Glob("cases/*.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	stack := startImportStack(t)
	args := []string{"--id-from", "filename", "--json", folder, "cases"}
	first := importReport(t, stack.run(t, args...))
	done := first.Imported()
	const refused = 12 // of the cases
	if sum := first.Summary; len(first.Files) != len(files)+len(cases) || sum.Refused != refused || sum.Imported != len(files)+len(cases)-refused || sum.Unchanged != 0 || sum.EventsPresent != 0 {
		t.Errorf("first run: %d files, %+v", len(first.Files), sum)
	}
	seen, older := 0, 0
	for _, file := range files {
		name := filepath.Base(file)
		if !done[name] {
			t.Errorf("%s is not reported as imported", name)
			continue
		}
		content := readFile(t, file)
		if name[1] < '3' {
			older++
			if err := stack.checkOlder(t.Context(), content, harness.SessionOfFile(file)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		f, err := stack.check(t.Context(), content, harness.SessionOfFile(file))
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
	second := importReport(t, stack.run(t, args...))
	if sum := second.Summary; sum.Imported != 0 || sum.Unchanged != first.Summary.Imported || sum.Refused != refused || sum.EventsImported != 0 || sum.EventsPresent != first.Summary.EventsImported {
		t.Errorf("second run: %+v, after %+v", sum, first.Summary)
	}
	t.Logf("recorded sessions %d, of older formats %d, of format 3 with expectations %d", len(files), older, seen)
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

// madeUpID is how the id of a message starts that was recorded without one.
const madeUpID = `"imported-message-`

// checkOlder is check for a file of format 0, 1 or 2.
func (s importStack) checkOlder(ctx context.Context, file []byte, id string) error {
	header, events, err := convertDumbly(file)
	if err != nil {
		return err
	}
	_, err = s.hold(ctx, header, events, id)
	return err
}

// convertDumbly says which session of format 3 a file of format 0, 1 or 2
// stands for. It trusts the file.
func convertDumbly(file []byte) (header json.RawMessage, all []harness.Event, err error) {
	lines := bytes.Split(bytes.TrimSpace(file), []byte("\n"))
	var members map[string]json.RawMessage
	if err := json.Unmarshal(lines[0], &members); err != nil {
		return nil, nil, err
	}
	members["version"] = json.RawMessage("3")
	_, forked := members["seedLength"]
	for name, value := range map[string]string{"isSeeded": fmt.Sprint(forked), "delegationDepth": "0"} {
		if members[name] == nil {
			members[name] = json.RawMessage(value)
		}
	}
	if header, err = json.Marshal(members); err != nil {
		return nil, nil, err
	}
	var createdAt int64
	if err := json.Unmarshal(members["createdAt"], &createdAt); err != nil {
		return nil, nil, err
	}
	ids := map[int64]string{} // of messages that have none of their own
	for _, line := range lines[1:] {
		var row struct {
			Type  string
			Seq0  json.Number
			Time0 json.Number
			Data  struct {
				Turn, Step, Index, ID, Name json.RawMessage
				DT                          []json.Number
				Texts, Args                 []json.RawMessage
			}
		}
		_ = json.Unmarshal(line, &row) // of any other line it takes what fits
		kind, packed := map[string]string{"text-chunks": "text-delta", "reasoning-chunks": "reasoning-delta", "tool-call-chunks": "tool-call-delta"}[row.Type]
		if packed {
			time := createdAt
			if row.Time0 != "" {
				f, _ := row.Time0.Float64()
				time = int64(f)
			}
			for i, element := range append(row.Data.Texts, row.Data.Args...) {
				if i > 0 {
					f, _ := row.Data.DT[i-1].Float64()
					time += int64(f)
				}
				chunk := fmt.Sprintf(`"type":%q,"index":%s,"text":%s`, kind, row.Data.Index, element)
				if kind == "tool-call-delta" {
					name := ""
					if row.Data.Name != nil {
						name = `"name":` + string(row.Data.Name) + ","
					}
					chunk = fmt.Sprintf(`"type":%q,"index":%s,"id":%s,%s"argumentsDelta":%s`, kind, row.Data.Index, row.Data.ID, name, element)
				}
				all = append(all, harness.Event{Type: "assistant/chunk", Seq: int64(len(all)), Time: time,
					Data: fmt.Appendf(nil, `{"turn":%s,"step":%s,"chunk":{%s}}`, row.Data.Turn, row.Data.Step, chunk)})
			}
			continue
		}
		e, err := harness.ParseEvent(line)
		if err != nil {
			return nil, nil, err
		}
		e.Seq = int64(len(all))
		if e.Time < 0 {
			e.Time = createdAt
		}
		from := int64(-1)
		switch e.Type {
		case "assistant/message":
			e.Sources = nil
			fallthrough
		case "system/message", "user/message", "tool/result":
			var op struct{ Start, End, StartSeq *float64 }
			_ = json.Unmarshal(e.SurfaceOp, &op) // "append" has none of these
			if op.StartSeq != nil {
				from = int64(*op.StartSeq)
			}
			if op.Start != nil {
				from = int64(*op.Start)
				e.SurfaceOp = fmt.Appendf(nil, `{"op":"replace","startSeq":%d,"endSeq":%d}`, from, int64(*op.End))
			}
			if e.Data, err = putTogether(e, from, ids); err != nil {
				return nil, nil, err
			}
		}
		all = append(all, e)
	}
	return header, all, nil
}

// putTogether answers the data of an event whose message has neither id nor
// role as format 3 has it, and any other data as it is.
func putTogether(e harness.Event, replaced int64, ids map[int64]string) (json.RawMessage, error) {
	var data map[string]any
	d := json.NewDecoder(bytes.NewReader(e.Data))
	d.UseNumber()
	if err := d.Decode(&data); err != nil {
		return nil, err
	}
	if data["message"] != nil || data["id"] != nil || data["content"] == nil {
		return e.Data, nil
	}
	id, rewritten := ids[replaced]
	if !rewritten {
		id = fmt.Sprintf("imported-message-%d", e.Seq)
	}
	ids[e.Seq] = id
	message := map[string]any{"id": id, "role": "user", "content": data["content"]}
	switch e.Type {
	case "user/message":
		data["id"], data["role"] = id, "user"
		return json.Marshal(data)
	case "assistant/message":
		source := data["provenance"].(map[string]any)
		source["kind"] = "model"
		message["role"], message["source"] = "assistant", source
	case "tool/result":
		message["source"] = map[string]any{"kind": "tool", "callId": data["callId"]}
		message["content"] = []any{map[string]any{"type": "tool-result", "toolCallId": data["callId"], "content": data["content"], "isError": data["isError"]}}
	}
	for _, moved := range []string{"content", "provenance", "callId", "isError"} {
		delete(data, moved)
	}
	data["message"] = message
	return json.Marshal(data)
}

// olderFiles are small session files of formats 0 to 2.
func olderFiles() []string {
	var files []string
	for _, name := range []string{"packed", "renamed", "oldest", "format1"} {
		files = append(files, filepath.Join("..", "..", "internal", "sessionfile", "testdata", name+".jsonl"))
	}
	return files
}

func compress(t *testing.T, content []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	return w.EncodeAll(content, nil)
}

func write(t *testing.T, content []byte, path ...string) string {
	t.Helper()
	file := filepath.Join(path...)
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func TestImportOfDirectories(t *testing.T) {
	t.Parallel()
	stack := startImportStack(t)
	dir := t.TempDir()
	for _, file := range olderFiles() {
		write(t, readFile(t, file), dir, "b", filepath.Base(file))
	}
	plain := readFile(t, caseFile("18-keep-what-lies-outside-range"))
	write(t, compress(t, plain), dir, "b", "deeper", "compressed.jsonl.zst")
	write(t, compress(t, plain)[:200], dir, "b", "deeper", "cut-off.jsonl.zst")
	write(t, readFile(t, caseFile("24-seq-hole")), dir, "a", "hole.jsonl")
	write(t, plain, dir, "a", "plain.jsonl")
	write(t, []byte("notes"), dir, "a", "notes.txt")
	write(t, compress(t, plain), dir, "plain.zst") // of no name that a directory is searched for
	alone := write(t, compress(t, plain), t.TempDir(), "alone")
	none := filepath.Join(dir, "none.jsonl")

	args := []string{"--id-from", "filename", none, filepath.Join(dir, "b"), alone, filepath.Join(dir, "a"), filepath.Join(dir, "plain.zst"), dir}
	r := stack.run(t, append(args, "--json")...)
	if r.Code != 1 {
		t.Errorf("exit code %d, want 1", r.Code)
	}
	first := importReport(t, r)
	got := []string{}
	for _, f := range first.Files {
		name, err := filepath.Rel(dir, f.File)
		if err != nil || strings.HasPrefix(name, "..") {
			name = filepath.Base(f.File)
		}
		got = append(got, fmt.Sprintf("%s %s %d %d", name, f.Status, f.Imported, f.Present))
	}
	want := []string{
		"none.jsonl refused 0 0",
		"b/deeper/compressed.jsonl.zst imported 15 0", "b/deeper/cut-off.jsonl.zst refused 0 0",
		"b/format1.jsonl imported 5 0", "b/oldest.jsonl imported 10 0", "b/packed.jsonl imported 19 0", "b/renamed.jsonl imported 12 0",
		"alone imported 15 0",
		"a/hole.jsonl refused 0 0", "a/plain.jsonl imported 15 0",
		"plain.zst imported 0 15", // the same session as a/plain.jsonl
		// and now all of them again:
		"a/hole.jsonl refused 0 0", "a/plain.jsonl imported 0 15",
		"b/deeper/compressed.jsonl.zst imported 0 15", "b/deeper/cut-off.jsonl.zst refused 0 0",
		"b/format1.jsonl imported 0 5", "b/oldest.jsonl imported 0 10", "b/packed.jsonl imported 0 19", "b/renamed.jsonl imported 0 12",
	}
	for i := range want {
		want[i] = filepath.FromSlash(want[i])
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if s := first.Summary; s.Files != len(want) || s.Imported != 7 || s.Unchanged != 7 || s.Refused != 5 || s.Ignored != 3 || s.EventsImported != 91 || s.EventsPresent != 91 {
		t.Errorf("summary %+v", s)
	}
	says(t, r, `cut-off.*cut off`, `none\.jsonl.*no such file`, `"converted":\{"from":0,"to":3,"expandedRows":4,"expandedEvents":10,"renamedOps":0,"droppedSources":1,"reshapedMessages":0\}`)

	for _, file := range olderFiles() {
		if err := stack.checkOlder(t.Context(), readFile(t, file), harness.SessionOfFile(file)); err != nil {
			t.Errorf("%s: %v", file, err)
		}
	}
	for _, id := range []string{"compressed", "alone", "plain"} {
		if _, err := stack.check(t.Context(), plain, id); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}

	// For people the same in lines, the last of which sums up.
	r = stack.run(t, args...)
	if r.Code != 1 || r.Stderr == "" {
		t.Errorf("exit code %d, want 1, and a word on stderr: %q", r.Code, r.Stderr)
	}
	says(t, r, `packed\.jsonl: converted from format 0 to 3: 4 packed rows expanded to 10 events, sourceEventSeqs of 1 assistant messages dropped\n`,
		`renamed\.jsonl: converted from format 2 to 3: start and end of 1 replacements renamed\n`,
		`oldest\.jsonl: converted from format 0 to 3: .*6 messages given an id`,
		`\n19 files: 0 imported, 14 unchanged, 5 refused; 0 events imported, 182 already there; 3 other files ignored\n`)
	if strings.Contains(r.Output(), "\r") {
		t.Errorf("a progress bar where there is no terminal: %q", r.Output())
	}

	// An export of what was converted is of format 3 and the same session.
	exported, err := stack.projector.Export(t.Context(), "packed")
	if err != nil {
		t.Fatal(err)
	}
	again := importReport(t, stack.run(t, "--json", write(t, exported, t.TempDir(), "export.jsonl")))
	if s := again.Summary; s.Unchanged != 1 || s.EventsPresent != 19 {
		t.Errorf("import of the export: %+v", s)
	}

	if r := stack.run(t, t.TempDir()); r.Code != 0 || !strings.Contains(r.Stdout, "0 files: ") {
		t.Errorf("an empty directory: exit code %d, %s", r.Code, r.Output())
	}
}

func TestImportUnderAnIDThatIsThere(t *testing.T) {
	t.Parallel()
	stack := startImportStack(t)
	dir := t.TempDir()
	line := func(n int, text string) string {
		return fmt.Sprintf(`{"type":"todo/write","seq":%d,"data":{"text":%q}}`+"\n", n, text)
	}
	header := func(id, more string) string {
		return fmt.Sprintf(`{"type":"session","version":3,"id":%q%s}`+"\n", id, more)
	}
	three := line(0, "a") + line(1, "b") + line(2, "c")
	for _, c := range []struct {
		name      string
		stored    string // imported first
		file      string
		says      string // empty: it is good
		imported  int64
		unchanged bool
	}{
		{"same", header("same", "") + three, header("same", "") + three, "", 0, true},
		{"spelled otherwise", header("spelled", "") + three, `{"version":3.0, "id":"spelled", "type":"session"}` + "\n" + strings.ReplaceAll(three, `,"data"`, ` , "data"`), "version is 3 there and 3.0 in the file", 0, false},
		{"older spelling", header("older", `,"createdAt":0`) + three, strings.Replace(header("older", `,"createdAt":0`), `"version":3`, `"version":1`, 1) + three, "", 0, true},
		{"longer", header("longer", "") + three, header("longer", "") + three + line(3, "d") + line(4, "e"), "", 2, false},
		{"shorter", header("shorter", "") + three, header("shorter", "") + line(0, "a"), "", 0, true},
		{"other at the end", header("end", "") + three, header("end", "") + line(0, "a") + line(1, "b") + line(2, "x"), "from seq 2 on", 0, false},
		{"other from the start, and longer", header("start", "") + three, header("start", "") + line(0, "x") + three[len(line(0, "a")):] + line(3, "d"), "from seq 0 on", 0, false},
		{"other time", header("time", "") + three, header("time", "") + strings.Replace(three, `"seq":1`, `"seq":1,"time":7`, 1), "from seq 1 on", 0, false},
		{"other member", header("member", `,"createdAt":5,"cwd":"/a"`) + three, header("member", `,"createdAt":5,"cwd":"/b"`) + three, `cwd is "/a" there and "/b" in the file; nothing was changed`, 0, false},
		{"more and fewer members", header("members", `,"createdAt":5,"x":1`) + three, header("members", `,"createdAt":5,"y":[2]`) + three, `x is 1 there and missing in the file, y is missing there and [2] in the file`, 0, false},
		{"createdAt that was not given", header("created", "") + three, header("created", `,"createdAt":5`) + three, `createdAt is 0 there and 5 in the file`, 0, false},
		{"no events", header("empty", ""), header("empty", ""), "", 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			first := write(t, []byte(c.stored), dir, c.name, "1.jsonl")
			second := write(t, []byte(c.file), dir, c.name, "2.jsonl")
			r := stack.run(t, "--json", filepath.Join(dir, c.name)) // both in one call
			got := importReport(t, r)
			if len(got.Files) != 2 || got.Files[0].File != first || got.Files[1].File != second || got.Files[0].Status != "imported" || !got.Files[0].Created || got.Files[1].Created {
				t.Fatalf("got %s", r.Output())
			}
			f := got.Files[1]
			switch {
			case c.says == "" && (r.Code != 0 || f.Status != "imported" || f.Imported != c.imported || c.unchanged != (got.Summary.Unchanged == 1)):
				t.Errorf("expected %d imported, got %s", c.imported, r.Output())
			case c.says != "" && (r.Code != 1 || f.Status != "refused" || f.Imported != 0 || len(f.Problems) != 1 || !strings.Contains(f.Problems[0].Detail, c.says)):
				t.Errorf("expected a refusal with %q, got %s", c.says, r.Output())
			}
			stored := c.stored
			if c.imported > 0 {
				stored = c.file
			}
			next, err := stack.appender.NextSeq(t.Context(), f.Session)
			if err != nil || next != int64(strings.Count(stored, "\n")-1) {
				t.Errorf("next seq %d, %v", next, err)
			}
		})
	}
}

// TestImportOfABigFile imports more than fits in memory (a GB with
// PALIMPSEST_LONG=1) and looks at what is shown on a terminal meanwhile.
func TestImportOfABigFile(t *testing.T) {
	t.Parallel()
	size := int64(32 << 20)
	if harness.Long() {
		size = 1000 << 20
	}
	file := filepath.Join(t.TempDir(), "big.jsonl")
	events := writeBig(t, file, size)
	bin := filepath.Join(t.TempDir(), "appender")
	if out, err := exec.Command("go", "build", "-o", bin, "palimpsest/cmd/appender").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	appender := harness.Appender{Invariants: "off"}.Start(t)

	run := func(args ...string) (stdout, terminal string, state *os.ProcessState) {
		cmd := exec.CommandContext(t.Context(), bin, append([]string{"import", "--nats", appender.NATS, file}, args...)...)
		cmd.Env = append(os.Environ(), "GOMEMLIMIT=256MiB")
		var out bytes.Buffer
		cmd.Stdout = &out
		shown := onTerminal(t, cmd)
		if err := cmd.Run(); err != nil {
			t.Errorf("import %v: %v\n%s", args, err, out.String())
		}
		return out.String(), shown(), cmd.ProcessState
	}

	begun := time.Now()
	stdout, terminal, state := run()
	took := time.Since(begun)
	if next, err := appender.Client().NextSeq(t.Context(), "big"); err != nil || next != int64(events) {
		t.Errorf("next seq %d, %v, want %d", next, err, events)
	}
	says(t, harness.Result{Stdout: stdout}, fmt.Sprintf(`%d events imported, 0 already there`, events))
	if runtime.GOOS == "linux" {
		says(t, harness.Result{Stdout: terminal}, `importing\s+\d+% .*B/s`)
		const most = 256 << 10 // KiB
		peak := state.SysUsage().(*syscall.Rusage).Maxrss
		if peak > most {
			t.Errorf("the import took %d MiB at most, want %d", peak>>10, most>>10)
		}
		t.Logf("%d MB, %d events: %.1f s, %.1f s of them on a CPU, %d MiB at most", size>>20, events, took.Seconds(), state.UserTime().Seconds(), peak>>10)
	}

	stdout, terminal, _ = run("--json")
	if r := importReport(t, harness.Result{Stdout: stdout}); r.Summary.Unchanged != 1 || r.Summary.EventsPresent != int64(events) {
		t.Errorf("again: %s", stdout)
	}
	if strings.Contains(terminal, "importing") {
		t.Errorf("a progress bar beside --json: %q", terminal)
	}
}

// writeBig writes a session file of about the given size and answers how many
// events it has.
func writeBig(t *testing.T, path string, size int64) (events int) {
	t.Helper()
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriterSize(file, 1<<20)
	fmt.Fprintf(w, `{"type":"session",%s`+"\n", harness.NewHeader("big", 3)[1:])
	script := harness.NewScript(7, 600)
	for done := int64(0); done < size; {
		for _, line := range script.Next(1000) {
			n, _ := w.Write(append(line, '\n'))
			done += int64(n)
			events++
		}
	}
	if err := errors.Join(w.Flush(), file.Close()); err != nil {
		t.Fatal(err)
	}
	return events
}

// onTerminal gives a command a terminal for its standard error, and answers
// what was shown there once it has ended. Where there are no Linux terminals
// it does nothing.
func onTerminal(t *testing.T, cmd *exec.Cmd) (shown func() string) {
	t.Helper()
	if runtime.GOOS != "linux" {
		return func() string { return "" }
	}
	const unlock, number = 0x40045431, 0x80045430 // TIOCSPTLCK, TIOCGPTN
	ours, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no terminals: %v", err)
	}
	var zero, n int32
	for request, arg := range map[uintptr]*int32{unlock: &zero, number: &n} {
		if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, ours.Fd(), request, uintptr(unsafe.Pointer(arg))); errno != 0 {
			t.Fatal(errno)
		}
	}
	theirs, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = theirs
	all := make(chan string, 1)
	go func() {
		b, _ := io.ReadAll(ours) // ends with an error once nobody has the other side
		all <- string(b)
	}()
	return func() string {
		_ = theirs.Close()
		text := <-all
		_ = ours.Close()
		return text
	}
}
