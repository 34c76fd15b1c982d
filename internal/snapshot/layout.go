package snapshot

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

// Bucket is the KV bucket of snapshots.
const Bucket = "SURFACES"

// layoutVersion is `v` of heads, pages and index pages.
const layoutVersion = 1

// HeadKey is the key of a session's head: its token.
func HeadKey(session string) string { return events.Token(session) }

// PageKey is the key of a page.
func PageKey(token string, n int64) string { return token + "." + strconv.FormatInt(n, 10) }

// IndexKey is the key of an index page.
func IndexKey(token string, n int64) string { return token + ".i" + strconv.FormatInt(n, 10) }

// Head is a session's head as the bucket holds it.
type Head struct {
	V                 int                `json:"v"`
	Format            events.Format      `json:"format"`
	Fold              int                `json:"fold"` // version of the fold that made it
	Session           string             `json:"session"`
	Seq               events.Seq         `json:"seq"` // of the last event folded; -1 for none
	StreamSeq         uint64             `json:"streamSeq"`
	Digest            string             `json:"digest"`
	Chain             string             `json:"chain"`
	Time              int64              `json:"time"`     // Unix ms, of the last event
	LogBytes          int64              `json:"logBytes"` // of all canonical lines, with their line ends
	ReplaceGeneration int64              `json:"replaceGeneration"`
	NodeCount         int                `json:"nodeCount"`
	HeadType          string             `json:"headType,omitempty"`
	Index             []int64            `json:"index"` // numbers of the sealed index pages, in order
	Pages             Entries            `json:"pages"` // the open index
	Tail              []PageNode         `json:"tail"`  // the newest nodes
	NextPage          int64              `json:"nextPage"`
	Lifecycle         lifecycle.Snapshot `json:"lifecycle"`
	Writer            *session.Writer    `json:"writer,omitempty"`

	size int // bytes of the value that it was read from
}

// PageEntry is one page in an index.
type PageEntry struct {
	N     int64 `json:"n"`
	Count int   `json:"count"`
	Seqs  Runs  `json:"seqs"`
	Bytes int64 `json:"bytes"` // of the data of its events
}

// IndexPage is an index page as the bucket holds it.
type IndexPage struct {
	V     int     `json:"v"`
	Pages Entries `json:"pages"`
}

// Entries are the pages of an open index or of an index page: IndexEntries at most.
type Entries []PageEntry

// UnmarshalJSON refuses more entries before it reads any: runs are short however many seqs they stand for.
func (es *Entries) UnmarshalJSON(b []byte) error {
	var items []json.RawMessage
	if err := json.Unmarshal(b, &items); err != nil {
		return err
	}
	if len(items) > IndexEntries {
		return fmt.Errorf("pages: expected up to %d entries, found %d", IndexEntries, len(items))
	}
	*es = make(Entries, len(items))
	for i, it := range items {
		if err := json.Unmarshal(it, &(*es)[i]); err != nil {
			return err
		}
	}
	return nil
}

// Page is a page as the bucket holds it.
type Page struct {
	V     int        `json:"v"`
	Nodes []PageNode `json:"nodes"`
}

// PageNode is one node in a page or a tail.
type PageNode struct {
	Seq         events.Seq      `json:"seq"`
	At          uint64          `json:"at"` // stream sequence of the commit that holds the event
	Type        string          `json:"type"`
	Size        int32           `json:"size"` // bytes of the event's data
	Fingerprint string          `json:"fp,omitempty"`
	Message     json.RawMessage `json:"message,omitempty"` // absent when the node derives none
}

// check says what no fold writes about a node, "" when it is well. seq is that of the head.
func (n *PageNode) check(seq events.Seq) string {
	kind := events.SurfaceKind(n.Type)
	switch {
	case n.Seq < 0 || n.Seq > seq:
		return fmt.Sprintf("node %d: expected a seq from 0 to the head's, %d", n.Seq, seq)
	case !kind.OnSurface():
		return fmt.Sprintf("node %d: type: expected a surface type, found %q", n.Seq, n.Type)
	case (kind == events.KindTool) != (n.Fingerprint != ""):
		return fmt.Sprintf("node %d: fp: expected one on a tool/result and nowhere else, found %q on a %s", n.Seq, n.Fingerprint, n.Type)
	case n.Size < 0:
		return fmt.Sprintf("node %d: size: expected bytes, found %d", n.Seq, n.Size)
	}
	return ""
}

func (n *PageNode) fill(to *surface.Node) {
	to.Seq, to.At, to.Kind, to.Size = n.Seq, n.At, events.SurfaceKind(n.Type), n.Size
	to.Body = surface.NewBody(n.Message, n.Fingerprint)
}

// Runs is a list of seqs in surface order, written short: a number stands for itself, [a,b]
// for a, a+1, … b.
type Runs []events.Seq

// MarshalJSON writes the short form.
func (r Runs) MarshalJSON() ([]byte, error) { return appendRuns(nil, r), nil }

func appendRuns(b []byte, seqs []events.Seq) []byte {
	b = append(b, '[')
	for i := 0; i < len(seqs); {
		k := i + 1
		for k < len(seqs) && seqs[k] == seqs[k-1]+1 {
			k++
		}
		if i > 0 {
			b = append(b, ',')
		}
		if k-i == 1 {
			b = strconv.AppendInt(b, int64(seqs[i]), 10)
		} else {
			b = fmt.Appendf(b, "[%d,%d]", seqs[i], seqs[k-1])
		}
		i = k
	}
	return append(b, ']')
}

// UnmarshalJSON reads the short form.
func (r *Runs) UnmarshalJSON(b []byte) error {
	var items []json.RawMessage
	if err := json.Unmarshal(b, &items); err != nil {
		return err
	}
	*r = (*r)[:0]
	for _, it := range items {
		if len(it) > 0 && it[0] == '[' {
			var ab []events.Seq
			if err := json.Unmarshal(it, &ab); err != nil {
				return err
			}
			// An event's data has a byte at least, so no page holds more than PageTarget nodes.
			if len(ab) != 2 || ab[0] < 0 || ab[1] < ab[0] || ab[1]-ab[0] >= PageTarget {
				return fmt.Errorf("run %s: expected [first,last]", it)
			}
			if len(*r)+int(ab[1]-ab[0]) >= PageTarget {
				return fmt.Errorf("run %s: expected up to %d seqs of a page, found more", it, PageTarget)
			}
			for s := ab[0]; s <= ab[1]; s++ {
				*r = append(*r, s)
			}
			continue
		}
		var s events.Seq
		if err := json.Unmarshal(it, &s); err != nil {
			return err
		}
		*r = append(*r, s)
	}
	return nil
}

// KV is one value to be written.
type KV struct {
	Key   string
	Value []byte
}

// Flush is what a snapshot wants written: first the pages, each created unless it is there
// already, then the head by compare-and-set; Unreferenced may be deleted some time after.
type Flush struct {
	Pages        []KV
	Head         KV
	Seq          events.Seq // of the head
	Unreferenced []string
	// Overwrite writes pages even where some are: those of a damaged snapshot.
	Overwrite bool

	session string
	chain   events.Digest
}

// Flush returns what must be written so that the bucket holds the present state, and takes
// for granted that it will be: when writing fails the snapshot must be loaded again. An error
// names an event whose data breaks a rule.
func (s *Snapshot) Flush() (*Flush, error) {
	places := make([]span, 0, s.Surface.Len()-s.tailAt)
	f, err := s.values(&places)
	if err != nil {
		return nil, err
	}
	s.letGo()
	s.dropped = nil
	// The head has all messages of the tail: so the commits that they came with can go. Bodies that others
	// have too stay as they are.
	for i, at := range places {
		if m := s.Surface.Node(s.tailAt + i).Body; at.end > 0 && !s.shares {
			m.Move(f.Head.Value[at.from:at.end:at.end])
		}
	}
	s.held = cap(f.Head.Value)
	return f, nil
}

// Messages gives the message of a node that is not in memory, nil when the node derives none. at is the
// offset that it will have in the value that it is a part of.
type Messages func(n *surface.Node, at int) ([]byte, error)

// ExpectHead returns the head that the bucket must hold for the present state of a bare snapshot. It
// changes nothing. The head may be written into room, which is not overwritten; where that is too small,
// it gets memory of its own. Without from, as in ExpectPages, all messages must be in memory.
func (s *Snapshot) ExpectHead(room []byte, from Messages) ([]byte, error) {
	return s.appendHead(s.roomForHead(room[len(room):]), from, nil)
}

// ExpectPages calls f for every page and index page that the bucket must hold for the present state of a
// bare snapshot, with a function that makes its value.
func (s *Snapshot) ExpectPages(f func(key string, value func(Messages) ([]byte, error)) error) error {
	return s.eachUnwritten(f)
}

// span is where a message stands in a value; end is 0 for none.
type span struct{ from, end int }

// values are what is to be written. places gets where the messages of the tail are in the head.
func (s *Snapshot) values(places *[]span) (*Flush, error) {
	f := &Flush{Seq: s.Last(), Unreferenced: s.dropped, session: s.ID, chain: s.Chain}
	err := s.eachUnwritten(func(key string, value func(Messages) ([]byte, error)) error {
		v, err := value(nil)
		f.Pages = append(f.Pages, KV{key, v})
		return err
	})
	if err != nil {
		return nil, err
	}
	head, err := s.appendHead(s.roomForHead(nil), nil, places)
	if err != nil {
		return nil, err
	}
	f.Head = KV{events.Token(s.ID), head}
	return f, nil
}

// roomForHead returns room, or a larger one: for the tail and a few kilobytes of all else, so that the head
// need not be copied as it grows.
func (s *Snapshot) roomForHead(room []byte) []byte {
	if n := int(s.tailSize) + 128*(s.Surface.Len()-s.tailAt) + 2048; cap(room)-len(room) < n {
		return make([]byte, 0, n)
	}
	return room
}

// eachUnwritten calls f for the sealed pages and index pages that the bucket does not have.
func (s *Snapshot) eachUnwritten(f func(key string, value func(Messages) ([]byte, error)) error) error {
	if s.unwritten == 0 {
		return nil
	}
	token := events.Token(s.ID)
	pos := 0
	for g := 0; g <= len(s.groups); g++ {
		pages := s.pagesOf(g)
		start := pos
		for _, p := range pages {
			if !p.written {
				err := f(PageKey(token, p.n), func(from Messages) ([]byte, error) {
					v, err := s.appendNodes([]byte(`{"v":1,"nodes":`), pos, p.count, from, nil)
					return append(v, '}'), err
				})
				if err != nil {
					return err
				}
			}
			pos += p.count
		}
		if g < len(s.groups) && !s.groups[g].written {
			err := f(IndexKey(token, s.groups[g].n), func(Messages) ([]byte, error) {
				return append(s.appendEntries([]byte(`{"v":1,"pages":`), start, pages), '}'), nil
			})
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// letGo marks all pages as written and drops the bodies that the bucket has now.
func (s *Snapshot) letGo() {
	if s.unwritten == 0 && !s.filled {
		return
	}
	pos := 0
	for g := 0; g <= len(s.groups); g++ {
		pages := s.pagesOf(g)
		for i := range pages {
			for k := pos; k < pos+pages[i].count && (s.filled || !pages[i].written); k++ {
				s.Surface.Node(k).Body = nil
			}
			pages[i].written = true
			pos += pages[i].count
		}
		if g < len(s.groups) {
			s.groups[g].written = true
		}
	}
	s.unwritten, s.filled = 0, false
}

// appendNodes appends count nodes from a position on as a JSON array. Their messages come from their bodies
// unless from gives them. places, when given, gets where their messages are.
func (s *Snapshot) appendNodes(b []byte, pos, count int, from Messages, places *[]span) ([]byte, error) {
	b = append(b, '[')
	for i := pos; i < pos+count; i++ {
		n := s.Surface.Node(i)
		var msg []byte
		var fp string
		var err error
		if from == nil {
			if msg, err = n.Message(s.Format); err != nil {
				return nil, err
			}
		}
		if from == nil || n.Kind == events.KindTool {
			if fp, err = n.Fingerprint(s.Format); err != nil {
				return nil, err
			}
		}
		if i > pos {
			b = append(b, ',')
		}
		b = append(b, `{"seq":`...)
		b = strconv.AppendInt(b, int64(n.Seq), 10)
		b = append(b, `,"at":`...)
		b = strconv.AppendUint(b, n.At, 10)
		b = append(append(append(b, `,"type":"`...), n.Kind.Type()...), `","size":`...)
		b = strconv.AppendInt(b, int64(n.Size), 10)
		if fp != "" {
			b = append(append(append(b, `,"fp":"`...), fp...), '"')
		}
		const name = `,"message":`
		if from != nil {
			if msg, err = from(n, len(b)+len(name)); err != nil {
				return nil, err
			}
		}
		var at span
		if msg != nil {
			b = append(append(b, name...), msg...)
			at = span{len(b) - len(msg), len(b)}
		}
		if places != nil {
			*places = append(*places, at)
		}
		b = append(b, '}')
	}
	return append(b, ']'), nil
}

// appendEntries appends index entries for pages whose first node stands at a position.
func (s *Snapshot) appendEntries(b []byte, pos int, pages []page) []byte {
	b = append(b, '[')
	var seqs []events.Seq
	for i, p := range pages {
		if i > 0 {
			b = append(b, ',')
		}
		seqs = seqs[:0]
		for k := pos; k < pos+p.count; k++ {
			seqs = append(seqs, s.Surface.Node(k).Seq)
		}
		pos += p.count
		b = fmt.Appendf(b, `{"n":%d,"count":%d,"seqs":`, p.n, p.count)
		b = appendRuns(b, seqs)
		b = fmt.Appendf(b, `,"bytes":%d}`, p.bytes)
	}
	return append(b, ']')
}

// appendHead writes the head by hand: encoding/json would read every message in it again.
func (s *Snapshot) appendHead(b []byte, from Messages, places *[]span) ([]byte, error) {
	id, err := json.Marshal(s.ID)
	if err != nil {
		return nil, err
	}
	b = fmt.Appendf(b, `{"v":%d,"format":%d,"fold":%d,"session":%s,"seq":%d,"streamSeq":%d,"digest":"%s","chain":"%s","time":%d,"logBytes":%d,"replaceGeneration":%d,"nodeCount":%d`,
		layoutVersion, s.Format, session.FoldVersion, id, s.Last(), s.StreamSeq, s.Digest, s.Chain, s.Time, s.LogBytes, s.Surface.Generation(), s.Surface.Len())
	if s.Surface.Len() > 0 {
		b = fmt.Appendf(b, `,"headType":"%s"`, s.Surface.Node(0).Kind.Type())
	}
	b = append(b, `,"index":[`...)
	openAt := 0
	for i, g := range s.groups {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, g.n, 10)
		openAt += g.nodes
	}
	b = append(b, `],"pages":`...)
	b = s.appendEntries(b, openAt, s.open)
	b = append(b, `,"tail":`...)
	if b, err = s.appendNodes(b, s.tailAt, s.Surface.Len()-s.tailAt, from, places); err != nil {
		return nil, err
	}
	state := s.Life.Snapshot()
	// Their order tells when the state was loaded last, and nothing else.
	slices.SortFunc(state.Answered, func(a, b lifecycle.Call) int { return strings.Compare(a.ID, b.ID) })
	life, err := json.Marshal(state)
	if err != nil {
		return nil, err
	}
	b = fmt.Appendf(b, `,"nextPage":%d,"lifecycle":%s`, s.nextPage, life)
	if s.Writer != nil {
		w, err := json.Marshal(s.Writer)
		if err != nil {
			return nil, err
		}
		b = append(append(b, `,"writer":`...), w...)
	}
	return append(b, '}'), nil
}

// ParseHead reads a head and checks that it is of a layout that this program knows.
func ParseHead(b []byte, session string) (*Head, error) {
	h, ok := parseHead(b)
	bad := func(format string, args ...any) error {
		return &events.Error{Code: events.CodeSnapshotDamaged, Session: session, Detail: "head: " + fmt.Sprintf(format, args...)}
	}
	if !ok {
		h = new(Head)
		if err := json.Unmarshal(b, h); err != nil {
			return nil, bad("%v", err)
		}
	}
	h.size = len(b)
	switch {
	case h.V != layoutVersion:
		return nil, bad("layout version: expected %d, found %d", layoutVersion, h.V)
	case h.Session != session:
		return nil, bad("session: expected %q, found %q", session, h.Session)
	case h.Format != events.Format3 && h.Format != events.Format4:
		return nil, bad("format: expected 3 or 4, found %d", h.Format)
	case h.Seq < events.NoSeq || h.Seq > events.MaxSeq || h.NodeCount < 0 || h.ReplaceGeneration < 0:
		return nil, bad("seq %d, nodeCount %d and replaceGeneration %d: expected numbers from 0 to 2^53-1", h.Seq, h.NodeCount, h.ReplaceGeneration)
	case h.NextPage < 0 || h.NextPage > int64(events.MaxSeq):
		return nil, bad("nextPage: expected a number from 0 to 2^53-1, found %d", h.NextPage)
	}
	return h, nil
}

// Restore makes a snapshot of a head and its index pages, given in the head's order.
func Restore(h *Head, index []*IndexPage, keep surface.Keep) (*Snapshot, error) {
	s := &Snapshot{State: &session.State{
		ID: h.Session, Format: h.Format, Next: h.Seq + 1, StreamSeq: h.StreamSeq, Time: h.Time, LogBytes: h.LogBytes,
		Writer: h.Writer, Life: lifecycle.Restore(h.Lifecycle),
	}, fold: h.Fold, nextPage: h.NextPage, held: h.size}
	bad := func(format string, args ...any) error { return s.damaged(format, args...) }
	var err error
	if s.Digest, err = events.ParseDigest(h.Digest); err != nil {
		return nil, bad("%v", err)
	}
	if s.Chain, err = events.ParseDigest(h.Chain); err != nil {
		return nil, bad("%v", err)
	}
	if len(index) != len(h.Index) {
		return nil, bad("%d index pages for %d numbers", len(index), len(h.Index))
	}
	nodes := make([]surface.Node, 0, len(h.Tail))
	numbers := map[int64]bool{}
	take := func(entries []PageEntry) (pages []page, count int, err error) {
		for _, e := range entries {
			switch {
			case len(e.Seqs) != e.Count || e.Count == 0:
				return nil, 0, bad("page %d: count %d, but %d seqs", e.N, e.Count, len(e.Seqs))
			case e.N < 0 || e.N >= h.NextPage:
				return nil, 0, bad("page %d: expected a number below nextPage, %d", e.N, h.NextPage)
			case e.Bytes < 0:
				return nil, 0, bad("page %d: bytes: expected a size, found %d", e.N, e.Bytes)
			case numbers[e.N]: // only the first of them would ever be filled
				return nil, 0, bad("page %d: expected each number once, found it again", e.N)
			case e.Count > h.NodeCount-len(nodes):
				return nil, 0, bad("nodeCount %d, but more nodes in index and tail", h.NodeCount)
			}
			numbers[e.N] = true
			runs := 0
			for i, seq := range e.Seqs {
				if i == 0 || seq != e.Seqs[i-1]+1 {
					runs++
				}
				if seq < 0 || seq > h.Seq {
					return nil, 0, bad("page %d: node %d: expected a seq from 0 to the head's, %d", e.N, seq, h.Seq)
				}
				nodes = append(nodes, surface.Node{Seq: seq})
			}
			pages = append(pages, page{n: e.N, count: e.Count, runs: runs, bytes: e.Bytes, written: true})
			count += e.Count
		}
		return pages, count, nil
	}
	for i, ip := range index {
		g := group{n: h.Index[i], written: true}
		switch {
		case g.n < 0 || g.n >= h.NextPage:
			return nil, bad("index page %d: expected a number below nextPage, %d", g.n, h.NextPage)
		case ip.V != layoutVersion:
			return nil, bad("index page %d: layout version: expected %d, found %d", g.n, layoutVersion, ip.V)
		case len(ip.Pages) == 0:
			return nil, bad("index page %d: expected entries, found none", g.n)
		}
		if g.pages, g.nodes, err = take(ip.Pages); err != nil {
			return nil, err
		}
		s.groups = append(s.groups, g)
	}
	if s.open, _, err = take(h.Pages); err != nil {
		return nil, err
	}
	s.tailAt = len(nodes)
	for i := range h.Tail {
		if wrong := h.Tail[i].check(h.Seq); wrong != "" {
			return nil, bad("tail: %s", wrong)
		}
		var n surface.Node
		h.Tail[i].fill(&n)
		s.tailSize += int64(n.Size)
		nodes = append(nodes, n)
	}
	if len(nodes) != h.NodeCount {
		return nil, bad("nodeCount %d, but %d nodes in index and tail", h.NodeCount, len(nodes))
	}
	if len(nodes) > 0 {
		kind := events.SurfaceKind(h.HeadType)
		if !kind.OnSurface() || s.tailAt == 0 && kind != nodes[0].Kind {
			return nil, bad("headType: expected the type of node %d, found %q", nodes[0].Seq, h.HeadType)
		}
		nodes[0].Kind = kind
	}
	s.Surface = surface.Restore(h.Format, keep, h.ReplaceGeneration, nodes)
	return s, nil
}

// Pages returns the numbers of all pages in surface order.
func (s *Snapshot) Pages() []int64 {
	var out []int64
	for g := 0; g <= len(s.groups); g++ {
		for _, p := range s.pagesOf(g) {
			out = append(out, p.n)
		}
	}
	return out
}

// around is a value, or if that is long the part of it that lies around an offset.
func around(m json.RawMessage, at int) string {
	const before, most = 60, 120
	from := max(0, min(at, len(m))-before)
	to := min(len(m), from+most)
	text := strings.ToValidUTF8(string(m[from:to]), "")
	if from > 0 {
		text = "…" + text
	}
	if to < len(m) {
		text += "…"
	}
	return text
}

// Difference says how a value of the bucket differs from what it should be, member by member;
// "" when it does not.
func Difference(want, got []byte) string {
	if bytes.Equal(want, got) {
		return ""
	}
	var a, b map[string]json.RawMessage
	if err := json.Unmarshal(got, &b); err != nil {
		return "expected a JSON object: " + err.Error()
	}
	if err := json.Unmarshal(want, &a); err != nil {
		return err.Error()
	}
	for _, k := range slices.Sorted(maps.Keys(a)) {
		if !bytes.Equal(a[k], b[k]) {
			same := 0
			for same < min(len(a[k]), len(b[k])) && a[k][same] == b[k][same] {
				same++
			}
			return fmt.Sprintf("%s: expected %s, found %s", k, around(a[k], same), around(b[k], same))
		}
	}
	for _, k := range slices.Sorted(maps.Keys(b)) {
		if _, ok := a[k]; !ok {
			return fmt.Sprintf("unexpected member %s", k)
		}
	}
	return "same members in another spelling"
}
