package main

import (
	"context"
	"errors"
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
	platform.StartFlags
	api.EdgeFlags
	AccessLog       bool          `help:"Record every read of sessions in the stream ACCESS." env:"PALIMPSEST_ACCESS_LOG"`
	AccessMaxAge    time.Duration `help:"How long records of reads stay, where the stream is created." default:"2160h"`
	Listen          string        `help:"Address of the HTTP API; port 0 picks a free one." default:"127.0.0.1:8081" env:"PALIMPSEST_PROJECTOR_LISTEN"`
	ID              string        `name:"id" help:"Name of this worker among those that share the partitions. Default: host, pid and something random." placeholder:"ID" env:"PALIMPSEST_WORKER_ID"`
	Lease           time.Duration `help:"How long a worker that is gone keeps its partitions, in whole seconds from 2s on. Default: 3s, and 10s on a replicated stream." placeholder:"DURATION"`
	FlushAfter      time.Duration `help:"The longest that a folded event waits to be in a head." default:"50ms"`
	FlushBehind     time.Duration `help:"The same while much of a partition is still to be read; ten times as long while very much is." default:"1s"`
	FlushEvents     int           `help:"Folded events of one session after which it is flushed at once." default:"256"`
	Writes          int           `help:"Snapshots that are written at the same time." default:"12"`
	CatchUpBytes    int           `help:"Memory for messages that wait while partitions that are far behind are read with one consumer, in bytes, and as much as the largest message at the least; negative: one consumer for each, always." default:"33554432"`
	CacheBytes      int           `help:"Memory for sessions that are kept between events, in bytes." default:"536870912"`
	UnflushedBytes  int           `help:"Memory for what was read and is in no head yet, in bytes: reading waits for writes when there is more." default:"134217728"`
	PageCache       int           `help:"Memory for pages and heads that were read for requests, in bytes; 0 for none." name:"page-cache-bytes" default:"134217728"`
	HeaderCache     int           `help:"Memory for session headers, in bytes; 0 for none." name:"header-cache-bytes" default:"16777216"`
	Freeze          bool          `help:"Check events held in memory against what was read before they are served."`
	ServiceParallel int           `help:"Endpoints of each NATS service, and so requests of it that are worked on at the same time." default:"16"`
	FeedEvery       time.Duration `help:"How often the buckets are asked for news while somebody follows the feed." default:"250ms"`
	FeedBehind      time.Duration `help:"How long a reader of the feed may be behind before it is cut off." default:"1m"`
}

// errNoCatchUp tells 0, which would mean the default, from what it might be taken for.
var errNoCatchUp = errors.New("--catch-up-bytes: expected more than 0, or a negative number for one consumer for each partition, found 0")

func (c *serveCmd) Run(ctx context.Context) error {
	if err := c.StartFlags.Check(); err != nil {
		return err
	}
	c.Bound(&c.NATSFlags)
	err := errors.Join(platform.AboveZero(map[string]int64{
		"flush-events": int64(c.FlushEvents), "writes": int64(c.Writes), "cache-bytes": int64(c.CacheBytes), "unflushed-bytes": int64(c.UnflushedBytes),
		"service-parallel": int64(c.ServiceParallel), "partitions": int64(c.Partitions), "replicas": int64(c.Replicas),
	}), platform.AboveZero(map[string]time.Duration{
		"flush-after": c.FlushAfter, "flush-behind": c.FlushBehind, "access-max-age": c.AccessMaxAge, "feed-every": c.FeedEvery, "feed-behind": c.FeedBehind,
	}), c.EdgeFlags.Check(c.Listen))
	if err != nil {
		return err
	}
	if c.PageCache < 0 || c.HeaderCache < 0 {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--page-cache-bytes and --header-cache-bytes: expected 0 or more, found %d and %d", c.PageCache, c.HeaderCache)}
	}
	if c.CatchUpBytes == 0 {
		return &platform.ExitError{Code: platform.ExitUsage, Err: errNoCatchUp}
	}
	if c.ID == "" {
		c.ID = projection.DefaultWorkerID()
	} else if err := projection.CheckWorkerID(c.ID); err != nil {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--id: %w", err)}
	}
	if c.Lease != 0 {
		if err := projection.CheckLease(c.Lease); err != nil {
			return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--lease: %w", err)}
		}
	}
	var g platform.Group
	served, err := c.EdgeFlags.Open(ctx, "palimpsest-projector", c.Listen, &g)
	if err != nil {
		return stopAfter(&g, err)
	}
	// Who waits for a seq is answered at once when the program stops: nothing takes long then.
	patience, err := served.Listen(ctx, c.StartWait, transient, 0)
	if err != nil {
		return stopAfter(&g, err)
	}
	s, err := c.openPatiently(ctx, "palimpsest-projector", &g, patience)
	if err != nil {
		return stopAfter(&g, err)
	}
	if c.AccessLog {
		l := api.NewAccessLog(s.journal.JetStream(), api.AccessConfig{MaxAge: c.AccessMaxAge, Replicas: c.Replicas, Patience: patience})
		g.Add("access log", l)
		served.Record(l)
	}
	heads := projection.NewHeads()
	worker := projection.NewWorker(s.journal, s.buckets, heads, projection.Config{
		ID: c.ID, Lease: c.Lease, FlushAfter: c.FlushAfter, FlushBehind: max(c.FlushBehind, c.FlushAfter), FlushEvents: c.FlushEvents, Writes: c.Writes, CacheBytes: c.CacheBytes, UnflushedBytes: c.UnflushedBytes, CatchUpBytes: c.CatchUpBytes, Replicas: c.Replicas, Freeze: c.Freeze, Telemetry: served.Telemetry,
	})
	reader := projection.NewReader(s.journal, s.headers, s.buckets, heads)
	s.buckets.Snapshots.CachePages(c.PageCache)
	reader.CacheHeaders(c.HeaderCache)
	g.Add("worker", patience.Patient("projection", worker))
	hubs := projection.NewHubs(reader, s.conns.Publish[0])
	open := api.ProjectorConfig{
		Fleet: projection.NewFleet(reader, projection.FleetConfig{Every: c.FeedEvery, Behind: c.FeedBehind}),
		Ready: func(ctx context.Context) error { return errors.Join(worker.Ready(), s.ready(ctx)) },
	}
	guarded := open
	guarded.Edge, guarded.Registry = served.Edge, served.Registry
	http := served.Serve(api.NewProjector(reader, worker, hubs, s.auditor(), guarded), &g)
	// Over NATS, the server's permissions say who may ask what.
	g.Add("services", api.NewProjectorServices(s.conns.Publish[len(s.conns.Publish)-1], api.NewProjector(reader, worker, hubs, s.auditor(), open), api.ServiceConfig{Parallel: c.ServiceParallel}))
	g.Add("ready", platform.NewRunner(func(ctx context.Context, ready func()) error {
		slog.Info("serving", "http", http.URL(), "nats", platform.WithoutSecrets(c.NATS), "config", c.shown())
		if err := platform.PrintReady(os.Stdout, platform.Ready{HTTP: http.URL(), NATS: c.NATS}); err != nil {
			return err
		}
		worker.Announce(http.URL())
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
