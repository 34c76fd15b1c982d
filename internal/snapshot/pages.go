package snapshot

import (
	"context"
	"errors"
	"unsafe"

	"github.com/synadia-io/orbit.go/jetstreamext"

	"palimpsest/internal/cache"
	"palimpsest/internal/surface"
)

// Pages that are read with one request, at most: so many, and so many bytes of their events'
// data, unless one alone has more.
const (
	batchPages = 128
	batchBytes = 4 << 20
)

// readBytes is how many bytes of pages are read at a time by all: the server gives up a connection that
// more than 64 MiB wait for. A page that has more is read alone.
const readBytes = 32 << 20

// DefaultPageCache is how many bytes of pages a Store keeps in memory by default.
const DefaultPageCache = 128 << 20

// pageCache holds what was parsed of the values of a bucket, by bucket and key: pages and index
// pages, which are created once and never rewritten, and what heads say, each of one revision.
//
// There are two exceptions. A page of a damaged snapshot is written over, and Write forgets it;
// and a power cut can take the newest writes of a single server, after which a number or a
// revision is used again: the server restarts then, so the cache is cleared at a reconnect.
type pageCache = cache.Cache[[2]string, kept]

// kept is one of the three.
type kept struct {
	page     *Page
	index    *IndexPage
	snap     *Snapshot // as the head has it, to be copied; the messages of sealed pages are not in it
	revision uint64    // of the head
}

func newPageCache(bytes int) *pageCache { return cache.New[[2]string, kept](bytes) }

func (s *Store) cached(key string) [2]string { return [2]string{s.generation.Bucket, key} }

// cache returns the cache, cleared when the connection was lost meanwhile.
func (s *Store) cache() *pageCache {
	c := s.register.pages.Load()
	c.ClearAt(s.register.js.Conn().Stats().Reconnects)
	return c
}

// unfilled is Load through the cache: a head that did not change is not read into a snapshot again. An index
// page that is not there is errNoValue.
func (s *Store) unfilled(ctx context.Context, session string) (*Snapshot, uint64, error) {
	c, key := s.cache(), s.cached(HeadKey(session))
	raw, rev, err := s.get(ctx, HeadKey(session))
	if errors.Is(err, errNoValue) {
		return nil, 0, nil
	}
	if err != nil {
		return nil, 0, err
	}
	if k, ok := c.Get(key); ok && k.revision == rev && k.snap.ID == session {
		return k.snap.copied(), rev, nil
	}
	h, err := ParseHead(raw, session)
	if err != nil {
		return nil, rev, err
	}
	snap, err := s.restore(ctx, h, surface.KeepBodies)
	if err != nil {
		return nil, rev, err
	}
	first := snap.copied()
	c.Put(key, kept{snap: snap, revision: rev}, snap.Bytes()+len(snap.Pages())*int(unsafe.Sizeof(page{})))
	return first, rev, nil
}

// indexPage reads an index page.
func (s *Store) indexPage(ctx context.Context, key string) (*IndexPage, error) {
	c := s.cache()
	if k, ok := c.Get(s.cached(key)); ok {
		return k.index, nil
	}
	raw, _, err := s.get(ctx, key)
	if err != nil {
		return nil, err
	}
	ip, err := ParseIndexPage(raw, key)
	if err == nil && ip.V == layoutVersion {
		size := len(raw)
		for i := range ip.Pages {
			size += len(ip.Pages[i].Seqs)*8 + int(unsafe.Sizeof(PageEntry{}))
		}
		c.Put(s.cached(key), kept{index: ip}, size)
	}
	return ip, err
}

// CachePages keeps up to so many bytes of pages and heads in memory, those that were read last. With 0
// every page is read from the bucket whenever it is asked for. Defaults to DefaultPageCache.
func (s *Store) CachePages(bytes int) { s.register.pages.Store(newPageCache(bytes)) }

// OnRead lets a test get between the reads of head and pages: f hears of pages that are about to
// be read from the bucket, by key. It must be set before the store is used.
func (s *Store) OnRead(f func(keys []string)) { s.register.reading = f }

// memory estimates what a page takes that was parsed from raw, which its messages are parts of.
func (p *Page) memory(raw []byte) int { return len(raw) + len(p.Nodes)*int(unsafe.Sizeof(PageNode{})) }

// batch returns the first pages, those that are read with one request, and the bytes of their events'
// data.
func (s *Snapshot) batch(pages []int64) (some []int64, bytes int64) {
	size := make(map[int64]int64, len(pages))
	for g := 0; g <= len(s.groups); g++ {
		for _, p := range s.pagesOf(g) {
			size[p.n] = p.bytes
		}
	}
	for i, n := range pages {
		if i == batchPages || i > 0 && bytes+size[n] > batchBytes {
			return pages[:i], bytes
		}
		bytes += size[n]
	}
	return pages, bytes
}

func pageKeys(token string, pages []int64) []string {
	out := make([]string, len(pages))
	for i, n := range pages {
		out[i] = PageKey(token, n)
	}
	return out
}

// readPages reads pages with one request, by key. It leaves out those that are not there, and
// all that it got no answer for.
func (s *Store) readPages(ctx context.Context, token string, pages []int64) map[string][]byte {
	if len(pages) == 1 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	prefix := "$KV." + s.generation.Bucket + "."
	subjects := pageKeys(token, pages)
	for i := range subjects {
		subjects[i] = prefix + subjects[i]
	}
	msgs, err := jetstreamext.GetLastMsgsFor(ctx, s.register.js, "KV_"+s.generation.Bucket, subjects)
	if err != nil {
		return nil
	}
	out := make(map[string][]byte, len(pages))
	for m, err := range msgs {
		if err != nil {
			break
		}
		if len(m.Data) > 0 { // a deletion has none
			out[m.Subject[len(prefix):]] = m.Data
		}
	}
	return out
}
