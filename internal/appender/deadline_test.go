package appender

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestADeadlineOutlivesItsParentAndEndsWhatIsMadeFromIt(t *testing.T) {
	t.Parallel()
	type key struct{}
	parent, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
	cancel()
	early := withDeadline(parent, context.Background(), time.Hour)
	if early.Err() != nil || early.Value(key{}) != "value" {
		t.Errorf("expected the parent's value and not its end, found %v and %v", early.Value(key{}), early.Err())
	}
	child, cancelChild := context.WithTimeout(early, 2*time.Hour)
	defer cancelChild()
	if at, ok := child.Deadline(); !ok || !at.Equal(early.at) {
		t.Errorf("expected the child to end at %v, found %v", early.at, at)
	}
	early.end()
	<-child.Done()
	if !errors.Is(child.Err(), context.Canceled) || !errors.Is(early.Err(), context.Canceled) {
		t.Errorf("found %v and %v", child.Err(), early.Err())
	}

	unused := withDeadline(parent, context.Background(), time.Hour)
	unused.end()
	<-unused.Done()
	if !errors.Is(unused.Err(), context.Canceled) {
		t.Errorf("found %v", unused.Err())
	}
}

func TestADeadlineThatPassesSaysSo(t *testing.T) {
	t.Parallel()
	past := withDeadline(t.Context(), context.Background(), -time.Second) // asked for its error alone
	if !errors.Is(past.Err(), context.DeadlineExceeded) {
		t.Errorf("found %v", past.Err())
	}
	past.end()
	soon := withDeadline(t.Context(), context.Background(), time.Millisecond)
	defer soon.end()
	<-soon.Done()
	if !errors.Is(soon.Err(), context.DeadlineExceeded) {
		t.Errorf("found %v", soon.Err())
	}
}

func TestADeadlineEndsWithWhatItIsToldTo(t *testing.T) {
	t.Parallel()
	until, end := context.WithCancel(t.Context())
	waited := withDeadline(t.Context(), until, time.Hour)
	defer waited.end()
	asked := withDeadline(t.Context(), until, time.Hour)
	defer asked.end()
	done := waited.Done()
	if waited.Err() != nil || asked.Err() != nil {
		t.Errorf("found %v and %v before the end", waited.Err(), asked.Err())
	}
	end()
	<-done
	for _, d := range []*deadline{waited, asked} { // asked: at once, though nobody waited for it
		if !errors.Is(d.Err(), context.Canceled) {
			t.Errorf("expected the end to be seen, found %v", d.Err())
		}
	}
}
