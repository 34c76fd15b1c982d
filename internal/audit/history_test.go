package audit_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/sessionfile"
)

// dumb is a session as one reads it who knows nothing but the documentation: lines decoded by
// encoding/json, and a surface that is searched from its start each time.
type dumb struct {
	lines    []dumbLine
	surfaces [][]events.Seq // behind each seq
	replaced map[events.Seq][]events.Seq
	shadowed map[events.Seq]events.Seq
}

type dumbLine struct {
	Seq             events.Seq
	Type            string
	SurfaceOp       json.RawMessage
	SourceEventSeqs []events.Seq
}

func (w *world) dumb(session string) *dumb {
	w.t.Helper()
	h, err := w.headers.Get(journaltest.Context(w.t), session)
	if err != nil {
		w.t.Fatal(err)
	}
	log := journaltest.CheckLog(w.t, w.srv.Conn(w.t), w.log.Config().Stream, w.log.Subject(session), session, h.Raw)
	d := &dumb{replaced: map[events.Seq][]events.Seq{}, shadowed: map[events.Seq]events.Seq{}}
	var now []events.Seq
	for _, line := range log.Lines {
		var l dumbLine
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			w.t.Fatal(err)
		}
		d.lines = append(d.lines, l)
		var op struct{ StartSeq, EndSeq events.Seq }
		switch {
		case l.SurfaceOp == nil:
		case json.Unmarshal(l.SurfaceOp, &op) == nil:
			from, to := slices.Index(now, op.StartSeq), slices.Index(now, op.EndSeq)
			d.replaced[l.Seq] = slices.Clone(now[from : to+1])
			for _, n := range now[from : to+1] {
				d.shadowed[n] = l.Seq
			}
			now = slices.Concat(now[:from], []events.Seq{l.Seq}, now[to+1:])
		default:
			now = append(slices.Clone(now), l.Seq)
		}
		d.surfaces = append(d.surfaces, now)
	}
	return d
}

// at is the surface as of a seq.
func (d *dumb) at(seq events.Seq) []events.Seq {
	if seq < 0 {
		return nil
	}
	return d.surfaces[seq]
}

// origins lists what an event came from, as an explanation does, one "depth role seq" each.
func (d *dumb) origins(seq events.Seq) []string {
	var out []string
	told := map[events.Seq]bool{}
	var tell func(seq events.Seq, depth int, role string)
	tell = func(seq events.Seq, depth int, role string) {
		out = append(out, fmt.Sprint(depth, role, seq, told[seq]))
		if told[seq] {
			return
		}
		told[seq] = true
		for _, r := range d.replaced[seq] {
			tell(r, depth+1, "replaced")
		}
		for _, c := range d.lines[seq].SourceEventSeqs {
			if !slices.Contains(d.replaced[seq], c) {
				tell(c, depth+1, "cited")
			}
		}
	}
	tell(seq, 0, "")
	return out
}

// check compares the explanation of every event with a dumb search.
func (d *dumb) check(t *testing.T, w *world, session string) {
	t.Helper()
	ctx := journaltest.Context(t)
	last := d.surfaces[len(d.surfaces)-1]
	for seq := range events.Seq(len(d.lines)) {
		x, err := w.Explain(ctx, session, seq, 0)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, o := range x.From {
			got = append(got, fmt.Sprint(o.Depth, o.Role, o.Seq, o.Repeated))
		}
		if want := d.origins(seq); !slices.Equal(got, want) {
			t.Errorf("%s seq %d came from %v, want %v", session, seq, got, want)
		}
		var over, wantOver []events.Seq
		for _, o := range x.Over {
			over = append(over, o.Seq)
		}
		for by, ok := d.shadowed[seq]; ok; by, ok = d.shadowed[by] {
			wantOver = append(wantOver, by)
		}
		position := slices.Index(last, seq)
		if !slices.Equal(over, wantOver) || x.OnSurface != (position >= 0) || x.OnSurface && *x.Position != position {
			t.Errorf("%s seq %d: %v above it, on the surface %t, want %v and position %d", session, seq, over, x.OnSurface, wantOver, position)
		}
	}
}

// Every event of a session that was compacted five times over, each time with the summary
// before in it, is explained as a dumb search explains it.
func TestExplainThroughNestedCompactions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := rand.New(rand.NewPCG(1, 2))
	next := events.Seq(0)
	add := func(raw string) {
		w.append("nested", raw)
		next++
	}
	var nodes []events.Seq
	for level := range 5 {
		for range 3 + r.IntN(6) {
			nodes = append(nodes, next)
			add(user(fmt.Sprintf("level %d seq %d", level, next)))
			if r.IntN(2) == 0 {
				add(`{"type":"compaction/start","data":{}}`)
			}
		}
		// From the summary before, or from before that, to almost the end.
		to := len(nodes) - r.IntN(3)
		cut := slices.Clone(nodes[0:to])
		if level == 0 {
			cut = nodes[1:to]
		}
		sources, _ := json.Marshal(append(slices.Clone(cut), next-1-events.Seq(r.IntN(2))))
		if slices.Contains(cut, next-1) || slices.Contains(cut, next-2) {
			sources, _ = json.Marshal(cut)
		}
		raw := fmt.Sprintf(`{"type":"user/message","surfaceOp":{"op":"replace","startSeq":%d,"endSeq":%d},"sourceEventSeqs":%s,"data":%s}`, cut[0], cut[len(cut)-1], sources, message(fmt.Sprintf("summary %d", level)))
		nodes = slices.Concat(nodes[:slices.Index(nodes, cut[0])], []events.Seq{next}, nodes[to:])
		add(raw)
	}
	d := w.dumb("nested")
	d.check(t, w, "nested")
	deepest := 0
	x, err := w.Explain(journaltest.Context(t), "nested", nodes[0], 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range x.From {
		deepest = max(deepest, o.Depth)
		if o.Op != "" && o.Text == "" {
			t.Errorf("seq %d shows no text", o.Seq)
		}
	}
	if deepest < 5 || x.Truncated {
		t.Errorf("%d levels, truncated %t", deepest, x.Truncated)
	}
	if x, err := w.Explain(journaltest.Context(t), "nested", nodes[0], 3); err != nil || len(x.From) != 3 || !x.Truncated {
		t.Errorf("with a limit: %v, %+v", err, x)
	}
	if _, err := w.Explain(journaltest.Context(t), "nested", next, 0); err == nil || !strings.Contains(err.Error(), "no event at seq") {
		t.Errorf("an event that is not there: %v", err)
	}
}

const recorded = "../../../shared/sessions"

// imported imports recorded sessions and returns their ids.
func (w *world) imported(t *testing.T, pattern string) []string {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join(recorded, pattern))
	if len(files) == 0 {
		t.Skipf("no recorded sessions in %s", recorded)
	}
	var ids []string
	for _, path := range files {
		rep, err := w.Import(journaltest.Context(t), path, sessionfile.Options{IDFrom: sessionfile.IDFromFilename, RepairTail: true})
		if err != nil || !rep.OK() {
			t.Fatalf("%s: %v, %+v", path, err, rep)
		}
		ids = append(ids, rep.Session)
	}
	return ids
}

// At every seq of recorded sessions, diff and at say what a full refold says.
func TestRecordedSessionsAtEverySeq(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ids := w.imported(t, "v3-*compaction*.jsonl")
	if len(ids) != 3 {
		t.Fatalf("%d sessions", len(ids))
	}
	ctx := journaltest.Context(t)
	reader := projection.NewReader(w.log, w.headers, w.buckets, projection.NewHeads())
	replacements := 0
	for _, id := range ids {
		d := w.dumb(id)
		d.check(t, w, id)
		replacements += len(d.replaced)
		last := events.Seq(len(d.lines) - 1)
		diff := func(from, to events.Seq) {
			t.Helper()
			got, err := w.Diff(ctx, id, from, to)
			if err != nil {
				t.Fatal(err)
			}
			var want [3][]events.Seq // came, went, passed
			for _, n := range d.at(to) {
				if !slices.Contains(d.at(from), n) {
					want[0] = append(want[0], n)
				}
			}
			for seq := from + 1; seq <= to; seq++ {
				for _, n := range d.replaced[seq] {
					if slices.Contains(d.at(from), n) {
						want[1] = append(want[1], n)
					} else {
						want[2] = append(want[2], n)
					}
				}
			}
			for i, steps := range [][]audit.Step{got.Came, got.Went, got.Passed} {
				var seqs []events.Seq
				for _, s := range steps {
					seqs = append(seqs, s.Seq)
					if by, ok := d.shadowed[s.Seq]; i > 0 && (!ok || s.ShadowedBy == nil || *s.ShadowedBy != by) {
						t.Errorf("%s %d..%d: %d was shadowed by %v, want %d", id, from, to, s.Seq, s.ShadowedBy, by)
					}
				}
				if !slices.Equal(seqs, want[i]) {
					t.Errorf("%s %d..%d: came, went, passed [%d]: %v, want %v", id, from, to, i, seqs, want[i])
				}
			}
		}
		for seq := events.Seq(0); seq <= last; seq++ {
			diff(seq-1, seq)
			diff(events.NoSeq, seq)
			diff(seq, last)
			v, err := reader.At(ctx, id, seq)
			if err != nil || !slices.Equal(v.Surface.Seqs(), d.at(seq)) {
				t.Errorf("%s at %d: %v, want %v (%v)", id, seq, v.Surface.Seqs(), d.at(seq), err)
			}
		}
	}
	if replacements < 3 {
		t.Errorf("only %d replacements", replacements)
	}
	if _, err := w.Diff(ctx, ids[0], 3, 2); err == nil {
		t.Error("a diff backwards was answered")
	}
}

func TestBlameFindsWhoPutATextInAndTookItOut(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append("s", user("nothing"), user(`the caf\u00e9 key`), user("x"), replace([]events.Seq{1, 2}, "still: the café key"))
	w.append("s", replace([]events.Seq{3}, "gone"), user("the café key"))
	b, err := w.Blame(journaltest.Context(t), "s", "café k")
	if err != nil {
		t.Fatal(err)
	}
	got := ""
	for _, s := range b.Spans {
		got += fmt.Sprintf("%d-", s.From)
		if s.To != nil {
			got += s.To.String()
		}
		got += " "
	}
	for _, e := range b.Events {
		got += e.Seq.String()
		if e.ShadowedBy != nil {
			got += "<" + e.ShadowedBy.String()
		}
		got += " "
	}
	if want := "1-4 5- 1<3 3<4 5 "; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	for text, want := range map[string]int{"role": 0, `"`: 0, "user": 5} { // keys are not searched, values are
		if b, err := w.Blame(journaltest.Context(t), "s", text); err != nil || len(b.Events) < want || want == 0 && len(b.Events) != 0 {
			t.Errorf("%q: %v, %+v", text, err, b)
		}
	}
	if _, err := w.Blame(journaltest.Context(t), "s", ""); err == nil {
		t.Error("no text was searched for")
	}
}

func assistant(usage string) string {
	return `{"type":"assistant/message","surfaceOp":"append","data":{"message":{"id":"a","role":"assistant","content":[],"source":{"kind":"model","provider":"p","model":"m"}}` + usage + `}}`
}

// Tokens are summed up by session and over all, and what a fork inherited is counted once.
func TestUsageCountsForkedPrefixesOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	w.append("parent", user("q"), assistant(`,"usage":{"inputTokens":10,"outputTokens":5}`), assistant(""))
	if _, err := w.Fork(ctx, appender.ForkRequest{Parent: "parent", ID: "child"}); err != nil {
		t.Fatal(err)
	}
	w.append("child", assistant(`,"usage":{"inputTokens":100,"outputTokens":1,"cacheReadTokens":7}`))
	if _, err := w.Fork(ctx, appender.ForkRequest{Parent: "child", ID: "grandchild"}); err != nil {
		t.Fatal(err)
	}
	w.append("grandchild", assistant(`,"usage":{"inputTokens":1000}`))
	child, err := w.Usage(ctx, "grandchild")
	if err != nil {
		t.Fatal(err)
	}
	if child.Messages != 1 || child.Tokens["inputTokens"] != 1000 || child.Inherited.Tokens["inputTokens"] != 110 || child.Inherited.Messages != 3 || child.LastSeq != 6 {
		t.Errorf("grandchild: %+v, inherited %+v", child, child.Inherited)
	}
	f, err := w.Fleet(ctx)
	if err != nil {
		t.Fatal(err)
	}
	want := audit.Tokens{"inputTokens": 1110, "outputTokens": 6, "cacheReadTokens": 7}
	if !maps.Equal(f.Tokens, want) || !maps.Equal(f.Models["p/m"], want) || f.Messages != 4 || f.Unmetered != 1 || len(f.Sessions) != 3 || f.Sessions[1].Session != "grandchild" {
		t.Errorf("fleet: %+v", f)
	}
}

// A replay gives the events of a range, at the recorded pace.
func TestReplayKeepsThePace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var raws []string
	for _, at := range []int64{1000, 2000, 5000, 4000, 4000, 64000} {
		raws = append(raws, strings.Replace(user("x"), `"type"`, fmt.Sprintf(`"time":%d,"type"`, at), 1))
	}
	w.append("s", raws...)
	for _, c := range []struct {
		speed string
		gap   time.Duration
		want  []time.Duration // since the first event
	}{
		{"1x", 0, []time.Duration{time.Second, 4 * time.Second, 4 * time.Second, 4 * time.Second, 64 * time.Second}},
		{"2x", 10 * time.Second, []time.Duration{500 * time.Millisecond, 2 * time.Second, 2 * time.Second, 2 * time.Second, 7 * time.Second}},
		{"max", 0, nil},
	} {
		speed, err := audit.ParseSpeed(c.speed)
		if err != nil {
			t.Fatal(err)
		}
		var asked []time.Duration
		var seqs []events.Seq
		began := time.Now()
		err = w.Replay(journaltest.Context(t), "s", audit.Replay{To: events.MaxSeq, Speed: speed, MaxGap: c.gap, Wait: func(_ context.Context, d time.Duration) error {
			asked = append(asked, d)
			return nil
		}}, func(e *events.Event, _ *events.Commit) error {
			seqs = append(seqs, e.Seq)
			return nil
		})
		took := time.Since(began)
		if err != nil || len(seqs) != 6 || len(asked) != len(c.want) && took < 500*time.Millisecond {
			t.Fatalf("%s: %v, events %v, waits %v", c.speed, err, seqs, asked)
		}
		for i, d := range asked {
			if len(asked) == len(c.want) && (d > c.want[i] || d < c.want[i]-took) {
				t.Errorf("%s: waited %v before event %d, want %v", c.speed, d, i+1, c.want[i])
			}
		}
	}
	var got []events.Seq
	err := w.Replay(journaltest.Context(t), "s", audit.Replay{From: 2, To: 4, Speed: audit.Max}, func(e *events.Event, _ *events.Commit) error {
		got = append(got, e.Seq)
		return nil
	})
	if err != nil || !slices.Equal(got, []events.Seq{2, 3, 4}) {
		t.Errorf("%v, %v", err, got)
	}
	for _, bad := range []string{"", "1", "x", "0x", "-1x", "NaNx", "fast"} {
		if _, err := audit.ParseSpeed(bad); err == nil {
			t.Errorf("speed %q was taken", bad)
		}
	}
}

// What lies behind the seqs that are compared does not matter, readable or not.
func TestDiffBeforeAForeignMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	w.append("s", user("zero"), user("one"))
	if _, err := w.js.Publish(ctx, w.log.Subject("s"), []byte("hello")); err != nil {
		t.Fatal(err)
	}
	a := audit.New(w.log, w.headers, w.buckets)
	if d, err := a.Diff(ctx, "s", 0, 1); err != nil || len(d.Came) != 1 || d.Came[0].Seq != 1 {
		t.Errorf("%+v, %v", d, err)
	}
	if d, err := a.Diff(ctx, "s", 0, 2); !errors.Is(err, &events.Error{Code: events.CodeCorrupt}) {
		t.Errorf("beyond it: %+v, %v", d, err)
	}
}
