package harness

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	readyLimit = 60 * time.Second
	drainLimit = 30 * time.Second
	runLimit   = 3 * time.Minute
)

// Process is one running program.
type Process struct {
	Name string
	HTTP string // base URL, as the ready line gave it
	NATS string // URL of the NATS it serves or uses

	cmd    *exec.Cmd
	stdout *output
	stderr *output
	exited chan struct{} // closed once the process has been reaped
	first  chan string   // gets its first line, and is closed behind it
}

// Appender says how to start `appender serve`. With NATS set it joins that
// server, else it runs an embedded one on NATSListen with its store in Data.
type Appender struct {
	NATS       string
	Data       string   // Defaults to a folder that goes with the test
	Listen     string   // Defaults to 127.0.0.1:0
	NATSListen string   // Defaults to 127.0.0.1:0
	Invariants string   // Defaults to the program's own default
	Replicas   int      // Defaults to the program's own default
	Args       []string // more of them
}

// Start runs the appender until the test ends and waits until it is ready.
func (a Appender) Start(t testing.TB) *Process {
	t.Helper()
	return a.Launch(t).AwaitReady(t)
}

// Launch is Start without waiting. Listen must name a port, since nothing else tells it yet.
func (a Appender) Launch(t testing.TB) *Process {
	t.Helper()
	args := []string{"serve", "--listen", or(a.Listen, "127.0.0.1:0")}
	if a.NATS != "" {
		args = append(args, "--nats", a.NATS)
	} else {
		data := a.Data
		if data == "" {
			data = t.TempDir()
		}
		args = append(args, "--data", data, "--nats-listen", or(a.NATSListen, "127.0.0.1:0"))
	}
	if a.Replicas != 0 {
		args = append(args, "--replicas", strconv.Itoa(a.Replicas))
	}
	if a.Invariants != "" {
		args = append(args, "--invariants", a.Invariants)
	}
	return launch(t, nil, a.Listen, "appender", append(args, a.Args...)...)
}

// Projector says how to start `projector serve`.
type Projector struct {
	NATS     string
	Listen   string        // Defaults to 127.0.0.1:0
	ID       string        // Defaults to the program's own default
	Lease    time.Duration // Defaults to the program's own default
	Replicas int           // Defaults to the program's own default
	Args     []string      // further ones
	Env      []string      // beside the test's own
}

// Start runs the projector until the test ends and waits until it is ready.
func (p Projector) Start(t testing.TB) *Process {
	t.Helper()
	return p.Launch(t).AwaitReady(t)
}

// Launch is Start without waiting. Listen must name a port, since nothing else tells it yet.
func (p Projector) Launch(t testing.TB) *Process {
	t.Helper()
	args := []string{"serve", "--listen", or(p.Listen, "127.0.0.1:0"), "--nats", p.NATS}
	if p.ID != "" {
		args = append(args, "--id", p.ID)
	}
	if p.Lease != 0 {
		args = append(args, "--lease", p.Lease.String())
	}
	if p.Replicas != 0 {
		args = append(args, "--replicas", strconv.Itoa(p.Replicas))
	}
	return launch(t, p.Env, p.Listen, "projector", append(args, p.Args...)...)
}

func or(s, fallback string) string {
	if s == "" {
		return fallback
	}
	return s
}

// starts runs functions on one OS thread that lives as long as the test
// process: a child's death signal is tied to the thread that made the child.
var starts = sync.OnceValue(func() chan<- func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
})

// StartCommand starts a command that the kernel ends when this process dies.
func StartCommand(cmd *exec.Cmd) error {
	cmd.SysProcAttr = childAttributes(cmd.SysProcAttr)
	done := make(chan error)
	starts() <- func() { done <- cmd.Start() }
	return <-done
}

func start(t testing.TB, name string, args ...string) *Process {
	t.Helper()
	return launch(t, nil, "", name, args...).AwaitReady(t)
}

func launch(t testing.TB, env []string, listen, name string, args ...string) *Process {
	t.Helper()
	p := &Process{
		Name:   name,
		HTTP:   "http://" + listen,
		first:  make(chan string, 1),
		cmd:    exec.Command(program(t, name), args...),
		stdout: &output{},
		stderr: &output{},
		exited: make(chan struct{}),
	}
	p.cmd.Dir = t.TempDir()
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = p.stderr
	pipe, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := StartCommand(p.cmd); err != nil {
		t.Fatalf("start %s: %v", name, err)
	}
	go func() {
		defer close(p.exited)
		defer close(p.first)
		lines := bufio.NewReader(io.TeeReader(pipe, p.stdout))
		if line, err := lines.ReadString('\n'); err == nil {
			p.first <- line
		}
		_, _ = io.Copy(io.Discard, lines)
		_ = p.cmd.Wait() // after the pipe is read to its end, as os/exec asks
	}()
	t.Cleanup(func() {
		p.Kill()
		p.report(t)
	})
	return p
}

// AwaitReady waits until the process is ready.
func (p *Process) AwaitReady(t testing.TB) *Process {
	t.Helper()
	timer := time.NewTimer(readyLimit)
	defer timer.Stop()
	select {
	case line, ok := <-p.first:
		if !ok {
			<-p.exited
			t.Fatalf("%s ended (code %d) before it was ready", strings.Join(p.cmd.Args, " "), p.cmd.ProcessState.ExitCode())
		}
		var err error
		if p.HTTP, p.NATS, err = parseReady(line); err != nil {
			t.Fatalf("%s: ready line %q: %v", p.Name, line, err)
		}
	case <-timer.C:
		t.Fatalf("%s was not ready in %v", strings.Join(p.cmd.Args, " "), readyLimit)
	}
	return p
}

func parseReady(line string) (http, nats string, err error) {
	var ready struct {
		Ready bool   `json:"ready"`
		HTTP  string `json:"http"`
		NATS  string `json:"nats"`
	}
	if err := json.Unmarshal([]byte(line), &ready); err != nil {
		return "", "", err
	}
	if !ready.Ready || ready.NATS == "" {
		return "", "", errors.New(`want {"ready":true,"http":"…","nats":"…"}`)
	}
	if ready.HTTP != "" { // a NATS server serves none
		http = withScheme(ready.HTTP, "http")
	}
	return http, withScheme(ready.NATS, "nats"), nil
}

// withScheme lets a ready line give host:port or a whole URL.
func withScheme(address, scheme string) string {
	if strings.Contains(address, "://") {
		return strings.TrimSuffix(address, "/")
	}
	return scheme + "://" + address
}

// HostPort is the address part of a URL that a ready line gave.
func HostPort(url string) string {
	_, after, found := strings.Cut(url, "://")
	if !found {
		return url
	}
	return after
}

// Client talks to the process over HTTP.
func (p *Process) Client() *Client { return NewClient(p.HTTP) }

// Kill ends the process with SIGKILL and waits until it is gone.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill()
	<-p.exited
}

// Signal sends a signal; a process that has ended gets none.
func (p *Process) Signal(sig os.Signal) error {
	err := p.cmd.Process.Signal(sig)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Term sends SIGTERM and expects the process to drain and end with code 0.
func (p *Process) Term(t testing.TB) {
	t.Helper()
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Fatalf("SIGTERM to %s: %v", p.Name, err)
	}
	timer := time.NewTimer(drainLimit)
	defer timer.Stop()
	select {
	case <-p.exited:
		if state := p.cmd.ProcessState; state.ExitCode() != 0 {
			t.Fatalf("%s after SIGTERM: %v, want exit code 0", p.Name, state)
		}
	case <-timer.C:
		t.Fatalf("%s had not ended %v after SIGTERM", p.Name, drainLimit)
	}
}

// RSS is how much memory the process has resident, in bytes. It is known on Linux alone.
func (p *Process) RSS() (int, bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.cmd.Process.Pid))
	if err != nil {
		return 0, false
	}
	var size, resident int
	if _, err := fmt.Sscan(string(b), &size, &resident); err != nil {
		return 0, false
	}
	return resident * os.Getpagesize(), true
}

// Stdout is what the process has written to its standard output so far.
func (p *Process) Stdout() string { return p.stdout.String() }

// Stderr is what the process has logged so far.
func (p *Process) Stderr() string { return p.stderr.String() }

// troubles are what no program may ever log.
var troubles = []string{"WARNING: DATA RACE", "panic: ", "panic serving", "fatal error: "}

func (p *Process) report(t testing.TB) {
	log := p.stderr.String()
	for _, trouble := range troubles {
		if strings.Contains(log, trouble) {
			t.Errorf("%s logged %q", p.Name, trouble)
		}
	}
	if t.Failed() {
		t.Logf("%s (pid %d) wrote to stderr:\n%s", p.Name, p.cmd.Process.Pid, log)
	}
}

// Result is how a command ended.
type Result struct {
	Code   int
	MaxRSS int // most memory that it had resident, in bytes; 0 where that is not known
	Stdout string
	Stderr string
}

// Output is all that a command printed.
func (r Result) Output() string { return r.Stdout + r.Stderr }

// Run runs one of the programs to its end.
func Run(t testing.TB, name string, args ...string) Result {
	t.Helper()
	return RunFor(t, runLimit, name, args...)
}

// RunFor is Run with a limit of time of its own.
func RunFor(t testing.TB, limit time.Duration, name string, args ...string) Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, program(t, name), args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := StartCommand(cmd)
	if err == nil {
		err = cmd.Wait()
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s %s: %v", name, strings.Join(args, " "), err)
	}
	if ctx.Err() != nil {
		t.Fatalf("%s %s did not end in %v\n%s", name, strings.Join(args, " "), limit, stderr.String())
	}
	r := Result{Code: cmd.ProcessState.ExitCode(), MaxRSS: maxRSS(cmd.ProcessState), Stdout: stdout.String(), Stderr: stderr.String()}
	for _, trouble := range troubles {
		if strings.Contains(r.Stderr, trouble) {
			t.Errorf("%s %s logged %q:\n%s", name, strings.Join(args, " "), trouble, r.Stderr)
		}
	}
	return r
}

// output keeps the last part of what a process wrote.
type output struct {
	mu      sync.Mutex
	bytes   []byte
	dropped int
}

const outputLimit = 256 << 10

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.bytes = append(o.bytes, b...)
	if over := len(o.bytes) - outputLimit; over > outputLimit {
		o.bytes = append(o.bytes[:0], o.bytes[over:]...)
		o.dropped += over
	}
	return len(b), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.dropped > 0 {
		return fmt.Sprintf("[%d bytes before]\n%s", o.dropped, o.bytes)
	}
	return string(o.bytes)
}

// Until calls check every few milliseconds until it answers nil, and fails the
// test with its last error when that takes longer than limit.
func Until(t testing.TB, limit time.Duration, what string, check func() error) {
	t.Helper()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %v", what, limit, err)
		}
		select {
		case <-ticker.C:
		case <-t.Context().Done():
			t.Fatalf("%s: the test ended: %v", what, err)
		}
	}
}
