package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
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
	Paths      []string `arg:"" name:"path" help:"Session files of formats 0 to 4, plain or zstd, archives (*.tar.zst), and directories with such: their *.jsonl, *.jsonl.zst and *.tar.zst, at any depth."`
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

// files imports one file after the other. One that is bad is reported and the others are done;
// trouble with JetStream ends the whole.
func (c *importCmd) files(ctx context.Context, a *appender.Appender, o sessionfile.Options) error {
	found := find(c.Paths)
	bar := newBar(found, c.JSON)
	var out reporter = &textReport{w: os.Stdout, bar: bar}
	if c.JSON {
		out = &jsonReport{w: os.Stdout}
	}
	sum := summary{Ignored: found.ignored}
	var err error
	told := func(rep *appender.ImportReport) error {
		sum.add(rep)
		return out.file(rep)
	}
	for _, f := range found.files {
		switch {
		case f.err != nil:
			err = told(appender.Unreadable(f.path, f.err))
		case strings.HasSuffix(f.path, audit.ArchiveExt):
			err = importArchive(ctx, a, f.path, o, told)
			bar.done(f.size)
		default:
			o.Progress = bar.file(f.size)
			var rep *appender.ImportReport
			if rep, err = a.Import(ctx, f.path, o); err == nil {
				err = told(rep)
			}
			bar.done(f.size)
		}
		if err != nil {
			err = fmt.Errorf("%s: %w; what was committed stays, and importing the file again goes on from there", f.path, err)
			break
		}
	}
	bar.clear()
	if eerr := out.end(sum, err); err == nil {
		err = eerr
	}
	if err == nil && sum.Refused > 0 {
		err = &platform.ExitError{Code: platform.ExitFailed, Err: fmt.Errorf("%d of %d files have problems and were not imported", sum.Refused, sum.Files)}
	}
	return err
}

// found is what an import has to do.
type found struct {
	files   []foundFile
	ignored int   // files in directories that are no session files by their names
	bytes   int64 // of all files
}

type foundFile struct {
	path string
	size int64
	err  error // of a directory that cannot be read
}

// find lists the given files, and those of the given directories in the order of their names.
func find(paths []string) *found {
	var f found
	for _, path := range paths {
		if st, err := os.Stat(path); err == nil && st.IsDir() {
			f.dir(path)
		} else {
			f.file(path)
		}
	}
	return &f
}

func (f *found) file(path string) {
	file := foundFile{path: path}
	if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
		file.size = st.Size()
	}
	f.files = append(f.files, file)
	f.bytes += file.size
}

func (f *found) dir(path string) {
	entries, err := os.ReadDir(path) // sorted
	for _, e := range entries {
		switch name := filepath.Join(path, e.Name()); {
		case e.IsDir():
			f.dir(name)
		case strings.HasSuffix(name, ".jsonl"), strings.HasSuffix(name, ".jsonl.zst"), strings.HasSuffix(name, audit.ArchiveExt):
			f.file(name)
		default:
			f.ignored++
		}
	}
	if err != nil {
		f.files = append(f.files, foundFile{path: path, err: err})
	}
}

// bar shows how many bytes of all files were read, in both passes together. A nil bar shows
// nothing.
type bar struct {
	*progressbar.ProgressBar
	before int64 // bytes of the files that are done
}

// newBar returns a bar when somebody looks at standard error, nil otherwise.
func newBar(f *found, quiet bool) *bar {
	if quiet || f.bytes == 0 || !term.IsTerminal(int(os.Stderr.Fd())) {
		return nil
	}
	return &bar{ProgressBar: progressbar.NewOptions64(2*f.bytes,
		progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetDescription("importing"),
		progressbar.OptionShowBytes(true), progressbar.OptionUseIECUnits(true),
		progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())}
}

// file returns what a file's progress is told to, pass after pass.
func (b *bar) file(size int64) func(done, total int64) {
	if b == nil {
		return nil
	}
	pass, last := int64(0), int64(0)
	return func(done, _ int64) {
		if done <= last {
			pass = size
		}
		last = done
		b.set(b.before + min(pass+done, 2*size))
	}
}

// done says that a file is through, however much of it was read.
func (b *bar) done(size int64) {
	if b != nil {
		b.before += 2 * size
		b.set(b.before)
	}
}

func (b *bar) set(n int64) { _ = b.Set64(n) } // a terminal that is gone is no reason to stop

// clear takes the bar away until it moves again, to make room for a line.
func (b *bar) clear() {
	if b != nil {
		_ = b.Clear()
	}
}

// summary is what became of all files.
type summary struct {
	Files          int   `json:"files"`
	Imported       int   `json:"imported"`       // files of which something was stored now
	Unchanged      int   `json:"unchanged"`      // files that were in the log as they are
	Refused        int   `json:"refused"`        // files with problems
	Ignored        int   `json:"ignored"`        // other files in the directories, by their names
	EventsImported int64 `json:"eventsImported"` // stored now
	EventsPresent  int64 `json:"eventsPresent"`  // already there
}

func (s *summary) add(rep *appender.ImportReport) {
	s.Files++
	s.EventsImported += rep.Imported
	s.EventsPresent += rep.Present
	switch {
	case !rep.OK():
		s.Refused++
	case rep.Created || rep.Imported > 0:
		s.Imported++
	default:
		s.Unchanged++
	}
}

// reporter writes reports as they come.
type reporter interface {
	file(*appender.ImportReport) error
	end(summary, error) error
}

// jsonReport writes one document, a file at a time, so that it takes no memory and ends well
// when the import does not.
type jsonReport struct {
	w     io.Writer
	files int
}

// fileReport is a file's report in JSON.
type fileReport struct {
	*appender.ImportReport
	Status string `json:"status"` // imported (the file is in the log now) or refused
}

func (j *jsonReport) file(rep *appender.ImportReport) error {
	r := fileReport{rep, "imported"}
	if !rep.OK() {
		r.Status = "refused"
	}
	before := ",\n"
	if j.files == 0 {
		before = `{"files":[` + "\n"
	}
	j.files++
	return j.write(before, r, "")
}

func (j *jsonReport) end(s summary, err error) error {
	before := "\n],\"summary\":"
	if j.files == 0 {
		before = `{"files":[],"summary":`
	}
	if err != nil {
		return errors.Join(j.write(before, s, ""), j.write(`,"error":`, err.Error(), "}\n"))
	}
	return j.write(before, s, "}\n")
}

func (j *jsonReport) write(before string, v any, behind string) error {
	b, err := json.Marshal(v)
	if err == nil {
		_, err = j.w.Write(slices.Concat([]byte(before), b, []byte(behind)))
	}
	return err
}

// textReport writes a line a problem, one for each file, and one for all.
type textReport struct {
	w   io.Writer
	bar *bar
}

func (t *textReport) file(rep *appender.ImportReport) error {
	t.bar.clear()
	var b strings.Builder
	place := func(p sessionfile.Problem) string {
		if p.Line > 0 {
			return fmt.Sprintf("%s:%d", rep.File, p.Line)
		}
		return rep.File
	}
	for _, p := range rep.Problems {
		fmt.Fprintf(&b, "%s: error: %s\n", place(p), what(p))
	}
	for _, br := range rep.Branches {
		fmt.Fprintf(&b, "%s: branch: line %d (seq %d) to line %d (seq %d)\n", rep.File, br.FirstLine, br.FirstSeq, br.LastLine, br.LastSeq)
	}
	for _, p := range rep.Warnings {
		fmt.Fprintf(&b, "%s: warning: %s\n", place(p), what(p))
	}
	if rep.MoreWarnings > 0 {
		fmt.Fprintf(&b, "%s: %d more warnings\n", rep.File, rep.MoreWarnings)
	}
	var rules []events.Rule
	for r := range rep.Violations {
		rules = append(rules, r)
	}
	slices.Sort(rules)
	for _, r := range rules {
		v := rep.Violations[r]
		for _, p := range v.First {
			fmt.Fprintf(&b, "%s: warning: %s\n", place(p), what(p))
		}
		if more := v.Count - int64(len(v.First)); more > 0 {
			fmt.Fprintf(&b, "%s: warning: %s %d more times\n", rep.File, r, more)
		}
	}
	if rep.OK() {
		fmt.Fprintf(&b, "%s: session %s: %d events (%d imported, %d already there), %d nodes, %d replacements\n",
			rep.File, rep.Session, rep.Events, rep.Imported, rep.Present, rep.Nodes, rep.Replacements)
	}
	if c := rep.Converted; c != nil && rep.OK() {
		fmt.Fprintf(&b, "%s: converted from format %d to %d: %s\n", rep.File, c.From, c.To, conversions(c))
	}
	_, err := io.WriteString(t.w, b.String())
	return err
}

func conversions(c *sessionfile.Converted) string {
	var done []string
	for _, d := range []struct {
		n    int64
		what string
	}{
		{c.ExpandedRows, fmt.Sprintf("%d packed rows expanded to %d events", c.ExpandedRows, c.ExpandedEvents)},
		{c.RenamedOps, fmt.Sprintf("start and end of %d replacements renamed", c.RenamedOps)},
		{c.DroppedSources, fmt.Sprintf("sourceEventSeqs of %d assistant messages dropped", c.DroppedSources)},
		{c.ReshapedMessages, fmt.Sprintf("%d messages given an id and their present shape", c.ReshapedMessages)},
	} {
		if d.n > 0 {
			done = append(done, d.what)
		}
	}
	if done == nil {
		return "nothing but the version in the header"
	}
	return strings.Join(done, ", ")
}

func (t *textReport) end(s summary, _ error) error {
	_, err := fmt.Fprintf(t.w, "%d files: %d imported, %d unchanged, %d refused; %d events imported, %d already there; %d other files ignored\n",
		s.Files, s.Imported, s.Unchanged, s.Refused, s.EventsImported, s.EventsPresent, s.Ignored)
	return err
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
