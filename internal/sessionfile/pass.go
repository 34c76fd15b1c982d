package sessionfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	"palimpsest/internal/events"
)

// pass is one reading of a file.
type pass struct {
	f       *File
	compare bool // with what Check saw
	content *content
	lines   *lines
	header  *events.Header
	dated   bool // the header has a createdAt
	next    events.Seq
	conv    *converter // nil unless the file is of an older format

	// canonical says, while Check reads, that every line so far was an event's canonical line,
	// and in pass two that all were: then the same bytes need not be validated again.
	canonical bool
}

// newPass starts a reading, which must be closed. One that compares reads no other bytes than
// those that Check saw.
func (f *File) newPass(compare bool) *pass {
	c := &content{f: f, b: &blocks{f: f, compare: compare}}
	return &pass{f: f, compare: compare, content: c, lines: newLines(c, f.o.MaxEvent), canonical: !compare || f.canonical}
}

func (p *pass) close() { p.content.close() }

// within reports whether the line that was read last stands for more events.
func (p *pass) within() bool { return p.conv != nil && p.conv.row.left > 0 }

// event returns the next event, io.EOF behind the last one.
func (p *pass) event() (*events.Event, error) {
	if p.within() {
		return p.parse(p.conv.next())
	}
	l, err := p.lines.next()
	if err != nil {
		return nil, err
	}
	return p.first(l)
}

// first returns the event of a line, the first one when it stands for several.
func (p *pass) first(l line) (*events.Event, error) {
	text := l.text
	if p.conv != nil {
		var err error
		if text, err = p.conv.event(l.text, p.next, p.header.CreatedAt); err != nil {
			return nil, err
		}
	}
	e, err := p.parse(text)
	if err != nil && torn(l, err) {
		return nil, &events.Error{Code: CodeCrashTail, Detail: fmt.Sprintf(
			"the last line, line %d, is incomplete: %d bytes from byte %d on, without a line end; a crash cut it off. Drop it with repair-tail", l.number, len(l.text), l.offset)}
	}
	return e, err
}

func (p *pass) parse(text []byte) (*events.Event, error) {
	if p.canonical && p.compare {
		e := new(events.Event)
		err := events.ParseCanonical(e, bytes.Clone(text), p.header.Format, p.f.o.Vocabulary)
		p.next++
		return e, err
	}
	e, err := events.Parse(text, p.context(p.next))
	if err != nil {
		return nil, err
	}
	if most := p.f.o.MaxEvent; len(e.Line) > most {
		seq := e.Seq
		return nil, &events.Error{Code: events.CodeTooLarge, Seq: &seq, Detail: fmt.Sprintf("the event has %d bytes in canonical form, the limit is %d", len(e.Line), most)}
	}
	p.canonical = p.canonical && bytes.Equal(e.Line, text)
	p.next++
	if p.conv != nil {
		p.conv.taken()
	}
	return e, nil
}

// context is what a line is parsed in: a missing seq is the next one, a missing time that of
// the header.
func (p *pass) context(next events.Seq) events.Context {
	return events.Context{Format: p.header.Format, Vocabulary: p.f.o.Vocabulary, Next: next, Now: p.header.CreatedAt, EmptyCallID: true}
}

// torn reports whether a line is what a crash leaves of an event: the last one, without an
// end of its line or of its JSON.
func torn(l line, err error) bool {
	return !l.ended && broke(err, events.RuleJSONMalformed) && !json.Valid(l.text)
}

func broke(err error, r events.Rule) bool {
	var e *events.Error
	return errors.As(err, &e) && e.Rule == r
}

// lineOf is the line of a seq in the part of a file that was read without a problem: behind
// the header, one event a line. Where a line can stand for several, the file is read again.
func (p *pass) lineOf(seq events.Seq) int {
	if p.conv == nil {
		return int(seq) + 2
	}
	again := p.f.newPass(true)
	defer again.close()
	_, err := again.readHeader(p.f.id())
	for err == nil && again.next <= seq {
		_, err = again.event()
	}
	if err != nil {
		return 0
	}
	return again.lines.at.number
}

// explain says more about a seq that is not the next one. Behind a seq that steps back it
// reads on: when the following lines go on from there, the file holds two branches, which
// are returned.
func (p *pass) explain(v *events.Error, stop func() bool) []Branch {
	got := *v.Seq
	if got > p.next {
		v.Detail += fmt.Sprintf("; %d events are missing here, and nothing is renumbered", got-p.next)
		return nil
	}
	at := p.lines.at
	first := Branch{p.lineOf(got), got, p.lineOf(p.next - 1), p.next - 1}
	second := Branch{at.number, got, at.number, got}
	if got < p.next-1 { // a repeat of the very last seq is two writers, not two branches
		p.next = got
		_, err := p.first(at)
		for !stop() && p.inBranch(err) {
			second.LastLine, second.LastSeq = p.lines.at.number, p.next-1
			_, err = p.event()
		}
	}
	if second.LastSeq == got {
		v.Detail += fmt.Sprintf("; line %d has seq %d already", first.FirstLine, got)
		return nil
	}
	v.Detail += fmt.Sprintf("; the file holds two branches: the first ends at line %d with seq %d, the second starts at line %d with seq %d and ends at line %d with seq %d",
		first.LastLine, first.LastSeq, second.FirstLine, second.FirstSeq, second.LastLine, second.LastSeq)
	if got > 0 {
		v.Detail += fmt.Sprintf("; both follow seq %d at line %d", got-1, p.lineOf(got-1))
	}
	v.Detail += ". Neither is imported; make a file of each"
	return []Branch{first, second}
}

// inBranch reports whether the event that was read with err is the next one of a branch: it
// is when it is good, and when something other than its seq is wrong with it.
func (p *pass) inBranch(err error) bool {
	if err == nil {
		return true
	}
	if !errors.Is(err, &events.Error{Code: events.CodeRuleViolation}) || broke(err, events.RuleJSONMalformed) {
		return false
	}
	p.next++
	return true
}
