package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

const (
	appenders  = 2
	projectors = 3
)

// stack is all processes and what is between them.
type stack struct {
	dir       string // with the stores
	programs  string // directory of what was built
	old, next string // the same of an earlier version, and of another version of the fold
	upgrade   string
	processes map[string]*process
	names     []string // of processes, in the order of their start
	net       fabric
	clients   [3]string         // addresses of the servers
	monitors  [3]string         // addresses at which they tell of themselves
	without   map[string]string // kinds of faults that cannot be had here, and why
}

// fabric is what is between the processes.
type fabric interface {
	// place says where a process is: its host, and the command that starts it there.
	place(name string) (host string, within []string, err error)
	// way is the address under which processes reach a server's target.
	way(target string, ends ...*process) (string, error)
	cut(*process) error // nothing passes, and nobody is told
	join(*process) error
	slow(*process) error
	quick(*process) error
	reset(*process) error // of the connections that there are
	close()
}

// leftOut says why a kind of fault cannot be had here, "" when it can.
func (s *stack) leftOut(kind string) string { return s.without[kind] }

// newStack builds the programs and lays what is between them. Nothing runs yet.
func newStack(ctx context.Context, c config, say func(string, ...any)) (*stack, error) {
	dir, err := os.MkdirTemp("", "palimpsest-faults-")
	if err != nil {
		return nil, err
	}
	s := &stack{dir: dir, processes: map[string]*process{}, without: map[string]string{}, upgrade: c.upgrade}
	if err := s.build(ctx); err != nil {
		return s, err
	}
	switch c.upgrade {
	case toVersion:
		var commit string
		if s.old, commit, err = s.buildOld(ctx, c.old); err != nil {
			return s, err
		}
		say("the earlier version is that of commit %s", commit)
	case toFold:
		if s.next, err = s.buildFold(ctx); err != nil {
			return s, err
		}
	}
	s.net = &proxies{}
	where := "TCP proxies on loopback"
	if alone() {
		if n, err := newNetwork(); err == nil {
			s.net, where = &namespaces{n}, "a network namespace for each process"
		} else {
			where += fmt.Sprintf(" (no namespaces: %v)", err)
			if err := tools("ip link set lo up"); err != nil {
				return s, err
			}
		}
	}
	say("between the processes: %s", where)
	if err := s.lay(c.seed%syncEvery == 0); err != nil {
		return s, err
	}
	return s, s.disks(say)
}

// build builds the programs where the next run finds them: nothing is linked twice.
func (s *stack) build(ctx context.Context) error {
	root, err := harness.RepoRoot()
	if err != nil {
		return err
	}
	s.programs = filepath.Join(root, "bin", "faults-programs")
	if harness.Race() {
		s.programs += "-race"
	}
	if err := os.MkdirAll(s.programs, 0o755); err != nil {
		return err
	}
	packages := []string{"./cmd/appender", "./cmd/projector", "./test/e2e/harness/natsd"}
	overlay, err := clockOverlay(s.programs)
	if err == nil {
		packages = append([]string{"-overlay", overlay}, packages...)
	} else {
		s.without[misdated] = err.Error()
	}
	return load.Build(ctx, s.programs, packages...)
}

// syncEvery is of how many seeds one has servers sync each write; those of the others sync each second.
const syncEvery = 4

// disks gives each server a disk, where that can be had.
func (s *stack) disks(say func(string, ...any)) error {
	for _, name := range serverNames {
		p := s.processes[name]
		err := errors.New("needs root on Linux, and not -plain")
		if alone() {
			p.disk, err = newDisk(p.store, filepath.Join(s.dir, "disk-"+name))
		}
		if err != nil {
			s.without[full], s.without[sluggish] = err.Error(), err.Error()
			say("servers have no disks of their own: %v", err)
			return nil
		}
		if err := p.disk.check(); err != nil {
			s.without[sluggish] = err.Error()
		}
	}
	say("each server has a disk of its own, of %d MiB", diskMiB)
	return nil
}

// lay makes a way for each pair of servers and direction, and for each program and server.
func (s *stack) lay(syncAlways bool) error {
	names := programNames
	if s.upgrade == toFold {
		names = append(slices.Clone(names), nextNames...)
	}
	free, err := load.FreeAddresses(3*3 + len(names))
	if err != nil {
		return err
	}
	var routes [3]string
	for i, name := range serverNames {
		host, within, err := s.net.place(name)
		if err != nil {
			return err
		}
		s.clients[i], routes[i], s.monitors[i] = host+":"+port(free[i]), host+":"+port(free[3+i]), host+":"+port(free[6+i])
		store := filepath.Join(s.dir, "store-"+name)
		p := s.add(name, within, "natsd", "-verbose", "-no-gossip", "-name", name, "-host", host, "-port", port(s.clients[i]), "-cluster-port", port(routes[i]), "-http-port", port(s.monitors[i]), "-store", store)
		p.store = store
		if syncAlways {
			p.Line = append(p.Line, "-sync-always")
		}
	}
	for i, from := range serverNames {
		var urls []string
		for j, to := range serverNames {
			if i == j {
				continue
			}
			addr, err := s.net.way(routes[j], s.processes[from], s.processes[to])
			if err != nil {
				return err
			}
			urls = append(urls, "nats://"+addr)
		}
		p := s.processes[from]
		p.Line = append(p.Line, "-routes", strings.Join(urls, ","))
	}
	for i, name := range names {
		program := map[byte]string{'a': "appender", 'p': "projector", 'q': "projector"}[name[0]]
		host, within, err := s.net.place(name)
		if err != nil {
			return err
		}
		listen := host + ":" + port(free[9+i])
		p := s.add(name, within, program, "serve", "--listen", listen, "--insecure-no-auth", "--replicas", "3", "--log-level", "warn")
		p.http = "http://" + listen
		if program == "projector" {
			p.Line = append(p.Line, "--id", name)
		}
		var urls []string
		for j, to := range serverNames {
			addr, err := s.net.way(s.clients[j], p, s.processes[to])
			if err != nil {
				return err
			}
			urls = append(urls, "nats://"+addr)
		}
		p.Line = append(p.Line, "--nats", strings.Join(urls, ","))
		if s.upgrade == toVersion {
			p.use(s.old)
		}
	}
	return nil
}

func (s *stack) add(name string, within []string, program string, args ...string) *process {
	line := append(append(slices.Clone(within), s.program(program)), args...)
	p := &process{Process: load.NewProcess(name, s.dir, line, noSpace), at: len(within)}
	s.processes[name], s.names = p, append(s.names, name)
	return p
}

func port(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }

// program is the path of one that was built.
func (s *stack) program(name string) string { return filepath.Join(s.programs, name) }

// direct are the servers' URLs without links.
func (s *stack) direct() string { return "nats://" + strings.Join(s.clients[:], ",nats://") }

// start starts the servers, then the programs.
func (s *stack) start(ctx context.Context) error {
	for _, name := range serverNames {
		if err := s.processes[name].launch(0); err != nil {
			return err
		}
	}
	for _, name := range serverNames {
		if err := s.processes[name].Ready(ctx); err != nil {
			return err
		}
	}
	if err := s.leader(ctx); err != nil {
		return err
	}
	for _, name := range programNames {
		p := s.processes[name]
		if err := p.launch(0); err != nil {
			return err
		}
		if err := p.Ready(ctx); err != nil {
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
	for late := time.Now().Add(load.StartTime); ; {
		one, cancel := context.WithTimeout(ctx, 2*time.Second)
		info, err := js.AccountInfo(one)
		cancel()
		if err == nil && info != nil {
			return nil
		}
		if time.Now().After(late) || !load.Wait(ctx, 200*time.Millisecond) {
			return fmt.Errorf("the cluster has no leader: %w", err)
		}
	}
}

// close ends all processes, programs before servers, and removes what was made.
func (s *stack) close(of *suite) error {
	var errs []error
	for i := len(s.names) - 1; i >= 0; i-- {
		p := s.processes[s.names[i]]
		if !p.Launched() {
			continue
		}
		errs = append(errs, p.Term())
		p.CheckTroubles(of.Tally)
		of.keep(map[string]string{p.Name: p.Stderr.String()})
	}
	if s.net != nil {
		s.net.close()
	}
	for _, p := range s.processes {
		if p.disk != nil {
			errs = append(errs, p.disk.close())
		}
	}
	return errors.Join(append(errs, os.RemoveAll(s.dir))...)
}

// process is a program or server with what it suffers from.
type process struct {
	*load.Process
	at    int     // of the program in its command line
	store string  // directory of a server's store
	disk  *disk   // nil when it has none of its own
	http  string  // base URL of its API
	links []*link // of proxies
	noted int64   // how often it had said noSpace before its disk was filled

	trouble sync.Mutex // held by the fault that it suffers
}

// launch starts the process with a clock that is off and does not wait until it is ready.
func (p *process) launch(clock time.Duration) error {
	return p.Launch(fmt.Sprintf("%s=%d", clockEnv, int(clock.Seconds())))
}

// noSpace is what a server says whose disk is full.
const noSpace = "no space left on device"
