package snapshot_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

func open(t *testing.T) (*snapshot.Store, jetstream.JetStream, *journaltest.Server) {
	t.Helper()
	srv := journaltest.Start(t)
	j := srv.JetStream(t)
	s, err := snapshot.Open(journaltest.Context(t), j, 1)
	if err != nil {
		t.Fatal(err)
	}
	return s, j, srv
}

// flushed is a fresh fold of a log, flushed.
func flushed(t *testing.T, commits []*events.Commit) *snapshot.Flush {
	t.Helper()
	s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
	for _, c := range commits {
		if err := s.Fold(c, vocabulary, nil); err != nil {
			t.Fatal(err)
		}
	}
	f, err := s.Flush()
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func messages(t *testing.T, s *snapshot.Snapshot) []string {
	t.Helper()
	raws, err := s.Surface.Messages()
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, m := range raws {
		out = append(out, string(m))
	}
	return out
}

func TestStoreReadsBackWhatItWrote(t *testing.T) {
	t.Parallel()
	store, _, _ := open(t)
	ctx := journaltest.Context(t)
	b, _ := small(t)
	if h, rev, err := store.Head(ctx, sessionID); h != nil || rev != 0 || err != nil {
		t.Fatalf("a session without a head: %v, %d, %v", h, rev, err)
	}
	if s, rev, err := store.Load(ctx, sessionID, surface.KeepBodies); s != nil || rev != 0 || err != nil {
		t.Fatalf("a session without a head: %v, %d, %v", s, rev, err)
	}
	f := flushed(t, b.commits)
	rev, err := store.Write(ctx, f, 0)
	if err != nil {
		t.Fatal(err)
	}
	full, fullRev, err := store.Full(ctx, sessionID)
	if err != nil || fullRev != rev {
		t.Fatalf("%v, revision %d, want %d", err, fullRev, rev)
	}
	if _, want := refold(t, b.commits); !slices.Equal(messages(t, full), want) {
		t.Errorf("messages differ from a refold of the log")
	}
	if ids, err := store.Sessions(ctx); err != nil || !slices.Equal(ids, []string{sessionID}) {
		t.Errorf("sessions %q, %v", ids, err)
	}
	if err := store.Delete(ctx, []string{f.Pages[0].Key, f.Pages[0].Key, "no.1"}); err != nil {
		t.Errorf("delete: %v", err)
	}
	if _, _, err := store.Full(ctx, sessionID); !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) {
		t.Errorf("with a page gone for good: %v", err)
	}
}

// Only the writer that knows the newest head writes one, and a page that is there stays.
func TestOnlyTheNewestOwnerWrites(t *testing.T) {
	t.Parallel()
	store, _, _ := open(t)
	ctx := journaltest.Context(t)
	b, _ := small(t)
	f := flushed(t, b.commits)
	rev, err := store.Write(ctx, f, 0)
	if err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]uint64{"no head": 0, "an older head": rev - 1, "a newer head": rev + 1} {
		if _, err := store.Write(ctx, f, r); !errors.Is(err, snapshot.ErrMoved) {
			t.Errorf("a writer that knows of %s: %v", name, err)
		}
	}
	get := func(key string) string {
		e, err := store.KV().Get(ctx, key)
		if err != nil {
			t.Fatal(err)
		}
		return string(e.Value())
	}
	f.Pages = []snapshot.KV{{Key: f.Pages[0].Key, Value: []byte("other")}}
	if rev, err = store.Write(ctx, f, rev); err != nil {
		t.Fatal(err)
	}
	if get(f.Pages[0].Key) == "other" {
		t.Errorf("a page was written over")
	}
	f.Overwrite = true
	if _, err = store.Write(ctx, f, rev); err != nil {
		t.Fatal(err)
	}
	if get(f.Pages[0].Key) != "other" {
		t.Errorf("a page of a damaged snapshot was not written over")
	}
}

// A head is lost when the bucket ends before it or has something else in its place, and not when a newer
// one followed on it.
func TestAHeadThatTheBucketLost(t *testing.T) {
	t.Parallel()
	store, _, _ := open(t)
	ctx := journaltest.Context(t)
	b, _ := small(t)
	first, second := flushed(t, b.commits[:1]), flushed(t, b.commits)
	lost := func(m *snapshot.Mark) bool {
		t.Helper()
		got, err := store.Lost(ctx, m)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	rev, err := store.Write(ctx, first, 0)
	if err != nil {
		t.Fatal(err)
	}
	end, err := store.End(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		mark *snapshot.Mark
		want bool
	}{
		"nothing":                 {nil, false},
		"the head":                {first.Mark(rev), false},
		"the end":                 {end, false},
		"beyond the end":          {first.Mark(rev + 1), true},
		"an end beyond the end":   {&snapshot.Mark{Revision: end.Revision + 1}, true},
		"another head":            {second.Mark(rev), true},
		"that of another session": {&snapshot.Mark{Revision: rev, Session: "other", Chain: first.Mark(rev).Chain}, true},
	} {
		if got := lost(c.mark); got != c.want {
			t.Errorf("%s: lost %t, want %t", what, got, c.want)
		}
	}
	if _, err := store.Write(ctx, second, rev); err != nil {
		t.Fatal(err)
	}
	if lost(first.Mark(rev)) {
		t.Error("a head that another one followed on counts as lost")
	}
}

// A reader under which the head moves on, and the pages go, starts over and serves the newer
// snapshot, never a mixture.
func TestReadersSeeNoTornSnapshot(t *testing.T) {
	t.Parallel()
	store, _, _ := open(t)
	ctx := journaltest.Context(t)
	b, kv := small(t)
	s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
	var rev uint64
	write := func() (dropped []string) {
		f, err := s.Flush()
		if err != nil {
			t.Error(err)
			return nil
		}
		if rev, err = store.Write(ctx, f, rev); err != nil {
			t.Error(err)
		}
		return f.Unreferenced
	}
	for _, c := range b.commits {
		if err := s.Fold(c, vocabulary, nil); err != nil {
			t.Fatal(err)
		}
	}
	write()
	h, _ := kv.head(t)
	last := h.Pages[len(h.Pages)-1]
	moves := 0
	store.OnRead(func(keys []string) {
		if !slices.Contains(keys, snapshot.PageKey(events.Token(sessionID), last.N)) {
			return
		}
		store.OnRead(nil)
		moves++
		c := b.commit(t, 1, user(opReplace(last.Seqs[0], last.Seqs[0]), sources(last.Seqs[:1]), "short"))
		kv.fold(t, s, c)
		if err := store.Delete(ctx, write()); err != nil {
			t.Error(err)
		}
	})
	full, _, err := store.Full(ctx, sessionID)
	if err != nil {
		t.Fatal(err)
	}
	nodes, want := refold(t, b.commits)
	if moves != 1 || !slices.Equal(full.Surface.Seqs(), nodes) || !slices.Equal(messages(t, full), want) {
		t.Errorf("after %d moves the reader has nodes %v and %d messages; the log has %v and %d", moves, full.Surface.Seqs(), len(messages(t, full)), nodes, len(want))
	}
}

// What is damaged in the bucket is an error that says so, with the revision of the head where
// it is needed for writing over it.
func TestStoreTellsDamage(t *testing.T) {
	t.Parallel()
	store, _, srv := open(t)
	ctx := journaltest.Context(t)
	w := buildWide()
	write := func(f *snapshot.Flush, rev uint64) uint64 {
		t.Helper()
		f.Overwrite = true
		rev, err := store.Write(ctx, f, rev)
		if err != nil {
			t.Fatal(err)
		}
		return rev
	}
	key := snapshot.HeadKey(sessionID)
	isDamaged := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) {
			t.Errorf("%s: %v, want snapshot-damaged", what, err)
		}
	}
	rev := write(&snapshot.Flush{Head: snapshot.KV{Key: key, Value: []byte("{")}}, 0)
	_, got, err := store.Head(ctx, sessionID)
	isDamaged("half a head", err)
	if got != rev {
		t.Errorf("half a head: revision %d, want %d", got, rev)
	}
	// A head with two index pages, of which none is there, then one is no JSON.
	rev = write(&snapshot.Flush{Head: snapshot.KV{Key: key, Value: w.pages[key]}}, rev)
	_, got, err = store.Load(ctx, sessionID, surface.KeepBodies)
	isDamaged("index pages that are not there", err)
	if got != rev {
		t.Errorf("index pages that are not there: revision %d, want %d", got, rev)
	}
	f := &snapshot.Flush{Head: snapshot.KV{Key: key, Value: w.pages[key]}}
	for k, v := range w.pages {
		if strings.Contains(k, ".i") {
			f.Pages = append(f.Pages, snapshot.KV{Key: k, Value: v})
		}
	}
	good := f.Pages[1].Value
	for what, bad := range map[string][]byte{"no JSON": []byte("["), "another layout": bytes.Replace(good, []byte(`"v":1`), []byte(`"v":2`), 1), "nothing in it": []byte(`{"v":1,"pages":[]}`)} {
		f.Pages[1].Value = bad
		rev = write(f, rev)
		_, got, err = store.Load(ctx, sessionID, surface.KeepBodies)
		isDamaged("an index page with "+what, err)
		if got != rev {
			t.Errorf("an index page with %s: revision %d, want %d", what, got, rev)
		}
	}
	f.Pages[1].Value = good
	write(f, rev)
	s, _, err := store.Load(ctx, sessionID, surface.KeepBodies)
	if err != nil {
		t.Fatal(err)
	}
	n := s.Pages()[300]
	if gone, err := store.FillPages(ctx, s, []int64{n}); !gone || err != nil {
		t.Errorf("a page that is not there: gone %v, %v", gone, err)
	}
	pageKey := snapshot.PageKey(events.Token(sessionID), n)
	for what, bad := range map[string][]byte{"no JSON": []byte("["), "another layout": bytes.Replace(w.pages[pageKey], []byte(`"v":1`), []byte(`"v":2`), 1)} {
		if _, err := store.KV().Put(ctx, pageKey, bad); err != nil {
			t.Fatal(err)
		}
		_, err := store.FillPages(ctx, s, []int64{n})
		isDamaged("a page with "+what, err)
	}
	srv.Down()
	gone, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, _, err := store.Load(gone, sessionID, surface.KeepBodies); !errors.Is(err, &events.Error{Code: events.CodeUnavailable}) {
		t.Errorf("with the server away: %v", err)
	}
}
