package api

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
)

// ServiceConfig is a program's NATS side.
type ServiceConfig struct {
	// Prefix is the first token of the subjects. Defaults to palimpsest.
	Prefix string
	// Version is the service's version, as a semantic version. Defaults to 0.1.0.
	Version string
	// Parallel is how many appends are worked on at the same time, and how many of them are
	// endpoints of that name there are; the others wait in the client's buffers. Defaults to
	// 64. Of every other operation there are 2. Of a projector it is the number of every
	// operation and defaults to 16.
	Parallel int
	// ReplyBytes is the largest body of a projector's reply. Defaults to what the server's
	// max_payload allows, less room for headers.
	ReplyBytes int
	// Logger hears of failed requests. Defaults to slog.Default().
	Logger *slog.Logger
}

// Services answers requests over NATS: the same operations, bodies and problems as over HTTP.
// It is a platform.Service.
type Services struct {
	conn        *nats.Conn
	out         *journal.Outbox
	name, about string
	ops         []operation
	alone       []string              // operations whose subject names no session
	parallel    func(name string) int // endpoints of an operation
	ctx         context.Context       // of every request
	stopWaiting func()                // called by Stop: ends ctx; may be nil, when somebody else ends it
	cfg         ServiceConfig

	mu      sync.Mutex // guards all below
	service micro.Service
	active  int           // requests that are being worked on
	still   chan struct{} // closed when active is 0, while somebody waits for that
}

// NewAppenderServices returns the appender's NATS services: <prefix>.append.<token> and so on.
func NewAppenderServices(conn *nats.Conn, a *appender.Appender, cfg ServiceConfig) *Services {
	if cfg.Parallel == 0 {
		cfg.Parallel = 64
	}
	s := newServices(conn, "palimpsest-appender", "Appends to agent sessions; subjects end in the session's token", cfg)
	s.ops = (&appends{a}).operations()
	s.ctx = a.Stopping()
	s.parallel = func(op string) int {
		if op == "append" {
			return cfg.Parallel
		}
		return 2
	}
	return s
}

func newServices(conn *nats.Conn, name, about string, cfg ServiceConfig) *Services {
	if cfg.Prefix == "" {
		cfg.Prefix = "palimpsest"
	}
	if cfg.Version == "" {
		cfg.Version = "0.1.0"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	out := journal.NewOutbox(conn, func(m *nats.Msg, err error) {
		cfg.Logger.Warn("answer could not be sent", "subject", m.Subject, "err", err)
	})
	return &Services{conn: conn, out: out, name: name, about: about, cfg: cfg}
}

// Start begins to answer.
func (s *Services) Start(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.service != nil {
		return fmt.Errorf("api: service %s runs already", s.name)
	}
	svc, err := micro.AddService(s.conn, micro.Config{
		Name: s.name, Version: s.cfg.Version, Description: s.about,
		QueueGroup: s.name,
	})
	if err != nil {
		return fmt.Errorf("api: service %s: %w", s.name, err)
	}
	for _, op := range s.ops {
		h := micro.HandlerFunc(func(r micro.Request) { s.serve(op, r) })
		// An endpoint works on one request at a time, and its statistics are right only when it
		// answers before it returns: what runs in parallel is several endpoints of one name.
		subject := s.cfg.Prefix + "." + op.name
		if !slices.Contains(s.alone, op.name) {
			subject += ".*"
		}
		for range s.parallel(op.name) {
			if err := svc.AddEndpoint(op.name, h, micro.WithEndpointSubject(subject)); err != nil {
				_ = svc.Stop()
				return fmt.Errorf("api: endpoint %s: %w", op.name, err)
			}
		}
	}
	s.service = svc
	return nil
}

// flushTime bounds how long Stop waits for the server to confirm that it sends no more requests:
// it may be gone by then.
const flushTime = 5 * time.Second

// Stop takes no further requests and waits for those that are being worked on.
func (s *Services) Stop(ctx context.Context) error {
	s.mu.Lock()
	svc := s.service
	s.service = nil
	s.mu.Unlock()
	if svc == nil {
		return nil
	}
	if s.stopWaiting != nil {
		s.stopWaiting()
	}
	// The subscriptions drain: what they hold already still comes, and is answered.
	err := svc.Stop()
	if s.conn.IsConnected() {
		flush, cancel := context.WithTimeout(ctx, flushTime)
		if ferr := s.conn.FlushWithContext(flush); err == nil {
			err = ferr
		}
		cancel()
	} else { // nobody is there to hear of it, nor to send more
		err = nil
	}
	s.mu.Lock()
	var still chan struct{}
	if s.active > 0 {
		still = make(chan struct{})
		s.still = still
	}
	s.mu.Unlock()
	if still == nil {
		return err
	}
	select {
	case <-still:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// begin counts a request that is being worked on, until end is called.
func (s *Services) begin() (end func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.active--; s.active == 0 && s.still != nil {
			close(s.still)
			s.still = nil
		}
	}
}

// serve works on a request.
func (s *Services) serve(op operation, r micro.Request) {
	defer s.begin()()
	defer func() {
		if p := recover(); p != nil {
			s.cfg.Logger.Error("panic in a service", "subject", r.Subject(), "panic", fmt.Sprint(p))
			s.refuse(r, &events.Error{Code: events.CodeInternal, Detail: "the server made a mistake; it is in its log"})
		}
	}()
	out, err := s.answer(op, r)
	if err != nil {
		s.refuse(r, whenEnded(s.ctx, err))
		return
	}
	h := nats.Header{"Content-Type": {typeJSON}, "Palimpsest-Status": {strconv.Itoa(out.status)}}
	if out.etag != "" {
		h["ETag"] = []string{out.etag}
	}
	body, err := events.Marshal(out.body)
	if err != nil {
		s.cfg.Logger.Warn("answer could not be sent", "subject", r.Subject(), "err", err)
		return
	}
	// Not with r.Respond, which counts nothing for an answer that is no error.
	s.out.Publish(&nats.Msg{Subject: r.Reply(), Header: h, Data: body})
}

func (s *Services) answer(op operation, r micro.Request) (*output, error) {
	var session string
	var err error
	if subject := r.Subject(); !slices.Contains(s.alone, op.name) {
		if session, err = events.SessionOf(subject[strings.LastIndexByte(subject, '.')+1:]); err != nil {
			return nil, &events.Error{Code: events.CodeSessionID, Detail: err.Error() + "; write every byte of the id outside [A-Za-z0-9_-] as =XX"}
		}
	}
	if err := checkHeaders(r.Headers()); err != nil {
		return nil, err
	}
	in := &input{session: session, body: r.Data(), query: &query{Values: url.Values{}}, header: func(name string) string {
		for k, v := range r.Headers() { // NATS headers keep the case in which they were sent
			if strings.EqualFold(k, name) && len(v) > 0 {
				return v[0]
			}
		}
		return ""
	}}
	if op.types != nil {
		if in.contentType, err = contentType(in.header("Content-Type"), op.types); err != nil {
			return nil, err
		}
		if err := identity(in.header("Content-Encoding")); err != nil {
			return nil, err
		}
	}
	return op.do(s.ctx, in)
}

// refuse answers with the problem document that HTTP would have, in the body of a service error.
func (s *Services) refuse(r micro.Request, err error) {
	p := ProblemOf(err)
	body, merr := events.Marshal(p)
	if merr != nil {
		body = nil
	}
	if p.Status >= http.StatusInternalServerError {
		s.cfg.Logger.Warn("request failed", "subject", r.Subject(), "status", p.Status, "err", err)
	}
	h := micro.Headers{"Content-Type": {"application/problem+json"}}
	if p.retriable() {
		h["Retry-After"] = []string{strconv.Itoa(retryAfter)}
	}
	if rerr := r.Error(strconv.Itoa(p.Status), p.Title, body, micro.WithHeaders(h)); rerr != nil {
		s.cfg.Logger.Warn("answer could not be sent", "subject", r.Subject(), "err", rerr)
	}
}
