package telemetry_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"palimpsest/internal/events"
	"palimpsest/internal/telemetry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clear takes away what the environment of the test says.
func clear(t *testing.T) {
	t.Helper()
	for _, name := range []string{"OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"} {
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
