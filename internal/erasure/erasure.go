// Package erasure owns taking a session away for good: its messages are overwritten in the
// store's files, and a tombstone stands in their place. It knows which streams and buckets hold
// something of a session, not who asks.
package erasure

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/snapshot"
)

// Stream holds one record of every erasure, on erasures.<token>. Nothing is deleted from it.
const Stream = "ERASURES"

const prefix = "erasures."

// buckets are the KV buckets that hold something of a session.
func buckets(all []snapshot.Generation) []string {
	out := []string{journal.HeadersBucket, quarantineBucket}
	for _, g := range all {
		out = append(out, g.Bucket)
	}
	return out
}

const quarantineBucket = "QUARANTINE"

// Eraser erases sessions.
type Eraser struct {
	log     *journal.Journal
	headers *journal.Headers
	js      jetstream.JetStream
	now     func() time.Time
}

// New opens the stream of records.
func New(ctx context.Context, j *journal.Journal, h *journal.Headers) (*Eraser, error) {
	_, err := j.OpenStream(ctx, jetstream.StreamConfig{
		Name: Stream, Description: "Palimpsest: records of erased sessions, see docs/audit.md", Subjects: []string{prefix + "*"},
		DenyDelete: true, DenyPurge: true,
	})
	if err != nil {
		return nil, err
	}
	return &Eraser{j, h, j.JetStream(), time.Now}, nil
}

// Request asks for a session to be erased.
type Request struct {
	Session string
	Reason  string // not empty; it is kept
	By      string // who asks, not empty; it is kept
	// WithForks erases the sessions that were forked from it, too, and those forked from them.
	WithForks bool
	// Progress, when set, hears how many of the messages of a session's log are overwritten.
	Progress func(session string, done, total int)
}

// Receipt says what was erased, and what is left to do.
type Receipt struct {
	*events.Tombstone
	StreamSeq uint64 `json:"streamSeq"` // of the tombstone in the log

	Messages int `json:"messages"` // of the log, overwritten in the store's files now
	Keys     int `json:"keys"`     // of header, snapshot and quarantine, removed now
	// Clean are the streams in whose files no byte of the session is left now; Unfinished those
	// in whose files what was removed may still lie, until erase --finish.
	Clean      []string `json:"clean"`
	Unfinished []string `json:"unfinished"`
	// Children are the sessions that were made from it. What they copied is theirs.
	Children []string   `json:"children"`
	Forks    []*Receipt `json:"forks,omitempty"` // those of them that were erased with it
}

// Finished says in a receipt, and in those of forks, that Finish was done after it.
func (r *Receipt) Finished() {
	r.Clean, r.Unfinished = append(r.Clean, r.Unfinished...), []string{}
	for _, f := range r.Forks {
		f.Finished()
	}
}

// Erase erases a session. It can be repeated: what an erasure that was cut off has left is
// done then, and the receipt has the reason of the first one. session-not-found says that there
// is no such session.
func (e *Eraser) Erase(ctx context.Context, r Request) (*Receipt, error) {
	return e.erase(ctx, r, map[string]bool{})
}

// erase is Erase but for what was erased on the way to it: headers may name each other as parents.
func (e *Eraser) erase(ctx context.Context, r Request, seen map[string]bool) (*Receipt, error) {
	seen[r.Session] = true
	if err := events.CheckSessionID(r.Session); err != nil {
		return nil, err
	}
	for name, v := range map[string]string{"reason": r.Reason, "by": r.By} {
		if strings.TrimSpace(v) == "" || len(v) > 1000 {
			return nil, &events.Error{Code: events.CodeBadRequest, Session: r.Session, Detail: name + ": expected a text of 1 to 1000 bytes, which is kept on record"}
		}
	}
	out := &Receipt{Clean: []string{e.log.Config().Stream}, Children: []string{}}
	generations, err := snapshot.All(ctx, e.js)
	if err != nil {
		return nil, err
	}
	for _, b := range buckets(generations) {
		out.Unfinished = append(out.Unfinished, "KV_"+b)
	}
	// From here on appends are refused: the tombstone follows what they take for the end.
	if out.Tombstone, out.StreamSeq, err = e.bury(ctx, r); err != nil {
		return nil, err
	}
	// A fork that goes on without having seen the tombstone is on the list by now.
	children, err := e.headers.Children(ctx, r.Session)
	if err != nil {
		return nil, err
	}
	slices.Sort(children)
	out.Children = append(out.Children, children...)
	if err := e.record(ctx, out); err != nil {
		return nil, err
	}
	n, err := e.header(ctx, r.Session)
	if err != nil {
		return nil, err
	}
	out.Keys += n
	if out.Messages, err = e.wipe(ctx, r, out.StreamSeq); err != nil {
		return nil, err
	}
	for _, subject := range derived(r.Session, generations) {
		n, err := e.purge(ctx, subject)
		if err != nil {
			return nil, err
		}
		out.Keys += n
	}
	if !r.WithForks {
		return out, nil
	}
	for _, child := range children {
		if seen[child] {
			continue
		}
		fork := r
		fork.Session = child
		f, err := e.erase(ctx, fork, seen)
		if errors.Is(err, events.ErrSessionNotFound) { // its creation was cut off
			continue
		}
		if err != nil {
			return out, fmt.Errorf("fork %s: %w; the session itself is erased", child, err)
		}
		out.Forks = append(out.Forks, f)
	}
	return out, nil
}

// derived returns the subjects on which buckets hold what projectors made of a session.
func derived(session string, all []snapshot.Generation) (subjects []string) {
	token := events.Token(session)
	for _, g := range all {
		subjects = append(subjects, "$KV."+g.Bucket+"."+token, "$KV."+g.Bucket+"."+token+".*", "$KV."+quarantineBucket+"."+g.Key(token))
	}
	return subjects
}

// bucketStream is the stream behind the bucket of a key's subject.
func bucketStream(subject string) string { return "KV_" + strings.Split(subject, ".")[1] }

// bury puts a tombstone behind a session's log, or finds the one that is there.
func (e *Eraser) bury(ctx context.Context, r Request) (*events.Tombstone, uint64, error) {
	const tries = 100 // others may append meanwhile
	for range tries {
		t := &events.Tombstone{V: 1, ID: nuid.Next(), Session: r.Session, By: r.By, Reason: r.Reason, Time: events.FormatTime(e.now()), LastSeq: events.NoSeq}
		last, err := e.log.LeaderLast(ctx, r.Session)
		var bad *journal.MalformedError
		var after uint64
		switch {
		case errors.Is(err, events.ErrErased) && errors.As(err, &bad):
			t, err := events.ParseTombstone(bad.Body)
			return t, bad.StreamSeq, err
		case errors.As(err, &bad): // what is damaged can be erased, too; its end is that of what is good
			after = bad.StreamSeq
			if err := e.seed(ctx, t); err != nil && !errors.Is(err, events.ErrSessionNotFound) {
				return nil, 0, err
			}
			if err := e.good(ctx, t); err != nil {
				return nil, 0, err
			}
		case err != nil:
			return nil, 0, err
		case last == nil:
			if err := e.seed(ctx, t); err != nil {
				return nil, 0, err
			}
		default:
			after, t.LastSeq, t.Digest, t.Chain = last.StreamSeq, last.Last, last.Digest.String(), last.Chain.String()
		}
		m, err := t.Message()
		if err != nil {
			return nil, 0, err
		}
		m.Subject = e.log.Subject(r.Session)
		ack, err := e.js.PublishMsg(ctx, m, jetstream.WithExpectLastSequencePerSubject(after), jetstream.WithMsgID(t.ID))
		if err == nil {
			return t, ack.Sequence, nil
		}
		if !journal.WrongRevision(err) {
			return nil, 0, unavailable(err)
		}
	}
	return nil, 0, &events.Error{Code: events.CodeOverloaded, Session: r.Session, Detail: "others appended to the session each time; stop its writer and try again"}
}

// seed puts what both chains start from into a tombstone, for a log without a commit. A header that
// cannot be read has no chain.
func (e *Eraser) seed(ctx context.Context, t *events.Tombstone) error {
	t.Digest = events.SeedDigest(t.Session).String()
	h, _, err := e.headers.Forked(ctx, t.Session)
	if h != nil {
		t.Chain = events.SeedChain(t.Session, h.Raw).String()
	}
	if errors.Is(err, &events.Error{Code: events.CodeCorrupt}) {
		return nil
	}
	return err
}

// good puts the end of what can be read of a damaged log into a tombstone.
func (e *Eraser) good(ctx context.Context, t *events.Tombstone) error {
	err := e.log.ReadToEnd(ctx, t.Session, 0, func(c *events.Commit) error {
		t.LastSeq, t.Digest, t.Chain = c.Last, c.Digest.String(), c.Chain.String()
		return nil
	})
	var bad *journal.MalformedError
	if errors.As(err, &bad) {
		return nil
	}
	return err
}

func unavailable(err error) error {
	return &events.Error{Code: events.CodeUnavailable, Cause: err, Detail: fmt.Sprintf("JetStream did not do it: %v; erase again to go on", err)}
}

// record keeps who erased what, when and why.
func (e *Eraser) record(ctx context.Context, r *Receipt) error {
	last, err := e.log.LastOn(ctx, Stream, Subject(r.Session))
	if err != nil || last != nil {
		return err
	}
	b, err := events.Marshal(r.Tombstone)
	if err != nil {
		return err
	}
	if _, err := e.js.Publish(ctx, Subject(r.Session), b, jetstream.WithMsgID(r.ID)); err != nil {
		return unavailable(err)
	}
	return nil
}

// header takes a session's header away and puts a tombstone in its place, so that the session is
// known to be gone and not taken for one that never was.
func (e *Eraser) header(ctx context.Context, session string) (int, error) {
	h, _, err := e.headers.Forked(ctx, session)
	if errors.Is(err, events.ErrErased) {
		return 0, nil
	}
	token := events.Token(session)
	kv, kerr := e.js.KeyValue(ctx, journal.HeadersBucket)
	if kerr != nil {
		return 0, unavailable(kerr)
	}
	if h != nil && h.ParentSession != "" {
		if _, err := e.purge(ctx, "$KV."+journal.HeadersBucket+".children."+events.Token(h.ParentSession)+"."+token); err != nil {
			return 0, err
		}
	}
	n, err := e.purge(ctx, "$KV."+journal.HeadersBucket+"."+token)
	if err != nil {
		return 0, err
	}
	if _, err := kv.Put(ctx, token, events.HeaderTombstone()); err != nil {
		return 0, unavailable(err)
	}
	return n, nil
}

// wipe overwrites the messages of a session's log before a stream sequence in the store's files,
// one at a time: the server writes a whole file anew for each and does nothing else for the stream
// meanwhile, so that several at once are no faster and leave less room for others.
func (e *Eraser) wipe(ctx context.Context, r Request, before uint64) (int, error) {
	stream := e.log.Config().Stream
	s, err := e.js.Stream(ctx, stream)
	if err != nil {
		return 0, unavailable(err)
	}
	var seqs []uint64
	err = e.log.Each(ctx, stream, e.log.Subject(r.Session), func(m jetstream.Msg) error {
		meta, err := m.Metadata()
		if err == nil && meta.Sequence.Stream < before {
			seqs = append(seqs, meta.Sequence.Stream)
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	for i, seq := range seqs {
		if r.Progress != nil {
			r.Progress(r.Session, i, len(seqs))
		}
		if err := s.SecureDeleteMsg(ctx, seq); err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) && !errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) {
			return 0, unavailable(err)
		}
	}
	if r.Progress != nil {
		r.Progress(r.Session, len(seqs), len(seqs))
	}
	return len(seqs), nil
}

// purge removes what a bucket's stream holds on a subject. A bucket lets nobody delete a single
// message, so the bytes stay in its files until Finish.
func (e *Eraser) purge(ctx context.Context, subject string) (int, error) {
	s, held, err := e.held(ctx, bucketStream(subject), subject)
	if err != nil || len(held) == 0 {
		return 0, err
	}
	if err := s.Purge(ctx, jetstream.WithPurgeSubject(subject)); err != nil {
		return 0, unavailable(err)
	}
	return len(held), nil
}

// held returns how many messages a stream has on each of the subjects that a filter matches: none
// when there is no such stream.
func (e *Eraser) held(ctx context.Context, stream, subject string) (jetstream.Stream, map[string]uint64, error) {
	s, err := e.js.Stream(ctx, stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, unavailable(err)
	}
	info, err := s.Info(ctx, jetstream.WithSubjectFilter(subject))
	if err != nil {
		return nil, nil, unavailable(err)
	}
	return s, info.State.Subjects, nil
}

// mostNamed is how many sessions an error names.
const mostNamed = 10

// complete says of which sessions that were erased something is left: their erasure was
// interrupted, or a projector that was killed meanwhile wrote behind it.
func (e *Eraser) complete(ctx context.Context, generations []snapshot.Generation) error {
	ids, err := Sessions(ctx, e.log)
	if err != nil {
		return err
	}
	buried, err := e.log.Buried(ctx) // one that was interrupted early is not on record yet
	if err != nil {
		return err
	}
	recorded := map[string]bool{}
	for _, id := range ids {
		recorded[id] = true
	}
	for id := range buried {
		if !recorded[id] {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	var named []string
	n := 0
	for _, id := range ids {
		left, err := e.left(ctx, id, buried[id], recorded[id], generations)
		if err != nil {
			return err
		}
		if left == nil {
			continue
		}
		if n++; n <= mostNamed {
			named = append(named, fmt.Sprintf("of session %s: %s", id, strings.Join(left, ", ")))
		}
	}
	if n == 0 {
		return nil
	}
	if n > mostNamed {
		named = append(named, fmt.Sprintf("and something of %d more", n-mostNamed))
	}
	return &events.Error{Code: events.CodeSessionPending, Detail: fmt.Sprintf(
		"expected complete erasures, found %d that left something: %s; run `appender erase SESSION --reason …` for each again (the first reason is kept), then finish", n, strings.Join(named, "; "))}
}

// left says what is left of a session that was erased. Where the log has nothing on its subject,
// not even a tombstone, and no header is there, another store was erased, and there is nothing to do.
func (e *Eraser) left(ctx context.Context, session string, buried, recorded bool, generations []snapshot.Generation) (left []string, err error) {
	subject := e.log.Subject(session)
	_, held, err := e.held(ctx, e.log.Config().Stream, subject)
	if err != nil {
		return nil, err
	}
	messages := held[subject]
	if buried && messages > 0 {
		messages--
	}
	_, err = e.headers.Get(ctx, session)
	header := err == nil || errors.Is(err, &events.Error{Code: events.CodeCorrupt})
	switch {
	case header, errors.Is(err, events.ErrErased), errors.Is(err, events.ErrSessionNotFound):
	default:
		return nil, err
	}
	if messages > 0 {
		left = append(left, fmt.Sprintf("%d messages of its log", messages))
	}
	if header {
		left = append(left, "its header")
	}
	if !buried && left == nil {
		return nil, nil
	}
	if errors.Is(err, events.ErrSessionNotFound) {
		left = append(left, "no tombstone in its header's place")
	}
	if !recorded {
		left = append(left, "no record of its erasure")
	}
	keys := 0
	for _, subject := range derived(session, generations) {
		n, err := e.live(ctx, subject)
		if err != nil {
			return nil, err
		}
		keys += n
	}
	if keys > 0 {
		left = append(left, fmt.Sprintf("%d keys of its snapshot", keys))
	}
	return left, nil
}

// live counts the keys of a bucket on a subject that are not marked as deleted.
func (e *Eraser) live(ctx context.Context, subject string) (n int, err error) {
	stream := bucketStream(subject)
	_, held, err := e.held(ctx, stream, subject)
	if err != nil || len(held) == 0 {
		return 0, err
	}
	bucket := strings.TrimPrefix(stream, "KV_")
	kv, err := e.js.KeyValue(ctx, bucket)
	if err != nil {
		return 0, unavailable(err)
	}
	for subject := range held {
		_, err := kv.Get(ctx, strings.TrimPrefix(subject, "$KV."+bucket+"."))
		switch {
		case err == nil:
			n++
		case !errors.Is(err, jetstream.ErrKeyNotFound):
			return 0, unavailable(err)
		}
	}
	return n, nil
}

// fillerKey is a key that no session's token is.
const fillerKey = "palimpsest.finish.filler"

// fillerBytes is more than the largest block in which a server keeps the messages of a bucket.
const fillerBytes = 24 << 20

// Finish moves what the buckets hold into new files, so that the old ones, in which older
// versions of keys lie, are removed by the server. Readers and projectors go on meanwhile. It
// returns how many keys were moved. While something is left of a session that was erased it moves
// nothing, and the error, session-pending, names the session: what is left would be moved too.
func (e *Eraser) Finish(ctx context.Context) (moved int, err error) {
	generations, err := snapshot.All(ctx, e.js)
	if err != nil {
		return 0, err
	}
	if err := e.complete(ctx, generations); err != nil {
		return 0, err
	}
	for _, bucket := range buckets(generations) {
		n, err := e.move(ctx, bucket)
		moved += n
		if err != nil {
			return moved, fmt.Errorf("bucket %s: %w", bucket, err)
		}
	}
	return moved, nil
}

func (e *Eraser) move(ctx context.Context, bucket string) (moved int, err error) {
	kv, err := e.js.KeyValue(ctx, bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, unavailable(err)
	}
	s, err := e.js.Stream(ctx, "KV_"+bucket)
	if err != nil {
		return 0, unavailable(err)
	}
	old := s.CachedInfo().State.LastSeq
	if old == 0 {
		return 0, nil
	}
	// What is written from here on is in other files than what was: the file that is open now
	// is filled up first, with what does not compress.
	if err := e.fill(ctx, bucket); err != nil {
		return 0, err
	}
	if err := kv.PurgeDeletes(ctx, jetstream.DeleteMarkersOlderThan(-1)); err != nil {
		return 0, unavailable(err)
	}
	l, err := kv.ListKeys(ctx)
	if err != nil {
		return 0, unavailable(err)
	}
	for key := range l.Keys() {
		entry, err := kv.Get(ctx, key)
		if errors.Is(err, jetstream.ErrKeyNotFound) || err == nil && (entry.Revision() > old || key == fillerKey) {
			continue // gone, or moved by its writer
		}
		if err != nil {
			return moved, unavailable(err)
		}
		_, err = kv.Update(ctx, key, entry.Value(), entry.Revision())
		if journal.WrongRevision(err) {
			continue // its writer was faster, and its newest version is new
		}
		if err != nil {
			return moved, unavailable(err)
		}
		moved++
	}
	if err := s.Purge(ctx, jetstream.WithPurgeSubject("$KV."+bucket+"."+fillerKey)); err != nil {
		return moved, unavailable(err)
	}
	info, err := s.Info(ctx)
	if err != nil {
		return moved, unavailable(err)
	}
	if first := info.State.FirstSeq; first <= old {
		return moved, &events.Error{Code: events.CodeUnavailable, Detail: fmt.Sprintf("something is left of before: stream sequence %d of at most %d; finish again", first, old)}
	}
	return moved, nil
}

// fill writes and removes filler until the file that was open is full.
func (e *Eraser) fill(ctx context.Context, bucket string) error {
	piece := make([]byte, 512<<10)
	subject := "$KV." + bucket + "." + fillerKey
	for n := 0; n < fillerBytes; n += len(piece) {
		if _, err := rand.Read(piece); err != nil {
			return err
		}
		if _, err := e.js.PublishMsg(ctx, &nats.Msg{Subject: subject, Data: piece}); err != nil {
			return unavailable(err)
		}
	}
	return nil
}

// Subject is where the record of a session's erasure lies.
func Subject(session string) string { return prefix + events.Token(session) }

// Sessions returns the ids of the sessions whose erasure is on record, unordered.
func Sessions(ctx context.Context, j *journal.Journal) (ids []string, err error) {
	err = j.Each(ctx, Stream, prefix+"*", func(m jetstream.Msg) error {
		if id, err := events.SessionOf(strings.TrimPrefix(m.Subject(), prefix)); err == nil {
			ids = append(ids, id)
		}
		return nil
	})
	if journal.StreamMissing(err) {
		return nil, nil
	}
	return ids, err
}
