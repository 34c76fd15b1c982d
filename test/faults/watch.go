package main

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// watcher follows a session from its start, from any projector that answers, and goes on behind
// the last delta when it is cut off.
type watcher struct {
	stop context.CancelFunc
	done chan struct{}

	mu   sync.Mutex // guards the two below
	seqs []int64    // of the deltas, in the order in which they came
	last string     // id of the last event
}

func (l *callers) watch(ctx context.Context, s *session, i int) {
	ctx, stop := context.WithCancel(ctx)
	w := &watcher{stop: stop, done: make(chan struct{})}
	s.watchers = append(s.watchers, w)
	go func() {
		defer close(w.done)
		for n := i; ctx.Err() == nil; n++ {
			w.follow(ctx, l, harness.SessionPath(s.id, "/watch"), l.reads[n%len(l.reads)].Base)
			load.Wait(ctx, 200*time.Millisecond)
		}
	}()
}

// follow is one connection.
func (w *watcher) follow(ctx context.Context, l *callers, path, base string) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path+"?from=-1", nil)
	if err != nil {
		l.s.Finding("watch: %v", err)
		return
	}
	w.mu.Lock()
	if w.last != "" {
		r.Header.Set("Last-Event-ID", w.last)
	}
	w.mu.Unlock()
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return // not there yet, or not now
	}
	l.s.Add("watches begun", 1)
	// A projector that stands still sends nothing, not even its heartbeat: go to another one.
	idle := time.AfterFunc(30*time.Second, func() { _ = res.Body.Close() })
	defer idle.Stop()
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, 16<<20)
	kind, id := "", ""
	for lines.Scan() {
		idle.Reset(30 * time.Second)
		name, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		switch {
		case name == "event":
			kind = value
		case name == "id":
			id = value
		case lines.Text() == "":
			if kind == "delta" {
				seq, err := strconv.ParseInt(id, 10, 64)
				if err != nil {
					l.s.Finding("watch of %s: id %q", path, id)
					return
				}
				w.mu.Lock()
				w.seqs, w.last = append(w.seqs, seq), id
				w.mu.Unlock()
			}
			kind = ""
		}
	}
}

// reached waits until the last delta is that of a seq, and says what is wrong with all of them.
func (w *watcher) reached(ctx context.Context, want []int64) error {
	for {
		w.mu.Lock()
		n := len(w.seqs)
		for i := range min(n, len(want)) {
			if w.seqs[i] != want[i] {
				defer w.mu.Unlock()
				return fmt.Errorf("delta %d of the watch is that of seq %d, want %d", i, w.seqs[i], want[i])
			}
		}
		w.mu.Unlock()
		switch {
		case n > len(want):
			return fmt.Errorf("the watch told of %d deltas, want %d", n, len(want))
		case n == len(want):
			return nil
		}
		if !load.Wait(ctx, 50*time.Millisecond) {
			return fmt.Errorf("the watch told of %d deltas, want %d", n, len(want))
		}
	}
}
