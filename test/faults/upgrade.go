package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// Ways to upgrade under load.
const (
	toVersion = "version" // programs of an earlier commit, one by one replaced by those of today, and back
	toFold    = "fold"    // projectors of today beside some of another version of the fold, and back
)

// nextNames are the projectors of another version of the fold.
var nextNames = []string{"q0", "q1"}

// errNoHistory says that there is no earlier version to upgrade from.
var errNoHistory = errors.New("there is no earlier commit to build the programs of")

// buildOld builds the programs of an earlier commit: the one that is asked for, else the latest tag,
// else ten commits ago. It returns their directory and the commit.
func (s *stack) buildOld(ctx context.Context, rev string) (dir, commit string, err error) {
	root, err := harness.RepoRoot()
	if err != nil {
		return "", "", err
	}
	git := func(args ...string) (string, error) {
		cmd := exec.CommandContext(ctx, "git", args...)
		cmd.Dir = root
		out, err := cmd.Output()
		return strings.TrimSpace(string(out)), err
	}
	if rev == "" {
		if rev, err = git("describe", "--tags", "--abbrev=0"); err != nil {
			rev = "HEAD~10"
		}
	}
	if commit, err = git("rev-parse", "--short", "--verify", rev+"^{commit}"); err != nil {
		return "", "", fmt.Errorf("%w: %s", errNoHistory, rev)
	}
	dir = filepath.Join(root, "bin", "faults-programs-"+commit)
	source := filepath.Join(s.dir, "source")
	if err := os.Mkdir(source, 0o700); err != nil {
		return "", "", err
	}
	archive := filepath.Join(s.dir, "source.tar")
	if _, err := git("archive", "-o", archive, commit); err != nil {
		return "", "", fmt.Errorf("git archive %s: %w", commit, err)
	}
	if out, err := exec.CommandContext(ctx, "tar", "-xf", archive, "-C", source).CombinedOutput(); err != nil {
		return "", "", fmt.Errorf("tar: %w: %s", err, out)
	}
	return dir, commit, load.BuildIn(ctx, source, dir, "./cmd/appender", "./cmd/projector")
}

// buildFold builds a projector with the next version of the fold. The constant is replaced while it
// is compiled.
func (s *stack) buildFold(ctx context.Context) (string, error) {
	root, err := harness.RepoRoot()
	if err != nil {
		return "", err
	}
	file := filepath.Join(root, "internal", "session", "session.go")
	source, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	changed := bytes.Replace(source, []byte("const FoldVersion = "), []byte("const FoldVersion = 1000 + "), 1)
	if bytes.Equal(changed, source) {
		return "", fmt.Errorf("%s has no FoldVersion", file)
	}
	dir := filepath.Join(root, "bin", "faults-programs-fold")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	overlay, err := writeOverlay(dir, file, changed)
	if err != nil {
		return "", err
	}
	return dir, load.Build(ctx, dir, "-overlay", overlay, "./cmd/projector")
}

// use has the process run the program of a directory at its next start.
func (p *process) use(dir string) { p.Line[p.at] = filepath.Join(dir, filepath.Base(p.Line[p.at])) }

// progress waits until clients got more done, so that something happens on both sides of a step.
func (s *suite) progress(ctx context.Context) {
	want := s.Get(changesStored) + 25
	for late := time.Now().Add(load.StartTime); s.Get(changesStored) < want; {
		if time.Now().After(late) {
			s.Finding("clients got no %d changes done within %v", 25, load.StartTime)
			return
		}
		if !load.Wait(ctx, 20*time.Millisecond) {
			return
		}
	}
}

// roll replaces programs by those of a directory, one after the other.
func (s *suite) roll(ctx context.Context, what, dir string, names ...string) error {
	for _, name := range names {
		p := s.stack.processes[name]
		s.say("%s becomes the %s one", name, what)
		if err := p.Term(); err != nil {
			s.Finding("%v", err)
		}
		p.use(dir)
		if err := p.launch(0); err != nil {
			return err
		}
		if err := p.Ready(ctx); err != nil {
			return err
		}
		s.Add("upgrade: programs replaced by the "+what+" one", 1)
		s.progress(ctx)
	}
	return nil
}

// upgradeVersion goes from an earlier version to this one and back, under load.
func (s *suite) upgradeVersion(ctx context.Context) error {
	s.progress(ctx)
	projectors, appenders := programNames[2:], programNames[:2]
	if err := s.roll(ctx, "new", s.stack.programs, projectors...); err != nil {
		return err
	}
	if err := s.roll(ctx, "new", s.stack.programs, appenders...); err != nil {
		return err
	}
	if err := s.roll(ctx, "old", s.stack.old, appenders...); err != nil {
		return err
	}
	return s.roll(ctx, "old", s.stack.old, projectors...)
}

// upgradeFold builds snapshots of another version of the fold, switches to them and goes back, under load.
func (s *suite) upgradeFold(ctx context.Context) error {
	today := programNames[2:]
	s.progress(ctx)
	for _, name := range nextNames {
		p := s.stack.processes[name]
		p.use(s.stack.next)
		if err := p.launch(0); err != nil {
			return err
		}
		if err := p.Ready(ctx); err != nil {
			return err
		}
	}
	s.progress(ctx)
	if err := s.holders(ctx, today, nextNames); err != nil {
		return err
	}
	if err := s.folds(ctx, "SURFACES"); err != nil {
		return err
	}
	s.say("projector rebuild, of the next fold")
	if err := s.command(ctx, s.stack.next, "rebuild"); err != nil {
		return err
	}
	if err := s.holders(ctx, nextNames, today); err != nil {
		return err
	}
	s.progress(ctx)
	if err := s.folds(ctx, "SURFACES", "SURFACES_2"); err != nil {
		return err
	}
	s.say("projector rebuild --back, of today's fold")
	if err := s.command(ctx, s.stack.programs, "rebuild", "--back"); err != nil {
		return err
	}
	if err := s.holders(ctx, today, nextNames); err != nil {
		return err
	}
	s.progress(ctx)
	for _, name := range nextNames {
		if err := s.stack.processes[name].Term(); err != nil {
			s.Finding("%v", err)
		}
	}
	return s.folds(ctx, "SURFACES", "SURFACES_2")
}

// command runs a command of a projector to its end.
func (s *suite) command(ctx context.Context, dir string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, verifyTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "projector"), append(args, "--nats", s.stack.direct(), "--replicas", "3", "--log-level", "warn")...)
	cmd.Env = load.Environment()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("projector %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	s.Add("check: projector "+strings.Join(args, " "), 1)
	return nil
}

// holders waits until some projectors hold all partitions, each at least one, and others none.
func (s *suite) holders(ctx context.Context, all, none []string) error {
	c := harness.NewClient(s.stack.processes[programNames[2]].http)
	for late := time.Now().Add(load.StartTime); ; {
		w, err := c.Workers(ctx)
		loads := w.Loads()
		there := 0
		for _, m := range w.Workers {
			if slices.Contains(all, m.ID) || slices.Contains(none, m.ID) {
				there++
			}
		}
		if err == nil && len(w.Unowned) == 0 && there == len(all)+len(none) && slices.Equal(slices.Sorted(maps.Keys(loads)), all) {
			s.Add("check: partitions are held by the projectors of the fold that serves, and by no other", 1)
			return nil
		}
		if time.Now().After(late) || !load.Wait(ctx, 100*time.Millisecond) {
			return fmt.Errorf("partitions are held by %v of %+v, expected by %v alone: %w", loads, w.Workers, all, err)
		}
	}
}

// folds checks that all heads in each bucket say the one version of the fold that the bucket was
// built by, and that no two buckets have the same.
func (s *suite) folds(ctx context.Context, buckets ...string) error {
	nc, js, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer nc.Close()
	before := map[int]string{}
	for _, bucket := range buckets {
		folds := map[int]int64{}
		err := each(ctx, js, "KV_"+bucket, func(m jetstream.Msg) error {
			var head struct{ Fold *int }
			if json.Unmarshal(m.Data(), &head) == nil && head.Fold != nil { // pages have none
				folds[*head.Fold]++
			}
			return nil
		})
		if err != nil {
			return err
		}
		if len(folds) != 1 {
			return fmt.Errorf("bucket %s holds heads of folds %v, expected one fold", bucket, folds)
		}
		for fold, n := range folds {
			if other := before[fold]; other != "" {
				return fmt.Errorf("buckets %s and %s are of the same fold %d", other, bucket, fold)
			}
			before[fold] = bucket
			s.Add("check: heads of the fold that built their bucket", n)
		}
	}
	return nil
}
