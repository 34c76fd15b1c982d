package load

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

// Bounds of every wait for a process.
const (
	StartTime = 60 * time.Second // until it prints its ready line
	StopTime  = 60 * time.Second // from SIGTERM to the end
)

// Build builds packages of this module into a directory, with the race detector when
// PALIMPSEST_RACE=1.
func Build(ctx context.Context, dir string, args ...string) error {
	root, err := harness.RepoRoot()
	if err != nil {
		return err
	}
	return BuildIn(ctx, root, dir, args...)
}

// BuildIn is Build of another module.
func BuildIn(ctx context.Context, root, dir string, args ...string) error {
	build := []string{"build", "-o", dir + string(filepath.Separator)}
	if harness.Race() {
		build = append(build, "-race")
	}
	cmd := exec.CommandContext(ctx, "go", append(build, args...)...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build: %w\n%s", err, out)
	}
	return nil
}

// FreeAddresses are addresses on loopback that stay free while a program is away: below the ports
// that outgoing connections get.
func FreeAddresses(n int) (out []string, err error) {
	var held []net.Listener
	defer func() {
		for _, ln := range held {
			err = errors.Join(err, ln.Close())
		}
	}()
	for range 1000 {
		if len(out) == n {
			return out, nil
		}
		addr := fmt.Sprintf("127.0.0.1:%d", 18000+rand.IntN(14000))
		if ln, lerr := net.Listen("tcp", addr); lerr == nil {
			held, out = append(held, ln), append(out, addr)
		}
	}
	return nil, errors.New("not enough free ports between 18000 and 32000")
}

// Environment is this program's without settings for the others.
func Environment() (out []string) {
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "PALIMPSEST_") {
			out = append(out, kv)
		}
	}
	return out
}

// Troubles are what no program may ever say.
var Troubles = []string{"WARNING: DATA RACE", "panic: ", "panic in a handler", "panic serving", "fatal error: "}

// Process is one program that is started again and again.
type Process struct {
	Name   string
	Dir    string   // where it runs
	Line   []string // program and arguments
	Stderr *Output  // of all its runs

	mu     sync.Mutex // guards the three below
	cmd    *exec.Cmd
	stdout *Output
	ended  chan struct{} // closed when it was waited for
}

// NewProcess is one that does not run yet. Beside Troubles it counts what it is told to look for.
func NewProcess(name, dir string, line []string, look ...string) *Process {
	return &Process{Name: name, Dir: dir, Line: line, Stderr: NewOutput(append(look, Troubles...)...)}
}

// Launch starts the process, with more in its environment, and does not wait until it is ready.
func (p *Process) Launch(env ...string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	stdout, ended := NewOutput(), make(chan struct{})
	cmd := exec.Command(p.Line[0], p.Line[1:]...)
	cmd.Env, cmd.Dir = append(Environment(), env...), p.Dir
	cmd.Stdout, cmd.Stderr = stdout, p.Stderr
	if err := harness.StartCommand(cmd); err != nil {
		return fmt.Errorf("%s: %w", p.Name, err)
	}
	p.cmd, p.stdout, p.ended = cmd, stdout, ended
	go func() {
		_ = cmd.Wait() // how it ended is in ProcessState
		close(ended)
	}()
	return nil
}

// Launched says whether it ever ran.
func (p *Process) Launched() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd != nil
}

func (p *Process) now() (*exec.Cmd, *Output, chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd, p.stdout, p.ended
}

// Ended is closed when the process as it was launched last has ended.
func (p *Process) Ended() <-chan struct{} {
	_, _, ended := p.now()
	return ended
}

// Pid is the process id of its last run.
func (p *Process) Pid() int {
	cmd, _, _ := p.now()
	return cmd.Process.Pid
}

// Failed is an error with what the process said last on stderr.
func (p *Process) Failed(format string, args ...any) error {
	return fmt.Errorf("%s %s\n%s", p.Name, fmt.Sprintf(format, args...), p.Stderr.String())
}

// EndedBy is Failed for a process that ended by itself.
func (p *Process) EndedBy() error {
	cmd, _, _ := p.now()
	return p.Failed("ended by itself: %v", cmd.ProcessState)
}

// Ready waits for the ready line. A process that ends before is an error; when ctx ends, it is none.
func (p *Process) Ready(ctx context.Context) error {
	for late := time.Now().Add(StartTime); ; {
		cmd, stdout, ended := p.now()
		if line, _, whole := strings.Cut(stdout.String(), "\n"); whole {
			var ready struct{ Ready bool }
			if json.Unmarshal([]byte(line), &ready) != nil || !ready.Ready {
				return p.Failed("printed %q, expected a ready line", line)
			}
			return nil
		}
		select {
		case <-ended:
			return p.Failed("ended before it was ready: %v", cmd.ProcessState)
		default:
		}
		if time.Now().After(late) {
			return p.Failed("was not ready within %v", StartTime)
		}
		if !Wait(ctx, 20*time.Millisecond) {
			return nil
		}
	}
}

// Signal sends a signal.
func (p *Process) Signal(sig os.Signal) error {
	cmd, _, _ := p.now()
	if err := cmd.Process.Signal(sig); err != nil {
		return p.Failed("%v: %v", sig, err)
	}
	return nil
}

// Kill ends this one process, by its id, with SIGKILL.
func (p *Process) Kill() {
	cmd, _, ended := p.now()
	_ = cmd.Process.Kill() // it may have ended
	<-ended
}

// Term ends a process with SIGTERM and expects exit code 0.
func (p *Process) Term() error {
	cmd, _, ended := p.now()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	late := time.NewTimer(StopTime)
	defer late.Stop()
	select {
	case <-ended:
	case <-late.C:
		p.Kill()
		return p.Failed("did not end within %v of SIGTERM and was killed", StopTime)
	}
	if !cmd.ProcessState.Success() {
		return p.Failed("ended with %v, expected exit code 0", cmd.ProcessState)
	}
	return nil
}

// CheckTroubles notes what the process should never have said.
func (p *Process) CheckTroubles(t *Tally) {
	for _, trouble := range Troubles {
		if p.Stderr.Seen(trouble) > 0 {
			t.Finding("%s said %q:\n%s", p.Name, trouble, p.Stderr.String())
		}
	}
}

// outputLimit is how much is kept of what a process writes, in bytes; for a moment twice as much.
const outputLimit = 32 << 10

// Output keeps the last part of what a process wrote, and counts what is looked for in all of it.
type Output struct {
	look []string
	mu   sync.Mutex // guards all below
	b    []byte
	seen map[string]int64
}

// NewOutput looks for texts.
func NewOutput(look ...string) *Output { return &Output{look: look, seen: map[string]int64{}} }

// Write takes more in.
func (o *Output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	before := len(o.b)
	o.b = append(o.b, p...)
	for _, text := range o.look {
		o.seen[text] += int64(bytes.Count(o.b[max(0, before-len(text)+1):], []byte(text))) // a text may come in two pieces
	}
	if over := len(o.b) - outputLimit; over > outputLimit {
		o.b = append(o.b[:0], o.b[over:]...)
	}
	return len(p), nil
}

// Seen is how often a text was written that is looked for.
func (o *Output) Seen(text string) int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.seen[text]
}

func (o *Output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.b)
}
