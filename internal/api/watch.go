package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"palimpsest/internal/events"
	"palimpsest/internal/projection"
)

const (
	// watchWrite bounds how long one delta may take to reach a watcher.
	watchWrite = 10 * time.Second
	// watchPiece is how many bytes of deltas are written at once.
	watchPiece = 64 << 10
	// watchBeat is how often a silent watch says that it is alive.
	watchBeat = 15 * time.Second
)

// watch answers with server-sent events: one `delta` for each change of the surface, its id the
// seq; at the end an `end` that says why. It resumes with Last-Event-ID or from=.
func (s *projectorAPI) watch(w http.ResponseWriter, r *http.Request, id string) error {
	q := readQuery(r, "from")
	from := events.NoSeq // from=-1 asks for everything
	if q.Get("from") != from.String() {
		from = q.seq("from", from)
	}
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
		v, err := s.r.View(r.Context(), id, projection.Want{MinSeq: events.NoSeq, Timeout: s.cfg.WaitDefault})
		if err != nil {
			return err
		}
		from = v.Last()
	}
	watch, err := s.hubs.Watch(r.Context(), id, from)
	if err != nil {
		return err
	}
	defer watch.Close()
	out := http.NewResponseController(w)
	send := func(text string) error {
		if err := out.SetWriteDeadline(time.Now().Add(watchWrite)); err != nil {
			return err
		}
		if _, err := io.WriteString(w, text); err != nil {
			return err
		}
		return out.Flush()
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return nil
	}
	// The hello has an id: a watcher that is cut off before the first delta resumes behind it.
	text := sseEvent("hello", from.String(), map[string]any{"session": id, "from": from})
	for {
		if err := send(text); err != nil {
			return nil // the watcher is gone
		}
		ctx, cancel := context.WithTimeout(r.Context(), watchBeat)
		ds, err := watch.Next(ctx)
		beat := ctx.Err() != nil && r.Context().Err() == nil
		cancel()
		switch {
		case err == nil:
			var b strings.Builder
			for _, d := range ds {
				if b.Len() > watchPiece { // one commit may hold very many
					if err := send(b.String()); err != nil {
						return nil // the watcher is gone
					}
					b.Reset()
				}
				b.WriteString(sseEvent("delta", d.Seq.String(), d))
			}
			text = b.String()
		case beat:
			text = ": alive\n\n"
		default:
			_ = send(sseEvent("end", "", endOf(r.Context(), err))) // the watcher may be gone
			return nil
		}
	}
}

// sseEvent writes a server-sent event.
func sseEvent(name, id string, data any) string {
	b, err := json.Marshal(data)
	if err != nil {
		panic(err) // deltas and problems always encode
	}
	if id != "" {
		id = "id: " + id + "\n"
	}
	return fmt.Sprintf("%sevent: %s\ndata: %s\n\n", id, name, b)
}

// endOf says why a watch ends.
func endOf(ctx context.Context, err error) any {
	if ctx.Err() != nil {
		return map[string]string{"code": "stopping", "detail": "the server is stopping; resume with Last-Event-ID"}
	}
	if errors.Is(err, projection.ErrSlow) {
		return Problem{Type: "urn:palimpsest:problem:slow-watcher", Title: "The watcher did not keep up", Status: http.StatusServiceUnavailable, Code: "slow-watcher", Detail: err.Error()}
	}
	return ProblemOf(err)
}
