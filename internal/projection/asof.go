package projection

import (
	"context"
	"errors"
	"fmt"

	"palimpsest/internal/events"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

func notThere(session string, seq events.Seq) error {
	return &events.Error{Code: events.CodeNotFound, Session: session, Seq: &seq, Detail: fmt.Sprintf("the session has no event at seq %d", seq)}
}

// surfaceAt returns the surface as of a seq, its nodes' seqs alone, and the stream sequence
// behind which the log goes on from there; the commit behind it may begin before the seq.
func (r *Reader) surfaceAt(ctx context.Context, session string, seq events.Seq) (*surface.State, uint64, error) {
	h, err := r.headers.Get(ctx, session)
	if err != nil {
		return nil, 0, err
	}
	s := surface.New(h.Format, surface.KeepFingerprints)
	if seq < 0 {
		return s, 0, nil
	}
	at, err := r.log.Locate(ctx, session, seq)
	if err != nil {
		return nil, 0, err
	}
	if at == nil {
		return nil, 0, notThere(session, seq)
	}
	err = r.log.ReadOn(ctx, session, 0, 0, func(c *events.Commit) error {
		err := deltasOf(ctx, r.log, s, c, events.NoSeq, seq, nil)
		if err == nil && c.StreamSeq >= at.StreamSeq {
			err = errReached
		}
		return err
	})
	if err != nil && !errors.Is(err, errReached) {
		return nil, 0, err
	}
	return s, at.StreamSeq - 1, nil
}

// At returns a session's snapshot as of a seq, with all its messages. It starts from the
// nearest state that is of use: the head when it is not beyond the seq, the head cut short when
// nothing was replaced since, and the log's start otherwise.
func (r *Reader) At(ctx context.Context, session string, seq events.Seq) (*View, error) {
	if err := events.CheckSessionID(session); err != nil {
		return nil, err
	}
	h, err := r.headers.Get(ctx, session)
	if err != nil {
		return nil, err
	}
	at, err := r.log.Locate(ctx, session, seq)
	if err != nil {
		return nil, err
	}
	if at == nil {
		return nil, notThere(session, seq)
	}
	snaps := r.buckets.Snapshots.Pin(ctx)
	snap, _, err := snaps.Load(ctx, session, surface.KeepFingerprints)
	if err != nil && !damaged(err) {
		return nil, err
	}
	useful, err := r.useful(ctx, snap, at, seq)
	if err != nil {
		return nil, err
	}
	if useful {
		last := snap.Last()
		snap, _, err = snaps.Full(ctx, session)
		if err != nil && !damaged(err) {
			return nil, err
		}
		if snap == nil || snap.Last() != last { // it moved on, and something may have been replaced
			if useful, err = r.useful(ctx, snap, at, seq); err != nil {
				return nil, err
			}
		}
	}
	switch {
	case !useful:
		snap = snapshot.New(session, h.Format, surface.KeepBodies)
	case snap.Last() > seq:
		snap.Surface.Truncate(seq)
		snap.Next = seq + 1
	}
	if snap.Last() < seq {
		err = r.log.ReadToEnd(ctx, session, snap.StreamSeq, func(c *events.Commit) error {
			part := *c
			var err error
			if part.Body, part.Last, err = bodyUpTo(c, seq); err != nil {
				return err
			}
			if err := known(ctx, r.log, func(v *events.Vocabulary) error { return snap.Fold(&part, v, nil) }); err != nil {
				return err
			}
			if part.Last >= seq {
				return errReached
			}
			return nil
		})
		if err != nil && !errors.Is(err, errReached) {
			return nil, err
		}
	}
	v := &View{Snapshot: snap}
	v.Quarantine, err = r.quarantineOf(ctx, session, false)
	return v, err
}

// bodyUpTo is the body of a commit without the events behind a seq, and its last seq then.
func bodyUpTo(c *events.Commit, seq events.Seq) ([]byte, events.Seq, error) {
	if c.Last <= seq {
		return c.Body, c.Last, nil
	}
	n := 0
	for at := c.First; at <= seq; at++ {
		if n >= len(c.Body) { // around the appender, anything can be stored
			return nil, 0, &events.Error{Code: events.CodeCorrupt, Session: c.Session, Seq: &at, Detail: fmt.Sprintf("log: the commit at stream sequence %d says that it has seqs %d to %d, and its body ends before seq %d", c.StreamSeq, c.First, c.Last, at)}
		}
		line, _ := events.CutLine(c.Body[n:])
		n = min(n+len(line)+1, len(c.Body))
	}
	return c.Body[:n], seq, nil
}

// useful reports whether the surface as of a seq can be made from a snapshot, which may be nil.
func (r *Reader) useful(ctx context.Context, snap *snapshot.Snapshot, at *events.Commit, seq events.Seq) (bool, error) {
	if snap == nil || snap.Foldable() != nil {
		return false, nil
	}
	if snap.Last() <= seq {
		return true, nil
	}
	return r.onlyAppended(ctx, snap, at, seq)
}

// onlyAppended reports whether nothing was replaced behind a seq, up to the snapshot's, so that
// the surface then is the surface now without its latest nodes. It gives up when reading
// about that would take longer than folding the log from its start.
func (r *Reader) onlyAppended(ctx context.Context, snap *snapshot.Snapshot, at *events.Commit, seq events.Seq) (bool, error) {
	if snap.Surface.Generation() == 0 {
		return true, nil
	}
	if snap.Last()-seq > seq {
		return false, nil
	}
	errReplaced := errors.New("replaced")
	err := r.log.ReadOn(ctx, snap.ID, at.StreamSeq-1, at.First, func(c *events.Commit) error {
		if c.First > snap.Last() {
			return errReached
		}
		for line := range c.Lines() {
			var e events.Event
			err := known(ctx, r.log, func(v *events.Vocabulary) error { return events.ParseCanonical(&e, line, c.Format, v) })
			if err != nil {
				return err
			}
			if e.Seq > seq && e.Op.Kind == events.OpReplace {
				return errReplaced
			}
		}
		return nil
	})
	switch {
	case errors.Is(err, errReplaced):
		return false, nil
	case errors.Is(err, errReached):
		return true, nil
	}
	return err == nil, err
}
