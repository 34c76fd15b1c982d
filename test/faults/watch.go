package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
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

	mu     sync.Mutex // guards the two below
	deltas []delta    // in the order in which they came
	last   string     // id of the last event
}

// delta is one change of the surface, as a watch tells it.
type delta struct {
	Seq      int64
	Op       string
	Node     struct{ Seq int64 }
	Shadowed []int64
}

// newDelta is the delta of an event that replaces nodes, or none.
func newDelta(seq int64, shadowed []int64) delta {
	d := delta{Seq: seq, Op: "append", Shadowed: shadowed}
	if shadowed != nil {
		d.Op = "replace"
	}
	d.Node.Seq = seq
	return d
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
	kind, id, data := "", "", ""
	for lines.Scan() {
		idle.Reset(30 * time.Second)
		name, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		switch {
		case name == "event":
			kind = value
		case name == "id":
			id = value
		case name == "data":
			data = value
		case lines.Text() == "":
			if kind == "delta" {
				var d delta
				if err := json.Unmarshal([]byte(data), &d); err != nil || strconv.FormatInt(d.Seq, 10) != id {
					l.s.Finding("watch of %s: id %q, data %q", path, id, data)
					return
				}
				w.mu.Lock()
				w.deltas, w.last = append(w.deltas, d), id
				w.mu.Unlock()
			}
			kind, data = "", ""
		}
	}
}

// reached waits until as many deltas came as are wanted, and says what is wrong with them.
func (w *watcher) reached(ctx context.Context, want []delta) error {
	for {
		w.mu.Lock()
		n := len(w.deltas)
		for i := range min(n, len(want)) {
			if !reflect.DeepEqual(w.deltas[i], want[i]) {
				defer w.mu.Unlock()
				return fmt.Errorf("delta %d of the watch is %+v, want %+v", i, w.deltas[i], want[i])
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
