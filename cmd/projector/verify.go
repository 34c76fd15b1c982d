package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"time"

	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

type verifyCmd struct {
	storeFlags
	All      bool          `help:"Every session that has a header, a log or a head."`
	LogOnly  bool          `help:"Leave heads and pages out."`
	Wait     time.Duration `help:"How long the projection may take to reach the log's end; 0 for not at all." default:"10s"`
	Workers  int           `help:"Sessions that are verified at a time, and with --all partitions of the log where they are read one by one, at most." default:"8"`
	Memory   int64         `name:"memory-bytes" help:"Memory for sessions that --all keeps at a time, in bytes, about. Where they do not fit, the log is read several times." default:"268435456"`
	JSON     bool          `name:"json" help:"Print the report as JSON."`
	Trusted  []string      `name:"trusted-key" help:"Public key: compare what it signed with the logs." placeholder:"KEY"`
	Kept     []string      `name:"attestations" help:"File of attestations that were kept, one a line, besides those of the store." placeholder:"FILE" type:"existingfile"`
	IDs      bool          `name:"ids" help:"Take all arguments for session ids, those too that end as files do or are directories here."`
	Sessions []string      `arg:"" optional:"" name:"session" help:"Session ids; or session files and archives (*.jsonl, *.jsonl.zst, *.tar.zst), or directories with such, at any depth, which are verified without a store."`
}

// options are those of the auditor.
func (c *verifyCmd) options() (audit.Options, error) {
	o := audit.Options{LogOnly: c.LogOnly, Wait: c.Wait, Parallel: c.Workers, Memory: c.Memory, Trusted: c.Trusted, Copies: map[string][]*audit.Attestation{}}
	for _, key := range c.Trusted {
		if err := audit.CheckPublicKey(key); err != nil {
			return o, err
		}
	}
	if len(c.Kept) > 0 && len(c.Trusted) == 0 {
		return o, errors.New("verify: --attestations needs a --trusted-key that signed them")
	}
	for _, path := range c.Kept {
		f, err := os.Open(path)
		if err != nil {
			return o, err
		}
		list, err := audit.ReadAttestations(f)
		if err = errors.Join(err, f.Close()); err != nil {
			return o, fmt.Errorf("%s: %w", path, err)
		}
		for _, t := range list {
			o.Copies[t.Session] = append(o.Copies[t.Session], t)
		}
	}
	return o, nil
}

func (c *verifyCmd) Run(ctx context.Context) error {
	if c.All == (len(c.Sessions) > 0) {
		return &platform.ExitError{Code: platform.ExitUsage, Err: errors.New("verify: expected session ids or --all, and not both")}
	}
	err := errors.Join(platform.AboveZero(map[string]int64{"workers": int64(c.Workers), "memory-bytes": c.Memory}), platform.NotBelow(0, map[string]time.Duration{"wait": c.Wait}))
	if err != nil {
		return err
	}
	if c.Wait == 0 {
		c.Wait = -1 // not at all; 0 would mean the default
	}
	o, err := c.options()
	if err != nil {
		return &platform.ExitError{Code: platform.ExitUsage, Err: err}
	}
	files, err := c.files()
	if err != nil {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("verify: %w", err)}
	}
	var bar verifyBar
	o.Begin, o.Read, o.Each = bar.begin, bar.read, bar.each
	var rep *audit.Report
	if files != nil {
		var v *events.Vocabulary
		if v, err = c.Vocabulary(); err == nil {
			rep, err = audit.Files(ctx, files, v, o)
		}
	} else {
		err = c.with(ctx, func(s *store) (err error) {
			if c.All {
				rep, err = s.auditor().All(ctx, o)
			} else {
				rep, err = s.auditor().Some(ctx, c.Sessions, o)
			}
			return err
		})
	}
	bar.end()
	if err != nil {
		return err
	}
	return c.print(rep)
}

// files are the session files and archives that the arguments name, in directories too; none when
// they are session ids.
func (c *verifyCmd) files() (files []string, err error) {
	if c.IDs {
		return nil, nil
	}
	ids := 0
	for _, name := range c.Sessions {
		switch st, err := os.Stat(name); {
		case err == nil && st.IsDir():
			in, err := audit.FilesIn(name)
			if err != nil {
				return nil, err
			}
			if in == nil {
				return nil, fmt.Errorf("the directory %s has no session files and archives (*.jsonl, *.jsonl.zst, *.tar.zst); if it is the id of a session, say --ids", name)
			}
			files = append(files, in...)
		case audit.IsFile(name):
			files = append(files, name)
		case audit.NamesFile(name):
			return nil, fmt.Errorf("there is no file %s; if it is the id of a session, say --ids", name)
		default:
			ids++
		}
	}
	if files != nil && ids > 0 {
		return nil, errors.New("expected files or session ids, and not both")
	}
	return files, nil
}

// print writes the report; findings make the exit code 1.
func (c *verifyCmd) print(rep *audit.Report) error {
	if c.JSON {
		if err := printJSON(rep); err != nil {
			return err
		}
	} else {
		for _, f := range rep.Findings {
			fmt.Println(f)
		}
		fmt.Printf("sessions %d, commits %d, events %d, pages %d verified: %d findings\n", rep.Sessions, rep.Commits, rep.Events, rep.Pages, len(rep.Findings))
		for _, t := range rep.Erased {
			fmt.Printf("session %s was erased at %s by %s: %s\n", t.Session, t.Time, t.By, t.Reason)
		}
		if len(c.Trusted) > 0 {
			fmt.Printf("attested to their last event: %d sessions, in part: %d, not at all: %d\n", rep.Attested, rep.PartlyAttested, rep.Unattested)
		}
		for _, rule := range slices.Sorted(maps.Keys(rep.Violations)) {
			fmt.Printf("lifecycle rule %s broken %d times (no finding: it was not enforced)\n", rule, rep.Violations[rule])
		}
	}
	if !rep.OK() {
		return &platform.ExitError{Code: platform.ExitFailed}
	}
	return nil
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
	b, err := c.call(ctx, http.MethodPost, sessionPath(c.Session, "/retry"), nil)
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
