package journal

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
)

// Delivery is one message of a partition, in stream order.
type Delivery struct {
	Commit  *events.Commit
	Err     *MalformedError // set when the message is no commit; Commit is nil then
	Session string          // set in both cases; "" when the subject is no session's

	StreamSeq uint64
	Pending   uint64 // messages of the partition that are still to come
	Stored    time.Time
}

// stopWait is how long Stop waits for the client to be done. With the server away that takes
// as long as a request that nobody answers, which is no reason to keep the caller.
const stopWait = time.Second

// msgOverhead is what the server counts for a message beside its headers and body: subjects.
const msgOverhead = 4096

// Follower reads one partition in stream order. Messages may come twice after a reconnect;
// none is left out.
type Follower struct {
	cons jetstream.Consumer
	run  jetstream.ConsumeContext

	mu   sync.Mutex // held while f is called
	over bool       // f must not be called any more

	stop sync.Once
	done chan struct{} // closed when the client is done
}

// Follow starts reading a partition behind a stream sequence. f is called from one goroutine,
// and while it blocks no more than a few messages are buffered. The consumer has no acks: who
// follows remembers how far it got. failed hears of trouble that the reader does not mend itself.
//
// pull messages are asked for at a time, less when they come to more bytes than the largest message
// may have, and the next ones once these are there: so what the server must hold for a connection is at
// most that many bytes for each of its partitions, which are spread over all connections for bulk.
func (j *Journal) Follow(ctx context.Context, partition int, after uint64, pull int, f func(Delivery), failed func(error)) (*Follower, error) {
	cons, err := j.bulk[partition%len(j.bulk)].OrderedConsumer(ctx, j.cfg.Stream, jetstream.OrderedConsumerConfig{
		FilterSubjects:    []string{fmt.Sprintf("%s.%d.*", j.cfg.Prefix, partition)},
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       after + 1,
		InactiveThreshold: 30 * time.Second, // Stop leaves the consumer behind
	})
	if err != nil {
		return nil, j.unavailable(err)
	}
	fw := &Follower{cons: cons, done: make(chan struct{})}
	fw.run, err = cons.Consume(func(m jetstream.Msg) {
		fw.mu.Lock()
		defer fw.mu.Unlock()
		if fw.over {
			return
		}
		meta, err := m.Metadata()
		if err != nil {
			failed(fmt.Errorf("partition %d: %w", partition, err))
			return
		}
		d := Delivery{StreamSeq: meta.Sequence.Stream, Pending: meta.NumPending, Stored: meta.Timestamp}
		c, err := j.commit(m.Headers(), m.Data(), m.Subject(), d.StreamSeq)
		if err == nil {
			d.Commit, d.Session = c, c.Session
		} else {
			d.Err, _ = err.(*MalformedError) // commit returns no other error
			d.Session, _ = j.SessionOfSubject(m.Subject())
		}
		f(d)
	}, jetstream.PullMaxMessagesWithBytesLimit(pull, j.MaxCommit()+events.HeaderReserve+msgOverhead), jetstream.PullThresholdMessages(1), jetstream.ConsumeErrHandler(func(_ jetstream.ConsumeContext, err error) {
		failed(fmt.Errorf("partition %d: %w", partition, err))
	}))
	if err != nil {
		return nil, j.unavailable(err)
	}
	return fw, nil
}

// Pending asks the server how many messages of the partition are still to come.
func (f *Follower) Pending(ctx context.Context) (uint64, error) {
	info, err := f.cons.Info(ctx)
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
			f.run.Stop()
			<-f.run.Closed()
		}()
	})
	timer := time.NewTimer(stopWait)
	defer timer.Stop()
	select {
	case <-f.done:
	case <-timer.C:
	}
}
