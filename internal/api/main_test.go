package api_test

import (
	"context"
	"log/slog"
	"net/http"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"

	"palimpsest/internal/api"
	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/telemetry"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	goleak.VerifyTestMain(m)
}

// world is both programs' APIs over one server.
type world struct {
	js        jetstream.JetStream
	log       *journal.Journal
	headers   *journal.Headers
	buckets   *projection.Buckets
	appender  *appender.Appender
	worker    *projection.Worker
	reader    *projection.Reader
	hubs      *projection.Hubs
	auditor   *audit.Auditor
	telemetry *telemetry.Telemetry
}

func newWorld(t testing.TB, tel *telemetry.Telemetry) *world {
	t.Helper()
	ctx := journaltest.Context(t)
	srv := journaltest.Start(t)
	nc := srv.Conn(t)
	vocabulary, err := events.NewVocabulary()
	if err != nil {
		t.Fatal(err)
	}
	w := &world{telemetry: tel}
	if w.log, err = journal.Open(ctx, journal.Conns{Publish: []*nats.Conn{nc}, Read: srv.Conn(t)}, journal.Config{Partitions: 2}, vocabulary); err != nil {
		t.Fatal(err)
	}
	w.js = w.log.JetStream()
	if w.headers, err = w.log.OpenHeaders(ctx); err != nil {
		t.Fatal(err)
	}
	if w.buckets, err = projection.OpenBuckets(ctx, w.js, 1); err != nil {
		t.Fatal(err)
	}
	w.appender = appender.New(w.log, w.headers, w.buckets.Snapshots, appender.Config{Telemetry: tel})
	heads := projection.NewHeads()
	w.worker = projection.NewWorker(w.log, w.buckets, heads, projection.Config{Unleased: true, Telemetry: tel})
	w.reader = projection.NewReader(w.log, w.headers, w.buckets, heads)
	w.hubs = projection.NewHubs(w.reader, nc)
	w.auditor = audit.New(w.log, w.headers, w.buckets)
	if err := w.worker.Start(ctx); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.worker.Stop(journaltest.Context(t)); err != nil {
			t.Error(err)
		}
		if err := w.appender.Close(journaltest.Context(t)); err != nil {
			t.Error(err)
		}
	})
	return w
}

func (w *world) appenderAPI(e *api.Edge) http.Handler {
	return api.NewAppender(w.appender, api.AppenderConfig{Edge: e})
}

func (w *world) projectorAPI(e *api.Edge) http.Handler {
	return api.NewProjector(w.reader, w.worker, w.hubs, w.auditor, api.ProjectorConfig{Edge: e})
}

// appendOf is an append of one user message.
func appendOf(session string) appender.Request {
	return appender.Request{Session: session, Events: [][]byte{[]byte(userEvent)}}
}

// keep keeps spans when the exporter is shut down, which the one in memory does not.
type keep struct{ *tracetest.InMemoryExporter }

func (keep) Shutdown(context.Context) error { return nil }
