package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"palimpsest/internal/platform"
	"palimpsest/internal/snapshot"
)

type sweepCmd struct {
	storeFlags
	Session string        `arg:"" optional:"" help:"Session id. Default: all sessions."`
	Grace   time.Duration `help:"How old a page must be, and how long it stays readable after it was found." default:"30s"`
	DryRun  bool          `help:"Show what would be removed, and remove nothing."`
	JSON    bool          `name:"json" help:"Print the report as JSON."`
}

func (c *sweepCmd) Run(ctx context.Context) error {
	if c.Grace <= 0 {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--grace: expected more than 0, found %v", c.Grace)}
	}
	return c.with(ctx, func(s *store) error {
		o := snapshot.Sweep{Session: c.Session, Grace: c.Grace, DryRun: c.DryRun}
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
		return nil
	})
}
