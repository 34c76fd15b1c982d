package projection_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// mix appends a mixture to n sessions: many small events, large ones that fill pages,
// replacements of tails and of pages, several events a commit. It returns each session's
// last seq and how many events there are.
func (w *world) mix(n int) (last map[string]events.Seq, total int64) {
	w.t.Helper()
	last = map[string]events.Seq{}
	add := func(id string, raws ...string) {
		last[id] = w.append(id, raws...)
		total += int64(len(raws))
	}
	for i := range n {
		id := fmt.Sprintf("mixed %d", i)
		add(id, `{"type":"turn/start","data":{"turn":1}}`, `{"type":"step/start","data":{"turn":1,"step":1}}`, user("first"), user("second"))
		at := last[id]
		for k := range 3 + i%5 {
			add(id, user(strings.Repeat("x", 25<<10)), user(fmt.Sprint(k)))
		}
		switch i % 3 {
		case 0:
			add(id, replace([]events.Seq{at - 1, at, at + 1}, "summary"), user("more"))
		case 1:
			add(id, user("more"), replace([]events.Seq{at + 2, at + 3, at + 4, at + 5, at + 6}, "summary"))
		}
		add(id, user("end"))
	}
	return last, total
}

func TestHeadsEqualAFreshFold(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{FlushEvents: 3})
	last, total := w.mix(20)
	for id, seq := range last {
		k.wrote(id, seq)
	}
	r := w.verify()
	if r.Sessions != 20 || r.Events != total || r.Pages == 0 {
		t.Errorf("verified %d sessions, %d events, %d pages; want 20, %d, some", r.Sessions, r.Events, r.Pages, total)
	}
	if got := k.Stats().Events.Load(); got != total {
		t.Errorf("%d events were appended, %d were folded", total, got)
	}

	// A new worker goes on from the checkpoint and applies nothing twice.
	k.stop()
	next := w.worker(projection.Config{})
	w.append("mixed 7", user("later"))
	next.wrote("mixed 7", last["mixed 7"]+1)
	if s := next.Stats(); s.Commits.Load() != 1 || s.Events.Load() != 1 || s.Loads.Load() != 1 {
		t.Errorf("after a restart: %d commits, %d events folded, %d sessions loaded, want one each", s.Commits.Load(), s.Events.Load(), s.Loads.Load())
	}
	w.verify()
}

// A worker that remembers nothing of how far it got finds in the heads that all is applied.
func TestWhatIsAppliedIsSkipped(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	last, total := w.mix(6)
	for id, seq := range last {
		k.wrote(id, seq)
	}
	k.stop()
	for p := range partitions {
		if err := w.buckets.Checkpoints.Purge(journaltest.Context(t), fmt.Sprintf("p%d", p)); err != nil {
			t.Fatal(err)
		}
	}
	again := w.worker(projection.Config{})
	w.append("mixed 0", user("later"))
	again.wrote("mixed 0", last["mixed 0"]+1)
	again.stop()
	if s := again.Stats(); s.Events.Load() != 1 || s.Flushes.Load() != 1 {
		t.Errorf("%d of %d events were folded and %d heads written, want one each", s.Events.Load(), total+1, s.Flushes.Load())
	}
	w.verify()
}

// A worker that dies with its writes leaves nothing that the next one does not find, wherever
// it is cut off.
func TestKilledWorkerLosesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var last map[string]events.Seq
	for round := range 3 {
		k := w.worker(projection.Config{FlushEvents: 2 + round})
		var writes atomic.Int64
		k.tap.set(func(op, _, _ string) error {
			if op != "get" && writes.Add(1) > int64(10+7*round) {
				return errMoved
			}
			return nil
		})
		last, _ = w.mix(8)
		k.until("a refused write", func() bool { return k.moved > 0 })
		k.kill()
	}
	k := w.worker(projection.Config{})
	w.verify()
	for id, seq := range last {
		if got := w.headSeq(id); got != seq {
			t.Errorf("%s: head at seq %d, want %d", id, got, seq)
		}
	}
	k.stop()
}

// A head that was not written, because another owner was first, stays before the checkpoint:
// should nobody append to its session again, the next start finds it.
func TestCheckpointStaysBehindHeads(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	const lost = "lost"
	beside := w.neighbour(lost)
	k.wrote(lost, w.append(lost, user("one")))
	k.tap.set(func(op, bucket, key string) error {
		if op == "update" && bucket == snapshot.Bucket && key == lost {
			return errMoved
		}
		return nil
	})
	at, err := w.Append(journaltest.Context(t), appender.Request{Session: lost, Events: [][]byte{[]byte(user("two"))}})
	if err != nil {
		t.Fatal(err)
	}
	k.until("a refused head", func() bool { return k.moved > 0 })
	k.wrote(beside, w.append(beside, user("one"), user("two")))
	if got := statusOf(t, k, w.log.Partition(lost)); got.OldestUnflushedMs == 0 {
		t.Errorf("a head that is not written does not show in the status: %+v", got)
	}
	k.stop()
	c, err := w.log.Locate(journaltest.Context(t), lost, at.LastSeq)
	if err != nil {
		t.Fatal(err)
	}
	if cp := w.checkpoint(lost); cp >= c.StreamSeq {
		t.Errorf("the checkpoint is %d, the head lacks the commit at %d", cp, c.StreamSeq)
	}
	w.worker(projection.Config{}).wrote(lost, at.LastSeq)
	w.verify()
}

// Two workers on the same partitions hinder each other, and no head is wrong for it.
func TestTwoWorkersFightBySet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.worker(projection.Config{FlushEvents: 2}, w.journal(nil))
	b := w.worker(projection.Config{FlushEvents: 3}, w.journal(nil))
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			id := fmt.Sprintf("fought over %d", i)
			nodes := []events.Seq{}
			for n := range 60 {
				raw, size := user(fmt.Sprint(n)), 10
				if n%9 == 5 {
					size = 30 << 10
					raw = user(strings.Repeat("x", size))
				}
				if n%10 == 9 {
					at := n % len(nodes)
					raw = replace(nodes[at/2:at+1], "summary")
					nodes = append(append(append([]events.Seq{}, nodes[:at/2]...), events.Seq(n)), nodes[at+1:]...)
				} else {
					nodes = append(nodes, events.Seq(n))
				}
				w.append(id, raw)
			}
		})
	}
	wg.Wait()
	w.verify()
	a.stop()
	b.stop()
	w.verify()
	moved := a.Stats().Moved.Load() + b.Stats().Moved.Load()
	if moved == 0 {
		t.Errorf("the workers never met")
	}
	t.Logf("%d refused head writes, %d and %d heads written, %d and %d events folded of 240", moved,
		a.Stats().Flushes.Load(), b.Stats().Flushes.Load(), a.Stats().Events.Load(), b.Stats().Events.Load())
}

// An event beyond the one that follows the head is no end: what lies between is read from the log.
func TestGapIsHealed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	seq := w.fill("gap", 5, 30<<10)
	k.wrote("gap", seq)
	k.stop()
	if err := w.buckets.Snapshots.KV().Purge(journaltest.Context(t), "gap"); err != nil {
		t.Fatal(err)
	}
	k = w.worker(projection.Config{})
	k.wrote("gap", w.append("gap", user("behind the gap")))
	if s := k.Stats(); s.Healed.Load() != 1 || s.Events.Load() != 6 {
		t.Errorf("%d gaps healed, %d events folded, want 1 and 6", s.Healed.Load(), s.Events.Load())
	}
	w.verify()
}

// Sessions that do not fit into memory are dropped and loaded again.
func TestSessionsAreDroppedAndLoadedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{CacheBytes: 1})
	ids := []string{"s"}
	for i := 0; len(ids) < 5; i++ { // all of one partition, which keeps the last one
		if id := fmt.Sprintf("s%d", i); w.log.Partition(id) == w.log.Partition("s") {
			ids = append(ids, id)
		}
	}
	for round := range 3 {
		for _, id := range ids {
			k.wrote(id, w.append(id, user(strings.Repeat("x", 40<<10)), user(fmt.Sprint(round))))
		}
	}
	if s := k.Stats(); s.Loads.Load() != 15 {
		t.Errorf("5 sessions with 3 commits each were loaded %d times, want 15", s.Loads.Load())
	}
	if n := k.SessionsInMemory(); n > 2 { // the last one, and the one before until it was seen to be written
		t.Errorf("%d sessions in memory", n)
	}
	w.verify()
}

// What is read faster than it is written waits in bounded memory, and checkpoints follow although there
// is always more to be read.
func TestMemoryOfWhatIsNotWrittenIsBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const sessions, limit = 300, 64 << 10
	id := w.neighbour("s")
	n := w.log.Partition(id)
	var ids []string
	for i := 0; len(ids) < sessions; i++ {
		if id := fmt.Sprintf("n%d", i); w.log.Partition(id) == n {
			ids = append(ids, id)
			w.append(id, user(strings.Repeat("x", 8<<10)))
		}
	}
	stream, err := w.js.Stream(journaltest.Context(t), w.log.Config().Stream)
	if err != nil {
		t.Fatal(err)
	}
	end := stream.CachedInfo().State.LastSeq
	k := w.worker0(projection.Config{
		Partitions: []int{n}, FlushAfter: time.Hour, FlushEvents: 1 << 20, CheckpointEvery: 1, Writes: 1, UnflushedBytes: limit,
	})
	var early, most atomic.Int64
	k.tap.set(func(op, bucket, key string) error {
		switch {
		case bucket == projection.CheckpointsBucket && op != "get" && k.Stats().Commits.Load() < sessions/2:
			early.Add(1)
		case bucket == snapshot.Bucket && op == "create":
			most.Store(max(most.Load(), k.UnflushedBytes()))
		}
		return nil
	})
	if err := k.Start(journaltest.Context(t)); err != nil {
		t.Fatal(err)
	}
	journaltest.Eventually(t, "all to be read", func() bool { return statusOf(t, k, n).Read == end })
	if early.Load() == 0 {
		t.Error("no checkpoint was written in the first half of the log")
	}
	if m := most.Load(); m == 0 || m > limit+32<<10 {
		t.Errorf("at most %d bytes were not written, want 1 to %d and what one commit takes", m, limit)
	}
	k.stop()
	w.verify()
}

// Pages that no head refers to any more stay for the time of grace, and then go.
func TestUnreferencedPagesGo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{Grace: 20 * time.Millisecond})
	k.wrote("s", w.fill("s", 6, 40<<10))
	kv := w.buckets.Snapshots.KV()
	if _, err := kv.Get(journaltest.Context(t), "s.0"); err != nil {
		t.Fatal(err)
	}
	k.wrote("s", w.append("s", replace([]events.Seq{0, 1, 2}, "summary")))
	for _, key := range []string{"s.0", "s.1", "s.2"} {
		journaltest.Eventually(t, key+" to be deleted", func() bool {
			_, err := kv.Get(journaltest.Context(t), key)
			return errors.Is(err, jetstream.ErrKeyNotFound)
		})
	}
	w.verify()
}

// Stop writes what was folded and the checkpoints, however far off their time is.
func TestStopDrains(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{FlushAfter: time.Hour, FlushEvents: 1 << 20, CheckpointEvery: time.Hour})
	last, _ := w.mix(5)
	info, err := w.log.Info(journaltest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	end := info.State.LastSeq
	journaltest.Eventually(t, "the log to be read", func() bool {
		read := uint64(0)
		for _, p := range k.Status(journaltest.Context(t)) {
			if p.Lag == nil || *p.Lag > 0 {
				return false
			}
			read = max(read, p.Read)
		}
		return read == end
	})
	if seq := w.headSeq("mixed 0"); seq != events.NoSeq {
		t.Fatalf("a head at seq %d before its time", seq)
	}
	k.stop()
	for id, seq := range last {
		if got := w.headSeq(id); got != seq {
			t.Errorf("%s: head at seq %d, want %d", id, got, seq)
		}
	}
	if got := max(w.checkpoint("mixed 0"), w.checkpoint(w.otherPartition("mixed 0"))); got != end {
		t.Errorf("the checkpoints end at %d, the log at %d", got, end)
	}
	next := w.worker(projection.Config{})
	next.stop()
	if n := next.Stats().Commits.Load(); n != 0 {
		t.Errorf("%d commits were folded again", n)
	}
}

func (w *world) otherPartition(session string) string {
	for i := 0; ; i++ {
		if id := fmt.Sprintf("other-%d", i); w.log.Partition(id) != w.log.Partition(session) {
			return id
		}
	}
}

func TestStartAndStopTolerateMisuse(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker0(projection.Config{})
	ctx := journaltest.Context(t)
	k.stop()
	if err := k.Retry(ctx, "s"); !errors.Is(err, &events.Error{Code: events.CodeUnavailable}) {
		t.Errorf("Retry before Start: %v", err)
	}
	if err := k.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if err := k.Start(ctx); err == nil {
		t.Errorf("a second Start was accepted")
	}
	k.wrote("s", w.append("s", user("one")))
	k.stop()
	k.stop()
	if err := k.Retry(ctx, "s"); !errors.Is(err, &events.Error{Code: events.CodeUnavailable}) {
		t.Errorf("Retry after Stop: %v", err)
	}
	if err := k.Start(ctx); err != nil {
		t.Fatalf("Start after Stop: %v", err)
	}
	k.wrote("s", w.append("s", user("two")))
}

// A checkpoint that cannot be read is no reason to start somewhere else.
func TestUnreadableCheckpointIsAnError(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if _, err := w.buckets.Checkpoints.Put(journaltest.Context(t), "p1", []byte(`{"v":2}`)); err != nil {
		t.Fatal(err)
	}
	k := w.worker0(projection.Config{})
	if err := k.Start(journaltest.Context(t)); !errors.Is(err, &events.Error{Code: events.CodeCorrupt}) || !strings.Contains(err.Error(), "p1") {
		t.Errorf("Start: %v", err)
	}
	if err := w.buckets.Checkpoints.Purge(journaltest.Context(t), "p1"); err != nil {
		t.Fatal(err)
	}
	if err := k.Start(journaltest.Context(t)); err != nil {
		t.Errorf("Start: %v", err)
	}
}

// The server goes away and comes back under load; what was acknowledged is projected.
func TestServerRestartDuringProjection(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{FlushEvents: 4})
	var wg sync.WaitGroup
	half := make(chan struct{})
	for i := range 3 {
		wg.Go(func() {
			id := fmt.Sprintf("s%d", i)
			for n := range 40 {
				if n == 20 && i == 0 {
					close(half)
				}
				w.append(id, user(strings.Repeat("x", 100+n*700)))
			}
		})
	}
	journaltest.Await(t, "half of the appends", half)
	w.srv.Restart()
	wg.Wait()
	for i := range 3 {
		k.wrote(fmt.Sprintf("s%d", i), 39)
	}
	w.verify()
	if n := k.Stats().Events.Load(); n < 120 {
		t.Errorf("%d events folded, want 120", n)
	}
}

func statusOf(t testing.TB, k *worker, partition int) projection.PartitionStatus {
	t.Helper()
	for _, p := range k.Status(journaltest.Context(t)) {
		if p.Partition == partition {
			return p
		}
	}
	t.Fatalf("no partition %d", partition)
	return projection.PartitionStatus{}
}

func caughtUp(ps []projection.PartitionStatus) bool {
	for _, p := range ps {
		if p.Lag == nil || *p.Lag > 0 || p.OldestUnflushedMs > 0 {
			return false
		}
	}
	return len(ps) > 0
}

// Whoever asks while events are appended is never told that all is projected when it is not.
func TestCaughtUpIsNeverClaimedWhileBehind(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	claims := 0
	for n := range 60 {
		id := fmt.Sprintf("s%d", n%3)
		seq := w.append(id, user(fmt.Sprint(n)))
		for !caughtUp(k.Status(journaltest.Context(t))) {
		}
		claims++
		if got := w.headSeq(id); got < seq {
			t.Fatalf("caught up is claimed with the head of %s at seq %d, before seq %d", id, got, seq)
		}
	}
	t.Logf("%d claims", claims)
}

// What stands still on the way into the heads shows: a message that cannot be folded yet as
// lag, a head that cannot be written as age.
func TestWhatStandsStillShows(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	away := errors.New("away")
	k.tap.set(func(op, bucket, _ string) error {
		if op == "get" && bucket == snapshot.Bucket {
			return away
		}
		return nil
	})
	w.fill("s", 5, 10)
	p := w.log.Partition("s")
	journaltest.Eventually(t, "trouble", func() bool { return statusOf(t, k, p).Error != "" })
	for range 20 {
		if st := statusOf(t, k, p); st.Lag != nil && *st.Lag == 0 || st.Read > 0 {
			t.Fatalf("nothing can be folded, and the status says %+v", st)
		}
	}
	k.tap.set(func(op, bucket, _ string) error {
		if op != "get" && bucket == snapshot.Bucket {
			return away
		}
		return nil
	})
	journaltest.Eventually(t, "the log to be read", func() bool {
		st := statusOf(t, k, p)
		return st.Lag != nil && *st.Lag == 0
	})
	for range 20 {
		if st := statusOf(t, k, p); st.OldestUnflushedMs == 0 || st.Checkpoint > 0 {
			t.Fatalf("no head can be written, and the status says %+v", st)
		}
	}
	if k.OldestUnflushed() <= 0 {
		t.Errorf("the age of the oldest event is %v", k.OldestUnflushed())
	}
	k.tap.set(nil)
	k.wrote("s", 4)
	journaltest.Eventually(t, "the end", func() bool { return caughtUp(k.Status(journaltest.Context(t))) })
	w.verify()
}
