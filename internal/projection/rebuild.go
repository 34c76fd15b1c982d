package projection

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/journal"
	"palimpsest/internal/snapshot"
)

// rebuildTick is how often a rebuild looks how far it is.
const rebuildTick = 200 * time.Millisecond

// RebuildOptions say how a generation of snapshots is brought about.
type RebuildOptions struct {
	// Back brings the generation that served before up to date and switches to it, instead of
	// folding everything into a new one.
	Back bool
	// Worker is how it folds.
	Worker Config
	// Follow is how long to fold on after the switch until all workers have followed it.
	// Defaults to 1 min.
	Follow time.Duration
	// Progress hears how far it is, a few times a second. May be nil.
	Progress func(RebuildProgress)
}

// RebuildProgress is how far a rebuild is.
type RebuildProgress struct {
	Events   int64  // folded so far
	Lag      uint64 // commits that are still to be read, as far as is known
	Switched bool
}

// RebuildReport is what a rebuild did.
type RebuildReport struct {
	From     snapshot.Generation  `json:"from"`
	To       snapshot.Generation  `json:"to"`
	Dropped  *snapshot.Generation `json:"dropped,omitempty"` // one from before From
	Events   int64                `json:"events"`            // folded
	Commits  int64                `json:"commits"`
	Heads    int64                `json:"heads"`    // writes of them
	Seconds  float64              `json:"seconds"`  // until the switch
	Followed bool                 `json:"followed"` // all workers work on the new generation
}

// Rebuild folds the log into a new generation of snapshots while the one that serves goes on
// serving, and switches to it once it is caught up. What was interrupted is gone on with. Readers and
// workers of all processes follow the switch by themselves; the old generation is kept, standing still.
func Rebuild(ctx context.Context, j *journal.Journal, b *Buckets, o RebuildOptions) (*RebuildReport, error) {
	began := time.Now()
	g, err := b.Snapshots.Generations(ctx)
	if err != nil {
		return nil, err
	}
	target := b.Snapshots.Build
	if o.Back {
		target = b.Snapshots.Restore
	}
	store, err := target(ctx)
	if err != nil {
		return nil, err
	}
	r := &RebuildReport{From: g.Current, To: store.Generation()}
	cfg := o.Worker
	cfg.Quiet, cfg.Unleased = true, true // nobody else writes into it
	w := NewWorker(j, b.of(store), NewHeads(), cfg)
	if err := w.Start(ctx); err != nil {
		return nil, err
	}
	err = o.rebuild(ctx, j, b, w, store, r, began)
	// What was folded is flushed and checkpointed, so that the next try goes on from there.
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if serr := w.Stop(stop); err == nil {
		err = serr
	}
	s := w.Stats()
	r.Events, r.Commits, r.Heads = s.Events.Load(), s.Commits.Load(), s.Flushes.Load()
	return r, err
}

func (o *RebuildOptions) rebuild(ctx context.Context, j *journal.Journal, b *Buckets, w *Worker, store *snapshot.Store, r *RebuildReport, began time.Time) error {
	ticker := time.NewTicker(rebuildTick)
	defer ticker.Stop()
	wait := func() error {
		select {
		case <-ticker.C:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	tell := func(lag uint64, switched bool) {
		if o.Progress != nil {
			o.Progress(RebuildProgress{Events: w.stats.Events.Load(), Lag: lag, Switched: switched})
		}
	}
	// The log may grow all the time: all that it held a tick ago is near enough.
	for end := uint64(math.MaxUint64); ; {
		lag, caughtUp := behind(w.Status(ctx), end)
		tell(lag, false)
		if caughtUp {
			break
		}
		now, err := j.Info(ctx)
		if err != nil && ctx.Err() == nil {
			return err
		}
		if err == nil {
			end = now.State.LastSeq
		}
		if err := wait(); err != nil {
			return fmt.Errorf("rebuild: stopped at %d events, the same command goes on from there: %w", w.stats.Events.Load(), err)
		}
	}
	third, err := b.Snapshots.Switch(ctx, store)
	if err != nil {
		return err
	}
	r.Seconds = time.Since(began).Seconds()
	if third != nil {
		if err := b.drop(ctx, *third); err != nil {
			return err
		}
		r.Dropped = third
	}
	// Nobody else writes into the new generation until the workers have followed.
	if o.Follow == 0 {
		o.Follow = time.Minute
	}
	over := time.Now().Add(o.Follow)
	for {
		if r.Followed, err = b.followed(ctx, j.Partitions(), r.To.N); err != nil || r.Followed || time.Now().After(over) {
			return err
		}
		tell(0, true)
		if err := wait(); err != nil {
			return err
		}
	}
}

// followed reports whether all workers that there are write a generation.
func (b *Buckets) followed(ctx context.Context, partitions, generation int) (bool, error) {
	v, err := b.Workers.read(ctx, partitions)
	if err != nil {
		return false, err
	}
	for _, m := range v.members {
		if m.Generation != generation {
			return false, nil
		}
	}
	return true, nil
}

// unflushed is how old what is in no head may be for a partition to be caught up, in milliseconds.
const unflushed = 1000

// behind says how many commits are still to be read, and whether everything up to a stream sequence
// is in heads, or about to be.
func behind(ps []PartitionStatus, end uint64) (lag uint64, caughtUp bool) {
	caughtUp = true
	for _, p := range ps {
		if p.Lag != nil {
			lag += *p.Lag
		}
		caughtUp = caughtUp && (p.Lag != nil && *p.Lag == 0 || p.Read >= end) && p.OldestUnflushedMs <= unflushed
	}
	return lag, caughtUp
}

// DropPrevious deletes the generation that served before, with its checkpoints and its records of
// quarantine. It returns what was deleted, nil when nothing was kept.
func (b *Buckets) DropPrevious(ctx context.Context) (*snapshot.Generation, error) {
	g, err := b.Snapshots.DropPrevious(ctx)
	if err != nil || g == nil {
		return g, err
	}
	return g, b.drop(ctx, *g)
}

// drop deletes what is left of a generation that nothing refers to any more.
func (b *Buckets) drop(ctx context.Context, g snapshot.Generation) error {
	if err := b.Snapshots.Drop(ctx, g); err != nil {
		return err
	}
	for what, kv := range map[string]jetstream.KeyValue{"checkpoints": b.Checkpoints, "quarantine": b.Quarantine} {
		l, err := kv.ListKeysFiltered(ctx, g.Key("*"))
		if err != nil {
			return unavailable(what, err)
		}
		var keys []string
		for k := range l.Keys() {
			keys = append(keys, k)
		}
		for _, k := range keys {
			if err := kv.Purge(ctx, k); err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
				return unavailable(what, err)
			}
		}
	}
	return nil
}
