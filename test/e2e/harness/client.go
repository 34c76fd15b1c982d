package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

const (
	requestLimit = 60 * time.Second
	awaitLimit   = 30 * time.Second
)

// Client talks to one program over HTTP.
type Client struct {
	Base string
	http *http.Client
}

// NewClient answers a client with connections of its own.
func NewClient(base string) *Client {
	return &Client{Base: base, http: &http.Client{
		Timeout:   requestLimit,
		Transport: &http.Transport{MaxIdleConnsPerHost: 64},
	}}
}

// Answer is a whole HTTP response.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Option changes a request before it is sent.
type Option func(*http.Request)

// With sets a header.
func With(key, value string) Option {
	return func(r *http.Request) { r.Header.Set(key, value) }
}

// ContentType says what the body is.
func ContentType(value string) Option { return With("Content-Type", value) }

// Query adds a query parameter.
func Query(key, value string) Option {
	return func(r *http.Request) {
		q := r.URL.Query()
		q.Set(key, value)
		r.URL.RawQuery = q.Encode()
	}
}

// ExpectedSeq says which seq the first event of an append must get.
func ExpectedSeq(seq int64) Option { return Query("expectedSeq", strconv.FormatInt(seq, 10)) }

// MinSeq makes a read wait until that seq is projected.
func MinSeq(seq int64) Option {
	return func(r *http.Request) {
		q := r.URL.Query()
		for key, values := range awaitQuery(seq, awaitLimit) {
			q[key] = values
		}
		r.URL.RawQuery = q.Encode()
	}
}

// SessionPath is the path of a call on a session; the id is percent-encoded,
// dots too where the id is nothing else.
func SessionPath(id, call string) string {
	escaped := url.PathEscape(id)
	if id == "." || id == ".." {
		escaped = strings.ReplaceAll(id, ".", "%2E")
	}
	return "/v1/sessions/" + escaped + call
}

// Do sends one request and reads the whole answer.
func (c *Client) Do(ctx context.Context, method, path string, body []byte, options ...Option) (Answer, error) {
	r, err := http.NewRequestWithContext(ctx, method, c.Base+path, bytes.NewReader(body))
	if err != nil {
		return Answer{}, err
	}
	if body != nil {
		r.Header.Set("Content-Type", TypeJSON)
	}
	for _, option := range options {
		option(r)
	}
	res, err := c.http.Do(r)
	if err != nil {
		return Answer{}, err
	}
	defer res.Body.Close()
	read, err := io.ReadAll(res.Body)
	if err != nil {
		return Answer{}, fmt.Errorf("%s %s: read the answer: %w", method, path, err)
	}
	return Answer{Status: res.StatusCode, Header: res.Header, Body: read}, nil
}

// Refused is the error of a call that was answered with a problem document.
type Refused struct {
	Problem Problem
	Header  http.Header
}

func (r *Refused) Error() string {
	p := r.Problem
	return fmt.Sprintf("refused: %d %s %s: %s", p.Status, p.Code, p.Rule, p.Detail)
}

// AsRefused answers the problem in err, or nil.
func AsRefused(err error) *Problem {
	var refused *Refused
	if errors.As(err, &refused) {
		return &refused.Problem
	}
	return nil
}

// Problem reads the answer as a problem document and holds it to its form.
func (a Answer) Problem() (Problem, error) {
	var p Problem
	media, _, err := mime.ParseMediaType(a.Header.Get("Content-Type"))
	if err != nil || media != TypeProblem {
		return p, fmt.Errorf("status %d with Content-Type %q, want a problem document: %.300s", a.Status, a.Header.Get("Content-Type"), a.Body)
	}
	if err := json.Unmarshal(a.Body, &p); err != nil {
		return p, fmt.Errorf("problem document %.300s: %w", a.Body, err)
	}
	switch {
	case p.Status != a.Status:
		err = fmt.Errorf("status %d in the document, %d on the wire", p.Status, a.Status)
	case p.Code == "" || p.Title == "" || p.Detail == "":
		err = errors.New("code, title and detail must be there")
	case p.Type != "urn:palimpsest:problem:"+p.Code:
		err = fmt.Errorf("type %q does not name the code %q", p.Type, p.Code)
	}
	if err != nil {
		return p, fmt.Errorf("problem document %.300s: %w", a.Body, err)
	}
	return p, nil
}

// call sends a request, decodes a 2xx answer into out, and turns any other
// into *Refused.
func (c *Client) call(ctx context.Context, out any, method, path string, body []byte, options ...Option) (Answer, error) {
	a, err := c.Do(ctx, method, path, body, options...)
	if err != nil {
		return a, err
	}
	if a.Status < 200 || a.Status > 299 {
		p, err := a.Problem()
		if err != nil {
			return a, fmt.Errorf("%s %s: %w", method, path, err)
		}
		return a, &Refused{Problem: p, Header: a.Header}
	}
	if out == nil {
		return a, nil
	}
	if err := json.Unmarshal(a.Body, out); err != nil {
		return a, fmt.Errorf("%s %s: answer %.300s: %w", method, path, a.Body, err)
	}
	return a, nil
}

// Create creates a session. A nil header leaves it to the appender.
func (c *Client) Create(ctx context.Context, id string, header json.RawMessage) (Created, int, error) {
	var created Created
	a, err := c.call(ctx, &created, http.MethodPost, "/v1/sessions", createBody(id, header))
	if err == nil && (created.Session == "" || id != "" && created.Session != id) {
		err = fmt.Errorf("create %q answered session %q", id, created.Session)
	}
	return created, a.Status, err
}

// Append appends a body and holds the receipt to its form.
func (c *Client) Append(ctx context.Context, id string, body []byte, options ...Option) (Receipt, error) {
	var r Receipt
	a, err := c.call(ctx, &r, http.MethodPost, SessionPath(id, "/events"), body, options...)
	if err != nil {
		return r, err
	}
	switch {
	case a.Status != http.StatusCreated && !(r.Duplicate && a.Status == http.StatusOK):
		err = fmt.Errorf("status %d, want 201", a.Status)
	case r.Session != id:
		err = fmt.Errorf("session %q, want %q", r.Session, id)
	case r.FirstSeq < 0 || r.LastSeq < r.FirstSeq || r.Commit == "" || len(r.Digest) != 64:
		err = errors.New("seqs, commit and digest must be there")
	}
	if err != nil {
		err = fmt.Errorf("receipt %.300s: %w", a.Body, err)
	}
	return r, err
}

// AppendEvents appends events as one array.
func (c *Client) AppendEvents(ctx context.Context, id string, events []json.RawMessage, options ...Option) (Receipt, error) {
	return c.Append(ctx, id, Array(events), options...)
}

// Array is a JSON array of raw values, byte for byte.
func Array[T ~[]byte](values []T) []byte {
	parts := make([][]byte, len(values))
	for i, v := range values {
		parts[i] = v
	}
	return fmt.Appendf(nil, "[%s]", bytes.Join(parts, []byte(",")))
}

// Repair closes an open turn.
func (c *Client) Repair(ctx context.Context, id string) error {
	_, err := c.call(ctx, nil, http.MethodPost, SessionPath(id, "/repair"), nil)
	return err
}

// Status reads a session's status; its ETag must name the next seq.
func (c *Client) Status(ctx context.Context, id string) (Status, error) {
	var s Status
	a, err := c.call(ctx, &s, http.MethodGet, SessionPath(id, ""), nil)
	if err != nil {
		return s, err
	}
	if s.Session != id || s.NextSeq == nil {
		return s, fmt.Errorf("status %.300s: session and nextSeq must be there", a.Body)
	}
	if got, want := a.Header.Get("ETag"), fmt.Sprintf(`"%d"`, *s.NextSeq); got != want {
		return s, fmt.Errorf("status of %q: ETag %s with nextSeq %d", id, got, *s.NextSeq)
	}
	return s, nil
}

// NextSeq is the seq that the session's next event will get.
func (c *Client) NextSeq(ctx context.Context, id string) (int64, error) {
	s, err := c.Status(ctx, id)
	if err != nil {
		return 0, err
	}
	return *s.NextSeq, nil
}

// Messages reads the derived messages.
func (c *Client) Messages(ctx context.Context, id string, options ...Option) (Messages, error) {
	var m Messages
	a, err := c.call(ctx, &m, http.MethodGet, SessionPath(id, "/messages"), nil, options...)
	if err == nil && (m.Session != id || m.Messages == nil) {
		err = fmt.Errorf("messages %.300s: session and messages must be there", a.Body)
	}
	m.ETag = a.Header.Get("ETag")
	return m, err
}

// Surface reads the nodes.
func (c *Client) Surface(ctx context.Context, id string, options ...Option) (SurfaceView, error) {
	var v SurfaceView
	a, err := c.call(ctx, &v, http.MethodGet, SessionPath(id, "/surface"), nil, options...)
	if err == nil && (v.Session != id || v.Nodes == nil) {
		err = fmt.Errorf("surface %.300s: session and nodes must be there", a.Body)
	}
	return v, err
}

// Transcript reads the human view.
func (c *Client) Transcript(ctx context.Context, id string, options ...Option) (Transcript, error) {
	var v Transcript
	_, err := c.call(ctx, &v, http.MethodGet, SessionPath(id, "/transcript"), nil, options...)
	return v, err
}

// EventPage reads one page of raw events.
func (c *Client) EventPage(ctx context.Context, id string, options ...Option) (EventPage, error) {
	var v EventPage
	a, err := c.call(ctx, &v, http.MethodGet, SessionPath(id, "/events"), nil, options...)
	if err == nil && (v.Session != id || v.Events == nil) {
		err = fmt.Errorf("events %.300s: session and events must be there", a.Body)
	}
	return v, err
}

// Events reads all events of a session, page by page.
func (c *Client) Events(ctx context.Context, id string) ([]Event, error) {
	var events []Event
	from := int64(0)
	for {
		page, err := c.EventPage(ctx, id, Query("from", strconv.FormatInt(from, 10)))
		if err != nil {
			return nil, err
		}
		for _, line := range page.Events {
			e, err := ParseEvent(line)
			if err != nil {
				return nil, fmt.Errorf("event %.200s: %w", line, err)
			}
			events = append(events, e)
		}
		if page.Next == nil {
			return events, nil
		}
		if *page.Next <= from {
			return nil, fmt.Errorf("events of %q: the page from %d says next %d", id, from, *page.Next)
		}
		from = *page.Next
	}
}

// Export reads the session file.
func (c *Client) Export(ctx context.Context, id string) ([]byte, error) {
	a, err := c.call(ctx, nil, http.MethodGet, SessionPath(id, "/export"), nil)
	return a.Body, err
}

// Sessions reads one page of the list of sessions.
func (c *Client) Sessions(ctx context.Context, options ...Option) (SessionPage, error) {
	var v SessionPage
	_, err := c.call(ctx, &v, http.MethodGet, "/v1/sessions", nil, options...)
	return v, err
}
