package snapshot_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

// until calls f each few milliseconds until it reports true.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	over := time.After(30 * time.Second)
	for !f() {
		select {
		case <-tick.C:
		case <-over:
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// What is built shows only once it was switched to, to every process, and can be taken back.
func TestGenerationsAreSwitchedAndRolledBack(t *testing.T) {
	t.Parallel()
	store, j, _ := open(t)
	ctx := journaltest.Context(t)
	other, err := snapshot.Open(ctx, j, 1) // another process
	if err != nil {
		t.Fatal(err)
	}
	b, _ := small(t)
	half, whole := flushed(t, b.commits[:len(b.commits)/2]), flushed(t, b.commits)
	if _, err := store.Write(ctx, half, 0); err != nil {
		t.Fatal(err)
	}
	seqOf := func(s *snapshot.Store) events.Seq {
		t.Helper()
		h, _, err := s.Head(ctx, sessionID)
		if err != nil {
			t.Fatal(err)
		}
		if h == nil {
			return events.NoSeq
		}
		return h.Seq
	}
	if _, err := store.Restore(ctx); !errors.Is(err, &events.Error{Code: events.CodeNotFound}) {
		t.Errorf("nothing to roll back to: %v", err)
	}

	built, err := store.Build(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := other.Build(ctx); err != nil || again.Generation() != built.Generation() {
		t.Fatalf("a build is joined by whoever builds too: %v, %v, %v", again.Generation(), built.Generation(), err)
	}
	if g := built.Generation(); g.N != 2 || g.Bucket != "SURFACES_2" || g.Key("p7") != "g2.p7" || store.Generation().Key("p7") != "p7" {
		t.Errorf("generation %+v, keys %q and %q", g, g.Key("p7"), store.Generation().Key("p7"))
	}
	if seqOf(built) != events.NoSeq {
		t.Errorf("a new generation begins empty")
	}
	if _, err := built.Write(ctx, whole, 0); err != nil {
		t.Fatal(err)
	}
	if seqOf(store) != half.Seq || seqOf(other) != half.Seq {
		t.Errorf("what is being built must not show")
	}

	pinned := other.Pin(ctx)
	if third, err := store.Switch(ctx, built); err != nil || third != nil {
		t.Fatal(third, err)
	}
	if seqOf(store) != whole.Seq {
		t.Errorf("who switched reads on from the new generation")
	}
	until(t, "the other process follows", func() bool { return other.Pin(ctx).Generation().N == 2 })
	if seqOf(other) != whole.Seq || seqOf(pinned) != half.Seq {
		t.Errorf("the other process is at %d, what was pinned at %d", seqOf(other), seqOf(pinned))
	}
	if third, err := other.Switch(ctx, built); err != nil || third != nil {
		t.Errorf("switching again changes nothing: %v, %v", third, err)
	}

	old, err := other.Restore(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Switch(ctx, old); err != nil {
		t.Fatal(err)
	}
	if seqOf(other.Pin(ctx)) != half.Seq {
		t.Errorf("after rolling back: seq %d, want %d", seqOf(other.Pin(ctx)), half.Seq)
	}
	if seqOf(other) != whole.Seq {
		t.Errorf("right behind the switch the newer head is served, not that of seq %d", seqOf(other))
	}
	g, err := store.Generations(ctx)
	if err != nil || g.Current.N != 1 || g.Previous == nil || g.Previous.N != 2 || g.Building != nil || g.Last != 2 {
		t.Errorf("%+v, %v", g, err)
	}

	// The next build has a number of its own, and pushes the oldest out.
	third, err := store.Build(ctx)
	if err != nil || third.Generation().N != 3 {
		t.Fatal(third, err)
	}
	out, err := store.Switch(ctx, third)
	if err != nil || out == nil || out.N != 2 {
		t.Fatalf("%+v, %v", out, err)
	}
	if err := store.Drop(ctx, *out); err != nil {
		t.Fatal(err)
	}
	if was, err := store.DropPrevious(ctx); err != nil || was.N != 1 {
		t.Errorf("%+v, %v", was, err)
	}
	if was, err := store.DropPrevious(ctx); err != nil || was != nil {
		t.Errorf("nothing is left to drop: %+v, %v", was, err)
	}
	for _, bucket := range []string{"SURFACES", "SURFACES_2"} {
		if _, err := j.KeyValue(ctx, bucket); !errors.Is(err, jetstream.ErrBucketNotFound) {
			t.Errorf("bucket %s: %v", bucket, err)
		}
	}
	if s, err := snapshot.Open(ctx, j, 1); err != nil || s.Generation().N != 3 {
		t.Errorf("a new process begins at generation 3: %v, %v", s, err)
	}
	if _, err := built.Write(ctx, whole, 0); err == nil {
		t.Errorf("a write into a bucket that was dropped went through")
	}
	if _, err := store.Switch(ctx, built); !errors.Is(err, &events.Error{Code: events.CodeNotFound}) {
		t.Errorf("switching to a generation that was dropped: %v", err)
	}
}

// A program folds into nothing that another version of the fold built.
func TestAnotherFoldsGenerationIsNotFoldedInto(t *testing.T) {
	t.Parallel()
	store, j, _ := open(t)
	ctx := journaltest.Context(t)
	b, _ := small(t)
	if _, err := store.Write(ctx, flushed(t, b.commits[:1]), 0); err != nil {
		t.Fatal(err)
	}
	kv := store.KV()
	e, err := kv.Get(ctx, snapshot.HeadKey(sessionID))
	if err != nil {
		t.Fatal(err)
	}
	foreign := strings.Replace(string(e.Value()), `"fold":1,`, `"fold":2,`, 1)
	if _, err := kv.Put(ctx, snapshot.HeadKey(sessionID), []byte(foreign)); err != nil {
		t.Fatal(err)
	}
	snap, _, err := store.Full(ctx, sessionID)
	if err != nil {
		t.Fatalf("it can be served: %v", err)
	}
	refused := &events.Error{Code: events.CodeFoldVersion}
	if err := snap.Fold(b.commits[1], vocabulary, nil); !errors.Is(err, refused) || snap.Next != b.commits[0].Last+1 {
		t.Errorf("fold: %v, next %d", err, snap.Next)
	}

	// An unfinished build by another version is given up, and its bucket goes.
	built, err := store.Build(ctx)
	if err != nil {
		t.Fatal(err)
	}
	register, err := j.KeyValue(ctx, snapshot.GenerationsBucket)
	if err != nil {
		t.Fatal(err)
	}
	edit := func(f func(*snapshot.Generations)) {
		t.Helper()
		g, err := store.Generations(ctx)
		if err != nil {
			t.Fatal(err)
		}
		f(g)
		b, err := json.Marshal(g)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := register.Put(ctx, snapshot.GenerationsKey, b); err != nil {
			t.Fatal(err)
		}
	}
	edit(func(g *snapshot.Generations) { g.Building.Fold = 2; g.Current.Fold = 2 })
	next, err := store.Build(ctx)
	if err != nil || next.Generation().N != 3 || next.Generation().Foldable() != nil {
		t.Fatalf("%+v, %v", next, err)
	}
	if _, err := j.KeyValue(ctx, built.Generation().Bucket); !errors.Is(err, jetstream.ErrBucketNotFound) {
		t.Errorf("the bucket of the build that was given up: %v", err)
	}
	if _, err := store.Generations(ctx); err != nil {
		t.Fatal(err)
	}
	if err := store.Generation().Foldable(); !errors.Is(err, refused) {
		t.Errorf("the generation that serves is another version's: %v", err)
	}
	if _, err := store.Switch(ctx, next); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Restore(ctx); !errors.Is(err, refused) {
		t.Errorf("rolling back to another version's: %v", err)
	}

	// What cannot be read is said to be damaged, and the last known generation serves on.
	if _, err := register.Put(ctx, snapshot.GenerationsKey, []byte(`{"v":2}`)); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Generations(ctx); !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) {
		t.Errorf("a register that cannot be read: %v", err)
	}
	if s, _, err := store.Pin(ctx).Load(ctx, sessionID, surface.KeepBodies); err != nil || s != nil {
		t.Errorf("the new generation is empty and serves on: %v, %v", s, err)
	}
	if _, err := snapshot.Open(ctx, j, 1); !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) {
		t.Errorf("a new process has nothing to go by: %v", err)
	}
}
