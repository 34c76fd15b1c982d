package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"mime"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"palimpsest/internal/appender"
	"palimpsest/internal/auth"
	"palimpsest/internal/events"
)

// AppenderConfig is the appender's HTTP side.
type AppenderConfig struct {
	// MaxBody is the largest request body in bytes. Defaults to 8 MiB.
	MaxBody int64
	// BodyTime is how long a client may take to send a request body. Defaults to 60 s.
	BodyTime time.Duration
	// Edge is what stands before the API. Defaults to nil: everybody may do everything.
	Edge *Edge
	// Registry takes the program's metrics. Defaults to one of its own.
	Registry *prometheus.Registry
	// Ready says why requests cannot be served at the moment, nil when they can.
	Ready func(context.Context) error
	// Logger hears of failed requests. Defaults to slog.Default().
	Logger *slog.Logger
}

// NewAppender returns the handler of the appender's API.
func NewAppender(a *appender.Appender, cfg AppenderConfig) http.Handler {
	cfg = cfg.withDefaults()
	o := &appends{a}
	rt := newRouter(cfg.Logger)
	for _, op := range o.operations() {
		rt.handle(op.method, op.path, overHTTP(op, cfg))
	}
	health(rt, cfg.Ready)
	rt.handle("GET", "/metrics", appenderMetrics(a, cfg.Registry, cfg.Edge))
	return cfg.Edge.around(rt)
}

func (c AppenderConfig) withDefaults() AppenderConfig {
	if c.MaxBody == 0 {
		c.MaxBody = 8 << 20
	}
	if c.BodyTime == 0 {
		c.BodyTime = time.Minute
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// health adds the probes: alive, and able to serve.
func health(rt *router, ready func(context.Context) error) {
	rt.handle("GET", "/healthz", func(w http.ResponseWriter, r *http.Request, _ string) error {
		return writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	})
	rt.handle("GET", "/readyz", func(w http.ResponseWriter, r *http.Request, _ string) error {
		if ready != nil {
			if err := ready(r.Context()); err != nil {
				return &events.Error{Code: events.CodeUnavailable, Cause: err, Detail: "not ready: " + err.Error()}
			}
		}
		return writeJSON(w, http.StatusOK, map[string]string{"status": "ok"})
	})
}

// overHTTP makes an operation a handler.
func overHTTP(op operation, cfg AppenderConfig) handler {
	return func(w http.ResponseWriter, r *http.Request, session string) error {
		in := &input{session: session, header: r.Header.Get, query: readQuery(r, op.params...)}
		if in.query.err != nil {
			return in.query.err
		}
		if err := checkHeaders(r.Header); err != nil {
			return err
		}
		if cfg.Edge.asks() {
			in.caller = auth.From(r.Context())
		}
		if op.types != nil {
			given := r.Header.Get("Content-Type")
			if r.ContentLength == 0 { // nothing is of any type; curl -d '' says that it is a form
				given = ""
			}
			var err error
			if in.contentType, err = contentType(given, op.types); err != nil {
				return err
			}
			if err := plain(w, r); err != nil {
				return err
			}
			if in.body, err = readBody(w, r, cfg.MaxBody, cfg.BodyTime); err != nil {
				return err
			}
		}
		out, err := op.do(r.Context(), in)
		if err != nil {
			return err
		}
		if out.etag != "" {
			w.Header().Set("ETag", out.etag)
		}
		if out.status == http.StatusCreated && out.location != "" {
			w.Header().Set("Location", out.location)
		}
		return writeJSON(w, out.status, out.body)
	}
}

// announced is how many bytes of a request body get memory before they come.
const announced = 256 << 10

// readBody reads a request body up to the limit. One that says that it is larger is refused
// before it is read.
func readBody(w http.ResponseWriter, r *http.Request, most int64, within time.Duration) ([]byte, error) {
	tooLarge := func(found string) error {
		w.Header().Set("Connection", "close") // the rest of the body is not worth reading
		return &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("request body: expected at most %d bytes, found %s; split the append", most, found)}
	}
	if r.ContentLength > most {
		return nil, tooLarge(fmt.Sprint(r.ContentLength))
	}
	// A client that stalls must hold neither a connection for ever nor the program's end up.
	rc := http.NewResponseController(w)
	if err := rc.SetReadDeadline(time.Now().Add(within)); err != nil {
		return nil, err
	}
	defer context.AfterFunc(r.Context(), func() { _ = rc.SetReadDeadline(time.Now()) })() // fails when the connection is gone
	// What the client announces is believed up to a point: a body need not come.
	b := bytes.NewBuffer(make([]byte, 0, max(0, min(r.ContentLength, announced))+bytes.MinRead))
	_, err := b.ReadFrom(http.MaxBytesReader(w, r.Body, most))
	if err == nil {
		err = rc.SetReadDeadline(time.Time{})
	}
	var max *http.MaxBytesError
	switch {
	case err != nil && r.Context().Err() != nil && !errors.Is(context.Cause(r.Context()), context.Canceled):
		return nil, err // the program stops; a body that breaks off cancels the request too
	case errors.As(err, &max):
		return nil, tooLarge("more")
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, badRequest(fmt.Sprintf("request body: expected within %v, found %d bytes by then", within, b.Len()))
	case err != nil:
		return nil, badRequest("request body: " + err.Error())
	}
	return b.Bytes(), nil
}

// plain refuses a body in an encoding: what it would unpack to has no bound.
func plain(w http.ResponseWriter, r *http.Request) error {
	given := r.Header.Values("Content-Encoding")
	if err := identity(given...); err != nil {
		w.Header().Set("Accept-Encoding", "identity") // what would be taken
		return err
	}
	return nil
}

func identity(encodings ...string) error {
	for _, given := range encodings {
		if given != "" && !strings.EqualFold(given, "identity") {
			return &events.Error{Code: events.CodeMediaType, Detail: fmt.Sprintf("Content-Encoding: expected none, or identity, found %q; send the body as it is", short(given))}
		}
	}
	return nil
}

// contentType checks a Content-Type against those that an operation takes. None at all is JSON.
func contentType(ct string, accepted []string) (string, error) {
	if ct == "" {
		return typeJSON, nil
	}
	if slices.Contains(accepted, ct) {
		return ct, nil
	}
	refuse := func(format string, args ...any) error {
		return &events.Error{Code: events.CodeMediaType, Detail: "Content-Type: " + fmt.Sprintf(format, args...)}
	}
	mt, params, err := mime.ParseMediaType(ct)
	if err != nil {
		return "", refuse("%q: %v", ct, err)
	}
	if cs := params["charset"]; cs != "" && !strings.EqualFold(cs, "utf-8") {
		return "", refuse("expected charset utf-8, found %q", cs)
	}
	if !slices.Contains(accepted, mt) {
		hint := ""
		if mt == "application/x-www-form-urlencoded" {
			hint = " (curl -d sends that; use curl --json)"
		}
		return "", refuse("expected %s, found %s%s", strings.Join(accepted, " or "), mt, hint)
	}
	return mt, nil
}
