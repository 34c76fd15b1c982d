package telemetry_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"

	"palimpsest/internal/events"
	"palimpsest/internal/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clear takes away what the environment of the test says.
func clear(t *testing.T) {
	t.Helper()
	for _, name := range []string{"OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_TRACES_SAMPLER"} {
		t.Setenv(name, "")
	}
}

func TestNothingIsStartedUnlessTheEnvironmentAsks(t *testing.T) {
	for name, env := range map[string]map[string]string{
		"nothing set": {},
		"disabled":    {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
		"none":        {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
	} {
		clear(t)
		for k, v := range env {
			t.Setenv(k, v)
		}
		tel, err := telemetry.Start(t.Context(), telemetry.Config{Service: "test"})
		if tel != nil || err != nil {
			t.Errorf("%s: found %v, %v", name, tel, err)
		}
	}
	var off *telemetry.Telemetry
	var cs telemetry.Commits
	c := &events.Commit{Trace: "00-00000000000000000000000000000001-0000000000000001-01"}
	if n := testing.AllocsPerRun(100, func() {
		off.Note(&cs, c)
		off.Flush(context.Background(), "s", 1, &cs)(nil)
	}); n != 0 {
		t.Errorf("off, a flush allocates %v times", n)
	}
	if err := off.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestSpansAndMetricsGoToTheEndpointInTheEnvironment(t *testing.T) {
	clear(t)
	var mu sync.Mutex
	got := map[string][]byte{}
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := io.Reader(r.Body)
		if r.Header.Get("Content-Encoding") == "gzip" {
			z, err := gzip.NewReader(r.Body)
			if err != nil {
				t.Error(err)
				return
			}
			body = z
		}
		b, err := io.ReadAll(body)
		if err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		got[r.URL.Path] = append(got[r.URL.Path], b...)
		w.Header().Set("Content-Type", "application/x-protobuf")
	}))
	defer collector.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
	t.Setenv("OTEL_TRACES_SAMPLER", "always_on")
	t.Setenv("OTEL_SERVICE_NAME", "named-by-the-environment")
	reg := prometheus.NewRegistry()
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: "palimpsest_appender_events_total"})
	reg.MustRegister(c)
	c.Add(7)
	tel, err := telemetry.Start(t.Context(), telemetry.Config{Service: "test", Gatherer: reg})
	if err != nil || tel == nil {
		t.Fatal(tel, err)
	}
	tel.Publish(t.Context(), &events.Commit{ID: "c", Session: "s"}, "sessions.1.s", []string{"", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})(events.ErrFenced)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := tel.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	for path, words := range map[string][]string{
		"/v1/traces":  {"publish sessions.{partition}.{session}", "named-by-the-environment", "messaging.system", "fenced"},
		"/v1/metrics": {"palimpsest_appender_events", "messaging.client.operation.duration", "fenced"},
	} {
		for _, word := range words {
			if !bytes.Contains(got[path], []byte(word)) {
				t.Errorf("%s: %d bytes without %q", path, len(got[path]), word)
			}
		}
	}
}

// keep keeps spans when the exporter is shut down, which the one in memory does not.
type keep struct{ *tracetest.InMemoryExporter }

func (keep) Shutdown(context.Context) error { return nil }

const (
	recorded   = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	unrecorded = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-00"
)

func TestByDefaultAShareOfTracesIsRecordedAndAllThatCallersRecord(t *testing.T) {
	clear(t)
	spans := tracetest.NewInMemoryExporter()
	tel, err := telemetry.Start(t.Context(), telemetry.Config{Service: "test", Spans: keep{spans}})
	if err != nil {
		t.Fatal(err)
	}
	const n = 1000 // the batch that waits holds as many
	for range n {
		c := &events.Commit{ID: "c", Session: "s"}
		tel.Publish(t.Context(), c, "sessions.1.s", []string{""})(nil)
		if len(c.Trace) != len(recorded) {
			t.Fatalf("the commit has the traceparent %q, want one", c.Trace)
		}
	}
	if err := tel.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := float64(len(spans.GetSpans())) / n; got <= 0 || got > 4*telemetry.DefaultRatio {
		t.Errorf("%g of the traces were recorded, want about %g", got, telemetry.DefaultRatio)
	}

	spans.Reset()
	if tel, err = telemetry.Start(t.Context(), telemetry.Config{Service: "test", Spans: keep{spans}}); err != nil {
		t.Fatal(err)
	}
	c := &events.Commit{ID: "c", Session: "s"}
	tel.Publish(t.Context(), c, "sessions.1.s", []string{"", unrecorded, recorded})(nil) // the parent is the one that is recorded
	var cs telemetry.Commits
	tel.Note(&cs, c)
	tel.Note(&cs, &events.Commit{Trace: unrecorded})
	tel.Flush(t.Context(), "s", 1, &cs)(nil)
	tel.Publish(t.Context(), &events.Commit{}, "sessions.1.s", []string{unrecorded})(nil)
	if err := tel.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := spans.GetSpans()
	if len(got) != 2 {
		t.Fatalf("%d spans, want a publish and a flush", len(got))
	}
	for _, s := range got {
		if id := s.SpanContext.TraceID().String(); id != recorded[3:35] || len(s.Links) != 1 || s.Links[0].SpanContext.TraceID().String() != unrecorded[3:35] {
			t.Errorf("%s is in trace %s with links %v, want the caller's that is recorded and one to the other", s.Name, id, s.Links)
		}
	}
	if got[1].Parent.SpanID() != got[0].SpanContext.SpanID() {
		t.Errorf("the parent of the flush is %s, want the publish", got[1].Parent.SpanID())
	}
}

func TestMethodsThatCallersMakeUpAreOneInSpansAndMetrics(t *testing.T) {
	clear(t)
	t.Setenv("OTEL_TRACES_SAMPLER", "always_on")
	spans := tracetest.NewInMemoryExporter()
	tel, err := telemetry.Start(t.Context(), telemetry.Config{Service: "test", Spans: keep{spans}})
	if err != nil {
		t.Fatal(err)
	}
	for _, method := range []string{"GET", "MADE", "UP"} {
		_, end := tel.Request(httptest.NewRequest(method, "/", nil), "/v1/sessions", "")
		end(200)
	}
	if err := tel.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range spans.GetSpans() {
		names = append(names, s.Name)
	}
	if want := []string{"GET /v1/sessions", "_OTHER /v1/sessions", "_OTHER /v1/sessions"}; !slices.Equal(names, want) {
		t.Errorf("found spans %v, want %v", names, want)
	}
}

// BenchmarkAppend is what telemetry does for an append that is answered, stored and flushed.
func BenchmarkAppend(b *testing.B) {
	for _, sampler := range []string{"", "always_on", "always_off"} {
		b.Run("sampler="+sampler, func(b *testing.B) {
			b.Setenv("OTEL_TRACES_SAMPLER", sampler)
			tel, err := telemetry.Start(b.Context(), telemetry.Config{Service: "test", Spans: tracetest.NewNoopExporter()})
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			r := httptest.NewRequest("POST", "/v1/sessions/s/events", nil)
			for b.Loop() {
				r.Header.Del("traceparent")
				r, end := tel.Request(r, "/v1/sessions/{id}/events", "s")
				c := &events.Commit{ID: "c", Session: "s"}
				tel.Publish(r.Context(), c, "sessions.1.s", []string{r.Header.Get("traceparent")})(nil)
				end(201)
				var cs telemetry.Commits
				tel.Note(&cs, c)
				tel.Flush(r.Context(), "s", 1, &cs)(nil)
			}
			if err := tel.Stop(context.Background()); err != nil {
				b.Fatal(err)
			}
		})
	}
}
