package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"time"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// errUnknown says that nobody knows whether a call was carried out.
var errUnknown = errors.New("outcome unknown")

// call is one request to a program.
type call struct {
	what   string // as it is counted
	client *harness.Client
	method string
	path   string
	body   []byte
	// safe says that sending it again is harmless, since the service recognises it or it
	// changes nothing the second time.
	safe    bool
	options []harness.Option
}

// result is what became of a call.
type result struct {
	harness.Answer
	problem *harness.Problem // why it was refused
	// lost says that an attempt had no answer, so that it may have been carried out besides.
	lost bool
}

// do sends a call as a good client does: again after an answer that says that nothing was
// done, with growing pauses, and again after no answer at all when that is safe.
func (s *soak) do(ctx context.Context, c call) (r result, err error) {
	whole := ctx
	ctx, cancel := context.WithTimeout(whole, callTime)
	defer cancel()
	s.Add("calls", 1)
	s.Add("call: "+c.what, 1)
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		r.Answer, err = c.client.Do(ctx, c.method, c.path, c.body, c.options...)
		switch {
		case err != nil && !load.Unsent(err):
			s.Add("answers lost", 1)
			r.lost = true
			if !c.safe {
				return r, errUnknown
			}
		case err != nil: // nobody listens
		case r.Status/100 == 2:
			return r, nil
		default:
			p, err := r.Problem()
			if err != nil {
				s.Finding("%s: %s %s: %v", c.what, c.method, c.path, err)
				return r, errUnknown
			}
			switch {
			case p.Code == "outcome-unknown":
				s.Add("answers outcome-unknown", 1)
				r.lost = true
				if !c.safe {
					return r, errUnknown
				}
			case p.Status == http.StatusTooManyRequests, p.Status == http.StatusServiceUnavailable, p.Code == "not-yet-projected":
				s.Add("answers "+p.Code, 1)
			case p.Status >= 500:
				s.Finding("%s: %s %s: %d %s: %s", c.what, c.method, c.path, p.Status, p.Code, p.Detail)
				fallthrough
			default:
				s.Add("refused: "+p.Code, 1)
				r.problem = &p
				return r, nil
			}
		}
		s.Add("retries", 1)
		if !load.Wait(ctx, pause/2+rand.N(pause)) {
			if whole.Err() != nil { // the soak was interrupted
				return r, errUnknown
			}
			s.Finding("%s: %s %s was not answered within %v", c.what, c.method, c.path, callTime)
			return r, errUnknown
		}
	}
}

// decode reads an answer; one that cannot be read is a finding.
func (s *soak) decode(r result, into any) bool {
	if err := json.Unmarshal(r.Body, into); err != nil {
		s.Finding("answer %.200s: %v", r.Body, err)
		return false
	}
	return true
}

// tail reads a session's events from a seq on, from the log.
func (s *soak) tail(ctx context.Context, session string, from int64) ([]harness.Event, error) {
	var out []harness.Event
	for {
		r, err := s.do(ctx, call{what: "events", client: s.fleet.reads, method: "GET", path: harness.SessionPath(session, "/events"), safe: true,
			options: []harness.Option{harness.Query("from", fmt.Sprint(from))}})
		if err != nil {
			return nil, err
		}
		if r.problem != nil {
			return nil, fmt.Errorf("events of %s: %s: %s", session, r.problem.Code, r.problem.Detail)
		}
		var page harness.EventPage
		if !s.decode(r, &page) {
			return nil, errUnknown
		}
		for _, line := range page.Events {
			e, err := harness.ParseEvent(line)
			if err != nil {
				return nil, fmt.Errorf("events of %s: %.200s: %w", session, line, err)
			}
			out = append(out, e)
		}
		if page.Next == nil {
			return out, nil
		}
		from = *page.Next
	}
}
