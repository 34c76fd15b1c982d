package harness

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const clusterSize = 3

// Cluster is three NATS servers, each a process of its own.
type Cluster struct {
	URL string // of all servers, with commas between them

	servers map[string]*clusterServer
}

type clusterServer struct {
	args []string
	p    *Process
}

// StartCluster runs a cluster until the test ends and waits until it has a leader.
func StartCluster(t testing.TB) *Cluster {
	t.Helper()
	c := &Cluster{servers: map[string]*clusterServer{}}
	ports := FreePorts(t, 2*clusterSize)
	var urls, routes []string
	for i := range clusterSize {
		urls = append(urls, fmt.Sprintf("nats://127.0.0.1:%d", ports[2*i]))
		routes = append(routes, fmt.Sprintf("nats://127.0.0.1:%d", ports[2*i+1]))
	}
	c.URL = strings.Join(urls, ",")
	for i := range clusterSize {
		name := fmt.Sprintf("n%d", i)
		c.servers[name] = &clusterServer{args: []string{
			"-name", name, "-port", fmt.Sprint(ports[2*i]), "-cluster-port", fmt.Sprint(ports[2*i+1]),
			"-routes", strings.Join(slices.Delete(slices.Clone(routes), i, i+1), ","), "-store", filepath.Join(t.TempDir(), name),
		}}
		c.Up(t, name)
	}
	js := c.client(t)
	Until(t, time.Minute, "the cluster has a leader", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		_, err := js.AccountInfo(ctx)
		return err
	})
	return c
}

// FreePorts answers ports of loopback on which nobody listens.
func FreePorts(t testing.TB, n int) []int {
	t.Helper()
	var ports []int
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close() // behind the loop, so that no port comes twice
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports
}

func (c *Cluster) client(t testing.TB) jetstream.JetStream {
	t.Helper()
	nc, err := nats.Connect(c.URL, nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return js
}

// Up starts a server that is down, on its store and ports.
func (c *Cluster) Up(t testing.TB, name string) {
	t.Helper()
	s := c.servers[name]
	s.p = start(t, "natsd", s.args...)
}

// Kill ends a server with SIGKILL.
func (c *Cluster) Kill(name string) { c.servers[name].p.Kill() }

// Leader waits until the stream of the log has a leader, all of its replicas are in step with
// it, and answers its name.
func (c *Cluster) Leader(t testing.TB) string {
	t.Helper()
	js := c.client(t)
	var leader string
	Until(t, time.Minute, "the stream has a leader and current replicas", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		s, err := js.Stream(ctx, Stream)
		if err != nil {
			return err
		}
		info := s.CachedInfo().Cluster
		if info == nil || info.Leader == "" || len(info.Replicas) != clusterSize-1 {
			return fmt.Errorf("cluster of the stream: %+v", info)
		}
		for _, r := range info.Replicas {
			if r.Offline || !r.Current {
				return fmt.Errorf("replica %+v is not in step", r)
			}
		}
		leader = info.Leader
		return nil
	})
	return leader
}
