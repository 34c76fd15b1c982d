package platform

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

func TestConnectByTCPAndInProcess(t *testing.T) {
	t.Parallel()
	s := startEmbedded(t, EmbedConfig{})
	for name, cfg := range map[string]ConnConfig{"tcp": {URL: s.ClientURL()}, "in process": {InProcess: s}} {
		t.Run(name, func(t *testing.T) {
			cfg.Made = &atomic.Uint64{}
			nc := connect(t, cfg)
			if cfg.Made.Load() != 1 {
				t.Errorf("made %d times, want once", cfg.Made.Load())
			}
			sub, err := nc.SubscribeSync("echo")
			if err != nil {
				t.Fatal(err)
			}
			if err := nc.Publish("echo", []byte("hello")); err != nil {
				t.Fatal(err)
			}
			if msg, err := sub.NextMsgWithContext(testContext(t)); err != nil || string(msg.Data) != "hello" {
				t.Errorf("got %v, %v", msg, err)
			}
			if nc.Opts.Name != program() {
				t.Errorf("name %q", nc.Opts.Name)
			}
		})
	}
}

func TestConnectWaitsForAServerThatStartsLater(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0") // finds a port, and refuses NATS clients until it is closed
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	accepted := make(chan struct{})
	go func() {
		defer close(accepted)
		if conn, err := ln.Accept(); err == nil {
			conn.Close()
		}
		ln.Close()
	}()
	connected := make(chan error, 1)
	go func() {
		nc, err := Connect(testContext(t), ConnConfig{URL: "nats://" + addr})
		if err == nil {
			nc.Close()
		}
		connected <- err
	}()
	await(t, "the first attempt", accepted)
	startEmbedded(t, EmbedConfig{Listen: addr})
	if err := await(t, "the connection", connected); err != nil {
		t.Errorf("Connect = %v", err)
	}
}

func TestConnectGivesUp(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	nobody := ln.Addr().String()
	ln.Close()

	_, err = Connect(testContext(t), ConnConfig{URL: "nats://user:secret@" + nobody, ConnectWait: 10 * time.Millisecond})
	if err == nil || !strings.Contains(err.Error(), "no NATS server at nats://"+nobody+" within 10ms") || strings.Contains(err.Error(), "secret") {
		t.Errorf("Connect = %v", err)
	}
	if !errors.Is(err, nats.ErrNoServers) {
		t.Errorf("%v does not wrap the client's error", err)
	}

	ctx, cancel := context.WithCancelCause(testContext(t))
	cancel(ErrStopping)
	if _, err := Connect(ctx, ConnConfig{URL: "nats://" + nobody}); !errors.Is(err, ErrStopping) {
		t.Errorf("Connect while stopping = %v", err)
	}
}

func TestConnectDoesNotRetryRefusedCredentials(t *testing.T) {
	t.Parallel()
	s := startPlain(t, &server.Options{Authorization: "right"})
	begin := time.Now()
	_, err := Connect(testContext(t), ConnConfig{URL: strings.Replace(s.ClientURL(), "nats://", "nats://wrong@", 1), ConnectWait: testDeadline})
	if !errors.Is(err, nats.ErrAuthorization) || strings.Contains(err.Error(), "wrong@") {
		t.Errorf("Connect = %v", err)
	}
	if took := time.Since(begin); took > testDeadline/2 {
		t.Errorf("gave up after %s", took)
	}
}

// startPlain starts a nats-server as somebody else would run it.
func startPlain(t *testing.T, opts *server.Options) *server.Server {
	t.Helper()
	if opts.Port == 0 {
		opts.Host, opts.Port = "127.0.0.1", server.RANDOM_PORT
	}
	opts.NoSigs, opts.NoLog = true, true
	ns, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	t.Cleanup(func() {
		ns.Shutdown()
		ns.WaitForShutdown()
	})
	return ns
}

func TestConnectReadsItsFilesFirst(t *testing.T) {
	t.Parallel()
	missing := filepath.Join(t.TempDir(), "missing")
	for name, cfg := range map[string]ConnConfig{
		"credentials": {CredsFile: missing},
		"nkey":        {NKeyFile: missing},
		"CA":          {CAFile: missing},
		"certificate": {CertFile: missing, KeyFile: missing},
	} {
		cfg.URL, cfg.ConnectWait = "nats://127.0.0.1:1", testDeadline
		if _, err := Connect(testContext(t), cfg); err == nil || !strings.Contains(err.Error(), missing) {
			t.Errorf("%s: Connect = %v, want the missing file named", name, err)
		}
	}
}

func TestConnectionOutlivesItsServer(t *testing.T) {
	t.Parallel()
	var log logBuffer
	var made atomic.Uint64
	cfg := EmbedConfig{DataDir: t.TempDir()}
	s := startEmbedded(t, cfg)
	cfg.Listen = strings.TrimPrefix(s.ClientURL(), "nats://")
	nc := connect(t, ConnConfig{URL: s.ClientURL(), Name: "survivor", Made: &made, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	status := nc.StatusChanged(nats.RECONNECTING, nats.CONNECTED)
	if err := s.Shutdown(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if got := await(t, "the disconnect", status); got != nats.RECONNECTING {
		t.Fatalf("status %s", got)
	}
	if made.Load() != 1 {
		t.Errorf("made %d times while no server is there, want once", made.Load())
	}
	startEmbedded(t, cfg)
	if got := await(t, "the reconnect", status); got != nats.CONNECTED {
		t.Fatalf("status %s", got)
	}
	if made.Load() != 2 {
		t.Errorf("made %d times, want twice", made.Load())
	}
	eventually(t, "both log records", func() bool {
		return strings.Contains(log.String(), "NATS disconnected, reconnecting") && strings.Contains(log.String(), "NATS reconnected")
	})
	if !strings.Contains(log.String(), "connection=survivor") {
		t.Errorf("log %q does not name the connection", log.String())
	}
}

func TestAsynchronousErrorsAreLoggedOncePerPeriod(t *testing.T) {
	t.Parallel()
	var f repeatFilter
	now := time.Now()
	slow, denied := errors.New("slow consumer"), errors.New("permissions violation")
	for _, c := range []struct {
		err  error
		at   time.Duration
		pass bool
	}{
		{slow, 0, true},
		{slow, time.Second, false},
		{denied, 2 * time.Second, true},
		{denied, 3 * time.Second, false},
		{denied, 2*time.Second + sameErrorEvery, true},
	} {
		if got := f.pass(c.err, now.Add(c.at)); got != c.pass {
			t.Errorf("%v after %s: logged %t, want %t", c.err, c.at, got, c.pass)
		}
	}
}

func TestDrainWorksOffWhatArrived(t *testing.T) {
	t.Parallel()
	s := startEmbedded(t, EmbedConfig{})
	nc := connect(t, ConnConfig{URL: s.ClientURL()})
	entered, release := make(chan struct{}), make(chan struct{})
	var handled int
	if _, err := nc.Subscribe("work", func(*nats.Msg) {
		if handled == 0 {
			close(entered)
			<-release
		}
		handled++
	}); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if err := nc.Publish("work", nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.FlushWithContext(testContext(t)); err != nil {
		t.Fatal(err)
	}
	await(t, "the first message", entered)
	draining := nc.StatusChanged(nats.DRAINING_SUBS)
	drained := make(chan error, 1)
	go func() { drained <- Drain(testContext(t), nc) }()
	await(t, "the drain to begin", draining)
	close(release)
	if err := await(t, "the drain", drained); err != nil {
		t.Errorf("Drain = %v", err)
	}
	if handled != 5 {
		t.Errorf("%d messages were handled, want 5", handled)
	}
	for _, closed := range []*nats.Conn{nc, nil} {
		if err := Drain(testContext(t), closed); err != nil {
			t.Errorf("Drain of a closed connection = %v", err)
		}
	}
}

func TestDrainWhoseTimeIsUpClosesTheConnection(t *testing.T) {
	t.Parallel()
	s := startEmbedded(t, EmbedConfig{})
	nc := connect(t, ConnConfig{URL: s.ClientURL()})
	entered, release := make(chan struct{}), make(chan struct{})
	if _, err := nc.Subscribe("work", func(*nats.Msg) { close(entered); <-release }); err != nil {
		t.Fatal(err)
	}
	if err := nc.Publish("work", nil); err != nil {
		t.Fatal(err)
	}
	await(t, "the message", entered)
	over, cancel := context.WithCancel(testContext(t))
	cancel()
	if err := Drain(over, nc); !errors.Is(err, context.Canceled) {
		t.Errorf("Drain = %v", err)
	}
	close(release)
	if !nc.IsClosed() {
		t.Error("the connection is still open")
	}
}

func TestDrainWithoutAServerSaysWhatWasNotSent(t *testing.T) {
	t.Parallel()
	for name, publish := range map[string]bool{"nothing to send": false, "something to send": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startEmbedded(t, EmbedConfig{})
			nc := connect(t, ConnConfig{URL: s.ClientURL()})
			reconnecting := nc.StatusChanged(nats.RECONNECTING)
			if err := s.Shutdown(testContext(t)); err != nil {
				t.Fatal(err)
			}
			await(t, "the disconnect", reconnecting)
			if publish {
				if err := nc.Publish("lost", []byte("words")); err != nil {
					t.Fatal(err)
				}
			}
			err := Drain(testContext(t), nc)
			if publish != (err != nil) || (publish && !strings.Contains(err.Error(), "were not sent")) {
				t.Errorf("Drain = %v", err)
			}
			if !nc.IsClosed() {
				t.Error("the connection is still open")
			}
		})
	}
}

func TestConnsAreSeparateAndCloseTogether(t *testing.T) {
	t.Parallel()
	s := startEmbedded(t, EmbedConfig{})
	conns, err := ConnectAll(testContext(t), ConnsConfig{ConnConfig: ConnConfig{URL: s.ClientURL(), Name: "appender"}})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, nc := range conns.all() {
		names = append(names, nc.Opts.Name)
	}
	if got := strings.Join(names, " "); got != "appender/publish-0 appender/publish-1 appender/kv" {
		t.Errorf("connections %q", got)
	}
	if got := conns.Made.Load(); got != 3 {
		t.Errorf("%d connections were counted, want 3", got)
	}
	if got := s.ns.NumClients(); got != 3 {
		t.Errorf("%d connections at the server, want 3", got)
	}
	for range 2 {
		if err := conns.Close(testContext(t)); err != nil {
			t.Errorf("Close = %v", err)
		}
	}
	for _, nc := range conns.all() {
		if !nc.IsClosed() {
			t.Errorf("%s is still open", nc.Opts.Name)
		}
	}
	var never *Conns
	if err := never.Close(testContext(t)); err != nil {
		t.Errorf("Close of nil = %v", err)
	}
}

func TestConnectAllLeavesNothingOpenWhenOneFails(t *testing.T) {
	t.Parallel()
	s := startPlain(t, &server.Options{MaxConn: 2})
	_, err := ConnectAll(testContext(t), ConnsConfig{ConnConfig: ConnConfig{URL: s.ClientURL(), ConnectWait: 10 * time.Millisecond}})
	if err == nil {
		t.Error("ConnectAll succeeded with a server that takes two connections")
	}
	eventually(t, "the connections to close", func() bool { return s.NumClients() == 0 })
}

func TestConnConfigNamesEveryMistake(t *testing.T) {
	t.Parallel()
	if err := (ConnsConfig{ConnConfig: ConnConfig{URL: "nats://h"}}).Validate(); err != nil {
		t.Errorf("the defaults are not valid: %v", err)
	}
	err := ConnsConfig{Publishers: -1, ConnConfig: ConnConfig{
		CredsFile: "c", NKeyFile: "n", CertFile: "f", ConnectWait: -1, PingInterval: -1, DrainTimeout: -1,
	}}.Validate()
	if err == nil {
		t.Fatal("nothing was found wrong")
	}
	for _, want := range []string{"publishing connections is -1", "URL is missing", "nkey n", `certificate "f"`, "connect wait", "ping interval", "drain timeout"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	for _, url := range []string{"nats://u:secret%zz@h", "http://u:secret@h", "nats://", "nats://h:1,secret@x y"} {
		if err := (ConnConfig{URL: url}).Validate(); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("URL %q: %v", url, err)
		}
	}
	for _, url := range []string{"localhost", "h:4222, tls://u:p@[::1]:4223", "wss://h"} {
		if err := (ConnConfig{URL: url}).Validate(); err != nil {
			t.Errorf("URL %q: %v", url, err)
		}
	}
	if err := (ConnConfig{URL: "nats://u:secret@h", InProcess: &Server{}}).Validate(); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("URL and in-process server: %v", err)
	}
}
