package api_test

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"palimpsest/internal/api"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/telemetry"
)

func TestOneTraceGoesFromTheRequestThroughTheCommitToTheFlush(t *testing.T) {
	t.Parallel()
	ctx := journaltest.Context(t)
	spans, metrics := tracetest.NewInMemoryExporter(), sdkmetric.NewManualReader()
	tel, err := telemetry.Start(ctx, telemetry.Config{Service: "test", Spans: keep{spans}, Metrics: metrics})
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, tel)
	url := serve(t, w.appenderAPI(&api.Edge{Telemetry: tel}))
	const callers = 8
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			req, err := http.NewRequestWithContext(ctx, "POST", url+"/v1/sessions/secret-id/events", strings.NewReader(userEvent))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("traceparent", fmt.Sprintf("00-%032x-%016x-01", i+1, i+1))
			resp, err := http.DefaultTransport.RoundTrip(req)
			if err != nil {
				t.Error(err)
				return
			}
			resp.Body.Close()
			if resp.StatusCode != 201 {
				t.Errorf("status %d", resp.StatusCode)
			}
		})
	}
	wg.Wait()
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	if _, err := w.reader.View(ctx, "secret-id", projection.Want{MinSeq: callers - 1, Timeout: journaltest.Deadline}); err != nil {
		t.Fatal(err)
	}
	var rm metricdata.ResourceMetrics
	if err := metrics.Collect(ctx, &rm); err != nil {
		t.Fatal(err)
	}
	if err := w.worker.Stop(ctx); err != nil {
		t.Fatal(err)
	}
	if err := tel.Stop(ctx); err != nil { // hands over what is batched
		t.Fatal(err)
	}

	byID := map[string]tracetest.SpanStub{}
	kinds := map[string][]tracetest.SpanStub{}
	for _, s := range spans.GetSpans() {
		byID[s.SpanContext.SpanID().String()] = s
		kinds[s.Name] = append(kinds[s.Name], s)
	}
	requests, commits, flushes := kinds["POST /v1/sessions/{id}/events"], kinds["publish sessions.{partition}.{session}"], kinds["flush"]
	if len(requests) != callers || len(commits) == 0 || len(commits) > callers || len(flushes) == 0 {
		t.Fatalf("%d requests, %d commits, %d flushes", len(requests), len(commits), len(flushes))
	}
	// Every request follows its caller, and is parent of a commit or linked to it; every commit is parent of a flush or linked.
	follows := func(s tracetest.SpanStub) []string {
		out := []string{s.Parent.SpanID().String()}
		for _, l := range s.Links {
			out = append(out, l.SpanContext.SpanID().String())
		}
		return out
	}
	var followed []string
	for _, s := range slices.Concat(commits, flushes) {
		followed = append(followed, follows(s)...)
		if parent, ok := byID[s.Parent.SpanID().String()]; !ok || parent.SpanContext.TraceID() != s.SpanContext.TraceID() {
			t.Errorf("%s: its parent is in another trace or none", s.Name)
		}
	}
	slices.Sort(followed)
	for _, s := range slices.Concat(requests, commits) {
		n := 0
		for _, id := range followed {
			if id == s.SpanContext.SpanID().String() {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%s is followed by %d spans, want 1", s.Name, n)
		}
	}
	for _, s := range requests {
		if want := fmt.Sprintf("%032s", s.Parent.SpanID().String()[15:]); s.SpanContext.TraceID().String() != want {
			t.Errorf("a request's trace is %s, want its caller's %s", s.SpanContext.TraceID(), want)
		}
	}
	// The commit in the log carries the span that stored it.
	err = w.log.ReadToEnd(ctx, "secret-id", 0, func(c *events.Commit) error {
		if parts := strings.Split(c.Trace, "-"); len(parts) != 4 || byID[parts[2]].Name != commits[0].Name {
			t.Errorf("commit of seq %d: traceparent %q is not its span's", c.First, c.Trace)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	measured(t, rm)
	t.Logf("one trace:\n%s", drawn(spans.GetSpans(), commits[0].SpanContext.TraceID()))
}

// drawn shows the spans of a trace below their parents, with what they are linked to.
func drawn(all tracetest.SpanStubs, trace trace.TraceID) string {
	var b strings.Builder
	var below func(parent string, depth int)
	below = func(parent string, depth int) {
		for _, s := range all {
			if s.SpanContext.TraceID() != trace || s.Parent.SpanID().String() != parent {
				continue
			}
			fmt.Fprintf(&b, "%s%s (%s, span %s, %v)", strings.Repeat("  ", depth), s.Name, s.SpanKind, s.SpanContext.SpanID(), s.EndTime.Sub(s.StartTime))
			for _, l := range s.Links {
				fmt.Fprintf(&b, " linked to span %s of trace %s", l.SpanContext.SpanID(), l.SpanContext.TraceID())
			}
			b.WriteString("\n")
			below(s.SpanContext.SpanID().String(), depth+1)
		}
	}
	for _, s := range all {
		if s.SpanContext.TraceID() == trace && s.Parent.IsRemote() && s.SpanKind.String() == "server" {
			fmt.Fprintf(&b, "trace %s, begun by the caller's span %s\n", trace, s.Parent.SpanID())
			below(s.Parent.SpanID().String(), 1)
		}
	}
	return b.String()
}

// measured checks that there are the three histograms, and no session id on them.
func measured(t *testing.T, rm metricdata.ResourceMetrics) {
	t.Helper()
	var names []string
	for _, sm := range rm.ScopeMetrics {
		for _, m := range sm.Metrics {
			names = append(names, m.Name)
			h, ok := m.Data.(metricdata.Histogram[float64])
			if !ok {
				continue
			}
			for _, p := range h.DataPoints {
				for _, kv := range p.Attributes.ToSlice() {
					if strings.Contains(kv.Value.String(), "secret-id") || kv.Key == attribute.Key("palimpsest.session.id") {
						t.Errorf("%s has the session in %s", m.Name, kv.Key)
					}
				}
			}
		}
	}
	slices.Sort(names)
	if want := []string{"http.server.request.duration", "messaging.client.operation.duration", "messaging.process.duration"}; !slices.Equal(names, want) {
		t.Errorf("found metrics %v, want %v", names, want)
	}
}
