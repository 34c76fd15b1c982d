package projection_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"palimpsest/internal/api"
	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

// compact replaces a few neighbouring nodes by a summary.
func (a *author) compact(ctx context.Context) error {
	from, to := a.span()
	r, err := a.w.Compact(ctx, appender.CompactRequest{Session: a.id, Start: a.surface[from], End: a.surface[to], Summary: json.RawMessage(`"less"`), Allow: []string{appender.AllowSplit}})
	if err != nil {
		return err
	}
	a.shadow(from, to, r.FirstSeq+2)
	a.next = r.LastSeq + 1
	return nil
}

// Two hundred watchers over HTTP, cut off again and again, as is the projector's connection to
// NATS, while their sessions are compacted without end: each rebuilds its session's surface,
// and sees every change once. WATCH_STORM is how many times larger it is (1).
func TestWatchersOutlastAStorm(t *testing.T) {
	t.Parallel()
	scale := 1
	if s := os.Getenv("WATCH_STORM"); s != "" {
		var err error
		if scale, err = strconv.Atoi(s); err != nil || scale < 1 {
			t.Fatalf("WATCH_STORM: expected a number from 1 on, found %q", s)
		}
	}
	const sessions, watchers = 8, 200
	rounds := 20 * scale
	w := newWorld(t)
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(scale)*time.Minute)
	defer cancel()
	k := w.worker(projection.Config{FlushEvents: 5})
	proxy := w.srv.StartProxy(t)
	nc := journaltest.Dial(t, proxy.URL())
	srv := httptest.NewServer(api.NewProjector(w.reader, k.Worker, projection.NewHubs(w.reader, nc), audit.New(w.log, w.headers, w.buckets), api.ProjectorConfig{}))
	defer srv.Close()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}

	authors := make([]*author, sessions)
	for s := range authors {
		authors[s] = w.author(fmt.Sprintf("storm %d", s), uint64(s)+40, 100)
		if err := authors[s].commit(ctx); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for _, a := range authors {
		wg.Go(func() {
			for i := range rounds {
				err := a.commit(ctx)
				for n := 0; err == nil && n < 2 && len(a.surface) > 2; n++ {
					err = a.compact(ctx)
				}
				if err != nil {
					t.Errorf("round %d: %v", i, err)
					return
				}
				if i%10 == 9 { // the next delta that comes is lost, and the connection with it
					proxy.LoseWhen(func(up bool, b []byte) bool { return !up })
				}
			}
			if err := a.end(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	var cuts atomic.Int64
	results := make([]*rebuilt, watchers)
	for n := range results {
		id, rng := authors[n%sessions].id, rand.New(rand.NewPCG(uint64(n), 9))
		b := rebuild(nil, events.NoSeq)
		results[n] = b
		wg.Go(func() {
			for !b.ended && ctx.Err() == nil {
				if err := watchOnce(ctx, client, srv.URL, id, b, 1+rng.IntN(60)); err != nil {
					t.Errorf("watcher %d: %v", n, err)
					return
				}
				cuts.Add(1)
			}
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for s, a := range authors {
		l := w.refold(a.id, events.MaxSeq)
		v, err := w.reader.View(journaltest.Context(t), a.id, projection.Want{MinSeq: a.next - 1, Timeout: 30 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(v.Surface.Seqs(), a.surface) {
			t.Fatalf("the head of %s has %v, want %v", a.id, v.Surface.Seqs(), a.surface)
		}
		for n := s; n < watchers; n += sessions {
			if b := results[n]; !slices.Equal(b.surface, a.surface) || !slices.Equal(b.seen, l.changed) {
				t.Errorf("watcher %d of %s: rebuilt %v of %d changes, want %v of %d", n, a.id, b.surface, len(b.seen), a.surface, len(l.changed))
			}
		}
	}
	if n := cuts.Load(); n < watchers {
		t.Errorf("only %d connections", n)
	}
	t.Logf("%d connections, %d reconnects to NATS", cuts.Load(), nc.Stats().Reconnects)
}

// watchOnce watches over one connection, for so many deltas at most, and leaves it without a word.
func watchOnce(ctx context.Context, client *http.Client, base, id string, b *rebuilt, most int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, "GET", base+"/v1/sessions/"+url.PathEscape(id)+"/watch?from=-1", nil)
	if err != nil {
		return err
	}
	if b.at > events.NoSeq {
		r.Header.Set("Last-Event-ID", b.at.String())
	}
	resp, err := client.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusServiceUnavailable: // the connection to NATS was lost just now
		return nil
	default:
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	in := bufio.NewReader(resp.Body)
	var name string
	for most > 0 && !b.ended {
		line, err := in.ReadString('\n')
		if err != nil {
			return errors.Join(err, ctx.Err())
		}
		line = strings.TrimSuffix(line, "\n")
		if v, ok := strings.CutPrefix(line, "event: "); ok {
			name = v
		}
		v, ok := strings.CutPrefix(line, "data: ")
		switch {
		case !ok:
		case name == "delta":
			var d projection.Delta
			if err := json.Unmarshal([]byte(v), &d); err != nil {
				return err
			}
			if err := b.apply(d); err != nil {
				return err
			}
			most--
		case name == "end":
			return fmt.Errorf("the watch ended: %s", v)
		}
	}
	return nil
}
