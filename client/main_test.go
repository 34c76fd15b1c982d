package client_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"palimpsest/client"
	"palimpsest/internal/api"
	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// The services that all tests and examples talk to. Their sessions are apart.
var appenderURL, projectorURL string

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "palimpsest-client-")
	if err != nil {
		return failed(err)
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	var g platform.Group
	code := 1
	if err = serve(ctx, dir, &g); err == nil {
		code = m.Run()
		http.DefaultClient.CloseIdleConnections()
	}
	if err = errors.Join(err, g.Stop(ctx)); err != nil {
		return failed(err)
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			return failed(err)
		}
	}
	return code
}

func failed(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// serve starts a server, an appender and a projector, to be stopped with the group.
func serve(ctx context.Context, dir string, g *platform.Group) error {
	srv, err := platform.StartServer(platform.EmbedConfig{DataDir: dir, Listen: "127.0.0.1:0"})
	if err != nil {
		return err
	}
	g.Add("nats-server", platform.StopFunc(srv.Shutdown))
	conns, err := platform.ConnectAll(ctx, platform.ConnsConfig{ConnConfig: platform.ConnConfig{URL: srv.ClientURL()}})
	if err != nil {
		return errors.Join(err, g.Start(ctx))
	}
	g.Add("nats", platform.StopFunc(conns.Close))
	handlers, worker, err := handlers(ctx, conns)
	if err != nil {
		return errors.Join(err, g.Start(ctx))
	}
	g.Add("worker", worker)
	a := platform.Serve(platform.HTTPConfig{Listen: "127.0.0.1:0", Handler: handlers.appender})
	p := platform.Serve(platform.HTTPConfig{Listen: "127.0.0.1:0", Handler: handlers.projector})
	g.Add("appender", a)
	g.Add("projector", p)
	if err := g.Start(ctx); err != nil {
		return err
	}
	appenderURL, projectorURL = a.URL(), p.URL()
	return nil
}

type services struct{ appender, projector http.Handler }

// handlers wires the two services up over one set of connections.
func handlers(ctx context.Context, conns *platform.Conns) (services, *projection.Worker, error) {
	j, err := journal.Open(ctx, journal.Conns{Publish: conns.Publish, Read: conns.KV, Made: conns.Made}, journal.Config{}, events.DefaultVocabulary())
	if err != nil {
		return services{}, nil, err
	}
	headers, err := j.OpenHeaders(ctx)
	if err != nil {
		return services{}, nil, err
	}
	snaps, err := snapshot.Open(ctx, j.JetStream(), 1)
	if err != nil {
		return services{}, nil, err
	}
	buckets, err := projection.OpenBuckets(ctx, j.JetStream(), 1)
	if err != nil {
		return services{}, nil, err
	}
	a := appender.New(j, headers, snaps, appender.Config{Invariants: lifecycle.Off})
	heads := projection.NewHeads()
	worker := projection.NewWorker(j, buckets, heads, projection.Config{Unleased: true})
	reader := projection.NewReader(j, headers, buckets, heads)
	return services{
		appender:  api.NewAppender(a, api.AppenderConfig{}),
		projector: api.NewProjector(reader, worker, projection.NewHubs(reader, conns.KV), audit.New(j, headers, buckets), api.ProjectorConfig{}),
	}, worker, nil
}

// deadline is far above what any call takes.
const deadline = 2 * time.Minute

// within is a context that ends at the deadline.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), deadline)
	t.Cleanup(cancel)
	return ctx
}

// dial makes a client whose requests go through the faults.
func dial(t *testing.T, faults *faulty, change ...func(*client.Config)) *client.Client {
	t.Helper()
	cfg := client.Config{AppenderURL: appenderURL, ProjectorURL: projectorURL, MinBackoff: time.Millisecond, MaxBackoff: 20 * time.Millisecond}
	transport := &http.Transport{MaxIdleConnsPerHost: 16}
	t.Cleanup(transport.CloseIdleConnections)
	cfg.HTTPClient = &http.Client{Transport: transport}
	if faults != nil {
		faults.under = transport
		cfg.HTTPClient.Transport = faults
	}
	for _, c := range change {
		c(&cfg)
	}
	c, err := client.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// fresh is a session that no other test uses, nor another run of the same test.
func fresh(c *client.Client, name string) *client.Session {
	return c.Session(name + " " + client.NewID())
}
