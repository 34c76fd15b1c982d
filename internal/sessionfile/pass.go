package sessionfile

import (
	"encoding/json"
	"errors"
	"fmt"

	"palimpsest/internal/events"
)

// pass is one reading of a file.
type pass struct {
	lines  *lines
	o      *Options
	header *events.Header
	dated  bool // the header has a createdAt
	next   events.Seq
}

func (f *File) newPass(compare bool) *pass {
	return &pass{lines: newLines(&blocks{f: f, compare: compare}, f.o.MaxEvent), o: &f.o}
}

// event returns the next event, io.EOF behind the last one.
func (p *pass) event() (*events.Event, error) {
	l, err := p.lines.next()
	if err != nil {
		return nil, err
	}
	e, err := events.Parse(l.text, p.context(p.next))
	if err != nil {
		if torn(l, err) {
			return nil, &events.Error{Code: CodeCrashTail, Detail: fmt.Sprintf(
				"the last line, line %d, is incomplete: %d bytes from byte %d on, without a line end; a crash cut it off. Drop it with repair-tail", l.number, len(l.text), l.offset)}
		}
		return nil, err
	}
	if len(e.Line) > p.o.MaxEvent {
		seq := e.Seq
		return nil, &events.Error{Code: events.CodeTooLarge, Seq: &seq, Detail: fmt.Sprintf("the event has %d bytes in canonical form, the limit is %d", len(e.Line), p.o.MaxEvent)}
	}
	p.next++
	return e, nil
}

// context is what a line is parsed in: a missing seq is the next one, a missing time that of
// the header.
func (p *pass) context(next events.Seq) events.Context {
	return events.Context{Format: p.header.Format, Vocabulary: p.o.Vocabulary, Next: next, Now: p.header.CreatedAt, EmptyCallID: true}
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
// the header, one event a line.
func lineOf(seq events.Seq) int { return int(seq) + 2 }

// explain says more about a seq that is not the next one. Behind a seq that steps back it
// reads on: when the following lines go on from there, the file holds two branches, which
// are returned.
func (p *pass) explain(v *events.Error, stop func() bool) []Branch {
	got := *v.Seq
	if got > p.next {
		v.Detail += fmt.Sprintf("; %d events are missing here, and nothing is renumbered", got-p.next)
		return nil
	}
	first := Branch{lineOf(got), got, lineOf(p.next - 1), p.next - 1}
	second := Branch{p.lines.at.number, got, p.lines.at.number, got}
	for got < p.next-1 && !stop() { // a repeat of the very last seq is two writers, not two branches
		l, err := p.lines.next()
		if err != nil {
			break
		}
		_, err = events.Parse(l.text, p.context(second.LastSeq+1))
		if broke(err, events.RuleSeqNotContiguous) || broke(err, events.RuleJSONMalformed) {
			break
		}
		second.LastLine, second.LastSeq = l.number, second.LastSeq+1
	}
	if second.LastSeq == got {
		v.Detail += fmt.Sprintf("; line %d has seq %d already", first.FirstLine, got)
		return nil
	}
	v.Detail += fmt.Sprintf("; the file holds two branches: the first ends at line %d with seq %d, the second starts at line %d with seq %d and ends at line %d with seq %d",
		first.LastLine, first.LastSeq, second.FirstLine, second.FirstSeq, second.LastLine, second.LastSeq)
	if got > 0 {
		v.Detail += fmt.Sprintf("; both follow seq %d at line %d", got-1, lineOf(got-1))
	}
	v.Detail += ". Neither is imported; make a file of each"
	return []Branch{first, second}
}
