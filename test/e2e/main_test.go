// Package e2e_test holds the two programs to their contract from outside: real
// processes, killed and stopped, on real NATS servers. PALIMPSEST_RACE=1 builds
// the programs with the race detector, PALIMPSEST_LONG=1 takes the long runs.
package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"testing"

	"palimpsest/test/e2e/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// stack is one appender with its embedded server, and one projector.
type stack struct {
	nats                string
	appender, projector *harness.Client
}

func startStack(t *testing.T, invariants string) stack {
	t.Helper()
	appender := harness.Appender{Invariants: invariants}.Start(t)
	projector := harness.Projector{NATS: appender.NATS}.Start(t)
	return stack{nats: appender.NATS, appender: appender.Client(), projector: projector.Client()}
}

// note is a user message with an id of its own; all its text is the id.
func note(id string) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(`{"type":"user/message","surfaceOp":"append","data":{"id":%q,"role":"user","source":{"kind":"user"},"content":[{"type":"text","text":%q}]}}`, id, id))
}

func notes(ids ...string) []json.RawMessage {
	events := make([]json.RawMessage, len(ids))
	for i, id := range ids {
		events[i] = note(id)
	}
	return events
}

// noteID is the id that note gave an event.
func noteID(e harness.Event) (string, error) {
	var data struct{ ID string }
	err := json.Unmarshal(e.Data, &data)
	if err == nil && data.ID == "" {
		err = fmt.Errorf("event %s has no id", e.Line)
	}
	return data.ID, err
}

// mustAppend appends events as one array.
func mustAppend(t *testing.T, c *harness.Client, session string, events []json.RawMessage, options ...harness.Option) harness.Receipt {
	t.Helper()
	r, err := c.AppendEvents(t.Context(), session, events, options...)
	if err != nil {
		t.Fatalf("append to %q: %v", session, err)
	}
	return r
}

// refused holds err to a problem of that status and code.
func refused(t *testing.T, err error, status int, code string) harness.Problem {
	t.Helper()
	p := harness.AsRefused(err)
	if p == nil {
		t.Fatalf("want %d %s, got %v", status, code, err)
	}
	if p.Status != status || p.Code != code {
		t.Fatalf("want %d %s, got %v", status, code, err)
	}
	return *p
}

// matchesFold compares what the projector serves with a dumb fold of the
// events that it serves.
func matchesFold(ctx context.Context, projector *harness.Client, session string, last int64) error {
	messages, err := projector.Messages(ctx, session, harness.MinSeq(last))
	if err != nil {
		return err
	}
	if messages.Seq != last {
		return fmt.Errorf("messages as of seq %d, want %d", messages.Seq, last)
	}
	events, err := projector.Events(ctx, session)
	if err != nil {
		return err
	}
	if int64(len(events)) != last+1 {
		return fmt.Errorf("%d events, want %d", len(events), last+1)
	}
	folded, err := harness.Fold(3, events)
	if err != nil {
		return err
	}
	if messages.ReplaceGeneration != folded.Generation {
		return fmt.Errorf("replaceGeneration %d, want %d", messages.ReplaceGeneration, folded.Generation)
	}
	return harness.SameMessages(messages.Messages, folded.Messages)
}

// verifyAll runs the checker over every session and expects it content.
func verifyAll(t *testing.T, natsURL string) {
	t.Helper()
	if r := harness.Run(t, "projector", "verify", "--all", "--nats", natsURL); r.Code != 0 {
		t.Errorf("projector verify --all: exit code %d\n%s", r.Code, r.Output())
	}
}
