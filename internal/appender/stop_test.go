package appender_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
)

// never is longer than any test runs.
const never = 10 * time.Minute

// What waits for a server that is away when the appender is told to stop is refused, so that another
// appender can be asked: it does not wait for as long as a load may take.
func TestLoadsAreGivenUpAtTheEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	author := w.start(t, appender.Config{})
	asked := map[string]func(context.Context, *process) error{
		"compact": func(ctx context.Context, p *process) error {
			_, err := p.Compact(ctx, appender.CompactRequest{Session: "compact", Start: 0, End: 1, Summary: json.RawMessage(`"x"`)})
			return err
		},
		"append": func(ctx context.Context, p *process) error {
			_, err := p.Append(ctx, at(2, to("append", note("x"))))
			return err
		},
	}
	for session := range asked {
		author.must(t, to(session, user("u0"), user("u1")))
	}
	p := w.start(t, appender.Config{LoadTimeout: never, StopGrace: 20 * time.Millisecond}, journal.Config{ReadTimeout: never})
	w.Down()
	ctx := journaltest.Context(t)
	answers := map[string]chan error{}
	for what, ask := range asked {
		answer := make(chan error, 1)
		answers[what] = answer
		go func() { answer <- ask(ctx, p) }()
	}
	journaltest.Eventually(t, "all to load", func() bool { return p.Stats().Loads.Load() == int64(len(asked)) })
	p.GiveUp()
	for what, answer := range answers {
		if e := asError(journaltest.Await(t, what, answer)); e.Code != events.CodeUnavailable || !strings.Contains(e.Detail, "shutting down") {
			t.Errorf("%s: %v", what, e)
		}
	}
	p.refused(t, to("late", note("x")), events.CodeUnavailable, "")
	w.Up()
	for session := range asked {
		if n := w.check(t, session).Next(); n != 2 {
			t.Errorf("%s: the log ends at %d, want 2", session, n)
		}
	}
}

// A publish that was begun is pursued beyond the end of the grace; what would be published behind it
// is refused.
func TestAPublishUnderWayGetsItsTimeAtTheEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{StopGrace: time.Millisecond})
	g, blocker := p.block(t, "s")
	waiting := p.queue(t, to("s", note("waiting")))
	p.GiveUp()
	journaltest.Await(t, "the end of the grace", p.Stopping().Done())
	g.release()
	if got := journaltest.Await(t, "the publish under way", blocker); got.err != nil {
		t.Error(got.err)
	}
	if got := journaltest.Await(t, "what waits behind it", waiting); asError(got.err).Code != events.CodeUnavailable {
		t.Errorf("what waited was answered %+v, %v", got.Receipt, got.err)
	}
	log := w.check(t, "s")
	count(t, log, "blocker", 1)
	count(t, log, "waiting", 0)
}

// Of a publish that nobody answers any more it is said that its outcome is not known, at the end too:
// whoever was told unavailable could take it for not stored.
func TestAnOutcomeThatIsNotKnownIsNoRefusalAtTheEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	jc := journal.Config{RetryBudget: 300 * time.Millisecond, PublishTimeout: 100 * time.Millisecond}
	p := w.start(t, appender.Config{StopGrace: time.Millisecond}, jc)
	g, blocker := p.block(t, "s", func(*events.Commit) error { return nats.ErrTimeout })
	w.Down()
	p.GiveUp()
	journaltest.Await(t, "the end of the grace", p.Stopping().Done())
	g.release()
	got := journaltest.Await(t, "the publish under way", blocker)
	if e := asError(got.err); e.Code != events.CodeOutcomeUnknown || e.Commit == "" {
		t.Errorf("answered %+v, %v", got.Receipt, got.err)
	}
}
