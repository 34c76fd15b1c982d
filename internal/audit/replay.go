package audit

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"palimpsest/internal/events"
	"palimpsest/internal/projection"
)

// Max is the speed of a replay that does not wait.
const Max Speed = 0

// Speed is how fast a replay goes, as a multiple of the recorded pace; Max does not wait.
type Speed float64

// ParseSpeed reads a speed as a flag gives it: max, 1x, 2.5x.
func ParseSpeed(s string) (Speed, error) {
	if s == "max" {
		return Max, nil
	}
	n, err := strconv.ParseFloat(strings.TrimSuffix(s, "x"), 64)
	if err != nil || !strings.HasSuffix(s, "x") || !(n >= 0.001 && n <= 1e6) {
		return 0, &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("speed: expected max or a multiple from 0.001x to 1000000x, such as 1x, found %q", s)}
	}
	return Speed(n), nil
}

// Replay says which events are replayed, and how fast.
type Replay struct {
	From, To events.Seq // inclusive; To may lie beyond the end
	Speed    Speed
	// MaxGap bounds the time between two events, before speed. Defaults to no bound.
	MaxGap time.Duration
	// Wait waits for a time, or until ctx ends. Defaults to a timer.
	Wait func(context.Context, time.Duration) error
}

// Replay calls f for the events of a range, in order, at the pace at which they were recorded.
// Time that f takes is not waited for again.
func (a *Auditor) Replay(ctx context.Context, id string, r Replay, f func(*events.Event, *events.Commit) error) error {
	if r.Wait == nil {
		r.Wait = wait
	}
	began, due := time.Now(), time.Duration(0)
	var before *int64
	reader := projection.NewReader(a.log, a.headers, a.buckets, projection.NewHeads())
	_, err := reader.Events(ctx, id, projection.Range{From: r.From, To: r.To}, func(e *events.Event, c *events.Commit) error {
		if before != nil && r.Speed != Max {
			const most = 1e11                                                          // ms, three years: a sum of such stays a time.Duration for long
			gap := time.Duration(min(max(0, e.Time-*before), most)) * time.Millisecond // times may step back
			if r.MaxGap > 0 {
				gap = min(gap, r.MaxGap)
			}
			due += time.Duration(float64(gap) / float64(r.Speed))
			if left := due - time.Since(began); left > 0 {
				if err := r.Wait(ctx, left); err != nil {
					return err
				}
			}
		}
		before = &e.Time
		return f(e, c)
	})
	return err
}

func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
