package snapshot_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"palimpsest/internal/events"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

// small is a session with pages, a tail and something in every member of its head.
func small(t fataler) (*book, bucket) {
	t.Helper()
	b, kv := newBook(sessionID), bucket{}
	s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
	fold := func(raws ...string) { kv.fold(t, s, b.commit(t, 2, raws...)) }
	fold(`{"type":"agent/status","data":{"agent":"x","status":"running"}}`, `{"type":"session/writer","ignorable":true,"data":{"writer":"w","epoch":1}}`)
	fold(`{"type":"turn/start","data":{"turn":1}}`, `{"type":"step/start","data":{"turn":1,"step":1}}`)
	fold(system(opAppend, "", "<be> & brief"), assistant("", "b", "a", "c"))
	fold(`{"type":"tool/call","data":{"turn":1,"step":1,"callId":"b"}}`, `{"type":"tool/call","data":{"turn":1,"step":1,"callId":"a"}}`)
	fold(tool(opAppend, "", "b", strings.Repeat("b", 40<<10)), tool(opAppend, "", "a", strings.Repeat("a", 40<<10)))
	fold(user(opAppend, "", strings.Repeat("u", 70<<10)), tool(opAppend, "", "z", `\ud800`), assistant(""))
	flush(t, s, kv)
	return b, kv
}

func flush(t fataler, s *snapshot.Snapshot, kv bucket) {
	t.Helper()
	f, err := s.Flush()
	if err != nil {
		t.Fatalf("flush: %v", err)
	}
	for _, p := range append(f.Pages, f.Head) {
		kv[p.Key] = p.Value
	}
}

// marshal is what encoding/json makes of a value, without its escapes for HTML.
func marshal(t fataler, v any) string {
	t.Helper()
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		t.Fatalf("%v", err)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

// Heads and pages are written by hand; encoding/json reads them and writes the same bytes.
func TestHeadAndPagesRoundTrip(t *testing.T) {
	t.Parallel()
	_, kv := small(t)
	h, _ := kv.head(t)
	if len(h.Pages) < 2 || len(h.Tail) < 2 || h.Writer == nil || len(h.Lifecycle.Calls) == 0 || h.HeadType != events.TypeSystem {
		t.Fatalf("the sample lacks something: %+v", h)
	}
	if got, want := marshal(t, h), string(kv[snapshot.HeadKey(sessionID)]); got != want {
		t.Errorf("head\n%.600s\nbecomes\n%.600s", want, got)
	}
	for _, e := range h.Pages {
		p := kv.page(t, e.N)
		if got, want := marshal(t, p), string(kv[snapshot.PageKey(events.Token(sessionID), e.N)]); got != want {
			t.Errorf("page %d\n%.300s\nbecomes\n%.300s", e.N, want, got)
		}
	}
	w := buildWide()
	for key, value := range w.pages {
		if strings.Contains(key, ".i") {
			if got := marshal(t, read[snapshot.IndexPage](t, w.pages, key)); got != string(value) {
				t.Errorf("%s becomes other bytes", key)
			}
		}
	}
	var odd json.RawMessage
	for _, n := range h.Tail {
		if n.Type == events.TypeTool {
			odd = n.Message
		}
	}
	if !bytes.Contains(odd, []byte(`"\ud800"`)) {
		t.Errorf("a lone surrogate became %.300s", odd)
	}
	if again := kv.load(t); !bytes.Equal(expectInto(t, again, kv)[snapshot.HeadKey(sessionID)], kv[snapshot.HeadKey(sessionID)]) {
		t.Errorf("the head of a restored snapshot differs")
	}
}

// A snapshot that was loaded between two results of parallel calls has the head of one that
// was not.
func TestAnsweredCallsHaveOneOrder(t *testing.T) {
	t.Parallel()
	b, kv := small(t)
	whole := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
	for _, c := range b.commits {
		kv.fold(t, whole, c)
	}
	loaded := kv.load(t)
	for _, call := range []string{"a", "c", "b"} {
		c := b.commit(t, 1, tool(opAppend, "", call, "again"))
		kv.fold(t, whole, c)
		kv.fold(t, loaded, c)
	}
	key := snapshot.HeadKey(sessionID)
	if d := snapshot.Difference(expectInto(t, whole, kv)[key], expectInto(t, loaded, kv)[key]); d != "" {
		t.Error(d)
	}
}

func TestRunsAreWrittenShort(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		seqs snapshot.Runs
		want string
	}{
		{nil, `[]`},
		{snapshot.Runs{7}, `[7]`},
		{snapshot.Runs{0, 1}, `[[0,1]]`},
		{snapshot.Runs{0, 1, 2, 9, 3, 4, 8, 7}, `[[0,2],9,[3,4],8,7]`},
		{snapshot.Runs{events.MaxSeq - 1, events.MaxSeq}, `[[9007199254740990,9007199254740991]]`},
	} {
		if got := marshal(t, c.seqs); got != c.want {
			t.Errorf("%v is written %s, want %s", []events.Seq(c.seqs), got, c.want)
		}
	}
	rapid.Check(t, func(r *rapid.T) {
		seqs := rapid.SliceOf(rapid.Int64Range(0, 20)).Draw(r, "seqs")
		want := make(snapshot.Runs, len(seqs))
		for i, s := range seqs {
			want[i] = events.Seq(s)
		}
		var got snapshot.Runs
		if err := json.Unmarshal([]byte(marshal(r, want)), &got); err != nil || !slices.Equal(got, want) {
			r.Fatalf("%v became %v: %v", want, got, err)
		}
	})
}

func TestRunsThatNobodyWroteAreRefused(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{
		`{}`, `["1"]`, `[null,[2,1]]`, `[[1]]`, `[[1,2,3]]`, `[[]]`, `[[-2,-1]]`, `[1.5]`, `[[0,1e30]]`,
		`[[0,100000000]]`, `[[-9223372036854775808,9223372036854775807]]`, `[[0,65536]]`,
		`[[0,40000],[40001,80000]]`,
	} {
		var r snapshot.Runs
		if err := json.Unmarshal([]byte(bad), &r); err == nil {
			t.Errorf("%s was read as %d seqs", bad, len(r))
		}
	}
}

func TestDifferenceNamesTheFirstMember(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ want, got, difference string }{
		{`{"a":1}`, `{"a":1}`, ""},
		{`{"a":1,"b":2,"c":3}`, `{"a":1,"b":9,"c":8}`, "b: expected 2, found 9"},
		{`{"a":1,"b":2}`, `{"a":1}`, "b: expected 2, found "},
		{`{"a":1}`, `{"a":1,"z":0,"y":0}`, "unexpected member y"},
		{`{"a":1,"b":2}`, `{"b":2,"a":1}`, "same members in another spelling"},
		{`{"a":1}`, `{"a":`, "expected a JSON object: unexpected end of JSON input"},
		{`{"a":1}`, `[]`, "expected a JSON object: json: cannot unmarshal array into Go value of type map[string]json.RawMessage"},
	} {
		if got := snapshot.Difference([]byte(c.want), []byte(c.got)); got != c.difference {
			t.Errorf("%s against %s: %q, want %q", c.got, c.want, got, c.difference)
		}
	}
}

// edit changes the JSON value under a path of keys.
func edit(t fataler, raw []byte, path string, value string) []byte {
	t.Helper()
	var root any
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	if err := d.Decode(&root); err != nil {
		t.Fatalf("%v", err)
	}
	at := root
	keys := strings.Split(path, ".")
	for i, k := range keys {
		last := i == len(keys)-1
		switch v := at.(type) {
		case map[string]any:
			if last {
				if v[k] = json.RawMessage(value); value == "" {
					delete(v, k)
				}
			}
			at = v[k]
		case []any:
			n := 0
			if _, err := fmt.Sscan(k, &n); err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			if last {
				v[n] = json.RawMessage(value)
			}
			at = v[n]
		default:
			t.Fatalf("%s: no such place", path)
		}
	}
	return []byte(marshal(t, root))
}

// Damage is told, with code snapshot-damaged, before anything is made of it.
func TestDamageIsTold(t *testing.T) {
	t.Parallel()
	_, kv := small(t)
	for _, c := range []struct{ path, value, detail string }{
		{"v", "2", "layout version"},
		{"v", "", "layout version"},
		{"session", `"s 2"`, "session"},
		{"format", "5", "format"},
		{"seq", "-2", "seq"},
		{"seq", "9007199254740992", "seq"},
		{"seq", "4", "expected a seq from 0 to the head's"},
		{"seq", `"4"`, "seq"},
		{"digest", `"00"`, "digest"},
		{"chain", `"zz"`, "digest"},
		{"replaceGeneration", "-1", "replaceGeneration"},
		{"nodeCount", "-1", "nodeCount"},
		{"nodeCount", "4", "nodeCount"},
		{"nodeCount", "9007199254740991", "nodeCount"},
		{"headType", `"user/mess"`, "headType"},
		{"headType", "", "headType"},
		{"index", "[1]", "index page"},
		{"nextPage", "2", "nextPage"},
		{"nextPage", "-1", "nextPage"},
		{"nextPage", "9223372036854775807", "nextPage"},
		{"pages.0.n", "7", "below nextPage"},
		{"pages.0.n", "-1", "below nextPage"},
		{"pages.0.count", "9", "count"},
		{"pages.0.seqs", "[]", "count"},
		{"pages.0.seqs", "[[4,8000000000]]", "expected [first,last]"},
		{"pages.0.seqs.1", "99", "expected a seq from 0 to the head's"},
		{"pages.0.bytes", "-1", "bytes"},
		{"pages.1.n", "0", "each number once"},
		{"tail.0.type", `"turn/start"`, "type"},
		{"tail.0.type", "", "type"},
		{"tail.0.fp", "", "fp"},
		{"tail.1.fp", `"00"`, "fp"},
		{"tail.0.size", "-5", "size"},
		{"tail.0.seq", "-1", "expected a seq from 0 to the head's"},
		{"tail.0.seq", "99", "expected a seq from 0 to the head's"},
		{"tail", "[]", "nodeCount"},
	} {
		raw := edit(t, kv[snapshot.HeadKey(sessionID)], c.path, c.value)
		h, err := snapshot.ParseHead(raw, sessionID)
		if err == nil {
			var index []*snapshot.IndexPage
			for range h.Index {
				index = append(index, &snapshot.IndexPage{V: 1})
			}
			_, err = snapshot.Restore(h, index, surface.KeepBodies)
		}
		if !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) || !strings.Contains(err.Error(), c.detail) {
			t.Errorf("head with %s = %s: %v, want snapshot-damaged with %q", c.path, c.value, err, c.detail)
		}
	}
	h, _ := kv.head(t)
	for _, c := range []struct{ path, value, detail string }{
		{"nodes", "[]", "nodes"},
		{"nodes.0.seq", "9", "its index entry says"},
		{"nodes.0.type", `"nonsense"`, "type"},
		{"nodes.0.type", `"user/message"`, "expected a system/message"},
		{"nodes.2.fp", "", "fp"},
		{"nodes.2.size", "40000", "bytes"},
	} {
		e := h.Pages[0]
		key := snapshot.PageKey(events.Token(sessionID), e.N)
		p := read[snapshot.Page](t, bucket{key: edit(t, kv[key], c.path, c.value)}, key)
		s := kv.load(t)
		if err := s.Fill(e.N, p.Nodes); !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) || !strings.Contains(err.Error(), c.detail) {
			t.Errorf("page with %s = %s: %v, want snapshot-damaged with %q", c.path, c.value, err, c.detail)
		}
		if err := s.Fill(e.N, kv.page(t, e.N).Nodes); err != nil {
			t.Errorf("the good page after that one: %v", err)
		}
	}
	if err := kv.load(t).Fill(77, nil); !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) {
		t.Errorf("a page of no index: %v", err)
	}
}

// A short text may claim so many seqs that memory would not hold them.
func TestMorePagesThanAnIndexHasAreRefused(t *testing.T) {
	t.Parallel()
	_, kv := small(t)
	for _, space := range []string{"", " "} { // in the form in which it is written, and in another
		pages := func(n int) []byte {
			entry := space + fmt.Sprintf(`{"n":0,"count":%d,"seqs":[[0,%d]],"bytes":1}`, snapshot.PageTarget, snapshot.PageTarget-1)
			return []byte("[" + strings.Join(slices.Repeat([]string{entry}, n), ",") + "]")
		}
		head := kv[snapshot.HeadKey(sessionID)]
		from, to := bytes.Index(head, []byte(`"pages":[`))+len(`"pages":`), bytes.Index(head, []byte(`,"tail":`))
		head = slices.Concat(head[:from], pages(snapshot.IndexEntries+1), head[to:])
		if _, err := snapshot.ParseHead(head, sessionID); !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) || !strings.Contains(err.Error(), "found 257") {
			t.Errorf("a head: %v", err)
		}
		index := slices.Concat([]byte(`{"v":1,"pages":`), pages(snapshot.IndexEntries+1), []byte("}"))
		if _, err := snapshot.ParseIndexPage(index, "s.i1"); !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) || !strings.Contains(err.Error(), "found 257") {
			t.Errorf("an index page: %v", err)
		}
	}
}

// FuzzParseHead gives a head, an index page and a page of any bytes to what reads them. What
// is taken for a snapshot must bear being folded on, whatever it asks for.
func FuzzParseHead(f *testing.F) {
	t := panicker{}
	key := snapshot.HeadKey(sessionID)
	b, kv := newBook(sessionID), bucket{}
	s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
	kv.fold(t, s, b.commit(t, 1, `{"type":"turn/start","data":{"turn":1}}`, `{"type":"step/start","data":{"turn":1,"step":1}}`))
	for range 3 {
		kv.fold(t, s, b.commit(t, 1, tool(opAppend, "", "c", "r")))
	}
	flush(t, s, kv)
	head := kv[key]
	tail := read[snapshot.Head](t, kv, key).Tail
	f.Add(head, []byte(`{}`), []byte(`{}`), int64(3), int64(4))
	for _, c := range [][2]string{{"tail.0.type", `"x"`}, {"headType", `"x"`}, {"nodeCount", "9007199254740991"}, {"tail.2.size", "65536"}, {"tail.1.seq", "2"}, {"lifecycle.calls", `[{"id":""},{"id":""}]`}} {
		f.Add(edit(t, head, c[0], c[1]), []byte(`{}`), []byte(`{}`), int64(2), int64(3))
	}
	// The same three nodes as a page, in the open index and behind an index page.
	entries := fmt.Sprintf(`[{"n":0,"count":3,"seqs":[[2,4]],"bytes":%d}]`, 3*tail[0].Size)
	paged := edit(t, edit(t, head, "tail", "[]"), "nextPage", "2")
	page := []byte(`{"v":1,"nodes":` + marshal(t, tail) + `}`)
	f.Add(edit(t, paged, "pages", entries), []byte(`{}`), page, int64(2), int64(3))
	f.Add(edit(t, paged, "index", "[1]"), []byte(`{"v":1,"pages":`+entries+`}`), page, int64(2), int64(3))
	f.Add(edit(t, paged, "index", "[1]"), []byte(`{"v":1,"pages":`+entries+`}`), edit(t, page, "nodes.1.type", `"x"`), int64(3), int64(3))

	f.Fuzz(func(t *testing.T, head, index, page []byte, from, to int64) {
		h, err := snapshot.ParseHead(head, sessionID)
		if err != nil || len(h.Index) > 3 {
			return
		}
		var pages []*snapshot.IndexPage
		for range h.Index {
			ip := new(snapshot.IndexPage)
			if json.Unmarshal(index, ip) != nil {
				return
			}
			pages = append(pages, ip)
		}
		var p snapshot.Page
		if json.Unmarshal(page, &p) != nil {
			p.Nodes = nil
		}
		for _, keep := range []surface.Keep{surface.KeepBodies, surface.KeepFrozenBodies} {
			s, err := snapshot.Restore(h, pages, keep)
			if err != nil {
				return
			}
			if s.Surface.Len() > 1<<16 || s.Next > 1<<40 {
				return
			}
			s.Pages()
			for _, raw := range []string{
				user(opAppend, "", "x"),
				tool(opReplace(events.Seq(from), events.Seq(from)), sources([]events.Seq{events.Seq(from)}), "c", "new"),
				user(opReplace(events.Seq(from), events.Seq(to)), sources(s.Surface.Seqs()), "y"),
			} {
				next := s.Next
				foldDamaged(s, raw, p.Nodes)
				if s.Next > next+1 {
					t.Fatalf("one event moved the snapshot from %d to %d", next, s.Next)
				}
			}
			if fl, err := s.Flush(); err == nil {
				if _, err := snapshot.ParseHead(fl.Head.Value, sessionID); err != nil {
					t.Fatalf("the head that a flush wrote cannot be read: %v\n%.500s", err, fl.Head.Value)
				}
			}
		}
	})
}

// foldDamaged folds one event into a snapshot of unknown origin, with the same nodes for every
// page that is asked for.
func foldDamaged(s *snapshot.Snapshot, raw string, nodes []snapshot.PageNode) {
	e, err := events.Parse([]byte(raw), events.Context{Format: s.Format, Vocabulary: vocabulary, Next: s.Next})
	if err != nil {
		return
	}
	c := &events.Commit{ID: "c", Session: sessionID, Format: s.Format, First: e.Seq, Last: e.Seq, StreamSeq: s.StreamSeq + 1, Body: append(bytes.Clone(e.Line), '\n')}
	for range 5 { // a replacement asks for the pages at its two ends, and those of what it replaces
		var pages *snapshot.PagesError
		if err := s.Fold(c, vocabulary, nil); !errors.As(err, &pages) {
			return
		}
		for _, n := range pages.Pages {
			if s.Fill(n, slices.Clone(nodes)) != nil {
				return
			}
		}
	}
	panic("the fold asks for pages for ever")
}
