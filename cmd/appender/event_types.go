package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/platform"
)

type eventTypesCmd struct {
	List   eventTypesListCmd   `cmd:"" help:"List the log-only event types that were added to the vocabulary."`
	Remove eventTypesRemoveCmd `cmd:"" help:"Take an added type out of the vocabulary, as a way out of a mistyped --event-types. Refused when an event of it is stored."`
}

// ownAddress is where an embedded server listens that nobody else is to find.
const ownAddress = "127.0.0.1:0"

type eventTypesListCmd struct {
	storeFlags
	All bool `help:"Built-in types too."`
}

func (c *eventTypesListCmd) Run(ctx context.Context) error {
	return c.withStored(ctx, func(_ *store, stored []string) error {
		builtIn := events.DefaultVocabulary().Types()
		for _, t := range stored {
			if c.All || !slices.Contains(builtIn, t) {
				fmt.Println(t)
			}
		}
		return nil
	})
}

type eventTypesRemoveCmd struct {
	storeFlags
	Type string `arg:"" help:"The type. No appender or projector that names it in --event-types may run, or be started later."`
}

func (c *eventTypesRemoveCmd) Run(ctx context.Context) error {
	return c.withStored(ctx, func(s *store, _ []string) error {
		if err := s.journal.ForgetType(ctx, c.Type); err != nil {
			return err
		}
		fmt.Printf("%s is out of the vocabulary\n", c.Type)
		return nil
	})
}

// withStored opens the log with whatever types its vocabulary lists.
func (f storeFlags) withStored(ctx context.Context, do func(*store, []string) error) error {
	var g platform.Group
	return stopAfter(&g, func() error {
		s := new(store)
		if err := f.connect(ctx, s, "palimpsest-appender-cli", ownAddress, &g); err != nil {
			return err
		}
		js, err := jetstream.New(s.conns.KV)
		if err != nil {
			return err
		}
		stored, err := journal.StoredTypes(ctx, js, journal.Config{})
		if err != nil {
			return err
		}
		f.EventTypes = strings.Join(events.DefaultVocabulary().Missing(stored), ",")
		if err := f.bind(ctx, s); err != nil {
			return err
		}
		return do(s, stored)
	}())
}
