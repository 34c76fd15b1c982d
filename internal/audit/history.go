package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"

	"palimpsest/internal/events"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

// errReached ends a reading at the place that was looked for.
var errReached = errors.New("audit: reached")

// refold folds a session's log from its start, up to a seq, or to the log's end when that is
// MaxSeq. f, when given, sees every applied plan with the surface behind it.
func (a *Auditor) refold(ctx context.Context, id string, upTo events.Seq, f func(*session.State, *session.Plan, *events.Commit)) (*session.State, error) {
	if err := events.CheckSessionID(id); err != nil {
		return nil, err
	}
	h, err := a.headers.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	st := session.New(id, h.Format, h.Raw, surface.KeepFingerprints)
	ready := func(p *session.Plan) error {
		if p.Event.Seq > upTo {
			return errReached
		}
		return nil
	}
	err = a.log.ReadOn(ctx, id, 0, 0, func(c *events.Commit) error {
		each := func(p *session.Plan) {
			if f != nil {
				f(st, p, c)
			}
		}
		err := st.FoldCommitIf(c, a.log.Vocabulary(), ready, each)
		if errors.Is(err, &events.Error{Code: events.CodeRuleViolation, Rule: events.RuleUnknownType}) {
			if _, err := a.log.RefreshVocabulary(ctx); err != nil {
				return err
			}
			err = st.FoldCommitIf(c, a.log.Vocabulary(), ready, each)
		}
		if err == nil && c.Last >= upTo { // what comes then may not be readable
			return errReached
		}
		return err
	})
	if err != nil && !errors.Is(err, errReached) {
		return nil, err
	}
	if upTo != events.MaxSeq && st.Last() < upTo {
		return nil, &events.Error{Code: events.CodeNotFound, Session: id, Seq: &upTo, Detail: fmt.Sprintf("the session has no event at seq %d; its last is %d", upTo, st.Last())}
	}
	return st, nil
}

// Step is an event as history tells of it.
type Step struct {
	Seq  events.Seq `json:"seq"`
	Type string     `json:"type"`
	Time int64      `json:"time"`         // Unix ms
	Op   string     `json:"op,omitempty"` // append or replace; nothing off the surface

	Commit    string `json:"commit"`
	Actor     string `json:"actor"`
	StreamSeq uint64 `json:"streamSeq"`

	Replaced []events.Seq `json:"replaced,omitempty"` // nodes that it took the place of, in surface order
	Cites    []events.Seq `json:"cites,omitempty"`    // sourceEventSeqs that it did not replace
	// ShadowedBy is the replacement that took it off the surface; nil for one that is on the
	// surface, or never was.
	ShadowedBy *events.Seq `json:"shadowedBy,omitempty"`
	Text       string      `json:"text,omitempty"` // how its message begins
}

// stepOf tells of an event that was just folded.
func stepOf(p *session.Plan, c *events.Commit) *Step {
	e := p.Event
	s := &Step{Seq: e.Seq, Type: e.Type, Time: e.Time, Commit: c.ID, Actor: c.Actor, StreamSeq: c.StreamSeq}
	if e.Kind.OnSurface() && e.Op.Kind != events.OpNone {
		s.Op = "append"
		if p.Change.Replace {
			s.Op = "replace"
		}
		if e.Check(c.Format) == nil {
			s.Text = glimpse(e.Message())
		}
	}
	shadowed := map[events.Seq]bool{}
	for _, n := range p.Change.Shadowed() {
		s.Replaced = append(s.Replaced, n.Seq)
		shadowed[n.Seq] = true
	}
	for _, seq := range e.Sources {
		if !shadowed[seq] {
			s.Cites = append(s.Cites, seq)
		}
	}
	return s
}

// Origin is an event in the tree of an explanation.
type Origin struct {
	Depth int `json:"depth"` // 0 for what is explained
	// Role says how it belongs to the one above it: replaced, or cited. "" for what is explained.
	Role string `json:"role,omitempty"`
	// Repeated says that the event stands in the tree before, with what it came from.
	Repeated bool `json:"repeated,omitempty"`
	Step
}

// Explanation says where a node came from and what became of it.
type Explanation struct {
	Session string     `json:"session"`
	Seq     events.Seq `json:"seq"`
	LastSeq events.Seq `json:"lastSeq"` // where the log ended
	// OnSurface says that the event is a node at the log's end, Position where, from 0.
	OnSurface bool `json:"onSurface"`
	Position  *int `json:"position,omitempty"`
	// Over are the replacements above the event: the one that shadows it, the one that shadows
	// that, up to the node that stands for it on the surface now.
	Over []Step `json:"over"`
	// From is the event and all that it came from, down to events that replaced nothing, each
	// behind the one it belongs to.
	From []Origin `json:"from"`
	// Truncated says that From has more events than the limit.
	Truncated bool `json:"truncated,omitempty"`
}

// MostOrigins is how many events an explanation lists unless told otherwise.
const MostOrigins = 10_000

// Explain says where the event at a seq came from, through any number of replacements, and what
// shadows it. Its tree has at most limit events; 0 means MostOrigins.
func (a *Auditor) Explain(ctx context.Context, id string, seq events.Seq, limit int) (*Explanation, error) {
	if limit <= 0 {
		limit = MostOrigins
	}
	steps := map[events.Seq]*Step{}
	var logged []*Step // by seq; what is off the surface, until it is known to be cited
	st, err := a.refold(ctx, id, events.MaxSeq, func(_ *session.State, p *session.Plan, c *events.Commit) {
		s := stepOf(p, c)
		for _, r := range s.Replaced {
			by := s.Seq
			steps[r].ShadowedBy = &by
		}
		if s.Op == "" {
			logged = append(logged, &Step{Seq: s.Seq, Type: s.Type, Time: s.Time, Commit: s.Commit, Actor: s.Actor, StreamSeq: s.StreamSeq})
			s = logged[len(logged)-1]
		}
		steps[s.Seq] = s
	})
	if err != nil {
		return nil, err
	}
	s := steps[seq]
	if s == nil {
		return nil, &events.Error{Code: events.CodeNotFound, Session: id, Seq: &seq, Detail: fmt.Sprintf("the session has no event at seq %d; its last is %d", seq, st.Last())}
	}
	out := &Explanation{Session: id, Seq: seq, LastSeq: st.Last(), Over: []Step{}}
	if at, ok := st.Surface.Position(seq); ok {
		out.OnSurface, out.Position = true, &at
	}
	for by := s.ShadowedBy; by != nil; by = steps[*by].ShadowedBy {
		out.Over = append(out.Over, *steps[*by])
	}
	// Depth first, with a stack: replacements nest as deep as there are any.
	type todo struct {
		seq   events.Seq
		depth int
		role  string
	}
	stack, told := []todo{{seq, 0, ""}}, map[events.Seq]bool{}
	for len(stack) > 0 {
		t := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if len(out.From) == limit {
			out.Truncated = true
			break
		}
		s := steps[t.seq]
		o := Origin{Depth: t.depth, Role: t.role, Repeated: told[t.seq], Step: *s}
		out.From = append(out.From, o)
		if o.Repeated {
			continue
		}
		told[t.seq] = true
		for i := len(s.Cites) - 1; i >= 0; i-- {
			stack = append(stack, todo{s.Cites[i], t.depth + 1, "cited"})
		}
		for i := len(s.Replaced) - 1; i >= 0; i-- {
			stack = append(stack, todo{s.Replaced[i], t.depth + 1, "replaced"})
		}
	}
	return out, nil
}

// Diff says which nodes came and went between two seqs.
type Diff struct {
	Session string     `json:"session"`
	From    events.Seq `json:"from"` // the surface as of this seq; -1 for the empty one
	To      events.Seq `json:"to"`
	Came    []Step     `json:"came"`   // on the surface as of To and not as of From, in surface order
	Went    []Step     `json:"went"`   // the other way round, each with what shadows it
	Passed  []Step     `json:"passed"` // came behind From and went before To
	// Did are the replacements behind From up to To, in log order.
	Did []Step `json:"did"`
}

// Diff compares the surface as of two seqs; from must not be behind to. A from of -1 is the
// empty surface.
func (a *Auditor) Diff(ctx context.Context, id string, from, to events.Seq) (*Diff, error) {
	if from < events.NoSeq || from > to {
		return nil, &events.Error{Code: events.CodeBadRequest, Session: id, Detail: fmt.Sprintf("from and to: expected -1 or a seq, and a seq that is not before it, found %d and %d", from, to)}
	}
	out := &Diff{Session: id, From: from, To: to, Came: []Step{}, Went: []Step{}, Passed: []Step{}, Did: []Step{}}
	was := map[events.Seq]bool{}
	steps := map[events.Seq]*Step{}
	var gone []*Step // in the order in which they went
	st, err := a.refold(ctx, id, to, func(st *session.State, p *session.Plan, c *events.Commit) {
		s := stepOf(p, c)
		if s.Op != "" {
			steps[s.Seq] = s
		}
		if s.Seq > from {
			for _, r := range s.Replaced {
				by := s.Seq
				steps[r].ShadowedBy = &by
				gone = append(gone, steps[r])
			}
			if s.Op == "replace" {
				out.Did = append(out.Did, *s)
			}
		}
		for _, r := range s.Replaced {
			if s.Seq <= from {
				delete(steps, r) // went before
			}
		}
		if s.Seq == from {
			for _, n := range st.Surface.Seqs() {
				was[n] = true
			}
		}
	})
	if err != nil {
		return nil, err
	}
	for _, s := range gone {
		if was[s.Seq] {
			out.Went = append(out.Went, *s)
		} else {
			out.Passed = append(out.Passed, *s)
		}
	}
	for _, n := range st.Surface.Seqs() {
		if !was[n] {
			out.Came = append(out.Came, *steps[n])
		}
	}
	return out, nil
}

// Span is a time during which a text was in the messages.
type Span struct {
	From events.Seq  `json:"from"`         // the event that put it in
	To   *events.Seq `json:"to,omitempty"` // the event that took it out; nil: it is in the messages now
}

// Blame says which events put a text into the messages and which took it out.
type Blame struct {
	Session string     `json:"session"`
	Text    string     `json:"text"`
	LastSeq events.Seq `json:"lastSeq"`
	// Spans are when the text was in at least one message.
	Spans []Span `json:"spans"`
	// Events are the events whose message has the text, each with what shadows it.
	Events []Step `json:"events"`
}

// Blame looks for a text in the messages of a session, in the strings that they hold, decoded.
func (a *Auditor) Blame(ctx context.Context, id, text string) (*Blame, error) {
	if text == "" {
		return nil, &events.Error{Code: events.CodeBadRequest, Session: id, Detail: "text: expected a text to look for, found none"}
	}
	out := &Blame{Session: id, Text: text, Spans: []Span{}, Events: []Step{}}
	in := map[events.Seq]*Step{} // nodes with the text that are on the surface
	var all []*Step
	st, err := a.refold(ctx, id, events.MaxSeq, func(_ *session.State, p *session.Plan, c *events.Commit) {
		e, before := p.Event, len(in)
		for _, n := range p.Change.Shadowed() {
			if s := in[n.Seq]; s != nil {
				by := e.Seq
				s.ShadowedBy = &by
				delete(in, n.Seq)
			}
		}
		if e.Kind.OnSurface() && e.Op.Kind != events.OpNone && e.Check(c.Format) == nil && hasText(e.Message(), text) {
			s := stepOf(p, c)
			in[e.Seq] = s
			all = append(all, s)
		}
		switch {
		case before == 0 && len(in) > 0:
			out.Spans = append(out.Spans, Span{From: e.Seq})
		case before > 0 && len(in) == 0:
			seq := e.Seq
			out.Spans[len(out.Spans)-1].To = &seq
		}
	})
	if err != nil {
		return nil, err
	}
	out.LastSeq = st.Last()
	for _, s := range all {
		out.Events = append(out.Events, *s)
	}
	return out, nil
}

// hasText reports whether a string in a JSON value contains a text.
func hasText(val []byte, text string) bool {
	if len(val) == 0 || bytes.IndexByte(val, '\\') < 0 && !strings.Contains(text, `"`) && !bytes.Contains(val, []byte(text)) {
		return false
	}
	found := false
	switch val[0] {
	case '"':
		s, _ := events.Text(val)
		return strings.Contains(s, text)
	case '{':
		events.EachMember(val, func(_, v []byte) bool { found = hasText(v, text); return !found })
	case '[':
		events.EachElement(val, func(v []byte) bool { found = hasText(v, text); return !found })
	}
	return found
}

// glimpseRunes is how much of a message a step shows.
const glimpseRunes = 80

// glimpse returns how the texts of a message begin, on one line.
func glimpse(msg []byte) string {
	var b strings.Builder
	var walk func(block []byte)
	walk = func(block []byte) {
		if b.Len() > 4*glimpseRunes {
			return
		}
		if t, ok := events.Text(events.Get(block, "text")); ok {
			b.WriteString(t[:min(len(t), 4*glimpseRunes)] + " ")
		}
		if t, ok := events.Text(events.Get(block, "name")); ok && events.TextIs(events.Get(block, "type"), "tool-call") {
			b.WriteString("→ " + t + " ")
		}
		events.EachElement(events.Get(block, "content"), func(v []byte) bool { walk(v); return true })
	}
	walk(msg)
	s := strings.ToValidUTF8(strings.Join(strings.Fields(b.String()), " "), "")
	if r := []rune(s); len(r) > glimpseRunes {
		return string(r[:glimpseRunes-1]) + "…"
	}
	return s
}
