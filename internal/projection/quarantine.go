package projection

import (
	"context"
	"encoding/json"
	"errors"
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
}

// readQuarantine returns the sessions in quarantine by partition.
func (w *Worker) readQuarantine(ctx context.Context) (map[int]map[string]bool, error) {
	all, err := ListQuarantine(ctx, w.buckets.Quarantine)
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

// ListQuarantine returns every record, unordered.
func ListQuarantine(ctx context.Context, kv jetstream.KeyValue) ([]Quarantine, error) {
	l, err := kv.ListKeys(ctx)
	if err != nil {
		return nil, unavailable("quarantine", err)
	}
	var keys []string
	for k := range l.Keys() {
		keys = append(keys, k)
	}
	var out []Quarantine
	for _, k := range keys {
		id, err := events.SessionOf(k)
		if err != nil {
			continue
		}
		q, err := GetQuarantine(ctx, kv, id)
		if err != nil {
			return nil, err
		}
		if q != nil {
			out = append(out, *q)
		}
	}
	return out, nil
}

// GetQuarantine returns a session's record, nil when it is not in quarantine.
func GetQuarantine(ctx context.Context, kv jetstream.KeyValue, session string) (*Quarantine, error) {
	e, err := kv.Get(ctx, events.Token(session))
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, unavailable("quarantine", err)
	}
	q := new(Quarantine)
	if err := json.Unmarshal(e.Value(), q); err != nil {
		return nil, &events.Error{Code: events.CodeCorrupt, Session: session, Detail: "the quarantine record is not readable: " + err.Error()}
	}
	return q, nil
}

// quarantine puts a session aside because of a message that cannot be folded. What was folded
// of it and is good is flushed first.
func (p *partition) quarantine(ctx context.Context, session string, streamSeq uint64, cause error) error {
	q := Quarantine{Session: session, StreamSeq: streamSeq, Time: time.Now().UnixMilli(), Detail: cause.Error(), Code: events.CodeInternal}
	var e *events.Error
	if errors.As(cause, &e) {
		q.Code, q.Rule, q.Seq, q.Detail = e.Code, e.Rule, e.Seq, e.Detail
	}
	b, err := json.Marshal(q)
	if err != nil {
		return err
	}
	if _, err := p.w.buckets.Quarantine.Put(ctx, events.Token(session), b); err != nil {
		return unavailable("quarantine", err)
	}
	p.quarantined[session] = true
	p.w.stats.Quarantined.Add(1)
	p.w.cfg.Logger.Error("session quarantined", "session", session, "streamSeq", streamSeq, "code", q.Code, "rule", q.Rule, "detail", q.Detail)
	if en := p.sessions[session]; en != nil {
		p.drop(en)
	}
	if err := p.keepGood(ctx, session, streamSeq); err != nil {
		p.troubled(err)
	}
	if s := p.w.cfg.Signals.Quarantined; s != nil {
		s(q)
	}
	return nil
}

// keepGood brings the head of a session in quarantine up to its last good commit, checking all
// that it folds.
func (p *partition) keepGood(ctx context.Context, session string, bad uint64) error {
	for {
		snap, rev, err := p.w.buckets.Snapshots.Load(ctx, session, p.w.keep())
		if err != nil {
			return err
		}
		f, err := p.foldGood(ctx, session, snap, bad)
		if err != nil || f == nil {
			return err
		}
		_, err = p.write(ctx, f, rev)
		if errors.Is(err, snapshot.ErrMoved) { // by a write of our own that was under way
			continue
		}
		if err == nil {
			p.w.heads.written(session, f.Seq)
		}
		return err
	}
}

// foldGood folds what follows a snapshot (nil for none) up to the first bad commit. A nil
// flush says that there is nothing to write.
func (p *partition) foldGood(ctx context.Context, session string, snap *snapshot.Snapshot, bad uint64) (*snapshot.Flush, error) {
	stop := errors.New("stop")
	folded := false
	var after uint64
	if snap != nil {
		after = snap.StreamSeq
	}
	err := p.w.log.Read(ctx, session, after, func(c *events.Commit) error {
		if snap == nil {
			snap = snapshot.New(session, c.Format, p.w.keep())
		}
		if c.StreamSeq >= bad || c.First != snap.Next || checkCommit(c, p.w.log.Vocabulary()) != nil {
			return stop
		}
		folded = true
		return p.foldPages(ctx, snap, c)
	})
	if errors.Is(err, stop) {
		err = nil
	}
	if !folded || err != nil {
		return nil, err
	}
	return snap.Flush()
}

// checkCommit reads every event of a commit in full.
func checkCommit(c *events.Commit, v *events.Vocabulary) error {
	for line, rest := []byte(nil), c.Body; len(rest) > 0; {
		line, rest = events.CutLine(rest)
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
	}
}

// retry takes a session out of quarantine and folds it on.
func (p *partition) retry(ctx context.Context, session string) error {
	if !p.quarantined[session] {
		return &events.Error{Code: events.CodeNotFound, Session: session, Detail: "the session is not in quarantine"}
	}
	if err := p.w.buckets.Quarantine.Purge(ctx, events.Token(session)); err != nil {
		return unavailable("quarantine", err)
	}
	delete(p.quarantined, session)
	e := &entry{session: session}
	p.forget(e)
	if p.quarantined[session] {
		q, err := GetQuarantine(ctx, p.w.buckets.Quarantine, session)
		if err != nil || q == nil {
			return err
		}
		return &events.Error{Code: events.CodeQuarantined, Session: session, Seq: q.Seq, Rule: q.Rule, Detail: "still in quarantine: " + q.Detail}
	}
	return nil
}
