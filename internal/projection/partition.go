package projection

import (
	"container/list"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/session"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
	"palimpsest/internal/telemetry"
)

const (
	tick       = 10 * time.Millisecond
	retryPause = 200 * time.Millisecond
	// patience is how much longer than its time a flush waits for a writer while folding goes on.
	patience = time.Second
	// deliveries is how many messages wait between the consumer and the fold.
	deliveries = 16
)

// partition is one partition at work. Everything but the atomics belongs to the goroutine in run.
type partition struct {
	w      *Worker
	b      *Buckets // of one generation
	n      int
	stream jetstream.Stream

	sessions    map[string]*entry
	recent      list.List       // of *entry: those that are not dirty, most recently used first
	bytes       int             // estimated, of all entries, without what no flush took
	unflushed   int             // estimated, of commits that no flush took
	pending     uint64          // messages that were still to be read when the last one came
	dirty       map[*entry]bool // those with something that is in no head yet
	due         list.List       // of *entry: those of dirty that wait for a flush, by since
	writing     map[*entry]bool // those of dirty that are being written
	lost        map[string]lost
	quarantined map[string]bool
	written     chan result
	retries     chan retry
	failures    chan error         // trouble with reading
	offers      chan *seat         // capacity 1; a seat at the common reader, nil for none
	asked       bool               // for one
	here        bool               // those that started with it need not wait for it; guarded by commons.mu
	unfollow    context.CancelFunc // lets go of a delivery that waits for its turn
	garbage     []trash
	done        chan struct{} // closed when run has returned
	holds       func() bool   // whether the partition's lease still lets it write

	back   bool           // the log lost its end: goBack is due
	unheld bool           // the stored checkpoint says that heads are still being compared
	conn   uint64         // how often the connection was made anew when the log was last known to have newest
	newest witness        // the message that was read last
	marks  []witness      // those before it that no checkpoint has yet
	stored *witness       // of the stored checkpoint
	head   *snapshot.Mark // the head that was written last; nil for none

	checkpoint    uint64 // as stored
	checkpointRev uint64
	nextCheck     time.Time
	nextRegain    time.Time
	nextConsider  time.Time // when to see again whether to read with others
	nextFlush     time.Time // when to look again for sessions that must be flushed

	read          atomic.Uint64 // stream sequence of the last message that was dealt with
	arrived       atomic.Uint64 // messages that the consumer handed over
	dealt         atomic.Uint64 // those of them that were dealt with
	checkpointed  atomic.Uint64
	oldest        atomic.Int64 // Unix ms, when the oldest unflushed event was read; 0 for none
	count, memory atomic.Int64
	draining      atomic.Bool   // what is written now has no tombstone read behind it
	aside         atomic.Int64  // sessions in quarantine
	behind        atomic.Uint64 // messages that were still to be read when the last one came, or when the partition asked
	seated        atomic.Bool   // it reads with others
	counted       atomic.Pointer[count]
	follower      atomic.Pointer[journal.Follower]
	trouble       atomic.Pointer[string]
}

// count is how many messages were still to be read when dealt of them had been dealt with.
type count struct {
	n, dealt uint64
	at       time.Time
}

// entry is one session in memory.
type entry struct {
	session string
	snap    *snapshot.Snapshot // nil: nothing was folded yet, and there is no head to start from
	rev     uint64             // revision of its head in the bucket; 0 when it has none
	place   *list.Element      // in recent; nil when it is not there
	waits   *list.Element      // in due; nil when it is not there
	size    int

	since   time.Time // when the oldest event that no flush took was read; zero when clean
	first   uint64    // stream sequence of the first commit that no flush took
	pending int       // events that no flush took
	bytes   int       // estimated, of their commits
	traces  telemetry.Commits

	// mending says that the log is folded anew over a damaged snapshot: to its end before
	// anything is written, so that no head goes back, and then pages are written over.
	mending bool

	writing      bool // a write is under way, or its result has not been seen
	writingSince time.Time
	writingFirst uint64

	// told is the seq up to which deltas were handed to a flush; deltas are those since, nil
	// when they are too many for one message.
	told      events.Seq
	deltas    []Delta
	deltaSeqs int  // shadowed seqs in deltas
	tooMany   bool // deltas are not all
}

// note keeps what a plan did to the surface, to be published once it is in a head.
func (e *entry) note(p *session.Plan) {
	d, ok := deltaOf(&p.Change)
	if !ok || e.tooMany {
		return
	}
	e.deltas = append(e.deltas, d)
	if e.deltaSeqs += len(d.Shadowed); len(e.deltas) > maxDeltas || e.deltaSeqs > maxDeltaSeqs {
		e.deltas, e.tooMany = nil, true
	}
}

// tell takes what was noted as the message that announces a flush.
func (e *entry) tell(f *snapshot.Flush) *deltaMessage {
	m := &deltaMessage{Session: e.session, From: e.told, To: f.Seq, StreamSeq: e.snap.StreamSeq, Digest: e.snap.Digest.String(), Deltas: e.deltas}
	if f.Overwrite { // the log was folded anew: what was told before is not what this follows on
		m.From, m.Deltas = events.NoSeq, nil
	}
	if m.Deltas == nil && !e.tooMany && !f.Overwrite {
		m.Deltas = []Delta{} // nothing of it was on the surface
	}
	e.told, e.deltas, e.deltaSeqs, e.tooMany = f.Seq, nil, 0, false
	return m
}

// result is the end of a snapshot's write.
type result struct {
	e     *entry
	rev   uint64
	seq   events.Seq
	news  *deltaMessage
	trash []string
	mark  *snapshot.Mark // of the head
	err   error
}

// lost is a session whose folded events did not get into its head. The checkpoint stays before
// them until they were folded again.
type lost struct {
	first   uint64    // stream sequence of the first commit that may be in no head
	since   time.Time // when it was read
	suspect bool      // its head may tell of commits that the log has lost
}

// errDropped says that the entry that is being folded was dropped meanwhile.
var errDropped = errors.New("the session was dropped while it was folded")

// commitError is trouble with the message at a stream sequence.
type commitError struct {
	streamSeq uint64
	err       error
}

func (e *commitError) Error() string { return e.err.Error() }
func (e *commitError) Unwrap() error { return e.err }

// trash is keys that a session's head no longer refers to, to be deleted once nobody can be reading
// them.
type trash struct {
	due     time.Time
	session string
	keys    []string
}

func newPartition(w *Worker, b *Buckets, n int, stream jetstream.Stream, quarantined map[string]bool) *partition {
	if quarantined == nil {
		quarantined = map[string]bool{}
	}
	return &partition{
		holds: func() bool { return true },
		w:     w, b: b, n: n, stream: stream, sessions: map[string]*entry{}, dirty: map[*entry]bool{}, writing: map[*entry]bool{}, lost: map[string]lost{}, quarantined: quarantined,
		written: make(chan result, w.cfg.Writes), retries: make(chan retry), done: make(chan struct{}), failures: make(chan error, 1), offers: make(chan *seat, 1),
	}
}

type checkpointValue struct {
	V         int            `json:"v"`
	StreamSeq uint64         `json:"streamSeq"`
	Witness   *witness       `json:"witness,omitempty"` // a message that was read by then
	Head      *snapshot.Mark `json:"head,omitempty"`    // the head that was written last
	Back      bool           `json:"back,omitempty"`    // heads are still being compared with the log, since that or their bucket lost its end
}

func (p *partition) key() string { return p.b.checkpointKey(p.n) }

// readCheckpoint reads how far the partition is projected. end is where the stream ends: a
// checkpoint beyond it is that of a stream which lost its end, and what was stored there since
// is new.
func (p *partition) readCheckpoint(ctx context.Context, end uint64) error {
	e, err := p.b.Checkpoints.Get(ctx, p.key())
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
	p.checkpoint, p.checkpointRev, p.stored = v.StreamSeq, e.Revision(), v.Witness
	gone, err := p.gone(ctx, v.Witness)
	if err != nil {
		return err
	}
	if gone || v.Back || v.StreamSeq > end {
		p.w.cfg.Logger.Error("the log lost its end; comparing all heads of the partition with it", "partition", p.n, "checkpoint", v.StreamSeq, "end", end)
		p.back = true
		return nil
	}
	if lost, err := p.b.Snapshots.Lost(ctx, v.Head); err != nil {
		return err
	} else if lost {
		p.headsLost()
		return nil
	}
	p.head = v.Head
	p.read.Store(p.checkpoint)
	p.checkpointed.Store(p.checkpoint)
	if v.Witness != nil { // until there is something newer, this tells whether the log loses its end
		p.newest = *v.Witness
	}
	return nil
}

// run works the partition until ctx ends, and then drains it, unless its lease was lost.
func (p *partition) run(ctx context.Context) {
	defer close(p.done)
	p.w.working.Add(1)
	defer func() {
		p.keeps(-p.bytes)
		p.owes(-p.unflushed)
		p.w.working.Add(-1)
	}()
	p.w.commons.enter(p)
	defer p.w.commons.forget(p)
	in := make(chan journal.Delivery, deliveries)
	var follower *journal.Follower // where messages come from: its own consumer
	var at *seat                   // or the common reader
	var taken []journal.Delivery
	stop := func() {
		if follower != nil {
			p.unfollow()
			follower.Stop()
			follower = nil
			p.follower.Store(nil)
			for len(in) > 0 { // read again from wherever the partition reads on
				<-in
			}
			p.dealt.Store(p.arrived.Load())
		}
		if at != nil {
			at.leave()
			at = nil
			p.together(false)
		}
		p.pending = 0
		p.behind.Store(0)
	}
	defer stop()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	waits := false // for an offer
	for {
		var news <-chan struct{}
		if at != nil {
			news = at.news
		}
		select {
		case d := <-in:
			p.deliver(ctx, d)
			for range len(in) { // take what is there before looking at the clock
				p.deliver(ctx, <-in)
			}
		case <-news:
			var over bool
			if taken, over = p.takeSome(ctx, at, taken); over {
				stop()
			}
		case s := <-p.offers:
			waits = false
			if s != nil {
				stop()
				at = p.sit(s)
			}
		case r := <-p.written:
			p.settle(r)
			p.nextFlush = time.Time{} // a writer is free
		case r := <-p.retries:
			r.done <- p.retry(ctx, r.session)
		case err := <-p.failures:
			p.troubled(err)
		case <-ticker.C:
			if at != nil {
				at.wake() // others' messages pass without a word
			}
		case <-ctx.Done():
			if at != nil { // others must not wait for what is not dealt with any more
				stop()
			}
			p.w.commons.came(p)
			if p.holds() {
				p.drain()
			}
			return
		}
		if p.back && ctx.Err() == nil {
			stop()
			if err := p.goBack(ctx); err != nil {
				p.troubled(err)
				p.pause(ctx)
				continue
			}
		}
		if !p.asked && ctx.Err() == nil {
			waits = p.ask(ctx)
		}
		if follower == nil && at == nil && !waits && ctx.Err() == nil {
			follower = p.follow(ctx, in)
		}
		now := time.Now()
		if follower != nil && p.pending > uint64(p.w.cfg.CatchUpFrom/p.w.log.Partitions()) && now.After(p.nextConsider) {
			p.nextConsider = now.Add(p.w.cfg.CatchUpEvery)
			p.w.commons.consider(ctx)
		}
		p.regain(ctx, now)
		p.evict()                                       // other partitions may have joined
		if now = time.Now(); !now.Before(p.nextFlush) { // looking takes longer than folding a commit
			p.nextFlush = now.Add(tick / 2)
			p.flushDue(ctx, now, false)
		}
		p.checkpointDue(ctx, now)
		p.sweep(ctx, now)
	}
}

// ask asks for a place at the common reader, and reports whether an answer will come.
func (p *partition) ask(ctx context.Context) bool {
	p.asked = true
	defer p.w.commons.came(p)
	waits, err := p.w.commons.ask(ctx, p)
	if err != nil && ctx.Err() == nil {
		p.troubled(err) // and the partition reads for itself
	}
	return waits
}

// follow starts reading behind what was dealt with; nil when JetStream is away.
func (p *partition) follow(ctx context.Context, in chan<- journal.Delivery) *journal.Follower {
	ctx, p.unfollow = context.WithCancel(ctx)
	f, err := p.w.log.Follow(ctx, p.n, p.read.Load(), p.w.cfg.Pull, func(d journal.Delivery) {
		p.arrived.Add(1)
		select {
		case in <- d:
		case <-ctx.Done():
		}
	}, p.fail)
	if err != nil {
		if ctx.Err() == nil {
			p.troubled(err)
			p.pause(ctx)
		}
		p.unfollow()
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
	defer p.dealt.Add(1)
	p.pending = d.Pending
	p.behind.Store(d.Pending)
	for {
		follows, err := p.look(ctx, d.Conn)
		if follows {
			break
		}
		if err == nil || ctx.Err() != nil {
			return // what was read is no more, and the log is read again
		}
		p.troubled(err)
		p.pause(ctx)
	}
	if d.StreamSeq <= p.read.Load() { // again, after a reconnect
		return
	}
	defer func() {
		if p.read.Load() == d.StreamSeq {
			p.newest = witness{d.StreamSeq, d.ID}
		}
	}()
	for ctx.Err() == nil {
		err := p.fold(ctx, d)
		if err == nil {
			p.trouble.Store(nil)
			p.read.Store(d.StreamSeq)
			return
		}
		if errors.Is(err, errDropped) {
			continue // it is loaded again
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
	if p.lost[d.Session].suspect { // its head must not be folded on before it was held against the log
		if err := p.catchUp(ctx, d.Session); err != nil {
			return err
		}
		delete(p.lost, d.Session)
	}
	if p.quarantined[d.Session] {
		return nil
	}
	if d.Err != nil {
		return p.quarantine(ctx, d.Session, d.StreamSeq, d.Err)
	}
	e, err := p.entry(ctx, d.Session)
	if err == nil {
		err = p.foldInto(ctx, e, d.Commit)
	}
	return p.judge(ctx, e, d.StreamSeq, err)
}

// temporary tells trouble with JetStream from trouble with what the log holds.
func temporary(err error) bool {
	var e *events.Error
	return err != nil && (!errors.As(err, &e) || e.Code == events.CodeUnavailable)
}

// judge deals with the end of a fold: trouble with the log's content quarantines the session,
// trouble with JetStream is returned. The latter may come in the midst of a commit, so the
// entry is dropped and the session loaded again.
func (p *partition) judge(ctx context.Context, e *entry, streamSeq uint64, err error) error {
	switch {
	case err == nil:
		return nil
	case temporary(err):
		p.lose(e)
		return err
	}
	var bad *commitError
	if errors.As(err, &bad) {
		streamSeq = bad.streamSeq
	}
	p.lose(e)
	return p.quarantine(ctx, e.session, streamSeq, err)
}

// entry returns the session's entry, loaded from its head when it is not in memory. An entry
// is returned with an error too.
func (p *partition) entry(ctx context.Context, session string) (*entry, error) {
	e := p.sessions[session]
	if e != nil {
		if e.place != nil {
			p.recent.MoveToFront(e.place)
		}
		return e, nil
	}
	e = &entry{session: session, told: events.NoSeq}
	p.w.stats.Loads.Add(1)
	snap, rev, err := p.b.Snapshots.Load(ctx, session, p.w.keep())
	if damaged(err) {
		p.w.cfg.Logger.Error("snapshot is damaged; folding the log anew", "session", session, "err", err)
		e.mending, err = true, nil
	}
	if err != nil {
		return e, err
	}
	e.snap, e.rev = snap, rev
	if snap != nil {
		e.told = snap.Last()
	}
	p.sessions[session] = e
	e.place = p.recent.PushFront(e)
	p.account(e)
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
		return p.mend(ctx, e)
	}
	return err
}

// mend folds a session's log anew, from its first commit to where it ends now.
func (p *partition) mend(ctx context.Context, e *entry) error {
	e.snap, e.mending = nil, true
	upTo, err := endOf(ctx, p.w.log, e.session)
	if err != nil {
		return err
	}
	return p.heal(ctx, e, upTo)
}

// endOf is the stream sequence of the last message of a session's log, 0 when there is none.
// Whoever reads up to there comes to an end, however fast others append.
func endOf(ctx context.Context, j *journal.Journal, session string) (uint64, error) {
	last, err := j.LeaderLast(ctx, session)
	var bad *journal.MalformedError
	switch {
	case errors.As(err, &bad):
		return bad.StreamSeq, nil
	case err != nil || last == nil:
		return 0, err
	}
	return last.StreamSeq, nil
}

func (p *partition) foldOrHeal(ctx context.Context, e *entry, c *events.Commit) error {
	if e.snap == nil {
		if e.mending {
			return p.mend(ctx, e)
		}
		e.snap = snapshot.New(e.session, c.Format, p.w.keep())
	}
	switch last := e.snap.Last(); {
	case c.StreamSeq <= e.snap.StreamSeq && (c.Last < last || c.Last == last && c.Digest == e.snap.Digest):
		return nil // in the head already
	case c.StreamSeq <= e.snap.StreamSeq, c.First < e.snap.Next:
		// Behind the head in one count and before it in the other: the head tells of a log
		// that a power cut took away.
		p.w.cfg.Logger.Error("head is ahead of the log; folding the log anew", "session", e.session, "headSeq", int64(last), "streamSeq", c.StreamSeq)
		return p.mend(ctx, e)
	case c.First > e.snap.Next:
		p.w.stats.Healed.Add(1)
		return p.heal(ctx, e, c.StreamSeq)
	}
	return p.foldOne(ctx, e, c)
}

// heal folds the session's log behind the entry's state, up to and including a stream sequence.
func (p *partition) heal(ctx context.Context, e *entry, upTo uint64) error {
	stop := errors.New("stop")
	var after uint64
	if e.snap != nil {
		after = e.snap.StreamSeq
	}
	err := p.w.log.ReadToEnd(ctx, e.session, after, func(c *events.Commit) error {
		if c.StreamSeq > upTo {
			return stop
		}
		if e.snap == nil {
			e.snap = snapshot.New(e.session, c.Format, p.w.keep())
		}
		if c.First != e.snap.Next {
			return notNext(c, e.snap.Next)
		}
		if err := p.foldOne(ctx, e, c); err != nil {
			return err
		}
		if c.StreamSeq == upTo {
			return stop
		}
		return nil
	})
	if err == stop {
		return nil
	}
	return atMessage(err)
}

// notNext is the error of a commit that does not follow what was folded.
func notNext(c *events.Commit, next events.Seq) error {
	e := journal.NotNext(c, next)
	e.Code = events.CodeSeqConflict // as when the fold finds it within a commit
	return &commitError{c.StreamSeq, e}
}

// atMessage gives the error of a message that is no commit its place.
func atMessage(err error) error {
	var m *journal.MalformedError
	if errors.As(err, &m) {
		return &commitError{m.StreamSeq, m}
	}
	return err
}

// foldOne folds the commit that follows the entry's state.
func (p *partition) foldOne(ctx context.Context, e *entry, c *events.Commit) error {
	next := e.snap.Next
	if err := p.foldPages(ctx, e.snap, c, e.note, func() error { return p.awaitWrite(ctx, e) }); err != nil {
		return &commitError{c.StreamSeq, err}
	}
	p.w.stats.Commits.Add(1)
	p.w.stats.Events.Add(int64(e.snap.Next - next))
	if e.since.IsZero() {
		e.since, e.first = time.Now(), c.StreamSeq
		p.dirty[e] = true
		p.unplace(e)
		p.wait(e)
		p.oldest.CompareAndSwap(0, e.since.UnixMilli())
	}
	e.pending += int(e.snap.Next - next)
	size := journal.Held(c) + int(e.snap.Next-next)*eventMemory
	e.bytes += size
	p.owes(size)
	p.account(e)
	p.w.cfg.Telemetry.Note(&e.traces, c)
	if e.mending {
		return nil // a head at less than the log's end would go back
	}
	if e.pending >= p.w.cfg.FlushEvents {
		p.flush(ctx, e)
	}
	p.relieve(ctx, e)
	if p.sessions[e.session] != e {
		return errDropped
	}
	return nil
}

// eventMemory is about what an event takes in memory beside its line.
const eventMemory = int(unsafe.Sizeof(surface.Node{}) + unsafe.Sizeof(surface.Body{}))

// relieve holds the fold up while more is in memory than may be: what was not written yet, and
// what is kept between events. The oldest of the former are written first. e is the entry that is
// being folded.
func (p *partition) relieve(ctx context.Context, e *entry) {
	for ctx.Err() == nil {
		p.evict()
		if !p.overdue() && !p.over(e.size) {
			return
		}
		if p.due.Len()+len(p.writing) == 0 { // what is left cannot be dropped
			return
		}
		p.awaitWriter(ctx)
	}
}

// awaitWriter flushes the entry that has waited longest, once it is this partition's turn to have a
// writer, or takes note of the end of a write.
func (p *partition) awaitWriter(ctx context.Context) {
	var writer chan<- struct{}
	if p.due.Len() > 0 {
		writer = p.w.writes
	}
	select {
	case writer <- struct{}{}:
		p.flushWith(ctx, p.due.Front().Value.(*entry))
	case r := <-p.written:
		p.settle(r)
	case <-ctx.Done():
	}
}

// awaitWrite returns once no write of an entry is under way: before that its newest pages
// cannot be read back.
func (p *partition) awaitWrite(ctx context.Context, e *entry) error {
	for e.writing {
		select {
		case r := <-p.written:
			p.settle(r)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if p.sessions[e.session] != e {
		return errDropped
	}
	return nil
}

// foldPages folds a commit, reading the pages that it turns out to need. ready is called before
// they are read.
func (p *partition) foldPages(ctx context.Context, snap *snapshot.Snapshot, c *events.Commit, each func(*session.Plan), ready func() error) error {
	for {
		err := known(ctx, p.w.log, func(v *events.Vocabulary) error { return snap.Fold(c, v, each) })
		var pages *snapshot.PagesError
		if !errors.As(err, &pages) {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := ready(); err != nil {
			return err
		}
		gone, err := p.b.Snapshots.FillPages(ctx, snap, pages.Pages)
		if err == nil && gone {
			err = &events.Error{Code: events.CodeSnapshotDamaged, Session: c.Session, Detail: fmt.Sprintf("snapshot: pages %v are not there", pages.Pages)}
		}
		if err != nil {
			return err
		}
	}
}

// known calls f with the vocabulary, and again with what other processes added meanwhile when
// it calls a type unknown.
func known(ctx context.Context, j *journal.Journal, f func(*events.Vocabulary) error) error {
	err := f(j.Vocabulary())
	if !errors.Is(err, &events.Error{Code: events.CodeRuleViolation, Rule: events.RuleUnknownType}) {
		return err
	}
	if _, rerr := j.RefreshVocabulary(ctx); rerr != nil {
		return rerr
	}
	return f(j.Vocabulary())
}

// wait puts an entry that has something to be written among those that wait for it.
func (p *partition) wait(e *entry) {
	at := p.due.Back()
	for at != nil && at.Value.(*entry).since.After(e.since) {
		at = at.Prev()
	}
	switch {
	case e.writing || e.waits != nil: // comes in once it is written
	case at == nil:
		e.waits = p.due.PushFront(e)
	default:
		e.waits = p.due.InsertAfter(e, at)
	}
}

// unwait takes it out.
func (p *partition) unwait(e *entry) {
	if e.waits != nil {
		p.due.Remove(e.waits)
		e.waits = nil
	}
}

// flushDue flushes the sessions whose oldest event has waited long enough, the oldest first, as
// long as there are writers. When one has waited much longer for a writer than it should, nothing is
// folded before it has one: other partitions would have them all for ever.
func (p *partition) flushDue(ctx context.Context, now time.Time, all bool) {
	for at := p.due.Front(); at != nil; at = p.due.Front() {
		e := at.Value.(*entry)
		age, due := now.Sub(e.since), p.flushAfter()
		if !all && age < due {
			break
		}
		if p.flush(ctx, e) {
			continue
		}
		if all || age < due+patience || ctx.Err() != nil {
			break
		}
		p.awaitWriter(ctx)
	}
	oldest := time.Time{}
	note := func(t time.Time) {
		if !t.IsZero() && (oldest.IsZero() || t.Before(oldest)) {
			oldest = t
		}
	}
	if at := p.due.Front(); at != nil {
		note(at.Value.(*entry).since)
	}
	for e := range p.writing {
		note(e.writingSince)
	}
	for _, l := range p.lost {
		note(l.since)
	}
	if oldest.IsZero() {
		p.oldest.Store(0)
	} else {
		p.oldest.Store(oldest.UnixMilli())
	}
}

// flush hands the entry's snapshot to a writer, unless one has it already. It reports false when
// all writers are busy: what waits coalesces.
func (p *partition) flush(ctx context.Context, e *entry) bool {
	if e.waits == nil {
		return true
	}
	select {
	case p.w.writes <- struct{}{}:
		p.flushWith(ctx, e)
		return true
	default:
		return false
	}
}

// flushWith is flush for who has a writer, for an entry that waits.
func (p *partition) flushWith(ctx context.Context, e *entry) {
	p.unwait(e)
	f, err := e.snap.Flush()
	if err != nil {
		<-p.w.writes
		p.badData(ctx, e, err)
		return
	}
	if f.Overwrite, e.mending = e.mending, false; f.Overwrite {
		p.spare(e.session)
	}
	e.writing, e.writingSince, e.writingFirst = true, e.since, e.first
	p.writing[e] = true
	p.owes(-e.bytes)
	e.since, e.first, e.pending, e.bytes = time.Time{}, 0, 0, 0
	p.account(e)
	rev, news := e.rev, e.tell(f)
	traced := p.w.cfg.Telemetry.Flush(ctx, e.session, f.Seq, &e.traces)
	p.w.running.Add(1)
	go func() {
		defer p.w.running.Done()
		r := result{e: e, seq: f.Seq, news: news, trash: f.Unreferenced}
		if r.rev, r.err = p.write(ctx, f, rev); r.err == nil {
			r.mark = f.Mark(r.rev)
		}
		p.takeBack(ctx, e.session)
		traced(r.err)
		<-p.w.writes
		p.tell(r)
	}()
}

// tell hands the outcome of a write to the fold. One that has ended, because its lease did, takes
// none any more: the next owner goes by what is stored.
func (p *partition) tell(r result) {
	select {
	case p.written <- r:
	case <-p.done:
	}
}

// write writes a flush until it is known to be written or another owner's is.
func (p *partition) write(ctx context.Context, f *snapshot.Flush, rev uint64) (uint64, error) {
	for {
		if !p.holds() {
			return 0, errLost // another owner folds it
		}
		// What was folded is written even while the worker stops.
		wctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		next, err := p.b.Snapshots.Write(wctx, f, rev)
		cancel()
		if err == nil {
			p.w.stats.wrote(f)
		}
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

// settle takes note of a write's end. Where another owner wrote the head, or our own write
// went through without an answer, the session is lost for now.
func (p *partition) settle(r result) {
	e := r.e
	if r.err != nil {
		if errors.Is(r.err, snapshot.ErrMoved) {
			p.w.stats.Moved.Add(1)
			p.w.stats.Stale.Add(1)
			if s := p.w.cfg.Signals.Moved; s != nil {
				s(e.session)
			}
		} else {
			p.troubled(r.err)
		}
		p.lose(e)
		e.writing = false
		return
	}
	e.writing = false
	delete(p.writing, e)
	e.writingSince, e.writingFirst = time.Time{}, 0
	e.rev = r.rev
	p.wroteHead(r.mark)
	p.w.stats.Flushes.Add(1)
	p.trouble.Store(nil)
	switch {
	case !p.dirty[e]: // it was dropped
	case e.since.IsZero():
		delete(p.dirty, e)
		e.place = p.recent.PushFront(e)
	default:
		p.wait(e)
	}
	p.tellWritten(e.session, r.seq, r.trash)
	p.publish(r.news)
	p.evict()
}

// publish announces a flush to those who watch the session. It is core NATS: who misses it
// reads the log.
func (p *partition) publish(m *deltaMessage) {
	if p.w.cfg.Quiet {
		return
	}
	b, err := json.Marshal(m)
	if err != nil {
		panic(err) // seqs and names of types always encode
	}
	if err := p.w.log.JetStream().Conn().Publish(DeltaSubject(m.Session), b); err != nil {
		p.troubled(err)
	}
}

// tellWritten tells of a head that was written, and puts what it no longer refers to aside.
func (p *partition) tellWritten(session string, seq events.Seq, keys []string) {
	if len(keys) > 0 {
		p.garbage = append(p.garbage, trash{time.Now().Add(p.w.cfg.Grace), session, keys})
	}
	p.w.heads.written(session, seq)
	if s := p.w.cfg.Signals.Flushed; s != nil {
		s(session, seq)
	}
}

// lose drops an entry and notes what of it may be in no head.
func (p *partition) lose(e *entry) {
	l := lost{first: e.first, since: e.since}
	if e.writingFirst > 0 {
		l = lost{first: e.writingFirst, since: e.writingSince}
	}
	p.drop(e)
	if old, ok := p.lost[e.session]; l.first > 0 && (!ok || l.first < old.first) {
		l.suspect = old.suspect
		p.lost[e.session] = l
	}
}

// regain folds the lost sessions again from their heads and the log.
func (p *partition) regain(ctx context.Context, now time.Time) {
	if now.Before(p.nextRegain) {
		return
	}
	n := 0
	for session := range p.lost {
		if n++; n > regainAtOnce {
			return
		}
		if err := p.catchUp(ctx, session); err != nil {
			p.troubled(err)
			p.nextRegain = now.Add(retryPause)
			return
		}
		delete(p.lost, session)
	}
}

// catchUp folds a session up to what this partition has read.
func (p *partition) catchUp(ctx context.Context, session string) error {
	if p.quarantined[session] {
		return nil
	}
	e, err := p.entry(ctx, session)
	if err == nil && p.lost[session].suspect {
		err = p.hold(ctx, e)
	}
	switch upTo := p.read.Load(); {
	case errors.Is(err, errDropped): // there is nothing of it
		return nil
	case err != nil:
	case e.mending && e.snap == nil:
		err = p.mend(ctx, e)
	default:
		err = p.heal(ctx, e, upTo)
		if damaged(err) {
			err = p.mend(ctx, e)
		}
	}
	return p.judge(ctx, e, p.read.Load(), err)
}

func (p *partition) drop(e *entry) {
	delete(p.dirty, e)
	delete(p.writing, e)
	p.unwait(e)
	if p.sessions[e.session] == e {
		delete(p.sessions, e.session)
	}
	p.unplace(e)
	p.keeps(-e.size)
	p.owes(-e.bytes)
	e.size, e.bytes = 0, 0
}

// unplace takes an entry out of those that may be dropped.
func (p *partition) unplace(e *entry) {
	if e.place != nil {
		p.recent.Remove(e.place)
		e.place = nil
	}
}

// keeps counts what entries take.
func (p *partition) keeps(n int) {
	p.bytes += n
	p.w.kept.Add(int64(n))
}

// owes counts what is in no head yet.
func (p *partition) owes(n int) {
	p.unflushed += n
	p.w.owed.Add(int64(n))
}

// over says whether all partitions keep more than they may and this one more than its share; but for
// n bytes, which are not to be held against it.
func (p *partition) over(n int) bool {
	return p.w.kept.Load() > int64(p.w.cfg.CacheBytes) && p.bytes-n > p.w.portion(p.w.cfg.CacheBytes)
}

// overdue is the same for what is in no head yet.
func (p *partition) overdue() bool {
	return p.w.owed.Load() > int64(p.w.cfg.UnflushedBytes) && p.unflushed > p.w.portion(p.w.cfg.UnflushedBytes)
}

// account updates the estimate of what an entry takes.
func (p *partition) account(e *entry) {
	size := 1024 + len(e.deltas)*int(unsafe.Sizeof(Delta{})) + e.deltaSeqs*8
	if e.snap != nil {
		size += e.snap.Bytes()
	}
	p.keeps(size - e.size)
	e.size = size
	p.count.Store(int64(len(p.sessions)))
	p.memory.Store(int64(p.bytes + p.unflushed))
}

// evict drops the sessions that were not used for longest while memory is short. The one that was
// used last stays, however large: the next event is likely to be its.
func (p *partition) evict() {
	for p.recent.Len() > 1 && p.over(0) {
		p.drop(p.recent.Back().Value.(*entry))
	}
	p.count.Store(int64(len(p.sessions)))
	p.memory.Store(int64(p.bytes + p.unflushed))
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
	for _, l := range p.lost {
		upTo = min(upTo, l.first-1)
	}
	return upTo
}

func (p *partition) checkpointDue(ctx context.Context, now time.Time) {
	if now.Before(p.nextCheck) && !p.caughtUp(now) {
		return
	}
	p.nextCheck = now.Add(p.w.cfg.CheckpointEvery)
	if _, err := p.look(ctx, p.w.log.Reconnects()); err != nil {
		p.troubled(err) // and asked again
	}
	p.mark()
	p.writeCheckpoint(ctx)
}

func (p *partition) writeCheckpoint(ctx context.Context) {
	upTo := p.safe()
	if !p.holds() || upTo <= p.checkpoint && !(p.unheld && len(p.lost) == 0 && upTo == p.checkpoint) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	if err := p.storeCheckpoint(ctx, checkpointValue{V: 1, StreamSeq: upTo, Witness: p.witnessFor(upTo), Head: p.head}); err != nil {
		// Another owner's, or no answer: take what is stored. It is never too far, since
		// whoever wrote it had written the heads before.
		if journal.WrongRevision(err) {
			p.w.stats.Stale.Add(1)
			p.w.cfg.Logger.Info("projection: another owner wrote the checkpoint; going on from that", "partition", p.n)
		} else {
			p.troubled(fmt.Errorf("checkpoint: %w", err))
		}
		if p.takeCheckpoint(ctx); !p.unheld {
			p.checkpointed.Store(p.checkpoint)
		}
		return
	}
	p.checkpointed.Store(upTo)
	if s := p.w.cfg.Signals.Checkpointed; s != nil {
		s(p.n, upTo)
	}
}

// takeCheckpoint takes the checkpoint that is stored, where another owner may have written it.
func (p *partition) takeCheckpoint(ctx context.Context) {
	e, err := p.b.Checkpoints.Get(ctx, p.key())
	if err != nil {
		return // and tried again with the next write
	}
	var v checkpointValue
	if json.Unmarshal(e.Value(), &v) == nil {
		p.checkpoint, p.checkpointRev, p.stored, p.unheld = v.StreamSeq, e.Revision(), v.Witness, v.Back
	}
}

func (p *partition) storeCheckpoint(ctx context.Context, v checkpointValue) error {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // numbers and strings always encode
	}
	var rev uint64
	if p.checkpointRev == 0 {
		rev, err = p.b.Checkpoints.Create(ctx, p.key(), b)
	} else {
		rev, err = p.b.Checkpoints.Update(ctx, p.key(), b, p.checkpointRev)
	}
	if err == nil {
		p.checkpoint, p.checkpointRev, p.stored, p.unheld = v.StreamSeq, rev, v.Witness, v.Back
	}
	return err
}

// sweep deletes pages that no head has referred to for the grace time. The head is looked at first: a
// power cut may have brought one back that does.
func (p *partition) sweep(ctx context.Context, now time.Time) {
	for len(p.garbage) > 0 && now.After(p.garbage[0].due) && p.holds() {
		t := p.garbage[0]
		keys, err := p.b.Snapshots.Unreferenced(ctx, t.session, t.keys)
		if err == nil {
			err = p.b.Snapshots.Delete(ctx, keys)
		}
		if err != nil {
			p.troubled(err)
			return
		}
		p.garbage = p.garbage[1:]
	}
}

// spare forgets what was put aside of a session whose log was folded anew: its pages are numbered anew
// with it, and are being written.
func (p *partition) spare(session string) {
	p.garbage = slices.DeleteFunc(p.garbage, func(t trash) bool { return t.session == session })
}

// drain flushes what was folded and writes the checkpoint.
func (p *partition) drain() {
	p.draining.Store(true)
	deadline := time.Now().Add(10 * time.Second)
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	for len(p.dirty) > 0 && ctx.Err() == nil && p.holds() {
		p.flushDue(ctx, time.Now(), true)
		select {
		case r := <-p.written:
			p.settle(r) // what is lost is the next owner's concern, from the checkpoint on
		case <-time.After(tick):
		case <-ctx.Done():
		}
	}
	p.writeCheckpoint(ctx)
}

func (p *partition) status(ctx context.Context) PartitionStatus {
	st := PartitionStatus{Partition: p.n, Read: p.read.Load()}
	if f := p.follower.Load(); f != nil || p.seated.Load() {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		n, err := p.lag(ctx, f, st.Read)
		if err == nil {
			st.Lag = &n
		} else {
			st.Error = err.Error()
		}
	}
	// Behind the lag: what was read by then is in heads, or shows here.
	if at := p.oldest.Load(); at > 0 {
		st.OldestUnflushedMs = max(1, time.Now().UnixMilli()-at)
	}
	st.Checkpoint, st.Sessions, st.Bytes = p.checkpointed.Load(), int(p.count.Load()), int(p.memory.Load())
	if st.Lag != nil && *st.Lag == 0 && st.OldestUnflushedMs == 0 && st.Checkpoint >= st.Read {
		p.trouble.Store(nil) // whatever it was, nothing is left of it
	}
	if s := p.trouble.Load(); s != nil {
		st.Error = *s
	}
	return st
}

// lag is how many messages of the partition lie behind what was read: those that the consumer
// has not delivered, and those that wait here. Neither sees what is under way from the one to
// the other, so 0 is said only when the stream has nothing.
func (p *partition) lag(ctx context.Context, f *journal.Follower, read uint64) (uint64, error) {
	dealt := p.dealt.Load() // first, so that what arrives meanwhile counts
	if f == nil {
		return p.lagTogether(ctx, dealt, read)
	}
	n, err := f.Pending(ctx)
	if err != nil {
		return 0, err
	}
	if n += p.arrived.Load() - dealt; n > 0 {
		return n, nil
	}
	filter := fmt.Sprintf("%s.%d.*", p.w.log.Config().Prefix, p.n)
	_, err = p.stream.GetMsg(ctx, read+1, jetstream.WithGetMsgSubject(filter))
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return 0, nil
	case err != nil:
		return 0, err
	}
	return 1, nil
}

// countEvery is how often the messages that are still to be read are counted anew while the partition
// reads with others.
const countEvery = 10 * time.Second

// lagTogether is lag while the partition reads with others, and no consumer counts for it alone: what
// was counted a moment ago, less what was dealt with since. What came since is counted with the next.
func (p *partition) lagTogether(ctx context.Context, dealt, read uint64) (uint64, error) {
	if c := p.counted.Load(); c != nil && time.Since(c.at) < countEvery && c.n > dealt-c.dealt {
		return c.n - (dealt - c.dealt), nil
	}
	n, err := p.w.log.Behind(ctx, p.n, read)
	if err == nil {
		p.counted.Store(&count{n: n, dealt: dealt, at: time.Now()})
	}
	return n, err
}
