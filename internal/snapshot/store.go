package snapshot

import (
	"context"
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

// Store is the bucket of snapshots: the one that serves, whichever that is, or one generation of
// it. It is safe for concurrent use.
type Store struct {
	follower   *follower // nil for one generation
	generation Generation
	register   *register
	kv         jetstream.KeyValue
}

// Open binds to the bucket that serves, creating the first one when there is none.
func Open(ctx context.Context, js jetstream.JetStream, replicas int) (*Store, error) {
	r, err := openRegister(ctx, js, replicas)
	if err != nil {
		return nil, err
	}
	f := &follower{register: r, born: time.Now()}
	for {
		_, err := f.look(ctx)
		if err == nil {
			break
		}
		if !errors.Is(err, errBucketLost) {
			return nil, err
		}
		wait := time.NewTimer(lookEvery / 2)
		select {
		case <-wait.C:
		case <-ctx.Done():
			wait.Stop()
			return nil, err
		}
	}
	return &Store{follower: f, register: r}, nil
}

// KV returns the bucket itself, the one that serves now.
func (s *Store) KV() jetstream.KeyValue { return s.Pin(context.Background()).kv }

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
	s, err := s.newest(ctx, session)
	if err != nil {
		return nil, 0, err
	}
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
	s, err := s.newest(ctx, session)
	if err != nil {
		return nil, 0, err
	}
	for try := 0; ; try++ {
		h, rev, err := s.Head(ctx, session)
		if err != nil || h == nil {
			return nil, rev, err
		}
		snap, err := s.restore(ctx, h, keep)
		if errors.Is(err, errNoValue) && try < tornReads { // the head moved on, and the page went
			continue
		}
		return snap, rev, damagedValue(session, err)
	}
}

// restore reads a head's index pages and makes the snapshot. A page that is not there is errNoValue.
func (s *Store) restore(ctx context.Context, h *Head, keep surface.Keep) (*Snapshot, error) {
	index := make([]*IndexPage, len(h.Index))
	for i, n := range h.Index {
		var err error
		if index[i], err = s.indexPage(ctx, IndexKey(events.Token(h.Session), n)); err != nil {
			return nil, err
		}
	}
	return Restore(h, index, keep)
}

func damagedValue(session string, err error) error {
	if errors.Is(err, errNoValue) {
		return &events.Error{Code: events.CodeSnapshotDamaged, Session: session, Detail: "snapshot: the head refers to a page that is not there"}
	}
	return err
}

// FillPages reads pages into a snapshot. gone reports that one of them is not there (any more).
func (s *Store) FillPages(ctx context.Context, snap *Snapshot, pages []int64) (gone bool, err error) {
	if len(pages) == 0 {
		return false, nil
	}
	s = s.Pin(ctx)
	missing := s.fillCached(snap, pages)
	for len(missing) > 0 {
		some, bytes := snap.batch(missing)
		missing = missing[len(some):]
		bytes = min(max(bytes, 1), readBytes)
		if err := s.register.room.Acquire(ctx, bytes); err != nil {
			return false, unavailable(err)
		}
		// Others may have read them meanwhile.
		gone, err := s.readInto(ctx, snap, s.fillCached(snap, some))
		s.register.room.Release(bytes)
		if gone || err != nil {
			return gone, err
		}
	}
	return false, nil
}

// fillCached fills in the pages that are in the cache, and returns the others.
func (s *Store) fillCached(snap *Snapshot, pages []int64) (missing []int64) {
	token, cache := events.Token(snap.ID), s.cache()
	for _, n := range pages {
		if p, ok := cache.Get(s.cached(PageKey(token, n))); !ok || snap.Fill(n, p.page.Nodes) != nil {
			missing = append(missing, n)
		}
	}
	return missing
}

// readInto reads pages from the bucket into a snapshot.
func (s *Store) readInto(ctx context.Context, snap *Snapshot, pages []int64) (gone bool, err error) {
	if len(pages) == 0 {
		return false, nil
	}
	token, cache := events.Token(snap.ID), s.cache()
	if f := s.register.reading; f != nil {
		f(pageKeys(token, pages))
	}
	read := s.readPages(ctx, token, pages)
	for _, n := range pages {
		key := PageKey(token, n)
		raw := read[key]
		if raw == nil { // not there, or not answered: this tells which
			if raw, _, err = s.get(ctx, key); errors.Is(err, errNoValue) {
				return true, nil
			}
		}
		if err != nil {
			return false, err
		}
		p, err := ParsePage(raw, key)
		if err != nil {
			return false, err
		}
		if p.V != layoutVersion {
			return false, snap.damaged("page %d: layout version: expected %d, found %d", n, layoutVersion, p.V)
		}
		if err := snap.Fill(n, p.Nodes); err != nil {
			return false, err
		}
		cache.Put(s.cached(key), kept{page: p}, p.memory(raw))
	}
	return false, nil
}

// Full reads a session's snapshot with all its messages, consistent in itself: when a page
// went away under it, it starts over from the head.
func (s *Store) Full(ctx context.Context, session string) (*Snapshot, uint64, error) {
	s, err := s.newest(ctx, session)
	if err != nil {
		return nil, 0, err
	}
	for try := 0; ; try++ {
		snap, rev, err := s.unfilled(ctx, session)
		if snap == nil && err == nil {
			return nil, 0, nil
		}
		if err == nil {
			var gone bool
			if gone, err = s.FillPages(ctx, snap, snap.Pages()); gone {
				err = errNoValue
			}
		}
		switch {
		case err == nil:
			return snap, rev, nil
		case !errors.Is(err, errNoValue) || try == tornReads:
			return nil, 0, damagedValue(session, err)
		}
	}
}

// Write writes what a snapshot flushed on top of the head at revision rev (0 for none) and
// returns the head's new revision. ErrMoved says that another owner wrote the head meanwhile;
// any other error leaves open whether it was written.
func (s *Store) Write(ctx context.Context, f *Flush, rev uint64) (uint64, error) {
	s = s.Pin(ctx)
	for _, p := range f.Pages {
		if f.Overwrite {
			_, err := s.kv.Put(ctx, p.Key, p.Value)
			s.register.pages.Load().Delete(s.cached(p.Key))
			if err != nil {
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
	case journal.WrongRevision(err):
		return 0, ErrMoved
	}
	return 0, unavailable(err)
}

// Delete removes keys that no head refers to any more. What is gone already is no error.
func (s *Store) Delete(ctx context.Context, keys []string) error {
	s = s.Pin(ctx)
	for _, k := range keys {
		s.register.pages.Load().Delete(s.cached(k))
		if err := s.kv.Purge(ctx, k); err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
			return unavailable(err)
		}
	}
	return nil
}

// Remove deletes the head at a revision; ErrMoved says that there is another one. Its pages stay.
func (s *Store) Remove(ctx context.Context, session string, rev uint64) error {
	s = s.Pin(ctx)
	err := s.kv.Purge(ctx, HeadKey(session), jetstream.LastRevision(rev))
	switch {
	case err == nil:
		return nil
	case journal.WrongRevision(err):
		return ErrMoved
	}
	return unavailable(err)
}

// Erase removes head and pages of a session that was erased, and returns how many keys there were.
func (s *Store) Erase(ctx context.Context, session string) (n int, err error) {
	s = s.Pin(ctx)
	token := events.Token(session)
	l, err := s.kv.ListKeysFiltered(ctx, token, token+".*")
	if errors.Is(err, jetstream.ErrNoKeysFound) {
		return 0, nil
	}
	if err != nil {
		return 0, unavailable(err)
	}
	for key := range l.Keys() {
		s.register.pages.Load().Delete(s.cached(key))
		if err := s.kv.Purge(ctx, key); err != nil {
			return n, unavailable(err)
		}
		n++
	}
	return n, ctx.Err()
}

// Sessions returns the ids of the sessions that have a head, unordered.
func (s *Store) Sessions(ctx context.Context) ([]string, error) {
	s = s.Pin(ctx)
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
