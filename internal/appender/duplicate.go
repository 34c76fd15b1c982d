package appender

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"palimpsest/internal/events"
)

// maxKey is the longest idempotency key in bytes.
const maxKey = 255

func checkKey(key string) error {
	for i := 0; i < len(key); i++ {
		if key[i] < 0x20 || key[i] > 0x7E {
			return &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("idempotency key: expected printable ASCII, found byte 0x%02x", key[i])}
		}
	}
	if len(key) > maxKey {
		return &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("idempotency key: expected at most %d bytes, found %d", maxKey, len(key))}
	}
	return nil
}

// keyWindow is the idempotency keys of a session's latest commits, found in the log. A nil
// window is one that was not read yet.
type keyWindow struct {
	span   time.Duration
	now    func() time.Time
	byKey  map[string]keyed
	oldest []keyed // in the order of commits
}

// keyed is an append that a key covers.
type keyed struct {
	key         string
	first, last events.Seq
	streamSeq   uint64
	at          time.Time
}

// add notes the keys of a commit.
func (k *keyWindow) add(c *events.Commit) {
	if k == nil || len(c.Appends) == 0 {
		return
	}
	at, err := time.Parse(time.RFC3339, c.Time)
	if err != nil {
		return // the commit was not made by an appender; it has no key of a caller's
	}
	for _, a := range c.Appends {
		e := keyed{a.Key, a.First, a.Last, c.StreamSeq, at}
		k.byKey[a.Key] = e
		k.oldest = append(k.oldest, e)
	}
	k.forget(k.now()) // a session of appends with new keys alone must not grow for ever
}

// forget drops what is too old.
func (k *keyWindow) forget(now time.Time) {
	for len(k.oldest) > 0 && now.Sub(k.oldest[0].at) > k.span {
		if e := k.oldest[0]; k.byKey[e.key] == e {
			delete(k.byKey, e.key)
		}
		k.oldest = k.oldest[1:]
	}
}

// find returns the append that a key covers, if it is young enough.
func (k *keyWindow) find(key string, now time.Time) (keyed, bool) {
	k.forget(now)
	e, ok := k.byKey[key]
	return e, ok
}

func (k *keyWindow) bytes() int {
	if k == nil {
		return 0
	}
	return 128 + 160*len(k.oldest)
}

// readKeys reads back the commits of the window. What a replica lacks is read from the leader.
func (s *actor) readKeys(ctx context.Context) error {
	now := s.a.cfg.Now()
	k := &keyWindow{span: s.a.cfg.KeyWindow, now: s.a.cfg.Now, byKey: map[string]keyed{}}
	if s.state.StreamSeq > 0 {
		var last uint64
		// Commits carry the appenders' clocks, the log the server's: read a little more.
		err := s.a.log.Since(ctx, s.id, now.Add(-s.a.cfg.KeyWindow-time.Minute), func(c *events.Commit) error {
			last = c.StreamSeq
			if c.StreamSeq <= s.state.StreamSeq {
				k.add(c)
			}
			return nil
		})
		if err != nil {
			return err
		}
		if last < s.state.StreamSeq {
			if last == 0 { // nothing was stored in that time, or a replica that lags says so
				end, err := s.a.log.LeaderLast(ctx, s.id)
				if err != nil {
					return err
				}
				if end == nil {
					return s.lostLog()
				}
				at, perr := time.Parse(time.RFC3339, end.Time)
				if perr == nil && now.Sub(at) > s.a.cfg.KeyWindow {
					s.keys = k
					return nil
				}
			}
			err = s.a.log.LeaderTail(ctx, s.id, last, func(c *events.Commit) error {
				if c.StreamSeq <= s.state.StreamSeq {
					k.add(c)
				}
				return nil
			})
			if err != nil {
				return err
			}
		}
	}
	s.keys = k
	return nil
}

// recognise answers an append whose key the session has seen: with the original receipt, or key-reused
// when the events are others. An append with an expected seq is recognised by that seq, at any later
// time; one that would be stored there now, under a key that was used elsewhere, is refused.
func (s *actor) recognise(ctx context.Context, w *work) (*Receipt, error) {
	if w.Key == "" || w.Expected != nil && w.derive == nil && *w.Expected != s.state.Next {
		return nil, nil
	}
	if s.keys == nil {
		if err := s.readKeys(ctx); err != nil {
			return nil, err
		}
	}
	e, ok := s.keys.find(w.Key, s.a.cfg.Now())
	if !ok {
		return nil, nil
	}
	if w.Expected != nil && e.first != *w.Expected {
		return nil, &events.Error{Code: events.CodeKeyReused, Session: s.id, Seq: &e.first,
			Detail: fmt.Sprintf("the idempotency key %q was used for the events at seqs %d to %d, and not at the expected seq %d: when they are the same they are stored, and new events need a new key", w.Key, e.first, e.last, *w.Expected)}
	}
	if w.derive != nil {
		return s.recogniseDerived(ctx, w, e)
	}
	last, err := s.stored(ctx, w, e.first)
	if err != nil {
		return nil, err
	}
	if last == nil || e.last-e.first+1 != events.Seq(len(w.Events)) {
		return nil, s.keyReused(w, e.first, e.last)
	}
	return s.original(w, e.first, last), nil
}

// recogniseDerived answers a request whose events were made from the state then, which is
// another now: the key and the kind of request tell that it is the same.
func (s *actor) recogniseDerived(ctx context.Context, w *work, k keyed) (*Receipt, error) {
	c, err := s.a.log.Locate(ctx, s.id, k.first)
	if err != nil {
		return nil, err
	}
	e, _, err := s.a.readEvent(ctx, s.id, k.first, s.state.Format)
	if err != nil {
		return nil, err
	}
	if c == nil || e == nil {
		return nil, s.lostLog()
	}
	same := e.Type == w.begins
	if same && w.same != nil {
		if w.sameAt > 0 {
			if e, _, err = s.a.readEvent(ctx, s.id, k.first+w.sameAt, s.state.Format); err != nil {
				return nil, err
			}
		}
		same = e != nil && w.same(e, s.state.Format)
	}
	if !same {
		return nil, s.keyReused(w, k.first, k.last)
	}
	return &Receipt{Session: s.id, FirstSeq: k.first, LastSeq: k.last, Commit: c.ID, Duplicate: true, Digest: c.Digest.String()}, nil
}

func (s *actor) keyReused(w *work, first, last events.Seq) error {
	return &events.Error{Code: events.CodeKeyReused, Session: s.id, Seq: &first,
		Detail: fmt.Sprintf("the idempotency key %q was used for the events at seqs %d to %d, which are others; use a new key for new events", w.Key, first, last)}
}

func (s *actor) original(w *work, first events.Seq, last *events.Commit) *Receipt {
	return &Receipt{Session: s.id, FirstSeq: first, LastSeq: first + events.Seq(len(w.Events)) - 1, Commit: last.ID, Duplicate: true, Digest: last.Digest.String()}
}

// duplicateOf answers an append whose expected seq has been passed: when the same events lie
// at those seqs already, the original receipt; else the refusal. Who gave a key then must give
// it again, and under a fence the writer must be the one who was it then.
func (s *actor) duplicateOf(ctx context.Context, w *work, refusal error) (*Receipt, error) {
	first := *w.Expected
	if !errors.Is(refusal, events.ErrSeqConflict) && !errors.Is(refusal, events.ErrFenced) ||
		first >= s.state.Next || w.derive != nil || w.Parsed != nil {
		return nil, refusal
	}
	c, err := s.a.log.Locate(ctx, s.id, first)
	if err != nil {
		return nil, err
	}
	if c == nil {
		return nil, refusal
	}
	if w.Epoch != nil {
		then, err := s.epochAt(ctx, first)
		if err != nil {
			return nil, err
		}
		if then != *w.Epoch {
			return nil, refusal
		}
	}
	last, err := s.stored(ctx, w, first)
	if err != nil {
		return nil, err
	}
	if w.Key != "" {
		key := ""
		for _, a := range c.Appends {
			if a.First == first {
				key = a.Key
			}
		}
		switch {
		case key != w.Key:
			return nil, refusal
		case last == nil:
			return nil, s.keyReused(w, first, first+events.Seq(len(w.Events))-1)
		}
	}
	if last == nil {
		return nil, refusal
	}
	return s.original(w, first, last), nil
}

// epochAt is the writer's epoch that was in force for an event at seq. Only a retry by a
// writer that has been replaced needs to read for it.
func (s *actor) epochAt(ctx context.Context, seq events.Seq) (events.Seq, error) {
	if s.state.Writer == nil || s.state.Writer.Seq < seq {
		return s.state.Epoch(), nil
	}
	var epoch events.Seq
	stop := errors.New("stop")
	err := s.a.log.ReadToEnd(ctx, s.id, 0, func(c *events.Commit) error {
		for line := range c.Lines() {
			var e events.Event
			if err := events.ParseCanonical(&e, line, c.Format, s.a.log.Vocabulary()); err != nil {
				return err
			}
			switch {
			case e.Seq >= seq:
				return stop
			case e.Type == typeWriter:
				if f := e.Fields(); f.Epoch > epoch {
					epoch = f.Epoch
				}
			case e.Type == "session/end-seed" && e.Fields().Inherited:
				epoch = 0
			}
		}
		return nil
	})
	if err != nil && !errors.Is(err, stop) {
		return 0, err
	}
	return epoch, nil
}

// stored returns the commit that holds the last of the request's events when the log holds
// exactly these events from seq first on, nil when it holds others. Times count only when the
// caller gave them.
func (s *actor) stored(ctx context.Context, w *work, first events.Seq) (*events.Commit, error) {
	c, err := s.a.log.Locate(ctx, s.id, first)
	if err != nil || c == nil {
		return nil, err
	}
	next, end := first, first+events.Seq(len(w.Events))
	var last *events.Commit
	enough := errors.New("enough")
	compare := func(c *events.Commit) error {
		for line, rest := []byte(nil), c.Body; len(rest) > 0 && next < end; {
			line, rest = events.CutLine(rest)
			var have events.Event
			if err := events.ParseCanonical(&have, line, s.state.Format, s.a.log.Vocabulary()); err != nil {
				return err
			}
			if have.Seq < next {
				continue
			}
			given, err := events.Parse(w.Events[next-first], events.Context{
				Format: s.state.Format, Vocabulary: s.a.log.Vocabulary(), Next: next, Now: have.Time})
			if err != nil || !bytes.Equal(given.Line, line) {
				return enough
			}
			last, next = c, next+1
		}
		if next == end {
			return enough
		}
		return nil
	}
	if err = compare(c); err == nil {
		err = s.a.log.LeaderTail(ctx, s.id, c.StreamSeq, compare)
	}
	if err != nil && !errors.Is(err, enough) {
		return nil, err
	}
	if next != end {
		return nil, nil
	}
	return last, nil
}

// lostLog says that a session's log is gone although its state came from it.
func (s *actor) lostLog() error { return lostLog(s.id) }

func lostLog(session string) error {
	return &events.Error{Code: events.CodeCorrupt, Session: session, Detail: "the session's log is gone; run projector verify"}
}
