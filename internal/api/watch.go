package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"palimpsest/internal/events"
	"palimpsest/internal/projection"
)

// watch answers with server-sent events: one `delta` for each change of the surface, its id the
// seq; at the end an `end` that says why. It resumes with Last-Event-ID or from=.
func (s *projectorAPI) watch(w http.ResponseWriter, r *http.Request, id string) error {
	q := readQuery(r, "from")
	from := q.seqOrStart("from", "the log's start")
	if q.err != nil {
		return q.err
	}
	if last := r.Header.Get("Last-Event-ID"); last != "" {
		n, err := strconv.ParseInt(last, 10, 64)
		if err != nil || n < int64(events.NoSeq) || n > int64(events.MaxSeq) {
			return badRequest(fmt.Sprintf("Last-Event-ID: expected the id of an event of this watch, found %q", last))
		}
		from = events.Seq(n)
	} else if !q.Has("from") {
		var err error
		if from, err = s.r.Projected(r.Context(), id, s.cfg.WaitDefault); err != nil {
			return err
		}
	}
	watch, err := s.hubs.Watch(r.Context(), id, from)
	if err != nil {
		return err
	}
	defer watch.Close()
	out := startSSE(w, r)
	if out == nil {
		return nil
	}
	// The hello has an id: a watcher that is cut off before the first delta resumes behind it.
	if out.send(appendSSE(nil, "hello", from.String(), map[string]any{"session": id, "from": from})) != nil {
		return nil // the watcher is gone
	}
	follow(r.Context(), out, watch.Next, func(b []byte, d projection.Delta) []byte { return appendSSE(b, "delta", d.Seq.String(), d) }, endOf)
	return nil
}

// endOf says why a watch ends.
func endOf(ctx context.Context, err error) any {
	switch {
	case ctx.Err() != nil:
		return stopping(ctx)
	case errors.Is(err, projection.ErrSlow):
		return endWith("slow-watcher", "The watcher did not keep up", err)
	case errors.Is(err, projection.ErrRewound):
		return endWith("log-rewound", "The log ends before what was told of it", err)
	}
	return ProblemOf(err)
}
