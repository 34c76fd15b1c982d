// Package projection owns the read side: workers that read the log's partitions in order, fold
// them and write heads and pages, and the reader that serves what was derived. It knows
// nothing of HTTP.
package projection

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
	"palimpsest/internal/telemetry"
)

// Config is how a worker projects.
type Config struct {
	// FlushAfter is the longest that a folded event waits to be in a head. Defaults to 50 ms.
	FlushAfter time.Duration
	// FlushEvents is how many folded events of one session are flushed at once at the latest.
	// Defaults to 256.
	FlushEvents int
	// Writes is how many snapshots are written at the same time. Defaults to 12.
	Writes int
	// CheckpointEvery is how often a partition's checkpoint is written. Defaults to 500 ms.
	CheckpointEvery time.Duration
	// Pull is how many messages of a partition are asked for at a time. Times 32 partitions,
	// times the size of a message, it must stay well below what the server keeps pending for a
	// connection (64 MiB on a stock server). Defaults to 64, and to fewer where messages may be
	// large.
	Pull int
	// CacheBytes bounds the memory of sessions that are kept between events, over all
	// partitions. Defaults to 512 MiB.
	CacheBytes int
	// Grace is how long pages that no head refers to stay readable. Defaults to 30 s.
	Grace time.Duration
	// Replicas of the buckets when they are created. Defaults to 1.
	Replicas int
	// Freeze checks events that are held in memory against what was read before they are
	// served. Defaults to false.
	Freeze bool
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
	Moved        func(session string) // a head write was refused
}

func (c Config) withDefaults(maxPayload int) Config {
	if c.FlushAfter == 0 {
		c.FlushAfter = 50 * time.Millisecond
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
		// Half of a stock server's pending limit, if every message were as large as can be.
		c.Pull = min(64, max(1, (32<<20)/max(1, maxPayload)/8))
	}
	if c.CacheBytes == 0 {
		c.CacheBytes = 512 << 20
	}
	if c.Grace == 0 {
		c.Grace = 30 * time.Second
	}
	if c.Replicas == 0 {
		c.Replicas = 1
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
	return b, nil
}

// Worker projects the partitions of a journal into the buckets.
type Worker struct {
	cfg     Config
	log     *journal.Journal
	buckets *Buckets
	heads   *Heads
	stats   Stats

	mu         sync.Mutex
	cancel     context.CancelCauseFunc
	partitions []*partition
	running    sync.WaitGroup
	writes     chan struct{} // one token per snapshot that is being written
}

// Stats counts what the worker did since it started.
type Stats struct {
	Events, Commits, Flushes, Healed, Moved, Quarantined, Loads atomic.Int64
}

// NewWorker returns a worker at rest. heads hears of every head that it writes.
func NewWorker(j *journal.Journal, b *Buckets, heads *Heads, cfg Config) *Worker {
	cfg = cfg.withDefaults(j.MaxCommit())
	return &Worker{cfg: cfg, log: j, buckets: b, heads: heads, writes: make(chan struct{}, cfg.Writes)}
}

// Stats returns the worker's counters.
func (w *Worker) Stats() *Stats { return &w.stats }

// errStopping is the cause of a worker's context when it was told to stop.
var errStopping = errors.New("projection: stopping")

// Start begins to work all partitions, each from its checkpoint on.
func (w *Worker) Start(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cancel != nil {
		return errors.New("projection: the worker runs already")
	}
	quarantined, err := w.readQuarantine(ctx)
	if err != nil {
		return err
	}
	stream, err := w.log.JetStream().Stream(ctx, w.log.Config().Stream)
	if err != nil {
		return unavailable("stream", err)
	}
	run, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	w.cancel = cancel
	w.partitions = nil
	for n := range w.log.Partitions() {
		p := newPartition(w, n, stream, quarantined[n])
		if err := p.readCheckpoint(ctx, stream.CachedInfo().State.LastSeq); err != nil {
			cancel(err)
			w.running.Wait()
			w.cancel, w.partitions = nil, nil
			return err
		}
		w.partitions = append(w.partitions, p)
		w.running.Add(1)
		go func() {
			defer w.running.Done()
			p.run(run)
		}()
	}
	return nil
}

// Stop drains: what was folded is flushed, checkpoints are written. It returns once all is
// still, or ctx ends.
func (w *Worker) Stop(ctx context.Context) error {
	w.mu.Lock()
	cancel := w.cancel
	w.mu.Unlock()
	if cancel == nil {
		return nil
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
		w.mu.Unlock()
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
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

// Status asks every partition how far it is.
func (w *Worker) Status(ctx context.Context) []PartitionStatus {
	w.mu.Lock()
	ps := w.partitions
	w.mu.Unlock()
	out := make([]PartitionStatus, len(ps))
	var wg sync.WaitGroup
	for i, p := range ps {
		wg.Add(1)
		go func() {
			defer wg.Done()
			out[i] = p.status(ctx)
		}()
	}
	wg.Wait()
	return out
}

// OldestUnflushed is the age in seconds of the oldest event that was read and is not yet in a
// head, 0 when there is none.
func (w *Worker) OldestUnflushed() float64 {
	var oldest int64
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.partitions {
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
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.partitions {
		n += int(p.count.Load())
	}
	return n
}

// Retry takes a session out of quarantine and folds it on from its head.
func (w *Worker) Retry(ctx context.Context, session string) error {
	w.mu.Lock()
	ps := w.partitions
	w.mu.Unlock()
	away := &events.Error{Code: events.CodeUnavailable, Session: session, Detail: "no worker runs here"}
	n := w.log.Partition(session)
	if n >= len(ps) {
		return away
	}
	done := make(chan error, 1)
	select {
	case ps[n].retries <- retry{session, done}:
	case <-ps[n].done:
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
