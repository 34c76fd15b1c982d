package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"palimpsest/internal/api"
	"palimpsest/internal/appender"
	"palimpsest/internal/journal"
	"palimpsest/internal/platform"
	"palimpsest/internal/snapshot"
)

// storeFlags say where the log is: at a NATS server, or in a directory that an embedded
// server opens.
type storeFlags struct {
	platform.NATSFlags
	Data       string `help:"Directory of the embedded server's store, without --nats." default:"${data}" type:"path" env:"PALIMPSEST_DATA"`
	Durability string `help:"When the embedded server syncs to disk: interval (each second) or always (before each ack)." enum:"interval,always" default:"interval"`
	Replicas   int    `help:"Replicas of stream and buckets when they are created." default:"1"`
	Partitions int    `help:"Partitions of the stream when it is created." default:"32"`
	api.VocabularyFlags
}

// defaultData and defaultListen are where the embedded server keeps its store and listens.
const (
	defaultData   = "./data"
	defaultListen = "127.0.0.1:4222"
)

// store is the open log with everything under it.
type store struct {
	server  *platform.Server // nil with --nats
	conns   *platform.Conns
	url     string
	journal *journal.Journal
	headers *journal.Headers
	snaps   *snapshot.Store
}

// open connects to NATS, or starts the embedded server on listen and connects to that. What
// was opened is added to the group, to be stopped with it.
func (f storeFlags) open(ctx context.Context, name, listen string, g *platform.Group) (*store, error) {
	if err := f.checkData(); err != nil {
		return nil, err
	}
	return f.openPatiently(ctx, name, listen, g, platform.Patience{})
}

// checkData is a usage error when --data was given, on the command line and not in the environment, and has no
// meaning: with a server that is elsewhere, which the environment may name.
func (f storeFlags) checkData() error {
	if f.NATS == "" && f.Context == "" {
		return nil
	}
	for _, unsaid := range []string{defaultData, os.Getenv("PALIMPSEST_DATA")} {
		if path, err := filepath.Abs(unsaid); err == nil && path == f.Data {
			return nil
		}
	}
	return f.notEmbedded("--data")
}

// notEmbedded is the error of a flag that is about the embedded server when there is none.
func (f storeFlags) notEmbedded(flag string) error {
	return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("%s is about the embedded NATS server, and none is started where another one is given (%q, by --nats, --nats-context or the environment): leave out one of them", flag, platform.WithoutSecrets(f.NATS)+f.Context)}
}

// exists is a usage error when the embedded server would make its store anew, for a command that is of no
// use on an empty one.
func (f storeFlags) exists() error {
	if f.NATS != "" || f.Context != "" {
		return nil
	}
	if _, err := os.Stat(filepath.Join(f.Data, "jetstream")); errors.Is(err, os.ErrNotExist) {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--data: there is no store at %s; give the directory of one, or --nats", f.Data)}
	}
	return nil
}

// openPatiently is open for a program that serves.
func (f storeFlags) openPatiently(ctx context.Context, name, listen string, g *platform.Group, p platform.Patience) (*store, error) {
	if _, err := f.Vocabulary(); err != nil { // before anything starts
		return nil, err
	}
	s := new(store)
	if err := p.Do(ctx, "NATS", func(ctx context.Context) error { return f.connect(ctx, s, name, listen, g) }); err != nil {
		return nil, err
	}
	return s, p.Do(ctx, "log and buckets", func(ctx context.Context) error { return f.bind(ctx, s) })
}

// transient reports whether a start may succeed later.
func transient(err error) bool { return platform.Unreached(err) || journal.Transient(err) }

// connect is the first half of open: it looks at nothing that is stored. A second call goes on where
// the first one failed.
func (f storeFlags) connect(ctx context.Context, s *store, name, listen string, g *platform.Group) error {
	var err error
	if f.NATS != "" || f.Context != "" {
		s.url = f.NATS
	} else if s.server == nil {
		s.server, err = platform.StartServer(platform.EmbedConfig{DataDir: f.Data, Listen: listen, Durability: platform.Durability(f.Durability)})
		if err != nil {
			return err
		}
		g.Add("nats-server", platform.StopFunc(s.server.Shutdown))
		s.url = s.server.ClientURL()
	}
	cc := f.NATSFlags.Config(name)
	cc.URL = s.url
	if s.conns, err = platform.ConnectAll(ctx, platform.ConnsConfig{ConnConfig: cc}); err != nil {
		return err
	}
	g.Add("nats", platform.StopFunc(s.disconnect))
	if f.Context != "" {
		s.url = s.conns.KV.ConnectedUrl()
	}
	return nil
}

// log is how the log is treated.
func (f storeFlags) log() journal.Config {
	return journal.Config{Replicas: f.Replicas, Partitions: f.Partitions}
}

// bind is the second half of open: the log and the buckets.
func (f storeFlags) bind(ctx context.Context, s *store) error {
	vocabulary, err := f.Vocabulary()
	if err != nil {
		return err
	}
	if s.journal, err = journal.Open(ctx, journal.Conns{Publish: s.conns.Publish, Read: s.conns.KV, Made: s.conns.Made}, f.log(), vocabulary); err != nil {
		return err
	}
	if s.headers, err = s.journal.OpenHeaders(ctx); err != nil {
		return err
	}
	s.snaps, err = snapshot.Open(ctx, s.journal.JetStream(), f.Replicas)
	return err
}

func (s *store) appender(c appender.Config) *appender.Appender {
	return appender.New(s.journal, s.headers, s.snaps, c)
}

// ready says why the log cannot be reached, nil when it can.
func (s *store) ready(ctx context.Context) error {
	if s.server != nil {
		if err := s.server.Healthy(); err != nil {
			return err
		}
	}
	if !s.conns.KV.IsConnected() {
		return errors.New("not connected to NATS")
	}
	_, err := s.journal.Info(ctx)
	return err
}

// disconnect closes the connections. What a connection could not send when the program ends is
// lost to nobody: who waited for an answer was told that there was none, and projection goes
// on from the log.
func (s *store) disconnect(ctx context.Context) error {
	if err := s.conns.Close(ctx); err != nil {
		slog.Warn("closing the connections to NATS", "err", err)
	}
	return nil
}
