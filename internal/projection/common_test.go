package projection_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// reading is what a worker's common reader told.
type reading struct {
	mu      sync.Mutex // guards all below
	seqs    []uint64   // stream sequences that it read
	began   int        // partitions that began to read with others
	parted  int        // those that read for themselves again
	changed chan struct{}
	at      map[uint64]func() // what happens when a message is read; once
}

// together is a worker's configuration that has its partitions read together however little is to be
// read. at says what happens when messages are read, before anybody has them.
func (w *world) together(cfg projection.Config, at map[uint64]func()) (projection.Config, *reading) {
	r := &reading{changed: make(chan struct{}), at: at}
	tell := func(f func()) {
		r.mu.Lock()
		defer r.mu.Unlock()
		f()
		close(r.changed)
		r.changed = make(chan struct{})
	}
	cfg.CatchUpFrom = 1
	cfg.Signals.Read = func(streamSeq uint64) {
		var now func()
		tell(func() {
			r.seqs = append(r.seqs, streamSeq)
			now = r.at[streamSeq]
			delete(r.at, streamSeq)
		})
		if now != nil {
			now()
		}
	}
	cfg.Signals.Together = func(_ int, yes bool) {
		tell(func() {
			if yes {
				r.began++
			} else {
				r.parted++
			}
		})
	}
	return cfg, r
}

// until waits until a condition on what was told holds.
func (r *reading) until(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for {
		r.mu.Lock()
		ok, changed := condition(), r.changed
		r.mu.Unlock()
		if ok {
			return
		}
		journaltest.Await(t, what, changed)
	}
}

// alone waits until n partitions have read together and each reads for itself again.
func (r *reading) alone(t testing.TB, n int) {
	t.Helper()
	r.until(t, fmt.Sprintf("%d partitions to read together and part again", n), func() bool { return r.began >= n && r.parted == r.began })
}

// end is the stream sequence of the log's last message.
func (w *world) end() uint64 {
	w.t.Helper()
	info, err := w.log.Info(journaltest.Context(w.t))
	if err != nil {
		w.t.Fatal(err)
	}
	return info.State.LastSeq
}

// What is appended while the last messages are read together is read by each partition for itself:
// nothing is left out and nothing folded twice.
func TestPartitionsThatAreFarBehindReadTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	last, total := w.mix(12)
	more := func() {
		for id := range last {
			last[id] = w.append(id, user("meanwhile"))
			total++
		}
	}
	end := w.end()
	cfg, r := w.together(projection.Config{}, map[uint64]func(){end / 2: more, end: more})
	k := w.worker(cfg)
	r.alone(t, partitions)
	for id, seq := range last {
		k.wrote(id, seq)
	}
	r.mu.Lock()
	seqs := slices.Clone(r.seqs)
	r.mu.Unlock()
	for i, seq := range seqs {
		if seq != uint64(i+1) {
			t.Fatalf("read together: %v, want all in order", seqs)
		}
	}
	if n := uint64(len(seqs)); n < end || n == w.end() {
		t.Errorf("read %d messages together, want %d and not all %d", n, end, w.end())
	}
	if got := k.Stats().Events.Load(); got != total {
		t.Errorf("%d events were appended, %d were folded", total, got)
	}
	for id := range last {
		k.wrote(id, w.append(id, user("alone")))
	}
	r.mu.Lock()
	if len(r.seqs) != len(seqs) {
		t.Errorf("read together once it was over: %v", r.seqs[len(seqs):])
	}
	r.mu.Unlock()
	k.until("checkpoints at the log's end", func() bool { return caughtUp(k.Status(journaltest.Context(t))) })
	w.verify()
}

// Partitions that fall behind while they work read together too.
func TestPartitionsThatFallBehindReadTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg, r := w.together(projection.Config{Pull: 1, CatchUpEvery: 1}, nil)
	k := w.worker0(cfg)
	ids := []string{"one", w.otherPartition("one")}
	held := make(chan struct{}, 2*len(ids)) // before the first message of each of the four sessions is folded
	hold := [partitions]chan struct{}{make(chan struct{}), make(chan struct{})}
	k.tap.set(func(op, bucket, key string) error {
		if op == "get" && bucket == snapshot.Bucket && isHead(key) {
			held <- struct{}{}
			<-hold[w.log.Partition(key)]
		}
		return nil
	})
	if err := k.Start(journaltest.Context(t)); err != nil {
		t.Fatal(err)
	}
	journaltest.Eventually(t, "each partition to read for itself", func() bool { return caughtUp(k.Status(journaltest.Context(t))) })
	for _, id := range ids {
		w.append(id, user("delivered as it is appended"))
	}
	for range ids {
		journaltest.Await(t, "a partition to be held up", held)
	}
	for i := range 80 { // of the first few nobody says yet that more follow
		for _, id := range ids {
			if i >= 40 {
				id = w.neighbour(id)
			}
			w.append(id, user("behind"))
		}
	}
	hold[0] <- struct{}{}
	hold[1] <- struct{}{}
	for range ids { // each knows now how much there is behind what it has
		journaltest.Await(t, "a partition to be held up again", held)
	}
	close(hold[0])
	r.until(t, "a partition to read with the other", func() bool { return r.began > 0 })
	close(hold[1])
	r.until(t, "both partitions to read together", func() bool { return r.began >= partitions })
	for _, id := range ids {
		k.wrote(w.neighbour(id), 39)
	}
	if got := k.Stats().Events.Load(); got != 162 {
		t.Errorf("162 events were appended, %d were folded", got)
	}
	w.verify()
}

// A checkpoint passes what belongs to others.
func TestCheckpointOfAnIdlePartitionPassesWhatOthersHave(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const busy = "busy"
	idle := w.otherPartition(busy)
	w.append(idle, user("only"))
	w.fill(busy, 1100, 1)
	cfg, r := w.together(projection.Config{}, nil)
	k := w.worker(cfg)
	k.until("the idle partition's checkpoint", func() bool { return k.checkpoints[w.log.Partition(idle)] > 1000 })
	r.alone(t, partitions)
	k.wrote(busy, 1099)
	k.stop()
	k = w.worker(projection.Config{})
	k.wrote(idle, w.append(idle, user("another")))
	if n := k.Stats().Events.Load(); n != 1 {
		t.Errorf("%d events were folded behind the checkpoints, want 1", n)
	}
	w.verify()
}

// A session that cannot be folded is put aside, and the others of all partitions go on.
func TestQuarantineWhileReadingTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append(sick, user("good"))
	last, _ := w.mix(4)
	bad := w.raw(sick, nil, "hello")
	for id := range last {
		last[id] = w.append(id, user("behind"))
	}
	cfg, r := w.together(projection.Config{}, nil)
	k := w.worker(cfg)
	if q := k.record(); q.Session != sick || q.StreamSeq != bad {
		t.Errorf("quarantined %+v, want %s at %d", q, sick, bad)
	}
	for id, seq := range last {
		k.wrote(id, seq)
	}
	r.alone(t, partitions)
	end := w.end()
	k.until("checkpoints behind the bad message", func() bool {
		return k.checkpoints[w.log.Partition(sick)] > bad && slices.ContainsFunc([]int{0, 1}, func(p int) bool { return k.checkpoints[p] == end })
	})
	if got := w.headSeq(sick); got != 0 {
		t.Errorf("the head of %s is at %d, want the last good commit", sick, got)
	}
}

// The server goes away and comes back in the middle.
func TestServerRestartWhileReadingTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	last, _ := w.mix(8)
	cfg, r := w.together(projection.Config{}, map[uint64]func(){w.end() / 2: w.srv.Restart})
	k := w.worker(cfg)
	for id, seq := range last {
		k.wrote(id, seq)
	}
	r.alone(t, partitions)
	for id := range last {
		k.wrote(id, w.append(id, user("behind")))
	}
	w.verify()
}

// The log loses its end while it is read together, and grows beyond it again: every head becomes that
// of the log as it is.
func TestTheLogLosesItsEndWhileItIsReadTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const sessions = 8
	id := func(i int) string { return fmt.Sprint("s", i) }
	for i := range sessions {
		w.fill(id(i), 3, 3<<10)
	}
	cut := w.powerCut()
	for i := range sessions {
		w.fill(id(i), 8, 3<<10)
	}
	w.append("lost", user("all of it"))
	end := w.end()
	cfg, r := w.together(projection.Config{}, map[uint64]func(){end - 10: func() {
		cut()
		for n := range 90 {
			w.append(id(n%(sessions/2)), user(fmt.Sprint("other ", n)))
		}
	}})
	k := w.worker(cfg)
	r.alone(t, partitions)
	w.headsAtTheEnd(sessions, id)
	w.verify()
	k.wrote("lost", w.append("lost", user("again")))
	k.wrote(id(7), w.append(id(7), user("again")))
	w.verify()
}

// A worker that loses its leases in the middle stops there, and another one goes on.
func TestLeasesAreLostWhileReadingTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	last, total := w.mix(8)
	ended := make(chan struct{})
	cfg, r := w.together(projection.Config{ID: "a", Lease: lease}, nil)
	a := w.worker0(cfg, w.journal(nil))
	r.at = map[uint64]func(){w.end() / 2: func() {
		a.tap.set(func(op, bucket, _ string) error {
			if op == "publish" && bucket == projection.WorkersBucket {
				return context.DeadlineExceeded
			}
			return nil
		})
		journaltest.Eventually(t, "the leases to end", func() bool { return a.Stats().Lost.Load() == partitions })
		close(ended)
	}}
	if err := a.Start(journaltest.Context(t)); err != nil {
		t.Fatal(err)
	}
	journaltest.Await(t, "the leases to end", ended)
	r.alone(t, partitions)
	cfg, _ = w.together(projection.Config{ID: "b", Lease: lease}, nil)
	b := w.worker(cfg, w.journal(nil))
	for id, seq := range last {
		w.projected(id, seq)
	}
	b.owners("b", "b")
	if got := a.Stats().Events.Load(); got >= total {
		t.Errorf("a folded %d of %d events though it stopped in the middle", got, total)
	}
	w.verify()
}

// A partition that cannot go on holds the others up only once it has as many bytes as may wait.
func TestOneBlockedPartitionStopsReadingAtTheBound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const blocked = "blocked"
	free := w.otherPartition(blocked)
	const size = 25 << 10
	most := w.log.MaxCommit()/size + 1 // messages of the blocked partition that may wait
	w.fill(free, 5, 10)
	w.fill(blocked, most/2, size)
	early := w.append(free, user("in between"))
	w.fill(blocked, 2*most, size)
	late := w.append(free, user("behind the bound"))
	hold, reached := make(chan struct{}), w.end()-uint64(2*most)
	cfg, r := w.together(projection.Config{CatchUpBytes: 1}, nil) // which is as much as the largest message
	k := w.worker0(cfg)
	k.tap.set(func(op, bucket, key string) error {
		if op == "get" && bucket == snapshot.Bucket && key == blocked {
			<-hold
		}
		return nil
	})
	if err := k.Start(journaltest.Context(t)); err != nil {
		t.Fatal(err)
	}
	k.wrote(free, early) // beyond many of the blocked partition's
	r.until(t, "reading to go on", func() bool { return slices.Contains(r.seqs, reached) })
	r.mu.Lock()
	at := slices.Max(r.seqs)
	r.mu.Unlock()
	if end := w.end(); at >= end || w.headSeq(free) >= late {
		t.Errorf("read up to %d of %d, and the other partition's head is at %d", at, end, w.headSeq(free))
	}
	close(hold)
	k.wrote(free, late)
	k.wrote(blocked, events.Seq(most/2+2*most-1))
	r.alone(t, partitions)
	w.verify()
}

// Messages that are as large as may be need all the room there is, one after the other.
func TestLargestCommitsAreReadTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := "large"
	b := w.otherPartition(a)
	text := strings.Repeat("x", w.log.MaxCommit()-512)
	for range 3 {
		for _, id := range []string{a, b} {
			w.append(id, user(text))
			w.append(id, user("small"))
		}
	}
	cfg, r := w.together(projection.Config{CatchUpBytes: 1}, nil)
	k := w.worker(cfg)
	k.wrote(a, 5)
	k.wrote(b, 5)
	r.alone(t, partitions)
	w.verify()
}

// With a negative bound nobody reads together.
func TestReadingTogetherCanBeTurnedOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	last, _ := w.mix(4)
	cfg, r := w.together(projection.Config{CatchUpBytes: -1}, nil)
	k := w.worker(cfg)
	for id, seq := range last {
		k.wrote(id, seq)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.began != 0 || len(r.seqs) != 0 {
		t.Errorf("%d partitions read together, messages %v", r.began, r.seqs)
	}
}

func TestRebuildReadsTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	_, total := w.mix(6)
	var read atomic.Int64
	cfg, _ := w.together(projection.Config{}, nil)
	cfg.Signals.Read = func(uint64) { read.Add(1) }
	r, err := projection.Rebuild(journaltest.Context(t), w.log, w.buckets, projection.RebuildOptions{Worker: cfg})
	if err != nil {
		t.Fatal(err)
	}
	if r.Events != total || uint64(read.Load()) != w.end() {
		t.Errorf("folded %d of %d events, read %d of %d messages together", r.Events, total, read.Load(), w.end())
	}
	w.verify()
}
