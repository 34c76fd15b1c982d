package audit_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
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

// world is a server with a log, an appender, a worker and an auditor.
type world struct {
	t       testing.TB
	srv     *journaltest.Server
	js      jetstream.JetStream
	log     *journal.Journal
	headers *journal.Headers
	buckets *projection.Buckets
	worker  *projection.Worker
	keyFile string // of its attester

	partitions int

	*appender.Appender
	*audit.Auditor
}

func newWorld(t testing.TB) *world {
	t.Helper()
	return newWorldOf(t, 2)
}

func newWorldOf(t testing.TB, partitions int) *world {
	t.Helper()
	w := &world{t: t, srv: journaltest.Start(t), partitions: partitions}
	w.js = w.srv.JetStream(t)
	ctx := journaltest.Context(t)
	w.log = w.journal()
	var err error
	if w.headers, err = w.log.OpenHeaders(ctx); err != nil {
		t.Fatal(err)
	}
	if w.buckets, err = projection.OpenBuckets(ctx, w.log.JetStream(), 1); err != nil {
		t.Fatal(err)
	}
	w.Appender = appender.New(w.log, w.headers, w.buckets.Snapshots, appender.Config{})
	w.Auditor = audit.New(w.log, w.headers, w.buckets)
	w.worker = projection.NewWorker(w.log, w.buckets, projection.NewHeads(), projection.Config{Unleased: true, FlushAfter: 5 * time.Millisecond, FlushEvents: 20, CheckpointEvery: 20 * time.Millisecond})
	if err := w.worker.Start(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.stop()
		if err := w.Close(journaltest.Context(t)); err != nil {
			t.Errorf("close the appender: %v", err)
		}
	})
	return w
}

// journal opens the log as another process does, which knows some more event types.
func (w *world) journal(types ...string) *journal.Journal {
	w.t.Helper()
	v, err := events.NewVocabulary(types...)
	if err != nil {
		w.t.Fatal(err)
	}
	j, err := journal.Open(journaltest.Context(w.t), journal.Conns{Publish: []*nats.Conn{w.srv.Conn(w.t)}, Read: w.srv.Conn(w.t)}, journal.Config{Partitions: w.partitions}, v)
	if err != nil {
		w.t.Fatal(err)
	}
	return j
}

// stop stops the worker, with all that was folded in the heads.
func (w *world) stop() {
	w.t.Helper()
	if err := w.worker.Stop(journaltest.Context(w.t)); err != nil {
		w.t.Errorf("stop the worker: %v", err)
	}
}

// append appends events as one commit.
func (w *world) append(session string, raws ...string) {
	w.t.Helper()
	r := appender.Request{Session: session, Actor: "ann"}
	for _, raw := range raws {
		r.Events = append(r.Events, []byte(raw))
	}
	if _, err := w.Append(journaltest.Context(w.t), r); err != nil {
		w.t.Fatalf("append to %s: %v", session, err)
	}
}

// settle waits until a session's head is at the end of its log, and stops the worker.
func (w *world) settle(session string) {
	w.t.Helper()
	w.projected(session)
	w.stop()
}

// projected waits until a session's head is at the end of its log.
func (w *world) projected(session string) {
	w.t.Helper()
	ctx := journaltest.Context(w.t)
	last, err := w.log.LeaderLast(ctx, session)
	if err != nil {
		w.t.Fatal(err)
	}
	journaltest.Eventually(w.t, "the head of "+session, func() bool {
		h, _, err := w.buckets.Snapshots.Head(ctx, session)
		return err == nil && h != nil && h.Seq >= last.Last
	})
}

// project has a new worker project some sessions to the end of their logs, and stops it.
func (w *world) project(t testing.TB, sessions ...string) {
	t.Helper()
	w.worker = projection.NewWorker(w.log, w.buckets, projection.NewHeads(), projection.Config{Unleased: true, FlushAfter: 5 * time.Millisecond})
	if err := w.worker.Start(journaltest.Context(t)); err != nil {
		t.Fatal(err)
	}
	for _, id := range sessions {
		w.projected(id)
	}
	w.stop()
}

func user(text string) string {
	return `{"type":"user/message","surfaceOp":"append","data":` + message(text) + `}`
}

func message(text string) string {
	return `{"id":"u","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"` + text + `"}]}`
}

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

// message reads one message of the log as it is.
func (w *world) message(streamSeq uint64) *jetstream.RawStreamMsg {
	w.t.Helper()
	m, err := w.stream().GetMsg(journaltest.Context(w.t), streamSeq)
	if err != nil {
		w.t.Fatal(err)
	}
	return m
}

func (w *world) stream() jetstream.Stream {
	w.t.Helper()
	s, err := w.js.Stream(journaltest.Context(w.t), w.log.Config().Stream)
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

// remove deletes a message of the log.
func (w *world) remove(streamSeq uint64) {
	w.t.Helper()
	if err := w.stream().DeleteMsg(journaltest.Context(w.t), streamSeq); err != nil {
		w.t.Fatal(err)
	}
}

// rewrite makes the stream anew from its messages, after a change to them. A message that stays
// in its place keeps its stream sequence.
func (w *world) rewrite(change func([]*jetstream.RawStreamMsg)) {
	w.t.Helper()
	ctx := journaltest.Context(w.t)
	s := w.stream()
	state := s.CachedInfo().State
	var msgs []*jetstream.RawStreamMsg
	for seq := uint64(1); seq <= state.LastSeq; seq++ {
		msgs = append(msgs, w.message(seq))
	}
	change(msgs)
	if err := w.js.DeleteStream(ctx, w.log.Config().Stream); err != nil {
		w.t.Fatal(err)
	}
	if _, err := w.js.CreateStream(ctx, s.CachedInfo().Config); err != nil {
		w.t.Fatal(err)
	}
	for _, m := range msgs {
		if m.Subject == "" { // taken out
			continue
		}
		if _, err := w.js.PublishMsg(ctx, &nats.Msg{Subject: m.Subject, Header: ceHeaders(m.Header), Data: m.Data}); err != nil {
			w.t.Fatal(err)
		}
	}
}

// ceHeaders is what of a message's headers its writer gave.
func ceHeaders(h nats.Header) nats.Header {
	out := nats.Header{}
	for k, v := range h {
		if strings.HasPrefix(k, "ce-") {
			out[k] = v
		}
	}
	return out
}

// store puts a commit with one line behind a session's log, around the appender; change may
// spoil it. It returns its stream sequence.
func (w *world) store(session string, raw func(seq events.Seq) string, change func(*events.Commit)) uint64 {
	w.t.Helper()
	ctx := journaltest.Context(w.t)
	last, err := w.log.LeaderLast(ctx, session)
	if err != nil || last == nil {
		w.t.Fatalf("the end of %s: %v, %v", session, last, err)
	}
	wr := journaltest.NewWriter(session, nil)
	wr.Next, wr.Digest, wr.Chain = last.Last+1, last.Digest, last.Chain
	c := wr.Lines(fmt.Sprintf("by-hand-%s-%d", session, wr.Next), raw(wr.Next))
	if change != nil {
		change(c)
	}
	if _, err := w.log.Publish(ctx, c, last.StreamSeq); err != nil {
		w.t.Fatal(err)
	}
	return c.StreamSeq
}

func (w *world) put(key, value string) {
	w.t.Helper()
	if _, err := w.buckets.Snapshots.KV().Put(journaltest.Context(w.t), key, []byte(value)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) get(key string) string {
	w.t.Helper()
	e, err := w.buckets.Snapshots.KV().Get(journaltest.Context(w.t), key)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		w.t.Fatalf("there is no key %s", key)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	return string(e.Value())
}

func (w *world) purge(key string) {
	w.t.Helper()
	if err := w.buckets.Snapshots.KV().Purge(journaltest.Context(w.t), key); err != nil {
		w.t.Fatal(err)
	}
}

// setHeader puts other bytes into the bucket of headers; "" takes the header away.
func (w *world) setHeader(session, value string) {
	w.t.Helper()
	ctx := journaltest.Context(w.t)
	kv, err := w.js.KeyValue(ctx, journal.HeadersBucket)
	if err == nil && value == "" {
		err = kv.Purge(ctx, events.Token(session))
	} else if err == nil {
		_, err = kv.Put(ctx, events.Token(session), []byte(value))
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// place is where a finding says that something is wrong.
type place struct {
	session, check string
	seq            events.Seq // NoSeq when it names none
	streamSeq      uint64
	key            string
	rule           events.Rule
}

func placeOf(f audit.Finding) place {
	p := place{f.Session, f.Check, events.NoSeq, f.StreamSeq, f.Key, f.Rule}
	if f.Seq != nil {
		p.seq = *f.Seq
	}
	return p
}

// all verifies everything.
func (w *world) all(o audit.Options) *audit.Report {
	w.t.Helper()
	r, err := w.All(journaltest.Context(w.t), o)
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}
