package projection_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/api"
	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

// author writes a session: messages and tool results, several events a commit, replacements,
// compactions and prunes. It knows the surface that comes of it.
type author struct {
	w       *world
	id      string
	rng     *rand.Rand
	size    int // of the largest text
	next    events.Seq
	surface []events.Seq
	tools   []events.Seq // tool results that are on the surface
}

func (w *world) author(id string, seed uint64, size int) *author {
	return &author{w: w, id: id, rng: rand.New(rand.NewPCG(seed, 0)), size: size}
}

// shadow puts a node in the place of the nodes from position at to position to.
func (a *author) shadow(at, to int, by events.Seq) {
	gone := slices.Clone(a.surface[at : to+1])
	a.surface = slices.Replace(a.surface, at, to+1, by)
	a.tools = slices.DeleteFunc(a.tools, func(s events.Seq) bool { return slices.Contains(gone, s) })
}

// span is a few neighbouring nodes.
func (a *author) span() (from, to int) {
	from = a.rng.IntN(len(a.surface))
	return from, min(len(a.surface)-1, from+a.rng.IntN(6))
}

// commit appends something.
func (a *author) commit(ctx context.Context) error {
	var r *appender.Receipt
	var err error
	switch n := a.rng.IntN(10); {
	case n == 0 && len(a.surface) > 3:
		from, to := a.span()
		r, err = a.w.Compact(ctx, appender.CompactRequest{Session: a.id, Start: a.surface[from], End: a.surface[to], Summary: json.RawMessage(`"summary"`)})
		if err == nil {
			a.shadow(from, to, r.FirstSeq+2)
		}
	case n == 1 && len(a.tools) > 0:
		seq := a.tools[a.rng.IntN(len(a.tools))]
		r, err = a.w.Prune(ctx, appender.PruneRequest{Session: a.id, Seq: seq})
		if err == nil {
			at := slices.Index(a.surface, seq)
			a.shadow(at, at, r.FirstSeq)
			a.tools = append(a.tools, r.FirstSeq)
		}
	default:
		req := appender.Request{Session: a.id}
		for range 1 + a.rng.IntN(5) {
			seq := a.next + events.Seq(len(req.Events))
			text := fmt.Sprint(seq, " ", strings.Repeat("x", a.rng.IntN(a.size)))
			raw := user(text)
			switch n := a.rng.IntN(8); {
			case n == 0:
				raw = `{"type":"goal/change","data":{}}`
			case n == 1:
				raw = fmt.Sprintf(`{"type":"tool/result","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"r","role":"user","source":{"kind":"tool","callId":"c"},"content":[{"type":"tool-result","toolCallId":"c","isError":false,"content":[{"type":"text","text":"%s"}]}]}}}`, text)
				a.surface, a.tools = append(a.surface, seq), append(a.tools, seq)
			case n == 2 && len(a.surface) > 0:
				from, to := a.span()
				raw = replace(a.surface[from:to+1], text)
				a.shadow(from, to, seq)
			default:
				a.surface = append(a.surface, seq)
			}
			req.Events = append(req.Events, []byte(raw))
		}
		r, err = a.w.Append(ctx, req)
	}
	if err != nil {
		return err
	}
	if r.FirstSeq != a.next {
		return fmt.Errorf("%s: append at seq %d, expected %d", a.id, r.FirstSeq, a.next)
	}
	a.next = r.LastSeq + 1
	return nil
}

// end appends the session's last event, which watchers know by its type.
func (a *author) end(ctx context.Context) error {
	r, err := a.w.Append(ctx, appender.Request{Session: a.id, Events: [][]byte{[]byte(last)}})
	if err != nil {
		return err
	}
	a.next, a.surface = r.LastSeq+1, append(a.surface, r.LastSeq)
	return nil
}

const last = `{"type":"system/message","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"s","role":"system","source":{"kind":"system"},"content":[{"type":"text","text":"the end"}]}}}`

// rebuilt is a surface that is made of deltas alone.
type rebuilt struct {
	surface []events.Seq
	from    events.Seq // where it began
	at      events.Seq // seq of the last delta, or where it began
	seen    []events.Seq
	ended   bool
}

func rebuild(surface []events.Seq, from events.Seq) *rebuilt {
	return &rebuilt{surface: surface, from: from, at: from}
}

func (b *rebuilt) apply(d projection.Delta) error {
	if d.Seq <= b.at || d.Node.Seq != d.Seq {
		return fmt.Errorf("delta %+v came behind seq %d", d, b.at)
	}
	switch d.Op {
	case "append":
		if len(d.Shadowed) > 0 {
			return fmt.Errorf("delta %+v appends and shadows", d)
		}
		b.surface = append(b.surface, d.Seq)
	case "replace":
		at := -1
		if len(d.Shadowed) > 0 {
			at = slices.Index(b.surface, d.Shadowed[0])
		}
		if at < 0 || at+len(d.Shadowed) > len(b.surface) || !slices.Equal(b.surface[at:at+len(d.Shadowed)], d.Shadowed) {
			return fmt.Errorf("delta %+v does not fit %v", d, b.surface)
		}
		b.surface = slices.Replace(b.surface, at, at+len(d.Shadowed), d.Seq)
	default:
		return fmt.Errorf("delta %+v", d)
	}
	b.at, b.seen, b.ended = d.Seq, append(b.seen, d.Seq), d.Node.Type == events.TypeSystem
	return nil
}

// until reads deltas until a condition holds.
func (b *rebuilt) until(ctx context.Context, w *projection.Watch, condition func() bool) error {
	for !condition() {
		ds, err := w.Next(ctx)
		if err != nil {
			return err
		}
		for _, d := range ds {
			if err := b.apply(d); err != nil {
				return err
			}
		}
	}
	return nil
}

// check compares it with the session's log, which is read with nothing but the bare client.
func (b *rebuilt) check(w *world, session string) {
	w.t.Helper()
	l := w.refold(session, events.MaxSeq)
	var want []events.Seq
	for _, seq := range l.changed {
		if seq > b.from {
			want = append(want, seq)
		}
	}
	if !slices.Equal(b.seen, want) {
		w.t.Errorf("%s from seq %d: saw deltas %v, want %v", session, b.from, b.seen, want)
	}
	if !slices.Equal(b.surface, l.surface) {
		w.t.Errorf("%s from seq %d: rebuilt %v, want %v", session, b.from, b.surface, l.surface)
	}
}

// hubs are those of a process with a connection of its own.
func (w *world) hubs() (*projection.Hubs, *nats.Conn) {
	nc := w.srv.Conn(w.t)
	return projection.NewHubs(w.reader, nc), nc
}

func (w *world) watch(hs *projection.Hubs, session string, from events.Seq) *projection.Watch {
	w.t.Helper()
	watch, err := hs.Watch(journaltest.Context(w.t), session, from)
	if err != nil {
		w.t.Fatal(err)
	}
	return watch
}

// nudge makes hubs look into the log.
func (w *world) nudge(session string) {
	w.t.Helper()
	if err := w.nc.Publish(projection.DeltaSubject(session), []byte("not JSON")); err != nil {
		w.t.Fatal(err)
	}
}

func TestWatchersRebuildTheSurface(t *testing.T) {
	t.Parallel()
	const sessions, watchers, commits = 5, 10, 20
	w := newWorld(t)
	ctx := journaltest.Context(t)
	k := w.worker(projection.Config{FlushEvents: 7})
	processes := make([]*projection.Hubs, 2)
	for i := range processes {
		processes[i], _ = w.hubs()
	}
	authors := make([]*author, sessions)
	begun := make([][]chan struct{}, sessions) // closed when so many commits are there
	for s := range authors {
		authors[s] = w.author(fmt.Sprintf("watched %d", s), uint64(s), 200)
		if err := authors[s].commit(ctx); err != nil {
			t.Fatal(err)
		}
		k.wrote(authors[s].id, authors[s].next-1)
		begun[s] = make([]chan struct{}, commits)
		for i := range begun[s] {
			begun[s][i] = make(chan struct{})
		}
	}
	var wg sync.WaitGroup
	for s, a := range authors {
		wg.Go(func() {
			for i := range commits {
				if err := a.commit(ctx); err != nil {
					t.Error(err)
				}
				close(begun[s][i])
			}
			if err := a.end(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	results := make([]*rebuilt, sessions*watchers)
	for n := range results {
		s := n / watchers
		id, hs := authors[s].id, processes[n%2]
		rng := rand.New(rand.NewPCG(uint64(n), 1))
		wg.Go(func() {
			b := rebuild(nil, events.NoSeq)
			results[n] = b
			stays := 1 << 30 // deltas until the watcher is cut off
			switch n % 3 {
			case 0: // from the start
			case 1: // from the head, some time later
				journaltest.Await(t, "commits", begun[s][rng.IntN(commits)])
				v, err := w.reader.View(ctx, id, now)
				if err != nil {
					t.Error(err)
					return
				}
				*b = *rebuild(v.Surface.Seqs(), v.Last())
				n := v.Surface.Len()
				b.ended = n > 0 && v.Surface.Node(n-1).Kind == events.KindSystem
			case 2:
				stays = 1 + rng.IntN(15)
			}
			for !b.ended {
				watch, err := hs.Watch(ctx, id, b.at)
				if err != nil {
					t.Errorf("watch %s from %d: %v", id, b.at, err)
					return
				}
				until := len(b.seen) + stays
				err = b.until(ctx, watch, func() bool { return b.ended || len(b.seen) >= until })
				watch.Close()
				if err != nil {
					t.Errorf("watch %s: %v", id, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for n, b := range results {
		b.check(w, authors[n/watchers].id)
	}
	for _, a := range authors {
		v, err := w.reader.View(ctx, a.id, projection.Want{MinSeq: a.next - 1, Timeout: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(v.Surface.Seqs(), a.surface) {
			t.Errorf("%s: the head has %v, want %v", a.id, v.Surface.Seqs(), a.surface)
		}
	}
}

// A watcher that is interrupted while it reads the log goes on where it was.
func TestInterruptedHistory(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	hs, _ := w.hubs()
	k := w.worker(projection.Config{})
	a := w.author("s", 7, 100)
	ctx := journaltest.Context(t)
	for range 270 { // more than one read takes
		if err := a.commit(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.end(ctx); err != nil {
		t.Fatal(err)
	}
	k.wrote("s", a.next-1)
	watch := w.watch(hs, "s", events.NoSeq)
	defer watch.Close()
	b := rebuild(nil, events.NoSeq)
	for patience := 500 * time.Microsecond; !b.ended; patience += patience / 4 {
		short, cancel := context.WithTimeout(ctx, patience)
		err := b.until(short, watch, func() bool { return b.ended })
		cancel()
		if err != nil && (short.Err() == nil || ctx.Err() != nil) {
			t.Fatal(err)
		}
	}
	b.check(w, "s")
}

// What no message tells of is found in the log.
func TestLostDeltasAreHealed(t *testing.T) {
	t.Parallel()
	t.Run("nobody tells", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		hs, _ := w.hubs()
		a := w.author("s", 1, 10)
		ctx := journaltest.Context(t)
		if err := a.commit(ctx); err != nil {
			t.Fatal(err)
		}
		watch := w.watch(hs, "s", events.NoSeq)
		defer watch.Close()
		for range 20 {
			if err := a.commit(ctx); err != nil {
				t.Fatal(err)
			}
		}
		if err := a.end(ctx); err != nil {
			t.Fatal(err)
		}
		b := rebuild(nil, events.NoSeq)
		soon, cancel := context.WithTimeout(ctx, 20*time.Second) // many times the silence
		defer cancel()
		if err := b.until(soon, watch, func() bool { return b.ended }); err != nil {
			t.Fatal(err)
		}
		b.check(w, "s")
	})
	// Messages that are late, too early, not complete, or nonsense.
	t.Run("what is told is of no use", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		hs, _ := w.hubs()
		w.append("s", user("0"), user("1"))
		watch := w.watch(hs, "s", events.NoSeq)
		defer watch.Close()
		b := rebuild(nil, events.NoSeq)
		for _, text := range []string{
			"nonsense",
			`{"session":"s","from":40,"to":41,"streamSeq":99,"deltas":[{"seq":41,"op":"append","node":{"seq":41,"type":"user/message"}}]}`,
			`{"session":"s","from":%[1]d,"to":%[2]d,"streamSeq":99,"deltas":null}`,
			`{"session":"s","from":%[1]d,"to":%[2]d,"streamSeq":99,"deltas":[{"seq":%[2]d,"op":"replace","node":{"seq":%[2]d,"type":"user/message"},"shadowed":[77]}]}`,
			`{"session":"s","from":0,"to":1,"streamSeq":2,"deltas":[{"seq":1,"op":"append","node":{"seq":1,"type":"user/message"}}]}`,
		} {
			seq := w.append("s", user("more"))
			if strings.Contains(text, "%") {
				text = fmt.Sprintf(text, seq-1, seq)
			}
			if err := w.nc.Publish(projection.DeltaSubject("s"), []byte(text)); err != nil {
				t.Fatal(err)
			}
			if err := b.until(journaltest.Context(t), watch, func() bool { return b.at == seq }); err != nil {
				t.Fatal(err)
			}
		}
		b.check(w, "s")
	})
	t.Run("a message is lost with its connection", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t)
		k := w.worker(projection.Config{})
		proxy := w.srv.StartProxy(t)
		hs := projection.NewHubs(w.reader, journaltest.Dial(t, proxy.URL()))
		k.wrote("s", w.append("s", user("0")))
		watch := w.watch(hs, "s", 0)
		defer watch.Close()
		b := rebuild([]events.Seq{0}, 0)
		// A first delta comes through: the subscription stands.
		seq := w.append("s", user("1"))
		if err := b.until(journaltest.Context(t), watch, func() bool { return b.at == seq }); err != nil {
			t.Fatal(err)
		}
		proxy.LoseWhen(func(up bool, p []byte) bool { return !up && strings.Contains(string(p), projection.DeltaSubject("s")) })
		seq = w.append("s", user("2"), replace([]events.Seq{0, 1}, "summary"))
		k.wrote("s", seq)
		if err := b.until(journaltest.Context(t), watch, func() bool { return b.at == seq }); err != nil {
			t.Fatal(err)
		}
		if proxy.Armed() {
			t.Error("nothing was lost")
		}
		b.check(w, "s")
	})
}

func TestSlowWatcherIsCutOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	hs, _ := w.hubs()
	if _, _, err := w.Create(ctx, "s", nil); err != nil {
		t.Fatal(err)
	}
	slow, fast := w.watch(hs, "s", events.NoSeq), w.watch(hs, "s", events.NoSeq)
	defer fast.Close()
	b := rebuild(nil, events.NoSeq)
	chunk := make([]string, 900)
	for i := range chunk {
		chunk[i] = user("x")
	}
	for range 5 {
		seq := w.append("s", chunk...)
		w.nudge("s")
		if err := b.until(ctx, fast, func() bool { return b.at == seq }); err != nil {
			t.Fatal(err)
		}
	}
	if ds, err := slow.Next(ctx); !errors.Is(err, projection.ErrSlow) {
		t.Errorf("the slow watcher got %d deltas, %v", len(ds), err)
	}
	slow.Close()
	b.check(w, "s")
	// It resumes from the log, and goes over to what the hub hears.
	again := w.watch(hs, "s", 99)
	defer again.Close()
	late := rebuild(slices.Clone(b.surface[:100]), 99)
	seq := w.append("s", replace([]events.Seq{3, 4, 5}, "summary"))
	w.nudge("s")
	if err := late.until(ctx, again, func() bool { return late.at == seq }); err != nil {
		t.Fatal(err)
	}
	late.check(w, "s")
}

func TestWatchBeginsAndEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	hs, nc := w.hubs()
	if _, err := hs.Watch(ctx, "nowhere", events.NoSeq); !errors.Is(err, events.ErrSessionNotFound) {
		t.Errorf("a session that is not there: %v", err)
	}
	if _, err := hs.Watch(ctx, "a\x00b", events.NoSeq); !errors.Is(err, &events.Error{Code: events.CodeSessionID}) {
		t.Errorf("a bad id: %v", err)
	}
	w.append("s", user("0"), user("1"))
	first, second := w.watch(hs, "s", 1), w.watch(hs, "s", 1)
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if ds, err := second.Next(gone); !errors.Is(err, context.Canceled) {
		t.Errorf("at the end: %v, %v", ds, err)
	}
	w.append("s", user("2"), user("3"), `{"type":"goal/change","data":1}`)
	seq := w.append("s", user("5"), user("6"))
	w.nudge("s")
	b := rebuild([]events.Seq{0, 1}, 1)
	if err := b.until(ctx, second, func() bool { return b.at == seq }); err != nil {
		t.Fatal(err)
	}
	b.check(w, "s")
	if n := nc.NumSubscriptions(); n != 1 {
		t.Errorf("two watchers of a session have %d subscriptions", n)
	}
	first.Close()
	second.Close()
	if n := nc.NumSubscriptions(); n != 0 {
		t.Errorf("%d subscriptions are left", n)
	}
	again := w.watch(hs, "s", events.NoSeq)
	b = rebuild(nil, events.NoSeq)
	if err := b.until(ctx, again, func() bool { return b.at == seq }); err != nil {
		t.Fatal(err)
	}
	b.check(w, "s")

	// A log that cannot be folded ends the watch.
	w.store("s", func(seq events.Seq) string {
		return line("user/message", seq, `,"surfaceOp":{"op":"replace","startSeq":4,"endSeq":4},"sourceEventSeqs":[4]`, message("bad"))
	})
	w.nudge("s")
	bad := &events.Error{Code: events.CodeRuleViolation, Rule: events.RuleEndpointNotOnSurface}
	if ds, err := again.Next(ctx); !errors.Is(err, bad) {
		t.Errorf("a broken log: %v, %v", ds, err)
	}
	anew := w.watch(hs, "s", events.NoSeq)
	b = rebuild(nil, events.NoSeq)
	if err := b.until(ctx, anew, func() bool { return b.at == seq }); err != nil {
		t.Error(err)
	}
	if ds, err := anew.Next(ctx); !errors.Is(err, bad) {
		t.Errorf("a broken log, watched anew: %v, %v", ds, err)
	}
	anew.Close()
	again.Close()
	if n := nc.NumSubscriptions(); n != 0 {
		t.Errorf("%d subscriptions are left", n)
	}
}

// Event types that another process added are known to watchers and to readers of the past.
func TestTypesOfAnotherProcess(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	hs, _ := w.hubs()
	seq := w.append("s", user("0"))
	watch := w.watch(hs, "s", events.NoSeq)
	defer watch.Close()
	other := appender.New(w.journal([]string{"our/new"}), w.headers, w.buckets.Snapshots, appender.Config{})
	defer func() {
		if err := other.Close(ctx); err != nil {
			t.Error(err)
		}
	}()
	r, err := other.Append(ctx, appender.Request{Session: "s", Events: [][]byte{[]byte(`{"type":"our/new","data":1}`), []byte(replace([]events.Seq{seq}, "new"))}})
	if err != nil {
		t.Fatal(err)
	}
	if v, err := w.reader.At(ctx, "s", r.LastSeq); err != nil || !slices.Equal(v.Surface.Seqs(), []events.Seq{r.LastSeq}) {
		t.Errorf("at seq %d: %v", r.LastSeq, err)
	}
	w.nudge("s")
	b := rebuild(nil, events.NoSeq)
	if err := b.until(ctx, watch, func() bool { return b.at == r.LastSeq }); err != nil {
		t.Fatal(err)
	}
	b.check(w, "s")
}

// sse is one server-sent event.
type sse struct{ id, event, data string }

// stream is a watch over HTTP.
type stream struct {
	t    testing.TB
	resp *http.Response
	in   *bufio.Scanner
}

// next reads an event; ok is false at the end of the stream.
func (s *stream) next() (e sse, ok bool) {
	s.t.Helper()
	for s.in.Scan() {
		name, value, _ := strings.Cut(s.in.Text(), ": ")
		switch name {
		case "id":
			e.id = value
		case "event":
			e.event = value
		case "data":
			e.data = value
		case "":
			if e != (sse{}) {
				return e, true
			}
		default:
			s.t.Errorf("unexpected line %q", s.in.Text())
		}
	}
	return e, false
}

// deltas reads n deltas into a surface.
func (s *stream) deltas(b *rebuilt, n int) {
	s.t.Helper()
	for range n {
		e, ok := s.next()
		var d projection.Delta
		if err := json.Unmarshal([]byte(e.data), &d); !ok || e.event != "delta" || err != nil || e.id != d.Seq.String() {
			s.t.Fatalf("expected a delta, found %+v (%t, %v)", e, ok, err)
		}
		if err := b.apply(d); err != nil {
			s.t.Fatal(err)
		}
	}
}

func TestWatchOverHTTP(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	k := w.worker(projection.Config{})
	hs, nc := w.hubs()
	base, stop := context.WithCancel(context.Background())
	defer stop()
	srv := httptest.NewUnstartedServer(api.NewProjector(w.reader, k.Worker, hs, audit.New(w.log, w.headers, w.buckets), api.ProjectorConfig{}))
	srv.Config.BaseContext = func(net.Listener) context.Context { return base }
	srv.Start()
	defer srv.Close()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}
	do := func(method, session, query, lastID string) *http.Response {
		t.Helper()
		r, err := http.NewRequestWithContext(ctx, method, srv.URL+"/v1/sessions/"+session+"/watch"+query, nil)
		if err != nil {
			t.Fatal(err)
		}
		if lastID != "" {
			r.Header.Set("Last-Event-ID", lastID)
		}
		resp, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		return resp
	}
	open := func(query, lastID string, from events.Seq) *stream {
		t.Helper()
		resp := do("GET", "s", query, lastID)
		s := &stream{t, resp, bufio.NewScanner(resp.Body)}
		hello, _ := s.next()
		if want := (sse{from.String(), "hello", fmt.Sprintf(`{"from":%d,"session":"s"}`, from)}); hello != want || resp.Header.Get("Content-Type") != "text/event-stream" {
			t.Fatalf("watch%s answered %d %v with %+v, want %+v", query, resp.StatusCode, resp.Header, hello, want)
		}
		return s
	}
	k.wrote("s", w.append("s", user("0"), user("1"), `{"type":"goal/change","data":1}`))

	// From the start, cut off, and resumed behind the last id.
	b := rebuild(nil, events.NoSeq)
	s := open("?from=-1", "", events.NoSeq)
	s.deltas(b, 2)
	w.append("s", replace([]events.Seq{0, 1}, "summary"), user("4"))
	s.deltas(b, 1)
	s.resp.Body.Close()
	s = open("?from=-1", b.at.String(), b.at) // as a browser does: the id counts
	s.deltas(b, 1)
	w.append("s", user("5"))
	s.deltas(b, 1)
	b.check(w, "s")

	// From the head. A watcher that is cut off before its first delta resumes with the hello's id.
	k.wrote("s", 5)
	s2 := open("", "", 5)
	s2.resp.Body.Close()
	k.wrote("s", w.append("s", user("6")))
	s2 = open("", "5", 5)
	late := rebuild(slices.Clone(b.surface), 5)
	s2.deltas(late, 1)
	late.check(w, "s")
	s3 := open("?from=4", "", 4)
	s.deltas(b, 1)

	for name, c := range map[string]struct {
		session, query, lastID string
		status                 int
		code                   string
	}{
		"a session that is not there":             {"nowhere", "", "", 404, `"session-not-found"`},
		"a session that is not there, from a seq": {"nowhere", "?from=0", "", 404, `"session-not-found"`},
		"a bad from":                                {"s", "?from=x", "", 400, `"bad-request"`},
		"a from before the start":                   {"s", "?from=-2", "", 400, `or -1 for the log's start`},
		"a bad id":                                  {"s", "", "x", 400, `"bad-request"`},
		"a parameter that there is not":             {"s", "?seq=1", "", 400, `"bad-request"`},
		"a parameter that is given a second time":   {"s", "?from=-1&from=-1", "", 400, `"bad-request"`},
		"an id that is no seq of this or any other": {"s", "", "-2", 400, `"bad-request"`},
	} {
		resp := do("GET", c.session, c.query, c.lastID)
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != c.status || !strings.Contains(string(body), c.code) {
			t.Errorf("%s: %d %s, %v", name, resp.StatusCode, body, err)
		}
	}
	resp := do("HEAD", "s", "", "")
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("HEAD: %d", resp.StatusCode)
	}

	// The server stops.
	s3.deltas(rebuild([]events.Seq{3, 4}, 4), 2)
	stop()
	for _, s := range []*stream{s, s2, s3} {
		if e, _ := s.next(); e.event != "end" || e.id != "" || !strings.Contains(e.data, `"stopping"`) {
			t.Errorf("at the end: %+v", e)
		}
		if e, ok := s.next(); ok {
			t.Errorf("behind the end: %+v", e)
		}
		s.resp.Body.Close()
	}
	journaltest.Eventually(t, "the hub to end", func() bool { return nc.NumSubscriptions() == 0 })
}
