// Package surface owns the ordered list of events that makes up a session's message list:
// the rules that need it (6 to 8 of the surface rules), and what an append and a replacement
// do to it. It is pure: no I/O, no clock, no goroutines. It does not know where nodes are kept.
package surface

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"sort"

	"palimpsest/internal/events"
)

// Node is one entry of the surface.
type Node struct {
	Seq  events.Seq
	At   uint64      // stream sequence of the commit that holds the event; 0 when not known
	Kind events.Kind // KindLog while the node's details are not in memory
	Size int32       // bytes of the event's data
	Body *Body       // nil while the node's message is not in memory

	// key orders the nodes: the seq of an appended node, and for a replacement the key of the
	// first node that it shadows. So keys ascend along the surface whatever was replaced, and
	// an appended node is found by bisection.
	key events.Seq
}

// Body is what a node's event says, as far as it is in memory. A body that was made from an
// event derives its message when it is first asked for.
type Body struct {
	event       *events.Event      // nil once it was read, except with Freeze
	done        bool               // message and fingerprint are known
	sum         *[sha256.Size]byte // of the event's line when it was committed, with Freeze
	message     []byte
	fingerprint string
}

// NewBody returns a body with what a page holds: the derived message (nil when the node
// derives none) and the fingerprint of a tool result.
func NewBody(message []byte, fingerprint string) *Body {
	return &Body{message: message, fingerprint: fingerprint}
}

// Message returns the node's derived message, nil when it derives none. Data that was never
// read is checked first: the error names the rule that it breaks, or says that the event was
// changed in memory after it was committed.
func (n *Node) Message(f events.Format) ([]byte, error) {
	if err := n.Body.read(f); err != nil {
		return nil, err
	}
	return n.Body.message, nil
}

// Fingerprint returns the fingerprint of a tool result, "" for other nodes.
func (n *Node) Fingerprint(f events.Format) (string, error) {
	if err := n.Body.read(f); err != nil {
		return "", err
	}
	return n.Body.fingerprint, nil
}

// Move gives the body another copy of its message, in memory that outlives what the event came
// with, which the body then lets go of. It does nothing with a body that keeps its event.
func (b *Body) Move(message []byte) {
	if b.event == nil {
		b.message = message
	}
}

func (b *Body) read(f events.Format) error {
	e := b.event
	if e == nil {
		return nil
	}
	if err := b.Frozen(); err != nil || b.done {
		return err
	}
	if err := e.Check(f); err != nil {
		return err
	}
	b.message = e.Message()
	if e.Kind == events.KindTool {
		b.fingerprint = e.Fingerprint(f)
	}
	b.done = true
	if b.sum == nil {
		b.event = nil
	}
	return nil
}

// Frozen compares the event that the body holds with what was committed.
func (b *Body) Frozen() error {
	if b.event == nil || b.sum == nil || sha256.Sum256(b.event.Line) == *b.sum {
		return nil
	}
	seq := b.event.Seq
	return &events.Error{Code: events.CodeInvariant, Rule: events.RuleEventMutated, Seq: &seq,
		Detail: "the event in memory differs from the one that was committed; it is neither folded nor served"}
}

// Keep says what the state holds on to for the nodes that it adds.
type Keep uint8

// What is kept. A writer needs fingerprints alone, whoever derives messages needs bodies.
const (
	KeepFingerprints Keep = iota
	KeepBodies
	KeepFrozenBodies // bodies, each with a hash that is checked before it is used
)

// State is the surface of one session. It is not safe for concurrent use.
type State struct {
	format     events.Format
	keep       Keep
	nodes      []Node
	generation int64
}

// New returns the surface of an empty session.
func New(f events.Format, k Keep) *State { return &State{format: f, keep: k} }

// Restore returns a surface with the given nodes, in surface order; it takes them over.
// Details and bodies may be missing: Plan asks for them with a *MissingError.
func Restore(f events.Format, k Keep, generation int64, nodes []Node) *State {
	next := events.MaxSeq + 1
	for i := len(nodes) - 1; i >= 0; i-- {
		nodes[i].key = min(nodes[i].Seq, next-1)
		next = nodes[i].key
	}
	return &State{format: f, keep: k, nodes: nodes, generation: generation}
}

// Copy returns a surface that changes on its own. The nodes' bodies are the same.
func (s *State) Copy() *State {
	c := *s
	c.nodes = slices.Clone(s.nodes)
	return &c
}

// Format returns the format of the session's events.
func (s *State) Format() events.Format { return s.format }

// Len returns the number of nodes.
func (s *State) Len() int { return len(s.nodes) }

// Node returns the node at position i for reading or for filling in what was missing. It
// must not be held across Apply.
func (s *State) Node(i int) *Node { return &s.nodes[i] }

// Generation returns how many replacements the surface has seen.
func (s *State) Generation() int64 { return s.generation }

// Seqs returns the seqs of the nodes in surface order.
func (s *State) Seqs() []events.Seq {
	out := make([]events.Seq, len(s.nodes))
	for i := range s.nodes {
		out[i] = s.nodes[i].Seq
	}
	return out
}

// Messages returns the derived messages in surface order. All bodies must be in memory.
func (s *State) Messages() ([][]byte, error) {
	var out [][]byte
	for i := range s.nodes {
		m, err := s.nodes[i].Message(s.format)
		if err != nil {
			return nil, err
		}
		if m != nil {
			out = append(out, m)
		}
	}
	return out, nil
}

// Position finds the node of seq.
func (s *State) Position(seq events.Seq) (int, bool) {
	i := sort.Search(len(s.nodes), func(i int) bool { return s.nodes[i].key >= seq })
	if i < len(s.nodes) && s.nodes[i].Seq == seq {
		return i, true
	}
	if s.generation == 0 {
		return 0, false
	}
	for i := len(s.nodes) - 1; i >= 0; i-- { // a replacement stands under another's key
		if s.nodes[i].Seq == seq {
			return i, true
		}
	}
	return 0, false
}

// MissingError says that Plan needs the details of the node at Position, which are not in
// memory. Whoever keeps them fills them in (Node) and plans again.
type MissingError struct{ Position int }

func (e *MissingError) Error() string {
	return fmt.Sprintf("the node at position %d is not in memory", e.Position)
}

// Change is a planned step: the event's node takes the place of Removed nodes from Position
// on. An event that is not on the surface changes nothing and has Node.Kind KindLog.
type Change struct {
	Position int
	Removed  int
	Replace  bool
	Node     Node

	shadowed []Node // set by Apply, for Undo
}

// Plan checks an event against the surface and says what applying it will do. It changes
// nothing. The error is an *events.Error with the first broken rule, or a *MissingError.
func (s *State) Plan(e *events.Event) (Change, error) {
	if e.Op.Kind == events.OpNone {
		return Change{}, nil
	}
	c := Change{Position: len(s.nodes), Node: Node{Seq: e.Seq, Kind: e.Kind, Size: int32(len(e.Data())), key: e.Seq}}
	if e.Op.Kind == events.OpReplace {
		if err := s.planReplace(e, &c); err != nil {
			return Change{}, err
		}
	}
	switch {
	case s.keep != KeepFingerprints:
		c.Node.Body = &Body{event: e}
		if s.keep == KeepFrozenBodies {
			sum := sha256.Sum256(e.Line)
			c.Node.Body.sum = &sum
		}
	case e.Kind == events.KindTool && c.Node.Body == nil:
		if err := e.Check(s.format); err != nil {
			return Change{}, err
		}
		c.Node.Body = NewBody(nil, e.Fingerprint(s.format))
	}
	return c, nil
}

// PlanStored says what an event of the log does to the surface, for one who keeps neither
// details nor bodies: it looks for the ends of a replacement and checks nothing else.
func (s *State) PlanStored(e *events.Event) (Change, error) {
	c := Change{Position: len(s.nodes), Node: Node{Seq: e.Seq, Kind: e.Kind, Size: int32(len(e.Data())), key: e.Seq}}
	switch e.Op.Kind {
	case events.OpNone:
		return Change{}, nil
	case events.OpReplace:
		from, to, err := s.ends(e)
		if err != nil {
			return Change{}, err
		}
		c.Position, c.Removed, c.Replace = from, to-from+1, true
		c.Node.key = s.nodes[from].key
	}
	return c, nil
}

// Replay applies what another fold of the same log found: a node that was appended, or took
// the place of the shadowed ones. It reports false, and changes nothing, when the surface is
// not the one that this happened to.
func (s *State) Replay(seq events.Seq, k events.Kind, shadowed []events.Seq) bool {
	c := Change{Position: len(s.nodes), Node: Node{Seq: seq, Kind: k, key: seq}}
	if len(shadowed) > 0 {
		from, ok := s.Position(shadowed[0])
		if !ok || from+len(shadowed) > len(s.nodes) {
			return false
		}
		for i, want := range shadowed {
			if s.nodes[from+i].Seq != want {
				return false
			}
		}
		c.Position, c.Removed, c.Replace = from, len(shadowed), true
		c.Node.key = s.nodes[from].key
	}
	s.Apply(&c)
	return true
}

// Truncate takes the nodes behind a seq off the surface. Nothing may have been replaced since.
func (s *State) Truncate(seq events.Seq) {
	n := len(s.nodes)
	for n > 0 && s.nodes[n-1].Seq > seq {
		n--
	}
	clear(s.nodes[n:])
	s.nodes = s.nodes[:n]
}

// ends finds the positions of the two ends of a replacement.
func (s *State) ends(e *events.Event) (from, to int, err error) {
	fail := func(r events.Rule, format string, args ...any) (int, int, error) {
		return 0, 0, events.Violation(r, e.Seq, fmt.Sprintf(format, args...))
	}
	from, ok := s.Position(e.Op.Start)
	if !ok {
		return fail(events.RuleEndpointNotOnSurface, "startSeq %d is not a node of the surface", e.Op.Start)
	}
	if to, ok = s.Position(e.Op.End); !ok {
		return fail(events.RuleEndpointNotOnSurface, "endSeq %d is not a node of the surface", e.Op.End)
	}
	if from > to {
		return fail(events.RuleRangeInverted, "startSeq %d stands behind endSeq %d on the surface", e.Op.Start, e.Op.End)
	}
	return from, to, nil
}

func (s *State) planReplace(e *events.Event, c *Change) error {
	fail := func(r events.Rule, format string, args ...any) error {
		return events.Violation(r, e.Seq, fmt.Sprintf(format, args...))
	}
	from, to, err := s.ends(e)
	if err != nil {
		return err
	}
	shadowed := s.nodes[from : to+1]
	if missing := uncited(shadowed, e.Sources); missing != nil {
		return fail(events.RuleSourcesIncomplete, "sourceEventSeqs must cite every node from startSeq %d through endSeq %d; missing: %s", e.Op.Start, e.Op.End, list(missing))
	}
	if e.Kind == events.KindTool {
		if len(shadowed) != 1 {
			return fail(events.RuleRewriteSpan, "a replacing tool/result must replace exactly one node, found %d", len(shadowed))
		}
		switch target := &shadowed[0]; {
		case target.Kind == events.KindLog:
			return &MissingError{from}
		case target.Kind != events.KindTool:
			return fail(events.RuleRewriteTarget, "a tool/result can only replace a tool/result; node %d is another event", target.Seq)
		case target.Body == nil:
			return &MissingError{from}
		default:
			old, err := target.Fingerprint(s.format)
			if err != nil {
				return err
			}
			if err := e.Check(s.format); err != nil {
				return err
			}
			if old != e.Fingerprint(s.format) {
				return fail(events.RuleRewriteChanges, "a tool/result that replaces %d may change nothing of data but the content of the result", target.Seq)
			}
			c.Node.Body = NewBody(nil, old)
		}
	}
	if from == 0 {
		switch head := &s.nodes[0]; {
		case head.Kind == events.KindLog:
			return &MissingError{0}
		case head.Kind == events.KindSystem && (e.Kind != events.KindSystem || to != 0):
			return fail(events.RuleSystemHeadProtected, "node %d is the system message at the head; only a system/message that replaces exactly it may cover it", head.Seq)
		}
	}
	c.Position, c.Removed, c.Replace = from, len(shadowed), true
	c.Node.key = shadowed[0].key
	return nil
}

// uncited returns the seqs of nodes that sources lacks, nil when there are none.
func uncited(nodes []Node, sources []events.Seq) (missing []events.Seq) {
	if !slices.IsSorted(sources) {
		sources = slices.Sorted(slices.Values(sources))
	}
	i := 0
	for k := range nodes {
		seq := nodes[k].Seq
		if i < len(sources) && sources[i] == seq { // both mostly ascend together
			i++
			continue
		}
		at, ok := slices.BinarySearch(sources, seq)
		if !ok {
			missing = append(missing, seq)
			continue
		}
		i = at + 1
	}
	return missing
}

// list names the first few seqs.
func list(seqs []events.Seq) string {
	const most = 8
	if len(seqs) <= most {
		return fmt.Sprint(seqs)
	}
	return fmt.Sprintf("%v and %d more", seqs[:most], len(seqs)-most)
}

// Apply carries a planned change out. The change must have been planned against this very state.
func (s *State) Apply(c *Change) {
	if c.Node.Kind == events.KindLog {
		return
	}
	if !c.Replace {
		s.nodes = append(s.nodes, c.Node)
		return
	}
	s.generation++
	c.shadowed = slices.Clone(s.nodes[c.Position : c.Position+c.Removed])
	s.splice(c.Position, c.Removed, c.Node)
}

// splice puts n in the place of removed nodes, moving whichever side is shorter.
func (s *State) splice(at, removed int, n Node) {
	behind := at + removed
	if gap := removed - 1; at < len(s.nodes)-behind {
		copy(s.nodes[gap:], s.nodes[:at])
		clear(s.nodes[:gap])
		s.nodes = s.nodes[gap:]
	} else if gap > 0 {
		copy(s.nodes[at+1:], s.nodes[behind:])
		clear(s.nodes[len(s.nodes)-gap:])
		s.nodes = s.nodes[:len(s.nodes)-gap]
	}
	s.nodes[at] = n
}

// Undo takes the most recent change back.
func (s *State) Undo(c *Change) {
	if c.Node.Kind == events.KindLog {
		return
	}
	if !c.Replace {
		s.nodes = s.nodes[:len(s.nodes)-1]
		return
	}
	s.generation--
	s.nodes = slices.Replace(s.nodes, c.Position, c.Position+1, c.shadowed...)
}

// Shadowed returns the nodes that an applied replacement took off the surface.
func (c *Change) Shadowed() []Node { return c.shadowed }
