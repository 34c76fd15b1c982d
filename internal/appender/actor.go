package appender

import (
	"bytes"
	"container/list"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

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
	size    int          // bytes of Events

	share share // what it is of the commit that is being made

	// Set by the actor when the work is finished.
	receipt  *Receipt
	err      error
	finished bool
	done     chan struct{} // closed then; nil when the caller itself is the actor
}

// solitary work does not share a commit.
func (w *work) solitary() bool { return w.inspect != nil || w.derive != nil }

func (w *work) finish(r *Receipt, err error) {
	w.receipt, w.err, w.finished = r, err, true
	if w.done != nil {
		close(w.done)
	}
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
	keys  *keyWindow     // nil until an append with an idempotency key comes

	conn uint64 // Journal.Reconnects when the log was last known to hold the state's last commit

	contended atomic.Int64 // ns since start until which gaps are left for others

	unborn *events.Header // the header of a session that is not stored yet; nil for others
}

// begin works on what came to an actor at rest, and leaves what came meanwhile to a goroutine.
func (s *actor) begin(w *work) {
	group := []*work{w}
	s.work(group)
	if s.isContended() || !s.a.rest(s, group) {
		go s.run(group)
		return
	}
	s.a.running.Done()
}

// run works until the queue is empty. group is what was worked on before.
func (s *actor) run(group []*work) {
	defer s.a.running.Done()
	for {
		s.leaveGap()
		group = s.a.take(s, group)
		if len(group) == 0 {
			if s.a.rest(s, nil) {
				return
			}
			continue
		}
		s.work(group)
		if len(group) > 1 {
			runtime.Gosched() // those who were answered may join the next group
		}
	}
}

// work carries out a group of work. A panic is a bug: it fails the group, and the state, which
// cannot be trusted then, is loaded again.
func (s *actor) work(group []*work) {
	defer func() {
		p := recover()
		if p == nil {
			return
		}
		s.a.cfg.Logger.Error("panic in an append", "session", s.id, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		s.state = nil
		for _, w := range group {
			if !w.finished {
				w.finish(nil, &events.Error{Code: events.CodeInternal, Session: s.id, Detail: "the appender made a mistake; it is in its log. Whether the events were stored is not known"})
			}
		}
	}()
	s.do(group)
}

const (
	// contention is how long an appender goes on leaving gaps after it was asked for a turn.
	contention = time.Second
	// gap is the longest of the pauses between two commits then: time for another appender to
	// read what it missed and to publish.
	gap = 12 * time.Millisecond
	// askAfter is how often in a row an appender is overtaken before it asks for a turn.
	askAfter = 2
)

// leaveGap pauses while another appender has asked for a turn on the session. Without it, the
// one that is nearest to the server would win every round.
func (s *actor) leaveGap() {
	if s.isContended() {
		time.Sleep(gap/4 + rand.N(3*gap/4))
	}
}

func (s *actor) isContended() bool {
	until := s.contended.Load()
	return until != 0 && int64(time.Since(start)) < until
}

// start is what contention is measured from, by the clock that nobody sets back.
var start = time.Now()

// contend makes the actor leave gaps for a while.
func (s *actor) contend() { s.contended.Store(int64(time.Since(start) + contention)) }

// askForTurn asks other appenders for a gap, and leaves gaps from then on as they do.
func (s *actor) askForTurn() {
	s.contend()
	if err := s.a.log.AskForTurn(s.id); err != nil {
		s.a.cfg.Logger.Warn("asking for a turn", "session", s.id, "err", err)
	}
}

// do carries out one group of work: what becomes one commit, or a single look at the state.
func (s *actor) do(group []*work) {
	ctx := withDeadline(group[0].ctx, s.a.stopping, s.a.cfg.LoadTimeout)
	defer ctx.end()
	// What is away for the moment is no reason to refuse: the publish looks as well, for as long as it takes.
	if err := s.confirm(ctx); err != nil && !errors.Is(err, &events.Error{Code: events.CodeUnavailable}) {
		s.fail(group, err)
		return
	}
	fresh := s.state == nil // as new as the log's end when it was loaded just now
	if fresh {
		if err := s.reload(ctx); err != nil {
			s.fail(group, err)
			return
		}
	}
	if w := group[0]; w.inspect != nil {
		if !fresh {
			if err := s.catchUp(ctx); err != nil {
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
		if conflicts >= askAfter {
			s.askForTurn()
		}
		if s.state == nil { // lost with a commit whose outcome is not known
			if err := s.reload(ctx); err != nil {
				s.fail(group, err)
				return
			}
			fresh = true
		}
		group = s.try(ctx, group, &fresh)
	}
}

// reload makes the state anew.
func (s *actor) reload(ctx context.Context) error {
	s.state, s.keys = nil, nil
	conn := s.a.log.Reconnects() // before the log is read: what is read may be lost with the server
	if err := s.a.load(ctx, s, false); err != nil {
		return err
	}
	s.conn = conn
	return nil
}

// confirm forgets a state whose last commit the log does not hold any more. A server that lost power
// may have lost commits that were not synced, and others may have their place since; whoever is still
// connected as before has not lived through that.
func (s *actor) confirm(ctx context.Context) error {
	if s.state == nil {
		return nil
	}
	conn := s.a.log.Reconnects()
	if conn == s.conn {
		return nil
	}
	if s.state.StreamSeq == 0 { // its header may be lost
		s.state = nil
		return nil
	}
	c, err := s.a.log.Stored(ctx, s.id, s.state.StreamSeq)
	if err != nil {
		return err
	}
	if c == nil || c.Chain != s.state.Chain {
		s.lost()
		return nil
	}
	s.conn = conn
	return nil
}

// try plans the group as one commit and publishes it. It returns the work that is to be tried
// again: the others were first, and the state knows of theirs now.
func (s *actor) try(ctx context.Context, group []*work, fresh *bool) (again []*work) {
	batch := s.state.Begin(s.a.cfg.Invariants)
	defer batch.End()
	batch.Reserve(linesOf(group))
	var in []*share
	for i, w := range group {
		if in != nil && w.Key != "" && sharesKey(in, w.Key) {
			again = append(again, w) // to be recognised once the other is committed
			continue
		}
		r, err := s.recognise(ctx, w)
		if r != nil {
			w.finish(r, nil)
			continue
		}
		var sh *share
		if err == nil {
			sh, err = s.plan(ctx, batch, w)
		}
		if !*fresh && (judged(err) || err == nil && sh == nil) {
			// What was found wrong, or to need nothing, may be so only because others
			// appended meanwhile.
			batch.Rollback()
			*fresh = true
			if err := s.catchUp(ctx); err != nil {
				s.fail(append(s.waiting(in, group[i:]), again...), err)
				return nil
			}
			return append(s.waiting(in, group[i:]), again...)
		}
		if in != nil && judged(err) {
			again = append(again, w) // to be judged by what is stored in the end
			continue
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
		return again
	}
	return append(s.publish(ctx, batch, in, fresh), again...)
}

// linesOf is how many bytes the lines of a group will have at most, or little more.
func linesOf(group []*work) (n int) {
	for _, w := range group {
		for _, raw := range w.Events {
			n += len(raw) + lineReserve
		}
		for _, e := range w.Parsed {
			n += len(e.Line) + 1
		}
	}
	return n
}

// publish stores the batch as one commit and answers the callers whose shares it holds. It
// returns those that are to be tried again.
func (s *actor) publish(ctx context.Context, batch *session.Batch, in []*share, fresh *bool) (again []*work) {
	first := in[0].w
	c := batch.Blank()
	c.ID, c.Actor, c.Time, c.Format, c.Trace = nuid.Next(), first.Actor, s.a.stamp(), s.state.Format, first.Trace
	if c.Actor == "" {
		c.Actor = events.NoActor
	}
	for _, sh := range in {
		if sh.w.Key != "" {
			c.Appends = append(c.Appends, events.AppendSpan{Key: sh.w.Key, First: sh.first, Last: sh.last})
		}
	}
	batch.Seal(c)
	if err := s.bear(ctx); err != nil {
		batch.Rollback()
		s.state = nil
		if errors.Is(err, errOtherHeader) {
			return s.waiting(in, nil)
		}
		s.fail(s.waiting(in, nil), err)
		return nil
	}
	var traced func(error)
	if s.a.cfg.Telemetry != nil {
		traced = s.traced(ctx, c, in)
	}
	dup, err := s.a.log.PublishSince(ctx, s.conn, c, s.state.StreamSeq)
	if traced != nil {
		traced(err)
	}
	if err == nil {
		batch.Commit(c)
		s.keys.add(c)
		s.a.stats.Commits.Add(1)
		s.a.stats.Events.Add(int64(c.Last - c.First + 1))
		digest := c.Digest.String()
		for _, sh := range in {
			s.report(sh)
			sh.w.finish(&Receipt{Session: s.id, FirstSeq: sh.first, LastSeq: sh.last, Commit: c.ID, Duplicate: dup, Digest: digest, Violations: sh.violations, Warnings: sh.warnings}, nil)
		}
		return nil
	}
	var conflict *journal.ConflictError
	switch {
	case errors.As(err, &conflict):
		s.a.stats.Conflicts.Add(1)
		batch.Rollback()
		*fresh = true
		if err := s.absorb(ctx, conflict); err != nil {
			s.state = nil
			if ctx.Err() != nil {
				err = s.overtaken(err)
			}
			s.fail(s.waiting(in, nil), err)
			return nil
		}
		return s.waiting(in, nil)
	default:
		batch.Rollback()
		s.state = nil // what the log holds now is not known
		if !isOurs(err) {
			// The time was up before anything was sent.
			err = s.overtaken(err)
		}
		s.fail(s.waiting(in, nil), err)
		return nil
	}
}

// overtaken is the error of an append for which others were first until its time was up, or until the
// appender was told to stop.
func (s *actor) overtaken(cause error) error {
	if s.a.stopping.Err() != nil {
		return shutDown(s.id, cause)
	}
	return &events.Error{Code: events.CodeOverloaded, Session: s.id, Cause: cause, Detail: fmt.Sprintf("other appenders were first for %v; try again later", s.a.cfg.LoadTimeout)}
}

// errOtherHeader says that a session was created with another header than the default one
// that its first events were planned with.
var errOtherHeader = errors.New("appender: the session was created meanwhile")

// bear stores the default header of a session that nobody created, now that it is about to get
// its first event: a refused append leaves no session behind.
func (s *actor) bear(ctx context.Context) error {
	if s.unborn == nil {
		return nil
	}
	h := s.unborn
	stored, _, err := s.a.headers.Create(ctx, h)
	if err != nil {
		return err
	}
	s.unborn = nil
	if !bytes.Equal(stored.Raw, h.Raw) {
		return errOtherHeader
	}
	return nil
}

// share is one caller's part of a commit.
type share struct {
	w           *work
	first, last events.Seq
	violations  []*Violation
	warnings    []string
}

func sharesKey(in []*share, key string) bool {
	return slices.ContainsFunc(in, func(sh *share) bool { return sh.w.Key == key })
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

// isOurs reports whether an error is an *events.Error.
func isOurs(err error) bool {
	var e *events.Error
	return errors.As(err, &e)
}

// judged reports whether an error depends on what the session's log holds.
func judged(err error) bool {
	if err == nil {
		return false
	}
	var e *events.Error
	if !errors.As(err, &e) {
		return false
	}
	switch e.Rule {
	case events.RuleJSONMalformed, events.RuleEnvelopeMalformed, events.RuleUnknownType, events.RuleMessageMalformed:
		return false
	}
	switch e.Code {
	case events.CodeRuleViolation, events.CodeInvariant, events.CodeSeqConflict, events.CodeFenced, events.CodeSplitsToolPair:
		return true
	}
	return false
}

// plan adds one caller's events to the batch, all or none. A nil share without an error means
// that there is nothing to append.
func (s *actor) plan(ctx context.Context, batch *session.Batch, w *work) (*share, error) {
	if err := s.fence(w); err != nil {
		return nil, err
	}
	if w.Expected != nil && *w.Expected != s.state.Next {
		next, want := s.state.Next, *w.Expected
		return nil, &events.Error{Code: events.CodeSeqConflict, Session: s.id, ExpectedSeq: &want, ActualSeq: &next,
			Detail: fmt.Sprintf("expected the next seq to be %d, it is %d; read what was appended and decide again", want, next)}
	}
	raws := w.Events
	if w.derive != nil {
		var err error
		if raws, err = w.derive(ctx, s); raws == nil {
			return nil, err
		}
	}
	at := batch.Mark()
	sh := &w.share
	*sh = share{w: w, first: s.state.Next}
	seen := len(batch.Violations())
	size, most := events.KeyReserve(w.Key), s.a.maxCommit()
	c := events.Context{Format: s.state.Format, Vocabulary: s.a.log.Vocabulary(), Now: s.a.cfg.Now().UnixMilli(), EmptyCallID: w.EmptyCallID}
	for i := range len(raws) + len(w.Parsed) {
		c.Next, c.Room = s.state.Next, batch.Room()
		e, err := s.event(w, raws, i, c)
		if err == nil {
			err = s.add(ctx, batch, e)
		}
		if err == nil {
			if size += len(e.Line) + 1; size > most {
				err = &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("the append has more than %d bytes, which is what one commit can hold; split it", most)}
			}
		}
		if err != nil {
			batch.Rewind(at)
			return nil, s.at(w, i, err)
		}
	}
	if err := s.quota(sh); err != nil && !w.takesFence {
		batch.Rewind(at)
		return nil, err
	}
	sh.last = s.state.Next - 1
	sh.warnings = append(sh.warnings, s.near("the append", int64(size), int64(most), "bytes of a commit")...)
	for _, v := range batch.Violations()[seen:] {
		sh.violations = append(sh.violations, &Violation{Rule: v.Rule, Seq: *v.Seq, Detail: v.Detail})
	}
	return sh, nil
}

// at says in an error which session and which event of the request it is about.
func (s *actor) at(w *work, i int, err error) error {
	var e *events.Error
	if !errors.As(err, &e) {
		return err
	}
	c := *e
	c.Session = s.id
	if w.derive == nil {
		c.Index = &i
	}
	return &c
}

// fence refuses whoever is not the session's writer (any more). An append without an epoch
// may say instead at which seq it wants to be: then it cannot overlook another's events.
func (s *actor) fence(w *work) error {
	if w.takesFence {
		return nil
	}
	switch {
	case w.Epoch != nil && *w.Epoch != s.state.Epoch():
		current := s.state.Epoch()
		return &events.Error{Code: events.CodeFenced, Session: s.id, Epoch: &current,
			Detail: fmt.Sprintf("the writer's epoch is %d, the session is at epoch %d; stop writing, or become its writer anew", *w.Epoch, current)}
	case w.Epoch == nil && w.Expected == nil && s.state.Writer != nil:
		current := s.state.Epoch()
		return &events.Error{Code: events.CodeFenced, Session: s.id, Epoch: &current,
			Detail: fmt.Sprintf("the session has a writer (%q, epoch %d); an append needs its epoch or an expectedSeq", s.state.Writer.ID, current)}
	}
	return nil
}

// quota refuses what would make the session larger than it may be, and warns at 80 %.
func (s *actor) quota(sh *share) error {
	for _, q := range []struct {
		have, most int64
		unit       string
	}{
		{int64(s.state.Next), s.a.cfg.MaxSessionEvents, "events of a session"},
		{s.state.LogBytes, s.a.cfg.MaxSessionBytes, "bytes of a session"},
	} {
		if q.have > q.most {
			return &events.Error{Code: events.CodeTooLarge, Session: s.id, Detail: fmt.Sprintf("the append would make %d %s, at most %d are allowed; fork the session at its last turn", q.have, q.unit, q.most)}
		}
		sh.warnings = append(sh.warnings, s.near("the session", q.have, q.most, q.unit)...)
	}
	return nil
}

// near warns of a limit of which 80 % are used.
func (s *actor) near(who string, have, most int64, unit string) []string {
	if have < most-most/5 {
		return nil
	}
	return []string{fmt.Sprintf("%s has %d of at most %d %s", who, have, most, unit)}
}

// event makes the i-th event of a request, for the place that c says.
func (s *actor) event(w *work, raws [][]byte, i int, c events.Context) (*events.Event, error) {
	if raws == nil {
		return w.Parsed[i], nil
	}
	e, err := events.Parse(raws[i], c)
	if err != nil {
		return nil, err
	}
	if most := min(s.a.cfg.MaxEvent, s.a.log.MaxCommit()-1); len(e.Line) > most {
		return nil, &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("the event has %d bytes, at most %d are taken (the smaller of the configured maximum %d and what the server takes, %d)", len(e.Line), most, s.a.cfg.MaxEvent, s.a.log.MaxCommit()-1)}
	}
	if e.Type == typeWriter && e.Kind != events.KindOpaque && !w.takesFence {
		return nil, &events.Error{Code: events.CodeFenced, Detail: "session/writer is appended by POST …/writer alone, which gives it the next epoch"}
	}
	if e.Type == "session/end-seed" && e.Kind != events.KindOpaque && s.state.Writer != nil && e.Fields().Inherited {
		// It takes the fence away, and epochs would begin anew: an old writer's would be the current one.
		current := s.state.Epoch()
		return nil, &events.Error{Code: events.CodeFenced, Epoch: &current, Detail: fmt.Sprintf("session/end-seed with inherited true belongs behind what a fork copied; expected none in a session that has a writer (%q, epoch %d)", s.state.Writer.ID, current)}
	}
	return e, nil
}

// add plans an event on top of the batch. Nodes whose details are not in memory are looked up
// in the log.
func (s *actor) add(ctx context.Context, batch *session.Batch, e *events.Event) error {
	for {
		err := batch.Add(e)
		if err == nil {
			return nil
		}
		var missing *surface.MissingError
		if !errors.As(err, &missing) {
			return err
		}
		if err := s.fillNode(ctx, s.state.Surface.Node(missing.Position)); err != nil {
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
	for line := range c.Lines() {
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
	if !fromLog && s.unborn == nil {
		snap, _, err := s.a.store.Load(ctx, s.id, surface.KeepFingerprints)
		switch {
		case errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}):
			s.a.cfg.Logger.Warn("the session's snapshot is damaged; reading its whole log", "session", s.id, "err", err)
		case err != nil:
			return err
		case snap != nil && snap.Foldable() == nil:
			st = snap.State
		}
	}
	s.state = st
	if *s.a.cfg.Freeze {
		st.Life.Freeze()
	}
	// The head's own commit is read too: a power cut may have taken it from an unsynced log,
	// and others may have its place since.
	head, found := st.StreamSeq, st.StreamSeq == 0
	err := s.readFrom(ctx, head, func(c *events.Commit) error {
		if !found {
			if found = c.StreamSeq == head && c.Chain == st.Chain; !found {
				return errHeadUnknown
			}
			return nil
		}
		return s.fold(ctx, c)
	})
	if err == nil && !found {
		err = errHeadUnknown
	}
	if err != nil {
		s.state = nil
	}
	if errors.Is(err, errHeadUnknown) {
		s.a.cfg.Logger.Error("the session's log lacks what its head was made of; reading the whole log", "session", s.id, "seq", int64(st.Last()))
		return s.load(ctx, h, true)
	}
	return err
}

// readFrom calls f for the commits from stream sequence head on, 0: for all. The last is looked
// at first: nearly always it is the head's own, or there is none, and reading a batch costs more.
func (s *actor) readFrom(ctx context.Context, head uint64, f func(*events.Commit) error) error {
	if s.unborn != nil {
		return nil // it has no log, as was seen when it was adopted
	}
	last, err := s.a.log.LeaderLast(ctx, s.id)
	var garbage *journal.MalformedError
	switch {
	case errors.As(err, &garbage): // commits may lie before it
	case err != nil:
		return err
	case last == nil:
		return nil
	case head > 0 && last.StreamSeq == head, head == 0 && s.state.Chain.NextChain(last) == last.Chain:
		return f(last)
	}
	return s.a.log.ReadToEnd(ctx, s.id, max(head, 1)-1, f)
}

// errHeadUnknown says that the log does not hold the commit that a head ends with.
var errHeadUnknown = errors.New("appender: the head's commit is not in the log")

// fold folds a commit that is in the log.
func (s *actor) fold(ctx context.Context, c *events.Commit) error {
	if c.First != s.state.Next {
		return journal.NotNext(c, s.state.Next)
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
		case err == nil:
			s.keys.add(c)
			return nil
		default:
			return err
		}
		if err != nil {
			return err
		}
	}
}

// takeUp folds a commit that others appended. One that was not made behind the state's last commit
// is refused: the log was rewound, and went on with others.
func (s *actor) takeUp(ctx context.Context, c *events.Commit) error {
	if s.state.Chain.NextChain(c) != c.Chain {
		return &journal.ConflictError{Rewound: true}
	}
	return s.fold(ctx, c)
}

// catchUp brings the state to the log's end: it folds what the log holds behind it, or loads it anew
// when the log is another one by now.
func (s *actor) catchUp(ctx context.Context) error {
	if err := s.confirm(ctx); err != nil {
		s.state = nil
		return err
	}
	if s.state == nil {
		return s.reload(ctx)
	}
	err := s.a.log.CatchUp(ctx, s.id, s.state.StreamSeq, s.state.Next, func(c *events.Commit) error { return s.takeUp(ctx, c) })
	if isRewound(err) {
		s.lost()
		return s.reload(ctx)
	}
	if err != nil {
		s.state = nil
	}
	return err
}

func isRewound(err error) bool {
	var conflict *journal.ConflictError
	return errors.As(err, &conflict) && conflict.Rewound
}

// lost forgets a state after a power cut took acknowledged commits of an unsynced store. The log is
// the truth.
func (s *actor) lost() {
	s.a.cfg.Logger.Error("the session's log lacks what its state was made of; reading it again", "session", s.id, "seq", int64(s.state.Last()))
	s.state = nil
}

// absorb folds what other appenders stored first.
func (s *actor) absorb(ctx context.Context, conflict *journal.ConflictError) error {
	if conflict.Rewound {
		s.lost()
		return s.reload(ctx)
	}
	for _, c := range conflict.Commits {
		if err := s.takeUp(ctx, c); isRewound(err) {
			s.lost()
			return s.reload(ctx)
		} else if err != nil {
			return err
		}
	}
	return s.catchUp(ctx)
}

// closers are the events that repair appends: a new epoch when the session has a writer, so
// that a writer that is thought dead cannot go on behind the repair, and then the closers.
func (s *actor) closers(context.Context) ([][]byte, error) {
	life := s.state.Life
	next := s.state.Next
	closers := life.Closers(s.state.Format, next, s.state.Time)
	if closers == nil || s.state.Writer == nil {
		return closers, nil
	}
	return append([][]byte{s.fenceEvent("repair", s.state.Time)}, life.Closers(s.state.Format, next+1, s.state.Time)...), nil
}

// fenceEvent is the session/writer event that makes somebody the session's writer.
func (s *actor) fenceEvent(writer string, time int64) []byte {
	return fmt.Appendf(nil, `{"type":"session/writer","seq":%d,"time":%d,"ignorable":true,"data":{"writer":%s,"epoch":%d}}`,
		s.state.Next, time, events.Quote(writer), s.state.Epoch()+1)
}
