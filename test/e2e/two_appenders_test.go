package e2e_test

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// pairOf is two appenders on one NATS.
type pairOf struct {
	nats      string
	appenders []*harness.Client
}

func (p pairOf) log(t *testing.T) *harness.Log { return harness.OpenLog(t, p.nats) }

// Two appender processes on one NATS must share a session: with the server
// embedded in one of them, and with a stock server of its own.
func TestTwoAppendersShareASession(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(*testing.T) pairOf{
		"embedded server": func(t *testing.T) pairOf {
			first := harness.Appender{Invariants: "enforce"}.Start(t)
			second := harness.Appender{NATS: first.NATS, Invariants: "enforce"}.Start(t)
			return pairOf{first.NATS, []*harness.Client{first.Client(), second.Client()}}
		},
		"standalone server": func(t *testing.T) pairOf {
			url := harness.StandaloneNATS(t)
			first := harness.Appender{NATS: url, Invariants: "enforce"}.Start(t)
			second := harness.Appender{NATS: url, Invariants: "enforce"}.Start(t)
			return pairOf{url, []*harness.Client{first.Client(), second.Client()}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pair := start(t)
			writeWithoutExpectation(t, pair)
			raceForSeqs(t, pair)
			raceFreely(t, pair)
		})
	}
}

// writeWithoutExpectation lets eight writers append to one session as fast as
// they can: nothing acknowledged is lost, doubled or moved.
func writeWithoutExpectation(t *testing.T, pair pairOf) {
	t.Helper()
	const writers, session = 8, "crowded"
	duration := 3 * time.Second
	if harness.Long() {
		duration = 10 * time.Second
	}
	ctx, cancel := context.WithTimeout(t.Context(), duration)
	defer cancel()
	var undecided atomic.Int64
	var wg sync.WaitGroup
	all := make([]*survivor, writers)
	for i := range all {
		w := &survivor{session: session, name: fmt.Sprintf("w%d", i), acknowledged: map[string]int64{}, unknown: map[string]bool{}}
		all[i] = w
		client := pair.appenders[i%len(pair.appenders)]
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				id := fmt.Sprintf("%s-%d", w.name, n)
				// Not bound by ctx: what was sent is waited for.
				receipt, err := client.Append(t.Context(), session, note(id))
				if err == nil {
					w.acknowledged[id] = receipt.FirstSeq
					continue
				}
				w.unknown[id] = true
				if p := harness.AsRefused(err); p == nil || p.Status != http.StatusServiceUnavailable {
					t.Errorf("%s: %v", id, err)
					return
				}
				undecided.Add(1)
			}
		})
	}
	wg.Wait()
	last, err := holdsAcknowledged(t.Context(), pair.log(t), session, all)
	if err != nil {
		t.Error(err)
	}
	for _, w := range all {
		if len(w.acknowledged) < 5 {
			t.Errorf("writer %s got only %d events in within %v", w.name, len(w.acknowledged), duration)
		}
	}
	t.Logf("%d events on one session in %v, %d undecided", last+1, duration, undecided.Load())
}

// raceForSeqs lets all writers ask for the same seq, round by round: one gets
// it, and the others are told which seq comes next.
func raceForSeqs(t *testing.T, pair pairOf) {
	t.Helper()
	const writers, rounds, session = 8, 25, "raced"
	type outcome struct {
		id  string
		err error
	}
	var winners []string
	for round := range int64(rounds) {
		outcomes := make([]outcome, writers)
		var wg sync.WaitGroup
		for i := range outcomes {
			client := pair.appenders[i%len(pair.appenders)]
			wg.Go(func() {
				id := fmt.Sprintf("r%d-w%d", round, i)
				_, err := client.Append(t.Context(), session, note(id), harness.ExpectedSeq(round))
				outcomes[i] = outcome{id, err}
			})
		}
		wg.Wait()
		var won []string
		for _, o := range outcomes {
			if o.err == nil {
				won = append(won, o.id)
				continue
			}
			p := refused(t, o.err, http.StatusConflict, "seq-conflict")
			if p.ExpectedSeq == nil || *p.ExpectedSeq != round || p.ActualSeq == nil || *p.ActualSeq != round+1 {
				t.Fatalf("seq %d: the loser %s is told expectedSeq %v and actualSeq %v, want %d and %d",
					round, o.id, deref(p.ExpectedSeq), deref(p.ActualSeq), round, round+1)
			}
		}
		if len(won) != 1 {
			t.Fatalf("seq %d: winners %v, want one", round, won)
		}
		winners = append(winners, won[0])
	}
	checkWinners(t, pair, session, winners)
}

func deref(n *int64) string {
	if n == nil {
		return "nothing"
	}
	return fmt.Sprint(*n)
}

// raceFreely lets writers chase the tail at their own pace, each starting from
// what the last conflict told it.
func raceFreely(t *testing.T, pair pairOf) {
	t.Helper()
	const writers, session, target = 8, "chased", 200
	winners := make([]string, target)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range writers {
		client := pair.appenders[i%len(pair.appenders)]
		wg.Go(func() {
			for next, n := int64(0), 0; next < target; n++ {
				id := fmt.Sprintf("w%d-%d", i, n)
				_, err := client.Append(t.Context(), session, note(id), harness.ExpectedSeq(next))
				if err == nil {
					mu.Lock()
					if winners[next] != "" {
						t.Errorf("seq %d was given to %s and to %s", next, winners[next], id)
					}
					winners[next] = id
					mu.Unlock()
					next++
					continue
				}
				p := harness.AsRefused(err)
				if p == nil || p.Code != "seq-conflict" || p.ActualSeq == nil || *p.ActualSeq <= next {
					t.Errorf("%s at seq %d: %v", id, next, err)
					return
				}
				next = *p.ActualSeq
			}
		})
	}
	wg.Wait()
	checkWinners(t, pair, session, winners)
}

// checkWinners compares who was told to have won with what the log holds.
func checkWinners(t *testing.T, pair pairOf, session string, winners []string) {
	t.Helper()
	w := &survivor{acknowledged: map[string]int64{}}
	for seq, id := range winners {
		if id == "" {
			t.Errorf("nobody won seq %d", seq)
			return
		}
		w.acknowledged[id] = int64(seq)
	}
	if _, err := holdsAcknowledged(t.Context(), pair.log(t), session, []*survivor{w}); err != nil {
		t.Errorf("%s: %v", session, err)
	}
}

// A stock server takes smaller messages than the embedded one: what cannot fit
// is refused before it is sent, and the refusal names both sizes.
func TestEventBeyondTheServersLimitIsRefused(t *testing.T) {
	t.Parallel()
	appender := harness.Appender{NATS: harness.StandaloneNATS(t)}.Start(t).Client()
	const session = "too-large"
	mustAppend(t, appender, session, notes("fits"))
	large := []byte(fmt.Sprintf(`{"type":"turn/start","data":{"turn":1,"text":%q}}`, bigText(2<<20)))
	_, err := appender.Append(t.Context(), session, large)
	p := refused(t, err, http.StatusRequestEntityTooLarge, "too-large")
	if numbers := numbersIn(p.Detail); len(numbers) < 2 {
		t.Errorf("the detail names no two sizes: %s", p.Detail)
	}
	if next, err := appender.NextSeq(t.Context(), session); err != nil || next != 1 {
		t.Errorf("next seq %d (%v), want 1", next, err)
	}
}
