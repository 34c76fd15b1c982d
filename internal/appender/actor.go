package appender

import (
	"bytes"
	"container/list"
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/nats-io/nuid"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

// maxConflicts bounds how often one commit is planned anew because other appenders were first.
const maxConflicts = 1000

// work is one caller's request while it is in an actor's hands.
type work struct {
	Request
	ctx     context.Context
	inspect func(*actor) // looks at the state instead of appending

	// Set by the actor before it closes done.
	receipt *Receipt
	err     error
	done    chan struct{}
}

// solitary work does not share a commit.
func (w *work) solitary() bool { return w.inspect != nil || w.derive != nil }

func (w *work) finish(r *Receipt, err error) {
	w.receipt, w.err = r, err
	close(w.done)
}

// actor is one session's state and the appends that wait for it. Its queue, busy, place and
// size are guarded by Appender.mu; all else belongs to the goroutine in run, of which there is
// one at a time.
type actor struct {
	a     *Appender
	id    string
	queue []*work
	busy  bool
	place *list.Element // in Appender.idle, while at rest
	size  int           // as counted in Appender.bytes

	state *session.State // nil until loaded, and whenever it cannot be trusted
}

// run works until the queue is empty.
func (s *actor) run() {
	defer s.a.running.Done()
	for {
		group := s.a.take(s)
		if len(group) == 0 {
			if s.a.rest(s) {
				return
			}
			continue
		}
		s.do(group)
	}
}

// do carries out one group of work: what becomes one commit, or a single look at the state.
func (s *actor) do(group []*work) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(group[0].ctx), s.a.cfg.LoadTimeout)
	defer cancel()
	fresh := s.state == nil // as new as the log's end when it was loaded just now
	if fresh {
		if err := s.a.load(ctx, s, false); err != nil {
			for _, w := range group {
				w.finish(nil, err)
			}
			return
		}
	}
	if w := group[0]; w.inspect != nil {
		if !fresh {
			if _, err := s.catchUp(ctx); err != nil {
				w.finish(nil, err)
				return
			}
		}
		w.inspect(s)
		w.finish(nil, nil)
		return
	}
	for conflicts := 0; len(group) > 0; conflicts++ {
		if conflicts == maxConflicts {
			for _, w := range group {
				w.finish(nil, &events.Error{Code: events.CodeOverloaded, Session: s.id, Detail: fmt.Sprintf("other appenders were first %d times; try again later", conflicts)})
			}
			return
		}
		group = s.try(ctx, group, &fresh)
	}
}

// try plans the group as one commit and publishes it. It returns the work that is to be tried
// again: the others were first, and the state knows of theirs now.
func (s *actor) try(ctx context.Context, group []*work, fresh *bool) (again []*work) {
	batch := s.state.Begin(s.a.cfg.Invariants)
	var in []*share
	for i, w := range group {
		sh, err := s.plan(batch, w)
		if err != nil && !*fresh && judged(err) {
			// What was found wrong may be so only because others appended meanwhile.
			batch.Rollback()
			*fresh = true
			if _, err := s.catchUp(ctx); err != nil {
				s.fail(group[i:], err)
				return s.waiting(in, nil)
			}
			return s.waiting(in, group[i:])
		}
		switch {
		case err != nil && w.Expected != nil:
			r, derr := s.duplicateOf(ctx, w, err)
			w.finish(r, derr)
		case err != nil:
			w.finish(nil, err)
		case sh == nil: // nothing to append
			w.finish(nil, nil)
		default:
			in = append(in, sh)
		}
	}
	if len(in) == 0 {
		return nil
	}
	first := in[0].w
	c := &events.Commit{ID: nuid.Next(), Actor: first.Actor, Time: events.FormatTime(s.a.cfg.Now()), Format: s.state.Format, Trace: first.Trace}
	if c.Actor == "" {
		c.Actor = events.NoActor
	}
	batch.Seal(c)
	dup, err := s.a.log.Publish(ctx, c, s.state.StreamSeq)
	var conflict *journal.ConflictError
	switch {
	case err == nil:
		batch.Commit(c)
		s.a.stats.Commits.Add(1)
		s.a.stats.Events.Add(int64(c.Last - c.First + 1))
		for _, sh := range in {
			s.report(sh)
			sh.w.finish(&Receipt{Session: s.id, FirstSeq: sh.first, LastSeq: sh.last, Commit: c.ID, Duplicate: dup, Digest: c.Digest.String(), Violations: sh.violations}, nil)
		}
		return nil
	case errors.As(err, &conflict):
		s.a.stats.Conflicts.Add(1)
		batch.Rollback()
		*fresh = true
		if err := s.absorb(ctx, conflict); err != nil {
			s.state = nil
			s.fail(s.waiting(in, nil), err)
			return nil
		}
		return s.waiting(in, nil)
	default:
		batch.Rollback()
		s.state = nil // what the log holds now is not known
		s.fail(s.waiting(in, nil), err)
		return nil
	}
}

// share is one caller's part of a commit.
type share struct {
	w           *work
	first, last events.Seq
	violations  []*Violation
}

func (s *actor) waiting(in []*share, rest []*work) []*work {
	out := make([]*work, 0, len(in)+len(rest))
	for _, sh := range in {
		out = append(out, sh.w)
	}
	return append(out, rest...)
}

func (s *actor) fail(ws []*work, err error) {
	for _, w := range ws {
		w.finish(nil, err)
	}
}

// judged reports whether an error depends on what the session's log holds.
func judged(err error) bool {
	var e *events.Error
	if !errors.As(err, &e) {
		return false
	}
	switch e.Rule {
	case events.RuleJSONMalformed, events.RuleEnvelopeMalformed, events.RuleUnknownType, events.RuleMessageMalformed:
		return false
	}
	return e.Code == events.CodeRuleViolation || e.Code == events.CodeInvariant || e.Code == events.CodeSeqConflict
}

// plan adds one caller's events to the batch, all or none. A nil share without an error means
// that there is nothing to append.
func (s *actor) plan(batch *session.Batch, w *work) (*share, error) {
	if w.Expected != nil && *w.Expected != s.state.Next {
		next, want := s.state.Next, *w.Expected
		return nil, &events.Error{Code: events.CodeSeqConflict, Session: s.id, ExpectedSeq: &want, ActualSeq: &next,
			Detail: fmt.Sprintf("expected the next seq to be %d, it is %d; read what was appended and decide again", want, next)}
	}
	raws := w.Events
	if w.derive != nil {
		if raws = w.derive(s); raws == nil {
			return nil, nil
		}
	}
	at := batch.Mark()
	sh := &share{w: w, first: s.state.Next}
	seen := len(batch.Violations())
	n := len(raws) + len(w.Parsed)
	size := 0
	for i := range n {
		e, err := s.event(w, raws, i)
		if err == nil {
			err = s.add(batch, e)
		}
		if err == nil {
			if size += len(e.Line) + 1; size > s.a.log.MaxCommit() {
				err = &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("the append has more than %d bytes, which is what one commit can hold; split it", s.a.log.MaxCommit())}
			}
		}
		if err != nil {
			batch.Rewind(at)
			var e *events.Error
			if errors.As(err, &e) {
				c := *e
				c.Session = s.id
				if w.derive == nil {
					c.Index = &i
				}
				err = &c
			}
			return nil, err
		}
	}
	sh.last = s.state.Next - 1
	for _, v := range batch.Violations()[seen:] {
		sh.violations = append(sh.violations, &Violation{Rule: v.Rule, Seq: *v.Seq, Detail: v.Detail})
	}
	return sh, nil
}

// event makes the i-th event of a request, for the session's next seq.
func (s *actor) event(w *work, raws [][]byte, i int) (*events.Event, error) {
	if raws == nil {
		return w.Parsed[i], nil
	}
	e, err := events.Parse(raws[i], events.Context{
		Format: s.state.Format, Vocabulary: s.a.log.Vocabulary(), Next: s.state.Next,
		Now: s.a.cfg.Now().UnixMilli(), EmptyCallID: w.EmptyCallID,
	})
	if err != nil {
		return nil, err
	}
	if most := min(s.a.cfg.MaxEvent, s.a.log.MaxCommit()-1); len(e.Line) > most {
		return nil, &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("the event has %d bytes, at most %d are taken (the smaller of the configured maximum %d and what the server takes, %d)", len(e.Line), most, s.a.cfg.MaxEvent, s.a.log.MaxCommit()-1)}
	}
	return e, nil
}

// add plans an event on top of the batch. Nodes whose details are not in memory are looked up
// in the log.
func (s *actor) add(batch *session.Batch, e *events.Event) error {
	for {
		err := batch.Add(e)
		var missing *surface.MissingError
		if !errors.As(err, &missing) {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), s.a.cfg.LoadTimeout)
		err = s.fillNode(ctx, s.state.Surface.Node(missing.Position))
		cancel()
		if err != nil {
			return err
		}
	}
}

// fillNode reads a node's event from the log and keeps what the rules need of it.
func (s *actor) fillNode(ctx context.Context, n *surface.Node) error {
	e, at, err := s.a.readEvent(ctx, s.id, n.Seq, s.state.Format)
	if err != nil {
		return err
	}
	if e == nil {
		return &events.Error{Code: events.CodeCorrupt, Session: s.id, Seq: &n.Seq, Detail: "the snapshot has a node that the log lacks; run projector verify"}
	}
	n.At, n.Kind, n.Size = at, e.Kind, int32(len(e.Data()))
	fp := ""
	if e.Kind == events.KindTool {
		fp = e.Fingerprint(s.state.Format)
	}
	n.Body = surface.NewBody(nil, fp)
	return nil
}

// readEvent reads one event from the log; nil when the log has no such seq.
func (a *Appender) readEvent(ctx context.Context, session string, seq events.Seq, f events.Format) (*events.Event, uint64, error) {
	c, err := a.log.Locate(ctx, session, seq)
	if err != nil || c == nil {
		return nil, 0, err
	}
	for line, rest := []byte(nil), c.Body; len(rest) > 0; {
		line, rest = events.CutLine(rest)
		e := new(events.Event)
		if err := events.ParseCanonical(e, line, f, a.log.Vocabulary()); err != nil {
			return nil, 0, err
		}
		if e.Seq == seq {
			return e, c.StreamSeq, nil
		}
	}
	return nil, 0, nil
}

// report counts and logs the lifecycle rules that observe mode let through.
func (s *actor) report(sh *share) {
	for _, v := range sh.violations {
		s.a.stats.Violations.Add(1)
		s.a.cfg.Logger.LogAttrs(sh.w.ctx, slog.LevelWarn, "lifecycle rule broken",
			slog.String("session", s.id), slog.String("rule", string(v.Rule)), slog.Int64("seq", int64(v.Seq)), slog.String("detail", v.Detail))
	}
}

// load makes the state from the session's head and the log behind it, or from the log alone.
func (s *actor) load(ctx context.Context, h *events.Header, fromLog bool) error {
	st := session.New(s.id, h.Format, h.Raw, surface.KeepFingerprints)
	if !fromLog {
		snap, _, err := s.a.store.Load(ctx, s.id, surface.KeepFingerprints)
		switch {
		case errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}):
			s.a.cfg.Logger.Warn("the session's snapshot is damaged; reading its whole log", "session", s.id, "err", err)
		case err != nil:
			return err
		case snap != nil:
			st = snap.State
		}
	}
	s.state = st
	if *s.a.cfg.Freeze {
		st.Life.Freeze()
	}
	err := s.a.log.ReadToEnd(ctx, s.id, st.StreamSeq, func(c *events.Commit) error { return s.fold(ctx, c) })
	if err != nil {
		s.state = nil
	}
	return err
}

// fold folds a commit that is in the log.
func (s *actor) fold(ctx context.Context, c *events.Commit) error {
	if c.First != s.state.Next {
		return &events.Error{Code: events.CodeCorrupt, Session: s.id, Seq: &c.First,
			Detail: fmt.Sprintf("stream sequence %d: expected a commit from seq %d on, found one from %d; run projector verify", c.StreamSeq, s.state.Next, c.First)}
	}
	for refreshed := false; ; {
		err := s.state.FoldCommit(c, s.a.log.Vocabulary(), nil)
		var missing *surface.MissingError
		switch {
		case errors.As(err, &missing):
			err = s.fillNode(ctx, s.state.Surface.Node(missing.Position))
		case errors.Is(err, &events.Error{Code: events.CodeRuleViolation, Rule: events.RuleUnknownType}) && !refreshed:
			refreshed = true
			if _, rerr := s.a.log.RefreshVocabulary(ctx); rerr != nil {
				err = rerr
			} else {
				err = nil
			}
		default:
			return err
		}
		if err != nil {
			return err
		}
	}
}

// catchUp folds what the log holds behind the state and reports whether there was anything.
func (s *actor) catchUp(ctx context.Context) (news bool, err error) {
	err = s.a.log.LeaderTail(ctx, s.id, s.state.StreamSeq, func(c *events.Commit) error {
		news = true
		return s.fold(ctx, c)
	})
	if err != nil {
		s.state = nil
	}
	return news, err
}

// absorb folds what other appenders stored first.
func (s *actor) absorb(ctx context.Context, conflict *journal.ConflictError) error {
	if conflict.Rewound {
		// The log ends before the head that the state came from: a power cut took
		// acknowledged commits of an unsynced store. The log is the truth.
		s.a.cfg.Logger.Error("the session's log ends before its state; reading the whole log again", "session", s.id, "seq", int64(s.state.Last()))
		return s.a.load(ctx, s, true)
	}
	for _, c := range conflict.Commits {
		if err := s.fold(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// duplicateOf answers an append whose expectedSeq has been passed: when the same events lie
// at those seqs already, the original receipt; else the conflict.
func (s *actor) duplicateOf(ctx context.Context, w *work, refusal error) (*Receipt, error) {
	if !errors.Is(refusal, events.ErrSeqConflict) || *w.Expected >= s.state.Next || w.derive != nil || w.Parsed != nil {
		return nil, refusal
	}
	first, err := s.a.log.Locate(ctx, s.id, *w.Expected)
	if err != nil {
		return nil, err
	}
	if first == nil {
		return nil, refusal
	}
	next, last := *w.Expected, first
	same := func(c *events.Commit) (done bool) {
		for line, rest := []byte(nil), c.Body; len(rest) > 0; {
			line, rest = events.CutLine(rest)
			var stored events.Event
			if events.ParseCanonical(&stored, line, s.state.Format, s.a.log.Vocabulary()) != nil {
				return true
			}
			if stored.Seq < next {
				continue
			}
			given, err := events.Parse(w.Events[next-*w.Expected], events.Context{
				Format: s.state.Format, Vocabulary: s.a.log.Vocabulary(), Next: next, Now: stored.Time})
			if err != nil || !bytes.Equal(given.Line, line) {
				return true
			}
			if last, next = c, next+1; next == *w.Expected+events.Seq(len(w.Events)) {
				return true
			}
		}
		return false
	}
	if !same(first) {
		stop := errors.New("stop")
		err := s.a.log.LeaderTail(ctx, s.id, first.StreamSeq, func(c *events.Commit) error {
			if same(c) {
				return stop
			}
			return nil
		})
		if err != nil && err != stop {
			return nil, err
		}
	}
	if next != *w.Expected+events.Seq(len(w.Events)) {
		return nil, refusal
	}
	return &Receipt{Session: s.id, FirstSeq: *w.Expected, LastSeq: next - 1, Commit: last.ID, Duplicate: true, Digest: last.Digest.String()}, nil
}

// closers are the events that repair appends: a new epoch when the session has a writer, so
// that a writer that is thought dead cannot go on behind the repair, and then the closers.
func (s *actor) closers() [][]byte {
	life := s.state.Life
	next := s.state.Next
	closers := life.Closers(s.state.Format, next, s.state.Time)
	if closers == nil || s.state.Writer == nil {
		return closers
	}
	fence := fmt.Appendf(nil, `{"type":"session/writer","seq":%d,"time":%d,"ignorable":true,"data":{"writer":"repair","epoch":%d}}`,
		next, s.state.Time, s.state.Writer.Epoch+1)
	return append([][]byte{fence}, life.Closers(s.state.Format, next+1, s.state.Time)...)
}
