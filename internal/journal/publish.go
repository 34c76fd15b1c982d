package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
)

// JetStream's error codes that a publish tells apart.
const (
	errWrongLastSeq         = 10071 // wrong last sequence: N
	errWrongLastSeqConstant = 10164 // the same without the number, from replicated streams
	errDuplicateInFlight    = 10158 // the same message id is being stored right now
	errMessageTooLarge      = 10054
	errStoreFailed          = 10077 // its text says why
	errNoPeers              = 10005 // too few servers for the replicas
)

// ConflictError says that the session's log went on behind the writer's back: Commits are the
// first that follow the one that the writer took for the last; there may be more. Rewound means the opposite: the log does not
// hold the commit that the writer took for the last any more, whether or not it went on with others.
type ConflictError struct {
	Commits []*events.Commit
	Rewound bool
}

func (e *ConflictError) Error() string {
	if e.Rewound {
		return "the log lacks the commit that was taken for its last"
	}
	return fmt.Sprintf("%d other commits were stored first", len(e.Commits))
}

// apiError is an error that the server answered.
type apiError struct {
	Code        int    `json:"code"`
	ErrCode     int    `json:"err_code"`
	Description string `json:"description"`
}

func (e *apiError) Error() string {
	return fmt.Sprintf("%s (%d)", e.Description, e.ErrCode)
}

// Publish stores the commit behind the session's commit at stream sequence after (0: it is the
// first) and sets c.StreamSeq. It returns only once the outcome is known, or the retry budget
// is spent:
//
//   - nil: committed. duplicate says that an earlier attempt had stored it already.
//   - *ConflictError: not stored and never will be, since others were first.
//   - *events.Error of code outcome-unknown: the budget is spent and nobody knows; the same
//     commit may be published again at any time.
//   - *events.Error of another code, or ctx's error before anything was sent: not stored.
func (j *Journal) Publish(ctx context.Context, c *events.Commit, after uint64) (duplicate bool, err error) {
	return j.PublishSince(ctx, j.Reconnects(), c, after)
}

// PublishSince is Publish for one who knows since when the log ends as it thinks: made is what
// Reconnects was then.
func (j *Journal) PublishSince(ctx context.Context, made uint64, c *events.Commit, after uint64) (duplicate bool, err error) {
	conn := j.conn()

	if err := ctx.Err(); err != nil {
		return false, err
	}
	seq, dup, err := j.publishOnce(ctx, conn, &made, c, after)
	if err == nil {
		c.StreamSeq = seq
		return dup, nil
	}
	// Once something was sent, the caller going away must not leave the outcome open.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), j.cfg.RetryBudget)
	defer cancel()
	var last error
	conflicts := 0
	for attempt, pause := 0, 50*time.Millisecond; ; attempt++ {
		if attempt > 0 {
			if seq, dup, err = j.publishOnce(ctx, conn, &made, c, after); err == nil {
				c.StreamSeq = seq
				return dup, nil
			}
		}
		last = err
		conflict := isConflict(err)
		if e := definite(c, err, j.MaxCommit()); e != nil && attempt == 0 {
			return false, e
		}
		others, rerr := j.after(ctx, c, after)
		var malformed *MalformedError
		switch {
		case errors.As(rerr, &malformed):
			return false, malformed.Err // the log went on with something that is no commit
		case rerr != nil:
			last = rerr
		case len(others) > 0:
			for _, o := range others {
				if o.ID == c.ID {
					c.StreamSeq = o.StreamSeq
					return true, nil
				}
			}
			return false, &ConflictError{Commits: others}
		case errors.Is(err, errNotBehind):
			return false, &ConflictError{Rewound: true}
		case conflict:
			// A conflict with nothing new behind it: the log is shorter than the writer
			// thinks. A leader that has just changed may say so for a moment.
			if conflicts++; conflicts >= 3 {
				return false, &ConflictError{Rewound: true}
			}
		}
		// Nothing new there: undecided. The same bytes with the same id and the same
		// expectation are stored once at most, however often they are sent.
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return false, &events.Error{Code: events.CodeOutcomeUnknown, Session: c.Session, Commit: c.ID, Cause: last,
				Detail: fmt.Sprintf("whether commit %s was stored could not be found out within %v (%v); repeat the append with expectedSeq to find out safely", c.ID, j.cfg.RetryBudget, last)}
		}
		pause = min(2*pause, time.Second)
	}
}

// enough is how many commits in flight make a connection busy: fewer share its writes better
// than they would run side by side.
const enough = 64

// conn returns the connection for the next publish: the first that is not busy, or else
// whichever has least to do.
func (j *Journal) conn() *acks {
	least := j.acks[0]
	for _, a := range j.acks {
		n := a.flying.Load()
		if n < enough {
			return a
		}
		if n < least.flying.Load() {
			least = a
		}
	}
	return least
}

// definite returns the error for the caller when err says for certain that nothing was stored
// and trying again is no use.
func definite(c *events.Commit, err error, most int) error {
	var api *apiError
	switch {
	case errors.Is(err, nats.ErrMaxPayload), errors.As(err, &api) && api.ErrCode == errMessageTooLarge:
		return &events.Error{Code: events.CodeTooLarge, Session: c.Session, Cause: err,
			Detail: fmt.Sprintf("the commit has %d bytes, JetStream takes at most %d: %v", len(c.Body), most, err)}
	case errors.As(err, &api) && api.ErrCode == errStoreFailed && strings.HasPrefix(api.Description, "maximum "):
		return &events.Error{Code: events.CodeUnavailable, Session: c.Session, Cause: err,
			Detail: fmt.Sprintf("the stream is full: %v; raise its limits", err)}
	case errors.As(err, &api) && api.Code == 503 && api.ErrCode != errDuplicateInFlight:
		return nil // away for the moment
	case errors.As(err, &api) && !isConflict(err) && api.ErrCode != errDuplicateInFlight:
		return &events.Error{Code: events.CodeUnavailable, Session: c.Session, Cause: err,
			Detail: fmt.Sprintf("JetStream refused to store the commit: %v", err)}
	}
	return nil
}

func isConflict(err error) bool {
	var api *apiError
	return errors.As(err, &api) && (api.ErrCode == errWrongLastSeq || api.ErrCode == errWrongLastSeqConstant)
}

// message carries a commit to the server, and then another.
type message struct {
	nats.Msg
	header    *events.CommitHeader
	id, after [1]string
}

var messages = sync.Pool{New: func() any {
	m := &message{header: events.NewCommitHeader()}
	m.Header = m.header.Header
	m.Header[nats.MsgIdHdr], m.Header[nats.ExpectedLastSubjSeqHdr] = m.id[:], m.after[:]
	return m
}}

func (m *message) fill(c *events.Commit, after uint64) {
	m.header.Fill(c)
	m.id[0], m.after[0] = c.ID, strconv.FormatUint(after, 10)
	m.Data = c.Body
}

// errNotBehind says that a commit was not sent, since what it was made for is not in the log.
var errNotBehind = errors.New("journal: the log lacks the commit's predecessor")

// isBehind makes sure that the commit at a stream sequence is the one that c was made to follow, as
// c's chain says.
func (j *Journal) isBehind(ctx context.Context, c *events.Commit, after uint64) error {
	if after == 0 {
		return nil
	}
	last, err := j.Stored(ctx, c.Session, after)
	var garbage *MalformedError
	switch {
	case errors.As(err, &garbage):
		return errNotBehind
	case err != nil:
		return err
	case last == nil || last.Chain.NextChain(c) != c.Chain:
		return errNotBehind
	}
	return nil
}

// publishOnce sends the commit and waits for its ack. When a connection was made anew since made, the
// server may have lost what was not synced, and others' commits may have the same stream sequences since:
// the expectation alone does not tell then that the commit comes behind the one that it was made for.
func (j *Journal) publishOnce(ctx context.Context, conn *acks, made *uint64, c *events.Commit, after uint64) (seq uint64, dup bool, err error) {
	if j.Faults.BeforePublish != nil {
		if err := j.Faults.BeforePublish(c); err != nil {
			return 0, false, err
		}
	}
	if now := j.Reconnects(); now != *made {
		if err := j.isBehind(ctx, c, after); err != nil {
			return 0, false, err
		}
		*made = now
	}
	m := messages.Get().(*message)
	m.fill(c, after)
	m.Subject = j.Subject(c.Session)
	resp, err := conn.send(&m.Msg)
	if err == nil {
		messages.Put(m) // a message without an answer may still be in use
		seq, dup, err = parseAck(resp.Data)
	}
	if j.Faults.AfterPublish != nil {
		err = j.Faults.AfterPublish(c, err)
	}
	return seq, dup, err
}

// parseAck reads the answer to a publish: {"stream":"…","seq":n} nearly always.
func parseAck(b []byte) (seq uint64, dup bool, err error) {
	const before = `"seq":`
	if i := bytes.Index(b, []byte(before)); i > 0 && bytes.HasPrefix(b, []byte(`{"stream":"`)) {
		for i += len(before); i < len(b) && b[i] >= '0' && b[i] <= '9'; i++ {
			seq = seq*10 + uint64(b[i]-'0')
		}
		if seq > 0 && i == len(b)-1 && b[i] == '}' {
			return seq, false, nil
		}
	}
	var ack struct {
		Error     *apiError `json:"error"`
		Seq       uint64    `json:"seq"`
		Duplicate bool      `json:"duplicate"`
	}
	switch err := json.Unmarshal(b, &ack); {
	case err != nil:
		return 0, false, err
	case ack.Error != nil:
		return 0, false, ack.Error
	case ack.Seq == 0:
		return 0, false, fmt.Errorf("unexpected answer to a publish: %s", b)
	}
	return ack.Seq, ack.Duplicate, nil
}

// after reads what follows a stream sequence on the subject of a commit's session, from the
// stream's leader: the reads that decide must not come from a replica that lags. The one that
// follows directly is enough to know: it is the commit, or the commit never will be stored.
func (j *Journal) after(ctx context.Context, c *events.Commit, after uint64) ([]*events.Commit, error) {
	first, err := j.leaderNext(ctx, c.Session, after+1)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return []*events.Commit{first}, nil
}
