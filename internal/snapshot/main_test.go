package snapshot_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"palimpsest/internal/events"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

func TestMain(m *testing.M) {
	flag.Parse()
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "rapid.checks" })
	if !given { // a case folds and writes megabytes
		if err := flag.Set("rapid.checks", checks); err != nil {
			panic(err)
		}
	}
	goleak.VerifyTestMain(m)
}

const sessionID = "s 1" // a token that differs from the id

var vocabulary = events.DefaultVocabulary()

// fataler is what *testing.T and *rapid.T have in common here.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

// book writes a session's log.
type book struct {
	session string
	format  events.Format
	next    events.Seq
	at      uint64 // stream sequence of the last commit
	digest  events.Digest
	chain   events.Digest
	commits []*events.Commit
}

func newBook(session string) *book {
	return &book{session: session, format: events.Format3, digest: events.SeedDigest(session), chain: events.SeedChain(session, nil)}
}

// commit adds one commit with the given events, gap stream sequences behind the last one.
func (b *book) commit(t fataler, gap uint64, raws ...string) *events.Commit {
	t.Helper()
	c := &events.Commit{ID: fmt.Sprintf("c%d", b.next), Session: b.session, Actor: events.NoActor, Time: "2026-01-01T00:00:00.000Z", Format: b.format, First: b.next}
	for _, raw := range raws {
		e, err := events.Parse([]byte(raw), events.Context{Format: b.format, Vocabulary: vocabulary, Next: b.next, Now: 1767225604000 + int64(b.next)})
		if err != nil {
			t.Fatalf("%.200s: %v", raw, err)
		}
		c.Body = append(append(c.Body, e.Line...), '\n')
		b.digest = b.digest.Next(e.Line)
		b.next++
	}
	b.at += gap
	c.Last, c.Digest, c.StreamSeq = b.next-1, b.digest, b.at
	b.chain = b.chain.NextChain(c)
	c.Chain = b.chain
	b.commits = append(b.commits, c)
	return c
}

const opAppend = `"append"`

func opReplace(from, to events.Seq) string {
	return fmt.Sprintf(`{"op":"replace","startSeq":%d,"endSeq":%d}`, from, to)
}

// sources cites nodes; "" cites none.
func sources(seqs []events.Seq) string {
	if len(seqs) == 0 {
		return ""
	}
	b, err := json.Marshal(seqs)
	if err != nil {
		panic(err)
	}
	return `,"sourceEventSeqs":` + string(b)
}

// content holds a text that needs no escapes.
func content(text string) string {
	if text == "" {
		return `[]`
	}
	return `[{"type":"text","text":"` + text + `"}]`
}

func user(op, cites, text string) string {
	return `{"type":"user/message","surfaceOp":` + op + cites + `,"data":{"id":"u","role":"user","source":{"kind":"user"},"content":` + content(text) + `}}`
}

func system(op, cites, text string) string {
	return `{"type":"system/message","surfaceOp":` + op + cites + `,"data":{"turn":1,"step":1,"message":{"id":"s","role":"system","source":{"kind":"plugin"},"content":` + content(text) + `}}}`
}

// assistant says text and asks for calls; with neither it derives no message.
func assistant(text string, calls ...string) string {
	blocks := strings.Trim(content(text), "[]")
	for _, id := range calls {
		if blocks != "" {
			blocks += ","
		}
		blocks += `{"type":"tool-call","id":"` + id + `"}`
	}
	return `{"type":"assistant/message","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"a","role":"assistant","source":{"kind":"model","provider":"p","model":"m"},"content":[` + blocks + `]}}}`
}

func tool(op, cites, call, text string) string {
	return `{"type":"tool/result","surfaceOp":` + op + cites + `,"data":{"turn":1,"step":1,"message":{"id":"t","role":"user","source":{"kind":"tool","callId":"` + call +
		`"},"content":[{"type":"tool-result","toolCallId":"` + call + `","isError":false,"content":` + content(text) + `}]}}}`
}

// bucket stands for SURFACES. Nothing is ever removed from it.
type bucket map[string][]byte

// take writes a flush as the store does, and checks that a page that is there already is the
// same page, and what the flush says about pages that the head no longer refers to: before and
// after are what the last head and this one refer to.
func (b bucket) take(t fataler, f *snapshot.Flush, before, after map[string]bool) {
	t.Helper()
	for _, p := range f.Pages {
		if old, ok := b[p.Key]; ok && !bytes.Equal(old, p.Value) {
			t.Fatalf("page %s was\n%.300s\nand is now\n%.300s", p.Key, old, p.Value)
		}
		b[p.Key] = p.Value
	}
	b[f.Head.Key] = f.Head.Value
	for key := range after {
		if b[key] == nil {
			t.Fatalf("the head at seq %d refers to %s, which is not there", f.Seq, key)
		}
	}
	var gone []string
	for key := range before {
		if !after[key] {
			gone = append(gone, key)
		}
	}
	slices.Sort(gone)
	if told := slices.Sorted(slices.Values(f.Unreferenced)); !slices.Equal(gone, told) {
		t.Fatalf("head at seq %d: the head before referred to %v beside, the flush calls %v unreferenced", f.Seq, gone, told)
	}
}

// refers is the set of keys that a head refers to.
func refers(h *snapshot.Head, index []*snapshot.IndexPage) map[string]bool {
	out := map[string]bool{}
	token := events.Token(h.Session)
	for i, n := range h.Index {
		out[snapshot.IndexKey(token, n)] = true
		for _, e := range index[i].Pages {
			out[snapshot.PageKey(token, e.N)] = true
		}
	}
	for _, e := range h.Pages {
		out[snapshot.PageKey(token, e.N)] = true
	}
	return out
}

// head reads the head and its index pages.
func (b bucket) head(t fataler) (*snapshot.Head, []*snapshot.IndexPage) {
	t.Helper()
	h, err := snapshot.ParseHead(b[snapshot.HeadKey(sessionID)], sessionID)
	if err != nil {
		t.Fatalf("head: %v", err)
	}
	index := make([]*snapshot.IndexPage, len(h.Index))
	for i, n := range h.Index {
		index[i] = read[snapshot.IndexPage](t, b, snapshot.IndexKey(events.Token(sessionID), n))
	}
	return h, index
}

// load restores the snapshot that the bucket holds.
func (b bucket) load(t fataler) *snapshot.Snapshot {
	t.Helper()
	h, index := b.head(t)
	s, err := snapshot.Restore(h, index, surface.KeepBodies)
	if err != nil {
		t.Fatalf("restore: %v", err)
	}
	return s
}

func (b bucket) page(t fataler, n int64) *snapshot.Page {
	t.Helper()
	return read[snapshot.Page](t, b, snapshot.PageKey(events.Token(sessionID), n))
}

func read[T any](t fataler, b bucket, key string) *T {
	t.Helper()
	out := new(T)
	if err := json.Unmarshal(b[key], out); err != nil {
		t.Fatalf("%s: %v: %.200q", key, err, b[key])
	}
	return out
}

// fold folds a commit, filling pages in from the bucket when they are asked for.
func (b bucket) fold(t fataler, s *snapshot.Snapshot, c *events.Commit) {
	t.Helper()
	for range 2*len(c.Body) + 2 {
		err := s.Fold(c, vocabulary, nil)
		var pages *snapshot.PagesError
		if err == nil {
			return
		}
		if !errors.As(err, &pages) {
			t.Fatalf("fold of seq %d: %v", c.First, err)
		}
		for _, n := range pages.Pages {
			if err := s.Fill(n, b.page(t, n).Nodes); err != nil {
				t.Fatalf("fill of page %d: %v", n, err)
			}
		}
	}
	t.Fatalf("fold of seq %d asks for pages for ever", c.First)
}

// messages are what a reader with nothing but the bucket derives.
func (b bucket) messages(t fataler) []string {
	t.Helper()
	h, index := b.head(t)
	entries := []snapshot.PageEntry{}
	for _, ip := range index {
		entries = append(entries, ip.Pages...)
	}
	var out []string
	take := func(nodes []snapshot.PageNode) {
		for _, n := range nodes {
			if n.Message != nil {
				out = append(out, string(n.Message))
			}
		}
	}
	for _, e := range append(entries, h.Pages...) {
		take(b.page(t, e.N).Nodes)
	}
	take(h.Tail)
	return out
}

// refold folds a log with encoding/json and nothing of the code under test: the nodes and the
// messages of its surface.
func refold(t fataler, commits []*events.Commit) (nodes []events.Seq, messages []string) {
	t.Helper()
	type entry struct {
		Type      string
		Seq       events.Seq
		SurfaceOp json.RawMessage
		Data      json.RawMessage
	}
	var log []entry
	for _, c := range commits {
		for line := range bytes.Lines(c.Body) {
			var e entry
			if err := json.Unmarshal(line, &e); err != nil {
				t.Fatalf("%v", err)
			}
			log = append(log, e)
		}
	}
	for _, e := range log {
		if e.SurfaceOp == nil || !strings.HasSuffix(e.Type, "/message") && e.Type != "tool/result" {
			continue
		}
		if string(e.SurfaceOp) == opAppend {
			nodes = append(nodes, e.Seq)
			continue
		}
		var op struct{ StartSeq, EndSeq events.Seq }
		if err := json.Unmarshal(e.SurfaceOp, &op); err != nil {
			t.Fatalf("%v", err)
		}
		from, to := slices.Index(nodes, op.StartSeq), slices.Index(nodes, op.EndSeq)
		nodes = slices.Concat(nodes[:from], []events.Seq{e.Seq}, nodes[to+1:])
	}
	for _, seq := range nodes {
		e := log[seq]
		var data struct {
			Message json.RawMessage
			Content []json.RawMessage
		}
		if err := json.Unmarshal(e.Data, &data); err != nil {
			t.Fatalf("%v", err)
		}
		if e.Type == "user/message" {
			messages = append(messages, string(e.Data))
			continue
		}
		var m struct{ Content []json.RawMessage }
		if err := json.Unmarshal(data.Message, &m); err != nil {
			t.Fatalf("%v", err)
		}
		if len(m.Content) > 0 || e.Type == "tool/result" {
			messages = append(messages, string(data.Message))
		}
	}
	return nodes, messages
}
