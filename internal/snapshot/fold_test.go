package snapshot_test

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"palimpsest/internal/events"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

// modelNode is a node of the surface as the model knows it.
type modelNode struct {
	seq  events.Seq
	kind string // user, system, assistant, tool
	call string // of a tool
}

// author makes up a session, event by event. It knows the surface.
type author struct {
	*book
	nodes []modelNode
	calls int
}

// text draws the text of a message; most are small.
func text(r *rapid.T) string {
	limits := rapid.SampledFrom([][2]int{{1, 300}, {1, 300}, {1, 300}, {1, 300}, {1 << 10, 20 << 10}, {1 << 10, 20 << 10}, {20 << 10, 64 << 10}, {64<<10 - 200, 200 << 10}}).Draw(r, "limits")
	n := rapid.IntRange(limits[0], limits[1]).Draw(r, "size")
	return strings.Repeat(string(rune('a'+n%26)), n)
}

// span draws a range of nodes to be replaced: positions, inclusive. bounds are positions at
// which pages begin.
func (a *author) span(r *rapid.T, bounds []int) (from, to int) {
	last := len(a.nodes) - 1
	pos := func(name string) int { return rapid.IntRange(0, last).Draw(r, name) }
	switch rapid.SampledFrom([]string{"any", "one", "tail", "pages", "all", "short"}).Draw(r, "span") {
	case "one":
		from = pos("at")
		to = from
	case "tail":
		from, to = pos("from"), last
	case "all":
		from, to = 0, last
	case "pages": // from where one page begins to where another ends
		if len(bounds) < 2 {
			return 0, last
		}
		i := rapid.IntRange(0, len(bounds)-2).Draw(r, "first page")
		k := rapid.IntRange(i+1, len(bounds)-1).Draw(r, "behind the last page")
		from, to = bounds[i], bounds[k]-1
	case "short":
		from = pos("from")
		to = min(last, from+rapid.IntRange(1, 5).Draw(r, "nodes"))
	default:
		from, to = pos("from"), pos("to")
		from, to = min(from, to), max(from, to)
	}
	return from, to
}

// event makes up the next event of a commit of which n came before. It returns its raw form,
// after the model took it in.
func (a *author) event(r *rapid.T, n int, bounds []int) string {
	seq := a.next + events.Seq(n)
	add := func(kind, call string) { a.nodes = append(a.nodes, modelNode{seq, kind, call}) }
	switch rapid.SampledFrom([]string{"user", "user", "assistant", "assistant", "empty", "system", "tool", "tool", "replace", "replace", "replace", "rewrite", "rewrite", "life", "life"}).Draw(r, "event") {
	case "assistant":
		a.calls += 2
		add("assistant", "")
		return assistant(text(r), fmt.Sprintf("call-%d", a.calls-1), fmt.Sprintf("call-%d", a.calls))
	case "empty":
		add("assistant", "")
		return assistant("")
	case "system":
		add("system", "")
		return system(opAppend, "", text(r))
	case "tool":
		call := fmt.Sprintf("call-%d", rapid.IntRange(max(0, a.calls-3), a.calls).Draw(r, "call"))
		add("tool", call)
		return tool(opAppend, "", call, text(r))
	case "replace":
		if len(a.nodes) == 0 {
			break
		}
		from, to := a.span(r, bounds)
		if to >= len(a.nodes) {
			break // bounds are of before the commit
		}
		with := user
		kind := "user"
		if from == 0 && a.nodes[0].kind == "system" { // protected
			to, with, kind = 0, system, "system"
		}
		var cites []events.Seq
		for _, nd := range a.nodes[from : to+1] {
			cites = append(cites, nd.seq)
		}
		op := opReplace(cites[0], cites[len(cites)-1])
		slices.Sort(cites)
		a.nodes = slices.Concat(a.nodes[:from], []modelNode{{seq, kind, ""}}, a.nodes[to+1:])
		return with(op, sources(cites), text(r))
	case "rewrite":
		var tools []int
		for i, nd := range a.nodes {
			if nd.kind == "tool" {
				tools = append(tools, i)
			}
		}
		if tools == nil {
			break
		}
		at := rapid.SampledFrom(tools).Draw(r, "rewritten")
		old := a.nodes[at]
		a.nodes[at] = modelNode{seq, "tool", old.call}
		return tool(opReplace(old.seq, old.seq), sources([]events.Seq{old.seq}), old.call, text(r))
	case "life":
		turn := rapid.IntRange(1, 2).Draw(r, "turn")
		return rapid.SampledFrom([]string{
			fmt.Sprintf(`{"type":"turn/start","data":{"turn":%d}}`, turn),
			fmt.Sprintf(`{"type":"step/start","data":{"turn":%d,"step":1}}`, turn),
			fmt.Sprintf(`{"type":"tool/call","data":{"turn":1,"step":1,"callId":"call-%d"}}`, rapid.IntRange(max(0, a.calls-2), a.calls+1).Draw(r, "call")),
			fmt.Sprintf(`{"type":"step/end","data":{"turn":%d,"step":1}}`, turn),
			fmt.Sprintf(`{"type":"turn/end","data":{"turn":%d}}`, turn),
			`{"type":"agent/status","data":{"agent":"x","status":"running"}}`,
			fmt.Sprintf(`{"type":"session/writer","ignorable":true,"data":{"writer":"w","epoch":%d}}`, seq),
			`{"type":"x/opaque","surfaceOp":"append","ignorable":true,"data":[1.10]}`,
		}).Draw(r, "life")
	}
	add("user", "")
	return user(opAppend, "", text(r))
}

// write makes up one commit.
func (a *author) write(r *rapid.T, bounds []int) *events.Commit {
	var raws []string
	if rapid.IntRange(0, 9).Draw(r, "new step") == 0 {
		raws = append(raws, `{"type":"turn/start","data":{"turn":1}}`, `{"type":"step/start","data":{"turn":1,"step":1}}`)
	}
	for range rapid.IntRange(1, 4).Draw(r, "events") {
		raws = append(raws, a.event(r, len(raws), bounds))
	}
	return a.commit(r, uint64(rapid.IntRange(1, 3).Draw(r, "gap")), raws...)
}

func (a *author) seqs() []events.Seq {
	out := make([]events.Seq, len(a.nodes))
	for i, nd := range a.nodes {
		out[i] = nd.seq
	}
	return out
}

// checkCuts checks how a head with its index cuts a surface, and returns at which positions
// pages begin, the tail included. seen holds what numbers stood for so far: a number never
// stands for something else.
func checkCuts(t fataler, h *snapshot.Head, index []*snapshot.IndexPage, want []events.Seq, seen map[int64]string) (bounds []int) {
	t.Helper()
	var seqs []events.Seq
	numbers := map[int64]bool{}
	number := func(n int64, what string) {
		if n >= h.NextPage || numbers[n] {
			t.Fatalf("number %d of %s: taken twice, or not below nextPage %d", n, what, h.NextPage)
		}
		numbers[n] = true
		if old, ok := seen[n]; ok && old != what {
			t.Fatalf("number %d stood for %s, and stands for %s", n, old, what)
		}
		seen[n] = what
	}
	entries := func(es []snapshot.PageEntry) {
		for _, e := range es {
			if e.Count == 0 || e.Count != len(e.Seqs) || e.Bytes > snapshot.PageTarget && e.Count > 1 {
				t.Fatalf("page %d: count %d, %d seqs, %d bytes", e.N, e.Count, len(e.Seqs), e.Bytes)
			}
			number(e.N, fmt.Sprintf("page %v", e.Seqs))
			bounds = append(bounds, len(seqs))
			seqs = append(seqs, e.Seqs...)
		}
	}
	for i, ip := range index {
		if len(ip.Pages) == 0 || len(ip.Pages) > snapshot.IndexEntries {
			t.Fatalf("index page %d has %d entries", h.Index[i], len(ip.Pages))
		}
		first, last := ip.Pages[0].N, ip.Pages[len(ip.Pages)-1].N
		number(h.Index[i], fmt.Sprintf("index page of %d entries from %d to %d", len(ip.Pages), first, last))
		entries(ip.Pages)
	}
	if len(h.Pages) >= snapshot.IndexEntries {
		t.Fatalf("the open index has %d entries", len(h.Pages))
	}
	runs := 0
	for _, e := range h.Pages {
		for i, seq := range e.Seqs {
			if i == 0 || seq != e.Seqs[i-1]+1 {
				runs++
			}
		}
	}
	if runs >= 2*snapshot.IndexRuns {
		t.Fatalf("the open index has %d runs", runs)
	}
	entries(h.Pages)
	bounds = append(bounds, len(seqs))
	size := 0
	for _, n := range h.Tail {
		size += int(n.Size)
		seqs = append(seqs, n.Seq)
	}
	if size >= snapshot.PageTarget {
		t.Fatalf("the tail has %d bytes", size)
	}
	if !slices.Equal(seqs, want) || h.NodeCount != len(want) {
		t.Fatalf("seq %d: head and index have nodes\n%v\nthe surface is\n%v", h.Seq, seqs, want)
	}
	return bounds
}

// expectInto is what the bucket must hold for a snapshot that was never flushed, on top of base.
func expectInto(t fataler, s *snapshot.Snapshot, base bucket) bucket {
	t.Helper()
	b := maps.Clone(base)
	head, err := s.ExpectHead(nil, nil)
	if err != nil {
		t.Fatalf("expect: %v", err)
	}
	b[snapshot.HeadKey(s.ID)] = head
	err = s.ExpectPages(func(key string, value func(snapshot.Messages) ([]byte, error)) (err error) {
		b[key], err = value(nil)
		return err
	})
	if err != nil {
		t.Fatalf("expect: %v", err)
	}
	return b
}

// follower is a snapshot of the session with the bucket that it writes to.
type follower struct {
	name   string
	snap   *snapshot.Snapshot
	bucket bucket
	refers map[string]bool // by its head
	reload bool            // loads itself again after each flush
}

// flush writes, and compares the head with what it must be, which refers to the given keys.
func (f *follower) flush(t fataler, want []byte, refers map[string]bool) {
	t.Helper()
	fl, err := f.snap.Flush()
	if err != nil {
		t.Fatalf("%s: flush: %v", f.name, err)
	}
	if !bytes.Equal(fl.Head.Value, want) {
		t.Fatalf("%s: %s", f.name, snapshot.Difference(want, fl.Head.Value))
	}
	f.bucket.take(t, fl, f.refers, refers)
	f.refers = refers
	if f.reload {
		f.snap = f.bucket.load(t)
	}
}

// follow lets an author write, folds what it writes into a snapshot that is never flushed and
// into others that are, and checks all of them against each other and against the model.
func follow(r *rapid.T, a *author, never *snapshot.Snapshot, base bucket, followers []*follower) {
	seen := map[int64]string{}
	want := expectInto(r, never, base)
	h, index := want.head(r)
	bounds := checkCuts(r, h, index, a.seqs(), seen)
	for range rapid.IntRange(4, 20).Draw(r, "commits") {
		c := a.write(r, bounds)
		base.fold(r, never, c)
		want = expectInto(r, never, base)
		h, index = want.head(r)
		bounds = checkCuts(r, h, index, a.seqs(), seen)
		var keys map[string]bool
		for _, f := range followers {
			f.bucket.fold(r, f.snap, c)
			if rapid.IntRange(0, 2).Draw(r, f.name+" flushes") == 0 {
				if keys == nil {
					keys = refers(h, index)
				}
				f.flush(r, want[snapshot.HeadKey(sessionID)], keys)
			}
		}
	}
	keys := refers(h, index)
	for _, f := range followers {
		f.flush(r, want[snapshot.HeadKey(sessionID)], keys)
		for key := range keys {
			if !bytes.Equal(want[key], f.bucket[key]) {
				r.Fatalf("%s: %s: %s", f.name, key, snapshot.Difference(want[key], f.bucket[key]))
			}
		}
	}
}

// The cuts cover the surface whatever is replaced, and depend on the log alone: not on when a
// snapshot was flushed, nor on when it was loaded again.
func TestCutsFollowFromTheLogAlone(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(r *rapid.T) {
		a := &author{book: newBook(sessionID)}
		fresh := func() *snapshot.Snapshot { return snapshot.New(sessionID, events.Format3, surface.KeepBodies) }
		flushed := &follower{name: "flushed", snap: fresh(), bucket: bucket{}}
		reloaded := &follower{name: "reloaded", snap: fresh(), bucket: bucket{}, reload: true}
		follow(r, a, fresh(), bucket{}, []*follower{flushed, reloaded})

		nodes, messages := refold(r, a.commits)
		if !slices.Equal(nodes, a.seqs()) {
			r.Fatalf("the model has %v, a refold has %v", a.seqs(), nodes)
		}
		for _, f := range []*follower{flushed, reloaded} {
			if got := f.bucket.messages(r); !slices.Equal(got, messages) {
				r.Fatalf("%s: %d messages in head and pages, a refold of the log has %d, or others", f.name, len(got), len(messages))
			}
		}
	})
}

// wide is a session with sealed index pages, as it was at several points.
type wide struct {
	pages bucket
	at    []point
}

type point struct {
	head   []byte
	keys   []string
	author author
}

// build folds commits with one node each, which is their last event, and flushes at some points.
func build(commits int, write func(i int) (raws []string, kind, call string), flushed func(i int) bool) *wide {
	t := panicker{}
	w := &wide{pages: bucket{}}
	a := author{book: newBook(sessionID)}
	s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
	var keys map[string]bool
	for i := range commits {
		raws, kind, call := write(i)
		w.pages.fold(t, s, a.commit(t, 1, raws...))
		a.nodes = append(a.nodes, modelNode{a.next - 1, kind, call})
		if !flushed(i) {
			continue
		}
		f, err := s.Flush()
		if err != nil {
			panic(err)
		}
		before := keys
		w.pages[f.Head.Key] = f.Head.Value
		for _, p := range f.Pages {
			w.pages[p.Key] = p.Value
		}
		keys = refers(w.pages.head(t))
		w.pages.take(t, f, before, keys)
		at := author{book: &book{session: sessionID, format: events.Format3, next: a.next, at: a.at, digest: a.digest, chain: a.chain}, nodes: slices.Clone(a.nodes)}
		w.at = append(w.at, point{f.Head.Value, slices.Collect(maps.Keys(keys)), at})
	}
	return w
}

// writeWide makes nodes of which each fills a page: two of 33 KiB do not fit into one.
func writeWide(i int) (raws []string, kind, call string) {
	if i%7 == 3 {
		return []string{tool(opAppend, "", "c", long)}, "tool", "c"
	}
	return []string{user(opAppend, "", long)}, "user", ""
}

var long = strings.Repeat("x", 33<<10)

// buildWide makes index pages of 256 entries.
var buildWide = sync.OnceValue(func() *wide {
	return build(600, writeWide, func(i int) bool { return i%40 == 39 || i > 250 && i < 260 || i > 508 && i < 516 })
})

// buildSparse makes index pages of few entries, each of a page of many nodes between which
// other events lie.
var buildSparse = sync.OnceValue(func() *wide {
	text := strings.Repeat("y", 300)
	return build(2400, func(i int) ([]string, string, string) {
		return []string{`{"type":"goal/change","data":1}`, user(opAppend, "", text)}, "user", ""
	}, func(i int) bool { return i%150 == 149 })
})

type panicker struct{}

func (panicker) Helper()                           {}
func (panicker) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

// The same with hundreds of pages, so that replacements cross index pages, and index pages
// become full, are cut again and dissolve.
func TestIndexPagesFollowFromTheLogAlone(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(r *rapid.T) {
		w := buildWide()
		if rapid.Bool().Draw(r, "sparse") {
			w = buildSparse()
		}
		p := w.at[rapid.IntRange(0, len(w.at)-1).Draw(r, "start")]
		a := p.author
		b := *a.book
		a.book, a.nodes = &b, slices.Clone(a.nodes)
		start := func() bucket {
			own := bucket{snapshot.HeadKey(sessionID): p.head}
			for _, key := range p.keys {
				own[key] = w.pages[key]
			}
			return own
		}
		base := start()
		keys := refers(base.head(r))
		flushed := &follower{name: "flushed", snap: base.load(r), bucket: start(), refers: keys}
		reloaded := &follower{name: "reloaded", snap: base.load(r), bucket: start(), refers: keys, reload: true}
		follow(r, &a, base.load(r), base, []*follower{flushed, reloaded})
	})
}

// The starts of the test before this one are themselves what a fold without any flush makes.
func TestSealedIndexPagesAreThoseOfAFreshFold(t *testing.T) {
	t.Parallel()
	w := buildWide()
	a := newBook(sessionID)
	s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
	for i := range 600 {
		raws, _, _ := writeWide(i)
		if err := s.Fold(a.commit(t, 1, raws...), vocabulary, nil); err != nil {
			t.Fatal(err)
		}
	}
	want := expectInto(t, s, bucket{})
	for key, value := range want {
		if !bytes.Equal(value, w.pages[key]) {
			t.Errorf("%s: %s", key, snapshot.Difference(value, w.pages[key]))
		}
	}
	if len(want) != len(w.pages) || len(refers(want.head(t))) != len(want)-1 {
		t.Errorf("a fresh fold has %d keys, the flushed one %d", len(want), len(w.pages))
	}
	if h, index := want.head(t); len(index) != 2 || len(h.Pages) < 80 {
		t.Errorf("%d index pages and %d open entries", len(index), len(h.Pages))
	}
	if _, index := buildSparse().pages.head(t); len(index) < 2 || len(index[0].Pages) > 20 {
		t.Errorf("a sparse session has %d index pages, the first of %d entries", len(index), len(index[0].Pages))
	}
}
