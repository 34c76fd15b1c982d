package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"time"

	"palimpsest/internal/events"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

// filterFlags pick sessions.
type filterFlags struct {
	State  string `help:"Only sessions in this state: open (a turn is open), idle or quarantined." enum:",open,idle,quarantined" default:""`
	Since  string `help:"Only sessions with a last activity at or after this time, RFC 3339 or Unix milliseconds." placeholder:"TIME"`
	Agent  string `help:"Only sessions of this agent: the header's agentPreset, or an agent that is not idle."`
	Parent string `help:"Only the forks and sub-agents of this session."`
}

// check says what is wrong with the flags, and returns what --since says, in Unix milliseconds.
func (f *filterFlags) check() (since int64, err error) {
	if f.Since != "" {
		since, err = projection.ParseSince(f.Since)
	}
	if err == nil && f.Parent != "" {
		err = events.CheckSessionID(f.Parent)
	}
	if err != nil {
		err = &platform.ExitError{Code: platform.ExitUsage, Err: err}
	}
	return since, err
}

func (f *filterFlags) query() url.Values {
	q := url.Values{}
	for name, v := range map[string]string{"state": f.State, "since": f.Since, "agent": f.Agent, "parent": f.Parent} {
		if v != "" {
			q.Set(name, v)
		}
	}
	return q
}

type sessionsCmd struct {
	storeFlags
	filterFlags
	Limit int  `help:"At most so many sessions; 0 for all."`
	JSON  bool `name:"json" help:"Print one session a line as JSON, with its header."`
}

func (c *sessionsCmd) Run(ctx context.Context) error {
	if err := platform.NotBelow(0, map[string]int64{"limit": int64(c.Limit)}); err != nil {
		return err
	}
	if _, err := c.check(); err != nil {
		return err
	}
	return c.with(ctx, func(s *store) error {
		q := c.query()
		head := c.JSON // printed, or not wanted
		for left := c.Limit; ; {
			q.Set("limit", "1000")
			if c.Limit > 0 {
				q.Set("limit", strconv.Itoa(min(left, 1000)))
			}
			b, err := s.get(ctx, "/v1/sessions", q)
			if err != nil {
				return err
			}
			var page struct {
				Sessions []json.RawMessage
				Cursor   string
			}
			if err := json.Unmarshal(b, &page); err != nil {
				return err
			}
			if !head { // not above an error
				fmt.Print(rowHead)
				head = true
			}
			for _, line := range page.Sessions {
				if c.JSON {
					fmt.Printf("%s\n", line)
					continue
				}
				var row projection.FleetRow
				if err := json.Unmarshal(line, &row); err != nil {
					return err
				}
				printRow(&row, "")
			}
			left -= len(page.Sessions)
			if page.Cursor == "" || c.Limit > 0 && left <= 0 {
				return nil
			}
			q.Set("cursor", page.Cursor)
		}
	})
}

const rowHead = "state        turn  step       seq  last activity         nodes  log bytes  session\n"

// printRow shows a session in one line.
func printRow(r *projection.FleetRow, note string) {
	number := func(n *events.Seq) string {
		if n == nil {
			return "-"
		}
		return n.String()
	}
	if r.Writer != nil {
		note += fmt.Sprintf("  writer %s (epoch %d)", r.Writer.ID, r.Writer.Epoch)
	}
	if r.Parent != "" {
		note += "  child of " + r.Parent
	}
	if r.Quarantine != nil {
		note += "  " + oneLine(r.Quarantine.Detail)
	}
	fmt.Printf("%-11s %5s %5s %9d  %-20s %6d %10d  %s%s\n", r.State, number(r.OpenTurn), number(r.OpenStep), r.Seq,
		time.UnixMilli(r.Time).UTC().Format(time.RFC3339), r.Nodes, r.LogBytes, r.Session, note)
}

type feedCmd struct {
	storeFlags
	filterFlags
	From int64 `help:"Begin behind this revision, that of the last change that was seen; 0 begins with every session." default:"0"`
	JSON bool  `name:"json" help:"Print one change a line as JSON."`
}

func (c *feedCmd) Run(ctx context.Context) error {
	if c.From < 0 {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--from: expected a revision, 0 or more, found %d", c.From)}
	}
	since, err := c.check()
	if err != nil {
		return err
	}
	return c.with(ctx, func(s *store) error {
		filter := projection.FleetFilter{State: projection.SessionState(c.State), Since: since, Agent: c.Agent, Parent: c.Parent}
		feed, _, err := projection.NewFleet(s.reader(), projection.FleetConfig{}).Feed(ctx, filter, uint64(c.From))
		if err != nil {
			return err
		}
		if !c.JSON {
			fmt.Print("revision  ", rowHead)
		}
		for changes := feed.Aside(); ; {
			for i := range changes {
				if err := c.print(&changes[i]); err != nil {
					return err
				}
			}
			if changes, err = feed.Next(ctx); err != nil {
				if errors.Is(err, platform.ErrStopping) {
					return nil
				}
				return err
			}
		}
	})
}

func (c *feedCmd) print(ch *projection.FeedChange) error {
	if c.JSON {
		b, err := json.Marshal(ch)
		if err != nil {
			return err
		}
		fmt.Printf("%s\n", b)
		return nil
	}
	note := ""
	if ch.Left {
		note = "  (no longer one of those asked for)"
	}
	fmt.Printf("%8d  ", ch.Rev)
	printRow(&ch.FleetRow, note)
	return nil
}
