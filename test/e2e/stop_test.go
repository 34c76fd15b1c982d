package e2e_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

func TestSIGTERMDrainsAndEndsWithCodeZero(t *testing.T) {
	t.Parallel()
	options := harness.Appender{Data: t.TempDir(), Invariants: "enforce"}
	appender := options.Start(t)
	projector := harness.Projector{NATS: appender.NATS}.Start(t)
	receipt := mustAppend(t, appender.Client(), "stopped", harness.NewScript(1, 20).Next(30))
	if _, err := projector.Client().Messages(t.Context(), "stopped", harness.MinSeq(29)); err != nil {
		t.Fatal(err)
	}
	projector.Term(t)
	appender.Term(t)
	for _, p := range []*harness.Process{appender, projector} {
		if lines := strings.Count(p.Stdout(), "\n"); lines != 1 {
			t.Errorf("%s printed %d lines on stdout, want the ready line alone:\n%s", p.Name, lines, p.Stdout())
		}
	}

	// What was acknowledged is there when both come back, and goes on.
	appender = options.Start(t)
	projector = harness.Projector{NATS: appender.NATS}.Start(t)
	status, err := appender.Client().Status(t.Context(), "stopped")
	if err != nil {
		t.Fatal(err)
	}
	if *status.NextSeq != 30 || status.Digest != receipt.Digest {
		t.Errorf("after the restart: next seq %d, digest %s; want 30, %s", *status.NextSeq, status.Digest, receipt.Digest)
	}
	mustAppend(t, appender.Client(), "stopped", notes("after"), harness.ExpectedSeq(30))
	if err := matchesFold(t.Context(), projector.Client(), "stopped", 30); err != nil {
		t.Error(err)
	}
}

func TestProjectorEndsWithoutItsServer(t *testing.T) {
	t.Parallel()
	appender := harness.Appender{}.Start(t)
	projector := harness.Projector{NATS: appender.NATS}.Start(t)
	mustAppend(t, appender.Client(), "orphan", notes("a"))
	if _, err := projector.Client().Messages(t.Context(), "orphan", harness.MinSeq(0)); err != nil {
		t.Fatal(err)
	}
	appender.Kill()
	projector.Term(t)
}

// While a drain waits for a request that does not end, a second SIGTERM ends
// the program at once.
func TestSecondSIGTERMEndsAtOnce(t *testing.T) {
	t.Parallel()
	appender := harness.Appender{}.Start(t)
	mustAppend(t, appender.Client(), "waiting", notes("a"))
	for _, c := range []struct {
		start   func(*testing.T) *harness.Process
		request string
	}{
		{
			func(t *testing.T) *harness.Process { return harness.Appender{NATS: appender.NATS}.Start(t) },
			"POST /v1/sessions/waiting/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
		},
		{
			func(t *testing.T) *harness.Process { return harness.Projector{NATS: appender.NATS}.Start(t) },
			"GET /v1/sessions/waiting/messages?minSeq=1000000&timeout=1m0s HTTP/1.1\r\nHost: localhost\r\n\r\n",
		},
	} {
		p := c.start(t)
		t.Run(p.Name, func(t *testing.T) {
			t.Parallel()
			address := harness.HostPort(p.HTTP)
			conn, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := io.WriteString(conn, c.request); err != nil {
				t.Fatal(err)
			}
			if err := p.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			// Two signals at once could count as one: wait until the first
			// has taken effect.
			harness.Until(t, 10*time.Second, "the listener closed", func() error {
				select {
				case <-p.Exited():
					return nil
				default:
				}
				probe, err := net.DialTimeout("tcp", address, time.Second)
				if err != nil {
					return nil
				}
				return errors.Join(errors.New("it still accepts"), probe.Close())
			})
			if err := p.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			harness.Until(t, 3*time.Second, "ended after the second SIGTERM", func() error {
				select {
				case <-p.Exited():
					return nil
				default:
					return fmt.Errorf("%s still runs", p.Name)
				}
			})
		})
	}
}
