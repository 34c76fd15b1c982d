package snapshot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/semaphore"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/session"
)

// GenerationsBucket is the KV bucket that says which bucket of snapshots serves. Its key
// GenerationsKey holds a Generations.
const (
	GenerationsBucket = "GENERATIONS"
	GenerationsKey    = "surfaces"
)

// overlap is for how long after a switch the generation that served before is read too, so that no
// reader is served less than it was before.
const overlap = 10 * time.Second

// lostAfter is how long the bucket that serves must be missing before it counts as lost, and another
// one is begun in its place: a server that is starting may not know of it yet.
const lostAfter = 5 * time.Second

// lookEvery is how old what is known of the generations may be. A process follows a switch
// within it.
const lookEvery = time.Second

// Generation is one build of all snapshots, in a bucket of its own.
type Generation struct {
	N      int    `json:"n"` // 1, 2, …; never used twice
	Bucket string `json:"bucket"`
	Fold   int    `json:"fold"` // version of the fold that builds it
	Since  int64  `json:"since"`
}

// Generations says which generation serves, which one served before and can again, and which
// one is being built.
type Generations struct {
	V        int         `json:"v"`
	Current  Generation  `json:"current"`
	Previous *Generation `json:"previous,omitempty"`
	Building *Generation `json:"building,omitempty"`
	Last     int         `json:"last"` // highest number that was given

	revision uint64
	born     bool // stored by this very read
}

func newGeneration(n int) Generation {
	g := Generation{N: n, Bucket: Bucket, Fold: session.FoldVersion, Since: time.Now().UnixMilli()}
	if n > 1 {
		g.Bucket = fmt.Sprintf("%s_%d", Bucket, n)
	}
	return g
}

// Key is a key of a bucket that all generations share, made this generation's own: the key
// itself in the first one.
func (g Generation) Key(key string) string {
	if g.N <= 1 {
		return key
	}
	return fmt.Sprintf("g%d.%s", g.N, key)
}

// Foldable says whether this program may write into the generation: an error of code
// fold-version says that another version of the fold built it.
func (g Generation) Foldable() error {
	if g.Fold == session.FoldVersion {
		return nil
	}
	return &events.Error{Code: events.CodeFoldVersion, Detail: fmt.Sprintf(
		"bucket %s was built by version %d of the fold, and this program has version %d; build another with `projector rebuild`, or run the program that built it", g.Bucket, g.Fold, session.FoldVersion)}
}

// All returns the generations that there are: whoever takes something of a session away must take it
// away from each.
func All(ctx context.Context, js jetstream.JetStream) ([]Generation, error) {
	kv, err := js.KeyValue(ctx, GenerationsBucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, unavailable(err)
	}
	r := &register{js: js, kv: kv}
	g, err := r.read(ctx)
	if err != nil {
		return nil, err
	}
	out := []Generation{g.Current}
	for _, more := range []*Generation{g.Previous, g.Building} {
		if more != nil {
			out = append(out, *more)
		}
	}
	return out, nil
}

// register is the bucket of generations.
type register struct {
	js       jetstream.JetStream
	kv       jetstream.KeyValue
	replicas int
	pages    atomic.Pointer[pageCache] // of all generations
	reading  func(keys []string)       // see OnRead
	room     *semaphore.Weighted       // bytes of pages that are being read
}

func openRegister(ctx context.Context, js jetstream.JetStream, replicas int) (*register, error) {
	kv, err := journal.OpenBucket(ctx, js, jetstream.KeyValueConfig{
		Bucket: GenerationsBucket, Description: "Palimpsest: which bucket of snapshots serves, see docs/kv-layout.md", History: 16,
		Storage: jetstream.FileStorage, Replicas: replicas,
	})
	if err != nil {
		return nil, err
	}
	r := &register{js: js, kv: kv, replicas: replicas, room: semaphore.NewWeighted(readBytes)}
	r.pages.Store(newPageCache(DefaultPageCache))
	return r, nil
}

// read returns what is stored, and stores a first generation when there is nothing.
func (r *register) read(ctx context.Context) (*Generations, error) {
	g, err := r.stored(ctx)
	if err != nil || g != nil {
		return g, err
	}
	first := &Generations{V: 1, Current: newGeneration(1), Last: 1}
	switch err := r.store(ctx, first); {
	case err == nil:
		first.born = true
		return first, nil
	case !errors.Is(err, ErrMoved):
		return nil, err
	}
	if g, err = r.stored(ctx); err == nil && g == nil {
		err = unavailable(jetstream.ErrKeyNotFound)
	}
	return g, err
}

// stored returns what is stored, nil when there is nothing.
func (r *register) stored(ctx context.Context) (*Generations, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	e, err := r.kv.Get(ctx, GenerationsKey)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, unavailable(err)
	}
	g := new(Generations)
	if err := json.Unmarshal(e.Value(), g); err != nil || g.V != 1 || g.Current.N < 1 || g.Current.Bucket == "" {
		return nil, &events.Error{Code: events.CodeSnapshotDamaged, Detail: fmt.Sprintf("bucket %s, key %s: expected {\"v\":1,\"current\":{\"n\":…,\"bucket\":…}}, found %s", GenerationsBucket, GenerationsKey, e.Value())}
	}
	g.revision = e.Revision()
	return g, nil
}

// store writes g over what it was read as; ErrMoved says that another process was faster.
func (r *register) store(ctx context.Context, g *Generations) error {
	b, err := json.Marshal(g)
	if err != nil {
		panic(err) // numbers and strings always encode
	}
	var rev uint64
	if g.revision == 0 {
		rev, err = r.kv.Create(ctx, GenerationsKey, b)
	} else {
		rev, err = r.kv.Update(ctx, GenerationsKey, b, g.revision)
	}
	if err == nil {
		g.revision = rev
		return nil
	}
	if journal.WrongRevision(err) {
		return ErrMoved
	}
	return unavailable(err)
}

// errBucketLost says that a generation's bucket is not there.
var errBucketLost = errors.New("snapshot: the bucket is not there")

// bind binds to a generation's bucket. Only a generation that begins is created: a bucket that went
// away is not replaced by an empty one, since checkpoints tell of what was in it.
func (r *register) bind(ctx context.Context, g Generation, create bool) (*Store, error) {
	if create {
		kv, err := journal.OpenBucket(ctx, r.js, jetstream.KeyValueConfig{
			Bucket: g.Bucket, Description: "Palimpsest: session snapshots, see docs/kv-layout.md", History: 1,
			Storage: jetstream.FileStorage, Replicas: r.replicas, Compression: true,
		})
		if err != nil {
			return nil, err
		}
		return &Store{generation: g, register: r, kv: kv}, nil
	}
	kv, err := r.js.KeyValue(ctx, g.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, &events.Error{Code: events.CodeSnapshotDamaged, Cause: errBucketLost, Detail: fmt.Sprintf("bucket %s says that snapshots are in %s, which is not there; unless it comes back within seconds, another one is begun and folded from the log", GenerationsBucket, g.Bucket)}
	}
	if err != nil {
		return nil, unavailable(err)
	}
	return &Store{generation: g, register: r, kv: kv}, nil
}

// follower keeps a store at the generation that serves.
type follower struct {
	register *register
	looking  sync.Mutex
	born     time.Time    // origin of looked
	looked   atomic.Int64 // ns behind born, since the time of day may be set back; 0: it did not look yet
	missing  time.Time    // since when the bucket that serves is not there; guarded by looking
	now      atomic.Pointer[Store]
	before   atomic.Pointer[before]
}

// before is the generation that served until a moment ago.
type before struct {
	store *Store
	until time.Time
}

// newest returns the generation whose head of a session is the newest, shortly after a switch; the one
// that serves otherwise.
func (s *Store) newest(ctx context.Context, session string) (*Store, error) {
	if s.follower == nil {
		return s, nil
	}
	now := s.follower.current(ctx)
	old := s.follower.before.Load()
	if old == nil || time.Now().After(old.until) {
		return now, nil
	}
	was, _, err := old.store.Head(ctx, session)
	if err != nil || was == nil {
		return now, nil // it may be gone already
	}
	is, _, err := now.Head(ctx, session)
	if err != nil {
		return now, err
	}
	if is == nil || is.Seq < was.Seq {
		return old.store, nil
	}
	return now, nil
}

// current returns the generation that serves, known for lookEvery at most. While the register
// does not answer, what was known last serves on.
func (f *follower) current(ctx context.Context) *Store {
	known := func() bool {
		looked := f.looked.Load()
		return looked > 0 && int64(time.Since(f.born))-looked < int64(lookEvery)
	}
	if known() {
		return f.now.Load()
	}
	f.looking.Lock()
	defer f.looking.Unlock()
	if known() {
		return f.now.Load()
	}
	if _, err := f.look(ctx); err != nil && ctx.Err() == nil {
		slog.Warn("which generation of snapshots serves is not known; going on with the last one", "bucket", f.now.Load().generation.Bucket, "err", err)
	}
	return f.now.Load()
}

// look reads the register and binds to the generation that serves. The caller holds looking.
func (f *follower) look(ctx context.Context) (*Generations, error) {
	defer func() { f.looked.Store(max(1, int64(time.Since(f.born)))) }()
	g, err := f.register.read(ctx)
	if err != nil {
		return nil, err
	}
	s, err := f.register.bind(ctx, g.Current, false)
	switch {
	case err == nil:
		f.missing = time.Time{}
	case !errors.Is(err, errBucketLost):
		return nil, err
	case g.born: // by this process, a moment ago
		if s, err = f.register.bind(ctx, g.Current, true); err != nil {
			return nil, err
		}
	case f.missing.IsZero():
		f.missing = time.Now()
		return nil, err
	case time.Since(f.missing) < lostAfter:
		return nil, err
	default:
		// The log is the truth: all of it is folded anew, into a bucket of its own, so that no
		// checkpoint of the lost one counts.
		slog.Error("the bucket of snapshots that served is gone; beginning another one, which is folded from the log", "lost", g.Current.Bucket)
		next := newGeneration(g.Last + 1)
		g.Current, g.Last = next, next.N
		if s, err = f.register.bind(ctx, next, true); err != nil {
			return nil, err
		}
		if err := f.register.store(ctx, g); errors.Is(err, ErrMoved) {
			return nil, unavailable(err) // another process did the same: its choice is read at the next look
		} else if err != nil {
			return nil, err
		}
		f.missing = time.Time{}
	}
	if old := f.now.Load(); old == nil || old.generation != g.Current {
		if old != nil {
			f.before.Store(&before{old, time.Now().Add(overlap)})
		}
		f.now.Store(s)
	}
	return g, nil
}

// Pin returns the store of the generation that serves now, for whoever must see one generation
// from the beginning to the end of what it does.
func (s *Store) Pin(ctx context.Context) *Store {
	if s.follower == nil {
		return s
	}
	return s.follower.current(ctx)
}

// Known is Pin for who must not wait: it asks nobody.
func (s *Store) Known() *Store {
	if s.follower == nil {
		return s
	}
	return s.follower.now.Load()
}

// Generation says which generation a store is that Pin returned, and which one serves as far as is
// known of any other.
func (s *Store) Generation() Generation {
	if s.follower != nil {
		return s.follower.now.Load().generation
	}
	return s.generation
}

// Generations reads which generations there are, from the bucket itself.
func (s *Store) Generations(ctx context.Context) (*Generations, error) {
	s.follower.looking.Lock()
	defer s.follower.looking.Unlock()
	return s.follower.look(ctx)
}

// Build returns the store of a generation that is being built, a new one unless a build by the same
// version of the fold stands unfinished.
func (s *Store) Build(ctx context.Context) (*Store, error) {
	r := s.follower.register
	for {
		g, err := r.read(ctx)
		if err != nil {
			return nil, err
		}
		if g.Building == nil || g.Building.Foldable() != nil {
			stale := g.Building
			next := newGeneration(g.Last + 1)
			g.Building, g.Last = &next, next.N
			if err := r.store(ctx, g); errors.Is(err, ErrMoved) {
				continue
			} else if err != nil {
				return nil, err
			}
			if stale != nil {
				if err := r.drop(ctx, *stale); err != nil {
					return nil, err
				}
			}
		}
		return r.bind(ctx, *g.Building, true)
	}
}

// Restore returns the store of the generation that served before, to be brought up to date and
// switched to.
func (s *Store) Restore(ctx context.Context) (*Store, error) {
	r := s.follower.register
	g, err := r.read(ctx)
	if err != nil {
		return nil, err
	}
	if g.Previous == nil {
		return nil, &events.Error{Code: events.CodeNotFound, Detail: fmt.Sprintf("bucket %s serves, and no generation from before it is kept", g.Current.Bucket)}
	}
	if err := g.Previous.Foldable(); err != nil {
		return nil, err
	}
	return r.bind(ctx, *g.Previous, false)
}

// Switch makes a generation that Build or Restore returned the one that serves. The one that
// served is kept as the previous one; a third is returned, to be dropped.
func (s *Store) Switch(ctx context.Context, to *Store) (third *Generation, err error) {
	r := s.follower.register
	for {
		g, err := r.read(ctx)
		if err != nil {
			return nil, err
		}
		n := to.generation.N
		switch {
		case g.Current.N == n: // by another process, or without an answer
		case g.Building != nil && g.Building.N == n:
			third, g.Building = g.Previous, nil
		case g.Previous == nil || g.Previous.N != n:
			return nil, &events.Error{Code: events.CodeNotFound, Detail: fmt.Sprintf("generation %d was given up meanwhile; %d serves", n, g.Current.N)}
		}
		if g.Current.N != n {
			was := g.Current
			g.Previous, g.Current = &was, to.generation
			g.Current.Since = time.Now().UnixMilli()
			if err := r.store(ctx, g); errors.Is(err, ErrMoved) {
				continue
			} else if err != nil {
				return nil, err
			}
		}
		_, err = s.Generations(ctx)
		return third, err
	}
}

// DropPrevious forgets the generation that served before and deletes its bucket. It returns what was
// dropped, nil when nothing was kept.
func (s *Store) DropPrevious(ctx context.Context) (*Generation, error) {
	r := s.follower.register
	for {
		g, err := r.read(ctx)
		if err != nil || g.Previous == nil {
			return nil, err
		}
		was := g.Previous
		g.Previous = nil
		if err := r.store(ctx, g); errors.Is(err, ErrMoved) {
			continue
		} else if err != nil {
			return nil, err
		}
		if err := settle(ctx, g.Current); err != nil {
			return was, err
		}
		return was, r.drop(ctx, *was)
	}
}

// settle waits until every process knows that a generation serves, so that nobody reads the one
// before any more.
func settle(ctx context.Context, g Generation) error {
	wait := 3*lookEvery - time.Since(time.UnixMilli(g.Since))
	if wait <= 0 {
		return nil
	}
	timer := time.NewTimer(min(wait, 3*lookEvery))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// Drop deletes the bucket of a generation that Switch returned.
func (s *Store) Drop(ctx context.Context, g Generation) error {
	if err := settle(ctx, s.Generation()); err != nil {
		return err
	}
	return s.follower.register.drop(ctx, g)
}

func (r *register) drop(ctx context.Context, g Generation) error {
	if err := r.js.DeleteKeyValue(ctx, g.Bucket); err != nil && !errors.Is(err, jetstream.ErrBucketNotFound) && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return unavailable(err)
	}
	return nil
}
