package session

import (
	"sync"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
)

// Batch is a run of candidates that are to become one commit. Events that were added can be
// taken back until the batch is committed, so that a refused or lost commit leaves the state
// as it was. One batch at a time; the state must not be used otherwise meanwhile.
type Batch struct {
	s          *State
	mode       lifecycle.Mode
	plans      []Plan
	marks      []mark
	violations []*events.Error
	body       []byte // the lines, each with its line end
	commit     events.Commit
}

// mark is what Rewind needs beside the surface's own undo.
type mark struct {
	plans, violations int
	body              int
	next              events.Seq
	time, logBytes    int64
	digest            events.Digest
	writer            *Writer
	life              lifecycle.State
}

// batches are used again, with the memory of their plans and marks.
var batches = sync.Pool{New: func() any { return new(Batch) }}

// mostReused is how many plans or marks a batch may have had room for to be used again.
const mostReused = 256

// Begin starts a batch.
func (s *State) Begin(mode lifecycle.Mode) *Batch {
	b := batches.Get().(*Batch)
	b.s, b.mode = s, mode
	b.Mark()
	return b
}

// End gives back the memory of a batch that was committed or rolled back, and of its Blank. Neither may be
// used from then on. What was sealed into another commit stays: the lines are not used again, since
// events that the state holds are parts of them.
func (b *Batch) End() {
	if cap(b.plans) > mostReused || cap(b.marks) > mostReused {
		return
	}
	clear(b.plans)
	clear(b.marks)
	*b = Batch{plans: b.plans[:0], marks: b.marks[:0]}
	batches.Put(b)
}

// Blank returns an empty commit to be filled in and sealed. It is gone with the batch's End.
func (b *Batch) Blank() *events.Commit { return &b.commit }

// Mark notes the present point and returns it for Rewind: what follows is one caller's.
func (b *Batch) Mark() int {
	if last := len(b.marks) - 1; last >= 0 && b.marks[last].plans == len(b.plans) {
		return last // nothing was added since
	}
	b.marks = append(b.marks, mark{len(b.plans), len(b.violations), len(b.body), b.s.Next, b.s.Time, b.s.LogBytes, b.s.Digest, b.s.Writer, *b.s.Life.Clone()})
	return len(b.marks) - 1
}

// Add plans a candidate on top of the batch and takes it in. An error leaves the batch as it was.
func (b *Batch) Add(e *events.Event) error {
	p, err := b.s.Plan(e, b.mode)
	if err != nil {
		return err
	}
	if p.Violation != nil {
		b.violations = append(b.violations, p.Violation)
	}
	b.s.Apply(&p, 0)
	b.s.Digest = b.s.Digest.Next(e.Line)
	b.plans = append(b.plans, p)
	b.addLine(e.Line)
	return nil
}

// Reserve makes room for lines of n bytes in all, line ends included, in an empty batch.
func (b *Batch) Reserve(n int) { b.body = make([]byte, 0, n) }

// Room is where the line of the next event may be written (see events.Context), so that it
// needs not be copied when it is added.
func (b *Batch) Room() []byte { return b.body }

func (b *Batch) addLine(line []byte) {
	n := len(b.body)
	if room := b.body[n:cap(b.body)]; len(room) > len(line) && &room[0] == &line[0] {
		b.body = b.body[:n+len(line)]
	} else {
		b.body = append(b.body, line...)
	}
	b.body = append(b.body, '\n')
}

// Rewind takes back everything that was added since the mark.
func (b *Batch) Rewind(to int) {
	m := b.marks[to]
	for i := len(b.plans) - 1; i >= m.plans; i-- {
		b.s.Surface.Undo(&b.plans[i].Change)
	}
	clear(b.plans[m.plans:])
	b.plans, b.violations, b.body = b.plans[:m.plans], b.violations[:m.violations], b.body[:m.body]
	b.s.Next, b.s.Time, b.s.LogBytes, b.s.Digest, b.s.Writer, b.s.Life = m.next, m.time, m.logBytes, m.digest, m.writer, m.life.Clone()
	clear(b.marks[to+1:])
	b.marks = b.marks[:to+1]
}

// Rollback takes everything back.
func (b *Batch) Rollback() { b.Rewind(0) }

// Len returns how many events the batch holds.
func (b *Batch) Len() int { return len(b.plans) }

// Violations returns the lifecycle rules that observe mode let through.
func (b *Batch) Violations() []*events.Error { return b.violations }

// Seal fills a commit in: first and last seq, digest, chain, body. ID, Actor, Time and
// Format must be set. The events stay speculative until Commit.
func (b *Batch) Seal(c *events.Commit) {
	c.Body = b.body
	c.Session = b.s.ID
	c.First = b.plans[0].Event.Seq
	c.Last = b.plans[len(b.plans)-1].Event.Seq
	c.Digest = b.s.Digest
	c.Chain = b.s.Chain.NextChain(c)
}

// Commit makes the batch final, as stored in c.
func (b *Batch) Commit(c *events.Commit) { b.s.Seal(c) }
