package projection

import (
	"context"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/cache"
	"palimpsest/internal/events"
)

// DefaultHeaderCache is how many bytes of headers a Reader keeps in memory by default.
const DefaultHeaderCache = 16 << 20

// headerOverhead is about what a header takes in memory beside its bytes.
const headerOverhead = 512

// CacheHeaders keeps up to so many bytes of session headers in memory, those that were asked for
// last. With 0 every header is read whenever it is asked for. Defaults to DefaultHeaderCache. It
// must be called before the reader is used.
func (r *Reader) CacheHeaders(bytes int) { r.known = cache.New[string, *events.Header](bytes) }

// header returns a session's header. A header is created once and never changes, so one that was
// read is not read again, unless the server was away: a power cut can take the newest ones.
func (r *Reader) header(ctx context.Context, session string) (*events.Header, error) {
	r.known.ClearAt(r.log.Reconnects())
	if h, ok := r.known.Get(session); ok {
		return h, nil
	}
	h, err := r.headers.Get(ctx, session)
	if err == nil {
		r.known.Put(session, h, headerOverhead+len(session)+len(h.Raw))
	}
	return h, err
}

const (
	// sickEvery is how old a reader's list of quarantined sessions may be.
	sickEvery = 100 * time.Millisecond
	// settling is how long the list is read again after the bucket has changed: by then every
	// replica has what changed.
	settling = 10 * time.Second
)

// sickList knows which sessions may be in quarantine, so that not every read of a session asks
// the bucket, which mostly has nothing to tell. It is at most sickEvery old, and never older
// than what the worker of the same process found.
type sickList struct {
	mu      sync.Mutex // guards all below
	looked  time.Time
	changed time.Time
	was     bucketState
	listed  map[string]bool
	failed  bool // the last look: everything may be
}

// bucketState tells whether anything happened in a bucket.
type bucketState struct {
	created time.Time
	last    uint64
	key     string // of the generation
}

// may reports whether a session may be in quarantine; its record tells.
func (l *sickList) may(ctx context.Context, b *Buckets, session string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if time.Since(l.looked) >= sickEvery {
		err := l.look(ctx, b)
		l.looked, l.failed = time.Now(), err != nil
	}
	return l.failed || l.listed[session]
}

func (l *sickList) look(ctx context.Context, b *Buckets) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	b = b.Pin(ctx)
	st, err := b.Quarantine.Status(ctx)
	if err != nil {
		return err
	}
	now := bucketState{key: b.quarantineKey("")}
	if s, ok := st.(*jetstream.KeyValueBucketStatus); ok {
		now.created, now.last = s.StreamInfo().Created, s.StreamInfo().State.LastSeq
	}
	if now != l.was {
		l.was, l.changed = now, time.Now()
	} else if time.Since(l.changed) > settling {
		return nil
	}
	if now.last == 0 {
		l.listed = nil
		return nil
	}
	all, err := b.Quarantined(ctx)
	if err != nil {
		l.was = bucketState{} // list again
		return err
	}
	l.listed = make(map[string]bool, len(all))
	for i := range all {
		l.listed[all[i].Session] = true
	}
	return nil
}

// quarantineOf returns a session's record, nil when it is not in quarantine. It asks the bucket
// itself when the answer must be as new as the log.
func (r *Reader) quarantineOf(ctx context.Context, session string, fresh bool) (*Quarantine, error) {
	if !fresh && !r.heads.isSick(session) && !r.sick.may(ctx, r.buckets, session) {
		return nil, nil
	}
	return r.buckets.QuarantineOf(ctx, session)
}

// sickened notes that a session of this process was put into quarantine.
func (h *Heads) sickened(session string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.sick == nil {
		h.sick = map[string]bool{}
	}
	h.sick[session] = true
}

// isSick reports whether a worker of this process ever put the session into quarantine.
func (h *Heads) isSick(session string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sick[session]
}
