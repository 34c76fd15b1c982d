package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"time"
)

// silence is how long a stream may be silent before it is taken for dead. The projector says that
// it is alive every 15 s.
const silence = 50 * time.Second

// streamEvent is one server-sent event.
type streamEvent struct {
	name, id string
	data     []byte
}

// readEvent reads the next event that has data; what is in between is a sign of life.
func readEvent(in *bufio.Reader, alive func()) (e streamEvent, err error) {
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return e, err
		}
		alive()
		name, value, _ := bytes.Cut(bytes.TrimRight(line, "\r\n"), []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(name) {
		case "id":
			e.id = string(value)
		case "event":
			e.name = string(value)
		case "data":
			e.data = append(e.data, value...)
		case "":
			if len(line) <= 2 && e.data != nil { // an empty line, and not a comment
				return e, nil
			}
		}
	}
}

// stream is an answer of server-sent events that goes on over as many connections as it takes.
type stream struct {
	c       *Client
	path    string
	session string
	query   url.Values
	last    string // id to resume behind, "" while there is none
}

// errEnough ends a stream whose reader wants no more.
var errEnough = errors.New("enough")

// each calls take for every event until take or the service ends it, or ctx does. The error is
// an *Error, or nil when take answered errEnough.
func (s *stream) each(ctx context.Context, take func(streamEvent) error) error {
	for fruitless, heard := 0, time.Now(); ; {
		err := s.once(ctx, func(e streamEvent) error {
			heard = time.Now()
			if e.name != "hello" {
				fruitless = 0
			}
			return take(e)
		})
		var final *Error
		switch {
		case errors.Is(err, errEnough):
			return nil
		case errors.As(err, &final):
			return err
		case ctx.Err() != nil:
			return &Error{Code: codeCanceled, Session: s.session, Cause: context.Cause(ctx)}
		case time.Since(heard) > max(s.c.cfg.RetryBudget, 0)+silence:
			return &Error{Code: codeUnavailable, Session: s.session, Cause: err, Detail: "the stream breaks off again and again"}
		}
		wait(ctx, s.c.backoff(fruitless, 0))
		fruitless++
	}
}

// once reads one connection to its end. An *Error is final, any other error asks for another
// connection.
func (s *stream) once(ctx context.Context, take func(streamEvent) error) error {
	r := &request{base: s.c.projector, method: http.MethodGet, path: s.path, query: s.query, session: s.session, stream: true, header: http.Header{}}
	if s.last != "" {
		r.header.Set("Last-Event-ID", s.last)
	}
	a, err := s.c.do(ctx, r, nil)
	if err != nil {
		return err
	}
	defer a.stream.Close()
	dead := time.AfterFunc(silence, func() { a.stream.Close() })
	defer dead.Stop()
	in := bufio.NewReader(a.stream)
	for {
		e, err := readEvent(in, func() { dead.Reset(silence) })
		if err != nil {
			return fmt.Errorf("the connection broke: %w", err)
		}
		if e.name == "end" {
			return s.ended(e.data)
		}
		if err := take(e); err != nil {
			return err
		}
		if e.id != "" {
			s.last = e.id
		}
	}
}

// ended says whether an `end` is the stream's, or just that of a connection.
func (s *stream) ended(data []byte) error {
	var p problem
	if err := json.Unmarshal(data, &p); err != nil {
		return err
	}
	switch p.Code {
	case "stopping", "slow-watcher", "slow-reader", codeUnavailable:
		return fmt.Errorf("the service ended it: %s: %w", p.Code, io.EOF)
	}
	return &Error{Status: http.StatusOK, Title: p.Title, Detail: p.Detail, Code: p.Code, Rule: p.Rule, Session: s.session, Seq: p.Seq}
}

// malformed is the error of an event that is not one of the service.
func (s *stream) malformed(e streamEvent, err error) error {
	return &Error{Status: http.StatusOK, Code: codeBadAnswer, Session: s.session, Cause: err, Detail: fmt.Sprintf("an event cannot be read: %.200q", e.data)}
}
