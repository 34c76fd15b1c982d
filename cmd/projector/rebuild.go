package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

type rebuildCmd struct {
	storeFlags
	Back           bool          `help:"Bring the generation that served before up to date and switch back to it." xor:"what"`
	DropPrevious   bool          `help:"Delete the generation that served before; there is no way back to it then." xor:"what"`
	List           bool          `help:"Show which generations there are, and do nothing." xor:"what"`
	Writes         int           `help:"Snapshots that are written at the same time." default:"12"`
	CacheBytes     int           `help:"Memory for sessions that are kept between events, in bytes." default:"536870912"`
	UnflushedBytes int           `help:"Memory for what was read and is in no head yet, in bytes: reading waits for writes when there is more." default:"134217728"`
	CatchUpBytes   int           `help:"Memory for messages that wait for the fold, in bytes, and as much as the largest message at the least; negative: one consumer for each partition." default:"33554432"`
	Follow         time.Duration `help:"How long to go on folding after the switch until all workers have followed it." default:"1m"`
	JSON           bool          `name:"json" help:"Print the report as JSON."`
}

func (c *rebuildCmd) Help() string {
	return "Folds the whole log into a new bucket while the one that serves goes on serving, and switches to it once it is caught up. " +
		"Running projectors and appenders follow within a second or two. When it is interrupted, the same command goes on where it stopped. The bucket that served before is kept as it was, for --back, until the next rebuild or --drop-previous."
}

func (c *rebuildCmd) Run(ctx context.Context) error {
	for name, n := range map[string]int64{"writes": int64(c.Writes), "cache-bytes": int64(c.CacheBytes), "unflushed-bytes": int64(c.UnflushedBytes), "follow": int64(c.Follow)} {
		if n < 1 {
			return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--%s: expected more than 0, found %d", name, n)}
		}
	}
	if c.CatchUpBytes == 0 {
		return &platform.ExitError{Code: platform.ExitUsage, Err: errNoCatchUp}
	}
	return c.with(ctx, func(s *store) error {
		switch {
		case c.List:
			return c.list(ctx, s)
		case c.DropPrevious:
			return c.drop(ctx, s)
		}
		return c.rebuild(ctx, s)
	})
}

func (c *rebuildCmd) rebuild(ctx context.Context, s *store) error {
	o := projection.RebuildOptions{
		Back: c.Back, Follow: c.Follow, Worker: projection.Config{Writes: c.Writes, CacheBytes: c.CacheBytes, UnflushedBytes: c.UnflushedBytes, CatchUpBytes: c.CatchUpBytes},
	}
	if term.IsTerminal(int(os.Stderr.Fd())) {
		bar := progressbar.NewOptions64(-1, progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetDescription("folding"),
			progressbar.OptionShowIts(), progressbar.OptionSetItsString("events"), progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
		defer func() { _ = bar.Finish() }() // only draws
		o.Progress = func(p projection.RebuildProgress) {
			what := fmt.Sprintf("folding, %d commits to go", p.Lag)
			if p.Switched {
				what = "switched, waiting for the workers"
			}
			bar.Describe(what)
			_ = bar.Set64(p.Events) // only draws
		}
	}
	r, err := projection.Rebuild(ctx, s.journal, s.buckets, o)
	if err != nil && ctx.Err() != nil { // a script must not take it for done
		interrupted := fmt.Errorf("interrupted: nothing was switched, and the same command goes on from there (%v)", err)
		if r != nil && r.Seconds > 0 {
			interrupted = fmt.Errorf("interrupted behind the switch: generation %d (bucket %s) serves, and some workers may still write the one before; look at `projector status` (%v)", r.To.N, r.To.Bucket, err)
		}
		return &platform.ExitError{Code: platform.ExitFailed, Err: interrupted}
	}
	if r != nil && c.JSON {
		if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
			return err
		}
	}
	if err != nil {
		return err
	}
	if !c.JSON {
		fmt.Printf("generation %d (bucket %s) serves: %d events of %d commits folded, %d heads written, switched after %.1f s\n", r.To.N, r.To.Bucket, r.Events, r.Commits, r.Heads, r.Seconds)
		fmt.Printf("generation %d (bucket %s) is kept; `projector rebuild --back` returns to it, --drop-previous deletes it\n", r.From.N, r.From.Bucket)
		if r.Dropped != nil {
			fmt.Printf("generation %d (bucket %s) was deleted\n", r.Dropped.N, r.Dropped.Bucket)
		}
	}
	if !r.Followed {
		return fmt.Errorf("the switch is made, but not all workers followed it within %v: look at `projector status`; they do as soon as they reach NATS", c.Follow)
	}
	return nil
}

func (c *rebuildCmd) list(ctx context.Context, s *store) error {
	g, err := s.buckets.Snapshots.Generations(ctx)
	if err != nil {
		return err
	}
	if c.JSON {
		return json.NewEncoder(os.Stdout).Encode(g)
	}
	line := func(what string, g *snapshot.Generation) {
		if g != nil {
			fmt.Printf("%-9s generation %d   bucket %s   fold %d   since %s\n", what, g.N, g.Bucket, g.Fold, time.UnixMilli(g.Since).UTC().Format(time.RFC3339))
		}
	}
	line("current", &g.Current)
	line("previous", g.Previous)
	line("building", g.Building)
	return nil
}

func (c *rebuildCmd) drop(ctx context.Context, s *store) error {
	g, err := s.buckets.DropPrevious(ctx)
	switch {
	case err != nil:
		return err
	case c.JSON:
		return json.NewEncoder(os.Stdout).Encode(g)
	case g == nil:
		fmt.Println("no generation from before is kept")
	default:
		fmt.Printf("generation %d (bucket %s) was deleted\n", g.N, g.Bucket)
	}
	return nil
}
