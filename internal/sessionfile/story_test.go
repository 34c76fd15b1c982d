package sessionfile_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/sessionfile"
)

// TestStories compares what each file in testdata is read as, and what it is when it is
// written again, with the .txt of the same name. Its first line says what it guards against.
func TestStories(t *testing.T) {
	t.Parallel()
	for _, s := range []struct {
		name, file, guards string
		o                  sessionfile.Options
	}{
		{"recorded", "recorded", "lines without seq and time refused, or given a time that the file does not say", sessionfile.Options{}},
		{"format4", "format4", "format 4 read by the rules of format 3", sessionfile.Options{}},
		{"mixed-seq", "mixed-seq", "a missing seq counted on its own and not from its neighbours", sessionfile.Options{}},
		{"blank-middle", "blank-middle", "a hole in the file that nobody notices", sessionfile.Options{}},
		{"blank-end", "blank-end", "an editor's blank line at the end refused", sessionfile.Options{}},
		{"blank-ends", "blank-ends", "a blank line that is not the last one let through", sessionfile.Options{}},
		{"no-line-end", "no-line-end", "a complete last event taken for a crash tail", sessionfile.Options{}},
		{"torn", "torn", "the events before a crash tail imported without being asked", sessionfile.Options{}},
		{"torn-repair", "torn", "repair-tail dropping more than the incomplete line", sessionfile.Options{RepairTail: true}},
		{"branches-from-0", "branches-from-0", "one of two branches imported as if it were the session", sessionfile.Options{}},
		{"stray-seq", "stray-seq", "a single late event called a branch", sessionfile.Options{}},
		{"empty-call-id", "empty-call-id", "old recordings with an empty callId refused", sessionfile.Options{}},
		{"lifecycle", "lifecycle", "broken lifecycle rules let through without a word", sessionfile.Options{}},
		{"lifecycle-off", "lifecycle", "lifecycle rules looked at although they are off", sessionfile.Options{Invariants: lifecycle.Off}},
		{"lifecycle-enforce", "lifecycle", "broken lifecycle rules let through when they are enforced", sessionfile.Options{Invariants: lifecycle.Enforce}},
		{"packed", "packed", "packed rows expanded to other seqs, times or tokens than they stand for", sessionfile.Options{}},
		{"packed-branches", "packed-branches", "lines of branches counted as if each were one event", sessionfile.Options{}},
		{"packed-torn", "packed-torn", "the first events of a row that was cut off taken for the whole row", sessionfile.Options{}},
		{"packed-torn-repair", "packed-torn", "repair-tail dropping more than the incomplete row", sessionfile.Options{RepairTail: true}},
		{"packed-no-line-end", "packed-no-line-end", "a warning of the last line for each of its events", sessionfile.Options{}},
		{"renamed", "renamed", "old replacements refused, or the start and end of anything else renamed", sessionfile.Options{}},
		{"oldest", "oldest", "messages without an id refused, or given one that changes when they are rewritten", sessionfile.Options{}},
		{"format1", "format1", "what a fork inherited forgotten, since old headers say it in another way", sessionfile.Options{}},
		{"spelled", "spelled", "events that are spelled another way refused, or their data touched", sessionfile.Options{}},
	} {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			f, err := sessionfile.Open(filepath.Join("testdata", s.file+".jsonl"), s.o)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := f.Close(); err != nil {
					t.Error(err)
				}
			}()
			r, err := f.Check(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			report, err := json.MarshalIndent(r, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			got := fmt.Appendf(nil, "Guards against: %s\n\n%s\n\n", s.guards, report)
			if r.OK() {
				got = append(got, export(t, f)...)
			} else {
				got = fmt.Appendln(got, r.Problems[0])
			}
			golden := filepath.Join("testdata", s.name+".txt")
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				t.Errorf("got:\n%s\nwant:\n%s", got, want)
			}
		})
	}
}

// TestExportIsAFixedPoint reads what was written and writes it again.
func TestExportIsAFixedPoint(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"recorded", "format4", "mixed-seq", "spelled", "empty-call-id", "lifecycle", "packed", "renamed", "oldest", "format1"} {
		content, err := os.ReadFile(filepath.Join("testdata", name+".jsonl"))
		if err != nil {
			t.Fatal(err)
		}
		first := export(t, checked(t, name, content, sessionfile.Options{}))
		second := export(t, checked(t, name, first, sessionfile.Options{}))
		if !bytes.Equal(first, second) {
			t.Errorf("%s: first export:\n%s\nsecond:\n%s", name, first, second)
		}
	}
}

func checked(t testing.TB, name string, content []byte, o sessionfile.Options) *sessionfile.File {
	t.Helper()
	f := sessionfile.OpenBytes(name, content, o)
	r, err := f.Check(t.Context())
	if err == nil {
		err = r.Err()
	}
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func export(t testing.TB, f *sessionfile.File) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := sessionfile.Write(&b, f.Header(), lines(t, f)); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

var errStop = errors.New("stop")

// lines yields the lines of a checked file's events.
func lines(t testing.TB, f *sessionfile.File) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		err := f.Events(t.Context(), func(e *events.Event) error {
			if !yield(e.Line, nil) {
				return errStop
			}
			return nil
		})
		if err != nil && !errors.Is(err, errStop) {
			yield(nil, err)
		}
	}
}
