package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"time"

	"palimpsest/internal/api"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

type serveCmd struct {
	storeFlags
	Listen      string        `help:"Address of the HTTP API; port 0 picks a free one." default:"127.0.0.1:8081" env:"PALIMPSEST_PROJECTOR_LISTEN"`
	FlushAfter  time.Duration `help:"The longest that a folded event waits to be in a head." default:"50ms"`
	FlushBehind time.Duration `help:"The same while much of a partition is still to be read." default:"1s"`
	FlushEvents int           `help:"Folded events of one session after which it is flushed at once." default:"256"`
	Writes      int           `help:"Snapshots that are written at the same time." default:"12"`
	CacheBytes  int           `help:"Memory for sessions that are kept between events, in bytes." default:"536870912"`
	PageCache   int           `help:"Memory for pages and heads that were read for requests, in bytes; 0 for none." name:"page-cache-bytes" default:"134217728"`
	HeaderCache int           `help:"Memory for session headers, in bytes; 0 for none." name:"header-cache-bytes" default:"16777216"`
	Freeze      bool          `help:"Check events held in memory against what was read before they are served."`
}

func (c *serveCmd) Run(ctx context.Context) error {
	for name, n := range map[string]int64{
		"flush-after": int64(c.FlushAfter), "flush-behind": int64(c.FlushBehind), "flush-events": int64(c.FlushEvents), "writes": int64(c.Writes), "cache-bytes": int64(c.CacheBytes),
		"partitions": int64(c.Partitions), "replicas": int64(c.Replicas),
	} {
		if n < 1 {
			return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--%s: expected more than 0, found %d", name, n)}
		}
	}
	if c.PageCache < 0 || c.HeaderCache < 0 {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--page-cache-bytes and --header-cache-bytes: expected 0 or more, found %d and %d", c.PageCache, c.HeaderCache)}
	}
	var g platform.Group
	s, err := c.open(ctx, "palimpsest-projector", &g)
	if err != nil {
		return stopAfter(&g, err)
	}
	heads := projection.NewHeads()
	worker := projection.NewWorker(s.journal, s.buckets, heads, projection.Config{
		FlushAfter: c.FlushAfter, FlushBehind: max(c.FlushBehind, c.FlushAfter), FlushEvents: c.FlushEvents, Writes: c.Writes, CacheBytes: c.CacheBytes, Replicas: c.Replicas, Freeze: c.Freeze,
	})
	reader := projection.NewReader(s.journal, s.headers, s.buckets, heads)
	s.buckets.Snapshots.CachePages(c.PageCache)
	reader.CacheHeaders(c.HeaderCache)
	g.Add("worker", worker)
	http := platform.Serve(platform.HTTPConfig{Listen: c.Listen, Handler: api.NewProjector(reader, worker, projection.NewHubs(reader, s.conns.Publish[0]), s.auditor(), api.ProjectorConfig{Ready: s.ready})})
	g.Add("http", http)
	g.Add("ready", platform.NewRunner(func(ctx context.Context, ready func()) error {
		slog.Info("serving", "http", http.URL(), "nats", c.NATS, "config", *c)
		if err := platform.PrintReady(os.Stdout, platform.Ready{HTTP: http.URL(), NATS: c.NATS}); err != nil {
			return err
		}
		ready()
		<-ctx.Done()
		return nil
	}))
	return g.Run(ctx, drainTime)
}
