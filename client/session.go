package client

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"
	"unicode/utf8"
)

// Request headers of the appender.
const (
	headerKey   = "Idempotency-Key"
	headerEpoch = "Palimpsest-Writer-Epoch"
)

// maxKey is the longest idempotency key in bytes.
const maxKey = 255

// Receipt says where an append was committed.
type Receipt struct {
	Session  string `json:"session"`
	FirstSeq Seq    `json:"firstSeq"`
	LastSeq  Seq    `json:"lastSeq"`
	// Commit is the id of the commit that holds the append. It may hold others' as well.
	Commit string `json:"commit"`
	// Duplicate says that an earlier request had stored the events already; the receipt is
	// that one's.
	Duplicate bool `json:"duplicate"`
	// Digest is the digest of the commit's last event, in hex.
	Digest string `json:"digest"`
	// Violations are the lifecycle rules that the append breaks, when the appender lets them
	// through and reports them.
	Violations []Violation `json:"violations"`
	// Warnings say which limits are used by 80 % or more, in words.
	Warnings []string `json:"warnings"`
}

// Violation is one broken lifecycle rule.
type Violation struct {
	Rule   string `json:"rule"`
	Seq    Seq    `json:"seq"`
	Detail string `json:"detail"`
}

func (r *Receipt) validate(session string) error {
	if r.Session != session || r.Commit == "" || r.LastSeq < r.FirstSeq || r.FirstSeq < 0 {
		return fmt.Errorf("expected a receipt of session %q", session)
	}
	return nil
}

// AppendOption is a condition or a name of an append.
type AppendOption func(*appendOptions)

type appendOptions struct {
	expected, epoch *Seq
	key             *string
}

// ExpectedSeq is the seq that the first event must get; 0 says that the session has no events
// yet. Otherwise the append is refused with ErrSeqConflict, unless the same events lie there
// already: then it is answered with the original receipt, at any later time. Of two processes
// that append equal events at the same seq both are told that theirs are stored; an
// IdempotencyKey or an Epoch beside it tells them apart.
func ExpectedSeq(seq Seq) AppendOption { return func(o *appendOptions) { o.expected = &seq } }

// IdempotencyKey names the append: the same events under the same key are stored once, within
// the appender's window for keys. 1 to 255 bytes of printable ASCII. Defaults to a random one
// when there is no ExpectedSeq.
func IdempotencyKey(key string) AppendOption { return func(o *appendOptions) { o.key = &key } }

// Epoch is the writer's epoch. It is refused with ErrFenced when another writer took over.
// A Writer gives it by itself.
func Epoch(epoch Seq) AppendOption { return func(o *appendOptions) { o.epoch = &epoch } }

func readOptions(opts []AppendOption) (o appendOptions) {
	for _, opt := range opts {
		opt(&o)
	}
	return o
}

// post is a request to the appender about the session.
func (s *Session) post(call string, body []byte, o appendOptions) (*request, error) {
	r := &request{base: s.c.appender, method: http.MethodPost, path: s.path(call), body: body, session: s.id, writes: true,
		header: http.Header{"Content-Type": {"application/json"}}}
	if o.expected != nil {
		r.query = url.Values{"expectedSeq": {strconv.FormatInt(int64(*o.expected), 10)}}
	}
	if o.epoch != nil {
		r.header.Set(headerEpoch, strconv.FormatInt(int64(*o.epoch), 10))
	}
	if o.key != nil {
		if err := checkKey(*o.key); err != nil {
			return nil, bad(s.id, "%v", err)
		}
		r.header.Set(headerKey, *o.key)
	}
	return r, nil
}

func checkKey(key string) error {
	if len(key) == 0 || len(key) > maxKey {
		return fmt.Errorf("idempotency key: expected 1 to %d bytes, found %d", maxKey, len(key))
	}
	for i := range len(key) {
		if key[i] < ' ' || key[i] > '~' {
			return fmt.Errorf("idempotency key: expected printable ASCII, found byte 0x%02x", key[i])
		}
	}
	return nil
}

// Append appends events, all or none, and returns once they are committed. A session that does
// not exist is created with a default header.
//
// It is safe to lose the answer: the append is repeated until it is answered or ctx ends, and
// stored once. Nothing was stored when the error is not ErrOutcomeUnknown. After that one, the
// same events with the same ExpectedSeq, or with the error's IdempotencyKey, ask again.
//
// Errors besides those of transport: ErrSeqConflict, ErrFenced, ErrKeyReused, ErrRuleViolation,
// ErrInvariant, ErrTooLarge, ErrSessionPending, ErrBadRequest.
func (s *Session) Append(ctx context.Context, events []Event, opts ...AppendOption) (*Receipt, error) {
	body, err := encodeEvents(s.id, events)
	if err != nil {
		return nil, err
	}
	o := readOptions(opts)
	o.nameIt()
	r, err := s.post("/events", body, o)
	if err != nil {
		return nil, err
	}
	r.recognised = true
	if o.expected == nil {
		r.key = *o.key
	}
	out := new(Receipt)
	if _, err := s.c.do(ctx, r, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Created says what a create found.
type Created struct {
	Session string `json:"session"`
	// Created is false when the session had this header already; also when an attempt of this
	// very call made it, whose answer was lost.
	Created bool `json:"created"`
	// Header is the session's header as it is stored.
	Header json.RawMessage `json:"header"`
}

func (r *Created) validate(session string) error {
	if r.Session != session || r.Header == nil {
		return fmt.Errorf("expected the header of session %q", session)
	}
	return nil
}

// Create makes the session. header is encoded like an event's Data; what it leaves out gets
// defaults, and nil leaves out all. The same header again is no error; another one is
// ErrSessionExists. Sessions need not be created: the first append does it.
func (s *Session) Create(ctx context.Context, header any) (*Created, error) {
	m := map[string]any{"id": s.id}
	if header != nil {
		m["header"] = header
	}
	body, err := object(s.id, m)
	if err != nil {
		return nil, err
	}
	r, err := s.post("", body, appendOptions{})
	if err != nil {
		return nil, err
	}
	r.path, r.recognised = "/v1/sessions", true
	out := new(Created)
	if _, err := s.c.do(ctx, r, out); err != nil {
		return nil, err
	}
	return out, nil
}

// object writes a JSON object whose members are encoded like an event's Data.
func object(session string, members map[string]any) ([]byte, error) {
	b := []byte{'{'}
	for k, v := range members {
		name, err := encode(k)
		if err != nil {
			return nil, bad(session, "%v", err)
		}
		if text, ok := v.(string); ok && !utf8.ValidString(text) {
			return nil, bad(session, "%s: expected UTF-8, found %q", k, text)
		}
		value, err := encode(v)
		if err != nil {
			return nil, bad(session, "%s: %v", k, err)
		}
		if len(b) > 1 {
			b = append(b, ',')
		}
		b = append(append(append(b, name...), ':'), value...)
	}
	return append(b, '}'), nil
}

// Status is what the appender knows of a session, to the end of its log.
type Status struct {
	Session           string
	Header            json.RawMessage
	NextSeq           Seq       // the seq that the next event gets
	Time              time.Time // of the last event; the zero time when there is none
	Digest            string    // of the last event, in hex
	Chain             string    // of the last commit, in hex
	OpenTurn          *Seq      // number of the open turn; nil when none is open
	OpenStep          *Seq      // number of the open step; nil when none is open
	PendingCalls      []string  // ids of the open step's recorded calls without a result
	Nodes             int       // of the surface
	LogBytes          int64     // of all canonical lines
	ReplaceGeneration int64     // how many replacements there were
	Writer            *WriterInfo
}

// WriterInfo is who may write.
type WriterInfo struct {
	Name  string
	Epoch Seq
}

// Status reads the session's state from the appender, as new as the log is.
func (s *Session) Status(ctx context.Context) (*Status, error) {
	var w status
	r := &request{base: s.c.appender, method: http.MethodGet, path: s.path(""), session: s.id}
	if _, err := s.c.do(ctx, r, &w); err != nil {
		return nil, err
	}
	out := &Status{
		Session: w.Session, Header: w.Header, NextSeq: w.NextSeq, Digest: w.Digest, Chain: w.Chain, OpenTurn: w.OpenTurn, OpenStep: w.OpenStep,
		PendingCalls: w.PendingCalls, Nodes: w.Nodes, LogBytes: w.LogBytes, ReplaceGeneration: w.ReplaceGeneration,
	}
	if w.NextSeq > 0 {
		out.Time = time.UnixMilli(w.Time).UTC()
	}
	if w.Writer != nil {
		out.Writer = &WriterInfo{w.Writer.ID, w.Writer.Epoch}
	}
	return out, nil
}

// status is a status as the appender writes it.
type status struct {
	Session           string          `json:"session"`
	Header            json.RawMessage `json:"header"`
	NextSeq           Seq             `json:"nextSeq"`
	Time              int64           `json:"time"`
	Digest            string          `json:"digest"`
	Chain             string          `json:"chain"`
	OpenTurn          *Seq            `json:"openTurn"`
	OpenStep          *Seq            `json:"openStep"`
	PendingCalls      []string        `json:"pendingCalls"`
	Nodes             int             `json:"nodes"`
	LogBytes          int64           `json:"logBytes"`
	ReplaceGeneration int64           `json:"replaceGeneration"`
	Writer            *struct {
		ID    string `json:"id"`
		Epoch Seq    `json:"epoch"`
	} `json:"writer"`
}

func (w *status) validate(session string) error {
	if w.Session != session || w.Digest == "" {
		return fmt.Errorf("expected the status of session %q", session)
	}
	return nil
}

// Repair closes the turn that a crashed writer left open: with an error result for each
// unanswered tool call, the end of the step and the end of the turn. When the session has a
// writer, repair takes a new epoch first, so that the writer is fenced off. The receipt is nil
// when nothing was open; also when an attempt of this very call closed it, whose answer was
// lost.
func (s *Session) Repair(ctx context.Context) (*Receipt, error) {
	r, err := s.post("/repair", []byte("{}"), appendOptions{})
	if err != nil {
		return nil, err
	}
	var out repaired
	if _, err := s.c.do(ctx, r, &out); err != nil {
		return nil, err
	}
	if !out.Repaired {
		return nil, nil
	}
	return &out.Receipt, nil
}

type repaired struct {
	Receipt
	Repaired bool `json:"repaired"`
}

func (r *repaired) validate(session string) error {
	if r.Repaired {
		return r.Receipt.validate(session)
	}
	return nil
}

// Fork is how a session is forked.
type Fork struct {
	// ID is the child's id. Defaults to a new one.
	ID string
	// At is the last seq that the child takes over; no turn may be open behind it. Defaults to
	// the parent's last.
	At *Seq
	// Header has further members of the child's header, encoded like an event's Data. Lineage
	// is added. Defaults to none.
	Header any
}

// Forked says what a fork made.
type Forked struct {
	Session string `json:"session"` // the child
	Parent  string `json:"parent"`
	At      Seq    `json:"at"`
	// LastSeq is the seq of the session/end-seed that closes what the child took over.
	LastSeq Seq `json:"lastSeq"`
	// Created is false when the same fork was made before; also when an attempt of this very
	// call made it, whose answer was lost.
	Created bool            `json:"created"`
	Header  json.RawMessage `json:"header"`
}

func (r *Forked) validate(string) error {
	if r.Session == "" || r.Header == nil {
		return errors.New("expected the header of a fork")
	}
	return nil
}

// Fork makes a session that starts with this one's events 0 to At, as they are. The child is
// not seen before it is complete; the same fork again completes one that was cut off, and is no
// error when it is complete. Errors: ErrOpenTurn, ErrSessionExists (the id names another
// session), ErrSessionNotFound.
func (s *Session) Fork(ctx context.Context, f Fork) (*Forked, error) {
	if f.ID == "" {
		f.ID = NewID()
	}
	if f.At == nil { // now, so that a repeated request asks for the same fork
		st, err := s.Status(ctx)
		if err != nil {
			return nil, err
		}
		if st.NextSeq == 0 {
			return nil, bad(s.id, "the session has no events to be forked")
		}
		last := st.NextSeq - 1
		f.At = &last
	}
	m := map[string]any{"id": f.ID, "at": *f.At}
	if f.Header != nil {
		m["header"] = f.Header
	}
	body, err := object(s.id, m)
	if err != nil {
		return nil, err
	}
	r, err := s.post("/fork", body, appendOptions{})
	if err != nil {
		return nil, err
	}
	r.recognised = true
	out := new(Forked)
	if _, err := s.c.do(ctx, r, out); err != nil {
		return nil, err
	}
	return out, nil
}

// Compaction is a range of the surface and what is to stand in its place.
type Compaction struct {
	// Start and End are nodes of the surface, in surface order, inclusive.
	Start, End Seq
	// Summary replaces them as a user/message: a text, or an array of content blocks. Encoded
	// like an event's Data. Required.
	Summary any
	// Extra are further members of the compaction/summary event, such as provider, model or
	// usage. Defaults to none.
	Extra map[string]any
	// AllowSplit lets the range separate a tool call from its result, or from one that is still to
	// come. Defaults to false.
	AllowSplit bool
}

// Compact replaces a range of the surface by a summary, in one commit with the compaction's
// own events. The log keeps what was replaced. Takes ExpectedSeq, IdempotencyKey and Epoch.
//
// It is safe to lose the answer: without an ExpectedSeq a repeated compaction is known by its
// key, which is made up when none is given. With one it is not known: when an answer was lost,
// a refusal is ErrOutcomeUnknown as well, since the range may be gone because the lost attempt
// replaced it. Read the surface then.
//
// Errors: ErrSplitsToolPair, ErrRuleViolation (an endpoint is not on the surface, or the system
// message is covered), ErrSeqConflict, ErrFenced.
func (s *Session) Compact(ctx context.Context, c Compaction, opts ...AppendOption) (*Receipt, error) {
	m := map[string]any{}
	for k, v := range c.Extra {
		switch k {
		case "startSeq", "endSeq", "summary", "allow", "expectedSeq", "epoch":
			return nil, bad(s.id, "Extra: %q is set by the compaction itself", k)
		}
		m[k] = v
	}
	m["startSeq"], m["endSeq"], m["summary"] = c.Start, c.End, c.Summary
	if c.AllowSplit {
		m["allow"] = []string{"splits-tool-pair"}
	}
	return s.derived(ctx, "/compact", m, opts)
}

// Prune replaces the content of the tool result at seq, a node of the surface, and leaves all
// else of it as it is. content is a text or an array of content blocks, encoded like an
// event's Data; nil puts a text there that says how many bytes were pruned. Takes ExpectedSeq,
// IdempotencyKey and Epoch, and is repeated like Compact. Errors: ErrRuleViolation, ErrSeqConflict, ErrFenced.
func (s *Session) Prune(ctx context.Context, seq Seq, content any, opts ...AppendOption) (*Receipt, error) {
	m := map[string]any{"seq": seq}
	if content != nil {
		m["content"] = content
	}
	return s.derived(ctx, "/prune", m, opts)
}

// nameIt makes up an idempotency key where the caller said nothing by which a repeated request
// is known.
func (o *appendOptions) nameIt() {
	if o.key == nil && o.expected == nil {
		key := rand.Text()
		o.key = &key
	}
}

// knownBy says that a repeated request is known by its key. With an expected seq it is not: its
// events are made anew each time, and differ once the first attempt was stored.
func (r *request) knownBy(o appendOptions) {
	if o.expected == nil {
		r.key, r.recognised = *o.key, true
	}
}

// derived asks for an append whose events the appender makes.
func (s *Session) derived(ctx context.Context, call string, members map[string]any, opts []AppendOption) (*Receipt, error) {
	o := readOptions(opts)
	o.nameIt()
	body, err := object(s.id, members)
	if err != nil {
		return nil, err
	}
	r, err := s.post(call, body, o)
	if err != nil {
		return nil, err
	}
	r.knownBy(o)
	out := new(Receipt)
	if _, err := s.c.do(ctx, r, out); err != nil {
		return nil, err
	}
	return out, nil
}
