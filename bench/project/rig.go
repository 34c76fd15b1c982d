package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/platform"
)

// rig is one server on a store of its own. Everything is in this process, and talks over
// loopback TCP as it would between processes.
type rig struct {
	dir   string
	stop  []func(context.Context) error // in the order of start
	url   string
	conns *platform.Conns     // the projector's
	js    jetstream.JetStream // of the bare client
}

// stopWithin bounds stopping all.
const stopWithin = 30 * time.Second

// inFlight is how many publishes wait for their acks while a log is made.
const inFlight = 4096

func newRig(ctx context.Context) (r *rig, err error) {
	r = &rig{}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	if r.dir, err = os.MkdirTemp("", "palimpsest-bench-project-"); err != nil {
		return nil, err
	}
	server, err := platform.StartServer(platform.EmbedConfig{DataDir: r.dir, Listen: "127.0.0.1:0"})
	if err != nil {
		return nil, err
	}
	r.stop = append(r.stop, server.Shutdown)
	r.url = server.ClientURL()
	if r.conns, err = platform.ConnectAll(ctx, platform.ConnsConfig{ConnConfig: platform.ConnConfig{URL: r.url, Name: "bench-projector"}}); err != nil {
		return nil, err
	}
	r.stop = append(r.stop, r.conns.Close)
	r.js, err = r.connect()
	return r, err
}

// connect opens a connection as a client would, with nats.go's defaults.
func (r *rig) connect() (jetstream.JetStream, error) {
	nc, err := nats.Connect(r.url, nats.Name("bench-client"))
	if err != nil {
		return nil, err
	}
	r.stop = append(r.stop, func(context.Context) error { nc.Close(); return nil })
	return jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(inFlight))
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

// recorded is a log with all its sessions, and what projecting it must come to.
type recorded struct {
	name    string
	journal *journal.Journal
	authors []*author
	events  int            // of all sessions
	commits int            // of all sessions
	ends    map[int]uint64 // partition → stream sequence of its last commit
	parts   map[int]int    // partition → its commits
}

// newLog stores a log of sessions that grow in turns, per events a commit. Its sessions have no headers.
func (r *rig) newLog(ctx context.Context, name string, per, sessions, length int) (*recorded, error) {
	l, err := r.openLog(ctx, name)
	if err != nil {
		return nil, err
	}
	for i := range sessions {
		l.authors = append(l.authors, newAuthor(fmt.Sprintf("%s-%05d", name, i), nil))
	}
	for range length / per {
		for _, a := range l.authors {
			if err := l.publish(r.js, a.commit(per, dataBytes)); err != nil {
				return nil, err
			}
		}
	}
	return l, l.finish(ctx, r.js)
}

func (r *rig) openLog(ctx context.Context, name string) (*recorded, error) {
	l := &recorded{name: name, ends: map[int]uint64{}, parts: map[int]int{}}
	var err error
	l.journal, err = journal.Open(ctx, journal.Conns{Publish: r.conns.Publish, Read: r.conns.KV, Made: r.conns.Made}, journal.Config{Stream: "LOG-" + name, Prefix: "log-" + name}, events.DefaultVocabulary())
	return l, err
}

// publish stores a commit, which must not race with others of its session.
func (l *recorded) publish(js jetstream.JetStream, c *events.Commit) error {
	l.commits++
	l.events += int(c.Last - c.First + 1)
	p := l.journal.Partition(c.Session)
	l.ends[p] = uint64(l.commits) // the only writer: one message, one stream sequence
	l.parts[p]++
	_, err := js.PublishMsgAsync(&nats.Msg{Subject: l.journal.Subject(c.Session), Header: c.Header(), Data: c.Body}, jetstream.WithStallWait(time.Minute))
	return err
}

// finish waits for all acks.
func (l *recorded) finish(ctx context.Context, js jetstream.JetStream) error {
	select {
	case <-js.PublishAsyncComplete():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	info, err := l.journal.Info(ctx)
	if err == nil && info.State.LastSeq != uint64(l.commits) {
		err = fmt.Errorf("log %s: expected %d commits, found %d", l.name, l.commits, info.State.LastSeq)
	}
	return err
}

var quiet = slog.New(slog.DiscardHandler)
