package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"palimpsest/internal/erasure"
	"palimpsest/internal/platform"
	"palimpsest/internal/snapshot"
)

type sweepCmd struct {
	storeFlags
	Session string        `arg:"" optional:"" help:"Session id. Default: all sessions."`
	Grace   time.Duration `help:"How old a page must be, and how long it stays readable after it was found." default:"30s"`
	Markers time.Duration `help:"How old the marker of a deleted key must be to be removed." default:"24h"`
	DryRun  bool          `help:"Show what would be removed, and remove nothing."`
	JSON    bool          `name:"json" help:"Print the report as JSON."`
}

func (c *sweepCmd) Run(ctx context.Context) error {
	if err := platform.AboveZero(map[string]time.Duration{"grace": c.Grace, "markers": c.Markers}); err != nil {
		return err
	}
	return c.with(ctx, func(s *store) error {
		erased, err := erasure.Sessions(ctx, s.journal)
		if err != nil {
			return err
		}
		o := snapshot.Sweep{Session: c.Session, Grace: c.Grace, Markers: c.Markers, DryRun: c.DryRun, Erased: erased}
		if !c.JSON {
			o.Found = func(key string) { fmt.Println(key) }
		}
		r, err := s.buckets.Snapshots.Sweep(ctx, o)
		if err != nil {
			return err
		}
		if c.JSON {
			return json.NewEncoder(os.Stdout).Encode(r)
		}
		fmt.Printf("%d sessions with %d pages; in no head: %d, removed: %d; left alone without a good head: %d sessions\n", r.Sessions, r.Pages, r.Unreferenced, r.Removed, r.Skipped)
		if !c.DryRun {
			fmt.Printf("removed: %d keys of erased sessions, %d markers of deleted keys\n", r.Erased, r.Markers)
		}
		return nil
	})
}
