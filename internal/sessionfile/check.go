package sessionfile

import (
	"context"
	"errors"
	"fmt"
	"io"

	"palimpsest/internal/events"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

// Check is pass one: it folds the whole file, event by event, and reports what it found. The
// first problem ends it; what is wrong with the file is in the report and no error. The
// error is the cause of ctx when that ended first; there is no report then.
func (f *File) Check(ctx context.Context) (*Report, error) {
	f.sums, f.canonical, f.header, f.report = nil, false, nil, nil
	r := &Report{File: f.name, Version: noVersion, Warnings: []Problem{}, Problems: []Problem{}, Violations: map[events.Rule]*Violations{}}
	p := f.newPass(false)
	defer p.close()
	err := f.check(ctx, p, r)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if err != nil {
		r.Problems = append(r.Problems, p.problem(err))
	}
	// That somebody writes to the file may be why it looks as it does.
	if again := f.unchanged(); again != nil && !errors.Is(err, &events.Error{Code: CodeUnreadable}) && !errors.Is(err, &events.Error{Code: CodeChanged}) {
		r.Problems = append(r.Problems, p.problem(again))
	}
	if r.OK() {
		f.header, f.canonical = p.header, p.canonical && p.conv == nil
	}
	f.report = r
	return r, nil
}

func (f *File) check(ctx context.Context, p *pass, r *Report) (err error) {
	if f.version, err = f.src.version(); err != nil {
		return unreadable(err)
	}
	if f.o.IDFrom == IDFromFilename {
		if err := events.CheckSessionID(f.id()); err != nil {
			return err
		}
	}
	if r.Version, err = p.readHeader(f.id()); err != nil {
		return err
	}
	h := p.header
	r.Session = h.ID
	if !p.dated {
		r.warn(Problem{Line: 1, Code: CodeNoCreatedAt, Detail: "the header has no createdAt; 0 is taken for it and for the time of events that carry none"})
	}
	if p.content.zstd != nil {
		r.Compression = "zstd"
	}
	st := session.New(h.ID, h.Format, nil, surface.KeepFingerprints)
	defer func() {
		r.Events, r.Bytes = int64(st.Next), st.LogBytes
		r.Nodes, r.Replacements = st.Surface.Len(), st.Surface.Generation()
		if turn, ok := st.Life.Turn(); ok {
			r.OpenTurn = &turn
		}
		if p.conv != nil {
			r.Converted = &p.conv.Converted
		}
	}()
	for ctx.Err() == nil {
		if at := p.lines.at; !at.ended && !p.within() {
			r.warn(Problem{Line: at.number, Code: CodeNoLineEnd, Detail: "the last line has no line end; it is complete and was taken"})
		}
		e, err := p.event()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case errors.Is(err, &events.Error{Code: CodeCrashTail}) && f.o.RepairTail:
			w := p.problem(err)
			w.Detail = fmt.Sprintf("the last line, line %d, was dropped: it is incomplete, %d bytes from byte %d on, without a line end", w.Line, *w.Bytes, *w.Offset)
			r.warn(w)
			return nil
		case broke(err, events.RuleSeqNotContiguous):
			v := new(events.Error)
			errors.As(err, &v)
			at := p.lines.at // explain reads on
			if p.conv != nil {
				counts := p.conv.Converted
				defer func() { p.conv.Converted = counts }()
			}
			r.Branches = p.explain(v, func() bool { return ctx.Err() != nil })
			p.lines.at = at
			return v
		case err != nil:
			return err
		}
		plan, err := st.Plan(e, f.o.Invariants)
		if err != nil {
			return err
		}
		if plan.Violation != nil {
			r.observe(p.problem(plan.Violation))
		}
		if e.Kind == events.KindTool && e.Fields().CallID == "" {
			seq := e.Seq
			r.warn(Problem{Line: p.lines.at.number, Seq: &seq, Code: CodeEmptyCallID, Detail: "the tool result has an empty callId; it is kept so and belongs to no call"})
		}
		if e.Type == "session/end-seed" && (e.Fields().Inherited || p.conv != nil && e.Seq == p.conv.inherited) {
			seq := e.Seq
			r.InheritedThrough = &seq
		}
		st.Apply(&plan, 0)
	}
	return nil
}

// problem says where in the file an error arose: at the line that was read last, unless it
// is one of the file as a whole.
func (p *pass) problem(err error) Problem {
	at := p.lines.at
	out := Problem{Line: at.number, Code: events.CodeInternal, Detail: err.Error()}
	var e *events.Error
	if errors.As(err, &e) {
		out.Seq, out.Code, out.Rule, out.Detail = e.Seq, e.Code, e.Rule, e.Detail
	}
	switch out.Code {
	case CodeUnreadable, CodeChanged:
		out.Line = 0
	case CodeCrashTail:
		n := int64(len(at.text))
		out.Offset, out.Bytes = &at.offset, &n
	}
	return out
}
