package platform

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

func untilStopped(ctx context.Context, ready func()) error {
	ready()
	<-ctx.Done()
	return context.Cause(ctx)
}

func TestRunnerStartReturnsOnceReady(t *testing.T) {
	t.Parallel()
	var worked bool
	r := NewRunner(func(ctx context.Context, ready func()) error {
		worked = true
		return untilStopped(ctx, ready)
	})
	if err := r.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if !worked {
		t.Error("Start returned before the function was ready")
	}
	if err := r.Stop(testContext(t)); err != nil {
		t.Errorf("an ordered stop is no failure: %v", err)
	}
	if err := r.Stop(testContext(t)); err != nil {
		t.Errorf("second Stop: %v", err)
	}
	if err := r.Err(); err != nil {
		t.Errorf("Err after an ordered stop: %v", err)
	}
}

func TestRunnerOutlivesTheContextOfStart(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(testContext(t))
	r := NewRunner(untilStopped)
	if err := r.Start(ctx); err != nil {
		t.Fatal(err)
	}
	cancel()
	select {
	case <-r.Done():
		t.Error("the end of Start's context ended the function")
	default:
	}
	if err := r.Stop(testContext(t)); err != nil {
		t.Fatal(err)
	}
}

func TestRunnerThatFailsIsToldFromOneThatIsStopped(t *testing.T) {
	t.Parallel()
	broken := errors.New("disk on fire")
	for _, c := range []struct {
		name string
		err  func(ctx context.Context) error
		want error
	}{
		{"stopped", func(ctx context.Context) error { return ctx.Err() }, nil},
		{"stopped, wrapped", func(ctx context.Context) error { return fmt.Errorf("reading: %w", context.Cause(ctx)) }, nil},
		{"failed while stopping", func(context.Context) error { return broken }, broken},
		{"failed and stopped", func(ctx context.Context) error { return errors.Join(context.Cause(ctx), broken) }, broken},
		{"drained too slowly", func(context.Context) error { return context.DeadlineExceeded }, context.DeadlineExceeded},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := NewRunner(func(ctx context.Context, ready func()) error {
				ready()
				<-ctx.Done()
				return c.err(ctx)
			})
			if err := r.Start(testContext(t)); err != nil {
				t.Fatal(err)
			}
			if err := r.Stop(testContext(t)); !errors.Is(err, c.want) {
				t.Errorf("Stop = %v, want %v", err, c.want)
			}
		})
	}
}

func TestRunnerThatEndsByItself(t *testing.T) {
	t.Parallel()
	broken := errors.New("lease lost")
	fail := make(chan struct{})
	r := NewRunner(func(_ context.Context, ready func()) error {
		ready()
		<-fail
		return broken
	})
	if err := r.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := r.Err(); err != nil {
		t.Errorf("Err while it runs: %v", err)
	}
	close(fail)
	await(t, "the end", r.Done())
	if err := r.Err(); !errors.Is(err, broken) {
		t.Errorf("Err = %v", err)
	}
	if err := r.Stop(testContext(t)); !errors.Is(err, broken) {
		t.Errorf("Stop = %v", err)
	}
}

func TestRunnerThatDoesNotGetReady(t *testing.T) {
	t.Parallel()
	broken := errors.New("no such bucket")
	r := NewRunner(func(context.Context, func()) error { return broken })
	if err := r.Start(testContext(t)); !errors.Is(err, broken) {
		t.Errorf("Start = %v", err)
	}
	r = NewRunner(func(context.Context, func()) error { return nil })
	if err := r.Start(testContext(t)); err == nil {
		t.Error("Start of a function that ended before it was ready said nothing")
	}

	late := errors.New("out of patience")
	ctx, cancel := context.WithCancelCause(testContext(t))
	r = NewRunner(func(ctx context.Context, _ func()) error {
		cancel(late)
		<-ctx.Done()
		return ctx.Err()
	})
	if err := r.Start(ctx); !errors.Is(err, late) {
		t.Errorf("Start = %v, want the cause of its context", err)
	}
}

func TestRunnerStoppedBeforeStartAndDuringStart(t *testing.T) {
	t.Parallel()
	r := NewRunner(untilStopped)
	for range 2 {
		if err := r.Stop(testContext(t)); err != nil {
			t.Fatalf("Stop of what was never started: %v", err)
		}
	}
	if err := r.Start(testContext(t)); !errors.Is(err, ErrStopping) {
		t.Errorf("Start after Stop = %v", err)
	}
	await(t, "Done", r.Done())

	entered := make(chan struct{})
	r = NewRunner(func(ctx context.Context, _ func()) error {
		close(entered)
		<-ctx.Done()
		return ctx.Err()
	})
	started := make(chan error, 1)
	go func() { started <- r.Start(testContext(t)) }()
	await(t, "the function", entered)
	if err := r.Stop(testContext(t)); err != nil {
		t.Errorf("Stop during Start: %v", err)
	}
	if err := await(t, "Start", started); !errors.Is(err, ErrStopping) {
		t.Errorf("Start = %v", err)
	}
	if err := r.Start(testContext(t)); err == nil {
		t.Error("a second Start was let through")
	}
}

func TestRunnerThatDoesNotStopInTime(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	r := NewRunner(func(_ context.Context, ready func()) error {
		ready()
		<-release
		return nil
	})
	if err := r.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(testContext(t), time.Millisecond)
	defer cancel()
	if err := r.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Stop = %v", err)
	}
	close(release)
	if err := r.Stop(testContext(t)); err != nil {
		t.Errorf("Stop after it ended: %v", err)
	}
}

// diary records the order of what happens.
type diary struct {
	mu      sync.Mutex
	entries []string
}

func (d *diary) write(entry string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.entries = append(d.entries, entry)
}

func (d *diary) expect(t *testing.T, want ...string) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	if !slices.Equal(d.entries, want) {
		t.Errorf("order is %q, want %q", d.entries, want)
	}
}

// noted is a Service that writes a diary and fails where told to.
type noted struct {
	name              string
	diary             *diary
	startErr, stopErr error
}

func (n *noted) Start(context.Context) error { n.diary.write("start " + n.name); return n.startErr }
func (n *noted) Stop(context.Context) error  { n.diary.write("stop " + n.name); return n.stopErr }

func TestGroupStartsInOrderAndStopsInReverse(t *testing.T) {
	t.Parallel()
	var d diary
	var g Group
	for _, name := range []string{"a", "b", "c"} {
		g.Add(name, &noted{name: name, diary: &d})
	}
	if err := g.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := g.Start(testContext(t)); err == nil {
		t.Error("a second Start was let through")
	}
	for range 2 {
		if err := g.Stop(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
	d.expect(t, "start a", "start b", "start c", "stop c", "stop b", "stop a")
}

func TestGroupNeverStarted(t *testing.T) {
	t.Parallel()
	var d diary
	var g Group
	g.Add("a", &noted{name: "a", diary: &d})
	if err := g.Stop(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := g.Start(testContext(t)); !errors.Is(err, ErrStopping) {
		t.Errorf("Start after Stop = %v", err)
	}
	await(t, "Done", g.Done())
	d.expect(t)
}

func TestGroupStopsWhatItStartedWhenAMemberDoesNotStart(t *testing.T) {
	t.Parallel()
	broken := errors.New("port taken")
	var d diary
	var g Group
	g.Add("a", &noted{name: "a", diary: &d})
	g.Add("b", &noted{name: "b", diary: &d, startErr: broken})
	g.Add("c", &noted{name: "c", diary: &d})
	err := g.Start(testContext(t))
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "b: ") {
		t.Errorf("Start = %v, want b's error under its name", err)
	}
	d.expect(t, "start a", "start b", "stop a")
	if err := g.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
	d.expect(t, "start a", "start b", "stop a")
}

func TestGroupStopGivesEachMemberItsTurn(t *testing.T) {
	t.Parallel()
	broken := errors.New("would not flush")
	var d diary
	var g Group
	g.Add("a", &noted{name: "a", diary: &d})
	g.Add("b", &noted{name: "b", diary: &d, stopErr: broken})
	if err := g.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := g.Stop(testContext(t)); !errors.Is(err, broken) || err.Error() != "b: would not flush" {
		t.Errorf("Stop = %v", err)
	}
	d.expect(t, "start a", "start b", "stop b", "stop a")
}

func TestGroupStopEndsAStartThatHangs(t *testing.T) {
	t.Parallel()
	entered := make(chan struct{})
	var d diary
	var g Group
	g.Add("a", &noted{name: "a", diary: &d})
	g.Add("hangs", NewRunner(func(ctx context.Context, _ func()) error {
		close(entered)
		<-ctx.Done()
		return ctx.Err()
	}))
	started := make(chan error, 1)
	go func() { started <- g.Start(testContext(t)) }()
	await(t, "the second member", entered)
	if err := g.Stop(testContext(t)); err != nil {
		t.Errorf("Stop = %v", err)
	}
	if err := await(t, "Start", started); !errors.Is(err, ErrStopping) {
		t.Errorf("Start = %v", err)
	}
	d.expect(t, "start a", "stop a")
}

func TestGroupRunEndsWhenItsContextDoes(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancelCause(testContext(t))
	var d diary
	var g Group
	g.Add("a", &noted{name: "a", diary: &d})
	g.Add("b", NewRunner(func(ctx context.Context, ready func()) error {
		ready()
		cancel(ErrStopping)
		<-ctx.Done()
		d.write("b sees " + context.Cause(ctx).Error())
		return ctx.Err()
	}))
	if err := g.Run(ctx, testDeadline); err != nil {
		t.Errorf("Run = %v", err)
	}
	d.expect(t, "start a", "b sees stopping", "stop a")
}

func TestGroupRunEndsWhenAMemberFails(t *testing.T) {
	t.Parallel()
	broken := errors.New("lease lost")
	fail := make(chan struct{})
	var d diary
	var g Group
	g.Add("a", &noted{name: "a", diary: &d})
	g.Add("finishes", NewRunner(func(_ context.Context, ready func()) error { ready(); return nil }))
	g.Add("fails", NewRunner(func(_ context.Context, ready func()) error {
		ready()
		<-fail
		return broken
	}))
	g.Add("last", NewRunner(func(ctx context.Context, ready func()) error {
		close(fail)
		return untilStopped(ctx, ready)
	}))
	if err := g.Run(testContext(t), testDeadline); !errors.Is(err, broken) || err.Error() != "fails: lease lost" {
		t.Errorf("Run = %q, want the failure once, under the member's name", err)
	}
	d.expect(t, "start a", "stop a")
}

func TestGroupStopIsTriedAgainForAMemberWhoseTimeWasUp(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	var g Group
	g.Add("slow", NewRunner(func(_ context.Context, ready func()) error {
		ready()
		<-release
		return nil
	}))
	if err := g.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(testContext(t))
	cancel()
	if err := g.Stop(over); err == nil {
		t.Error("Stop did not say that a member still runs")
	}
	close(release)
	if err := g.Stop(testContext(t)); err != nil {
		t.Errorf("second Stop = %v", err)
	}
}

func TestStopFuncJoinsAGroup(t *testing.T) {
	t.Parallel()
	var d diary
	var g Group
	g.Add("server", StopFunc(func(context.Context) error { d.write("server down"); return nil }))
	g.Add("a", &noted{name: "a", diary: &d})
	if err := g.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := g.Stop(testContext(t)); err != nil {
		t.Fatal(err)
	}
	d.expect(t, "start a", "stop a", "server down")
}
