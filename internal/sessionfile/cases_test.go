package sessionfile_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/sessionfile"
	"palimpsest/internal/surface"
)

const root = "../.."

// refusal is what a bad file's one problem must be.
type refusal struct {
	line  int
	name  string   // rule, or code where no rule is broken
	words []string // that its detail says
}

var accepted *refusal

// TestCases holds files that each have one point to what they are there for.
func TestCases(t *testing.T) {
	t.Parallel()
	table := map[string]*refusal{
		"01-duplicate-seq-two-writers":           {10, "seq-not-contiguous", []string{"expected seq 8, got 7", "line 9 has seq 7 already"}},
		"03-two-branches-same-seqs":              {16, "seq-not-contiguous", []string{"expected seq 14, got 7", "the first ends at line 15 with seq 13", "the second starts at line 16 with seq 7", "both follow seq 6 at line 8"}},
		"04-unknown-event-type":                  {6, "unknown-type", []string{`"demo-plugin/usage"`}},
		"05-unknown-event-type-ignorable":        accepted,
		"06-replace-old-keys-in-v3":              {9, "replace-malformed", []string{"op, startSeq and endSeq", "op, start, end"}},
		"07-compaction-swallows-system-head":     {9, "system-head-protected", nil},
		"07c-second-system-appended":             accepted,
		"08-extra-members-in-summary":            accepted,
		"10-user-before-step-no-system":          accepted,
		"11-list-0":                              accepted,
		"11-list-1":                              {9, "crash-tail", []string{"line 9", "byte 1165", "41 bytes"}},
		"11-list-2":                              accepted,
		"12b-unicode-line-separators":            accepted,
		"15-forked-child-inherited-prefix":       accepted,
		"16-crash-tail-open-call":                accepted,
		"17-result-without-call":                 accepted,
		"18-keep-what-lies-outside-range":        accepted,
		"20-replace-range-numerically-backwards": accepted,
		"20b-replace-end-before-start":           {11, "replace-range-inverted", nil},
		"20d-source-misses-shadowed-node":        {8, "replace-sources-incomplete", []string{"3"}},
		"21-prune-tool-result-in-place":          accepted,
		"22-seq-encoding-0":                      accepted,
		"22-seq-encoding-2":                      {4, "envelope-malformed", []string{"a string"}},
		"22-seq-encoding-5":                      {4, "envelope-malformed", []string{"2^53-1"}},
		"23-source-points-forward":               {6, "sources-not-earlier", nil},
		"24-seq-hole":                            {8, "seq-not-contiguous", []string{"expected seq 6, got 9", "3 events are missing"}},
		"26-empty-assistant-message":             accepted,
		"28-crlf-lines":                          accepted,
		"30-large-request-header":                accepted,
	}
	files, err := filepath.Glob(filepath.Join(root, "test/conformance/cases/*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != len(table) {
		t.Errorf("found %d files for %d cases", len(files), len(table))
	}
	for _, path := range files {
		name := strings.TrimSuffix(filepath.Base(path), ".jsonl")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want, ok := table[name]
			if !ok {
				t.Fatal("this case is not in the table")
			}
			r, f := check(t, path, sessionfile.Options{})
			if want == nil {
				if err := r.Err(); err != nil {
					t.Fatal(err)
				}
				checkKeepsData(t, path, f)
				return
			}
			if len(r.Problems) != 1 {
				t.Fatalf("expected one problem, got %v", r.Problems)
			}
			p := r.Problems[0]
			if p.Line != want.line || string(p.Rule) != want.name && string(p.Code) != want.name {
				t.Errorf("expected %s at line %d, got: %v", want.name, want.line, p)
			}
			for _, w := range want.words {
				if !strings.Contains(p.Detail, w) {
					t.Errorf("expected %q in %q", w, p.Detail)
				}
			}
			if err := f.Events(t.Context(), func(*events.Event) error { t.Error("an event of a refused file was handed out"); return nil }); err == nil {
				t.Error("Events of a refused file did not fail")
			}
		})
	}
}

// checkKeepsData compares the data of each event with that in the file, byte for byte. The
// cases are written without insignificant white space.
func checkKeepsData(t *testing.T, path string, f *sessionfile.File) {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	rows := strings.Split(strings.ReplaceAll(string(content), "\r\n", "\n"), "\n")[1:]
	err = f.Events(t.Context(), func(e *events.Event) error {
		if !strings.Contains(rows[e.Seq], `"data":`+string(e.Data())) {
			t.Errorf("seq %d: data is %s in the file line %s", e.Seq, e.Data(), rows[e.Seq])
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestCaseDetails(t *testing.T) {
	t.Parallel()
	path := func(name string) string { return filepath.Join(root, "test/conformance/cases", name+".jsonl") }

	r, _ := check(t, path("03-two-branches-same-seqs"), sessionfile.Options{})
	if want := []sessionfile.Branch{{FirstLine: 9, FirstSeq: 7, LastLine: 15, LastSeq: 13}, {FirstLine: 16, FirstSeq: 7, LastLine: 21, LastSeq: 12}}; !slices.Equal(r.Branches, want) {
		t.Errorf("branches: expected %v, got %v", want, r.Branches)
	}
	r, _ = check(t, path("01-duplicate-seq-two-writers"), sessionfile.Options{})
	if r.Branches != nil {
		t.Errorf("two writers at one seq are no branches, got %v", r.Branches)
	}

	r, f := check(t, path("11-list-1"), sessionfile.Options{RepairTail: true})
	if !r.OK() || r.Events != 7 || len(r.Warnings) != 1 || r.Warnings[0].Code != sessionfile.CodeCrashTail || *r.Warnings[0].Offset != 1165 || *r.Warnings[0].Bytes != 41 {
		t.Errorf("repaired crash tail: got %+v", r)
	}
	if got := len(fold(t, f).lines); got != 7 {
		t.Errorf("expected the 7 events before the crash tail, got %d", got)
	}

	r, _ = check(t, path("17-result-without-call"), sessionfile.Options{})
	v := r.Violations[lifecycle.RuleResultWithoutCall]
	if v == nil || v.Count != 1 || v.First[0].Line != 7 {
		t.Errorf("observed violations: got %+v", r.Violations)
	}
	r, _ = check(t, path("17-result-without-call"), sessionfile.Options{Invariants: lifecycle.Enforce})
	if r.OK() || r.Problems[0].Code != events.CodeInvariant || r.Problems[0].Rule != lifecycle.RuleResultWithoutCall {
		t.Errorf("enforced: got %v", r.Problems)
	}

	r, _ = check(t, path("16-crash-tail-open-call"), sessionfile.Options{})
	if r.OpenTurn == nil || *r.OpenTurn != 1 {
		t.Errorf("open turn: expected 1, got %v", r.OpenTurn)
	}

	_, f = check(t, path("18-keep-what-lies-outside-range"), sessionfile.Options{})
	if got, want := fold(t, f).nodes, []events.Seq{2, 11, 5, 6, 7, 8}; !slices.Equal(got, want) {
		t.Errorf("nodes: expected %v, got %v", want, got)
	}
	_, f = check(t, path("26-empty-assistant-message"), sessionfile.Options{})
	if got := fold(t, f); len(got.nodes) != 3 || len(got.messageIDs) != 2 {
		t.Errorf("an empty assistant message is a node without a message, got %v and %v", got.nodes, got.messageIDs)
	}
}

// TestRecordedSessions reads real sessions, where they are at hand.
func TestRecordedSessions(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(root, "../shared/sessions")
	files, _ := filepath.Glob(filepath.Join(dir, "v[0-9]*.jsonl"))
	if len(files) == 0 {
		t.Skipf("no recorded sessions in %s", dir)
	}
	content, err := os.ReadFile(filepath.Join(dir, "expected.json"))
	if err != nil {
		t.Fatal(err)
	}
	var expected map[string]struct {
		Events       int64
		Nodes        []events.Seq
		Replacements []replacement
		MessageIDs   []string
	}
	if err := json.Unmarshal(content, &expected); err != nil {
		t.Fatal(err)
	}
	seen := 0
	for _, path := range files {
		name := filepath.Base(path)
		want, known := expected[name]
		if known {
			seen++
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, f := check(t, path, sessionfile.Options{IDFrom: sessionfile.IDFromFilename})
			if err := r.Err(); err != nil {
				t.Fatal(err)
			}
			if id := strings.TrimSuffix(name, ".jsonl"); r.Session != id || f.Header().ID != id {
				t.Errorf("id: expected %q, got %q", id, r.Session)
			}
			if !known {
				return
			}
			got := fold(t, f)
			if r.Events != want.Events || r.Nodes != len(want.Nodes) || r.Replacements != int64(len(want.Replacements)) {
				t.Errorf("expected %d events, %d nodes, %d replacements, got %+v", want.Events, len(want.Nodes), len(want.Replacements), r)
			}
			if !slices.Equal(got.nodes, want.Nodes) {
				t.Errorf("nodes: expected %v, got %v", want.Nodes, got.nodes)
			}
			if len(got.replacements)+len(want.Replacements) > 0 && !reflect.DeepEqual(got.replacements, want.Replacements) {
				t.Errorf("replacements: expected %v, got %v", want.Replacements, got.replacements)
			}
			if !slices.Equal(got.messageIDs, want.MessageIDs) {
				t.Errorf("message ids: expected %v, got %v", want.MessageIDs, got.messageIDs)
			}
		})
	}
	if seen != len(expected) {
		t.Errorf("%d of %d expected files are there", seen, len(expected))
	}
}

func check(t *testing.T, path string, o sessionfile.Options) (*sessionfile.Report, *sessionfile.File) {
	t.Helper()
	f, err := sessionfile.Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	})
	r, err := f.Check(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r, f
}

type replacement struct {
	Seq, StartSeq, EndSeq events.Seq
	ShadowedSeqs          []events.Seq
}

type folded struct {
	lines        []string
	nodes        []events.Seq
	replacements []replacement
	messages     [][]byte
	messageIDs   []string
}

// fold folds what pass two hands out.
func fold(t *testing.T, f *sessionfile.File) folded {
	t.Helper()
	var out folded
	st := session.New(f.Header().ID, f.Header().Format, nil, surface.KeepBodies)
	err := f.Events(t.Context(), func(e *events.Event) error {
		p, err := st.Plan(e, lifecycle.Off)
		if err != nil {
			return err
		}
		st.Apply(&p, 0)
		out.lines = append(out.lines, string(e.Line))
		if p.Change.Replace {
			r := replacement{Seq: e.Seq, StartSeq: e.Op.Start, EndSeq: e.Op.End}
			for _, n := range p.Change.Shadowed() {
				r.ShadowedSeqs = append(r.ShadowedSeqs, n.Seq)
			}
			out.replacements = append(out.replacements, r)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	out.nodes = st.Surface.Seqs()
	messages, err := st.Surface.Messages()
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range messages {
		out.messages = append(out.messages, m)
		var msg struct{ ID string }
		if err := json.Unmarshal(m, &msg); err != nil {
			t.Fatal(err)
		}
		out.messageIDs = append(out.messageIDs, msg.ID)
	}
	return out
}
