package journal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
)

// Scan calls f for the messages of all sessions behind a stream sequence, up to another one, in
// stream order and without their bodies. It is for who needs to know what was committed, and
// not what it says. A message that is no commit comes with an error in its Delivery.
func (j *Journal) Scan(ctx context.Context, after, upTo uint64, f func(Delivery) error) error {
	if after >= upTo {
		return nil
	}
	return j.each(ctx, j.cfg.Stream, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: after + 1, HeadersOnly: true, InactiveThreshold: 30 * time.Second,
	}, func(m jetstream.Msg, meta *jetstream.MsgMetadata) (bool, error) {
		d := Delivery{StreamSeq: meta.Sequence.Stream, Pending: meta.NumPending, Stored: meta.Timestamp}
		if d.StreamSeq > upTo {
			return true, nil
		}
		c, err := j.commit(m.Headers(), nil, m.Subject(), d.StreamSeq)
		if err == nil {
			d.Commit, d.Session = c, c.Session
		} else {
			d.Err, _ = err.(*MalformedError) // commit returns no other error
			d.Session, _ = j.SessionOfSubject(m.Subject())
		}
		return d.StreamSeq == upTo, f(d)
	})
}

// Each calls f for the messages that a stream holds on a subject now, in order.
func (j *Journal) Each(ctx context.Context, stream, subject string, f func(jetstream.Msg) error) error {
	return j.each(ctx, stream, jetstream.OrderedConsumerConfig{FilterSubjects: []string{subject}, InactiveThreshold: 30 * time.Second},
		func(m jetstream.Msg, _ *jetstream.MsgMetadata) (bool, error) { return false, f(m) })
}

// EachLast is Each for the last message of every subject that matches a filter. Those that become the last
// one meanwhile may come too, or instead.
func (j *Journal) EachLast(ctx context.Context, stream, filter string, f func(jetstream.Msg) error) error {
	return j.each(ctx, stream, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{filter}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, InactiveThreshold: 30 * time.Second,
	}, func(m jetstream.Msg, _ *jetstream.MsgMetadata) (bool, error) { return false, f(m) })
}

// Buried returns the sessions whose log ends in a tombstone.
func (j *Journal) Buried(ctx context.Context) (map[string]bool, error) {
	out := map[string]bool{}
	err := j.each(ctx, j.cfg.Stream, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{j.cfg.Prefix + ".>"}, DeliverPolicy: jetstream.DeliverLastPerSubjectPolicy, HeadersOnly: true, InactiveThreshold: 30 * time.Second,
	}, func(m jetstream.Msg, _ *jetstream.MsgMetadata) (bool, error) {
		if events.IsTombstone(m.Headers()) {
			if id, err := j.SessionOfSubject(m.Subject()); err == nil {
				out[id] = true
			}
		}
		return false, nil
	})
	return out, err
}

// each reads a stream until f says that it is done, or nothing is pending. A message that does
// not come within the time of a read ends it with an error: who reads tries again.
func (j *Journal) each(ctx context.Context, stream string, cfg jetstream.OrderedConsumerConfig, f func(jetstream.Msg, *jetstream.MsgMetadata) (done bool, err error)) error {
	cons, err := j.js.OrderedConsumer(ctx, stream, cfg)
	if err != nil {
		return j.unavailable(err)
	}
	info, err := cons.Info(ctx)
	if err != nil {
		return j.unavailable(err)
	}
	if info.NumPending == 0 {
		return nil
	}
	it, err := cons.Messages(jetstream.PullMaxMessages(256))
	if err != nil {
		return j.unavailable(err)
	}
	defer it.Stop()
	for {
		one, cancel := context.WithTimeout(ctx, j.cfg.ReadTimeout)
		m, err := it.Next(jetstream.NextContext(one))
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return j.unavailable(fmt.Errorf("stream %s: %w", stream, err))
		}
		meta, err := m.Metadata()
		if err != nil {
			return fmt.Errorf("stream %s: %w", stream, err)
		}
		done, err := f(m, meta)
		if err != nil || done || meta.NumPending == 0 {
			return err
		}
	}
}

// LastOn returns the data of the last message that a stream holds on a subject, which may have
// wildcards, as the stream's leader says; nil when there is none.
func (j *Journal) LastOn(ctx context.Context, stream, subject string) ([]byte, error) {
	m, err := j.leaderMessage(ctx, stream, map[string]any{"last_by_subj": subject})
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return m.Data, nil
}

// OpenStream binds to a stream beside the log, creating it with the given settings when it is
// not there. It never changes the settings of one that is.
func (j *Journal) OpenStream(ctx context.Context, c jetstream.StreamConfig) (jetstream.Stream, error) {
	c.Storage, c.Replicas, c.AllowDirect = jetstream.FileStorage, j.cfg.Replicas, true
	s, err := j.js.Stream(ctx, c.Name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		s, err = j.js.CreateStream(ctx, c)
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			s, err = j.js.Stream(ctx, c.Name)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", c.Name, err)
	}
	return s, nil
}

// StreamMissing reports whether an error says that a stream is not there.
func StreamMissing(err error) bool {
	var e *events.Error
	return errors.Is(err, jetstream.ErrStreamNotFound) || errors.As(err, &e) && errors.Is(e.Cause, jetstream.ErrStreamNotFound)
}
