package main

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/test/e2e/harness"
)

// target is what clients work on and what is checked then: processes of this machine, or containers.
type target interface {
	// writes and reads are the base URLs that clients know, of appenders and of projectors.
	writes() []string
	reads() []string
	// served are the projectors, one by one.
	served(context.Context) ([]*harness.Client, error)
	// nats is the URL of the servers.
	nats(context.Context) (string, error)
	// streams are all that there are on the servers.
	streams(context.Context, jetstream.JetStream) ([]*jetstream.StreamInfo, error)
	// states are what the servers tell of themselves, for whoever looks for the cause of a finding.
	states(context.Context) map[string]string
	// program is the path of a program, for commands.
	program(name string) string
}

// bases are the base URLs of the programs whose names begin with a letter.
func (s *stack) bases(letter byte) (out []string) {
	for _, name := range programNames {
		if name[0] == letter {
			out = append(out, s.processes[name].http)
		}
	}
	return out
}

func (s *stack) writes() []string { return s.bases('a') }
func (s *stack) reads() []string  { return s.bases('p') }

func (s *stack) served(context.Context) (out []*harness.Client, err error) {
	for _, base := range s.reads() {
		out = append(out, harness.NewClient(base))
	}
	return out, nil
}

func (s *stack) nats(context.Context) (string, error) { return s.direct(), nil }

func (s *stack) streams(ctx context.Context, js jetstream.JetStream) (out []*jetstream.StreamInfo, err error) {
	l := js.ListStreams(ctx)
	for info := range l.Info() {
		out = append(out, info)
	}
	return out, l.Err()
}

func (s *stack) states(ctx context.Context) map[string]string {
	out := map[string]string{}
	for i, name := range serverNames {
		for _, page := range []string{"raftz", "jsz?streams=true&raft=true"} {
			c := harness.NewClient("http://" + s.monitors[i])
			one, cancel := context.WithTimeout(ctx, 5*time.Second)
			a, err := c.Do(one, http.MethodGet, "/"+page, nil)
			cancel()
			what, _, _ := strings.Cut(page, "?")
			out[name+"-"+what] = string(a.Body)
			if err != nil {
				out[name+"-"+what] = err.Error()
			}
		}
	}
	return out
}
