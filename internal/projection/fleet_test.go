package projection_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

func (w *world) fleet() *projection.Fleet {
	return projection.NewFleet(w.reader, projection.FleetConfig{Every: 5 * time.Millisecond})
}

// list returns the ids that a filter picks, read in small pages.
func list(t testing.TB, f *projection.Fleet, ff projection.FleetFilter) (ids []string) {
	t.Helper()
	for cursor := ""; ; {
		page, err := f.List(journaltest.Context(t), ff, cursor, 2)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range page.Rows {
			ids = append(ids, r.Session)
		}
		if cursor = page.Cursor; cursor == "" {
			return ids
		}
	}
}

func (w *world) create(id, header string) {
	w.t.Helper()
	if _, _, err := w.Create(journaltest.Context(w.t), id, []byte(header)); err != nil {
		w.t.Fatal(err)
	}
}

const turnStart, stepStart, turnEnd = `{"type":"turn/start","data":{"turn":7}}`, `{"type":"step/start","data":{"turn":7,"step":2}}`,
	`{"type":"turn/end","data":{"turn":7,"reason":{"kind":"completed"}}}`

func TestFleetTellsWhatSessionsAreDoing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	w.create("empty", `{"createdAt":1000,"agentPreset":"scout"}`)
	w.create("open", `{"agentPreset":"smith","parentSession":"empty"}`)
	w.append("open", user("hello"), turnStart, `{"type":"agent/status","data":{"agent":"helper \"1\"","status":"running"}}`)
	open := w.append("open", stepStart)
	w.append("idle", `{"type":"turn/start","data":{"turn":7},"time":5000}`)
	idle := w.append("idle", `{"type":"turn/end","data":{"turn":7,"reason":{"kind":"completed"}},"time":5001}`)
	w.append("bad", user("good"))
	w.store("bad", func(seq events.Seq) string { return line("user/message", seq, "", message("no marker")) })
	k.wrote("open", open)
	k.wrote("idle", idle)
	k.record()

	f := w.fleet()
	for _, c := range []struct {
		what string
		ff   projection.FleetFilter
		want []string
	}{
		{"all", projection.FleetFilter{}, []string{"bad", "empty", "idle", "open"}},
		{"open", projection.FleetFilter{State: projection.StateOpen}, []string{"open"}},
		{"idle", projection.FleetFilter{State: projection.StateIdle}, []string{"empty", "idle"}},
		{"quarantined", projection.FleetFilter{State: projection.StateQuarantined}, []string{"bad"}},
		{"preset", projection.FleetFilter{Agent: "scout"}, []string{"empty"}},
		{"agent that runs", projection.FleetFilter{Agent: `helper "1"`}, []string{"open"}},
		{"agent of nobody", projection.FleetFilter{Agent: "nobody"}, nil},
		{"children", projection.FleetFilter{Parent: "empty"}, []string{"open"}},
		{"since creation", projection.FleetFilter{Since: 1001, State: projection.StateIdle}, []string{"idle"}},
		{"since the last event", projection.FleetFilter{Since: 5001, State: projection.StateIdle}, []string{"idle"}},
		{"since later", projection.FleetFilter{Since: 5002, State: projection.StateIdle}, nil},
	} {
		if got := list(t, f, c.ff); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", c.what, got, c.want)
		}
	}
	page, err := f.List(journaltest.Context(t), projection.FleetFilter{State: projection.StateOpen}, "", 10)
	if err != nil {
		t.Fatal(err)
	}
	h, rev, err := w.buckets.Snapshots.Head(journaltest.Context(t), "open")
	if err != nil {
		t.Fatal(err)
	}
	r := page.Rows[0]
	if r.Rev != rev || r.Seq != open || *r.OpenTurn != 7 || *r.OpenStep != 2 || r.Nodes != 1 || r.Time != h.Time || r.LogBytes != h.LogBytes || r.Parent != "empty" || r.Preset != "smith" {
		t.Errorf("row %+v of head %+v at revision %d", r, h, rev)
	}
}

func TestFleetListsWhatWasWrittenBeforeTheCall(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	f := w.fleet()
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 10 {
				id := fmt.Sprintf("s %d %d", g, i)
				w.create(id, "")
				page, err := f.List(journaltest.Context(t), projection.FleetFilter{}, "", 1000)
				if err != nil || !slices.ContainsFunc(page.Rows, func(r projection.FleetRow) bool { return r.Session == id }) {
					t.Errorf("%s is not listed: %v", id, err)
				}
			}
		})
	}
	wg.Wait()
	if got := list(t, f, projection.FleetFilter{}); len(got) != 40 || !slices.IsSorted(got) {
		t.Errorf("%d sessions: %q", len(got), got)
	}
}

func TestFleetReadsNothingTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	f := w.fleet()
	k.wrote("s", w.fill("s", 40, 30<<10)) // pages too
	list(t, f, projection.FleetFilter{})
	before := f.Stats().Read
	if list(t, f, projection.FleetFilter{}); f.Stats().Read != before {
		t.Errorf("%d messages read for a list without news", f.Stats().Read-before)
	}
	if before > 3 { // a header, a head, and one more that came between
		t.Errorf("%d messages read for one session", before)
	}
}

// reader of a feed: the latest that it was told of each session.
type feedReader struct {
	latest map[string]projection.FeedChange
	rev    uint64
	told   int
}

func (r *feedReader) take(cs []projection.FeedChange) error {
	if r.latest == nil {
		r.latest = map[string]projection.FeedChange{}
	}
	for _, c := range cs {
		if c.Revised {
			if c.Rev <= r.rev {
				return fmt.Errorf("revision %d of %s came behind %d", c.Rev, c.Session, r.rev)
			}
			r.rev = c.Rev
		}
		if old, ok := r.latest[c.Session]; ok && c.Seq < old.Seq {
			return fmt.Errorf("%s went back from seq %d to %d", c.Session, old.Seq, c.Seq)
		}
		r.latest[c.Session] = c
		r.told++
	}
	return nil
}

func (r *feedReader) until(ctx context.Context, fd *projection.Feed, condition func() bool) error {
	for !condition() {
		cs, err := fd.Next(ctx)
		if err != nil {
			return err
		}
		if err := r.take(cs); err != nil {
			return err
		}
	}
	return nil
}

func TestFeedsOfAllSpeedsEndWithTheLastStates(t *testing.T) {
	t.Parallel()
	const sessions, rounds, readers = 12, 15, 6
	w := newWorld(t)
	w.worker(projection.Config{FlushEvents: 3})
	f, ctx := w.fleet(), journaltest.Context(t)
	last := make([]events.Seq, sessions)
	id := func(s int) string { return fmt.Sprintf("s%02d", s) }
	written := make(chan struct{})
	var wg sync.WaitGroup
	for s := range sessions {
		wg.Go(func() {
			for range rounds {
				last[s] = w.append(id(s), user("x"))
			}
		})
	}
	go func() { wg.Wait(); close(written) }()
	var done sync.WaitGroup
	for n := range readers {
		done.Go(func() {
			var r feedReader
			rng := rand.New(rand.NewPCG(uint64(n), 3))
			ended := func() bool {
				select {
				case <-written:
				default:
					return false
				}
				for s := range sessions {
					if c, ok := r.latest[id(s)]; !ok || c.Seq < last[s] {
						return false
					}
				}
				return true
			}
			for !ended() { // resumes again and again
				fd, reset, err := f.Feed(ctx, projection.FleetFilter{}, r.rev)
				if err != nil || reset {
					t.Errorf("feed from %d: reset %t, %v", r.rev, reset, err)
					return
				}
				stop := r.told + 1 + rng.IntN(20)
				if err := r.until(ctx, fd, func() bool { return r.told >= stop || ended() }); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	done.Wait()
}

func TestFeedOfAFilterTellsWhoLeaves(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.worker(projection.Config{})
	f, ctx := w.fleet(), journaltest.Context(t)
	fd, _, err := f.Feed(ctx, projection.FleetFilter{State: projection.StateOpen}, 0)
	if err != nil {
		t.Fatal(err)
	}
	var r feedReader
	w.append("never open", user("x"))
	w.append("s", turnStart)
	if err := r.until(ctx, fd, func() bool { return len(r.latest) > 0 }); err != nil {
		t.Fatal(err)
	}
	if c := r.latest["s"]; len(r.latest) != 1 || c.Left || c.OpenTurn == nil {
		t.Fatalf("told %+v", r.latest)
	}
	rev := r.rev
	w.append("s", turnEnd)
	if err := r.until(ctx, fd, func() bool { return r.latest["s"].Left }); err != nil {
		t.Fatal(err)
	}
	// Who was away meanwhile is told too.
	fd, _, err = f.Feed(ctx, projection.FleetFilter{State: projection.StateOpen}, rev)
	if err != nil {
		t.Fatal(err)
	}
	var again feedReader
	if err := again.until(ctx, fd, func() bool { return again.latest["s"].Left }); err != nil {
		t.Fatal(err)
	}
}

func TestFeedTellsOfQuarantineAndItsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{})
	f, ctx := w.fleet(), journaltest.Context(t)
	k.wrote("s", w.append("s", user("x")))
	fd, _, err := f.Feed(ctx, projection.FleetFilter{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	w.store("s", func(seq events.Seq) string { return line("new/type", seq, "", "{}") })
	k.record()
	var r feedReader
	if err := r.until(ctx, fd, func() bool { return r.latest["s"].State == projection.StateQuarantined }); err != nil {
		t.Fatal(err)
	}
	late, _, err := f.Feed(ctx, projection.FleetFilter{}, f.Stats().Newest)
	if err != nil {
		t.Fatal(err)
	}
	if q := late.Aside(); len(q) != 1 || q[0].Session != "s" || q[0].Quarantine.Rule != events.RuleUnknownType {
		t.Errorf("a feed that begins now says %+v", q)
	}
	w.journal([]string{"new/type"})
	if err := k.Retry(ctx, "s"); err != nil {
		t.Fatal(err)
	}
	if err := r.until(ctx, fd, func() bool { return r.latest["s"].Quarantine == nil && r.latest["s"].Seq == 1 }); err != nil {
		t.Fatal(err)
	}
}

// putHead writes a head by hand, once the bucket can be reached: what is lost with a connection is
// never answered.
func (w *world) putHead(session, head string) {
	w.t.Helper()
	js := w.log.JetStream()
	journaltest.Eventually(w.t, "the bucket to take a head", func() bool {
		if js.Conn().FlushTimeout(time.Second) != nil {
			return false
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		_, err := w.buckets.Snapshots.KV().Put(ctx, session, []byte(head))
		return err == nil
	})
}

func TestFeedSurvivesALossOfTheBucketsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	put := func(id string, seq int) {
		t.Helper()
		w.putHead(id, fmt.Sprintf(`{"v":1,"session":"%s","seq":%d,"nodeCount":1}`, id, seq))
	}
	f := w.fleet()
	put("a", 1)
	put("b", 1)
	w.srv.Down()
	restore := w.srv.SaveStream("KV_SURFACES")
	w.srv.Up()
	put("a", 2)
	put("c", 1)
	journaltest.Eventually(t, "a fleet of three", func() bool { return f.Refresh(ctx) == nil && f.Stats().Newest == 4 })
	fd, _, err := f.Feed(ctx, projection.FleetFilter{}, 4)
	if err != nil {
		t.Fatal(err)
	}
	w.srv.Down()
	restore()
	w.srv.Up()
	put("d", 5) // takes the revision that was a's
	put("e", 6)
	put("f", 7)
	latest := map[string]events.Seq{}
	for len(latest) < 3 {
		cs, err := fd.Next(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range cs {
			latest[c.Session] = c.Seq
		}
	}
	if latest["d"] != 5 || latest["e"] != 6 || latest["f"] != 7 {
		t.Errorf("told of %v", latest)
	}
	if got := f.Stats(); got.Newest != 5 {
		t.Errorf("%+v", got)
	}
	_, reset, err := f.Feed(ctx, projection.FleetFilter{}, 99)
	if err != nil || !reset {
		t.Errorf("a feed from beyond the end: reset %t, %v", reset, err)
	}
}

// A connection that was lost before a rebuild, whose old bucket is gone when the index is asked again.
func TestFleetFollowsARebuildBehindAReconnect(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	k := w.worker(projection.Config{})
	k.wrote("a", w.append("a", user("0")))
	k.wrote("b", w.append("b", user("0"), user("1")))
	f := w.fleet()
	fd, _, err := f.Feed(ctx, projection.FleetFilter{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if cs, err := fd.Next(ctx); err != nil || len(cs) != 2 {
		t.Fatalf("%+v, %v", cs, err)
	}
	k.stop()
	w.srv.Restart()
	journaltest.Eventually(t, "the connection", func() bool { return w.js.Conn().IsConnected() })
	if _, err := projection.Rebuild(ctx, w.log, w.buckets, projection.RebuildOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.buckets.DropPrevious(ctx); err != nil {
		t.Fatal(err)
	}
	var page *projection.FleetPage
	journaltest.Eventually(t, "the list", func() bool {
		page, err = f.List(ctx, projection.FleetFilter{}, "", 10)
		return err == nil
	})
	if len(page.Rows) != 2 || page.Rows[0].Seq != 0 || page.Rows[1].Seq != 1 {
		t.Errorf("%+v", page.Rows)
	}
	cs, err := fd.Next(ctx) // behind the switch every session is told again, in whatever order the rebuild wrote them
	told := map[string]events.Seq{}
	for _, c := range cs {
		told[c.Session] = c.Seq
	}
	if err != nil || len(cs) != 2 || !maps.Equal(told, map[string]events.Seq{"a": 0, "b": 1}) {
		t.Errorf("the feed tells %+v, %v", cs, err)
	}
	w.restartAppender()
	w.worker(projection.Config{}).wrote("a", w.append("a", user("1")))
	if cs, err = fd.Next(ctx); err != nil || len(cs) != 1 || cs[0].Session != "a" || cs[0].Seq != 1 {
		t.Errorf("then it tells %+v, %v", cs, err)
	}
}

func TestFeedOfAnIdleFleetEndsWithItsContext(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	fd, _, err := w.fleet().Feed(journaltest.Context(t), projection.FleetFilter{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(journaltest.Context(t), 30*time.Millisecond)
	defer cancel()
	if cs, err := fd.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, %v", cs, err)
	}
}

// BenchmarkFleet measures the index over FLEET_SESSIONS sessions (20000) with heads of
// FLEET_HEAD bytes (8000): filling it, a page, a poll without news, and memory.
func BenchmarkFleet(b *testing.B) {
	number := func(name string, def int) int {
		if n, err := strconv.Atoi(os.Getenv(name)); err == nil {
			return n
		}
		return def
	}
	sessions, size := number("FLEET_SESSIONS", 20000), number("FLEET_HEAD", 8000)
	w := newWorld(b)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Minute)
	defer cancel()
	js, err := jetstream.New(w.srv.Conn(b), jetstream.WithPublishAsyncMaxPending(512))
	if err != nil {
		b.Fatal(err)
	}
	text := strings.Repeat("x", size)
	for i := range sessions {
		id := fmt.Sprintf("session-%06d", i)
		head := fmt.Sprintf(`{"v":1,"format":3,"fold":1,"session":"%s","seq":%d,"time":1767225604000,"logBytes":%d,"nodeCount":20,"pages":[],"tail":[{"seq":1,"message":{"text":"%s"}}],"nextPage":3,"lifecycle":{"turn":3,"step":null,"calls":[],"agents":{}}}`, id, i, size, text)
		for subject, body := range map[string]string{
			"$KV.HEADERS." + id:  fmt.Sprintf(`{"version":3,"id":"%s","createdAt":1767225600000,"isSeeded":false,"delegationDepth":0,"agentPreset":"standard"}`, id),
			"$KV.SURFACES." + id: head, "$KV.SURFACES." + id + ".0": `{"v":1,"nodes":[]}`,
		} {
			if _, err := js.PublishMsgAsync(&nats.Msg{Subject: subject, Data: []byte(body)}, jetstream.WithStallWait(time.Minute)); err != nil {
				b.Fatal(err)
			}
		}
	}
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		b.Fatal(ctx.Err())
	}
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	f := w.fleet()
	begun := time.Now()
	if err := f.Refresh(ctx); err != nil {
		b.Fatal(err)
	}
	took, with := time.Since(begun), heap()
	b.Logf("filled with %d sessions in %v", f.Stats().Sessions, took)
	f = nil
	b.Logf("%d bytes each", (with-min(with, heap()))/uint64(sessions))
	f = w.fleet()
	if err := f.Refresh(ctx); err != nil {
		b.Fatal(err)
	}
	b.Run("page", func(b *testing.B) {
		for i := range b.N {
			if _, err := f.List(ctx, projection.FleetFilter{}, fmt.Sprintf("session-%06d", i%sessions), 100); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("filter-that-picks-none", func(b *testing.B) {
		for range b.N {
			if _, err := f.List(ctx, projection.FleetFilter{Agent: "nobody"}, "", 100); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("poll", func(b *testing.B) {
		for range b.N {
			if err := f.Refresh(ctx); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("all-keys-as-before", func(b *testing.B) {
		for range b.N {
			if _, err := w.headers.List(ctx); err != nil {
				b.Fatal(err)
			}
		}
	})
	runtime.KeepAlive(f)
}
