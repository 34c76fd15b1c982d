package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"palimpsest/test/e2e/harness"
)

// agent is a session with one owner at a time, who keeps to the lifecycle rules.
type agent struct {
	s      *soak
	ledger *ledger
	begun  atomic.Bool // the session is there

	mu    sync.Mutex // held by the owner; guards all below
	m     model
	mine  int64     // the epoch that the owner holds, 0 for none
	stale bool      // the log may hold what the model does not know
	past  []request // some appends that were acknowledged
}

// request is an append that can be repeated.
type request struct {
	body    []byte
	options []harness.Option
	keyed   bool
	key     string
	at      time.Time
	receipt harness.Receipt
}

func newAgent(s *soak, l *ledger) *agent { return &agent{s: s, ledger: l, m: newModel()} }

func (a *agent) path(call string) string { return harness.SessionPath(a.ledger.id, call) }

// act does one thing.
func (a *agent) act(ctx context.Context, r *rand.Rand) {
	if a.stale && !a.sync(ctx) {
		return
	}
	if !a.begun.Load() {
		a.create(ctx, r)
		return
	}
	switch n := r.IntN(100); {
	case a.m.epoch != a.mine && (a.mine > 0 || r.IntN(2) == 0), n < 1:
		a.takeWriter(ctx, r)
	case n < 6 && len(a.m.nodes) > 4:
		a.compact(ctx, r)
	case n < 14 && a.m.turn != none && a.prunable() >= 0:
		a.prune(ctx, r)
	case n < 17 && len(a.m.legal) > 0 && !a.s.fleet.full():
		a.fork(ctx, r)
	case n < 18 && a.m.turn != none: // the owner dies; another repairs the session
		a.mine = 0
		a.repair(ctx)
		a.stale = true
	case n < 21:
		a.bad(ctx, r)
	case n < 25 && len(a.past) > 0:
		a.again(ctx, r)
	case n < 28:
		a.look(ctx)
	default:
		a.append(ctx, r)
	}
}

// sync reads what the log holds behind the model and reports whether it could.
func (a *agent) sync(ctx context.Context) bool {
	events, err := a.s.tail(ctx, a.ledger.id, a.m.next)
	if err != nil {
		a.s.Finding("%v", err)
		return false
	}
	for _, e := range events {
		if e.Seq != a.m.next {
			a.s.Finding("%s: the log goes on with seq %d behind %d", a.ledger.id, e.Seq, a.m.next-1)
			return false
		}
		if err := a.m.apply(e); err != nil {
			a.s.Finding("%s: %v", a.ledger.id, err)
			return false
		}
	}
	a.stale = false
	return true
}

func (a *agent) create(ctx context.Context, r *rand.Rand) {
	if r.IntN(2) == 0 { // the first append creates it
		a.append(ctx, r)
		a.begun.Store(true)
		return
	}
	body := fmt.Sprintf(`{"id":%q,"header":{"version":3,"cwd":"/soak","agentPreset":"soak"}}`, a.ledger.id)
	res, err := a.s.do(ctx, call{what: "create", client: a.s.fleet.writes, method: "POST", path: "/v1/sessions", body: []byte(body), safe: true})
	if err == nil && res.problem == nil {
		a.begun.Store(true)
	} else if res.problem != nil {
		a.s.Finding("create %s: %s: %s", a.ledger.id, res.problem.Code, res.problem.Detail)
	}
}

// append appends one event or a batch, secured in one of several ways.
func (a *agent) append(ctx context.Context, r *rand.Rand) {
	m := a.m.clone()
	events := make([]event, 0, 8)
	for range 1 + min(r.IntN(4)*r.IntN(4), 8) {
		e := m.write(r, a.s.fleet.mark())
		parsed, err := harness.ParseEvent([]byte(e.raw))
		if err == nil {
			err = m.apply(parsed)
		}
		if err != nil {
			a.s.Finding("the soak's own event %s: %v", e.raw, err)
			return
		}
		events = append(events, e)
	}
	req := request{at: time.Now()}
	guard := []string{"expected", "expected", "key", "key", "both", "plain"}[r.IntN(6)]
	if a.m.epoch != a.mine { // without the epoch only an expectedSeq gets past the fence
		guard = []string{"expected", "both"}[r.IntN(2)]
	}
	var expected *int64
	if guard == "expected" || guard == "both" {
		expected = &a.m.next
	}
	if guard == "key" || guard == "both" {
		req.keyed, req.key = true, "key "+events[0].mark
		req.options = append(req.options, harness.With("Idempotency-Key", req.key))
	}
	if a.mine > 0 && a.mine == a.m.epoch {
		req.options = append(req.options, a.epoch())
	}
	what, options := "", []harness.Option(nil)
	what, req.body, options = encode(r, events, expected)
	req.options = append(req.options, options...)

	res, err := a.s.do(ctx, call{what: "append " + what + " " + guard, client: a.s.fleet.writes, method: "POST", path: a.path("/events"), body: req.body, safe: guard != "plain", options: req.options})
	marks := marksOf(events)
	switch {
	case err != nil:
		a.ledger.unknown(marks...)
		a.stale = true
	case res.problem != nil:
		a.ledger.refused(marks...)
		a.refused(ctx, "append", res, "INVARIANT", "seq-conflict", "fenced")
	default:
		if !a.s.decode(res, &req.receipt) {
			return
		}
		a.s.acked(a.ledger, req.receipt, len(events), marks...)
		if guard != "plain" {
			a.past = append(a.past, req)
			a.past = a.past[max(0, len(a.past)-8):]
		}
		if req.receipt.FirstSeq != a.m.next {
			if expected != nil {
				a.s.Finding("%s: expected seq %d, got %d", a.ledger.id, a.m.next, req.receipt.FirstSeq)
			}
			a.stale = true
			return
		}
		a.m = m
	}
}

func (a *agent) epoch() harness.Option {
	return harness.With("Palimpsest-Writer-Epoch", strconv.FormatInt(a.mine, 10))
}

func marksOf(events []event) (out []string) {
	for _, e := range events {
		out = append(out, e.mark)
	}
	return out
}

// encode writes a request in one of the ways that the API takes.
func encode(r *rand.Rand, events []event, expected *int64) (what string, body []byte, options []harness.Option) {
	raws := make([]string, len(events))
	for i, e := range events {
		raws[i] = e.raw
	}
	inBody := false
	switch n := r.IntN(3); {
	case len(events) == 1 && n > 0:
		what, body = "one", []byte(raws[0])
	case n == 0:
		what, body = "ndjson", []byte(strings.Join(raws, "\n")+"\n")
		options = append(options, harness.ContentType(harness.TypeNDJSON))
	case n == 1:
		what, body = "array", []byte("["+strings.Join(raws, ",")+"]")
	default:
		what, inBody = "object", true
		rest := ""
		if expected != nil {
			rest = fmt.Sprintf(`,"expectedSeq":%d`, *expected)
		}
		body = []byte(`{"events":[` + strings.Join(raws, ",") + `]` + rest + `}`)
	}
	switch {
	case expected == nil || inBody:
	case r.IntN(2) == 0:
		options = append(options, harness.ExpectedSeq(*expected))
	default:
		options = append(options, harness.With("If-Match", fmt.Sprintf(`"%d"`, *expected)))
	}
	return what, body, options
}

// acked notes a receipt.
func (s *soak) acked(l *ledger, r harness.Receipt, events int, marks ...string) {
	if r.Session != l.id || r.LastSeq-r.FirstSeq+1 != int64(events) || r.Commit == "" {
		s.Finding("%s: receipt %+v for %d events", l.id, r, events)
		return
	}
	if r.Duplicate {
		s.Add("duplicates", 1)
	}
	l.ack(r, marks...)
	s.Add("events acknowledged", int64(events))
}

// refused looks at the log after a refusal: something must have happened there that the owner
// did not know of, or else a legal request was refused.
func (a *agent) refused(ctx context.Context, what string, res result, legal ...string) {
	next, epoch := a.m.next, a.m.epoch
	if !a.sync(ctx) {
		a.stale = true
		return
	}
	if a.m.next == next && a.m.epoch == epoch || !slices.Contains(legal, res.problem.Code) {
		a.s.Finding("%s: %s at seq %d was refused and nothing had happened (the log is at %d): %s %s: %s", a.ledger.id, what, next, a.m.next, res.problem.Code, res.problem.Rule, res.problem.Detail)
	}
}

// derived sends a request whose events the service makes, for the seq that the owner expects or
// under a key. A retry is recognised by its key alone; with an expected seq it is refused when
// the first attempt was stored, and the log tells.
func (a *agent) derived(ctx context.Context, r *rand.Rand, what, path, members, mark string, events int, legal ...string) (receipt harness.Receipt, epoch int64, ok bool) {
	fenced := a.m.epoch != a.mine && what != "writer"
	keyed := !fenced && r.IntN(2) == 0
	c := call{what: what, client: a.s.fleet.writes, method: "POST", path: a.path(path), safe: true}
	if keyed {
		c.what += " key"
		c.body = []byte("{" + strings.TrimPrefix(members, ",") + "}")
		c.options = append(c.options, harness.With("Idempotency-Key", "key "+mark))
	} else {
		c.what += " expected"
		c.body = fmt.Appendf(nil, `{"expectedSeq":%d%s}`, a.m.next, members)
	}
	if a.mine > 0 && a.mine == a.m.epoch && what != "writer" {
		c.options = append(c.options, a.epoch())
	}
	res, err := a.s.do(ctx, c)
	var answer struct {
		harness.Receipt
		Epoch int64
	}
	switch {
	case err != nil:
		a.ledger.unknown(mark)
		a.stale = true
	case res.problem != nil && res.lost && !keyed: // maybe by itself
		a.s.Add("refused after a lost answer, settled from the log", 1)
		a.ledger.unknown(mark)
		a.stale = true
	case res.problem != nil && slices.Contains(legal, res.problem.Code):
		a.ledger.refused(mark)
	case res.problem != nil:
		a.ledger.refused(mark)
		a.refused(ctx, what, res, "seq-conflict", "fenced", "INVARIANT", "rule-violation")
	case a.s.decode(res, &answer):
		if answer.FirstSeq != a.m.next && !keyed {
			a.s.Finding("%s: %s expected seq %d, got %d", a.ledger.id, what, a.m.next, answer.FirstSeq)
		}
		marks := []string{mark}
		if what == "compact" {
			marks = []string{"", mark}
		}
		a.s.acked(a.ledger, answer.Receipt, events, marks...)
		a.s.Add("done: "+what, 1)
		a.stale = true // the log says what was made
		return answer.Receipt, answer.Epoch, true
	}
	return receipt, 0, false
}

func (a *agent) takeWriter(ctx context.Context, r *rand.Rand) {
	mark := a.s.fleet.mark()
	if receipt, epoch, ok := a.derived(ctx, r, "writer", "/writer", fmt.Sprintf(`,"writer":%q`, mark), mark, 1); ok {
		a.mine = epoch
		a.ledger.took(receipt.FirstSeq, epoch)
	} else if a.mine != a.m.epoch {
		a.mine = 0
	}
}

func (a *agent) compact(ctx context.Context, r *rand.Rand) {
	first := 0
	if a.m.nodes[0].kind == "system/message" {
		first = 1
	}
	from := first + r.IntN(len(a.m.nodes)-first)
	to := min(from+r.IntN(20), len(a.m.nodes)-1)
	mark, allow := a.s.fleet.mark(), ""
	if r.IntN(4) == 0 {
		allow = `,"allow":["splits-tool-pair"]`
	}
	a.derived(ctx, r, "compact", "/compact", fmt.Sprintf(`,"startSeq":%d,"endSeq":%d,"summary":"what was said","mark":%q%s`, a.m.nodes[from].seq, a.m.nodes[to].seq, mark, allow), mark, 4, "splits-tool-pair")
}

// prunable is the position of a tool result that was not pruned, -1 when there is none.
func (a *agent) prunable() int {
	return slices.IndexFunc(a.m.nodes, func(n node) bool { return n.kind == "tool/result" && !n.pruned })
}

func (a *agent) prune(ctx context.Context, r *rand.Rand) {
	i := a.prunable()
	for range r.IntN(3) {
		if k := slices.IndexFunc(a.m.nodes[i+1:], func(n node) bool { return n.kind == "tool/result" && !n.pruned }); k >= 0 {
			i += 1 + k
		}
	}
	mark := a.s.fleet.mark()
	a.derived(ctx, r, "prune", "/prune", fmt.Sprintf(`,"seq":%d,"content":"pruned: %s"`, a.m.nodes[i].seq, mark), mark, 1)
}

// fork makes a child, which an agent of its own goes on with.
func (a *agent) fork(ctx context.Context, r *rand.Rand) {
	at := a.m.legal[r.IntN(len(a.m.legal))]
	child := newAgent(a.s, newLedger(fmt.Sprintf("%s/%s", strings.SplitN(a.ledger.id, "/", 2)[0], a.s.fleet.mark())))
	child.ledger.parent, child.ledger.at = a.ledger, at
	body := fmt.Sprintf(`{"at":%d,"id":%q}`, at, child.ledger.id)
	res, err := a.s.do(ctx, call{what: "fork", client: a.s.fleet.writes, method: "POST", path: a.path("/fork"), body: []byte(body), safe: true})
	switch {
	case err != nil: // do has said so
	case res.problem != nil:
		a.s.Finding("fork of %s at %d: %s: %s", a.ledger.id, at, res.problem.Code, res.problem.Detail)
	default:
		var f struct {
			Session string
			LastSeq int64
		}
		if a.s.decode(res, &f) && (f.Session != child.ledger.id || f.LastSeq != at+1) {
			a.s.Finding("fork of %s at %d: %s", a.ledger.id, at, res.Body)
		}
		a.s.Add("done: fork", 1)
		if a.ledger.parent != nil {
			a.s.Add("done: fork of a fork", 1)
		}
		child.begun.Store(true)
		child.stale = true
		a.s.fleet.adopt(child)
	}
}

// repair closes what is open. Anybody may ask, the owner of the session at work or not.
func (a *agent) repair(ctx context.Context) {
	res, err := a.s.do(ctx, call{what: "repair", client: a.s.fleet.writes, method: "POST", path: a.path("/repair"), safe: true})
	if res.lost {
		a.ledger.unknownRepair()
	}
	if err != nil {
		return
	}
	var out struct {
		harness.Receipt
		Repaired bool
	}
	switch {
	case res.problem != nil:
		a.s.Finding("repair of %s: %s: %s", a.ledger.id, res.problem.Code, res.problem.Detail)
	case a.s.decode(res, &out) && out.Repaired:
		a.s.Add("done: repair", 1)
		a.s.acked(a.ledger, out.Receipt, int(out.LastSeq-out.FirstSeq+1))
	}
}

// bad sends a batch whose last event is not acceptable: nothing of it may be stored.
func (a *agent) bad(ctx context.Context, r *rand.Rand) {
	events := []event{note(a.s.fleet.mark()), note(a.s.fleet.mark())}
	wrong := a.s.fleet.mark()
	events = append(events, event{[]string{
		fmt.Sprintf(`{"type":"no/such","data":{"mark":%q}}`, wrong),
		fmt.Sprintf(`{"type":"step/end","data":{"turn":99999,"step":1,"mark":%q}}`, wrong),
		fmt.Sprintf(`{"type":"user/message","surfaceOp":{"op":"replace","startSeq":9999999,"endSeq":9999999},"sourceEventSeqs":[0],"data":{"id":"x","mark":%q,"role":"user","source":{"kind":"user"},"content":[]}}`, wrong),
	}[r.IntN(3)], wrong})
	what, body, options := encode(r, events, &a.m.next)
	res, err := a.s.do(ctx, call{what: "bad batch " + what, client: a.s.fleet.writes, method: "POST", path: a.path("/events"), body: body, safe: true, options: options})
	if err != nil {
		return
	}
	a.ledger.refused(marksOf(events)...)
	switch {
	case res.problem == nil:
		a.s.Finding("%s: a bad batch was stored: %s", a.ledger.id, res.Body)
	case res.problem.Code == "seq-conflict":
		a.stale = true
	case res.problem.Index == nil || *res.problem.Index != 2:
		a.s.Finding("%s: a bad batch was refused for event %v: %s", a.ledger.id, res.problem.Index, res.Body)
	}
}

// again repeats an append that was acknowledged, or uses its key for another.
func (a *agent) again(ctx context.Context, r *rand.Rand) {
	req := a.past[r.IntN(len(a.past))]
	if req.keyed && time.Since(req.at) > 5*time.Minute { // a key is known for ten
		return
	}
	c := call{what: "append again", client: a.s.fleet.writes, method: "POST", path: a.path("/events"), body: req.body, safe: true, options: req.options}
	if req.keyed && r.IntN(3) == 0 {
		mark := a.s.fleet.mark()
		c.what, c.body = "key reused", []byte("["+note(mark).raw+"]")
		c.options = []harness.Option{harness.With("Idempotency-Key", req.key)}
		res, err := a.s.do(ctx, c)
		a.ledger.refused(mark)
		if err == nil && (res.problem == nil || res.problem.Code != "key-reused") {
			a.s.Finding("%s: other events under key %q: %s", a.ledger.id, req.key, res.Body)
		}
		return
	}
	res, err := a.s.do(ctx, c)
	if err != nil {
		return
	}
	var receipt harness.Receipt
	want := req.receipt
	want.Duplicate = true
	if res.problem != nil || a.s.decode(res, &receipt) && receipt != want {
		a.s.Finding("%s: the append acknowledged by %+v, again: %s", a.ledger.id, req.receipt, res.Body)
	}
	a.s.Add("duplicates", 1)
}

// look reads the owner's own writes, and compares the surface with the owner's.
func (a *agent) look(ctx context.Context) {
	if a.m.next == 0 {
		return
	}
	res, err := a.s.do(ctx, call{what: "read surface", client: a.s.fleet.reads, method: "GET", path: a.path("/surface"), safe: true, options: []harness.Option{harness.MinSeq(a.m.next - 1)}})
	if err != nil {
		return
	}
	var v harness.SurfaceView
	if res.problem != nil || !a.s.decode(res, &v) {
		a.s.Finding("surface of %s: %s", a.ledger.id, res.Body)
		return
	}
	var seqs []int64
	for _, n := range a.m.nodes {
		seqs = append(seqs, n.seq)
	}
	if v.Seq < a.m.next-1 || v.Seq == a.m.next-1 && !slices.Equal(v.Seqs(), seqs) {
		a.s.Finding("surface of %s at %d: got %v as of %d, want %v", a.ledger.id, a.m.next-1, v.Seqs(), v.Seq, seqs)
	}
}

// commons is a session to which many append at the same time.
type commons struct {
	s      *soak
	ledger *ledger
	next   atomic.Int64 // as somebody saw it last
}

// act appends a few notes, secured in one of several ways.
func (c *commons) act(ctx context.Context, r *rand.Rand) {
	var events []event
	for range 1 + r.IntN(3) {
		events = append(events, note(c.s.fleet.mark()))
	}
	guard := []string{"expected", "key", "plain"}[r.IntN(3)]
	var expected *int64
	var options []harness.Option
	switch guard {
	case "expected":
		n := c.next.Load()
		expected = &n
	case "key":
		options = append(options, harness.With("Idempotency-Key", "key "+events[0].mark))
	}
	what, body, more := encode(r, events, expected)
	res, err := c.s.do(ctx, call{what: "shared append " + what + " " + guard, client: c.s.fleet.writes, method: "POST", path: harness.SessionPath(c.ledger.id, "/events"), body: body, safe: guard != "plain", options: append(options, more...)})
	marks := marksOf(events)
	var receipt harness.Receipt
	switch {
	case err != nil:
		c.ledger.unknown(marks...)
	case res.problem != nil && res.problem.Code == "seq-conflict" && expected != nil && res.problem.ActualSeq != nil:
		c.ledger.refused(marks...)
		c.next.Store(*res.problem.ActualSeq)
	case res.problem != nil:
		c.s.Finding("append to %s: %s: %s", c.ledger.id, res.problem.Code, res.problem.Detail)
	case c.s.decode(res, &receipt):
		c.s.acked(c.ledger, receipt, len(events), marks...)
		c.next.Store(receipt.LastSeq + 1)
	}
}
