package session_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

// choices is where a run takes its decisions from.
type choices interface {
	fataler
	choose(n int) int // 0 to n-1
}

type rapidChoices struct{ *rapid.T }

func (c rapidChoices) choose(n int) int { return rapid.IntRange(0, n-1).Draw(c.T, "choice") }

type byteChoices struct {
	*testing.T
	b []byte
}

func (c *byteChoices) choose(n int) int {
	if len(c.b) == 0 {
		return 0
	}
	v := int(c.b[0])
	c.b = c.b[1:]
	return v % n
}

// TestFoldEqualsFullRefold holds the incremental fold to the oracle, whatever is offered and by
// whichever way.
func TestFoldEqualsFullRefold(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		runFold(rapidChoices{rt}, rapid.IntRange(1, 30).Draw(rt, "steps"))
	})
}

func FuzzFold(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		seed := make([]byte, 200+r.IntN(800))
		for i := range seed {
			seed[i] = byte(r.Uint32())
		}
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		runFold(&byteChoices{t, b}, 1+len(b)/20)
	})
}

// foldRun is one session under test beside its oracle.
type foldRun struct {
	choices
	s   *session.State
	o   oracle
	log []*events.Event
}

func runFold(c choices, steps int) {
	keep := []surface.Keep{surface.KeepFingerprints, surface.KeepBodies, surface.KeepFrozenBodies}[c.choose(3)]
	r := &foldRun{choices: c, s: session.New(sessionID, events.Format3, []byte("{}"), keep)}
	for range min(steps, 60) {
		switch r.choose(8) {
		case 0:
			r.batch(keep)
		case 1:
			r.restore(keep)
		default:
			r.offer()
		}
		r.check()
	}
	r.checkMessages()
	r.checkFold(keep)
}

// offer plans one candidate, and applies it when it is fine.
func (r *foldRun) offer() {
	c := r.candidate()
	before := viewOf(r.s)
	want := r.o.judge(c)
	e, err := parse(c.raw(), events.Format3, r.s.Next)
	var p session.Plan
	if err == nil {
		err = r.filling(func() (err error) { p, err = r.s.Plan(e, lifecycle.Off); return err })
	}
	r.verdict(c, err, want)
	sameView(r, "after a plan", r.s, before)
	if err == nil {
		r.s.Apply(&p, 5)
		r.s.Digest = r.s.Digest.Next(e.Line)
		r.take(c, e)
	}
}

func (r *foldRun) take(c candidate, e *events.Event) {
	r.o.log = append(r.o.log, c)
	r.log = append(r.log, e)
}

func (r *foldRun) verdict(c candidate, err error, want events.Rule) {
	r.Helper()
	if got := ruleOf(err); got != want {
		nodes, _ := r.o.surface()
		r.Fatalf("%s\non surface %v: rule %q, the oracle says %q (%v)", c.raw(), nodes, got, want, err)
	}
}

// filling calls plan, and fills in what it misses until it misses nothing.
func (r *foldRun) filling(plan func() error) error {
	for {
		err := plan()
		missing, ok := errors.AsType[*surface.MissingError](err)
		if !ok {
			return err
		}
		n := r.s.Surface.Node(missing.Position)
		if n.Body != nil && n.Kind != events.KindLog {
			r.Fatalf("node %d at position %d is said to be missing, but is there", n.Seq, missing.Position)
		}
		r.fill(n)
	}
}

// fill gives a node the details and body that a page holds of it.
func (r *foldRun) fill(n *surface.Node) {
	e := r.log[n.Seq]
	fp := ""
	if e.Kind == events.KindTool {
		fp = e.Fingerprint(events.Format3)
	}
	n.Kind, n.Size, n.Body = e.Kind, int32(len(e.Data())), surface.NewBody(e.Message(), fp)
}

// batch offers a run of candidates, takes some back, and in the end keeps or drops them all.
func (r *foldRun) batch(keep surface.Keep) {
	empty := viewOf(r.s)
	keptOracle, keptLog := slices.Clone(r.o.log), slices.Clone(r.log)
	b := r.s.Begin(lifecycle.Off)
	type point struct {
		mark   int
		events int
		view   view
	}
	var points []point
	for range r.choose(12) {
		switch r.choose(6) {
		case 0:
			points = append(points, point{b.Mark(), len(r.o.log), viewOf(r.s)})
		case 1:
			if len(points) == 0 {
				continue
			}
			at := r.choose(len(points))
			p := points[at]
			points = points[:at+1]
			b.Rewind(p.mark)
			r.o.log, r.log = r.o.log[:p.events], r.log[:p.events]
			sameView(r, "after a rewind", r.s, p.view)
		default:
			c := r.candidate()
			want := r.o.judge(c)
			e, err := parse(c.raw(), events.Format3, r.s.Next)
			if err == nil {
				err = r.filling(func() error { return b.Add(e) })
			}
			r.verdict(c, err, want)
			if err == nil {
				r.take(c, e)
			}
		}
		r.check()
	}
	if b.Len() != len(r.o.log)-len(keptOracle) {
		r.Fatalf("the batch holds %d events, want %d", b.Len(), len(r.o.log)-len(keptOracle))
	}
	if b.Len() == 0 || r.choose(3) == 0 {
		b.Rollback()
		r.o.log, r.log = keptOracle, keptLog
		sameView(r, "after a rollback", r.s, empty)
		return
	}
	c := &events.Commit{ID: "c", Actor: events.NoActor, Format: events.Format3, StreamSeq: r.s.StreamSeq + 2}
	b.Seal(c)
	b.Commit(c)
	if c.First != empty.Next || c.Last != r.s.Last() || r.s.StreamSeq != c.StreamSeq || r.s.Chain != empty.Chain.NextChain(c) || r.s.Digest != c.Digest {
		r.Fatalf("commit %+v of a batch behind seq %d", c, empty.Next-1)
	}
}

// restore puts a surface in place that knows its nodes' seqs and not always more.
func (r *foldRun) restore(keep surface.Keep) {
	nodes := make([]surface.Node, r.s.Surface.Len())
	for i := range nodes {
		nodes[i] = surface.Node{Seq: r.s.Surface.Node(i).Seq}
		switch r.choose(3) {
		case 0:
			r.fill(&nodes[i])
		case 1:
			nodes[i].Kind = r.log[nodes[i].Seq].Kind
		}
	}
	r.s.Surface = surface.Restore(events.Format3, keep, r.s.Surface.Generation(), nodes)
	r.s.Life = lifecycle.Restore(r.s.Life.Snapshot())
}

func (r *foldRun) check() {
	r.Helper()
	nodes, generation := r.o.surface()
	if got := r.s.Surface.Seqs(); !slices.Equal(got, nodes) || r.s.Surface.Len() != len(nodes) {
		r.Fatalf("surface %v, the oracle says %v", got, nodes)
	}
	if got := r.s.Surface.Generation(); got != generation {
		r.Fatalf("generation %d, the oracle says %d", got, generation)
	}
	if r.s.Next != events.Seq(len(r.o.log)) {
		r.Fatalf("next seq %d after %d events", r.s.Next, len(r.o.log))
	}
	for seq := range events.Seq(len(r.o.log) + 1) {
		want := slices.Index(nodes, seq)
		if got, ok := r.s.Surface.Position(seq); ok != (want >= 0) || ok && got != want {
			r.Fatalf("position of %d on %v is %d, %t", seq, nodes, got, ok)
		}
	}
}

// checkMessages fills in every body and compares the derived messages.
func (r *foldRun) checkMessages() {
	for i := range r.s.Surface.Len() {
		n := r.s.Surface.Node(i)
		if e := r.log[n.Seq]; n.Kind != events.KindLog && (n.Kind != e.Kind || int(n.Size) != len(e.Data()) && n.Size != 0) {
			r.Fatalf("node %d has kind %d and size %d", n.Seq, n.Kind, n.Size)
		}
		r.fill(n)
	}
	r.sameMessages(r.s)
}

func (r *foldRun) sameMessages(s *session.State) {
	r.Helper()
	messages, err := s.Surface.Messages()
	if err != nil {
		r.Fatalf("messages: %v", err)
	}
	var got []string
	for _, m := range messages {
		got = append(got, string(m))
	}
	if want := r.o.messages(); !slices.Equal(got, want) {
		r.Fatalf("messages\n got %q\nwant %q", got, want)
	}
}

// checkFold folds the log's lines as stored, in commits of any size, some delivered again.
func (r *foldRun) checkFold(keep surface.Keep) {
	s := session.New(sessionID, events.Format3, []byte("{}"), surface.KeepFrozenBodies)
	var lines []string
	for _, e := range r.log {
		lines = append(lines, string(e.Line))
	}
	before := s.Digest
	for first, n := 0, 0; first < len(lines); first += n {
		n = 1 + r.choose(min(5, len(lines)-first))
		c := commitOf(events.Seq(first), uint64(first+1), before, lines[first:first+n]...)
		before = c.Digest
		for range 1 + r.choose(2) {
			if err := s.FoldCommit(c, vocabulary, nil); err != nil {
				r.Fatalf("fold: %v", err)
			}
		}
	}
	if got, want := s.LogBytes, int64(len(strings.Join(lines, ""))+len(lines)); got != want {
		r.Fatalf("the log is said to have %d bytes, it has %d", got, want)
	}
	want := viewOf(r.s)
	want.StreamSeq, want.Chain = s.StreamSeq, s.Chain
	sameView(r, "fold of the log", s, want)
	r.sameMessages(s)
}

// candidate makes an event that is mostly fine.
func (r *foldRun) candidate() candidate {
	nodes, _ := r.o.surface()
	next := events.Seq(len(r.o.log))
	c := candidate{seq: events.NoSeq, turn: 1, fixed: []string{`{"a":1,"b":[1.10]}`, `{"b":[1.1],"a":1e0}`, `{"a":2,"b":[]}`}[r.choose(3)],
		callID: []string{"c1", "c2"}[r.choose(2)], text: []string{"hello", "wor\nld", "\u00e4<&>"}[r.choose(3)],
		shuffled: r.choose(2) == 0, empty: r.choose(5) == 0}
	if r.choose(8) == 0 {
		c.typ, c.data = r.logOnly()
	} else {
		c.typ = []string{events.TypeUser, events.TypeTool, events.TypeAssistant, events.TypeSystem}[r.choose(4)]
		c.op = true
		switch {
		case len(nodes) == 0:
		case r.choose(2) == 0 && (c.typ != events.TypeAssistant || r.choose(8) == 0):
			r.aim(&c, nodes)
		case r.choose(4) == 0 && next > 0:
			c.cites = []events.Seq{events.Seq(r.choose(int(next)))}
		}
	}
	switch r.choose(40) { // now and then a fault
	case 0:
		c.seq = next
	case 1:
		c.seq = next + 1
	case 2:
		c.cites = []events.Seq{}
	case 3:
		c.cites = append(c.cites, next)
	case 4:
		c.cites = append(c.cites, c.cites...)
	case 5:
		c.op, c.replace = !c.op, false
	case 6:
		c.end = next
	case 7:
		c.broken = true
	case 8:
		c.cites = append(c.cites, events.Seq(r.choose(int(next)+1)))
	}
	return c
}

// aim makes a replacement of a candidate.
func (r *foldRun) aim(c *candidate, nodes []events.Seq) {
	from := r.choose(len(nodes))
	to := from + r.choose(min(4, len(nodes)-from))
	if c.typ == events.TypeTool && r.choose(4) > 0 { // a prune, and of a result when there is one
		to = from
		for i := range nodes {
			if at := (from + i) % len(nodes); r.o.log[nodes[at]].typ == events.TypeTool {
				old := r.o.log[nodes[at]]
				from, to = at, at
				if r.choose(4) > 0 {
					c.fixed, c.callID, c.broken = old.fixed, old.callID, false
				}
				break
			}
		}
	}
	c.op, c.replace = false, true
	c.start, c.end = nodes[from], nodes[to]
	c.cites = slices.Clone(nodes[from : to+1])
	switch r.choose(12) {
	case 0:
		c.cites = c.cites[:len(c.cites)-1]
	case 1:
		slices.Reverse(c.cites)
	case 2:
		c.start, c.end = c.end, c.start
	case 3:
		c.start = events.Seq(r.choose(len(r.o.log)))
	case 4:
		c.end = events.Seq(r.choose(len(r.o.log)))
	case 5:
		if extra := events.Seq(r.choose(len(r.o.log))); !slices.Contains(c.cites, extra) {
			c.cites = append([]events.Seq{extra}, c.cites...)
		}
	}
	if len(c.cites) == 0 {
		c.cites = nil
	}
}

func (r *foldRun) logOnly() (typ, data string) {
	kinds := [][2]string{
		{"turn/start", `{"turn":1}`}, {"turn/end", `{"turn":1}`}, {"step/start", `{"turn":1,"step":1}`}, {"step/end", `{"turn":1,"step":1}`},
		{"tool/call", `{"turn":1,"step":1,"callId":"c1"}`}, {"agent/status", `{"agent":"a","status":"running"}`}, {"agent/status", `{"agent":"a","status":"idle"}`},
		{"session/writer", `{"writer":"w","epoch":1}`}, {"session/end-seed", `{"inherited":true}`}, {"x/opaque", `1`},
	}
	k := kinds[r.choose(len(kinds))]
	return k[0], k[1]
}
