package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"regexp"
	"strings"

	"github.com/nats-io/nuid"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
)

// AppenderConfig is the appender's HTTP side.
type AppenderConfig struct {
	// MaxBody is the largest request body in bytes. Defaults to 8 MiB.
	MaxBody int64
	// Ready says why requests cannot be served at the moment, nil when they can.
	Ready func(context.Context) error
	// Logger hears of failed requests. Defaults to slog.Default().
	Logger *slog.Logger
}

type appenderAPI struct {
	a   *appender.Appender
	cfg AppenderConfig
}

// NewAppender returns the handler of the appender's API.
func NewAppender(a *appender.Appender, cfg AppenderConfig) http.Handler {
	if cfg.MaxBody == 0 {
		cfg.MaxBody = 8 << 20
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	s := &appenderAPI{a, cfg}
	rt := newRouter(cfg.Logger)
	rt.handle("POST", "/v1/sessions", s.create)
	rt.handle("GET", "/v1/sessions/{id}", s.status)
	rt.handle("POST", "/v1/sessions/{id}/events", s.append)
	rt.handle("POST", "/v1/sessions/{id}/repair", s.repair)
	health(rt, cfg.Ready)
	rt.handle("GET", "/metrics", appenderMetrics(a))
	return rt
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

// readBody reads a request body up to the limit. One that says that it is larger is refused
// before it is read.
func (s *appenderAPI) readBody(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	tooLarge := func(found string) error {
		w.Header().Set("Connection", "close") // the rest of the body is not worth reading
		return &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("request body: expected at most %d bytes, found %s; split the append", s.cfg.MaxBody, found)}
	}
	if r.ContentLength > s.cfg.MaxBody {
		return nil, tooLarge(fmt.Sprint(r.ContentLength))
	}
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.cfg.MaxBody))
	var max *http.MaxBytesError
	switch {
	case errors.As(err, &max):
		return nil, tooLarge("more")
	case err != nil:
		return nil, badRequest("request body: " + err.Error())
	}
	return b, nil
}

func contentType(r *http.Request) (string, error) {
	ct := r.Header.Get("Content-Type")
	if ct == "" {
		return "application/json", nil
	}
	mt, params, err := mime.ParseMediaType(ct)
	if err != nil {
		return "", &events.Error{Code: events.CodeMediaType, Detail: fmt.Sprintf("Content-Type %q: %v", ct, err)}
	}
	if cs := params["charset"]; cs != "" && !strings.EqualFold(cs, "utf-8") {
		return "", &events.Error{Code: events.CodeMediaType, Detail: fmt.Sprintf("Content-Type: expected charset utf-8, found %q", cs)}
	}
	return mt, nil
}

func (s *appenderAPI) create(w http.ResponseWriter, r *http.Request, _ string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	ct, err := contentType(r)
	if err != nil {
		return err
	}
	if ct != "application/json" {
		return &events.Error{Code: events.CodeMediaType, Detail: fmt.Sprintf("Content-Type: expected application/json, found %s", ct)}
	}
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	id, header := "", []byte(nil)
	if len(bytes.TrimSpace(body)) > 0 {
		members, err := events.SplitObject(body)
		if err != nil {
			return err
		}
		for k, v := range members {
			switch k {
			case "id":
				if err := json.Unmarshal(v, &id); err != nil {
					return badRequest("id: expected a string")
				}
				if id == "" {
					return events.CheckSessionID("")
				}
			case "header":
				header = v
			default:
				return badRequest(fmt.Sprintf("unknown key %q; expected id and header", k))
			}
		}
	}
	if id == "" && !headerNames(header) {
		id = nuid.Next()
	}
	h, created, err := s.a.Create(r.Context(), id, header)
	if err != nil {
		return err
	}
	status := http.StatusOK
	if created {
		status = http.StatusCreated
		w.Header().Set("Location", sessionsPath+pathEscape(h.ID))
	}
	return writeJSON(w, status, struct {
		Session string          `json:"session"`
		Created bool            `json:"created"`
		Header  json.RawMessage `json:"header"`
	}{h.ID, created, h.Raw})
}

// headerNames reports whether a header carries an id of its own.
func headerNames(header []byte) bool {
	if header == nil {
		return false
	}
	m, err := events.SplitObject(header)
	return err != nil || m["id"] != nil
}

func (s *appenderAPI) status(w http.ResponseWriter, r *http.Request, id string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	st, err := s.a.Status(r.Context(), id)
	if err != nil {
		return err
	}
	return writeSummary(w, st.Header, st.Summary, nil)
}

func (s *appenderAPI) append(w http.ResponseWriter, r *http.Request, id string) error {
	q := readQuery(r, "expectedSeq")
	req := appender.Request{Session: id, Trace: traceParent(r)}
	if q.Has("expectedSeq") {
		n := q.seq("expectedSeq", 0)
		req.Expected = &n
	}
	if q.err != nil {
		return q.err
	}
	if err := expect(&req, r.Header.Get("If-Match")); err != nil {
		return err
	}
	ct, err := contentType(r)
	if err != nil {
		return err
	}
	read, ok := bodies[ct]
	if !ok {
		return &events.Error{Code: events.CodeMediaType, Detail: fmt.Sprintf("Content-Type: expected application/json, application/x-ndjson, application/cloudevents+json or application/cloudevents-batch+json, found %s", ct)}
	}
	body, err := s.readBody(w, r)
	if err != nil {
		return err
	}
	if err := read(s.a, r.Context(), &req, body); err != nil {
		var e *events.Error
		if errors.As(err, &e) && e.Session == "" {
			e.Session = id
		}
		return err
	}
	receipt, err := s.a.Append(r.Context(), req)
	if err != nil {
		return err
	}
	w.Header().Set("ETag", fmt.Sprintf(`"%d"`, receipt.LastSeq+1))
	return writeJSON(w, http.StatusCreated, receipt)
}

// expect takes the expected seq of a second place where it may stand; both must agree.
func expect(req *appender.Request, ifMatch string) error {
	if ifMatch == "" {
		return nil
	}
	n, ok := events.ParseSeq(strings.TrimSuffix(strings.TrimPrefix(ifMatch, `"`), `"`))
	if !ok || len(ifMatch) < 3 || ifMatch[0] != '"' || ifMatch[len(ifMatch)-1] != '"' {
		return badRequest(fmt.Sprintf(`If-Match: expected "<next seq>" in double quotes, found %s`, ifMatch))
	}
	return agree(&req.Expected, n, "expectedSeq and If-Match")
}

func agree(into **events.Seq, n events.Seq, what string) error {
	if *into != nil && **into != n {
		return badRequest(fmt.Sprintf("%s differ: %d and %d", what, **into, n))
	}
	*into = &n
	return nil
}

// bodies reads the events of a request, by content type.
var bodies = map[string]func(*appender.Appender, context.Context, *appender.Request, []byte) error{
	"application/json": func(_ *appender.Appender, _ context.Context, req *appender.Request, b []byte) error {
		return readJSONBody(req, b)
	},
	"application/x-ndjson": func(_ *appender.Appender, _ context.Context, req *appender.Request, b []byte) error {
		return readLines(req, b)
	},
	"application/cloudevents+json": func(a *appender.Appender, ctx context.Context, req *appender.Request, b []byte) error {
		return readCloudEvents(a, ctx, req, [][]byte{b})
	},
	"application/cloudevents-batch+json": func(a *appender.Appender, ctx context.Context, req *appender.Request, b []byte) error {
		items, err := events.SplitArray(b)
		if err != nil {
			return err
		}
		return readCloudEvents(a, ctx, req, items)
	},
}

// readJSONBody reads one event, an array of events, or {"events":[…],"expectedSeq":n}.
func readJSONBody(req *appender.Request, b []byte) error {
	b = bytes.TrimLeft(b, " \t\r\n")
	if len(b) > 0 && b[0] == '[' {
		items, err := events.SplitArray(b)
		req.Events = items
		return err
	}
	members, err := events.SplitObject(b)
	if err != nil || members["events"] == nil || members["type"] != nil {
		// What is wrong with a single event is for the one parser to say.
		req.Events = [][]byte{b}
		return nil
	}
	for k, v := range members {
		switch k {
		case "events":
			if req.Events, err = events.SplitArray(v); err != nil {
				return err
			}
		case "expectedSeq":
			n, ok := events.ParseSeq(string(v))
			if !ok {
				return badRequest("expectedSeq: expected an integer from 0 to 2^53-1")
			}
			if err := agree(&req.Expected, n, "expectedSeq of body and request"); err != nil {
				return err
			}
		default:
			return badRequest(fmt.Sprintf("unknown key %q; expected events and expectedSeq", k))
		}
	}
	return nil
}

// readLines reads one event a line; lines end at LF alone, and blank ones are skipped.
func readLines(req *appender.Request, b []byte) error {
	for len(b) > 0 {
		var line []byte
		line, b = events.CutLine(b)
		if len(bytes.TrimSpace(line)) > 0 {
			req.Events = append(req.Events, line)
		}
	}
	return nil
}

func readCloudEvents(a *appender.Appender, ctx context.Context, req *appender.Request, items [][]byte) error {
	format, err := a.Format(ctx, req.Session)
	if err != nil {
		return err
	}
	for i, it := range items {
		raw, err := events.FromCloudEvent(it, format)
		if err != nil {
			var e *events.Error
			if errors.As(err, &e) {
				e.Index = &i
			}
			return err
		}
		req.Events = append(req.Events, raw)
	}
	return nil
}

var traceParentPattern = regexp.MustCompile(`^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

// traceParent is the caller's W3C trace context, "" when it is absent or malformed.
func traceParent(r *http.Request) string {
	if t := r.Header.Get("traceparent"); traceParentPattern.MatchString(t) {
		return t
	}
	return ""
}

func (s *appenderAPI) repair(w http.ResponseWriter, r *http.Request, id string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	receipt, err := s.a.Repair(r.Context(), id, "")
	if err != nil {
		return err
	}
	if receipt == nil {
		return writeJSON(w, http.StatusOK, map[string]any{"session": id, "repaired": false})
	}
	return writeJSON(w, http.StatusCreated, struct {
		*appender.Receipt
		Repaired bool `json:"repaired"`
	}{receipt, true})
}
