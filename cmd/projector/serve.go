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
	api.EdgeFlags
	AccessLog    bool          `help:"Record every read of sessions in the stream ACCESS." env:"PALIMPSEST_ACCESS_LOG"`
	AccessMaxAge time.Duration `help:"How long records of reads stay, where the stream is created." default:"2160h"`
	Listen       string        `help:"Address of the HTTP API; port 0 picks a free one." default:"127.0.0.1:8081" env:"PALIMPSEST_PROJECTOR_LISTEN"`
	FlushAfter   time.Duration `help:"The longest that a folded event waits to be in a head." default:"50ms"`
	FlushEvents  int           `help:"Folded events of one session after which it is flushed at once." default:"256"`
	Writes       int           `help:"Snapshots that are written at the same time." default:"12"`
	CacheBytes   int           `help:"Memory for sessions that are kept between events, in bytes." default:"536870912"`
	Freeze       bool          `help:"Check events held in memory against what was read before they are served."`
}

func (c *serveCmd) Run(ctx context.Context) error {
	for name, n := range map[string]int64{
		"flush-after": int64(c.FlushAfter), "flush-events": int64(c.FlushEvents), "writes": int64(c.Writes), "access-max-age": int64(c.AccessMaxAge), "cache-bytes": int64(c.CacheBytes),
		"partitions": int64(c.Partitions), "replicas": int64(c.Replicas),
	} {
		if n < 1 {
			return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--%s: expected more than 0, found %d", name, n)}
		}
	}
	var g platform.Group
	s, err := c.open(ctx, "palimpsest-projector", &g)
	if err != nil {
		return stopAfter(&g, err)
	}
	served, err := c.EdgeFlags.Open(ctx, "palimpsest-projector", c.Listen, &g)
	if err != nil {
		return stopAfter(&g, err)
	}
	if c.AccessLog {
		l := api.NewAccessLog(s.journal.JetStream(), api.AccessConfig{MaxAge: c.AccessMaxAge, Replicas: c.Replicas})
		g.Add("access log", l)
		served.Record(l)
	}
	heads := projection.NewHeads()
	worker := projection.NewWorker(s.journal, s.buckets, heads, projection.Config{
		FlushAfter: c.FlushAfter, FlushEvents: c.FlushEvents, Writes: c.Writes, CacheBytes: c.CacheBytes, Replicas: c.Replicas, Freeze: c.Freeze, Telemetry: served.Telemetry,
	})
	reader := projection.NewReader(s.journal, s.headers, s.buckets, heads)
	g.Add("worker", worker)
	http := served.Serve(api.NewProjector(reader, worker, projection.NewHubs(reader, s.conns.Publish[0]), s.auditor(),
		api.ProjectorConfig{Ready: s.ready, Edge: served.Edge, Registry: served.Registry}), &g)
	g.Add("ready", platform.NewRunner(func(ctx context.Context, ready func()) error {
		slog.Info("serving", "http", http.URL(), "nats", platform.WithoutSecrets(c.NATS), "config", c.shown())
		if err := platform.PrintReady(os.Stdout, platform.Ready{HTTP: http.URL(), NATS: c.NATS}); err != nil {
			return err
		}
		ready()
		<-ctx.Done()
		return nil
	}))
	return g.Run(ctx, drainTime)
}

// shown is the configuration without what nobody else should know.
func (c *serveCmd) shown() serveCmd {
	out := *c
	out.NATS = platform.WithoutSecrets(c.NATS)
	return out
}
