package appender

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/sessionfile"
)

// Chunks in which an import commits.
const (
	importEvents = 256
	importBytes  = 512 << 10
)

// ImportReport is what became of one file.
type ImportReport struct {
	*sessionfile.Report
	// Imported is how many events were stored now, Present how many were there already.
	Imported int64 `json:"imported"`
	Present  int64 `json:"present"`
}

// Import validates a session file as a whole and then stores what of it is not stored yet. A
// file that was imported before changes nothing, a longer version of it is continued, and one
// that differs from what is stored is refused. What is wrong with the file is in the report;
// the error is trouble with JetStream or the end of ctx, and what was committed stays.
func (a *Appender) Import(ctx context.Context, path string, o sessionfile.Options) (*ImportReport, error) {
	if o.MaxEvent == 0 {
		o.MaxEvent = min(a.cfg.MaxEvent, a.log.MaxCommit()-1)
	}
	if o.Vocabulary == nil {
		o.Vocabulary = a.log.Vocabulary()
	}
	f, err := sessionfile.Open(path, o)
	if err != nil {
		return refusedFile(path, err), nil
	}
	defer f.Close()
	rep, err := f.Check(ctx)
	if err != nil {
		return nil, err
	}
	out := &ImportReport{Report: rep}
	if !rep.OK() {
		return out, nil
	}
	err = a.importChecked(ctx, f, out)
	var e *events.Error
	if errors.As(err, &e) && e.Code != events.CodeUnavailable && e.Code != events.CodeOutcomeUnknown && e.Code != events.CodeOverloaded {
		rep.Problems = append(rep.Problems, sessionfile.Problem{Seq: e.Seq, Code: e.Code, Rule: e.Rule, Detail: e.Detail})
		return out, nil
	}
	return out, err
}

func refusedFile(path string, err error) *ImportReport {
	p := sessionfile.Problem{Code: sessionfile.CodeUnreadable, Detail: err.Error()}
	var e *events.Error
	if errors.As(err, &e) {
		p.Code, p.Rule, p.Detail = e.Code, e.Rule, e.Detail
	}
	return &ImportReport{Report: &sessionfile.Report{File: path, Version: -1, Problems: []sessionfile.Problem{p}, Warnings: []sessionfile.Problem{}, Violations: map[events.Rule]*sessionfile.Violations{}}}
}

func (a *Appender) importChecked(ctx context.Context, f *sessionfile.File, out *ImportReport) error {
	h := f.Header()
	if _, _, err := a.Create(ctx, h.ID, h.Raw); err != nil {
		return err
	}
	st, err := a.Status(ctx, h.ID)
	if err != nil {
		return err
	}
	stored, stop := iter.Pull2(a.storedLines(ctx, h.ID))
	defer stop()
	var chunk []*events.Event
	size := 0
	flush := func() error {
		if len(chunk) == 0 {
			return nil
		}
		first := chunk[0].Seq
		_, err := a.Append(ctx, Request{Session: h.ID, Parsed: chunk, Expected: &first})
		if err != nil {
			return err
		}
		out.Imported += int64(len(chunk))
		chunk, size = nil, 0
		return nil
	}
	err = f.Events(ctx, func(e *events.Event) error {
		if e.Seq < st.NextSeq {
			line, err, ok := stored()
			switch {
			case !ok:
				return &events.Error{Code: events.CodeCorrupt, Session: h.ID, Seq: &e.Seq, Detail: "the log ends before the seq that it should hold; run projector verify"}
			case err != nil:
				return err
			case !bytes.Equal(line, e.Line):
				seq := e.Seq
				return &events.Error{Code: events.CodeSeqConflict, Session: h.ID, Seq: &seq,
					Detail: fmt.Sprintf("the session that is stored under this id differs from the file from seq %d on; nothing was changed", seq)}
			}
			out.Present++
			return nil
		}
		most := min(importBytes, a.log.MaxCommit())
		if len(chunk) == importEvents || len(chunk) > 0 && size+len(e.Line)+1 > most {
			if err := flush(); err != nil {
				return err
			}
		}
		chunk = append(chunk, e)
		size += len(e.Line) + 1
		return nil
	})
	if err != nil {
		return err
	}
	return flush()
}

// storedLines are the lines of a session's log, in order.
func (a *Appender) storedLines(ctx context.Context, session string) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		stop := errors.New("stop")
		err := a.log.ReadToEnd(ctx, session, 0, func(c *events.Commit) error {
			for line, rest := []byte(nil), c.Body; len(rest) > 0; {
				line, rest = events.CutLine(rest)
				if !yield(line, nil) {
					return stop
				}
			}
			return nil
		})
		if err != nil && !errors.Is(err, stop) {
			yield(nil, err)
		}
	}
}

// ForImport returns the configuration of an appender that imports: the files were checked as
// a whole before, so its own checks of lifecycle rules are off.
func (c Config) ForImport() Config {
	c.Invariants = lifecycle.Off
	return c
}
