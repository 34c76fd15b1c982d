package appender

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// deadline is a context that ends at a point in time, or with another context, and has a timer only
// once somebody waits for that: most appends find their state in memory and never do.
type deadline struct {
	context.Context // its values; it never ends
	at              time.Time
	until           context.Context // ends it too

	once   sync.Once // guards the two below
	timed  context.Context
	cancel context.CancelFunc
	begun  atomic.Bool // the two are set
}

// ended is what a deadline is that was ended before anybody waited for it.
var ended, end = context.WithCancel(context.Background())

func init() { end() }

// withDeadline returns a context with the values of parent, not its end, that ends after d and when
// until does.
func withDeadline(parent, until context.Context, d time.Duration) *deadline {
	return &deadline{Context: context.WithoutCancel(parent), until: until, at: time.Now().Add(d)}
}

func (d *deadline) start() context.Context {
	d.once.Do(func() {
		timed, cancel := context.WithDeadline(d.Context, d.at)
		if d.until.Err() != nil {
			cancel() // now, and not a moment later
		}
		forget := context.AfterFunc(d.until, cancel)
		d.timed, d.cancel = timed, func() { forget(); cancel() }
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
	if !d.begun.Load() && time.Now().Before(d.at) && d.until.Err() == nil {
		return nil
	}
	return d.start().Err()
}
