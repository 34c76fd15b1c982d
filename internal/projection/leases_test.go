package projection_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

// lease is the shortest that there is, so that tests need not wait.
const lease = 2 * time.Second

// sharer starts a worker that shares the partitions, in a process of its own.
func (w *world) sharer(id string) *worker {
	w.t.Helper()
	return w.worker(projection.Config{ID: id, Lease: lease}, w.journal(nil))
}

func (k *worker) overview() *projection.Overview {
	k.t.Helper()
	o, err := k.Overview(journaltest.Context(k.t))
	if err != nil {
		k.t.Fatal(err)
	}
	return o
}

// owners waits until the workers with leases are these, one for each partition, in any order.
func (k *worker) owners(want ...string) {
	k.t.Helper()
	var got []string
	slices.Sort(want)
	deadline := time.Now().Add(journaltest.Deadline / 2)
	journaltest.Eventually(k.t, fmt.Sprint("the partitions to be owned by ", want), func() bool {
		got = nil
		for _, p := range k.overview().Partitions {
			if p.Worker != nil {
				got = append(got, *p.Worker)
			}
		}
		slices.Sort(got)
		if time.Now().After(deadline) {
			k.t.Fatalf("owners are %v, want %v", got, want)
		}
		return slices.Equal(got, want)
	})
}

// projected waits until a head holds seq, as a reader of another process does.
func (w *world) projected(session string, seq events.Seq) {
	w.t.Helper()
	v, err := w.reader.View(journaltest.Context(w.t), session, projection.Want{MinSeq: seq, Timeout: 30 * time.Second})
	if err != nil || v.Last() < seq {
		w.t.Fatalf("%s is not projected up to %d: %v", session, seq, err)
	}
}

func TestWorkersShareThePartitions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.sharer("a")
	last, _ := w.mix(6)
	a.owners("a", "a")
	b := w.sharer("b")
	a.owners("a", "b")
	for id := range last {
		last[id] = w.append(id, user("of two"))
	}
	for id, seq := range last {
		w.projected(id, seq)
	}
	if a.Stats().Stale.Load() != 0 || b.Stats().Stale.Load() != 0 {
		t.Errorf("writes were refused (%d, %d): a partition was worked twice in an orderly hand-over", a.Stats().Stale.Load(), b.Stats().Stale.Load())
	}
	if o := a.overview(); len(o.Workers) != 2 || len(o.Unowned) != 0 || len(o.Workers[0].Partitions) != 1 {
		t.Errorf("overview %+v: want two workers with a partition each", o)
	}
	journaltest.Eventually(t, "all of it to be caught up", func() bool { return b.overview().CaughtUp })

	b.stop()
	for _, p := range a.overview().Partitions {
		if p.Worker != nil && *p.Worker == "b" {
			t.Errorf("partition %d is still leased to a worker that has stopped", p.Partition)
		}
	}
	a.owners("a", "a")
	for id := range last {
		w.projected(id, w.append(id, user("of one")))
	}
	w.verify()
	if o := a.overview(); len(o.Workers) != 1 {
		t.Errorf("workers %+v: the one that left is still there", o.Workers)
	}
}

// A worker whose renewals get no answer stops before its leases end, and writes nothing more;
// the other one takes over within two lease times.
func TestWorkerThatCannotRenewIsReplaced(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.sharer("a"), w.sharer("b")
	a.owners("a", "b")
	var session string
	for i := 0; session == ""; i++ {
		id := fmt.Sprint("s", i)
		if o := a.overview().Partitions[w.log.Partition(id)]; *o.Worker == "a" {
			session = id
		}
	}
	w.projected(session, w.append(session, user("first")))

	var cut atomic.Bool
	var late atomic.Int64 // writes of a behind the end of its lease
	var ended atomic.Int64
	a.tap.set(func(op, bucket, key string) error {
		if bucket == projection.WorkersBucket {
			if op == "publish" && cut.Load() {
				return context.DeadlineExceeded
			}
			return nil
		}
		if at := ended.Load(); at != 0 && op != "get" && time.Now().UnixNano() > at {
			late.Add(1)
		}
		return nil
	})
	ended.Store(time.Now().Add(lease).UnixNano())
	cut.Store(true)
	before := time.Now()
	seq := w.append(session, user("while a is cut off"))
	b.owners("b", "b")
	if took := time.Since(before); took > 2*lease+time.Second {
		t.Errorf("taken over after %v, later than two leases of %v", took, lease)
	} else {
		t.Logf("taken over after %v with leases of %v", took, lease)
	}
	seq = max(seq, w.append(session, user("b's")))
	w.projected(session, seq)
	b.wrote(session, seq)
	if a.Stats().Lost.Load() != 1 {
		t.Errorf("a lost %d leases, want 1", a.Stats().Lost.Load())
	}
	if late.Load() != 0 {
		t.Errorf("a wrote %d times behind the end of its lease", late.Load())
	}
	if a.Ready() == nil {
		t.Error("a says that it is ready though it is no member any more")
	}
	ended.Store(0)
	cut.Store(false)
	a.owners("a", "b") // it joins again by itself
	w.verify()
}

func TestLeaseThatNobodyRenewsIsTakenEvenIfTheServerKeepsIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	kv, err := w.js.KeyValue(journaltest.Context(t), projection.WorkersBucket)
	if err != nil {
		t.Fatal(err)
	}
	// Without a TTL of their own these keys live for ever.
	for key, value := range map[string]string{
		"member.ghost": `{"v":1,"id":"ghost","run":"r","started":1,"renewed":1,"ttlMs":2000,"partitions":[]}`,
		"lease.0":      `{"v":1,"worker":"ghost","run":"r","since":1,"ttlMs":2000}`,
		"lease.1":      `{"v":1,"worker":"ghost","run":"r","since":1,"ttlMs":2000}`,
		"member.newer": `{"v":2,"id":"newer"}`,
	} {
		if _, err := kv.Put(journaltest.Context(t), key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	a := w.sharer("a")
	a.owners("a", "a")
	w.projected("s", w.append("s", user("hello")))
}

func TestWorkerIDIsTakenOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.sharer("same")
	b := w.worker0(projection.Config{ID: "same", Lease: lease}, w.journal(nil))
	err := b.Start(journaltest.Context(t))
	if !errors.Is(err, &events.Error{Code: events.CodeBadRequest}) || !strings.Contains(err.Error(), "of its own") {
		t.Errorf("a second worker of one id: %v, want it refused", err)
	}
	a.owners("same", "same")
	a.stop()
	if err := b.Start(journaltest.Context(t)); err != nil {
		t.Fatalf("the id of a worker that left: %v", err)
	}
	b.owners("same", "same")
}

func TestIDOfADeadWorkerIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	value := []byte(`{"v":1,"id":"pod-0","run":"before","started":1,"renewed":1,"ttlMs":2000,"partitions":[]}`)
	kv, err := w.js.KeyValue(journaltest.Context(t), projection.WorkersBucket)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Create(journaltest.Context(t), "member.pod-0", value, jetstream.KeyTTL(lease)); err != nil {
		t.Fatal(err)
	}
	k := w.sharer("pod-0")
	k.owners("pod-0", "pod-0")
	if err := k.Ready(); err != nil {
		t.Error(err)
	}
}

func TestRetryReachesTheWorkerThatHasThePartition(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.sharer("a")
	w.append("bad", user("fine"))
	w.store("bad", func(seq events.Seq) string {
		return line("user/message", seq, `,"surfaceOp":{"op":"replace","startSeq":7,"endSeq":7},"sourceEventSeqs":[0]`, message("no"))
	})
	a.record()
	// A process that works nothing asks the one that does.
	other := w.worker0(projection.Config{ID: "other"}, w.journal(nil))
	err := other.Retry(journaltest.Context(t), "bad")
	if !errors.Is(err, events.ErrQuarantined) {
		t.Errorf("retry of what is still bad: %v", err)
	}
	err = other.Retry(journaltest.Context(t), "unknown")
	if !errors.Is(err, &events.Error{Code: events.CodeNotFound}) {
		t.Errorf("retry of a session that is not in quarantine: %v", err)
	}
	if o := other.overview(); o.Partitions[w.log.Partition("bad")].Quarantined != 1 {
		t.Errorf("overview %+v: want one session in quarantine", o)
	}
	a.stop()
	err = other.Retry(journaltest.Context(t), "bad")
	if !errors.Is(err, &events.Error{Code: events.CodeUnavailable}) || !strings.Contains(err.Error(), "no worker has partition") {
		t.Errorf("retry while nobody works: %v", err)
	}
}

func TestServerRestartLeavesNobodyBehind(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.sharer("a"), w.sharer("b")
	a.owners("a", "b")
	for i := range 8 {
		w.projected(fmt.Sprint("s", i), w.append(fmt.Sprint("s", i), user("before")))
	}
	w.srv.Down()
	journaltest.Eventually(t, "both workers to have lost their leases", func() bool {
		return a.Stats().Lost.Load() == 1 && b.Stats().Lost.Load() == 1
	})
	w.srv.Up()
	a.owners("a", "b")
	w.restartAppender()
	for i := range 8 {
		w.projected(fmt.Sprint("s", i), w.append(fmt.Sprint("s", i), user("after")))
	}
	w.verify()
	// What was said about the time without a server is over.
	for _, k := range []*worker{a, b} {
		journaltest.Eventually(t, "the error texts to be gone", func() bool {
			for _, st := range k.Status(journaltest.Context(t)) {
				if st.Error != "" {
					return false
				}
			}
			return true
		})
	}
}

func TestLagOfPartitionsThatNobodyWorksIsMeasured(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.fill("s", 5, 10)
	idle := w.worker0(projection.Config{}, w.journal(nil))
	o := idle.overview()
	if o.Lag == nil || *o.Lag != 5 || o.CaughtUp || len(o.Unowned) != partitions {
		t.Errorf("overview without a worker: %+v, want a lag of 5 and %d unowned partitions", o, partitions)
	}
	a := w.sharer("a")
	journaltest.Eventually(t, "the gauges to say that all is read", func() bool {
		g := a.Gauges()
		return g.Lag == 0 && g.LagTotal == 0 && g.Owned == partitions && g.Unowned == 0 && g.Workers == 1
	})
}

// A worker that froze said last that nothing is left to read. That is not repeated for as long as
// its keys live.
func TestLagOfAWorkerThatIsSilentIsMeasured(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.fill("s", 5, 10)
	n := w.log.Partition("s")
	kv, err := w.js.KeyValue(journaltest.Context(t), projection.WorkersBucket)
	if err != nil {
		t.Fatal(err)
	}
	for key, value := range map[string]string{ // without a TTL of their own they live for ever
		"member.frozen":           fmt.Sprintf(`{"v":1,"id":"frozen","run":"r","started":1,"renewed":1,"ttlMs":2000,"fold":1,"generation":1,"partitions":[{"partition":%d,"read":0,"checkpoint":0,"lag":0,"oldestUnflushedMs":7,"sessions":1}]}`, n),
		fmt.Sprint("lease.", n):   `{"v":1,"worker":"frozen","run":"r","since":1,"ttlMs":2000}`,
		fmt.Sprint("lease.", 1-n): `{"v":1,"worker":"other","run":"q","since":1,"ttlMs":2000}`,
	} {
		if _, err := kv.Put(journaltest.Context(t), key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	idle := w.worker0(projection.Config{}, w.journal(nil))
	var o *projection.Overview
	journaltest.Eventually(t, "the worker to be called silent", func() bool {
		o = idle.overview()
		return len(o.Workers) == 1 && o.Workers[0].Silent
	})
	p := o.Partitions[n]
	if p.SilentSince == nil || *p.SilentSince < o.Generation.Since || p.Lag == nil || *p.Lag != 5 || p.OldestUnflushedMs <= 7+1000 || p.Sessions != 1 {
		t.Errorf("its partition: %+v, want since when it is silent, a lag of 5 and an age that grows", p)
	}
	if *p.Worker != "frozen" || o.Workers[0].SilentMs < 1000 || o.CaughtUp || o.Lag == nil || *o.Lag != 5 {
		t.Errorf("overview: %+v, want a lag of 5", o)
	}
	if q := o.Partitions[1-n]; q.SilentSince != nil {
		t.Errorf("a partition of another worker: %+v, want nothing said of silence", q)
	}
}

// A server that was killed may bring back the key of a worker that left, and forget that it was to run
// out. Such a worker is neither counted nor waited for.
func TestAWorkerThatCameBackFromTheDeadIsNotCounted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	kv, err := w.js.KeyValue(journaltest.Context(t), projection.WorkersBucket)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(journaltest.Context(t), "member.ghost", []byte(`{"v":1,"id":"ghost","run":"r","started":1,"renewed":1,"ttlMs":100,"fold":1,"generation":1,"partitions":[]}`)); err != nil {
		t.Fatal(err)
	}
	a := w.sharer("a")
	journaltest.Eventually(t, "the living worker to be all that is counted", func() bool {
		g := a.Gauges()
		return g.Workers == 1 && g.Owned == partitions && g.Unowned == 0
	})
}

func TestWatchFollowsASessionFromOneWorkerToTheNext(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.sharer("a")
	w.projected("s", w.append("s", user("0")))
	watch, err := projection.NewHubs(w.reader, w.nc).Watch(journaltest.Context(t), "s", events.NoSeq)
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Close()
	var got []events.Seq
	next := func(upTo events.Seq) {
		t.Helper()
		for len(got) == 0 || got[len(got)-1] < upTo {
			ds, err := watch.Next(journaltest.Context(t))
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range ds {
				got = append(got, d.Seq)
			}
		}
	}
	next(w.append("s", user("1")))
	b := w.sharer("b")
	a.stop()
	b.owners("b", "b")
	next(w.append("s", user("2")))
	if want := []events.Seq{0, 1, 2}; !slices.Equal(got, want) {
		t.Errorf("watched %v, want %v", got, want)
	}
	if b.Stats().Flushes.Load() == 0 {
		t.Error("b has not written: the watch did not see a hand-over")
	}
}

func TestStopToleratesAnyState(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker0(projection.Config{ID: "a", Lease: lease})
	k.stop()
	if err := k.Start(journaltest.Context(t)); err != nil {
		t.Fatal(err)
	}
	if err := k.Start(journaltest.Context(t)); err == nil {
		t.Error("a second start was not refused")
	}
	k.stop()
	k.stop()
	if k.Ready() == nil {
		t.Error("a stopped worker is ready")
	}
}

func TestWhatALeaseOrAnIDMayBe(t *testing.T) {
	t.Parallel()
	for d, ok := range map[time.Duration]bool{time.Second: false, 1999 * time.Millisecond: false, 2 * time.Second: true, 2500 * time.Millisecond: false, time.Minute: true, -time.Second: false} {
		if err := projection.CheckLease(d); (err == nil) != ok {
			t.Errorf("lease of %v: %v", d, err)
		}
	}
	for id, ok := range map[string]bool{"": false, "pod-0": true, "a.b": false, "a*": false, "ü": false, strings.Repeat("x", 129): false, projection.DefaultWorkerID(): true} {
		if err := projection.CheckWorkerID(id); (err == nil) != ok {
			t.Errorf("id %q: %v", id, err)
		}
	}
}

func TestBucketWhoseKeysCannotRunOutIsRefused(t *testing.T) {
	t.Parallel()
	srv := journaltest.Start(t)
	js := srv.JetStream(t)
	if _, err := js.CreateKeyValue(journaltest.Context(t), jetstream.KeyValueConfig{Bucket: projection.WorkersBucket}); err != nil {
		t.Fatal(err)
	}
	if _, err := projection.OpenRoster(journaltest.Context(t), js, 1); err == nil || !strings.Contains(err.Error(), "delete it") {
		t.Errorf("a bucket without TTLs: %v, want it refused", err)
	}
}

// Two processes of one id do not fight, even when the second one came while the first was away.
func TestWorkerWhoseIDWasTakenStandsBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.sharer("pod")
	a.owners("pod", "pod")
	var cut atomic.Bool
	a.tap.set(func(op, _, _ string) error {
		if op == "publish" && cut.Load() {
			return context.DeadlineExceeded
		}
		return nil
	})
	cut.Store(true)
	b := w.sharer("pod") // waits until the other's key has run out
	cut.Store(false)
	journaltest.Eventually(t, "the first to see that its id is taken", func() bool {
		err := a.Ready()
		return err != nil && strings.Contains(err.Error(), "was taken by another process")
	})
	seq := w.append("s", user("hello"))
	b.wrote("s", seq)
	if n := len(a.Status(journaltest.Context(t))); n != 0 {
		t.Errorf("the first still works %d partitions", n)
	}
	b.stop()
	journaltest.Eventually(t, "the first to be back", func() bool { return a.Ready() == nil && len(a.Status(journaltest.Context(t))) == partitions })
	w.projected("s", w.append("s", user("again")))
	w.verify()
}
