package appender

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nuid"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

// ForkRequest asks for a session that starts with another's events.
type ForkRequest struct {
	Parent string
	ID     string      // of the child; "" makes one up
	At     *events.Seq // last seq that is taken over; nil: the parent's last
	Header []byte      // members of the child's header, as JSON; lineage is added
	Actor  string
}

// Fork says what a fork made.
type Fork struct {
	Session string          `json:"session"`
	Parent  string          `json:"parent"`
	At      events.Seq      `json:"at"`
	LastSeq events.Seq      `json:"lastSeq"` // of the session/end-seed that closes the inherited part
	Created bool            `json:"created"` // false: the same fork was made before
	Header  json.RawMessage `json:"header"`
}

// Fork makes a session that starts with the parent's events 0..At, line for line, and a
// session/end-seed behind them. The child's id is reserved first, and it is invisible until
// its header is written last; the same request again goes on where an earlier one was cut off.
func (a *Appender) Fork(ctx context.Context, r ForkRequest) (*Fork, error) {
	parent, at, err := a.forkPoint(ctx, r)
	if err != nil {
		return nil, err
	}
	if r.ID == "" {
		r.ID = nuid.Next()
	}
	if r.ID == r.Parent {
		return nil, &events.Error{Code: events.CodeBadRequest, Session: r.Parent, Detail: "id: a session cannot be forked into itself"}
	}
	time, err := a.legalFork(ctx, r.Parent, parent.Format, at)
	if err != nil {
		return nil, err
	}
	h, err := childHeader(r, parent, time)
	if err != nil {
		return nil, err
	}
	if err := a.checkHeader(h); err != nil {
		return nil, err
	}
	f := &fork{a: a, r: r, at: at, time: time, header: h}
	out := &Fork{Session: h.ID, Parent: r.Parent, At: at, LastSeq: at + 1, Header: h.Raw}
	stored, err := a.headers.Get(ctx, h.ID)
	switch {
	case err == nil && !bytes.Equal(stored.Raw, h.Raw):
		return nil, &events.Error{Code: events.CodeSessionExists, Session: h.ID, Detail: "the session has another header: " + clip(stored.Raw)}
	case err == nil:
		return out, f.isPrefix(ctx)
	case !errors.Is(err, events.ErrSessionNotFound):
		return nil, err
	}
	if err := a.headers.Reserve(ctx, h, at); err != nil {
		return nil, err
	}
	// An erasure of the parent that begins behind the first look finds the reservation; one that began
	// before the second may not have waited for what was copied since.
	if err := f.parentStays(ctx); err != nil {
		return nil, err
	}
	if err := f.copy(ctx); err != nil {
		return nil, err
	}
	if err := f.parentStays(ctx); err != nil {
		return nil, err
	}
	out.Created, err = a.headers.Fulfil(ctx, h, at)
	return out, err
}

// forkPoint returns the parent's header and the last seq that the child takes over. What comes behind a
// given one is not looked at: a session whose log was damaged later can be forked before that.
func (a *Appender) forkPoint(ctx context.Context, r ForkRequest) (*events.Header, events.Seq, error) {
	if r.At == nil && r.ID != "" { // the same request again, maybe, and the parent went on since
		at, err := a.forkedAt(ctx, r.Parent, r.ID)
		if err != nil {
			return nil, 0, err
		}
		if at != events.NoSeq {
			r.At = &at
		}
	}
	if r.At != nil && *r.At >= 0 && events.CheckSessionID(r.Parent) == nil {
		h, err := a.headers.Get(ctx, r.Parent)
		if err != nil {
			return nil, 0, err
		}
		if c, err := a.log.Locate(ctx, r.Parent, *r.At); err != nil || c != nil {
			return h, *r.At, err
		}
	}
	parent, err := a.Status(ctx, r.Parent)
	if err != nil {
		return nil, 0, err
	}
	at := parent.NextSeq - 1
	if r.At != nil {
		at = *r.At
	}
	if parent.NextSeq == 0 {
		return nil, 0, &events.Error{Code: events.CodeBadRequest, Session: r.Parent, Detail: "the session has no events, so that there is nothing to start with; create a session instead"}
	}
	if at < 0 || at >= parent.NextSeq {
		return nil, 0, &events.Error{Code: events.CodeBadRequest, Session: r.Parent, Detail: fmt.Sprintf("at: expected a seq from 0 to %d, found %d", parent.NextSeq-1, at)}
	}
	return parent.Header, at, nil
}

// forkedAt is the last seq that a session took over when it was forked from another one; NoSeq when it was
// not, or is not there. A fork that is not complete has it on record. Of one that is, it is found in the
// logs: behind what both begin with there is the child's own end-seed, the last one, since the parent may be a fork, too.
func (a *Appender) forkedAt(ctx context.Context, parent, child string) (events.Seq, error) {
	h, at, err := a.headers.Forked(ctx, child)
	switch {
	case errors.Is(err, events.ErrSessionNotFound):
		return events.NoSeq, nil
	case err != nil || h.ParentSession != parent || !h.IsSeeded:
		return events.NoSeq, err
	case at != events.NoSeq:
		return at, nil
	}
	last := events.NoSeq
	before := map[events.Seq]events.Digest{} // by the seq of an end-seed, the digest of all before it
	digest := events.SeedDigest(child)
	err = a.lines(ctx, child, h.Format, 0, events.MaxSeq, func(e *events.Event) error {
		if e.Type == "session/end-seed" && e.Fields().Inherited {
			last, before[e.Seq] = e.Seq, digest
		}
		digest = digest.Next(e.Line)
		return nil
	})
	if err != nil || last == events.NoSeq {
		return events.NoSeq, err
	}
	found := events.NoSeq
	digest = events.SeedDigest(child)
	err = a.lines(ctx, parent, h.Format, 0, last-1, func(e *events.Event) error {
		digest = digest.Next(e.Line)
		if before[e.Seq+1] == digest {
			found = e.Seq
		}
		return nil
	})
	return found, err
}

// childHeader is the header of a fork. It depends on the request and the parent alone, so that
// the same request makes the same header, which the commit chain starts from.
func childHeader(r ForkRequest, parent *events.Header, time int64) (*events.Header, error) {
	given := map[string][]byte{}
	if len(r.Header) > 0 {
		var err error
		if given, err = events.SplitObject(r.Header); err != nil {
			return nil, err
		}
	}
	b := fmt.Appendf(nil, `{"version":%d,"id":%s,"createdAt":%d`, parent.Format, events.Quote(r.ID), time)
	if c := given["createdAt"]; c != nil {
		b = fmt.Appendf(nil, `{"version":%d,"id":%s,"createdAt":%s`, parent.Format, events.Quote(r.ID), c)
	}
	members, err := events.SplitObject(parent.Raw)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"cwd", "agentPreset"} { // what the child has of its parent unless told otherwise
		if _, ok := given[name]; !ok && members[name] != nil {
			given[name] = members[name]
		}
	}
	b = fmt.Appendf(b, `,"parentSession":%s,"isSeeded":true`, events.Quote(r.Parent))
	depth := given["delegationDepth"]
	if depth == nil {
		if depth = members["delegationDepth"]; depth == nil {
			depth = []byte("0")
		}
	}
	b = fmt.Appendf(b, `,"delegationDepth":%s`, depth)
	for _, name := range sortedKeys(given) {
		switch name {
		case "createdAt", "delegationDepth":
		case "version", "id", "parentSession", "isSeeded", "type":
			return nil, &events.Error{Code: events.CodeHeaderMalformed, Session: r.ID, Detail: fmt.Sprintf("session header of a fork: %s is set by the fork and must not be given", name)}
		default:
			b = fmt.Appendf(b, `,%s:%s`, events.Quote(name), given[name])
		}
	}
	return events.ParseHeader(append(b, '}'), r.ID, time)
}

// legalFork makes sure that no turn is open behind the parent's event at, and returns that
// event's time.
func (a *Appender) legalFork(ctx context.Context, parent string, f events.Format, at events.Seq) (int64, error) {
	life := lifecycle.New()
	var time, size int64
	err := a.lines(ctx, parent, f, 0, at, func(e *events.Event) error {
		if e.Kind != events.KindOpaque {
			life.Apply(e)
		}
		time = e.Time
		size += int64(len(e.Line)) + 1
		return nil
	})
	if err != nil {
		return 0, err
	}
	if int64(at)+2 > a.cfg.MaxSessionEvents || size > a.cfg.MaxSessionBytes {
		return 0, &events.Error{Code: events.CodeTooLarge, Session: parent, Seq: &at, Detail: fmt.Sprintf("the fork would start with %d events of %d bytes; a session may have %d and %d", at+2, size, a.cfg.MaxSessionEvents, a.cfg.MaxSessionBytes)}
	}
	if turn, open := life.Turn(); open {
		return 0, &events.Error{Code: events.CodeOpenTurn, Session: parent, Seq: &at,
			Detail: fmt.Sprintf("turn %d is open behind seq %d; fork where a turn has ended, or repair the session first", turn, at)}
	}
	return time, nil
}

// lines calls f for the events from..to of a session's log.
func (a *Appender) lines(ctx context.Context, session string, format events.Format, from, to events.Seq, f func(*events.Event) error) error {
	enough := errors.New("enough")
	next := from
	read := func(c *events.Commit) error {
		for line := range c.Lines() {
			e := new(events.Event)
			if err := events.ParseCanonical(e, line, format, a.log.Vocabulary()); err != nil {
				return err
			}
			if e.Seq < next {
				continue
			}
			next = e.Seq + 1
			if err := f(e); err != nil {
				return err
			}
			if e.Seq >= to { // what comes then may not be readable
				return enough
			}
		}
		return nil
	}
	var after uint64
	var first events.Seq // behind that
	if from > 0 {
		c, err := a.log.Locate(ctx, session, from)
		if err != nil || c == nil {
			return err
		}
		after, first = c.StreamSeq, c.Last+1
		if err := read(c); errors.Is(err, enough) {
			return nil
		} else if err != nil {
			return err
		}
	}
	if err := a.log.ReadOn(ctx, session, after, first, read); err != nil && !errors.Is(err, enough) {
		return err
	}
	return nil
}

// fork is a child in the making.
type fork struct {
	a      *Appender
	r      ForkRequest
	at     events.Seq
	time   int64 // of the parent's event at
	header *events.Header
}

// parentStays refuses a fork whose parent was erased meanwhile. Damage of the parent's log is none of its
// business.
func (f *fork) parentStays(ctx context.Context) error {
	_, err := f.a.log.LeaderLast(ctx, f.r.Parent)
	var damaged *journal.MalformedError
	switch {
	case errors.Is(err, events.ErrErased):
		return &events.Error{Code: events.CodeErased, Session: f.r.Parent, Cause: err,
			Detail: fmt.Sprintf("the session was erased while it was forked; erase %q as well, for what that copied of it", f.header.ID)}
	case errors.As(err, &damaged):
		return nil
	}
	return err
}

// endSeed is the event behind the inherited part.
func (f *fork) endSeed() (*events.Event, error) {
	raw := fmt.Appendf(nil, `{"type":"session/end-seed","seq":%d,"time":%d,"data":{"inherited":true}}`, f.at+1, f.time)
	return events.Parse(raw, events.Context{Format: f.header.Format, Vocabulary: f.a.log.Vocabulary(), Next: f.at + 1, Now: f.time})
}

// seed calls do for what the child starts with, from a seq on.
func (f *fork) seed(ctx context.Context, from events.Seq, do func(*events.Event) error) error {
	if from <= f.at {
		if err := f.a.lines(ctx, f.r.Parent, f.header.Format, from, f.at, do); err != nil {
			return err
		}
	}
	if from > f.at+1 {
		return nil
	}
	e, err := f.endSeed()
	if err != nil {
		return err
	}
	return do(e)
}

// copy stores what the child starts with, as far as it is not stored yet.
func (f *fork) copy(ctx context.Context) error {
	for {
		st := session.New(f.header.ID, f.header.Format, f.header.Raw, surface.KeepFingerprints)
		made := f.a.log.Reconnects()
		if err := f.resume(ctx, st); err != nil {
			return err
		}
		err := f.append(ctx, st, made)
		var conflict *journal.ConflictError
		if !errors.As(err, &conflict) {
			return err
		}
		// The same request runs elsewhere; what it stored is what we would have.
	}
}

// resume folds what an earlier request stored of the child, and makes sure that it is ours.
func (f *fork) resume(ctx context.Context, st *session.State) error {
	other := func(seq events.Seq) error {
		return &events.Error{Code: events.CodeSessionExists, Session: f.header.ID, Seq: &seq, Detail: "the session has events that are not those of this fork"}
	}
	err := f.a.log.ReadToEnd(ctx, f.header.ID, 0, func(c *events.Commit) error {
		want := st.Chain.NextChain(c)
		if err := st.FoldCommit(c, f.a.log.Vocabulary(), nil); err != nil {
			return err
		}
		if c.Chain != want { // binds the header
			return other(c.First)
		}
		return nil
	})
	if err != nil {
		return err
	}
	if st.Next > f.at+2 {
		return other(f.at + 2)
	}
	return f.same(ctx, st.Next)
}

// same compares what is stored of the child before a seq with what it starts with.
func (f *fork) same(ctx context.Context, upTo events.Seq) error {
	if upTo == 0 {
		return nil
	}
	digest := events.SeedDigest(f.header.ID)
	enough := errors.New("enough")
	err := f.seed(ctx, 0, func(e *events.Event) error {
		if e.Seq == upTo {
			return enough
		}
		digest = digest.Next(e.Line)
		return nil
	})
	if err != nil && !errors.Is(err, enough) {
		return err
	}
	c, err := f.a.log.Locate(ctx, f.header.ID, upTo-1)
	if err != nil {
		return err
	}
	if c == nil || c.Digest != digest {
		seq := upTo - 1
		return &events.Error{Code: events.CodeSessionExists, Session: f.header.ID, Seq: &seq, Detail: "the session's first events are not those of the parent"}
	}
	return nil
}

// isPrefix makes sure that a child that is complete starts with this fork's events.
func (f *fork) isPrefix(ctx context.Context) error {
	digest := events.SeedDigest(f.header.ID)
	stored := events.SeedDigest(f.header.ID)
	err := f.seed(ctx, 0, func(e *events.Event) error {
		digest = digest.Next(e.Line)
		return nil
	})
	if err != nil {
		return err
	}
	err = f.a.lines(ctx, f.header.ID, f.header.Format, 0, f.at+1, func(e *events.Event) error {
		stored = stored.Next(e.Line)
		return nil
	})
	if err != nil {
		return err
	}
	if stored != digest {
		return &events.Error{Code: events.CodeSessionExists, Session: f.header.ID, Detail: "the session exists and was not forked there"}
	}
	return nil
}

// append stores the rest of what the child starts with, in commits of a bounded size. made is
// Journal.Reconnects from before its log was read.
func (f *fork) append(ctx context.Context, st *session.State, made uint64) error {
	batch := st.Begin(f.a.cfg.Invariants)
	size := 0
	flush := func() error {
		if batch.Len() == 0 {
			return nil
		}
		c := &events.Commit{ID: nuid.Next(), Actor: f.r.Actor, Time: events.FormatTime(f.a.cfg.Now()), Format: st.Format}
		if c.Actor == "" {
			c.Actor = events.NoActor
		}
		batch.Seal(c)
		if _, err := f.a.log.PublishSince(ctx, made, c, st.StreamSeq); err != nil {
			return err
		}
		batch.Commit(c)
		batch, size = st.Begin(f.a.cfg.Invariants), 0
		return nil
	}
	err := f.seed(ctx, st.Next, func(e *events.Event) error {
		if batch.Len() >= importEvents || batch.Len() > 0 && size+len(e.Line)+1 > min(importBytes, f.a.maxCommit()) {
			if err := flush(); err != nil {
				return err
			}
		}
		size += len(e.Line) + 1
		return batch.Add(e)
	})
	if err != nil {
		batch.Rollback()
		return err
	}
	return flush()
}
