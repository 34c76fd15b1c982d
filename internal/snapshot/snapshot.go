// Package snapshot owns how a session's snapshot looks in the bucket SURFACES: heads, pages
// and index pages, how the fold cuts a surface into them, and reading them back. The layout is
// a public contract (docs/kv-layout.md). It knows neither who writes snapshots nor when.
package snapshot

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"palimpsest/internal/events"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

const (
	// PageTarget is the size at which a page is sealed: bytes of its events' data. An event
	// of that size or more gets a page of its own.
	PageTarget = 64 << 10
	// IndexEntries is how many entries of the open index are sealed as one index page, at most.
	IndexEntries = 256
	// IndexRuns is how many runs of seqs the entries of the open index have at most: where
	// events off the surface lie between the nodes, most nodes are a run of their own, and
	// the head would carry the seqs of many pages.
	IndexRuns = 1024
)

// page is one sealed page: a run of consecutive nodes.
type page struct {
	n       int64 // its number, never used twice in a session
	count   int   // nodes
	runs    int   // of seqs that follow each other
	bytes   int64 // of the nodes' data
	written bool  // the bucket has it
}

// group is one sealed index page: a run of consecutive pages.
type group struct {
	n       int64
	pages   []page
	nodes   int
	written bool
}

// Snapshot is a session's state together with how its surface is cut into pages. The cuts
// follow from the log alone: two owners that fold the same log cut alike, whenever each of
// them writes. It is not safe for concurrent use.
type Snapshot struct {
	*session.State
	fold      int // version of the fold that made it
	groups    []group
	open      []page // the open index
	nextPage  int64
	tailAt    int   // position of the first node of the tail
	tailSize  int64 // bytes of the tail's data
	unwritten int   // sealed pages and index pages that the bucket does not have
	filled    bool  // bodies were read back from pages
	held      int   // bytes that the bodies of nodes are parts of, as far as they were written or read
	dropped   []string
	shares    bool // bodies, with others
	bare      bool // see NewBare
}

// copied returns a snapshot that changes on its own. The bodies are the same: they were read, and do not change.
func (s *Snapshot) copied() *Snapshot {
	c := *s
	c.State = s.State.Copy()
	c.groups = slices.Clone(s.groups)
	for i := range c.groups {
		c.groups[i].pages = slices.Clone(c.groups[i].pages)
	}
	c.open, c.dropped, c.shares = slices.Clone(s.open), slices.Clone(s.dropped), true
	return &c
}

// New returns the snapshot of a session without events.
func New(id string, f events.Format, keep surface.Keep) *Snapshot {
	return &Snapshot{State: session.New(id, f, nil, keep), fold: session.FoldVersion}
}

// NewBare returns the snapshot of a session without events that keeps no messages, for whoever compares
// what the bucket holds with the log (ExpectHead, ExpectPages) and never flushes.
func NewBare(id string, f events.Format) *Snapshot {
	s := New(id, f, surface.KeepFingerprints)
	s.bare = true
	return s
}

// Foldable says whether this program may fold on: an error of code fold-version says that another
// version of the fold made the snapshot.
func (s *Snapshot) Foldable() error {
	if s.fold == session.FoldVersion {
		return nil
	}
	return &events.Error{Code: events.CodeFoldVersion, Session: s.ID, Detail: fmt.Sprintf(
		"version %d of the fold made the snapshot, and this program has version %d; build all of them anew with `projector rebuild`, or run the program that made it", s.fold, session.FoldVersion)}
}

// Bytes estimates the memory that the snapshot holds. Events that no Flush took are not in it, nor
// those that are held to check them (surface.KeepFrozenBodies).
func (s *Snapshot) Bytes() int {
	return s.State.Bytes() + s.held + (s.Surface.Len()-s.tailAt)*int(unsafe.Sizeof(surface.Body{}))
}

// PagesError says that folding needs pages that are not in memory: read them, Fill them in,
// and fold again from where the snapshot stands.
type PagesError struct{ Pages []int64 }

func (e *PagesError) Error() string { return fmt.Sprintf("pages %v are not in memory", e.Pages) }

// Fold folds a commit as session.State.FoldCommit does, and keeps the cuts in step. The
// error may be a *PagesError; the events before the one that needs the pages are applied then.
// each, when given, sees every applied plan. A snapshot that another version of the fold made is
// refused.
func (s *Snapshot) Fold(c *events.Commit, v *events.Vocabulary, each func(*session.Plan)) error {
	if err := s.Foldable(); err != nil {
		return err
	}
	err := s.FoldCommitIf(c, v, func(p *session.Plan) error {
		if !p.Change.Replace {
			return nil
		}
		return s.needEnds(p.Change.Position, p.Change.Position+p.Change.Removed-1)
	}, func(p *session.Plan) {
		s.derive(&p.Change)
		s.cut(&p.Change)
		if each != nil {
			each(p)
		}
	})
	var missing *surface.MissingError
	if errors.As(err, &missing) {
		return &PagesError{[]int64{s.pageAt(missing.Position).n}}
	}
	return err
}

// derive reads the message of a node that was just put on the surface: it is written sooner or later,
// and the event need not be kept until then. Data that breaks a rule is left for Flush to report.
func (s *Snapshot) derive(c *surface.Change) {
	if c.Node.Body != nil {
		_, _ = s.Surface.Node(c.Position).Message(s.Format)
	}
}

// needEnds makes sure that the pages at both ends of a replaced range are in memory, since
// they are cut again.
func (s *Snapshot) needEnds(from, to int) error {
	if s.bare { // nothing is written of it
		return nil
	}
	var missing []int64
	for _, pos := range []int{from, to} {
		if pos >= s.tailAt {
			continue
		}
		first := s.firstOf(pos)
		if pg := s.pageAt(pos); !s.loaded(first, pg.count) && (len(missing) == 0 || missing[0] != pg.n) {
			missing = append(missing, pg.n)
		}
	}
	if missing != nil {
		return &PagesError{missing}
	}
	return nil
}

// loaded reports whether the nodes of a page have their details and bodies.
func (s *Snapshot) loaded(first, count int) bool {
	for i := first; i < first+count; i++ {
		if s.Surface.Node(i).Body == nil {
			return false
		}
	}
	return true
}

// locate finds the page that holds a position: group (len(groups) for the open index), index
// in its pages, position of its first node.
func (s *Snapshot) locate(pos int) (g, p, first int) {
	for g = range s.groups {
		if pos < first+s.groups[g].nodes {
			break
		}
		first += s.groups[g].nodes
		if g == len(s.groups)-1 {
			g++
			break
		}
	}
	pages := s.pagesOf(g)
	for p = range pages {
		if pos < first+pages[p].count {
			return g, p, first
		}
		first += pages[p].count
	}
	panic(fmt.Sprintf("snapshot: position %d is in no page", pos))
}

func (s *Snapshot) pagesOf(g int) []page {
	if g < len(s.groups) {
		return s.groups[g].pages
	}
	return s.open
}

func (s *Snapshot) pageAt(pos int) page {
	g, p, _ := s.locate(pos)
	return s.pagesOf(g)[p]
}

func (s *Snapshot) firstOf(pos int) int {
	_, _, first := s.locate(pos)
	return first
}

// Fill puts what a page holds into the nodes that it stands for.
func (s *Snapshot) Fill(n int64, nodes []PageNode) error {
	first := 0
	for g := 0; g <= len(s.groups); g++ {
		for _, p := range s.pagesOf(g) {
			if p.n != n {
				first += p.count
				continue
			}
			if len(nodes) != p.count {
				return s.damaged("page %d has %d nodes, its index entry says %d", n, len(nodes), p.count)
			}
			var bytes int64
			for i := range nodes {
				to := s.Surface.Node(first + i)
				if nodes[i].Seq != to.Seq {
					return s.damaged("page %d has node %d where its index entry says %d", n, nodes[i].Seq, to.Seq)
				}
				if wrong := nodes[i].check(s.Last()); wrong != "" {
					return s.damaged("page %d: %s", n, wrong)
				}
				if kind := events.SurfaceKind(nodes[i].Type); to.Kind.OnSurface() && to.Kind != kind {
					return s.damaged("page %d: node %d: expected a %s, found a %s", n, to.Seq, to.Kind.Type(), kind.Type())
				}
				bytes += int64(nodes[i].Size)
			}
			if bytes != p.bytes {
				return s.damaged("page %d has %d bytes, its index entry says %d", n, bytes, p.bytes)
			}
			for i := range nodes {
				if to := s.Surface.Node(first + i); to.Body == nil {
					nodes[i].fill(to)
				}
			}
			s.filled = true
			s.held += int(bytes)
			return nil
		}
	}
	return s.damaged("page %d is in no index", n)
}

func (s *Snapshot) damaged(format string, args ...any) error {
	return &events.Error{Code: events.CodeSnapshotDamaged, Session: s.ID, Detail: "snapshot: " + fmt.Sprintf(format, args...)}
}

// cut keeps the cuts in step with a change that was just applied to the surface.
func (s *Snapshot) cut(c *surface.Change) {
	switch {
	case c.Node.Kind == events.KindLog:
	case !c.Replace:
		s.addToTail(int64(c.Node.Size))
	case c.Position >= s.tailAt:
		for i := range c.Shadowed() {
			s.tailSize -= int64(c.Shadowed()[i].Size)
		}
		if s.tailSize += int64(c.Node.Size); s.tailSize >= PageTarget {
			s.recutTail(s.tailAt)
		}
	default:
		s.recut(c.Position, c.Removed)
	}
}

// addToTail takes in the node that was appended to the surface.
func (s *Snapshot) addToTail(size int64) {
	end := s.Surface.Len() - 1 // position of the new node
	if end > s.tailAt && s.tailSize+size > PageTarget {
		s.seal(end-s.tailAt, s.tailSize)
		s.tailSize = 0
	}
	if s.tailSize += size; s.tailSize >= PageTarget {
		s.seal(s.Surface.Len()-s.tailAt, s.tailSize)
		s.tailSize = 0
	}
}

// recutTail cuts the nodes from a position on, as if they had just been appended.
func (s *Snapshot) recutTail(from int) {
	s.tailAt, s.tailSize = from, 0
	for i := from; i < s.Surface.Len(); i++ {
		size := int64(s.Surface.Node(i).Size)
		if i > s.tailAt && s.tailSize+size > PageTarget {
			s.seal(i-s.tailAt, s.tailSize)
			s.tailSize = 0
		}
		if s.tailSize += size; s.tailSize >= PageTarget {
			s.seal(i+1-s.tailAt, s.tailSize)
			s.tailSize = 0
		}
	}
}

// seal makes a page of the first count nodes of the tail.
func (s *Snapshot) seal(count int, bytes int64) {
	s.open = append(s.open, page{n: s.number(), count: count, runs: s.runs(s.tailAt, s.tailAt+count), bytes: bytes})
	s.tailAt += count
	s.sealIndex()
}

// sealIndex makes index pages of the open index as long as it is full.
func (s *Snapshot) sealIndex() {
	for n, runs := 0, 0; n < len(s.open); {
		runs += s.open[n].runs
		if n++; n == IndexEntries || runs >= IndexRuns {
			s.groups = append(s.groups, s.newGroup(s.open[:n]))
			s.open = append([]page(nil), s.open[n:]...)
			n, runs = 0, 0
		}
	}
}

// runs counts the runs of seqs that follow each other in the nodes of [from, to).
func (s *Snapshot) runs(from, to int) (n int) {
	for i := from; i < to; i++ {
		if i == from || s.Surface.Node(i).Seq != s.Surface.Node(i-1).Seq+1 {
			n++
		}
	}
	return n
}

func (s *Snapshot) number() int64 {
	n := s.nextPage
	s.nextPage++
	s.unwritten++
	return n
}

func (s *Snapshot) newGroup(pages []page) group {
	g := group{n: s.number(), pages: append([]page(nil), pages...)}
	for _, p := range pages {
		g.nodes += p.count
	}
	return g
}

// recut mends the cuts after a replacement, applied already, that began in a sealed page: the
// pages at its two ends become one run of nodes that is cut anew, and so do their index pages.
func (s *Snapshot) recut(pos, removed int) {
	last := pos + removed - 1 // the range as it was before the replacement
	g1, p1, first := s.locate(pos)
	if last >= s.tailAt { // everything from the first page on becomes the tail
		s.dropFrom(g1, p1)
		s.recutTail(first)
		return
	}
	g2, p2, lastFirst := s.locate(last)
	end := lastFirst + s.pagesOf(g2)[p2].count - (removed - 1) // behind the run, as it is now
	before := append([]page(nil), s.pagesOf(g1)[:p1]...)
	behind := append([]page(nil), s.pagesOf(g2)[p2+1:]...)
	s.dropPages(g1, p1, g2, p2)
	pages := append(append(before, s.split(first, end)...), behind...)
	s.tailAt -= removed - 1
	if g2 == len(s.groups) { // reaches into the open index: the groups before g1 stay
		s.dropGroups(g1, len(s.groups))
		s.groups = s.groups[:g1]
		s.open = pages
		s.sealIndex()
		return
	}
	s.dropGroups(g1, g2+1)
	runs := 0
	for _, p := range pages {
		runs += p.runs
	}
	k := max((len(pages)+IndexEntries-1)/IndexEntries, min(len(pages), (runs+IndexRuns-1)/IndexRuns))
	var mid []group
	for ; k > 0; k-- { // evenly, so that the next ones fit in
		n := (len(pages) + k - 1) / k
		mid = append(mid, s.newGroup(pages[:n]))
		pages = pages[n:]
	}
	s.groups = append(s.groups[:g1:g1], append(mid, s.groups[g2+1:]...)...)
}

// split cuts the nodes of [from, to) into sealed pages of about even size.
func (s *Snapshot) split(from, to int) []page {
	var total int64
	for i := from; i < to; i++ {
		total += int64(s.Surface.Node(i).Size)
	}
	pages := max(1, (total+PageTarget-1)/PageTarget)
	target := (total + pages - 1) / pages
	var out []page
	start, size := from, int64(0)
	for i := from; i < to; i++ {
		n := int64(s.Surface.Node(i).Size)
		if i > start && (size+n > PageTarget || size >= target) {
			out = append(out, page{n: s.number(), count: i - start, runs: s.runs(start, i), bytes: size})
			start, size = i, 0
		}
		size += n
	}
	return append(out, page{n: s.number(), count: to - start, runs: s.runs(start, to), bytes: size})
}

// dropFrom forgets all pages from page p of group g on.
func (s *Snapshot) dropFrom(g, p int) {
	if g == len(s.groups) {
		s.dropPages(g, p, g, len(s.open)-1)
		s.open = s.open[:p:p]
		return
	}
	s.dropPages(g, p, len(s.groups), len(s.open)-1)
	keep := append([]page(nil), s.groups[g].pages[:p]...)
	s.dropGroups(g, len(s.groups))
	s.groups = s.groups[:g:g]
	s.open = keep
}

// dropPages notes the pages of an inclusive range as unreferenced.
func (s *Snapshot) dropPages(g1, p1, g2, p2 int) {
	for g := g1; g <= g2; g++ {
		pages := s.pagesOf(g)
		from, to := 0, len(pages)
		if g == g1 {
			from = p1
		}
		if g == g2 {
			to = p2 + 1
		}
		for _, p := range pages[from:max(from, to)] {
			if p.written {
				s.dropped = append(s.dropped, PageKey(events.Token(s.ID), p.n))
			} else {
				s.unwritten--
			}
		}
	}
}

func (s *Snapshot) dropGroups(from, to int) {
	for _, g := range s.groups[from:to] {
		if g.written {
			s.dropped = append(s.dropped, IndexKey(events.Token(s.ID), g.n))
		} else {
			s.unwritten--
		}
	}
}
