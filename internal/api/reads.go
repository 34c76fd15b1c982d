package api

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/events"
)

// reads are the projector's operations over NATS. Each is a route of the HTTP API, whose answer
// is cut into pages where it does not fit a message.
type reads struct {
	routes http.Handler
	most   func() int // bytes of a reply's body
}

// replyReserve is the room for the headers of a reply, in bytes.
const replyReserve = 4 << 10

// NewProjectorServices returns the projector's NATS services: <prefix>.messages.<token>,
// <prefix>.surface.<token>, <prefix>.session.<token>, <prefix>.sessions and <prefix>.status.
// routes is the projector's HTTP API.
func NewProjectorServices(conn *nats.Conn, routes http.Handler, cfg ServiceConfig) *Services {
	if cfg.Parallel == 0 {
		cfg.Parallel = 16
	}
	o := &reads{routes: routes}
	s := newServices(conn, "palimpsest-projector", "Reads what was derived from agent sessions", cfg)
	o.most = func() int {
		if s.cfg.ReplyBytes > 0 {
			return s.cfg.ReplyBytes
		}
		return int(conn.MaxPayload()) - replyReserve
	}
	s.ctx, s.stopWaiting = context.WithCancel(context.Background())
	s.parallel = func(op string) int { return cfg.Parallel }
	s.ops = []operation{
		{name: "messages", path: "/v1/sessions/{id}/messages", do: o.list("messages", "/messages", "system", "unpaired", "report")},
		{name: "surface", path: "/v1/sessions/{id}/surface", do: o.list("nodes", "/surface")},
		{name: "session", path: "/v1/sessions/{id}", do: o.session},
		{name: "sessions", path: "/v1/sessions", do: o.sessions},
		{name: "status", path: "/v1/status", do: o.status},
	}
	s.alone = []string{"sessions", "status"}
	return s
}

// get runs a route with the parameters that a request's body names.
func (o *reads) get(ctx context.Context, path string, params url.Values) (http.Header, []byte, error) {
	return Local(ctx, o.routes, path, params)
}

// params reads the parameters in a request's body: an object whose members are what HTTP has
// in its query, as strings, numbers or booleans. No body is none.
func (in *input) params() (url.Values, error) {
	m, err := events.SplitObject(in.body)
	if len(in.body) == 0 {
		m, err = nil, nil
	}
	if err != nil {
		return nil, badRequest("body: expected a JSON object of parameters: " + err.Error())
	}
	q := url.Values{}
	for k, v := range m {
		text, ok := events.Text(v)
		switch {
		case ok:
		case len(v) > 0 && (v[0] == '-' || v[0] >= '0' && v[0] <= '9') || string(v) == "true" || string(v) == "false":
			text = string(v)
		default:
			return nil, badRequest(fmt.Sprintf("%s: expected a string, a number or a boolean, found %s", short(k), short(string(v))))
		}
		q.Set(k, text)
	}
	return q, nil
}

// place is where a page of a session's list begins: it pins the seq, so that all pages are of
// one and the same snapshot, however the session goes on.
type place struct {
	Seq    events.Seq `json:"seq"`
	Index  int        `json:"index"`
	Format string     `json:"format,omitempty"`
}

func (p place) String() string {
	b, err := json.Marshal(p)
	if err != nil {
		panic(err) // numbers and a string always encode
	}
	return base64.RawURLEncoding.EncodeToString(b)
}

func parsePlace(s string) (p place, err error) {
	b, err := base64.RawURLEncoding.DecodeString(s)
	if err == nil {
		err = json.Unmarshal(b, &p)
	}
	if err != nil || p.Seq < 0 || p.Seq > events.MaxSeq || p.Index < 0 {
		return p, badRequest(fmt.Sprintf("cursor: expected the cursor of an earlier answer, found %q", short(s)))
	}
	return p, nil
}

// list answers a route whose answer is an object with a list. Members that are named last come
// with the list's end, all others with each page.
func (o *reads) list(name, tail string, last ...string) func(context.Context, *input) (*output, error) {
	return func(ctx context.Context, in *input) (*output, error) {
		q, err := in.params()
		if err != nil {
			return nil, err
		}
		path := sessionsPath + pathEscape(in.session) + tail
		at := place{Format: q.Get("format")}
		var header http.Header
		var body []byte
		if q.Has("cursor") {
			if len(q) > 1 {
				return nil, badRequest("cursor: expected no other parameter beside it; it stands for all of them")
			}
			if at, err = parsePlace(q.Get("cursor")); err != nil {
				return nil, err
			}
			header, body, err = o.pinned(ctx, path, at)
		} else {
			header, body, err = o.get(ctx, path, q)
		}
		if err != nil {
			return nil, err
		}
		page, err := o.page(body, name, last, at)
		if err != nil {
			return nil, err
		}
		return &output{status: http.StatusOK, etag: header.Get("ETag"), body: json.RawMessage(page)}, nil
	}
}

// pinned reads a route as of a seq: from the snapshot when it is still that of the seq.
func (o *reads) pinned(ctx context.Context, path string, at place) (http.Header, []byte, error) {
	q := url.Values{}
	if at.Format != "" {
		q.Set("format", at.Format)
	}
	header, body, err := o.get(ctx, path, q)
	if err == nil && header.Get("ETag") == fmt.Sprintf(`"%d"`, at.Seq) {
		return header, body, nil
	}
	q.Set("at", at.Seq.String())
	return o.get(ctx, path, q)
}

// page cuts a page out of an answer. One that fits as a whole is not cut.
func (o *reads) page(body []byte, name string, last []string, at place) ([]byte, error) {
	most := o.most()
	if at.Index == 0 && len(body) <= most {
		return body, nil
	}
	var items [][]byte
	var seq events.Seq
	head, rest := []byte{'{'}, []byte{}
	events.EachMember(body, func(key, val []byte) bool {
		switch k := string(key); {
		case k == name:
			events.EachElement(val, func(it []byte) bool {
				items = append(items, it)
				return true
			})
		case slices.Contains(last, k):
			rest = fmt.Appendf(rest, `,"%s":%s`, k, val)
		default:
			if k == "seq" {
				seq, _ = events.ParseSeq(string(val))
			}
			head = fmt.Appendf(head, `"%s":%s,`, k, val)
		}
		return true
	})
	if at.Index > len(items) {
		return nil, badRequest(fmt.Sprintf("cursor: expected one that lies in the list of %d, found item %d", len(items), at.Index))
	}
	head = fmt.Appendf(head, `"%s":[`, name)
	next := place{Seq: seq, Index: at.Index, Format: at.Format}
	// The longest that can stand behind the items of a page that is not the last.
	more := func() []byte { return fmt.Appendf(nil, `],"more":true,"cursor":"%s"}`, next) }
	room := most - len(head) - len(fmt.Appendf(nil, `],"more":true,"cursor":"%s"}`, place{Seq: seq, Index: len(items), Format: at.Format}))
	page := head
	for ; next.Index < len(items); next.Index++ {
		it := items[next.Index]
		if room -= len(it) + 1; room < 0 {
			break
		}
		if next.Index > at.Index {
			page = append(page, ',')
		}
		page = append(page, it...)
	}
	switch {
	case next.Index == len(items) && len(page)+len(rest)+2 <= most:
		return append(append(append(page, ']'), rest...), '}'), nil
	case next.Index > at.Index:
		return append(page, more()...), nil
	}
	return nil, &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("item %d of %s does not fit a reply of %d bytes; read it over HTTP, or raise the server's max_payload", at.Index, name, most)}
}

// whole answers a route whose answer is not cut.
func (o *reads) whole(ctx context.Context, in *input, path string) (*output, error) {
	q, err := in.params()
	if err != nil {
		return nil, err
	}
	header, body, err := o.get(ctx, path, q)
	if err != nil {
		return nil, err
	}
	if most := o.most(); len(body) > most {
		return nil, &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("the answer has %d bytes, a reply at most %d; ask over HTTP", len(body), most)}
	}
	return &output{status: http.StatusOK, etag: header.Get("ETag"), body: json.RawMessage(body)}, nil
}

func (o *reads) session(ctx context.Context, in *input) (*output, error) {
	return o.whole(ctx, in, sessionsPath+pathEscape(in.session))
}

func (o *reads) status(ctx context.Context, in *input) (*output, error) {
	return o.whole(ctx, in, "/v1/status")
}

// sessions answers a page of the fleet, with fewer sessions than were asked for where they do
// not fit.
func (o *reads) sessions(ctx context.Context, in *input) (*output, error) {
	q, err := in.params()
	if err != nil {
		return nil, err
	}
	_, body, err := o.get(ctx, "/v1/sessions", q)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Sessions []json.RawMessage `json:"sessions"`
		Cursor   string            `json:"cursor"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return nil, err
	}
	room := o.most() - 400 // of the cursor and what is around the list
	page, cursor := []byte(`{"sessions":[`), answer.Cursor
	for i, it := range answer.Sessions {
		if room -= len(it) + 1; room < 0 {
			if i == 0 {
				return nil, &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("a session's header does not fit a reply of %d bytes; ask over HTTP", o.most())}
			}
			id, _ := events.Text(events.Get(answer.Sessions[i-1], "session"))
			cursor = base64.RawURLEncoding.EncodeToString([]byte(id))
			break
		}
		if i > 0 {
			page = append(page, ',')
		}
		page = append(page, it...)
	}
	page = append(page, ']')
	if cursor != "" {
		page = fmt.Appendf(page, `,"more":true,"cursor":"%s"`, cursor)
	}
	return &output{status: http.StatusOK, body: json.RawMessage(append(page, '}'))}, nil
}
