// Package events owns what an event is: its canonical line, the vocabulary of types, the rules
// that an event breaks or keeps by itself, the digest chain, and the CloudEvents in which
// commits are stored and single events cross the edges. It knows nothing of other events, of
// the surface or of where anything is kept.
package events

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Format is the version of a session's event shapes, as its header's `version` says: 3 or 4.
type Format int

// The formats that are stored. Older session files become format 3 on import.
const (
	Format3 Format = 3
	Format4 Format = 4
)

// OpKind is what an event does to the surface.
type OpKind uint8

// The operations. An event that is not on the surface has OpNone.
const (
	OpNone OpKind = iota
	OpAppend
	OpReplace
)

// Op is the surfaceOp of an event. Start and End (seqs of surface nodes, inclusive, in
// surface order) mean something for OpReplace alone.
type Op struct {
	Kind       OpKind
	Start, End Seq
}

// Event is one immutable entry of a session's log. Its slices belong to it: whoever holds
// an Event must not change them.
type Event struct {
	Type      string
	Kind      Kind
	Seq       Seq
	Time      int64 // Unix milliseconds
	Op        Op
	Sources   []Seq // sourceEventSeqs, nil when absent
	Ignorable bool

	// Line is the canonical line without its line end: the form of the log, of session files
	// and of the digest.
	Line    []byte
	data    int  // offset of data in Line
	checked bool // passed Parse or Check
	found   found

	// TimeGiven says that the appender's caller, not the appender, chose the time.
	TimeGiven bool
}

// found is where the parts of a surface event that was checked stand in its data: what was
// looked up for the check needs not be looked up again.
type found struct {
	msg, msgEnd int32 // the message; msgEnd is 0 when it was not checked
	free        int32 // what a rewrite of a tool result may change; 0 when there is none
	empty       bool  // the message's content is an empty array
}

// Data returns the event's data, token for token as it was given. It is a part of Line.
func (e *Event) Data() []byte { return e.Line[e.data : len(e.Line)-1] }

// Context is what Parse must know about the place at which an event is to be appended.
type Context struct {
	Format     Format
	Vocabulary *Vocabulary
	Next       Seq   // the seq that the event will get
	Now        int64 // Unix ms; the time of an event that carries none

	// EmptyCallID accepts a tool result whose callId is empty, as old recordings hold them.
	// Defaults to false.
	EmptyCallID bool
	// Room is where the line may be written; it is not overwritten. A line that might not fit
	// into its capacity gets memory of its own. Defaults to nil.
	Room []byte
}

// Parse reads one event as a caller wrote it: any key order, any white space, seq and time
// optional. It checks every rule that needs no other event, in the order of the rules, and
// returns the event with its canonical line. Errors are *Error with the first broken rule.
// The event holds no reference to raw.
func Parse(raw []byte, c Context) (*Event, error) {
	fail := func(r Rule, format string, args ...any) error {
		return Violation(r, c.Next, fmt.Sprintf(format, args...))
	}
	var members memberList
	spaces, err := scanText(raw, MaxDepth+1, &members)
	if err != nil {
		return nil, fail(RuleJSONMalformed, "%v; an event is one JSON object in UTF-8", err)
	}
	env, envErr := readEnvelope(raw, members.all())
	// A given seq is looked at first, so that a writer that is behind hears of that and
	// not of what it wrote.
	if env.seq != nil {
		if n, ok := parseInteger(env.seq); ok && Seq(n) != c.Next {
			e := Violation(RuleSeqNotContiguous, Seq(n), fmt.Sprintf("expected seq %d, got %d", c.Next, n))
			given, next := Seq(n), c.Next
			e.ExpectedSeq, e.ActualSeq = &given, &next
			return nil, e
		}
	}
	if envErr != "" {
		return nil, fail(RuleEnvelopeMalformed, "%s", envErr)
	}
	e := &Event{Seq: c.Next, Time: c.Now, Ignorable: env.ignorable != nil}
	if env.time != nil {
		e.Time, _ = parseInteger(env.time)
		e.TimeGiven = true
	}
	var known bool
	e.Type, e.Kind, known = c.Vocabulary.classify(env.typ, c.Format, e.Ignorable)
	if !known {
		return nil, fail(RuleUnknownType, "type %q is not in the vocabulary of format %d; mark the event \"ignorable\":true to store it unread, or add the type to the deployment's vocabulary", e.Type, c.Format)
	}
	if e.Kind != KindOpaque {
		if v := e.readMeta(env.op, env.sources); v != nil {
			return nil, v
		}
	}
	e.buildLine(env, spaces, c.Room[len(c.Room):])
	if e.Kind.OnSurface() {
		var store [12]member
		if v := e.checkMessage(c.Format, c.EmptyCallID, appendMembers(store[:0], e.Data())); v != nil {
			return nil, v
		}
	}
	e.checked = true
	return e, nil
}

// envelope holds the value tokens of an event's top-level members; absent ones are nil.
type envelope struct {
	typ                                      []byte // unescaped
	seq, time, op, sources, ignorable, datum []byte
}

// readEnvelope sorts the members of an event and says what is wrong with them, if anything.
// The tokens that it could read are returned either way.
func readEnvelope(raw []byte, members []member) (env envelope, problem string) {
	if t := bytes.TrimLeft(raw, " \t\r\n"); t[0] != '{' {
		return env, "expected an event, which is an object, found " + kindOf(t)
	}
	note := func(format string, args ...any) {
		if problem == "" {
			problem = fmt.Sprintf(format, args...)
		}
	}
	var typ []byte
	for _, m := range members {
		key := m.key
		if bytes.IndexByte(key, '\\') >= 0 {
			key = unescape(nil, key)
		}
		var slot *[]byte
		switch string(key) {
		case "type":
			slot = &typ
		case "seq":
			slot = &env.seq
		case "time":
			slot = &env.time
		case "surfaceOp":
			slot = &env.op
		case "sourceEventSeqs":
			slot = &env.sources
		case "ignorable":
			slot = &env.ignorable
		case "data":
			slot = &env.datum
		}
		switch {
		case slot == nil:
			note("unknown key %q; an event has type, seq, time, surfaceOp, sourceEventSeqs, ignorable and data, in exact case", clip(m.key))
		case *slot != nil:
			note("key %q is given twice", clip(m.key))
			if slot == &env.seq {
				env.seq = nil
				return env, problem
			}
		default:
			*slot = m.val
		}
	}
	ok := isText(typ)
	if ok {
		if env.typ = typ[1 : len(typ)-1]; bytes.IndexByte(env.typ, '\\') >= 0 {
			env.typ = unescape(nil, env.typ)
		}
	}
	switch {
	case typ == nil:
		note("type is missing")
	case !ok:
		note("type: expected a string, found %s", kindOf(typ))
	case !validType(env.typ):
		note("type %q: expected %s", clip(typ), typePattern)
	}
	for _, f := range []struct {
		name string
		tok  []byte
	}{{"seq", env.seq}, {"time", env.time}} {
		if f.tok == nil {
			continue
		}
		if _, ok := parseInteger(f.tok); !ok {
			note("%s: expected an integer from 0 to 2^53-1, found %s %s", f.name, kindOf(f.tok), clip(f.tok))
		}
	}
	if env.ignorable != nil && string(env.ignorable) != "true" {
		note("ignorable: expected true or nothing at all, found %s", clip(env.ignorable))
	}
	if env.datum == nil {
		note("data is missing")
	}
	return env, problem
}

// readMeta checks surfaceOp and sourceEventSeqs (compact or not) and stores what they say.
func (e *Event) readMeta(op, sources []byte) *Error {
	fail := func(r Rule, format string, args ...any) *Error {
		return Violation(r, e.Seq, fmt.Sprintf(format, args...))
	}
	if !e.Kind.OnSurface() {
		if op != nil {
			return fail(RuleSurfaceOpForbidden, "%s is a log-only type and must not carry surfaceOp", e.Type)
		}
		if sources != nil {
			return fail(RuleSourcesForbidden, "%s is a log-only type and must not carry sourceEventSeqs", e.Type)
		}
		return nil
	}
	switch {
	case op == nil:
		return fail(RuleSurfaceOpRequired, `%s is a surface type and must carry surfaceOp: "append" or {"op":"replace","startSeq":a,"endSeq":b}`, e.Type)
	case op[0] == '{':
		if v := e.readReplace(op); v != nil {
			return v
		}
		if e.Op.Start >= e.Seq || e.Op.End >= e.Seq {
			return fail(RuleEndpointNotEarlier, "a replacement at seq %d must name earlier nodes, found startSeq %d and endSeq %d", e.Seq, e.Op.Start, e.Op.End)
		}
	default:
		if !textIs(op, "append") {
			return fail(RuleSurfaceOpMalformed, `surfaceOp: expected "append" or an object, found %s %s`, kindOf(op), clip(op))
		}
		e.Op.Kind = OpAppend
	}
	if sources == nil {
		return nil
	}
	if e.Kind == KindAssistant {
		return fail(RuleAssistantSources, "assistant/message must not carry sourceEventSeqs")
	}
	return e.readSources(sources)
}

// readReplace reads the object form of surfaceOp: exactly op, startSeq and endSeq.
func (e *Event) readReplace(op []byte) *Error {
	op = compacted(op)
	keys := 0
	var kind, start, end []byte
	eachMember(op, func(k, v []byte) bool {
		keys++
		switch {
		case keyIs(k, "op"):
			kind = v
		case keyIs(k, "startSeq"):
			start = v
		case keyIs(k, "endSeq"):
			end = v
		}
		return true
	})
	fail := func(format string, args ...any) *Error {
		return Violation(RuleReplaceMalformed, e.Seq, "surfaceOp: "+fmt.Sprintf(format, args...))
	}
	if keys != 3 || kind == nil || start == nil || end == nil {
		return fail("expected exactly the keys op, startSeq and endSeq, found %s", keysOf(op))
	}
	if !textIs(kind, "replace") {
		return fail(`op: expected "replace", found %s`, clip(kind))
	}
	a, okA := parseInteger(start)
	b, okB := parseInteger(end)
	if !okA || !okB {
		return fail("startSeq and endSeq must be integers from 0 to 2^53-1, found %s and %s", clip(start), clip(end))
	}
	e.Op = Op{Kind: OpReplace, Start: Seq(a), End: Seq(b)}
	return nil
}

// keysOf lists the keys of an object, for an error text.
func keysOf(obj []byte) string {
	var keys []string
	eachMember(obj, func(k, _ []byte) bool {
		keys = append(keys, clip(k))
		return true
	})
	return strings.Join(keys, ", ")
}

// readSources reads sourceEventSeqs of a surface event.
func (e *Event) readSources(tok []byte) *Error {
	fail := func(r Rule, format string, args ...any) *Error {
		return Violation(r, e.Seq, "sourceEventSeqs: "+fmt.Sprintf(format, args...))
	}
	if tok[0] != '[' {
		return fail(RuleSourcesMalformed, "expected an array of seqs, found %s", kindOf(tok))
	}
	tok = compacted(tok)
	if string(tok) == "[]" {
		return fail(RuleSourcesEmpty, "expected at least one seq or no sourceEventSeqs at all, found an empty array")
	}
	e.Sources = make([]Seq, 0, 1+bytes.Count(tok, []byte{','}))
	var bad []byte
	eachElement(tok, func(v []byte) bool {
		n, ok := parseInteger(v)
		if !ok {
			bad = v
			return false
		}
		e.Sources = append(e.Sources, Seq(n))
		return true
	})
	if bad != nil {
		return fail(RuleSourcesMalformed, "expected integers from 0 to 2^53-1, found %s %s", kindOf(bad), clip(bad))
	}
	if d, twice := firstDuplicate(e.Sources); twice {
		return fail(RuleSourcesDuplicate, "seq %d is given twice", d)
	}
	for _, s := range e.Sources {
		if s >= e.Seq {
			return fail(RuleSourcesNotEarlier, "an event at seq %d must cite earlier ones, found %d", e.Seq, s)
		}
	}
	return nil
}

// firstDuplicate finds a seq that stands in s twice. Sources mostly come in ascending order,
// which needs no copy.
func firstDuplicate(s []Seq) (Seq, bool) {
	sorted := true
	for i := 1; i < len(s) && sorted; i++ {
		sorted = s[i-1] < s[i]
	}
	if sorted {
		return 0, false
	}
	c := slices.Clone(s)
	slices.Sort(c)
	for i := 1; i < len(c); i++ {
		if c[i-1] == c[i] {
			return c[i], true
		}
	}
	return 0, false
}

// buildLine writes the canonical line. Metadata of an opaque event is kept token for token,
// since nobody here knows what it means.
func (e *Event) buildLine(env envelope, spaces bool, b []byte) {
	if most := len(env.datum) + len(env.op) + len(env.sources) + len(e.Type) + 96; cap(b) < most {
		b = make([]byte, 0, most)
	}
	b = append(b, `{"type":"`...)
	b = append(b, e.Type...)
	b = append(b, `","seq":`...)
	b = strconv.AppendInt(b, int64(e.Seq), 10)
	b = append(b, `,"time":`...)
	b = strconv.AppendInt(b, e.Time, 10)
	switch {
	case e.Kind == KindOpaque:
		if env.op != nil {
			b = appendCompact(append(b, `,"surfaceOp":`...), env.op, spaces)
		}
		if env.sources != nil {
			b = appendCompact(append(b, `,"sourceEventSeqs":`...), env.sources, spaces)
		}
	default:
		b = e.appendMeta(b)
	}
	if e.Ignorable {
		b = append(b, `,"ignorable":true`...)
	}
	b = append(b, `,"data":`...)
	e.data = len(b)
	b = appendCompact(b, env.datum, spaces)
	e.Line = append(b, '}')
}

func (e *Event) appendMeta(b []byte) []byte {
	switch e.Op.Kind {
	case OpAppend:
		b = append(b, `,"surfaceOp":`+appendOp...)
	case OpReplace:
		b = append(b, `,"surfaceOp":{"op":"replace","startSeq":`...)
		b = strconv.AppendInt(b, int64(e.Op.Start), 10)
		b = append(b, `,"endSeq":`...)
		b = strconv.AppendInt(b, int64(e.Op.End), 10)
		b = append(b, '}')
	}
	if e.Sources != nil {
		b = append(b, `,"sourceEventSeqs":`...)
		b = appendSeqs(b, e.Sources)
	}
	return b
}

func appendSeqs(b []byte, seqs []Seq) []byte {
	b = append(b, '[')
	for i, s := range seqs {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(s), 10)
	}
	return append(b, ']')
}
