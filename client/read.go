package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// ReadOption says how new an answer must be.
type ReadOption func(*readOpts)

type readOpts struct {
	query url.Values
	wait  time.Duration
}

// defaultWait is how long the projector waits for a MinSeq without a Timeout.
const defaultWait = 5 * time.Second

// MinSeq waits until the event with that seq is projected, for 5 s unless Timeout says
// otherwise. ErrNotProjected says that it was not.
func MinSeq(seq Seq) ReadOption {
	return func(o *readOpts) { o.query.Set("minSeq", strconv.FormatInt(int64(seq), 10)) }
}

// Timeout is how long MinSeq waits, at most 1 min.
func Timeout(d time.Duration) ReadOption {
	return func(o *readOpts) {
		o.query.Set("timeout", d.String())
		o.wait = max(0, d)
	}
}

// Fresh reads as new as the log is, projected or not. It costs the projector more.
func Fresh() ReadOption { return func(o *readOpts) { o.query.Set("fresh", "true") } }

// At reads as of the event with that seq, whatever came later. Not together with MinSeq and Fresh.
func At(seq Seq) ReadOption {
	return func(o *readOpts) { o.query.Set("at", strconv.FormatInt(int64(seq), 10)) }
}

// Provider is whose API messages are to be sent to.
type Provider string

// The providers.
const (
	OpenAI    Provider = "openai"
	Anthropic Provider = "anthropic"
)

// Format reads the messages in the form that a provider's API takes, with a report of all that
// is not there as it is in the log. Messages takes it, Surface does not.
func Format(p Provider) ReadOption {
	return func(o *readOpts) { o.query.Set("format", string(p)) }
}

// get is a request to the projector about the session.
func (s *Session) get(call string, q url.Values) *request {
	return &request{base: s.c.projector, method: http.MethodGet, path: s.path(call), query: q, session: s.id}
}

// view reads a snapshot.
func (s *Session) view(ctx context.Context, call string, opts []ReadOption, out any) error {
	o := readOpts{url.Values{}, defaultWait}
	for _, opt := range opts {
		opt(&o)
	}
	if v := o.query.Get("minSeq"); strings.HasPrefix(v, "-") { // NoSeq: of a session without events
		o.query.Del("minSeq")
	}
	r := s.get(call, o.query)
	r.patience = o.wait
	_, err := s.c.do(ctx, r, out)
	return err
}

// Quarantine says why a session's projection stands still.
type Quarantine struct {
	Seq       *Seq   `json:"seq"` // of the event that cannot be folded
	Rule      string `json:"rule"`
	Detail    string `json:"detail"`
	StreamSeq uint64 `json:"streamSeq"` // JetStream's number of the message that holds it
	Time      int64  `json:"time"`      // Unix milliseconds
	// Skipped is set when an operator decided to leave the session as it is.
	Skipped *Skipped `json:"skipped"`
}

// Skipped is who decided to leave a session in quarantine, and why.
type Skipped struct {
	By     string `json:"by"`
	Reason string `json:"reason"`
	Time   int64  `json:"time"` // Unix milliseconds
}

// Unpaired is a tool call on the list without a result, or a result without a call.
type Unpaired struct {
	Kind   string `json:"kind"` // call or result
	CallID string `json:"callId"`
	Seq    Seq    `json:"seq"`   // of the message that holds it
	Index  int    `json:"index"` // of that message in the list
}

// Note is one thing that a rendering for a provider had to change.
type Note struct {
	Seq    Seq    `json:"seq"`   // of the message
	Index  int    `json:"index"` // of the message on the list before it was rendered
	Block  *int   `json:"block"` // in the message's content; nil for all of it
	What   string `json:"what"`  // such as text, tool-call.id, user/message
	Action string `json:"action"`
	Detail string `json:"detail"`
}

// Messages is the message list that the model should see.
type Messages struct {
	Session string `json:"session"`
	// Seq is the last seq that the list takes into account, NoSeq for a session without events.
	Seq               Seq               `json:"seq"`
	ReplaceGeneration int64             `json:"replaceGeneration"` // how many replacements there were
	Messages          []json.RawMessage `json:"messages"`          // in order, token for token
	// Quarantine is set when the log holds something that cannot be folded; the list is then
	// that of the events before it.
	Quarantine *Quarantine `json:"quarantine"`
	// Unpaired are the tool calls without a result and the results without a call. Without
	// Format alone: a Format pairs them, and its Report says how.
	Unpaired []Unpaired `json:"unpaired"`
	// System, with Format(Anthropic) alone, is what the parameter of that name takes; nil for nothing.
	System json.RawMessage `json:"system"`
	// Report, with Format alone, is what of the messages is not there as it is in the log.
	Report []Note `json:"report"`
}

func (r *Messages) validate(session string) error { return isView(r.Session, session, r.Messages) }

func isView[T any](found, session string, list []T) error {
	if found != session || list == nil {
		return fmt.Errorf("expected what was derived from session %q", session)
	}
	return nil
}

// Messages reads the derived messages. Errors: ErrSessionNotFound, ErrNotProjected,
// ErrQuarantined (a MinSeq that will not be projected).
func (s *Session) Messages(ctx context.Context, opts ...ReadOption) (*Messages, error) {
	out := new(Messages)
	if err := s.view(ctx, "/messages", opts, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Surface is the ordered list of nodes that the messages are derived from.
type Surface struct {
	Session           string      `json:"session"`
	Seq               Seq         `json:"seq"` // as of this event
	ReplaceGeneration int64       `json:"replaceGeneration"`
	Nodes             []Node      `json:"nodes"`
	Quarantine        *Quarantine `json:"quarantine"` // as in Messages
}

// Node is one entry of a surface.
type Node struct {
	Seq     Seq    `json:"seq"`     // of the event that the node is
	Type    string `json:"type"`    // of the event
	Bytes   int64  `json:"bytes"`   // of the event's data
	Derives bool   `json:"derives"` // false for an empty message, which the model does not see
}

func (r *Surface) validate(session string) error { return isView(r.Session, session, r.Nodes) }

// Surface reads the nodes. Errors are those of Messages.
func (s *Session) Surface(ctx context.Context, opts ...ReadOption) (*Surface, error) {
	out := new(Surface)
	if err := s.view(ctx, "/surface", opts, out); err != nil {
		return nil, err
	}
	return out, nil
}

// RangeOption narrows a reading of the log.
type RangeOption func(url.Values)

// From is the first seq that is read. Defaults to 0.
func From(seq Seq) RangeOption {
	return func(q url.Values) { q.Set("from", strconv.FormatInt(int64(seq), 10)) }
}

// To is the last seq that is read; it may lie beyond the end. Defaults to the end.
func To(seq Seq) RangeOption {
	return func(q url.Values) { q.Set("to", strconv.FormatInt(int64(seq), 10)) }
}

// Types reads the events of these types only. Events takes it, Transcript does not.
func Types(types ...string) RangeOption {
	return func(q url.Values) { q.Set("type", strings.Join(types, ",")) }
}

// PageSize is how many entries one request asks for, from 1 on. Defaults to the projector's
// own, which bounds pages by bytes as well.
func PageSize(n int) RangeOption { return func(q url.Values) { q.Set("limit", strconv.Itoa(n)) } }

// page is a page of the log.
type page[T any] struct {
	Session  string `json:"session"`
	Events   []T    `json:"events"`
	Messages []T    `json:"messages"`
	Next     *Seq   `json:"next"`
}

func (p *page[T]) validate(session string) error {
	if p.Events == nil {
		return isView(p.Session, session, p.Messages)
	}
	return isView(p.Session, session, p.Events)
}

// pages reads a range of the log page by page.
func pages[T any](ctx context.Context, s *Session, call string, opts []RangeOption) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		q := url.Values{}
		for _, opt := range opts {
			opt(q)
		}
		for {
			var p page[T]
			if _, err := s.c.do(ctx, s.get(call, q), &p); err != nil {
				yield(none, err)
				return
			}
			for _, it := range append(p.Events, p.Messages...) {
				if !yield(it, nil) {
					return
				}
			}
			if p.Next == nil {
				return
			}
			q.Set("from", strconv.FormatInt(int64(*p.Next), 10))
		}
	}
}

// Events reads the log: every event that was appended, shadowed ones too, in order. It asks for
// the next page as it goes on, and ends after the first error. The log is served as far as it
// is committed, projected or not. Takes From, To, Types and PageSize.
func (s *Session) Events(ctx context.Context, opts ...RangeOption) iter.Seq2[StoredEvent, error] {
	return func(yield func(StoredEvent, error) bool) {
		for line, err := range pages[json.RawMessage](ctx, s, "/events", opts) {
			var e StoredEvent
			if err == nil {
				if e, err = parseStored(line); err != nil {
					err = &Error{Code: codeBadAnswer, Session: s.id, Cause: err, Detail: "an event cannot be read"}
				}
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// Entry is one message of a transcript.
type Entry struct {
	Seq     Seq
	Time    time.Time // UTC, whole milliseconds
	Type    string
	Message json.RawMessage // token for token
}

// UnmarshalJSON reads an entry as the projector writes it.
func (e *Entry) UnmarshalJSON(b []byte) error {
	var w struct {
		Seq     Seq             `json:"seq"`
		Time    int64           `json:"time"`
		Type    string          `json:"type"`
		Message json.RawMessage `json:"message"`
	}
	err := json.Unmarshal(b, &w)
	*e = Entry{w.Seq, time.UnixMilli(w.Time).UTC(), w.Type, w.Message}
	return err
}

// Transcript reads what a human saw: the messages that were appended, in log order, without
// the replacements. It reads page by page and ends after the first error. Takes From, To and
// PageSize.
func (s *Session) Transcript(ctx context.Context, opts ...RangeOption) iter.Seq2[Entry, error] {
	return pages[Entry](ctx, s, "/transcript", opts)
}

// Export writes the session's file: the header line, then all canonical event lines. An export
// that breaks off is an error, and what was written until then stays written; only one of
// which nothing was written is tried again.
func (s *Session) Export(ctx context.Context, w io.Writer) error {
	r := s.get("/export", nil)
	r.stream = true
	a, err := s.c.do(ctx, r, nil)
	if err != nil {
		return err
	}
	defer a.stream.Close()
	if _, err := io.Copy(w, a.stream); err != nil {
		return &Error{Status: a.status, Code: codeBadAnswer, Session: s.id, Cause: err, Detail: "the export broke off"}
	}
	return nil
}

// ListOption narrows a list of sessions.
type ListOption func(url.Values)

// Parent lists the forks and sub-agents of one session only.
func Parent(id string) ListOption { return func(q url.Values) { q.Set("parent", id) } }

// ListPageSize is how many sessions one request asks for, from 1 to 1000. Defaults to 100.
func ListPageSize(n int) ListOption { return func(q url.Values) { q.Set("limit", strconv.Itoa(n)) } }

type list struct {
	Sessions []SessionInfo `json:"sessions"`
	Cursor   string        `json:"cursor"`
}

func (l *list) validate(string) error {
	if l.Sessions == nil {
		return errors.New("expected a list of sessions")
	}
	return nil
}

// Sessions lists sessions in the order of their ids. It reads page by page and ends after the
// first error. Takes InState, Since, Agent, Parent and ListPageSize.
func (c *Client) Sessions(ctx context.Context, opts ...ListOption) iter.Seq2[SessionInfo, error] {
	return func(yield func(SessionInfo, error) bool) {
		q := url.Values{}
		for _, opt := range opts {
			opt(q)
		}
		for {
			var l list
			if _, err := c.do(ctx, &request{base: c.projector, method: http.MethodGet, path: "/v1/sessions", query: q}, &l); err != nil {
				yield(SessionInfo{}, err)
				return
			}
			for _, it := range l.Sessions {
				if !yield(it, nil) {
					return
				}
			}
			if l.Cursor == "" {
				return
			}
			q.Set("cursor", l.Cursor)
		}
	}
}
