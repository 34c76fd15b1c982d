package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/user"
	"strings"

	"palimpsest/internal/erasure"
	"palimpsest/internal/platform"
)

type eraseCmd struct {
	storeFlags
	Session   string `arg:"" optional:"" help:"Session id."`
	Reason    string `help:"Why. It is kept on record."`
	By        string `help:"Who asks. It is kept on record. Default: the user that runs this."`
	WithForks bool   `help:"Erase the sessions that were forked from it, too, and those forked from them."`
	Finish    bool   `help:"Then move what all buckets hold into new files, so that nothing of what was erased is in the old ones."`
	JSON      bool   `name:"json" help:"Print the receipt as JSON."`
}

func (c *eraseCmd) Run(ctx context.Context) error {
	bad := func(text string) error {
		return &platform.ExitError{Code: platform.ExitUsage, Err: errors.New("erase: " + text)}
	}
	switch {
	case c.Session == "" && !c.Finish:
		return bad("expected a session id, or --finish")
	case c.Session != "" && strings.TrimSpace(c.Reason) == "":
		return bad("expected a --reason")
	}
	if c.By == "" {
		u, err := user.Current()
		if err != nil {
			return bad("who asks is not known; say it with --by")
		}
		c.By = u.Username
	}
	var g platform.Group
	s, err := c.open(ctx, "palimpsest-erase", "127.0.0.1:0", &g)
	if err == nil {
		err = c.erase(ctx, s)
	}
	return stopAfter(&g, err)
}

func (c *eraseCmd) erase(ctx context.Context, s *store) error {
	e, err := erasure.New(ctx, s.journal, s.headers)
	if err != nil {
		return err
	}
	var out struct {
		Receipt *erasure.Receipt `json:"receipt,omitempty"`
		Moved   *int             `json:"moved,omitempty"` // keys that --finish moved
	}
	if c.Session != "" {
		out.Receipt, err = e.Erase(ctx, erasure.Request{Session: c.Session, Reason: c.Reason, By: c.By, WithForks: c.WithForks})
		if err != nil {
			return err
		}
		if !c.JSON {
			printReceipt(out.Receipt)
		}
	}
	if c.Finish {
		moved, err := e.Finish(ctx)
		if err != nil {
			return err
		}
		out.Moved = &moved
		if !c.JSON {
			fmt.Printf("finished: %d keys moved to new files\n", moved)
		}
	}
	if c.JSON {
		return json.NewEncoder(os.Stdout).Encode(out)
	}
	return nil
}

func printReceipt(r *erasure.Receipt) {
	fmt.Printf("session %s erased at %s by %s: %s\n", r.Session, r.Time, r.By, r.Reason)
	fmt.Printf("  its log ended with seq %d, digest %s\n", r.LastSeq, r.Digest)
	fmt.Printf("  %d messages overwritten, %d keys removed; erasure %s, tombstone at stream sequence %d\n", r.Messages, r.Keys, r.ID, r.StreamSeq)
	fmt.Printf("  clean now: %s; after erase --finish: %s\n", strings.Join(r.Clean, ", "), strings.Join(r.Unfinished, ", "))
	if len(r.Children) > len(r.Forks) {
		fmt.Printf("  made from it, with what they copied: %s (erase --with-forks)\n", strings.Join(r.Children, ", "))
	}
	for _, f := range r.Forks {
		printReceipt(f)
	}
}
