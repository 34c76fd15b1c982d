package projection_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/erasure"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// erase erases a session as an operator does.
func (w *world) erase(session string) {
	w.t.Helper()
	ctx := journaltest.Context(w.t)
	e, err := erasure.New(ctx, w.log, w.headers)
	if err != nil {
		w.t.Fatal(err)
	}
	if _, err := e.Erase(ctx, erasure.Request{Session: session, Reason: "asked for", By: "ann"}); err != nil {
		w.t.Fatal(err)
	}
}

// left is how many messages a bucket has of a session, markers of deleted keys among them if asked.
func (w *world) left(session string, markers bool) (n int) {
	w.t.Helper()
	ctx := journaltest.Context(w.t)
	var opts []jetstream.WatchOpt
	if !markers {
		opts = append(opts, jetstream.IgnoreDeletes())
	}
	token := events.Token(session)
	watch, err := w.buckets.Snapshots.KV().WatchFiltered(ctx, []string{token, token + ".*"}, opts...)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = watch.Stop() }()
	for e := range watch.Updates() {
		if e == nil {
			return n
		}
		n++
	}
	return n
}

// A worker that stops, and so does not read the tombstone, has the first head and pages of a
// session under way while it is erased: what arrives behind the erasure is taken back.
func TestAWriteThatArrivesBehindAnErasureIsTakenBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const id = "victim"
	arrived, goOn := make(chan struct{}), make(chan struct{})
	k := w.worker0(projection.Config{})
	once := sync.OnceFunc(func() { close(arrived) })
	k.tap.set(func(op, _, _ string) error {
		if op == "create" {
			once()
			<-goOn
		}
		return nil
	})
	if err := k.Start(journaltest.Context(t)); err != nil {
		t.Fatal(err)
	}
	w.fill(id, 12, 30<<10)
	journaltest.Await(t, "the first write", arrived)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if err := k.Stop(over); err == nil { // it is told, and nobody waits for it
		t.Error("the worker stopped with a write under way")
	}
	w.erase(id)
	close(goOn)
	k.stop()
	if n := w.left(id, false); n > 0 {
		t.Errorf("%d keys of the erased session are left", n)
	}
	if r := w.verify(); len(r.Erased) != 1 {
		t.Errorf("verify: %+v", r)
	}
}

// What a worker that was killed left of an erased session goes with a sweep, and so do markers of
// deleted keys once they are old enough.
func TestSweepRemovesWhatIsLeftOfErasedSessionsAndOldMarkers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	kv := w.buckets.Snapshots.KV()
	k := w.worker(projection.Config{})
	k.wrote("victim", w.append("victim", user("secret")))
	k.wrote("other", w.append("other", user("kept")))
	k.stop()
	head, err := kv.Get(ctx, snapshot.HeadKey("victim"))
	if err != nil {
		t.Fatal(err)
	}
	w.erase("victim")
	for _, key := range []string{snapshot.HeadKey("victim"), snapshot.PageKey("victim", 0)} {
		if _, err := kv.Create(ctx, key, head.Value()); err != nil {
			t.Fatal(err)
		}
	}
	ids, err := erasure.Sessions(ctx, w.log)
	if err != nil || len(ids) != 1 || ids[0] != "victim" {
		t.Fatalf("erased: %v, %v", ids, err)
	}
	if r, err := w.buckets.Snapshots.Sweep(ctx, snapshot.Sweep{Erased: ids, DryRun: true, Markers: time.Nanosecond}); err != nil || w.left("victim", false) != 2 {
		t.Errorf("a dry run: %+v, %v", r, err)
	}
	if r, err := w.buckets.Snapshots.Sweep(ctx, snapshot.Sweep{Erased: ids, Session: "other"}); err != nil || r.Erased != 0 {
		t.Errorf("of another session: %+v, %v", r, err)
	}
	r, err := w.buckets.Snapshots.Sweep(ctx, snapshot.Sweep{Erased: ids, Markers: time.Hour})
	if err != nil || r.Erased != 2 || r.Markers != 0 || w.left("victim", false) != 0 || w.left("victim", true) != 2 {
		t.Errorf("%+v, %v; left are %d and %d", r, err, w.left("victim", false), w.left("victim", true))
	}
	r, err = w.buckets.Snapshots.Sweep(ctx, snapshot.Sweep{Erased: ids, Markers: time.Nanosecond})
	if err != nil || r.Erased != 0 || r.Markers != 2 || w.left("victim", true) != 0 {
		t.Errorf("markers: %+v, %v; %d are left", r, err, w.left("victim", true))
	}
	k = w.worker(projection.Config{})
	k.wrote("other", w.append("other", user("more")))
	w.verify()
}

// A sweep removes no key that was written again behind its marker.
func TestSweepOfMarkersLeavesWhatWasWrittenAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	kv := w.buckets.Snapshots.KV()
	for _, key := range []string{"a.0", "b.0"} {
		if _, err := kv.Put(ctx, key, []byte("{}")); err != nil {
			t.Fatal(err)
		}
		if err := kv.Purge(ctx, key); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := kv.Create(ctx, "b.0", []byte("{}")); err != nil {
		t.Fatal(err)
	}
	r, err := w.buckets.Snapshots.Sweep(ctx, snapshot.Sweep{Markers: time.Nanosecond, Grace: time.Hour})
	if err != nil || r.Markers != 1 || w.left("a", true) != 0 || w.left("b", true) != 1 {
		t.Errorf("%+v, %v; left are %d and %d", r, err, w.left("a", true), w.left("b", true))
	}
}

// Whoever follows the feed hears that a session was erased: of any feed that told of it, also one
// that was resumed from before, and one that asks for some sessions alone.
func TestFeedTellsOfAnErasure(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.worker(projection.Config{})
	f, ctx := w.fleet(), journaltest.Context(t)
	filters := []projection.FleetFilter{{}, {State: projection.StateOpen}}
	var feeds []*projection.Feed
	readers := make([]feedReader, len(filters))
	for _, filter := range filters {
		fd, _, err := f.Feed(ctx, filter, 0)
		if err != nil {
			t.Fatal(err)
		}
		feeds = append(feeds, fd)
	}
	w.append("victim", turnStart)
	w.append("other", turnStart)
	for i := range readers {
		r := &readers[i]
		if err := r.until(ctx, feeds[i], func() bool { return r.latest["victim"].OpenTurn != nil && r.latest["other"].OpenTurn != nil }); err != nil {
			t.Fatal(err)
		}
	}
	rev := readers[0].rev
	w.erase("victim")
	told := func(r *feedReader) func() bool {
		return func() bool { c := r.latest["victim"]; return c.Erased && c.Left }
	}
	for i := range readers {
		if err := readers[i].until(ctx, feeds[i], told(&readers[i])); err != nil {
			t.Errorf("%+v: %v", filters[i], err)
		}
	}
	for _, filter := range filters { // of who was away meanwhile
		fd, _, err := f.Feed(ctx, filter, rev)
		if err != nil {
			t.Fatal(err)
		}
		var r feedReader
		if err := r.take(fd.Aside()); err != nil || !told(&r)() {
			t.Errorf("resumed, %+v: %+v, %v", filter, r.latest, err)
		}
		if c, ok := r.latest["other"]; ok && (c.Erased || c.Left) {
			t.Errorf("resumed, %+v: another session is told of as %+v", filter, c)
		}
	}
}
