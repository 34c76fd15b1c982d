// Package platform owns the process and its connection to NATS: starting and stopping what runs in the
// background, signals and exit codes, logging, the HTTP listener, an embedded nats-server and the client
// connections.
//
// It must not know sessions, events, streams, subjects or routes, nor which of the programs it runs in. It
// depends on no other package of this module.
package platform

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// ErrStopping is the cause of every context that was cancelled in order to stop, as opposed to one that was
// cancelled because something failed or took too long.
var ErrStopping = errors.New("stopping")

// Stopping reports whether ctx was cancelled in order to stop.
func Stopping(ctx context.Context) bool {
	return errors.Is(context.Cause(ctx), ErrStopping)
}

// Service is something that runs in the background.
//
// Start returns when the service runs, or with the reason why it does not; then nothing is left running. Its
// context bounds the starting only: what was started runs until Stop, so that a group can be stopped in order.
//
// Stop returns when the service has ended, or with an error when ctx ended first. It MUST tolerate a service
// that was never started and a second call. A service is used once: it is not started again after Stop.
type Service interface {
	Start(ctx context.Context) error
	Stop(ctx context.Context) error
}

// Watched is implemented by a Service that can end by itself. Done is closed when it has ended; Err is then the
// failure that ended it, nil when it was stopped or had nothing more to do.
type Watched interface {
	Done() <-chan struct{}
	Err() error
}

// StopFunc makes a Service of something that runs already and must be stopped in its turn, such as a server
// that had to be up before the other members could be built.
type StopFunc func(ctx context.Context) error

// Start does nothing.
func (StopFunc) Start(context.Context) error { return nil }

// Stop calls the function, which must tolerate a second call.
func (f StopFunc) Stop(ctx context.Context) error { return f(ctx) }

// Runner is a Service that runs one function in a goroutine. Make one with NewRunner.
type Runner struct {
	run   func(ctx context.Context, ready func()) error
	ready chan struct{} // closed by the function
	done  chan struct{} // closed when the function has returned, or when it never will be called
	err   error         // written before done is closed

	mu      sync.Mutex              // guards the two below
	cancel  context.CancelCauseFunc // nil until Start
	stopped bool                    // Stop came before Start
}

// NewRunner returns a Runner for run, which calls ready once it does its work and returns soon after its context
// is done. Its context keeps the values of Start's context and is cancelled with cause ErrStopping by Stop; an
// error that says no more than that is not a failure.
func NewRunner(run func(ctx context.Context, ready func()) error) *Runner {
	return &Runner{run: run, ready: make(chan struct{}), done: make(chan struct{})}
}

// Start calls the function and returns once that has called ready. It returns the function's error when it ends
// before that, and waits for its end when ctx is done first.
func (r *Runner) Start(ctx context.Context) error {
	runCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	r.mu.Lock()
	switch {
	case r.stopped:
		r.mu.Unlock()
		cancel(nil)
		return fmt.Errorf("not started, because it was stopped before: %w", ErrStopping)
	case r.cancel != nil:
		r.mu.Unlock()
		cancel(nil)
		return errors.New("was started already; a service is started once")
	}
	r.cancel = cancel
	r.mu.Unlock()

	go func() {
		defer close(r.done)
		err := r.run(runCtx, sync.OnceFunc(func() { close(r.ready) }))
		if !onlySaysStopped(runCtx, err) {
			r.err = err
		}
		cancel(nil) // releases the context's resources when the function ended by itself
	}()

	select {
	case <-r.ready:
		return nil
	case <-r.done:
		select {
		case <-r.ready:
			return r.err
		default:
		}
		switch {
		case r.err != nil:
			return r.err
		case Stopping(runCtx):
			return fmt.Errorf("stopped before it was ready: %w", ErrStopping)
		}
		return errors.New("ended before it was ready")
	case <-ctx.Done():
		cancel(context.Cause(ctx))
		<-r.done
		return fmt.Errorf("start given up: %w", context.Cause(ctx))
	}
}

// Stop cancels the function's context with cause ErrStopping, waits for its end and returns Err.
func (r *Runner) Stop(ctx context.Context) error {
	r.mu.Lock()
	if r.cancel == nil {
		if !r.stopped {
			r.stopped = true
			close(r.done)
		}
		r.mu.Unlock()
		return nil
	}
	cancel := r.cancel
	r.mu.Unlock()

	cancel(ErrStopping)
	select {
	case <-r.done:
		return r.err
	default:
	}
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return fmt.Errorf("still running when its time to stop was up: %w", context.Cause(ctx))
	}
}

// Done is closed when the function has returned, or will never be called because Stop came first.
func (r *Runner) Done() <-chan struct{} { return r.done }

// Err is the failure that ended the function: nil while it runs, after an ordered stop, and when it returned nil.
func (r *Runner) Err() error {
	select {
	case <-r.done:
		return r.err
	default:
		return nil
	}
}

// onlySaysStopped reports whether err, in all its branches, says no more than that ctx was cancelled. A real
// failure joined with a cancellation stays a failure.
func onlySaysStopped(ctx context.Context, err error) bool {
	if err == nil {
		return true
	}
	if ctx.Err() == nil {
		return false
	}
	switch wrapped := err.(type) { //nolint:errorlint // walks the tree that errors.As would flatten
	case interface{ Unwrap() []error }:
		for _, branch := range wrapped.Unwrap() {
			if !onlySaysStopped(ctx, branch) {
				return false
			}
		}
		return true
	case interface{ Unwrap() error }:
		if inner := wrapped.Unwrap(); inner != nil {
			return onlySaysStopped(ctx, inner)
		}
	}
	return errors.Is(err, context.Canceled) || errors.Is(err, ErrStopping)
}

// rewindWithin bounds stopping what was started before a member that did not start.
const rewindWithin = 10 * time.Second

// Group is a Service made of others: it starts them in the order in which they were added and stops them in
// reverse. The zero value is an empty group.
type Group struct {
	life sync.Mutex // held by the one Start or Stop that is at work

	mu          sync.Mutex // guards everything below
	members     []member
	started     []member // in order of starting, without those that have been stopped
	state       groupState
	cancelStart context.CancelCauseFunc
	failure     *memberError
	done        chan struct{} // made on first use, closed by the first failure and by Stop
	doneClosed  bool
}

type groupState int

const (
	groupNew groupState = iota
	groupStarted
	groupStopped
)

type member struct {
	name string
	Service
}

// memberError is what a member said, under the member's name.
type memberError struct {
	name string
	err  error
}

func (e *memberError) Error() string { return e.name + ": " + e.err.Error() }
func (e *memberError) Unwrap() error { return e.err }

// Add appends a member under the name that errors and logs give it. It MUST NOT be called after Start.
func (g *Group) Add(name string, s Service) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state != groupNew {
		panic("platform: Group.Add(" + name + ") after Start or Stop")
	}
	g.members = append(g.members, member{name: name, Service: s})
}

// Start starts the members in order. When one does not start, those before it are stopped again.
func (g *Group) Start(ctx context.Context) error {
	g.life.Lock()
	defer g.life.Unlock()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	g.mu.Lock()
	switch g.state {
	case groupStarted:
		g.mu.Unlock()
		return errors.New("the group was started already; a service is started once")
	case groupStopped:
		g.mu.Unlock()
		return fmt.Errorf("the group is not started, because it was stopped before: %w", ErrStopping)
	}
	g.state = groupStarted
	g.cancelStart = cancel // lets Stop end a Start that hangs
	members := g.members
	g.mu.Unlock()

	for _, m := range members {
		err := context.Cause(ctx)
		if err == nil {
			err = m.Start(ctx)
		}
		if err != nil {
			stopCtx, done := context.WithTimeout(context.WithoutCancel(ctx), rewindWithin)
			defer done()
			err = errors.Join(&memberError{m.name, err}, g.stopStarted(stopCtx))
			g.mu.Lock()
			g.closeDone()
			g.mu.Unlock()
			return err
		}
		g.mu.Lock()
		g.started = append(g.started, m)
		g.mu.Unlock()
		if w, ok := m.Service.(Watched); ok {
			go g.watch(m.name, w)
		}
	}
	return nil
}

// watch makes a member's own failure the group's.
func (g *Group) watch(name string, w Watched) {
	select {
	case <-w.Done():
	case <-g.Done(): // another member failed first, or the group was stopped
		return
	}
	if err := w.Err(); err != nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		if g.failure == nil && g.state == groupStarted {
			g.failure = &memberError{name, err}
			g.closeDone()
		}
	}
}

// Stop stops the members that run, the last started first. Each gets its turn, also after one that did not stop
// in time; the errors of all are joined. A member whose time was up is tried again by the next Stop.
func (g *Group) Stop(ctx context.Context) error {
	g.mu.Lock()
	if g.cancelStart != nil {
		g.cancelStart(ErrStopping)
	}
	g.mu.Unlock()

	g.life.Lock()
	defer g.life.Unlock()
	g.mu.Lock()
	g.state = groupStopped
	g.mu.Unlock()

	err := g.stopStarted(ctx)
	g.mu.Lock()
	g.closeDone()
	g.mu.Unlock()
	return err
}

// stopStarted is called with life held.
func (g *Group) stopStarted(ctx context.Context) error {
	g.mu.Lock()
	started := g.started
	g.mu.Unlock()

	var errs []error
	var left []member
	for i := len(started) - 1; i >= 0; i-- {
		m := started[i]
		slog.Debug("stopping", slog.String("service", m.name))
		if err := m.Stop(ctx); err != nil {
			errs = append(errs, &memberError{m.name, err})
			if ctx.Err() != nil {
				left = append([]member{m}, left...)
			}
		}
	}
	g.mu.Lock()
	g.started = left
	g.mu.Unlock()
	return errors.Join(errs...)
}

// Done is closed when a member has failed and when the group has been stopped.
func (g *Group) Done() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.doneLocked()
}

func (g *Group) doneLocked() chan struct{} {
	if g.done == nil {
		g.done = make(chan struct{})
	}
	return g.done
}

func (g *Group) closeDone() {
	if done := g.doneLocked(); !g.doneClosed {
		g.doneClosed = true
		close(done)
	}
}

// Err is the first failure of a member that ended by itself, under the member's name.
func (g *Group) Err() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.failure == nil {
		return nil
	}
	return g.failure
}

// Run starts the group, waits until ctx is done or a member fails, and stops it within stopWithin. It returns nil
// after an ordered stop, else what failed.
func (g *Group) Run(ctx context.Context, stopWithin time.Duration) error {
	if err := g.Start(ctx); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-g.Done():
	}
	stopCtx, done := context.WithTimeout(context.WithoutCancel(ctx), stopWithin)
	defer done()
	failure, stopErr := g.Err(), g.Stop(stopCtx)
	var failed *memberError
	if errors.As(failure, &failed) && errors.Is(stopErr, failed.err) {
		return stopErr // the member's Stop has said it again
	}
	return errors.Join(failure, stopErr)
}
