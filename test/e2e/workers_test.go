package e2e_test

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// scaleLease is the lease of the workers on a single server; scaleNoise is what a loaded machine
// may add to the time of a take-over.
const (
	scaleLease = 2 * time.Second
	scaleNoise = 3 * time.Second
)

// load is a number of sessions that grow side by side until it is stopped.
type load struct {
	t      *testing.T
	name   string
	last   []atomic.Int64 // by session, the last acknowledged seq; -1 for none
	stop   context.CancelFunc
	wg     sync.WaitGroup
	events atomic.Int64
}

// startLoad lets writers append scripts, each to sessions of its own, at a pace that leaves the
// machine some time.
func startLoad(t *testing.T, client *harness.Client, name string, sessions, writers int) *load {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	l := &load{t: t, name: name, last: make([]atomic.Int64, sessions), stop: stop}
	for w := range writers {
		l.wg.Go(func() {
			pace := time.NewTicker(20 * time.Millisecond)
			defer pace.Stop()
			scripts := make([]*harness.Script, sessions)
			for i := range scripts {
				l.last[i].CompareAndSwap(0, -1)
				scripts[i] = harness.NewScript(uint64(i), 60)
			}
			for {
				for i := w; i < sessions; i += writers {
					select {
					case <-pace.C:
					case <-ctx.Done():
						return
					}
					// Not bound by ctx: what was sent is waited for.
					r, err := client.AppendEvents(t.Context(), l.session(i), scripts[i].Next(3))
					if err != nil {
						t.Errorf("append to %s: %v", l.session(i), err)
						return
					}
					l.last[i].Store(r.LastSeq)
					l.events.Add(3)
				}
			}
		})
	}
	t.Cleanup(l.end)
	return l
}

func (l *load) session(i int) string { return fmt.Sprintf("%s-%02d", l.name, i) }

// end stops the writers and waits for them. It tolerates a second call.
func (l *load) end() {
	l.stop()
	l.wg.Wait()
}

// goOn waits until so many more events were appended.
func (l *load) goOn(events int64) {
	l.t.Helper()
	if harness.Long() {
		events *= 20
	}
	target := l.events.Load() + events
	harness.Until(l.t, 2*time.Minute, fmt.Sprintf("%d more events appended", events), func() error {
		if n := l.events.Load(); n < target {
			return fmt.Errorf("%d so far", n)
		}
		return nil
	})
}

// check holds every session to a sequential fold of its log: in the buckets, and as it is served.
func (l *load) check(natsURL string, reader *harness.Client) {
	l.t.Helper()
	log := harness.OpenLog(l.t, natsURL)
	for i := range l.last {
		last := l.last[i].Load()
		if last < 0 {
			l.t.Errorf("%s: nothing was appended", l.session(i))
			continue
		}
		if err := matchesFold(l.t.Context(), reader, l.session(i), last); err != nil {
			l.t.Errorf("%s: %v", l.session(i), err)
		}
		if err := headMatchesLog(l.t.Context(), log, l.session(i)); err != nil {
			l.t.Errorf("%s: %v", l.session(i), err)
		}
	}
	verifyAll(l.t, natsURL)
}

// shared waits until the partitions are shared among these workers and nobody else, none with
// more than its share, and answers how long that took.
func shared(t *testing.T, ask *harness.Client, limit time.Duration, ids ...string) time.Duration {
	t.Helper()
	begin := time.Now()
	most := (harness.Partitions + len(ids) - 1) / len(ids)
	slices.Sort(ids)
	harness.Until(t, limit, fmt.Sprintf("all partitions at %v, at most %d each", ids, most), func() error {
		w, err := ask.Workers(t.Context())
		if err != nil {
			return err
		}
		loads := w.Loads()
		total := 0
		for _, n := range loads {
			total += n
			if n > most {
				return fmt.Errorf("%v", loads)
			}
		}
		if got := slices.Sorted(maps.Keys(loads)); total != harness.Partitions || !slices.Equal(got, ids) {
			return fmt.Errorf("%v", loads)
		}
		return nil
	})
	w, err := ask.Workers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(begin)
	t.Logf("partitions at %v after %v: %v", ids, took.Round(time.Millisecond), w.Loads())
	return took
}

// counted adds up a counter of several projectors.
func counted(t *testing.T, name string, of ...*harness.Process) (sum float64) {
	t.Helper()
	for _, p := range of {
		n, err := p.Client().Metric(t.Context(), "palimpsest_projector_"+name)
		if err != nil {
			t.Error(err)
		}
		sum += n
	}
	return sum
}

// Workers come and go in every way while events come in: killed, frozen beyond their leases,
// added, drained. All heads must be right in the end, and the partitions evenly shared after
// each step.
func TestScaleWorkersComeAndGoUnderLoad(t *testing.T) {
	t.Parallel()
	appender := harness.Appender{Invariants: "enforce"}.Start(t)
	begin := func(id string) *harness.Process {
		return harness.Projector{NATS: appender.NATS, ID: id, Lease: scaleLease}.Start(t)
	}
	w1, w2, w3 := begin("w1"), begin("w2"), begin("w3")
	l := startLoad(t, appender.Client(), "scaled", 24, 4)
	ask := w3.Client()
	shared(t, ask, 20*time.Second, "w1", "w2", "w3")
	l.goOn(500)

	w1.Kill()
	if took := shared(t, ask, 20*time.Second, "w2", "w3"); took > 2*scaleLease+scaleNoise {
		t.Errorf("what a killed worker had was taken over after %v, with leases of %v", took, scaleLease)
	}
	l.goOn(300)

	if err := w2.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	frozen := time.NewTimer(6 * time.Second)
	defer frozen.Stop()
	if took := shared(t, ask, 20*time.Second, "w3"); took > 2*scaleLease+scaleNoise {
		t.Errorf("what a frozen worker had was taken over after %v, with leases of %v", took, scaleLease)
	}
	<-frozen.C
	if err := w2.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	shared(t, ask, 20*time.Second, "w2", "w3")
	if n := counted(t, "leases_lost_total", w2); n == 0 {
		t.Error("a worker that slept through its leases has not noticed")
	}
	l.goOn(300)

	w4 := begin("w4")
	shared(t, ask, 20*time.Second, "w2", "w3", "w4")
	l.goOn(300)

	before := counted(t, "stale_writes_refused_total", w2, w4)
	w3.Term(t)
	// Freed, not run out: a drain costs the readers no lease.
	if took := shared(t, w4.Client(), 20*time.Second, "w2", "w4"); took > scaleLease+scaleNoise {
		t.Errorf("what a drained worker had was taken over after %v", took)
	}
	l.goOn(300)
	l.end()
	l.check(appender.NATS, w4.Client())
	if after := counted(t, "stale_writes_refused_total", w2, w4); after != before {
		t.Logf("%v writes were refused around the drain", after-before)
	}
	t.Logf("%d events; refused stale writes: w2 %v, w4 %v; leases lost by w2: %v", l.events.Load(),
		counted(t, "stale_writes_refused_total", w2), counted(t, "stale_writes_refused_total", w4), counted(t, "leases_lost_total", w2))
	harness.Until(t, 10*time.Second, "all caught up", func() error {
		w, err := w2.Client().Workers(t.Context())
		if err == nil && (!w.CaughtUp || len(w.Unowned) > 0) {
			err = fmt.Errorf("%+v", w)
		}
		return err
	})
	for _, args := range [][]string{{"--nats", appender.NATS}, {"--url", w2.HTTP}} {
		r := harness.Run(t, "projector", append([]string{"status"}, args...)...)
		if r.Code != 0 || !strings.Contains(r.Stdout, "caught up: true") || !strings.Contains(r.Stdout, "  w4  "+w4.HTTP) {
			t.Errorf("projector status %v: exit code %d\n%s", args, r.Code, r.Output())
		}
	}
}

// survivors are writers that go on whatever happens to what is between them and the log.
type survivors struct {
	all   []*survivor
	count atomic.Int64
	end   func()
}

func startSurvivors(t *testing.T, client func() *harness.Client, n int) *survivors {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	s := &survivors{}
	var wg sync.WaitGroup
	for i := range n {
		w := &survivor{session: fmt.Sprintf("own-%02d", i), name: fmt.Sprintf("w%02d", i), insists: true, acknowledged: map[string]int64{}, unknown: map[string]bool{}}
		s.all = append(s.all, w)
		c := client()
		wg.Go(func() {
			if err := w.write(ctx, c, &s.count); err != nil {
				t.Error(err)
			}
		})
	}
	s.end = func() {
		cancel()
		wg.Wait()
	}
	t.Cleanup(s.end)
	return s
}

func (s *survivors) reach(t *testing.T, more int64) {
	t.Helper()
	if harness.Long() {
		more *= 10
	}
	target := s.count.Load() + more
	harness.Until(t, 3*time.Minute, fmt.Sprintf("%d more events acknowledged", more), func() error {
		if n := s.count.Load(); n < target {
			return fmt.Errorf("%d of %d", n, target)
		}
		return nil
	})
}

// check holds what was acknowledged against the log, and the heads against a fold of it.
func (s *survivors) check(t *testing.T, natsURL string, reader *harness.Client) {
	t.Helper()
	log := harness.OpenLog(t, natsURL)
	for _, w := range s.all {
		last, err := holdsAcknowledged(t.Context(), log, w.session, []*survivor{w})
		if err == nil {
			err = matchesFold(t.Context(), reader, w.session, last)
		}
		if err == nil {
			err = headMatchesLog(t.Context(), log, w.session)
		}
		if err != nil {
			t.Errorf("%s: %v", w.session, err)
		}
	}
	verifyAll(t, natsURL)
}

// A server that dies and comes back with all leases on its disk must not leave the workers
// waiting for each other, and what they say about the time without it must go.
func TestScaleServerRestartedUnderLoad(t *testing.T) {
	t.Parallel()
	options := harness.Appender{Data: t.TempDir(), Invariants: "enforce"}
	appender := options.Start(t)
	options.Listen, options.NATSListen = harness.HostPort(appender.HTTP), harness.HostPort(appender.NATS)
	w1 := harness.Projector{NATS: appender.NATS, ID: "w1", Lease: scaleLease}.Start(t)
	w2 := harness.Projector{NATS: appender.NATS, ID: "w2", Lease: scaleLease}.Start(t)
	s := startSurvivors(t, appender.Client, 8)
	shared(t, w1.Client(), 20*time.Second, "w1", "w2")
	for range 2 {
		s.reach(t, 200)
		appender.Kill()
		appender = options.Start(t)
	}
	s.reach(t, 200)
	shared(t, w2.Client(), 30*time.Second, "w1", "w2")
	s.end()
	s.check(t, appender.NATS, w1.Client())
	for _, w := range []*harness.Process{w1, w2} {
		harness.Until(t, 20*time.Second, "no error is left", func() error {
			st, err := w.Client().Workers(t.Context())
			for _, p := range st.Partitions {
				if p.Error != "" {
					err = fmt.Errorf("partition %d: %s", p.Partition, p.Error)
				}
			}
			return err
		})
	}
	t.Logf("%d events; refused stale writes %v, leases lost %v", s.count.Load(), counted(t, "stale_writes_refused_total", w1, w2), counted(t, "leases_lost_total", w1, w2))
}

// On a cluster of three servers the server that leads the log's stream dies, twice.
func TestScaleClusterLosesItsLeader(t *testing.T) {
	t.Parallel()
	cluster := harness.StartCluster(t)
	appender := harness.Appender{NATS: cluster.URL, Invariants: "enforce", Replicas: 3}.Start(t)
	w1 := harness.Projector{NATS: cluster.URL, ID: "w1", Replicas: 3}.Start(t)
	w2 := harness.Projector{NATS: cluster.URL, ID: "w2", Replicas: 3}.Start(t)
	s := startSurvivors(t, appender.Client, 6)
	shared(t, w1.Client(), time.Minute, "w1", "w2")
	for range 2 {
		s.reach(t, 60)
		leader := cluster.Leader(t)
		cluster.Kill(leader)
		begin := time.Now()
		s.reach(t, 20)
		t.Logf("the leader %s was killed; appends went on after %v", leader, time.Since(begin).Round(time.Millisecond))
		cluster.Up(t, leader)
	}
	s.reach(t, 60)
	cluster.Leader(t)
	shared(t, w2.Client(), time.Minute, "w1", "w2")
	s.end()
	s.check(t, cluster.URL, w1.Client())
	t.Logf("%d events; refused stale writes %v, leases lost %v", s.count.Load(), counted(t, "stale_writes_refused_total", w1, w2), counted(t, "leases_lost_total", w1, w2))
}
