package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/test/e2e/harness"
)

const (
	appenders  = 2
	projectors = 3
)

// stack is all processes, the links between them, and the directory that holds programs and
// stores.
type stack struct {
	dir       string
	processes map[string]*process
	names     []string // of processes, in the order of their start
	links     []*link
	clients   [3]string // addresses of the servers
	mounted   []string  // directories with disks of their own
}

// newStack builds the programs and lays the links. Nothing runs yet.
func newStack(ctx context.Context, disk bool) (*stack, error) {
	dir, err := os.MkdirTemp("", "palimpsest-faults-")
	if err != nil {
		return nil, err
	}
	s := &stack{dir: dir, processes: map[string]*process{}}
	root, err := harness.RepoRoot()
	if err != nil {
		return s, err
	}
	args := []string{"build"}
	if harness.Race() {
		args = append(args, "-race")
	}
	cmd := exec.CommandContext(ctx, "go", append(args, "-o", dir+string(filepath.Separator), "./cmd/appender", "./cmd/projector", "./test/e2e/harness/natsd")...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return s, fmt.Errorf("build: %w\n%s", err, out)
	}
	if err := s.lay(); err != nil || !disk {
		return s, err
	}
	for _, name := range serverNames {
		dir := s.processes[name].store
		if err := mountDisk(dir); err != nil {
			return s, err
		}
		s.mounted = append(s.mounted, dir)
	}
	return s, nil
}

// lay makes a link for each pair of servers and direction, and for each program and server.
func (s *stack) lay() error {
	addrs, err := freeAddresses(2*3 + appenders + projectors)
	if err != nil {
		return err
	}
	routes := addrs[3:6]
	copy(s.clients[:], addrs[:3])
	for i, name := range serverNames {
		store := filepath.Join(s.dir, "store-"+name)
		s.add(name, "natsd", "-no-gossip", "-name", name, "-port", port(s.clients[i]), "-cluster-port", port(routes[i]), "-store", store).store = store
	}
	for i, from := range serverNames {
		var urls []string
		for j, to := range serverNames {
			if i == j {
				continue
			}
			l, err := s.link(routes[j], from, to)
			if err != nil {
				return err
			}
			urls = append(urls, "nats://"+l.addr)
		}
		p := s.processes[from]
		p.args = append(p.args, "-routes", strings.Join(urls, ","))
	}
	for i, name := range programNames {
		program := map[byte]string{'a': "appender", 'p': "projector"}[name[0]]
		p := s.add(name, program, "serve", "--listen", addrs[6+i], "--replicas", "3", "--log-level", "warn")
		p.http = "http://" + addrs[6+i]
		if program == "projector" {
			p.args = append(p.args, "--id", name)
		}
		var urls []string
		for j, to := range serverNames {
			l, err := s.link(s.clients[j], name, to)
			if err != nil {
				return err
			}
			urls = append(urls, "nats://"+l.addr)
		}
		p.args = append(p.args, "--nats", strings.Join(urls, ","))
	}
	return nil
}

func (s *stack) add(name, program string, args ...string) *process {
	p := &process{name: name, path: filepath.Join(s.dir, program), dir: s.dir, args: args}
	s.processes[name], s.names = p, append(s.names, name)
	return p
}

// link belongs to the processes at both ends: whoever is cut off loses all of its links.
func (s *stack) link(target string, ends ...string) (*link, error) {
	l, err := newLink(target)
	if err != nil {
		return nil, err
	}
	s.links = append(s.links, l)
	for _, name := range ends {
		// A program's links end at servers too: a server that is cut off has no clients.
		if p := s.processes[name]; p != nil {
			p.links = append(p.links, l)
		}
	}
	return l, nil
}

func port(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }

// freeAddresses stay free while a program is away: below the ports that outgoing connections get.
func freeAddresses(n int) (out []string, err error) {
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

// direct are the servers' URLs without links.
func (s *stack) direct() string { return "nats://" + strings.Join(s.clients[:], ",nats://") }

// start starts the servers, then the programs.
func (s *stack) start(ctx context.Context, t *tally) error {
	for _, name := range serverNames {
		if err := s.processes[name].launch(); err != nil {
			return err
		}
	}
	for _, name := range serverNames {
		if err := s.processes[name].ready(ctx, t); err != nil {
			return err
		}
	}
	if err := s.leader(ctx); err != nil {
		return err
	}
	for _, name := range programNames {
		p := s.processes[name]
		if err := p.launch(); err != nil {
			return err
		}
		if err := p.ready(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

// leader waits until the cluster has a leader.
func (s *stack) leader(ctx context.Context) error {
	nc, err := nats.Connect(s.direct())
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	for late := time.Now().Add(startTime); ; {
		one, cancel := context.WithTimeout(ctx, 2*time.Second)
		info, err := js.AccountInfo(one)
		cancel()
		if err == nil && info != nil {
			return nil
		}
		if time.Now().After(late) || !wait(ctx, 200*time.Millisecond) {
			return fmt.Errorf("the cluster has no leader: %w", err)
		}
	}
}

// close ends all processes, programs before servers, and removes what was made.
func (s *stack) close(t *tally) error {
	var errs []error
	for i := len(s.names) - 1; i >= 0; i-- {
		p := s.processes[s.names[i]]
		if p.cmd == nil {
			continue
		}
		errs = append(errs, p.term())
		for _, trouble := range []string{"WARNING: DATA RACE", "panic: ", "panic in a handler", "panic serving", "fatal error: "} {
			if strings.Contains(p.stderr.String(), trouble) {
				t.finding("%s said %q:\n%s", p.name, trouble, p.stderr.String())
			}
		}
	}
	for _, l := range s.links {
		l.close()
	}
	for _, dir := range s.mounted {
		errs = append(errs, unmountDisk(dir))
	}
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}

// process is one program that is started again and again.
type process struct {
	name, path, dir string
	args            []string
	store           string // directory of a server's store
	http            string // base URL of its API
	links           []*link
	stderr          output // of all its runs

	trouble sync.Mutex // held by the fault that it suffers

	mu     sync.Mutex // guards the three below
	cmd    *exec.Cmd
	stdout *output
	ended  chan struct{} // closed when it was waited for
}

// launch starts the process and does not wait until it is ready.
func (p *process) launch() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stdout, p.ended = new(output), make(chan struct{})
	p.cmd = exec.Command(p.path, p.args...)
	p.cmd.Env, p.cmd.Dir = environment(), p.dir
	p.cmd.Stdout, p.cmd.Stderr = p.stdout, &p.stderr
	p.cmd.SysProcAttr = childAttributes()
	begun := make(chan error)
	starts() <- func() { begun <- p.cmd.Start() }
	if err := <-begun; err != nil {
		return fmt.Errorf("%s: %w", p.name, err)
	}
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait() // how it ended is in ProcessState
		close(ended)
	}(p.cmd, p.ended)
	return nil
}

// starts runs functions on one thread that lives as long as this program: a child is told when
// the thread that made it ends.
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

// now is the process as it runs.
func (p *process) now() (*exec.Cmd, *output, chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd, p.stdout, p.ended
}

// ready waits for the ready line. A process that ends before is started again, as whoever runs
// it would do: one that finds no leader of the log says so and ends.
func (p *process) ready(ctx context.Context, t *tally) error {
	for late := time.Now().Add(startTime); ; {
		cmd, stdout, ended := p.now()
		if strings.Contains(stdout.String(), `"ready":true`) {
			return nil
		}
		select {
		case <-ended:
			t.add("starts that failed, and were repeated", 1)
			if !wait(ctx, 500*time.Millisecond) {
				return nil
			}
			if time.Now().After(late) {
				return fmt.Errorf("%s ended before it was ready, again and again: %v\n%s", p.name, cmd.ProcessState, p.stderr.String())
			}
			if err := p.launch(); err != nil {
				return err
			}
			continue
		default:
		}
		if time.Now().After(late) {
			return fmt.Errorf("%s was not ready within %v\n%s", p.name, startTime, p.stderr.String())
		}
		if !wait(ctx, 20*time.Millisecond) {
			return nil
		}
	}
}

func (p *process) signal(sig os.Signal) error {
	cmd, _, _ := p.now()
	if err := cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("%s: %v: %w\n%s", p.name, sig, err, p.stderr.String())
	}
	return nil
}

// kill ends this one process, by its id, with SIGKILL.
func (p *process) kill() {
	cmd, _, ended := p.now()
	_ = cmd.Process.Kill() // it may have ended
	<-ended
}

// term ends a process with SIGTERM and expects exit code 0.
func (p *process) term() error {
	cmd, _, ended := p.now()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	late := time.NewTimer(stopTime)
	defer late.Stop()
	select {
	case <-ended:
	case <-late.C:
		p.kill()
		return fmt.Errorf("%s did not end within %v of SIGTERM and was killed\n%s", p.name, stopTime, p.stderr.String())
	}
	if !cmd.ProcessState.Success() {
		return fmt.Errorf("%s ended with %v, expected exit code 0\n%s", p.name, cmd.ProcessState, p.stderr.String())
	}
	return nil
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

// outputLimit is how much is kept of what a process writes, in bytes.
const outputLimit = 4 << 10

// output keeps the last part of what a process wrote.
type output struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if over := o.b.Len() + len(p) - outputLimit; over > 0 {
		o.b.Next(over)
	}
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}
