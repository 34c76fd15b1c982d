package client_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"testing"

	"palimpsest/client"
)

func take(t *testing.T, s *client.Session, name string) *client.Writer {
	t.Helper()
	w, err := s.TakeWriter(within(t), name)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func TestReplacedWriterIsFenced(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	c := dial(t, faults)
	s := fresh(c, "fenced")
	first := take(t, s, "first")
	if r, err := first.Append(within(t), note("a"), note("b")); err != nil || r.FirstSeq != 1 || r.LastSeq != 2 {
		t.Fatalf("got %+v, %v", r, err)
	}
	second := take(t, s, "second")
	if first.Epoch() != 1 || second.Epoch() != 2 || second.Next() != 4 || second.Name() != "second" {
		t.Errorf("epochs %d and %d, next %d", first.Epoch(), second.Epoch(), second.Next())
	}
	_, err := first.Append(within(t), note("c"))
	if e := asError(t, err); !errors.Is(err, client.ErrFenced) || e.Epoch == nil || *e.Epoch != 2 {
		t.Errorf("got %v", err)
	}
	faults.expect()
	if _, err := first.Append(within(t), note("d")); !errors.Is(err, client.ErrFenced) {
		t.Errorf("got %v", err)
	}
	if _, err := first.Sync(within(t)); !errors.Is(err, client.ErrFenced) {
		t.Errorf("got %v", err)
	}
	if n := len(faults.requests()); n != 0 {
		t.Errorf("a fenced writer sent %d requests", n)
	}
	if _, err := s.Append(within(t), []client.Event{note("nobody's")}); !errors.Is(err, client.ErrFenced) {
		t.Errorf("an append without an epoch: %v", err)
	}
	if _, err := second.Append(within(t), note("e")); err != nil {
		t.Error(err)
	}
	if got := ids(t, s); !slices.Equal(got, []string{"a", "b", "e"}) {
		t.Errorf("the log holds %q", got)
	}
}

// A writer that is replaced between an append and its lost answer still hears that the append
// was stored, and one whose append came too late hears that it was not.
func TestWriterReplacedWhileAnAnswerIsLost(t *testing.T) {
	t.Parallel()
	for _, stored := range []bool{true, false} {
		t.Run(fmt.Sprintf("stored %t", stored), func(t *testing.T) {
			t.Parallel()
			faults := new(faulty)
			s := fresh(dial(t, faults), fmt.Sprintf("replaced/%t", stored))
			w := take(t, s, "first")
			other := dial(t, nil).Session(s.ID())
			faults.expect(fault{stored: stored, answer: func(r *http.Request) (*http.Response, error) {
				if _, err := other.TakeWriter(context.WithoutCancel(r.Context()), "second"); err != nil {
					t.Error(err)
				}
				return nil, syscall.ECONNRESET
			}})
			r, err := w.Append(within(t), note("a"))
			if stored {
				if err != nil || !r.Duplicate || r.FirstSeq != 1 {
					t.Errorf("got %+v, %v", r, err)
				}
			} else if !errors.Is(err, client.ErrFenced) || errors.Is(err, client.ErrOutcomeUnknown) {
				t.Errorf("got %v", err)
			}
			if n := len(ids(t, s)); n != map[bool]int{true: 1}[stored] {
				t.Errorf("the log holds %d notes", n)
			}
			if _, err := w.Append(within(t), note("b")); !errors.Is(err, client.ErrFenced) {
				t.Errorf("got %v", err)
			}
		})
	}
}

func TestWriterSyncsAfterAConflict(t *testing.T) {
	t.Parallel()
	s := fresh(dial(t, nil), "synced")
	w := take(t, s, "w")
	// Whoever knows the next seq may append without an epoch.
	if _, err := s.Append(within(t), []client.Event{note("other")}, client.ExpectedSeq(w.Next())); err != nil {
		t.Fatal(err)
	}
	_, err := w.Append(within(t), note("a"))
	if e := asError(t, err); !errors.Is(err, client.ErrSeqConflict) || *e.ActualSeq != 2 {
		t.Fatalf("got %v", err)
	}
	if next, err := w.Sync(within(t)); err != nil || next != 2 || w.Next() != 2 {
		t.Fatalf("synced to %d: %v", next, err)
	}
	if _, err := w.Append(within(t), note("a")); err != nil {
		t.Error(err)
	}
	if got := ids(t, s); !slices.Equal(got, []string{"other", "a"}) {
		t.Errorf("the log holds %q", got)
	}
}

func TestWriterAfterAnUnknownOutcome(t *testing.T) {
	t.Parallel()
	for _, same := range []bool{true, false} {
		t.Run(fmt.Sprintf("same %t", same), func(t *testing.T) {
			t.Parallel()
			faults := new(faulty)
			s := fresh(dial(t, faults), fmt.Sprintf("unknown/%t", same))
			w := take(t, s, "w")
			ctx, cancel := context.WithCancel(within(t))
			faults.expect(fault{stored: true, answer: func(*http.Request) (*http.Response, error) {
				cancel()
				return nil, syscall.ECONNRESET
			}})
			if _, err := w.Append(ctx, note("a")); !errors.Is(err, client.ErrOutcomeUnknown) {
				t.Fatalf("got %v", err)
			}
			if same {
				if r, err := w.Append(within(t), note("a")); err != nil || !r.Duplicate {
					t.Errorf("got %+v, %v", r, err)
				}
			} else {
				if _, err := w.Append(within(t), note("b")); !errors.Is(err, client.ErrSeqConflict) {
					t.Errorf("got %v", err)
				}
				if _, err := w.Sync(within(t)); err != nil {
					t.Error(err)
				}
			}
			if _, err := w.Append(within(t), note("c")); err != nil {
				t.Error(err)
			}
			if got := ids(t, s); !slices.Equal(got, []string{"a", "c"}) {
				t.Errorf("the log holds %q", got)
			}
		})
	}
}

func TestWriterIsSharedByGoroutines(t *testing.T) {
	t.Parallel()
	s := fresh(dial(t, nil), "shared")
	w := take(t, s, "w")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 5 {
				if _, err := w.Append(within(t), note(fmt.Sprintf("%d-%d", i, n))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if got := ids(t, s); len(got) != 40 || w.Next() != 41 {
		t.Errorf("%d events, next %d", len(got), w.Next())
	}
}

func TestWriterWaitsItsTurnNoLongerThanItsContext(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	s := fresh(dial(t, faults), "turns")
	w := take(t, s, "w")
	inFlight, goOn := make(chan struct{}), make(chan struct{})
	faults.expect(fault{stored: true, answer: func(*http.Request) (*http.Response, error) {
		close(inFlight)
		<-goOn
		return nil, syscall.ECONNRESET
	}})
	done := make(chan error, 1)
	go func() {
		_, err := w.Append(within(t), note("a"))
		done <- err
	}()
	<-inFlight
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := w.Append(ctx, note("b")); !errors.Is(err, context.Canceled) || errors.Is(err, client.ErrOutcomeUnknown) {
		t.Errorf("got %v", err)
	}
	close(goOn)
	if err := <-done; err != nil {
		t.Error(err)
	}
	if got := ids(t, s); !slices.Equal(got, []string{"a"}) {
		t.Errorf("the log holds %q", got)
	}
}

func TestTakingTheWriterAgainAfterALostAnswer(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	s := fresh(dial(t, faults), "taken")
	faults.expect(resetAfter)
	w := take(t, s, "w")
	if w.Epoch() != 1 {
		t.Errorf("epoch %d, want that of the first attempt", w.Epoch())
	}
	if _, err := w.Append(within(t), note("a")); err != nil {
		t.Error(err)
	}
	// With an expectedSeq the second attempt may be in the way of the first.
	faults.expect(resetAfter)
	_, err := s.TakeWriter(within(t), "w", client.ExpectedSeq(2))
	if !errors.Is(err, client.ErrSeqConflict) || !errors.Is(err, client.ErrOutcomeUnknown) {
		t.Errorf("got %v", err)
	}
}
