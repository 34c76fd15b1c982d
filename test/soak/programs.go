package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// stack is the two programs and the directory that holds them and their store.
type stack struct {
	dir                                  string
	listen, natsListen, projectorListens string
	appender, projector                  *load.Process
}

func newStack() (*stack, error) {
	dir, err := os.MkdirTemp("", "palimpsest-soak-")
	if err != nil {
		return nil, err
	}
	free, err := load.FreeAddresses(3)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	s := &stack{dir: dir, listen: free[0], natsListen: free[1], projectorListens: free[2]}
	program := func(name string, args ...string) *load.Process {
		return load.NewProcess(name, dir, append(append([]string{filepath.Join(dir, name)}, args...), "--log-level", "warn"))
	}
	s.appender = program("appender", "serve", "--invariants", "enforce", "--data", filepath.Join(dir, "store"), "--listen", s.listen, "--nats-listen", s.natsListen)
	s.projector = program("projector", "serve", "--nats", s.natsURL(), "--listen", s.projectorListens)
	return s, nil
}

// build builds the programs.
func (s *stack) build(ctx context.Context) error {
	return load.Build(ctx, s.dir, "./cmd/appender", "./cmd/projector")
}

func (s *stack) natsURL() string { return "nats://" + s.natsListen }

// start starts a program and waits for its ready line.
func (s *stack) start(ctx context.Context, p *load.Process) error {
	if err := p.Launch(); err != nil {
		return err
	}
	return p.Ready(ctx)
}

// stop ends what runs, the projector first since it reads from the other's server.
func (s *stack) stop() error {
	var errs []error
	for _, p := range []*load.Process{s.projector, s.appender} {
		if !p.Launched() {
			continue
		}
		select {
		case <-p.Ended(): // whoever saw it end has said so
		default:
			errs = append(errs, p.Term())
		}
	}
	return errors.Join(errs...)
}

func (s *stack) remove() error { return os.RemoveAll(s.dir) }

// verify runs projector verify over everything and returns its report.
func (s *stack) verify(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, verifyTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(s.dir, "projector"), "verify", "--all", "--wait", "60s", "--nats", s.natsURL(), "--log-level", "warn")
	cmd.Env = load.Environment()
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err := harness.StartCommand(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	return strings.TrimSpace(out.String()), err
}
