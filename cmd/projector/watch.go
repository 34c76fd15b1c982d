package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"palimpsest/internal/events"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

type watchCmd struct {
	storeFlags
	Session string `arg:"" help:"Session id."`
	From    *int64 `help:"Show what happened behind this seq too; --from=-1 for everything. Default: from now on."`
	JSON    bool   `name:"json" help:"Print one delta a line as JSON."`
}

func (c *watchCmd) Run(ctx context.Context) error {
	if c.From != nil {
		if err := platform.NotBelow(int64(events.NoSeq), map[string]int64{"from": *c.From}); err != nil {
			return err
		}
	}
	return c.with(ctx, func(s *store) error {
		r := s.reader()
		from := events.NoSeq
		if c.From != nil {
			from = events.Seq(*c.From)
		} else {
			v, err := r.View(ctx, c.Session, projection.Want{MinSeq: events.NoSeq})
			if err != nil {
				return err
			}
			from = v.Last()
		}
		w, err := projection.NewHubs(r, s.conns.Publish[0]).Watch(ctx, c.Session, from)
		if err != nil {
			return err
		}
		defer w.Close()
		for {
			ds, err := w.Next(ctx)
			if errors.Is(err, platform.ErrStopping) {
				return nil
			}
			if err != nil {
				return err
			}
			for _, d := range ds {
				if c.JSON {
					b, err := json.Marshal(d)
					if err != nil {
						return err
					}
					fmt.Printf("%s\n", b)
					continue
				}
				if d.Op == "replace" {
					fmt.Printf("%8d  %-18s takes the place of %v\n", d.Seq, d.Node.Type, d.Shadowed)
				} else {
					fmt.Printf("%8d  %-18s\n", d.Seq, d.Node.Type)
				}
			}
		}
	})
}
