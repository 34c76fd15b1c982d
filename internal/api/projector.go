package api

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"palimpsest/internal/audit"
	"palimpsest/internal/auth"
	"palimpsest/internal/events"
	"palimpsest/internal/projection"
	"palimpsest/internal/session"
)

// ProjectorConfig is the projector's HTTP side.
type ProjectorConfig struct {
	// WaitDefault is how long minSeq waits when the request names no timeout. Defaults to 5 s.
	WaitDefault time.Duration
	// WaitMost is the longest timeout that a request may ask for. Defaults to 60 s.
	WaitMost time.Duration
	// PageBytes bounds the events of one answer, in bytes of their lines. Defaults to 4 MiB.
	PageBytes int
	// BodyTime is how long a client may take to send a request body. Defaults to 60 s.
	BodyTime time.Duration
	// Fleet is the index of all sessions. Defaults to one that the first request for it fills.
	Fleet *projection.Fleet
	// Edge is what stands before the API. Defaults to nil: everybody may read everything.
	Edge *Edge
	// Registry takes the program's metrics. Defaults to one of its own.
	Registry *prometheus.Registry
	// Ready says why requests cannot be served at the moment, nil when they can.
	Ready func(context.Context) error
	// Logger hears of failed requests. Defaults to slog.Default().
	Logger *slog.Logger
}

type projectorAPI struct {
	r    *projection.Reader
	w    *projection.Worker
	a    *audit.Auditor
	hubs *projection.Hubs
	cfg  ProjectorConfig
}

// NewProjector returns the handler of the projector's API.
func NewProjector(r *projection.Reader, wk *projection.Worker, hubs *projection.Hubs, a *audit.Auditor, cfg ProjectorConfig) http.Handler {
	if cfg.WaitDefault == 0 {
		cfg.WaitDefault = 5 * time.Second
	}
	if cfg.WaitMost == 0 {
		cfg.WaitMost = time.Minute
	}
	if cfg.PageBytes == 0 {
		cfg.PageBytes = 4 << 20
	}
	if cfg.BodyTime == 0 {
		cfg.BodyTime = time.Minute
	}
	if cfg.Fleet == nil {
		cfg.Fleet = projection.NewFleet(r, projection.FleetConfig{})
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	s := &projectorAPI{r, wk, a, hubs, cfg}
	rt := newRouter(cfg.Logger)
	rt.handle("GET", "/v1/sessions", s.sessions)
	rt.handle("GET", "/v1/feed", s.feed)
	rt.handle("GET", "/v1/sessions/{id}", s.session)
	rt.handle("GET", "/v1/sessions/{id}/messages", s.messages)
	rt.handle("GET", "/v1/sessions/{id}/surface", s.surface)
	rt.handle("GET", "/v1/sessions/{id}/transcript", s.transcript)
	rt.handle("GET", "/v1/sessions/{id}/events", s.events)
	rt.handle("GET", "/v1/sessions/{id}/export", s.export)
	rt.handle("GET", "/v1/sessions/{id}/watch", s.watch)
	rt.handle("GET", "/v1/sessions/{id}/verify", s.verify)
	s.historyRoutes(rt)
	rt.handle("POST", "/v1/sessions/{id}/retry", s.retry)
	rt.handle("POST", "/v1/sessions/{id}/skip", s.skip)
	rt.handle("GET", "/v1/status", s.status)
	rt.handle("GET", "/v1/workers", s.workers)
	health(rt, cfg.Ready)
	rt.handle("GET", "/metrics", projectorMetrics(wk, r, cfg.Registry, cfg.Edge))
	return cfg.Edge.around(rt)
}

func pathEscape(id string) string { return url.PathEscape(id) }

// want reads how new an answer must be. The query must have been read with these names.
func (s *projectorAPI) want(q *query) projection.Want {
	w := projection.Want{MinSeq: q.seq("minSeq", events.NoSeq), Timeout: s.cfg.WaitDefault, Fresh: q.flag("fresh")}
	if t := q.Get("timeout"); t != "" && q.err == nil {
		d, err := time.ParseDuration(t)
		if n, nerr := strconv.Atoi(t); nerr == nil { // a bare number is seconds
			d, err = time.Duration(n)*time.Second, nil
		}
		if err != nil || d < 0 || d > s.cfg.WaitMost {
			q.err = badRequest(fmt.Sprintf("timeout: expected a duration such as 500ms or 10s up to %v, found %q", s.cfg.WaitMost, t))
		}
		w.Timeout = d
	}
	return w
}

var wantParams = []string{"minSeq", "timeout", "fresh", "at"}

// view reads the snapshot that a request asks for, and answers 304 when the client has it
// already; the view is nil then.
func (s *projectorAPI) view(w http.ResponseWriter, r *http.Request, id string, more ...string) (*projection.View, error) {
	q := readQuery(r, append(more, wantParams...)...)
	want := s.want(q)
	if q.err != nil {
		return nil, q.err
	}
	var v *projection.View
	var err error
	if at := q.seq("at", events.NoSeq); at == events.NoSeq && q.err == nil {
		v, err = s.r.View(r.Context(), id, want)
	} else if q.err != nil {
		return nil, q.err
	} else if q.Has("minSeq") || q.Has("fresh") {
		return nil, badRequest("at: expected without minSeq and fresh, which ask for something newer")
	} else {
		v, err = s.r.At(r.Context(), id, at)
	}
	if err != nil {
		return nil, err
	}
	w.Header().Set("Cache-Control", "no-cache")
	if v.Quarantine != nil { // which may end without another event
		return v, nil
	}
	etag := fmt.Sprintf(`"%d"`, v.Last())
	w.Header().Set("ETag", etag)
	if matches(r.Header.Get("If-None-Match"), etag) {
		w.WriteHeader(http.StatusNotModified)
		return nil, nil
	}
	return v, nil
}

// matches reports whether an If-None-Match names the tag.
func matches(header, etag string) bool {
	for t := range strings.SplitSeq(header, ",") {
		if t = strings.TrimSpace(t); t == "*" || strings.TrimPrefix(t, "W/") == etag {
			return true
		}
	}
	return false
}

// open begins the JSON object that view answers share.
func open(v *projection.View) []byte {
	id, _ := json.Marshal(v.ID)
	b := fmt.Appendf(nil, `{"session":%s,"seq":%d,"replaceGeneration":%d`, id, v.Last(), v.Surface.Generation())
	if v.Quarantine != nil {
		q, _ := json.Marshal(v.Quarantine)
		b = append(append(b, `,"quarantine":`...), q...)
	}
	return b
}

func (s *projectorAPI) surface(w http.ResponseWriter, r *http.Request, id string) error {
	v, err := s.view(w, r, id)
	if err != nil || v == nil {
		return err
	}
	b := append(open(v), `,"nodes":[`...)
	for i := range v.Surface.Len() {
		n := v.Surface.Node(i)
		if i > 0 {
			b = append(b, ',')
		}
		m, err := n.Message(v.Format)
		if err != nil {
			return err
		}
		b = fmt.Appendf(b, `{"seq":%d,"type":"%s","bytes":%d,"derives":%t}`, n.Seq, n.Kind.Type(), n.Size, m != nil)
	}
	return writeBody(w, "application/json", append(b, "]}\n"...))
}

// session answers what the projection knows of a session.
func (s *projectorAPI) session(w http.ResponseWriter, r *http.Request, id string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	h, err := s.r.Headers().Get(r.Context(), id)
	if err != nil {
		return err
	}
	v, err := s.r.View(r.Context(), id, projection.Want{MinSeq: events.NoSeq, Timeout: s.cfg.WaitDefault})
	if err != nil {
		return err
	}
	out := summaryOf(h, v.Summary(), v.Quarantine)
	w.Header().Set("ETag", out.etag)
	return writeJSON(w, out.status, out.body)
}

// summaryOf answers what is known of a session: to the end of its log by an appender, as far
// as it is projected by a projector.
func summaryOf(h *events.Header, sum session.Summary, q *projection.Quarantine) *output {
	return &output{status: http.StatusOK, etag: fmt.Sprintf(`"%d"`, sum.NextSeq), body: struct {
		Session string          `json:"session"`
		Header  json.RawMessage `json:"header"`
		session.Summary
		Quarantine *projection.Quarantine `json:"quarantine,omitempty"`
	}{h.ID, h.Raw, sum, q}}
}

// rangeOf reads which part of a log is asked for.
func (s *projectorAPI) rangeOf(r *http.Request, more ...string) (projection.Range, *query) {
	q := readQuery(r, append(more, "from", "to", "limit")...)
	rg := projection.Range{
		From: q.seq("from", 0), To: q.seq("to", events.MaxSeq),
		Limit: q.limit("limit", 1000, 10000), MaxBytes: s.cfg.PageBytes,
	}
	if q.err == nil && rg.From > rg.To {
		q.err = badRequest(fmt.Sprintf("from and to: expected a seq, and one that is not before it, found %d and %d", rg.From, rg.To))
	}
	return rg, q
}

// page answers a page of the log: a head, the items that each gives, and where to go on.
func (s *projectorAPI) page(w http.ResponseWriter, r *http.Request, id, name string, rg projection.Range, item func([]byte, *events.Event, events.Format) []byte) error {
	sid, _ := json.Marshal(id)
	b := fmt.Appendf(nil, `{"session":%s,"%s":[`, sid, name)
	n := 0
	next, err := s.r.Events(r.Context(), id, rg, func(e *events.Event, c *events.Commit) error {
		before := len(b)
		if n > 0 {
			b = append(b, ',')
		}
		with := len(b)
		if b = item(b, e, c.Format); len(b) == with {
			b = b[:before]
		} else {
			n++
		}
		return nil
	})
	if err != nil {
		return err
	}
	b = append(b, ']')
	if next != events.NoSeq {
		b = fmt.Appendf(b, `,"next":%d`, next)
	}
	return writeBody(w, "application/json", append(b, "}\n"...))
}

func (s *projectorAPI) transcript(w http.ResponseWriter, r *http.Request, id string) error {
	rg, q := s.rangeOf(r)
	if q.err != nil {
		return q.err
	}
	rg.Types = []string{events.TypeSystem, events.TypeUser, events.TypeAssistant, events.TypeTool, events.TypeDeveloper}
	return s.page(w, r, id, "messages", rg, func(b []byte, e *events.Event, _ events.Format) []byte {
		if e.Op.Kind != events.OpAppend {
			return b
		}
		m := e.Message()
		if m == nil {
			return b
		}
		b = fmt.Appendf(b, `{"seq":%d,"time":%d,"type":"%s","message":`, e.Seq, e.Time, e.Type)
		return append(append(b, m...), '}')
	})
}

func (s *projectorAPI) events(w http.ResponseWriter, r *http.Request, id string) error {
	rg, q := s.rangeOf(r, "type", "format")
	if t := q.Get("type"); t != "" {
		rg.Types = strings.Split(t, ",")
	}
	if q.err != nil {
		return q.err
	}
	switch f := q.Get("format"); f {
	case "", "json":
		return s.page(w, r, id, "events", rg, func(b []byte, e *events.Event, _ events.Format) []byte { return append(b, e.Line...) })
	case "cloudevents":
		b := []byte{'['}
		next, err := s.r.Events(r.Context(), id, rg, func(e *events.Event, c *events.Commit) error {
			if len(b) > 1 {
				b = append(b, ',')
			}
			b = e.AppendCloudEvent(b, id, c.Format)
			return nil
		})
		if err != nil {
			return err
		}
		if next != events.NoSeq {
			u := *r.URL
			v := u.Query()
			v.Set("from", next.String())
			u.RawQuery = v.Encode()
			w.Header().Set("Link", fmt.Sprintf(`<%s>; rel="next"`, u.RequestURI()))
		}
		return writeBody(w, "application/cloudevents-batch+json", append(b, "]\n"...))
	default:
		return badRequest(fmt.Sprintf("format: expected json or cloudevents, found %q", f))
	}
}

func (s *projectorAPI) export(w http.ResponseWriter, r *http.Request, id string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	if _, err := s.r.Headers().Get(r.Context(), id); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Content-Disposition", fmt.Sprintf(`attachment; filename="%s.jsonl"`, events.Token(id)))
	return s.r.Export(r.Context(), id, w)
}

// mine keeps the sessions that the caller may read, nil for all.
func mine(r *http.Request) func(string) bool {
	c := auth.From(r.Context())
	if c == nil {
		return nil
	}
	return func(id string) bool { return c.May(auth.Read, id) }
}

func (s *projectorAPI) verify(w http.ResponseWriter, r *http.Request, id string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	rep, err := s.a.Session(r.Context(), id, audit.Options{Wait: s.cfg.WaitDefault})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, rep)
}

func (s *projectorAPI) retry(w http.ResponseWriter, r *http.Request, id string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	if err := s.w.Retry(r.Context(), id); err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, map[string]any{"session": id, "quarantined": false})
}

// workers answers how far the whole projection is, and who works what.
func (s *projectorAPI) workers(w http.ResponseWriter, r *http.Request, _ string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	o, err := s.w.Overview(r.Context())
	if err != nil {
		return err
	}
	qs, err := s.r.Quarantined(r.Context())
	if err != nil {
		return err
	}
	if qs == nil {
		qs = []projection.Quarantine{}
	}
	return writeJSON(w, http.StatusOK, struct {
		*projection.Overview
		Quarantined []projection.Quarantine `json:"quarantined"`
	}{o, qs})
}

// status answers how far this worker's partitions are, and what stands in the way.
func (s *projectorAPI) status(w http.ResponseWriter, r *http.Request, _ string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	qs, err := s.r.Quarantined(r.Context())
	if err != nil {
		return err
	}
	ps := s.w.Status(r.Context())
	out := struct {
		Worker string `json:"worker"`
		// CaughtUp is true only when every partition of the log said so, also those of other
		// workers: nothing to read, nothing unflushed.
		CaughtUp          bool                         `json:"caughtUp"`
		Lag               *uint64                      `json:"lag"` // commits; null when a partition did not say
		OldestUnflushedMs int64                        `json:"oldestUnflushedMs"`
		Quarantined       []projection.Quarantine      `json:"quarantined"`
		Skipped           []projection.Quarantine      `json:"skipped"` // in quarantine, and left so on purpose
		Partitions        []projection.PartitionStatus `json:"partitions"`
	}{Worker: s.w.ID(), Partitions: ps}
	out.Quarantined, out.Skipped = apart(qs)
	var lag uint64
	known := true
	for _, p := range ps {
		if p.Lag == nil {
			known = false
		} else {
			lag += *p.Lag
		}
		out.OldestUnflushedMs = max(out.OldestUnflushedMs, p.OldestUnflushedMs)
	}
	if known {
		out.Lag = &lag
		out.CaughtUp = lag == 0 && out.OldestUnflushedMs == 0 && s.w.Follows(r.Context())
	}
	if out.CaughtUp && len(ps) < s.r.Journal().Partitions() {
		all, err := s.w.Overview(r.Context())
		if err != nil {
			return err
		}
		out.CaughtUp = all.CaughtUp
	}
	return writeJSON(w, http.StatusOK, out)
}
