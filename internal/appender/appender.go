// Package appender owns the write side: what is asked to be appended becomes planned, published
// and acknowledged commits, one in flight a session. It knows nothing of HTTP.
package appender

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/telemetry"
)

// Config is how the appender treats appends.
type Config struct {
	// Invariants says what is done about a broken lifecycle rule. Defaults to off.
	Invariants lifecycle.Mode
	// Freeze checks events that are held in memory against what was committed before they are
	// used. Defaults to true unless Invariants is off.
	Freeze *bool
	// MaxEvent is the largest canonical line in bytes. Defaults to 8 MiB; what the server takes
	// in one message is a limit besides.
	MaxEvent int
	// GroupEvents and GroupBytes bound how much of several callers' appends becomes one commit;
	// one caller's append is bounded by the size of a commit alone. Default to 64 and 256 KiB.
	GroupEvents, GroupBytes int
	// Queue is how many appends may wait for one session. Defaults to 1024.
	Queue int
	// PendingBytes bounds the events of all appends that wait or are in flight. Defaults to
	// 64 MiB.
	PendingBytes int
	// MaxCommit is the largest commit in bytes of its lines. Defaults to 8 MiB; what the server
	// takes in one message is a limit besides.
	MaxCommit int
	// MaxHeader is the largest session header in bytes. Defaults to 64 KiB.
	MaxHeader int
	// MaxSessionEvents and MaxSessionBytes bound a session: events, and bytes of their
	// canonical lines. Default to 10 million and 8 GiB.
	MaxSessionEvents, MaxSessionBytes int64
	// KeyWindow is how long an idempotency key is recognised without an expectedSeq.
	// Defaults to 10 minutes.
	KeyWindow time.Duration
	// CacheBytes bounds the memory of sessions that are kept between appends. Defaults to 256 MiB.
	CacheBytes int
	// LoadTimeout bounds loading a session's state. Defaults to 30 s.
	LoadTimeout time.Duration
	// StopGrace is how long, once the appender is told to stop, work may go on of which nothing was
	// published yet; then it is refused with unavailable, and may be sent to another appender. A
	// publish that was begun gets its time. Defaults to 1 s.
	StopGrace time.Duration
	// Now is the clock. Defaults to time.Now.
	Now func() time.Time
	// Telemetry makes spans of commits. Defaults to nil: none.
	Telemetry *telemetry.Telemetry
	// Logger hears of broken lifecycle rules and of trouble. Defaults to slog.Default().
	Logger *slog.Logger
}

func (c Config) withDefaults() Config {
	if c.Invariants == "" {
		c.Invariants = lifecycle.Off
	}
	if c.Freeze == nil {
		on := c.Invariants != lifecycle.Off
		c.Freeze = &on
	}
	num := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	num(&c.MaxEvent, 8<<20)
	num(&c.GroupEvents, 64)
	num(&c.GroupBytes, 256<<10)
	num(&c.Queue, 1024)
	num(&c.PendingBytes, 64<<20)
	num(&c.MaxCommit, 8<<20)
	num(&c.MaxHeader, 64<<10)
	if c.MaxSessionEvents == 0 {
		c.MaxSessionEvents = 10_000_000
	}
	if c.MaxSessionBytes == 0 {
		c.MaxSessionBytes = 8 << 30
	}
	if c.KeyWindow == 0 {
		c.KeyWindow = 10 * time.Minute
	}
	num(&c.CacheBytes, 256<<20)
	if c.LoadTimeout == 0 {
		c.LoadTimeout = 30 * time.Second
	}
	if c.StopGrace == 0 {
		c.StopGrace = time.Second
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// answerTime is what it takes to hand an answer to its caller, at the most.
const answerTime = time.Second

// Drain is how long after GiveUp the last answer comes at the most: a publish may begin until the grace
// is over, and is then pursued. Whoever carries the answers waits that long when the program stops.
func (c Config) Drain(log journal.Config) time.Duration {
	return c.withDefaults().StopGrace + log.Pursuit() + answerTime
}

// Appender appends to the sessions of a journal. It is safe for concurrent use.
type Appender struct {
	cfg     Config
	log     *journal.Journal
	headers *journal.Headers
	store   *snapshot.Store
	stats   Stats
	stamped atomic.Pointer[stamped] // the last one that was asked for

	stopping context.Context // ends when nothing is to be published any more
	stop     context.CancelFunc

	mu       sync.Mutex // guards all below
	sessions map[string]*actor
	idle     list.List // of *actor, most recently used first: those without work
	bytes    int       // of all loaded states
	pending  int       // bytes of events that wait or are in flight
	closed   bool
	grace    *time.Timer // ends stopping; nil until the appender is told to stop
	running  sync.WaitGroup
}

// Stats counts what the appender did since it started.
type Stats struct {
	Events, Commits, Refused, Conflicts, Violations, Loads atomic.Int64
}

// New returns an appender.
func New(j *journal.Journal, h *journal.Headers, s *snapshot.Store, cfg Config) *Appender {
	a := &Appender{cfg: cfg.withDefaults(), log: j, headers: h, store: s, sessions: map[string]*actor{}}
	a.stopping, a.stop = context.WithCancel(context.Background())
	return a
}

// Listen makes the appender hear of others that ask for a turn on a session which both append
// to. Without it they may starve. stop ends it.
func (a *Appender) Listen() (stop func(), err error) {
	return a.log.OnAskForTurn(func(session string) {
		a.mu.Lock()
		defer a.mu.Unlock()
		if s := a.sessions[session]; s != nil {
			s.contend()
		}
	})
}

// Stats returns the appender's counters.
func (a *Appender) Stats() *Stats { return &a.stats }

// Sessions returns how many sessions are in memory, and how many bytes their states take.
func (a *Appender) Sessions() (n, bytes int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.sessions), a.bytes
}

// GiveUp begins the appender's end: what nothing was published of within Config.StopGrace from now on is
// refused with unavailable, so that nobody waits for what is away. Until then appends are taken as
// ever. A second call changes nothing.
func (a *Appender) GiveUp() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.grace == nil {
		a.grace = time.AfterFunc(a.cfg.StopGrace, a.stop)
	}
}

// Stopping ends when nothing is to be published any more: Config.StopGrace after GiveUp or Close.
func (a *Appender) Stopping() context.Context { return a.stopping }

// shutDown is the error of work that was given up, or came too late.
func shutDown(session string, cause error) error {
	return &events.Error{Code: events.CodeUnavailable, Session: session, Cause: cause, Detail: "the appender is shutting down; send the request to another one"}
}

// Close waits until what was asked for is done or given up, or ctx ends. Appends from then on are
// refused.
func (a *Appender) Close(ctx context.Context) error {
	a.GiveUp()
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	done := make(chan struct{})
	go func() {
		a.running.Wait()
		close(done)
	}()
	select {
	case <-done:
		a.stop()
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Create stores a session's header. header may be empty: the session gets a default one. The
// same header again is no error; another one is session-exists.
func (a *Appender) Create(ctx context.Context, id string, header []byte) (h *events.Header, created bool, err error) {
	if len(header) == 0 {
		header = []byte("{}")
	}
	want, err := events.ParseHeader(header, id, a.cfg.Now().UnixMilli())
	if err != nil {
		return nil, false, err
	}
	if err := a.checkHeader(want); err != nil {
		return nil, false, err
	}
	if err := a.notPending(ctx, want.ID, want); err != nil {
		return nil, false, err
	}
	stored, created, err := a.headers.Create(ctx, want)
	if err != nil {
		return nil, false, err
	}
	if !created && !stored.Matches(header) {
		return nil, false, &events.Error{Code: events.CodeSessionExists, Session: want.ID, Detail: "the session has another header: " + clip(stored.Raw)}
	}
	return stored, created, nil
}

func (a *Appender) checkHeader(h *events.Header) error {
	if h.ParentSession == h.ID {
		return &events.Error{Code: events.CodeHeaderMalformed, Session: h.ID, Detail: "session header: parentSession: a session cannot be its own parent; name another one, or leave it out"}
	}
	if most := min(a.cfg.MaxHeader, a.log.MaxCommit()); len(h.Raw) > most {
		return &events.Error{Code: events.CodeTooLarge, Session: h.ID, Detail: fmt.Sprintf("session header: expected at most %d bytes, found %d", most, len(h.Raw))}
	}
	return nil
}

// stamp is the time of a commit that is made now. Commits of one millisecond share its text.
func (a *Appender) stamp() string {
	now := a.cfg.Now()
	last := a.stamped.Load()
	if last == nil || last.ms != now.UnixMilli() {
		last = &stamped{now.UnixMilli(), events.FormatTime(now)}
		a.stamped.Store(last)
	}
	return last.text
}

// stamped is a point in time, in Unix ms, and as a commit says it.
type stamped struct {
	ms   int64
	text string
}

// maxCommit is how many bytes the lines of one commit may have.
func (a *Appender) maxCommit() int { return min(a.cfg.MaxCommit, a.log.MaxCommit()) }

func clip(b []byte) string {
	if len(b) > 300 {
		return string(b[:300]) + "…"
	}
	return string(b)
}

// Format returns the format of a session, that of a default header when it is not there yet.
func (a *Appender) Format(ctx context.Context, session string) (events.Format, error) {
	h, err := a.headers.Get(ctx, session)
	if errors.Is(err, events.ErrSessionNotFound) {
		return events.Format3, nil
	}
	if err != nil {
		return 0, err
	}
	return h.Format, nil
}

// Request asks for an append to one session.
type Request struct {
	Session string
	// Events are the events as the caller wrote them, in order; stored all or not at all.
	Events [][]byte
	// Expected is the seq that the first event must get; nil when the caller does not care.
	Expected *events.Seq
	// Epoch is the writer's epoch; nil when the caller gave none.
	Epoch *events.Seq
	// Key is the caller's idempotency key, "" for none.
	Key string
	// Actor is the authenticated caller, "" when there is none.
	Actor string
	// Trace is the W3C traceparent that the commit carries.
	Trace string

	// Parsed are events that were validated already, in place of Events: an import's.
	Parsed []*events.Event
	// EmptyCallID accepts tool results with an empty callId, as import does.
	EmptyCallID bool

	// derive makes the events from the state; no events and no error: nothing is to be done.
	derive func(context.Context, *actor) ([][]byte, error)
	// A request that is repeated with its key is known by what its events are: begins is the
	// type of the first, and same, when given, judges the one at offset sameAt.
	begins string
	sameAt events.Seq
	same   func(*events.Event, events.Format) bool
	// takesFence lets the request through whoever the session's writer is, and however large
	// the session: it closes or takes over.
	takesFence bool
}

// Receipt says where an append was stored.
type Receipt struct {
	Session   string     `json:"session"`
	FirstSeq  events.Seq `json:"firstSeq"`
	LastSeq   events.Seq `json:"lastSeq"`
	Commit    string     `json:"commit"`
	Duplicate bool       `json:"duplicate"`
	// Digest is the digest of the last event of the commit that holds the append.
	Digest string `json:"digest"`
	// Violations are the lifecycle rules that the append breaks and observe mode let through.
	Violations []*Violation `json:"violations,omitempty"`
	// Warnings say which limits are used by 80 % or more.
	Warnings []string `json:"warnings,omitempty"`
}

// Violation is one broken lifecycle rule.
type Violation struct {
	Rule   events.Rule `json:"rule"`
	Seq    events.Seq  `json:"seq"`
	Detail string      `json:"detail"`
}

// Append appends the request's events and returns once they are committed. Errors are
// *events.Error; nothing was stored unless the code is outcome-unknown.
func (a *Appender) Append(ctx context.Context, r Request) (*Receipt, error) {
	if err := events.CheckSessionID(r.Session); err != nil {
		return nil, err
	}
	if len(r.Events)+len(r.Parsed) == 0 && r.derive == nil {
		return nil, &events.Error{Code: events.CodeBadRequest, Session: r.Session, Detail: "expected at least one event, found none"}
	}
	if err := checkKey(r.Key); err != nil {
		return nil, err
	}
	w := &work{Request: r, ctx: ctx}
	w.size = events.KeyReserve(r.Key)
	for _, e := range r.Events {
		w.size += len(e)
	}
	if err := a.submit(w); err != nil {
		return nil, err
	}
	if w.err != nil {
		a.stats.Refused.Add(1)
	}
	return w.receipt, w.err
}

// Repair closes the open turn of a session whose writer is gone. The receipt is nil when the
// log needs no closers.
func (a *Appender) Repair(ctx context.Context, session, actorName string) (*Receipt, error) {
	if _, err := a.headers.Get(ctx, session); err != nil {
		return nil, err
	}
	return a.Append(ctx, Request{Session: session, Actor: actorName, takesFence: true, derive: func(ctx context.Context, s *actor) ([][]byte, error) { return s.closers(ctx) }})
}

// Fence is what became of a request to be a session's writer.
type Fence struct {
	*Receipt
	Writer string     `json:"writer"`
	Epoch  events.Seq `json:"epoch"`
}

// WriterRequest asks for somebody to become a session's writer.
type WriterRequest struct {
	Session, Writer string
	Key             string // idempotency key, "" for none
	Expected        *events.Seq
	Actor           string
}

// TakeWriter makes somebody the session's writer: whoever was it before is refused from then on.
// With Expected the session must be at that seq.
func (a *Appender) TakeWriter(ctx context.Context, r WriterRequest) (*Fence, error) {
	id, writer := r.Session, r.Writer
	if writer == "" || len(writer) > events.MaxSessionID || !utf8.ValidString(writer) {
		return nil, &events.Error{Code: events.CodeBadRequest, Session: id, Detail: fmt.Sprintf("writer: expected 1 to %d bytes of UTF-8, found %q", events.MaxSessionID, clip([]byte(writer)))}
	}
	f := &Fence{Writer: writer}
	receipt, err := a.Append(ctx, Request{Session: id, Key: r.Key, Expected: r.Expected, Actor: r.Actor, takesFence: true, begins: typeWriter, derive: func(_ context.Context, s *actor) ([][]byte, error) {
		f.Epoch = s.state.Epoch() + 1
		return [][]byte{s.fenceEvent(writer, a.cfg.Now().UnixMilli())}, nil
	}})
	f.Receipt = receipt
	if err != nil {
		return nil, err
	}
	if receipt.Duplicate { // an earlier request took it, at whatever epoch the session had then
		st, err := a.Status(ctx, id)
		if err != nil {
			return nil, err
		}
		e, _, err := a.readEvent(ctx, id, receipt.FirstSeq, st.Header.Format)
		if err != nil {
			return nil, err
		}
		if e == nil { // lost since it was recognised
			return nil, lostLog(id)
		}
		fields := e.Fields()
		if fields.Writer != writer {
			return nil, &events.Error{Code: events.CodeKeyReused, Session: id, Seq: &receipt.FirstSeq, Detail: fmt.Sprintf("the idempotency key was used for the writer %q; use a new key for %q", fields.Writer, writer)}
		}
		f.Epoch = fields.Epoch
	}
	return f, nil
}

const typeWriter = "session/writer"

// Status is what an appender knows of a session.
type Status struct {
	Header *events.Header
	session.Summary
}

// Status reads a session's state up to the end of its log.
func (a *Appender) Status(ctx context.Context, id string) (*Status, error) {
	if err := events.CheckSessionID(id); err != nil {
		return nil, err
	}
	h, err := a.headers.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	st := &Status{Header: h}
	w := &work{Request: Request{Session: id}, ctx: ctx, inspect: func(s *actor) { st.Summary = s.state.Summary() }}
	if err := a.submit(w); err != nil {
		return nil, err
	}
	return st, w.err
}

// submit has work done and returns when it is: a publish that was sent is pursued to its end,
// whether or not the caller waits. A session at rest is worked by the caller itself, which
// spares two changes of goroutine; what others hand in meanwhile is not its business.
func (a *Appender) submit(w *work) error {
	s, atRest, err := a.enqueue(w)
	if err != nil {
		return err
	}
	if atRest {
		s.begin(w)
	} else {
		<-w.done
	}
	// Of what was published the outcome is known, or said not to be.
	if w.err != nil && !isOurs(w.err) && a.stopping.Err() != nil {
		w.err = shutDown(w.Session, w.err)
	}
	return nil
}

// enqueue hands work to the session's actor. atRest says that the caller must make it work on that.
func (a *Appender) enqueue(w *work) (s *actor, atRest bool, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed || a.stopping.Err() != nil {
		return nil, false, shutDown(w.Session, nil)
	}
	s = a.sessions[w.Session]
	known := s != nil
	if !known {
		s = &actor{a: a, id: w.Session}
	}
	if len(s.queue) >= a.cfg.Queue {
		return nil, false, &events.Error{Code: events.CodeOverloaded, Session: w.Session, Detail: fmt.Sprintf("%d appends wait for this session already; try again later", len(s.queue))}
	}
	if a.pending+w.size > a.cfg.PendingBytes && a.pending > 0 {
		return nil, false, &events.Error{Code: events.CodeOverloaded, Session: w.Session, Detail: fmt.Sprintf("%d bytes of appends are waiting already; try again later", a.pending)}
	}
	if !known {
		a.sessions[w.Session] = s
	}
	a.pending += w.size
	if s.busy {
		w.done = make(chan struct{})
		s.queue = append(s.queue, w)
		return s, false, nil
	}
	s.busy = true
	if s.place != nil {
		a.idle.Remove(s.place)
		s.place = nil
	}
	a.running.Add(1)
	return s, true, nil
}

// rest puts an actor without work aside and drops those that were not used for longest
// while the states take more memory than they may. It reports false when there is work after all, and
// does nothing then. done is work that is not counted as pending any more.
func (a *Appender) rest(s *actor, done []*work) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(s.queue) > 0 {
		return false
	}
	a.release(done)
	s.busy, s.queue = false, nil
	if s.unborn != nil { // it may be created with another header before the next append
		s.state, s.keys, s.unborn = nil, nil, nil
	}
	size := 0
	if s.state != nil {
		size = s.state.Bytes() + s.keys.bytes() + 512
	}
	a.bytes += size - s.size
	s.size = size
	if s.state == nil {
		delete(a.sessions, s.id)
		return true
	}
	s.place = a.idle.PushFront(s)
	for a.bytes > a.cfg.CacheBytes && a.idle.Len() > 0 {
		old := a.idle.Remove(a.idle.Back()).(*actor)
		old.place = nil
		a.bytes -= old.size
		delete(a.sessions, old.id)
	}
	return true
}

// lineReserve is how much longer an event's canonical line may be than what its caller wrote:
// seq, time and a line end.
const lineReserve = 64

// take removes from the actor's queue what may become one commit. done is work that is not counted as
// pending any more.
func (a *Appender) take(s *actor, done []*work) []*work {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.release(done)
	clear(done) // a part of what the queue was
	n, count, size, reserve := 0, 0, 0, 0
	for n < len(s.queue) {
		w := s.queue[n]
		count += len(w.Events) + len(w.Parsed)
		size += w.size
		reserve += len(w.Events)*lineReserve + 2*len(w.Key)
		if n > 0 && (w.solitary() || s.queue[0].solitary() || w.Actor != s.queue[0].Actor ||
			count > a.cfg.GroupEvents || size > a.cfg.GroupBytes || size+reserve > a.maxCommit()) {
			break
		}
		n++
	}
	out := s.queue[:n:n]
	s.queue = s.queue[n:]
	return out
}

// release takes work that is done off the count of what is pending. The caller holds the mutex.
func (a *Appender) release(group []*work) {
	for _, w := range group {
		a.pending -= w.size
	}
}

// load reads a session's state: from its head and what the log holds behind it, or from the
// log alone.
func (a *Appender) load(ctx context.Context, s *actor, fromLog bool) error {
	a.stats.Loads.Add(1)
	s.unborn = nil
	h, err := a.headers.Get(ctx, s.id)
	if errors.Is(err, events.ErrSessionNotFound) {
		if h, err = a.adopt(ctx, s.id, err); err == nil {
			s.unborn = h
		}
	}
	if err != nil {
		return err
	}
	return s.load(ctx, h, fromLog)
}

// adopt makes a default header for a session that is unknown, to be stored with its first
// event, unless it is reserved or has a log: then its header is still to come, from a fork.
func (a *Appender) adopt(ctx context.Context, id string, absent error) (*events.Header, error) {
	if errors.Is(absent, journal.ErrReserved) {
		return nil, &events.Error{Code: events.CodeSessionPending, Session: id, Detail: "a fork is making the session and is not complete; repeat the fork request"}
	}
	if err := a.notPending(ctx, id, nil); err != nil {
		return nil, err
	}
	return events.ParseHeader([]byte("{}"), id, a.cfg.Now().UnixMilli())
}

// notPending refuses a session that has a log and no header: a fork is under way, or a power cut took
// the header. The one that the log's chain starts from, given as want, is not refused.
func (a *Appender) notPending(ctx context.Context, id string, want *events.Header) error {
	last, err := a.log.LeaderLast(ctx, id)
	var garbage *journal.MalformedError
	switch {
	case err != nil && !errors.As(err, &garbage):
		return err
	case err == nil && last == nil:
		return nil
	}
	if _, herr := a.headers.Get(ctx, id); !errors.Is(herr, events.ErrSessionNotFound) {
		return herr // nil: its header is there, maybe since a moment ago
	} else if want != nil && !errors.Is(herr, journal.ErrReserved) {
		if own, err := a.startsFrom(ctx, want); err != nil || own {
			return err
		}
	}
	if err == nil {
		err = &events.Error{Code: events.CodeSessionPending, Session: id, Detail: "the session has events but no header: the fork that makes it is not complete, repeat the fork request; or its header was lost, create it with the very same one"}
	}
	return err
}

// startsFrom reports whether the chain of a session's log starts from a header.
func (a *Appender) startsFrom(ctx context.Context, h *events.Header) (own bool, err error) {
	enough := errors.New("enough")
	err = a.log.LeaderTail(ctx, h.ID, 0, func(c *events.Commit) error {
		own = c.First == 0 && events.SeedChain(h.ID, h.Raw).NextChain(c) == c.Chain
		return enough
	})
	if errors.Is(err, enough) {
		err = nil
	}
	return own, err
}
