package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/bench/rig"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
)

// bed is one server on a store of its own. Everything is in this process, and talks over
// loopback TCP as it would between processes.
type bed struct {
	*rig.Server
	js jetstream.JetStream // of the bare client
}

// inFlight is how many publishes wait for their acks while a log is made.
const inFlight = 4096

func newBed(ctx context.Context) (r *bed, err error) {
	r = &bed{}
	if r.Server, err = rig.Start(ctx, "bench-projector", ""); err != nil {
		return nil, err
	}
	if r.js, err = r.connect(); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// connect opens a client's connection for many publishes.
func (r *bed) connect() (jetstream.JetStream, error) {
	nc, err := r.Connect()
	if err != nil {
		return nil, err
	}
	return jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(inFlight))
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

// newLog stores a log of sessions that grow in turns, per events a commit, which are traced or not. Its sessions have no headers.
func (r *bed) newLog(ctx context.Context, name string, per, sessions, length int, traced bool) (*recorded, error) {
	l, err := r.openLog(ctx, name)
	if err != nil {
		return nil, err
	}
	for i := range sessions {
		a := newAuthor(fmt.Sprintf("%s-%05d", name, i), nil)
		a.traced = traced
		l.authors = append(l.authors, a)
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

func (r *bed) openLog(ctx context.Context, name string) (*recorded, error) {
	l := &recorded{name: name, ends: map[int]uint64{}, parts: map[int]int{}}
	var err error
	l.journal, err = journal.Open(ctx, journal.Conns{Publish: r.Conns.Publish, Read: r.Conns.KV, Made: r.Conns.Made}, journal.Config{Stream: "LOG-" + name, Prefix: "log-" + name}, events.DefaultVocabulary())
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
