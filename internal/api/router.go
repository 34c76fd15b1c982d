package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"palimpsest/internal/events"
)

// handler answers a request; an error becomes a problem, unless the answer has begun.
type handler func(w http.ResponseWriter, r *http.Request, session string) error

// router finds the handler of a path. Unlike http.ServeMux it never redirects, so that a
// session id such as ".." gets an answer of its own.
type router struct {
	routes map[string]map[string]handler // path with {id} for the session → method → handler
	log    *slog.Logger
}

func newRouter(log *slog.Logger) *router {
	return &router{routes: map[string]map[string]handler{}, log: log}
}

// handle adds a route.
func (rt *router) handle(method, path string, h handler) {
	if rt.routes[path] == nil {
		rt.routes[path] = map[string]handler{}
	}
	rt.routes[path][method] = h
}

const sessionsPath = "/v1/sessions/"

// ServeHTTP dispatches a request. A panic in a handler is a bug: it is logged and answered as
// an internal error, and the program goes on.
func (rt *router) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	started := &startedWriter{ResponseWriter: w}
	defer func() {
		if p := recover(); p != nil {
			if p == http.ErrAbortHandler {
				panic(p)
			}
			rt.log.ErrorContext(r.Context(), "panic in a handler", "method", r.Method, "path", r.URL.EscapedPath(), "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			if !started.started {
				writeProblem(w, &events.Error{Code: events.CodeInternal, Detail: "the server made a mistake; it is in its log"})
			}
		}
	}()
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if r.ContentLength != 0 && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
		// Nobody would read that body, and waiting for its end has no bound.
		w.Header().Set("Connection", "close")
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Second))
		writeProblem(w, badRequest("a "+r.Method+" has no body here; leave it out"))
		return
	}
	err := whenEnded(r.Context(), rt.dispatch(started, r))
	switch {
	case err == nil:
	case started.started:
		// Half an answer must not look like a whole one.
		rt.log.WarnContext(r.Context(), "answer broken off", "method", r.Method, "path", r.URL.EscapedPath(), "err", err)
		panic(http.ErrAbortHandler)
	default:
		if p := ProblemOf(err); p.Status >= 500 {
			rt.log.WarnContext(r.Context(), "request failed", "method", r.Method, "path", r.URL.EscapedPath(), "status", p.Status, "err", err)
		}
		writeProblem(w, err)
	}
}

// whenEnded is the error of a request whose context has ended: the program stops, or the client is gone
// and nobody reads it.
func whenEnded(ctx context.Context, err error) error {
	if err == nil || ctx.Err() == nil {
		return err
	}
	if e := (*events.Error)(nil); errors.As(err, &e) {
		return err
	}
	return &events.Error{Code: events.CodeUnavailable, Cause: err, Detail: "the server is stopping; try again"}
}

// splitPath returns a request's path, with {id} in the place of a session's id, and that id.
func splitPath(r *http.Request) (path, session string, err error) {
	path = r.URL.EscapedPath()
	if rest, ok := strings.CutPrefix(path, sessionsPath); ok {
		id, tail, more := strings.Cut(rest, "/")
		if session, err = url.PathUnescape(id); err != nil {
			return "", "", badRequest("session id: " + err.Error())
		}
		path = sessionsPath + "{id}"
		if more {
			path += "/" + tail
		}
		if err := events.CheckSessionID(session); err != nil {
			return "", "", err
		}
	}
	return path, session, nil
}

// has reports whether there is a handler.
func (rt *router) has(method, path string) bool {
	if method == http.MethodHead {
		method = http.MethodGet
	}
	return rt.routes[path][method] != nil
}

func (rt *router) dispatch(w http.ResponseWriter, r *http.Request) error {
	path, session, err := splitPath(r)
	if err != nil {
		return err
	}
	methods, ok := rt.routes[path]
	if !ok {
		return &events.Error{Code: events.CodeNotFound, Detail: fmt.Sprintf("there is nothing at %s", r.URL.EscapedPath())}
	}
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	h, ok := methods[method]
	if !ok {
		allowed := slices.Sorted(maps.Keys(methods))
		if methods[http.MethodGet] != nil {
			allowed = append(allowed, http.MethodHead)
		}
		w.Header().Set("Allow", strings.Join(allowed, ", "))
		return &events.Error{Code: events.CodeMethod, Detail: fmt.Sprintf("%s is not allowed here; expected %s", r.Method, strings.Join(allowed, " or "))}
	}
	return h(w, r, session)
}

// Answers that go on beyond the server's own write timeout move their deadline: a client that
// reads on is served to the end, one that stopped reading is cut off.
const (
	writeTime  = 60 * time.Second // for a piece
	writePiece = 64 << 10         // bytes
)

// startedWriter notes whether an answer has begun, and gives a long one the time it needs.
type startedWriter struct {
	http.ResponseWriter
	started bool
	piece   int // bytes since the deadline was set last
}

func (w *startedWriter) WriteHeader(status int) {
	w.started = true
	w.ResponseWriter.WriteHeader(status)
}

func (w *startedWriter) Write(b []byte) (int, error) {
	if w.piece += len(b); w.piece >= writePiece || !w.started {
		w.piece = 0
		_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(writeTime)) // fails in tests without a connection
	}
	w.started = true
	return w.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController reach the connection.
func (w *startedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// writeJSON answers with a JSON value. Messages in it keep their tokens.
func writeJSON(w http.ResponseWriter, status int, v any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v) // the client may be gone
	return nil
}

// writeBody answers with a JSON text that is complete already.
func writeBody(w http.ResponseWriter, contentType string, b []byte) error {
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(http.StatusOK)
	_, _ = w.Write(b) // the client may be gone
	return nil
}

// query reads parameters and refuses those that a route does not know.
type query struct {
	url.Values
	err error
}

func readQuery(r *http.Request, known ...string) *query {
	v, err := url.ParseQuery(r.URL.RawQuery)
	q := &query{Values: v}
	if err != nil {
		q.err = badRequest("query: " + err.Error())
		return q
	}
	for k := range v {
		found := false
		for _, n := range known {
			found = found || n == k
		}
		if !found {
			expected := strings.Join(known, ", ")
			if expected == "" {
				expected = "none here"
			}
			q.err = badRequest(fmt.Sprintf("unknown parameter %q; expected %s", short(k), expected))
		} else if len(v[k]) > 1 {
			q.err = badRequest(fmt.Sprintf("query parameter %q is given twice", k))
		}
	}
	return q
}

// seq reads a seq; def when it is absent.
func (q *query) seq(name string, def events.Seq) events.Seq {
	if q.err != nil || !q.Has(name) {
		return def
	}
	n, ok := events.ParseSeq(q.Get(name))
	if !ok {
		q.err = badRequest(fmt.Sprintf("%s: expected an integer from 0 to 2^53-1, found %q", name, short(q.Get(name))))
	}
	return n
}

// seqOrStart reads a seq, or -1 for what lies before the first one, as when it is absent.
func (q *query) seqOrStart(name, start string) events.Seq {
	if q.Get(name) == events.NoSeq.String() {
		return events.NoSeq
	}
	before := q.err
	n := q.seq(name, events.NoSeq)
	if before == nil && q.err != nil {
		q.err = badRequest(fmt.Sprintf("%s: expected an integer from 0 to 2^53-1, or -1 for %s, found %q", name, start, short(q.Get(name))))
	}
	return n
}

// limit reads a count from 1 to most; def when it is absent.
func (q *query) limit(name string, def, most int) int {
	n := q.seq(name, events.Seq(def))
	if q.err == nil && (n < 1 || n > events.Seq(most)) {
		q.err = badRequest(fmt.Sprintf("%s: expected a count from 1 to %d, found %d", name, most, n))
	}
	return int(n)
}

// flag reads a boolean; false when it is absent.
func (q *query) flag(name string) bool {
	switch v := q.Get(name); {
	case q.err != nil || !q.Has(name) || v == "false":
	case v == "true":
		return true
	default:
		q.err = badRequest(fmt.Sprintf("%s: expected true or false, found %q", name, v))
	}
	return false
}
