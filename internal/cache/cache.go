// Package cache owns values in memory that can be read again from elsewhere: as many as fit
// into a number of bytes, those that were used last. It knows nothing of what they are.
package cache

import (
	"container/list"
	"sync"
)

// Cache holds values up to a number of bytes. It is safe for concurrent use. Values are shared
// by all who get them, so they must not be changed.
type Cache[K comparable, V any] struct {
	mu     sync.Mutex // guards all below
	limit  int
	bytes  int
	at     uint64 // of ClearAt
	byKey  map[K]*list.Element
	recent list.List // of *item[K, V], most recently used first
}

type item[K comparable, V any] struct {
	key   K
	value V
	size  int
}

// New returns an empty cache of at most limit bytes. With 0 it keeps nothing.
func New[K comparable, V any](limit int) *Cache[K, V] {
	return &Cache[K, V]{limit: limit, byKey: map[K]*list.Element{}}
}

// Get returns the value of a key.
func (c *Cache[K, V]) Get(key K) (v V, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	el, ok := c.byKey[key]
	if !ok {
		return v, false
	}
	c.recent.MoveToFront(el)
	return el.Value.(*item[K, V]).value, true
}

// Put keeps a value that takes size bytes, in the place of the one that the key has. One that is
// larger than an eighth of the cache is not kept: it would drive out many others.
func (c *Cache[K, V]) Put(key K, v V, size int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(c.byKey[key])
	if size > c.limit/8 {
		return
	}
	c.byKey[key] = c.recent.PushFront(&item[K, V]{key, v, size})
	c.bytes += size
	for c.bytes > c.limit {
		c.remove(c.recent.Back())
	}
}

// Delete forgets a key.
func (c *Cache[K, V]) Delete(key K) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.remove(c.byKey[key])
}

// Clear forgets everything.
func (c *Cache[K, V]) Clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bytes = 0
	clear(c.byKey)
	c.recent.Init()
}

// ClearAt forgets everything when n is another one than it was told before: a count of what makes
// values uncertain.
func (c *Cache[K, V]) ClearAt(n uint64) {
	c.mu.Lock()
	changed := c.at != n
	c.at = n
	c.mu.Unlock()
	if changed {
		c.Clear()
	}
}

// Bytes is what the values take.
func (c *Cache[K, V]) Bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}

func (c *Cache[K, V]) remove(el *list.Element) {
	if el == nil {
		return
	}
	it := c.recent.Remove(el).(*item[K, V])
	delete(c.byKey, it.key)
	c.bytes -= it.size
}
