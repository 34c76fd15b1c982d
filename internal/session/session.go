// Package session owns the one fold of a session: cursor, surface, lifecycle and writer fence
// together. Append, import, projection and audit all go through it. It is pure: no I/O, no
// clock, no goroutines.
package session

import (
	"fmt"
	"unsafe"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/surface"
)

// FoldVersion is the version of what the fold makes of a log. A head says which one made it.
const FoldVersion = 1

// Writer is the current writer of a session that has one.
type Writer struct {
	ID    string     `json:"id"`
	Epoch events.Seq `json:"epoch"`
	Seq   events.Seq `json:"seq"` // of the session/writer event
}

// State is what a session's log folds to, up to and including seq Next-1. It is not safe for
// concurrent use.
type State struct {
	ID        string
	Format    events.Format
	Next      events.Seq    // the seq that the next event gets
	StreamSeq uint64        // stream sequence of the last commit; 0 when there is none
	Time      int64         // Unix ms, of the last event
	LogBytes  int64         // of all canonical lines, with their line ends
	Digest    events.Digest // of the last event
	Chain     events.Digest // of the last commit
	Writer    *Writer
	Surface   *surface.State
	Life      *lifecycle.State
}

// New returns the state of a session without events. Its chain is that of a session whose
// header has the given bytes; who does not follow the chain passes nil.
func New(id string, f events.Format, header []byte, keep surface.Keep) *State {
	return &State{
		ID: id, Format: f, Digest: events.SeedDigest(id), Chain: events.SeedChain(id, header),
		Surface: surface.New(f, keep), Life: lifecycle.New(),
	}
}

// Copy returns a state that changes on its own. Copies may be made concurrently of a state that has been
// copied once and does not change.
func (s *State) Copy() *State {
	c := *s
	c.Surface, c.Life = s.Surface.Copy(), s.Life.Clone()
	return &c
}

// Last returns the seq of the last event, NoSeq when there is none.
func (s *State) Last() events.Seq { return s.Next - 1 }

// Epoch returns the epoch of the session's writer, 0 when it has none.
func (s *State) Epoch() events.Seq {
	if s.Writer == nil {
		return 0
	}
	return s.Writer.Epoch
}

// Bytes estimates the memory that the state holds, without bodies.
func (s *State) Bytes() int {
	return 512 + len(s.ID) + s.Surface.Len()*int(unsafe.Sizeof(surface.Node{})) + s.Life.Bytes()
}

// Plan is a candidate that kept every rule, with what applying it will do.
type Plan struct {
	Event *events.Event
	// Violation is the lifecycle rule that the event breaks and observe mode lets through.
	Violation *events.Error
	Change    surface.Change
}

// Plan checks a candidate against the state without changing it. Surface rules come first,
// then, unless mode is off, lifecycle rules. Errors are *events.Error with the first broken
// rule, or *surface.MissingError.
func (s *State) Plan(e *events.Event, mode lifecycle.Mode) (Plan, error) {
	if e.Seq != s.Next {
		given, next := e.Seq, s.Next
		v := events.Violation(events.RuleSeqNotContiguous, e.Seq, fmt.Sprintf("expected seq %d, got %d", s.Next, e.Seq))
		v.ExpectedSeq, v.ActualSeq = &given, &next
		return Plan{}, v
	}
	c, err := s.Surface.Plan(e)
	if err != nil {
		return Plan{}, err
	}
	p := Plan{Event: e, Change: c}
	if mode != lifecycle.Off {
		if v := s.Life.Check(e); v != nil {
			if mode == lifecycle.Enforce {
				return Plan{}, v
			}
			p.Violation = v
		}
	}
	return p, nil
}

// Apply carries out a plan that was made against this very state, for an event that the
// commit at the given stream sequence holds (0 when it is not stored yet).
func (s *State) Apply(p *Plan, at uint64) {
	e := p.Event
	p.Change.Node.At = at
	s.Surface.Apply(&p.Change)
	if e.Kind != events.KindOpaque {
		s.Life.Apply(e)
		s.applyWriter(e)
	}
	s.Next = e.Seq + 1
	s.Time = e.Time
	s.LogBytes += int64(len(e.Line)) + 1
}

func (s *State) applyWriter(e *events.Event) {
	switch e.Type {
	case "session/writer":
		// Epochs only grow: an older one in a log, written by hand, changes nothing.
		if f := e.Fields(); f.Writer != "" && f.Epoch != events.NoSeq && f.Epoch > s.Epoch() {
			s.Writer = &Writer{ID: f.Writer, Epoch: f.Epoch, Seq: e.Seq}
		}
	case "session/end-seed":
		if e.Fields().Inherited {
			s.Writer = nil
		}
	}
}

// Seal notes the commit that holds the events applied last.
func (s *State) Seal(c *events.Commit) {
	s.StreamSeq, s.Digest, s.Chain = c.StreamSeq, c.Digest, c.Chain
}

// FoldCommit folds a stored commit: it parses its lines, skips events that the state has
// already, and plans and applies the others. f, when given, sees each applied plan. An error
// leaves the state at the last event before the bad one; the commit is not sealed then.
func (s *State) FoldCommit(c *events.Commit, v *events.Vocabulary, f func(*Plan)) error {
	return s.FoldCommitIf(c, v, nil, f)
}

// together is how many events of a commit are made at a time.
const together = 64

// FoldCommitIf is FoldCommit with a say for ready, when given: it sees each plan before it is
// applied, and an error of its ends the fold there.
func (s *State) FoldCommitIf(c *events.Commit, v *events.Vocabulary, ready func(*Plan) error, f func(*Plan)) (err error) {
	if c.Last < s.Next {
		return nil
	}
	if c.Format != s.Format {
		return &events.Error{Code: events.CodeCorrupt, Session: s.ID, Seq: &c.First,
			Detail: fmt.Sprintf("commit %s has format %d in a session of format %d", c.ID, c.Format, s.Format)}
	}
	from := s.Next
	defer func() {
		if err != nil {
			s.digestApplied(c, from)
		}
	}()
	line, rest := []byte(nil), c.Body
	want := c.First
	var fresh []events.Event // in one piece: what is kept of them keeps the body as well
	for len(rest) > 0 {
		line, rest = events.CutLine(rest)
		if len(fresh) == 0 {
			fresh = make([]events.Event, max(1, min(c.Last-want+1, together)))
		}
		e := &fresh[0]
		fresh = fresh[1:]
		if err := events.ParseCanonical(e, line, s.Format, v); err != nil {
			return err
		}
		if e.Seq != want {
			return events.Violation(events.RuleSeqNotContiguous, e.Seq, fmt.Sprintf("expected seq %d in commit %s, got %d", want, c.ID, e.Seq))
		}
		want++
		if e.Seq < s.Next {
			continue
		}
		p, err := s.Plan(e, lifecycle.Off)
		if err == nil && ready != nil {
			err = ready(&p)
		}
		if err != nil {
			return err
		}
		s.Apply(&p, c.StreamSeq)
		if f != nil {
			f(&p)
		}
	}
	if want != c.Last+1 {
		return &events.Error{Code: events.CodeCorrupt, Session: s.ID, Seq: &c.Last,
			Detail: fmt.Sprintf("commit %s says lastseq %d, its body ends at %d", c.ID, c.Last, want-1)}
	}
	s.Seal(c)
	return nil
}

// digestApplied moves the digest on over the events of c from the given seq on that were
// applied before a bad one, so that it stays that of the last event.
func (s *State) digestApplied(c *events.Commit, from events.Seq) {
	line, rest := []byte(nil), c.Body
	for seq := c.First; seq < s.Next; seq++ {
		line, rest = events.CutLine(rest)
		if seq >= from {
			s.Digest = s.Digest.Next(line)
		}
	}
}
