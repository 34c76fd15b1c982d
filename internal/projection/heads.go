package projection

import (
	"sync"

	"palimpsest/internal/events"
)

// Heads tells whoever waits that a head was written in this process. Heads that other
// processes write are heard of on core NATS, and found by polling in any case.
type Heads struct {
	mu      sync.Mutex
	waiting map[string][]*waiter
	sick    map[string]bool // sessions that were put into quarantine here
}

type waiter struct {
	seq events.Seq
	hit chan struct{}
}

// NewHeads returns Heads that nobody waits for.
func NewHeads() *Heads { return &Heads{waiting: map[string][]*waiter{}} }

// written wakes those who wait for a seq up to this one.
func (h *Heads) written(session string, seq events.Seq) {
	h.mu.Lock()
	defer h.mu.Unlock()
	ws := h.waiting[session]
	keep := ws[:0]
	for _, w := range ws {
		if w.seq <= seq {
			close(w.hit)
		} else {
			keep = append(keep, w)
		}
	}
	if len(keep) == 0 {
		delete(h.waiting, session)
	} else {
		h.waiting[session] = keep
	}
}

// await returns a channel that is closed once a head at or beyond seq is written here. stop
// must be called when nobody waits any more.
func (h *Heads) await(session string, seq events.Seq) (hit <-chan struct{}, stop func()) {
	w := &waiter{seq, make(chan struct{})}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.waiting[session] = append(h.waiting[session], w)
	return w.hit, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		ws := h.waiting[session]
		for i := range ws {
			if ws[i] == w {
				h.waiting[session] = append(ws[:i], ws[i+1:]...)
				break
			}
		}
		if len(h.waiting[session]) == 0 {
			delete(h.waiting, session)
		}
	}
}
