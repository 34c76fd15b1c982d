package journal

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// filter is the subject of all sessions of a partition.
func (j *Journal) filter(partition int) string {
	return fmt.Sprintf("%s.%d.*", j.cfg.Prefix, partition)
}

// More reports whether the partition holds messages behind a stream sequence. The stream's
// leader says so, never a replica that lags.
func (j *Journal) More(ctx context.Context, partition int, after uint64) (bool, error) {
	_, err := j.leaderMessage(ctx, j.cfg.Stream, map[string]any{"seq": after + 1, "next_by_subj": j.filter(partition)})
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return false, nil
	}
	return err == nil, err
}

// Behind counts the partition's messages behind a stream sequence.
func (j *Journal) Behind(ctx context.Context, partition int, after uint64) (uint64, error) {
	if more, err := j.More(ctx, partition, after); err != nil || !more {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, j.cfg.ReadTimeout)
	defer cancel()
	// Only a consumer counts what lies behind a place: one that nobody reads.
	c, err := j.js.CreateConsumer(ctx, j.cfg.Stream, jetstream.ConsumerConfig{
		FilterSubject: j.filter(partition), DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: after + 1,
		AckPolicy: jetstream.AckNonePolicy, MemoryStorage: true, Replicas: 1, InactiveThreshold: 5 * time.Second,
	})
	if err != nil {
		return 0, j.unavailable(err)
	}
	info := c.CachedInfo()
	if err := j.js.DeleteConsumer(ctx, j.cfg.Stream, info.Name); err != nil && !errors.Is(err, jetstream.ErrConsumerNotFound) {
		return 0, j.unavailable(err)
	}
	return info.NumPending, nil
}
