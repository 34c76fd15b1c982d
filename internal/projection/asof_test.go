package projection_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// past is what a session's events up to a seq come to, folded without any of the program's code.
type past struct {
	surface    []events.Seq
	texts      []string
	generation int64
	changed    []events.Seq // events that changed the surface
	end        events.Seq   // of the log
}

// refold reads a session's log with the bare client and folds it up to a seq.
func (w *world) refold(session string, upTo events.Seq) past {
	w.t.Helper()
	h, err := w.headers.Get(journaltest.Context(w.t), session)
	if err != nil {
		w.t.Fatal(err)
	}
	return refold(w, journaltest.CheckLog(w.t, w.nc, w.log.Config().Stream, w.log.Subject(session), session, h.Raw), upTo)
}

func refold(w *world, l *journaltest.Log, upTo events.Seq) past {
	w.t.Helper()
	out := past{end: l.Next() - 1}
	for i, text := range l.Lines[:min(int(l.Next()), int(upTo)+1)] {
		var e struct {
			SurfaceOp json.RawMessage
			Data      json.RawMessage
		}
		if err := json.Unmarshal([]byte(text), &e); err != nil {
			w.t.Fatal(err)
		}
		if e.SurfaceOp == nil {
			continue
		}
		_, rest, _ := strings.Cut(string(e.Data), `"text":"`)
		shown, _, _ := strings.Cut(rest, `"`)
		from, to := len(out.surface), len(out.surface)
		if e.SurfaceOp[0] == '{' {
			var op struct{ StartSeq, EndSeq events.Seq }
			if err := json.Unmarshal(e.SurfaceOp, &op); err != nil {
				w.t.Fatal(err)
			}
			from, to = slices.Index(out.surface, op.StartSeq), slices.Index(out.surface, op.EndSeq)+1
			out.generation++
		}
		out.surface = slices.Replace(out.surface, from, to, events.Seq(i))
		out.texts = slices.Replace(out.texts, from, to, shown)
		out.changed = append(out.changed, events.Seq(i))
	}
	return out
}

// at compares a session's surface as of a seq.
func (w *world) at(r *projection.Reader, session string, seq events.Seq, want past) {
	w.t.Helper()
	v, err := r.At(journaltest.Context(w.t), session, seq)
	if err != nil {
		w.t.Errorf("%s at seq %d: %v", session, seq, err)
		return
	}
	if got := v.Surface.Seqs(); v.Last() != seq || !slices.Equal(got, want.surface) || v.Surface.Generation() != want.generation {
		w.t.Errorf("%s at seq %d: seq %d, surface %v, generation %d; want %v, %d", session, seq, v.Last(), got, v.Surface.Generation(), want.surface, want.generation)
	}
	if got := texts(w.t, v); !slices.Equal(got, append([]string{}, want.texts...)) {
		w.t.Errorf("%s at seq %d: the messages differ", session, seq)
	}
}

func TestAtEverySeq(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		commits int
		size    int
	}{"small": {14, 20}, "with pages": {12, 8 << 10}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ctx := journaltest.Context(t)
			k := w.worker0(projection.Config{FlushEvents: 5})
			authors := []*author{w.author("a", 1, c.size), w.author("b", 2, c.size)}
			write := func(n int) {
				for _, a := range authors {
					for range n {
						if err := a.commit(ctx); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			check := func(head string) {
				for _, a := range authors {
					h, err := w.headers.Get(ctx, a.id)
					if err != nil {
						t.Fatal(err)
					}
					l := journaltest.CheckLog(t, w.nc, w.log.Config().Stream, w.log.Subject(a.id), a.id, h.Raw)
					if l.Next() != a.next || !slices.Equal(refold(w, l, events.MaxSeq).surface, a.surface) {
						t.Fatalf("%s: the log is not what was appended", a.id)
					}
					for seq := range l.Next() {
						w.at(w.reader, a.id, seq, refold(w, l, seq))
					}
					for _, seq := range []events.Seq{l.Next(), l.Next() + 100, events.MaxSeq, events.NoSeq} {
						if _, err := w.reader.At(ctx, a.id, seq); !errors.Is(err, &events.Error{Code: events.CodeNotFound}) {
							t.Errorf("%s at seq %d, head %s: %v", a.id, seq, head, err)
						}
					}
				}
			}
			write(c.commits / 2)
			check("is not there")
			if err := k.Start(ctx); err != nil {
				t.Fatal(err)
			}
			for _, a := range authors {
				k.wrote(a.id, a.next-1)
			}
			check("is at the end")
			k.stop()
			write(c.commits / 2)
			check("is in the midst") // behind some seqs, at one, beyond others
		})
	}
}

// With nothing replaced behind the seq, the head is cut short.
func TestAtBeforeTheHeadsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	k := w.worker(projection.Config{})
	w.append("s", user("0"), user("1"), user("2"), replace([]events.Seq{0, 1}, "3"))
	w.append("s", `{"type":"goal/change","data":1}`, user("5"), user("6"))
	k.wrote("s", w.append("s", user("7"), user("8")))
	for seq := events.Seq(0); seq <= 8; seq++ {
		w.at(w.reader, "s", seq, w.refold("s", seq))
	}
	if _, err := w.reader.At(ctx, "nowhere", 0); !errors.Is(err, events.ErrSessionNotFound) {
		t.Errorf("a session that is not there: %v", err)
	}
	if _, err := w.reader.At(ctx, "a\x00b", 0); !errors.Is(err, &events.Error{Code: events.CodeSessionID}) {
		t.Errorf("a bad id: %v", err)
	}
	if _, _, err := w.Create(ctx, "empty", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := w.reader.At(ctx, "empty", 0); !errors.Is(err, &events.Error{Code: events.CodeNotFound}) {
		t.Errorf("an empty session: %v", err)
	}
}

// The head moves on, with a replacement, between its two reads; or a page of it is damaged.
func TestAtWhileTheHeadMoves(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	taps := &tap{JetStream: w.js}
	buckets, err := projection.OpenBuckets(journaltest.Context(t), taps, 1)
	if err != nil {
		t.Fatal(err)
	}
	r := projection.NewReader(w.log, w.headers, buckets, projection.NewHeads())
	for id, seq := range map[string]events.Seq{"beyond": 7, "at": 9} {
		var end events.Seq
		for i := range 10 {
			end = w.append(id, user(fmt.Sprint(i)))
		}
		k.wrote(id, end)
		reads := 0
		taps.set(func(op, bucket, key string) error {
			if op == "get" && bucket == snapshot.Bucket && key == id {
				if reads++; reads == 2 {
					k.wrote(id, w.append(id, replace([]events.Seq{8, 9}, "summary")))
				}
			}
			return nil
		})
		w.at(r, id, seq, w.refold(id, seq))
		if reads != 2 {
			t.Errorf("the head %s the seq was read %d times", id, reads)
		}
	}
	taps.set(nil)

	k.wrote("paged", w.fill("paged", 4, 40<<10))
	if _, err := w.buckets.Snapshots.KV().Put(journaltest.Context(t), snapshot.PageKey("paged", 0), []byte("{")); err != nil {
		t.Fatal(err)
	}
	w.at(r, "paged", 3, w.refold("paged", 3))
}

// A commit that claims more events than it has is an error, and no surface of what is not there.
func TestAtBehindTheEndOfACommitsBody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	w.append(sick, user("0"))
	last, err := w.log.LeaderLast(ctx, sick)
	if err != nil {
		t.Fatal(err)
	}
	wr := journaltest.NewWriter(sick, nil)
	wr.Next, wr.Digest, wr.Chain = last.Last+1, last.Digest, last.Chain
	c := wr.Lines("by-hand", good(1))
	c.Last = 1000
	if _, err := w.log.Publish(ctx, c, last.StreamSeq); err != nil {
		t.Fatal(err)
	}
	if _, err := w.reader.At(ctx, sick, 500); !errors.Is(err, &events.Error{Code: events.CodeCorrupt}) {
		t.Errorf("at seq 500: %v", err)
	}
	if v, err := w.reader.At(ctx, sick, 0); err != nil || v.Surface.Len() != 1 {
		t.Errorf("at seq 0: %v", err)
	}
}
