package sessionfile_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/sessionfile"
)

// TestOlderFormats holds files of formats 0 to 2 to what a dumb reading makes of them.
func TestOlderFormats(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"packed", "renamed", "oldest", "format1", "packed-no-line-end"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			content, err := os.ReadFile(filepath.Join("testdata", name+".jsonl"))
			if err != nil {
				t.Fatal(err)
			}
			f := checked(t, name, content, sessionfile.Options{})
			want := dumbEvents(content)
			sameEvents(t, f, want)
			if name != "packed-no-line-end" && name != "format1" { // these have no surface
				sameSurface(t, f, want)
			}
		})
	}
}

// TestRecordedSessionsOfOlderFormats does the same with real ones, where they are at hand.
func TestRecordedSessionsOfOlderFormats(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(root, "../shared/sessions")
	files, _ := filepath.Glob(filepath.Join(dir, "v[0-2]-*.jsonl"))
	if len(files) == 0 {
		t.Skipf("no recorded sessions in %s", dir)
	}
	type counts struct {
		events, rows, expanded, ops, sources, messages int64
	}
	known := map[string]counts{
		"v0-agent-instructions-replace":    {45, 0, 0, 1, 3, 0},
		"v0-goal-multi-turn-actions":       {2098, 23, 1939, 0, 12, 0},
		"v0-open-turn-cancel-tool-calls":   {17, 0, 0, 0, 1, 4},
		"v0-packed-chunks":                 {124, 4, 93, 0, 2, 0},
		"v0-parallel-tool-calls":           {32, 0, 0, 0, 2, 0},
		"v0-subagent-fork-child":           {99, 3, 61, 0, 2, 0},
		"v0-subagent-fork-parent":          {200, 5, 156, 0, 3, 0},
		"v0-tool-outcome-unknown-expected": {24, 0, 0, 0, 1, 0},
		"v2-compaction-recovery":           {26, 0, 0, 1, 0, 0},
	}
	for _, path := range files {
		name := strings.TrimSuffix(filepath.Base(path), ".jsonl")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			content, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			r, f := check(t, path, sessionfile.Options{IDFrom: sessionfile.IDFromFilename})
			if err := r.Err(); err != nil {
				t.Fatal(err)
			}
			c := r.Converted
			if c == nil || c.From != int(name[1]-'0') || c.To != 3 || r.Version != c.From || f.Header().Format != events.Format3 {
				t.Fatalf("expected a file that was converted to format 3, got version %d, %+v", r.Version, c)
			}
			if len(r.Warnings)+len(r.Violations) > 0 {
				t.Errorf("warnings %v, violations %v", r.Warnings, r.Violations)
			}
			got := counts{r.Events, c.ExpandedRows, c.ExpandedEvents, c.RenamedOps, c.DroppedSources, c.ReshapedMessages}
			if want, ok := known[name]; ok && got != want {
				t.Errorf("expected %+v, got %+v", want, got)
			}
			want := dumbEvents(content)
			sameEvents(t, f, want)
			sameSurface(t, f, want)

			first := export(t, f)
			again := checked(t, name, first, sessionfile.Options{})
			if second := export(t, again); !bytes.Equal(first, second) {
				t.Errorf("an export is not read as what it is:\n%s\n%s", first, second)
			}
			if !bytes.Equal(f.Header().Raw, again.Header().Raw) {
				t.Errorf("headers: %s\n%s", f.Header().Raw, again.Header().Raw)
			}
		})
	}
}

const oldHeader = `{"type":"session","version":0,"id":"s","createdAt":1800000000000}` + "\n"

func TestPackedRowThatIsCorrupt(t *testing.T) {
	t.Parallel()
	const good = `{"type":"tool-call-chunks","seq0":1,"time0":5,"data":{"turn":1,"step":1,"index":0,"dt":[2,-7],"id":"c","name":"n","args":["a","b","c"]}}`
	for _, c := range []struct{ old, new, words string }{
		{``, ``, ""},
		{`"seq0":1,`, ``, ""},  // counted
		{`"time0":5,`, ``, ""}, // dated by the header
		{`,"name":"n"`, ``, ""},
		{`"seq0":1`, `"seq0":1.0`, ""},
		{`"dt":[2,-7]`, `"dt":[2e0,-7.0]`, ""},
		{`"dt":[2,-7],`, ``, "data: dt is missing"},
		{`,"args":["a","b","c"]`, ``, "data: args is missing"},
		{`"id":"c",`, ``, "data: id is missing"},
		{`"turn":1,`, ``, "data: turn is missing"},
		{`"step":1,`, ``, "data: step is missing"},
		{`"index":0,`, ``, "data: index is missing"},
		{`"data":{`, `"date":{`, `unknown key "date"; expected type, seq0, time0, data`},
		{`"seq0":1`, `"seq":1`, `unknown key "seq"`},
		{`"seq0":1`, `"seq0":1,"seq0":1`, `key "seq0" is given twice`},
		{`"time0":5`, `"time0":5,"ignorable":true`, `unknown key "ignorable"`},
		{`"id":"c"`, `"id":"c","more":1`, `data: unknown key "more"; expected turn, step, index, dt, args, id, name`},
		{`"id":"c"`, `"id":"c","\u0069d":"c"`, "is given twice"},
		{`"args":`, `"texts":`, `data: unknown key "texts"`},
		{`"data":{"turn":1,"step":1,"index":0,"dt":[2,-7],"id":"c","name":"n","args":["a","b","c"]}`, `"data":[]`, "data: expected an object, found []"},
		{`"dt":[2,-7]`, `"dt":[2]`, "data.dt: expected 2 steps between the times of 3 events, found 1"},
		{`"dt":[2,-7]`, `"dt":[2,-7,0]`, "data.dt: expected 2 steps between the times of 3 events, found 3"},
		{`"dt":[2,-7]`, `"dt":{}`, "data.dt: expected an array of integers, found {}"},
		{`"dt":[2,-7]`, `"dt":[2,"7"]`, `data.dt[1]: expected an integer, found "7"`},
		{`"dt":[2,-7]`, `"dt":[0.5,7]`, "data.dt[0]: expected an integer, found 0.5"},
		{`"dt":[2,-7]`, `"dt":[-0,7]`, "data.dt[0]: expected an integer, found -0"},
		{`"dt":[2,-7]`, `"dt":[2,-8]`, "data.dt[1]: the time that it leads to, -1, is not between 0 and 2^53-1"},
		{`"dt":[2,-7]`, `"dt":[-6,100]`, "data.dt[0]: the time that it leads to, -1, is not"},
		{`"dt":[2,-7]`, `"dt":[9007199254740990,0]`, "data.dt[0]: the time that it leads to, 9007199254740995, is not"},
		{`"dt":[2,-7]`, `"dt":[9007199254740993,0]`, "data.dt[0]: expected an integer, found 9007199254740993"},
		{`"time0":5`, `"time0":-5`, "time0: expected an integer from 0 to 2^53-1, found -5"},
		{`"time0":5`, `"time0":null`, "time0: expected an integer from 0 to 2^53-1, found null"},
		{`"seq0":1`, `"seq0":"1"`, `seq0: expected an integer from 0 to 2^53-1, found "1"`},
		{`"seq0":1`, `"seq0":1.5`, "seq0: expected an integer from 0 to 2^53-1, found 1.5"},
		{`"args":["a","b","c"]`, `"args":["a","b",3]`, "data.args[2]: expected a string, found 3"},
		{`"args":["a","b","c"]`, `"args":[]`, "data.args: expected at least one string, found none"},
		{`"args":["a","b","c"]`, `"args":"abc"`, `data.args: expected an array of strings, found "abc"`},
		{`"id":"c"`, `"id":7`, "data.id: expected a string, found 7"},
		{`"name":"n"`, `"name":null`, "data.name: expected a string, found null"},
		{`"turn":1`, `"turn":"1"`, `data.turn: expected a number, found "1"`},
		{`"index":0`, `"index":{}`, "data.index: expected a number, found {}"},
		{`"seq0":1`, `"seq0":2`, "expected seq 1, got 2; 1 events are missing here"},
		{`"seq0":1,"time0":5`, `"seq0":0,"time0":-5`, "expected seq 1, got 0; line 2 has seq 0 already"},
	} {
		row := strings.Replace(good, c.old, c.new, 1)
		if row == good && c.old != c.new {
			t.Fatalf("%s is not in the row", c.old)
		}
		r := report(t, oldHeader+todo(80)+"\n"+row+"\n", sessionfile.Options{})
		switch {
		case c.words == "":
			if !r.OK() || r.Events != 4 || r.Converted.ExpandedEvents != 3 {
				t.Errorf("%s: expected 4 events, got %+v", row, r)
			}
		case len(r.Problems) != 1 || r.Events != 1 || r.Converted.ExpandedRows != 0:
			t.Errorf("%s: expected one problem, got %+v", row, r)
		default:
			p := r.Problems[0]
			name := events.RuleEnvelopeMalformed
			if strings.Contains(c.words, "got") {
				name = events.RuleSeqNotContiguous
			} else if !strings.HasPrefix(p.Detail, "packed row tool-call-chunks: ") {
				t.Errorf("the detail does not say that it is about a packed row: %s", p.Detail)
			}
			if p.Line != 3 || p.Rule != name || !strings.Contains(p.Detail, c.words) {
				t.Errorf("%s: expected %s with %q at line 3, got %v", row, name, c.words, p)
			}
		}
	}
}

func TestPackedRowsBelongToOlderFormats(t *testing.T) {
	t.Parallel()
	row := `{"type":"text-chunks","seq0":0,"time0":5,"data":{"turn":1,"step":1,"index":0,"dt":[],"texts":["a"]}}` + "\n"
	for version, ok := range map[string]bool{"0": true, "1": true, "2": true, "3": false, "4": false} {
		r := report(t, strings.Replace(oldHeader, `"version":0`, `"version":`+version, 1)+row, sessionfile.Options{})
		if r.OK() != ok || (r.Converted != nil) != ok {
			t.Errorf("format %s: got %+v", version, r)
		}
	}
}

func TestPackedRowAtTheLimitOfALine(t *testing.T) {
	t.Parallel()
	row := `{"type":"text-chunks","data":{"turn":1,"step":1,"index":0,"dt":[0],"texts":["a","` + strings.Repeat("x", 900) + `"]}}`
	if r := report(t, oldHeader+row+"\n", sessionfile.Options{MaxEvent: 1100}); !r.OK() || r.Events != 2 {
		t.Errorf("got %+v", r)
	}
	// The second event is longer than the row in which it stands.
	r := report(t, oldHeader+row+"\n", sessionfile.Options{MaxEvent: len(row)})
	if len(r.Problems) != 1 || r.Problems[0].Code != events.CodeTooLarge || *r.Problems[0].Seq != 1 || r.Problems[0].Line != 2 || r.Events != 1 {
		t.Errorf("got %+v", r)
	}
}

func TestOldEventsThatAreRefused(t *testing.T) {
	t.Parallel()
	message := `"data":{"content":[],"source":{"kind":"user"},"role":"user","id":"u"}`
	for _, c := range []struct{ line, words string }{
		{`{"type":"user/message","surfaceOp":{"op":"replace","start":0},` + message + `}`, "found"},
		{`{"type":"user/message","surfaceOp":{"op":"replace","start":0,"end":0,"startSeq":0},` + message + `}`, "found"},
		{`{"type":"user/message","surfaceOp":{"op":"replace","start":0,"start":0,"end":0},` + message + `}`, "found"},
		{`{"type":"user/message","surfaceOp":"append","surfaceOp":{"op":"replace","start":0,"end":0},` + message + `}`, `key "surfaceOp" is given twice`},
		{`{"type":"assistant/message","surfaceOp":"append","sourceEventSeqs":[1],"sourceEventSeqs":[1],"data":{}}`, `key "sourceEventSeqs" is given twice`},
		{`{"type":"assistant/message","surfaceOp":"append","sourceEventSeqs":1,"data":{}}`, "must not carry sourceEventSeqs"},
		{`{"type":"assistant/message","surfaceOp":"append","data":{"turn":1,"content":[]}}`, "data.message"},
		{`{"type":"assistant/message","surfaceOp":"append","data":{"turn":1,"content":[],"provenance":{"kind":"x","provider":"p","model":"m"}}}`, `key "kind" is given twice`},
		{`{"type":"tool/result","surfaceOp":"append","data":{"callId":"c","content":[],"error":{}}}`, "isError must be true"},
		{`{"type":"tool/result","surfaceOp":"append","data":{"callId":"c","content":[],"isError":true,"isError":false}}`, "data"},
		{`{"type":"user/message","surfaceOp":"append","data":{"content":[],"source":{"kind":"user"},"id":"u"}}`, "role"},
		{`{"type":"text-chunks\u0000"}`, "expected"},
		{`[]`, "expected an event"},
		{`"text-chunks"`, "expected an event"},
		{"{\"type\":\"text-chunks\",\"data\":\"\xff\"}", "invalid UTF-8"},
		{`{"type":7}`, "type: expected a string"},
	} {
		r := report(t, oldHeader+c.line+"\n", sessionfile.Options{})
		if len(r.Problems) != 1 || r.Problems[0].Line != 2 || r.Problems[0].Code != events.CodeRuleViolation || !strings.Contains(r.Problems[0].Detail, c.words) {
			t.Errorf("%s: expected %q at line 2, got %v", c.line, c.words, r.Problems)
		}
	}
}

func TestHeaderOfOlderFormats(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ given, stored string }{
		{`{"version":0,"type":"session","id":"s","createdAt":5}`, `{"version":3,"type":"session","id":"s","createdAt":5,"isSeeded":false,"delegationDepth":0}`},
		{` { "type":"session" , "version": 2.0, "id":"\u0073","createdAt":5.0, "x\u00e9":[1.0, "\ud800"] } `, `{"type":"session","version":3,"id":"\u0073","createdAt":5.0,"x\u00e9":[1.0,"\ud800"],"isSeeded":false,"delegationDepth":0}`},
		{`{"type":"session","version":1,"id":"s","createdAt":5,"seedLength":0}`, `{"type":"session","version":3,"id":"s","createdAt":5,"seedLength":0,"isSeeded":true,"delegationDepth":0}`},
		{`{"type":"session","version":1,"id":"s","createdAt":5,"seedLength":2,"isSeeded":false}`, `{"type":"session","version":3,"id":"s","createdAt":5,"seedLength":2,"isSeeded":false,"delegationDepth":0}`},
	} {
		f := checked(t, "s", []byte(c.given+"\n"), sessionfile.Options{})
		if got := string(f.Header().Raw); got != c.stored {
			t.Errorf("%s:\nexpected %s\n     got %s", c.given, c.stored, got)
		}
	}
	for _, c := range []struct{ given, words string }{
		{`{"type":"session","version":0,"id":"s","seedLength":-1}`, "seedLength: expected an integer"},
		{`{"type":"session","version":0,"version":0,"id":"s"}`, "given twice"},
		{`{"type":"session","version":0,"id":"s","isSeeded":1}`, "isSeeded: expected a boolean"},
		{`{"type":"session","version":0,"createdAt":1}`, "id is missing"},
		{`{"type":"session","version":-0,"id":"s"}`, "format -0 is not supported"},
		{`{"type":"session","version":1e-400,"id":"s"}`, "format 1e-400 is not supported"},
	} {
		if r := report(t, c.given+"\n", sessionfile.Options{}); len(r.Problems) != 1 || r.Problems[0].Line != 1 || !strings.Contains(r.Problems[0].Detail, c.words) {
			t.Errorf("%s: expected %q, got %v", c.given, c.words, r.Problems)
		}
	}
}
