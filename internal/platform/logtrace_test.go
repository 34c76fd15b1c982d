package platform

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/trace"
)

func TestARecordWithinASpanNamesIt(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log, err := NewLogger(LogConfig{Format: "json", Output: &out})
	if err != nil {
		t.Fatal(err)
	}
	log.With("a", 1).Info("outside")
	ctx := trace.ContextWithSpanContext(t.Context(), trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{15: 1}, SpanID: trace.SpanID{7: 2}}))
	log.With(slog.Int("a", 1)).InfoContext(ctx, "inside")
	lines := strings.Split(out.String(), "\n")
	if strings.Contains(lines[0], "trace_id") || !strings.Contains(lines[1], `"trace_id":"00000000000000000000000000000001","span_id":"0000000000000002"`) {
		t.Errorf("found\n%s", out.String())
	}
}
