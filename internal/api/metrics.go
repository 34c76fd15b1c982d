package api

import (
	"context"
	"math"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"palimpsest/internal/appender"
	"palimpsest/internal/projection"
)

// metricsOf serves counters in Prometheus' text format. Session ids are never labels.
func metricsOf(program string, reg *prometheus.Registry, e *Edge, counters map[string]*atomic.Int64, gauges map[string]func() float64) handler {
	if reg == nil {
		reg = prometheus.NewRegistry()
	}
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	for name, c := range counters {
		reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{
			Namespace: "palimpsest", Subsystem: program, Name: name + "_total", Help: "Number of " + name + " since the program started.",
		}, func() float64 { return float64(c.Load()) }))
	}
	for name, c := range e.counters() {
		reg.MustRegister(prometheus.NewCounterFunc(prometheus.CounterOpts{Namespace: "palimpsest", Name: name + "_total", Help: "Number of " + strings.ReplaceAll(name, "_", " ") + " since the program started."},
			func() float64 { return float64(c.Load()) }))
	}
	for name, g := range gauges {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "palimpsest", Subsystem: program, Name: name, Help: "Current " + name + "."}, g))
	}
	h := promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
	return func(w http.ResponseWriter, r *http.Request, _ string) error {
		h.ServeHTTP(w, r)
		return nil
	}
}

// counters are what an edge counts.
func (e *Edge) counters() map[string]*atomic.Int64 {
	if e == nil {
		return nil
	}
	out := map[string]*atomic.Int64{}
	if e.Auth != nil {
		out["http_unauthenticated"], out["http_forbidden"], out["http_rate_limited"] = &e.stats.unauthenticated, &e.stats.forbidden, &e.stats.limited
	}
	if e.Access != nil {
		out["access_records"], out["access_records_dropped"] = &e.Access.stored, &e.Access.dropped
	}
	return out
}

func appenderMetrics(a *appender.Appender, reg *prometheus.Registry, e *Edge) handler {
	s := a.Stats()
	return metricsOf("appender", reg, e, map[string]*atomic.Int64{
		"events": &s.Events, "commits": &s.Commits, "refused": &s.Refused,
		"conflicts": &s.Conflicts, "violations": &s.Violations, "loads": &s.Loads,
	}, map[string]func() float64{
		"sessions_in_memory": func() float64 { n, _ := a.Sessions(); return float64(n) },
		"cache_bytes":        func() float64 { _, b := a.Sessions(); return float64(b) },
	})
}

func projectorMetrics(w *projection.Worker, r *projection.Reader, reg *prometheus.Registry, e *Edge) handler {
	s := w.Stats()
	counted := func(pick func(quarantined, skipped int) int) func() float64 {
		return func() float64 {
			ctx, cancel := context.WithTimeout(context.Background(), quarantineTime)
			defer cancel()
			all, err := r.Quarantined(ctx)
			if err != nil {
				return math.NaN()
			}
			quarantined, skipped := apart(all)
			return float64(pick(len(quarantined), len(skipped)))
		}
	}
	return metricsOf("projector", reg, e, map[string]*atomic.Int64{
		"events": &s.Events, "commits": &s.Commits, "flushes": &s.Flushes, "healed": &s.Healed,
		"moved": &s.Moved, "quarantined": &s.Quarantined, "loads": &s.Loads, "writes": &s.Writes, "written_bytes": &s.WrittenBytes,
		"stale_writes_refused": &s.Stale, "leases_lost": &s.Lost,
	}, map[string]func() float64{
		"lag":                      func() float64 { return w.Gauges().Lag },
		"lag_total":                func() float64 { return w.Gauges().LagTotal },
		"partitions_owned":         func() float64 { return w.Gauges().Owned },
		"partitions_unowned":       func() float64 { return w.Gauges().Unowned },
		"workers":                  func() float64 { return w.Gauges().Workers },
		"workers_silent":           func() float64 { return w.Gauges().Silent },
		"sessions_quarantined":     func() float64 { return w.Gauges().Quarantined },
		"oldest_unflushed_seconds": w.OldestUnflushed,
		"sessions_in_memory":       func() float64 { return float64(w.SessionsInMemory()) },
		"cached_bytes":             func() float64 { return float64(w.CachedBytes()) },
		"unflushed_bytes":          func() float64 { return float64(w.UnflushedBytes()) },
		"quarantined_sessions":     counted(func(quarantined, _ int) int { return quarantined }),
		"skipped_sessions":         counted(func(_, skipped int) int { return skipped }),
	})
}

// quarantineTime bounds how long a scrape waits for the quarantine bucket.
const quarantineTime = 2 * time.Second
