package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/api"
	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/platform"
	"palimpsest/internal/snapshot"
)

// rig is one server on a store of its own and an appender with both of its APIs, put together
// as `appender serve` does. Everything is in this process, and talks over loopback TCP as it
// would between processes.
type rig struct {
	dir      string
	stop     []func(context.Context) error // in the order of start
	url      string
	conns    *platform.Conns // the appender's
	js       jetstream.JetStream
	journal  *journal.Journal
	headers  *journal.Headers
	snaps    *snapshot.Store
	appender *appender.Appender
	http     string // host:port
	targets  []*target
}

// rawStream takes the baseline's messages. It has the settings of the appender's stream.
const rawStream, rawPrefix = "RAW", "raw"

// stopWithin bounds stopping all.
const stopWithin = 30 * time.Second

func newRig(ctx context.Context, d platform.Durability) (r *rig, err error) {
	r = &rig{}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if r.dir, err = os.MkdirTemp("", "palimpsest-bench-"); err != nil {
		return nil, err
	}
	server, err := platform.StartServer(platform.EmbedConfig{DataDir: r.dir, Listen: "127.0.0.1:0", Durability: d})
	if err != nil {
		return nil, err
	}
	r.stop = append(r.stop, server.Shutdown)
	r.url = server.ClientURL()
	if r.conns, err = platform.ConnectAll(ctx, platform.ConnsConfig{ConnConfig: platform.ConnConfig{URL: r.url, Name: "bench-appender"}}); err != nil {
		return nil, err
	}
	r.stop = append(r.stop, r.conns.Close)
	if r.journal, err = journal.Open(ctx, journal.Conns{Publish: r.conns.Publish, Read: r.conns.KV, Made: r.conns.Made}, journal.Config{}, events.DefaultVocabulary()); err != nil {
		return nil, err
	}
	if r.headers, err = r.journal.OpenHeaders(ctx); err != nil {
		return nil, err
	}
	if r.snaps, err = snapshot.Open(ctx, r.journal.JetStream(), 1); err != nil {
		return nil, err
	}
	r.appender = r.newAppender(appender.Config{})
	unlisten, err := r.appender.Listen()
	if err != nil {
		return nil, err
	}
	r.stop = append(r.stop, func(context.Context) error { unlisten(); return nil })
	services := api.NewAppenderServices(r.conns.Publish[0], r.appender, api.ServiceConfig{})
	if err := services.Start(ctx); err != nil {
		return nil, err
	}
	r.stop = append(r.stop, services.Stop)
	web := platform.Serve(platform.HTTPConfig{Listen: "127.0.0.1:0", Handler: api.NewAppender(r.appender, api.AppenderConfig{})})
	if err := web.Start(ctx); err != nil {
		return nil, err
	}
	r.stop = append(r.stop, web.Stop)
	r.http = strings.TrimPrefix(web.URL(), "http://")

	nc, err := r.connect()
	if err != nil {
		return nil, err
	}
	if r.js, err = jetstream.New(nc); err != nil {
		return nil, err
	}
	info, err := r.journal.Info(ctx)
	if err != nil {
		return nil, err
	}
	cfg := info.Config
	cfg.Name, cfg.Subjects, cfg.Description = rawStream, []string{rawPrefix + ".*.*"}, ""
	_, err = r.js.CreateStream(ctx, cfg)
	return r, err
}

// newAppender returns an appender that is closed with the rig.
func (r *rig) newAppender(cfg appender.Config) *appender.Appender {
	a := appender.New(r.journal, r.headers, r.snaps, cfg)
	r.stop = append(r.stop, a.Close)
	return a
}

// connect opens a connection as a client would, with nats.go's defaults.
func (r *rig) connect() (*nats.Conn, error) {
	nc, err := nats.Connect(r.url, nats.Name("bench-client"))
	if err != nil {
		return nil, err
	}
	r.stop = append(r.stop, func(context.Context) error { nc.Close(); return nil })
	return nc, nil
}

// close stops all, the last started first, and removes the store.
func (r *rig) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopWithin)
	defer cancel()
	var errs []error
	for i := len(r.stop) - 1; i >= 0; i-- {
		errs = append(errs, r.stop[i](ctx))
	}
	r.stop = nil
	if r.dir != "" {
		errs = append(errs, os.RemoveAll(r.dir))
	}
	return errors.Join(errs...)
}

// stored returns how many bytes a stream takes.
func (r *rig) stored(ctx context.Context, stream string) (uint64, error) {
	s, err := r.js.Stream(ctx, stream)
	if err != nil {
		return 0, err
	}
	return s.CachedInfo().State.Bytes, nil
}

func (r *rig) purge(ctx context.Context, stream string) error {
	s, err := r.js.Stream(ctx, stream)
	if err != nil {
		return err
	}
	return s.Purge(ctx)
}

// verify reads the whole log with the bare client. It returns an error unless every session's
// seqs are without holes and as many as were acknowledged.
func (r *rig) verify(ctx context.Context) error {
	next := map[string]events.Seq{}
	s, err := r.js.Stream(ctx, r.journal.Config().Stream)
	if err != nil {
		return err
	}
	if end := s.CachedInfo().State.LastSeq; end > 0 {
		cons, err := s.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{})
		if err != nil {
			return err
		}
		msgs, err := cons.Messages(jetstream.PullMaxBytes(16 << 20))
		if err != nil {
			return err
		}
		defer msgs.Stop()
		for at := uint64(0); at < end; {
			m, err := msgs.Next(jetstream.NextContext(ctx))
			if err != nil {
				return fmt.Errorf("reading the log behind stream sequence %d: %w", at, err)
			}
			meta, err := m.Metadata()
			if err != nil {
				return err
			}
			at = meta.Sequence.Stream
			if err := follow(next, m, at); err != nil {
				return err
			}
		}
	}
	sum := events.Seq(0)
	for _, t := range r.targets {
		if acked := events.Seq(t.acked.Load()); next[t.session] != acked {
			return fmt.Errorf("session %s: %d events were acknowledged, its log holds %d", t.session, acked, next[t.session])
		}
		sum += next[t.session]
		delete(next, t.session)
	}
	if len(next) > 0 {
		return fmt.Errorf("the log holds %d sessions that nobody appended to", len(next))
	}
	slog.Info("every log is contiguous and holds what was acknowledged", "sessions", len(r.targets), "events", int64(sum))
	return nil
}

// follow takes a session's next commit in.
func follow(next map[string]events.Seq, m jetstream.Msg, at uint64) error {
	c, err := events.ParseCommit(m.Headers(), m.Data(), at)
	if err != nil {
		return err
	}
	if c.First != next[c.Session] {
		return fmt.Errorf("session %s, stream sequence %d: expected a commit from seq %d on, found one from %d", c.Session, at, next[c.Session], c.First)
	}
	seq := c.First
	for line, rest := []byte(nil), c.Body; len(rest) > 0; seq++ {
		line, rest = events.CutLine(rest)
		var e events.Event
		if err := events.ParseCanonical(&e, line, c.Format, vocabulary); err != nil {
			return err
		}
		if e.Seq != seq {
			return fmt.Errorf("session %s, stream sequence %d: expected seq %d, found %d", c.Session, at, seq, e.Seq)
		}
	}
	if seq != c.Last+1 {
		return fmt.Errorf("session %s, stream sequence %d: expected events up to seq %d, found them up to %d", c.Session, at, c.Last, seq-1)
	}
	next[c.Session] = seq
	return nil
}

var vocabulary = events.DefaultVocabulary()
