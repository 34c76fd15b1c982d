package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"slices"
	"time"

	"palimpsest/internal/audit"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

type verifyCmd struct {
	storeFlags
	All      bool          `help:"Every session that has a header, a log or a head."`
	LogOnly  bool          `help:"Leave heads and pages out."`
	Wait     time.Duration `help:"How long the projection may take to reach the log's end." default:"10s"`
	JSON     bool          `name:"json" help:"Print the report as JSON."`
	Sessions []string      `arg:"" optional:"" name:"session" help:"Session ids."`
}

func (c *verifyCmd) Run(ctx context.Context) error {
	if c.All == (len(c.Sessions) > 0) {
		return &platform.ExitError{Code: platform.ExitUsage, Err: errors.New("verify: expected session ids or --all, and not both")}
	}
	return c.with(ctx, func(s *store) error {
		o := audit.Options{LogOnly: c.LogOnly, Wait: c.Wait}
		var rep *audit.Report
		var err error
		if c.All {
			rep, err = s.auditor().All(ctx, o)
		} else {
			rep, err = s.auditor().Some(ctx, c.Sessions, o)
		}
		if err != nil {
			return err
		}
		if c.JSON {
			if err := json.NewEncoder(os.Stdout).Encode(rep); err != nil {
				return err
			}
		} else {
			for _, f := range rep.Findings {
				fmt.Println(f)
			}
			fmt.Printf("sessions %d, commits %d, events %d, pages %d verified: %d findings\n", rep.Sessions, rep.Commits, rep.Events, rep.Pages, len(rep.Findings))
			for _, rule := range slices.Sorted(maps.Keys(rep.Violations)) {
				fmt.Printf("lifecycle rule %s broken %d times (no finding: it was not enforced)\n", rule, rep.Violations[rule])
			}
		}
		if !rep.OK() {
			return &platform.ExitError{Code: platform.ExitFailed}
		}
		return nil
	})
}

type quarantineCmd struct {
	List quarantineListCmd `cmd:"" help:"List sessions in quarantine."`
	Show quarantineShowCmd `cmd:"" help:"Show why a session is in quarantine."`

	Retry       quarantineRetryCmd `cmd:"" help:"Have a running projector fold a session again."`
	SkipSession quarantineSkipCmd  `cmd:"" help:"Decide to leave a session in quarantine: it no longer counts as an alert. A retry lifts that."`
}

type quarantineRetryCmd struct {
	urlFlag
	Session string `arg:"" help:"Session id."`
}

func (c *quarantineRetryCmd) Run(ctx context.Context) error {
	b, err := c.call(ctx, http.MethodPost, "/v1/sessions/"+url.PathEscape(c.Session)+"/retry")
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(b)
	return err
}

type quarantineListCmd struct {
	storeFlags
	JSON bool `name:"json" help:"Print one record a line."`
}

func (c *quarantineListCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(s *store) error {
		qs, err := s.reader().Quarantined(ctx)
		if err != nil {
			return err
		}
		for _, q := range qs {
			if err := printRecord(&q, c.JSON); err != nil {
				return err
			}
		}
		return nil
	})
}

type quarantineShowCmd struct {
	storeFlags
	Session string `arg:"" help:"Session id."`
	JSON    bool   `name:"json" help:"Print the record as JSON."`
}

func (c *quarantineShowCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(s *store) error {
		q, err := s.buckets.QuarantineOf(ctx, c.Session)
		if err != nil {
			return err
		}
		if q == nil {
			return fmt.Errorf("session %s is not in quarantine", c.Session)
		}
		return printRecord(q, c.JSON)
	})
}

func printRecord(q *projection.Quarantine, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(os.Stdout).Encode(q)
	}
	_, err := fmt.Printf("%s  stream sequence %d  %s %s  %s%s\n", q.Session, q.StreamSeq, q.Code, q.Rule, q.Detail, skippedNote(q))
	return err
}

// skippedNote says who left a session in quarantine, if somebody did.
func skippedNote(q *projection.Quarantine) string {
	if q.Skipped == nil {
		return ""
	}
	return fmt.Sprintf("  (left so by %s on %s: %s)", q.Skipped.By, time.UnixMilli(q.Skipped.Time).UTC().Format(time.RFC3339), q.Skipped.Reason)
}
