package sessionfile_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"palimpsest/internal/events"
	"palimpsest/internal/sessionfile"
)

const header = `{"type":"session","version":3,"id":"s","createdAt":1800000000000,"isSeeded":false,"delegationDepth":0}` + "\n"

// todo is a log-only event of exactly n bytes.
func todo(n int) string {
	const frame = `{"type":"todo/write","data":""}`
	return frame[:len(frame)-2] + strings.Repeat("x", n-len(frame)) + `"}`
}

func report(t *testing.T, content string, o sessionfile.Options) *sessionfile.Report {
	t.Helper()
	r, err := sessionfile.OpenBytes("s.jsonl", []byte(content), o).Check(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestHeader(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, content string
		version       int
		code          events.Code
		words         string
	}{
		{"empty file", "", -1, events.CodeHeaderMalformed, "the file is empty"},
		{"blank file", "\n", -1, events.CodeHeaderMalformed, "the file is empty"},
		{"blank first line", "\n" + header, -1, sessionfile.CodeBlankLine, ""},
		{"not JSON", "hello\n", -1, events.CodeHeaderMalformed, "at byte 0"},
		{"not an object", "[]\n", -1, events.CodeHeaderMalformed, "found something else"},
		{"an event", `{"type":"turn/start","data":{}}` + "\n", -1, events.CodeHeaderMalformed, `found "turn/start"`},
		{"no type", `{"version":3,"id":"s"}` + "\n", -1, events.CodeHeaderMalformed, "found nothing"},
		{"no version", `{"type":"session","id":"s"}` + "\n", -1, events.CodeHeaderMalformed, "version: expected 0 to 4, found nothing"},
		{"version is text", `{"type":"session","version":"3","id":"s"}` + "\n", -1, events.CodeHeaderMalformed, `found "3"`},
		{"version in another case", `{"type":"session","Version":3,"id":"s"}` + "\n", -1, events.CodeHeaderMalformed, "found nothing"},
		{"version twice", `{"type":"session","version":4,"version":3,"id":"s"}` + "\n", 3, events.CodeHeaderMalformed, "given twice"},
		{"format 5", `{"type":"session","version":5,"id":"s"}` + "\n", 5, sessionfile.CodeFormat, "format 5 is"},
		{"format 3.5", `{"type":"session","version":3.5,"id":"s"}` + "\n", -1, sessionfile.CodeFormat, "format 3.5 is"},
		{"zstd", "\x28\xb5\x2f\xfd\x04\x00", -1, sessionfile.CodeZstd, "cut off"},
		{"no id", `{"type":"session","version":3,"createdAt":0}` + "\n", 3, events.CodeHeaderMalformed, "filename"},
		{"empty id", `{"type":"session","version":3,"id":"","createdAt":0}` + "\n", 3, events.CodeSessionID, "empty"},
		{"cut off", header[:30], -1, events.CodeHeaderMalformed, "the end of the text"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := report(t, c.content, sessionfile.Options{RepairTail: true})
			if len(r.Problems) != 1 {
				t.Fatalf("expected one problem, got %v", r.Problems)
			}
			if p := r.Problems[0]; p.Line != 1 || p.Code != c.code || !strings.Contains(p.Detail, c.words) || r.Version != c.version {
				t.Errorf("expected version %d, %s with %q at line 1, got version %d, %v", c.version, c.code, c.words, r.Version, p)
			}
		})
	}
}

func TestHeaderWithoutCreatedAt(t *testing.T) {
	t.Parallel()
	f := checked(t, "s", []byte(`{"type":"session","version":3,"id":"s"}`+"\n"+todo(80)+"\n"), sessionfile.Options{})
	r, err := f.Check(t.Context())
	if err != nil || len(r.Warnings) != 1 || r.Warnings[0].Code != sessionfile.CodeNoCreatedAt {
		t.Errorf("expected a warning, got %v, %v", r.Warnings, err)
	}
	if f.Header().CreatedAt != 0 {
		t.Errorf("expected createdAt 0, so that the same file has the same header next time, got %d", f.Header().CreatedAt)
	}
}

func TestHeaderAlone(t *testing.T) {
	t.Parallel()
	if r := report(t, header, sessionfile.Options{}); !r.OK() || r.Events != 0 || len(r.Warnings) != 0 {
		t.Errorf("a session without events is good, got %+v", r)
	}
	if r := report(t, strings.TrimSpace(header), sessionfile.Options{}); !r.OK() || len(r.Warnings) != 1 || r.Warnings[0].Code != sessionfile.CodeNoLineEnd {
		t.Errorf("expected a warning of the missing line end, got %+v", r)
	}
}

func TestIDFromFilename(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"a/b/pear.jsonl":     "pear",
		"pear":               "pear",
		"{{x}} tree 7.jsonl": "{{x}} tree 7",
		"pear.json":          "pear.json",
		".jsonl":             "",
		"...jsonl":           "",
	} {
		for _, h := range []string{header, strings.Replace(header, `"id":"s",`, "", 1)} {
			f := sessionfile.OpenBytes(name, []byte(h), sessionfile.Options{IDFrom: sessionfile.IDFromFilename})
			r, err := f.Check(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if want == "" {
				if r.OK() || r.Problems[0].Code != events.CodeSessionID {
					t.Errorf("%s: expected a bad id, got %+v", name, r)
				}
				continue
			}
			if !r.OK() || r.Session != want || f.Header().ID != want {
				t.Errorf("%s: expected id %q, got %+v", name, want, r)
			}
		}
	}
	if _, err := sessionfile.ParseIDFrom("name"); !errors.Is(err, &events.Error{Code: events.CodeBadRequest}) {
		t.Errorf("got %v", err)
	}
}

func TestLimitOfALine(t *testing.T) {
	t.Parallel()
	// Without seq and time a line is longer in canonical form, by 30 bytes.
	const maxEvent, grows = 200_000, len(`"seq":0,"time":1800000000000,`)
	o := sessionfile.Options{MaxEvent: maxEvent}
	for _, c := range []struct {
		name, content string
		words         string // empty: it fits
	}{
		{"at the limit", todo(maxEvent-grows) + "\n", ""},
		{"at the limit with CRLF", strings.Replace(todo(maxEvent-grows), `"data"`, ` "data"`, 1) + "\r\n", ""},
		{"canonical form beyond it", todo(maxEvent-grows+1) + "\n", "200001 bytes in canonical form, the limit is 200000"},
		{"one beyond", todo(maxEvent+1) + "\n", "it has 200001 bytes, the limit for an event is 200000"},
		{"one beyond without a line end", todo(maxEvent + 1), "it has 200001 bytes, the limit for an event is 200000"},
		{"far beyond", todo(10*maxEvent) + "\n", "so far it has 262144 bytes, the limit for an event is 200000"},
		{"endless", strings.Repeat("[", 10*maxEvent), "so far it has 262144 bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := report(t, header+c.content, o)
			switch {
			case c.words == "" && !r.OK():
				t.Errorf("expected it to fit, got %v", r.Problems)
			case c.words != "" && (len(r.Problems) != 1 || r.Problems[0].Code != events.CodeTooLarge || r.Problems[0].Line != 2 || !strings.Contains(r.Problems[0].Detail, c.words)):
				t.Errorf("expected %q at line 2, got %v", c.words, r.Problems)
			}
		})
	}
	if r := report(t, header+todo(sessionfile.DefaultMaxEvent-grows)+"\n", sessionfile.Options{}); !r.OK() {
		t.Errorf("expected an event of 8 MiB to fit by default, got %v", r.Problems)
	}
	if r := report(t, header, sessionfile.Options{MaxEvent: 20}); r.OK() || r.Problems[0].Line != 1 {
		t.Errorf("the limit holds for the header too, got %+v", r)
	}
}

func TestCrashTail(t *testing.T) {
	t.Parallel()
	event := `{"type":"todo/write","data":"ä"}`
	for n := 1; n < len(event); n++ {
		content := header + event + "\n" + event[:n]
		r := report(t, content, sessionfile.Options{})
		if len(r.Problems) != 1 || r.Problems[0].Code != sessionfile.CodeCrashTail || r.Problems[0].Line != 3 || *r.Problems[0].Bytes != int64(n) || *r.Problems[0].Offset != int64(len(header)+len(event)+1) {
			t.Fatalf("cut at byte %d: got %v", n, r.Problems)
		}
		r = report(t, content, sessionfile.Options{RepairTail: true})
		if !r.OK() || r.Events != 1 || len(r.Warnings) != 1 {
			t.Fatalf("cut at byte %d, repaired: got %+v", n, r)
		}
	}
	for name, c := range map[string]struct {
		tail string
		code events.Code
	}{
		"zeroes of a lost block":      {strings.Repeat("\x00", 5000), sessionfile.CodeCrashTail},
		"cut line with an end":        {event[:20] + "\n", events.CodeRuleViolation},
		"complete, of unknown type":   {`{"type":"what/ever","data":1}`, events.CodeRuleViolation},
		"complete, but not in UTF-8":  {"{\"type\":\"todo/write\",\"data\":\"\xff\"}", events.CodeRuleViolation},
		"complete, but nested deeply": {`{"type":"todo/write","data":` + strings.Repeat("[", 600) + strings.Repeat("]", 600) + "}", events.CodeRuleViolation},
	} {
		r := report(t, header+event+"\n"+c.tail, sessionfile.Options{})
		if len(r.Problems) != 1 || r.Problems[0].Code != c.code || r.Problems[0].Line != 3 {
			t.Errorf("%s: expected %s at line 3, got %v", name, c.code, r.Problems)
		}
		r = report(t, header+event+"\n"+c.tail, sessionfile.Options{RepairTail: true})
		if r.OK() != (c.code == sessionfile.CodeCrashTail) {
			t.Errorf("%s: repair-tail drops a crash tail and nothing else, got %+v", name, r)
		}
	}
}

func TestWarningsAreBounded(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	b.WriteString(header)
	for i := range 250 {
		fmt.Fprintf(&b, `{"type":"tool/result","surfaceOp":"append","data":{"message":{"id":"r%d","role":"user","content":[{"type":"tool-result","toolCallId":"","content":[]}],"source":{"kind":"tool","callId":""}}}}`+"\n", i)
	}
	r := report(t, b.String(), sessionfile.Options{})
	if !r.OK() || len(r.Warnings) != 100 || r.MoreWarnings != 150 {
		t.Errorf("expected 100 warnings and 150 more, got %d and %d", len(r.Warnings), r.MoreWarnings)
	}
	if v := r.Violations["outside-step"]; v == nil || v.Count != 250 || len(v.First) != 3 {
		t.Errorf("expected 250 violations with the first 3, got %+v", v)
	}
}

func TestVocabulary(t *testing.T) {
	t.Parallel()
	v, err := events.DefaultVocabulary().With("orchard/pruned")
	if err != nil {
		t.Fatal(err)
	}
	content := header + `{"type":"orchard/pruned","data":{}}` + "\n"
	if r := report(t, content, sessionfile.Options{Vocabulary: v}); !r.OK() {
		t.Errorf("an added type was refused: %v", r.Problems)
	}
	if r := report(t, content, sessionfile.Options{}); r.OK() || r.Problems[0].Rule != events.RuleUnknownType {
		t.Errorf("expected %s, got %v", events.RuleUnknownType, r.Problems)
	}
}

func TestOpenWhatIsNoFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	_, err := sessionfile.Open(filepath.Join(dir, "none.jsonl"), sessionfile.Options{})
	if !errors.Is(err, &events.Error{Code: events.CodeNotFound}) || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is not there: got %v", err)
	}
	_, err = sessionfile.Open(dir, sessionfile.Options{})
	if !errors.Is(err, &events.Error{Code: sessionfile.CodeUnreadable}) || !strings.Contains(err.Error(), "a directory") {
		t.Errorf("a directory: got %v", err)
	}
}

func TestEventsBeforeCheck(t *testing.T) {
	t.Parallel()
	f := sessionfile.OpenBytes("s", []byte(header), sessionfile.Options{})
	if err := f.Events(t.Context(), nil); !errors.Is(err, &events.Error{Code: events.CodeInternal}) {
		t.Errorf("got %v", err)
	}
}

// onDisk writes 3 blocks and more of events and returns the path.
func onDisk(t *testing.T) (path string, n int) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "s.jsonl")
	n = 800
	content := header + strings.Repeat(todo(4096)+"\n", n)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path, n
}

// overwrite changes bytes at off (from the end when negative) and makes the file look untouched.
func overwrite(t *testing.T, path string, off int64, with string) {
	t.Helper()
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if off < 0 {
		off += st.Size()
	}
	if _, err := f.WriteAt([]byte(with), off); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, st.ModTime(), st.ModTime()); err != nil {
		t.Fatal(err)
	}
}

func TestFileChangesBetweenThePasses(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(path string) error{
		"grows":      func(p string) error { return appendTo(p, todo(100)+"\n") },
		"shrinks":    func(p string) error { return os.Truncate(p, 5000) },
		"is touched": func(p string) error { return os.Chtimes(p, time.Unix(1, 0), time.Unix(1, 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path, _ := onDisk(t)
			r, f := check(t, path, sessionfile.Options{})
			if err := r.Err(); err != nil {
				t.Fatal(err)
			}
			if err := change(path); err != nil {
				t.Fatal(err)
			}
			err := f.Events(t.Context(), func(*events.Event) error { t.Error("an event was handed out"); return errStop })
			if !errors.Is(err, &events.Error{Code: sessionfile.CodeChanged}) {
				t.Errorf("expected %s, got %v", sessionfile.CodeChanged, err)
			}
		})
	}
}

func appendTo(path, text string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

func TestOtherBytesAreNeverHandedOut(t *testing.T) {
	t.Parallel()
	path, n := onDisk(t)
	_, f := check(t, path, sessionfile.Options{})
	overwrite(t, path, -2000, "yyyy") // same size and time
	seen := 0
	err := f.Events(t.Context(), func(e *events.Event) error {
		if seen++; bytes.Contains(e.Line, []byte("yyyy")) {
			t.Error("bytes were handed out that were never checked")
		}
		return nil
	})
	if !errors.Is(err, &events.Error{Code: sessionfile.CodeChanged}) || !strings.Contains(err.Error(), "from byte 3145728") {
		t.Errorf("expected %s, got %v", sessionfile.CodeChanged, err)
	}
	if seen == 0 || seen >= n {
		t.Errorf("expected the events of the blocks that are as they were, got %d of %d", seen, n)
	}
}

func TestFileGrowsDuringAPass(t *testing.T) {
	t.Parallel()
	path, n := onDisk(t)
	grow := func() {
		if err := appendTo(path, "\n"); err != nil {
			t.Error(err)
		}
	}
	first := true
	r, f := check(t, path, sessionfile.Options{Progress: func(int64, int64) {
		if first {
			grow()
		}
		first = false
	}})
	if r.OK() || r.Problems[0].Code != sessionfile.CodeChanged || r.Problems[0].Line != 0 || f.Header() != nil {
		t.Errorf("pass one: expected %s, got %v", sessionfile.CodeChanged, r.Problems)
	}
	r, err := f.Check(t.Context()) // once more, with nobody writing
	if err != nil || !r.OK() {
		t.Fatalf("got %v, %v", r, err)
	}
	seen := 0
	err = f.Events(t.Context(), func(*events.Event) error {
		if seen++; seen == n {
			grow()
		}
		return nil
	})
	if seen != n || !errors.Is(err, &events.Error{Code: sessionfile.CodeChanged}) {
		t.Errorf("pass two: expected all %d events and then %s, got %d, %v", n, sessionfile.CodeChanged, seen, err)
	}
}

func TestFileShrinksDuringAPass(t *testing.T) {
	t.Parallel()
	path, _ := onDisk(t)
	r, _ := check(t, path, sessionfile.Options{Progress: func(int64, int64) {
		if err := os.Truncate(path, 1<<20+1); err != nil {
			t.Error(err)
		}
	}})
	if r.OK() || r.Problems[0].Code != sessionfile.CodeChanged || !strings.Contains(r.Problems[0].Detail, "ends at 1048577") {
		t.Errorf("expected %s, got %v", sessionfile.CodeChanged, r.Problems)
	}
}

func TestProgress(t *testing.T) {
	t.Parallel()
	var done []int64
	path, _ := onDisk(t)
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	_, f := check(t, path, sessionfile.Options{Progress: func(n, total int64) {
		if total != st.Size() {
			t.Errorf("total: expected %d, got %d", st.Size(), total)
		}
		done = append(done, n)
	}})
	want := []int64{1 << 20, 2 << 20, 3 << 20, st.Size()}
	if !slices.Equal(done, want) {
		t.Errorf("expected %v, got %v", want, done)
	}
	if err := f.Events(t.Context(), func(*events.Event) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if want = append(want, want...); !slices.Equal(done, want) {
		t.Errorf("with pass two: expected %v, got %v", want, done)
	}
}

func TestStopping(t *testing.T) {
	t.Parallel()
	reason := errors.New("enough")
	path, _ := onDisk(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	f, err := sessionfile.Open(path, sessionfile.Options{Progress: func(done, _ int64) {
		if done >= 2<<20 {
			cancel(reason)
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if r, err := f.Check(ctx); r != nil || !errors.Is(err, reason) {
		t.Errorf("Check: expected no report and the cause, got %v, %v", r, err)
	}
	if err := f.Events(t.Context(), nil); !errors.Is(err, &events.Error{Code: events.CodeInternal}) {
		t.Errorf("Events after a Check that was stopped: got %v", err)
	}
	if _, err := f.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithCancelCause(t.Context())
	seen := 0
	err = f.Events(ctx, func(*events.Event) error {
		if seen++; seen == 3 {
			cancel(reason)
		}
		return nil
	})
	if seen != 3 || !errors.Is(err, reason) {
		t.Errorf("Events: expected 3 and the cause, got %d, %v", seen, err)
	}
	if err := f.Events(t.Context(), func(*events.Event) error { return errStop }); err != errStop { //nolint:errorlint // the very error
		t.Errorf("expected the error of yield as it is, got %v", err)
	}
}

func TestReportAsText(t *testing.T) {
	t.Parallel()
	r := report(t, header+todo(80)+"\n"+`{"type":"todo/write","seq":5,"data":1}`, sessionfile.Options{})
	if got, want := r.Problems[0].String(), "line 3: seq 5: seq-not-contiguous: expected seq 1, got 5; 4 events are missing here, and nothing is renumbered"; got != want {
		t.Errorf("expected %q, got %q", want, got)
	}
	var e *events.Error
	if err := r.Err(); !errors.As(err, &e) || !errors.Is(err, events.ErrSeqConflict) || e.Session != "s" || !strings.HasPrefix(e.Detail, "s.jsonl: line 3: ") {
		t.Errorf("got %v", err)
	}
}
