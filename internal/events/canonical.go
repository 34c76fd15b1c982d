package events

import (
	"bytes"
	"fmt"
	"unicode/utf8"
)

// ParseCanonical reads the envelope of a canonical line into e, in the one form in which
// appenders write it, and leaves data unread: its cost does not depend on the size of data.
// e takes line over. Whether data is what the type demands is for Check to say; an
// envelope that is not canonical, or breaks a rule by itself, is an *Error.
func ParseCanonical(e *Event, line []byte, f Format, v *Vocabulary) error {
	p := envelopeReader{b: line}
	typ := p.quoted(`{"type":"`)
	seq := p.integer(`,"seq":`)
	time := p.integer(`,"time":`)
	if p.bad {
		return notCanonical(line, NoSeq)
	}
	*e = Event{Seq: Seq(seq), Time: time, Line: line, TimeGiven: true}
	var op, sources []byte
	metaStart := p.i
	if p.literal(`,"surfaceOp":`) {
		op = p.value()
	}
	if p.literal(`,"sourceEventSeqs":`) {
		sources = p.value()
	}
	meta := line[metaStart:p.i]
	e.Ignorable = p.literal(`,"ignorable":true`)
	if !p.literal(`,"data":`) || p.bad || line[len(line)-1] != '}' || len(line) < p.i+2 {
		return notCanonical(line, e.Seq)
	}
	e.data = p.i
	var known bool
	e.Type, e.Kind, known = v.classify(typ, f, e.Ignorable)
	switch {
	case !known:
		return Violation(RuleUnknownType, e.Seq, fmt.Sprintf("type %q is not in the vocabulary of format %d", clip(typ), f))
	case e.Kind == KindOpaque:
		return nil
	case e.Kind.OnSurface() && string(op) == appendOp && sources == nil:
		e.Op.Kind = OpAppend
		return nil
	}
	if err := e.readMeta(op, sources); err != nil {
		return err
	}
	var buf [256]byte
	if !bytes.Equal(e.appendMeta(buf[:0]), meta) {
		return notCanonical(line, e.Seq)
	}
	return nil
}

func notCanonical(line []byte, seq Seq) *Error {
	return Violation(RuleEnvelopeMalformed, seq, "the stored line is not in canonical form: "+clip(line))
}

// Check validates what ParseCanonical left unread: that the whole line is JSON and, for a
// surface event, that its message has the shape of its type.
func (e *Event) Check(f Format) error {
	if e.checked {
		return nil
	}
	if e.Kind == KindOpaque && !utf8.Valid(e.Line[:e.data]) { // its metadata; that of others is ASCII
		return notCanonical(e.Line, e.Seq)
	}
	var members memberList
	spaces, err := scanText(e.Data(), MaxDepth, &members)
	if err != nil {
		return Violation(RuleJSONMalformed, e.Seq, "data: "+err.Error())
	}
	if spaces {
		return Violation(RuleEnvelopeMalformed, e.Seq, "data holds insignificant white space, which is not canonical")
	}
	if e.Kind.OnSurface() {
		// What was imported with an empty callId stays readable.
		if v := e.checkMessage(f, true, unescapeKeys(members.all())); v != nil {
			return v
		}
	}
	e.checked = true
	return nil
}

// envelopeReader reads literal pieces of a line from the left. A piece that is not there
// sets bad, and nothing is read from then on.
type envelopeReader struct {
	b   []byte
	i   int
	bad bool
}

func (p *envelopeReader) literal(s string) bool {
	if p.bad || len(p.b)-p.i < len(s) || string(p.b[p.i:p.i+len(s)]) != s {
		return false
	}
	p.i += len(s)
	return true
}

// quoted reads a literal and the escape-free string behind it up to its closing quote.
func (p *envelopeReader) quoted(s string) []byte {
	if !p.literal(s) {
		p.bad = true
		return nil
	}
	rest := p.b[p.i:]
	if len(rest) > 129 {
		rest = rest[:129]
	}
	n := bytes.IndexByte(rest, '"')
	if n < 0 || !validType(rest[:n]) {
		p.bad = true
		return nil
	}
	p.i += n + 1
	return rest[:n]
}

// integer reads a literal and the plain decimal behind it.
func (p *envelopeReader) integer(s string) int64 {
	if !p.literal(s) {
		p.bad = true
		return 0
	}
	start := p.i
	n := int64(0)
	for p.i < len(p.b) && isDigit(p.b[p.i]) && p.i-start < 17 {
		n = n*10 + int64(p.b[p.i]-'0')
		p.i++
	}
	if p.i == start || n > int64(MaxSeq) || (p.b[start] == '0' && p.i-start > 1) {
		p.bad = true
	}
	return n
}

// value reads one JSON value of the metadata.
func (p *envelopeReader) value() []byte {
	if p.bad {
		return nil
	}
	s := scanner{b: p.b, i: p.i, maxDepth: MaxDepth}
	if s.value(0) != nil || s.spaces {
		p.bad = true
		return nil
	}
	v := p.b[p.i:s.i]
	p.i = s.i
	return v
}

// CutLine cuts the first line off a commit's body; rest is nil behind the last one.
func CutLine(body []byte) (line, rest []byte) {
	if n := bytes.IndexByte(body, '\n'); n >= 0 {
		return body[:n], body[n+1:]
	}
	return body, nil
}

// ScanValue validates the JSON value that b begins with and returns how many bytes it takes. ok is
// false when it is no JSON, or has white space between its tokens or more than MaxDepth levels.
// Its strings need not be valid UTF-8.
func ScanValue(b []byte) (n int, ok bool) {
	s := scanner{b: b, maxDepth: MaxDepth}
	if s.value(0) != nil || s.spaces {
		return 0, false
	}
	return s.i, true
}
