package api

import (
	"fmt"
	"net/http"

	"palimpsest/internal/audit"
	"palimpsest/internal/events"
)

// historyRoutes adds what package audit tells of a session's past.
func (s *projectorAPI) historyRoutes(rt *router) {
	rt.handle("GET", "/v1/sessions/{id}/explain", s.explain)
	rt.handle("GET", "/v1/sessions/{id}/diff", s.diff)
	rt.handle("GET", "/v1/sessions/{id}/blame", s.blame)
	rt.handle("GET", "/v1/sessions/{id}/usage", s.usage)
	rt.handle("GET", "/v1/usage", s.fleetUsage)
}

// must reads a seq that the request has to give.
func (q *query) must(name string) events.Seq {
	n := q.seq(name, events.NoSeq)
	if q.err == nil && n == events.NoSeq {
		q.err = badRequest(fmt.Sprintf("%s: expected a seq, found none", name))
	}
	return n
}

func (s *projectorAPI) explain(w http.ResponseWriter, r *http.Request, id string) error {
	q := readQuery(r, "seq", "limit")
	seq, limit := q.must("seq"), q.limit("limit", audit.MostOrigins, audit.MostOrigins)
	if q.err != nil {
		return q.err
	}
	x, err := s.a.Explain(r.Context(), id, seq, limit)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, x)
}

func (s *projectorAPI) diff(w http.ResponseWriter, r *http.Request, id string) error {
	q := readQuery(r, "from", "to")
	from := q.seqOrStart("from", "the empty surface")
	if !q.Has("from") {
		from = q.must("from")
	}
	to := q.must("to")
	if q.err != nil {
		return q.err
	}
	d, err := s.a.Diff(r.Context(), id, from, to)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, d)
}

func (s *projectorAPI) blame(w http.ResponseWriter, r *http.Request, id string) error {
	q := readQuery(r, "text")
	if q.err != nil {
		return q.err
	}
	b, err := s.a.Blame(r.Context(), id, q.Get("text"))
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, b)
}

func (s *projectorAPI) usage(w http.ResponseWriter, r *http.Request, id string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	u, err := s.a.Usage(r.Context(), id)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, u)
}

func (s *projectorAPI) fleetUsage(w http.ResponseWriter, r *http.Request, _ string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	u, err := s.a.Fleet(r.Context())
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, u)
}
