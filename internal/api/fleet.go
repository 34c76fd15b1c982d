package api

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"

	"palimpsest/internal/events"
	"palimpsest/internal/projection"
)

var filterParams = []string{"state", "since", "agent", "parent"}

// filter reads which sessions are asked for. The query must have been read with filterParams.
func (q *query) filter() (f projection.FleetFilter) {
	f.State, f.Agent, f.Parent = projection.SessionState(q.Get("state")), q.Get("agent"), q.Get("parent")
	switch {
	case q.err != nil:
	case f.State != "" && f.State != projection.StateOpen && f.State != projection.StateIdle && f.State != projection.StateQuarantined:
		q.err = badRequest(fmt.Sprintf("state: expected open, idle or quarantined, found %q", short(string(f.State))))
	case q.Has("agent") && f.Agent == "":
		q.err = badRequest("agent: expected the name of an agent, found nothing")
	case q.Has("parent"):
		q.err = events.CheckSessionID(f.Parent)
	}
	if q.err == nil && q.Has("since") {
		var err error
		if f.Since, err = projection.ParseSince(q.Get("since")); err != nil {
			q.err = badRequest(err.Error())
		}
	}
	return f
}

// sessions answers a page of the fleet: each session's state, and its header.
func (s *projectorAPI) sessions(w http.ResponseWriter, r *http.Request, _ string) error {
	q := readQuery(r, append([]string{"limit", "cursor"}, filterParams...)...)
	limit := q.limit("limit", 100, 1000)
	filter := q.filter()
	if q.err != nil {
		return q.err
	}
	after, err := base64.RawURLEncoding.DecodeString(q.Get("cursor"))
	if err != nil || len(after) > 0 && events.CheckSessionID(string(after)) != nil {
		return badRequest(fmt.Sprintf("cursor: expected the cursor of an earlier answer, found %q", short(q.Get("cursor"))))
	}
	page, err := s.cfg.Fleet.ListWhere(r.Context(), filter, string(after), limit, mine(r))
	if err != nil {
		return err
	}
	headers, err := s.headersOf(r.Context(), page.Rows)
	if err != nil {
		return err
	}
	type item struct {
		projection.FleetRow
		Header json.RawMessage `json:"header"`
	}
	out := struct {
		Sessions []item `json:"sessions"`
		Cursor   string `json:"cursor,omitempty"`
	}{Sessions: []item{}, Cursor: base64.RawURLEncoding.EncodeToString([]byte(page.Cursor))}
	for i, row := range page.Rows {
		if headers[i] != nil {
			out.Sessions = append(out.Sessions, item{row, headers[i].Raw})
		}
	}
	return writeJSON(w, http.StatusOK, out)
}

// headerReads is how many headers of a page are read at the same time.
const headerReads = 16

// headersOf reads the headers of some sessions; one that is not there is nil.
func (s *projectorAPI) headersOf(ctx context.Context, rows []projection.FleetRow) ([]*events.Header, error) {
	out := make([]*events.Header, len(rows))
	errs := make([]error, len(rows))
	var wg sync.WaitGroup
	for first := range min(headerReads, len(rows)) {
		wg.Go(func() {
			for i := first; i < len(rows); i += headerReads {
				h, err := s.r.Headers().Get(ctx, rows[i].Session)
				if errors.Is(err, events.ErrSessionNotFound) {
					continue
				}
				if out[i], errs[i] = h, err; err != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	return out, errors.Join(errs...)
}

// feed answers with server-sent events: a `session` for each session whose head changed, its
// id the head's revision; at the end an `end` that says why.
func (s *projectorAPI) feed(w http.ResponseWriter, r *http.Request, _ string) error {
	q := readQuery(r, append([]string{"from"}, filterParams...)...)
	filter := q.filter()
	from := uint64(q.seq("from", 0))
	if q.err != nil {
		return q.err
	}
	if last := r.Header.Get("Last-Event-ID"); last != "" {
		var err error
		if from, err = strconv.ParseUint(last, 10, 64); err != nil {
			return badRequest(fmt.Sprintf("Last-Event-ID: expected the id of an event of this feed, found %q", short(last)))
		}
	}
	feed, reset, err := s.cfg.Fleet.Feed(r.Context(), filter, from)
	if err != nil {
		return err
	}
	out := startSSE(w, r)
	if out == nil {
		return nil
	}
	hello := map[string]any{"from": from, "newest": feed.Newest()}
	if reset {
		hello["from"], hello["reset"] = 0, true
	}
	write := func(b []byte, c projection.FeedChange) []byte {
		id := ""
		if c.Revised {
			id = strconv.FormatUint(c.Rev, 10)
		}
		return appendSSE(b, "session", id, c)
	}
	text := appendSSE(nil, "hello", "", hello)
	for _, c := range feed.Aside() {
		text = write(text, c)
	}
	if out.send(text) != nil {
		return nil // the reader is gone
	}
	follow(r.Context(), out, feed.Next, write, func(ctx context.Context, err error) any {
		switch {
		case ctx.Err() != nil:
			return stopping(ctx)
		case errors.Is(err, projection.ErrFeedBehind):
			return endWith("slow-reader", "The reader of the feed did not keep up", err)
		}
		return ProblemOf(err)
	})
	return nil
}
