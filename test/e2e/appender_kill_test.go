package e2e_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// survivor is a writer that goes on whatever happens to the appender.
type survivor struct {
	session string
	name    string
	insists bool // owns its session: gives expectedSeq and repeats until acknowledged

	acknowledged map[string]int64 // by event id, the seq
	unknown      map[string]bool  // sent, never answered
}

// write appends one event after another until the context ends.
func (w *survivor) write(ctx context.Context, client *harness.Client, count *atomic.Int64) error {
	pause := time.NewTicker(20 * time.Millisecond)
	defer pause.Stop()
	next := int64(0)
	for n := 0; ctx.Err() == nil; n++ {
		id := fmt.Sprintf("%s-%d", w.name, n)
		for ctx.Err() == nil {
			var options []harness.Option
			if w.insists {
				options = append(options, harness.ExpectedSeq(next))
			}
			receipt, err := client.Append(ctx, w.session, note(id), options...)
			if err == nil {
				if w.insists && receipt.FirstSeq != next {
					return fmt.Errorf("%s: acknowledged at %d, asked for %d", id, receipt.FirstSeq, next)
				}
				w.acknowledged[id] = receipt.FirstSeq
				next = receipt.FirstSeq + 1
				count.Add(1)
				break
			}
			if p := harness.AsRefused(err); p != nil && p.Status != 503 {
				return fmt.Errorf("%s: %w", id, err)
			}
			// No answer: the appender is gone, and what became of the event
			// is not known.
			if !w.insists {
				w.unknown[id] = true
			}
			select {
			case <-pause.C:
			case <-ctx.Done():
			}
			if !w.insists {
				break
			}
		}
		if _, done := w.acknowledged[id]; !done {
			w.unknown[id] = true
		}
	}
	return nil
}

// The appender, killed with its embedded server under load and started again on
// the same store and ports, must still hold every acknowledged event once, at
// the seq it was acknowledged with.
func TestAppenderKilledUnderLoadKeepsWhatItAcknowledged(t *testing.T) {
	t.Parallel()
	const writers, rounds, perRound = 16, 3, 400
	options := harness.Appender{Data: t.TempDir(), Invariants: "enforce"}
	appender := options.Start(t)
	options.Listen, options.NATSListen = harness.HostPort(appender.HTTP), harness.HostPort(appender.NATS)
	projector := harness.Projector{NATS: appender.NATS}.Start(t)

	ctx, cancel := context.WithCancel(t.Context())
	var count atomic.Int64
	var wg sync.WaitGroup
	all := make([]*survivor, writers)
	for i := range all {
		w := &survivor{name: fmt.Sprintf("w%02d", i), acknowledged: map[string]int64{}, unknown: map[string]bool{}}
		if w.insists = i%2 == 0; w.insists {
			w.session = fmt.Sprintf("own-%02d", i)
		} else {
			w.session = fmt.Sprintf("shared-%d", i%4)
		}
		all[i] = w
		client := appender.Client()
		wg.Go(func() {
			if err := w.write(ctx, client, &count); err != nil {
				t.Error(err)
			}
		})
	}
	defer wg.Wait()
	defer cancel()
	reach := func(target int64) {
		t.Helper()
		harness.Until(t, time.Minute, fmt.Sprintf("%d events acknowledged", target), func() error {
			if n := count.Load(); n < target {
				return fmt.Errorf("%d so far", n)
			}
			return nil
		})
	}
	for range rounds {
		reach(count.Load() + perRound)
		appender.Kill()
		appender = options.Start(t)
	}
	reach(count.Load() + perRound)
	cancel()
	wg.Wait()

	log := harness.OpenLog(t, appender.NATS)
	bySession := map[string][]*survivor{}
	for _, w := range all {
		bySession[w.session] = append(bySession[w.session], w)
	}
	for session, owners := range bySession {
		last, err := holdsAcknowledged(t.Context(), log, session, owners)
		if err != nil {
			t.Errorf("%s: %v", session, err)
			continue
		}
		// The projector lost its server three times and must be up to date.
		if err := matchesFold(t.Context(), projector.Client(), session, last); err != nil {
			t.Errorf("%s: %v", session, err)
		}
	}
	verifyAll(t, appender.NATS)
	t.Logf("%d events acknowledged over %d kills", count.Load(), rounds)
}

// holdsAcknowledged reads a session with the bare client: its chain is whole,
// what was acknowledged is there once and at its seq, what was not is there
// once at most, and nothing else is. It answers the last seq.
func holdsAcknowledged(ctx context.Context, log *harness.Log, session string, writers []*survivor) (int64, error) {
	commits, err := log.Commits(ctx, session)
	if err != nil {
		return 0, err
	}
	header, err := log.Value(ctx, harness.HeaderBucket, harness.Token(session))
	if err != nil {
		return 0, err
	}
	lines, err := harness.CheckChain(session, header, commits)
	if err != nil {
		return 0, err
	}
	at := map[string]int64{}
	for seq, line := range lines {
		e, err := harness.ParseEvent(line)
		if err != nil {
			return 0, err
		}
		id, err := noteID(e)
		if err != nil {
			return 0, err
		}
		if before, twice := at[id]; twice {
			return 0, fmt.Errorf("event %s is at %d and at %d", id, before, seq)
		}
		at[id] = int64(seq)
	}
	sent := 0
	for _, w := range writers {
		for id, seq := range w.acknowledged {
			got, there := at[id]
			if !there {
				return 0, fmt.Errorf("event %s was acknowledged at %d and is gone", id, seq)
			}
			if got != seq {
				return 0, fmt.Errorf("event %s was acknowledged at %d and is at %d", id, seq, got)
			}
			sent++
		}
		for id := range w.unknown {
			if _, there := at[id]; there {
				sent++
			}
		}
	}
	if sent != len(lines) {
		return 0, fmt.Errorf("%d events in the log, %d of them were sent", len(lines), sent)
	}
	return int64(len(lines) - 1), nil
}
