package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/natsext"

	"palimpsest/internal/events"
)

// Batches in which ranges are read.
const (
	readBatch      = 256
	readBatchBytes = 4 << 20
)

// leaderNext returns the session's first commit at or behind a stream sequence, read from the
// stream's leader. jetstream.ErrMsgNotFound says that there is none.
func (j *Journal) leaderNext(ctx context.Context, session string, from uint64) (*events.Commit, error) {
	return j.leaderGet(ctx, map[string]any{"seq": from, "next_by_subj": j.Subject(session)})
}

// Stored returns the session's commit at a stream sequence; nil when there is none.
func (j *Journal) Stored(ctx context.Context, session string, streamSeq uint64) (*events.Commit, error) {
	c, err := j.leaderNext(ctx, session, streamSeq)
	if errors.Is(err, jetstream.ErrMsgNotFound) || err == nil && c.StreamSeq != streamSeq {
		return nil, nil
	}
	return c, err
}

// LeaderLast returns the session's last commit, read from the stream's leader; nil when the
// session has none.
func (j *Journal) LeaderLast(ctx context.Context, session string) (*events.Commit, error) {
	c, err := j.leaderGet(ctx, map[string]any{"last_by_subj": j.Subject(session)})
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	return c, err
}

func (j *Journal) leaderGet(ctx context.Context, req map[string]any) (*events.Commit, error) {
	m, err := j.leaderMessage(ctx, j.cfg.Stream, req)
	if err != nil {
		return nil, err
	}
	return j.commit(m.Header, m.Data, m.Subject, m.Sequence)
}

// leaderMessage reads one message from the leader of a stream.
func (j *Journal) leaderMessage(ctx context.Context, stream string, req map[string]any) (*jetstream.RawStreamMsg, error) {
	b, err := json.Marshal(req)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, j.cfg.ReadTimeout)
	defer cancel()
	resp, err := j.conns.Read.RequestWithContext(ctx, j.cfg.APIPrefix+".STREAM.MSG.GET."+stream, b)
	if err != nil {
		return nil, j.unavailable(err)
	}
	var got struct {
		Error   *apiError `json:"error"`
		Message *struct {
			Subject string    `json:"subject"`
			Seq     uint64    `json:"seq"`
			Header  []byte    `json:"hdrs"`
			Data    []byte    `json:"data"`
			Time    time.Time `json:"time"`
		} `json:"message"`
	}
	if err := json.Unmarshal(resp.Data, &got); err != nil {
		return nil, fmt.Errorf("unexpected answer to a read: %w", err)
	}
	switch {
	case got.Error != nil && got.Error.ErrCode == int(jetstream.JSErrCodeMessageNotFound):
		return nil, jetstream.ErrMsgNotFound
	case got.Error != nil:
		return nil, j.unavailable(got.Error)
	case got.Message == nil:
		return nil, fmt.Errorf("unexpected answer to a read: %s", resp.Data)
	}
	m := &jetstream.RawStreamMsg{Subject: got.Message.Subject, Sequence: got.Message.Seq, Data: got.Message.Data, Time: got.Message.Time}
	if len(got.Message.Header) > 0 {
		m.Header, _ = nats.DecodeHeadersMsg(got.Message.Header) // a message without headers is no commit
	}
	return m, nil
}

// commit reads a stored message and makes sure that it lies where its session belongs.
func (j *Journal) commit(h nats.Header, body []byte, subject string, seq uint64) (*events.Commit, error) {
	c, err := events.ParseCommit(h, body, seq)
	if err == nil && !j.isSubject(subject, c.Session) {
		err = &events.Error{Code: events.CodeCorrupt, Session: c.Session, Detail: fmt.Sprintf("stream sequence %d: a commit of session %q lies on subject %s", seq, c.Session, subject)}
	}
	if err != nil {
		return nil, &MalformedError{StreamSeq: seq, Subject: subject, Body: body, Header: h, Err: err}
	}
	if len(body) <= copiedBody {
		c.Body = bytes.Clone(body)
	}
	return c, nil
}

// A body is a part of the message that it came in, whose headers stay in memory with it. A body of up
// to copiedBody bytes, beside which they are much, is copied.
const (
	copiedBody = 2 << 10
	withBody   = 1 << 10 // what else the memory of a body that was not copied holds, about
)

// Held returns about how many bytes of memory whoever uses a part of the body of a commit that was read
// keeps with it.
func Held(c *events.Commit) int {
	if len(c.Body) <= copiedBody {
		return len(c.Body) + len(c.Body)/8 // as the allocator rounds up
	}
	return len(c.Body) + withBody
}

// MalformedError is a stored message that no appender wrote.
type MalformedError struct {
	StreamSeq uint64
	Subject   string
	Header    nats.Header
	Body      []byte
	Err       error // an *events.Error of code log-corrupt
}

func (e *MalformedError) Error() string { return e.Err.Error() }

// Unwrap returns the *events.Error.
func (e *MalformedError) Unwrap() error { return e.Err }

// Read calls f for the session's commits behind a stream sequence, in order, as far as the
// replica that answers has them. A malformed message ends it with a *MalformedError.
func (j *Journal) Read(ctx context.Context, session string, after uint64, f func(*events.Commit) error) error {
	return j.readFrom(ctx, session, batchStart{Seq: after + 1}, f)
}

// Since is Read for the commits that were stored from a point in time on, by the server's clock.
func (j *Journal) Since(ctx context.Context, session string, t time.Time, f func(*events.Commit) error) error {
	return j.readFrom(ctx, session, batchStart{Time: &t}, f)
}

func (j *Journal) readFrom(ctx context.Context, session string, start batchStart, f func(*events.Commit) error) error {
	for {
		msgs, more, err := j.batch(ctx, j.Subject(session), start)
		if err != nil {
			return err
		}
		for _, m := range msgs {
			c, err := j.commit(m.Header, m.Data, m.Subject, m.Sequence)
			if err != nil {
				return err
			}
			if err := f(c); err != nil {
				return err
			}
			start = batchStart{Seq: c.StreamSeq + 1}
		}
		if !more {
			return nil
		}
	}
}

// batch reads up to readBatch messages of a subject from a start on, and reports whether there
// are more.
func (j *Journal) batch(ctx context.Context, subject string, start batchStart) (out []*jetstream.RawStreamMsg, more bool, err error) {
	return j.batchOf(ctx, j.cfg.Stream, subject, readBatch, readBatchBytes, start)
}

// BucketBatch reads up to most messages of the stream behind a KV bucket on, markers of deleted
// keys too, in the order in which they were written: those of the keys that match a filter, from
// a revision on. more reports whether there are others behind them.
func (j *Journal) BucketBatch(ctx context.Context, bucket, filter string, from uint64, most int) (out []*jetstream.RawStreamMsg, more bool, err error) {
	return j.batchOf(ctx, "KV_"+bucket, "$KV."+bucket+"."+filter, most, bucketBatchBytes, batchStart{Seq: from})
}

// bucketBatchBytes is how many bytes of messages a batch of a bucket has, about: for each batch
// the server counts what is pending, over all subjects, so it pays to have few.
const bucketBatchBytes = 16 << 20

// BucketHas reports whether a KV bucket has a message that BucketBatch would give. Asking costs
// less than an empty batch, for which the server counts what is pending.
func (j *Journal) BucketHas(ctx context.Context, bucket, filter string, from uint64) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, j.cfg.ReadTimeout)
	defer cancel()
	req := fmt.Appendf(nil, `{"seq":%d,"next_by_subj":"$KV.%s.%s"}`, from, bucket, filter)
	m, err := j.conns.Read.RequestWithContext(ctx, j.cfg.APIPrefix+".DIRECT.GET.KV_"+bucket, req)
	if err != nil {
		return false, j.unavailable(err)
	}
	switch status := m.Header.Get("Status"); {
	case status == "", m.Header.Get(jetstream.SequenceHeader) != "": // the status is the message's own
		return true, nil
	case status == "404":
		return false, nil
	default:
		return false, j.unavailable(fmt.Errorf("bucket %s: status %s %s", bucket, status, m.Header.Get("Description")))
	}
}

// batchStart is where a batch begins: at a stream sequence, or at a point in time.
type batchStart struct {
	Seq  uint64     `json:"seq,omitempty"`
	Time *time.Time `json:"start_time,omitempty"`
}

func (j *Journal) batchOf(ctx context.Context, stream, subject string, most, mostBytes int, start batchStart) (out []*jetstream.RawStreamMsg, more bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, j.cfg.ReadTimeout)
	defer cancel()
	req, err := json.Marshal(struct {
		batchStart
		NextFor  string `json:"next_by_subj"`
		Batch    int    `json:"batch"`
		MaxBytes int    `json:"max_bytes"`
	}{start, subject, most, mostBytes})
	if err != nil {
		return nil, false, err
	}
	msgs, err := natsext.RequestMany(ctx, j.conns.Read, j.cfg.APIPrefix+".DIRECT.GET."+stream, req)
	if err != nil {
		return nil, false, j.unavailable(err)
	}
	for m, err := range msgs {
		if err != nil {
			return nil, false, j.unavailable(err)
		}
		got, pending, err := batched(m)
		switch status := m.Header.Get("Status"); {
		case err == nil:
			out, more = append(out, got), pending > 0
		case m.Header != nil && status == "204": // the end of the batch
			return out, more, nil
		case m.Header != nil && status == "404":
			return out, false, nil
		case m.Header != nil && status != "":
			return nil, false, j.unavailable(fmt.Errorf("stream %s: status %s %s", stream, status, m.Header.Get("Description")))
		case len(out) > 0: // up to here it can be read
			return out, true, nil
		default:
			return j.unreadable(ctx, stream, subject, start)
		}
	}
	if err := ctx.Err(); err != nil && len(out) == 0 { // no answer, which is not the log's end
		return nil, false, j.unavailable(err)
	}
	return out, more, nil
}

// batched reads a message of a batch. The server says what it is and where it lies in headers that
// it puts behind those of the message, which may have some of the same names: the last ones count.
// An error says that it is none: the server's word on the batch, or a message whose headers the
// client cannot read.
func batched(m *nats.Msg) (*jetstream.RawStreamMsg, uint64, error) {
	last := func(name string) string {
		if v := m.Header[name]; len(v) > 0 {
			return v[len(v)-1]
		}
		return ""
	}
	seq, err := strconv.ParseUint(last(jetstream.SequenceHeader), 10, 64)
	if err != nil {
		return nil, 0, fmt.Errorf("header %s: %w", jetstream.SequenceHeader, err)
	}
	pending, err := strconv.ParseUint(last("Nats-Num-Pending"), 10, 64)
	if err != nil {
		return nil, 0, fmt.Errorf("header Nats-Num-Pending: %w", err)
	}
	at, err := time.Parse(time.RFC3339Nano, last(jetstream.TimeStampHeaer))
	if err != nil {
		return nil, 0, fmt.Errorf("header %s: %w", jetstream.TimeStampHeaer, err)
	}
	return &jetstream.RawStreamMsg{Subject: last(jetstream.SubjectHeader), Sequence: seq, Header: m.Header, Data: m.Data, Time: at}, pending, nil
}

// unreadable reads the first message of a batch in another way, which needs no headers to say where
// it lies.
func (j *Journal) unreadable(ctx context.Context, stream, subject string, start batchStart) ([]*jetstream.RawStreamMsg, bool, error) {
	req := map[string]any{"seq": start.Seq, "next_by_subj": subject}
	if start.Time != nil {
		req = map[string]any{"start_time": start.Time, "next_by_subj": subject}
	}
	m, err := j.leaderMessage(ctx, stream, req)
	if err != nil {
		return nil, false, err
	}
	return []*jetstream.RawStreamMsg{m}, true, nil
}

// ReadToEnd is Read up to the very end of the log: what a replica does not have yet is read
// from the stream's leader.
func (j *Journal) ReadToEnd(ctx context.Context, session string, after uint64, f func(*events.Commit) error) error {
	last := after
	err := j.Read(ctx, session, after, func(c *events.Commit) error {
		last = c.StreamSeq
		return f(c)
	})
	if err != nil {
		return err
	}
	return j.LeaderTail(ctx, session, last, f)
}

// ReadOn is ReadToEnd for one who knows which seq comes next, and to whom a log with a hole must not
// look like a whole one: a commit that begins with another seq ends it with the error of NotNext. With
// NoSeq the first commit may begin with any.
func (j *Journal) ReadOn(ctx context.Context, session string, after uint64, next events.Seq, f func(*events.Commit) error) error {
	return j.ReadToEnd(ctx, session, after, func(c *events.Commit) error {
		if next != events.NoSeq && c.First != next {
			return j.Hole(ctx, c, next)
		}
		next = c.Last + 1
		return f(c)
	})
}

// NotNext is the error of a commit that does not begin with the seq that comes next in its session.
func NotNext(c *events.Commit, next events.Seq) *events.Error {
	return &events.Error{Code: events.CodeCorrupt, Rule: events.RuleSeqNotContiguous, Session: c.Session, Seq: &c.First, ExpectedSeq: &next, ActualSeq: &c.First,
		Detail: fmt.Sprintf("stream sequence %d: expected a commit from seq %d on, found one from %d: messages of the log are missing, or were written around the appender; `projector verify` says more, and from seq %d on it can be read", c.StreamSeq, next, c.First, c.First)}
}

// Hole is NotNext, unless the session is being erased: then its messages go one by one.
func (j *Journal) Hole(ctx context.Context, c *events.Commit, next events.Seq) error {
	if _, err := j.LeaderLast(ctx, c.Session); errors.Is(err, events.ErrErased) {
		return err
	}
	return NotNext(c, next)
}

// LeaderTail calls f for the session's commits behind a stream sequence, one read each from
// the stream's leader. It is for the last few. It ends where the log ended when it was called:
// it does not run after a writer that is faster.
func (j *Journal) LeaderTail(ctx context.Context, session string, after uint64, f func(*events.Commit) error) error {
	return j.CatchUp(ctx, session, after, events.NoSeq, f)
}

// farBehind is how many events behind the log's end catching up reads in batches.
const farBehind = 256

// CatchUp is LeaderTail for one who knows which seq comes next (NoSeq: who does not): a single
// new commit, the usual case, then costs one read, as does finding that there is none. A log that ends
// before that seq is a *ConflictError that says Rewound.
func (j *Journal) CatchUp(ctx context.Context, session string, after uint64, next events.Seq, f func(*events.Commit) error) error {
	last, err := j.LeaderLast(ctx, session)
	var bad *MalformedError
	switch {
	case errors.As(err, &bad): // commits may lie before it
	case err != nil:
		return err
	case last == nil || last.StreamSeq <= after:
		if next != events.NoSeq && after > 0 && (last == nil || last.StreamSeq < after || last.Last+1 != next) {
			return &ConflictError{Rewound: true}
		}
		return nil
	case last.First == next:
		return f(last)
	case next != events.NoSeq && last.First-next > farBehind:
		return j.ReadToEnd(ctx, session, after, f)
	}
	for {
		c, err := j.leaderNext(ctx, session, after+1)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := f(c); err != nil {
			return err
		}
		if after = c.StreamSeq; last != nil && after >= last.StreamSeq {
			return nil
		}
	}
}

// Locate returns the commit that holds an event, nil when the log ends before that seq, or for NoSeq. It
// bisects over the first seqs of the session's commits; there is no index to keep. A seq that the
// log lacks before its end is the error of NotNext, and one that may lie in a message which is no commit
// is a *MalformedError: such a message hides no other.
func (j *Journal) Locate(ctx context.Context, session string, seq events.Seq) (*events.Commit, error) {
	last, err := j.LeaderLast(ctx, session)
	lo, hi := uint64(1), uint64(0) // the stream sequences at which the wanted commit may lie
	bad, isBad := malformed(err)
	switch {
	case isBad:
		hi = bad.StreamSeq - 1
	case err != nil || last == nil || seq < 0 || seq > last.Last:
		return nil, err
	case seq >= last.First:
		return last, nil
	default:
		hi = last.StreamSeq - 1
	}
	next, behind := events.Seq(0), last // the seq that comes next before lo, the commit behind hi
	for seq >= 0 && lo <= hi {
		mid := lo + (hi-lo)/2
		c, skipped, err := j.commitFrom(ctx, session, mid, hi)
		if skipped != nil {
			bad = skipped
		}
		switch {
		case err != nil:
			return nil, err
		case c == nil:
			hi = mid - 1
		case c.First > seq: // at or behind mid is too late
			hi, behind = mid-1, c
		case c.Last < seq:
			lo, next = c.StreamSeq+1, c.Last+1
		default:
			return c, nil
		}
	}
	if bad != nil {
		return nil, bad
	}
	return nil, j.Hole(ctx, behind, next)
}

// commitFrom returns the session's first commit from one stream sequence to another, nil when there is
// none. Messages before it that are no commits are skipped, the last of which comes back.
func (j *Journal) commitFrom(ctx context.Context, session string, from, to uint64) (*events.Commit, *MalformedError, error) {
	var skipped *MalformedError
	for from <= to {
		c, err := j.leaderNext(ctx, session, from)
		bad, isBad := malformed(err)
		switch {
		case isBad:
			skipped, from = bad, bad.StreamSeq+1
			continue
		case errors.Is(err, jetstream.ErrMsgNotFound) || err == nil && c.StreamSeq > to:
			return nil, skipped, nil
		}
		return c, skipped, err
	}
	return nil, skipped, nil
}

// malformed returns the error of a message that is no commit, unless it is the tombstone of an erased
// session.
func malformed(err error) (*MalformedError, bool) {
	var bad *MalformedError
	ok := errors.As(err, &bad) && !errors.Is(err, events.ErrErased)
	return bad, ok
}

// CommitID returns the Nats-Msg-Id of the message at a stream sequence, as the stream's leader has
// it; "" when there is none.
func (j *Journal) CommitID(ctx context.Context, streamSeq uint64) (string, error) {
	m, err := j.leaderMessage(ctx, j.cfg.Stream, map[string]any{"seq": streamSeq})
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return m.Header.Get(jetstream.MsgIDHeader), nil
}

// Reconnects grows whenever one of the journal's connections was made anew. It is asked for with
// every delivery.
func (j *Journal) Reconnects() uint64 {
	if j.conns.Made != nil {
		return j.conns.Made.Load()
	}
	n := j.conns.Read.Stats().Reconnects
	for _, c := range j.conns.Publish {
		n += c.Stats().Reconnects
	}
	return n
}

// SessionsOf returns the ids of the sessions of a partition that have a log, unordered.
func (j *Journal) SessionsOf(ctx context.Context, partition int) ([]string, error) {
	commits, _, err := j.subjects(ctx, fmt.Sprintf("%s.%d.*", j.cfg.Prefix, partition))
	return slices.Collect(maps.Keys(commits)), err
}

// Info returns the stream's state.
func (j *Journal) Info(ctx context.Context) (*jetstream.StreamInfo, error) {
	s, err := j.js.Stream(ctx, j.cfg.Stream)
	if err != nil {
		return nil, j.unavailable(err)
	}
	return s.CachedInfo(), nil
}

// Subjects returns how many commits each session has, by session id. Subjects that are no
// session's come back in stray.
func (j *Journal) Subjects(ctx context.Context) (commits map[string]uint64, stray []string, err error) {
	return j.subjects(ctx, j.cfg.Prefix+".>")
}

// subjects is Subjects of those that match a filter.
func (j *Journal) subjects(ctx context.Context, filter string) (commits map[string]uint64, stray []string, err error) {
	s, err := j.js.Stream(ctx, j.cfg.Stream)
	if err != nil {
		return nil, nil, j.unavailable(err)
	}
	info, err := s.Info(ctx, jetstream.WithSubjectFilter(filter))
	if err != nil {
		return nil, nil, j.unavailable(err)
	}
	commits = make(map[string]uint64, len(info.State.Subjects))
	for subject, n := range info.State.Subjects {
		id, err := j.SessionOfSubject(subject)
		if err != nil {
			stray = append(stray, subject)
			continue
		}
		commits[id] = n
	}
	return commits, stray, nil
}
