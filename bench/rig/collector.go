package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"palimpsest/internal/platform"
	"palimpsest/internal/telemetry"
)

// WithTelemetry calls f with what a program has that sends traces and metrics to a collector in this
// process, and stops both.
func WithTelemetry(ctx context.Context, service string, f func(*telemetry.Telemetry) error) (err error) {
	stop := func(f func(context.Context) error) {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		err = errors.Join(err, f(ctx))
	}
	c, err := startCollector(ctx)
	if err != nil {
		return err
	}
	defer func() { stop(c.stop) }()
	tel, err := c.telemetry(ctx, service)
	if err != nil {
		return err
	}
	defer func() { stop(tel.Stop) }()
	return f(tel)
}

// collector takes traces and metrics over OTLP and forgets them.
type collector struct {
	web             *platform.HTTPServer
	traces, metrics atomic.Int64 // bytes
}

// startCollector starts one on a free port of this machine.
func startCollector(ctx context.Context) (*collector, error) {
	c := &collector{}
	c.web = platform.Serve(platform.HTTPConfig{Listen: "127.0.0.1:0", Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		if strings.HasSuffix(r.URL.Path, "/traces") {
			c.traces.Add(n)
		} else {
			c.metrics.Add(n)
		}
		w.Header().Set("Content-Type", "application/x-protobuf")
	})})
	return c, c.web.Start(ctx)
}

// telemetry is what a program has whose OTEL_EXPORTER_OTLP_ENDPOINT is the collector, with all else
// as it is by default.
func (c *collector) telemetry(ctx context.Context, service string) (*telemetry.Telemetry, error) {
	if err := errors.Join(os.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.web.URL()), os.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")); err != nil {
		return nil, err
	}
	defer os.Unsetenv("OTEL_EXPORTER_OTLP_ENDPOINT")
	defer os.Unsetenv("OTEL_EXPORTER_OTLP_PROTOCOL")
	return telemetry.Start(ctx, telemetry.Config{Service: service, Gatherer: prometheus.NewRegistry()})
}

// stop fails when no traces or no metrics came: then nothing was measured.
func (c *collector) stop(ctx context.Context) error {
	err := c.web.Stop(ctx)
	if t, m := c.traces.Load(), c.metrics.Load(); err == nil && (t == 0 || m == 0) {
		err = fmt.Errorf("the collector got %d bytes of traces and %d of metrics, expected some of both", t, m)
	}
	return err
}

// Overhead is what telemetry costs: rates and processor time with it and without.
type Overhead struct {
	Name    string  `json:"name"`
	Value   float64 `json:"value"` // with telemetry
	Unit    string  `json:"unit"`
	Without float64 `json:"baseline"`
	Ratio   float64 `json:"ratio"`
	// CPURatio is the processor time an event without telemetry by that with it: more is better.
	CPURatio float64 `json:"cpuRatio"`
}

// NewOverhead compares medians: rates in events/s, processor time in any unit an event.
func NewOverhead(name string, rateOn, rateOff, cpuOn, cpuOff float64) Overhead {
	return Overhead{name, Round(rateOn, 1), "events/s", Round(rateOff, 1), Round(rateOn/rateOff, 1000), Round(cpuOff/cpuOn, 1000)}
}
