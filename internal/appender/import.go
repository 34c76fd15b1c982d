package appender

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

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
	// Created says that the session was not there before.
	Created bool `json:"created"`
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
		o.MaxEvent = min(a.cfg.MaxEvent, a.maxCommit()-1)
	}
	if o.Vocabulary == nil {
		o.Vocabulary = a.log.Vocabulary()
	}
	f, err := sessionfile.Open(path, o)
	if err != nil {
		return Unreadable(path, err), nil
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

// Unreadable is the report of a file, or a directory of files, that cannot be read.
func Unreadable(path string, err error) *ImportReport {
	p := sessionfile.Problem{Code: sessionfile.CodeUnreadable, Detail: err.Error()}
	var e *events.Error
	if errors.As(err, &e) {
		p.Code, p.Rule, p.Detail = e.Code, e.Rule, e.Detail
	}
	return &ImportReport{Report: &sessionfile.Report{File: path, Version: -1, Problems: []sessionfile.Problem{p}, Warnings: []sessionfile.Problem{}, Violations: map[events.Rule]*sessionfile.Violations{}}}
}

func (a *Appender) importChecked(ctx context.Context, f *sessionfile.File, out *ImportReport) error {
	h := f.Header()
	for _, q := range []struct {
		have, most int64
		unit       string
	}{{out.Events, a.cfg.MaxSessionEvents, "events"}, {out.Bytes, a.cfg.MaxSessionBytes, "bytes"}} {
		if q.have > q.most { // said before the first event is stored, not at the limit
			return &events.Error{Code: events.CodeTooLarge, Session: h.ID, Detail: fmt.Sprintf("the session has %d %s, at most %d are allowed", q.have, q.unit, q.most)}
		}
	}
	var err error
	if out.Created, err = a.importHeader(ctx, h); err != nil {
		return err
	}
	next, err := a.nextSeq(ctx, h.ID)
	if err != nil {
		return err
	}
	stored, stop := iter.Pull2(a.storedLines(ctx, h.ID))
	defer stop()
	// While one chunk is on its way to the log, the next is read.
	var chunk []*events.Event
	size := 0
	var flying chan error // the outcome of the append that is under way
	land := func() error {
		if flying == nil {
			return nil
		}
		err := <-flying
		flying = nil
		return err
	}
	flush := func() error {
		if err := land(); err != nil || len(chunk) == 0 {
			return err
		}
		sent, done := chunk, make(chan error, 1)
		go func() {
			_, err := a.Append(ctx, Request{Session: h.ID, Parsed: sent, Expected: &sent[0].Seq})
			if err == nil {
				out.Imported += int64(len(sent))
			}
			done <- err
		}()
		chunk, size, flying = nil, 0, done
		return nil
	}
	err = f.Events(ctx, func(e *events.Event) error {
		if e.Seq < next {
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
		most := min(importBytes, a.maxCommit())
		if len(chunk) == importEvents || len(chunk) > 0 && size+len(e.Line)+1 > most {
			if err := flush(); err != nil {
				return err
			}
		}
		chunk = append(chunk, e)
		size += len(e.Line) + 1
		return nil
	})
	if err == nil {
		err = flush()
	}
	if lerr := land(); err == nil {
		err = lerr
	}
	return err
}

// nextSeq is the seq behind the end of a session's log. It needs no state: to compare a file
// with a log, nothing is folded.
func (a *Appender) nextSeq(ctx context.Context, session string) (events.Seq, error) {
	last, err := a.log.LeaderLast(ctx, session)
	if err != nil || last == nil {
		return 0, err
	}
	return last.Last + 1, nil
}

// importHeader stores a file's header, or makes sure that the session has the very same.
func (a *Appender) importHeader(ctx context.Context, h *events.Header) (created bool, err error) {
	_, created, err = a.Create(ctx, h.ID, h.Raw)
	if !errors.Is(err, &events.Error{Code: events.CodeSessionExists}) {
		return created, err
	}
	stored, gerr := a.headers.Get(ctx, h.ID)
	if gerr != nil {
		return false, gerr
	}
	return false, &events.Error{Code: events.CodeSessionExists, Session: h.ID, Cause: err,
		Detail: "the session that is stored under this id has another header: " + differences(stored.Raw, h.Raw) + "; nothing was changed"}
}

// differences names the members in which two headers differ.
func differences(stored, file []byte) string {
	var there, here map[string]json.RawMessage
	_ = json.Unmarshal(stored, &there) // both are valid objects
	_ = json.Unmarshal(file, &here)
	said := func(tok json.RawMessage) string {
		if tok == nil {
			return "missing"
		}
		return clip(tok)
	}
	names := slices.Collect(maps.Keys(there))
	for name := range here {
		if _, both := there[name]; !both {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var out []string
	for _, name := range names {
		if name != "type" && !bytes.Equal(there[name], here[name]) {
			out = append(out, fmt.Sprintf("%s is %s there and %s in the file", name, said(there[name]), said(here[name])))
		}
	}
	return strings.Join(out, ", ")
}

// storedLines are the lines of a session's log, in order.
func (a *Appender) storedLines(ctx context.Context, session string) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		stop := errors.New("stop")
		err := a.log.ReadOn(ctx, session, 0, 0, func(c *events.Commit) error {
			for line := range c.Lines() {
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
// a whole before, so its own checks of lifecycle rules are off. Behind a long log that has no
// snapshot it waits for the whole to be read.
func (c Config) ForImport() Config {
	c.Invariants = lifecycle.Off
	if c.LoadTimeout == 0 {
		c.LoadTimeout = 30 * time.Minute
	}
	return c
}
