package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/user"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"palimpsest/internal/erasure"
	"palimpsest/internal/platform"
)

type eraseCmd struct {
	storeFlags
	Session   string `arg:"" optional:"" help:"Session id."`
	Reason    string `help:"Why. It is kept on record."`
	By        string `help:"Who asks. It is kept on record. Default: the user that runs this."`
	WithForks bool   `help:"Erase the sessions that were forked from it, too, and those forked from them."`
	Finish    bool   `help:"Then move what all buckets hold into new files, so that nothing of what was erased is in the old ones. Refused while an erasure is not complete."`
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
	if err := c.exists(); err != nil {
		return err
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
		var bar eraseBar
		out.Receipt, err = e.Erase(ctx, erasure.Request{Session: c.Session, Reason: c.Reason, By: c.By, WithForks: c.WithForks, Progress: bar.progress})
		bar.clear()
		if err != nil {
			return err
		}
		if !c.JSON {
			printReceipt(out.Receipt)
		}
	}
	if c.Finish {
		var moved int
		if moved, err = e.Finish(ctx); err == nil {
			if out.Moved = &moved; out.Receipt != nil {
				out.Receipt.Finished()
			}
			if !c.JSON {
				fmt.Printf("finished: %d keys moved to new files\n", moved)
			}
		}
	}
	if c.JSON && (err == nil || out.Receipt != nil) { // a session that was erased is told of, whatever came then
		err = errors.Join(err, json.NewEncoder(os.Stdout).Encode(out))
	}
	return err
}

// eraseBar shows how many messages of a session's log are overwritten, and how long the others will
// take, when somebody looks at standard error.
type eraseBar struct {
	session string // that the bar is for
	bar     *progressbar.ProgressBar
}

func (b *eraseBar) progress(session string, done, total int) {
	if total < 2 || !term.IsTerminal(int(os.Stderr.Fd())) {
		return
	}
	if b.session != session {
		b.clear()
		b.session = session
		b.bar = progressbar.NewOptions(total,
			progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetDescription("erasing "+session),
			progressbar.OptionShowCount(), progressbar.OptionShowIts(), progressbar.OptionSetItsString("messages"),
			progressbar.OptionSetPredictTime(true),
			progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
	}
	_ = b.bar.Set(done) // a terminal that is gone is no reason to stop
}

func (b *eraseBar) clear() {
	if b.bar != nil {
		_ = b.bar.Clear()
	}
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
