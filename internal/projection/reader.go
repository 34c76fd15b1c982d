package projection

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/cache"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/sessionfile"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

// pollHeads is how often a reader that waits looks at the bucket, should it have missed the news.
const pollHeads = 100 * time.Millisecond

// Reader serves what was projected, and the log itself. It is safe for concurrent use.
type Reader struct {
	log     *journal.Journal
	headers *journal.Headers
	buckets *Buckets
	heads   *Heads
	known   *cache.Cache[string, *events.Header]
	sick    *sickList
}

// NewReader returns a reader. heads may be those of a worker in the same process, or new.
func NewReader(j *journal.Journal, h *journal.Headers, b *Buckets, heads *Heads) *Reader {
	r := &Reader{log: j, headers: h, buckets: b, heads: heads, sick: new(sickList)}
	r.CacheHeaders(DefaultHeaderCache)
	return r
}

// Journal returns the log.
func (r *Reader) Journal() *journal.Journal { return r.log }

// Headers returns the session headers.
func (r *Reader) Headers() *journal.Headers { return r.headers }

// Want says how new a snapshot must be.
type Want struct {
	// MinSeq waits until the snapshot holds this seq; NoSeq does not wait.
	MinSeq events.Seq
	// Timeout bounds waiting.
	Timeout time.Duration
	// Fresh folds what the log holds beyond the head, so that the answer is as new as the log.
	Fresh bool
}

// View is a session's snapshot as it is served.
type View struct {
	*snapshot.Snapshot
	// Quarantine is set when the session's log holds something that cannot be folded; the
	// snapshot is that of the last good commit.
	Quarantine *Quarantine
}

// View reads a session's snapshot with all its messages. A session that is not there, one that
// is not projected yet and an empty one are three different answers: session-not-found,
// not-yet-projected, and a snapshot at seq -1.
func (r *Reader) View(ctx context.Context, session string, want Want) (*View, error) {
	if err := events.CheckSessionID(session); err != nil {
		return nil, err
	}
	h, err := r.header(ctx, session)
	if err != nil {
		return nil, err
	}
	if want.MinSeq > events.NoSeq && !want.Fresh {
		if err := r.await(ctx, session, want.MinSeq, want.Timeout); err != nil {
			return nil, err
		}
	}
	snap, _, err := r.buckets.Snapshots.Full(ctx, session)
	if err != nil {
		return nil, err
	}
	if snap == nil && !want.Fresh {
		last, err := r.log.LeaderLast(ctx, session)
		if errors.Is(err, events.ErrErased) { // since the header was read
			return nil, events.Erased(session)
		}
		if err != nil && !isMalformed(err) {
			return nil, err
		}
		if last != nil || err != nil {
			if err := r.await(ctx, session, 0, want.Timeout); err != nil {
				return nil, err
			}
			if snap, _, err = r.buckets.Snapshots.Full(ctx, session); err != nil {
				return nil, err
			}
		}
	}
	if snap == nil {
		snap = snapshot.New(session, h.Format, surface.KeepBodies)
	}
	v := &View{Snapshot: snap}
	if v.Quarantine, err = r.quarantineOf(ctx, session, want.Fresh); err != nil {
		return nil, err
	}
	if want.Fresh && v.Quarantine == nil {
		if snap.Foldable() != nil {
			snap = snapshot.New(session, h.Format, surface.KeepBodies)
			v.Snapshot = snap
		}
		if err := r.freshen(ctx, snap); err != nil {
			return nil, err
		}
	}
	if want.MinSeq > snap.Last() {
		return nil, notProjected(session, want.MinSeq, snap.Last())
	}
	return v, nil
}

// Projected returns the seq of a session's head, NoSeq for a session without events. One whose
// first events are not projected yet is waited for.
func (r *Reader) Projected(ctx context.Context, session string, timeout time.Duration) (events.Seq, error) {
	if err := events.CheckSessionID(session); err != nil {
		return events.NoSeq, err
	}
	if _, err := r.headers.Get(ctx, session); err != nil {
		return events.NoSeq, err
	}
	for waited := false; ; waited = true {
		h, _, err := r.buckets.Snapshots.Head(ctx, session)
		if err != nil || h != nil {
			if h == nil {
				return events.NoSeq, err
			}
			return h.Seq, err
		}
		last, err := r.log.LeaderLast(ctx, session)
		if err != nil && !isMalformed(err) {
			return events.NoSeq, err
		}
		if last == nil && err == nil || waited {
			return events.NoSeq, nil
		}
		if err := r.await(ctx, session, 0, timeout); err != nil {
			return events.NoSeq, err
		}
	}
}

func isMalformed(err error) bool {
	var m *journal.MalformedError
	return errors.As(err, &m)
}

func notProjected(session string, want, have events.Seq) error {
	return &events.Error{Code: events.CodeNotProjected, Session: session, ExpectedSeq: &want, ActualSeq: &have,
		Detail: fmt.Sprintf("the projection is at seq %d, not yet at %d; try again, or ask with fresh=true", have, want)}
}

// freshen folds what the log's leader holds now behind a full snapshot.
func (r *Reader) freshen(ctx context.Context, snap *snapshot.Snapshot) error {
	return r.readToNow(ctx, snap.ID, snap.StreamSeq, snap.Next, func(c *events.Commit) error {
		return known(ctx, r.log, func(v *events.Vocabulary) error { return snap.Fold(c, v, nil) })
	})
}

// readToNow calls f for the session's commits behind a stream sequence, up to where its log ends
// when it is called. next is as in Journal.ReadOn.
func (r *Reader) readToNow(ctx context.Context, session string, after uint64, next events.Seq, f func(*events.Commit) error) error {
	end, err := endOf(ctx, r.log, session)
	if err != nil || end <= after {
		return err
	}
	stop := errors.New("stop")
	err = r.log.ReadOn(ctx, session, after, next, func(c *events.Commit) error {
		if c.StreamSeq <= end {
			if err := f(c); err != nil {
				return err
			}
		}
		if c.StreamSeq >= end {
			return stop
		}
		return nil
	})
	if err == stop {
		return nil
	}
	return err
}

// await returns once the session's head holds seq: not-yet-projected when the time is over,
// session-quarantined when it never will.
func (r *Reader) await(ctx context.Context, session string, seq events.Seq, timeout time.Duration) error {
	hit, stop := r.heads.await(session, seq)
	defer stop()
	over := time.NewTimer(timeout)
	defer over.Stop()
	var news chan struct{} // another process may have written a head
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, pollHeads) {
		h, _, err := r.buckets.Snapshots.Head(ctx, session)
		if err != nil {
			return err
		}
		have := events.NoSeq
		if h != nil {
			have = h.Seq
		}
		if have >= seq {
			return nil
		}
		q, err := r.buckets.QuarantineOf(ctx, session)
		if err != nil {
			return err
		}
		if q != nil {
			return &events.Error{Code: events.CodeQuarantined, Session: session, Rule: q.Rule, Seq: q.Seq, ExpectedSeq: &seq, ActualSeq: &have,
				Detail: q.standsStill()}
		}
		if news == nil {
			news = make(chan struct{}, 1)
			sub, err := r.log.JetStream().Conn().Subscribe(DeltaSubject(session), func(*nats.Msg) {
				select {
				case news <- struct{}{}:
				default:
				}
			})
			if err == nil { // else there is still the polling
				defer func() { _ = sub.Unsubscribe() }() // fails only when the connection is gone
			}
			continue // the head may have come before the server knew of the subscription
		}
		poll := time.NewTimer(pause)
		select {
		case <-news:
		case <-hit:
			hit = nil // once: the replica that answers may lag
		case <-poll.C:
		case <-over.C:
			poll.Stop()
			return notProjected(session, seq, have)
		case <-ctx.Done():
			poll.Stop()
			return context.Cause(ctx)
		}
		poll.Stop()
	}
}

// Range is a part of a session's log.
type Range struct {
	From, To events.Seq // inclusive; To may lie beyond the end
	Types    []string   // none: all
	Limit    int        // events; 0 for no limit
	MaxBytes int        // of their lines; 0 for no limit; one event is always given
}

// Events calls f for the events of a range, in order. next is the seq at which to go on when
// the limit ended it, NoSeq when the range was read to its end. A log with a hole in the range is the
// error of journal.NotNext, a message that is no commit a *journal.MalformedError; with a limit, what
// lies before is given first, and the error comes when reading goes on from there.
func (r *Reader) Events(ctx context.Context, session string, rg Range, f func(*events.Event, *events.Commit) error) (next events.Seq, err error) {
	if err := events.CheckSessionID(session); err != nil {
		return events.NoSeq, err
	}
	if _, err := r.headers.Get(ctx, session); err != nil {
		return events.NoSeq, err
	}
	first, err := r.log.Locate(ctx, session, rg.From)
	if err != nil || first == nil {
		return events.NoSeq, err
	}
	stop := errors.New("stop")
	next = events.NoSeq
	given, bytes, behind := 0, 0, rg.From
	read := func(c *events.Commit) error {
		for line := range c.Lines() {
			e := new(events.Event)
			if err := events.ParseCanonical(e, line, c.Format, r.log.Vocabulary()); err != nil {
				// The log as it is: an event whose rule is broken is shown all the same.
				if e.Line == nil {
					return err
				}
			}
			switch {
			case e.Seq < rg.From:
				continue
			case e.Seq > rg.To:
				return stop
			case len(rg.Types) > 0 && !slices.Contains(rg.Types, e.Type):
				continue
			case rg.Limit > 0 && given == rg.Limit || rg.MaxBytes > 0 && given > 0 && bytes+len(line) > rg.MaxBytes:
				next = e.Seq
				return stop
			}
			given++
			bytes += len(line)
			if err := f(e, c); err != nil {
				return err
			}
		}
		behind = c.Last + 1
		if c.Last >= rg.To {
			return stop
		}
		return nil
	}
	err = read(first)
	if err == nil {
		err = r.log.ReadOn(ctx, session, first.StreamSeq, first.Last+1, read)
	}
	var foreign *journal.MalformedError
	switch paged := given > 0 && (rg.Limit > 0 || rg.MaxBytes > 0); {
	case errors.Is(err, stop):
		err = nil
	case !paged || errors.Is(err, events.ErrErased):
	case errors.Is(err, &events.Error{Code: events.CodeCorrupt, Rule: events.RuleSeqNotContiguous}), errors.As(err, &foreign):
		next, err = behind, nil // the page ends where the log can no longer be read
	}
	return next, err
}

// Export writes the session's file: its header and its stored lines. It ends with an error at a hole
// in the log.
func (r *Reader) Export(ctx context.Context, session string, w io.Writer) error {
	if err := events.CheckSessionID(session); err != nil {
		return err
	}
	h, err := r.headers.Get(ctx, session)
	if err != nil {
		return err
	}
	return sessionfile.Write(w, h, func(yield func([]byte, error) bool) {
		stop := errors.New("stop")
		err := r.readToNow(ctx, session, 0, 0, func(c *events.Commit) error {
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
	})
}

// Quarantined lists the sessions in quarantine.
func (r *Reader) Quarantined(ctx context.Context) ([]Quarantine, error) {
	qs, err := r.buckets.Quarantined(ctx)
	slices.SortFunc(qs, func(a, b Quarantine) int {
		if a.Session < b.Session {
			return -1
		}
		return 1
	})
	return qs, err
}
