package audit

import (
	"context"
	"errors"
	"iter"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
)

const (
	// readAhead bounds the messages that wait to be verified, in bytes of messages of average
	// size, over all partitions that are read at a time.
	readAhead = 16 << 20
	// sessionBytes is what a session takes in memory whatever is in it, about.
	sessionBytes = 5 << 9
	// nodeBytes is what a node of a surface takes with the sum of its message, about.
	nodeBytes = 100
	// smallestEvent is the least that an event on a surface takes in a commit, about, in bytes.
	smallestEvent = 128
	// sampled is of how many sessions the last commit is read, to learn how many events a commit has.
	sampled = 32
	// finishing is how many sessions of a partition are compared with their heads at a time.
	finishing = 8
	// perPass is how many filtered consumers of one partition each cost the server as much, for each of
	// its messages, as it costs to read all messages once more without a filter, about.
	perPass = 20
	// quiet is how long a partition says nothing before it is asked whether there is more.
	quiet = 2 * time.Second
)

// stream verifies sessions by reading the log from start to end. Reading one session after the other would
// have the server search all of the log for each.
//
// For a consumer of one partition the server looks at the messages of all of them. So all are read at a
// time by one consumer, more than once when the sessions do not fit into memory, and partition by
// partition where that would be too often.
func (a *Auditor) stream(ctx context.Context, ids []string, logged map[string]uint64, out *collector) error {
	info, err := a.log.Info(ctx)
	if err != nil {
		return err
	}
	perCommit := a.eventsPerCommit(ctx, ids, logged)
	if n := info.State.Msgs; n > 0 { // whatever the commits say
		perCommit = min(perCommit, 1+float64(info.State.Bytes/n/smallestEvent))
	}
	parts := make([]group, a.log.Partitions())
	for p := range parts {
		parts[p].partitions = []int{p}
	}
	for _, id := range ids {
		g := &parts[a.log.Partition(id)]
		g.ids, g.weights = append(g.ids, id), append(g.weights, sessionBytes+int64(nodeBytes*perCommit*float64(logged[id])))
		g.logged = g.logged || logged[id] > 0
	}
	at, groups := 1, pack(parts, out.o.Memory)
	if len(groups) > 1+len(parts)/perPass {
		var largest int64
		for _, p := range parts {
			largest = max(largest, p.weight())
		}
		// The more partitions are read at a time, the more they share of what the server loads. One
		// that is read twice costs more than that.
		at, groups = int(max(1, min(int64(out.o.Parallel), out.o.Memory/max(1, largest)))), nil
		for p := range parts {
			groups = append(groups, pack(parts[p:p+1], out.o.Memory/int64(at))...)
		}
	}
	pull := pullOf(info, at)
	return parallel(ctx, at, slices.Values(groups), func(g group) error {
		return a.group(ctx, g, info.State.LastSeq, pull, out)
	})
}

// eventsPerCommit is how many events the commits of some of the sessions have on average, at least 1.
func (a *Auditor) eventsPerCommit(ctx context.Context, ids []string, logged map[string]uint64) float64 {
	var commits, found float64
	for i := 0; i < len(ids); i += 1 + len(ids)/sampled {
		last, err := a.log.LeaderLast(ctx, ids[i])
		if err == nil && last != nil { // what is wrong with the others is found later
			commits, found = commits+float64(logged[ids[i]]), found+float64(last.Last)+1
		}
	}
	return max(1, found/max(1, commits))
}

// pack puts the sessions of groups together anew, into as few as have room in memory.
func pack(groups []group, room int64) (out []group) {
	var g group
	var taken int64
	for _, from := range groups {
		for i, id := range from.ids {
			w := from.weights[i]
			if taken+w > room && taken > 0 {
				out = append(out, g)
				g, taken = group{}, 0
			}
			taken += w
			g.ids, g.weights, g.logged = append(g.ids, id), append(g.weights, w), g.logged || from.logged
			if p := from.partitions[0]; !slices.Contains(g.partitions, p) {
				g.partitions = append(g.partitions, p)
			}
		}
	}
	if len(g.ids) > 0 {
		out = append(out, g)
	}
	return out
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

// group is some sessions, which are verified in one reading of their partitions.
type group struct {
	partitions []int
	ids        []string
	weights    []int64 // bytes of memory, about, of each session
	logged     bool    // at least one may have events
}

func (g group) weight() (n int64) {
	for _, w := range g.weights {
		n += w
	}
	return n
}

func (a *Auditor) group(ctx context.Context, g group, end uint64, pull int, out *collector) error {
	var mu sync.Mutex
	vs := make(map[string]*verifier, len(g.ids))
	failed := parallel(ctx, finishing, slices.Values(g.ids), func(id string) error {
		v, err := a.begin(ctx, id, out.o)
		if err == nil {
			v.trust(out.o, out.kept[id])
			mu.Lock()
			vs[id] = v
			mu.Unlock()
		}
		return err
	})
	if g.logged {
		if err := a.verifyPartitions(ctx, g.partitions, vs, end, pull, out); err != nil {
			return errors.Join(failed, err)
		}
	}
	return errors.Join(failed, parallel(ctx, finishing, a.withHeads(ctx, vs, len(g.partitions) > 1 && !out.o.LogOnly), func(v headed) error {
		r, err := v.finish(ctx, out.o, v.head)
		if err == nil {
			r, err = a.settled(ctx, r, out.o)
		}
		if err == nil {
			out.add(r)
		}
		return err
	}))
}

// headed is a verifier that has read its log, with the head of its session when that is known.
type headed struct {
	*verifier
	head []byte
}

// withHeads yields all of vs, and takes them away as it does. all says that it pays to read the heads of
// all sessions in the order in which the bucket has them: for one alone the server loads, and
// decompresses, as much as for many.
func (a *Auditor) withHeads(ctx context.Context, vs map[string]*verifier, all bool) iter.Seq[headed] {
	return func(yield func(headed) bool) {
		take := func(id string, head []byte) bool {
			v := vs[id]
			delete(vs, id) // its nodes are not needed any more
			return v == nil || yield(headed{v, head})
		}
		if all && !a.eachHead(ctx, take) {
			return
		}
		for id := range vs {
			if !take(id, nil) {
				return
			}
		}
	}
}

// eachHead calls take for the heads of all sessions, until it answers false. Trouble ends it, which is met
// again by who asks for the heads that did not come.
func (a *Auditor) eachHead(ctx context.Context, take func(id string, head []byte) bool) (more bool) {
	store := a.buckets.Snapshots.Pin(ctx)
	if st, err := store.KV().Status(ctx); err != nil || st.History() != 1 { // then an older value could come
		return true
	}
	bucket := store.Generation().Bucket
	err := a.log.EachLast(ctx, "KV_"+bucket, "$KV."+bucket+".*", func(m jetstream.Msg) error {
		token := m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:]
		if id, err := events.SessionOf(token); err == nil && len(m.Data()) > 0 && !take(id, m.Data()) { // a deletion has no data
			return errReached
		}
		return nil
	})
	return err != errReached
}

// verifyPartitions reads partitions up to a stream sequence and has each session verify its commits.
func (a *Auditor) verifyPartitions(ctx context.Context, ps []int, vs map[string]*verifier, end uint64, pull int, out *collector) error {
	lanes := 1
	if len(ps) > 1 {
		lanes = min(out.o.Parallel, runtime.GOMAXPROCS(0))
	}
	s := newSpread(lanes, func(d journal.Delivery) error {
		v := vs[d.Session]
		switch {
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
	const step = 1024
	messages := 0
	complete, err := a.partitions(ctx, ps, end, pull, func(d journal.Delivery) error {
		if vs[d.Session] == nil { // another group's
			return nil
		}
		if messages++; messages%step == 0 {
			out.read(step)
		}
		return s.add(d)
	})
	out.read(messages % step)
	err = s.end(err)
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

// partitions calls f for the messages of one partition or several up to a stream sequence. An error of f
// ends the reading. complete is false when the last of them went away meanwhile, so that it is not
// sure that f saw all the others.
func (a *Auditor) partitions(ctx context.Context, ps []int, end uint64, pull int, f func(journal.Delivery) error) (complete bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var last uint64
	alive := make(chan struct{}, 1)
	pass := func(d journal.Delivery, f func(journal.Delivery) error) {
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
	take, failed := func(d journal.Delivery) { pass(d, f) }, func(error) {} // it goes on by itself
	var fw *journal.Follower
	if len(ps) == 1 {
		fw, err = a.log.Follow(ctx, ps[0], 0, pull, take, failed)
	} else {
		among := make([]bool, a.log.Partitions())
		for _, p := range ps {
			among[p] = true
		}
		fw, err = a.log.FollowAll(ctx, 0, func(d journal.Delivery) bool {
			if !among[d.Partition] {
				pass(d, func(journal.Delivery) error { return nil })
			}
			return among[d.Partition]
		}, take, failed)
	}
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
