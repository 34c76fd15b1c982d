package projection

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/snapshot"
)

// Quarantine is the record of a session whose log holds something that no appender would have
// stored. Its head stays at the last good commit; every other session goes on.
type Quarantine struct {
	Session   string      `json:"session"`
	Seq       *events.Seq `json:"seq,omitempty"` // of the bad event, when it has one
	Code      events.Code `json:"code"`
	Rule      events.Rule `json:"rule,omitempty"`
	Detail    string      `json:"detail"`
	StreamSeq uint64      `json:"streamSeq"` // of the message that holds it
	Time      int64       `json:"time"`      // Unix ms, when it was found
	// Skipped is set when somebody decided to leave the session as it is.
	Skipped *Skipped `json:"skipped,omitempty"`
}

// Skipped is the decision to leave a session in quarantine. It ends with a retry.
type Skipped struct {
	By     string `json:"by"`
	Reason string `json:"reason"`
	Time   int64  `json:"time"` // Unix ms
}

// Alerts reports whether a record, nil for none, asks for somebody's attention.
func (q *Quarantine) Alerts() bool { return q != nil && q.Skipped == nil }

// readQuarantine returns the sessions in quarantine by partition.
func (w *Worker) readQuarantine(ctx context.Context, b *Buckets) (map[int]map[string]bool, error) {
	all, err := b.Quarantined(ctx)
	if err != nil {
		return nil, err
	}
	out := map[int]map[string]bool{}
	for _, q := range all {
		n := w.log.Partition(q.Session)
		if out[n] == nil {
			out[n] = map[string]bool{}
		}
		out[n][q.Session] = true
	}
	return out, nil
}

// Quarantined returns every record of the generation that serves, unordered.
func (b *Buckets) Quarantined(ctx context.Context) ([]Quarantine, error) {
	b = b.Pin(ctx)
	l, err := b.Quarantine.ListKeysFiltered(ctx, b.Snapshots.Generation().Key("*"))
	if err != nil {
		return nil, unavailable("quarantine", err)
	}
	var keys []string
	for k := range l.Keys() {
		keys = append(keys, k)
	}
	var out []Quarantine
	for _, k := range keys {
		id, err := events.SessionOf(k[strings.IndexByte(k, '.')+1:])
		if err != nil {
			continue
		}
		q, err := b.QuarantineOf(ctx, id)
		if err != nil {
			return nil, err
		}
		if q != nil {
			out = append(out, *q)
		}
	}
	return out, nil
}

// QuarantineOf returns a session's record, nil when it is not in quarantine.
func (b *Buckets) QuarantineOf(ctx context.Context, session string) (*Quarantine, error) {
	e, err := b.Quarantine.Get(ctx, b.quarantineKey(session))
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, unavailable("quarantine", err)
	}
	return parseQuarantine(session, e.Value())
}

func parseQuarantine(session string, b []byte) (*Quarantine, error) {
	q := new(Quarantine)
	if err := json.Unmarshal(b, q); err != nil {
		return nil, &events.Error{Code: events.CodeCorrupt, Session: session, Detail: "the quarantine record is not readable: " + err.Error()}
	}
	return q, nil
}

// quarantine puts a session aside because of a message that cannot be folded, after what is
// good of it was brought into its head. An error is trouble with JetStream.
func (p *partition) quarantine(ctx context.Context, session string, streamSeq uint64, cause error) error {
	if gone, err := p.erased(ctx, session, cause); gone || err != nil {
		return err
	}
	if _, err := p.advance(ctx, session, streamSeq); temporary(err) {
		return err
	} else if err != nil {
		p.troubled(err)
	}
	old, err := p.b.QuarantineOf(ctx, session)
	if temporary(err) {
		return err
	}
	var skipped *Skipped
	if old != nil && old.StreamSeq == streamSeq { // found before, by another owner
		skipped = old.Skipped
	}
	q, err := p.record(ctx, session, streamSeq, cause, skipped)
	if err != nil {
		return err
	}
	p.quarantined[session] = true
	p.aside.Store(int64(len(p.quarantined)))
	p.w.stats.Quarantined.Add(1)
	p.w.cfg.Logger.Error("session quarantined", "session", session, "streamSeq", streamSeq, "code", q.Code, "rule", q.Rule, "detail", q.Detail)
	if e := p.sessions[session]; e != nil {
		p.drop(e)
	}
	delete(p.lost, session)
	if s := p.w.cfg.Signals.Quarantined; s != nil {
		s(*q)
	}
	return nil
}

// record writes a session's record.
func (p *partition) record(ctx context.Context, session string, streamSeq uint64, cause error, skipped *Skipped) (*Quarantine, error) {
	if !p.holds() {
		return nil, errLost
	}
	q := &Quarantine{Session: session, StreamSeq: streamSeq, Skipped: skipped, Time: time.Now().UnixMilli(), Detail: cause.Error(), Code: events.CodeInternal}
	var e *events.Error
	if errors.As(cause, &e) {
		q.Code, q.Rule, q.Seq, q.Detail = e.Code, e.Rule, e.Seq, e.Detail
	}
	b, err := json.Marshal(q)
	if err != nil {
		return nil, err
	}
	if _, err := p.b.Quarantine.Put(ctx, p.b.quarantineKey(session), b); err != nil {
		return nil, unavailable("quarantine", err)
	}
	p.w.heads.sickened(session)
	return q, nil
}

// advance brings the head of a session that is not in memory, or about to be dropped, up to its
// last good commit before a stream sequence, checking all that it folds. stopped is what is
// wrong with the commit that comes next, nil when all up to there are good.
func (p *partition) advance(ctx context.Context, session string, before uint64) (stopped *commitError, err error) {
	for anew := false; ; {
		snap, rev, err := p.b.Snapshots.Load(ctx, session, p.w.keep())
		if damaged(err) {
			anew = true
		} else if err != nil {
			return stopped, err
		}
		if anew {
			snap = nil
		}
		f, err := p.foldGood(ctx, session, snap, before)
		var bad *commitError
		switch {
		case damaged(err) && !anew:
			anew = true
			continue
		case temporary(err):
			return stopped, err
		case errors.As(err, &bad): // the snapshot may hold a part of it
			stopped, before = bad, bad.streamSeq
			continue
		case err != nil || f == nil:
			return stopped, err
		}
		if f.Overwrite = anew; anew {
			p.spare(session)
		}
		rev, err = p.write(ctx, f, rev)
		if errors.Is(err, snapshot.ErrMoved) { // by a write of our own that was under way
			continue
		}
		if err == nil {
			p.wroteHead(f.Mark(rev))
			p.tellWritten(session, f.Seq, f.Unreferenced)
		}
		return stopped, err
	}
}

// foldGood folds what follows a snapshot (nil for none) up to a stream sequence, and flushes
// it. A nil flush says that there is nothing to write, a *commitError that a commit before is
// not good.
func (p *partition) foldGood(ctx context.Context, session string, snap *snapshot.Snapshot, before uint64) (*snapshot.Flush, error) {
	stop := errors.New("stop")
	folded := false
	var after uint64
	if snap != nil {
		after = snap.StreamSeq
	}
	err := p.w.log.ReadToEnd(ctx, session, after, func(c *events.Commit) error {
		if c.StreamSeq >= before {
			return stop
		}
		if snap == nil {
			snap = snapshot.New(session, c.Format, p.w.keep())
		}
		if c.First != snap.Next {
			return notNext(c, snap.Next)
		}
		folded = true
		err := known(ctx, p.w.log, func(v *events.Vocabulary) error { return checkCommit(c, v) })
		if err == nil {
			err = p.foldPages(ctx, snap, c, nil, func() error { return nil })
		}
		if err != nil {
			return &commitError{c.StreamSeq, err}
		}
		return nil
	})
	err = atMessage(err)
	var bad *commitError
	if errors.As(err, &bad) && bad.streamSeq >= before {
		err = stop
	}
	if err != nil && err != stop {
		return nil, err
	}
	if !folded {
		return nil, nil
	}
	return snap.Flush()
}

// checkCommit reads every event of a commit in full.
func checkCommit(c *events.Commit, v *events.Vocabulary) error {
	for line := range c.Lines() {
		var e events.Event
		if err := events.ParseCanonical(&e, line, c.Format, v); err != nil {
			return err
		}
		if err := e.Check(c.Format); err != nil {
			return err
		}
	}
	return nil
}

// badData deals with an event whose data, read for the first time when its session was
// flushed, turns out to break a rule.
func (p *partition) badData(ctx context.Context, e *entry, cause error) {
	streamSeq := e.first
	var ev *events.Error
	if errors.As(cause, &ev) && ev.Seq != nil {
		if pos, ok := e.snap.Surface.Position(*ev.Seq); ok {
			streamSeq = e.snap.Surface.Node(pos).At
		}
	}
	if err := p.quarantine(ctx, e.session, streamSeq, cause); err != nil {
		p.troubled(err)
		p.lose(e) // it waits for no flush any more: what is bad is found again when the session is regained
	}
}

// retry takes a session out of quarantine when its log can be folded to its end now. A record of which
// this partition does not know is that of an owner which should have been none any more.
func (p *partition) retry(ctx context.Context, session string) error {
	if !p.quarantined[session] {
		if q, err := p.b.QuarantineOf(ctx, session); temporary(err) {
			return err
		} else if q == nil && err == nil {
			return &events.Error{Code: events.CodeNotFound, Session: session, Detail: "the session is not in quarantine"}
		}
	}
	stopped, err := p.advance(ctx, session, math.MaxUint64)
	if err != nil {
		return err
	}
	if e := p.sessions[session]; e != nil { // its head is behind what is stored now
		p.lose(e)
	}
	if stopped != nil {
		q, err := p.record(ctx, session, stopped.streamSeq, stopped, nil)
		if err != nil {
			return err
		}
		p.quarantined[session] = true
		p.aside.Store(int64(len(p.quarantined)))
		return &events.Error{Code: events.CodeQuarantined, Session: session, Seq: q.Seq, Rule: q.Rule, Detail: "still in quarantine: " + q.Detail}
	}
	if !p.holds() {
		return errLost
	}
	if err := p.b.Quarantine.Purge(ctx, p.b.quarantineKey(session)); err != nil {
		return unavailable("quarantine", err)
	}
	delete(p.quarantined, session)
	p.aside.Store(int64(len(p.quarantined)))
	return nil
}
