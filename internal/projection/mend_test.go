package projection_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

// What is damaged in the bucket is made anew from the log when it is needed, and no head goes
// back on the way.
func TestDamageIsMendedFromTheLog(t *testing.T) {
	t.Parallel()
	ctx := func(t *testing.T) *world { return newWorld(t) }
	const id = "s"
	put := func(w *world, key, value string) {
		if _, err := w.buckets.Snapshots.KV().Put(journaltest.Context(w.t), key, []byte(value)); err != nil {
			w.t.Fatal(err)
		}
	}
	get := func(w *world, key string) string {
		e, err := w.buckets.Snapshots.KV().Get(journaltest.Context(w.t), key)
		if err != nil {
			w.t.Fatal(err)
		}
		return string(e.Value())
	}
	purge := func(w *world, key string) {
		if err := w.buckets.Snapshots.KV().Purge(journaltest.Context(w.t), key); err != nil {
			w.t.Fatal(err)
		}
	}
	for name, damage := range map[string]func(w *world){
		"a head that is no JSON":        func(w *world) { put(w, id, "{") },
		"a head of another layout":      func(w *world) { put(w, id, `{"v":2}`) },
		"a head of another session":     func(w *world) { put(w, id, strings.Replace(get(w, id), `"session":"s"`, `"session":"x"`, 1)) },
		"a head with a broken tail":     func(w *world) { put(w, id, strings.Replace(get(w, id), `"type":"user/message"`, `"type":"user"`, 1)) },
		"a head with a node too few":    func(w *world) { put(w, id, strings.Replace(get(w, id), `"nodeCount":30`, `"nodeCount":31`, 1)) },
		"a head with a page twice":      func(w *world) { put(w, id, strings.Replace(get(w, id), `{"n":1,`, `{"n":0,`, 1)) },
		"no head":                       func(w *world) { purge(w, id) },
		"an early page that is gone":    func(w *world) { purge(w, "s.1") },
		"a late page that is gone":      func(w *world) { purge(w, "s.25") },
		"an early page that is no JSON": func(w *world) { put(w, "s.1", "[") },
		"a late page that is no JSON":   func(w *world) { put(w, "s.25", "[") },
		"all pages damaged": func(w *world) {
			for n := range 28 {
				put(w, fmt.Sprintf("s.%d", n), `{"v":1,"nodes":[]}`)
			}
		},
		"a page with the nodes of another": func(w *world) { put(w, "s.25", get(w, "s.24")) },
		"a page with an unknown type":      func(w *world) { put(w, "s.25", strings.Replace(get(w, "s.25"), "user/message", "user/massage", 1)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := ctx(t)
			// Far more events than are flushed at once, so that the fold anew takes many flushes'
			// worth.
			cfg := projection.Config{FlushEvents: 4}
			k := w.worker(cfg)
			k.wrote(id, w.fill(id, 30, 40<<10))
			k.stop()
			damage(w)
			k = w.worker(cfg)
			// Both replacements need pages.
			last := w.append(id, replace([]events.Seq{25, 26}, "late"), replace([]events.Seq{1, 2}, "early"))
			k.wrote(id, last)
			last = w.append(id, user("end"))
			k.wrote(id, last)
			k.stop()
			if !slices.IsSorted(k.flushed[id]) || k.flushed[id][0] < 29 && name != "no head" {
				t.Errorf("heads were written at seqs %v", k.flushed[id])
			}
			if n := k.Stats().Quarantined.Load(); n != 0 {
				t.Errorf("%d quarantines", n)
			}
			w.verify()
		})
	}
}

// A damaged snapshot does not keep a session in quarantine that the log can be folded for, nor
// its head from what is good.
func TestDamageAndQuarantineTogether(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	k.wrote(sick, w.fill(sick, 4, 40<<10))
	k.stop()
	kv := w.buckets.Snapshots.KV()
	if _, err := kv.Put(journaltest.Context(t), sick, []byte("{")); err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(journaltest.Context(t), sick+".0", []byte("{")); err != nil {
		t.Fatal(err)
	}
	w.append(sick, replace([]events.Seq{0, 1}, "early"))
	bad := w.raw(sick, nil, "hello")
	k = w.worker(projection.Config{})
	if q := k.record(); q.StreamSeq != bad || q.Code != events.CodeCorrupt {
		t.Errorf("the record is %+v, want one for stream sequence %d", q, bad)
	}
	if got := w.headSeq(sick); got != 4 {
		t.Errorf("the head is at seq %d, want 4", got)
	}
	w.remove(bad)
	if err := k.Retry(journaltest.Context(t), sick); err != nil {
		t.Errorf("Retry: %v", err)
	}
	w.verify()
}

// A power cut that takes the end of the log, but not the heads, or heads and checkpoints, that
// tell of it: what is appended from then on is projected, and the heads become those of the new
// log.
func TestHeadAheadOfTheLog(t *testing.T) {
	t.Parallel()
	for name, keepCheckpoint := range map[string]bool{"heads and a checkpoint beyond the end": true, "heads beyond the end": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			const id = "cut"
			beside, later := w.neighbour(id), w.neighbour(id)+"x"
			for w.log.Partition(later) != w.log.Partition(id) {
				later += "x"
			}
			k := w.worker(projection.Config{})
			k.wrote(id, w.fill(id, 10, 3<<10))
			k.wrote(beside, w.append(beside, user("0")))
			k.stop()
			before := w.checkpoint(id)
			w.srv.Down()
			restore := w.srv.SaveStream(w.log.Config().Stream)
			w.srv.Up()
			k = w.worker(projection.Config{})
			k.wrote(id, w.fill(id, 6, 3<<10))
			k.stop()
			if after := w.checkpoint(id); after != before+6 {
				t.Fatalf("the checkpoint went from %d to %d", before, after)
			}
			w.srv.Down()
			restore()
			w.srv.Up()
			if !keepCheckpoint {
				if _, err := w.buckets.Checkpoints.Put(journaltest.Context(t), fmt.Sprintf("p%d", w.log.Partition(id)), fmt.Appendf(nil, `{"v":1,"streamSeq":%d}`, before)); err != nil {
					t.Fatal(err)
				}
			}
			k = w.worker(projection.Config{})
			journaltest.Eventually(t, fmt.Sprintf("the checkpoint to be at the log's end, %d", before), func() bool { return w.checkpoint(id) == before })
			// What comes now gets the stream sequences of what was lost, and the lost seqs are
			// given again to other events.
			w.restartAppender()
			k.wrote(later, w.append(later, user("0")))
			var last events.Seq
			for n := range 9 {
				if last = w.append(id, user(fmt.Sprint("other ", n))); n == 0 && last != 10 {
					t.Fatalf("the first append behind the cut has seq %d, want 10", last)
				}
			}
			k.wrote(id, last)
			w.append(beside, user("1"))
			w.verify()
		})
	}
}
