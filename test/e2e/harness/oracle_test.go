package harness

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"testing"
)

// The oracle must itself agree with the conformance cases.
func TestFoldAgreesWithTheSurfaceCases(t *testing.T) {
	t.Parallel()
	root, err := RepoRoot()
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(filepath.Join(root, "test", "conformance", "surface.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(file) {
		var c struct {
			Name       string
			Candidates []struct {
				Event  json.RawMessage
				Accept bool
			}
			Expect struct {
				Nodes             []int64
				ReplaceGeneration int
				Replacements      []Replacement
				Messages          []json.RawMessage
			}
		}
		if err := json.Unmarshal(line, &c); err != nil {
			t.Fatal(err)
		}
		var events []Event
		for _, candidate := range c.Candidates {
			if !candidate.Accept {
				continue
			}
			e, err := ParseEvent(candidate.Event)
			if err != nil {
				t.Fatalf("%s: %v", c.Name, err)
			}
			if err := SameJSON(e.Canonical(), candidate.Event); err != nil {
				t.Errorf("%s: canonical line: %v", c.Name, err)
			}
			events = append(events, e)
		}
		s, err := Fold(3, events)
		if err != nil {
			t.Fatalf("%s: %v", c.Name, err)
		}
		if !reflect.DeepEqual(s.Nodes, c.Expect.Nodes) || s.Generation != c.Expect.ReplaceGeneration {
			t.Errorf("%s: nodes %v generation %d, want %v, %d", c.Name, s.Nodes, s.Generation, c.Expect.Nodes, c.Expect.ReplaceGeneration)
		}
		if !reflect.DeepEqual(s.Replacements, c.Expect.Replacements) {
			t.Errorf("%s: replacements %v, want %v", c.Name, s.Replacements, c.Expect.Replacements)
		}
		if err := SameMessages(s.Messages, c.Expect.Messages); err != nil {
			t.Errorf("%s: %v", c.Name, err)
		}
	}
}

func TestScriptFoldsWithReplacements(t *testing.T) {
	t.Parallel()
	script := NewScript(7, 40)
	var events []Event
	for range 20 {
		for _, line := range script.Next(20) {
			e, err := ParseEvent(line)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(e.Canonical(), line) {
				t.Fatalf("not canonical: %s", line)
			}
			if e.Seq != int64(len(events)) {
				t.Fatalf("seq %d, want %d", e.Seq, len(events))
			}
			events = append(events, e)
		}
	}
	s, err := Fold(3, events)
	if err != nil {
		t.Fatal(err)
	}
	if s.Generation < 20 || len(s.Nodes) < 5 {
		t.Errorf("generation %d and %d nodes: too dull to test with", s.Generation, len(s.Nodes))
	}
}

func TestSameJSONTellsValuesApart(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		a, b string
		same bool
	}{
		{`{"a":1.10,"b":[1]}`, `{"b":[1],"a":1.1}`, true},
		{`{"a":1e2}`, `{"a":100}`, true},
		{`12345678901234567890`, `12345678901234567891`, false},
		{`{"a":null}`, `{}`, false},
		{`[1,2]`, `[2,1]`, false},
		{`"x"`, `"y"`, false},
		{`{}`, `[]`, false},
	} {
		if err := SameJSON([]byte(c.a), []byte(c.b)); (err == nil) != c.same {
			t.Errorf("%s and %s: %v", c.a, c.b, err)
		}
	}
}
