package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"palimpsest/internal/auth"
	"palimpsest/internal/events"
	"palimpsest/internal/telemetry"
)

// Edge is what stands between callers and an API: who they are, how much they may ask, what
// they may do, and what is noted of it. A nil Edge lets everybody do everything.
type Edge struct {
	// Auth recognises callers. nil: nobody is asked, and nothing is refused.
	Auth *auth.Authenticator
	// OpenMetrics lets everybody read /metrics. Without it any recognised caller may.
	OpenMetrics bool
	// Rate is how many requests a second one caller may send, and Burst how many at once, where
	// the caller's own credential says nothing else. 0 is no limit. They need Auth.
	Rate  float64
	Burst int
	// Access takes a record of every read. nil: none are made.
	Access *AccessLog
	// Telemetry measures requests and makes spans of them. nil: none.
	Telemetry *telemetry.Telemetry
	// Logger hears of refusals. Defaults to slog.Default().
	Logger *slog.Logger

	stats struct{ unauthenticated, forbidden, limited atomic.Int64 }

	mu       sync.Mutex // guards limiters
	limiters map[string]*rate.Limiter
}

// maxLimiters bounds the callers whose rate is remembered.
const maxLimiters = 10000

// around puts the decorators around a router. This is their order, outermost first: spans see
// refusals; who a caller is comes before what they may; what is refused is not recorded as a read.
func (e *Edge) around(rt *router) http.Handler {
	if e == nil {
		return rt
	}
	if e.Logger == nil {
		e.Logger = slog.Default()
	}
	e.limiters = map[string]*rate.Limiter{}
	var h http.Handler = rt
	if e.Access != nil {
		h = e.record(rt, h)
	}
	if e.Auth != nil {
		h = e.authorise(rt, h)
		h = e.limit(h)
		h = e.authenticate(h)
	}
	if e.Telemetry != nil {
		h = e.trace(rt, h)
	}
	return h
}

// asks reports whether callers are asked who they are.
func (e *Edge) asks() bool { return e != nil && e.Auth != nil }

// open lists what everybody may ask.
func (e *Edge) open(path string) bool {
	return path == "/healthz" || path == "/readyz" || path == "/metrics" && e.OpenMetrics
}

func (e *Edge) authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if e.open(r.URL.Path) {
			next.ServeHTTP(w, r)
			return
		}
		token, err := bearer(r)
		var c *auth.Caller
		if err == nil {
			c, err = e.Auth.Authenticate(token)
		}
		if err != nil {
			e.stats.unauthenticated.Add(1)
			w.Header().Set("WWW-Authenticate", `Bearer realm="palimpsest"`)
			e.refuse(w, r, "-", &events.Error{Code: events.CodeUnauthenticated, Detail: err.Error()})
			return
		}
		ctx := auth.With(r.Context(), c)
		if !c.Expires.IsZero() && r.Method != http.MethodPost { // an append that has begun is seen through
			var cancel context.CancelFunc
			ctx, cancel = context.WithDeadline(ctx, c.Expires)
			defer cancel()
		}
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

func bearer(r *http.Request) (string, error) {
	given := r.Header.Values("Authorization")
	if len(given) == 0 {
		return "", errors.New("the Authorization header is missing; expected Authorization: Bearer <token>")
	}
	scheme, token, _ := strings.Cut(given[0], " ")
	if token = strings.TrimSpace(token); len(given) > 1 || !strings.EqualFold(scheme, "Bearer") || token == "" {
		return "", errors.New("the Authorization header is not readable; expected one, of the form Bearer <token>")
	}
	return token, nil
}

func (e *Edge) limit(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := auth.From(r.Context())
		if c != nil && !e.within(c) {
			e.stats.limited.Add(1)
			e.refuse(w, r, c.Name, &events.Error{Code: events.CodeRateLimited, Detail: "more requests than this caller may send; slow down"})
			return
		}
		next.ServeHTTP(w, r)
	})
}

// within counts a request and reports whether it is within the caller's rate.
func (e *Edge) within(c *auth.Caller) bool {
	per, burst := e.Rate, e.Burst
	if c.Rate > 0 {
		per, burst = c.Rate, c.Burst
	}
	if per <= 0 {
		return true
	}
	if burst <= 0 {
		burst = max(1, int(per))
	}
	e.mu.Lock()
	l := e.limiters[c.Name]
	if l == nil {
		if len(e.limiters) >= maxLimiters {
			for name, old := range e.limiters { // one whose bucket is full has nothing to remember
				if old.Tokens() >= float64(old.Burst()) {
					delete(e.limiters, name)
				}
			}
		}
		l = rate.NewLimiter(rate.Limit(per), burst)
		e.limiters[c.Name] = l
	}
	e.mu.Unlock()
	if l.Limit() != rate.Limit(per) || l.Burst() != burst { // the credential was reloaded
		l.SetLimit(rate.Limit(per))
		l.SetBurst(burst)
	}
	return l.Allow()
}

// right is what a call needs.
type right struct {
	scopes []auth.Scope // any of them
	on     subject
}

// subject is what a right must cover.
type subject int

const (
	onSession   subject = iota // the session in the path
	onListed                   // nothing by itself: the answer is filtered
	onBody                     // the session in the body, which the operation checks
	onAll                      // all sessions
	onAnything                 // nothing: whoever is recognised may
	sessionRoot = sessionsPath + "{id}"
)

// rights are what the calls of both programs need. What is not listed needs admin.
var rights = map[string]right{
	"POST /v1/sessions":                {[]auth.Scope{auth.Append}, onBody},
	"GET /v1/sessions":                 {[]auth.Scope{auth.Read}, onListed},
	"GET " + sessionRoot:               {[]auth.Scope{auth.Read, auth.Append}, onSession},
	"DELETE " + sessionRoot:            {[]auth.Scope{auth.Erase}, onSession},
	"POST " + sessionRoot + "/events":  {[]auth.Scope{auth.Append}, onSession},
	"POST " + sessionRoot + "/writer":  {[]auth.Scope{auth.Append}, onSession},
	"POST " + sessionRoot + "/compact": {[]auth.Scope{auth.Append}, onSession},
	"POST " + sessionRoot + "/prune":   {[]auth.Scope{auth.Append}, onSession},
	"POST " + sessionRoot + "/fork":    {[]auth.Scope{auth.Read}, onSession}, // and append to the child, in the body
	"POST " + sessionRoot + "/repair":  {[]auth.Scope{auth.Repair}, onSession},
	"POST " + sessionRoot + "/retry":   {[]auth.Scope{auth.Repair}, onSession},
	"POST " + sessionRoot + "/skip":    {[]auth.Scope{auth.Repair}, onSession},
	"POST " + sessionRoot + "/erase":   {[]auth.Scope{auth.Erase}, onSession},
	"GET /v1/feed":                     {[]auth.Scope{auth.Read}, onAll},
	"GET /v1/usage":                    {[]auth.Scope{auth.Read}, onAll},
	"GET /metrics":                     {nil, onAnything},
	"GET /healthz":                     {nil, onAnything},
	"GET /readyz":                      {nil, onAnything},
}

// rightFor finds what a call needs. Whatever answers about one session is a read of it.
func rightFor(method, path string) right {
	if method == http.MethodHead {
		method = http.MethodGet
	}
	if r, ok := rights[method+" "+path]; ok {
		return r
	}
	if method == http.MethodGet && strings.HasPrefix(path, sessionRoot+"/") {
		return right{[]auth.Scope{auth.Read}, onSession}
	}
	return right{[]auth.Scope{auth.Admin}, onAll}
}

func (e *Edge) authorise(rt *router, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := auth.From(r.Context())
		path, session, err := splitPath(r)
		// What the router refuses anyway, it refuses in its own words; they depend on no data.
		if c == nil || err != nil || !rt.has(r.Method, path) {
			next.ServeHTTP(w, r)
			return
		}
		need := rightFor(r.Method, path)
		switch need.on {
		case onSession:
			err = allow(c, session, need.scopes...)
		case onAll:
			err = allow(c, "", need.scopes...)
		}
		if err != nil {
			e.stats.forbidden.Add(1)
			e.refuse(w, r, c.Name, err)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// allow refuses a caller who has none of the scopes for a session ("": for all). It looks at
// the credential and the id alone, never at what is stored: so a refusal does not tell whether
// there is such a session.
func allow(c *auth.Caller, session string, scopes ...auth.Scope) error {
	for _, s := range scopes {
		if c.May(s, session) {
			return nil
		}
	}
	names := make([]string, len(scopes))
	for i, s := range scopes {
		names[i] = string(s)
	}
	e := &events.Error{Code: events.CodeForbidden, Session: session}
	if session == "" {
		e.Detail = fmt.Sprintf("this needs scope %s on all sessions, which your token does not have", strings.Join(names, " or "))
	} else {
		e.Detail = fmt.Sprintf("this needs scope %s on this session, which your token does not have; whether there is such a session is not said", strings.Join(names, " or "))
	}
	return e
}

// refuse answers a request that is not let through, without waiting for its body.
func (e *Edge) refuse(w http.ResponseWriter, r *http.Request, caller string, err error) {
	if r.ContentLength != 0 {
		w.Header().Set("Connection", "close") // the body is not worth reading, nor worth waiting for
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(time.Second))
	}
	e.Logger.InfoContext(r.Context(), "refused", "caller", caller, "method", r.Method, "path", r.URL.EscapedPath(), "remote", r.RemoteAddr, "err", err)
	writeProblem(w, err)
}

// actor is the name of the caller for the commit, "" when nobody was asked.
func (in *input) actor() string {
	if in.caller == nil {
		return ""
	}
	return in.caller.Name
}

// may refuses what the caller may not do to a session that the path does not name.
func (in *input) may(scope auth.Scope, session string) error {
	if in.caller == nil {
		return nil
	}
	return allow(in.caller, session, scope)
}

// mayCreate refuses a session that the caller may not append to, or whose parent they may not
// read: a header's parentSession puts the session on the parent's list of children.
func (in *input) mayCreate(id string, header []byte) error {
	if in.caller == nil {
		return nil
	}
	var parent string
	if header != nil {
		m, err := events.SplitObject(header)
		if err != nil {
			return err
		}
		if id == "" {
			if id, err = stringMember(m, "id"); err != nil {
				return err
			}
		}
		if string(m["parentSession"]) != "null" {
			if parent, err = stringMember(m, "parentSession"); err != nil {
				return err
			}
		}
	}
	if err := in.may(auth.Append, id); err != nil {
		return err
	}
	if parent != "" {
		return in.may(auth.Read, parent)
	}
	return nil
}
