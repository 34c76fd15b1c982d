package appender_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/lifecycle"
)

// TestEvictedSessionsGoOn: with room for none of them, every session is dropped when it is at
// rest and loaded again, and goes on where it was.
func TestEvictedSessionsGoOn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, c := range map[string]struct{ cache, loads int }{
		"none fits": {1, 5 * 4},
		"all fit":   {1 << 20, 4},
	} {
		p := w.start(t, appender.Config{CacheBytes: c.cache, Invariants: lifecycle.Enforce})
		for i := range 5 {
			for s := range 4 {
				id := fmt.Sprintf("%s %d", name, s)
				lines := []string{turn("start", i+1), user(fmt.Sprint("m", i)), turn("end", i+1)}
				if i == 2 {
					lines[1] = user("over", events.Seq(1), events.Seq(4))
				}
				if r := p.must(t, to(id, lines...)); r.FirstSeq != events.Seq(3*i) {
					t.Errorf("%s: append %d got seq %d", id, i, r.FirstSeq)
				}
			}
		}
		if got := p.Stats().Loads.Load(); got != int64(c.loads) {
			t.Errorf("%s: %d loads, want %d", name, got, c.loads)
		}
		n, bytes := p.Sessions()
		if name == "none fits" && (n != 0 || bytes != 0) || name == "all fit" && (n != 4 || bytes == 0 || bytes > c.cache) {
			t.Errorf("%s: %d sessions of %d bytes in memory", name, n, bytes)
		}
		for s := range 4 {
			if got := w.check(t, fmt.Sprintf("%s %d", name, s)).Next(); got != 15 {
				t.Errorf("%s %d ends at %d, want 15", name, s, got)
			}
		}
	}
}

// TestEvictionTakesTheOneNotUsedForLongest.
func TestEvictionTakesTheOneNotUsedForLongest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	probe := w.start(t, appender.Config{})
	probe.must(t, to("probe", note("x")))
	_, size := probe.Sessions()
	p := w.start(t, appender.Config{CacheBytes: 3*size + size/2})
	for i, step := range []struct {
		session string
		loads   int64
	}{{"a", 1}, {"b", 2}, {"c", 3}, {"a", 3}, {"d", 4}, {"a", 4}, {"c", 4}, {"b", 5}, {"d", 6}} {
		p.must(t, to(step.session, note("x")))
		if got := p.Stats().Loads.Load(); got != step.loads {
			t.Fatalf("step %d (%s): %d loads, want %d", i, step.session, got, step.loads)
		}
		journaltest.Eventually(t, "no more than fits", func() bool { _, bytes := p.Sessions(); return bytes <= 3*size+size/2 })
	}
}

// story is a session with something of everything that a head must carry. Its tool results are
// so large that pages of a head hold them, and its messages many.
func story() []appender.Request {
	const large = 70_000
	return []appender.Request{
		to("s", turn("start", 1), step("start", 1, 1)),
		to("s", onSurface("system/message", `{"turn":1,"step":1,"message":{"id":"sys","role":"system","source":{"kind":"system"},"content":[{"type":"text","text":"be good"}]}}`), user("m1")),
		to("s", assistant("a1", 1, 1, "c1", "c2")),
		to("s", toolCall(1, 1, "c1"), toolCall(1, 1, "c2")),
		to("s", result(1, 1, "c1", large)),                                   // 7
		to("s", logOnly("agent/status", `{"agent":"x","status":"running"}`)), // 8
		to("s", result(1, 1, "c2", 20), step("end", 1, 1)),                   // 9, 10
		to("s", step("start", 1, 2), user("m2"), user("m3")),                 // 11, 12, 13
		to("s", result(1, 1, "c1", 3, 7)),                                    // 14: prunes 7
		to("s", step("end", 1, 2), turn("end", 1)),                           // 15, 16
		to("s", user("sum", 12, 13)),                                         // 17: compacts
		to("s", turn("start", 2), step("start", 2, 1), assistant("a2", 2, 1, "c3", "c4"), toolCall(2, 1, "c3")),
		to("s", result(2, 1, "c3", large)), // 22
	}
}

// trials are appends whose answers depend on everything that a state holds. Those that are
// accepted come last.
func trials(next events.Seq) []appender.Request {
	return []appender.Request{
		to("s", user("x", 2)), // the system message, or not on the surface, or not there yet
		to("s", user("x", 3)), to("s", user("x", 12, 13)), to("s", user("x", 3, 4, 5)), to("s", user("x", 13, 12)),
		to("s", result(1, 1, "c1", 9, 7)), to("s", result(1, 1, "c1", 9, 14)), to("s", result(1, 1, "zz", 9, 14)), to("s", result(2, 1, "c3", 9, 22)), to("s", result(1, 1, "c1", 9, 3)),
		to("s", turn("start", 9)), to("s", turn("end", 1)), to("s", turn("end", 2)), to("s", step("start", 1, 7)), to("s", step("start", 2, 7)), to("s", step("end", 1, 2)),
		to("s", toolCall(1, 1, "c9")), to("s", result(1, 1, "c2", 4)), to("s", result(2, 1, "c4", 4)),
		to("s", logOnly("agent/status", `{"agent":"x","status":"running"}`)), to("s", logOnly("agent/status", `{"agent":"x","status":"idle"}`)),
		at(next+1, to("s", note("no"))), at(0, to("s", note("no"))),
		to("s", note("yes")), to("s", user("tail")),
	}
}

// TestHeadAndTailAreWorthTheWholeLog: an appender that starts from a head, wherever in the log
// it stands, answers as one that has read the whole log: the same receipts, the same errors.
func TestHeadAndTailAreWorthTheWholeLog(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg := appender.Config{Invariants: lifecycle.Enforce, Now: fixed}
	author := w.start(t, cfg)
	if _, _, err := author.Create(journaltest.Context(t), "s", []byte(`{"createdAt":1}`)); err != nil {
		t.Fatal(err)
	}
	for i, r := range story() {
		if _, err := author.Append(journaltest.Context(t), r); err != nil {
			t.Fatalf("story %d: %v", i, err)
		}
	}
	header, messages := w.header(t, "s"), w.messages(t)
	for _, k := range []int{9, len(messages)} { // the log's first k commits
		want := ""
		for _, head := range []int{0, k, k / 2} {
			w := newWorld(t)
			p := w.start(t, cfg)
			if _, _, err := p.Create(journaltest.Context(t), "s", header); err != nil {
				t.Fatal(err)
			}
			w.restore(t, messages[:k])
			if head > 0 {
				p.project(t, "s", events.Format3, head)
			}
			next := w.check(t, "s").Next()
			var answers []string
			for _, r := range trials(next) {
				receipt, err := p.Append(journaltest.Context(t), r)
				answer := fmt.Sprint(err)
				if err == nil {
					receipt.Commit = ""
					answer = fmt.Sprintf("%+v", *receipt)
				}
				answers = append(answers, answer)
			}
			st, err := p.Status(journaltest.Context(t), "s")
			if err != nil {
				t.Fatal(err)
			}
			st.Chain = "" // binds the commits' ids
			answers = append(answers, fmt.Sprintf("turn %v step %v calls %v nodes %d generation %d digest %s bytes %d", seq(st.OpenTurn), seq(st.OpenStep), st.PendingCalls, st.Nodes, st.ReplaceGeneration, st.Digest, st.LogBytes))
			if _, err := p.Repair(journaltest.Context(t), "s", ""); err != nil {
				t.Fatal(err)
			}
			got := strings.Join(append(answers, w.check(t, "s").Lines[next:]...), "\n")
			if want == "" {
				want = got
			} else if got != want {
				t.Fatalf("log of %d commits, head behind %d of them:\n%s\nfrom the log alone:\n%s", k, head, diff(got, want), diff(want, got))
			}
		}
	}
}

func seq(s *events.Seq) string {
	if s == nil {
		return "none"
	}
	return s.String()
}

// diff is the lines of a that b lacks.
func diff(a, b string) string {
	have := map[string]bool{}
	for line := range strings.Lines(b) {
		have[line] = true
	}
	out := ""
	for line := range strings.Lines(a) {
		if !have[line] {
			out += line
		}
	}
	return out
}

// messages are the stored messages of session s.
func (w *world) messages(t testing.TB) []*nats.Msg {
	t.Helper()
	js, err := jetstream.New(w.nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(journaltest.Context(t), "SESSIONS")
	if err != nil {
		t.Fatal(err)
	}
	var out []*nats.Msg
	for at := uint64(1); ; at++ {
		m, err := s.GetMsg(journaltest.Context(t), at)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		m.Header.Del(nats.ExpectedLastSubjSeqHdr)
		out = append(out, &nats.Msg{Subject: m.Subject, Header: m.Header, Data: m.Data})
	}
}

func (w *world) restore(t testing.TB, msgs []*nats.Msg) {
	t.Helper()
	for _, m := range msgs {
		if _, err := w.nc.RequestMsg(m, 20*time.Second); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRewriteOfAResultThatOnlyAHeadKnows: the head has pages with the tool results, and the
// appender does not read those; what the rule needs of the old result it finds in the log.
func TestRewriteOfAResultThatOnlyAHeadKnows(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	author := w.start(t, appender.Config{})
	author.must(t, to("s", turn("start", 1), step("start", 1, 1)))
	var results []events.Seq
	for i := range 5 {
		call := fmt.Sprint("c", i)
		r := author.must(t, to("s", toolCall(1, 1, call), result(1, 1, call, []int{10, 70_000, 10, 70_000, 10}[i])))
		results = append(results, r.LastSeq)
	}
	author.project(t, "s", events.Format3, -1)
	head, _, err := author.store.Head(journaltest.Context(t), "s")
	if err != nil || len(head.Pages) < 2 || len(head.Tail) != 1 {
		t.Fatalf("the head should have pages: %+v, %v", head, err)
	}
	for i, seq := range results {
		p := w.start(t, appender.Config{Invariants: lifecycle.Enforce})
		call := fmt.Sprint("c", i)
		p.refused(t, to("s", result(1, 2, call, 3, seq)), events.CodeRuleViolation, events.RuleRewriteChanges)
		p.refused(t, to("s", result(1, 1, "c9", 3, seq)), events.CodeRuleViolation, events.RuleRewriteChanges)
		r := p.must(t, to("s", note("in between"), result(1, 1, call, 3, seq), note("behind")))
		p.must(t, to("s", result(1, 1, call, 4, r.FirstSeq+1))) // and that one again
	}
	w.check(t, "s")
}

// TestDamagedHeadIsNoObstacle: the log is the truth.
func TestDamagedHeadIsNoObstacle(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	author := w.start(t, appender.Config{})
	for name, value := range map[string]string{"no JSON": "{", "another layout": `{"v":99,"session":"%s"}`, "another session": `{"v":1,"session":"zz","format":3}`, "no digest": `{"v":1,"session":"%s","format":3,"seq":1}`,
		"a page that is gone": `{"v":1,"session":"%s","format":3,"seq":1,"streamSeq":1,"index":[7],"pages":[],"tail":[],"nodeCount":0}`} {
		author.must(t, to(name, note("a"), user("m1")))
		if strings.Contains(value, "%s") {
			value = fmt.Sprintf(value, name)
		}
		if _, err := author.store.KV().Put(journaltest.Context(t), events.Token(name), []byte(value)); err != nil {
			t.Fatal(err)
		}
		p := w.start(t, appender.Config{})
		if r := p.must(t, to(name, user("m2", 1))); r.FirstSeq != 2 {
			t.Errorf("%s: seq %d, want 2", name, r.FirstSeq)
		}
		w.check(t, name)
	}
}

// TestLogThatWentBack: a power cut took the newest commits of the log, and left the head that
// knows of them. The log is the truth, at once and for good.
func TestLogThatWentBack(t *testing.T) {
	t.Parallel()
	for _, more := range []int{0, 1, 2, 3} { // commits behind the cut before the head is looked at again
		t.Run(fmt.Sprintf("then %d commits", more), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			author := w.start(t, appender.Config{})
			author.must(t, to("s", note("kept"), user("m1")))
			if err := author.Close(journaltest.Context(t)); err != nil {
				t.Fatal(err)
			}
			w.Down()
			cut := w.SaveStream("SESSIONS")
			w.Up()
			author = w.start(t, appender.Config{})
			author.must(t, to("s", note("lost"), user("m2")))
			author.must(t, to("s", user("m3"), note("lost")))
			author.project(t, "s", events.Format3, -1)
			w.Down()
			cut()
			w.Up()
			want := events.Seq(2)
			p := w.start(t, appender.Config{CacheBytes: 1}) // loads the session for every append
			for i := range more + 2 {
				if i == more {
					p = w.start(t, appender.Config{})
				}
				if r := p.must(t, to("s", note(fmt.Sprint("new ", i)))); r.FirstSeq != want {
					t.Errorf("append %d got seq %d, want %d", i, r.FirstSeq, want)
				}
				want++
			}
			// What the head alone knows is not on the surface.
			p.refused(t, to("s", user("x", 3)), events.CodeRuleViolation, events.RuleEndpointNotOnSurface)
			p.must(t, to("s", user("x", 1)))
			count(t, w.check(t, "s"), "lost", 0)
		})
	}
}

// TestLogThatWentBackUnderARunningAppender: the state in memory knows of more than the log.
func TestLogThatWentBackUnderARunningAppender(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	p.must(t, to("s", note("kept")))
	keyed := to("s", note("keyed"))
	keyed.Key = "k"
	last := p.must(t, keyed)
	lost := w.check(t, "s").Commits[1].StreamSeq
	js, err := jetstream.New(w.nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(journaltest.Context(t), "SESSIONS")
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.DeleteMsg(journaltest.Context(t), lost); err != nil {
		t.Fatal(err)
	}
	if r := p.must(t, to("s", note("new"))); r.FirstSeq != last.FirstSeq {
		t.Errorf("got seq %d, want %d", r.FirstSeq, last.FirstSeq)
	}
	// The key went with its events.
	if r := p.must(t, keyed); r.Duplicate || r.FirstSeq != last.FirstSeq+1 {
		t.Errorf("the keyed append again: %+v", *r)
	}
	count(t, w.check(t, "s"), `"keyed"`, 1)
}

// TestAppendersThatOutliveAPowerCut: both know commits that the log has lost, and one of them appends
// others before the other one looks.
func TestAppendersThatOutliveAPowerCut(t *testing.T) {
	t.Parallel()
	for _, more := range []int{0, 1, 2, 3} { // commits behind the cut
		for _, look := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d commits behind it, look first %t", more, look), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				a, b := w.start(t, appender.Config{}), w.start(t, appender.Config{})
				a.must(t, to("s", user("kept")))
				w.Down()
				cut := w.SaveStream("SESSIONS")
				w.Up()
				a.must(t, to("s", user("lost 1"), user("lost 2")))
				a.must(t, to("s", user("lost 3")))
				next := func(want events.Seq) {
					t.Helper()
					if st, err := b.Status(journaltest.Context(t), "s"); err != nil || st.NextSeq != want {
						t.Errorf("got %+v, %v, want next seq %d", st, err, want)
					}
				}
				next(4)
				w.Down()
				cut()
				w.Up()
				for i := range more {
					a.must(t, to("s", user(fmt.Sprint("new ", i))))
				}
				if look {
					next(events.Seq(1 + more))
				}
				if r := b.must(t, to("s", user("by b"))); r.FirstSeq != events.Seq(1+more) {
					t.Errorf("got seq %d, want %d", r.FirstSeq, 1+more)
				}
				a.must(t, to("s", user("by a")))
				count(t, w.check(t, "s"), "lost", 0)
			})
		}
	}
}

// TestOthersCommitsOnAnotherLogAreNotTakenUp: what comes next by its seq was made behind other events
// than those that the state knows, as no connection tells.
func TestOthersCommitsOnAnotherLogAreNotTakenUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, b := w.start(t, appender.Config{}), w.start(t, appender.Config{})
	a.must(t, to("s", note("kept")))
	a.must(t, to("s", note("lost")))
	if st, err := b.Status(journaltest.Context(t), "s"); err != nil || st.NextSeq != 2 {
		t.Fatal(st, err)
	}
	js, err := jetstream.New(w.nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.Stream(journaltest.Context(t), "SESSIONS")
	if err == nil {
		err = stream.DeleteMsg(journaltest.Context(t), w.check(t, "s").Commits[1].StreamSeq)
	}
	if err != nil {
		t.Fatal(err)
	}
	a.must(t, to("s", user("m1")))
	a.must(t, to("s", user("m2")))
	b.must(t, to("s", user("m3", 1, 2))) // m1 is on the surface
	if log := w.check(t, "s"); log.Next() != 4 {
		t.Errorf("the log has %d events, want 4", log.Next())
	}
}
