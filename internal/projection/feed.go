package projection

import (
	"context"
	"errors"
	"slices"
	"time"
)

// ErrFeedBehind ends the feed of a reader that did not keep up.
var ErrFeedBehind = errors.New("projection: the reader of the feed did not keep up; resume from the last revision that it saw")

// FeedChange is one change of the fleet: how a session is now.
type FeedChange struct {
	FleetRow
	// Left says that the session is not, or no longer, one of those that were asked for.
	Left bool `json:"left,omitempty"`
	// Revised says that a new head made the change, so that a feed may be resumed at Rev. What
	// changes a session's quarantine or brings its header has no revision.
	Revised bool `json:"-"`
}

// Feed follows the changes of all sessions, or of those that a filter picks, in the order of
// their heads' revisions. Of each session it tells the latest head that there is when the
// reader gets that far: heads that were replaced meanwhile are left out, no session's last
// head ever is, and none is told again. It is not safe for concurrent use.
type Feed struct {
	f       *Fleet
	match   func(*fleetRow) bool
	all     bool
	rev     uint64 // told up to here
	resumed bool
	losses  int
	note    uint64
	told    map[string]bool // sessions that were told, by whether they matched; nil when all do
	target  uint64
	upToNow time.Time // when the reader was last told of all that there was
}

// feedChunk is how many changes one call of Next returns at most.
const feedChunk = 256

// Feed begins a feed behind a revision of SURFACES: that of the last change that the caller
// knows, 0 to be told of every session. reset reports that the bucket does not reach that
// revision: it lost its end, or is another one, and every session is told.
func (f *Fleet) Feed(ctx context.Context, ff FleetFilter, from uint64) (fd *Feed, reset bool, err error) {
	if err := f.Refresh(ctx); err != nil {
		return nil, false, err
	}
	f.mu.RLock()
	defer f.mu.RUnlock()
	if from > f.newest {
		from, reset = 0, true
	}
	fd = &Feed{f: f, match: ff.matcher(), all: ff == FleetFilter{}, rev: from, resumed: from > 0,
		losses: len(f.losses), note: f.noted + uint64(len(f.notes)), target: f.newest}
	if !fd.all {
		fd.told = map[string]bool{}
	}
	return fd, reset, nil
}

// Newest is the revision up to which the index knew the heads when the feed began.
func (fd *Feed) Newest() uint64 { return fd.target }

// Aside returns those sessions in quarantine that the feed is about, and, where the feed resumes, all
// that were erased: whoever was away was not told of what became of them.
func (fd *Feed) Aside() (out []FeedChange) {
	fd.f.mu.RLock()
	defer fd.f.mu.RUnlock()
	fd.f.byID.Scan(func(r *fleetRow) bool {
		switch {
		case r.erased && fd.resumed:
			fd.remember(r.id, false)
			out = append(out, FeedChange{FleetRow: r.public(), Left: true})
		case r.quarantine != nil && r.rev <= fd.rev && fd.match(r):
			fd.remember(r.id, true)
			out = append(out, FeedChange{FleetRow: r.public()})
		}
		return true
	})
	return out
}

// Next waits for the next changes. The error is ctx's, or ErrFeedBehind.
func (fd *Feed) Next(ctx context.Context) ([]FeedChange, error) {
	for {
		out, news := fd.take()
		if len(out) < feedChunk {
			fd.upToNow = time.Now()
		} else if !fd.upToNow.IsZero() && time.Since(fd.upToNow) > fd.f.behind {
			return nil, ErrFeedBehind
		}
		if len(out) > 0 {
			return out, nil
		}
		poll := time.NewTimer(fd.f.every)
		select {
		case <-news:
		case <-poll.C:
			// Trouble with JetStream passes; until then there is no news.
			if err := fd.f.refreshSince(ctx, fd.f.every); err != nil && !temporary(err) && ctx.Err() == nil {
				poll.Stop()
				return nil, err
			}
		case <-ctx.Done():
			poll.Stop()
			return nil, context.Cause(ctx)
		}
		poll.Stop()
	}
}

// take returns what there is to tell, or a channel that is closed when there may be more.
func (fd *Feed) take() (out []FeedChange, news <-chan struct{}) {
	f := fd.f
	f.mu.RLock()
	defer f.mu.RUnlock()
	for ; fd.losses < len(f.losses); fd.losses++ {
		fd.rev = min(fd.rev, f.losses[fd.losses])
	}
	f.byRev.Ascend(&fleetRow{headPlace: headPlace{rev: fd.rev + 1}}, func(r *fleetRow) bool {
		if c, ok := fd.change(r); ok {
			c.Revised = true
			out = append(out, c)
		}
		fd.rev = r.rev
		return len(out) < feedChunk
	})
	if len(out) >= feedChunk {
		return out, f.changed
	}
	if fd.note < f.noted { // too many to be remembered
		fd.note = f.noted
		f.byID.Scan(func(r *fleetRow) bool {
			if r.quarantine != nil {
				if c, ok := fd.change(r); ok {
					out = append(out, c)
				}
			}
			return true
		})
	}
	for _, r := range f.notes[fd.note-f.noted:] {
		if (r.rev > 0 || r.erased) && !slices.ContainsFunc(out, func(c FeedChange) bool { return c.Session == r.id }) {
			if c, ok := fd.change(r); ok {
				out = append(out, c)
			}
		}
	}
	fd.note = f.noted + uint64(len(f.notes))
	return out, f.changed
}

// change is what the feed says of a row, if it says anything: that it is one of those that were
// asked for, or that it is not any more. Of a session whose header is not there yet nobody
// knows whether it is.
func (fd *Feed) change(r *fleetRow) (FeedChange, bool) {
	c := FeedChange{FleetRow: r.public(), Left: r.erased}
	if fd.all {
		return c, true
	}
	matched, known := fd.told[r.id]
	if !r.erased && (!r.header || fd.match(r)) {
		fd.remember(r.id, true)
		return c, true
	}
	c.Left = true
	// A feed that was resumed may have told of it before.
	if matched || !known && fd.resumed {
		fd.remember(r.id, false)
		return c, true
	}
	return c, false
}

func (fd *Feed) remember(id string, matched bool) {
	if fd.told != nil {
		fd.told[id] = matched
	}
}
