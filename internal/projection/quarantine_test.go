package projection_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// raw stores a message on a session's subject, whatever it is.
func (w *world) raw(session string, h nats.Header, body string) uint64 {
	w.t.Helper()
	ack, err := w.js.PublishMsg(journaltest.Context(w.t), &nats.Msg{Subject: w.log.Subject(session), Header: h, Data: []byte(body)})
	if err != nil {
		w.t.Fatal(err)
	}
	return ack.Sequence
}

// remove deletes a message of the log.
func (w *world) remove(streamSeq uint64) {
	w.t.Helper()
	ctx := journaltest.Context(w.t)
	s, err := w.js.Stream(ctx, w.log.Config().Stream)
	if err != nil {
		w.t.Fatal(err)
	}
	if err := s.DeleteMsg(ctx, streamSeq); err != nil {
		w.t.Fatal(err)
	}
}

// getRecord reads a session's record, nil when it is not in quarantine.
func (w *world) getRecord(session string) *projection.Quarantine {
	w.t.Helper()
	q, err := w.buckets.QuarantineOf(journaltest.Context(w.t), session)
	if err != nil {
		w.t.Fatal(err)
	}
	return q
}

const sick = "sick"

// A session whose log holds what no appender stores is put aside at its last good commit, and
// no other session notices.
func TestQuarantine(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		// spoil puts something bad behind seq 2 and returns where.
		spoil func(w *world) uint64
		code  events.Code
		rule  events.Rule
		seq   events.Seq // NoSeq for none
		head  events.Seq
	}{
		"a broken surface rule": {
			func(w *world) uint64 {
				return w.store(sick, func(seq events.Seq) string {
					return line("user/message", seq, `,"surfaceOp":{"op":"replace","startSeq":0,"endSeq":2},"sourceEventSeqs":[0,2]`, message("x"))
				})
			}, events.CodeRuleViolation, events.RuleSourcesIncomplete, 3, 2,
		},
		"a broken rule in the midst of a commit": {
			func(w *world) uint64 {
				return w.store(sick, good, good, func(seq events.Seq) string { return line("user/message", seq, "", message("x")) }, good)
			}, events.CodeRuleViolation, events.RuleSurfaceOpRequired, 5, 2,
		},
		"data that is no JSON": {
			func(w *world) uint64 {
				at := w.store(sick, good, func(seq events.Seq) string {
					return line("user/message", seq, `,"surfaceOp":"append"`, `{"id":nonsense}`)
				})
				w.store(sick, good)
				return at
			}, events.CodeRuleViolation, events.RuleJSONMalformed, 4, 2,
		},
		"data that is no message, behind a good commit": {
			func(w *world) uint64 {
				w.store(sick, good)
				return w.store(sick, func(seq events.Seq) string {
					return line("assistant/message", seq, `,"surfaceOp":"append"`, message("x"))
				})
			}, events.CodeRuleViolation, events.RuleMessageMalformed, 4, 3,
		},
		"an unknown type": {
			func(w *world) uint64 {
				return w.store(sick, func(seq events.Seq) string { return line("x/unknown", seq, "", "1") })
			}, events.CodeRuleViolation, events.RuleUnknownType, 3, 2,
		},
		"no canonical line": {
			func(w *world) uint64 {
				return w.store(sick, func(seq events.Seq) string { return fmt.Sprintf(`{ "type":"turn/start","seq":%d}`, seq) })
			}, events.CodeRuleViolation, events.RuleEnvelopeMalformed, events.NoSeq, 2,
		},
		"a seq that does not follow": {
			func(w *world) uint64 {
				return w.store(sick, func(seq events.Seq) string { return good(seq + 1) })
			}, events.CodeSeqConflict, events.RuleSeqNotContiguous, 4, 2,
		},
		"a message that is no commit": {
			func(w *world) uint64 { return w.raw(sick, nil, "hello") },
			events.CodeCorrupt, "", events.NoSeq, 2,
		},
		"a commit of another session": {
			func(w *world) uint64 {
				c := journaltest.NewWriter("another", nil).Commit("c", 1, 10)
				return w.raw(sick, c.Header(), string(c.Body))
			}, events.CodeCorrupt, "", events.NoSeq, 2,
		},
		"another format": {
			func(w *world) uint64 {
				c := journaltest.NewWriter(sick, nil)
				c.Next = 3
				m := c.Lines("c", good(3))
				m.Format = events.Format4
				return w.raw(sick, m.Header(), string(m.Body))
			}, events.CodeCorrupt, "", 3, 2,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			beside := w.neighbour(sick)
			w.append(sick, user("0"))
			w.append(sick, user("1"), user("2"))
			w.append(beside, user("0"))
			bad := c.spoil(w)
			w.append(beside, user("1"))
			k := w.worker(projection.Config{FlushAfter: 20 * time.Millisecond})
			q := k.record()
			k.wrote(beside, 1)
			if q.Session != sick || q.Code != c.code || q.Rule != c.rule || q.StreamSeq != bad || q.Time == 0 || q.Detail == "" {
				t.Errorf("the record is %+v; want code %s, rule %q, stream sequence %d", q, c.code, c.rule, bad)
			}
			if got := seqOf(q.Seq); got != c.seq {
				t.Errorf("the record names seq %d, want %d", got, c.seq)
			}
			if got := w.headSeq(sick); got != c.head {
				t.Errorf("the head is at seq %d, the last good commit ends at %d", got, c.head)
			}
			if got := w.getRecord(sick); got == nil || got.Detail != q.Detail || got.StreamSeq != bad {
				t.Errorf("the stored record is %+v, the signal was %+v", got, q)
			}
			if n := k.Stats().Quarantined.Load(); n != 1 {
				t.Errorf("%d quarantines, want one", n)
			}
			_, err := w.reader.View(journaltest.Context(t), sick, projection.Want{MinSeq: c.head + 1, Timeout: time.Minute})
			if !errors.Is(err, events.ErrQuarantined) {
				t.Errorf("waiting for what will not come: %v", err)
			}
			v, err := w.reader.View(journaltest.Context(t), sick, projection.Want{MinSeq: events.NoSeq, Fresh: true})
			if err != nil || v.Last() != c.head || v.Quarantine == nil {
				t.Errorf("the view of the last good commit: %v, %v", v, err)
			}

			// It stays so over a restart, and the others go on.
			k.stop()
			again := w.worker(projection.Config{})
			again.wrote(beside, w.append(beside, user("2")))
			again.stop()
			if n := again.Stats().Quarantined.Load(); n != 0 || w.headSeq(sick) != c.head || w.getRecord(sick) == nil {
				t.Errorf("after a restart: %d quarantines, head at %d, record %v", n, w.headSeq(sick), w.getRecord(sick))
			}

			// Trying again changes nothing while the cause is there.
			third := w.worker(projection.Config{})
			err = third.Retry(journaltest.Context(t), sick)
			if !errors.Is(err, events.ErrQuarantined) {
				t.Errorf("Retry: %v", err)
			}
			got := w.getRecord(sick)
			if got == nil || got.StreamSeq != bad || got.Code != c.code || got.Rule != c.rule || seqOf(got.Seq) != c.seq || w.headSeq(sick) != c.head {
				t.Errorf("after Retry in vain: head at %d, record %+v; want it as before, %+v", w.headSeq(sick), got, q)
			}
			all, err := w.reader.Quarantined(journaltest.Context(t))
			if err != nil || len(all) != 1 || all[0].Session != sick {
				t.Errorf("listed are %v, %v", all, err)
			}
		})
	}
}

func seqOf(seq *events.Seq) events.Seq {
	if seq == nil {
		return events.NoSeq
	}
	return *seq
}

// A hole in the log is found, also where the bad commit is not the one that was delivered.
func TestRemovedMessageQuarantines(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append(sick, user("0"))
	hole := w.store(sick, good, good)
	bad := w.store(sick, good)
	w.store(sick, good)
	w.remove(hole)
	k := w.worker(projection.Config{})
	if q := k.record(); q.Rule != events.RuleSeqNotContiguous || q.StreamSeq != bad || seqOf(q.Seq) != 3 {
		t.Errorf("the record is %+v, want rule %s at stream sequence %d", q, events.RuleSeqNotContiguous, bad)
	}
	if got := w.headSeq(sick); got != 0 {
		t.Errorf("the head is at seq %d, want 0", got)
	}
}

// A type that another process added to the vocabulary first is no trouble, for a worker and for
// a reader that have not heard of it.
func TestVocabularyIsReadAgainBeforeQuarantine(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{}, w.journal(nil))
	w.append("s", user("0"))
	w.journal([]string{"x/new"})
	at := w.store("s", func(seq events.Seq) string { return line("x/new", seq, "", "1") })
	k.wrote("s", 1)
	if q := w.getRecord("s"); q != nil {
		t.Errorf("quarantined for a type that is known: %+v", q)
	}
	if n := k.Stats().Quarantined.Load(); n != 0 {
		t.Errorf("%d quarantines", n)
	}
	k.stop()
	w.store("s", func(seq events.Seq) string { return line("x/new", seq, "", "2") })
	reader := projection.NewReader(w.journal2(t), w.headers, w.buckets, projection.NewHeads())
	v, err := reader.View(journaltest.Context(t), "s", projection.Want{MinSeq: events.NoSeq, Fresh: true})
	if err != nil || v.Last() != 2 || v.StreamSeq <= at {
		t.Errorf("a fresh view over a type that another process added: %v", err)
	}
}

// journal2 is a journal that opened the log before its vocabulary grew.
func (w *world) journal2(t *testing.T) *journal.Journal {
	t.Helper()
	if len(w.log.Vocabulary().Missing([]string{"x/new"})) == 0 {
		t.Fatal("the world's own journal knows the type already")
	}
	return w.log
}

// What is mended outside is folded on by Retry: a vocabulary that grew, a message that was
// deleted.
func TestRetry(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spoil func(w *world) uint64
		mend  func(w *world, bad uint64)
		last  events.Seq
	}{
		"after the vocabulary grew": {
			func(w *world) uint64 {
				return w.store(sick, good, func(seq events.Seq) string { return line("x/new", seq, "", "1") })
			},
			func(w *world, _ uint64) { w.journal([]string{"x/new"}) },
			3,
		},
		"after the message was deleted": {
			func(w *world) uint64 { return w.raw(sick, nil, "hello") },
			func(w *world, bad uint64) { w.remove(bad) },
			1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.append(sick, user("0"), user("1"))
			bad := c.spoil(w)
			k := w.worker(projection.Config{}, w.journal(nil))
			k.record()
			ctx := journaltest.Context(t)
			if err := k.Retry(ctx, "healthy"); !errors.Is(err, &events.Error{Code: events.CodeNotFound}) {
				t.Errorf("Retry of a session that is not in quarantine: %v", err)
			}
			c.mend(w, bad)

			// Trouble with JetStream is told, and leaves all as it was.
			k.tap.set(func(op, bucket, _ string) error {
				if op == "get" && bucket == snapshot.Bucket {
					return context.DeadlineExceeded
				}
				return nil
			})
			if err := k.Retry(ctx, sick); !errors.Is(err, &events.Error{Code: events.CodeUnavailable}) || w.getRecord(sick) == nil {
				t.Errorf("Retry with the bucket away: %v, record %v", err, w.getRecord(sick))
			}
			k.tap.set(nil)
			if err := k.Retry(ctx, sick); err != nil {
				t.Fatalf("Retry: %v", err)
			}
			if q := w.getRecord(sick); q != nil || w.headSeq(sick) != c.last {
				t.Errorf("after Retry the head is at seq %d, want %d; the record is %+v", w.headSeq(sick), c.last, q)
			}
			w.store(sick, good)
			k.wrote(sick, c.last+1)
			w.log.RefreshVocabulary(ctx)
			w.verify()
		})
	}
}

// A record that the partition's owner knows nothing of, put by one before it that was late, can be
// cleared, and the session goes on.
func TestRetryClearsARecordOfAnOwnerBefore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	k := w.worker(projection.Config{})
	k.wrote(sick, w.append(sick, user("0")))
	for _, record := range []string{`{"session":"sick","code":"log-corrupt","detail":"late","streamSeq":1,"time":1}`, "{"} {
		if _, err := w.buckets.Quarantine.Put(ctx, sick, []byte(record)); err != nil {
			t.Fatal(err)
		}
		if err := k.Retry(ctx, sick); err != nil {
			t.Errorf("Retry: %v", err)
		}
		if q := w.getRecord(sick); q != nil {
			t.Errorf("the record is %+v", q)
		}
		k.wrote(sick, w.append(sick, user("more")))
	}
	if n := k.Stats().Moved.Load(); n != 0 {
		t.Errorf("%d heads were another owner's", n)
	}
	w.verify()
}

// While its session's head or record cannot be written, a bad commit holds its partition up
// rather than getting lost.
func TestQuarantineWaitsForTheBuckets(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append(sick, user("0"))
	w.append(sick, user("1"))
	bad := w.store(sick, good, func(seq events.Seq) string { return line("x/unknown", seq, "", "1") })
	k := w.worker0(projection.Config{FlushAfter: time.Hour})
	k.tap.set(func(op, bucket, _ string) error {
		if op == "put" && bucket == projection.QuarantineBucket {
			return context.DeadlineExceeded
		}
		return nil
	})
	if err := k.Start(journaltest.Context(t)); err != nil {
		t.Fatal(err)
	}
	p := w.log.Partition(sick)
	journaltest.Eventually(t, "trouble with the record", func() bool { return strings.Contains(statusOf(t, k, p).Error, "quarantine") })
	if st := statusOf(t, k, p); st.Read >= bad || st.Lag == nil || *st.Lag == 0 {
		t.Errorf("the bad commit at %d is taken for dealt with: %+v", bad, st)
	}
	if got := w.headSeq(sick); got != 1 {
		t.Errorf("the head is at seq %d; what is good comes first, up to seq 1", got)
	}
	k.tap.set(nil)
	if q := k.record(); q.StreamSeq != bad || q.Rule != events.RuleUnknownType {
		t.Errorf("the record is %+v", q)
	}
	k.stop()
	if cp := w.checkpoint(sick); cp != bad {
		t.Errorf("the checkpoint is %d, want %d", cp, bad)
	}
}

// Bad data that is found at a flush while the records cannot be read is found again.
func TestBadDataIsNotForgottenWhileTheBucketsAreAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	k.wrote(sick, w.append(sick, user("0")))
	var tries atomic.Int64
	k.tap.set(func(op, bucket, _ string) error {
		if bucket == projection.QuarantineBucket && tries.Add(1) == 1 {
			return context.DeadlineExceeded
		}
		return nil
	})
	bad := w.store(sick, func(seq events.Seq) string {
		return line("user/message", seq, `,"surfaceOp":"append"`, `{"role":"user"}`)
	})
	if q := k.record(); q.StreamSeq != bad || q.Rule != events.RuleMessageMalformed {
		t.Errorf("the record is %+v", q)
	}
	k.until("the checkpoint", func() bool { return k.checkpoints[w.log.Partition(sick)] == bad })
}

// The record of a session whose own head write was under way is made once.
func TestQuarantineIsToldOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	beside := w.neighbour(sick)
	k := w.worker0(projection.Config{FlushEvents: 1})
	held, release := make(chan struct{}), make(chan struct{})
	var first atomic.Bool
	k.tap.set(func(op, bucket, key string) error {
		if op == "create" && bucket == snapshot.Bucket && isHead(key) && first.CompareAndSwap(false, true) {
			close(held)
			<-release
		}
		return nil
	})
	w.append(sick, user("0"))
	w.append(sick, user("1"))
	w.store(sick, func(seq events.Seq) string { return line("x/unknown", seq, "", "1") })
	if err := k.Start(journaltest.Context(t)); err != nil {
		t.Fatal(err)
	}
	journaltest.Await(t, "the first head", held)
	k.record()
	close(release)
	k.until("the head that came too late", func() bool { return k.moved > 0 })
	k.wrote(beside, w.append(beside, user("0")))
	k.stop()
	if n := k.Stats().Quarantined.Load(); n != 1 || len(k.quarantined) != 1 {
		t.Errorf("%d quarantines, want one", n)
	}
	if got := w.headSeq(sick); got != 1 {
		t.Errorf("the head is at seq %d, want 1", got)
	}
}

// A message on a subject that is no session's is passed over.
func TestStraySubjectIsPassedOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.log.Partition("s")
	if _, err := w.js.Publish(journaltest.Context(t), fmt.Sprintf("%s.%d.=zz", w.log.Config().Prefix, p), nil, jetstream.WithRetryAttempts(3)); err != nil {
		t.Fatal(err)
	}
	k := w.worker(projection.Config{})
	k.wrote("s", w.append("s", user("0")))
	if n := k.Stats().Quarantined.Load(); n != 0 {
		t.Errorf("%d quarantines", n)
	}
}

// A watch of a session in quarantine gives what comes before what cannot be folded, and then says why it ends.
func TestWatchOfASessionInQuarantine(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	w.append(sick, user("0"))
	w.append(sick, user("1"), user("2"))
	w.store(sick, good, func(seq events.Seq) string { return line("x/unknown", seq, "", "1") }) // no part of that commit is projected
	k := w.worker(projection.Config{})
	k.record()
	srv := w.serve(k)
	hs, _ := w.hubs()
	for from := events.NoSeq; from < 5; from++ {
		watch := w.watch(hs, sick, from)
		seq := from
		var err error
		for err == nil {
			var ds []projection.Delta
			ds, err = watch.Next(ctx)
			for _, d := range ds {
				if seq++; d.Seq != seq {
					t.Errorf("from %d: told of %d, want %d", from, d.Seq, seq)
				}
			}
		}
		watch.Close()
		if seq != max(from, 2) || !errors.Is(err, &events.Error{Code: events.CodeRuleViolation, Rule: events.RuleUnknownType}) {
			t.Errorf("from %d: told up to %d, %v", from, seq, err)
		}
	}
	got := srv.body("GET", "/v1/sessions/"+sick+"/watch?from=0", 200)
	for _, part := range []string{"event: hello\n", "id: 1\nevent: delta\n", "id: 2\nevent: delta\n", "event: end\n", `"code":"rule-violation"`} {
		if !strings.Contains(got, part) {
			t.Errorf("the answer lacks %q:\n%s", part, got)
		}
	}
	for _, path := range []string{"/messages?at=1", "/surface?at=1", "/messages"} {
		if got := srv.body("GET", "/v1/sessions/"+sick+path, 200); !strings.Contains(got, `"quarantine":{`) {
			t.Errorf("%s does not say that the session is in quarantine: %s", path, got)
		}
	}
}

// What lies before a message that is no commit can be read as ever: as of a seq, and page by page.
func TestForeignMessageHidesNothingBeforeIt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	w.append(sick, user("0"))
	w.append(sick, user("1"), user("2"))
	bad := w.raw(sick, nil, "hello")
	for seq := range events.Seq(3) {
		v, err := w.reader.At(ctx, sick, seq)
		if err != nil || v.Last() != seq || v.Surface.Len() != int(seq)+1 {
			t.Errorf("as of seq %d: %+v, %v", seq, v, err)
		}
	}
	var foreign *journal.MalformedError
	if v, err := w.reader.At(ctx, sick, 3); !errors.As(err, &foreign) || foreign.StreamSeq != bad {
		t.Errorf("behind it: %+v, %v", v, err)
	}
	for _, c := range []struct {
		from, to events.Seq
		limit    int
		given    int
		next     events.Seq
		bad      bool
	}{
		{0, 2, 0, 3, events.NoSeq, false},
		{0, events.MaxSeq, 10, 3, 3, false},
		{1, 1, 10, 1, events.NoSeq, false},
		{0, events.MaxSeq, 0, 3, events.NoSeq, true}, // no page: it must not look like the whole log
		{3, events.MaxSeq, 10, 0, events.NoSeq, true},
	} {
		given := 0
		next, err := w.reader.Events(ctx, sick, projection.Range{From: c.from, To: c.to, Limit: c.limit}, func(*events.Event, *events.Commit) error {
			given++
			return nil
		})
		if given != c.given || next != c.next || errors.As(err, &foreign) != c.bad || !c.bad && err != nil {
			t.Errorf("%+v: %d given, next %d, %v", c, given, next, err)
		}
	}
}
