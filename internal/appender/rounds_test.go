package appender_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/lifecycle"
)

// TestExactlyOneWinsTheTail: 1,000 times two appenders are asked for the same seq at once.
func TestExactlyOneWinsTheTail(t *testing.T) {
	t.Parallel()
	const rounds = 1000
	w := newWorld(t)
	ps := [2]*process{w.start(t, appender.Config{}), w.start(t, appender.Config{})}
	l := newLedger(w, ps[0], "s")
	random := rand.New(rand.NewPCG(3, 1000))
	var next events.Seq
	var wins [2]int
	for round := range rounds {
		var texts [2][]string
		var requests [2]appender.Request
		for i := range ps {
			requests[i] = to("s")
			for k := range 1 + random.IntN(3) {
				text := fmt.Sprintf("round %d, appender %d, event %d", round, i, k)
				texts[i] = append(texts[i], quoted(text)...)
				requests[i].Events = append(requests[i].Events, []byte(note(text)))
			}
			requests[i] = at(next, requests[i])
		}
		var got [2]answer
		var wg sync.WaitGroup
		start := make(chan struct{})
		for _, i := range random.Perm(2) {
			wg.Go(func() {
				<-start
				r, err := ps[i].Append(journaltest.Context(t), requests[i])
				got[i] = answer{r, err}
			})
		}
		close(start)
		wg.Wait()
		winner := 0
		if got[0].err != nil {
			winner = 1
		}
		won, lost := got[winner], got[1-winner]
		if won.err != nil || lost.err == nil {
			t.Fatalf("round %d: %+v, %v and %+v, %v", round, got[0].Receipt, got[0].err, got[1].Receipt, got[1].err)
		}
		if won.FirstSeq != next || won.Duplicate {
			t.Fatalf("round %d: won seq %d, asked for %d (duplicate: %t)", round, won.FirstSeq, next, won.Duplicate)
		}
		l.ack(t, won.Receipt, texts[winner]...)
		e := asError(lost.err)
		if !errors.Is(lost.err, events.ErrSeqConflict) || *e.ExpectedSeq != next || *e.ActualSeq != won.LastSeq+1 {
			t.Fatalf("round %d: the loser is told %v, the tail is %d", round, lost.err, won.LastSeq+1)
		}
		wins[winner]++
		next = won.LastSeq + 1
	}
	l.check(t)
	// In the first rounds the loser may have read the session behind the winner's commit.
	if n := ps[0].Stats().Conflicts.Load() + ps[1].Stats().Conflicts.Load(); n < rounds-10 {
		t.Errorf("%d conflicts in %d rounds", n, rounds)
	}
	t.Logf("wins: %v", wins)
}

// TestRepairAgainstALiveWriter: 200 times a writer is in the middle of a turn when its session
// is repaired, by one or two appenders at once, because somebody thinks it dead. The turn is
// closed once, what the writer was acknowledged stays, and a fenced writer is out afterwards.
func TestRepairAgainstALiveWriter(t *testing.T) {
	t.Parallel()
	// What keeps the two apart: the lifecycle rules, the writer's expected seq, or the fence.
	for _, guard := range []string{"rules", "expected", "fence", "fence-and-rules"} {
		for _, gate := range []string{"free", "writer-slips-in", "repair-slips-in"} {
			t.Run(guard+"-"+gate, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				cfg := appender.Config{}
				if guard == "rules" || guard == "fence-and-rules" {
					cfg.Invariants = lifecycle.Enforce
				}
				var ps [3]*process // the writer's and two that repair
				for i := range ps {
					ps[i] = w.start(t, cfg)
				}
				random := rand.New(rand.NewPCG(200, uint64(len(guard)*100+len(gate))))
				var seen outcome
				for round := range 17 {
					r := &duel{ledger: newLedger(w, ps[2], fmt.Sprintf("s%d", round)), t: t, ps: ps, guard: guard, gate: gate, random: random}
					seen.add(r.fight())
				}
				t.Logf("%+v", seen)
				if gate != "free" && (seen.repaired == 0 || seen.cutShort == 0) {
					t.Errorf("the two never met: %+v", seen)
				}
			})
		}
	}
}

// outcome counts how rounds went.
type outcome struct {
	repaired  int // a repair closed the turn
	finished  int // the writer did
	cutShort  int // the writer was refused in the middle
	twoCalled int // two repairs at once
}

func (o *outcome) add(p outcome) {
	o.repaired, o.finished, o.cutShort, o.twoCalled = o.repaired+p.repaired, o.finished+p.finished, o.cutShort+p.cutShort, o.twoCalled+p.twoCalled
}

// duel is one round.
type duel struct {
	*ledger
	t           *testing.T
	ps          [3]*process
	guard, gate string
	random      *rand.Rand

	mu    sync.Mutex // guards the ledger while the two run
	epoch *events.Seq
	next  events.Seq
}

// move is one append of the live writer, and a text of each of its events.
type move struct{ lines, texts []string }

func script() []move {
	all := func(texts ...string) []string { return texts }
	return []move{
		{all(turn("start", 1), step("start", 1, 1)), all(`"turn/start"`, `"step/start"`)},
		{all(assistant("a", 1, 1, "c1", "c2", "c3")), all(`"assistant/message"`)},
		{all(toolCall(1, 1, "c1"), toolCall(1, 1, "c2")), all(`"callId":"c1"`, `"callId":"c2"`)},
		{all(result(1, 1, "c1", 9)), all(`"r-c1"`)},
		{all(result(1, 1, "c2", 9)), all(`"r-c2"`)},
		{all(toolCall(1, 1, "c3"), result(1, 1, "c3", 9)), all(`"callId":"c3"`, `"r-c3"`)},
		{all(step("end", 1, 1)), all(`"step/end"`)},
		{all(step("start", 1, 2), assistant("b", 1, 2)), all(`"step/start"`, `"id":"b"`)},
		{all(step("end", 1, 2), turn("end", 1)), all(`"step/end"`, `"turn/end"`)},
	}
}

func (d *duel) fenced() bool { return strings.HasPrefix(d.guard, "fence") }

// write does one append of the writer and reports whether it was stored.
func (d *duel) write(s move) error {
	r := to(d.session, s.lines...)
	if d.guard == "expected" {
		r = at(d.next, r)
	}
	r.Epoch = d.epoch
	receipt, err := d.ps[0].Append(journaltest.Context(d.t), r)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ack(d.t, receipt, s.texts...)
	d.next = receipt.LastSeq + 1
	return nil
}

// repair repairs by one of the appenders and reports whether there was anything to close.
func (d *duel) repair(p *process) bool {
	r, err := p.Repair(journaltest.Context(d.t), d.session, "operator")
	if err != nil {
		d.t.Errorf("%s: repair: %v", d.session, err)
	}
	if r == nil {
		return false
	}
	texts := make([]string, r.LastSeq-r.FirstSeq+1)
	for i := range texts {
		texts[i] = `"tool/result"`
	}
	if n := len(texts); d.fenced() {
		texts[0], texts[n-1] = `"writer":"repair","epoch":2`, `"interrupted"`
	} else {
		texts[n-1] = `"interrupted"`
	}
	for i, text := range texts {
		if text == `"tool/result"` {
			texts[i] = `"type":"` // a result or the end of the step
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ack(d.t, r, texts...)
	return true
}

func (d *duel) fight() (o outcome) {
	d.t.Helper()
	writer := d.ps[0]
	for _, p := range d.ps {
		p.log.Faults = journal.Faults{}
	}
	if d.fenced() {
		f, err := writer.takeWriter(d.t, d.session, "me")
		if err != nil {
			d.t.Fatal(err)
		}
		d.ack(d.t, f.Receipt, `"writer":"me","epoch":1`)
		d.epoch, d.next = &f.Epoch, 1
	}
	steps := script()
	k := 1 + d.random.IntN(len(steps)-1) // the repair comes while the writer is at this step
	two := d.random.IntN(2) == 0
	if two {
		o.twoCalled++
	}
	for _, s := range steps[:k] {
		if err := d.write(s); err != nil {
			d.t.Fatalf("%s: %v", d.session, err)
		}
	}

	var refusal error
	repaired := make([]bool, 2)
	rest := func(from int) {
		for _, s := range steps[from:] {
			if refusal = d.write(s); refusal != nil {
				return
			}
		}
	}
	switch d.gate {
	case "free":
		start := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() { <-start; rest(k) })
		wg.Go(func() { <-start; repaired[0] = d.repair(d.ps[1]) })
		if two {
			wg.Go(func() { <-start; repaired[1] = d.repair(d.ps[2]) })
		}
		close(start)
		wg.Wait()
	case "writer-slips-in": // between what the repair read and what it publishes
		more := k
		d.ps[1].log.Faults.BeforePublish = counter(func(n int64, _ *events.Commit) error {
			if n == 1 {
				refusal = d.write(steps[k])
				more = k + 1
				if two {
					repaired[1] = d.repair(d.ps[2])
				}
			}
			return nil
		})
		repaired[0] = d.repair(d.ps[1])
		if refusal == nil {
			rest(more)
		}
	case "repair-slips-in": // between what the writer's appender planned and what it publishes
		writer.log.Faults.BeforePublish = counter(func(n int64, _ *events.Commit) error {
			if n == 1 {
				repaired[0] = d.repair(d.ps[1])
				if two {
					repaired[1] = d.repair(d.ps[2])
				}
			}
			return nil
		})
		rest(k)
	}
	return d.judge(o, repaired, refusal)
}

// judge holds the log against what both were told.
func (d *duel) judge(o outcome, repaired []bool, refusal error) outcome {
	d.t.Helper()
	log := d.check(d.t)
	closed := repaired[0] || repaired[1]
	switch {
	case repaired[0] && repaired[1]:
		d.t.Errorf("%s: repaired twice", d.session)
	case closed:
		o.repaired++
	case refusal != nil:
		d.t.Errorf("%s: the writer was refused and nobody repaired: %v", d.session, refusal)
	default:
		o.finished++
	}
	if refusal != nil {
		o.cutShort++
	} else if closed {
		d.t.Errorf("%s: the turn was repaired and the writer wrote on to its end", d.session)
	}
	count(d.t, log, `"type":"turn/start"`, 1)
	count(d.t, log, `"type":"turn/end"`, 1)
	if a, b := log.Count(`"type":"step/start"`), log.Count(`"type":"step/end"`); a != b {
		d.t.Errorf("%s: %d steps begin, %d end", d.session, a, b)
	}
	for _, call := range []string{"c1", "c2", "c3"} {
		asked, results := log.Count(`{"type":"tool-call","id":"`+call+`"`), log.Count(`"source":{"callId":"`+call+`"`)+log.Count(`"source":{"kind":"tool","callId":"`+call+`"`)
		if asked != results {
			d.t.Errorf("%s: call %s is asked for %d times and has %d results", d.session, call, asked, results)
		}
	}
	want := map[string]events.Code{"rules": events.CodeInvariant, "expected": events.CodeSeqConflict, "fence": events.CodeFenced, "fence-and-rules": events.CodeFenced}[d.guard]
	if refusal != nil && asError(refusal).Code != want {
		d.t.Errorf("%s: the writer was refused with %v, want %s", d.session, refusal, want)
	}
	// Whoever asks later finds nothing to close, and a fenced writer stays out.
	for _, p := range d.ps {
		if d.repair(p) {
			d.t.Errorf("%s: there was something left to close", d.session)
		}
		if !closed || !d.fenced() {
			continue
		}
		r := to(d.session, note("stale"))
		r.Epoch = d.epoch
		if _, err := p.Append(journaltest.Context(d.t), r); asError(err).Code != events.CodeFenced || *asError(err).Epoch != 2 {
			d.t.Errorf("%s: the stale writer got %v", d.session, err)
		}
	}
	return o
}

// TestRetryForTheWriterTellsTheEpochThatItGot, also at an appender that has not seen yet what
// the lost answer was about.
func TestRetryForTheWriterTellsTheEpochThatItGot(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first, behind := w.start(t, appender.Config{}), w.start(t, appender.Config{})
	ctx := journaltest.Context(t)
	behind.must(t, to("s", note("seen by both")))
	if _, err := first.takeWriter(t, "s", "before"); err != nil {
		t.Fatal(err)
	}
	r := appender.WriterRequest{Session: "s", Writer: "me", Key: "key"}
	got, err := first.TakeWriter(ctx, r)
	if err != nil || got.Epoch != 2 || got.Duplicate {
		t.Fatalf("%+v, %v", got, err)
	}
	for _, p := range []*process{behind, first, w.start(t, appender.Config{})} {
		again, err := p.TakeWriter(ctx, r)
		if err != nil || again.Epoch != got.Epoch || again.FirstSeq != got.FirstSeq || again.Commit != got.Commit || !again.Duplicate {
			t.Errorf("the first answer was %+v of %+v, the retry's %+v of %+v, %v", got, got.Receipt, again, again.Receipt, err)
		}
	}
}
