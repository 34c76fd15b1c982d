package projection_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

// While everything is folded anew, appends and reads go on, no read fails or goes back, and the result
// is that of a fresh fold. So it is after going back, however long the old generation stood still.
func TestRebuildServesOnAndSwitches(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	old := w.worker(projection.Config{})
	const sessions = 6
	id := func(i int) string { return fmt.Sprint("s", i%sessions) }
	for i := range sessions {
		w.fill(id(i), 40, 1000)
	}
	w.append("s1", replace([]events.Seq{3, 4, 5, 6, 7}, "short"))
	w.append("poison", user("fine"))
	w.store("poison", func(seq events.Seq) string {
		return line("user/message", seq, `,"surfaceOp":{"op":"replace","startSeq":0,"endSeq":0},"sourceEventSeqs":[99]`, message("m"))
	})
	for i := range sessions {
		old.wrote(id(i), 39)
	}
	old.record()

	ctx, stop := context.WithCancel(journaltest.Context(t))
	var busy sync.WaitGroup
	busy.Add(2)
	go func() {
		defer busy.Done()
		pace := time.NewTicker(5 * time.Millisecond)
		defer pace.Stop()
		for i := 0; ctx.Err() == nil; i++ {
			select {
			case <-pace.C:
			case <-ctx.Done():
			}
			if _, err := w.Append(ctx, appender.Request{Session: id(i), Events: [][]byte{[]byte(user("more"))}}); err != nil && ctx.Err() == nil {
				t.Errorf("append: %v", err)
			}
		}
	}()
	reads := 0
	go func() {
		defer busy.Done()
		pace := time.NewTicker(2 * time.Millisecond)
		defer pace.Stop()
		last := map[string]events.Seq{}
		for i := 0; ctx.Err() == nil; i++ {
			v, err := w.reader.View(ctx, id(i), projection.Want{MinSeq: events.NoSeq, Timeout: 10 * time.Second})
			if err != nil {
				if ctx.Err() == nil {
					t.Errorf("read: %v", err)
				}
				continue
			}
			if v.Last() < last[id(i)] {
				t.Errorf("%s was read at seq %d after seq %d", id(i), v.Last(), last[id(i)])
			}
			last[id(i)] = v.Last()
			reads++
			select {
			case <-pace.C:
			case <-ctx.Done():
			}
		}
	}()
	r, err := projection.Rebuild(journaltest.Context(t), w.log, w.buckets, projection.RebuildOptions{})
	stop()
	busy.Wait()
	if err != nil {
		t.Fatal(err)
	}
	if r.To.N != 2 || r.From.N != 1 || r.Events < 6*40+1 || !r.Followed || reads == 0 {
		t.Errorf("%+v, %d reads", r, reads)
	}
	for i := range sessions {
		s, err := w.Status(journaltest.Context(t), id(i))
		if err != nil {
			t.Fatal(err)
		}
		old.wrote(id(i), s.NextSeq-1)
	}
	old.stop()
	now := w.worker(projection.Config{})
	if q, err := w.buckets.QuarantineOf(journaltest.Context(t), "poison"); err != nil || q == nil || w.headSeq("poison") != 0 {
		t.Errorf("the new generation has its own record of the bad session: %+v, %v, head %d", q, err, w.headSeq("poison"))
	}
	for i := range sessions {
		s, err := w.Status(journaltest.Context(t), id(i))
		if err != nil {
			t.Fatal(err)
		}
		now.until("the new generation goes on", func() bool { return w.headSeq(id(i)) == s.NextSeq-1 })
	}
	now.stop()

	w.append("s0", user("while nobody projects"))
	back, err := projection.Rebuild(journaltest.Context(t), w.log, w.buckets, projection.RebuildOptions{Back: true})
	if err != nil {
		t.Fatal(err)
	}
	if back.To.N != 1 || back.From.N != 2 || back.Events != 1 {
		t.Errorf("going back: %+v, expected one event to be folded", back)
	}
	for i := range sessions {
		s, err := w.Status(journaltest.Context(t), id(i))
		if err != nil {
			t.Fatal(err)
		}
		if w.headSeq(id(i)) != s.NextSeq-1 {
			t.Errorf("%s: head at %d, log at %d", id(i), w.headSeq(id(i)), s.NextSeq-1)
		}
	}
	if g, err := w.buckets.DropPrevious(journaltest.Context(t)); err != nil || g.N != 2 {
		t.Errorf("%+v, %v", g, err)
	}
	l, err := w.buckets.Checkpoints.ListKeysFiltered(journaltest.Context(t), "g2.*")
	if err != nil {
		t.Fatal(err)
	}
	for k := range l.Keys() {
		t.Errorf("checkpoint %s is left", k)
	}
}

// A rebuild that was interrupted goes on where it stopped.
func TestRebuildGoesOnAfterAnInterruption(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const n = 400
	for i := range 4 {
		w.fill(fmt.Sprint("s", i), n/4, 200)
	}
	ctx, cancel := context.WithCancelCause(journaltest.Context(t))
	interrupted := errors.New("interrupted")
	r, err := projection.Rebuild(ctx, w.log, w.buckets, projection.RebuildOptions{
		Worker:   projection.Config{CheckpointEvery: time.Millisecond},
		Progress: func(projection.RebuildProgress) { cancel(interrupted) },
	})
	if !errors.Is(err, interrupted) {
		t.Fatal(err)
	}
	again, err := projection.Rebuild(journaltest.Context(t), w.log, w.buckets, projection.RebuildOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if again.To.N != r.To.N || again.Events+r.Events < n || again.Events == n && r.Events > 0 {
		t.Errorf("first %+v, then %+v", r, again)
	}
	w.verify()
}

// Nothing is projected into a bucket that another version of the fold built, and it is said why.
func TestAWorkerRefusesAnotherFoldsBucket(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append("s", user("m"))
	ctx := journaltest.Context(t)
	register, err := w.js.KeyValue(ctx, "GENERATIONS")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := register.Put(ctx, "surfaces", []byte(`{"v":1,"current":{"n":1,"bucket":"SURFACES","fold":2,"since":1},"last":1}`)); err != nil {
		t.Fatal(err)
	}
	k := w.worker0(projection.Config{})
	if err := k.Start(ctx); !errors.Is(err, &events.Error{Code: events.CodeFoldVersion}) {
		t.Errorf("start: %v", err)
	}
	if _, err := projection.Rebuild(ctx, w.log, w.buckets, projection.RebuildOptions{}); err != nil {
		t.Fatal(err)
	}
	k = w.worker(projection.Config{})
	last := w.append("s", user("m"))
	k.wrote("s", last)
	w.verify()
}

// One head that another version of the fold made stays as it is, and its session says why it
// stands still; all others go on.
func TestAnotherFoldsHeadIsLeftAlone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	k.wrote("s", w.append("s", user("m")))
	k.stop()
	ctx := journaltest.Context(t)
	kv := w.buckets.Snapshots.KV()
	e, err := kv.Get(ctx, "s")
	if err != nil {
		t.Fatal(err)
	}
	foreign := []byte(replaceOnce(t, string(e.Value()), `"fold":1,`, `"fold":2,`))
	if _, err := kv.Put(ctx, "s", foreign); err != nil {
		t.Fatal(err)
	}
	k = w.worker(projection.Config{})
	w.append("s", user("more"))
	other := w.neighbour("s")
	k.wrote(other, w.append(other, user("m")))
	if q := k.record(); q.Session != "s" || q.Code != events.CodeFoldVersion {
		t.Errorf("%+v", q)
	}
	if e, err := kv.Get(ctx, "s"); err != nil || string(e.Value()) != string(foreign) {
		t.Errorf("the head was touched: %s, %v", e.Value(), err)
	}
	v, err := w.reader.View(ctx, "s", projection.Want{MinSeq: events.NoSeq, Fresh: true})
	if err != nil || v.Last() != 0 || v.Quarantine == nil {
		t.Errorf("it is served as it is: %+v, %v", v, err)
	}
	w.restartAppender()
	if _, err := w.Append(ctx, appender.Request{Session: "s", Events: [][]byte{[]byte(user("the log goes on"))}}); err != nil {
		t.Errorf("append by a process that had to load the session: %v", err)
	}
}

func replaceOnce(t *testing.T, s, old, new string) string {
	t.Helper()
	if strings.Count(s, old) != 1 {
		t.Fatalf("%d times %q in %s", strings.Count(s, old), old, s)
	}
	return strings.Replace(s, old, new, 1)
}

// The bucket that serves is gone, with or without the checkpoints that tell of it: everything is folded
// anew, by a worker that runs and by one that starts, and nothing is said to be caught up before.
func TestALostBucketIsFoldedAnew(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running=%t", running), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ctx := journaltest.Context(t)
			begin := func() *worker { return w.worker(projection.Config{ID: "w", Lease: 2 * time.Second}) }
			k := begin()
			for i := range 4 {
				id := fmt.Sprint("s", i)
				k.wrote(id, w.fill(id, 3, 100))
			}
			if !running {
				k.stop()
			}
			if err := w.js.DeleteKeyValue(ctx, "SURFACES"); err != nil {
				t.Fatal(err)
			}
			if !running {
				k = begin()
			}
			journaltest.Eventually(t, "another bucket to be caught up", func() bool {
				o, err := k.Overview(ctx)
				if err != nil || !o.CaughtUp || o.Generation.N < 2 {
					return false
				}
				for i := range 4 { // whoever says so must be right
					h, _, err := w.buckets.Snapshots.Head(ctx, fmt.Sprint("s", i))
					if err != nil || w.buckets.Snapshots.Generation().N < 2 {
						return false // this reader has not noticed yet
					}
					if h == nil || h.Seq != 2 {
						t.Fatalf("s%d: caught up, with the head %+v", i, h)
					}
				}
				return true
			})
			w.verify()
			if _, err := w.Append(ctx, appender.Request{Session: "s0", Events: [][]byte{[]byte(user("on"))}}); err != nil {
				t.Error(err)
			}
			w.verify()
		})
	}
}
