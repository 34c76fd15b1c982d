// Package rig is what the benchmarks share: their command line, one server on a store of its own
// with a program's connections, profiles, and the medians that they print. It knows nothing of
// what is measured.
package rig

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"time"

	"github.com/alecthomas/kong"
	"github.com/nats-io/nats.go"

	"palimpsest/internal/platform"
)

// Parse reads a command line into b; name is that of the folder below bench/.
func Parse(b any, name, about string, args []string, stdout, stderr io.Writer) error {
	k, err := kong.New(b, kong.Name(name), kong.Writers(stdout, stderr), kong.Description(about))
	if err != nil {
		return err
	}
	if _, err := k.Parse(args); err != nil {
		return Usage(fmt.Errorf("%w; go run ./bench/%s --help shows what there is", err, name))
	}
	return nil
}

// Usage is an error of whoever wrote the command line.
func Usage(err error) error { return &platform.ExitError{Code: platform.ExitUsage, Err: err} }

// Server is one server and a program's connections to it, over loopback TCP as it would be between
// processes.
type Server struct {
	URL   string
	Conns *platform.Conns

	dir  string
	stop []func(context.Context) error // in the order of start
}

// stopWithin bounds stopping all.
const stopWithin = 30 * time.Second

// Start starts a server on a store in a new temporary directory, and connects to it. name is that
// of the connections.
func Start(ctx context.Context, name string, d platform.Durability) (s *Server, err error) {
	s = &Server{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.Close())
		}
	}()
	if s.dir, err = os.MkdirTemp("", "palimpsest-bench-"); err != nil {
		return nil, err
	}
	server, err := platform.StartServer(platform.EmbedConfig{DataDir: s.dir, Listen: "127.0.0.1:0", Durability: d})
	if err != nil {
		return nil, err
	}
	s.OnStop(server.Shutdown)
	s.URL = server.ClientURL()
	if s.Conns, err = platform.ConnectAll(ctx, platform.ConnsConfig{ConnConfig: platform.ConnConfig{URL: s.URL, Name: name}}); err != nil {
		return nil, err
	}
	s.OnStop(s.Conns.Close)
	return s, nil
}

// OnStop has f called by Close, before all that was there already is stopped.
func (s *Server) OnStop(f func(context.Context) error) { s.stop = append(s.stop, f) }

// Connect opens a connection as a client would, with nats.go's defaults.
func (s *Server) Connect() (*nats.Conn, error) {
	nc, err := nats.Connect(s.URL, nats.Name("bench-client"))
	if err != nil {
		return nil, err
	}
	s.OnStop(func(context.Context) error { nc.Close(); return nil })
	return nc, nil
}

// Close stops all, the last started first, and removes the store.
func (s *Server) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopWithin)
	defer cancel()
	var errs []error
	for i := len(s.stop) - 1; i >= 0; i-- {
		errs = append(errs, s.stop[i](ctx))
	}
	s.stop = nil
	if s.dir != "" {
		errs = append(errs, os.RemoveAll(s.dir))
	}
	return errors.Join(errs...)
}

// Profiles are the files that take the profiles of a run; "" is none.
type Profiles struct{ CPU, Mem string }

// Wanted reports whether there are any.
func (p Profiles) Wanted() bool { return p.CPU != "" || p.Mem != "" }

// Hold turns the sampling of allocations off, so that what comes before Run is not in the profile.
func (p Profiles) Hold() {
	if p.Mem != "" {
		runtime.MemProfileRate = 0
	}
}

// Run runs f under the profilers.
func (p Profiles) Run(f func() error) (err error) {
	if p.Mem != "" {
		runtime.MemProfileRate = 16 << 10
	}
	if p.CPU != "" {
		out, err := os.Create(p.CPU)
		if err != nil {
			return err
		}
		defer out.Close()
		if err := pprof.StartCPUProfile(out); err != nil {
			return err
		}
	}
	err = f()
	pprof.StopCPUProfile()
	if err != nil || p.Mem == "" {
		return err
	}
	out, err := os.Create(p.Mem)
	if err != nil {
		return err
	}
	runtime.GC() // what was allocated since the last one is not in the profile yet
	return errors.Join(pprof.Lookup("allocs").WriteTo(out, 0), out.Close())
}

// Median is that of one number of each sample.
func Median[T any](all []T, of func(T) float64) float64 {
	v := make([]float64, len(all))
	for i, s := range all {
		v[i] = of(s)
	}
	slices.Sort(v)
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

// Us is a duration in microseconds.
func Us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

// Round rounds to so many parts of one.
func Round(v, parts float64) float64 { return float64(int64(v*parts+0.5)) / parts }
