package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"palimpsest/test/e2e/harness"
)

// stack is the two programs and the directory that holds them and their store.
type stack struct {
	dir                                  string
	listen, natsListen, projectorListens string
	appender, projector                  *program
	all                                  []*program // every one that was started
}

func newStack() (*stack, error) {
	dir, err := os.MkdirTemp("", "palimpsest-soak-")
	if err != nil {
		return nil, err
	}
	s := &stack{dir: dir}
	for _, into := range []*string{&s.listen, &s.natsListen, &s.projectorListens} {
		if *into, err = freeAddress(); err != nil {
			return nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	return s, nil
}

// freeAddress is an address that stays free while a program is away: below the ports that
// outgoing connections get.
func freeAddress() (string, error) {
	for range 100 {
		addr := fmt.Sprintf("127.0.0.1:%d", 18000+rand.IntN(14000))
		if ln, err := net.Listen("tcp", addr); err == nil {
			return addr, ln.Close()
		}
	}
	return "", errors.New("no free port between 18000 and 32000")
}

// build builds the programs, with the race detector when PALIMPSEST_RACE=1.
func (s *stack) build(ctx context.Context) error {
	root, err := harness.RepoRoot()
	if err != nil {
		return err
	}
	args := []string{"build"}
	if harness.Race() {
		args = append(args, "-race")
	}
	cmd := exec.CommandContext(ctx, "go", append(args, "-o", s.dir+string(filepath.Separator), "./cmd/appender", "./cmd/projector")...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	return nil
}

func (s *stack) startAppender() error {
	p, err := s.start("appender", "serve", "--invariants", "enforce", "--data", filepath.Join(s.dir, "store"), "--listen", s.listen, "--nats-listen", s.natsListen)
	s.appender = p
	return err
}

func (s *stack) startProjector() error {
	p, err := s.start("projector", "serve", "--nats", s.natsURL(), "--listen", s.projectorListens)
	s.projector = p
	return err
}

func (s *stack) natsURL() string { return "nats://" + s.natsListen }

// program is one running program.
type program struct {
	name   string
	cmd    *exec.Cmd
	stdout *output
	stderr *output
	ended  chan struct{} // closed when it was waited for
}

// start starts a program and waits for its ready line.
func (s *stack) start(name string, args ...string) (*program, error) {
	p := &program{name: name, cmd: exec.Command(filepath.Join(s.dir, name), append(args, "--log-level", "warn")...),
		stdout: newOutput(), stderr: newOutput(), ended: make(chan struct{})}
	p.cmd.Env = environment()
	p.cmd.Dir = s.dir
	p.cmd.Stdout, p.cmd.Stderr = p.stdout, p.stderr
	p.cmd.SysProcAttr = childAttributes()
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	s.all = append(s.all, p)
	go func() {
		_ = p.cmd.Wait() // how it ended is in cmd.ProcessState
		close(p.ended)
	}()
	late := time.NewTimer(startTime)
	defer late.Stop()
	select {
	case <-p.stdout.line:
		var ready struct{ Ready bool }
		if line, _, _ := strings.Cut(p.stdout.String(), "\n"); json.Unmarshal([]byte(line), &ready) != nil || !ready.Ready {
			return p, p.failed("printed %q, expected a ready line", line)
		}
		return p, nil
	case <-p.ended:
		return p, p.failed("ended before it was ready: %v", p.cmd.ProcessState)
	case <-late.C:
		return p, p.failed("was not ready within %v", startTime)
	}
}

// environment is this program's without settings for the others.
func environment() (out []string) {
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "PALIMPSEST_") {
			out = append(out, kv)
		}
	}
	return out
}

// failed is an error with what the program said last on stderr.
func (p *program) failed(format string, args ...any) error {
	return fmt.Errorf("%s %s\n%s", p.name, fmt.Sprintf(format, args...), p.stderr.String())
}

// kill ends this one process, by its id, with SIGKILL.
func (p *program) kill() {
	_ = p.cmd.Process.Kill()
	<-p.ended
}

// term ends a program with SIGTERM and expects exit code 0.
func (p *program) term() error {
	select {
	case <-p.ended:
		return nil // whoever saw it end has said so
	default:
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	late := time.NewTimer(stopTime)
	defer late.Stop()
	select {
	case <-p.ended:
	case <-late.C:
		p.kill()
		return p.failed("did not end within %v of SIGTERM and was killed", stopTime)
	}
	if !p.cmd.ProcessState.Success() {
		return p.failed("ended with %v, expected exit code 0", p.cmd.ProcessState)
	}
	return nil
}

// stop ends what runs, the projector first since it reads from the other's server.
func (s *stack) stop() error {
	var errs []error
	for _, p := range []*program{s.projector, s.appender} {
		if p != nil {
			errs = append(errs, p.term())
		}
	}
	return errors.Join(errs...)
}

func (s *stack) remove() error { return os.RemoveAll(s.dir) }

// troubles are what no program may ever say.
func (s *stack) troubles() (out []string) {
	for _, p := range s.all {
		for _, text := range []string{"WARNING: DATA RACE", "panic: ", "panic in a handler", "panic serving", "fatal error: "} {
			if p.stderr.contains(text) {
				out = append(out, fmt.Sprintf("%s said %q:\n%s", p.name, text, p.stderr.String()))
			}
		}
	}
	return out
}

// verify runs projector verify over everything and returns its report.
func (s *stack) verify(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, verifyTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(s.dir, "projector"), "verify", "--all", "--wait", "60s", "--nats", s.natsURL(), "--log-level", "warn")
	cmd.Env = environment()
	cmd.SysProcAttr = childAttributes()
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// outputLimit is how much is kept of what a program writes, in bytes.
const outputLimit = 64 << 10

// output keeps the last part of what a program writes. line is closed when its first line is
// complete.
type output struct {
	mu    sync.Mutex // guards all below
	b     []byte
	whole bool
	line  chan struct{}
}

func newOutput() *output { return &output{line: make(chan struct{})} }

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.b = append(o.b, p...)
	if !o.whole && bytes.IndexByte(o.b, '\n') >= 0 {
		o.whole = true
		close(o.line)
	}
	if over := len(o.b) - outputLimit; over > outputLimit {
		o.b = append(o.b[:0], o.b[over:]...)
	}
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.b)
}

func (o *output) contains(text string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return bytes.Contains(o.b, []byte(text))
}
