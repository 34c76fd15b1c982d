package client

import (
	"context"
	"fmt"
)

// Writer is one process's right to write to a session, until somebody else takes it. Its
// appends go one after another, each with the writer's epoch and the seq that must come next,
// so that none can overlook another's events. It is safe for concurrent use.
type Writer struct {
	s     *Session
	name  string
	epoch Seq

	turn   chan struct{} // holds one token while an append is in flight; guards the two below
	next   Seq
	fenced error // set for good when somebody else took over
}

// TakeWriter makes the caller the session's writer under a name for people and logs: 1 to 200
// bytes of UTF-8. Whoever was it before gets ErrFenced from then on. Takes ExpectedSeq, which
// makes sure that nothing was appended that the caller has not seen, and IdempotencyKey.
//
// It is safe to lose the answer: without an ExpectedSeq a repeated request is known by its key,
// which is made up when none is given, and gets the epoch that it took. With an ExpectedSeq the lost attempt may be what ErrSeqConflict is then due to: the error is
// ErrOutcomeUnknown as well.
func (s *Session) TakeWriter(ctx context.Context, name string, opts ...AppendOption) (*Writer, error) {
	o := readOptions(opts)
	if o.epoch != nil {
		return nil, bad(s.id, "expected no option but ExpectedSeq and IdempotencyKey")
	}
	o.nameIt()
	body, err := object(s.id, map[string]any{"writer": name})
	if err != nil {
		return nil, err
	}
	r, err := s.post("/writer", body, o)
	if err != nil {
		return nil, err
	}
	r.knownBy(o)
	var out taken
	if _, err := s.c.do(ctx, r, &out); err != nil {
		return nil, err
	}
	return &Writer{s: s, name: name, epoch: out.Epoch, next: out.LastSeq + 1, turn: make(chan struct{}, 1)}, nil
}

type taken struct {
	Receipt
	Epoch Seq `json:"epoch"`
}

func (r *taken) validate(session string) error {
	if r.Epoch < 1 {
		return fmt.Errorf("expected an epoch, found %d", r.Epoch)
	}
	return r.Receipt.validate(session)
}

// Session returns the session that is written to.
func (w *Writer) Session() *Session { return w.s }

// Name returns the writer's name.
func (w *Writer) Name() string { return w.name }

// Epoch returns the writer's epoch, which grows by one with each writer of the session.
func (w *Writer) Epoch() Seq { return w.epoch }

// Next returns the seq that the writer's next event gets. It waits for an append in flight.
func (w *Writer) Next() Seq {
	w.turn <- struct{}{}
	defer w.release()
	return w.next
}

// Append appends events, all or none, at the writer's next seq, and returns once they are
// committed. It is repeated like Session.Append.
//
// After ErrFenced the writer is of no use: every further append is refused without being sent.
// After ErrSeqConflict somebody appended with an ExpectedSeq of their own: read what it was and
// call Sync. After ErrOutcomeUnknown the same events again find out whether they were stored;
// other ones get ErrSeqConflict if they were.
func (w *Writer) Append(ctx context.Context, events ...Event) (*Receipt, error) {
	return w.do(ctx, func(o []AppendOption) (*Receipt, error) { return w.s.Append(ctx, events, o...) })
}

// Compact is Session.Compact with the writer's epoch and next seq.
func (w *Writer) Compact(ctx context.Context, c Compaction) (*Receipt, error) {
	return w.do(ctx, func(o []AppendOption) (*Receipt, error) { return w.s.Compact(ctx, c, o...) })
}

// Prune is Session.Prune with the writer's epoch and next seq.
func (w *Writer) Prune(ctx context.Context, seq Seq, content any) (*Receipt, error) {
	return w.do(ctx, func(o []AppendOption) (*Receipt, error) { return w.s.Prune(ctx, seq, content, o...) })
}

// Sync reads the session's next seq anew, after which the writer goes on from there. The error
// is ErrFenced when somebody else is the session's writer.
func (w *Writer) Sync(ctx context.Context) (Seq, error) {
	if err := w.acquire(ctx); err != nil {
		return NoSeq, err
	}
	defer w.release()
	st, err := w.s.Status(ctx)
	if err != nil {
		return NoSeq, err
	}
	if st.Writer == nil || st.Writer.Epoch != w.epoch {
		var current Seq
		if st.Writer != nil {
			current = st.Writer.Epoch
		}
		w.fenced = &Error{Code: "fenced", Session: w.s.id, Epoch: &current, Detail: fmt.Sprintf("the writer's epoch is %d, the session is at epoch %d", w.epoch, current)}
		return NoSeq, w.fenced
	}
	w.next = st.NextSeq
	return w.next, nil
}

// do carries out one append when its turn comes.
func (w *Writer) do(ctx context.Context, send func([]AppendOption) (*Receipt, error)) (*Receipt, error) {
	if err := w.acquire(ctx); err != nil {
		return nil, err
	}
	defer w.release()
	r, err := send([]AppendOption{ExpectedSeq(w.next), Epoch(w.epoch)})
	if isFenced(err) {
		w.fenced = err
	}
	if err != nil {
		return nil, err
	}
	w.next = r.LastSeq + 1
	return r, nil
}

// isFenced reports whether a call ended with the service's word that the writer was replaced.
func isFenced(err error) bool {
	e, ok := err.(*Error) //nolint:errorlint // the last answer, not one that it wraps
	return ok && e.Code == "fenced"
}

// acquire waits for the appends before.
func (w *Writer) acquire(ctx context.Context) error {
	select {
	case w.turn <- struct{}{}:
	case <-ctx.Done():
		return &Error{Code: codeCanceled, Session: w.s.id, Cause: context.Cause(ctx), Detail: "nothing was sent"}
	}
	if w.fenced != nil {
		w.release()
		return w.fenced
	}
	return nil
}

func (w *Writer) release() { <-w.turn }
