// Package telemetry owns OpenTelemetry: exporters from the standard environment variables, the
// spans on an append's way through both programs, and their measurements. A nil *Telemetry is
// valid everywhere and does nothing, which is what a program has when no variable is set.
package telemetry

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	promclient "github.com/prometheus/client_golang/prometheus"
	promexport "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/contrib/exporters/autoexport"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"palimpsest/internal/events"
)

// Config describes a program's telemetry.
type Config struct {
	// Service is service.name, unless OTEL_SERVICE_NAME names another.
	Service string
	// Gatherer holds the program's Prometheus metrics, which are exported over OTLP as well.
	// Defaults to none.
	Gatherer promclient.Gatherer
	// Spans and Metrics take the place of what the environment says. For tests.
	Spans   sdktrace.SpanExporter
	Metrics sdkmetric.Reader
}

// Telemetry makes spans and measures. Make one with Start.
type Telemetry struct {
	tracer trace.Tracer
	spans  *sdktrace.TracerProvider
	meters *sdkmetric.MeterProvider

	request, send, process metric.Float64Histogram

	known sync.Map                    // answered → metric.MeasurementOption
	sent  atomic.Pointer[destination] // of the last commit
}

// DefaultRatio is the share of traces that are recorded unless OTEL_TRACES_SAMPLER says otherwise. A
// trace that a caller records is always recorded, and one that a caller does not is not.
const DefaultRatio = 0.05

// wanted reports whether the environment asks for a signal (TRACES or METRICS).
func wanted(signal string) bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return false
	}
	if e := os.Getenv("OTEL_" + signal + "_EXPORTER"); e != "" {
		return e != "none"
	}
	return os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") != "" || os.Getenv("OTEL_EXPORTER_OTLP_"+signal+"_ENDPOINT") != ""
}

// Start sets up what the environment asks for: OTEL_EXPORTER_OTLP_ENDPOINT and its kin,
// OTEL_TRACES_EXPORTER, OTEL_METRICS_EXPORTER, OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME,
// OTEL_RESOURCE_ATTRIBUTES, OTEL_SDK_DISABLED. It returns nil when nothing is asked for.
func Start(ctx context.Context, cfg Config) (*Telemetry, error) {
	if cfg.Spans == nil && wanted("TRACES") {
		var err error
		if cfg.Spans, err = autoexport.NewSpanExporter(ctx); err != nil {
			return nil, fmt.Errorf("telemetry: traces: %w; check the OTEL_ variables", err)
		}
	}
	if cfg.Metrics == nil && wanted("METRICS") {
		if cfg.Gatherer != nil {
			autoexport.WithFallbackMetricProducer(func(context.Context) (sdkmetric.Producer, error) {
				return promexport.NewMetricProducer(promexport.WithGatherer(cfg.Gatherer)), nil
			})
		}
		var err error
		if cfg.Metrics, err = autoexport.NewMetricReader(ctx); err != nil {
			return nil, fmt.Errorf("telemetry: metrics: %w; check the OTEL_ variables", err)
		}
	}
	if cfg.Spans == nil && cfg.Metrics == nil {
		return nil, nil
	}
	res, err := resource.New(ctx, resource.WithAttributes(attribute.String("service.name", cfg.Service)), resource.WithTelemetrySDK(), resource.WithHost(), resource.WithProcessPID(), resource.WithFromEnv())
	if err != nil && !errors.Is(err, resource.ErrPartialResource) {
		return nil, fmt.Errorf("telemetry: resource: %w", err)
	}
	t := &Telemetry{}
	spanOptions := []sdktrace.TracerProviderOption{sdktrace.WithResource(res)}
	if cfg.Spans != nil {
		spanOptions = append(spanOptions, sdktrace.WithBatcher(cfg.Spans))
		if os.Getenv("OTEL_TRACES_SAMPLER") == "" {
			spanOptions = append(spanOptions, sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(DefaultRatio))))
		}
	} else { // only measured
		spanOptions = append(spanOptions, sdktrace.WithSampler(sdktrace.NeverSample()))
	}
	t.spans = sdktrace.NewTracerProvider(spanOptions...)
	t.tracer = t.spans.Tracer("palimpsest")
	meterOptions := []sdkmetric.Option{sdkmetric.WithResource(res)}
	if cfg.Metrics != nil {
		meterOptions = append(meterOptions, sdkmetric.WithReader(cfg.Metrics))
	}
	t.meters = sdkmetric.NewMeterProvider(meterOptions...)
	meter := t.meters.Meter("palimpsest")
	for _, h := range []struct {
		of         *metric.Float64Histogram
		name, text string
	}{
		{&t.request, "http.server.request.duration", "Duration of HTTP requests."},
		{&t.send, "messaging.client.operation.duration", "Duration of storing a commit in JetStream, retries included."},
		{&t.process, "messaging.process.duration", "Duration of writing a session's snapshot."},
	} {
		if *h.of, err = meter.Float64Histogram(h.name, metric.WithUnit("s"), metric.WithDescription(h.text), metric.WithExplicitBucketBoundaries(bounds...)); err != nil {
			return nil, fmt.Errorf("telemetry: %s: %w", h.name, err)
		}
	}
	return t, nil
}

// bounds of the histograms in seconds: those of the conventions, and shorter ones.
var bounds = []float64{0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30}

// Stop exports what is left. It tolerates nil.
func (t *Telemetry) Stop(ctx context.Context) error {
	if t == nil {
		return nil
	}
	return errors.Join(t.spans.Shutdown(ctx), t.meters.Shutdown(ctx))
}

var w3c propagation.TraceContext

// traceHeader is where W3C Trace Context has the context.
const traceHeader = "traceparent"

// parse reads a traceparent; what is none gives an invalid context.
func parse(traceparent string) trace.SpanContext {
	if traceparent == "" {
		return trace.SpanContext{}
	}
	return trace.SpanContextFromContext(w3c.Extract(context.Background(), propagation.MapCarrier{traceHeader: traceparent}))
}

// text is the traceparent of a span.
func text(sc trace.SpanContext) string {
	id, span := sc.TraceID(), sc.SpanID()
	b := append(make([]byte, 0, 55), "00-"...)
	b = append(hex.AppendEncode(b, id[:]), '-')
	b = append(hex.AppendEncode(b, span[:]), '-')
	return string(hex.AppendEncode(b, []byte{byte(sc.TraceFlags() & trace.FlagsSampled)}))
}

// methods are those that have a name of their own in spans and metrics; others are whatever callers make up.
var methods = map[string]bool{"GET": true, "HEAD": true, "POST": true, "PUT": true, "PATCH": true, "DELETE": true, "OPTIONS": true, "TRACE": true, "CONNECT": true}

// answered is a request's method, route and status: what its measurements are told apart by.
type answered struct {
	method, route string
	status        int
}

// Request begins the span of an HTTP request. It puts its own context into the request's
// traceparent, so that what is made of the request follows it. It must not be called on nil.
func (t *Telemetry) Request(r *http.Request, route, session string) (*http.Request, func(status int)) {
	start := time.Now()
	method := r.Method
	if !methods[method] {
		method = "_OTHER"
	}
	ctx := w3c.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
	ctx, span := t.tracer.Start(ctx, method+" "+route, asServer)
	if span.IsRecording() {
		span.SetAttributes(attribute.String("http.request.method", method), attribute.String("http.route", route))
		if session != "" {
			span.SetAttributes(attribute.String("palimpsest.session.id", session))
		}
	}
	r = r.WithContext(ctx)
	if sc := span.SpanContext(); sc.IsValid() {
		r.Header.Set(traceHeader, text(sc))
	}
	return r, func(status int) {
		if span.IsRecording() {
			span.SetAttributes(attribute.Int("http.response.status_code", status))
			if status >= 500 {
				span.SetStatus(codes.Error, http.StatusText(status))
			}
		}
		span.End()
		t.request.Record(ctx, time.Since(start).Seconds(), t.attributes(answered{method, route, status}, func(k answered) attribute.Set {
			return attribute.NewSet(attribute.String("http.request.method", k.method), attribute.String("http.route", k.route), attribute.Int("http.response.status_code", k.status))
		}))
	}
}

// attributes of a measurement, made once for a request of its kind.
func (t *Telemetry) attributes(k answered, make func(answered) attribute.Set) metric.MeasurementOption {
	if o, ok := t.known.Load(k); ok {
		return o.(metric.MeasurementOption)
	}
	o := metric.WithAttributeSet(make(k))
	t.known.Store(k, o) // routes, methods and statuses are few
	return o
}

var (
	asServer   = trace.WithSpanKind(trace.SpanKindServer)
	asProducer = trace.WithSpanKind(trace.SpanKindProducer)
	asConsumer = trace.WithSpanKind(trace.SpanKindConsumer)
)

// destination is what all commits to one log have in common.
type destination struct {
	prefix, name string
	common       []attribute.KeyValue
	measured     metric.MeasurementOption // of those without an error
}

func (t *Telemetry) destination(subject string) *destination {
	prefix, _, _ := strings.Cut(subject, ".")
	if d := t.sent.Load(); d != nil && d.prefix == prefix {
		return d
	}
	d := &destination{prefix: prefix, name: "publish " + prefix + ".{partition}.{session}", common: []attribute.KeyValue{
		attribute.String("messaging.system", "nats"), attribute.String("messaging.operation.name", "publish"),
		attribute.String("messaging.operation.type", "send"), attribute.String("messaging.destination.template", prefix+".{partition}.{session}"),
	}}
	d.measured = metric.WithAttributeSet(attribute.NewSet(d.common...))
	t.sent.Store(d)
	return d
}

// sampled reports whether a traceparent says that its span is recorded.
func sampled(traceparent string) bool {
	return len(traceparent) == len("00-0123456789abcdef0123456789abcdef-0123456789abcdef-01") && strings.IndexByte("13579bdf", traceparent[len(traceparent)-1]) >= 0
}

// under begins a span whose parent is one of others: one that is recorded, the first if any, so
// that no trace ends where several meet. The rest are linked.
func (t *Telemetry) under(ctx context.Context, name string, kind trace.SpanStartOption, others []string) (context.Context, trace.Span) {
	parent := -1
	for i, o := range others {
		if sampled(o) {
			parent = i
			break
		}
		if parent < 0 && o != "" {
			parent = i
		}
	}
	if parent >= 0 {
		if sc := parse(others[parent]); sc.IsValid() {
			ctx = trace.ContextWithRemoteSpanContext(ctx, sc)
		}
	}
	ctx, span := t.tracer.Start(ctx, name, kind)
	if span.IsRecording() {
		for i, o := range others {
			if sc := parse(o); i != parent && sc.IsValid() {
				span.AddLink(trace.Link{SpanContext: sc})
			}
		}
	}
	return ctx, span
}

// Publish begins the span of storing a commit for its callers, whose contexts are given. The
// first that is recorded is the parent, the others are linked. The commit carries the span from
// then on. It must not be called on nil.
func (t *Telemetry) Publish(ctx context.Context, c *events.Commit, subject string, callers []string) (end func(error)) {
	start := time.Now()
	d := t.destination(subject)
	ctx, span := t.under(ctx, d.name, asProducer, callers)
	if span.IsRecording() {
		span.SetAttributes(d.common...)
		span.SetAttributes(
			attribute.String("messaging.destination.name", subject), attribute.String("messaging.message.id", c.ID),
			attribute.Int("messaging.message.body.size", len(c.Body)), attribute.Int("palimpsest.callers", len(callers)),
			attribute.Int64("palimpsest.seq.first", int64(c.First)), attribute.Int64("palimpsest.seq.last", int64(c.Last)),
			attribute.String("palimpsest.session.id", c.Session))
	}
	if sc := span.SpanContext(); sc.IsValid() {
		c.Trace = text(sc)
	}
	return func(err error) {
		finish(span, err)
		t.send.Record(ctx, time.Since(start).Seconds(), withError(d.measured, d.common, err))
	}
}

// maxLinks bounds the commits that a flush is linked to.
const maxLinks = 64

// Commits are the contexts of the commits that a flush will take.
type Commits struct {
	traces []string
	more   int
}

// Note remembers a commit's context. It does nothing on a nil Telemetry.
func (t *Telemetry) Note(cs *Commits, c *events.Commit) {
	switch {
	case t == nil || c.Trace == "":
	case len(cs.traces) < maxLinks:
		cs.traces = append(cs.traces, c.Trace)
	default:
		cs.more++
	}
}

// nothing ends what was not begun.
func nothing(error) {}

var (
	flushed = []attribute.KeyValue{
		attribute.String("messaging.system", "nats"), attribute.String("messaging.operation.name", "flush"), attribute.String("messaging.operation.type", "process"),
	}
	flushedMeasured = metric.WithAttributeSet(attribute.NewSet(flushed...))
)

// Flush begins the span of writing a session's snapshot, and forgets the commits. Its parent is
// the newest commit in it that is recorded, whose wait ends with it; the others are linked. On nil
// it does nothing.
func (t *Telemetry) Flush(ctx context.Context, session string, seq events.Seq, cs *Commits) (end func(error)) {
	if t == nil {
		return nothing
	}
	start := time.Now()
	traces, more := cs.traces, cs.more
	*cs = Commits{}
	slices.Reverse(traces)
	ctx, span := t.under(ctx, "flush", asConsumer, traces)
	if span.IsRecording() {
		span.SetAttributes(flushed...)
		span.SetAttributes(
			attribute.Int("messaging.batch.message_count", len(traces)+more), attribute.Int64("palimpsest.seq.last", int64(seq)),
			attribute.String("palimpsest.session.id", session))
	}
	return func(err error) {
		finish(span, err)
		t.process.Record(ctx, time.Since(start).Seconds(), withError(flushedMeasured, flushed, err))
	}
}

func finish(span trace.Span, err error) {
	if err != nil {
		span.SetAttributes(attribute.String("error.type", errorType(err)))
		span.SetStatus(codes.Error, err.Error())
	}
	span.End()
}

// withError adds the kind of an error to what is measured.
func withError(measured metric.MeasurementOption, common []attribute.KeyValue, err error) metric.MeasurementOption {
	if err == nil {
		return measured
	}
	return metric.WithAttributes(append(common[:len(common):len(common)], attribute.String("error.type", errorType(err)))...)
}

// errorType is a word of few values.
func errorType(err error) string {
	var e *events.Error
	if errors.As(err, &e) {
		return string(e.Code)
	}
	return "other"
}
