package audit

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/snapshot"
)

const (
	// readAhead bounds the messages that wait to be verified, in bytes of messages of average
	// size, over all partitions that are read at a time.
	readAhead = 16 << 20
	// sessionBytes is what a session takes in memory whatever is in it, about.
	sessionBytes = 2 << 10
	// heldHalves is how much memory the events of a commit take, in halves of its body, about.
	heldHalves = 3
	// headerBytes is about how much of a stored message is not the commit's body.
	headerBytes = 600
	// finishing is how many sessions of a partition are compared with their heads at a time.
	finishing = 8
	// quiet is how long a partition says nothing before it is asked whether there is more.
	quiet = 2 * time.Second
)

// stream verifies sessions by reading the log's partitions from start to end. Reading one
// session after the other would have the server search all of the log for each.
func (a *Auditor) stream(ctx context.Context, ids []string, logged map[string]uint64, out *collector) error {
	info, err := a.log.Info(ctx)
	if err != nil {
		return err
	}
	// Of a session its newest messages are in memory, and what was not let go of yet.
	var body int64
	if n := info.State.Msgs; n > 0 {
		body = max(64, int64(info.State.Bytes/n)-headerBytes)
	}
	weight := func(id string) int64 {
		return sessionBytes + heldHalves*min(body*int64(min(logged[id], mostShed)), leastShed+snapshot.PageTarget)/2
	}
	parts := make([][]string, a.log.Partitions())
	weights := make([]int64, len(parts))
	for _, id := range ids {
		p := a.log.Partition(id)
		parts[p] = append(parts[p], id)
		weights[p] += weight(id)
	}
	// The more partitions are read at a time, the more they share of what the server loads. One
	// that is read twice costs more than that.
	at := int(max(1, min(int64(out.o.Parallel), out.o.Memory/max(1, slices.Max(weights)))))
	var groups []group
	for p, ids := range parts {
		g := group{partition: p}
		var taken int64
		for _, id := range ids {
			w := weight(id)
			if taken+w > out.o.Memory/int64(at) && taken > 0 {
				groups = append(groups, g)
				g, taken = group{partition: p}, 0
			}
			taken += w
			g.ids, g.logged = append(g.ids, id), g.logged || logged[id] > 0
		}
		if len(g.ids) > 0 {
			groups = append(groups, g)
		}
	}
	pull := pullOf(info, at)
	return parallel(ctx, at, groups, func(g group) error {
		g.shedAt = max(leastShed, min(mostShed, out.o.Memory/4/int64(at*len(g.ids))))
		return a.group(ctx, g, info.State.LastSeq, pull, out)
	})
}

// pullOf is how many messages are asked for at a time, where some partitions are read at once.
func pullOf(info *jetstream.StreamInfo, parallel int) int {
	const most = 2048 // Follow asks for fewer where they are large
	n := info.State.Msgs
	if n == 0 {
		return most
	}
	return min(most, max(1, readAhead/parallel/int(info.State.Bytes/n+1)))
}

// group is some sessions of one partition, which are verified in one reading of it.
type group struct {
	partition int
	ids       []string
	logged    bool  // at least one has events
	shedAt    int64 // see verifier
}

func (a *Auditor) group(ctx context.Context, g group, end uint64, pull int, out *collector) error {
	var mu sync.Mutex
	vs := make(map[string]*verifier, len(g.ids))
	failed := parallel(ctx, finishing, g.ids, func(id string) error {
		v, err := a.begin(ctx, id)
		if err == nil {
			v.trust(out.o, out.kept[id])
			v.shedAt = g.shedAt
			mu.Lock()
			vs[id] = v
			mu.Unlock()
		}
		return err
	})
	if g.logged {
		if err := a.verifyPartition(ctx, g.partition, vs, end, pull); err != nil {
			return errors.Join(failed, err)
		}
	}
	ids := make([]string, 0, len(vs))
	for id := range vs {
		ids = append(ids, id)
	}
	return errors.Join(failed, parallel(ctx, finishing, ids, func(id string) error {
		mu.Lock()
		v := vs[id]
		delete(vs, id) // its messages are not needed any more
		mu.Unlock()
		r, err := v.finish(ctx, out.o)
		if err == nil {
			out.add(r)
		}
		return err
	}))
}

// verifyPartition reads a partition up to a stream sequence and has each session verify its commits.
func (a *Auditor) verifyPartition(ctx context.Context, p int, vs map[string]*verifier, end uint64, pull int) error {
	complete, err := a.partition(ctx, p, end, pull, func(d journal.Delivery) error {
		v := vs[d.Session]
		switch {
		case v == nil: // another group's
			return nil
		case d.Err != nil:
			v.malformed(d.Err)
		default:
			if err := v.commit(ctx, d.Commit); err != nil {
				return err
			}
		}
		v.at = d.StreamSeq
		return nil
	})
	if err != nil || complete {
		return err
	}
	for _, v := range vs {
		if err := v.read(ctx, v.at, end); err != nil {
			return err
		}
	}
	return nil
}

// partition calls f for the messages of a partition up to a stream sequence. An error of f ends
// the reading. complete is false when the last of them went away meanwhile, so that it is not
// sure that f saw all the others.
func (a *Auditor) partition(ctx context.Context, p int, end uint64, pull int, f func(journal.Delivery) error) (complete bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var last uint64
	alive := make(chan struct{}, 1)
	take := func(d journal.Delivery) {
		select {
		case alive <- struct{}{}:
		default:
		}
		if d.StreamSeq <= last || ctx.Err() != nil { // again, after a reconnect
			return
		}
		if last = d.StreamSeq; last <= end {
			if err := f(d); err != nil {
				cancel(err)
			}
		}
		if d.Pending == 0 || d.StreamSeq >= end {
			cancel(errReached)
		}
	}
	fw, err := a.log.Follow(ctx, p, 0, pull, take, func(error) {}) // it goes on by itself
	if err != nil {
		return false, err
	}
	defer fw.Stop()
	timer := time.NewTimer(quiet)
	defer timer.Stop()
	for {
		select {
		case <-alive:
		case <-timer.C:
			n, err := fw.Pending(ctx)
			if err == nil && n == 0 {
				return false, nil
			}
			if err != nil && !temporary(err) && ctx.Err() == nil {
				return false, err
			}
		case <-ctx.Done():
			if err := context.Cause(ctx); err != errReached {
				return false, err
			}
			return true, nil
		}
		timer.Reset(quiet)
	}
}

// temporary reports whether trouble may pass by itself.
func temporary(err error) bool {
	return errors.Is(err, &events.Error{Code: events.CodeUnavailable}) || errors.Is(err, context.DeadlineExceeded)
}
