package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/platform"
	"palimpsest/internal/sessionfile"
)

type importCmd struct {
	storeFlags
	IDFrom     string   `name:"id-from" help:"Where a session's id comes from: header or filename." enum:"header,filename" default:"header"`
	Invariants string   `help:"Lifecycle rules: off, observe (warn) or enforce (refuse)." enum:"off,observe,enforce" default:"observe"`
	RepairTail bool     `help:"Drop an incomplete last line, which a crash left, instead of refusing the file."`
	MaxEvent   int      `help:"Largest event in bytes of its canonical line; what the server takes in one message is a limit besides." default:"8388608"`
	JSON       bool     `name:"json" help:"Print the reports as one JSON document."`
	Files      []string `arg:"" name:"file" help:"Session files of format 3 or 4."`
}

func (c *importCmd) Run(ctx context.Context) error {
	mode, err := lifecycle.ParseMode(c.Invariants)
	if err != nil {
		return err
	}
	from, err := sessionfile.ParseIDFrom(c.IDFrom)
	if err != nil {
		return err
	}
	var g platform.Group
	s, err := c.open(ctx, "palimpsest-import", "127.0.0.1:0", &g)
	if err == nil {
		a := s.appender(appender.Config{MaxEvent: c.MaxEvent}.ForImport())
		err = c.files(ctx, a, sessionfile.Options{IDFrom: from, RepairTail: c.RepairTail, Invariants: mode})
	}
	return stopAfter(&g, err)
}

func (c *importCmd) files(ctx context.Context, a *appender.Appender, o sessionfile.Options) error {
	bad := 0
	reports := []fileReport{}
	for _, path := range c.Files {
		rep, err := a.Import(ctx, path, o)
		if err != nil {
			return fmt.Errorf("%s: %w; what was committed stays, and importing the file again goes on from there", path, err)
		}
		r := fileReport{rep, "imported"}
		if !rep.OK() {
			bad++
			r.Status = "refused"
		}
		reports = append(reports, r)
		if !c.JSON {
			c.print(rep)
		}
	}
	if c.JSON {
		if err := json.NewEncoder(os.Stdout).Encode(map[string]any{"files": reports}); err != nil {
			return err
		}
	}
	if bad > 0 {
		return &platform.ExitError{Code: platform.ExitFailed, Err: fmt.Errorf("%d of %d files have problems and were not imported", bad, len(c.Files))}
	}
	return nil
}

// fileReport is a file's report in JSON.
type fileReport struct {
	*appender.ImportReport
	Status string `json:"status"` // imported or refused
}

// print writes a file's report for people: a line a problem, and one for the file.
func (c *importCmd) print(rep *appender.ImportReport) {
	place := func(p sessionfile.Problem) string {
		if p.Line > 0 {
			return fmt.Sprintf("%s:%d", rep.File, p.Line)
		}
		return rep.File
	}
	for _, p := range rep.Problems {
		fmt.Printf("%s: error: %s\n", place(p), what(p))
	}
	for _, b := range rep.Branches {
		fmt.Printf("%s: branch: line %d (seq %d) to line %d (seq %d)\n", rep.File, b.FirstLine, b.FirstSeq, b.LastLine, b.LastSeq)
	}
	for _, p := range rep.Warnings {
		fmt.Printf("%s: warning: %s\n", place(p), what(p))
	}
	if rep.MoreWarnings > 0 {
		fmt.Printf("%s: %d more warnings\n", rep.File, rep.MoreWarnings)
	}
	var rules []events.Rule
	for r := range rep.Violations {
		rules = append(rules, r)
	}
	slices.Sort(rules)
	for _, r := range rules {
		v := rep.Violations[r]
		for _, p := range v.First {
			fmt.Printf("%s: warning: %s\n", place(p), what(p))
		}
		if more := v.Count - int64(len(v.First)); more > 0 {
			fmt.Printf("%s: warning: %s %d more times\n", rep.File, r, more)
		}
	}
	if rep.OK() {
		fmt.Printf("%s: session %s: %d events (%d imported, %d already there), %d nodes, %d replacements\n",
			rep.File, rep.Session, rep.Events, rep.Imported, rep.Present, rep.Nodes, rep.Replacements)
	}
}

// what says a problem without its place.
func what(p sessionfile.Problem) string {
	name := string(p.Rule)
	if name == "" {
		name = string(p.Code)
	}
	if p.Seq != nil {
		return fmt.Sprintf("%s at seq %d: %s", name, *p.Seq, p.Detail)
	}
	return fmt.Sprintf("%s: %s", name, p.Detail)
}
