package sessionfile_test

import (
	"bytes"
	"fmt"
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
		f.Add(frame(f, content), false)
	}
	f.Fuzz(func(t *testing.T, content []byte, repair bool) {
		file := sessionfile.OpenBytes("fuzz.jsonl", content, sessionfile.Options{RepairTail: repair, MaxEvent: 1 << 16, MaxWindow: 1 << 20})
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

// FuzzConvert reads any lines as those of a file of format 0, 1 or 2. What is accepted must be
// what a dumb reading makes of it, and once converted it must stay as it is.
func FuzzConvert(f *testing.F) {
	files, err := filepath.Glob("testdata/*.jsonl")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range files {
		content, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		_, lines, _ := bytes.Cut(content, []byte("\n"))
		f.Add(uint8(0), lines)
		for line := range bytes.Lines(lines) {
			f.Add(uint8(2), line) // most are numbered, but a fuzzer finds its way from there
		}
	}
	f.Fuzz(func(t *testing.T, version uint8, lines []byte) {
		content := fmt.Appendf(nil, `{"type":"session","version":%d,"id":"fuzz","createdAt":7}`+"\n%s", version%3, lines)
		file := sessionfile.OpenBytes("fuzz.jsonl", content, sessionfile.Options{MaxEvent: 1 << 16})
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
		sameEvents(t, file, dumbEvents(content))
		first := export(t, file)
		again := checked(t, "again.jsonl", first, sessionfile.Options{})
		if second := export(t, again); !bytes.Equal(first, second) {
			t.Fatalf("an export is not read as what it is:\n%q\n%q", first, second)
		}
	})
}
