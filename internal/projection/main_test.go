package projection_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	goleak.VerifyTestMain(m)
}

// partitions of the tests' logs: few, since each worker has a consumer for each.
const partitions = 2

// tap is a JetStream that asks before a key of its buckets is read or written. An error is
// the answer then, and the bucket hears nothing.
type tap struct {
	jetstream.JetStream
	mu   sync.Mutex
	hook func(op, bucket, key string) error
}

func (j *tap) set(hook func(op, bucket, key string) error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.hook = hook
}

func (j *tap) ask(op, bucket, key string) error {
	j.mu.Lock()
	hook := j.hook
	j.mu.Unlock()
	if hook == nil {
		return nil
	}
	return hook(op, bucket, key)
}

func (j *tap) KeyValue(ctx context.Context, bucket string) (jetstream.KeyValue, error) {
	kv, err := j.JetStream.KeyValue(ctx, bucket)
	return &tappedKV{kv, j, bucket}, err
}

func (j *tap) CreateKeyValue(ctx context.Context, cfg jetstream.KeyValueConfig) (jetstream.KeyValue, error) {
	kv, err := j.JetStream.CreateKeyValue(ctx, cfg)
	return &tappedKV{kv, j, cfg.Bucket}, err
}

func (j *tap) PublishMsg(ctx context.Context, m *nats.Msg, opts ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	if key, ok := strings.CutPrefix(m.Subject, "$KV."+projection.WorkersBucket+"."); ok {
		if err := j.ask("publish", projection.WorkersBucket, key); err != nil {
			return nil, err
		}
	}
	return j.JetStream.PublishMsg(ctx, m, opts...)
}

type tappedKV struct {
	jetstream.KeyValue
	tap    *tap
	bucket string
}

func (kv *tappedKV) Get(ctx context.Context, key string) (jetstream.KeyValueEntry, error) {
	if err := kv.tap.ask("get", kv.bucket, key); err != nil {
		return nil, err
	}
	return kv.KeyValue.Get(ctx, key)
}

func (kv *tappedKV) Put(ctx context.Context, key string, value []byte) (uint64, error) {
	if err := kv.tap.ask("put", kv.bucket, key); err != nil {
		return 0, err
	}
	return kv.KeyValue.Put(ctx, key, value)
}

func (kv *tappedKV) Create(ctx context.Context, key string, value []byte, opts ...jetstream.KVCreateOpt) (uint64, error) {
	if err := kv.tap.ask("create", kv.bucket, key); err != nil {
		return 0, err
	}
	return kv.KeyValue.Create(ctx, key, value, opts...)
}

func (kv *tappedKV) Update(ctx context.Context, key string, value []byte, revision uint64) (uint64, error) {
	if err := kv.tap.ask("update", kv.bucket, key); err != nil {
		return 0, err
	}
	return kv.KeyValue.Update(ctx, key, value, revision)
}

// errMoved is how the server refuses a write because of another owner's.
var errMoved = &jetstream.APIError{ErrorCode: jetstream.JSErrCodeStreamWrongLastSequence, Description: "wrong last sequence"}

// isHead reports whether a key of SURFACES is a head's.
func isHead(key string) bool { return !strings.Contains(key, ".") }

// world is a server with a log, an appender and a reader.
type world struct {
	t       testing.TB
	srv     *journaltest.Server
	nc      *nats.Conn
	js      jetstream.JetStream
	log     *journal.Journal
	headers *journal.Headers
	buckets *projection.Buckets
	heads   *projection.Heads
	reader  *projection.Reader

	*appender.Appender
}

func newWorld(t testing.TB) *world {
	t.Helper()
	w := &world{t: t, srv: journaltest.Start(t), heads: projection.NewHeads()}
	w.nc, w.js = w.srv.Conn(t), w.srv.JetStream(t)
	ctx := journaltest.Context(t)
	w.log = w.journal(nil)
	var err error
	if w.headers, err = w.log.OpenHeaders(ctx); err != nil {
		t.Fatal(err)
	}
	if w.buckets, err = projection.OpenBuckets(ctx, w.log.JetStream(), 1); err != nil {
		t.Fatal(err)
	}
	w.reader = projection.NewReader(w.log, w.headers, w.buckets, w.heads)
	w.restartAppender()
	return w
}

// journal opens the log as another process does, which knows some more event types.
func (w *world) journal(types []string) *journal.Journal {
	w.t.Helper()
	v, err := events.NewVocabulary(types...)
	if err != nil {
		w.t.Fatal(err)
	}
	j, err := journal.Open(journaltest.Context(w.t), journal.Conns{Publish: []*nats.Conn{w.srv.Conn(w.t)}, Read: w.srv.Conn(w.t)}, journal.Config{Partitions: partitions}, v)
	if err != nil {
		w.t.Fatal(err)
	}
	return j
}

// restartAppender takes an appender that remembers nothing.
func (w *world) restartAppender() {
	w.t.Helper()
	a := appender.New(w.log, w.headers, w.buckets.Snapshots, appender.Config{})
	w.Appender = a
	w.t.Cleanup(func() {
		if err := a.Close(journaltest.Context(w.t)); err != nil {
			w.t.Errorf("close the appender: %v", err)
		}
	})
}

// worker is a worker with what its signals told.
type worker struct {
	*projection.Worker
	t       testing.TB
	tap     *tap
	journal *journal.Journal

	mu          sync.Mutex // guards all below
	changed     chan struct{}
	flushed     map[string][]events.Seq
	checkpoints map[int]uint64
	quarantined []projection.Quarantine
	moved       int
}

// worker starts a worker, in a process of its own when log is given, and lets it react fast.
// It stops with the test.
func (w *world) worker(cfg projection.Config, log ...*journal.Journal) *worker {
	w.t.Helper()
	k := w.worker0(cfg, log...)
	if err := k.Start(journaltest.Context(w.t)); err != nil {
		w.t.Fatal(err)
	}
	return k
}

// worker0 is worker without starting it.
func (w *world) worker0(cfg projection.Config, log ...*journal.Journal) *worker {
	w.t.Helper()
	k := &worker{t: w.t, journal: w.log, changed: make(chan struct{}), flushed: map[string][]events.Seq{}, checkpoints: map[int]uint64{}}
	heads := w.heads
	if len(log) > 0 {
		k.journal, heads = log[0], projection.NewHeads()
	}
	k.tap = &tap{JetStream: k.journal.JetStream()}
	buckets, err := projection.OpenBuckets(journaltest.Context(w.t), k.tap, 1)
	if err != nil {
		w.t.Fatal(err)
	}
	if cfg.FlushAfter == 0 {
		cfg.FlushAfter = 5 * time.Millisecond
	}
	if cfg.ID == "" { // its partitions are not shared
		cfg.Unleased = true
	}
	if cfg.CheckpointEvery == 0 {
		cfg.CheckpointEvery = 10 * time.Millisecond
	}
	tell := func(f func()) {
		k.mu.Lock()
		defer k.mu.Unlock()
		f()
		close(k.changed)
		k.changed = make(chan struct{})
	}
	cfg.Signals = projection.Signals{
		Read: cfg.Signals.Read, Together: cfg.Signals.Together,
		Flushed: func(session string, seq events.Seq) {
			tell(func() { k.flushed[session] = append(k.flushed[session], seq) })
		},
		Checkpointed: func(p int, streamSeq uint64) { tell(func() { k.checkpoints[p] = streamSeq }) },
		Quarantined:  func(q projection.Quarantine) { tell(func() { k.quarantined = append(k.quarantined, q) }) },
		Moved:        func(string) { tell(func() { k.moved++ }) },
	}
	k.Worker = projection.NewWorker(k.journal, buckets, heads, cfg)
	w.t.Cleanup(k.stop)
	return k
}

func (k *worker) stop() {
	k.t.Helper()
	if err := k.Stop(journaltest.Context(k.t)); err != nil {
		k.t.Errorf("stop the worker: %v", err)
	}
}

// kill makes the worker lose all its writes from now on, and ends it.
func (k *worker) kill() {
	k.t.Helper()
	k.tap.set(func(op, _, _ string) error {
		if op == "get" {
			return nil
		}
		return errMoved
	})
	k.stop()
}

// until waits for signals until a condition on what they told holds.
func (k *worker) until(what string, condition func() bool) {
	k.t.Helper()
	for {
		k.mu.Lock()
		ok, changed := condition(), k.changed
		k.mu.Unlock()
		if ok {
			return
		}
		journaltest.Await(k.t, what, changed)
	}
}

// wrote waits until the worker has written a session's head at seq or beyond.
func (k *worker) wrote(session string, seq events.Seq) {
	k.t.Helper()
	k.until(fmt.Sprintf("the head of %s at seq %d", session, seq), func() bool {
		return slices.ContainsFunc(k.flushed[session], func(s events.Seq) bool { return s >= seq })
	})
}

// record waits for the worker's first quarantine.
func (k *worker) record() projection.Quarantine {
	k.t.Helper()
	k.until("a quarantine", func() bool { return len(k.quarantined) > 0 })
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.quarantined[0]
}

// append appends events as one commit and returns the last seq.
func (w *world) append(session string, raws ...string) events.Seq {
	w.t.Helper()
	r := appender.Request{Session: session}
	for _, raw := range raws {
		r.Events = append(r.Events, []byte(raw))
	}
	got, err := w.Append(journaltest.Context(w.t), r)
	if err != nil {
		w.t.Fatalf("append to %s: %v", session, err)
	}
	return got.LastSeq
}

// fill appends n messages of a given size, one a commit.
func (w *world) fill(session string, n, size int) (last events.Seq) {
	w.t.Helper()
	for range n {
		last = w.append(session, user(strings.Repeat("x", size)))
	}
	return last
}

func user(text string) string {
	return `{"type":"user/message","surfaceOp":"append","data":` + message(text) + `}`
}

func message(text string) string {
	return `{"id":"u","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"` + text + `"}]}`
}

// replace replaces nodes by one; the range is that of the first and the last.
func replace(nodes []events.Seq, text string) string {
	b, err := json.Marshal(nodes)
	if err != nil {
		panic(err)
	}
	return fmt.Sprintf(`{"type":"user/message","surfaceOp":{"op":"replace","startSeq":%d,"endSeq":%d},"sourceEventSeqs":%s,"data":%s}`, nodes[0], nodes[len(nodes)-1], b, message(text))
}

// line is a line of the log, written by hand.
func line(typ string, seq events.Seq, meta, data string) string {
	return fmt.Sprintf(`{"type":"%s","seq":%d,"time":1767225604000%s,"data":%s}`, typ, seq, meta, data)
}

// store puts a commit with the given lines behind a session's log, around the appender; its
// digest and chain are right. It returns its stream sequence.
func (w *world) store(session string, lines ...func(seq events.Seq) string) uint64 {
	w.t.Helper()
	ctx := journaltest.Context(w.t)
	last, err := w.log.LeaderLast(ctx, session)
	if err != nil || last == nil {
		w.t.Fatalf("the end of %s: %v, %v", session, last, err)
	}
	wr := journaltest.NewWriter(session, nil)
	wr.Next, wr.Digest, wr.Chain = last.Last+1, last.Digest, last.Chain
	var raws []string
	for i, f := range lines {
		raws = append(raws, f(wr.Next+events.Seq(i)))
	}
	c := wr.Lines(fmt.Sprintf("by-hand-%s-%d", session, wr.Next), raws...)
	if _, err := w.log.Publish(ctx, c, last.StreamSeq); err != nil {
		w.t.Fatal(err)
	}
	return c.StreamSeq
}

// good is a line that breaks nothing.
func good(seq events.Seq) string {
	return line("user/message", seq, `,"surfaceOp":"append"`, message(fmt.Sprint("good ", seq)))
}

// headSeq is the seq of a session's head, NoSeq when it has none.
func (w *world) headSeq(session string) events.Seq {
	w.t.Helper()
	h, _, err := w.buckets.Snapshots.Head(journaltest.Context(w.t), session)
	if err != nil {
		w.t.Fatal(err)
	}
	if h == nil {
		return events.NoSeq
	}
	return h.Seq
}

// checkpoint is the stored checkpoint of a session's partition.
func (w *world) checkpoint(session string) uint64 {
	w.t.Helper()
	e, err := w.buckets.Checkpoints.Get(journaltest.Context(w.t), fmt.Sprintf("p%d", w.log.Partition(session)))
	if err != nil {
		w.t.Fatal(err)
	}
	var v struct{ StreamSeq uint64 }
	if err := json.Unmarshal(e.Value(), &v); err != nil {
		w.t.Fatal(err)
	}
	return v.StreamSeq
}

// neighbour is a session of the same partition as another.
func (w *world) neighbour(session string) string {
	for i := 0; ; i++ {
		if id := fmt.Sprintf("neighbour-%d", i); w.log.Partition(id) == w.log.Partition(session) {
			return id
		}
	}
}

// verify checks every session against a fresh fold, once its head is at the log's end.
func (w *world) verify() *audit.Report {
	w.t.Helper()
	r, err := audit.New(w.log, w.headers, w.buckets).All(journaltest.Context(w.t), audit.Options{Wait: 45 * time.Second})
	if err != nil {
		w.t.Fatal(err)
	}
	for _, f := range r.Findings {
		w.t.Errorf("verify: %s", f)
	}
	return r
}
