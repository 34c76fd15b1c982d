package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"time"

	"palimpsest/internal/api"
	"palimpsest/internal/appender"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/platform"
)

type serveCmd struct {
	storeFlags
	platform.StartFlags
	attestFlags
	api.EdgeFlags
	Listen     string `help:"Address of the HTTP API; port 0 picks a free one." default:"127.0.0.1:8080" env:"PALIMPSEST_APPENDER_LISTEN"`
	NATSListen string `name:"nats-listen" help:"Address of the embedded NATS server; port 0 picks a free one." default:"${listen}"`
	Invariants string `help:"Lifecycle rules: off, observe (report) or enforce (refuse)." enum:"off,observe,enforce" default:"off" env:"PALIMPSEST_INVARIANTS"`
	Freeze     *bool  `help:"Check events held in memory against what was committed. Default: on unless invariants are off." negatable:""`
	MaxEvent   int    `help:"Largest event in bytes of its canonical line." default:"8388608"`
	MaxBody    int64  `help:"Largest request body in bytes." default:"8388608"`
	MaxCommit  int    `help:"Largest commit in bytes of its lines; what the server takes in one message is a limit besides." default:"8388608"`
	MaxHeader  int    `help:"Largest session header in bytes." default:"65536"`

	MaxSessionEvents int64 `help:"Most events of a session." default:"10000000"`
	MaxSessionBytes  int64 `help:"Most bytes of a session's events." default:"8589934592"`

	GroupEvents  int           `help:"Events of several callers that become one commit at the most." default:"64"`
	GroupBytes   int           `help:"Bytes of several callers' events that become one commit at the most." default:"262144"`
	Queue        int           `help:"Appends that may wait for one session; more are refused with 429." default:"1024"`
	PendingBytes int           `help:"Bytes of events that may wait or be in flight in all; more are refused with 429." default:"67108864"`
	CacheBytes   int           `help:"Memory for sessions that are kept between appends, in bytes." default:"268435456"`
	KeyWindow    time.Duration `help:"How long an Idempotency-Key is recognised without an expectedSeq." default:"10m"`
}

// shown is the configuration without what nobody else should know.
func (c *serveCmd) shown() serveCmd {
	out := *c
	out.NATS = platform.WithoutSecrets(c.NATS)
	return out
}

// restTime is how long the end takes of what is not the drain, at the most: services, connections, and the
// store of an embedded server.
const restTime = 10 * time.Second

// stopTime is how long the end of a command takes, at the most, and that of a start that failed.
const stopTime = 30 * time.Second

func (c *serveCmd) Run(ctx context.Context) error {
	if err := c.StartFlags.Check(); err != nil {
		return err
	}
	if err := c.checkData(); err != nil {
		return err
	}
	if c.NATSListen != defaultListen && (c.NATS != "" || c.Context != "") {
		return c.notEmbedded("--nats-listen")
	}
	c.Bound(&c.NATSFlags)
	mode, err := lifecycle.ParseMode(c.Invariants)
	if err != nil {
		return err
	}
	err = errors.Join(platform.AboveZero(map[string]int64{
		"max-event": int64(c.MaxEvent), "max-body": c.MaxBody, "max-commit": int64(c.MaxCommit), "max-header": int64(c.MaxHeader),
		"max-session-events": c.MaxSessionEvents, "max-session-bytes": c.MaxSessionBytes, "group-events": int64(c.GroupEvents),
		"group-bytes": int64(c.GroupBytes), "queue": int64(c.Queue), "pending-bytes": int64(c.PendingBytes), "cache-bytes": int64(c.CacheBytes),
		"partitions": int64(c.Partitions), "replicas": int64(c.Replicas),
	}), platform.AboveZero(map[string]time.Duration{"key-window": c.KeyWindow, "attest-every": c.AttestEvery}), c.EdgeFlags.Check(c.Listen))
	if err != nil {
		return err
	}
	var g platform.Group
	served, err := c.EdgeFlags.Open(ctx, "palimpsest-appender", c.Listen, &g)
	if err != nil {
		return stopAfter(&g, err)
	}
	cfg := appender.Config{
		Telemetry:  served.Telemetry,
		Invariants: mode, Freeze: c.Freeze, MaxEvent: c.MaxEvent, MaxCommit: c.MaxCommit, MaxHeader: c.MaxHeader,
		MaxSessionEvents: c.MaxSessionEvents, MaxSessionBytes: c.MaxSessionBytes,
		GroupEvents: c.GroupEvents, GroupBytes: c.GroupBytes, Queue: c.Queue, PendingBytes: c.PendingBytes,
		CacheBytes: c.CacheBytes, KeyWindow: c.KeyWindow,
	}
	drain := cfg.Drain(c.log())
	patience, err := served.Listen(ctx, c.StartWait, transient, drain)
	if err != nil {
		return stopAfter(&g, err)
	}
	s, err := c.openPatiently(ctx, "palimpsest-appender", c.NATSListen, &g, patience)
	if err != nil {
		return stopAfter(&g, err)
	}
	a := s.appender(cfg)
	g.Add("appender", platform.StopFunc(a.Close))
	stop, err := a.Listen()
	if err != nil {
		return stopAfter(&g, err)
	}
	g.Add("contention", platform.StopFunc(func(context.Context) error { stop(); return nil }))
	var attester platform.Service
	err = patience.Do(ctx, "stream of checkpoints", func(ctx context.Context) (err error) {
		attester, err = c.attester(ctx, s)
		return err
	})
	if err != nil {
		return stopAfter(&g, err)
	}
	if attester != nil {
		g.Add("attester", attester)
	}
	g.Add("services", api.NewAppenderServices(s.conns.Publish[0], a, api.ServiceConfig{}))
	http := served.Serve(api.NewAppender(a, api.AppenderConfig{MaxBody: c.MaxBody, Ready: s.ready, Edge: served.Edge, Registry: served.Registry}), &g)
	g.Add("ready", platform.NewRunner(func(ctx context.Context, ready func()) error {
		slog.Info("serving", "http", http.URL(), "nats", platform.WithoutSecrets(s.url), "config", c.shown())
		if err := platform.PrintReady(os.Stdout, platform.Ready{HTTP: http.URL(), NATS: s.url}); err != nil {
			return err
		}
		ready()
		<-ctx.Done()
		return nil
	}))
	// The last to start is the first to stop: what waits for a server that is away is given up while HTTP
	// drains, and not behind it.
	g.Add("giving up", platform.StopFunc(func(context.Context) error { a.GiveUp(); return nil }))
	return g.Run(ctx, drain+restTime)
}

// stopAfter stops what runs, after a start that failed or a command that ended, and hands err on.
func stopAfter(g *platform.Group, err error) error {
	ctx, cancel := context.WithTimeout(context.Background(), stopTime)
	defer cancel()
	if serr := g.Stop(ctx); serr != nil {
		slog.Warn("stopping", "err", serr)
	}
	return err
}
