package appender

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// deadline is a context that ends at a point in time, and has a timer only once somebody waits
// for that: most appends find their state in memory and never do.
type deadline struct {
	context.Context // its values; it never ends
	at              time.Time

	once   sync.Once // guards the two below
	timed  context.Context
	cancel context.CancelFunc
	begun  atomic.Bool // the two are set
}

// ended is what a deadline is that was ended before anybody waited for it.
var ended, end = context.WithCancel(context.Background())

func init() { end() }

// withDeadline returns a context with the values of parent, not its end, that ends after d.
func withDeadline(parent context.Context, d time.Duration) *deadline {
	return &deadline{Context: context.WithoutCancel(parent), at: time.Now().Add(d)}
}

func (d *deadline) start() context.Context {
	d.once.Do(func() {
		d.timed, d.cancel = context.WithDeadline(d.Context, d.at)
		d.begun.Store(true)
	})
	return d.timed
}

// end ends it early. It must be called.
func (d *deadline) end() {
	d.once.Do(func() {
		d.timed, d.cancel = ended, end
		d.begun.Store(true)
	})
	d.cancel()
}

func (d *deadline) Deadline() (time.Time, bool) { return d.at, true }

func (d *deadline) Done() <-chan struct{} { return d.start().Done() }

// AfterFunc spares each context that is made from this one a goroutine (see package context).
func (d *deadline) AfterFunc(f func()) (stop func() bool) { return context.AfterFunc(d.start(), f) }

func (d *deadline) Err() error {
	if !d.begun.Load() && time.Now().Before(d.at) {
		return nil
	}
	return d.start().Err()
}
