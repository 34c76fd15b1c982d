package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
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

const (
	// composeProject is the name of the project, so that no other stack of this machine is touched.
	composeProject = "palimpsest-try"
	upTime         = 2 * time.Minute  // until the stack, or a part that came back, is ready
	dockerTime     = 2 * time.Minute  // for one command
	cutOffTime     = 20 * time.Second // for which a server is without its network
	// clientsEach is how many clients there are of each published port: each keeps its connections, and
	// the balancer gives each connection to one program.
	clientsEach = 4
)

// errNoEngine says that there is nothing to run containers with.
var errNoEngine = errors.New("no container engine")

// buckets and streams of the stack, whose operator may not list them.
var composeStreams = []string{harness.Stream, "KV_HEADERS", "KV_SURFACES", "KV_CHECKPOINTS", "KV_WORKERS", "KV_QUARANTINE", "KV_GENERATIONS"}

// composed is the stack of deploy/compose.yaml, of images that were built here.
type composed struct {
	programs   string
	command    []string // docker compose, whichever there is, with the project and its file
	env        []string
	api        [2]string // published addresses of appenders and projectors
	projectors int       // how many there should be
}

// newComposed finds an engine and builds what checks need. Nothing runs yet.
func newComposed(ctx context.Context) (*composed, error) {
	root, err := harness.RepoRoot()
	if err != nil {
		return nil, err
	}
	c := &composed{programs: filepath.Join(root, "bin", "faults-programs-compose"), env: load.Environment(), projectors: 2}
	if _, err := c.docker(ctx, "info"); err != nil {
		return nil, fmt.Errorf("%w answers: %w (Debian: apt-get install docker.io docker-compose; dockerd &)", errNoEngine, err)
	}
	if _, err := c.docker(ctx, "compose", "version"); err == nil {
		c.command = []string{"docker", "compose"}
	} else if _, err := exec.LookPath("docker-compose"); err == nil {
		c.command = []string{"docker-compose"}
	} else {
		return nil, fmt.Errorf("%w: neither docker compose nor docker-compose is there", errNoEngine)
	}
	c.command = append(c.command, "-p", composeProject, "-f", filepath.Join(root, "deploy", "compose.yaml"))
	free, err := load.FreeAddresses(2)
	if err != nil {
		return nil, err
	}
	copy(c.api[:], free)
	c.env = append(c.env, "NATS_IMAGE=palimpsest/nats", "APPENDER_PORT="+port(free[0]), "PROJECTOR_PORT="+port(free[1]))
	if err := os.MkdirAll(c.programs, 0o755); err != nil {
		return nil, err
	}
	return c, load.Build(ctx, c.programs, "./cmd/projector")
}

// run runs a command and returns what it printed.
func (c *composed) run(ctx context.Context, line ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, dockerTime)
	defer cancel()
	cmd := exec.CommandContext(ctx, line[0], line[1:]...)
	cmd.Env = c.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %.2000s", strings.Join(line, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

func (c *composed) docker(ctx context.Context, args ...string) (string, error) {
	return c.run(ctx, append([]string{"docker"}, args...)...)
}

func (c *composed) compose(ctx context.Context, args ...string) error {
	_, err := c.run(ctx, append(slices.Clone(c.command), args...)...)
	return err
}

// containers are the ids of a service's containers, of those that run unless all are asked for; ""
// stands for any service.
func (c *composed) containers(ctx context.Context, service string, all bool) ([]string, error) {
	args := []string{"ps", "-q", "--filter", "label=com.docker.compose.project=" + composeProject}
	if service != "" {
		args = append(args, "--filter", "label=com.docker.compose.service="+service)
	}
	if all {
		args = append(args, "-a")
	}
	out, err := c.docker(ctx, args...)
	return strings.Fields(out), err
}

// container is one of them.
func (c *composed) container(ctx context.Context, service string) (string, error) {
	ids, err := c.containers(ctx, service, true)
	if err == nil && len(ids) == 0 {
		err = fmt.Errorf("there is no container of %s", service)
	}
	if err != nil {
		return "", err
	}
	return ids[0], nil
}

// addresses are those of a service's containers that run, on the network of the stack: this machine is
// on it too.
func (c *composed) addresses(ctx context.Context, service string) (out []string, err error) {
	ids, err := c.containers(ctx, service, false)
	if err != nil {
		return nil, err
	}
	for _, id := range ids {
		addr, err := c.docker(ctx, "inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}", id)
		if err != nil {
			return nil, err
		}
		out = append(out, strings.Fields(addr)...)
	}
	return out, nil
}

// times is a URL as often as there are clients of it.
func times(addr string) []string { return slices.Repeat([]string{"http://" + addr}, clientsEach) }

func (c *composed) writes() []string { return times(c.api[0]) }
func (c *composed) reads() []string  { return times(c.api[1]) }

func (c *composed) served(ctx context.Context) (out []*harness.Client, err error) {
	addresses, err := c.addresses(ctx, "projector")
	if err == nil && len(addresses) != c.projectors {
		err = fmt.Errorf("%d projectors run, expected %d", len(addresses), c.projectors)
	}
	for _, addr := range addresses {
		out = append(out, harness.NewClient("http://"+addr+":8081"))
	}
	return out, err
}

func (c *composed) nats(ctx context.Context) (string, error) {
	var urls []string
	for _, service := range composeServers {
		addresses, err := c.addresses(ctx, service)
		if err != nil {
			return "", err
		}
		for _, addr := range addresses {
			urls = append(urls, "nats://operator:operator-password@"+addr+":4222")
		}
	}
	if len(urls) == 0 {
		return "", errors.New("no NATS server runs")
	}
	return strings.Join(urls, ","), nil
}

var composeServers = []string{"nats-1", "nats-2", "nats-3"}

func (*composed) streams(ctx context.Context, js jetstream.JetStream) (out []*jetstream.StreamInfo, err error) {
	for _, name := range composeStreams {
		st, err := js.Stream(ctx, name)
		if err != nil {
			return nil, fmt.Errorf("stream %s: %w", name, err)
		}
		out = append(out, st.CachedInfo())
	}
	return out, nil
}

// states are in the containers, whose monitoring listens to nobody outside.
func (*composed) states(context.Context) map[string]string { return nil }

func (c *composed) program(name string) string { return filepath.Join(c.programs, name) }

// ready waits until what stands behind the published ports is ready.
func (c *composed) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, upTime)
	defer cancel()
	for _, addr := range c.api {
		for client := harness.NewClient("http://" + addr); ; {
			a, err := client.Do(ctx, http.MethodGet, "/readyz", nil)
			if err == nil && a.Status == http.StatusOK {
				break
			}
			if !load.Wait(ctx, 500*time.Millisecond) {
				return fmt.Errorf("%s is not ready within %v: %d %.300s: %w", addr, upTime, a.Status, a.Body, errors.Join(err, ctx.Err()))
			}
		}
	}
	return nil
}

// logs are what the containers said, by their names.
func (c *composed) logs(ctx context.Context) (map[string]string, error) {
	names, err := c.docker(ctx, "ps", "-a", "--format", "{{.Names}}", "--filter", "label=com.docker.compose.project="+composeProject)
	out := map[string]string{}
	for _, name := range strings.Fields(names) {
		var lerr error
		out[name], lerr = c.docker(ctx, "logs", name)
		err = errors.Join(err, lerr)
	}
	return out, err
}

// down takes the stack away, with all that it stored. Before that it looks at what the programs said.
func (c *composed) down(s *suite) error {
	ctx := context.Background() // whatever became of the run
	logs, err := c.logs(ctx)
	s.keep(logs)
	for name, text := range logs {
		for _, trouble := range load.Troubles {
			if i := strings.Index(text, trouble); i >= 0 {
				s.Finding("container %s said %.2000s", name, text[i:])
			}
		}
	}
	return errors.Join(err, c.compose(ctx, "down", "-v", "--remove-orphans"))
}

// runCompose brings the stack up, takes parts of it away while clients work on it, and checks.
func (s *suite) runCompose(ctx context.Context) error {
	c, err := newComposed(ctx)
	if err != nil {
		return err
	}
	s.target = c
	defer func() {
		if err := c.down(s); err != nil {
			s.Finding("%v", err)
		}
	}()
	if err := c.compose(ctx, "up", "-d"); err != nil {
		return err
	}
	if err := c.ready(ctx); err != nil {
		return err
	}
	s.say("the stack runs; %d callers on %d sessions", s.workers, s.sessions)
	return s.under(ctx, func(ctx context.Context) error { return s.takeApart(ctx, c) })
}

// takeApart does one fault after the other. After each, clients must get on.
func (s *suite) takeApart(ctx context.Context, c *composed) error {
	s.getOn(ctx)
	leader, err := s.leaderOf(ctx, harness.Stream)
	if err != nil {
		return err
	}
	for _, victim := range []struct{ what, service string }{{"leader of the log", leader}, {"an appender", "appender"}} {
		if err := s.killed(ctx, c, victim.what, victim.service, true); err != nil {
			return err
		}
	}
	if err := s.killed(ctx, c, "a projector", "projector", false); err != nil {
		return err
	}
	for _, n := range []int{1, 3} {
		s.say("scale to %d projectors", n)
		if err := c.compose(ctx, "up", "-d", "--no-recreate", "--scale", fmt.Sprintf("projector=%d", n)); err != nil {
			return err
		}
		c.projectors = n
		s.Add(fmt.Sprintf("fault: scale to %d projectors", n), 1)
		s.getOn(ctx)
	}
	victim := composeServers[2]
	s.say("%s without its network for %v", victim, cutOffTime)
	id, err := c.container(ctx, victim)
	if err != nil {
		return err
	}
	network := composeProject + "_palimpsest"
	if _, err := c.docker(ctx, "network", "disconnect", network, id); err != nil {
		return err
	}
	s.Add("fault: a server without its network", 1)
	back := time.Now().Add(cutOffTime)
	s.getOn(ctx)
	load.Wait(ctx, time.Until(back))
	if _, err := c.docker(ctx, "network", "connect", "--alias", victim, network, id); err != nil {
		return err
	}
	s.getOn(ctx)
	return c.ready(ctx)
}

// getOn waits until clients got more done, and says how long that took.
func (s *suite) getOn(ctx context.Context) {
	begun := time.Now()
	s.progress(ctx)
	s.say("clients got on within %v", time.Since(begun).Round(time.Millisecond))
}

// killed kills one container of a service, lets clients get on without it, and starts it again.
func (s *suite) killed(ctx context.Context, c *composed, what, service string, again bool) error {
	id, err := c.container(ctx, service)
	if err != nil {
		return err
	}
	s.say("kill %s (%s)", what, service)
	if _, err := c.docker(ctx, "kill", id); err != nil {
		return err
	}
	s.Add("fault: kill "+what, 1)
	s.getOn(ctx)
	if again {
		_, err = c.docker(ctx, "start", id)
	}
	return err
}

// leaderOf is the name of the server that leads a stream.
func (s *suite) leaderOf(ctx context.Context, stream string) (string, error) {
	nc, js, err := s.connect(ctx)
	if err != nil {
		return "", err
	}
	defer nc.Close()
	st, err := js.Stream(ctx, stream)
	if err != nil {
		return "", fmt.Errorf("stream %s: %w", stream, err)
	}
	if c := st.CachedInfo().Cluster; c != nil && slices.Contains(composeServers, c.Leader) {
		return c.Leader, nil
	}
	return "", fmt.Errorf("stream %s has no leader: %+v", stream, st.CachedInfo().Cluster)
}
