package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"strings"

	"github.com/nats-io/nuid"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
)

// Content types of requests.
const (
	typeJSON        = "application/json"
	typeLines       = "application/x-ndjson"
	typeCloudEvent  = "application/cloudevents+json"
	typeCloudEvents = "application/cloudevents-batch+json"
)

// Request headers, the same over HTTP and NATS.
const (
	headerKey   = "Idempotency-Key"
	headerEpoch = "Palimpsest-Writer-Epoch"
	headerMatch = "If-Match"
	headerTrace = "traceparent"
)

// checkHeaders refuses a condition or a key that is there and empty, or there twice: taken for
// absent, an append would be stored that its caller wanted to be conditional.
func checkHeaders(h map[string][]string) error {
	for name, values := range h {
		for _, known := range []string{headerKey, headerEpoch, headerMatch} {
			switch {
			case !strings.EqualFold(name, known) || len(values) == 0:
			case len(values) > 1:
				return badRequest(fmt.Sprintf("%s: expected one, found %d", known, len(values)))
			case values[0] == "":
				return badRequest(known + ": expected a value, found an empty one; leave the header out to say nothing")
			}
		}
	}
	return nil
}

// operation is one thing that an appender does, whichever way it is asked for.
type operation struct {
	name         string // of the NATS service's endpoint
	method, path string // over HTTP
	params       []string
	types        []string // content types of the body; nil: no body
	do           func(context.Context, *input) (*output, error)
}

// input is a request.
type input struct {
	session     string
	contentType string
	header      func(string) string
	query       *query
	body        []byte
}

// output is an answer.
type output struct {
	status   int
	etag     string
	location string
	body     any
}

// appends are the appender's operations.
type appends struct{ a *appender.Appender }

func (o *appends) operations() []operation {
	one := []string{typeJSON}
	many := []string{typeJSON, typeLines, typeCloudEvent, typeCloudEvents}
	expected := []string{"expectedSeq"}
	return []operation{
		{"create", "POST", "/v1/sessions", nil, one, o.create},
		{"status", "GET", "/v1/sessions/{id}", nil, nil, o.status},
		{"append", "POST", "/v1/sessions/{id}/events", expected, many, o.append},
		{"repair", "POST", "/v1/sessions/{id}/repair", nil, one, o.repair},
		{"writer", "POST", "/v1/sessions/{id}/writer", expected, one, o.writer},
		{"fork", "POST", "/v1/sessions/{id}/fork", nil, one, o.fork},
		{"compact", "POST", "/v1/sessions/{id}/compact", expected, one, o.compact},
		{"prune", "POST", "/v1/sessions/{id}/prune", expected, one, o.prune},
	}
}

// members reads a body that is one JSON object with known keys. No body is an empty object.
func members(body []byte, known ...string) (map[string][]byte, error) {
	if len(bytes.TrimSpace(body)) == 0 {
		return map[string][]byte{}, nil
	}
	m, err := events.SplitObject(body)
	if err != nil {
		return nil, err
	}
	for k := range m {
		found := false
		for _, n := range known {
			found = found || n == k
		}
		if !found {
			expected := strings.Join(known, ", ")
			if expected == "" {
				expected = "none"
			}
			return nil, badRequest(fmt.Sprintf("unknown key %q; expected %s", short(k), expected))
		}
	}
	return m, nil
}

// short cuts what a caller sent to what an error text may repeat of it.
func short(s string) string {
	const most = 100
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// stringMember reads a string; "" when it is absent.
func stringMember(m map[string][]byte, name string) (string, error) {
	var s string
	if v, ok := m[name]; ok && (v[0] != '"' || json.Unmarshal(v, &s) != nil) {
		return "", badRequest(name + ": expected a string")
	}
	return s, nil
}

// seqMember reads a seq; nil when it is absent.
func seqMember(m map[string][]byte, name string) (*events.Seq, error) {
	v, ok := m[name]
	if !ok {
		return nil, nil
	}
	n, ok := events.ParseSeq(string(v))
	if !ok {
		return nil, badRequest(name + ": expected an integer from 0 to 2^53-1")
	}
	return &n, nil
}

// conditions are what an append may depend on.
type conditions struct {
	expected *events.Seq
	epoch    *events.Seq
}

// conditions reads them from wherever they may stand: query, headers, body. Those that stand
// in two places must agree.
func (in *input) conditions(m map[string][]byte) (c conditions, err error) {
	if in.query.Has("expectedSeq") {
		n := in.query.seq("expectedSeq", 0)
		c.expected = &n
	}
	if in.query.err != nil {
		return c, in.query.err
	}
	if v := in.header(headerMatch); v != "" {
		n, ok := events.ParseSeq(strings.Trim(v, `"`))
		if !ok || len(v) < 3 || v[0] != '"' || v[len(v)-1] != '"' {
			return c, badRequest(fmt.Sprintf(`%s: expected "<next seq>" in double quotes, found %s`, headerMatch, v))
		}
		if err := agree(&c.expected, n, "expectedSeq and "+headerMatch); err != nil {
			return c, err
		}
	}
	if v := in.header(headerEpoch); v != "" {
		n, ok := events.ParseSeq(v)
		if !ok {
			return c, badRequest(fmt.Sprintf("%s: expected an integer from 0 to 2^53-1, found %q", headerEpoch, v))
		}
		c.epoch = &n
	}
	if len(m) == 0 {
		return c, nil
	}
	for name, into := range map[string]**events.Seq{"expectedSeq": &c.expected, "epoch": &c.epoch} {
		n, err := seqMember(m, name)
		if err != nil {
			return c, err
		}
		if n != nil {
			if err := agree(into, *n, name+" of body and request"); err != nil {
				return c, err
			}
		}
	}
	return c, nil
}

func agree(into **events.Seq, n events.Seq, what string) error {
	if *into != nil && **into != n {
		return badRequest(fmt.Sprintf("%s differ: %d and %d", what, **into, n))
	}
	*into = &n
	return nil
}

var traceParentPattern = regexp.MustCompile(`^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$`)

// trace is the caller's W3C trace context, "" when it is absent or malformed.
func (in *input) trace() string {
	if t := in.header(headerTrace); t != "" && traceParentPattern.MatchString(t) {
		return t
	}
	return ""
}

func (o *appends) create(ctx context.Context, in *input) (*output, error) {
	m, err := members(in.body, "id", "header")
	if err != nil {
		return nil, err
	}
	id, err := stringMember(m, "id")
	if err != nil {
		return nil, err
	}
	if m["id"] != nil && id == "" {
		return nil, events.CheckSessionID("")
	}
	if in.session != "" { // a NATS subject may name it
		if id != "" && id != in.session {
			return nil, badRequest(fmt.Sprintf("id: expected %q as in the subject, found %q", in.session, id))
		}
		id = in.session
	}
	header := m["header"]
	if id == "" && !hasID(header) {
		id = nuid.Next()
	}
	h, created, err := o.a.Create(ctx, id, header)
	if err != nil {
		return nil, err
	}
	out := &output{status: http.StatusOK, location: sessionsPath + pathEscape(h.ID), body: struct {
		Session string          `json:"session"`
		Created bool            `json:"created"`
		Header  json.RawMessage `json:"header"`
	}{h.ID, created, h.Raw}}
	if created {
		out.status = http.StatusCreated
	}
	return out, nil
}

// hasID reports whether a header carries an id of its own.
func hasID(header []byte) bool {
	if header == nil {
		return false
	}
	m, err := events.SplitObject(header)
	return err != nil || m["id"] != nil
}

func (o *appends) status(ctx context.Context, in *input) (*output, error) {
	st, err := o.a.Status(ctx, in.session)
	if err != nil {
		return nil, err
	}
	return summaryOf(st.Header, st.Summary, nil), nil
}

// stored answers a receipt.
func stored(r *appender.Receipt, body any) *output {
	return &output{status: http.StatusCreated, etag: `"` + (r.LastSeq + 1).String() + `"`, body: body}
}

func (o *appends) append(ctx context.Context, in *input) (*output, error) {
	req := appender.Request{Session: in.session, Key: in.header(headerKey), Trace: in.trace()}
	m, err := bodies[in.contentType](o.a, ctx, &req, in.body)
	if err != nil {
		var e *events.Error
		if errors.As(err, &e) && e.Session == "" {
			e.Session = in.session
		}
		return nil, err
	}
	c, err := in.conditions(m)
	if err != nil {
		return nil, err
	}
	req.Expected, req.Epoch = c.expected, c.epoch
	r, err := o.a.Append(ctx, req)
	if err != nil {
		return nil, err
	}
	return stored(r, r), nil
}

func (o *appends) repair(ctx context.Context, in *input) (*output, error) {
	if _, err := members(in.body); err != nil {
		return nil, err
	}
	r, err := o.a.Repair(ctx, in.session, "")
	if err != nil {
		return nil, err
	}
	type answer struct {
		*appender.Receipt
		Repaired bool `json:"repaired"`
	}
	if r == nil {
		return &output{status: http.StatusOK, body: map[string]any{"session": in.session, "repaired": false}}, nil
	}
	return stored(r, answer{r, true}), nil
}

func (o *appends) writer(ctx context.Context, in *input) (*output, error) {
	m, err := members(in.body, "writer", "expectedSeq")
	if err != nil {
		return nil, err
	}
	c, err := in.conditions(m)
	if err != nil {
		return nil, err
	}
	name, err := stringMember(m, "writer")
	if err != nil {
		return nil, err
	}
	f, err := o.a.TakeWriter(ctx, appender.WriterRequest{Session: in.session, Writer: name, Key: in.header(headerKey), Expected: c.expected})
	if err != nil {
		return nil, err
	}
	return stored(f.Receipt, f), nil
}

func (o *appends) fork(ctx context.Context, in *input) (*output, error) {
	m, err := members(in.body, "id", "at", "header")
	if err != nil {
		return nil, err
	}
	req := appender.ForkRequest{Parent: in.session, Header: m["header"]}
	if req.ID, err = stringMember(m, "id"); err != nil {
		return nil, err
	}
	if req.At, err = seqMember(m, "at"); err != nil {
		return nil, err
	}
	if m["id"] != nil {
		if err := events.CheckSessionID(req.ID); err != nil {
			return nil, err
		}
	}
	f, err := o.a.Fork(ctx, req)
	if err != nil {
		return nil, err
	}
	out := &output{status: http.StatusOK, location: sessionsPath + pathEscape(f.Session), body: f}
	if f.Created {
		out.status = http.StatusCreated
	}
	return out, nil
}

func (o *appends) compact(ctx context.Context, in *input) (*output, error) {
	m, err := events.SplitObject(in.body)
	if err != nil {
		return nil, err
	}
	c, err := in.conditions(m)
	if err != nil {
		return nil, err
	}
	req := appender.CompactRequest{Session: in.session, Summary: m["summary"], Extra: map[string]json.RawMessage{}, Key: in.header(headerKey), Expected: c.expected, Epoch: c.epoch, Trace: in.trace()}
	for name, into := range map[string]*events.Seq{"startSeq": &req.Start, "endSeq": &req.End} {
		n, err := seqMember(m, name)
		if err != nil {
			return nil, err
		}
		if n == nil {
			return nil, badRequest(name + " is missing; expected the seq of a node of the surface")
		}
		*into = *n
	}
	if req.Summary == nil {
		return nil, badRequest("summary is missing; expected a text or an array of content blocks")
	}
	if v := m["allow"]; v != nil && json.Unmarshal(v, &req.Allow) != nil {
		return nil, badRequest("allow: expected an array of strings")
	}
	for k, v := range m { // what is said about the summary goes with it
		switch k {
		case "startSeq", "endSeq", "summary", "allow", "expectedSeq", "epoch":
		case "compactionId", "shadowedRange", "shadowedSeqs":
			return nil, badRequest(k + " is set by the compaction and must not be given")
		default:
			req.Extra[k] = v
		}
	}
	r, err := o.a.Compact(ctx, req)
	if err != nil {
		return nil, err
	}
	return stored(r, r), nil
}

func (o *appends) prune(ctx context.Context, in *input) (*output, error) {
	m, err := members(in.body, "seq", "content", "expectedSeq", "epoch")
	if err != nil {
		return nil, err
	}
	c, err := in.conditions(m)
	if err != nil {
		return nil, err
	}
	seq, err := seqMember(m, "seq")
	if err != nil {
		return nil, err
	}
	if seq == nil {
		return nil, badRequest("seq is missing; expected the seq of a tool/result on the surface")
	}
	r, err := o.a.Prune(ctx, appender.PruneRequest{Session: in.session, Seq: *seq, Content: m["content"], Key: in.header(headerKey), Expected: c.expected, Epoch: c.epoch, Trace: in.trace()})
	if err != nil {
		return nil, err
	}
	return stored(r, r), nil
}

// bodies reads the events of a request, by content type. What else a body says is returned.
var bodies = map[string]func(*appender.Appender, context.Context, *appender.Request, []byte) (map[string][]byte, error){
	typeJSON: func(_ *appender.Appender, _ context.Context, req *appender.Request, b []byte) (map[string][]byte, error) {
		return readJSONBody(req, b)
	},
	typeLines: func(_ *appender.Appender, _ context.Context, req *appender.Request, b []byte) (map[string][]byte, error) {
		return nil, readLines(req, b)
	},
	typeCloudEvent: func(a *appender.Appender, ctx context.Context, req *appender.Request, b []byte) (map[string][]byte, error) {
		return nil, readCloudEvents(a, ctx, req, [][]byte{b})
	},
	typeCloudEvents: func(a *appender.Appender, ctx context.Context, req *appender.Request, b []byte) (map[string][]byte, error) {
		items, err := events.SplitArray(b)
		if err != nil {
			return nil, err
		}
		return nil, readCloudEvents(a, ctx, req, items)
	},
}

// readJSONBody reads one event, an array of events, or {"events":[…]} with conditions.
func readJSONBody(req *appender.Request, b []byte) (map[string][]byte, error) {
	b = bytes.TrimLeft(b, " \t\r\n")
	if len(b) > 0 && b[0] == '[' {
		items, err := events.SplitArray(b)
		req.Events = items
		return nil, err
	}
	// Without the word there is no such key, unless it is spelled with escapes.
	if !bytes.Contains(b, []byte(`"events"`)) && !bytes.Contains(b, []byte(`\u00`)) {
		req.Events = [][]byte{b}
		return nil, nil
	}
	m, err := events.SplitObject(b)
	if err != nil && m["events"] != nil && m["type"] == nil {
		return nil, err
	}
	if err != nil || m["events"] == nil || m["type"] != nil {
		// What is wrong with a single event is for the one parser to say.
		req.Events = [][]byte{b}
		return nil, nil
	}
	if m, err = members(b, "events", "expectedSeq", "epoch"); err != nil {
		return nil, err
	}
	req.Events, err = events.SplitArray(m["events"])
	return m, err
}

// readLines reads one event a line; lines end at LF alone, and blank ones are skipped.
func readLines(req *appender.Request, b []byte) error {
	for len(b) > 0 {
		var line []byte
		line, b = events.CutLine(b)
		if len(bytes.TrimSpace(line)) > 0 {
			req.Events = append(req.Events, line)
		}
	}
	return nil
}

func readCloudEvents(a *appender.Appender, ctx context.Context, req *appender.Request, items [][]byte) error {
	format, err := a.Format(ctx, req.Session)
	if err != nil {
		return err
	}
	for i, it := range items {
		raw, err := events.FromCloudEvent(it, format)
		if err != nil {
			var e *events.Error
			if errors.As(err, &e) {
				e.Index = &i
			}
			return err
		}
		req.Events = append(req.Events, raw)
	}
	return nil
}
