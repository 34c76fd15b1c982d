package appender_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/lifecycle"
)

// TestTwoAppendersOnOneSession: whatever they are asked at once, every acknowledged event is in
// the log once, at its seq, and the log is whole.
func TestTwoAppendersOnOneSession(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ps := []*process{w.start(t, appender.Config{}), w.start(t, appender.Config{CacheBytes: 1})}
	// Each holds its first commit until the other has one as well: they meet at least once.
	var ready sync.WaitGroup
	ready.Add(len(ps))
	for _, p := range ps {
		p.log.Faults.BeforePublish = func() func(*events.Commit) error {
			var once sync.Once
			return func(*events.Commit) error {
				once.Do(func() { ready.Done(); ready.Wait() })
				return nil
			}
		}()
	}
	const writers, each = 4, 40 // for each appender
	var mu sync.Mutex
	acknowledged := map[events.Seq]string{}
	var wg sync.WaitGroup
	for i, p := range ps {
		for k := range writers {
			wg.Go(func() {
				for n := range each {
					text := fmt.Sprintf("%d-%d-%d", i, k, n)
					r, err := p.Append(journaltest.Context(t), to("s", note(text), note(text)))
					if err != nil {
						t.Errorf("%s: %v", text, err)
						return
					}
					mu.Lock()
					acknowledged[r.FirstSeq], acknowledged[r.LastSeq] = text, text
					mu.Unlock()
				}
			})
		}
	}
	wg.Wait()
	log := w.check(t, "s")
	if want := 2 * 2 * writers * each; int(log.Next()) != want || len(acknowledged) != want {
		t.Fatalf("%d events in the log, %d acknowledged, want %d", log.Next(), len(acknowledged), want)
	}
	for seq, text := range acknowledged {
		if !strings.Contains(log.Lines[seq], `"`+text+`"`) {
			t.Errorf("%s was acknowledged at seq %d, where %s stands", text, seq, log.Lines[seq])
		}
	}
	if ps[0].Stats().Conflicts.Load()+ps[1].Stats().Conflicts.Load() == 0 {
		t.Error("the appenders never met")
	}
}

// TestTwoAppendersAndOneSeq: with an expected seq one wins each seq, and the losers hear of the
// actual tail.
func TestTwoAppendersAndOneSeq(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ps := []*process{w.start(t, appender.Config{}), w.start(t, appender.Config{})}
	const rounds = 30
	for round := range rounds {
		var won atomic.Int64
		var wg sync.WaitGroup
		for i, p := range ps {
			for k := range 2 {
				wg.Go(func() {
					text := fmt.Sprintf("%d-%d-%d", round, i, k)
					r, err := p.Append(journaltest.Context(t), at(events.Seq(round), to("s", note(text))))
					switch e := asError(err); {
					case err == nil && r.FirstSeq == events.Seq(round) && !r.Duplicate:
						won.Add(1)
					case errors.Is(err, events.ErrSeqConflict) && *e.ExpectedSeq == events.Seq(round) && *e.ActualSeq == events.Seq(round+1):
					default:
						t.Errorf("%s: %+v, %v", text, r, err)
					}
				})
			}
		}
		wg.Wait()
		if won.Load() != 1 {
			t.Fatalf("round %d: %d won", round, won.Load())
		}
	}
	if n := w.check(t, "s").Next(); n != rounds {
		t.Errorf("the log ends at %d, want %d", n, rounds)
	}
}

// TestOvertakenForeverIsOverload: who never gets a turn hears of that, and of nothing stored.
func TestOvertakenForeverIsOverload(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, other := w.start(t, appender.Config{LoadTimeout: 2 * time.Second}), w.start(t, appender.Config{})
	p.must(t, to("s", note("loaded")))
	p.log.Faults.BeforePublish = func(*events.Commit) error {
		_, err := other.Append(journaltest.Context(t), to("s", note("other")))
		return err
	}
	p.refused(t, to("s", note("mine")), events.CodeOverloaded, "")
	p.log.Faults.BeforePublish = nil
	p.must(t, to("s", note("at last")))
	log := w.check(t, "s")
	count(t, log, `"mine"`, 0)
	count(t, log, `"at last"`, 1)
}

// TestUnknownSessionIsCreatedOnce, however many appenders get its first events.
func TestUnknownSessionIsCreatedOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ps := []*process{w.start(t, appender.Config{}), w.start(t, appender.Config{}), w.start(t, appender.Config{})}
	for round := range 10 {
		id := fmt.Sprintf("s%d", round)
		var wg sync.WaitGroup
		for i, p := range ps {
			wg.Go(func() {
				if _, err := p.Append(journaltest.Context(t), to(id, note(fmt.Sprint(i)))); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n := w.check(t, id).Next(); n != 3 { // the chain starts from the one header
			t.Errorf("%s ends at %d, want 3", id, n)
		}
	}
}

// open leaves a session in the middle of a step with one call answered, one recorded and one
// only asked for.
func open(t testing.TB, p *process, id string) {
	t.Helper()
	p.must(t, to(id, turn("start", 1), step("start", 1, 1), assistant("a", 1, 1, "c1", "c2", "c3"), toolCall(1, 1, "c2"), toolCall(1, 1, "c1"), result(1, 1, "c1", 5)))
}

// closers is what repair adds to such a session.
var closers = []string{`"type":"tool/result"`, `"type":"tool/result"`, `"type":"step/end"`, `"type":"turn/end"`}

func TestRepairClosesWhatIsOpen(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{Invariants: lifecycle.Enforce})
	ctx := journaltest.Context(t)
	open(t, p, "s")
	r, err := p.Repair(ctx, "s", "operator")
	if err != nil || r.FirstSeq != 6 || r.LastSeq != 9 {
		t.Fatalf("%+v, %v", r, err)
	}
	log := w.check(t, "s")
	for i, want := range closers {
		if !strings.Contains(log.Lines[6+i], want) {
			t.Errorf("seq %d: %s, want %s", 6+i, log.Lines[6+i], want)
		}
	}
	if !strings.Contains(log.Lines[6], `"sourceEventSeqs":[3]`) || !strings.Contains(log.Lines[6], "TOOL_OUTCOME_UNKNOWN") || !strings.Contains(log.Lines[7], "TOOL_NOT_STARTED") {
		t.Errorf("results: %s and %s", log.Lines[6], log.Lines[7])
	}
	if c := log.Commits[1]; c.Actor != "operator" || c.ID != r.Commit {
		t.Errorf("commit: %+v", c)
	}
	// A balanced log gets nothing, whoever is asked.
	for _, p := range []*process{p, w.start(t, appender.Config{})} {
		if r, err := p.Repair(ctx, "s", ""); r != nil || err != nil {
			t.Errorf("again: %+v, %v", r, err)
		}
	}
	if n := w.check(t, "s").Next(); n != 10 {
		t.Errorf("the log ends at %d, want 10", n)
	}
}

// TestRepairLooksAtTheNewestLog: that the log was balanced when this appender saw it last is
// no reason to leave it open.
func TestRepairLooksAtTheNewestLog(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stale, other := w.start(t, appender.Config{}), w.start(t, appender.Config{})
	stale.must(t, to("s", note("balanced")))
	other.must(t, to("s", turn("start", 1)))
	if r, err := stale.Repair(journaltest.Context(t), "s", ""); err != nil || r == nil || r.FirstSeq != 2 {
		t.Fatalf("%+v, %v", r, err)
	}
	count(t, w.check(t, "s"), `"turn/end"`, 1)
	// And the other way round: what it thinks is open may be closed.
	stale.must(t, to("s", turn("start", 2)))
	other.must(t, to("s", turn("end", 2)))
	if r, err := stale.Repair(journaltest.Context(t), "s", ""); err != nil || r != nil {
		t.Errorf("%+v, %v", r, err)
	}
	count(t, w.check(t, "s"), `"turn/end"`, 2)
}

// TestRepairRacesALiveWriter: there are never two closers, and no acknowledged event is lost.
func TestRepairRacesALiveWriter(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cfg := appender.Config{Invariants: lifecycle.Enforce}
	writer, repairers := w.start(t, cfg), []*process{w.start(t, cfg), w.start(t, cfg)}
	const rounds, lanes = 100, 5
	for lane := range lanes {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for round := range rounds / lanes {
				repairRace(t, w, writer, repairers, fmt.Sprintf("s%d-%d", lane, round))
			}
		})
	}
}

// repairRace is one round.
func repairRace(t *testing.T, w *world, writer *process, repairers []*process, id string) {
	t.Helper()
	open(t, writer, id)
	var repairs atomic.Int64
	var acknowledged []string
	begin := make(chan struct{})
	var wg sync.WaitGroup
	for _, p := range repairers {
		wg.Go(func() {
			<-begin
			r, err := p.Repair(journaltest.Context(t), id, "")
			if err != nil {
				t.Errorf("%s: repair: %v", id, err)
			} else if r != nil {
				repairs.Add(1)
			}
		})
	}
	wg.Go(func() {
		lines := []string{note("w0"), result(1, 1, "c2", 5), note("w1"), step("end", 1, 1), note("w2"), turn("end", 1), note("w3")}
		<-begin
		for i, line := range lines {
			_, err := writer.Append(journaltest.Context(t), to(id, line))
			switch code := asError(err).Code; {
			case err == nil:
				acknowledged = append(acknowledged, line)
			case code == events.CodeInvariant && !strings.Contains(line, "goal/change"): // the repair was first
			default:
				t.Errorf("%s: append %d: %v", id, i, err)
			}
		}
	})
	close(begin)
	wg.Wait()
	log := w.check(t, id)
	count(t, log, `"turn/end"`, 1)
	count(t, log, `"step/end"`, 1)
	interrupted := log.Count(`"kind":"interrupted"`)
	if int64(interrupted) != repairs.Load() || interrupted > 1 {
		t.Errorf("%s: %d repairs, %d of them acknowledged", id, interrupted, repairs.Load())
	}
	for _, line := range acknowledged {
		typ, _, _ := strings.Cut(line, ",")
		if n := log.Count(typ, line[strings.Index(line, `"data":`):len(line)-1]); n != 1 {
			t.Errorf("%s: %s was acknowledged and is in the log %d times", id, line, n)
		}
	}
	for _, call := range []string{"c1", "c2", "c3"} {
		if n := log.Count(`"source":{"kind":"tool","callId":"`+call) + log.Count(`"source":{"callId":"`+call); n > 1 || n == 0 && interrupted == 1 && !slices.Contains(acknowledged, step("end", 1, 1)) {
			t.Errorf("%s: call %s has %d results", id, call, n)
		}
	}
}

// TestRepairFencesTheWriter: a session that has a writer gets a new epoch with its closers, and
// the writer that was thought dead cannot go on.
func TestRepairFencesTheWriter(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, other := w.start(t, appender.Config{Invariants: lifecycle.Enforce}), w.start(t, appender.Config{})
	ctx := journaltest.Context(t)
	f, err := p.TakeWriter(ctx, appender.WriterRequest{Session: "s", Writer: "agent"})
	if err != nil || f.Epoch != 1 || f.FirstSeq != 0 {
		t.Fatalf("%+v, %v", f, err)
	}
	mine := func(line string) appender.Request {
		r := to("s", line)
		r.Epoch = &f.Epoch
		return r
	}
	p.must(t, mine(turn("start", 1)))
	r, err := other.Repair(ctx, "s", "")
	if err != nil || r.FirstSeq != 2 || r.LastSeq != 3 {
		t.Fatalf("%+v, %v", r, err)
	}
	if e := p.refused(t, mine(note("zombie")), events.CodeFenced, ""); e.Epoch == nil || *e.Epoch != 2 {
		t.Errorf("the zombie hears of epoch %v, want 2", e.Epoch)
	}
	if r, err := p.Repair(ctx, "s", ""); r != nil || err != nil {
		t.Errorf("again: %+v, %v", r, err)
	}
	count(t, w.check(t, "s"), "zombie", 0)
}

// TestAnEndSeedDoesNotTakeTheFenceAway: epochs would begin anew, and an old writer's be the current one.
func TestAnEndSeedDoesNotTakeTheFenceAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	inherited := logOnly("session/end-seed", `{"inherited":true}`)
	p.must(t, to("s", inherited)) // there is nothing to take away
	for _, writer := range []string{"A", "B"} {
		if _, err := p.takeWriter(t, "s", writer); err != nil {
			t.Fatal(err)
		}
	}
	first, second := events.Seq(1), events.Seq(2)
	r := to("s", note("before"), inherited)
	r.Epoch = &second
	if e := p.refused(t, r, events.CodeFenced, ""); e.Index == nil || *e.Index != 1 {
		t.Errorf("refused with %+v, want the second event", e)
	}
	p.refused(t, at(3, to("s", inherited)), events.CodeFenced, "")
	if f, err := p.takeWriter(t, "s", "C"); err != nil || f.Epoch != 3 {
		t.Errorf("the next writer: %+v, %v", f, err)
	}
	stale := to("s", note("stale"))
	stale.Epoch = &first
	p.refused(t, stale, events.CodeFenced, "")
	count(t, w.check(t, "s"), "stale", 0)
}
