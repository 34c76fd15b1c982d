package journal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
)

func openHeaders(t testing.TB, s *journaltest.Server) *Headers {
	t.Helper()
	h, err := open(t, s, quick).OpenHeaders(journaltest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func header(t testing.TB, id, raw string) *events.Header {
	t.Helper()
	h, err := events.ParseHeader([]byte(raw), id, 1000)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestHeaderIsKeptAsItWasGiven(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	h := openHeaders(t, s)
	ctx := journaltest.Context(t)
	for _, id := range oddIDs {
		if _, err := h.Get(ctx, id); !errors.Is(err, events.ErrSessionNotFound) || asError(err).Session != id {
			t.Errorf("%q before it was created: %v", id, err)
		}
		given := header(t, id, `{"version":4,"ours":{"n":1.10,"s":"\ud800"},"cwd":"/tmp"}`)
		if _, created, err := h.Create(ctx, given); err != nil || !created {
			t.Fatalf("%q: created %t, %v", id, created, err)
		}
		got, err := h.Get(ctx, id)
		if err != nil || string(got.Raw) != string(given.Raw) || got.ID != id || got.Format != events.Format4 {
			t.Errorf("%q: got %+v, %v", id, got, err)
		}
	}
	got, err := h.List(ctx)
	slices.Sort(got)
	if want := slices.Sorted(slices.Values(oddIDs)); err != nil || !slices.Equal(got, want) {
		t.Errorf("List = %q, %v, want %q", got, err, want)
	}
}

func TestHeaderIsCreatedOnce(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	h := openHeaders(t, s)
	ctx := journaltest.Context(t)
	first := header(t, "s", `{"cwd":"/one"}`)
	if _, created, err := h.Create(ctx, first); err != nil || !created {
		t.Fatalf("created %t, %v", created, err)
	}
	for name, raw := range map[string]string{"the same": `{"cwd":"/one"}`, "another": `{"cwd":"/two"}`} {
		stored, created, err := h.Create(ctx, header(t, "s", raw))
		if err != nil || created || string(stored.Raw) != string(first.Raw) {
			t.Errorf("%s header again: created %t, %v, stored %s", name, created, err, stored.Raw)
		}
	}
}

// TestHeaderHasOneCreator: of many who create a session at once one does, and all hear which
// header it has.
func TestHeaderHasOneCreator(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	ctx := journaltest.Context(t)
	var hs [4]*Headers
	for i := range hs {
		hs[i] = openHeaders(t, s)
	}
	for round := range 20 {
		for name, raw := range map[string]string{"equal": `{"cwd":"/x"}`, "different": `{"cwd":"/%d"}`} {
			id := fmt.Sprintf("%s-%d", name, round)
			var created [4]bool
			var stored [4]*events.Header
			var errs [4]error
			var wg sync.WaitGroup
			for i := range hs {
				given := raw
				if name == "different" {
					given = fmt.Sprintf(raw, i)
				}
				wg.Go(func() { stored[i], created[i], errs[i] = hs[i].Create(ctx, header(t, id, given)) })
			}
			wg.Wait()
			winners := 0
			for i := range hs {
				if errs[i] != nil {
					t.Fatalf("%s: %v", id, errs[i])
				}
				if created[i] {
					winners++
				}
				if string(stored[i].Raw) != string(stored[0].Raw) {
					t.Fatalf("%s: creators heard of different headers: %s and %s", id, stored[0].Raw, stored[i].Raw)
				}
			}
			if got, err := hs[0].Get(ctx, id); err != nil || winners != 1 || string(got.Raw) != string(stored[0].Raw) {
				t.Fatalf("%s: %d creators, stored %+v, %v", id, winners, got, err)
			}
		}
	}
}

func TestChildrenOfASession(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	h := openHeaders(t, s)
	ctx := journaltest.Context(t)
	parents := []string{"p", "p.q", "children", "*", "…"}
	for _, parent := range parents {
		if got, err := h.Children(ctx, parent); err != nil || len(got) != 0 {
			t.Errorf("children of %q before there are any: %q, %v", parent, got, err)
		}
		for i := range 3 {
			id := fmt.Sprintf("%s/child.%d", parent, i)
			if _, created, err := h.Create(ctx, header(t, id, fmt.Sprintf(`{"parentSession":%q}`, parent))); err != nil || !created {
				t.Fatalf("%q: created %t, %v", id, created, err)
			}
		}
	}
	for _, parent := range parents {
		got, err := h.Children(ctx, parent)
		slices.Sort(got)
		want := []string{parent + "/child.0", parent + "/child.1", parent + "/child.2"}
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("children of %q: %q, %v, want %q", parent, got, err, want)
		}
	}
	if all, err := h.List(ctx); err != nil || len(all) != 3*len(parents) {
		t.Errorf("List holds %q, %v", all, err)
	}
}

// TestRefusedHeaderLeavesNoChild: a session that exists does not become a child because
// somebody said so.
func TestRefusedHeaderLeavesNoChild(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	h := openHeaders(t, s)
	ctx := journaltest.Context(t)
	for _, raw := range []string{`{}`, `{"parentSession":"p"}`, `{"parentSession":"q"}`} {
		if _, _, err := h.Create(ctx, header(t, "of-nobody", raw)); err != nil {
			t.Fatal(err)
		}
	}
	for _, raw := range []string{`{"parentSession":"p"}`, `{"parentSession":"q"}`, `{"parentSession":"p"}`} {
		if _, _, err := h.Create(ctx, header(t, "of-p", raw)); err != nil {
			t.Fatal(err)
		}
	}
	for parent, want := range map[string][]string{"p": {"of-p"}, "q": nil} {
		if got, err := h.Children(ctx, parent); err != nil || !slices.Equal(got, want) {
			t.Errorf("children of %s: %q, %v, want %q", parent, got, err, want)
		}
	}
}

// TestAForkIsAChildFromItsReservationOn, and one that is refused is none.
func TestAForkIsAChildFromItsReservationOn(t *testing.T) {
	t.Parallel()
	h := openHeaders(t, journaltest.Start(t))
	ctx := journaltest.Context(t)
	of := func(parent string) *events.Header {
		return header(t, "child", fmt.Sprintf(`{"parentSession":%q}`, parent))
	}
	if err := h.Reserve(ctx, of("p"), 3); err != nil {
		t.Fatal(err)
	}
	for parent, at := range map[string]events.Seq{"p": 2, "q": 3} {
		if err := h.Reserve(ctx, of(parent), at); !errors.Is(err, &events.Error{Code: events.CodeSessionExists}) {
			t.Errorf("another fork, of %s: %v", parent, err)
		}
	}
	for parent, want := range map[string][]string{"p": {"child"}, "q": nil} {
		if got, err := h.Children(ctx, parent); err != nil || !slices.Equal(got, want) {
			t.Errorf("children of %s: %q, %v, want %q", parent, got, err, want)
		}
	}
}

func TestDamagedHeaderIsCorrupt(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	h := openHeaders(t, s)
	ctx := journaltest.Context(t)
	if _, err := h.kv.Put(ctx, events.Token("a.b"), []byte(`{"version":`)); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Get(ctx, "a.b"); code(err) != events.CodeCorrupt || asError(err).Session != "a.b" {
		t.Errorf("got %v", err)
	}
	// One that was deleted is not there, and can be made anew.
	if _, _, err := h.Create(ctx, header(t, "s", `{}`)); err != nil {
		t.Fatal(err)
	}
	if err := h.kv.Delete(ctx, "s"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Get(ctx, "s"); !errors.Is(err, events.ErrSessionNotFound) {
		t.Errorf("deleted: %v", err)
	}
	if _, created, err := h.Create(ctx, header(t, "s", `{"cwd":"/"}`)); !created || err != nil {
		t.Errorf("again: created %t, %v", created, err)
	}
}

// laggard is a bucket whose replica answers what it held before.
type laggard struct {
	jetstream.KeyValue
	old jetstream.KeyValueEntry
}

func (l laggard) Get(context.Context, string) (jetstream.KeyValueEntry, error) { return l.old, nil }

// A fork was acknowledged, and the replica that answers a read still has its reservation.
func TestAReplicaThatLagsDoesNotTakeAForkBack(t *testing.T) {
	t.Parallel()
	ctx := journaltest.Context(t)
	h := openHeaders(t, journaltest.Start(t))
	child := header(t, "child", `{"version":3,"id":"child","createdAt":1,"isSeeded":true,"delegationDepth":0,"parentSession":"parent"}`)
	if err := h.Reserve(ctx, child, 3); err != nil {
		t.Fatal(err)
	}
	old, err := h.kv.Get(ctx, events.Token("child"))
	if err != nil {
		t.Fatal(err)
	}
	h.kv = laggard{h.kv, old}
	if _, err := h.Get(ctx, "child"); !errors.Is(err, ErrReserved) {
		t.Errorf("reserved: %v", err)
	}
	if created, err := h.Fulfil(ctx, child, 3); !created || err != nil {
		t.Fatal(created, err)
	}
	if got, err := h.Get(ctx, "child"); err != nil || string(got.Raw) != string(child.Raw) {
		t.Errorf("complete: %v, %v", got, err)
	}
	if created, err := h.Fulfil(ctx, child, 3); created || err != nil {
		t.Errorf("completed again: %v, %v", created, err)
	}
}
