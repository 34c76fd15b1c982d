package projection

import (
	"container/list"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/snapshot"
)

const (
	tick       = 10 * time.Millisecond
	retryPause = 200 * time.Millisecond
	// deliveries is how many messages wait between the consumer and the fold.
	deliveries = 16
	// maxUnflushed is how many bytes of commits a partition holds that no flush took.
	maxUnflushed = 8 << 20
)

// partition is one partition at work. Everything but the atomics belongs to the goroutine in run.
type partition struct {
	w *Worker
	n int

	sessions    map[string]*entry
	recent      list.List // of *entry, most recently used first
	bytes       int       // estimated, of all snapshots
	unflushed   int       // bytes of commits that no flush took
	dirty       map[*entry]bool
	quarantined map[string]bool
	written     chan result
	retries     chan retry
	garbage     []trash

	checkpoint    uint64 // as stored
	checkpointRev uint64
	nextCheck     time.Time

	read          atomic.Uint64 // stream sequence of the last message that was dealt with
	checkpointed  atomic.Uint64
	oldest        atomic.Int64 // Unix ms, when the oldest unflushed event was read; 0 for none
	count, memory atomic.Int64
	follower      atomic.Pointer[journal.Follower]
	trouble       atomic.Pointer[string]
}

// entry is one session in memory.
type entry struct {
	session string
	snap    *snapshot.Snapshot // nil: to be loaded when needed
	rev     uint64             // revision of its head in the bucket; 0 when it has none
	place   *list.Element
	size    int

	since   time.Time // when the oldest event that no flush took was read; zero when clean
	first   uint64    // stream sequence of the first commit that no flush took
	pending int       // events that no flush took
	bytes   int       // of their commits' bodies

	mending bool // folded anew over a damaged snapshot: pages are written over

	writing      bool
	writingSince time.Time
	writingFirst uint64
}

// result is the end of a snapshot's write.
type result struct {
	e     *entry
	rev   uint64
	seq   events.Seq
	trash []string
	err   error
}

// trash is keys that no head refers to, to be deleted once nobody can be reading them.
type trash struct {
	due  time.Time
	keys []string
}

func newPartition(w *Worker, n int, quarantined map[string]bool) *partition {
	if quarantined == nil {
		quarantined = map[string]bool{}
	}
	return &partition{
		w: w, n: n, sessions: map[string]*entry{}, dirty: map[*entry]bool{}, quarantined: quarantined,
		written: make(chan result, w.cfg.Writes), retries: make(chan retry),
	}
}

type checkpointValue struct {
	V         int    `json:"v"`
	StreamSeq uint64 `json:"streamSeq"`
}

func (p *partition) key() string { return fmt.Sprintf("p%d", p.n) }

func (p *partition) readCheckpoint(ctx context.Context) error {
	e, err := p.w.buckets.Checkpoints.Get(ctx, p.key())
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil
	}
	if err != nil {
		return unavailable("checkpoint of partition", err)
	}
	var v checkpointValue
	if err := json.Unmarshal(e.Value(), &v); err != nil || v.V != 1 {
		return &events.Error{Code: events.CodeCorrupt, Detail: fmt.Sprintf("checkpoint %s is not readable: %s; delete the key to fold the partition from its start", p.key(), e.Value())}
	}
	p.checkpoint, p.checkpointRev = v.StreamSeq, e.Revision()
	p.read.Store(v.StreamSeq)
	p.checkpointed.Store(v.StreamSeq)
	return nil
}

// run works the partition until ctx ends, and then drains it.
func (p *partition) run(ctx context.Context) {
	in := make(chan journal.Delivery, deliveries)
	failures := make(chan error, 1)
	follower := p.follow(ctx, in, failures)
	defer func() {
		if follower != nil {
			follower.Stop()
		}
	}()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case d := <-in:
			p.deliver(ctx, d)
			for more := true; more; { // take what is there before looking at the clock
				select {
				case d := <-in:
					p.deliver(ctx, d)
				default:
					more = false
				}
			}
		case r := <-p.written:
			p.finished(r)
		case r := <-p.retries:
			r.done <- p.retry(ctx, r.session)
		case err := <-failures:
			p.troubled(err)
		case <-ticker.C:
		case <-ctx.Done():
			p.drain()
			return
		}
		if follower == nil && ctx.Err() == nil {
			follower = p.follow(ctx, in, failures)
		}
		p.flushDue(ctx, time.Now(), false)
		p.checkpointDue(ctx, time.Now())
		p.sweep(ctx, time.Now())
	}
}

// follow starts reading behind what was dealt with; nil when JetStream is away.
func (p *partition) follow(ctx context.Context, in chan<- journal.Delivery, failures chan<- error) *journal.Follower {
	f, err := p.w.log.Follow(ctx, p.n, p.read.Load(), p.w.cfg.Pull, func(d journal.Delivery) {
		select {
		case in <- d:
		case <-ctx.Done():
		}
	}, func(err error) {
		select {
		case failures <- err:
		default:
		}
	})
	if err != nil {
		if ctx.Err() == nil {
			p.troubled(err)
			p.pause(ctx)
		}
		return nil
	}
	p.follower.Store(f)
	return f
}

func (p *partition) pause(ctx context.Context) {
	t := time.NewTimer(retryPause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (p *partition) troubled(err error) {
	s := err.Error()
	if old := p.trouble.Swap(&s); old == nil || *old != s {
		p.w.cfg.Logger.Warn("projection", "partition", p.n, "err", err)
	}
}

// deliver deals with one message: folds it, or finds that it was folded before, or puts its
// session into quarantine. It does not return before one of these is done or ctx ends.
func (p *partition) deliver(ctx context.Context, d journal.Delivery) {
	if d.StreamSeq <= p.read.Load() { // again, after a reconnect
		return
	}
	for ctx.Err() == nil {
		err := p.fold(ctx, d)
		if err == nil {
			p.trouble.Store(nil)
			p.read.Store(d.StreamSeq)
			return
		}
		p.troubled(err)
		p.pause(ctx)
	}
}

// fold folds one message. An error is temporary: JetStream is away.
func (p *partition) fold(ctx context.Context, d journal.Delivery) error {
	if d.Session == "" {
		p.w.cfg.Logger.Error("message on a subject that is no session's", "partition", p.n, "streamSeq", d.StreamSeq, "err", d.Err)
		return nil
	}
	if p.quarantined[d.Session] {
		return nil
	}
	if d.Err != nil {
		return p.quarantine(ctx, d.Session, d.StreamSeq, d.Err)
	}
	e, err := p.entry(ctx, d.Session, d.Commit.Format)
	if err == nil {
		err = p.foldInto(ctx, e, d.Commit)
	}
	return p.judge(ctx, d.Session, d.StreamSeq, err)
}

// judge tells trouble with the log's content, which quarantines the session, from trouble with
// JetStream, which is returned.
func (p *partition) judge(ctx context.Context, session string, streamSeq uint64, err error) error {
	var e *events.Error
	if err == nil || !errors.As(err, &e) || e.Code == events.CodeUnavailable {
		return err
	}
	return p.quarantine(ctx, session, streamSeq, err)
}

// entry returns the session's entry with its snapshot in memory.
func (p *partition) entry(ctx context.Context, session string, f events.Format) (*entry, error) {
	e := p.sessions[session]
	if e == nil {
		e = &entry{session: session}
		p.sessions[session] = e
		e.place = p.recent.PushFront(e)
	} else {
		p.recent.MoveToFront(e.place)
	}
	if e.snap != nil {
		return e, nil
	}
	p.w.stats.Loads.Add(1)
	snap, rev, err := p.w.buckets.Snapshots.Load(ctx, session, p.w.keep())
	if damaged(err) {
		p.w.cfg.Logger.Error("snapshot is damaged; folding the log anew", "session", session, "err", err)
		e.mending, err = true, nil
	}
	if err != nil {
		return nil, err
	}
	if snap == nil {
		snap = snapshot.New(session, f, p.w.keep())
	}
	e.snap, e.rev = snap, rev
	return e, nil
}

func damaged(err error) bool {
	return errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged})
}

// foldInto folds a commit into an entry, healing whatever lies between from the log. A
// snapshot that turns out to be damaged is made anew: the log is the truth.
func (p *partition) foldInto(ctx context.Context, e *entry, c *events.Commit) error {
	err := p.foldOrHeal(ctx, e, c)
	if damaged(err) {
		p.w.cfg.Logger.Error("snapshot is damaged; folding the log anew", "session", e.session, "err", err)
		e.snap, e.mending = snapshot.New(e.session, c.Format, p.w.keep()), true
		err = p.heal(ctx, e, c.StreamSeq)
	}
	return err
}

func (p *partition) foldOrHeal(ctx context.Context, e *entry, c *events.Commit) error {
	switch {
	case c.StreamSeq <= e.snap.StreamSeq:
		return nil // in the head already
	case c.First < e.snap.Next:
		// Stored behind the head, yet at a seq that the head has: the head tells of a log
		// that a power cut took away.
		p.w.cfg.Logger.Error("head is ahead of the log; folding the log anew", "session", e.session, "headSeq", int64(e.snap.Last()), "streamSeq", c.StreamSeq)
		e.snap, e.mending = snapshot.New(e.session, c.Format, p.w.keep()), true
		return p.heal(ctx, e, c.StreamSeq)
	case c.First > e.snap.Next:
		p.w.stats.Healed.Add(1)
		return p.heal(ctx, e, c.StreamSeq)
	}
	return p.foldOne(ctx, e, c)
}

// heal folds the session's log behind the entry's state, up to and including a stream sequence.
func (p *partition) heal(ctx context.Context, e *entry, upTo uint64) error {
	stop := errors.New("stop")
	err := p.w.log.ReadToEnd(ctx, e.session, e.snap.StreamSeq, func(c *events.Commit) error {
		if c.StreamSeq > upTo {
			return stop
		}
		if c.First != e.snap.Next {
			return events.Violation(events.RuleSeqNotContiguous, c.First, fmt.Sprintf("stream sequence %d: expected a commit from seq %d on, found one from %d", c.StreamSeq, e.snap.Next, c.First))
		}
		return p.foldOne(ctx, e, c)
	})
	if err == stop {
		return nil
	}
	return err
}

// foldOne folds the commit that follows the entry's state.
func (p *partition) foldOne(ctx context.Context, e *entry, c *events.Commit) error {
	next := e.snap.Next
	if err := p.foldPages(ctx, e.snap, c); err != nil {
		return err
	}
	p.w.stats.Commits.Add(1)
	p.w.stats.Events.Add(int64(e.snap.Next - next))
	if e.since.IsZero() {
		e.since, e.first = time.Now(), c.StreamSeq
		p.dirty[e] = true
	}
	e.pending += int(e.snap.Next - next)
	e.bytes += len(c.Body)
	p.unflushed += len(c.Body)
	if e.pending >= p.w.cfg.FlushEvents {
		p.flush(ctx, e)
	}
	p.relieve(ctx)
	return nil
}

// relieve holds the fold up while more waits to be written than may be in memory.
func (p *partition) relieve(ctx context.Context) {
	for p.unflushed > maxUnflushed && ctx.Err() == nil {
		p.flushDue(ctx, time.Now(), true)
		if p.unflushed <= maxUnflushed {
			return
		}
		select {
		case r := <-p.written:
			p.settle(r)
		case <-time.After(tick): // others have all the writers
		case <-ctx.Done():
		}
	}
}

// foldPages folds a commit, reading the pages that it turns out to need, and the vocabulary
// again before a type is called unknown.
func (p *partition) foldPages(ctx context.Context, snap *snapshot.Snapshot, c *events.Commit) error {
	for refreshed := false; ; {
		err := snap.Fold(c, p.w.log.Vocabulary(), nil)
		var pages *snapshot.PagesError
		switch {
		case errors.As(err, &pages):
			gone, ferr := p.w.buckets.Snapshots.FillPages(ctx, snap, pages.Pages)
			if ferr == nil && gone {
				ferr = &events.Error{Code: events.CodeSnapshotDamaged, Session: c.Session, Detail: fmt.Sprintf("snapshot: pages %v are not there", pages.Pages)}
			}
			if ferr != nil {
				return ferr
			}
		case !refreshed && errors.Is(err, &events.Error{Code: events.CodeRuleViolation, Rule: events.RuleUnknownType}):
			refreshed = true
			if _, rerr := p.w.log.RefreshVocabulary(ctx); rerr != nil {
				return rerr
			}
		default:
			return err
		}
	}
}

// flushDue flushes the sessions whose oldest event has waited long enough.
func (p *partition) flushDue(ctx context.Context, now time.Time, all bool) {
	oldest := time.Time{}
	note := func(t time.Time) {
		if !t.IsZero() && (oldest.IsZero() || t.Before(oldest)) {
			oldest = t
		}
	}
	for e := range p.dirty {
		if !e.writing && !e.since.IsZero() && (all || now.Sub(e.since) >= p.w.cfg.FlushAfter) {
			p.flush(ctx, e)
		}
		note(e.since)
		if e.writing {
			note(e.writingSince)
		}
	}
	p.oldest.Store(0)
	if !oldest.IsZero() {
		p.oldest.Store(oldest.UnixMilli())
	}
}

// flush hands the entry's snapshot to a writer, unless one has it already or all are busy.
func (p *partition) flush(ctx context.Context, e *entry) {
	if e.writing || e.snap == nil || e.since.IsZero() {
		return
	}
	select {
	case p.w.writes <- struct{}{}:
	default:
		return // as many as may be written at a time are; what waits coalesces
	}
	f, err := e.snap.Flush()
	if err != nil {
		<-p.w.writes
		p.badData(ctx, e, err)
		return
	}
	f.Overwrite, e.mending = e.mending, false
	e.writing, e.writingSince, e.writingFirst = true, e.since, e.first
	p.unflushed -= e.bytes
	e.since, e.first, e.pending, e.bytes = time.Time{}, 0, 0, 0
	p.account(e)
	rev := e.rev
	p.w.running.Add(1)
	go func() {
		defer p.w.running.Done()
		r := result{e: e, seq: f.Seq, trash: f.Unreferenced}
		r.rev, r.err = p.write(ctx, f, rev)
		<-p.w.writes
		p.written <- r
	}()
}

// write writes a flush until it is known to be written or another owner's is.
func (p *partition) write(ctx context.Context, f *snapshot.Flush, rev uint64) (uint64, error) {
	for {
		// What was folded is written even while the worker stops.
		wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		next, err := p.w.buckets.Snapshots.Write(wctx, f, rev)
		cancel()
		if err == nil || errors.Is(err, snapshot.ErrMoved) {
			return next, err
		}
		if ctx.Err() != nil {
			return 0, err // the next owner folds from the checkpoint
		}
		p.troubled(err)
		p.pause(ctx)
	}
}

// finished takes note of a write's end. Where another owner wrote the head, or our own write
// went through without an answer, the session is folded again from what the bucket and the
// log have.
func (p *partition) finished(r result) {
	if e := p.settle(r); e != nil {
		p.forget(e)
	}
}

// settle takes note of a write's end. It returns the entry, dropped, when its head was not
// written: its session's next event finds the gap and heals it.
func (p *partition) settle(r result) (lost *entry) {
	e := r.e
	e.writing = false
	e.writingSince, e.writingFirst = time.Time{}, 0
	if r.err != nil {
		p.w.stats.Moved.Add(1)
		if s := p.w.cfg.Signals.Moved; s != nil {
			s(e.session)
		}
		p.drop(e)
		return e
	}
	e.rev = r.rev
	p.w.stats.Flushes.Add(1)
	if e.since.IsZero() {
		delete(p.dirty, e)
	}
	if len(r.trash) > 0 {
		p.garbage = append(p.garbage, trash{time.Now().Add(p.w.cfg.Grace), r.trash})
	}
	p.w.heads.written(e.session, r.seq)
	if s := p.w.cfg.Signals.Flushed; s != nil {
		s(e.session, r.seq)
	}
	p.evict()
	return nil
}

// forget drops an entry and folds the session again from its head and the log, up to what
// this partition has read.
func (p *partition) forget(e *entry) {
	p.drop(e)
	ctx := context.Background()
	for {
		again, err := p.entry(ctx, e.session, events.Format3)
		if err == nil {
			if again.rev == 0 { // no head: the first commit tells the format
				again.snap = nil
				err = p.refold(ctx, again)
			} else {
				err = p.heal(ctx, again, p.read.Load())
			}
		}
		if err = p.judge(ctx, e.session, p.read.Load(), err); err == nil {
			return
		}
		p.troubled(err)
		return // the next event of the session, or the next start, finds the gap and heals it
	}
}

// refold folds a session's log from its first commit.
func (p *partition) refold(ctx context.Context, e *entry) error {
	return p.w.log.ReadToEnd(ctx, e.session, 0, func(c *events.Commit) error {
		if e.snap == nil {
			e.snap = snapshot.New(e.session, c.Format, p.w.keep())
		}
		return p.foldOne(ctx, e, c)
	})
}

func (p *partition) drop(e *entry) {
	delete(p.dirty, e)
	if p.sessions[e.session] == e {
		delete(p.sessions, e.session)
		p.recent.Remove(e.place)
	}
	p.bytes -= e.size
	p.unflushed -= e.bytes
	e.size, e.bytes = 0, 0
}

// account updates the estimate of what an entry takes.
func (p *partition) account(e *entry) {
	size := 1024
	if e.snap != nil {
		size += e.snap.Bytes() + 2*snapshot.PageTarget/4
	}
	p.bytes += size - e.size
	e.size = size
	p.count.Store(int64(len(p.sessions)))
	p.memory.Store(int64(p.bytes))
}

// evict drops the sessions that were not used for longest while memory is short.
func (p *partition) evict() {
	limit := p.w.cfg.CacheBytes / p.w.log.Partitions()
	for el := p.recent.Back(); el != nil && p.bytes > limit; {
		e := el.Value.(*entry)
		el = el.Prev()
		if !e.writing && e.since.IsZero() {
			p.drop(e)
		}
	}
	p.count.Store(int64(len(p.sessions)))
	p.memory.Store(int64(p.bytes))
}

// safe is the stream sequence up to which everything that was read is in heads.
func (p *partition) safe() uint64 {
	upTo := p.read.Load()
	for e := range p.dirty {
		if e.first > 0 && e.first <= upTo {
			upTo = e.first - 1
		}
		if e.writingFirst > 0 && e.writingFirst <= upTo {
			upTo = e.writingFirst - 1
		}
	}
	return upTo
}

func (p *partition) checkpointDue(ctx context.Context, now time.Time) {
	if now.Before(p.nextCheck) {
		return
	}
	p.nextCheck = now.Add(p.w.cfg.CheckpointEvery)
	p.writeCheckpoint(ctx)
}

func (p *partition) writeCheckpoint(ctx context.Context) {
	upTo := p.safe()
	if upTo <= p.checkpoint {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	b, err := json.Marshal(checkpointValue{1, upTo})
	if err != nil {
		panic(err) // numbers always encode
	}
	var rev uint64
	if p.checkpointRev == 0 {
		rev, err = p.w.buckets.Checkpoints.Create(ctx, p.key(), b)
	} else {
		rev, err = p.w.buckets.Checkpoints.Update(ctx, p.key(), b, p.checkpointRev)
	}
	if err != nil {
		// Another owner's, or no answer: take what is stored. It is never too far, since
		// whoever wrote it had written the heads before.
		p.troubled(fmt.Errorf("checkpoint: %w", err))
		if e, gerr := p.w.buckets.Checkpoints.Get(ctx, p.key()); gerr == nil {
			var v checkpointValue
			if json.Unmarshal(e.Value(), &v) == nil {
				p.checkpoint, p.checkpointRev = v.StreamSeq, e.Revision()
			}
		}
		return
	}
	p.checkpoint, p.checkpointRev = upTo, rev
	p.checkpointed.Store(upTo)
	if s := p.w.cfg.Signals.Checkpointed; s != nil {
		s(p.n, upTo)
	}
}

// sweep deletes pages that no head has referred to for the grace time.
func (p *partition) sweep(ctx context.Context, now time.Time) {
	for len(p.garbage) > 0 && now.After(p.garbage[0].due) {
		if err := p.w.buckets.Snapshots.Delete(ctx, p.garbage[0].keys); err != nil {
			p.troubled(err)
			return
		}
		p.garbage = p.garbage[1:]
	}
}

// drain flushes what was folded and writes the checkpoint.
func (p *partition) drain() {
	deadline := time.Now().Add(10 * time.Second)
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	for len(p.dirty) > 0 && ctx.Err() == nil {
		p.flushDue(ctx, time.Now(), true)
		select {
		case r := <-p.written:
			p.settle(r) // what is lost is the next owner's concern
		case <-time.After(tick):
		case <-ctx.Done():
		}
	}
	p.writeCheckpoint(ctx)
}

func (p *partition) status(ctx context.Context) PartitionStatus {
	st := PartitionStatus{
		Partition: p.n, Read: p.read.Load(), Checkpoint: p.checkpointed.Load(),
		Sessions: int(p.count.Load()), Bytes: int(p.memory.Load()),
	}
	if at := p.oldest.Load(); at > 0 {
		st.OldestUnflushedMs = max(1, time.Now().UnixMilli()-at)
	}
	if s := p.trouble.Load(); s != nil {
		st.Error = *s
	}
	if f := p.follower.Load(); f != nil {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		if n, err := f.Pending(ctx); err == nil {
			st.Lag = &n
		} else if st.Error == "" {
			st.Error = err.Error()
		}
	}
	return st
}
