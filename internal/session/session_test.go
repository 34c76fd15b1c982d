package session_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

const (
	systemHead = `{"type":"system/message","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"s","role":"system","source":{"kind":"x"},"content":[{"type":"text","text":"be good"}]}}}`
	userHello  = `{"type":"user/message","surfaceOp":"append","data":{"id":"u","role":"user","source":{"kind":"user"},"content":[]}}`
)

// over turns an appending candidate into a replacement.
func over(raw string, start, end int, cites string) string {
	return strings.Replace(raw, `"surfaceOp":"append"`, fmt.Sprintf(`"surfaceOp":{"op":"replace","startSeq":%d,"endSeq":%d}%s`, start, end, cites), 1)
}

func resultOf(callID, rest string) string {
	return fmt.Sprintf(`{"type":"tool/result","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"r","role":"user","source":{"kind":"tool","callId":%q},"content":[{"type":"tool-result","toolCallId":%q,"content":[]}]}%s}}`, callID, callID, rest)
}

func TestPlanNamesTheFirstBrokenRule(t *testing.T) {
	t.Parallel()
	s := session.New(sessionID, events.Format3, nil, surface.KeepFingerprints)
	for _, raw := range []string{systemHead, userHello, userHello, resultOf("c", ""), userHello,
		over(userHello, 1, 1, `,"sourceEventSeqs":[1]`)} { // surface 0 5 2 3 4, no turn is open
		if err := offer(s, raw, lifecycle.Off); err != nil {
			t.Fatal(err)
		}
	}
	const all = `,"sourceEventSeqs":[0,1,2,3,4,5]`
	assistant := `{"type":"assistant/message","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"a","role":"assistant","source":{"kind":"model","provider":"","model":""},"content":[]}}}`
	badMessage := strings.Replace(userHello, `"id":"u"`, `"id":""`, 1)
	cases := []struct {
		first, second events.Rule
		raw           string
	}{
		{events.RuleMessageMalformed, events.RuleEndpointNotOnSurface, over(badMessage, 1, 1, all)},
		{events.RuleToolErrorContradiction, events.RuleEndpointNotOnSurface, over(resultOf("c", `,"error":{}`), 1, 1, all)},
		{events.RuleEndpointNotOnSurface, events.RuleRangeInverted, over(userHello, 4, 1, all)},
		{events.RuleEndpointNotOnSurface, events.RuleSourcesIncomplete, over(userHello, 1, 2, "")},
		{events.RuleRangeInverted, events.RuleSourcesIncomplete, over(userHello, 2, 5, "")},
		{events.RuleSourcesIncomplete, events.RuleRewriteSpan, over(resultOf("c", ""), 5, 2, "")},
		{events.RuleSourcesIncomplete, events.RuleSystemHeadProtected, over(assistant, 0, 0, "")},
		{events.RuleRewriteSpan, events.RuleRewriteTarget, over(resultOf("c", ""), 5, 2, all)},
		{events.RuleRewriteSpan, events.RuleSystemHeadProtected, over(resultOf("c", ""), 0, 5, all)},
		{events.RuleRewriteTarget, events.RuleSystemHeadProtected, over(resultOf("c", ""), 0, 0, all)},
		{events.RuleRewriteChanges, lifecycle.RuleRewriteOutsideTurn, over(resultOf("d", ""), 3, 3, all)},
		{events.RuleSystemHeadProtected, lifecycle.RuleOutsideStep, over(systemHead, 0, 5, all)},
		{lifecycle.RuleOutsideStep, "", over(systemHead, 0, 0, all)},
		{lifecycle.RuleRewriteOutsideTurn, "", over(resultOf("c", ""), 3, 3, all)},
	}
	before := viewOf(s)
	for _, c := range cases {
		err := offer(s, c.raw, lifecycle.Enforce)
		if got := ruleOf(err); got != c.first {
			t.Errorf("%s: rule %q, want %q before %q (%v)", c.raw, got, c.first, c.second, err)
		}
		sameView(t, "after a refusal", s, before)
	}
	for _, raw := range []string{over(systemHead, 0, 0, all), over(userHello, 5, 2, all), over(resultOf("c", ""), 3, 3, all)} {
		if err := offer(s, raw, lifecycle.Off); err != nil {
			t.Errorf("%s: %v", raw, err)
		}
	}
}

func TestPlanRefusesAnotherSeq(t *testing.T) {
	t.Parallel()
	s := session.New(sessionID, events.Format3, nil, surface.KeepFingerprints)
	e, err := parse(userHello, events.Format3, 3)
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.Plan(e, lifecycle.Off)
	got, _ := errors.AsType[*events.Error](err)
	if got == nil || got.Rule != events.RuleSeqNotContiguous || *got.ExpectedSeq != 3 || *got.ActualSeq != 0 {
		t.Errorf("%v", err)
	}
}

func TestObserveReportsAndLetsThrough(t *testing.T) {
	t.Parallel()
	s := session.New(sessionID, events.Format3, nil, surface.KeepFingerprints)
	b := s.Begin(lifecycle.Observe)
	add := func(raw string) {
		t.Helper()
		e, err := parse(raw, events.Format3, s.Next)
		if err == nil {
			err = b.Add(e)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	add(`{"type":"turn/start","data":{"turn":1}}`)
	add(`{"type":"step/end","data":{"turn":1,"step":1}}`)
	mark := b.Mark()
	add(`{"type":"turn/start","data":{"turn":2}}`)
	if v := b.Violations(); len(v) != 2 || v[0].Rule != lifecycle.RuleStepMismatch || v[1].Rule != lifecycle.RuleTurnOverlap || v[1].Code != events.CodeInvariant || *v[1].Seq != 2 {
		t.Errorf("violations %v", v)
	}
	b.Rewind(mark)
	if v := b.Violations(); len(v) != 1 || b.Len() != 2 || s.Next != 2 {
		t.Errorf("violations %v of %d events after a rewind", v, b.Len())
	}
	if turn, _ := s.Life.Turn(); turn != 1 {
		t.Errorf("turn %d is open after a rewind", turn)
	}
}

// TestTheBodyIsTheLinesOfWhatStays: lines that were written into the batch's memory, that did
// not fit there, and that were taken back.
func TestTheBodyIsTheLinesOfWhatStays(t *testing.T) {
	t.Parallel()
	for _, reserve := range []int{-1, 0, 100, 400, 1000, 10_000} {
		s := session.New(sessionID, events.Format3, nil, surface.KeepFingerprints)
		b := s.Begin(lifecycle.Off)
		if reserve >= 0 {
			b.Reserve(reserve)
		}
		var kept []*events.Event
		var want strings.Builder
		add := func(text string, room []byte) *events.Event {
			t.Helper()
			raw := strings.Replace(userHello, "[]", `[{"type":"text","text":"`+text+`"}]`, 1)
			e, err := events.Parse([]byte(raw), events.Context{Format: events.Format3, Vocabulary: events.DefaultVocabulary(), Next: s.Next, Room: room})
			if err == nil {
				err = b.Add(e)
			}
			if err != nil {
				t.Fatal(err)
			}
			return e
		}
		for i := range 6 {
			mark := b.Mark()
			add("taken back", b.Room())
			b.Rewind(mark)
			room := b.Room()
			if i == 3 {
				room = nil // as an event that was parsed elsewhere
			}
			e := add(fmt.Sprint("stays ", i), room)
			kept = append(kept, e)
			want.WriteString(string(e.Line) + "\n")
		}
		var c events.Commit
		b.Seal(&c)
		if string(c.Body) != want.String() {
			t.Errorf("reserve %d: the body is\n%s\nwant\n%s", reserve, c.Body, want.String())
		}
		for i, e := range kept {
			if !strings.Contains(string(e.Line), fmt.Sprint("stays ", i)) {
				t.Errorf("reserve %d: the line of event %d became %s", reserve, i, e.Line)
			}
		}
	}
}

// lines are the canonical lines of candidates appended to an empty session.
func lines(t testing.TB, raws ...string) []string {
	t.Helper()
	var out []string
	for i, raw := range raws {
		e, err := parse(raw, events.Format3, events.Seq(i))
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, string(e.Line))
	}
	return out
}

func TestFoldCommitSkipsWhatIsApplied(t *testing.T) {
	t.Parallel()
	l := lines(t, systemHead, userHello, userHello, over(userHello, 1, 2, `,"sourceEventSeqs":[1,2]`), `{"type":"session/writer","data":{"writer":"w","epoch":4},"ignorable":true}`)
	all := commitOf(0, 9, events.SeedDigest(sessionID), l...)
	want := session.New(sessionID, events.Format3, nil, surface.KeepBodies)
	if err := want.FoldCommit(all, vocabulary, nil); err != nil {
		t.Fatal(err)
	}
	for applied := range len(l) + 1 {
		s := session.New(sessionID, events.Format3, nil, surface.KeepBodies)
		for _, raw := range l[:applied] {
			if err := offer(s, raw, lifecycle.Off); err != nil {
				t.Fatal(err)
			}
		}
		s.StreamSeq, s.Chain = want.StreamSeq, want.Chain
		var seen []events.Seq
		if err := s.FoldCommit(all, vocabulary, func(p *session.Plan) { seen = append(seen, p.Event.Seq) }); err != nil {
			t.Fatal(err)
		}
		sameView(t, fmt.Sprintf("with %d events applied before", applied), s, viewOf(want))
		if len(seen) != len(l)-applied || len(seen) > 0 && seen[0] != events.Seq(applied) {
			t.Errorf("%d applied before: saw %v", applied, seen)
		}
		if err := s.FoldCommit(all, vocabulary, func(*session.Plan) { t.Error("folded twice") }); err != nil {
			t.Error(err)
		}
	}
	for i := range want.Surface.Len() {
		if n := want.Surface.Node(i); n.At != 9 {
			t.Errorf("node %d is said to be at stream sequence %d", n.Seq, n.At)
		}
	}
}

func TestFoldCommitStopsAtTheEventBeforeABadOne(t *testing.T) {
	t.Parallel()
	good := lines(t, systemHead, userHello, userHello, userHello)
	replace := func(i int, line string) []string {
		out := append([]string(nil), good...)
		out[i] = line
		return out
	}
	cases := []struct {
		name  string
		lines []string
		stops events.Seq
		rule  events.Rule
	}{
		{"a rule of the surface", replace(2, strings.Replace(good[2], `"surfaceOp":"append"`, `"surfaceOp":{"op":"replace","startSeq":0,"endSeq":1},"sourceEventSeqs":[0,1]`, 1)), 2, events.RuleSystemHeadProtected},
		{"not canonical", replace(2, strings.Replace(good[2], `"seq":2`, `"seq":2.0`, 1)), 2, events.RuleEnvelopeMalformed},
		{"unknown type", replace(1, strings.Replace(good[1], `user/message`, `x/y`, 1)), 1, events.RuleUnknownType},
		{"a hole", replace(3, strings.Replace(good[3], `"seq":3`, `"seq":4`, 1)), 3, events.RuleSeqNotContiguous},
		{"a seq twice", replace(3, good[2]), 3, events.RuleSeqNotContiguous},
		{"an empty line", replace(3, ""), 3, events.RuleEnvelopeMalformed},
		{"a tool result that is none", replace(2, `{"type":"tool/result","seq":2,"time":1,"surfaceOp":"append","data":`+strings.Repeat("[", 1<<20)+`}`), 2, events.RuleJSONMalformed},
	}
	for _, c := range cases {
		s := session.New(sessionID, events.Format3, nil, surface.KeepFingerprints)
		want := session.New(sessionID, events.Format3, nil, surface.KeepFingerprints)
		for _, raw := range good[:c.stops] {
			if err := offer(want, raw, lifecycle.Off); err != nil {
				t.Fatal(err)
			}
		}
		bad := commitOf(0, 9, events.SeedDigest(sessionID), c.lines...)
		for range 2 { // the second time it starts at the bad event
			if err := s.FoldCommit(bad, vocabulary, nil); ruleOf(err) != c.rule {
				t.Errorf("%s: %v, want %s", c.name, err, c.rule)
			}
			sameView(t, c.name, s, viewOf(want))
		}
	}
}

func TestFoldCommitRefusesACommitThatContradictsItself(t *testing.T) {
	t.Parallel()
	good := lines(t, systemHead, userHello)
	for name, change := range map[string]func(*events.Commit){
		"another format":    func(c *events.Commit) { c.Format = events.Format4 },
		"lastseq too large": func(c *events.Commit) { c.Last = 2 },
		"lastseq too small": func(c *events.Commit) { c.Last = 0 },
		"firstseq":          func(c *events.Commit) { c.First = 1 },
		"no body":           func(c *events.Commit) { c.Body = nil },
	} {
		s := session.New(sessionID, events.Format3, nil, surface.KeepFingerprints)
		c := commitOf(0, 9, events.SeedDigest(sessionID), good...)
		change(c)
		if err := s.FoldCommit(c, vocabulary, nil); err == nil || s.StreamSeq != 0 {
			t.Errorf("%s: %v, stream sequence %d", name, err, s.StreamSeq)
		}
	}
	s := session.New(sessionID, events.Format3, nil, surface.KeepFingerprints)
	gap := commitOf(1, 9, events.SeedDigest(sessionID), good[1])
	if err := s.FoldCommit(gap, vocabulary, nil); ruleOf(err) != events.RuleSeqNotContiguous || s.Next != 0 || s.Digest != events.SeedDigest(sessionID) {
		t.Errorf("a commit behind a gap: %v", err)
	}
}

func TestWriterAndEndSeed(t *testing.T) {
	t.Parallel()
	s := session.New(sessionID, events.Format3, nil, surface.KeepFingerprints)
	running, none := map[string]string{"a": "running"}, map[string]string{}
	steps := []struct {
		raw    string
		writer *session.Writer
		agents map[string]string
	}{
		{`{"type":"agent/status","data":{"agent":"a","status":"running"}}`, nil, running},
		{`{"type":"session/writer","ignorable":true,"data":{"writer":"w","epoch":1}}`, &session.Writer{ID: "w", Epoch: 1, Seq: 1}, running},
		{`{"type":"session/writer","ignorable":true,"data":{"writer":"","epoch":9}}`, &session.Writer{ID: "w", Epoch: 1, Seq: 1}, running},
		{`{"type":"session/writer","ignorable":true,"data":{"writer":"v","epoch":2.0}}`, &session.Writer{ID: "v", Epoch: 2, Seq: 3}, running},
		{`{"type":"session/writer","ignorable":true,"data":{"writer":"w","epoch":2}}`, &session.Writer{ID: "v", Epoch: 2, Seq: 3}, running},
		{`{"type":"session/end-seed","data":{}}`, &session.Writer{ID: "v", Epoch: 2, Seq: 3}, running},
		{`{"type":"session/end-seed","data":{"inherited":true}}`, nil, none},
		{`{"type":"agent/status","data":{"agent":"a","status":"running"}}`, nil, running},
		{`{"type":"session/writer","ignorable":true,"data":{"writer":"w","epoch":1}}`, &session.Writer{ID: "w", Epoch: 1, Seq: 8}, running},
	}
	for _, c := range steps {
		if err := offer(s, c.raw, lifecycle.Enforce); err != nil {
			t.Fatal(err)
		}
		if sn := s.Life.Snapshot(); !reflect.DeepEqual(s.Writer, c.writer) || !reflect.DeepEqual(sn.Agents, c.agents) {
			t.Errorf("%s: writer %+v, agents %v", c.raw, s.Writer, sn.Agents)
		}
	}
}

func TestOpaqueEventsMoveNothing(t *testing.T) {
	t.Parallel()
	s := session.New(sessionID, events.Format3, nil, surface.KeepBodies)
	if err := offer(s, `{"type":"x/y","ignorable":true,"surfaceOp":"append","data":{"turn":1,"inherited":true,"writer":"w","epoch":1}}`, lifecycle.Enforce); err != nil {
		t.Fatal(err)
	}
	want := session.New(sessionID, events.Format3, nil, surface.KeepBodies)
	want.Next, want.Time, want.LogBytes, want.Digest = s.Next, s.Time, s.LogBytes, s.Digest
	sameView(t, "an opaque event", s, viewOf(want))
	if s.Next != 1 || s.Last() != 0 {
		t.Errorf("next seq %d", s.Next)
	}
}
