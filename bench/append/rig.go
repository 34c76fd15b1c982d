package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/bench/rig"
	"palimpsest/internal/api"
	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/platform"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/telemetry"
)

// bed is one server on a store of its own and an appender with both of its APIs, put together
// as `appender serve` does. Everything is in this process, and talks over loopback TCP as it
// would between processes.
type bed struct {
	*rig.Server
	js       jetstream.JetStream
	journal  *journal.Journal
	headers  *journal.Headers
	snaps    *snapshot.Store
	appender *appender.Appender
	http     string // host:port
	targets  []*target
}

// rawStream takes the baseline's messages. It has the settings of the appender's stream.
const rawName, rawStream, rawPrefix = "raw publish", "RAW", "raw"

// newBed starts one; tel may be nil.
func newBed(ctx context.Context, d platform.Durability, tel *telemetry.Telemetry) (r *bed, err error) {
	r = &bed{}
	if r.Server, err = rig.Start(ctx, "bench-appender", d); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close())
		}
	}()
	if r.journal, err = journal.Open(ctx, journal.Conns{Publish: r.Conns.Publish, Read: r.Conns.KV, Made: r.Conns.Made}, journal.Config{}, events.DefaultVocabulary()); err != nil {
		return nil, err
	}
	if r.headers, err = r.journal.OpenHeaders(ctx); err != nil {
		return nil, err
	}
	if r.snaps, err = snapshot.Open(ctx, r.journal.JetStream(), 1); err != nil {
		return nil, err
	}
	r.appender = r.newAppender(appender.Config{Telemetry: tel})
	unlisten, err := r.appender.Listen()
	if err != nil {
		return nil, err
	}
	r.OnStop(func(context.Context) error { unlisten(); return nil })
	services := api.NewAppenderServices(r.Conns.Publish[0], r.appender, api.ServiceConfig{})
	if err := services.Start(ctx); err != nil {
		return nil, err
	}
	r.OnStop(services.Stop)
	web := platform.Serve(platform.HTTPConfig{Listen: "127.0.0.1:0", Handler: api.NewAppender(r.appender, api.AppenderConfig{Edge: &api.Edge{Telemetry: tel}})})
	if err := web.Start(ctx); err != nil {
		return nil, err
	}
	r.OnStop(web.Stop)
	r.http = strings.TrimPrefix(web.URL(), "http://")

	nc, err := r.Connect()
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
func (r *bed) newAppender(cfg appender.Config) *appender.Appender {
	a := appender.New(r.journal, r.headers, r.snaps, cfg)
	r.OnStop(a.Close)
	return a
}

// stored returns how many bytes a stream takes.
func (r *bed) stored(ctx context.Context, stream string) (uint64, error) {
	s, err := r.js.Stream(ctx, stream)
	if err != nil {
		return 0, err
	}
	return s.CachedInfo().State.Bytes, nil
}

func (r *bed) purge(ctx context.Context, stream string) error {
	s, err := r.js.Stream(ctx, stream)
	if err != nil {
		return err
	}
	return s.Purge(ctx)
}

// verify reads the whole log with the bare client. It returns an error unless every session's
// seqs are without holes and as many as were acknowledged.
func (r *bed) verify(ctx context.Context) error {
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
