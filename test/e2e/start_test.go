package e2e_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// Both programs are started while two of three servers are away: they are alive, say that they are
// not ready and why, and serve once there is a quorum. One that is given a time ends with an error,
// and one that is told to stop meanwhile ends in order.
func TestAStartWaitsForAQuorum(t *testing.T) {
	t.Parallel()
	c := harness.StartCluster(t)
	first := harness.Appender{NATS: c.URL, Replicas: 3}.Start(t) // creates the stream
	mustAppend(t, first.Client(), "before", notes("a"))
	first.Term(t)
	// With its leader and one more away, the stream has none until they are back.
	away := []string{c.Leader(t), "n0"}
	if away[0] == "n0" {
		away[1] = "n1"
	}
	for _, name := range away {
		c.Kill(name)
	}

	ports := harness.FreePorts(t, 3)
	at := func(i int) string { return fmt.Sprintf("127.0.0.1:%d", ports[i]) }
	appender := harness.Appender{NATS: c.URL, Replicas: 3, Listen: at(0)}.Launch(t)
	projector := harness.Projector{NATS: c.URL, Replicas: 3, Listen: at(1)}.Launch(t)
	for _, p := range []*harness.Process{appender, projector} {
		harness.Until(t, time.Minute, p.Name+" says that it is not ready, and why", func() error {
			live, err := p.Client().Do(t.Context(), "GET", "/healthz", nil)
			if err != nil {
				return err
			}
			ready, err := p.Client().Do(t.Context(), "GET", "/readyz", nil)
			if err != nil {
				return err
			}
			if live.Status != 200 || ready.Status != 503 || strings.Contains(string(ready.Body), "the program starts") {
				return fmt.Errorf("healthz %d, readyz %d %s", live.Status, ready.Status, ready.Body)
			}
			return nil
		})
		refused, err := p.Client().Do(t.Context(), "GET", "/v1/sessions/before", nil)
		var problem harness.Problem
		if err != nil || refused.Status != 503 || json.Unmarshal(refused.Body, &problem) != nil || problem.Code != "unavailable" {
			t.Errorf("%s, asked while it starts: %d %s, %v", p.Name, refused.Status, refused.Body, err)
		}
		harness.Until(t, time.Minute, p.Name+" logs what it waits for", func() error {
			if log := p.Stderr(); !strings.Contains(log, "the start waits") || !strings.Contains(log, "log and buckets") {
				return fmt.Errorf("logged: %s", log)
			}
			return nil
		})
	}
	stopped := harness.Projector{NATS: c.URL, Replicas: 3, Listen: at(2)}.Launch(t)
	harness.Until(t, time.Minute, "another one lives", func() error {
		_, err := stopped.Client().Do(t.Context(), "GET", "/healthz", nil)
		return err
	})
	stopped.Term(t)
	r := harness.Run(t, "projector", "serve", "--nats", c.URL, "--listen", "127.0.0.1:0", "--start-wait", "100ms")
	if r.Code != 1 || !strings.Contains(r.Stderr, "not there within 100ms") {
		t.Errorf("with a time of its own: exit code %d\n%s", r.Code, r.Stderr)
	}

	for _, name := range away {
		c.Up(t, name)
	}
	for _, p := range []*harness.Process{appender, projector} {
		p.AwaitReady(t)
	}
	// Leaders may still change while the servers find each other.
	harness.Until(t, time.Minute, "an append is taken", func() error {
		_, err := appender.Client().AppendEvents(t.Context(), "before", notes("b"), harness.ExpectedSeq(1))
		return err
	})
	harness.Until(t, time.Minute, "it is served", func() error {
		_, err := projector.Client().Messages(t.Context(), "before", harness.MinSeq(1))
		return err
	})
}
