package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
)

// HeadersBucket is the bucket of session headers: `<token>` holds the header's bytes,
// `children.<parent token>.<token>` is an empty value that indexes forks and sub-agents.
const HeadersBucket = "HEADERS"

// OpenBucket binds to a KV bucket, creating it with the given settings when it is not there.
// It never changes the settings of one that is: those may have been made on purpose.
func OpenBucket(ctx context.Context, js jetstream.JetStream, c jetstream.KeyValueConfig) (kv jetstream.KeyValue, err error) {
	for range openTries {
		// A request that was lost with its connection is never answered: do not wait for all of ctx.
		one, cancel := context.WithTimeout(ctx, openTimeout)
		kv, err = openBucket(one, js, c)
		cancel()
		if err == nil || ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return kv, err
		}
	}
	return nil, err
}

const (
	// openTimeout bounds one try to bind to a bucket.
	openTimeout = 5 * time.Second
	openTries   = 3
)

func openBucket(ctx context.Context, js jetstream.JetStream, c jetstream.KeyValueConfig) (jetstream.KeyValue, error) {
	kv, err := js.KeyValue(ctx, c.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		kv, err = js.CreateKeyValue(ctx, c)
		if errors.Is(err, jetstream.ErrBucketExists) {
			kv, err = js.KeyValue(ctx, c.Bucket)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w", c.Bucket, err)
	}
	return kv, nil
}

// WrongRevision reports whether a write was refused since the subject or key is not as its writer
// expected: another one was faster, or this one's own earlier try went through.
func WrongRevision(err error) bool {
	var api *jetstream.APIError
	return errors.Is(err, jetstream.ErrKeyExists) ||
		errors.As(err, &api) && (api.ErrorCode == errWrongLastSeq || api.ErrorCode == errWrongLastSeqConstant)
}

// Headers is the bucket of session headers. A header is created once and never changes.
type Headers struct {
	j  *Journal
	kv jetstream.KeyValue
}

// OpenHeaders binds to the bucket of headers.
func (j *Journal) OpenHeaders(ctx context.Context) (*Headers, error) {
	kv, err := OpenBucket(ctx, j.js, jetstream.KeyValueConfig{
		Bucket: HeadersBucket, Description: "Palimpsest: session headers", History: 1,
		Storage: jetstream.FileStorage, Replicas: j.cfg.Replicas, Compression: true,
	})
	if err != nil {
		return nil, err
	}
	return &Headers{j, kv}, nil
}

// ErrReserved is what a header's absence wraps while a fork is making the session: its id is taken.
var ErrReserved = errors.New("journal: the session's id is reserved by a fork")

// reserved begins the value of a key whose header is still to come. A header is an object, so none
// begins like this.
const reserved = `["reserved",`

// reservation is what stands in a header's place while a fork makes the session. It says which fork,
// so that the same request goes on and any other one is refused.
func reservation(hd *events.Header, at events.Seq) []byte {
	return fmt.Appendf(nil, `%s{"at":%d,"header":%s}]`, reserved, at, hd.Raw)
}

// Get returns a session's header; session-not-found when there is none. That there is none, or only
// a reservation, is said by the bucket's leader, never by a replica that lags. An id that a fork has reserved has none,
// and the error is ErrReserved too.
func (h *Headers) Get(ctx context.Context, session string) (*events.Header, error) {
	raw, _, err := h.raw(ctx, session)
	if err != nil {
		return nil, err
	}
	if bytes.HasPrefix(raw, []byte(reserved)) {
		return nil, &events.Error{Code: events.CodeSessionNotFound, Session: session, Cause: ErrReserved, Detail: "the session is not complete: a fork is making it"}
	}
	if events.IsHeaderTombstone(raw) {
		return nil, events.Erased(session)
	}
	hd, err := events.ParseHeader(raw, session, 0)
	if err != nil {
		return nil, &events.Error{Code: events.CodeCorrupt, Session: session, Cause: err, Detail: "the stored header is damaged: " + err.Error()}
	}
	return hd, nil
}

// Forked is Get for a session that a fork makes or has made: of one that is not complete it returns the
// header that it will have, and the last seq that it takes over from its parent, which is NoSeq for all others.
func (h *Headers) Forked(ctx context.Context, session string) (*events.Header, events.Seq, error) {
	hd, err := h.Get(ctx, session)
	if !errors.Is(err, ErrReserved) {
		return hd, events.NoSeq, err
	}
	raw, _, err := h.raw(ctx, session)
	if err != nil {
		return nil, events.NoSeq, err
	}
	if !bytes.HasPrefix(raw, []byte(reserved)) { // it was completed meanwhile
		hd, err = h.Get(ctx, session)
		return hd, events.NoSeq, err
	}
	var value []json.RawMessage
	var of struct {
		At     events.Seq
		Header json.RawMessage
	}
	if err = json.Unmarshal(raw, &value); err == nil && len(value) == 2 {
		err = json.Unmarshal(value[1], &of)
	}
	if err == nil {
		hd, err = events.ParseHeader(of.Header, session, 0)
	}
	if err != nil {
		return nil, events.NoSeq, &events.Error{Code: events.CodeCorrupt, Session: session, Cause: err, Detail: "the stored reservation of a fork is damaged: " + err.Error()}
	}
	return hd, of.At, nil
}

// raw reads the value of a session's key and its revision.
func (h *Headers) raw(ctx context.Context, session string) ([]byte, uint64, error) {
	token := events.Token(session)
	e, err := h.get(ctx, token)
	switch {
	case err == nil && !bytes.HasPrefix(e.Value(), []byte(reserved)):
		return e.Value(), e.Revision(), nil
	case err != nil && !errors.Is(err, jetstream.ErrKeyNotFound):
		return nil, 0, h.j.unavailable(err)
	}
	m, err := h.j.leaderMessage(ctx, "KV_"+HeadersBucket, map[string]any{"last_by_subj": "$KV." + HeadersBucket + "." + token})
	if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, 0, err
	}
	if err != nil || len(m.Data) == 0 {
		return nil, 0, &events.Error{Code: events.CodeSessionNotFound, Session: session, Detail: "there is no such session"}
	}
	return m.Data, m.Sequence, nil
}

// Reserve takes the id of a session that a fork is about to make, so that no create and no first
// append can give it another header meanwhile. It is no error when the same fork has reserved it
// before; another one's is session-exists, and so is a header, but for the fork's own.
func (h *Headers) Reserve(ctx context.Context, hd *events.Header, at events.Seq) error {
	value := reservation(hd, at)
	kctx, cancel := context.WithTimeout(ctx, h.j.cfg.ReadTimeout)
	defer cancel()
	// Before the reservation, and so before anything is copied: who erases the parent finds the child.
	if _, err := h.kv.Put(kctx, childKey(hd), nil); err != nil {
		return h.j.unavailable(err)
	}
	_, err := h.kv.Create(kctx, events.Token(hd.ID), value)
	if err == nil {
		return nil
	}
	if !errors.Is(err, jetstream.ErrKeyExists) {
		return h.j.unavailable(err)
	}
	raw, _, err := h.raw(ctx, hd.ID)
	switch {
	case err != nil:
		return err
	case bytes.Equal(raw, value), bytes.Equal(raw, hd.Raw):
		return nil
	}
	other, _, err := h.Forked(ctx, hd.ID)
	if errors.Is(err, events.ErrErased) || err == nil && other.ParentSession != hd.ParentSession { // is not its child
		if err := h.kv.Purge(kctx, childKey(hd)); err != nil {
			return h.j.unavailable(err)
		}
	}
	switch {
	case bytes.HasPrefix(raw, []byte(reserved)):
		return &events.Error{Code: events.CodeSessionExists, Session: hd.ID, Detail: "another fork is making the session; repeat that one's request to complete it"}
	}
	return &events.Error{Code: events.CodeSessionExists, Session: hd.ID, Detail: "the session was created meanwhile with another header"}
}

// Fulfil stores the header of a session whose id the same fork reserved. created is false when
// another run of that fork was faster.
func (h *Headers) Fulfil(ctx context.Context, hd *events.Header, at events.Seq) (created bool, err error) {
	kctx, cancel := context.WithTimeout(ctx, h.j.cfg.ReadTimeout)
	defer cancel()
	raw, rev, err := h.raw(ctx, hd.ID)
	switch {
	case err != nil:
		return false, err
	case bytes.Equal(raw, hd.Raw):
		return false, nil
	case !bytes.Equal(raw, reservation(hd, at)):
		return false, &events.Error{Code: events.CodeSessionExists, Session: hd.ID, Detail: "the session's id is not reserved by this fork any more"}
	}
	if _, err := h.kv.Put(kctx, childKey(hd), nil); err != nil { // again: an older version reserved without it
		return false, h.j.unavailable(err)
	}
	_, err = h.kv.Update(kctx, events.Token(hd.ID), hd.Raw, rev)
	if err == nil {
		return true, nil
	}
	// By another run, or by this one without an answer: what is stored decides.
	if now, _, rerr := h.raw(ctx, hd.ID); rerr == nil && bytes.Equal(now, hd.Raw) {
		return false, nil
	}
	return false, h.j.unavailable(err)
}

// get reads a key, as long as any read may take: a request that is lost with its connection is
// never answered.
func (h *Headers) get(ctx context.Context, key string) (jetstream.KeyValueEntry, error) {
	ctx, cancel := context.WithTimeout(ctx, h.j.cfg.ReadTimeout)
	defer cancel()
	return h.kv.Get(ctx, key)
}

// Create stores a header unless the session has one. The header that is stored then comes
// back, with whether it was created now.
func (h *Headers) Create(ctx context.Context, hd *events.Header) (stored *events.Header, created bool, err error) {
	// A request that was lost with its connection is never answered: do not wait for all of ctx.
	ctx, cancel := context.WithTimeout(ctx, h.j.cfg.ReadTimeout)
	defer cancel()
	token := events.Token(hd.ID)
	if hd.ParentSession != "" { // before the header: an index entry without one is skipped
		if _, err := h.kv.Put(ctx, childKey(hd), nil); err != nil {
			return nil, false, h.j.unavailable(err)
		}
	}
	_, err = h.kv.Create(ctx, token, hd.Raw)
	switch {
	case err == nil:
		return hd, true, nil
	case errors.Is(err, jetstream.ErrKeyExists):
		stored, err = h.Get(ctx, hd.ID)
		if errors.Is(err, ErrReserved) {
			return nil, false, &events.Error{Code: events.CodeSessionPending, Session: hd.ID, Detail: "a fork is making the session and is not complete; repeat the fork request"}
		}
		if err != nil {
			return nil, false, err
		}
		if hd.ParentSession != "" && stored.ParentSession != hd.ParentSession { // is not its child
			if err := h.kv.Purge(ctx, childKey(hd)); err != nil {
				return nil, false, h.j.unavailable(err)
			}
		}
		return stored, false, nil
	}
	return nil, false, h.j.unavailable(err)
}

func childKey(hd *events.Header) string {
	return "children." + events.Token(hd.ParentSession) + "." + events.Token(hd.ID)
}

// Children returns the ids of the sessions that name parent as theirs, unordered. Forks in the making are
// among them, and there may be ids of which there is no session: who made it was cut off.
func (h *Headers) Children(ctx context.Context, parent string) ([]string, error) {
	return h.list(ctx, "children."+events.Token(parent)+".*")
}

// IsChild reports whether the index of children has a session under a parent, as the bucket's
// leader says.
func (h *Headers) IsChild(ctx context.Context, parent, child string) (bool, error) {
	key := "children." + events.Token(parent) + "." + events.Token(child)
	m, err := h.j.leaderMessage(ctx, "KV_"+HeadersBucket, map[string]any{"last_by_subj": "$KV." + HeadersBucket + "." + key})
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return false, nil
	}
	return err == nil && m.Header.Get("KV-Operation") == "", err // a marker says that it was removed
}

// List returns the ids of all sessions, unordered.
func (h *Headers) List(ctx context.Context) ([]string, error) {
	return h.list(ctx, "*") // tokens hold no dot
}

func (h *Headers) list(ctx context.Context, filter string) ([]string, error) {
	l, err := h.kv.ListKeysFiltered(ctx, filter)
	if err != nil {
		return nil, h.j.unavailable(err)
	}
	var out []string
	for key := range l.Keys() {
		id, err := events.SessionOf(key[strings.LastIndexByte(key, '.')+1:])
		if err == nil {
			out = append(out, id)
		}
	}
	return out, ctx.Err()
}
