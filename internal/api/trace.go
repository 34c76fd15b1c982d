package api

import (
	"net/http"
)

// trace makes a span of every request but probes and scrapes.
func (e *Edge) trace(rt *router, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, session, err := splitPath(r)
		if err != nil || !rt.has(r.Method, path) {
			path, session = "(none)", "" // a path that anybody makes up is no name for a span
		}
		if path == "/healthz" || path == "/readyz" || path == "/metrics" {
			next.ServeHTTP(w, r)
			return
		}
		r, end := e.Telemetry.Request(r, path, session)
		counted := &countedWriter{ResponseWriter: w, status: http.StatusOK}
		defer func() { end(counted.status) }() // also when the answer breaks off, which panics
		next.ServeHTTP(counted, r)
	})
}
