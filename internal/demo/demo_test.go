package demo_test

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"palimpsest/internal/demo"
	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/sessionfile"
	"palimpsest/internal/surface"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// folded is the demo session behind its last event, with what happened on the way.
type folded struct {
	file  *sessionfile.File
	state *session.State
	log   []*events.Event
	plans []session.Plan
}

func fold(t *testing.T) folded {
	t.Helper()
	out := folded{file: sessionfile.OpenBytes("demo.jsonl", demo.Session(), sessionfile.Options{Invariants: lifecycle.Enforce})}
	r, err := out.file.Check(t.Context())
	if err == nil {
		err = r.Err()
	}
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Warnings) != 0 || len(r.Violations) != 0 || r.OpenTurn != nil {
		t.Errorf("expected a session without a blemish, got %+v", r)
	}
	out.state = session.New(demo.ID, events.Format3, nil, surface.KeepBodies)
	err = out.file.Events(t.Context(), func(e *events.Event) error {
		p, err := out.state.Plan(e, lifecycle.Enforce)
		if err != nil {
			return err
		}
		out.state.Apply(&p, 0)
		out.log, out.plans = append(out.log, e), append(out.plans, p)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestSessionKeepsEveryRule(t *testing.T) {
	t.Parallel()
	f := fold(t)
	if h := f.file.Header(); h.ID != demo.ID || h.Format != events.Format3 {
		t.Errorf("expected id %s and format 3, got %s and %d", demo.ID, h.ID, h.Format)
	}
	if n := len(f.log); n < 45 || n > 60 {
		t.Errorf("expected 45 to 60 events, got %d", n)
	}
}

// TestSessionIsItsOwnExport keeps the bundled file in the form in which it is exported.
func TestSessionIsItsOwnExport(t *testing.T) {
	t.Parallel()
	f := fold(t)
	var b bytes.Buffer
	err := sessionfile.Write(&b, f.file.Header(), func(yield func([]byte, error) bool) {
		for _, e := range f.log {
			if !yield(e.Line, nil) {
				return
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(b.Bytes(), demo.Session()) {
		t.Errorf("expected the canonical form:\n%s", b.Bytes())
	}
}

func TestSessionIsTheCallersOwn(t *testing.T) {
	t.Parallel()
	clear(demo.Session())
	if !bytes.HasPrefix(demo.Session(), []byte(`{"type":"session"`)) {
		t.Error("a caller changed the bundled session")
	}
}

func TestSessionHoldsWhatItPromises(t *testing.T) {
	t.Parallel()
	f := fold(t)
	count := map[string]int{}
	for _, e := range f.log {
		count[e.Type]++
	}
	for typ, want := range map[string]int{
		"turn/start": 3, "turn/end": 3, "system/message": 1, "user/message": 4, "tool/call": 4, "tool/result": 5,
		"compaction/start": 1, "compaction/summary": 1, "compaction/end": 1, "agent/status": 6,
		"request/header": 2, "request/context": 1, "session/title": 1, "todo/write": 2,
	} {
		if count[typ] != want {
			t.Errorf("%s: expected %d, got %d", typ, want, count[typ])
		}
	}
	parallel := slices.ContainsFunc(f.log, func(e *events.Event) bool {
		return e.Kind == events.KindAssistant && len(e.ToolCalls()) == 2
	})
	if !parallel {
		t.Error("expected an assistant message with two tool calls")
	}
	text := string(demo.Session())
	for _, token := range []string{"°C", "青瓷", "🏺", "é", ":1.10", ":0.70", "1e2"} {
		if !strings.Contains(text, token) {
			t.Errorf("expected %q somewhere in the session", token)
		}
	}
}

func TestCompaction(t *testing.T) {
	t.Parallel()
	f := fold(t)
	at := slices.IndexFunc(f.plans, func(p session.Plan) bool { return p.Change.Replace && p.Event.Kind == events.KindUser })
	if at < 0 {
		t.Fatal("expected a replacing user/message")
	}
	p := f.plans[at]
	if p.Change.Position == 0 || f.state.Surface.Node(0).Kind != events.KindSystem {
		t.Error("the compaction must keep the system message at the head")
	}
	var asked, answered []string
	for _, n := range p.Change.Shadowed() {
		if !slices.Contains(p.Event.Sources, n.Seq) {
			t.Errorf("the compaction shadows seq %d without citing it", n.Seq)
		}
		switch e := f.log[n.Seq]; e.Kind {
		case events.KindAssistant:
			asked = append(asked, e.ToolCalls()...)
		case events.KindTool:
			answered = append(answered, e.Fields().CallID)
		}
	}
	slices.Sort(asked)
	slices.Sort(answered)
	if len(asked) != 2 || !slices.Equal(asked, answered) {
		t.Errorf("the compaction must not split calls %v from results %v", asked, answered)
	}
	if got := []string{f.log[at-2].Type, f.log[at-1].Type, f.log[at+1].Type}; !slices.Equal(got, []string{"compaction/start", "compaction/summary", "compaction/end"}) {
		t.Errorf("expected the replacement between summary and end, got %v", got)
	}
}

func TestPrunedToolResult(t *testing.T) {
	t.Parallel()
	f := fold(t)
	at := slices.IndexFunc(f.plans, func(p session.Plan) bool { return p.Change.Replace && p.Event.Kind == events.KindTool })
	if at < 0 {
		t.Fatal("expected a replacing tool/result")
	}
	pruned, original := f.log[at], f.log[f.plans[at].Change.Shadowed()[0].Seq]
	if len(pruned.Line)*2 > len(original.Line) {
		t.Errorf("expected pruning to save most of %d bytes, left are %d", len(original.Line), len(pruned.Line))
	}
	if i, ok := f.state.Surface.Position(pruned.Seq); !ok {
		t.Error("the pruned result must still be on the surface")
	} else if before := f.log[f.state.Surface.Node(i-1).Seq]; !slices.Contains(before.ToolCalls(), pruned.Fields().CallID) {
		t.Errorf("the pruned result must stand behind its call, found %s", before.Type)
	}
	messages, err := f.state.Surface.Messages()
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]bool{}
	for _, m := range messages {
		var msg struct{ ID string }
		if err := json.Unmarshal(m, &msg); err != nil {
			t.Fatal(err)
		}
		if ids[msg.ID] {
			t.Errorf("message id %s stands twice on the surface", msg.ID)
		}
		ids[msg.ID] = true
	}
	if len(ids) != f.state.Surface.Len() {
		t.Errorf("expected a message of each of %d nodes, got %d", f.state.Surface.Len(), len(ids))
	}
}
