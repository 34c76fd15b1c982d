package lifecycle_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// event is an event of a type that happens in a turn and step, at the next seq.
func event(t testing.TB, f events.Format, next events.Seq, raw string) *events.Event {
	t.Helper()
	e, err := events.Parse([]byte(raw), events.Context{Format: f, Vocabulary: events.DefaultVocabulary(), Next: next, Now: 1000})
	if err != nil {
		t.Fatalf("%s: %v", raw, err)
	}
	return e
}

func turnStart(turn int) string { return fmt.Sprintf(`{"type":"turn/start","data":{"turn":%d}}`, turn) }
func turnEnd(turn int) string {
	return fmt.Sprintf(`{"type":"turn/end","data":{"turn":%d,"reason":{}}}`, turn)
}
func stepStart(turn, step int) string {
	return fmt.Sprintf(`{"type":"step/start","data":{"turn":%d,"step":%d}}`, turn, step)
}
func stepEnd(turn, step int) string {
	return fmt.Sprintf(`{"type":"step/end","data":{"turn":%d,"step":%d}}`, turn, step)
}
func call(turn, step int, id string) string {
	return fmt.Sprintf(`{"type":"tool/call","data":{"turn":%d,"step":%d,"callId":"%s"}}`, turn, step, id)
}
func status(agent, to string) string {
	return fmt.Sprintf(`{"type":"agent/status","data":{"agent":%q,"status":%q}}`, agent, to)
}
func system(turn, step int) string {
	return fmt.Sprintf(`{"type":"system/message","surfaceOp":"append","data":{"turn":%d,"step":%d,"message":{"id":"s","role":"system","source":{"kind":"x"},"content":[]}}}`, turn, step)
}

// assistant asks for the given calls.
func assistant(turn, step int, ids ...string) string {
	var blocks []string
	for _, id := range ids {
		blocks = append(blocks, `{"type":"tool-call","id":"`+id+`"}`)
	}
	return fmt.Sprintf(`{"type":"assistant/message","surfaceOp":"append","data":{"turn":%d,"step":%d,"message":{"id":"a","role":"assistant","source":{"kind":"model","provider":"","model":""},"content":[%s]}}}`,
		turn, step, strings.Join(blocks, ","))
}

// result answers a call; with an error when a code is given.
func result(turn, step int, id, code string) string {
	rest := ""
	if code != "" {
		rest = fmt.Sprintf(`,"error":{"name":"E","code":%q}`, code)
	}
	return fmt.Sprintf(`{"type":"tool/result","surfaceOp":"append","data":{"turn":%d,"step":%d,"message":{"id":"r","role":"user","source":{"kind":"tool","callId":"%s"},"content":[{"type":"tool-result","toolCallId":"%s","isError":%t,"content":[]}]}%s}}`,
		turn, step, id, id, code != "", rest)
}

// rewrite makes a replacement of a tool result.
func rewrite(raw string, seq int) string {
	return strings.Replace(raw, `"surfaceOp":"append"`, fmt.Sprintf(`"surfaceOp":{"op":"replace","startSeq":%d,"endSeq":%d},"sourceEventSeqs":[%d]`, seq, seq, seq), 1)
}

// follow checks and applies events in turn and answers the rule that the last one breaks.
// Those before it must break none.
func follow(t testing.TB, raws ...string) (events.Rule, *lifecycle.State) {
	t.Helper()
	s := lifecycle.New()
	for i, raw := range raws {
		e := event(t, events.Format3, events.Seq(i), raw)
		before := s.Snapshot()
		err := s.Check(e)
		if after := s.Snapshot(); !reflect.DeepEqual(before, after) {
			t.Errorf("a check of %s changes %+v to %+v", raw, before, after)
		}
		if err != nil {
			if i < len(raws)-1 {
				t.Fatalf("event %d: %v", i, err)
			}
			if err.Code != events.CodeInvariant || *err.Seq != e.Seq || err.Detail == "" {
				t.Errorf("error %#v", err)
			}
			return err.Rule, s
		}
		s.Apply(e)
	}
	return "", s
}

func TestRules(t *testing.T) {
	t.Parallel()
	open := []string{turnStart(1), stepStart(1, 1)}
	cases := []struct {
		before []string
		event  string
		want   events.Rule
	}{
		{nil, turnStart(7), ""},
		{nil, `{"type":"turn/start","data":{}}`, lifecycle.RuleTurnMismatch},
		{[]string{turnStart(1)}, turnStart(2), lifecycle.RuleTurnOverlap},
		{open, turnStart(1), lifecycle.RuleTurnOverlap},
		{[]string{turnStart(1), turnEnd(1)}, turnStart(1), ""},
		{nil, turnEnd(1), lifecycle.RuleTurnMismatch},
		{[]string{turnStart(1)}, turnEnd(2), lifecycle.RuleTurnMismatch},
		{open, turnEnd(2), lifecycle.RuleTurnMismatch}, // before turn-end-open-step
		{open, turnEnd(1), lifecycle.RuleTurnEndOpenStep},
		{[]string{turnStart(1)}, `{"type":"turn/end","data":{"turn":1.0}}`, ""},
		{[]string{turnStart(1)}, `{"type":"turn/end","data":{"turn":"1"}}`, lifecycle.RuleTurnMismatch},
		{nil, stepStart(1, 1), lifecycle.RuleStepOutsideTurn},
		{[]string{turnStart(1)}, stepStart(2, 1), lifecycle.RuleStepOutsideTurn},
		{open, stepStart(2, 1), lifecycle.RuleStepOutsideTurn}, // before step-overlap
		{open, stepStart(1, 2), lifecycle.RuleStepOverlap},
		{open, stepStart(1, 1), lifecycle.RuleStepOverlap},
		{[]string{turnStart(1), turnEnd(1)}, stepStart(1, 1), lifecycle.RuleStepOutsideTurn},
		{[]string{turnStart(1)}, `{"type":"step/start","data":{"turn":1}}`, lifecycle.RuleStepMismatch},
		{nil, stepEnd(1, 1), lifecycle.RuleStepMismatch},
		{[]string{turnStart(1)}, stepEnd(1, 1), lifecycle.RuleStepMismatch},
		{open, stepEnd(2, 1), lifecycle.RuleStepMismatch},
		{open, stepEnd(1, 2), lifecycle.RuleStepMismatch},
		{open, stepEnd(1, 1), ""},
		{append(open, stepEnd(1, 1)), turnEnd(1), ""},

		{nil, `{"type":"assistant/chunk","data":{"turn":1,"step":1}}`, lifecycle.RuleOutsideStep},
		{open, `{"type":"assistant/chunk","data":{"turn":1,"step":1}}`, ""},
		{open, `{"type":"assistant/attempt","data":{"turn":1,"step":2}}`, lifecycle.RuleOutsideStep},
		{open, `{"type":"assistant/attempt","data":{"step":1}}`, lifecycle.RuleOutsideStep},
		{open, assistant(1, 1), ""},
		{open, assistant(2, 1), lifecycle.RuleOutsideStep},
		{[]string{turnStart(1)}, call(1, 1, "c"), lifecycle.RuleOutsideStep},
		{open, call(1, 1, "c"), ""},
		{nil, system(0, 0), lifecycle.RuleOutsideStep},
		{open, system(1, 1), ""},
		{open, rewrite(system(1, 2), 0), lifecycle.RuleOutsideStep},
		{nil, `{"type":"user/message","surfaceOp":"append","data":{"id":"u","role":"user","source":{"kind":"user"},"content":[]}}`, ""},
		{nil, `{"type":"todo/write","data":{"turn":9}}`, ""},
		{nil, `{"type":"x/y","ignorable":true,"data":{"turn":9}}`, ""},

		{nil, result(1, 1, "c", ""), lifecycle.RuleOutsideStep},
		{open, result(1, 2, "c", ""), lifecycle.RuleOutsideStep},
		{open, result(1, 1, "c", ""), lifecycle.RuleResultWithoutCall},
		{append(open, assistant(1, 1, "c")), result(1, 1, "c", ""), lifecycle.RuleResultWithoutCall},
		{append(open, assistant(1, 1, "c")), result(1, 1, "c", "TOOL_OUTCOME_UNKNOWN"), lifecycle.RuleResultWithoutCall},
		{append(open, assistant(1, 1, "c")), result(1, 1, "c", "TOOL_NOT_STARTED"), ""},
		{open, result(1, 1, "c", "TOOL_NOT_STARTED"), ""},
		{append(open, call(1, 1, "c")), result(1, 1, "c", ""), ""},
		{append(open, call(1, 1, "c")), result(1, 1, "d", ""), lifecycle.RuleResultWithoutCall},
		{append(open, call(1, 1, "c"), result(1, 1, "c", "")), result(1, 1, "c", ""), ""},
		{append(open, call(1, 1, "c"), stepEnd(1, 1), stepStart(1, 2)), result(1, 2, "c", ""), lifecycle.RuleResultWithoutCall},
		{append(open, call(1, 1, "c"), stepEnd(1, 1), stepStart(1, 2)), result(1, 1, "c", ""), lifecycle.RuleOutsideStep},

		{[]string{status("a", "running")}, rewrite(result(1, 1, "c", ""), 0), lifecycle.RuleRewriteOutsideTurn},
		{[]string{turnStart(1), turnEnd(1)}, rewrite(result(1, 1, "c", ""), 0), lifecycle.RuleRewriteOutsideTurn},
		{[]string{turnStart(2)}, rewrite(result(1, 1, "c", ""), 0), ""},

		{nil, status("a", "idle"), lifecycle.RuleAgentNoop},
		{nil, status("a", "running"), ""},
		{nil, status("a", "disposed"), ""},
		{[]string{status("a", "running")}, status("a", "running"), lifecycle.RuleAgentNoop},
		{[]string{status("a", "running")}, status("a", "idle"), ""},
		{[]string{status("a", "running"), status("a", "idle")}, status("a", "idle"), lifecycle.RuleAgentNoop},
		{[]string{status("a", "running")}, status("b", "running"), ""},
		{[]string{status("a", "disposed")}, status("a", "disposed"), lifecycle.RuleAgentAfterDisposed},
		{[]string{status("a", "disposed")}, status("a", "idle"), lifecycle.RuleAgentAfterDisposed},
		{[]string{status("a", "running"), status("a", "disposed")}, status("a", "running"), lifecycle.RuleAgentAfterDisposed},
		{[]string{status("a", "disposed"), `{"type":"session/end-seed","data":{"inherited":true}}`}, status("a", "running"), ""},
	}
	for _, c := range cases {
		if got, _ := follow(t, append(slices.Clone(c.before), c.event)...); got != c.want {
			t.Errorf("after %q %s: rule %q, want %q", c.before, c.event, got, c.want)
		}
	}
}

func TestALogThatBreaksRules(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name       string
		log        []string
		turn, step string
	}{
		{"starts win", []string{turnStart(1), stepStart(1, 1), turnStart(2)}, "2", "-"},
		{"a step start in the open turn wins", []string{turnStart(1), stepStart(1, 1), stepStart(1, 2)}, "1", "2"},
		{"ends count only when they name what is open", []string{turnStart(1), stepStart(1, 1), stepEnd(1, 2), stepEnd(2, 1), turnEnd(2)}, "1", "1"},
		{"a turn's end ends its step", []string{turnStart(1), stepStart(1, 1), turnEnd(1)}, "-", "-"},
		{"a step outside its turn moves nothing", []string{stepStart(1, 1), turnStart(1), stepStart(2, 1)}, "1", "-"},
		{"numbers that are none", []string{`{"type":"turn/start","data":{"turn":-1}}`, `{"type":"turn/start","data":null}`}, "-", "-"},
	}
	for _, c := range cases {
		s := lifecycle.New()
		for i, raw := range c.log {
			s.Apply(event(t, events.Format3, events.Seq(i), raw))
		}
		name := func(n events.Seq, ok bool) string {
			if !ok {
				return "-"
			}
			return n.String()
		}
		if turn, step := name(s.Turn()), name(s.Step()); turn != c.turn || step != c.step {
			t.Errorf("%s: turn %s and step %s are open, want %s and %s", c.name, turn, step, c.turn, c.step)
		}
	}
}

// closers are the types, calls and sources of what repair appends to a log.
func closers(t testing.TB, s *lifecycle.State, next events.Seq) (out []string) {
	t.Helper()
	for i, raw := range s.Closers(events.Format3, next, 55) {
		e := event(t, events.Format3, next+events.Seq(i), string(raw))
		if !bytes.Contains(raw, []byte(`"seq"`)) || e.Time != 55 {
			t.Errorf("closer %s", raw)
		}
		f := e.Fields()
		if err := s.Check(e); err != nil {
			t.Errorf("closer %s: %v", raw, err)
		}
		s.Apply(e)
		out = append(out, strings.TrimSpace(fmt.Sprintf("%s %s %s %v", e.Type, f.CallID, f.ErrorCode, e.Sources)))
	}
	if more := s.Closers(events.Format3, next, 55); len(more) > 0 {
		t.Errorf("%d closers for a repaired log", len(more))
	}
	return out
}

func TestCloserOrder(t *testing.T) {
	t.Parallel()
	open := []string{turnStart(1), stepStart(1, 1)}
	ends := []string{"step/end   []", "turn/end   []"}
	unknown := func(id string, seq int) string {
		return fmt.Sprintf("tool/result %s TOOL_OUTCOME_UNKNOWN [%d]", id, seq)
	}
	notStarted := func(id string) string { return fmt.Sprintf("tool/result %s TOOL_NOT_STARTED []", id) }
	cases := []struct {
		name string
		log  []string
		want []string
	}{
		{"nothing", nil, nil},
		{"balanced", []string{turnStart(1), turnEnd(1)}, nil},
		{"a turn", []string{turnStart(1)}, ends[1:]},
		{"a step", open, ends},
		{"calls in the order of the blocks", append(open, assistant(1, 1, "a", "b", "c"), call(1, 1, "c"), call(1, 1, "a")), append([]string{unknown("a", 4), notStarted("b"), unknown("c", 3)}, ends...)},
		{"answered ones are left out", append(open, assistant(1, 1, "a", "b"), call(1, 1, "a"), call(1, 1, "b"), result(1, 1, "a", "")), append([]string{unknown("b", 4)}, ends...)},
		{"a call before its message stands where the message asks", append(open, call(1, 1, "b"), assistant(1, 1, "a"), assistant(1, 1, "b")), append([]string{notStarted("a"), unknown("b", 2)}, ends...)},
		{"a call that nobody asked for gets none", append(open, call(1, 1, "x")), ends},
		{"an earlier step's calls get none", append(open, assistant(1, 1, "a"), stepEnd(1, 1), stepStart(1, 2), assistant(1, 2, "b")), append([]string{notStarted("b")}, ends...)},
		{"a message of another step asks nothing", append(open, assistant(1, 2, "a")), ends},
		{"the first record of a call is cited", append(open, assistant(1, 1, "a"), call(1, 1, "a"), call(1, 1, "a")), append([]string{unknown("a", 3)}, ends...)},
		{"a block twice is answered once", append(open, assistant(1, 1, "a", "a")), append([]string{notStarted("a")}, ends...)},
	}
	for _, c := range cases {
		fresh := func() *lifecycle.State {
			s := lifecycle.New()
			for i, raw := range c.log {
				s.Apply(event(t, events.Format3, events.Seq(i), raw))
			}
			return s
		}
		next := events.Seq(len(c.log))
		for how, s := range map[string]*lifecycle.State{"folded": fresh(), "restored": lifecycle.Restore(fresh().Snapshot()), "cloned": fresh().Clone()} {
			if got := closers(t, s, next); !slices.Equal(got, c.want) {
				t.Errorf("%s, %s:\n got %q\nwant %q", c.name, how, got, c.want)
			}
		}
	}
}

func TestCloserShapes(t *testing.T) {
	t.Parallel()
	for _, f := range []events.Format{events.Format3, events.Format4} {
		s := lifecycle.New()
		for i, raw := range []string{turnStart(1), stepStart(1, 1), assistant(1, 1, `a\ud800<&>\"`, "b"), call(1, 1, `a\uD800<&>\"`)} {
			s.Apply(event(t, f, events.Seq(i), raw))
		}
		raws := s.Closers(f, 4, 9)
		if len(raws) != 4 {
			t.Fatalf("%d closers", len(raws))
		}
		first := string(event(t, f, 4, string(raws[0])).Line)
		for _, want := range []string{`"sourceEventSeqs":[3]`, `"callId":"a\ud800`, `"toolCallId":"a\ud800`, `"id":"interrupted-tool-result-a\ud800`, `-4"`, `"name":"ToolOutcomeUnknownError"`} {
			if !strings.Contains(first, want) {
				t.Errorf("format %d: no %s in %s", f, want, first)
			}
		}
		var second struct {
			Data struct {
				Turn, Step int
				Message    struct {
					ID, Role   string
					ToolCallID string          `json:"toolCallId"`
					IsError    bool            `json:"isError"`
					Content    json.RawMessage `json:"content"`
				}
			}
		}
		if err := json.Unmarshal(raws[1], &second); err != nil {
			t.Fatal(err)
		}
		m := second.Data.Message
		if f == events.Format4 != (m.Role == "tool" && m.ToolCallID == "b" && m.IsError) || m.ID != "interrupted-tool-result-b-5" || second.Data.Turn != 1 || second.Data.Step != 1 {
			t.Errorf("format %d: %s", f, raws[1])
		}
		if f == events.Format3 && (m.Role != "user" || !bytes.Contains(m.Content, []byte(`"toolCallId":"b"`)) || !bytes.Contains(m.Content, []byte(`"isError":true`))) {
			t.Errorf("format %d: %s", f, raws[1])
		}
		// The closer answers the very call, lone surrogate and all.
		for i, raw := range raws {
			s.Apply(event(t, f, events.Seq(4+i), string(raw)))
			if i == 1 && len(s.PendingCalls()) != 0 {
				t.Errorf("format %d: calls %q are still open", f, s.PendingCalls())
			}
		}
	}
}

func TestLongStep(t *testing.T) {
	t.Parallel()
	s := lifecycle.New()
	next := events.Seq(0)
	apply := func(raw string) {
		s.Apply(event(t, events.Format3, next, raw))
		next++
	}
	apply(turnStart(1))
	apply(stepStart(1, 1))
	var want []string
	for i := range 300 { // more than are held unread
		id := fmt.Sprintf("c%d", i)
		apply(assistant(1, 1, id))
		apply(call(1, 1, id))
		if i%3 == 0 {
			apply(result(1, 1, id, ""))
		} else {
			want = append(want, id)
		}
	}
	if got := s.PendingCalls(); !slices.Equal(got, want) {
		t.Errorf("%d calls are pending, want %d", len(got), len(want))
	}
	if n := len(s.Closers(events.Format3, next, 1)); n != len(want)+2 {
		t.Errorf("%d closers, want %d", n, len(want)+2)
	}
	if s.Bytes() < 300*64 {
		t.Errorf("%d bytes for 300 calls", s.Bytes())
	}
}

func TestCloneSharesNothing(t *testing.T) {
	t.Parallel()
	log := []string{status("a", "running"), turnStart(1), stepStart(1, 1), assistant(1, 1, "a", "b"), call(1, 1, "a")}
	for read := range 2 { // before and after the held events are read
		_, s := follow(t, log...)
		if read == 1 {
			s.Snapshot()
		}
		c := s.Clone()
		want := s.Snapshot()
		for i, raw := range []string{result(1, 1, "a", ""), call(1, 1, "b"), call(1, 1, "x"), assistant(1, 1, "x"), status("a", "disposed"), status("b", "running")} {
			c.Apply(event(t, events.Format3, events.Seq(len(log)+i), raw))
		}
		c.Snapshot()
		if got := s.Snapshot(); !reflect.DeepEqual(got, want) {
			t.Errorf("the original became\n%+v\nfrom\n%+v", got, want)
		}
	}
}

func TestFrozenStateTellsAMutatedEvent(t *testing.T) {
	t.Parallel()
	for _, freeze := range []bool{true, false} {
		s := lifecycle.New()
		if freeze {
			s.Freeze()
		}
		held := event(t, events.Format3, 2, call(1, 1, "abc"))
		s.Apply(event(t, events.Format3, 0, turnStart(1)))
		s.Apply(event(t, events.Format3, 1, stepStart(1, 1)))
		s.Apply(held)
		copy(held.Line[bytes.Index(held.Line, []byte("abc")):], "xyz")
		err := s.Check(event(t, events.Format3, 3, result(1, 1, "xyz", "")))
		if !freeze {
			if err != nil || s.Mutated() != nil {
				t.Errorf("without freeze: %v", err)
			}
			continue
		}
		if err == nil || err.Code != events.CodeInvariant || err.Rule != events.RuleEventMutated || *err.Seq != 2 || s.Mutated() != err {
			t.Errorf("a mutated call explains a result: %v", err)
		}
	}
}

func TestSnapshotIsPlainJSON(t *testing.T) {
	t.Parallel()
	for _, log := range [][]string{nil,
		{status("a", "running"), status("b", "disposed"), turnStart(0), stepStart(0, 0), assistant(0, 0, "a", "b"), call(0, 0, "a"), call(0, 0, "x"), result(0, 0, "a", "")}} {
		_, s := follow(t, log...)
		raw, err := json.Marshal(s.Snapshot())
		if err != nil {
			t.Fatal(err)
		}
		for _, key := range []string{`"turn":`, `"step":`, `"calls":[`, `"agents":{`} {
			if !bytes.Contains(raw, []byte(key)) {
				t.Errorf("no %s in %s", key, raw)
			}
		}
		var sn lifecycle.Snapshot
		if err := json.Unmarshal(raw, &sn); err != nil {
			t.Fatal(err)
		}
		if got := lifecycle.Restore(sn).Snapshot(); !reflect.DeepEqual(got, s.Snapshot()) {
			t.Errorf("restored\n got %+v\nwant %+v", got, s.Snapshot())
		}
	}
}

func TestParseMode(t *testing.T) {
	t.Parallel()
	for _, m := range []lifecycle.Mode{lifecycle.Off, lifecycle.Observe, lifecycle.Enforce} {
		if got, err := lifecycle.ParseMode(string(m)); err != nil || got != m {
			t.Errorf("%s: %s, %v", m, got, err)
		}
	}
	if _, err := lifecycle.ParseMode("on"); err == nil {
		t.Errorf("on: %v", err)
	}
}
