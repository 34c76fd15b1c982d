package platform

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func startEmbedded(t *testing.T, cfg EmbedConfig) *Server {
	t.Helper()
	if cfg.DataDir == "" {
		cfg.DataDir = t.TempDir()
	}
	if cfg.Listen == "" {
		cfg.Listen = "127.0.0.1:0"
	}
	s, err := StartServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Shutdown(testContext(t)); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
	})
	return s
}

func connect(t *testing.T, cfg ConnConfig) *nats.Conn {
	t.Helper()
	nc, err := Connect(testContext(t), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// fill makes a stream with n messages.
func fill(t *testing.T, s *Server, stream string, n int) {
	t.Helper()
	js := jetStream(t, s)
	ctx := testContext(t)
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: stream, Subjects: []string{stream + ".>"}}); err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if _, err := js.Publish(ctx, stream+".x", fmt.Append(nil, "message ", i)); err != nil {
			t.Fatal(err)
		}
	}
}

func jetStream(t *testing.T, s *Server) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(connect(t, ConnConfig{URL: s.ClientURL()}))
	if err != nil {
		t.Fatal(err)
	}
	return js
}

func messages(t *testing.T, s *Server, stream string) uint64 {
	t.Helper()
	info, err := jetStream(t, s).Stream(testContext(t), stream)
	if err != nil {
		t.Fatal(err)
	}
	return info.CachedInfo().State.Msgs
}

func TestServerKeepsItsStreamsAcrossARestart(t *testing.T) {
	t.Parallel()
	for _, durability := range []Durability{DurabilityInterval, DurabilityAlways} {
		t.Run(string(durability), func(t *testing.T) {
			t.Parallel()
			cfg := EmbedConfig{DataDir: filepath.Join(t.TempDir(), "made", "on", "demand"), Durability: durability}
			s := startEmbedded(t, cfg)
			fill(t, s, "KEPT", 10)
			if err := s.Healthy(); err != nil {
				t.Errorf("Healthy = %v", err)
			}
			for range 2 {
				if err := s.Shutdown(testContext(t)); err != nil {
					t.Fatalf("Shutdown = %v", err)
				}
			}
			if err := s.Healthy(); err == nil {
				t.Error("a server that is down says that it is healthy")
			}
			if got := messages(t, startEmbedded(t, cfg), "KEPT"); got != 10 {
				t.Errorf("%d messages after the restart, want 10", got)
			}
		})
	}
}

func TestServerSyncsAsConfigured(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		durability Durability
		always     bool
	}{{DurabilityInterval, false}, {DurabilityAlways, true}, {"", false}} {
		s := startEmbedded(t, EmbedConfig{Durability: c.durability})
		// From JetStream and not from the options: it keeps a configuration of its own.
		got := s.ns.JetStreamConfig()
		if got.SyncAlways != c.always || got.SyncInterval.String() != "1s" {
			t.Errorf("durability %q: sync always %t, interval %s", c.durability, got.SyncAlways, got.SyncInterval)
		}
	}
}

func TestServerLimits(t *testing.T) {
	t.Parallel()
	s := startEmbedded(t, EmbedConfig{})
	nc := connect(t, ConnConfig{URL: s.ClientURL()})
	if got := nc.MaxPayload(); got != 8<<20+64<<10 {
		t.Errorf("maximum payload %d", got)
	}
	varz, err := s.ns.Varz(nil)
	if err != nil {
		t.Fatal(err)
	}
	if varz.MaxPending != 256<<20 {
		t.Errorf("maximum pending %d", varz.MaxPending)
	}
	if nc.ConnectedServerName() != "palimpsest" {
		t.Errorf("server name %q", nc.ConnectedServerName())
	}
}

func TestDataDirectoryIsServedOnce(t *testing.T) {
	t.Parallel()
	cfg := EmbedConfig{DataDir: t.TempDir()}
	first := startEmbedded(t, cfg)
	cfg.Listen = "127.0.0.1:0"
	_, err := StartServer(cfg)
	if !errors.Is(err, ErrDataDirInUse) {
		t.Fatalf("second server on the directory: %v", err)
	}
	for _, want := range []string{cfg.DataDir, fmt.Sprint("process ", os.Getpid()), "stop that process"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	if err := first.Shutdown(testContext(t)); err != nil {
		t.Fatal(err)
	}
	startEmbedded(t, cfg) // the lock went with the server, its file is still there
}

func TestServerPortTaken(t *testing.T) {
	t.Parallel()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	cfg := EmbedConfig{DataDir: t.TempDir(), Listen: ln.Addr().String()}
	_, err = StartServer(cfg)
	if err == nil {
		t.Fatal("two listeners on one port")
	}
	for _, want := range []string{ln.Addr().String(), "address already in use", "another port"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	cfg.Listen = "127.0.0.1:0"
	startEmbedded(t, cfg) // a start that failed has let go of the directory
}

func TestServerRefusesADamagedStore(t *testing.T) {
	t.Parallel()
	streamDir := func(dataDir, stream string) string {
		return filepath.Join(dataDir, "jetstream", "$G", "streams", stream)
	}
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, dataDir string)
		want   string
	}{
		{"metadata overwritten", func(t *testing.T, dataDir string) {
			writeFile(t, filepath.Join(streamDir(dataDir, "BAD"), "meta.inf"), "not what it was")
		}, "checksums do not match"},
		{"metadata gone", func(t *testing.T, dataDir string) {
			if err := os.Remove(filepath.Join(streamDir(dataDir, "BAD"), "meta.inf")); err != nil {
				t.Fatal(err)
			}
		}, "Missing stream metafile"},
		{"metadata emptied", func(t *testing.T, dataDir string) {
			writeFile(t, filepath.Join(streamDir(dataDir, "BAD"), "meta.inf"), "")
		}, "checksums do not match"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cfg := EmbedConfig{DataDir: t.TempDir(), Listen: "127.0.0.1:0"}
			s := startEmbedded(t, cfg)
			fill(t, s, "GOOD", 1)
			fill(t, s, "BAD", 1)
			if err := s.Shutdown(testContext(t)); err != nil {
				t.Fatal(err)
			}
			c.damage(t, cfg.DataDir)
			_, err := StartServer(cfg)
			if !errors.Is(err, ErrStoreDamaged) {
				t.Fatalf("StartServer = %v, want ErrStoreDamaged", err)
			}
			for _, want := range []string{"stream BAD", streamDir(cfg.DataDir, "BAD"), c.want, "restore"} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
			if strings.Contains(err.Error(), "GOOD") {
				t.Errorf("%q names a stream that is whole", err)
			}
			if err := os.Rename(streamDir(cfg.DataDir, "BAD"), filepath.Join(t.TempDir(), "aside")); err != nil {
				t.Fatal(err)
			}
			if got := messages(t, startEmbedded(t, cfg), "GOOD"); got != 1 {
				t.Errorf("%d messages in the good stream, want 1", got)
			}
		})
	}
}

func TestServerThatCannotUseItsDirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "file"), "")
	if _, err := StartServer(EmbedConfig{DataDir: filepath.Join(dir, "file"), Listen: "127.0.0.1:0"}); err == nil {
		t.Error("a file was taken for a directory")
	}
	writeFile(t, filepath.Join(dir, "jetstream"), "")
	_, err := StartServer(EmbedConfig{DataDir: dir, Listen: "127.0.0.1:0"})
	if err == nil || !strings.Contains(err.Error(), "not a directory") {
		t.Errorf("StartServer = %v", err)
	}
}

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// logBuffer collects a log that several goroutines write.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func TestServerLogsOnlyWhatNeedsAttention(t *testing.T) {
	t.Parallel()
	var quiet, debug logBuffer
	s := startEmbedded(t, EmbedConfig{Logger: slog.New(slog.NewTextHandler(&quiet, nil))})
	startEmbedded(t, EmbedConfig{Logger: slog.New(slog.NewTextHandler(&debug, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	if quiet.String() != "" {
		t.Errorf("a normal start logged %q", quiet.String())
	}
	if !strings.Contains(debug.String(), "component=nats-server") {
		t.Errorf("at level debug the server's notices are missing: %q", debug.String())
	}
	s.ns.Errorf("disk %s", "full")
	if !strings.Contains(quiet.String(), `level=ERROR msg="disk full" component=nats-server`) {
		t.Errorf("the server's error came out as %q", quiet.String())
	}
}

func TestServerOpenToTheNetworkIsReachedByLoopbackAndSaysSo(t *testing.T) {
	t.Parallel()
	var log logBuffer
	s := startEmbedded(t, EmbedConfig{Listen: "0.0.0.0:0", Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if !strings.HasPrefix(s.ClientURL(), "nats://127.0.0.1:") {
		t.Errorf("ClientURL %q", s.ClientURL())
	}
	connect(t, ConnConfig{URL: s.ClientURL()})
	if !strings.Contains(log.String(), "accepts anybody") {
		t.Errorf("log %q does not warn", log.String())
	}
}

func TestServerShutdownWhoseTimeIsUpGoesOn(t *testing.T) {
	t.Parallel()
	s := startEmbedded(t, EmbedConfig{})
	over, cancel := context.WithCancel(testContext(t))
	cancel()
	if err := s.Shutdown(over); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("Shutdown = %v", err)
	}
	if err := s.Shutdown(testContext(t)); err != nil {
		t.Errorf("second Shutdown = %v", err)
	}
	var never *Server
	if err := never.Shutdown(testContext(t)); err != nil {
		t.Errorf("Shutdown of nil = %v", err)
	}
}

func TestEmbedConfigNamesEveryMistake(t *testing.T) {
	t.Parallel()
	if err := (EmbedConfig{DataDir: "x"}).Validate(); err != nil {
		t.Errorf("the defaults are not valid: %v", err)
	}
	err := EmbedConfig{
		Listen: "4222", Durability: "sometimes", SyncInterval: -1, MaxPayload: 10, MaxPending: 9, MaxStore: -1, ServerName: "a b",
	}.Validate()
	if err == nil {
		t.Fatal("nothing was found wrong")
	}
	for _, want := range []string{
		"data directory is missing", `found "4222"`, `"sometimes"`, "sync interval", "at least the maximum payload of 10", "maximum store", `"a b"`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
}
