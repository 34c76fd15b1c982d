package appender_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/platform"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	goleak.VerifyTestMain(m)
}

// world is a server and what tests see of it from outside.
type world struct {
	*journaltest.Server
	nc *nats.Conn
}

func newWorld(t testing.TB, change ...func(*platform.EmbedConfig)) *world {
	t.Helper()
	s := journaltest.Start(t, change...)
	return &world{s, s.Conn(t)}
}

// process is one appender process: connections, journal, appender.
type process struct {
	*appender.Appender
	log     *journal.Journal
	headers *journal.Headers
	store   *snapshot.Store
}

// start starts an appender; it is closed with the test.
func (w *world) start(t testing.TB, cfg appender.Config, log ...journal.Config) *process {
	t.Helper()
	var jc journal.Config
	if len(log) > 0 {
		jc = log[0]
	}
	ctx := journaltest.Context(t)
	p := new(process)
	var err error
	p.log, err = journal.Open(ctx, journal.Conns{Publish: []*nats.Conn{w.Conn(t), w.Conn(t)}, Read: w.Conn(t)}, jc, events.DefaultVocabulary())
	if err == nil {
		p.headers, err = p.log.OpenHeaders(ctx)
	}
	if err == nil {
		p.store, err = snapshot.Open(ctx, p.log.JetStream(), 1)
	}
	if err != nil {
		t.Fatal(err)
	}
	p.Appender = appender.New(p.log, p.headers, p.store, cfg)
	t.Cleanup(func() {
		if err := p.Close(journaltest.Context(t)); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return p
}

// check reads a session's log past the journal and checks it as a whole: contiguous, no commit
// twice, both chains.
func (w *world) check(t testing.TB, session string) *journaltest.Log {
	t.Helper()
	log, err := w.read(t, session)
	if err != nil {
		t.Fatalf("session %q: %v", session, err)
	}
	return log
}

// read is check for a test that can name what is wrong.
func (w *world) read(t testing.TB, session string) (*journaltest.Log, error) {
	t.Helper()
	token := events.Token(session)
	subject := fmt.Sprintf("sessions.%d.%s", events.Partition(token, 32), token)
	return journaltest.ReadLog(t, w.nc, "SESSIONS", subject, session, w.header(t, session))
}

// header is the session's header as it is stored, nil when it has none.
func (w *world) header(t testing.TB, session string) []byte {
	t.Helper()
	js, err := jetstream.New(w.nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx := journaltest.Context(t)
	kv, err := js.KeyValue(ctx, "HEADERS")
	if err != nil {
		t.Fatal(err)
	}
	e, err := kv.Get(ctx, events.Token(session))
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	if bytes.HasPrefix(e.Value(), []byte(`["reserved",`)) { // reserved by a fork
		return nil
	}
	return e.Value()
}

// project writes the session's head as a projector would that has folded its first commits,
// all of them when commits is negative.
func (p *process) project(t testing.TB, session string, format events.Format, commits int) {
	t.Helper()
	ctx := journaltest.Context(t)
	snap := snapshot.New(session, format, surface.KeepBodies)
	enough := errors.New("enough")
	err := p.log.ReadToEnd(ctx, session, 0, func(c *events.Commit) error {
		if commits == 0 {
			return enough
		}
		commits--
		return snap.Fold(c, p.log.Vocabulary(), nil)
	})
	if err != nil && err != enough {
		t.Fatal(err)
	}
	_, rev, err := p.store.Head(ctx, session)
	if err != nil {
		t.Fatal(err)
	}
	flush, err := snap.Flush()
	if err == nil {
		_, err = p.store.Write(ctx, flush, rev)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// gate holds publishes back.
type gate struct {
	entered chan *events.Commit // one for each publish that is held
	open    chan struct{}       // closed when none is held any more
	once    sync.Once
}

// hold makes the process's publishes wait, until release. then, when given, says what becomes
// of a publish that is not held (any more): an error is taken for its answer. It must be called
// before anything is appended.
func (p *process) hold(t testing.TB, then ...func(*events.Commit) error) *gate {
	t.Helper()
	g := &gate{entered: make(chan *events.Commit, 1000), open: make(chan struct{})}
	p.log.Faults.BeforePublish = func(c *events.Commit) error {
		select {
		case <-g.open:
		default:
			g.entered <- c
			<-g.open
		}
		for _, f := range then {
			return f(c)
		}
		return nil
	}
	t.Cleanup(g.release)
	return g
}

func (g *gate) release() { g.once.Do(func() { close(g.open) }) }

// answer is what an append came back with.
type answer struct {
	*appender.Receipt
	err error
}

// send appends in the background; the answer comes on the channel.
func (p *process) send(t testing.TB, r appender.Request) <-chan answer {
	t.Helper()
	out := make(chan answer, 1)
	ctx := journaltest.Context(t)
	go func() {
		receipt, err := p.Append(ctx, r)
		out <- answer{receipt, err}
	}()
	return out
}

// queue sends an append and waits until it stands in the queue behind those before it.
func (p *process) queue(t testing.TB, r appender.Request) <-chan answer {
	t.Helper()
	n := p.Waiting(r.Session)
	out := p.send(t, r)
	journaltest.Eventually(t, "the append to be in the queue", func() bool { return p.Waiting(r.Session) == n+1 })
	return out
}

// must appends and fails the test when that is refused.
func (p *process) must(t testing.TB, r appender.Request) *appender.Receipt {
	t.Helper()
	receipt, err := p.Append(journaltest.Context(t), r)
	if err != nil {
		t.Fatalf("append to %s: %v", r.Session, err)
	}
	return receipt
}

// refused appends and fails the test when that is not refused with the code and rule.
func (p *process) refused(t testing.TB, r appender.Request, code events.Code, rule events.Rule) *events.Error {
	t.Helper()
	receipt, err := p.Append(journaltest.Context(t), r)
	e := asError(err)
	if e.Code != code || e.Rule != rule || receipt != nil {
		t.Fatalf("append to %s: got %+v, %v; want %s %s", r.Session, receipt, err, code, rule)
	}
	return e
}

func asError(err error) *events.Error {
	if e, ok := errors.AsType[*events.Error](err); ok {
		return e
	}
	return new(events.Error)
}

// to is a request to append the given events.
func to(session string, lines ...string) appender.Request {
	r := appender.Request{Session: session}
	for _, l := range lines {
		r.Events = append(r.Events, []byte(l))
	}
	return r
}

// at is a request with an expected seq.
func at(seq events.Seq, r appender.Request) appender.Request {
	r.Expected = &seq
	return r
}

// note is a log-only event that carries a text.
func note(text string) string {
	return fmt.Sprintf(`{"type":"goal/change","data":{"note":%q}}`, text)
}

func logOnly(typ, data string) string { return fmt.Sprintf(`{"type":%q,"data":%s}`, typ, data) }

// user is a user/message. over, when given, are the first and last node that it replaces; it
// cites all of cites.
func user(id string, over ...events.Seq) string {
	return onSurface("user/message", fmt.Sprintf(`{"id":%q,"role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"hello"}]}`, id), over...)
}

// onSurface is a surface event; with over it replaces the first through the last of these and
// cites them all.
func onSurface(typ, data string, over ...events.Seq) string {
	if len(over) == 0 {
		return fmt.Sprintf(`{"type":%q,"surfaceOp":"append","data":%s}`, typ, data)
	}
	cites, err := json.Marshal(over)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf(`{"type":%q,"surfaceOp":{"op":"replace","startSeq":%d,"endSeq":%d},"sourceEventSeqs":%s,"data":%s}`, typ, over[0], over[len(over)-1], cites, data)
}

func assistant(id string, turn, step int, calls ...string) string {
	content := `{"type":"text","text":"ok"}`
	for _, c := range calls {
		content += fmt.Sprintf(`,{"type":"tool-call","id":%q,"name":"run","arguments":"{}"}`, c)
	}
	return onSurface("assistant/message", fmt.Sprintf(`{"turn":%d,"step":%d,"message":{"id":%q,"role":"assistant","source":{"kind":"model","provider":"p","model":"m"},"content":[%s]}}`, turn, step, id, content))
}

func toolCall(turn, step int, call string) string {
	return logOnly("tool/call", fmt.Sprintf(`{"turn":%d,"step":%d,"callId":%q,"name":"run"}`, turn, step, call))
}

// result is a tool/result whose content is a text of the given size.
func result(turn, step int, call string, size int, over ...events.Seq) string {
	return onSurface("tool/result", fmt.Sprintf(`{"turn":%d,"step":%d,"message":{"id":"r-%s","role":"user","source":{"kind":"tool","callId":%q},"content":[{"type":"tool-result","toolCallId":%q,"isError":false,"content":[{"type":"text","text":%q}]}]}}`,
		turn, step, call, call, call, strings.Repeat("x", size)), over...)
}

func turn(what string, n int) string {
	return logOnly("turn/"+what, fmt.Sprintf(`{"turn":%d}`, n))
}

func step(what string, turn, n int) string {
	return logOnly("step/"+what, fmt.Sprintf(`{"turn":%d,"step":%d}`, turn, n))
}

// fixed is a clock that stands still.
func fixed() time.Time { return time.UnixMilli(1_767_225_600_000) }

// counter makes the n-th call of a hook do something else.
func counter(f func(n int64, c *events.Commit) error) func(*events.Commit) error {
	var n atomic.Int64
	return func(c *events.Commit) error { return f(n.Add(1), c) }
}

func count(t testing.TB, log *journaltest.Log, text string, want int) {
	t.Helper()
	if got := log.Count(text); got != want {
		t.Errorf("%d events contain %s, want %d", got, text, want)
	}
}
