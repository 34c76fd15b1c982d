package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// changesStored counts the calls that changed a log.
const changesStored = "changes stored"

// callers are the sessions, and the callers that work on them.
type callers struct {
	s        *suite
	writes   []*harness.Client // to appenders
	reads    []*harness.Client // to projectors
	marks    atomic.Int64
	stopping chan struct{} // closed when no caller begins anything new

	mu       sync.Mutex // guards sessions
	sessions []*session
}

// session is what callers know of one session.
type session struct {
	id     string
	parent *session // of a fork
	at     int64    // last seq that a fork inherited
	fenced bool     // writers take it in turn

	mu       sync.Mutex // guards all below
	ops      []op
	acked    int64           // highest seq that was acknowledged, -1 for none
	epoch    int64           // highest that was given out
	views    map[view]string // what reads answered with, and which did
	watchers []*watcher
}

// op is one call that should have changed the log, or read its end, as its caller saw it.
type op struct {
	what     string
	client   int
	mark     string                          // of its first event, "" when the service made all of them
	sent     []json.RawMessage               // its events, as they were asked for; nil when the service made them
	made     func(op, []harness.Event) error // what is wrong with those that the service made
	events   int64                           // 0 when only the service knows
	expected int64                           // seq that was expected, -1 for none
	call     int64                           // nanoseconds since the start
	end      int64
	outcome  string // stored, refused or unknown; read for one that read
	receipt  harness.Receipt
	epoch    int64 // that was given out
	actual   int64 // next seq as a conflict told it, -1 when none did
}

// view is what a read answered with: messages or nodes as of a seq.
type view struct {
	kind            string // messages or nodes
	seq, generation int64
	content         [sha256.Size]byte
}

// messagesView is a view of messages.
func messagesView(seq int64, generation int, messages []json.RawMessage) view {
	return view{"messages", seq, int64(generation), sha256.Sum256(harness.Array(messages))}
}

// nodesView is a view of the surface's nodes.
func nodesView(seq int64, generation int, nodes []int64) view {
	return view{"nodes", seq, int64(generation), sha256.Sum256(fmt.Append(nil, nodes))}
}

// saw keeps what a read answered with until it can be held against the log.
func (s *session) saw(v view, what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.views == nil {
		s.views = map[view]string{}
	}
	s.views[v] = what
}

func newCallers(s *suite) *callers {
	l := &callers{s: s, stopping: make(chan struct{})}
	for _, base := range s.target.writes() {
		l.writes = append(l.writes, harness.NewClient(base))
	}
	for _, base := range s.target.reads() {
		l.reads = append(l.reads, harness.NewClient(base))
	}
	for i := range s.sessions {
		l.sessions = append(l.sessions, &session{id: fmt.Sprintf("session %d", i), acked: -1, fenced: i%3 == 0})
	}
	return l
}

func (l *callers) all() []*session {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.sessions)
}

// start starts callers and watchers. The function that it returns lets callers finish what they
// have begun; watchers go on until the checks are through with them.
func (l *callers) start(ctx context.Context) (stop func()) {
	for i, s := range l.all() {
		if i%2 == 0 {
			l.watch(ctx, s, i)
		}
	}
	var wg sync.WaitGroup
	for i := range l.s.workers {
		r := rand.New(rand.NewPCG(l.s.seed, uint64(100+i)))
		wg.Go(func() {
			for {
				select {
				case <-l.stopping:
					return
				default:
				}
				l.act(ctx, r, i)
				if !load.Wait(ctx, time.Duration(r.Int64N(int64(2*l.s.pause)))) {
					return
				}
			}
		})
	}
	return func() {
		close(l.stopping)
		wg.Wait()
	}
}

// act does one thing.
func (l *callers) act(ctx context.Context, r *rand.Rand, client int) {
	all := l.all()
	s := all[r.IntN(len(all))]
	s.mu.Lock()
	acked, epoch := s.acked, s.epoch
	s.mu.Unlock()
	switch n := r.IntN(100); {
	case acked < 0 || n < 35:
		if r.IntN(4) == 0 { // a writer that was replaced, or none
			epoch = 0
		}
		l.append(ctx, r, s, client, "append with key", -1, epoch)
	case n < 60:
		l.append(ctx, r, s, client, "append with expectedSeq", acked+1, 0)
	case n < 63:
		l.turn(ctx, r, s, client)
	case n < 68 && s.fenced:
		l.takeWriter(ctx, r, s, client)
	case n < 71:
		l.derived(ctx, r, s, client, "repair", "", madeRepair)
	case n < 75:
		l.compact(ctx, r, s, client)
	case n < 77 && len(all) < 2*l.s.sessions:
		l.fork(ctx, r, s, client, acked)
	case n < 90:
		l.read(ctx, r, s, acked)
	default:
		l.fresh(ctx, r, s, client)
	}
}

// turn begins a turn that repair finds open.
func (l *callers) turn(ctx context.Context, r *rand.Rand, s *session, client int) {
	n := l.marks.Add(1)
	o := op{what: "turn", client: client, events: 1, expected: -1, actual: -1, mark: fmt.Sprintf("m-%d", n)}
	o.sent = []json.RawMessage{fmt.Appendf(nil, `{"type":"turn/start","data":{"turn":%d,"mark":%q}}`, n, o.mark)}
	s.mu.Lock()
	epoch := s.epoch
	s.mu.Unlock()
	options := []harness.Option{harness.With("Idempotency-Key", "key "+o.mark)}
	if epoch > 0 {
		options = append(options, harness.With("Palimpsest-Writer-Epoch", fmt.Sprint(epoch)))
	}
	l.change(ctx, r, s, o, harness.SessionPath(s.id, "/events"), harness.Array(o.sent), options...)
}

// event is an event with a mark, so that it can be found again.
func event(r *rand.Rand, mark string) string {
	if r.IntN(4) == 0 {
		return fmt.Sprintf(`{"type":"goal/change","data":{"mark":%q}}`, mark)
	}
	return fmt.Sprintf(`{"type":"user/message","surfaceOp":"append","data":{"id":%q,"mark":%q,"role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"kiln"}]}}`, mark, mark)
}

// append appends 1 to 4 events.
func (l *callers) append(ctx context.Context, r *rand.Rand, s *session, client int, what string, expected, epoch int64) {
	o := op{what: what, client: client, events: 1 + r.Int64N(4), expected: expected, actual: -1, mark: fmt.Sprintf("m-%d", l.marks.Add(1))}
	for i := range o.events {
		mark := o.mark
		if i > 0 {
			mark = fmt.Sprintf("%s-%d", o.mark, i)
		}
		o.sent = append(o.sent, json.RawMessage(event(r, mark)))
	}
	var options []harness.Option
	if expected >= 0 {
		options = append(options, harness.ExpectedSeq(expected))
	} else {
		options = append(options, harness.With("Idempotency-Key", "key "+o.mark))
	}
	// A session with a writer takes no append without epoch or expectedSeq.
	if epoch > 0 {
		options = append(options, harness.With("Palimpsest-Writer-Epoch", fmt.Sprint(epoch)))
	}
	l.change(ctx, r, s, o, harness.SessionPath(s.id, "/events"), harness.Array(o.sent), options...)
}

// derived asks for events that the service makes.
func (l *callers) derived(ctx context.Context, r *rand.Rand, s *session, client int, what, body string, made func(op, []harness.Event) error) {
	o := op{what: what, client: client, expected: -1, actual: -1, made: made}
	l.change(ctx, r, s, o, harness.SessionPath(s.id, "/"+what), []byte(body))
}

// types says whether events are of these types.
func types(events []harness.Event, want ...string) error {
	var got []string
	for _, e := range events {
		got = append(got, e.Type)
	}
	if !slices.Equal(got, want) {
		return fmt.Errorf("events %v, want %v", got, want)
	}
	return nil
}

// madeRepair checks what a repair made: it ends the turn, behind a new epoch when there is a writer.
func madeRepair(_ op, events []harness.Event) error {
	if len(events) > 1 {
		return types(events, "session/writer", "turn/end")
	}
	return types(events, "turn/end")
}

func (l *callers) takeWriter(ctx context.Context, r *rand.Rand, s *session, client int) {
	name := fmt.Sprintf("w%d", client)
	l.derived(ctx, r, s, client, "writer", fmt.Sprintf(`{"writer":%q}`, name), func(o op, events []harness.Event) error {
		if err := types(events, "session/writer"); err != nil {
			return err
		}
		var data struct {
			Writer string
			Epoch  int64
		}
		if err := json.Unmarshal(events[0].Data, &data); err != nil || data.Writer != name || data.Epoch != o.epoch {
			return fmt.Errorf("%s, want writer %s of epoch %d", events[0].Data, name, o.epoch)
		}
		return nil
	})
}

func (l *callers) compact(ctx context.Context, r *rand.Rand, s *session, client int) {
	surface, err := l.reads[r.IntN(len(l.reads))].Surface(ctx, s.id)
	if err != nil {
		return
	}
	nodes := surface.Seqs()
	s.saw(nodesView(surface.Seq, surface.ReplaceGeneration, nodes), "surface")
	if len(nodes) < 3 {
		return
	}
	from := r.IntN(len(nodes) - 1)
	to := min(from+1+r.IntN(5), len(nodes)-1)
	asked := harness.ReplaceOp{Start: nodes[from], End: nodes[to]}
	l.derived(ctx, r, s, client, "compact", fmt.Sprintf(`{"startSeq":%d,"endSeq":%d,"summary":"what was said"}`, asked.Start, asked.End), func(_ op, events []harness.Event) error {
		if err := types(events, "compaction/start", "compaction/summary", "user/message", "compaction/end"); err != nil {
			return err
		}
		if got, ok := events[2].Replace(); !ok || got != asked || !bytes.Contains(events[2].Data, []byte("what was said")) {
			return fmt.Errorf("%s, want one that replaces %+v", events[2].Line, asked)
		}
		return nil
	})
}

func (l *callers) fork(ctx context.Context, r *rand.Rand, s *session, client int, acked int64) {
	child := &session{id: fmt.Sprintf("fork %d", l.marks.Add(1)), parent: s, at: r.Int64N(acked + 1), acked: -1}
	res := l.do(ctx, l.writes, r, "fork", http.MethodPost, harness.SessionPath(s.id, "/fork"), fmt.Appendf(nil, `{"at":%d,"id":%q}`, child.at, child.id))
	switch {
	case res.err != nil, res.problem != nil && res.lost:
		// Whether there is a child is not known; if so, verify looks at it.
	case res.problem != nil && res.problem.Code != "open-turn" && res.problem.Code != "not-at-a-boundary":
		l.s.Finding("fork of %s at %d: %s: %s", s.id, child.at, res.problem.Code, res.problem.Detail)
	case res.problem == nil:
		l.s.Add("done: fork", 1)
		child.acked = child.at + 1
		l.mu.Lock()
		l.sessions = append(l.sessions, child)
		l.mu.Unlock()
	}
}

// change sends a call that changes the log and records what became of it.
func (l *callers) change(ctx context.Context, r *rand.Rand, s *session, o op, path string, body []byte, options ...harness.Option) {
	o.call = time.Since(l.s.started).Nanoseconds()
	res := l.do(ctx, l.writes, r, o.what, http.MethodPost, path, body, options...)
	o.end = time.Since(l.s.started).Nanoseconds()
	// An append that is recognised when it is repeated has one outcome; what the service makes
	// anew each time may have been done once before it was refused.
	recognised := o.events > 0
	var answer struct {
		harness.Receipt
		Epoch    int64
		Repaired *bool
	}
	switch {
	case res.err != nil, res.problem != nil && res.lost && (!recognised || res.problem.Code == "fenced"):
		o.outcome = "unknown"
	case res.problem != nil:
		o.outcome = "refused"
		if res.problem.ActualSeq != nil {
			o.actual = *res.problem.ActualSeq
		}
		switch res.problem.Code {
		case "seq-conflict", "fenced", "session-not-found", "rule-violation", "INVARIANT", "nothing-to-repair", "bad-request", "open-turn", "splits-tool-pair":
		default:
			l.s.Finding("%s on %s was refused: %s: %s", o.what, s.id, res.problem.Code, res.problem.Detail)
		}
	case json.Unmarshal(res.Body, &answer) != nil:
		l.s.Finding("%s on %s: answer %.200s", o.what, s.id, res.Body)
		o.outcome = "unknown"
	case answer.Repaired != nil && !*answer.Repaired && res.lost:
		o.outcome = "unknown" // nothing is open any more: the call that got no answer may have closed it
	case answer.Repaired != nil && !*answer.Repaired:
		o.outcome = "refused" // nothing was open
	default:
		o.outcome, o.receipt, o.epoch = "stored", answer.Receipt, answer.Epoch
		l.s.Add(changesStored, 1)
		if o.receipt.Session != s.id || o.events > 0 && o.receipt.LastSeq-o.receipt.FirstSeq+1 != o.events || o.receipt.Commit == "" {
			l.s.Finding("%s on %s: receipt %s", o.what, s.id, res.Body)
		}
		if o.receipt.Duplicate {
			l.s.Add("duplicates recognised", 1)
		}
		if res.lost {
			l.s.Add("decided after a lost answer", 1)
		}
	}
	l.s.Add(o.outcome+": "+o.what, 1)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ops = append(s.ops, o)
	if o.outcome == "stored" {
		s.acked = max(s.acked, o.receipt.LastSeq)
		s.epoch = max(s.epoch, answer.Epoch)
	} else if o.actual > 0 {
		s.acked = max(s.acked, o.actual-1) // somebody's, and there
	}
}

// read waits for what was acknowledged: an answer must not be older.
func (l *callers) read(ctx context.Context, r *rand.Rand, s *session, acked int64) {
	if acked < 0 {
		return
	}
	res := l.do(ctx, l.reads, r, "read with minSeq", http.MethodGet, harness.SessionPath(s.id, "/messages"), nil, harness.Query("minSeq", fmt.Sprint(acked)), harness.Query("timeout", "5s"))
	var m harness.Messages
	switch {
	case res.err != nil:
	case res.problem != nil:
		l.s.Finding("read of %s as of %d: %s: %s", s.id, acked, res.problem.Code, res.problem.Detail)
	case json.Unmarshal(res.Body, &m) != nil || m.Seq < acked:
		l.s.Finding("read of %s waited for %d and got %.100s", s.id, acked, res.Body)
	default:
		s.saw(messagesView(m.Seq, m.ReplaceGeneration, m.Messages), "read with minSeq")
		l.s.Add(notOlder, 1)
	}
}

// fresh reads the log's end: an answer must not be older than what was acknowledged before, and fit
// into one order with all other calls.
func (l *callers) fresh(ctx context.Context, r *rand.Rand, s *session, client int) {
	s.mu.Lock()
	acked := s.acked
	s.mu.Unlock()
	if acked < 0 {
		return
	}
	o := op{what: "fresh read", client: client, expected: -1, actual: -1, outcome: "read", call: time.Since(l.s.started).Nanoseconds()}
	res := l.do(ctx, l.reads, r, o.what, http.MethodGet, harness.SessionPath(s.id, "/messages"), nil, harness.Query("fresh", "true"))
	var m harness.Messages
	switch {
	case res.err != nil:
	case res.problem != nil:
		l.s.Finding("fresh read of %s: %s: %s", s.id, res.problem.Code, res.problem.Detail)
	case json.Unmarshal(res.Body, &m) != nil || m.Seq < acked:
		l.s.Finding("fresh read of %s, acknowledged up to %d, got %.100s", s.id, acked, res.Body)
	default:
		o.end = time.Since(l.s.started).Nanoseconds()
		o.receipt.LastSeq = m.Seq
		s.saw(messagesView(m.Seq, m.ReplaceGeneration, m.Messages), o.what)
		s.mu.Lock()
		s.ops = append(s.ops, o)
		s.mu.Unlock()
		l.s.Add(freshNotOlder, 1)
	}
}

// result is what became of a call.
type result struct {
	harness.Answer
	problem *harness.Problem // why it was refused
	lost    bool             // an attempt had no answer and may have been carried out besides
	err     error            // nobody knows what became of it
}

// do sends a call as a good client does: to any of the programs, again with growing pauses until
// there is an answer that decides.
func (l *callers) do(ctx context.Context, to []*harness.Client, r *rand.Rand, what, method, path string, body []byte, options ...harness.Option) (res result) {
	whole := ctx
	ctx, cancel := context.WithTimeout(whole, callTime)
	defer cancel()
	l.s.Add("calls", 1)
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		one, stop := context.WithTimeout(ctx, 20*time.Second)
		var err error
		res.Answer, err = to[r.IntN(len(to))].Do(one, method, path, body, options...)
		stop()
		var op *net.OpError
		switch {
		case errors.As(err, &op) && op.Op == "dial": // nobody listens
		case err != nil:
			l.s.Add("answers lost", 1)
			res.lost = true
		case res.Status/100 == 2:
			return res
		default:
			p, err := res.Problem()
			if err != nil {
				l.s.Finding("%s: %s %s: %v", what, method, path, err)
				res.err = err
				return res
			}
			switch {
			case p.Code == "outcome-unknown":
				res.lost = true
				l.s.Add("answers "+p.Code, 1)
			case p.Status == http.StatusTooManyRequests, p.Status == http.StatusServiceUnavailable, p.Code == "not-yet-projected":
				l.s.Add("answers "+p.Code, 1)
			case p.Status >= 500:
				l.s.Finding("%s: %s %s: %d %s: %s", what, method, path, p.Status, p.Code, p.Detail)
				fallthrough
			default:
				l.s.Add("refusals "+p.Code, 1)
				res.problem = &p
				return res
			}
		}
		if !load.Wait(ctx, pause/2+time.Duration(r.Int64N(int64(pause)))) {
			if whole.Err() == nil { // else the run was interrupted
				l.s.Finding("%s: %s %s was not decided within %v", what, method, path, callTime)
			}
			res.err = ctx.Err()
			return res
		}
	}
}
