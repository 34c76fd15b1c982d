package e2e_test

import (
	"encoding/json"
	"strings"
	"testing"

	"palimpsest/test/e2e/harness"
)

func TestCommandsOfTheFleet(t *testing.T) {
	t.Parallel()
	s := startStack(t, "off")
	mustAppend(t, s.appender, "at work", []json.RawMessage{json.RawMessage(`{"type":"turn/start","data":{"turn":4}}`)})
	mustAppend(t, s.appender, "at rest", notes("n"))
	for _, id := range []string{"at work", "at rest"} {
		if _, err := s.projector.Messages(t.Context(), id, harness.MinSeq(0)); err != nil {
			t.Fatal(err)
		}
	}
	run := func(code int, name string, args ...string) harness.Result {
		t.Helper()
		r := harness.Run(t, name, args...)
		if r.Code != code {
			t.Fatalf("%s %q: exit code %d, want %d\n%s", name, args, r.Code, code, r.Output())
		}
		return r
	}
	table := run(0, "projector", "sessions", "--nats", s.nats).Stdout
	if lines := strings.Split(strings.TrimSpace(table), "\n"); len(lines) != 3 || !strings.HasSuffix(lines[1], "  at rest") || !strings.HasSuffix(lines[2], "  at work") || strings.Fields(lines[2])[1] != "4" {
		t.Errorf("projector sessions printed\n%s", table)
	}
	var row struct {
		Session, State string
		Header         struct{ ID string }
	}
	line := run(0, "projector", "sessions", "--nats", s.nats, "--state", "open", "--json").Stdout
	if err := json.Unmarshal([]byte(line), &row); err != nil || row.Session != "at work" || row.State != "open" || row.Header.ID != "at work" {
		t.Errorf("projector sessions --state open --json printed %q: %v", line, err)
	}
	run(2, "projector", "sessions", "--nats", s.nats, "--state", "busy")
	run(2, "projector", "feed", "--nats", s.nats, "--since", "soon")
	if out := run(0, "projector", "sweep", "--nats", s.nats).Stdout; !strings.Contains(out, "in no head: 0, removed: 0") {
		t.Errorf("projector sweep printed %q", out)
	}

	// A mistyped event type would be known for ever.
	run(0, "projector", "sessions", "--nats", s.nats, "--event-types", "mis/typed")
	run(1, "projector", "sessions", "--nats", s.nats)
	if out := run(0, "appender", "event-types", "list", "--nats", s.nats).Stdout; out != "mis/typed\n" {
		t.Errorf("appender event-types list printed %q", out)
	}
	run(1, "appender", "event-types", "remove", "user/message", "--nats", s.nats)
	run(0, "appender", "event-types", "remove", "mis/typed", "--nats", s.nats)
	run(0, "projector", "sessions", "--nats", s.nats)
}
