package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// scale says how large a fleet is. PALIMPSEST_SCALE=SESSIONS,EVENTS,GOMEMLIMIT sets it.
type scale struct {
	sessions, events int
	memory           string // GOMEMLIMIT of the projector
}

func theScale(t *testing.T) scale {
	t.Helper()
	s := scale{sessions: 300, events: 9000, memory: "128MiB"}
	if v := os.Getenv("PALIMPSEST_SCALE"); v != "" {
		parts := strings.Split(v, ",")
		if len(parts) != 3 {
			t.Fatalf("PALIMPSEST_SCALE: expected SESSIONS,EVENTS,GOMEMLIMIT, found %q", v)
		}
		var err error
		if s.sessions, err = strconv.Atoi(parts[0]); err != nil {
			t.Fatal(err)
		}
		if s.events, err = strconv.Atoi(parts[1]); err != nil {
			t.Fatal(err)
		}
		s.memory = parts[2]
	}
	return s
}

// perCommit is how many events of the fleet are appended at a time.
const perCommit = 10

// A fleet is projected within a memory limit, whatever its size, and folded anew into another bucket
// while appends and reads go on: no read fails, and the result is that of a fresh fold.
func TestAFleetIsProjectedAndRebuilt(t *testing.T) {
	t.Parallel()
	s := theScale(t)
	appender := harness.Appender{Data: t.TempDir()}.Start(t)
	client := appender.Client()
	name := func(i int) string { return fmt.Sprintf("fleet-%06d", i) }

	began := time.Now()
	var turn atomic.Int64
	rounds := s.events / s.sessions / perCommit
	var fill sync.WaitGroup
	for range 16 {
		fill.Go(func() {
			for {
				n := int(turn.Add(1)) - 1
				if n >= rounds*s.sessions {
					return
				}
				i, round := n%s.sessions, n/s.sessions
				if err := appendLines(t.Context(), client, name(i), fleetLines(i, round)); err != nil {
					t.Errorf("append to %s: %v", name(i), err)
					return
				}
			}
		})
	}
	fill.Wait()
	total := rounds * s.sessions * perCommit
	t.Logf("%d events in %d sessions appended in %.1f s", total, s.sessions, time.Since(began).Seconds())
	if t.Failed() {
		return
	}

	began = time.Now()
	projector := harness.Projector{NATS: appender.NATS, Env: []string{"GOMEMLIMIT=" + s.memory}, Args: cachesFor(t, s.memory)}.Start(t)
	reader := projector.Client()
	var most int
	var curve []string
	next := began
	harness.Until(t, 30*time.Minute, "the fleet is projected", func() error {
		if rss, ok := projector.RSS(); ok {
			most = max(most, rss)
			if time.Now().After(next) {
				curve = append(curve, fmt.Sprint(rss>>20))
				next = time.Now().Add(5 * time.Second)
			}
		}
		return caughtUp(t.Context(), reader)
	})
	t.Logf("projected in %.1f s with GOMEMLIMIT=%s; resident memory at most %d MiB; each 5 s, in MiB: %s", time.Since(began).Seconds(), s.memory, most>>20, strings.Join(curve, " "))

	// Appends and reads go on while everything is folded anew.
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var busy sync.WaitGroup
	var appends, reads atomic.Int64
	busy.Go(func() {
		pause := time.NewTicker(5 * time.Millisecond)
		defer pause.Stop()
		for n := 0; ctx.Err() == nil; n++ {
			i := n % s.sessions
			if err := appendLines(ctx, client, name(i), fleetLines(i, rounds+n/s.sessions)); err != nil && ctx.Err() == nil {
				t.Errorf("append during the rebuild: %v", err)
			}
			appends.Add(1)
			select {
			case <-pause.C:
			case <-ctx.Done():
			}
		}
	})
	for w := range 4 {
		busy.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(w)))
			seen := map[string]int64{}
			for ctx.Err() == nil {
				id := name(random.IntN(s.sessions))
				m, err := reader.Messages(ctx, id)
				switch {
				case ctx.Err() != nil:
				case err != nil:
					t.Errorf("read during the rebuild: %v", err)
				case m.Seq < seen[id]:
					t.Errorf("%s was read at seq %d after seq %d", id, m.Seq, seen[id])
				default:
					seen[id] = m.Seq
				}
				reads.Add(1)
			}
		})
	}
	began = time.Now()
	r := harness.RunFor(t, time.Hour, "projector", "rebuild", "--json", "--nats", appender.NATS)
	took := time.Since(began)
	stop()
	busy.Wait()
	var report struct {
		To             struct{ Bucket string }
		Events         int
		Seconds        float64
		Followed       bool
		Commits, Heads int
	}
	if err := json.Unmarshal([]byte(r.Stdout), &report); r.Code != 0 || err != nil {
		t.Fatalf("rebuild: exit code %d, %v\n%s", r.Code, err, r.Output())
	}
	t.Logf("rebuilt in %.1f s (switched after %.1f s): %d events, %d heads written; meanwhile %d appends of %d events and %d reads", took.Seconds(), report.Seconds, report.Events, report.Heads, appends.Load(), perCommit, reads.Load())
	if report.Events < total || report.To.Bucket != "SURFACES_2" || !report.Followed || appends.Load() == 0 || reads.Load() == 0 {
		t.Errorf("%+v", report)
	}
	began = time.Now()
	harness.Until(t, 10*time.Minute, "the projector goes on in the new bucket", func() error { return caughtUp(t.Context(), reader) })
	t.Logf("the projector has caught up in the new bucket after %.1f s", time.Since(began).Seconds())
	began = time.Now()
	v := harness.RunFor(t, time.Hour, "projector", "verify", "--all", "--nats", appender.NATS)
	if v.Code != 0 {
		t.Errorf("projector verify --all: exit code %d\n%s", v.Code, v.Output())
	}
	t.Logf("verified in %.1f s, with at most %d MiB", time.Since(began).Seconds(), v.MaxRSS>>20)
	if r := harness.Run(t, "projector", "rebuild", "--drop-previous", "--nats", appender.NATS); r.Code != 0 || !strings.Contains(r.Stdout, "SURFACES") {
		t.Errorf("drop: exit code %d\n%s", r.Code, r.Output())
	}
	if _, err := reader.Messages(t.Context(), name(0)); err != nil {
		t.Errorf("read after the old bucket was dropped: %v", err)
	}
}

// cachesFor are the flags for a memory limit in MiB: a quarter of it for sessions, an eighth for what
// is not written yet and a sixteenth for pages. The rest is for what is on its way and the collector.
func cachesFor(t *testing.T, memory string) []string {
	t.Helper()
	n, err := strconv.Atoi(strings.TrimSuffix(memory, "MiB"))
	if err != nil {
		t.Fatalf("PALIMPSEST_SCALE: expected a GOMEMLIMIT in MiB, found %q", memory)
	}
	part := func(of int) string { return strconv.Itoa(n << 20 / of) }
	return []string{"--cache-bytes", part(4), "--unflushed-bytes", part(8), "--page-cache-bytes", part(16)}
}

// fleetLines are the events of one commit: four in ten are on the surface.
func fleetLines(session, round int) []byte {
	var b bytes.Buffer
	pad := strings.Repeat("x", 380)
	for i := range perCommit {
		if i%5 < 2 {
			fmt.Fprintf(&b, `{"type":"user/message","surfaceOp":"append","data":{"id":"m%d-%d","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"%s"}]}}`+"\n", round, i, pad)
		} else {
			fmt.Fprintf(&b, `{"type":"assistant/chunk","data":{"turn":1,"step":1,"text":"%s","n":%d}}`+"\n", pad, session)
		}
	}
	return b.Bytes()
}

func appendLines(ctx context.Context, c *harness.Client, session string, lines []byte) error {
	a, err := c.Do(ctx, "POST", harness.SessionPath(session, "/events"), lines, harness.ContentType("application/x-ndjson"))
	if err == nil && a.Status != 201 {
		err = fmt.Errorf("status %d: %s", a.Status, a.Body)
	}
	return err
}

// caughtUp says why a projector has not projected all that is in the log.
func caughtUp(ctx context.Context, c *harness.Client) error {
	a, err := c.Do(ctx, "GET", "/v1/status", nil)
	if err != nil {
		return err
	}
	var st struct{ CaughtUp bool }
	if err := json.Unmarshal(a.Body, &st); err != nil {
		return fmt.Errorf("status %d: %s", a.Status, a.Body)
	}
	if !st.CaughtUp {
		return fmt.Errorf("%.300s", a.Body)
	}
	return nil
}
