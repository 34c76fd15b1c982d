package api

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync/atomic"

	"palimpsest/internal/events"
)

// front stands before an API that is not there yet: until it is opened, probes say that the program
// is alive and not ready, and everything else is answered with 503.
type front struct {
	api    atomic.Pointer[http.Handler]
	why    atomic.Pointer[error]
	probes *router
}

func newFront() *front {
	f := &front{probes: newRouter(slog.Default())}
	f.waits(errors.New("the program starts"))
	health(f.probes, func(context.Context) error { return *f.why.Load() })
	return f
}

// waits notes what the start waits for.
func (f *front) waits(err error) { f.why.Store(&err) }

// open lets requests through to the API.
func (f *front) open(h http.Handler) { f.api.Store(&h) }

func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch h := f.api.Load(); {
	case h != nil:
		(*h).ServeHTTP(w, r)
	case r.URL.Path == "/healthz", r.URL.Path == "/readyz":
		f.probes.ServeHTTP(w, r)
	default: // nobody was asked who they are: what is missing is not for everybody
		writeProblem(w, &events.Error{Code: events.CodeUnavailable, Detail: "the program starts and is not ready yet; try again"})
	}
}
