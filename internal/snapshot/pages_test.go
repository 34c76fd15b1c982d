package snapshot_test

import (
	"slices"
	"sync"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

// Sealed pages are read once, and many with one request; with the cache off, each time.
func TestPagesAreReadOnce(t *testing.T) {
	t.Parallel()
	store, _, _ := open(t)
	ctx := journaltest.Context(t)
	b, _ := small(t)
	s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
	for _, c := range b.commits {
		if err := s.Fold(c, vocabulary, nil); err != nil {
			t.Fatal(err)
		}
	}
	f, err := s.Flush()
	if err != nil {
		t.Fatal(err)
	}
	rev, err := store.Write(ctx, f, 0)
	if err != nil {
		t.Fatal(err)
	}
	var requests [][]string
	store.OnRead(func(keys []string) { requests = append(requests, keys) })
	_, want := refold(t, b.commits)
	read := func(requested int) {
		t.Helper()
		requests = nil
		full, _, err := store.Full(ctx, sessionID)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(messages(t, full), want) {
			t.Error("the messages are not those of the log")
		}
		if len(requests) != requested {
			t.Errorf("expected %d requests for pages, found %v", requested, requests)
		}
	}
	if len(s.Pages()) < 2 {
		t.Fatalf("expected a session of several pages, found %v", s.Pages())
	}
	read(1)
	read(0)
	f.Overwrite = true // of a damaged snapshot: what is in memory may be what was damaged
	if _, err = store.Write(ctx, f, rev); err != nil {
		t.Fatal(err)
	}
	read(1)
	store.CachePages(0)
	read(1)
	read(1)
}

// Reads of one head share what was read of it, and whoever goes on from there does not show it to others.
func TestSnapshotsOfOneHeadChangeOnTheirOwn(t *testing.T) {
	t.Parallel()
	store, _, _ := open(t)
	ctx := journaltest.Context(t)
	b, _ := small(t)
	half := len(b.commits) / 2
	s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
	for _, c := range b.commits[:half] {
		if err := s.Fold(c, vocabulary, nil); err != nil {
			t.Fatal(err)
		}
	}
	f, err := s.Flush()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Write(ctx, f, 0); err != nil {
		t.Fatal(err)
	}
	_, before := refold(t, b.commits[:half])
	_, after := refold(t, b.commits)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 3 {
				full, _, err := store.Full(ctx, sessionID)
				if err != nil {
					t.Error(err)
					return
				}
				if i%4 == 1 {
					if _, err := full.Flush(); err != nil {
						t.Error(err)
					}
					continue
				}
				want := before
				if i%2 == 0 {
					want = after
					for _, c := range b.commits[half:] {
						if err := full.Fold(c, vocabulary, nil); err != nil {
							t.Error(err)
							return
						}
					}
				}
				raws, err := full.Surface.Messages()
				if err != nil {
					t.Error(err)
				}
				got := make([]string, len(raws))
				for k, m := range raws {
					got[k] = string(m)
				}
				if !slices.Equal(got, want) {
					t.Error("the messages are not those of the log")
				}
			}
		})
	}
	wg.Wait()
}
