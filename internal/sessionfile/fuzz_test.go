package sessionfile_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"palimpsest/internal/sessionfile"
)

// FuzzFile reads any bytes as a session file. What is accepted must come out of the second
// pass event for event, and its export must be read as the same and written as the same.
func FuzzFile(f *testing.F) {
	files, err := filepath.Glob("testdata/*.jsonl")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range files {
		content, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(content, false)
		f.Add(content, true)
	}
	f.Fuzz(func(t *testing.T, content []byte, repair bool) {
		file := sessionfile.OpenBytes("fuzz.jsonl", content, sessionfile.Options{RepairTail: repair, MaxEvent: 1 << 16})
		r, err := file.Check(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !r.OK() {
			if p := r.Problems[0]; p.Line < 1 || p.Code == "" || p.Code == "internal" || p.Detail == "" {
				t.Fatalf("not a useful problem: %+v", p)
			}
			return
		}
		first := export(t, file)
		if n := int64(bytes.Count(first, []byte{'\n'})) - 1; n != r.Events {
			t.Fatalf("the report says %d events, the export has %d", r.Events, n)
		}
		again := checked(t, "again.jsonl", first, sessionfile.Options{})
		if second := export(t, again); !bytes.Equal(first, second) {
			t.Fatalf("an export is not read as what it is:\n%q\n%q", first, second)
		}
	})
}
