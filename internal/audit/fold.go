package audit

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"palimpsest/internal/events"
	"palimpsest/internal/session"
	"palimpsest/internal/snapshot"
)

// How much of a session's log is folded before the pages that it made are reduced to their
// hashes, in bytes, so that a long session takes the memory of its nodes and not of its
// messages: leastShed where many sessions are in memory, mostShed where it is alone.
const leastShed, mostShed = 64 << 10, 8 << 20

// pageID is the SHA-256 of a page's value.
type pageID [sha256.Size]byte

func sum(page []byte) pageID { return sha256.Sum256(page) }

// typeEndSeed closes the inherited part of a fork.
const typeEndSeed = "session/end-seed"

// quick checks and folds a commit with which nothing is wrong, and reads each event once. It
// answers false, and has found nothing, when something is: what, is for commit to say.
func (v *verifier) quick(ctx context.Context, c *events.Commit) (well bool, err error) {
	if v.snap == nil || c.First != v.next || c.Stray != nil {
		return false, nil
	}
	digest, before := v.digest, make([]events.Digest, 0, min(c.Last-c.First+1, 1024))
	for line := range c.Lines() {
		before = append(before, digest)
		digest = digest.Next(line)
	}
	if digest != c.Digest || events.Seq(len(before)) != c.Last-c.First+1 {
		return false, nil
	}
	es := make([]*events.Event, 0, len(before))
	bad, err := v.fold(ctx, c, func(p *session.Plan) { es = append(es, p.Event) })
	if bad != nil || err != nil || len(es) != len(before) {
		return false, err
	}
	for _, e := range es {
		if e.Check(c.Format) != nil {
			return false, nil
		}
	}
	for i, e := range es {
		v.good(e, before[i])
	}
	v.digest, v.next = digest, c.Last+1
	v.r.Commits++
	v.r.Events += int64(len(es))
	v.chainOn(c)
	return true, nil
}

// fold folds a commit. bad says what is wrong with the commit, err is trouble with JetStream.
func (v *verifier) fold(ctx context.Context, c *events.Commit, each func(*session.Plan)) (bad, err error) {
	for {
		bad = v.snap.Fold(c, v.a.log.Vocabulary(), each)
		var missing *snapshot.PagesError
		if !errors.As(bad, &missing) {
			break
		}
		for _, n := range missing.Pages {
			if err := v.refill(ctx, n); err != nil {
				return nil, err
			}
		}
	}
	if v.unshed += int64(len(c.Body)); bad != nil || v.unshed < v.shedAt {
		return bad, nil
	}
	return v.shed(), nil
}

// shed lets go of the pages that were made, and keeps their hashes.
func (v *verifier) shed() error {
	pages, unreferenced, err := v.snap.Shed()
	if err != nil {
		return err
	}
	v.unshed = 0
	for _, p := range pages {
		v.pages[p.Key] = sum(p.Value)
	}
	for _, key := range unreferenced {
		delete(v.pages, key)
	}
	return nil
}

// refill reads what a page that was let go of holds from the log again.
func (v *verifier) refill(ctx context.Context, n int64) error {
	stubs := v.snap.Stubs(n)
	nodes := make([]snapshot.PageNode, 0, len(stubs))
	var c *events.Commit
	for _, s := range stubs {
		if c == nil || c.StreamSeq != s.At {
			var err error
			if c, err = v.a.log.Stored(ctx, v.id, s.At); err != nil {
				return err
			}
		}
		e, err := v.eventIn(c, s.Seq)
		if err != nil {
			return err
		}
		node := snapshot.PageNode{Seq: s.Seq, At: s.At, Type: e.Type, Size: int32(len(e.Data())), Message: e.Message()}
		if e.Kind == events.KindTool {
			node.Fingerprint = e.Fingerprint(v.snap.Format)
		}
		nodes = append(nodes, node)
	}
	return v.snap.Fill(n, nodes)
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
	return nil, &events.Error{Code: events.CodeCorrupt, Session: v.id, Seq: &seq, Detail: "the log changed while it was verified: an event that was read is not there any more"}
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
			if next > v.inherited {
				return stop
			}
			digest = digest.Next(line)
			next++
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
