package projection

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/synadia-io/orbit.go/jetstreamext"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
)

// WorkersBucket is the bucket in which workers announce themselves and hold their leases.
const WorkersBucket = "WORKERS"

const (
	memberPrefix = "member."
	leasePrefix  = "lease."
	// rosterVersion is the version of the values in the bucket.
	rosterVersion = 1
	// markerTTL is how long the server keeps the marker of a key that ran out.
	markerTTL = 30 * time.Second
	// atOnce is how many subjects one read of the bucket names at the most: the server answers
	// with 1024 messages at the most.
	atOnce = 512
	// turnSubject tells workers that the roster changed, so that they need not wait for their
	// next tick. It is core NATS, and who misses it ticks later.
	turnSubject = "palimpsest.workers"
)

// errTaken says that a key is not what the writer knew: somebody else wrote it, or it ran out.
var errTaken = errors.New("projection: the key was written by another worker, or ran out")

// Member is the value of member.<id>: a worker that is there.
type Member struct {
	V  int    `json:"v"`
	ID string `json:"id"`
	// Run is drawn at each start: it tells two processes with one id apart.
	Run     string `json:"run"`
	Started int64  `json:"started"` // Unix ms
	Renewed int64  `json:"renewed"` // Unix ms
	TTLMs   int64  `json:"ttlMs"`   // how long the key lives unless it is renewed
	// HTTP is where the worker's read API is; empty when it has none, or not yet.
	HTTP string `json:"http,omitempty"`
	// Fold is the version of the fold that the worker has. It takes partitions only while that is
	// the one that built the generation of snapshots that serves.
	Fold int `json:"fold"`
	// Generation is the generation of snapshots that all its partitions write.
	Generation int `json:"generation"`
	// Draining says that the worker is about to leave and takes no partitions.
	Draining bool `json:"draining,omitempty"`
	// Partitions are those that the worker holds, as far as they were when the value was written.
	Partitions []PartitionStatus `json:"partitions"`
}

// Lease is the value of lease.<partition>: which worker works it.
type Lease struct {
	V      int    `json:"v"`
	Worker string `json:"worker"` // id of the member
	Run    string `json:"run"`
	Since  int64  `json:"since"` // Unix ms
	TTLMs  int64  `json:"ttlMs"`
}

// Roster is the bucket of workers and leases. It is safe for concurrent use.
type Roster struct{ js jetstream.JetStream }

// OpenRoster binds to the bucket, creating it when it is not there.
func OpenRoster(ctx context.Context, js jetstream.JetStream, replicas int) (*Roster, error) {
	kv, err := journal.OpenBucket(ctx, js, jetstream.KeyValueConfig{
		Bucket: WorkersBucket, Description: "Palimpsest: projection workers and their leases, see docs/kv-layout.md", History: 1,
		Storage: jetstream.FileStorage, Replicas: replicas, LimitMarkerTTL: markerTTL,
	})
	if err != nil {
		return nil, err
	}
	st, err := kv.Status(ctx)
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w", WorkersBucket, err)
	}
	if st.LimitMarkerTTL() == 0 {
		return nil, fmt.Errorf("bucket %s was created without a TTL for markers, so its keys cannot run out; stop the projectors and delete it, it is made anew at the next start", WorkersBucket)
	}
	return &Roster{js}, nil
}

// roll is what the bucket held at a moment.
type roll struct {
	members map[string]Member // by id
	leases  map[int]Lease     // by partition
	// revs are the revisions of all keys, also of those that hold a marker: a key is written on
	// the condition that it still has the revision that was read.
	revs map[string]uint64
	// beats are when members last announced themselves, by the server's clock.
	beats map[string]time.Time
	// newest is when any key was last written, by the server's clock.
	newest time.Time
	// strange are keys whose values are none that this version writes.
	strange []string
}

func newRoll() *roll {
	return &roll{members: map[string]Member{}, leases: map[int]Lease{}, revs: map[string]uint64{}, beats: map[string]time.Time{}}
}

// silence is for how long a member has not announced itself, and whether that is longer than what
// it said last can be relied on: it announces itself every tick, and its partitions are asked as often.
func (o *roll) silence(id string, now time.Time) (d time.Duration, long bool) {
	d = max(0, now.Sub(o.beats[id]))
	return d, d > 2*tickOf(time.Duration(o.members[id].TTLMs)*time.Millisecond)
}

// lifetimes is after how many times of its life a key is taken for one that ran out, although it is there.
const lifetimes = 3

// bury takes out members whose keys should have run out long ago: a server that was killed may bring
// such keys back, and forget that they were to end. Others must have written since, by the same clock.
func (o *roll) bury() {
	for id, m := range o.members {
		if o.newest.Sub(o.beats[id]) > lifetimes*time.Duration(m.TTLMs)*time.Millisecond {
			delete(o.members, id)
			delete(o.beats, id)
		}
	}
}

// now is the time by the clock that stamps the keys.
func (r *Roster) now(ctx context.Context) (time.Time, error) {
	s, err := r.js.Stream(ctx, "KV_"+WorkersBucket)
	if err != nil {
		return time.Time{}, unavailable("workers", err)
	}
	return s.CachedInfo().TimeStamp, nil
}

func rosterSubject(key string) string { return "$KV." + WorkersBucket + "." + key }

func memberKey(id string) string { return memberPrefix + id }

func leaseKey(partition int) string { return leasePrefix + strconv.Itoa(partition) }

// read reads all members and leases, in one request unless there are very many partitions. A
// replica that answers may lag, so what is written is written under a condition.
func (r *Roster) read(ctx context.Context, partitions int) (*roll, error) {
	out := newRoll()
	defer out.bury()
	if partitions <= atOnce {
		return out, r.readInto(ctx, out, rosterSubject(memberPrefix+"*"), rosterSubject(leasePrefix+"*"))
	}
	if err := r.readInto(ctx, out, rosterSubject(memberPrefix+"*")); err != nil {
		return nil, err
	}
	for from := 0; from < partitions; from += atOnce {
		var subjects []string
		for p := from; p < min(partitions, from+atOnce); p++ {
			subjects = append(subjects, rosterSubject(leaseKey(p)))
		}
		if err := r.readInto(ctx, out, subjects...); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func (r *Roster) readInto(ctx context.Context, out *roll, subjects ...string) error {
	msgs, err := jetstreamext.GetLastMsgsFor(ctx, r.js, "KV_"+WorkersBucket, subjects)
	if err != nil {
		return unavailable("workers", err)
	}
	// An answer that is cut short must not look like workers that are gone.
	whole := false
	for m, err := range msgs {
		switch {
		case errors.Is(err, jetstreamext.ErrNoMessages), errors.Is(err, jetstream.ErrMsgNotFound):
			return nil
		case err != nil:
			return unavailable("workers", err)
		}
		whole = m.Header.Get("Nats-Num-Pending") == "0"
		out.take(strings.TrimPrefix(m.Subject, rosterSubject("")), m)
	}
	if !whole {
		err := context.Cause(ctx)
		if err == nil {
			err = errors.New("the answer ended early")
		}
		return unavailable("workers", err)
	}
	return nil
}

// take reads one key.
func (o *roll) take(key string, m *jetstream.RawStreamMsg) {
	o.revs[key] = m.Sequence
	if m.Time.After(o.newest) {
		o.newest = m.Time
	}
	if m.Header.Get("KV-Operation") != "" || m.Header.Get(jetstream.MarkerReasonHeader) != "" {
		return // deleted, or ran out
	}
	if id, ok := strings.CutPrefix(key, memberPrefix); ok {
		var v Member
		if json.Unmarshal(m.Data, &v) == nil && v.V == rosterVersion && v.ID == id {
			o.members[id], o.beats[id] = v, m.Time
			return
		}
	} else if p, err := strconv.Atoi(strings.TrimPrefix(key, leasePrefix)); err == nil {
		var v Lease
		if json.Unmarshal(m.Data, &v) == nil && v.V == rosterVersion && v.Worker != "" {
			o.leases[p] = v
			return
		}
	}
	o.strange = append(o.strange, key)
}

// put writes a key on condition that it has the revision that the caller knew (0: it was never
// there), to live for ttl, in whole seconds, at least one. errTaken says that it has another
// one; any other error leaves open whether it was written.
func (r *Roster) put(ctx context.Context, key string, value any, rev uint64, ttl time.Duration) (uint64, error) {
	b, err := json.Marshal(value)
	if err != nil {
		return 0, err
	}
	return r.publish(ctx, &nats.Msg{Subject: rosterSubject(key), Data: b}, rev, ttl)
}

// remove deletes a key on condition that it has the revision that the caller knew.
func (r *Roster) remove(ctx context.Context, key string, rev uint64) error {
	m := nats.NewMsg(rosterSubject(key))
	m.Header.Set("KV-Operation", "PURGE") // for the server a marker, which it removes by itself
	m.Header.Set(jetstream.MsgRollup, jetstream.MsgRollupSubject)
	_, err := r.publish(ctx, m, rev, markerTTL)
	return err
}

func (r *Roster) publish(ctx context.Context, m *nats.Msg, rev uint64, ttl time.Duration) (uint64, error) {
	if !r.js.Conn().IsConnected() {
		return 0, unavailable("workers", nats.ErrDisconnected) // at once: a lease does not wait
	}
	ack, err := r.js.PublishMsg(ctx, m, jetstream.WithExpectLastSequencePerSubject(rev), jetstream.WithMsgTTL(ttl))
	if err == nil {
		return ack.Sequence, nil
	}
	if journal.WrongRevision(err) {
		return 0, errTaken
	}
	return 0, unavailable("workers", err)
}

// nudge tells the workers that the roster changed.
func (r *Roster) nudge() {
	_ = r.js.Conn().Publish(turnSubject, nil) // they find out at their next tick
}

// retrySubject is where a worker takes requests to take a session out of quarantine.
func retrySubject(id string) string { return "palimpsest.worker." + id + ".retry" }

// CheckWorkerID refuses an id that cannot be part of a key and a subject.
func CheckWorkerID(id string) error {
	bad := strings.IndexFunc(id, func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_')
	})
	if id == "" || len(id) > 128 || bad >= 0 {
		return &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("worker id: expected 1 to 128 characters of [A-Za-z0-9_-], found %q", id)}
	}
	return nil
}
