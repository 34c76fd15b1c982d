package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nats.go/micro"
	"github.com/nats-io/nuid"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
)

const (
	writers     = 64
	dataBytes   = 512
	lines       = 100 // of a batch
	prefill     = 10  // events of a session that is made
	clientConns = 4   // of callers of the NATS service
)

// manySessions are more than there are writers; tests have fewer.
var manySessions = 1000

// target is a session, with how many of its events were acknowledged.
type target struct {
	session string
	acked   atomic.Int64
}

// newTargets names sessions that are not there yet.
func (r *bed) newTargets(label string, n int) []*target {
	out := make([]*target, n)
	for i := range out {
		out[i] = &target{session: fmt.Sprintf("%s-%04d", label, i)}
	}
	r.targets = append(r.targets, out...)
	return out
}

// sessions makes sessions that have some events already.
func (r *bed) sessions(ctx context.Context, label string, n int) ([]*target, error) {
	out := r.newTargets(label, n)
	calls := make([]call, n)
	for i, t := range out {
		calls[i] = appendTo(r.appender, t, repeat(userMessage, prefill))
	}
	return out, each(ctx, calls)
}

// each does every call once, as many at a time as there are writers.
func each(ctx context.Context, calls []call) error {
	var wg sync.WaitGroup
	var next atomic.Int64
	errs := make([]error, writers)
	for w := range writers {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(calls); i = int(next.Add(1)) - 1 {
				if _, errs[w] = calls[i](ctx); errs[w] != nil || ctx.Err() != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return context.Cause(ctx)
}

// userMessage is an event as a caller writes it, with dataBytes of data.
var userMessage = func() []byte {
	const head, tail = `{"id":"msg-0123456789","role":"user","content":[{"type":"text","text":"`, `"}],"source":{"kind":"user"}}`
	text := strings.Repeat("The quick brown fox jumps over the lazy dog. ", 16)[:dataBytes-len(head)-len(tail)]
	return []byte(`{"type":"user/message","surfaceOp":"append","data":` + head + text + tail + `}`)
}()

func repeat(event []byte, n int) [][]byte {
	out := make([][]byte, n)
	for i := range out {
		out[i] = event
	}
	return out
}

// appendTo appends through the Go API.
func appendTo(a *appender.Appender, t *target, evs [][]byte) call {
	return func(ctx context.Context) (int, error) {
		_, err := a.Append(ctx, appender.Request{Session: t.session, Events: evs})
		return t.done(len(evs), err)
	}
}

// done counts what was acknowledged.
func (t *target) done(n int, err error) (int, error) {
	if err != nil {
		return 0, fmt.Errorf("append to %s: %w", t.session, err)
	}
	t.acked.Add(int64(n))
	return n, nil
}

// kind is a case before there is a server for it.
type kind struct {
	name   string
	about  string
	listed bool
	fill   func(ctx context.Context, r *bed, l *load) error // makes its sessions and its calls
}

// kinds are all that is compared with the baseline.
func kinds() []kind {
	body := append(bytes.Join(repeat(userMessage, lines), []byte("\n")), '\n')
	return []kind{
		{"append/api/single", "Go API, 64 writers on 64 sessions", true, goAPI("single", writers, 1)},
		{"append/api/grouped16", "Go API, 16 callers on each of 64 sessions", true, goAPI("grouped", writers, 16)},
		{"append/api/1000sessions", "Go API, 64 writers on 1,000 sessions in turn", false, goAPIInTurn},
		{"append/api/1session", "Go API, 16 writers on one session", false, goAPI("shared", 1, 16)},
		{"append/nats/single", "NATS service, 64 callers on 64 sessions", true, service},
		{"append/http/single", "HTTP, 64 callers on 64 sessions", true, web("http", "application/json", userMessage, 1)},
		{"append/http/ndjson100", "HTTP, 64 callers on 64 sessions, 100 events a request", true, web("ndjson", "application/x-ndjson", body, lines)},
	}
}

// load makes a case at this server.
func (r *bed) load(ctx context.Context, k kind) (*load, error) {
	l := &load{name: k.name, about: k.about, listed: k.listed, stream: r.journal.Config().Stream}
	return l, k.fill(ctx, r, l)
}

// goAPI has so many callers append to each of so many sessions.
func goAPI(label string, sessions, each int) func(context.Context, *bed, *load) error {
	return func(ctx context.Context, r *bed, l *load) error {
		ts, err := r.sessions(ctx, label, sessions)
		for range each {
			for _, t := range ts {
				l.calls = append(l.calls, appendTo(r.appender, t, repeat(userMessage, 1)))
			}
		}
		return err
	}
}

func goAPIInTurn(ctx context.Context, r *bed, l *load) error {
	ts, err := r.sessions(ctx, "many", manySessions)
	for w := range writers {
		var mine []call
		for i := w; i < len(ts); i += writers {
			mine = append(mine, appendTo(r.appender, ts[i], repeat(userMessage, 1)))
		}
		l.calls = append(l.calls, inTurn(mine))
	}
	return err
}

func service(ctx context.Context, r *bed, l *load) error {
	ts, err := r.sessions(ctx, "nats", writers)
	if err != nil {
		return err
	}
	conns := make([]*nats.Conn, clientConns)
	for i := range conns {
		if conns[i], err = r.Connect(); err != nil {
			return err
		}
	}
	for i, t := range ts {
		l.calls = append(l.calls, overNATS(conns[i%clientConns], t))
	}
	return nil
}

// web has each session appended to over HTTP, some events a request.
func web(label, contentType string, body []byte, events int) func(context.Context, *bed, *load) error {
	return func(ctx context.Context, r *bed, l *load) error {
		ts, err := r.sessions(ctx, label, writers)
		for _, t := range ts {
			c := newCaller(r.http, t, contentType, body, events)
			l.calls = append(l.calls, c.call)
			l.after = append(l.after, c.close)
		}
		return err
	}
}

// inTurn does one of the calls after another.
func inTurn(calls []call) call {
	i := 0
	return func(ctx context.Context) (int, error) {
		i++
		return calls[i%len(calls)](ctx)
	}
}

// overNATS asks the appender's service.
func overNATS(nc *nats.Conn, t *target) call {
	subject := "palimpsest.append." + events.Token(t.session)
	return func(ctx context.Context) (int, error) {
		m, err := nc.RequestWithContext(ctx, subject, userMessage)
		if err == nil && m.Header.Get(micro.ErrorCodeHeader) != "" {
			err = fmt.Errorf("answer %s: %s", m.Header.Get(micro.ErrorCodeHeader), m.Data)
		}
		return t.done(1, err)
	}
}

// caller is a client of the HTTP API that keeps its connection while it is measured. The request
// is written as bytes that were made beforehand, and not by http.Client, whose share of the
// work would be larger than the handler's: what is to be measured is the server.
type caller struct {
	addr    string
	target  *target
	request []byte
	events  int // of a request

	conn    net.Conn // nil until the first call
	answers *bufio.Reader
}

func newCaller(addr string, t *target, contentType string, body []byte, n int) *caller {
	head := fmt.Sprintf("POST /v1/sessions/%s/events HTTP/1.1\r\nHost: %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n", url.PathEscape(t.session), addr, contentType, len(body))
	return &caller{addr: addr, target: t, request: append([]byte(head), body...), events: n}
}

func (c *caller) call(ctx context.Context) (int, error) {
	return c.target.done(c.events, c.post(ctx))
}

func (c *caller) post(ctx context.Context) (err error) {
	if c.conn == nil {
		if c.conn, err = new(net.Dialer).DialContext(ctx, "tcp", c.addr); err != nil {
			return err
		}
		c.answers = bufio.NewReader(c.conn)
	}
	if _, err := c.conn.Write(c.request); err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.answers, nil)
	if err != nil {
		return err
	}
	answer, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusCreated {
		err = fmt.Errorf("answer %s: %s", resp.Status, answer)
	}
	return err
}

func (c *caller) close(context.Context) error {
	if c.conn == nil {
		return nil
	}
	err := c.conn.Close()
	c.conn = nil
	return err
}

// rawPublishes is the baseline: what somebody writes who has nothing but nats.go and wants the
// same safety, from 64 goroutines on one connection, each on its own subject, one publish in
// flight each.
//
// "The same bytes" means: header and body are those of a stored commit of one event, read back
// from the log, and the subject is as long as a session's. What differs from message to message
// in a log does so here: the commit's id, which is the message id too, and the expected last
// sequence. Seq, digest and chain stay those of the template.
func (r *bed) rawPublishes(ctx context.Context) (*load, error) {
	ts, err := r.sessions(ctx, "model", writers)
	if err != nil {
		return nil, err
	}
	nc, err := r.Connect()
	if err != nil {
		return nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	log, err := r.js.Stream(ctx, r.journal.Config().Stream)
	if err != nil {
		return nil, err
	}
	l := &load{name: rawName, about: "jetstream.PublishMsg with expected last sequence, 64 goroutines on 64 subjects", stream: rawStream}
	last := make([]uint64, len(ts))                             // stream sequences
	l.after = append(l.after, func(ctx context.Context) error { // nobody looks at the messages again
		clear(last)
		return r.purge(ctx, rawStream)
	})
	for i, t := range ts {
		if _, err := appendTo(r.appender, t, [][]byte{userMessage})(ctx); err != nil {
			return nil, err
		}
		subject := r.journal.Subject(t.session)
		model, err := log.GetLastMsgForSubject(ctx, subject)
		if err != nil {
			return nil, err
		}
		// The publish sets the two headers of JetStream's that a commit has; the others are the read's.
		maps.DeleteFunc(model.Header, func(name string, _ []string) bool { return !strings.HasPrefix(name, "ce-") })
		msg := &nats.Msg{Subject: rawPrefix + strings.TrimPrefix(subject, r.journal.Config().Prefix), Header: model.Header, Data: model.Data}
		l.calls = append(l.calls, func(ctx context.Context) (int, error) {
			id := nuid.Next()
			msg.Header["ce-id"] = []string{id}
			ack, err := js.PublishMsg(ctx, msg, jetstream.WithMsgID(id), jetstream.WithExpectLastSequencePerSubject(last[i]))
			if err != nil {
				return 0, fmt.Errorf("publish to %s: %w", msg.Subject, err)
			}
			last[i] = ack.Sequence
			return 1, nil
		})
	}
	return l, nil
}
