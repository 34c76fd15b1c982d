package platform

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// childMode names the environment variable that turns the test binary into the program of a signal test.
const childMode = "PALIMPSEST_TEST_CHILD"

func TestMain(m *testing.M) {
	if mode := os.Getenv(childMode); mode != "" {
		os.Exit(childMain(mode))
	}
	slog.SetDefault(slog.New(slog.DiscardHandler)) // tests that look at logs give their own logger
	goleak.VerifyTestMain(m)
}

// testDeadline is far above what any wait takes, so that a test that hangs says where.
const testDeadline = 20 * time.Second

func testContext(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testDeadline)
	t.Cleanup(cancel)
	return ctx
}

// await fails the test when signal does not come.
func await[T any](t *testing.T, what string, signal <-chan T) T {
	t.Helper()
	select {
	case v := <-signal:
		return v
	case <-time.After(testDeadline):
		t.Fatalf("waited %s for %s", testDeadline, what)
		panic("unreachable")
	}
}

// eventually polls until condition holds.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.After(testDeadline)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("waited %s for %s", testDeadline, what)
		}
	}
}
