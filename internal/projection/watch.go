package projection

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/surface"
)

const (
	// keptDeltas is how many of a watched session's latest deltas are in memory. A watcher
	// that falls further behind is cut off.
	keptDeltas = 4096
	// silence is how long a hub hears nothing before it looks into the log by itself.
	silence = 2 * time.Second
)

// ErrSlow ends the watch of a reader that did not keep up.
var ErrSlow = errors.New("projection: the watcher did not keep up; resume from the last seq that it saw")

// ErrRewound ends the watches of a session whose log lost its end, in a power cut: what the
// watchers were told of is not there any more.
var ErrRewound = errors.New("projection: the log lost its end, and what was told of it is gone; read the surface again and watch from its seq")

// Hubs are the sessions that are watched in this process. A hub follows one session for all
// its watchers.
type Hubs struct {
	r    *Reader
	conn *nats.Conn

	mu   sync.Mutex
	hubs map[string]*hub
}

// NewHubs returns hubs that hear of deltas over a connection.
func NewHubs(r *Reader, conn *nats.Conn) *Hubs {
	return &Hubs{r: r, conn: conn, hubs: map[string]*hub{}}
}

// hub follows one session.
type hub struct {
	hs      *Hubs
	session string
	cancel  context.CancelFunc
	ready   chan struct{} // closed when the hub has loaded the session, or has ended
	done    chan struct{} // closed when its goroutine has returned
	watches int           // guarded by Hubs.mu

	// These belong to the hub's goroutine.
	surface    *surface.State
	last       events.Seq // of the last commit that is known, NoSeq for none
	streamSeq  uint64     // of that commit
	digest     string     // of its last event; "" when it is not known
	reconnects uint64     // of the connection, when the log was last known to be the one that is followed

	mu      sync.Mutex // guards all below
	seq     events.Seq // of the last event whose delta, if it had one, is known
	from    events.Seq // deltas holds all behind this seq
	deltas  []Delta
	changed chan struct{} // closed and replaced when there is news
	err     error         // set when the hub has ended
}

// Watch is one watcher of a session. It is not safe for concurrent use.
type Watch struct {
	h    *hub
	from events.Seq // of the last delta that was given out, or where the watch began

	lost error // of a watch that can give nothing

	// While the watch is behind the hub's memory it reads the log by itself.
	past  *surface.State
	after uint64
}

// Watch begins a watch behind a seq: that of the last event that the caller knows. It must be
// closed. With a seq beyond the log's end, which the log may have lost, Next answers ErrRewound.
func (hs *Hubs) Watch(ctx context.Context, session string, from events.Seq) (*Watch, error) {
	h, err := hs.join(ctx, session)
	if err != nil {
		return nil, err
	}
	w := &Watch{h: h, from: from}
	h.mu.Lock()
	behind, beyond := from < h.from, from > h.seq && h.err == nil
	h.mu.Unlock()
	if beyond { // of what the hub knows
		if w.lost, err = hs.beyond(ctx, session, from); err != nil {
			w.Close()
			return nil, err
		}
	}
	if behind {
		if w.past, w.after, err = hs.r.surfaceAt(ctx, session, from); err != nil {
			w.Close()
			return nil, err
		}
	}
	return w, nil
}

// beyondError is ErrRewound for a watch that was to begin behind the log's end.
type beyondError struct{ from, end events.Seq }

func (e *beyondError) Error() string {
	return fmt.Sprintf("projection: the watch is to begin behind seq %d, and the log ends with seq %d: it lost its end, or never reached so far; read the surface again and watch from its seq", e.from, e.end)
}

// Is reports that the caller is to do what it does for ErrRewound.
func (e *beyondError) Is(target error) bool { return target == ErrRewound }

// bad reports whether an error says that a session's log holds what cannot be folded.
func bad(err error) bool {
	var e *events.Error
	return errors.As(err, &e) && (e.Code == events.CodeCorrupt || e.Code == events.CodeRuleViolation)
}

// beyond returns an error for a watch that shall begin behind the log's end, nil when the log is longer
// than that.
func (hs *Hubs) beyond(ctx context.Context, session string, from events.Seq) (lost, err error) {
	last, err := hs.r.log.LeaderLast(ctx, session)
	end := events.NoSeq
	if last != nil {
		end = last.Last
	}
	if err != nil || from <= end {
		return nil, err
	}
	return &beyondError{from, end}, nil
}

// Close ends the watch.
func (w *Watch) Close() { w.h.hs.leave(w.h) }

// Next waits for the next deltas, in order, without gaps and repeats. The error is ctx's, or
// says why there will be no more: ErrSlow, or what the log holds that cannot be folded.
func (w *Watch) Next(ctx context.Context) ([]Delta, error) {
	if w.lost != nil {
		return nil, w.lost
	}
	for w.past != nil {
		ds, err := w.history(ctx)
		if err != nil || len(ds) > 0 {
			return ds, err
		}
	}
	for {
		ds, news, err := w.h.since(w.from)
		if err != nil {
			return nil, err
		}
		if len(ds) > 0 {
			w.from = ds[len(ds)-1].Seq
			return ds, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// history reads the next commits of the log, as far as the hub is: where its memory begins, a
// watcher would fall out of it at once. Where an error ends it, the next call goes on.
func (w *Watch) history(ctx context.Context) (out []Delta, err error) {
	w.h.mu.Lock()
	upTo := w.h.seq
	w.h.mu.Unlock()
	last := w.from
	err = w.h.hs.r.log.ReadOn(ctx, w.h.session, w.after, events.NoSeq, func(c *events.Commit) error {
		err := deltasOf(ctx, w.h.hs.r.log, w.past, c, w.from, upTo, func(d Delta) {
			out = append(out, d)
			last = d.Seq
		})
		if err != nil {
			return err
		}
		w.after, last = c.StreamSeq, min(c.Last, upTo)
		if last == upTo || len(out) >= maxDeltas {
			return errReached
		}
		return nil
	})
	w.from = max(w.from, last)
	if w.from >= upTo {
		w.past = nil
	}
	switch {
	case errors.Is(err, errReached) || len(out) > 0: // an error comes again
		return out, nil
	case err == nil:
		err = unavailable("watch", fmt.Errorf("the log ends at seq %d, before the head, which is at %d", w.from, upTo))
	}
	return nil, err
}

// errReached ends a reading of the log at the place that was looked for.
var errReached = errors.New("projection: reached")

// join returns the session's hub, started and at the end of the log, or before what the log holds that
// cannot be folded, with one more watch.
func (hs *Hubs) join(ctx context.Context, session string) (*hub, error) {
	if err := events.CheckSessionID(session); err != nil {
		return nil, err
	}
	hd, err := hs.r.headers.Get(ctx, session)
	if err != nil {
		return nil, err
	}
	hs.mu.Lock()
	h := hs.hubs[session]
	if h == nil {
		run, cancel := context.WithCancel(context.WithoutCancel(ctx))
		h = &hub{hs: hs, session: session, cancel: cancel, ready: make(chan struct{}), done: make(chan struct{}),
			last: events.NoSeq, seq: events.NoSeq, from: events.NoSeq, changed: make(chan struct{})}
		hs.hubs[session] = h
		go h.run(run, hd.Format)
	}
	h.watches++
	hs.mu.Unlock()
	select {
	case <-h.ready:
		h.mu.Lock()
		if err = h.err; bad(err) {
			err = nil // its watches are told behind what comes before it
		}
		h.mu.Unlock()
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	if err != nil {
		hs.leave(h)
		return nil, err
	}
	return h, nil
}

// leave ends a watch; the last one ends the hub.
func (hs *Hubs) leave(h *hub) {
	hs.mu.Lock()
	h.watches--
	last := h.watches == 0
	if last && hs.hubs[h.session] == h {
		delete(hs.hubs, h.session)
	}
	hs.mu.Unlock()
	if last {
		h.cancel()
		<-h.done
	}
}

// load brings the hub to the session's head.
func (h *hub) load(ctx context.Context, f events.Format) error {
	snap, _, err := h.hs.r.buckets.Snapshots.Load(ctx, h.session, surface.KeepFingerprints)
	if err != nil && !damaged(err) {
		return err
	}
	if snap == nil {
		h.surface = surface.New(f, surface.KeepFingerprints)
		return h.heal(ctx)
	}
	h.surface, h.last, h.streamSeq, h.digest = snap.Surface, snap.Last(), snap.StreamSeq, snap.Digest.String()
	h.seq, h.from = snap.Last(), snap.Last()
	return h.heal(ctx)
}

func (h *hub) run(ctx context.Context, f events.Format) {
	defer close(h.done)
	h.reconnects = h.hs.conn.Stats().Reconnects
	msgs := make(chan *nats.Msg, 256)
	sub, err := h.hs.conn.ChanSubscribe(DeltaSubject(h.session), msgs) // first, so that nothing is missed
	if err == nil {
		defer func() { _ = sub.Unsubscribe() }() // fails only when the connection is gone
		err = h.load(ctx, f)
	} else {
		err = unavailable("watch", err)
	}
	if err != nil {
		h.end(err)
	}
	close(h.ready)
	if err != nil {
		return
	}
	timer := time.NewTimer(silence)
	defer timer.Stop()
	for {
		var err error
		select {
		case m := <-msgs:
			var d deltaMessage
			readable := json.Unmarshal(m.Data, &d) == nil
			// Folded anew: because the log lost its end, or a snapshot was damaged.
			if err = h.sameLog(ctx, readable && d.From == events.NoSeq && d.Deltas == nil); err == nil && !(readable && h.take(&d)) {
				err = h.heal(ctx)
			}
		case <-timer.C:
			if err = h.sameLog(ctx, false); err == nil {
				err = h.heal(ctx)
			}
		case <-ctx.Done():
			return
		}
		timer.Reset(silence)
		if err != nil && ctx.Err() == nil && (!temporary(err) || errors.Is(err, ErrRewound)) {
			h.end(err) // the log holds what cannot be folded, or lost what was folded
			return
		}
	}
}

// sameLog makes sure that the log still holds what the hub followed, when it is asked to or the
// connection was lost since: a power cut may have taken the log's end away.
func (h *hub) sameLog(ctx context.Context, now bool) error {
	reconnects := h.hs.conn.Stats().Reconnects
	if reconnects == h.reconnects && !now {
		return nil
	}
	if h.last > events.NoSeq {
		c, err := h.hs.r.log.Locate(ctx, h.session, h.last)
		if err != nil {
			return err
		}
		if c == nil || c.StreamSeq != h.streamSeq || c.Last != h.last || h.digest != "" && c.Digest.String() != h.digest {
			return ErrRewound
		}
	}
	h.reconnects = reconnects
	return nil
}

// take applies the deltas of a flush if they follow on what the hub has. It reports false when
// there is a gap.
func (h *hub) take(m *deltaMessage) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if m.To <= h.seq {
		return true
	}
	if m.From != h.seq || m.Deltas == nil {
		return false
	}
	for _, d := range m.Deltas {
		if !h.surface.Replay(d.Seq, events.SurfaceKind(d.Node.Type), d.Shadowed) {
			return false
		}
		h.add(d)
		h.seq = d.Seq
	}
	h.seq, h.last, h.streamSeq, h.digest = m.To, m.To, m.StreamSeq, m.Digest
	h.wake()
	return true
}

// heal reads what the log holds now behind what the hub has.
func (h *hub) heal(ctx context.Context) error {
	err := h.hs.r.readToNow(ctx, h.session, h.streamSeq, events.NoSeq, func(c *events.Commit) error {
		h.mu.Lock()
		defer h.mu.Unlock()
		var all []Delta // of a commit that can be folded as a whole
		if err := deltasOf(ctx, h.hs.r.log, h.surface, c, h.seq, events.MaxSeq, func(d Delta) { all = append(all, d) }); err != nil {
			return err
		}
		for _, d := range all {
			h.add(d)
		}
		h.seq = max(h.seq, c.Last)
		h.last, h.streamSeq, h.digest = c.Last, c.StreamSeq, c.Digest.String()
		return nil
	})
	h.mu.Lock()
	h.wake()
	h.mu.Unlock()
	return err
}

// deltasOf applies the events of a commit that lie behind one seq and not behind another, and
// calls f, when given, for what each does to the surface.
func deltasOf(ctx context.Context, j *journal.Journal, s *surface.State, c *events.Commit, behind, upTo events.Seq, f func(Delta)) error {
	for line := range c.Lines() {
		var e events.Event
		err := known(ctx, j, func(v *events.Vocabulary) error { return events.ParseCanonical(&e, line, c.Format, v) })
		if err != nil {
			return err
		}
		if e.Seq <= behind {
			continue
		}
		if e.Seq > upTo {
			return nil
		}
		ch, err := s.PlanStored(&e)
		if err != nil {
			return err
		}
		s.Apply(&ch)
		if d, ok := deltaOf(&ch); ok && f != nil {
			f(d)
		}
	}
	return nil
}

// add keeps a delta. The caller holds mu.
func (h *hub) add(d Delta) {
	h.deltas = append(h.deltas, d)
	if extra := len(h.deltas) - keptDeltas; extra > 0 {
		h.from = h.deltas[extra-1].Seq
		clear(h.deltas[:extra])
		h.deltas = h.deltas[extra:]
	}
}

// wake tells the watchers that there is news. The caller holds mu.
func (h *hub) wake() {
	close(h.changed)
	h.changed = make(chan struct{})
}

func (h *hub) end(err error) {
	h.mu.Lock()
	h.err = err
	h.wake()
	h.mu.Unlock()
	h.hs.mu.Lock()
	defer h.hs.mu.Unlock()
	if h.hs.hubs[h.session] == h {
		delete(h.hs.hubs, h.session)
	}
}

// since returns the deltas behind a seq, or a channel that is closed when there are any.
func (h *hub) since(seq events.Seq) ([]Delta, <-chan struct{}, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if seq < h.from {
		return nil, nil, ErrSlow
	}
	i := sort.Search(len(h.deltas), func(i int) bool { return h.deltas[i].Seq > seq })
	if i < len(h.deltas) {
		return slices.Clone(h.deltas[i:]), nil, nil
	}
	return nil, h.changed, h.err
}
