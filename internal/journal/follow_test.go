package journal

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/platform"
)

// deliveries gathers what a follower delivers.
type deliveries struct {
	mu  sync.Mutex // guards all
	all []Delivery
	bad []error
}

func (d *deliveries) take(x Delivery) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.all = append(d.all, x)
}

func (d *deliveries) failed(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.bad = append(d.bad, err)
}

// seqs are the stream sequences that were delivered.
func (d *deliveries) seqs() []uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := []uint64{}
	for _, x := range d.all {
		out = append(out, x.StreamSeq)
	}
	return out
}

func follow(t testing.TB, j *Journal, partition int, after uint64) (*Follower, *deliveries) {
	t.Helper()
	d := new(deliveries)
	f, err := j.Follow(journaltest.Context(t), partition, after, 16, d.take, d.failed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Stop)
	return f, d
}

// stored appends n commits to sessions in turn and returns the stream sequences by partition.
func stored(t testing.TB, j *Journal, writers map[string]*journaltest.Writer, ends map[string]uint64, label string, n int) map[int][]uint64 {
	t.Helper()
	out := map[int][]uint64{}
	names := slices.Sorted(func(yield func(string) bool) {
		for id := range writers {
			if !yield(id) {
				return
			}
		}
	})
	for i := range n {
		id := names[i%len(names)]
		ends[id] = store(t, j, ends[id], writers[id].Commit(fmt.Sprintf("%s-%s-%d", id, label, i), 1+i%3, 60))
		p := j.Partition(id)
		out[p] = append(out[p], ends[id])
	}
	return out
}

func sessions(n int) (map[string]*journaltest.Writer, map[string]uint64) {
	writers := map[string]*journaltest.Writer{}
	for i := range n {
		id := fmt.Sprintf("s%d", i)
		writers[id] = journaltest.NewWriter(id, nil)
	}
	return writers, map[string]uint64{}
}

// TestFollowDeliversAPartitionInOrder, from its start and from in between, what is there and
// what comes.
func TestFollowDeliversAPartitionInOrder(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, Config{Partitions: 3})
	writers, ends := sessions(9)
	old := stored(t, j, writers, ends, "old", 90)
	type following struct {
		partition int
		after     uint64
		f         *Follower
		d         *deliveries
		want      []uint64
	}
	var all []*following
	for p := range 3 {
		for _, after := range []uint64{0, old[p][0], old[p][len(old[p])/2], 90, 500} {
			x := &following{partition: p, after: after}
			x.f, x.d = follow(t, j, p, after)
			for _, seq := range old[p] {
				if seq > after {
					x.want = append(x.want, seq)
				}
			}
			all = append(all, x)
		}
	}
	fresh := stored(t, j, writers, ends, "new", 60)
	for _, x := range all {
		if x.after < 500 {
			x.want = append(x.want, fresh[x.partition]...)
		}
	}
	for _, x := range all {
		journaltest.Eventually(t, "the followers to come to the end", func() bool { return len(x.d.seqs()) >= len(x.want) })
	}
	for _, x := range all {
		if n, err := x.f.Pending(journaltest.Context(t)); n != 0 || err != nil {
			t.Errorf("pending at the end: %d, %v", n, err)
		}
		x.f.Stop()
		if got := x.d.seqs(); !slices.Equal(got, append([]uint64{}, x.want...)) {
			t.Errorf("partition %d behind %d: got %v, want %v", x.partition, x.after, got, x.want)
		}
		for i, d := range x.d.all {
			if d.Err != nil || d.Commit == nil || d.Session != d.Commit.Session || d.Commit.StreamSeq != d.StreamSeq || j.Partition(d.Session) != x.partition || d.Stored.IsZero() {
				t.Errorf("delivery %d: %+v", i, d)
			}
		}
		if len(x.d.bad) != 0 {
			t.Errorf("partition %d: %v", x.partition, x.d.bad)
		}
	}
}

// TestFollowLosesNothingOverARestart of the server, however often.
func TestFollowLosesNothingOverARestart(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, Config{Partitions: 2})
	writers, ends := sessions(4)
	var fs [2]*Follower
	var ds [2]*deliveries
	for p := range fs {
		fs[p], ds[p] = follow(t, j, p, 0)
	}
	var want [2][]uint64
	for round := range 3 {
		if round > 0 {
			s.Restart()
		}
		for p, seqs := range stored(t, j, writers, ends, fmt.Sprint("r", round), 20) {
			want[p] = append(want[p], seqs...)
		}
	}
	for p := range fs {
		journaltest.Eventually(t, "everything to be delivered", func() bool {
			seqs := ds[p].seqs()
			return len(seqs) > 0 && seqs[len(seqs)-1] == want[p][len(want[p])-1]
		})
		fs[p].Stop()
		// In order, nothing left out; again is allowed.
		got := slices.Compact(slices.Sorted(slices.Values(ds[p].seqs())))
		if !slices.Equal(got, want[p]) {
			t.Errorf("partition %d: got %v, want %v", p, got, want[p])
		}
	}
}

// TestFollowStopsForGood: Stop waits for the delivery under way, and none comes behind it.
func TestFollowStopsForGood(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, Config{Partitions: 1})
	writers, ends := sessions(1)
	stored(t, j, writers, ends, "old", 10)
	entered, leave := make(chan struct{}, 100), make(chan struct{})
	var mu sync.Mutex
	left := 0
	f, err := j.Follow(journaltest.Context(t), 0, 0, 4, func(Delivery) {
		entered <- struct{}{}
		<-leave
		mu.Lock()
		left++
		mu.Unlock()
	}, func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	journaltest.Await(t, "the first delivery", entered)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		f.Stop()
	}()
	select {
	case <-stopped:
		t.Error("Stop returned while a delivery was under way")
	default:
	}
	close(leave)
	journaltest.Await(t, "Stop", stopped)
	mu.Lock()
	n := left
	mu.Unlock()
	stored(t, j, writers, ends, "new", 10)
	if len(entered) != n-1 {
		t.Errorf("%d deliveries began, %d ended before Stop returned", len(entered)+1, n)
	}
	f.Stop() // again
}

// TestFollowStopsWhileTheServerIsAway: whoever gives a partition up must not wait for it.
func TestFollowStopsWhileTheServerIsAway(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, Config{Partitions: 1})
	noticed := make(chan struct{}, 100)
	f, err := j.Follow(journaltest.Context(t), 0, 0, 16, func(Delivery) {}, func(error) { noticed <- struct{}{} })
	if err != nil {
		t.Fatal(err)
	}
	s.Restart() // the client makes a new consumer
	journaltest.Eventually(t, "the connection to be made anew", func() bool { return j.conns.Read.Stats().Reconnects > 0 })
	s.Down()
	journaltest.Eventually(t, "the connection to be lost", func() bool { return !j.conns.Read.IsConnected() })
	began := time.Now()
	f.Stop()
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("Stop took %v", took)
	}
	j.conns.Read.Close() // so that what goes on in the background ends
	journaltest.Await(t, "the client to be done", f.done)
}

// TestFollowDeliversGarbageAsSuch: it is the follower's business what becomes of the session.
func TestFollowDeliversGarbageAsSuch(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j, nc := open(t, s, Config{Partitions: 1}), s.Conn(t)
	ctx := journaltest.Context(t)
	_, d := follow(t, j, 0, 0)
	want := map[uint64]string{} // name by stream sequence
	for name, msg := range garbage("s") {
		if msg.Header.Get("Status") != "" {
			continue // see TestFollowDeliversWhatLooksLikeAStatus
		}
		msg.Subject = j.Subject("s")
		if _, err := nc.RequestMsgWithContext(ctx, msg); err != nil {
			t.Fatal(err)
		}
		want[uint64(len(want)+1)] = name
	}
	w := journaltest.NewWriter("behind", nil)
	store(t, j, 0, w.Commit("behind", 1, 60))
	journaltest.Eventually(t, "what lies behind the garbage", func() bool { return slices.Contains(d.seqs(), uint64(len(want)+1)) })
	d.mu.Lock()
	defer d.mu.Unlock()
	seen := map[uint64]bool{}
	for _, x := range d.all {
		seen[x.StreamSeq] = true
		name, bad := want[x.StreamSeq]
		if bad && (x.Err == nil || x.Commit != nil || x.Session != "s" || x.Err.StreamSeq != x.StreamSeq || code(x.Err) != events.CodeCorrupt) ||
			!bad && (x.Err != nil || x.Session != "behind") {
			t.Errorf("%s: %+v", name, x)
		}
	}
	for seq, name := range want {
		if !seen[seq] {
			t.Errorf("%s was not delivered", name)
		}
	}
}

// TestFollowDeliversWhatLooksLikeAStatus: an empty message with a Status header must not keep
// the follower from what lies behind it.
func TestFollowDeliversWhatLooksLikeAStatus(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j, nc := open(t, s, Config{Partitions: 1}), s.Conn(t)
	_, d := follow(t, j, 0, 0)
	for _, status := range []string{"404", "400", "100"} {
		msg := &nats.Msg{Subject: j.Subject("s"), Header: nats.Header{"Status": {status}}}
		if _, err := nc.RequestMsgWithContext(journaltest.Context(t), msg); err != nil {
			t.Fatal(err)
		}
	}
	store(t, j, 0, journaltest.NewWriter("behind", nil).Commit("behind", 1, 60))
	journaltest.Eventually(t, "what lies behind", func() bool { return slices.Contains(d.seqs(), 4) })
}

// A pull asks for many messages and for no more bytes than the largest message may have: large
// ones come all the same, also in the midst of small ones.
func TestFollowDeliversTheLargestCommits(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t, func(c *platform.EmbedConfig) { c.MaxPayload = 256 << 10 })
	j := open(t, s, Config{Partitions: 1})
	w := journaltest.NewWriter("s", nil)
	var want []uint64
	end := uint64(0)
	for i := range 12 {
		size := 100
		if i%3 > 0 {
			size = j.MaxCommit() - 120 // of data: all of the commit but the envelope
		}
		c := w.Commit(fmt.Sprintf("c%d", i), 1, size)
		if size > 100 && len(c.Body) < j.MaxCommit()-80 {
			t.Fatalf("expected a body of about %d bytes, found %d", j.MaxCommit(), len(c.Body))
		}
		end = store(t, j, end, c)
		want = append(want, end)
	}
	_, d := follow(t, j, 0, 0)
	journaltest.Eventually(t, "every commit", func() bool { return len(d.seqs()) >= len(want) })
	if got := d.seqs(); !slices.Equal(got, want) {
		t.Errorf("expected %v, found %v", want, got)
	}
}
