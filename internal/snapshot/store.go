package snapshot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/surface"
)

// ErrMoved says that the head is not the one that the writer knew: another owner wrote it.
var ErrMoved = errors.New("snapshot: another owner wrote the head")

// errNoValue is the absence of a key.
var errNoValue = errors.New("snapshot: no such key")

// readTimeout bounds one read of the bucket.
const readTimeout = 5 * time.Second

// tornReads is how often a reader starts over because a page went away under it.
const tornReads = 8

// Store is the bucket of snapshots. It is safe for concurrent use.
type Store struct{ kv jetstream.KeyValue }

// Open binds to the bucket, creating it when it is not there.
func Open(ctx context.Context, js jetstream.JetStream, replicas int) (*Store, error) {
	kv, err := journal.OpenBucket(ctx, js, jetstream.KeyValueConfig{
		Bucket: Bucket, Description: "Palimpsest: session snapshots, see docs/kv-layout.md", History: 1,
		Storage: jetstream.FileStorage, Replicas: replicas, Compression: true,
	})
	if err != nil {
		return nil, err
	}
	return &Store{kv}, nil
}

// KV returns the bucket itself.
func (s *Store) KV() jetstream.KeyValue { return s.kv }

func (s *Store) get(ctx context.Context, key string) ([]byte, uint64, error) {
	// A request that was lost with its connection is never answered: do not wait for all of ctx.
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	e, err := s.kv.Get(ctx, key)
	switch {
	case errors.Is(err, jetstream.ErrKeyNotFound):
		return nil, 0, errNoValue
	case err != nil:
		return nil, 0, unavailable(err)
	}
	return e.Value(), e.Revision(), nil
}

func unavailable(err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	return &events.Error{Code: events.CodeUnavailable, Cause: err, Detail: fmt.Sprintf("the snapshot bucket did not answer: %v; try again", err)}
}

// Head reads a session's head. A session without one has revision 0 and a nil head. A damaged
// head is an error of code snapshot-damaged, and its revision is returned all the same.
func (s *Store) Head(ctx context.Context, session string) (*Head, uint64, error) {
	raw, rev, err := s.get(ctx, HeadKey(session))
	if errors.Is(err, errNoValue) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	h, err := ParseHead(raw, session)
	return h, rev, err
}

// Load reads the snapshot of a session as its head has it, with its index pages but without
// the messages of sealed pages. A session without a head has a nil snapshot and revision 0; a
// damaged snapshot is an error of code snapshot-damaged, with the revision of its head.
func (s *Store) Load(ctx context.Context, session string, keep surface.Keep) (*Snapshot, uint64, error) {
	for try := 0; ; try++ {
		h, rev, err := s.Head(ctx, session)
		if err != nil || h == nil {
			return nil, rev, err
		}
		index := make([]*IndexPage, len(h.Index))
		for i, n := range h.Index {
			index[i] = new(IndexPage)
			if err = s.value(ctx, IndexKey(events.Token(session), n), index[i]); err != nil {
				break
			}
		}
		if errors.Is(err, errNoValue) && try < tornReads { // the head moved on, and the page went
			continue
		}
		if err != nil {
			return nil, rev, damagedValue(session, err)
		}
		snap, err := Restore(h, index, keep)
		return snap, rev, err
	}
}

func (s *Store) value(ctx context.Context, key string, into any) error {
	raw, _, err := s.get(ctx, key)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return &events.Error{Code: events.CodeSnapshotDamaged, Detail: fmt.Sprintf("snapshot: key %s: %v", key, err)}
	}
	return nil
}

func damagedValue(session string, err error) error {
	if errors.Is(err, errNoValue) {
		return &events.Error{Code: events.CodeSnapshotDamaged, Session: session, Detail: "snapshot: the head refers to a page that is not there"}
	}
	return err
}

// FillPages reads pages into a snapshot. gone reports that one of them is not there (any more).
func (s *Store) FillPages(ctx context.Context, snap *Snapshot, pages []int64) (gone bool, err error) {
	for _, n := range pages {
		var p Page
		err := s.value(ctx, PageKey(events.Token(snap.ID), n), &p)
		if errors.Is(err, errNoValue) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		if p.V != layoutVersion {
			return false, snap.damaged("page %d: layout version: expected %d, found %d", n, layoutVersion, p.V)
		}
		if err := snap.Fill(n, p.Nodes); err != nil {
			return false, err
		}
	}
	return false, nil
}

// Full reads a session's snapshot with all its messages, consistent in itself: when a page
// went away under it, it starts over from the head.
func (s *Store) Full(ctx context.Context, session string) (*Snapshot, uint64, error) {
	for try := 0; ; try++ {
		snap, rev, err := s.Load(ctx, session, surface.KeepBodies)
		if err != nil || snap == nil {
			return nil, 0, err
		}
		gone, err := s.FillPages(ctx, snap, snap.Pages())
		if err != nil {
			return nil, 0, err
		}
		if !gone {
			return snap, rev, nil
		}
		if try == tornReads {
			return nil, 0, damagedValue(session, errNoValue)
		}
	}
}

// Write writes what a snapshot flushed on top of the head at revision rev (0 for none) and
// returns the head's new revision. ErrMoved says that another owner wrote the head meanwhile;
// any other error leaves open whether it was written.
func (s *Store) Write(ctx context.Context, f *Flush, rev uint64) (uint64, error) {
	for _, p := range f.Pages {
		if f.Overwrite {
			if _, err := s.kv.Put(ctx, p.Key, p.Value); err != nil {
				return 0, unavailable(err)
			}
			continue
		}
		// A page that is there already is the same page: the cuts follow from the log.
		if _, err := s.kv.Create(ctx, p.Key, p.Value); err != nil && !errors.Is(err, jetstream.ErrKeyExists) {
			return 0, unavailable(err)
		}
	}
	var next uint64
	var err error
	if rev == 0 {
		next, err = s.kv.Create(ctx, f.Head.Key, f.Head.Value)
	} else {
		next, err = s.kv.Update(ctx, f.Head.Key, f.Head.Value, rev)
	}
	switch {
	case err == nil:
		return next, nil
	case wrongRevision(err):
		return 0, ErrMoved
	}
	return 0, unavailable(err)
}

// Delete removes keys that no head refers to any more. What is gone already is no error.
func (s *Store) Delete(ctx context.Context, keys []string) error {
	for _, k := range keys {
		if err := s.kv.Purge(ctx, k); err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
			return unavailable(err)
		}
	}
	return nil
}

// Sessions returns the ids of the sessions that have a head, unordered.
func (s *Store) Sessions(ctx context.Context) ([]string, error) {
	l, err := s.kv.ListKeysFiltered(ctx, "*")
	if err != nil {
		return nil, unavailable(err)
	}
	var out []string
	for k := range l.Keys() {
		if id, err := events.SessionOf(k); err == nil {
			out = append(out, id)
		}
	}
	return out, ctx.Err()
}
