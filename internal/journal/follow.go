package journal

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
)

// Delivery is one message of a partition, in stream order.
type Delivery struct {
	Partition int
	Commit    *events.Commit
	Err       *MalformedError // set when the message is no commit; Commit is nil then
	Session   string          // set in both cases; "" when the subject is no session's

	ID        string // Nats-Msg-Id, which is the commit's id unless somebody wrote around the appender
	Conn      uint64 // how often the connection had been made anew when it arrived
	StreamSeq uint64
	Pending   uint64 // messages that are still to come, of the partition or of all that are followed
	Stored    time.Time
}

// stopWait is how long Stop waits for the client to be done. With the server away that takes
// as long as a request that nobody answers, which is no reason to keep the caller.
const stopWait = time.Second

// msgOverhead is what the server counts for a message beside its headers and body: subjects.
const msgOverhead = 4096

// stallCheck is how often a follower that was handed nothing asks the stream's leader whether that
// is right.
const stallCheck = 2 * time.Second

// commonPull is how many messages are asked for at a time when all partitions are followed.
const commonPull = 4096

// Follower reads one partition, or all, in stream order. Messages may come twice after a reconnect;
// none is left out.
type Follower struct {
	j         *Journal
	partition int            // all when negative
	places    map[string]int // of all: partition by its token in the subject
	wanted    func(Delivery) bool
	pull      int
	deliver   func(Delivery)
	failed    func(error)

	mu   sync.Mutex // held while deliver is called
	over bool       // deliver must not be called any more
	last uint64     // stream sequence of the last delivery
	turn int        // which consumer delivers; what an earlier one still has is too late

	consumer sync.Mutex // guards cons and run
	cons     jetstream.Consumer
	run      jetstream.ConsumeContext

	stop    sync.Once
	cancel  context.CancelFunc // of watch
	watched chan struct{}      // closed when watch has ended
	done    chan struct{}      // closed when the client is done
}

// Follow starts reading a partition behind a stream sequence. f is called from one goroutine at a
// time, and while it blocks no more than a few messages are buffered. The consumer has no acks: who
// follows remembers how far it got. failed hears of trouble that the reader does not mend itself.
//
// pull messages are asked for at a time, less when they come to more bytes than the largest message
// may have, and the next ones once these are there: so what the server must hold for a connection is at
// most that many bytes for each of its partitions, which are spread over all connections for bulk.
func (j *Journal) Follow(ctx context.Context, partition int, after uint64, pull int, f func(Delivery), failed func(error)) (*Follower, error) {
	return j.follow(ctx, &Follower{partition: partition, pull: pull, deliver: f, failed: failed}, after)
}

// FollowAll is Follow for all partitions with one consumer, which costs the server much less for a
// message than one for each partition does. Of the messages that wanted refuses, by partition, stream
// sequence and id, nothing more is read. What lies on a subject that is no partition's is left out.
func (j *Journal) FollowAll(ctx context.Context, after uint64, wanted func(Delivery) bool, f func(Delivery), failed func(error)) (*Follower, error) {
	places := make(map[string]int, j.cfg.Partitions)
	for p := range j.cfg.Partitions {
		places[strconv.Itoa(p)] = p
	}
	return j.follow(ctx, &Follower{partition: -1, places: places, wanted: wanted, pull: commonPull, deliver: f, failed: failed}, after)
}

func (j *Journal) follow(ctx context.Context, fw *Follower, after uint64) (*Follower, error) {
	fw.j, fw.last, fw.watched, fw.done = j, after, make(chan struct{}), make(chan struct{})
	if err := fw.consume(ctx, after, 0); err != nil {
		return nil, err
	}
	ctx, fw.cancel = context.WithCancel(context.WithoutCancel(ctx))
	go fw.watch(ctx)
	return fw, nil
}

// consume begins to read behind a stream sequence.
func (f *Follower) consume(ctx context.Context, after uint64, turn int) error {
	cfg := jetstream.OrderedConsumerConfig{
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       after + 1,
		InactiveThreshold: 30 * time.Second, // Stop leaves the consumer behind
	}
	if f.partition >= 0 { // the server looks for the next message of all with less work when it has no filter
		cfg.FilterSubjects = []string{f.filter()}
	}
	cons, err := f.j.bulk[max(f.partition, 0)%len(f.j.bulk)].OrderedConsumer(ctx, f.j.cfg.Stream, cfg)
	if err != nil {
		return f.j.unavailable(err)
	}
	run, err := cons.Consume(func(m jetstream.Msg) {
		meta, err := m.Metadata()
		if err != nil {
			f.failed(fmt.Errorf("%s: %w", f, err))
			return
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.turn == turn {
			f.hand(m.Headers(), m.Data(), m.Subject(), Delivery{StreamSeq: meta.Sequence.Stream, Pending: meta.NumPending, Stored: meta.Timestamp})
		}
	}, jetstream.PullMaxMessagesWithBytesLimit(f.pull, f.j.MaxCommit()+events.HeaderReserve+msgOverhead), jetstream.PullThresholdMessages(1), jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
		f.failed(fmt.Errorf("%s: %w", f, err))
	}))
	if err != nil {
		return f.j.unavailable(err)
	}
	f.consumer.Lock()
	defer f.consumer.Unlock()
	f.cons, f.run = cons, run
	return nil
}

func (f *Follower) filter() string {
	if f.partition < 0 {
		return f.j.cfg.Prefix + ".*.*"
	}
	return f.j.filter(f.partition)
}

func (f *Follower) String() string {
	if f.partition < 0 {
		return "all partitions"
	}
	return fmt.Sprintf("partition %d", f.partition)
}

// place is the partition whose messages a subject carries; false when it is none's.
func (f *Follower) place(subject string) (int, bool) {
	if f.partition >= 0 {
		return f.partition, true
	}
	token, _, _ := strings.Cut(subject[min(len(subject), len(f.j.cfg.Prefix)+1):], ".")
	p, ok := f.places[token]
	return p, ok
}

// hand delivers a message. mu is held.
func (f *Follower) hand(h nats.Header, body []byte, subject string, d Delivery) {
	if f.over {
		return
	}
	f.last = max(f.last, d.StreamSeq)
	var ok bool
	if d.Partition, ok = f.place(subject); !ok {
		return
	}
	d.ID, d.Conn = h.Get(jetstream.MsgIDHeader), f.j.Reconnects()
	if f.wanted != nil && !f.wanted(d) {
		return
	}
	c, err := f.j.commit(h, body, subject, d.StreamSeq)
	if err == nil {
		d.Commit, d.Session = c, c.Session
	} else {
		d.Err, _ = err.(*MalformedError) // commit returns no other error
		d.Session, _ = f.j.SessionOfSubject(subject)
	}
	f.deliver(d)
}

// watch gets the follower past a message that the client does not hand over. The client takes an
// empty message with a Status header for one of the server's own, and waits for ever behind it.
func (f *Follower) watch(ctx context.Context) {
	defer close(f.watched)
	ticker := time.NewTicker(stallCheck)
	defer ticker.Stop()
	var last, next uint64 // as of the check before
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		if !f.mu.TryLock() { // it delivers right now
			continue
		}
		now := f.last
		f.mu.Unlock()
		m, err := f.j.leaderMessage(ctx, f.j.cfg.Stream, map[string]any{"seq": now + 1, "next_by_subj": f.filter()})
		switch {
		case err != nil: // nothing there, or trouble that the consumer sees too
			next = 0
		case m.Sequence == next && now == last:
			f.step(ctx, m)
			next = 0
		default:
			next = m.Sequence
		}
		last = now
	}
}

// step delivers a message that the consumer did not, and reads on behind it.
func (f *Follower) step(ctx context.Context, m *jetstream.RawStreamMsg) {
	f.mu.Lock()
	if f.over || f.last >= m.Sequence {
		f.mu.Unlock()
		return
	}
	f.turn++
	turn := f.turn
	f.hand(m.Header, m.Data, m.Subject, Delivery{StreamSeq: m.Sequence, Stored: m.Time})
	f.mu.Unlock()
	f.consumer.Lock()
	old := f.run
	f.consumer.Unlock()
	old.Stop()
	for {
		err := f.consume(ctx, m.Sequence, turn)
		if err == nil {
			break
		}
		f.failed(fmt.Errorf("%s: %w", f, err))
		select {
		case <-time.After(stallCheck):
		case <-ctx.Done():
			return
		}
	}
}

// Pending asks the server how many messages of the partition are still to come.
func (f *Follower) Pending(ctx context.Context) (uint64, error) {
	f.consumer.Lock()
	cons := f.cons
	f.consumer.Unlock()
	info, err := cons.Info(ctx)
	if err != nil {
		return 0, err
	}
	return info.NumPending + uint64(info.NumAckPending), nil
}

// Stop ends reading; f is not called again once it returns. It tolerates a second call.
func (f *Follower) Stop() {
	f.mu.Lock()
	f.over = true
	f.mu.Unlock()
	f.stop.Do(func() {
		go func() {
			defer close(f.done)
			f.cancel()
			<-f.watched // it may be changing consumers
			f.consumer.Lock()
			run := f.run
			f.consumer.Unlock()
			run.Stop()
			<-run.Closed()
		}()
	})
	timer := time.NewTimer(stopWait)
	defer timer.Stop()
	select {
	case <-f.done:
	case <-timer.C:
	}
}
