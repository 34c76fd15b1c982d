package projection_test

import (
	"errors"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

// A session that is put into quarantine, and taken out of it, somewhere else shows as such to a
// reader that has read it before.
func TestAReaderFollowsTheQuarantineOfOtherProcesses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	k := w.worker(projection.Config{})
	k.wrote("s", w.append("s", user("0")))
	sick := func() bool {
		v, err := w.reader.View(ctx, "s", now)
		if err != nil {
			t.Fatal(err)
		}
		return v.Quarantine != nil
	}
	if sick() {
		t.Fatal("the session is in quarantine before anybody put it there")
	}
	if _, err := w.buckets.Quarantine.Put(ctx, "s", []byte(`{"session":"s","code":"rule-violation","detail":"by hand","streamSeq":1,"time":1}`)); err != nil {
		t.Fatal(err)
	}
	journaltest.Eventually(t, "the quarantine to show", sick)
	if v, err := w.reader.View(ctx, "s", projection.Want{MinSeq: events.NoSeq, Fresh: true}); err != nil || v.Quarantine == nil {
		t.Errorf("a fresh read: %v", err)
	}
	if err := w.buckets.Quarantine.Purge(ctx, "s"); err != nil {
		t.Fatal(err)
	}
	if sick() {
		t.Error("the record is gone, and the session is in quarantine still")
	}
}

// That a session is not there is asked anew each time: it may come.
func TestASessionThatIsNotThereIsAskedForAnew(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	k := w.worker(projection.Config{})
	if _, err := w.reader.View(ctx, "s", now); !errors.Is(err, events.ErrSessionNotFound) {
		t.Fatal(err)
	}
	k.wrote("s", w.append("s", user("0")))
	for range 2 { // from the bucket, and from memory
		if v, err := w.reader.View(ctx, "s", now); err != nil || v.Last() != 0 {
			t.Errorf("found %v", err)
		}
	}
}
