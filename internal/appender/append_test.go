package appender_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/lifecycle"
)

func TestAppendAnswersWhereItIsStored(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	one := to("s", note("one"))
	one.Actor, one.Trace = "alice", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	first := p.must(t, one)
	second := p.must(t, to("s", user("m1"), note("two"), user("m2")))
	log := w.check(t, "s")
	if first.Session != "s" || first.FirstSeq != 0 || first.LastSeq != 0 || first.Duplicate || second.FirstSeq != 1 || second.LastSeq != 3 {
		t.Errorf("receipts: %+v and %+v", first, second)
	}
	for i, r := range []*appender.Receipt{first, second} {
		if c := log.Commits[i]; c.ID != r.Commit || c.Digest != r.Digest || c.First != int64(r.FirstSeq) || c.Last != int64(r.LastSeq) {
			t.Errorf("receipt %+v, stored %+v", r, c)
		}
	}
	if log.Commits[0].Actor != "alice" || log.Commits[1].Actor != "-" {
		t.Errorf("actors: %q and %q", log.Commits[0].Actor, log.Commits[1].Actor)
	}
	st, err := p.Status(journaltest.Context(t), "s")
	if err != nil || st.NextSeq != 4 || st.Nodes != 2 || st.Digest != second.Digest || st.Header.ID != "s" || st.Chain != log.Commits[1].Chain {
		t.Errorf("status: %+v, %v", st, err)
	}
	if n := p.Stats(); n.Events.Load() != 4 || n.Commits.Load() != 2 || n.Refused.Load() != 0 || n.Loads.Load() != 1 {
		t.Errorf("stats: %d events in %d commits, %d refused, %d loads", n.Events.Load(), n.Commits.Load(), n.Refused.Load(), n.Loads.Load())
	}
}

// TestRefusedAppendLeavesNothing: whichever event of a request is bad, the error names it, and
// the log and the state are as they were.
func TestRefusedAppendLeavesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{Invariants: lifecycle.Enforce, MaxEvent: 2000})
	p.must(t, to("s", turn("start", 1), step("start", 1, 1), user("m1"), user("m2"), toolCall(1, 1, "c"), result(1, 1, "c", 10)))
	status := func() string {
		t.Helper()
		st, err := p.Status(journaltest.Context(t), "s")
		if err != nil {
			t.Fatal(err)
		}
		st.Header = nil
		return fmt.Sprintf("%+v", st.Summary)
	}
	before := status()
	good := []string{user("m3", 2, 3), note("x"), result(1, 1, "c", 3, 5), step("end", 1, 1), turn("end", 1)}
	for name, bad := range map[string]struct {
		line string
		code events.Code
		rule events.Rule
	}{
		"json":      {`{"type":`, events.CodeRuleViolation, events.RuleJSONMalformed},
		"envelope":  {`{"type":"goal/change","data":{},"more":1}`, events.CodeRuleViolation, events.RuleEnvelopeMalformed},
		"type":      {`{"type":"no/such","data":{}}`, events.CodeRuleViolation, events.RuleUnknownType},
		"shadowed":  {user("m4", 1), events.CodeRuleViolation, events.RuleEndpointNotOnSurface},
		"rewrite":   {result(1, 1, "other", 3, 5), events.CodeRuleViolation, events.RuleRewriteChanges},
		"lifecycle": {step("start", 7, 7), events.CodeInvariant, lifecycle.RuleStepOutsideTurn},
		"seq":       {`{"type":"goal/change","seq":3,"data":{}}`, events.CodeSeqConflict, events.RuleSeqNotContiguous},
		"size":      {note(strings.Repeat("x", 3000)), events.CodeTooLarge, ""},
	} {
		for i := range len(good) + 1 {
			if name == "rewrite" && i > 2 {
				continue // the node is another by then
			}
			lines := append(append(append([]string{}, good[:i]...), bad.line), good[i:]...)
			e := p.refused(t, to("s", lines...), bad.code, bad.rule)
			if e.Index == nil || *e.Index != i || e.Session != "s" || e.Detail == "" {
				t.Errorf("%s at %d: %+v", name, i, e)
			}
			if e.Rule != "" && e.Rule != events.RuleSeqNotContiguous && (e.Seq == nil || *e.Seq != events.Seq(6+i)) {
				t.Errorf("%s at %d: the error is about seq %v", name, i, e.Seq)
			}
		}
	}
	if log := w.check(t, "s"); len(log.Commits) != 1 {
		t.Errorf("%d commits, want 1", len(log.Commits))
	}
	if after := status(); after != before {
		t.Errorf("the state changed:\n%s\n%s", before, after)
	}
	p.must(t, to("s", good...))
	if log := w.check(t, "s"); log.Next() != 11 {
		t.Errorf("the log ends at %d, want 11", log.Next())
	}
}

func TestAppendOfNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	p.refused(t, to("s"), events.CodeBadRequest, "")
	for _, id := range []string{"", ".", "..", strings.Repeat("x", 201), "a\x00b", "\xff"} {
		p.refused(t, to(id, note("x")), events.CodeSessionID, "")
		if _, err := p.Status(journaltest.Context(t), id); asError(err).Code != events.CodeSessionID {
			t.Errorf("status of %q: %v", id, err)
		}
	}
	if _, err := p.Status(journaltest.Context(t), "unknown"); !errors.Is(err, events.ErrSessionNotFound) {
		t.Errorf("status of an unknown session: %v", err)
	}
	if _, err := p.Repair(journaltest.Context(t), "unknown", ""); !errors.Is(err, events.ErrSessionNotFound) {
		t.Errorf("repair of an unknown session: %v", err)
	}
}

// TestConflictNamesTheActualTail, and nothing is stored.
func TestConflictNamesTheActualTail(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, other := w.start(t, appender.Config{}), w.start(t, appender.Config{})
	p.must(t, at(0, to("s", note("a"), note("b"))))
	for _, wrong := range []events.Seq{0, 1, 3, 100} {
		e := p.refused(t, at(wrong, to("s", note("c"))), events.CodeSeqConflict, "")
		if e.ExpectedSeq == nil || *e.ExpectedSeq != wrong || e.ActualSeq == nil || *e.ActualSeq != 2 || e.Session != "s" {
			t.Errorf("expected %d: %+v", wrong, e)
		}
	}
	// The tail is that of the log and not of what this appender saw last.
	other.must(t, at(2, to("s", note("c"), note("d"))))
	if e := p.refused(t, at(2, to("s", note("e"))), events.CodeSeqConflict, ""); *e.ActualSeq != 4 {
		t.Errorf("actual seq %d, want 4", *e.ActualSeq)
	}
	other.must(t, at(4, to("s", note("e"))))
	p.must(t, at(5, to("s", note("f"))))
	// The same said by the event itself.
	e := p.refused(t, to("s", `{"type":"goal/change","seq":3,"data":{}}`), events.CodeSeqConflict, events.RuleSeqNotContiguous)
	if *e.ExpectedSeq != 3 || *e.ActualSeq != 6 || *e.Index != 0 {
		t.Errorf("given seq: %+v", e)
	}
	p.must(t, to("s", `{"type":"goal/change","seq":6,"data":{}}`))
	if got := w.check(t, "s").Next(); got != 7 {
		t.Errorf("the log ends at %d, want 7", got)
	}
}

// TestRetryWithExpectedSeqIsSafeForEver: the same events at those seqs answer the original
// receipt, whoever is asked and however long after; others are a conflict.
func TestRetryWithExpectedSeqIsSafeForEver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	p.must(t, at(0, to("s", note("first"))))
	request := at(1, to("s", user("m1"), `{"type":"goal/change","time":77,"data":{"a":1.10,"b":"\u00e9"}}`, note("three")))
	original := p.must(t, request)
	for i := range 5 {
		p.must(t, to("s", note(fmt.Sprint("later ", i))))
	}
	want := *original
	want.Duplicate = true
	retry := func(who string, p *process, r appender.Request) {
		t.Helper()
		got := p.must(t, r)
		if fmt.Sprint(*got) != fmt.Sprint(want) {
			t.Errorf("%s: got %+v, want %+v", who, *got, want)
		}
	}
	retry("the same appender", p, request)
	retry("another one", w.start(t, appender.Config{}), request)
	w.Restart()
	fresh := w.start(t, appender.Config{Now: func() time.Time { return time.Now().Add(24 * time.Hour) }})
	retry("one behind a restart, a day later", fresh, request)
	retry("with the same content in another spelling", fresh, at(1, to("s",
		"{ \"surfaceOp\" : \"append\", \"data\":"+strings.TrimSuffix(strings.SplitN(user("m1"), `"data":`, 2)[1], "}")+", \"type\":\"user\\/message\", \"seq\": 1.0 }",
		`{"data":{"a":1.10,"b":"\u00e9"},"time":7.7e1,"type":"goal/change","seq":2}`, note("three"))))

	for name, r := range map[string]appender.Request{
		"other content":           at(1, to("s", user("m1"), `{"type":"goal/change","time":77,"data":{"a":1.1,"b":"\u00e9"}}`, note("three"))),
		"another time":            at(1, to("s", user("m1"), `{"type":"goal/change","time":78,"data":{"a":1.10,"b":"\u00e9"}}`, note("three"))),
		"another order":           at(1, to("s", user("m1"), note("three"), `{"type":"goal/change","time":77,"data":{"a":1.10,"b":"\u00e9"}}`)),
		"the same somewhere else": at(2, to("s", user("m1"), `{"type":"goal/change","time":77,"data":{"a":1.10,"b":"\u00e9"}}`, note("three"))),
		"one more at the end":     at(1, to("s", user("m1"), `{"type":"goal/change","time":77,"data":{"a":1.10,"b":"\u00e9"}}`, note("three"), note("four"))),
		"more than the log has":   at(8, to("s", note("later 4"), note("later 5"))),
		"no event at all":         at(1, to("s", "{")),
	} {
		if e := fresh.refused(t, r, events.CodeSeqConflict, ""); *e.ActualSeq != 9 {
			t.Errorf("%s: actual seq %d, want 9", name, *e.ActualSeq)
		}
	}
	if got := w.check(t, "s"); got.Next() != 9 || len(got.Commits) != 7 {
		t.Errorf("the log holds %d events in %d commits, want 9 in 7", got.Next(), len(got.Commits))
	}
}

// TestRetryIsRecognisedWithinAGroup: several callers' appends in one commit have receipts of
// their own, and so have their retries.
func TestRetryIsRecognisedWithinAGroup(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	g := p.hold(t)
	blocker := p.send(t, to("s", note("blocker")))
	journaltest.Await(t, "the publish", g.entered)
	var answers []<-chan answer
	var requests []appender.Request
	for i, n := 0, events.Seq(1); i < 4; i++ {
		r := to("s")
		for k := range i + 1 {
			r.Events = append(r.Events, []byte(note(fmt.Sprintf("%d-%d", i, k))))
		}
		requests = append(requests, at(n, r))
		answers = append(answers, p.queue(t, requests[i]))
		n += events.Seq(i + 1)
	}
	g.release()
	journaltest.Await(t, "the blocker", blocker)
	fresh := w.start(t, appender.Config{})
	for i, a := range answers {
		got := journaltest.Await(t, "an answer", a)
		if got.err != nil {
			t.Fatal(got.err)
		}
		again := fresh.must(t, requests[i])
		want := *got.Receipt
		want.Duplicate = true
		if fmt.Sprint(*again) != fmt.Sprint(want) {
			t.Errorf("append %d: retry answered %+v, the original was %+v", i, *again, *got.Receipt)
		}
	}
	if log := w.check(t, "s"); len(log.Commits) != 2 || log.Next() != 11 {
		t.Errorf("%d events in %d commits", log.Next(), len(log.Commits))
	}
}

// TestRefusalIsJudgedAgainstTheNewestLog: an appender that others have left behind looks at
// the log before it says no.
func TestRefusalIsJudgedAgainstTheNewestLog(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stale, other := w.start(t, appender.Config{Invariants: lifecycle.Enforce}), w.start(t, appender.Config{Invariants: lifecycle.Enforce})
	stale.must(t, to("s", note("loaded")))
	// A node that the stale appender has not seen.
	seq := other.must(t, to("s", user("m1"))).FirstSeq
	stale.must(t, to("s", user("m2", seq)))
	// A turn that it has not seen.
	other.must(t, to("s", turn("start", 1), step("start", 1, 1), toolCall(1, 1, "c")))
	stale.must(t, to("s", result(1, 1, "c", 10)))
	// A seq that it would not expect.
	next := other.must(t, to("s", note("x"))).LastSeq + 1
	stale.must(t, at(next, to("s", note("y"))))
	next = other.must(t, to("s", note("z"))).LastSeq + 1
	stale.must(t, to("s", fmt.Sprintf(`{"type":"goal/change","seq":%d,"data":{}}`, next)))
	// What is wrong whatever the log holds is refused; so is what is wrong in the newest log.
	stale.refused(t, to("s", user("m3", seq)), events.CodeRuleViolation, events.RuleEndpointNotOnSurface)
	other.must(t, to("s", step("end", 1, 1), turn("end", 1)))
	stale.refused(t, to("s", turn("end", 1)), events.CodeInvariant, lifecycle.RuleTurnMismatch)
	w.check(t, "s")
}

// TestObserveReportsAndEnforceRefuses.
func TestObserveReportsAndEnforceRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for mode, p := range map[lifecycle.Mode]*process{
		lifecycle.Off: w.start(t, appender.Config{Invariants: lifecycle.Off}), lifecycle.Observe: w.start(t, appender.Config{Invariants: lifecycle.Observe}),
		lifecycle.Enforce: w.start(t, appender.Config{Invariants: lifecycle.Enforce}), "": w.start(t, appender.Config{}),
	} {
		id := "session " + string(mode)
		p.must(t, to(id, turn("start", 1), note("fine")))
		bad := to(id, note("a"), step("end", 1, 5), note("b"), turn("start", 2))
		switch mode {
		case lifecycle.Enforce:
			e := p.refused(t, bad, events.CodeInvariant, lifecycle.RuleStepMismatch)
			if *e.Index != 1 || *e.Seq != 3 || e.Session != id {
				t.Errorf("enforce: %+v", e)
			}
			if n := w.check(t, id).Next(); n != 2 {
				t.Errorf("enforce: the log ends at %d, want 2", n)
			}
		case lifecycle.Observe:
			r := p.must(t, bad)
			if len(r.Violations) != 2 || r.Violations[0].Rule != lifecycle.RuleStepMismatch || r.Violations[0].Seq != 3 ||
				r.Violations[1].Rule != lifecycle.RuleTurnOverlap || r.Violations[1].Seq != 5 || r.Violations[1].Detail == "" {
				t.Errorf("observe: %+v", r)
			}
			if got := p.Stats().Violations.Load(); got != 2 {
				t.Errorf("observe counted %d", got)
			}
			if r := p.must(t, to(id, note("fine again"))); r.Violations != nil {
				t.Errorf("observe: %+v", r)
			}
		default:
			if r := p.must(t, bad); r.Violations != nil {
				t.Errorf("off: %+v", r)
			}
		}
		w.check(t, id)
	}
}

func TestCreateIsOnceOnly(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, other := w.start(t, appender.Config{}), w.start(t, appender.Config{})
	ctx := journaltest.Context(t)
	h, created, err := p.Create(ctx, "s", []byte(`{"version":4,"cwd":"/tmp","x":[1]}`))
	if err != nil || !created || h.Format != events.Format4 {
		t.Fatalf("%+v, %t, %v", h, created, err)
	}
	for _, same := range []string{`{"version":4,"cwd":"/tmp","x":[1]}`, ` { "x" : [ 1 ], "cwd":"/tmp", "version":4, "id":"s" } `} {
		if again, created, err := other.Create(ctx, "s", []byte(same)); err != nil || created || string(again.Raw) != string(h.Raw) {
			t.Errorf("the same header again: %t, %v", created, err)
		}
	}
	for _, different := range []string{`{"version":4,"cwd":"/var","x":[1]}`, `{}`, `{"version":3,"cwd":"/tmp","x":[1]}`} {
		_, _, err := other.Create(ctx, "s", []byte(different))
		if e := asError(err); e.Code != events.CodeSessionExists || !strings.Contains(e.Detail, "/tmp") {
			t.Errorf("header %s: %v", different, err)
		}
	}
	// Its format is the session's.
	p.must(t, to("s", onSurface("developer/message", `{"message":{"id":"d","role":"developer","source":{"kind":"system"},"content":[]}}`)))
	other.refused(t, to("unknown", onSurface("developer/message", `{"message":{"id":"d","role":"developer","source":{"kind":"system"},"content":[]}}`)), events.CodeRuleViolation, events.RuleUnknownType)
	if f, err := p.Format(ctx, "s"); f != events.Format4 || err != nil {
		t.Errorf("format %d, %v", f, err)
	}
	w.check(t, "s")
}

// TestSessionWithoutAHeaderIsPending: its events are there before its header, which a fork
// writes last.
func TestSessionWithoutAHeaderIsPending(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	if _, err := p.log.Publish(journaltest.Context(t), journaltest.NewWriter("child", nil).Commit("c", 2, 60), 0); err != nil {
		t.Fatal(err)
	}
	p.refused(t, to("child", note("x")), events.CodeSessionPending, "")
	if h := w.header(t, "child"); h != nil {
		t.Errorf("the session got the header %s", h)
	}
}

// TestOutcomeUnknownNamesTheCommit, and the next append reads anew what the log holds: nothing
// of the lost commit, or all of it when it arrives late.
func TestOutcomeUnknownNamesTheCommit(t *testing.T) {
	t.Parallel()
	for _, late := range []bool{false, true} {
		t.Run(fmt.Sprintf("late=%t", late), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			p, other := w.start(t, appender.Config{}, journal.Config{RetryBudget: 200 * time.Millisecond}), w.start(t, appender.Config{})
			p.must(t, to("s", note("before")))
			var sent *events.Commit
			p.log.Faults.BeforePublish = func(c *events.Commit) error {
				kept := *c // it is gone with the append
				sent = &kept
				return nats.ErrTimeout
			}
			request := at(1, to("s", note("open"), note("open")))
			e := p.refused(t, request, events.CodeOutcomeUnknown, "")
			if sent == nil || e.Commit != sent.ID || e.Session != "s" {
				t.Errorf("the error names commit %q, want %+v", e.Commit, sent)
			}
			p.log.Faults.BeforePublish = nil
			loads, next := p.Stats().Loads.Load(), events.Seq(1)
			if late {
				if _, err := other.log.Publish(journaltest.Context(t), sent, w.check(t, "s").Commits[0].StreamSeq); err != nil {
					t.Fatal(err)
				}
				next = 3
			}
			if r := p.must(t, to("s", note("behind"))); r.FirstSeq != next {
				t.Errorf("the next append got seq %d, want %d", r.FirstSeq, next)
			}
			if p.Stats().Loads.Load() != loads+1 {
				t.Error("the next append did not load the session anew")
			}
			// Repeating the append as the error says tells what became of it.
			r, err := p.Append(journaltest.Context(t), request)
			if late && (err != nil || !r.Duplicate || r.Commit != sent.ID) || !late && asError(err).Code != events.CodeSeqConflict {
				t.Errorf("the same append again: %+v, %v", r, err)
			}
			count(t, w.check(t, "s"), `"open"`, map[bool]int{false: 0, true: 2}[late])
		})
	}
}

// TestTimedOutButStoredIsNoError: the caller gets the receipt of what was stored.
func TestTimedOutButStoredIsNoError(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	p.log.Faults.AfterPublish = func(_ *events.Commit, err error) error {
		if err == nil {
			return nats.ErrTimeout
		}
		return err
	}
	for i := range 3 {
		if r := p.must(t, to("s", note(fmt.Sprint(i)))); r.FirstSeq != events.Seq(i) {
			t.Errorf("append %d got seq %d", i, r.FirstSeq)
		}
	}
	if n := w.check(t, "s").Next(); n != 3 {
		t.Errorf("the log ends at %d, want 3", n)
	}
}

// TestAppendOutlivesItsCaller: what was asked for is done, though nobody waits for it.
func TestAppendOutlivesItsCaller(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	ctx, leave := context.WithCancel(journaltest.Context(t))
	p.log.Faults.BeforePublish = counter(func(n int64, _ *events.Commit) error {
		if n == 1 {
			leave()
			return nats.ErrTimeout
		}
		return nil
	})
	r, err := p.Append(ctx, to("s", note("a")))
	if err != nil || r.FirstSeq != 0 {
		t.Errorf("%+v, %v", r, err)
	}
	if n := w.check(t, "s").Next(); n != 1 {
		t.Errorf("the log ends at %d, want 1", n)
	}
}

// TestGarbageInTheLogRefusesAppends of that session, for every caller, and of no other.
func TestGarbageInTheLogRefusesAppends(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	p.must(t, to("s", note("a")))
	if _, err := w.nc.Request(p.log.Subject("s"), []byte("garbage"), 10*time.Second); err != nil {
		t.Fatal(err)
	}
	g := p.hold(t)
	blocker := p.send(t, to("s", note("b")))
	journaltest.Await(t, "the publish", g.entered)
	// One that could go on and one whose refusal asks for a look at the log.
	good, bad := p.queue(t, to("s", note("c"))), p.queue(t, at(77, to("s", note("d"))))
	g.release()
	for _, a := range []<-chan answer{blocker, good, bad} {
		if got := journaltest.Await(t, "an answer", a); asError(got.err).Code != events.CodeCorrupt {
			t.Errorf("got %v", got.err)
		}
	}
	p.refused(t, to("s", note("e")), events.CodeCorrupt, "")
	p.must(t, to("another", note("f")))
	w.check(t, "another")
}

// TestGarbageBehindALoadedState: the look at the log that a refusal asks for fails, and takes
// along the callers of the same group.
func TestGarbageBehindALoadedState(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	g := p.hold(t)
	blocker := p.send(t, to("s", note("a")))
	journaltest.Await(t, "the publish", g.entered)
	p.log.Faults.AfterPublish = func(c *events.Commit, err error) error {
		if c.First == 0 { // the blocker's is stored: this lies behind the state that it leaves
			if _, err := w.nc.Request(p.log.Subject("s"), []byte("garbage"), 10*time.Second); err != nil {
				t.Error(err)
			}
		}
		return err
	}
	good, bad := p.queue(t, to("s", note("c"))), p.queue(t, at(77, to("s", note("d"))))
	g.release()
	if got := journaltest.Await(t, "the blocker", blocker); got.err != nil {
		t.Fatal(got.err)
	}
	for _, a := range []<-chan answer{good, bad} {
		if got := journaltest.Await(t, "an answer", a); asError(got.err).Code != events.CodeCorrupt {
			t.Errorf("got %v", got.err)
		}
	}
}

func TestTooLargeNamesBothNumbers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{MaxEvent: 1000})
	e := p.refused(t, to("s", note("a"), note(strings.Repeat("x", 2000))), events.CodeTooLarge, "")
	if *e.Index != 1 || !strings.Contains(e.Detail, "1000") || !strings.Contains(e.Detail, "20") {
		t.Errorf("got %+v", e)
	}
	if n := w.check(t, "s").Next(); n != 0 {
		t.Errorf("the log ends at %d, want 0", n)
	}
}

// TestKeyBesideAnExpectedSeq: the same append is known by its seq at any later time; under a key that was
// used elsewhere nothing is stored, as when a caller that got no answer looked anew where the log ends.
func TestKeyBesideAnExpectedSeq(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	ctx := journaltest.Context(t)
	keyed := func(r appender.Request) appender.Request {
		r.Key = "k"
		return r
	}
	p.must(t, keyed(to("s", note("a"))))
	for _, p := range []*process{p, w.start(t, appender.Config{})} {
		for name, r := range map[string]appender.Request{"the same": to("s", note("a")), "others": to("s", note("b"))} {
			if e := p.refused(t, at(1, keyed(r)), events.CodeKeyReused, ""); e.Seq == nil || *e.Seq != 0 {
				t.Errorf("%s events: %v", name, e)
			}
		}
		if r := p.must(t, at(0, keyed(to("s", note("a"))))); !r.Duplicate || r.FirstSeq != 0 {
			t.Errorf("the retry by its seq: %+v", r)
		}
		if r := p.must(t, keyed(to("s", note("a")))); !r.Duplicate || r.FirstSeq != 0 {
			t.Errorf("the retry by its key: %+v", r)
		}
		p.refused(t, at(0, keyed(to("s", note("b")))), events.CodeKeyReused, "")
	}
	next := events.Seq(1)
	take := appender.WriterRequest{Session: "s", Writer: "w", Key: "w", Expected: &next}
	first, err := p.TakeWriter(ctx, take)
	if err != nil || first.Epoch != 1 {
		t.Fatalf("%+v, %v", first, err)
	}
	if again, err := p.TakeWriter(ctx, take); err != nil || !again.Duplicate || again.FirstSeq != 1 || again.Epoch != 1 {
		t.Errorf("the writer's retry: %+v, %v", again, err)
	}
	next = 2
	if got, err := p.TakeWriter(ctx, take); asError(err).Code != events.CodeKeyReused {
		t.Errorf("at another seq: %+v, %v", got, err)
	}
	if n := len(w.check(t, "s").Lines); n != 2 {
		t.Errorf("the log has %d events, want 2", n)
	}
}

// TestASessionIsJudgedByTheHeaderThatItGot, also where a refused append was made before there was one.
func TestASessionIsJudgedByTheHeaderThatItGot(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	p.refused(t, to("s", onSurface("user/message", `{}`)), events.CodeRuleViolation, events.RuleMessageMalformed)
	if _, created, err := p.Create(journaltest.Context(t), "s", []byte(`{"version":4}`)); err != nil || !created {
		t.Fatal(created, err)
	}
	p.must(t, to("s", onSurface("developer/message", `{"message":{"id":"d","role":"developer","source":{"kind":"system"},"content":[]}}`)))
	w.check(t, "s")
}

// TestALostHeaderCanBeGivenAgain: a power cut took the header and left the log, whose chain tells
// which header it was.
func TestALostHeaderCanBeGivenAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	p := w.start(t, appender.Config{})
	p.must(t, to("other", note("x")))
	w.Down()
	cut := w.SaveStream("KV_HEADERS")
	w.Up()
	header := []byte(`{"version":3,"id":"s","createdAt":1,"isSeeded":false,"delegationDepth":0}`)
	if _, _, err := p.Create(ctx, "s", header); err != nil {
		t.Fatal(err)
	}
	p.must(t, to("s", note("one")))
	p.must(t, to("s", note("two")))
	w.Down()
	cut()
	w.Up()
	p = w.start(t, appender.Config{})
	p.refused(t, to("s", note("x")), events.CodeSessionPending, "")
	for _, other := range []string{"", `{}`, `{"createdAt":2}`} {
		if _, _, err := p.Create(ctx, "s", []byte(other)); asError(err).Code != events.CodeSessionPending {
			t.Errorf("with the header %q: %v", other, err)
		}
	}
	if _, created, err := p.Create(ctx, "s", header); err != nil || !created {
		t.Fatalf("with its own header: %t, %v", created, err)
	}
	p.must(t, to("s", note("three")))
	if log := w.check(t, "s"); log.Next() != 3 {
		t.Errorf("the log has %d events, want 3", log.Next())
	}
}

// TestOldKeysAreForgotten, also those of others' appends, behind which this appender looks for none.
func TestOldKeysAreForgotten(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var later atomic.Int64
	cfg := appender.Config{Now: func() time.Time { return fixed().Add(time.Duration(later.Load())) }}
	p, other := w.start(t, cfg), w.start(t, cfg)
	keyed := func(i int) appender.Request {
		r := to("s", note(fmt.Sprint(i)))
		r.Key = fmt.Sprint("key ", i)
		return r
	}
	p.must(t, keyed(0))
	for i := range 5 {
		later.Add(int64(11 * time.Minute))
		other.must(t, keyed(1+i))
		if _, err := p.Status(journaltest.Context(t), "s"); err != nil {
			t.Fatal(err)
		}
	}
	if n := p.Keys("s"); n != 1 {
		t.Errorf("%d keys are in memory, want 1", n)
	}
}
