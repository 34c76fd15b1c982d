// Package projection owns the read side: workers that read the log's partitions in order, fold
// them and write heads and pages, and the reader that serves what was derived. It knows
// nothing of HTTP.
package projection

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
	"palimpsest/internal/telemetry"
)

// Config is how a worker projects.
type Config struct {
	// ID names the worker among those that share the partitions: 1 to 128 characters of
	// [A-Za-z0-9_-]. Defaults to host, pid and something random.
	ID string
	// Lease is how long a worker that is gone keeps its partitions: whole seconds, 2 s and more.
	// It is renewed three times as often, and every 2 s at the latest. Defaults to 3 s, and to
	// 10 s when Replicas or those of the stream are above 1, since the election of a leader
	// takes 6 s and more.
	Lease time.Duration
	// Unleased has the worker work its partitions without asking anybody. Several workers may
	// have the same ones: each folds everything, and writes of heads are refused to all but one.
	// Defaults to false.
	Unleased bool
	// Partitions are those that an unleased worker works. Defaults to all.
	Partitions []int
	// FlushAfter is the longest that a folded event waits to be in a head. Defaults to 50 ms.
	FlushAfter time.Duration
	// FlushBehind is the same while more than a thousand commits of the partition are still to be
	// read: what is folded then is old already, and more of it comes into each head that is
	// written. While more than 64,000 are, of all that are read together, it is ten times as long.
	// Defaults to 1 s, and never to less than FlushAfter.
	FlushBehind time.Duration
	// FlushEvents is how many folded events of one session are flushed at once at the latest.
	// Defaults to 256.
	FlushEvents int
	// Writes is how many snapshots are written at the same time. Defaults to 12.
	Writes int
	// CheckpointEvery is how often a partition's checkpoint is written; a fifth of it when the
	// partition has just caught up with much. Defaults to 500 ms.
	CheckpointEvery time.Duration
	// Pull is how many messages of a partition are asked for at a time, at most: never more bytes
	// than the largest message may have. Defaults to 256.
	Pull int
	// CatchUpBytes bounds the messages that the common reader of partitions that are far behind holds
	// for them, by the size of their bodies; as many bytes as the largest message has are under way to
	// it besides. Less than the largest message is as much as it. A negative number: each partition
	// always reads for itself. Defaults to 32 MiB.
	CatchUpBytes int
	// CatchUpFrom is how many messages lie behind the partitions that begin to read together, at the
	// least; they part when a sixty-fourth of it is left. Defaults to 4,096.
	CatchUpFrom int
	// CatchUpEvery is how often a partition that fell behind while it reads for itself looks whether to
	// read together with others. Defaults to 2 s.
	CatchUpEvery time.Duration
	// CacheBytes bounds the memory of sessions that are kept between events, over all partitions
	// of the worker: when they keep more, those that have more than their share drop what was not
	// used for longest. The session of a partition that was used last is kept whatever it takes.
	// Defaults to 512 MiB.
	CacheBytes int
	// UnflushedBytes bounds the memory of what was read and is in no head yet, likewise: reading
	// waits for the writes meanwhile. A commit is never refused for its size. Defaults to 128 MiB.
	UnflushedBytes int
	// Grace is how long pages that no head refers to stay readable. Defaults to 30 s.
	Grace time.Duration
	// Replicas of the buckets when they are created. Defaults to 1.
	Replicas int
	// Freeze checks events that are held in memory against what was read before they are
	// served. Defaults to false.
	Freeze bool
	// Quiet announces no flushes to those who watch: for snapshots that do not serve.
	Quiet bool
	// Telemetry makes spans of flushes. Defaults to nil: none.
	Telemetry *telemetry.Telemetry
	// Logger hears of trouble. Defaults to slog.Default().
	Logger *slog.Logger
	// Signals lets a test wait for things to happen. All are nil in production.
	Signals Signals
}

// Signals are called at points of a worker's work.
type Signals struct {
	Flushed      func(session string, seq events.Seq) // a head was written
	Checkpointed func(partition int, streamSeq uint64)
	Quarantined  func(Quarantine)
	Moved        func(session string)          // a head write was refused
	Together     func(partition int, yes bool) // the partition begins to read with others, or reads for itself again
	Read         func(streamSeq uint64)        // the common reader has a message, before it hands it on
}

func (c Config) withDefaults() Config {
	if c.FlushAfter == 0 {
		c.FlushAfter = 50 * time.Millisecond
	}
	if c.FlushBehind == 0 {
		c.FlushBehind = max(time.Second, c.FlushAfter)
	}
	if c.FlushEvents == 0 {
		c.FlushEvents = 256
	}
	if c.Writes == 0 {
		c.Writes = 12
	}
	if c.CheckpointEvery == 0 {
		c.CheckpointEvery = 500 * time.Millisecond
	}
	if c.Pull == 0 {
		c.Pull = 256
	}
	if c.CatchUpBytes == 0 {
		c.CatchUpBytes = 32 << 20
	}
	if c.CatchUpFrom == 0 {
		c.CatchUpFrom = 4096
	}
	if c.CatchUpEvery == 0 {
		c.CatchUpEvery = 2 * time.Second
	}
	if c.CacheBytes == 0 {
		c.CacheBytes = 512 << 20
	}
	if c.UnflushedBytes == 0 {
		c.UnflushedBytes = 128 << 20
	}
	if c.Grace == 0 {
		c.Grace = 30 * time.Second
	}
	if c.Replicas == 0 {
		c.Replicas = 1
	}
	if c.ID == "" {
		c.ID = DefaultWorkerID()
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Buckets are the KV buckets that projection uses.
type Buckets struct {
	Snapshots   *snapshot.Store
	Checkpoints jetstream.KeyValue
	Quarantine  jetstream.KeyValue
	Workers     *Roster
}

// Names of the buckets beside SURFACES.
const (
	CheckpointsBucket = "CHECKPOINTS"
	QuarantineBucket  = "QUARANTINE"
)

// OpenBuckets binds to the buckets, creating them when they are not there.
func OpenBuckets(ctx context.Context, js jetstream.JetStream, replicas int) (*Buckets, error) {
	b := new(Buckets)
	var err error
	if b.Snapshots, err = snapshot.Open(ctx, js, replicas); err != nil {
		return nil, err
	}
	for name, kv := range map[string]*jetstream.KeyValue{CheckpointsBucket: &b.Checkpoints, QuarantineBucket: &b.Quarantine} {
		*kv, err = journal.OpenBucket(ctx, js, jetstream.KeyValueConfig{
			Bucket: name, Description: "Palimpsest: projection", History: 1, Storage: jetstream.FileStorage, Replicas: replicas,
		})
		if err != nil {
			return nil, err
		}
	}
	if b.Workers, err = OpenRoster(ctx, js, replicas); err != nil {
		return nil, err
	}
	return b, nil
}

// Pin returns the buckets with the generation of snapshots that serves now.
func (b *Buckets) Pin(ctx context.Context) *Buckets { return b.of(b.Snapshots.Pin(ctx)) }

// known is Pin for who must not wait: it asks nobody.
func (b *Buckets) known() *Buckets { return b.of(b.Snapshots.Known()) }

// of returns the buckets of one generation of snapshots.
func (b *Buckets) of(s *snapshot.Store) *Buckets {
	return &Buckets{Snapshots: s, Checkpoints: b.Checkpoints, Quarantine: b.Quarantine, Workers: b.Workers}
}

// generation is the one that the buckets are those of.
func (b *Buckets) generation() snapshot.Generation { return b.Snapshots.Generation() }

// checkpointKey is the key of a partition's checkpoint. Each generation has its own.
func (b *Buckets) checkpointKey(partition int) string {
	return b.generation().Key(fmt.Sprintf("p%d", partition))
}

// quarantineKey is the key of a session's record. Each generation has its own, since one may fold
// what another could not.
func (b *Buckets) quarantineKey(session string) string {
	return b.generation().Key(events.Token(session))
}

// Worker projects partitions of a journal into the buckets: those that are its share, or with
// Config.Unleased those that it is told to.
type Worker struct {
	cfg     Config
	log     *journal.Journal
	buckets *Buckets
	heads   *Heads
	stats   Stats
	commons *commons
	born    time.Time // origin of clock

	mu         sync.Mutex // guards the four below
	cancel     context.CancelCauseFunc
	share      *share // nil when unleased, and before the first start
	unlisten   func()
	partitions map[int]*running

	running sync.WaitGroup
	working atomic.Int64  // partitions that run
	kept    atomic.Int64  // estimated bytes of sessions in memory, of all partitions
	owed    atomic.Int64  // estimated bytes of what is in no head yet
	writes  chan struct{} // one token per snapshot that is being written
}

// Stats counts what the worker did since it started.
type Stats struct {
	Events, Commits, Flushes, Healed, Moved, Quarantined, Loads atomic.Int64
	// Stale counts writes of heads and checkpoints that were refused since another worker's was there.
	Stale atomic.Int64
	// Lost counts leases that ended before the partition was handed over.
	Lost atomic.Int64
	// Writes are the heads and pages that were written, WrittenBytes their values.
	Writes, WrittenBytes atomic.Int64
}

// wrote counts a flush that was written.
func (s *Stats) wrote(f *snapshot.Flush) {
	n := len(f.Head.Value)
	for i := range f.Pages {
		n += len(f.Pages[i].Value)
	}
	s.Writes.Add(int64(len(f.Pages)) + 1)
	s.WrittenBytes.Add(int64(n))
}

// NewWorker returns a worker at rest. heads hears of every head that it writes.
func NewWorker(j *journal.Journal, b *Buckets, heads *Heads, cfg Config) *Worker {
	cfg = cfg.withDefaults()
	w := &Worker{cfg: cfg, log: j, buckets: b, heads: heads, born: time.Now(), partitions: map[int]*running{}, writes: make(chan struct{}, cfg.Writes)}
	w.commons = &commons{w: w, all: map[*partition]bool{}}
	return w
}

// portion is a partition's share of what all partitions may have together.
func (w *Worker) portion(bytes int) int { return bytes / int(max(1, w.working.Load())) }

// Stats returns the worker's counters.
func (w *Worker) Stats() *Stats { return &w.stats }

// ID names the worker among those that share the partitions.
func (w *Worker) ID() string { return w.cfg.ID }

// errStopping is the cause of a worker's context when it was told to stop.
var errStopping = errors.New("projection: stopping")

// Start joins the workers that share the partitions and returns: the worker then takes what is
// its share, each partition from its checkpoint on. An id that another worker has is an error.
// An unleased worker begins to work its partitions.
func (w *Worker) Start(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cancel != nil {
		return errors.New("projection: the worker runs already")
	}
	stream, err := w.log.JetStream().Stream(ctx, w.log.Config().Stream)
	if err != nil {
		return unavailable("stream", err)
	}
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	if w.cfg.Unleased {
		err = w.startAll(ctx, run, stream)
	} else {
		err = w.startShare(ctx, run, stream)
	}
	if err != nil {
		cancel(err)
		w.running.Wait()
		clear(w.partitions)
		return err
	}
	w.cancel = cancel
	return nil
}

// startShare joins. The caller holds mu.
func (w *Worker) startShare(ctx, run context.Context, stream jetstream.Stream) error {
	ttl := w.cfg.Lease
	if ttl == 0 {
		if ttl = 3 * time.Second; w.cfg.Replicas > 1 || stream.CachedInfo().Config.Replicas > 1 {
			ttl = 10 * time.Second
		}
	}
	if err := errors.Join(CheckWorkerID(w.cfg.ID), CheckLease(ttl)); err != nil {
		return err
	}
	s := &share{w: w, roster: w.buckets.Workers, run: nuid.Next(), began: time.Now().UnixMilli(), ttl: ttl, stream: stream,
		seen: map[string]sighting{}, told: map[string]bool{}, wake: make(chan struct{}, 1), left: make(chan struct{})}
	if w.share != nil { // started again
		s.address.Store(w.share.address.Load())
	}
	if err := s.join(ctx); err != nil {
		return err
	}
	stop, err := s.listen(w.buckets.Workers.js.Conn())
	if err != nil {
		return err
	}
	w.share, w.unlisten = s, stop
	for _, f := range []func(context.Context){s.keep, s.guard, s.report} {
		w.running.Go(func() { f(run) })
	}
	return nil
}

// startAll starts the partitions of an unleased worker. The caller holds mu.
func (w *Worker) startAll(ctx, run context.Context, stream jetstream.Stream) error {
	b := w.buckets.Pin(ctx)
	if err := b.generation().Foldable(); err != nil {
		return err
	}
	quarantined, err := w.readQuarantine(ctx, b)
	if err != nil {
		return err
	}
	ns := w.cfg.Partitions
	if ns == nil {
		for n := range w.log.Partitions() {
			ns = append(ns, n)
		}
	}
	var ps []*partition
	for _, n := range ns {
		if n < 0 || n >= w.log.Partitions() {
			return &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("partition %d: expected 0 to %d", n, w.log.Partitions()-1)}
		}
		p := newPartition(w, b, n, stream, quarantined[n])
		p.aside.Store(int64(len(p.quarantined)))
		if err := p.readCheckpoint(ctx, stream.CachedInfo().State.LastSeq); err != nil {
			return err
		}
		ps = append(ps, p)
	}
	w.commons.expect(run, len(ps))
	for _, p := range ps {
		w.partitions[p.n] = &running{p: p}
		w.running.Go(func() { p.run(run) })
	}
	return nil
}

// Stop drains: what was folded is flushed, checkpoints are written, leases are freed for others.
// It returns once all is still, or ctx ends. A worker that never started is still.
func (w *Worker) Stop(ctx context.Context) error {
	w.mu.Lock()
	cancel, s, unlisten := w.cancel, w.share, w.unlisten
	w.mu.Unlock()
	if cancel == nil {
		return nil
	}
	if s != nil {
		s.draining.Store(true)
		s.wakeUp()
		select {
		case <-s.left:
		case <-ctx.Done():
			return ctx.Err()
		}
		unlisten()
	}
	cancel(errStopping)
	done := make(chan struct{})
	go func() {
		w.running.Wait()
		close(done)
	}()
	select {
	case <-done:
		w.mu.Lock()
		w.cancel = nil
		clear(w.partitions)
		w.mu.Unlock()
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Announce tells the other workers where this one's read API is.
func (w *Worker) Announce(url string) {
	w.mu.Lock()
	s := w.share
	w.mu.Unlock()
	if s != nil {
		s.address.Store(&url)
	}
}

// Ready says why the worker does not take part in projection, nil when it does.
func (w *Worker) Ready() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch s := w.share; {
	case w.cancel == nil:
		return &events.Error{Code: events.CodeUnavailable, Detail: "the worker does not run"}
	case s == nil:
	case s.foreign.Load():
		return w.buckets.generation().Foldable()
	case s.draining.Load():
		return &events.Error{Code: events.CodeUnavailable, Detail: "the worker is leaving"}
	case s.joined.Load() <= int64(w.clock()):
		detail := "the worker could not renew its place among the workers"
		if t := s.trouble.Load(); t != nil {
			detail += ": " + *t
		}
		return &events.Error{Code: events.CodeUnavailable, Detail: detail}
	}
	return nil
}

// PartitionStatus says how far a partition is projected.
type PartitionStatus struct {
	Partition int `json:"partition"`
	// Read is the stream sequence up to which the partition was read and folded.
	Read uint64 `json:"read"`
	// Checkpoint is the stream sequence up to which everything is in heads.
	Checkpoint uint64 `json:"checkpoint"`
	// Lag is how many commits of the partition are still to be read; null when JetStream did
	// not say.
	Lag *uint64 `json:"lag"`
	// OldestUnflushedMs is the age of the oldest event that was read and is not yet in a head.
	OldestUnflushedMs int64  `json:"oldestUnflushedMs"`
	Sessions          int    `json:"sessions"` // in memory
	Bytes             int    `json:"bytes"`    // estimated
	Error             string `json:"error,omitempty"`
}

// atWork returns the partitions that run here, in order.
func (w *Worker) atWork() []*partition {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := make([]*partition, 0, len(w.partitions))
	for _, r := range w.partitions {
		out = append(out, r.p)
	}
	slices.SortFunc(out, func(a, b *partition) int { return a.n - b.n })
	return out
}

// Status asks every partition that is worked here how far it is.
func (w *Worker) Status(ctx context.Context) []PartitionStatus {
	ps := w.atWork()
	out := make([]PartitionStatus, len(ps))
	var wg sync.WaitGroup
	for i, p := range ps {
		wg.Go(func() { out[i] = p.status(ctx) })
	}
	wg.Wait()
	return out
}

// OldestUnflushed is the age in seconds of the oldest event that was read and is not yet in a
// head, 0 when there is none.
func (w *Worker) OldestUnflushed() float64 {
	var oldest int64
	for _, p := range w.atWork() {
		if at := p.oldest.Load(); at > 0 && (oldest == 0 || at < oldest) {
			oldest = at
		}
	}
	if oldest == 0 {
		return 0
	}
	return time.Since(time.UnixMilli(oldest)).Seconds()
}

// SessionsInMemory is how many sessions the worker holds.
func (w *Worker) SessionsInMemory() (n int) {
	for _, p := range w.atWork() {
		n += int(p.count.Load())
	}
	return n
}

// CachedBytes estimates the memory of the sessions that the worker holds, without UnflushedBytes.
func (w *Worker) CachedBytes() int64 { return w.kept.Load() }

// UnflushedBytes estimates the memory of what the worker read and no head has yet.
func (w *Worker) UnflushedBytes() int64 { return w.owed.Load() }

// Retry takes a session out of quarantine and folds it on from its head. When another worker
// has the session's partition, that one is asked to.
func (w *Worker) Retry(ctx context.Context, session string) error {
	n := w.log.Partition(session)
	w.mu.Lock()
	r := w.partitions[n]
	w.mu.Unlock()
	if r != nil && r.p.holds() || w.cfg.Unleased {
		return w.retryHere(ctx, session)
	}
	return w.retryThere(ctx, session)
}

func (w *Worker) retryHere(ctx context.Context, session string) error {
	n := w.log.Partition(session)
	w.mu.Lock()
	r := w.partitions[n]
	w.mu.Unlock()
	away := &events.Error{Code: events.CodeUnavailable, Session: session, Detail: fmt.Sprintf("partition %d is not worked here; try again", n)}
	if r == nil {
		return away
	}
	done := make(chan error, 1)
	select {
	case r.p.retries <- retry{session, done}:
	case <-r.p.done:
		return away
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

type retry struct {
	session string
	done    chan error
}

// keep is what snapshots hold on to while they are folded for writing.
func (w *Worker) keep() surface.Keep {
	if w.cfg.Freeze {
		return surface.KeepFrozenBodies
	}
	return surface.KeepBodies
}

func unavailable(what string, err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	return &events.Error{Code: events.CodeUnavailable, Cause: err, Detail: fmt.Sprintf("%s: %v; try again", what, err)}
}
