package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"palimpsest/internal/api"
	"palimpsest/internal/audit"
	"palimpsest/internal/journal"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

// storeFlags say where the log is.
type storeFlags struct {
	platform.NATSFlags
	Replicas   int `help:"Replicas of stream and buckets when they are created." default:"1"`
	Partitions int `help:"Partitions of the stream when it is created." default:"32"`
	api.VocabularyFlags
}

// store is the open log with the buckets of projection.
type store struct {
	conns   *platform.Conns
	journal *journal.Journal
	headers *journal.Headers
	buckets *projection.Buckets
	fleet   *projection.Fleet // of commands that read the API; nil until it is needed
}

const (
	defaultURL = "nats://127.0.0.1:4222"
	drainTime  = 30 * time.Second
)

// open connects to NATS. What was opened is added to the group, to be stopped with it.
func (f *storeFlags) open(ctx context.Context, name string, g *platform.Group) (*store, error) {
	return f.openPatiently(ctx, name, g, platform.Patience{})
}

// transient reports whether a start may succeed later.
func transient(err error) bool { return platform.Unreached(err) || journal.Transient(err) }

// openPatiently is open for a program that serves.
func (f *storeFlags) openPatiently(ctx context.Context, name string, g *platform.Group, p platform.Patience) (*store, error) {
	vocabulary, err := f.Vocabulary()
	if err != nil {
		return nil, err
	}
	if f.NATS == "" && f.Context == "" {
		f.NATS = defaultURL
	}
	s := new(store)
	err = p.Do(ctx, "NATS", func(ctx context.Context) (err error) {
		s.conns, err = platform.ConnectAll(ctx, platform.ConnsConfig{ConnConfig: f.NATSFlags.Config(name)})
		return err
	})
	if err != nil {
		return nil, err
	}
	g.Add("nats", platform.StopFunc(s.disconnect))
	if f.Context != "" {
		f.NATS = s.conns.KV.ConnectedUrl()
	}
	return s, p.Do(ctx, "log and buckets", func(ctx context.Context) (err error) {
		// The partitions are read over the connections that an appender publishes on.
		if s.journal, err = journal.Open(ctx, journal.Conns{Publish: s.conns.Publish, Read: s.conns.KV, Made: s.conns.Made}, journal.Config{Replicas: f.Replicas, Partitions: f.Partitions}, vocabulary); err != nil {
			return err
		}
		if s.headers, err = s.journal.OpenHeaders(ctx); err != nil {
			return err
		}
		s.buckets, err = projection.OpenBuckets(ctx, s.journal.JetStream(), f.Replicas)
		return err
	})
}

// ready says why the log cannot be reached, nil when it can.
func (s *store) ready(ctx context.Context) error {
	if !s.conns.KV.IsConnected() {
		return errors.New("not connected to NATS")
	}
	_, err := s.journal.Info(ctx)
	return err
}

// with runs f on an open log, for commands that end by themselves.
func (f *storeFlags) with(ctx context.Context, do func(*store) error) error {
	var g platform.Group
	s, err := f.open(ctx, "palimpsest-projector-cli", &g)
	if err == nil {
		err = do(s)
	}
	return stopAfter(&g, err)
}

// stopAfter stops what runs and hands err on.
func stopAfter(g *platform.Group, err error) error {
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	if serr := g.Stop(ctx); serr != nil {
		slog.Warn("stopping", "err", serr)
	}
	return err
}

func (s *store) reader() *projection.Reader {
	return projection.NewReader(s.journal, s.headers, s.buckets, projection.NewHeads())
}

func (s *store) auditor() *audit.Auditor { return audit.New(s.journal, s.headers, s.buckets) }

// disconnect closes the connections. What a connection could not send when the program ends is
// lost to nobody: who waited for an answer was told that there was none, and projection goes
// on from the log.
func (s *store) disconnect(ctx context.Context) error {
	if err := s.conns.Close(ctx); err != nil {
		slog.Warn("closing the connections to NATS", "err", err)
	}
	return nil
}
