package projection

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/snapshot"
)

// mostRequests is how many partitions are asked about at the same time.
const mostRequests = 16

// Overview says how far the whole projection is, and who works what.
type Overview struct {
	// CaughtUp is true only when nothing of any partition is to be read and nothing unflushed.
	CaughtUp bool `json:"caughtUp"`
	// Lag is how many commits are still to be read; null when that of a partition is not known.
	Lag               *uint64 `json:"lag"`
	OldestUnflushedMs int64   `json:"oldestUnflushedMs"`
	// Generation is the one that serves.
	Generation snapshot.Generation `json:"generation"`
	// Unowned are the partitions that no worker has a lease for.
	Unowned    []int               `json:"unowned"`
	Workers    []WorkerOverview    `json:"workers"`
	Partitions []PartitionOverview `json:"partitions"`
}

// WorkerOverview is a worker that is there.
type WorkerOverview struct {
	ID      string `json:"id"`
	HTTP    string `json:"http,omitempty"`
	Started int64  `json:"started"` // Unix ms
	Renewed int64  `json:"renewed"` // Unix ms
	// SilentMs is how long ago the worker last announced itself, by the clock of the server.
	SilentMs int64 `json:"silentMs"`
	// Silent says that it is longer than it should be: what it said of its partitions is not relied on.
	Silent     bool  `json:"silent"`
	Draining   bool  `json:"draining"`
	Fold       int   `json:"fold"`       // version of its fold
	Generation int   `json:"generation"` // of the snapshots that its partitions write
	Partitions []int `json:"partitions"` // those that it has leases for
	Assigned   int   `json:"assigned"`   // how many it is to have
}

// PartitionOverview is a partition and who works it.
type PartitionOverview struct {
	Worker *string `json:"worker"` // null: nobody
	// SilentSince is when the worker last said how far it is, in Unix ms by the clock of the server,
	// if that is too long ago to be relied on. Lag is then counted from the checkpoint on.
	SilentSince *int64 `json:"silentSince,omitempty"`
	PartitionStatus
	Quarantined int `json:"quarantined"` // sessions
}

// Overview reads the roster, as any process can, and measures the lag of partitions of which no
// worker tells.
func (w *Worker) Overview(ctx context.Context) (*Overview, error) {
	v, err := w.buckets.Workers.read(ctx, w.log.Partitions())
	if err != nil {
		return nil, err
	}
	now, err := w.buckets.Workers.now(ctx)
	if err != nil {
		return nil, err
	}
	b := w.buckets.Pin(ctx)
	quarantined, err := w.readQuarantine(ctx, b)
	if err != nil {
		return nil, err
	}
	out := &Overview{Generation: b.generation(), Unowned: []int{}, Workers: []WorkerOverview{}, Partitions: w.tell(ctx, v, w.Status(ctx), now)}
	var active []string
	for id, m := range v.members {
		if !m.Draining && m.Fold == b.generation().Fold {
			active = append(active, id)
		}
	}
	followed := true // what is told is of the generation that serves
	load := map[string]int{}
	for _, id := range assign(w.log.Partitions(), active) {
		load[id]++
	}
	for id, m := range v.members {
		followed = followed && (m.Generation == out.Generation.N || len(m.Partitions) == 0)
		silence, silent := v.silence(id, now)
		o := WorkerOverview{ID: id, SilentMs: silence.Milliseconds(), Silent: silent, HTTP: m.HTTP, Started: m.Started, Renewed: m.Renewed, Draining: m.Draining, Fold: m.Fold, Generation: m.Generation, Partitions: []int{}, Assigned: load[id]}
		for n, l := range v.leases {
			if l.Run == m.Run {
				o.Partitions = append(o.Partitions, n)
			}
		}
		slices.Sort(o.Partitions)
		out.Workers = append(out.Workers, o)
	}
	slices.SortFunc(out.Workers, func(a, b WorkerOverview) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	var lag uint64
	known := true
	for i := range out.Partitions {
		p := &out.Partitions[i]
		p.Quarantined = len(quarantined[p.Partition])
		if p.Worker == nil {
			out.Unowned = append(out.Unowned, p.Partition)
		}
		if known = known && p.Lag != nil; known {
			lag += *p.Lag
		}
		out.OldestUnflushedMs = max(out.OldestUnflushedMs, p.OldestUnflushedMs)
	}
	if known {
		out.Lag = &lag
		out.CaughtUp = lag == 0 && out.OldestUnflushedMs == 0 && followed && w.Follows(ctx) && w.nothingBehind(ctx, out.Partitions)
	}
	return out, nil
}

// Follows reports whether all that is worked here writes the generation of snapshots that serves.
func (w *Worker) Follows(ctx context.Context) bool {
	n := w.buckets.Pin(ctx).generation().N
	for _, p := range w.atWork() {
		if p.b.generation().N != n {
			return false
		}
	}
	return true
}

// tell says of every partition how far it is: what is worked here says so itself, another
// worker's is as it was last announced, and the rest is measured from the checkpoint on: also what
// a worker works that has not announced itself for too long, at a time by the server's clock.
func (w *Worker) tell(ctx context.Context, v *roll, own []PartitionStatus, now time.Time) []PartitionOverview {
	told := map[int]PartitionStatus{}
	silent := map[int]int64{} // since when, Unix ms
	for id, m := range v.members {
		d, long := v.silence(id, now)
		if long {
			for n, l := range v.leases {
				if l.Run == m.Run {
					silent[n] = v.beats[id].UnixMilli()
				}
			}
		}
		for _, st := range m.Partitions {
			if l, ok := v.leases[st.Partition]; ok && l.Run == m.Run {
				if long {
					st.Lag = nil
					if st.OldestUnflushedMs > 0 { // and has not become younger
						st.OldestUnflushedMs += d.Milliseconds()
					}
				}
				told[st.Partition] = st
			}
		}
	}
	for _, st := range own {
		told[st.Partition] = st
		delete(silent, st.Partition)
	}
	out := make([]PartitionOverview, w.log.Partitions())
	var wg sync.WaitGroup
	tokens := make(chan struct{}, mostRequests)
	for n := range out {
		if l, ok := v.leases[n]; ok {
			out[n].Worker = &l.Worker
		}
		if since, ok := silent[n]; ok {
			out[n].SilentSince = &since
		}
		st, ok := told[n]
		if out[n].PartitionStatus = st; ok && st.Lag != nil {
			continue
		}
		tokens <- struct{}{}
		wg.Go(func() {
			defer func() { <-tokens }()
			out[n].PartitionStatus = w.measure(ctx, n, st)
		})
	}
	wg.Wait()
	return out
}

// measure counts what lies behind a partition's checkpoint.
func (w *Worker) measure(ctx context.Context, n int, st PartitionStatus) PartitionStatus {
	st.Partition = n
	e, err := w.buckets.Checkpoints.Get(ctx, w.buckets.checkpointKey(n))
	var v checkpointValue
	switch {
	case errors.Is(err, jetstream.ErrKeyNotFound):
		err = nil
	case err == nil:
		err = json.Unmarshal(e.Value(), &v)
	}
	var lag uint64
	if err == nil {
		lag, err = w.log.Behind(ctx, n, v.StreamSeq)
	}
	if err != nil {
		st.Error = err.Error()
		return st
	}
	st.Checkpoint, st.Read, st.Lag = v.StreamSeq, max(st.Read, v.StreamSeq), &lag
	return st
}

// nothingBehind makes sure that the log holds nothing behind what was read: what workers
// announce is a moment old.
func (w *Worker) nothingBehind(ctx context.Context, ps []PartitionOverview) bool {
	var wg sync.WaitGroup
	tokens := make(chan struct{}, mostRequests)
	none := make([]bool, len(ps))
	for i, p := range ps {
		tokens <- struct{}{}
		wg.Go(func() {
			defer func() { <-tokens }()
			more, err := w.log.More(ctx, p.Partition, p.Read)
			none[i] = err == nil && !more
		})
	}
	wg.Wait()
	return !slices.Contains(none, false)
}

// sumLag is the lag of all partitions, nil when that of one is not known.
func (w *Worker) sumLag(ctx context.Context, v *roll, own []PartitionStatus) *uint64 {
	if v == nil {
		return nil
	}
	var sum uint64
	for _, p := range w.tell(ctx, v, own, v.newest) { // its own key is written at each tick
		if p.Lag == nil {
			return nil
		}
		sum += *p.Lag
	}
	return &sum
}

// Gauges are numbers of a worker for a metrics scraper. They are as they were at the worker's
// last tick, and NaN while they are not known.
type Gauges struct {
	Lag         float64 // commits still to be read of the partitions that are worked here
	LagTotal    float64 // the same of all partitions, also of those that nobody works
	Owned       float64 // partitions that are worked here
	Unowned     float64 // partitions that no worker has a lease for
	Workers     float64 // that are there
	Silent      float64 // those of them that have not announced themselves for too long
	Quarantined float64 // sessions in quarantine, of the partitions that are worked here
}

// Gauges returns them.
func (w *Worker) Gauges() Gauges {
	nan := math.NaN()
	g := Gauges{Lag: nan, LagTotal: nan, Unowned: nan, Workers: nan, Silent: nan}
	for _, p := range w.atWork() {
		g.Owned++
		g.Quarantined += float64(p.aside.Load())
	}
	w.mu.Lock()
	s := w.share
	w.mu.Unlock()
	if s == nil {
		return g
	}
	if ps := s.reported.Load(); ps != nil {
		g.Lag = 0
		for _, p := range *ps {
			if p.Lag == nil {
				g.Lag = nan
				break
			}
			g.Lag += float64(*p.Lag)
		}
	}
	if n := s.lagTotal.Load(); n != nil {
		g.LagTotal = float64(*n)
	}
	if v := s.last.Load(); v != nil {
		g.Workers, g.Unowned = float64(len(v.members)), float64(w.log.Partitions()-len(v.leases))
		g.Silent = 0
		for id := range v.members {
			if _, long := v.silence(id, v.newest); long {
				g.Silent++
			}
		}
	}
	return g
}
