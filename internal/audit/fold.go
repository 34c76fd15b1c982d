package audit

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"

	"palimpsest/internal/events"
	"palimpsest/internal/session"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

// typeEndSeed closes the inherited part of a fork.
const typeEndSeed = "session/end-seed"

// quick checks and folds a commit with which nothing is wrong, and reads each event once. It
// answers false, and has found nothing, when something is: what, is for commit to say.
func (v *verifier) quick(c *events.Commit) (well bool) {
	if v.snap == nil || c.First != v.next || c.Stray != nil {
		return false
	}
	var few [4]events.Digest
	digest, before := v.digest, few[:0]
	for line := range c.Lines() {
		before = append(before, digest)
		digest = digest.Next(line)
	}
	if digest != c.Digest || events.Seq(len(before)) != c.Last-c.First+1 {
		return false
	}
	es := make([]*events.Event, 0, len(before))
	if v.fold(c, &es) != nil || len(es) != len(before) {
		return false
	}
	for _, e := range es {
		if e.Check(c.Format) != nil {
			return false
		}
	}
	for i, e := range es {
		v.good(e, before[i])
	}
	v.life.Settle()
	v.digest, v.next = digest, c.Last+1
	v.r.Commits++
	v.r.Events += int64(len(es))
	v.chainOn(c)
	return true
}

// fold folds a commit, and says what is wrong with it. The events that it folded are added to a list, when
// that is given.
func (v *verifier) fold(c *events.Commit, list *[]*events.Event) error {
	err := v.snap.Fold(c, v.a.log.Vocabulary(), func(p *session.Plan) {
		if e := p.Event; !v.logOnly && e.Kind.OnSurface() && e.Check(c.Format) == nil { // who folds finds what is wrong with it
			if m := e.Message(); m != nil {
				v.messages = append(v.messages, messageSum{e.Seq, sha256.Sum256(m)})
			}
		}
		if list != nil {
			*list = append(*list, p.Event)
		}
	})
	v.snap.Life.Settle() // a commit is not kept
	if len(v.messages) > 2*v.snap.Surface.Len()+64 {
		v.messages = v.messages.only(v.snap.Surface.Seqs())
	}
	return err
}

// messageSums are the SHA-256 of the messages of a session's events, by seq, ascending. What the bucket
// holds of a message is compared with its sum, so that a session takes the memory of its nodes and not of
// its messages.
type messageSums []messageSum

type messageSum struct {
	seq events.Seq
	sum [sha256.Size]byte
}

// of returns the sum of an event's message; ok is false when the event derives none.
func (s messageSums) of(seq events.Seq) (sum [sha256.Size]byte, ok bool) {
	i, ok := slices.BinarySearchFunc(s, seq, func(m messageSum, seq events.Seq) int { return cmp.Compare(m.seq, seq) })
	if !ok {
		return sum, false
	}
	return s[i].sum, true
}

// only returns the sums of some events alone.
func (s messageSums) only(seqs []events.Seq) messageSums {
	slices.Sort(seqs)
	out := make(messageSums, 0, len(seqs))
	for _, m := range s {
		if _, ok := slices.BinarySearch(seqs, m.seq); ok {
			out = append(out, m)
		}
	}
	return out
}

// retold gives the messages of the log's events once more: out of a value of the bucket where it has them
// as they were read from the log, and out of the log where it does not.
type retold struct {
	ctx    context.Context
	v      *verifier
	value  []byte
	parse  func(value []byte) []snapshot.PageNode // called when a message is not at its place
	nodes  []snapshot.PageNode                    // what it returned
	commit *events.Commit                         // the one that was read last
}

// errElsewhere says that a value has a message at another place, if at all.
var errElsewhere = errors.New("audit: a message is not at its place")

// inPlace is a snapshot.Messages that looks at the places of messages alone.
func (r *retold) inPlace(n *surface.Node, at int) ([]byte, error) {
	want, ok := r.v.messages.of(n.Seq)
	if !ok {
		return nil, nil
	}
	if at < len(r.value) {
		if m := r.value[at:events.ValueEnd(r.value, at)]; sha256.Sum256(m) == want {
			return m, nil
		}
	}
	return nil, errElsewhere
}

// message is a snapshot.Messages.
func (r *retold) message(n *surface.Node, at int) ([]byte, error) {
	if m, err := r.inPlace(n, at); err == nil {
		return m, nil
	}
	if r.parse != nil {
		r.nodes, r.parse = r.parse(r.value), nil
	}
	want, _ := r.v.messages.of(n.Seq)
	if i := slices.IndexFunc(r.nodes, func(p snapshot.PageNode) bool { return p.Seq == n.Seq }); i >= 0 && sha256.Sum256(r.nodes[i].Message) == want {
		return r.nodes[i].Message, nil
	}
	if r.commit == nil || r.commit.StreamSeq != n.At {
		var err error
		if r.commit, err = r.v.a.log.Stored(r.ctx, r.v.id, n.At); err != nil {
			return nil, err
		}
	}
	e, err := r.v.eventIn(r.commit, n.Seq)
	if err != nil {
		return nil, err
	}
	if m := e.Message(); sha256.Sum256(m) == want {
		return m, nil
	}
	return nil, r.v.changed(n.Seq)
}

// eventIn finds an event that was read before.
func (v *verifier) eventIn(c *events.Commit, seq events.Seq) (*events.Event, error) {
	if c != nil {
		for line := range c.Lines() {
			e := new(events.Event)
			if err := events.ParseCanonical(e, line, v.snap.Format, v.a.log.Vocabulary()); err != nil {
				return nil, err
			}
			if e.Seq == seq {
				return e, e.Check(v.snap.Format)
			}
		}
	}
	return nil, v.changed(seq)
}

func (v *verifier) changed(seq events.Seq) error {
	return &events.Error{Code: events.CodeCorrupt, Session: v.id, Seq: &seq, Detail: "the log changed while it was verified: an event that was read is not there any more"}
}

// commitHeaders compares those headers of a commit that no reader needs with its content.
func (v *verifier) commitHeaders(c *events.Commit) {
	for _, d := range c.Stray {
		last := c.Last
		v.find(Finding{Check: CheckCommit, Seq: &last, StreamSeq: c.StreamSeq, Expected: d.Expected, Found: d.Found, Detail: "header " + d.Name + " does not fit the commit"})
	}
}

// lineage compares a fork with its parent, as far as the parent is in this store.
func (v *verifier) lineage(ctx context.Context, h *events.Header) error {
	indexed, err := v.a.headers.IsChild(ctx, h.ParentSession, v.id)
	if err != nil {
		return err
	}
	if !indexed {
		v.find(Finding{Check: CheckLineage, Detail: fmt.Sprintf("the index of children lacks this session, whose header names %q as its parent", h.ParentSession)})
	}
	if v.inherited == events.NoSeq || !h.IsSeeded {
		return nil
	}
	parent, err := v.a.headers.Get(ctx, h.ParentSession)
	switch {
	case errors.Is(err, events.ErrSessionNotFound), errors.Is(err, events.ErrErased), errors.Is(err, &events.Error{Code: events.CodeCorrupt}):
		return nil // it is elsewhere, or a finding of its own
	case err != nil:
		return err
	case parent.Format != h.Format:
		v.find(Finding{Check: CheckLineage, Detail: fmt.Sprintf("the session has format %d, its parent %d", h.Format, parent.Format)})
		return nil
	}
	digest, next := events.SeedDigest(v.id), events.Seq(0)
	stop := errors.New("stop")
	err = v.a.log.ReadToEnd(ctx, h.ParentSession, 0, func(c *events.Commit) error {
		for line := range c.Lines() {
			digest = digest.Next(line)
			if next++; next > v.inherited { // what comes then is not the child's
				return stop
			}
		}
		return nil
	})
	if err != nil && err != stop {
		var own *events.Error
		if errors.As(err, &own) && (own.Code == events.CodeCorrupt || own.Code == events.CodeErased) {
			return nil // the parent's finding
		}
		return err
	}
	if next <= v.inherited || digest != v.seed {
		at := v.inherited
		f := Finding{Check: CheckLineage, Seq: &at, Expected: digest.String(), Found: v.seed.String(),
			Detail: fmt.Sprintf("the events up to here, which the session inherited, are not those of its parent %q", h.ParentSession)}
		if next <= v.inherited {
			f.Expected, f.Found = fmt.Sprintf("a parent with seq %d", v.inherited), fmt.Sprintf("one that ends at seq %d", next-1)
		}
		v.find(f)
	}
	return nil
}
