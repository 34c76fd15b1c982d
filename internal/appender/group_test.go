package appender_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"weak"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/platform"
)

// block holds the session's publishes and returns once one is under way, so that what is
// appended from now on queues up behind it.
func (p *process) block(t testing.TB, session string, then ...func(*events.Commit) error) (*gate, <-chan answer) {
	t.Helper()
	g := p.hold(t, then...)
	blocker := p.send(t, to(session, note("blocker")))
	journaltest.Await(t, "the publish", g.entered)
	return g, blocker
}

// TestGroupCommit: what queues up behind a publish becomes one commit, in the order of
// arrival, with a receipt or an error for each caller; a bad event is its caller's alone.
func TestGroupCommit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{Invariants: lifecycle.Enforce})
	g, blocker := p.block(t, "s")
	type caller struct {
		request appender.Request
		answer  <-chan answer
		code    events.Code // of its error, "" when it is fine
		rule    events.Rule
		index   int
	}
	var callers []*caller
	for i := range 40 {
		c := &caller{request: to("s", note(fmt.Sprintf("%d-a", i)), note(fmt.Sprintf("%d-b", i)))}
		switch i {
		case 3:
			c.request, c.code, c.rule, c.index = to("s", note("3-a"), `{"type":"no/such","data":{}}`), events.CodeRuleViolation, events.RuleUnknownType, 1
		case 10: // depends on what the callers before it append
			c.request = to("s", turn("start", 1), step("start", 1, 1))
		case 11:
			c.request = to("s", toolCall(1, 1, "call"), result(1, 1, "call", 5))
		case 12:
			c.request, c.code, c.rule, c.index = to("s", note("12-a"), note("12-b"), turn("start", 2)), events.CodeInvariant, lifecycle.RuleTurnOverlap, 2
		case 20:
			c.request, c.code = at(7, to("s", note("20-a"))), events.CodeSeqConflict
		}
		callers = append(callers, c)
		if len(callers) < 30 { // 58 events at most: one commit
			c.answer = p.queue(t, c.request)
		}
	}
	callers = callers[:29]
	g.release()
	if a := journaltest.Await(t, "the blocker", blocker); a.err != nil || a.FirstSeq != 0 {
		t.Fatal(a.err)
	}
	next := events.Seq(1)
	commit := ""
	for i, c := range callers {
		a := journaltest.Await(t, "an answer", c.answer)
		if c.code != "" {
			e := asError(a.err)
			if e.Code != c.code || e.Rule != c.rule || c.rule != "" && *e.Index != c.index {
				t.Errorf("caller %d: %v, want %s %s at %d", i, a.err, c.code, c.rule, c.index)
			}
			continue
		}
		if a.err != nil {
			t.Fatalf("caller %d: %v", i, a.err)
		}
		last := next + events.Seq(len(c.request.Events)) - 1
		if a.FirstSeq != next || a.LastSeq != last || a.Duplicate || commit != "" && a.Commit != commit {
			t.Errorf("caller %d: %+v, want %d..%d in %s", i, *a.Receipt, next, last, commit)
		}
		commit, next = a.Commit, last+1
	}
	log := w.check(t, "s")
	if len(log.Commits) != 2 || log.Commits[1].ID != commit || log.Next() != next {
		t.Errorf("%d events in %d commits, want %d in 2", log.Next(), len(log.Commits), next)
	}
	for _, gone := range []string{"3-a", "12-a", "20-a"} {
		count(t, log, `"`+gone+`"`, 0)
	}
}

// TestGroupCommitIsBounded by number, by bytes and by caller; the order of arrival is kept.
func TestGroupCommitIsBounded(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cfg   appender.Config
		queue []appender.Request
		want  []int // events of the commits
	}{
		"by number": {appender.Config{GroupEvents: 4}, []appender.Request{
			to("s", note("1")), to("s", note("2"), note("3")), to("s", note("4"), note("5")), to("s", note("6")),
			to("s", note("7"), note("8"), note("9"), note("10"), note("11"), note("12")), to("s", note("13")),
		}, []int{3, 3, 6, 1}},
		"by bytes": {appender.Config{GroupBytes: 1000}, []appender.Request{
			to("s", note(strings.Repeat("1", 400))), to("s", note(strings.Repeat("2", 400))), to("s", note(strings.Repeat("3", 400))),
			to("s", note(strings.Repeat("4", 3000))), to("s", note("5")),
		}, []int{2, 1, 1, 1}},
		"by caller": {appender.Config{}, []appender.Request{
			{Session: "s", Actor: "a", Events: [][]byte{[]byte(note("1"))}}, {Session: "s", Actor: "a", Events: [][]byte{[]byte(note("2"))}},
			{Session: "s", Actor: "b", Events: [][]byte{[]byte(note("3"))}}, {Session: "s", Actor: "a", Events: [][]byte{[]byte(note("4"))}}, to("s", note("5")),
		}, []int{2, 1, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			p := w.start(t, c.cfg)
			g, _ := p.block(t, "s")
			var answers []<-chan answer
			for _, r := range c.queue {
				answers = append(answers, p.queue(t, r))
			}
			g.release()
			next := events.Seq(1)
			for i, a := range answers {
				got := journaltest.Await(t, "an answer", a)
				if got.err != nil || got.FirstSeq != next {
					t.Fatalf("caller %d: %+v, %v, want seq %d", i, got.Receipt, got.err, next)
				}
				next = got.LastSeq + 1
			}
			var sizes []int
			for _, c := range w.check(t, "s").Commits[1:] {
				sizes = append(sizes, len(c.Lines))
			}
			if !slices.Equal(sizes, c.want) {
				t.Errorf("commits of %v events, want %v", sizes, c.want)
			}
		})
	}
}

// TestGroupFitsWhatTheServerTakes: appends that fit one by one are not refused for being
// together.
func TestGroupFitsWhatTheServerTakes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *platform.EmbedConfig) { c.MaxPayload = 64 << 10 })
	p := w.start(t, appender.Config{})
	g, _ := p.block(t, "s")
	var answers []<-chan answer
	for i := range 4 {
		answers = append(answers, p.queue(t, to("s", note(fmt.Sprint(i)+strings.Repeat("x", 40_000)))))
	}
	g.release()
	for i, a := range answers {
		if got := journaltest.Await(t, "an answer", a); got.err != nil {
			t.Errorf("caller %d: %v", i, got.err)
		}
	}
	if n := w.check(t, "s").Next(); n != 5 {
		t.Errorf("the log ends at %d, want 5", n)
	}
}

// TestRefusalWithinAGroupHoldsInTheLog: nobody is refused because of what a caller before it
// was going to append and did not.
func TestRefusalWithinAGroupHoldsInTheLog(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	g, blocker := p.block(t, "s", func(c *events.Commit) error {
		if strings.Contains(string(c.Body), "first") {
			return nats.ErrMaxPayload // refused for good
		}
		return nil
	})
	first, second := p.queue(t, to("s", note("first"))), p.queue(t, at(1, to("s", note("second"))))
	g.release()
	journaltest.Await(t, "the blocker", blocker)
	a, b := journaltest.Await(t, "the first", first), journaltest.Await(t, "the second", second)
	if asError(a.err).Code != events.CodeTooLarge || b.err != nil || b.FirstSeq != 1 {
		t.Errorf("got %v and %+v, %v", a.err, b.Receipt, b.err)
	}
	w.check(t, "s")
}

// TestRetryWhileTheFirstIsUnderWay: a caller that loses patience sends its append again while
// the first one waits. Both get the receipt.
func TestRetryWhileTheFirstIsUnderWay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	g, blocker := p.block(t, "s")
	expecting, keyed := at(1, to("s", note("expecting"))), to("s", note("keyed"))
	keyed.Key = "k"
	var answers []<-chan answer
	for _, r := range []appender.Request{expecting, expecting, keyed, keyed} {
		answers = append(answers, p.queue(t, r))
	}
	g.release()
	journaltest.Await(t, "the blocker", blocker)
	for i, first := range []events.Seq{1, 2} {
		a, b := journaltest.Await(t, "the first", answers[2*i]), journaltest.Await(t, "its retry", answers[2*i+1])
		if a.err != nil || b.err != nil || a.FirstSeq != first || b.FirstSeq != first || a.Duplicate || !b.Duplicate || a.Commit != b.Commit {
			t.Errorf("%d: got %+v, %v and %+v, %v", i, a.Receipt, a.err, b.Receipt, b.err)
		}
	}
	if n := w.check(t, "s").Next(); n != 3 {
		t.Errorf("the log ends at %d, want 3", n)
	}
}

// TestManyCallers: however many append at once, each gets its own answer, and the commits are
// far fewer than they are.
func TestManyCallers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	const callers, each, sessions = 16, 25, 3
	var mu sync.Mutex
	got := map[string]map[events.Seq]string{} // by session: what stands where
	var wg sync.WaitGroup
	for s := range sessions {
		id := fmt.Sprintf("s%d", s)
		got[id] = map[events.Seq]string{}
		for c := range callers {
			wg.Go(func() {
				last := events.NoSeq
				for i := range each {
					text := fmt.Sprintf("%s-%d-%d", id, c, i)
					r, err := p.Append(journaltest.Context(t), to(id, note(text)))
					if err != nil {
						t.Errorf("%s: %v", text, err)
						return
					}
					if r.FirstSeq <= last {
						t.Errorf("%s got seq %d, the one before it %d", text, r.FirstSeq, last)
					}
					last = r.FirstSeq
					mu.Lock()
					got[id][r.FirstSeq] = text
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	for id, stands := range got {
		log := w.check(t, id)
		if log.Next() != callers*each || len(stands) != callers*each {
			t.Fatalf("%s: %d events, %d receipts, want %d", id, log.Next(), len(stands), callers*each)
		}
		for seq, text := range stands {
			if !strings.Contains(log.Lines[seq], `"`+text+`"`) {
				t.Errorf("%s: %s was acknowledged at %d, where %s stands", id, text, seq, log.Lines[seq])
			}
		}
		if n := len(log.Commits); n > callers*each/2 {
			t.Errorf("%s: %d commits for %d appends", id, n, callers*each)
		}
	}
}

// TestSessionsDoNotWaitForEachOther.
func TestSessionsDoNotWaitForEachOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	held, open := make(chan struct{}), make(chan struct{})
	p.log.Faults.BeforePublish = func(c *events.Commit) error {
		if c.Session == "slow" {
			close(held)
			<-open
		}
		return nil
	}
	slow := p.send(t, to("slow", note("x")))
	journaltest.Await(t, "the publish", held)
	for i := range 20 {
		p.must(t, to(fmt.Sprintf("quick%d", i%3), note("y")))
	}
	close(open)
	if a := journaltest.Await(t, "the slow one", slow); a.err != nil {
		t.Error(a.err)
	}
}

// TestFullQueueIsOverload: more than may wait is refused at once, and what waits is done.
func TestFullQueueIsOverload(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{Queue: 3})
	g, blocker := p.block(t, "s")
	waiting := []<-chan answer{blocker}
	for i := range 3 {
		waiting = append(waiting, p.queue(t, to("s", note(fmt.Sprint(i)))))
	}
	for range 2 {
		p.refused(t, to("s", note("too much")), events.CodeOverloaded, "")
		if _, err := p.Status(journaltest.Context(t), "s"); asError(err).Code != events.CodeOverloaded {
			t.Errorf("status: %v", err)
		}
	}
	g.release()
	for _, a := range waiting {
		if got := journaltest.Await(t, "an answer", a); got.err != nil {
			t.Error(got.err)
		}
	}
	p.must(t, to("s", note("again")))
	log := w.check(t, "s")
	count(t, log, "too much", 0)
	if log.Next() != 5 {
		t.Errorf("the log ends at %d, want 5", log.Next())
	}
}

// TestPendingBytesAreBounded over all sessions, and an overload leaves nothing in memory.
func TestPendingBytesAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{PendingBytes: 2000})
	g, blocker := p.block(t, "s")
	waiting := p.queue(t, to("s", note(strings.Repeat("x", 1500))))
	before, _ := p.Sessions()
	for i := range 20 {
		p.refused(t, to(fmt.Sprintf("other%d", i), note(strings.Repeat("y", 1000))), events.CodeOverloaded, "")
	}
	if after, _ := p.Sessions(); after != before {
		t.Errorf("refused appends left %d sessions in memory, there were %d before", after, before)
	}
	g.release()
	for _, a := range []<-chan answer{blocker, waiting} {
		if got := journaltest.Await(t, "an answer", a); got.err != nil {
			t.Error(got.err)
		}
	}
	p.must(t, to("other1", note(strings.Repeat("y", 1000))))
	p.must(t, to("larger than may wait", note(strings.Repeat("z", 5000))))
}

// TestCloseWaitsForWork and refuses what comes behind it.
func TestCloseWaitsForWork(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{StopGrace: journaltest.Deadline})
	g, blocker := p.block(t, "s")
	waiting := p.queue(t, to("s", note("waiting")))
	hasty, cancel := context.WithCancel(journaltest.Context(t))
	cancel()
	if err := p.Close(hasty); !errors.Is(err, context.Canceled) {
		t.Errorf("Close of a caller who cannot wait: %v", err)
	}
	closed := make(chan error, 1)
	ctx := journaltest.Context(t)
	go func() { closed <- p.Close(ctx) }()
	p.refused(t, to("s", note("late")), events.CodeUnavailable, "")
	p.refused(t, to("other", note("late")), events.CodeUnavailable, "")
	if _, err := p.Status(ctx, "s"); asError(err).Code != events.CodeUnavailable {
		t.Errorf("status: %v", err)
	}
	select {
	case err := <-closed:
		t.Errorf("Close returned (%v) while a publish was under way", err)
	default:
	}
	g.release()
	for _, a := range []<-chan answer{blocker, waiting} {
		if got := journaltest.Await(t, "an answer", a); got.err != nil {
			t.Error(got.err)
		}
	}
	if err := journaltest.Await(t, "Close", closed); err != nil {
		t.Error(err)
	}
	if n := w.check(t, "s").Next(); n != 2 {
		t.Errorf("the log ends at %d, want 2", n)
	}
}

// TestRetryBehindALostCommit: of two callers with the same idempotency key in one group the
// first one's commit has no known outcome. The second is tried anew and not lost with it.
func TestRetryBehindALostCommit(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{}, journal.Config{RetryBudget: 200 * time.Millisecond})
	lost := ""
	g, blocker := p.block(t, "s", func(c *events.Commit) error {
		if c.Appends != nil && (lost == "" || lost == c.ID) {
			lost = c.ID
			return nats.ErrTimeout
		}
		return nil
	})
	keyed := to("s", note("once"))
	keyed.Key = "k"
	first, second := p.queue(t, keyed), p.queue(t, keyed)
	g.release()
	journaltest.Await(t, "the blocker", blocker)
	a, b := journaltest.Await(t, "the first", first), journaltest.Await(t, "the second", second)
	if asError(a.err).Code != events.CodeOutcomeUnknown || b.err != nil || b.FirstSeq != 1 || b.Duplicate {
		t.Errorf("got %v and %+v, %v", a.err, b.Receipt, b.err)
	}
	count(t, w.check(t, "s"), `"once"`, 1)
}

// TestFinishedRequestsAreLetGo: neither an actor that goes on working nor one at rest keeps them.
func TestFinishedRequestsAreLetGo(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{GroupEvents: 4})
	const groups = 5
	entered, goOn := make(chan int64, groups), make(chan struct{}, groups)
	t.Cleanup(func() { close(goOn) })
	p.log.Faults.BeforePublish = counter(func(n int64, _ *events.Commit) error {
		entered <- n
		<-goOn
		return nil
	})
	var kept []weak.Pointer[[64 << 10]byte]
	request := func() appender.Request {
		r := to("s", note("x"))
		b := new([64 << 10]byte)
		r.Events[0] = b[:copy(b[:], r.Events[0])]
		kept = append(kept, weak.Make(b))
		return r
	}
	answers := []<-chan answer{p.send(t, request())}
	journaltest.Await(t, "the first publish", entered)
	for range 4 * (groups - 1) {
		answers = append(answers, p.queue(t, request()))
	}
	letGo := func(what string, n int) {
		t.Helper()
		for _, a := range answers[:n] {
			if got := journaltest.Await(t, "an answer", a); got.err != nil {
				t.Fatal(got.err)
			}
		}
		journaltest.Eventually(t, what, func() bool {
			runtime.GC()
			return !slices.ContainsFunc(kept[:n], func(p weak.Pointer[[64 << 10]byte]) bool { return p.Value() != nil })
		})
		answers, kept = answers[n:], kept[n:]
	}
	for range groups - 1 {
		goOn <- struct{}{}
		journaltest.Await(t, "the next publish", entered)
	}
	letGo("the busy actor to let go of what is done", 1+4*(groups-2))
	goOn <- struct{}{}
	letGo("the actor at rest to let go of what is done", 4)
}
