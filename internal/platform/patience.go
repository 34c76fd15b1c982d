package platform

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"
)

const (
	patienceFirst   = 100 * time.Millisecond
	patienceLongest = 2 * time.Second
)

// Patience tries again what may succeed later, as a program's start does while others still start.
type Patience struct {
	// Within bounds all tries of one Do together; the last one may end later. Defaults to 0: for ever.
	Within time.Duration
	// Worth reports whether a failure may go away by itself. Defaults to nil: none does.
	Worth func(error) bool
	// Failed hears of each failure that is followed by another try. Defaults to nil: nobody.
	Failed func(error)
	// Logger is told of such a failure once in 10 s, and of each that is another one. Defaults to slog.Default().
	Logger *slog.Logger
}

// Do calls try until it succeeds. It returns the failure that is not worth another try, the last one when the time
// is up, and the cause of ctx when that ends first.
func (p Patience) Do(ctx context.Context, what string, try func(context.Context) error) error {
	log := p.Logger
	if log == nil {
		log = slog.Default()
	}
	var late <-chan time.Time
	if p.Within > 0 {
		timer := time.NewTimer(p.Within)
		defer timer.Stop()
		late = timer.C
	}
	begun, repeated := time.Now(), &repeatFilter{}
	for pause := patienceFirst; ; pause = min(2*pause, patienceLongest) {
		err := try(ctx)
		if err == nil {
			if repeated.text != "" {
				log.Info("what the start waited for is there", slog.String("what", what), slog.String("after", time.Since(begun).Round(time.Millisecond).String()))
			}
			return nil
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%s: given up: %w", what, context.Cause(ctx))
		}
		if p.Worth == nil || !p.Worth(err) {
			return err
		}
		if p.Failed != nil {
			p.Failed(err)
		}
		if repeated.pass(err, time.Now()) {
			log.Warn("the start waits, and tries again", slog.String("what", what), slog.Any("error", err), slog.String("since", time.Since(begun).Round(time.Millisecond).String()))
		}
		timer := time.NewTimer(pause + rand.N(pause/4))
		select {
		case <-timer.C:
			continue
		case <-late:
			err = fmt.Errorf("%s: not there within %v: %w; start what is missing, or give it longer (--start-wait)", what, p.Within, err)
		case <-ctx.Done():
			err = fmt.Errorf("%s: given up: %w", what, context.Cause(ctx))
		}
		timer.Stop()
		return err
	}
}

// Patient is a service that starts with patience, for one that does not end by itself.
func (p Patience) Patient(what string, s Service) Service { return &patient{p, what, s} }

type patient struct {
	p    Patience
	what string
	Service
}

func (s *patient) Start(ctx context.Context) error { return s.p.Do(ctx, s.what, s.Service.Start) }

// Running is a Service that was started before it was added to a group: its Start does nothing.
type Running struct{ *HTTPServer }

// Start does nothing.
func (Running) Start(context.Context) error { return nil }
