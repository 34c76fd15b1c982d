package projection_test

import (
	"fmt"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// What the projector does while the log or a bucket loses its end.
const (
	stopped = "stopped"
	running = "running"
)

// powerCut stops the server, and starts it again with the log as it was when the function was made.
func (w *world) powerCut() (cut func()) {
	w.t.Helper()
	w.srv.Down()
	restore := w.srv.SaveStream(w.log.Config().Stream)
	w.srv.Up()
	return func() {
		w.t.Helper()
		w.srv.Down()
		restore()
		w.srv.Up()
		w.restartAppender()
	}
}

// The log loses its end and grows beyond every checkpoint again before anybody looks: whether the
// projector stood still, ran or had just taken over meanwhile, every head becomes that of the log as
// it is, also those of sessions that nobody writes to any more.
func TestTheLogLostItsEndAndGrewAgain(t *testing.T) {
	t.Parallel()
	for _, projector := range []string{stopped, running, "just started"} {
		t.Run(projector, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ctx := journaltest.Context(t)
			k := w.worker(projection.Config{})
			id := func(i int) string { return fmt.Sprint("s", i) }
			const sessions = 8
			for i := range sessions {
				k.wrote(id(i), w.fill(id(i), 3, 3<<10))
			}
			cut := w.powerCut()
			for i := range sessions {
				k.wrote(id(i), w.fill(id(i), 8, 3<<10))
			}
			k.wrote("lost", w.append("lost", user("all of it")))
			journaltest.Eventually(t, "checkpoints at the log's end", func() bool {
				for _, p := range k.Status(ctx) {
					if p.Checkpoint < p.Read || p.Lag == nil || *p.Lag > 0 {
						return false
					}
				}
				return true
			})
			if projector != running {
				k.stop()
			}
			if projector == "just started" {
				k = w.worker(projection.Config{})
				journaltest.Eventually(t, "the new projector to read", func() bool { return caughtUp(k.Status(ctx)) })
			}
			cut()
			// Half of the sessions grow, with other events, past what the checkpoints tell of.
			for n := range 90 {
				w.append(id(n%(sessions/2)), user(fmt.Sprint("other ", n)))
			}
			if projector == stopped {
				k = w.worker(projection.Config{})
			}
			w.headsAtTheEnd(sessions, id)
			w.verify()
			// And from then on as ever.
			k.wrote("lost", w.append("lost", user("again")))
			k.wrote(id(7), w.append(id(7), user("again")))
			w.verify()
			for _, p := range k.Status(ctx) {
				if p.Error != "" {
					t.Errorf("partition %d: %s", p.Partition, p.Error)
				}
			}
		})
	}
}

// The log loses its end twice, and nothing is appended in between.
func TestTheLogLostItsEndTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	const sessions = 4
	id := func(i int) string { return fmt.Sprint("s", i) }
	fill := func(n int) {
		for i := range sessions {
			k.wrote(id(i), w.fill(id(i), n, 100))
		}
	}
	fill(2)
	second := w.powerCut()
	fill(3)
	first := w.powerCut()
	fill(5)
	k.wrote("lost", w.append("lost", user("all of it")))
	first()
	w.headsAtTheEnd(sessions, id)
	second()
	for n := range 30 {
		w.append(id(n%(sessions/2)), user(fmt.Sprint("other ", n)))
	}
	w.headsAtTheEnd(sessions, id)
	w.verify()
}

// The bucket of snapshots loses its end, and neither the log nor the checkpoint does: the heads are made
// anew, whether or not anything is appended.
func TestTheHeadsLostTheirEnd(t *testing.T) {
	t.Parallel()
	for _, projector := range []string{stopped, running} {
		t.Run(projector, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			k := w.worker(projection.Config{})
			const id = "s"
			k.wrote(id, w.append(id, user("0")))
			w.srv.Down()
			restore := w.srv.SaveStream("KV_" + snapshot.Bucket)
			w.srv.Up()
			k.wrote("new", w.append("new", user("0")))
			last := w.fill(id, 3, 40<<10)
			k.wrote(id, last)
			k.until("the checkpoint", func() bool { return k.checkpoints[w.log.Partition(id)] >= w.end() })
			lose := func() {
				t.Helper()
				if projector == stopped {
					k.stop()
				}
				w.srv.Down()
				restore()
				w.srv.Up()
				if projector == stopped {
					k = w.worker(projection.Config{})
				}
				journaltest.Eventually(t, "the heads to be back", func() bool { return w.headSeq(id) == last && w.headSeq("new") == 0 })
				journaltest.Eventually(t, "the end of it", func() bool { return caughtUp(k.Status(journaltest.Context(t))) })
			}
			lose()
			lose() // what was made anew, too
			k.wrote(id, w.append(id, user("again")))
			w.verify()
		})
	}
}

// headsAtTheEnd waits until n sessions have heads of all that is in the log, and "lost" has none.
func (w *world) headsAtTheEnd(n int, id func(int) string) {
	w.t.Helper()
	journaltest.Eventually(w.t, "all heads at the log's end", func() bool {
		for i := range n {
			s, err := w.Status(journaltest.Context(w.t), id(i))
			if err != nil {
				w.t.Fatal(err)
			}
			if w.headSeq(id(i)) != s.NextSeq-1 {
				return false
			}
		}
		return w.headSeq("lost") == events.NoSeq
	})
}
