package projection

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/jetstreamext"

	"palimpsest/internal/journal"
)

// WorkersBucket is the bucket in which workers announce themselves and lease partitions:
// `member.<id>` and `lease.<p>`, each with a time to live.
const WorkersBucket = "WORKERS"

// Member is what a worker says of itself, each time it renews its membership.
type Member struct {
	ID         string            `json:"id"`
	Started    int64             `json:"started"` // Unix ms
	Draining   bool              `json:"draining,omitempty"`
	Partitions []PartitionStatus `json:"partitions"` // those that it works
}

// leaseValue is the value of a lease.
type leaseValue struct {
	Worker string `json:"worker"`
}

// held is a lease of ours.
type heldLease struct {
	rev uint64
	// until is when we stop by ourselves unless the lease was renewed: half a second before it
	// ends, counted from when the last renewal that succeeded was sent.
	until time.Time
}

// leases keeps a worker's membership and its leases. A lease is for balance, not for safety:
// safety is the compare-and-set on every head and checkpoint. All fields belong to the
// goroutine that calls tick.
type leases struct {
	kv     jetstream.KeyValue
	js     jetstream.JetStream
	self   Member
	ttl    time.Duration
	parts  int
	member uint64 // revision of our member key; 0 before it is there
	held   map[int]heldLease
}

// leaseMargin is how long before its end a holder that cannot renew a lease stops.
const leaseMargin = 500 * time.Millisecond

// openWorkers binds to the bucket of workers.
func openWorkers(ctx context.Context, js jetstream.JetStream, replicas int) (jetstream.KeyValue, error) {
	return journal.OpenBucket(ctx, js, jetstream.KeyValueConfig{
		Bucket: WorkersBucket, Description: "Palimpsest: workers and their leases", History: 1,
		Storage: jetstream.FileStorage, Replicas: replicas, LimitMarkerTTL: time.Second,
	})
}

func memberKey(id string) string { return "member." + id }
func leaseKey(p int) string      { return "lease." + strconv.Itoa(p) }

// renew writes a value with a time to live on top of the revision that we know (0: none).
func (l *leases) renew(ctx context.Context, key string, value any, rev uint64) (uint64, error) {
	b, err := json.Marshal(value)
	if err != nil {
		return 0, err
	}
	if rev == 0 {
		return l.kv.Create(ctx, key, b, jetstream.KeyTTL(l.ttl))
	}
	// A KV update cannot carry a time to live; a publish on the bucket's subject can.
	msg := nats.NewMsg("$KV." + WorkersBucket + "." + key)
	msg.Data = b
	ack, err := l.js.PublishMsg(ctx, msg, jetstream.WithExpectLastSequencePerSubject(rev), jetstream.WithMsgTTL(l.ttl))
	if err != nil {
		return 0, err
	}
	return ack.Sequence, nil
}

// view is the bucket at one moment.
type leaseView struct {
	members map[string]Member
	holders map[int]string
}

// read polls the bucket: all members and leases in one request. A watch would do with less,
// but is blind for a long time after a server's restart.
func (l *leases) read(ctx context.Context) (*leaseView, error) {
	return readWorkers(ctx, l.js)
}

func readWorkers(ctx context.Context, js jetstream.JetStream) (*leaseView, error) {
	prefix := "$KV." + WorkersBucket + "."
	v := &leaseView{members: map[string]Member{}, holders: map[int]string{}}
	msgs, err := jetstreamext.GetLastMsgsFor(ctx, js, "KV_"+WorkersBucket, []string{prefix + "member.*", prefix + "lease.*"})
	if err != nil {
		return nil, err
	}
	for m, err := range msgs {
		if errors.Is(err, jetstreamext.ErrNoMessages) || errors.Is(err, jetstream.ErrMsgNotFound) {
			break
		}
		if err != nil {
			return nil, err
		}
		if len(m.Data) == 0 { // a marker: the key was deleted or its time is over
			continue
		}
		key := strings.TrimPrefix(m.Subject, prefix)
		if id, ok := strings.CutPrefix(key, "member."); ok {
			var mem Member
			if json.Unmarshal(m.Data, &mem) == nil {
				v.members[id] = mem
			}
			continue
		}
		p, err := strconv.Atoi(strings.TrimPrefix(key, "lease."))
		var val leaseValue
		if err == nil && json.Unmarshal(m.Data, &val) == nil {
			v.holders[p] = val.Worker
		}
	}
	return v, nil
}

// step is what a tick decided: partitions to begin with, partitions to drain and then release,
// and partitions to abandon at once because their lease is lost.
type step struct {
	acquired []int
	handOver []int
	lost     []int
}

// tick renews what we have, looks around, and takes free partitions that are ours to work.
// An error is temporary; the step says what to do all the same.
func (l *leases) tick(ctx context.Context, draining bool) (st step, err error) {
	var errs []error
	l.self.Draining = draining
	rev, err := l.renew(ctx, memberKey(l.self.ID), l.self, l.member)
	switch {
	case err == nil:
		l.member = rev
	case isMoved(err): // our key expired, or somebody uses our id: start over
		l.member = 0
		errs = append(errs, fmt.Errorf("membership: %w", err))
	default:
		errs = append(errs, fmt.Errorf("membership: %w", err))
	}
	for _, p := range slices.Sorted(maps.Keys(l.held)) {
		h := l.held[p]
		sent := time.Now()
		rev, err := l.renew(ctx, leaseKey(p), leaseValue{l.self.ID}, h.rev)
		switch {
		case err == nil:
			l.held[p] = heldLease{rev, sent.Add(l.ttl - leaseMargin)}
		case isMoved(err) || time.Now().After(h.until):
			delete(l.held, p)
			st.lost = append(st.lost, p)
		default:
			errs = append(errs, fmt.Errorf("lease %d: %w", p, err))
		}
	}
	v, err := l.read(ctx)
	if err != nil {
		return st, errors.Join(append(errs, err)...)
	}
	if l.member > 0 {
		v.members[l.self.ID] = l.self // our own renewal may not have reached the replica that answered
	}
	var live []string
	for id, m := range v.members {
		if !m.Draining {
			live = append(live, id)
		}
	}
	slices.Sort(live)
	for p, owner := range assign(live, l.parts) {
		_, mine := l.held[p]
		switch {
		case mine && owner != l.self.ID:
			st.handOver = append(st.handOver, p)
		case !mine && owner == l.self.ID && v.holders[p] == "" && !draining:
			sent := time.Now()
			rev, err := l.renew(ctx, leaseKey(p), leaseValue{l.self.ID}, 0)
			if err == nil {
				l.held[p] = heldLease{rev, sent.Add(l.ttl - leaseMargin)}
				st.acquired = append(st.acquired, p)
			} else if !isMoved(err) {
				errs = append(errs, fmt.Errorf("lease %d: %w", p, err))
			}
		}
	}
	return st, errors.Join(errs...)
}

// expired returns held leases whose time is over, and forgets them.
func (l *leases) expired(now time.Time) (lost []int) {
	for p, h := range l.held {
		if now.After(h.until) {
			delete(l.held, p)
			lost = append(lost, p)
		}
	}
	slices.Sort(lost)
	return lost
}

// release gives a lease up.
func (l *leases) release(ctx context.Context, p int) error {
	h, ok := l.held[p]
	if !ok {
		return nil
	}
	delete(l.held, p)
	err := l.kv.Delete(ctx, leaseKey(p), jetstream.LastRevision(h.rev))
	if isMoved(err) {
		return nil
	}
	return err
}

// leave takes our membership away.
func (l *leases) leave(ctx context.Context) error {
	if l.member == 0 {
		return nil
	}
	err := l.kv.Delete(ctx, memberKey(l.self.ID), jetstream.LastRevision(l.member))
	l.member = 0
	if isMoved(err) {
		return nil
	}
	return err
}

// isMoved reports that a compare-and-set found another revision than ours.
func isMoved(err error) bool {
	if errors.Is(err, jetstream.ErrKeyExists) {
		return true
	}
	var api *jetstream.APIError
	return errors.As(err, &api) && (api.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence || api.ErrorCode == 10164)
}
