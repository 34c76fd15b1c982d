package projection_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// pages are the keys of a session's pages in the bucket.
func (w *world) pages(session string) (keys []string) {
	w.t.Helper()
	l, err := w.buckets.Snapshots.KV().ListKeysFiltered(journaltest.Context(w.t), events.Token(session)+".*")
	if err != nil {
		w.t.Fatal(err)
	}
	for k := range l.Keys() {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func TestSweepRemovesPagesThatAStopLeftAndNoOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	const id = "s 1"
	k := w.worker(projection.Config{Grace: time.Hour})
	k.wrote(id, w.fill(id, 12, 30<<10))
	before := w.pages(id)
	k.wrote(id, w.append(id, replace([]events.Seq{3, 4, 5, 6, 7, 8}, "less")))
	k.stop() // within the grace time
	kv := w.buckets.Snapshots.KV()
	h, _, err := w.buckets.Snapshots.Head(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	coming := snapshot.PageKey(events.Token(id), h.NextPage) // of a head that is about to be written
	headless := "headless.0"
	for _, key := range []string{coming, headless} {
		if _, err := kv.Put(ctx, key, []byte(`{"v":1,"nodes":[]}`)); err != nil {
			t.Fatal(err)
		}
	}
	var leaked []string
	r, err := w.buckets.Snapshots.Sweep(ctx, snapshot.Sweep{Session: id, DryRun: true, Grace: time.Nanosecond, Found: func(key string) { leaked = append(leaked, key) }})
	if err != nil || r.Unreferenced == 0 || r.Removed != 0 || len(leaked) != r.Unreferenced {
		t.Fatalf("%+v, %q, %v", r, leaked, err)
	}
	for _, key := range leaked {
		if !slices.Contains(before, key) {
			t.Errorf("%s was found, which is no page of the head before, %q", key, before)
		}
	}
	// Young pages are not looked at.
	if r, err := w.buckets.Snapshots.Sweep(ctx, snapshot.Sweep{Grace: time.Hour}); err != nil || r.Pages != 0 {
		t.Errorf("within an hour: %+v, %v", r, err)
	}
	// A page that is written again after it was found is a page of somebody.
	again := leaked[0]
	r, err = w.buckets.Snapshots.Sweep(ctx, snapshot.Sweep{Grace: time.Nanosecond, Found: func(key string) {
		if key == again {
			if _, err := kv.Put(ctx, key, []byte(`{"v":1,"nodes":[]}`)); err != nil {
				t.Error(err)
			}
		}
	}})
	if err != nil || r.Removed != len(leaked)-1 || r.Skipped != 1 || r.Sessions != 2 {
		t.Errorf("%+v, %v", r, err)
	}
	left := w.pages(id)
	for _, key := range leaked {
		if slices.Contains(left, key) != (key == again) {
			t.Errorf("%s: left are %q", key, left)
		}
	}
	if !slices.Contains(left, coming) || !slices.Equal(w.pages("headless"), []string{headless}) {
		t.Errorf("left are %q and %q", left, w.pages("headless"))
	}
	if err := kv.Purge(ctx, headless); err != nil {
		t.Fatal(err)
	}
	if v, err := w.reader.View(ctx, id, projection.Want{MinSeq: events.NoSeq}); err != nil || v.Surface.Len() != 7 {
		t.Errorf("the view: %v", err)
	}
	if err := kv.Purge(ctx, coming); err != nil {
		t.Fatal(err)
	}
	k = w.worker(projection.Config{})
	k.wrote(id, w.append(id, user(strings.Repeat("y", 70<<10))))
	w.verify()
}

// Pages that were put aside before the log lost its end are those of the head again.
func TestPagesThatAPowerCutBringsBackStay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const id = "s"
	const grace = time.Second
	k := w.worker(projection.Config{Grace: grace})
	last := w.fill(id, 40, 8<<10)
	k.wrote(id, last)
	cut := w.powerCut()
	k.wrote(id, w.append(id, replace([]events.Seq{0, 1, 2, 3}, "summary")))
	aside := time.Now()
	cut()
	journaltest.Eventually(t, "the head to be back", func() bool { return w.headSeq(id) == last })
	journaltest.Eventually(t, "the grace time to be over", func() bool { return time.Since(aside) > grace })
	// What is put aside later is deleted later.
	k.wrote(w.neighbour(id), w.fill(w.neighbour(id), 3, 40<<10))
	k.wrote(w.neighbour(id), w.append(w.neighbour(id), replace([]events.Seq{0, 1}, "summary")))
	journaltest.Eventually(t, "the neighbour's page to be deleted", func() bool {
		return !slices.Contains(w.pages(w.neighbour(id)), w.neighbour(id)+".0")
	})
	w.buckets.Snapshots.CachePages(0)
	if _, err := w.reader.View(journaltest.Context(t), id, projection.Want{MinSeq: events.NoSeq}); err != nil {
		t.Errorf("behind the grace time: %v", err)
	}
	w.verify()
}
