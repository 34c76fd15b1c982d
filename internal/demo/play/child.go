package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// stack is the two programs and where they keep things.
type stack struct {
	bin, data, temp                     string
	listen, projectorListen, natsListen string
	log                                 io.Writer // where the programs' logs go besides; may be nil

	appender, projector *child // nil while not running
}

// child is one program that was started here.
type child struct {
	name   string
	cmd    *exec.Cmd
	stdout *output
	stderr *output
	ended  chan struct{} // closed when it has ended and was waited for
	ready
}

// ready is the line that a program prints when it serves.
type ready struct {
	Ready bool   `json:"ready"`
	HTTP  string `json:"http"`
	NATS  string `json:"nats"`
}

// output keeps what a program writes. line is closed when its first line is complete.
type output struct {
	mu    sync.Mutex
	b     bytes.Buffer
	also  io.Writer
	line  chan struct{}
	whole bool
}

func newOutput(also io.Writer) *output { return &output{also: also, line: make(chan struct{})} }

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.b.Write(p)
	if !o.whole && bytes.IndexByte(p, '\n') >= 0 {
		o.whole = true
		close(o.line)
	}
	if o.also != nil {
		return o.also.Write(p)
	}
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// command is a program of bin/ with no settings but its arguments, in a process group of its
// own: a Ctrl-C in the terminal is this program's to pass on.
func (s *stack) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(s.bin, name), args...)
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "PALIMPSEST_") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	cmd.SysProcAttr = processAttributes()
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// start starts a server and waits for its ready line. A child that comes with an error still
// runs.
func (s *stack) start(ctx context.Context, name string, args ...string) (*child, error) {
	args = append([]string{"serve", "--log-format", "text", "--log-level", "warn"}, args...)
	c := &child{name: name, cmd: s.command(name, args...), stdout: newOutput(nil), stderr: newOutput(s.log), ended: make(chan struct{})}
	c.cmd.Stdout, c.cmd.Stderr = c.stdout, c.stderr
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = c.cmd.Wait() // how it ended is in cmd.ProcessState
		close(c.ended)
	}()
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	select {
	case <-c.stdout.line:
		line, _, _ := strings.Cut(c.stdout.String(), "\n")
		if err := json.Unmarshal([]byte(line), &c.ready); err == nil && c.Ready && c.HTTP != "" && c.NATS != "" {
			return c, nil
		}
		return c, c.failed("printed %q, expected a ready line", line)
	case <-c.ended:
		return nil, c.failed("ended before it was ready: %v", c.cmd.ProcessState)
	case <-ctx.Done():
		if err := context.Cause(ctx); !errors.Is(err, context.DeadlineExceeded) {
			return c, err
		}
		return c, c.failed("was not ready within %v", startTime)
	}
}

// failed is an error with what the program said on stderr.
func (c *child) failed(format string, args ...any) error {
	err := c.name + " " + fmt.Sprintf(format, args...)
	if c.stderr.also == nil { // else it was shown already
		if said := strings.TrimSpace(c.stderr.String()); said != "" {
			err += "\n--- its stderr:\n" + said
		}
	}
	return errors.New(err)
}

// stop ends a program with SIGTERM and expects exit code 0.
func (c *child) stop() error {
	select {
	case <-c.ended:
		return c.failed("ended by itself: %v", c.cmd.ProcessState)
	default:
	}
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return c.failed("could not be told to stop: %v", err)
	}
	late := time.NewTimer(stopTime)
	defer late.Stop()
	select {
	case <-c.ended:
	case <-late.C:
		_ = c.cmd.Process.Kill() // this one process, by its id
		<-c.ended
		return c.failed("did not end within %v of SIGTERM and was killed", stopTime)
	}
	if !c.cmd.ProcessState.Success() {
		return c.failed("ended with %v, expected exit code 0", c.cmd.ProcessState)
	}
	return nil
}

// serve starts both programs.
func (s *stack) serve(ctx context.Context) (err error) {
	s.appender, err = s.start(ctx, "appender", "--invariants", "enforce", "--data", s.data, "--listen", s.listen, "--nats-listen", s.natsListen)
	if err != nil {
		return err
	}
	s.projector, err = s.start(ctx, "projector", "--nats", s.appender.NATS, "--listen", s.projectorListen)
	return err
}

// stop ends what runs, the projector first since it reads from the other's NATS server.
func (s *stack) stop() error {
	var errs []error
	for _, c := range []**child{&s.projector, &s.appender} {
		if *c != nil {
			errs = append(errs, (*c).stop())
			*c = nil
		}
	}
	return errors.Join(errs...)
}

// run runs a command of bin/ to its end and returns what it printed.
func (s *stack) run(ctx context.Context, name string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, commandTime)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := s.command(name, append([]string{"--log-format", "text", "--log-level", "warn"}, args...)...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		return "", err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		_ = cmd.Process.Kill() // this one process, by its id
		<-ended
		if err = context.Cause(ctx); errors.Is(err, context.DeadlineExceeded) {
			err = fmt.Errorf("not done within %v", commandTime)
		}
	}
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s%s", name, strings.Join(args, " "), err, stdout.String(), stderr.String())
	}
	return strings.TrimSpace(stdout.String()), nil
}
