package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"palimpsest/internal/events"
)

const (
	// sseWrite bounds how long one piece may take to reach a client.
	sseWrite = 10 * time.Second
	// ssePiece is how many bytes of events are written at once, about.
	ssePiece = 64 << 10
	// sseBeat is how often a silent answer says that it is alive.
	sseBeat = 15 * time.Second
)

// sse is an answer of server-sent events.
type sse struct {
	w   http.ResponseWriter
	out *http.ResponseController
}

// startSSE begins the answer. To a HEAD request that is all there is to say: nil.
func startSSE(w http.ResponseWriter, r *http.Request) *sse {
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	if r.Method == http.MethodHead {
		return nil
	}
	return &sse{w, http.NewResponseController(w)}
}

// send writes a text at once. An error says that the client is gone, or does not read.
func (s *sse) send(text []byte) error {
	if len(text) == 0 {
		return nil
	}
	if err := s.out.SetWriteDeadline(time.Now().Add(sseWrite)); err != nil {
		return err
	}
	if _, err := s.w.Write(text); err != nil {
		return err
	}
	return s.out.Flush()
}

// follow writes what next gives, each item as the event that write appends for it, until next
// ends with an error; the answer then ends with an `end` that says why.
func follow[T any](ctx context.Context, s *sse, next func(context.Context) ([]T, error), write func([]byte, T) []byte, why func(context.Context, error) any) {
	text := make([]byte, 0, ssePiece)
	for {
		beat, cancel := context.WithTimeout(ctx, sseBeat)
		items, err := next(beat)
		silent := beat.Err() != nil && ctx.Err() == nil
		cancel()
		text = text[:0]
		switch {
		case err == nil:
			for _, it := range items {
				if len(text) > ssePiece { // one commit may hold very many
					if s.send(text) != nil {
						return // the client is gone
					}
					text = text[:0]
				}
				text = write(text, it)
			}
		case silent:
			text = append(text, ": alive\n\n"...)
		default:
			_ = s.send(appendSSE(text, "end", "", why(ctx, err))) // the client may be gone
			return
		}
		if s.send(text) != nil {
			return // the client is gone
		}
	}
}

// appendSSE appends a server-sent event; without an id it leaves the client's last one as it is.
func appendSSE(b []byte, name, id string, data any) []byte {
	text, err := json.Marshal(data)
	if err != nil {
		panic(err) // deltas, rows and problems always encode
	}
	if id != "" {
		b = fmt.Appendf(b, "id: %s\n", id)
	}
	return fmt.Appendf(b, "event: %s\ndata: %s\n\n", name, text)
}

// stopping is the end of an answer whose server stops.
func stopping(ctx context.Context) any {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) { // nothing else puts an end to a stream at a point in time
		return map[string]string{"code": "token-expired", "detail": "the token of this request has expired; resume with Last-Event-ID and another one"}
	}
	return map[string]string{"code": "stopping", "detail": "the server is stopping; resume with Last-Event-ID"}
}

// endWith is the end of an answer for a reason that no other answer has.
func endWith(code, title string, err error) Problem {
	return Problem{Type: "urn:palimpsest:problem:" + code, Title: title, Status: http.StatusServiceUnavailable, Code: events.Code(code), Detail: err.Error()}
}
