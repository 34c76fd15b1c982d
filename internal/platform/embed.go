package platform

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Durability says when the embedded server's writes reach the disk.
type Durability string

const (
	// DurabilityInterval writes to the file at once and syncs every SyncInterval: a crash of the process loses
	// nothing, a power cut can lose what was acknowledged within the last interval.
	DurabilityInterval Durability = "interval"
	// DurabilityAlways syncs each write before it is acknowledged.
	DurabilityAlways Durability = "always"
)

// Defaults of EmbedConfig that other packages compare their own limits with.
const (
	// DefaultMaxPayload is a body of 8 MiB and room for its headers, in bytes.
	DefaultMaxPayload = 8<<20 + 64<<10
	// DefaultMaxPending is how many bytes may wait for one connection: nats-server's own 64 MiB would cut off a
	// connection that reads many large messages at once.
	DefaultMaxPending = 256 << 20
)

// EmbedConfig describes a nats-server inside the process: one server, JetStream on a file store, no cluster and no
// authentication.
type EmbedConfig struct {
	// DataDir holds the store and its LOCK. It is created when it does not exist. Required.
	DataDir string
	// Listen is "host:port"; port 0 takes a free one. The server does not ask who connects, so anything but
	// loopback belongs behind a firewall. Defaults to "127.0.0.1:4222".
	Listen string
	// Durability is "interval" or "always". Defaults to "interval".
	Durability Durability
	// SyncInterval is the time between syncs with durability "interval". Defaults to 1 s.
	SyncInterval time.Duration
	// MaxPayload is the largest message with its headers, in bytes. Defaults to DefaultMaxPayload.
	MaxPayload int
	// MaxPending is how many bytes may wait for one connection before it is cut off. It MUST NOT be less than
	// MaxPayload. Defaults to DefaultMaxPending.
	MaxPending int64
	// MaxStore is how many bytes the store may take. Defaults to three quarters of the space that is free.
	MaxStore int64
	// ServerName is what clients see as the server's name; no spaces. Defaults to "palimpsest".
	ServerName string
	// Logger takes the server's warnings and errors; its notices become debug records. Defaults to slog.Default().
	Logger *slog.Logger
}

func (c EmbedConfig) withDefaults() EmbedConfig {
	if c.Listen == "" {
		c.Listen = "127.0.0.1:4222"
	}
	if c.Durability == "" {
		c.Durability = DurabilityInterval
	}
	if c.SyncInterval == 0 {
		c.SyncInterval = time.Second
	}
	if c.MaxPayload == 0 {
		c.MaxPayload = DefaultMaxPayload
	}
	if c.MaxPending == 0 {
		c.MaxPending = DefaultMaxPending
	}
	if c.ServerName == "" {
		c.ServerName = "palimpsest"
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Validate says what is wrong with the configuration, all of it at once.
func (c EmbedConfig) Validate() error {
	c = c.withDefaults()
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if c.DataDir == "" {
		bad("the data directory is missing; name the directory that holds the store")
	}
	if _, _, err := splitListen(c.Listen); err != nil {
		bad("NATS listen address: %w", err)
	}
	if c.Durability != DurabilityInterval && c.Durability != DurabilityAlways {
		bad("durability is %q, expected %q or %q", c.Durability, DurabilityInterval, DurabilityAlways)
	}
	if c.SyncInterval < 0 {
		bad("sync interval is %s, expected a positive duration", c.SyncInterval)
	}
	if c.MaxPayload < 0 || c.MaxPayload > math.MaxInt32 {
		bad("maximum payload is %d bytes, expected 1 to %d", c.MaxPayload, math.MaxInt32)
	}
	if c.MaxPending < int64(c.MaxPayload) {
		bad("maximum pending is %d bytes, expected at least the maximum payload of %d; raise the one or lower the other", c.MaxPending, c.MaxPayload)
	}
	if c.MaxStore < 0 {
		bad("maximum store is %d bytes, expected a positive number, or 0 for three quarters of the free space", c.MaxStore)
	}
	if strings.ContainsFunc(c.ServerName, func(r rune) bool { return r <= ' ' }) {
		bad("server name is %q, expected a name without spaces", c.ServerName)
	}
	return errors.Join(errs...)
}

// Server is a nats-server that runs inside the process. Start one with StartServer.
type Server struct {
	ns   *server.Server
	url  string
	lock *dirLock

	stop    sync.Once
	down    chan struct{} // closed when the server is down and the lock released
	downErr error         // written before down is closed
}

// StartServer recovers the store in cfg.DataDir and returns once clients can connect. It never ends the process:
// what nats-server calls fatal is returned. It fails when the directory is in use (ErrDataDirInUse), the port is
// taken, or the store holds a stream that the server could not recover (ErrStoreDamaged).
func StartServer(cfg EmbedConfig) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("embedded NATS server: %w", err)
	}
	cfg = cfg.withDefaults()
	if err := os.MkdirAll(cfg.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w; create it, or name one that this user can write", err)
	}
	lock, err := lockDir(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	s, err := startLocked(cfg, lock)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("embedded NATS server: %w", err), lock.release())
	}
	return s, nil
}

func startLocked(cfg EmbedConfig, lock *dirLock) (*Server, error) {
	stored, err := storedStreams(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	ns, err := server.NewServer(serverOptions(cfg))
	if err != nil {
		return nil, err
	}
	log := newServerLog(cfg.Logger)
	ns.SetLoggerV2(log, false, false, false)
	s := &Server{ns: ns, lock: lock, down: make(chan struct{})}
	giveUp := func(err error) (*Server, error) {
		ns.Shutdown()
		ns.WaitForShutdown()
		return nil, err
	}

	ns.Start() // returns when the store is recovered and the listener open, or after a fatal error
	if fatal := log.firstFatal(); fatal != "" {
		return giveUp(fmt.Errorf("%s; %s", fatal, remedy(cfg, fatal)))
	}
	addr, ok := ns.Addr().(*net.TCPAddr)
	if !ok || !ns.JetStreamEnabled() {
		return giveUp(errors.New("it did not come up and did not say why; its log at level debug tells how far it came"))
	}
	if err := s.checkRecovered(stored, log.startWarnings()); err != nil {
		return giveUp(err)
	}
	s.url = "nats://" + reachable(addr)
	if !onLoopback(addr) {
		cfg.Logger.Warn("the embedded NATS server accepts anybody who reaches it; listen on loopback, or use a firewall or a NATS server with authentication",
			slog.String("listen", addr.String()))
	}
	return s, nil
}

func serverOptions(cfg EmbedConfig) *server.Options {
	host, port, _ := splitListen(cfg.Listen) // checked by Validate
	if port == 0 {
		port = server.RANDOM_PORT // for nats-server 0 is its default port
	}
	return &server.Options{
		ServerName:             cfg.ServerName,
		Host:                   host,
		Port:                   port,
		NoSigs:                 true, // signals belong to Main
		MaxPayload:             int32(cfg.MaxPayload),
		MaxPending:             cfg.MaxPending,
		JetStream:              true,
		JetStreamMaxStore:      cfg.MaxStore,
		DisableJetStreamBanner: true,
		StoreDir:               cfg.DataDir,
		SyncInterval:           cfg.SyncInterval,
		SyncAlways:             cfg.Durability == DurabilityAlways,
	}
}

// remedy says what to do about an error that nats-server calls fatal.
func remedy(cfg EmbedConfig, fatal string) string {
	if strings.Contains(fatal, "listening on port") {
		return "stop what listens there, or listen on another port (0 takes a free one)"
	}
	return "check the rights and the free space of " + cfg.DataDir
}

// ClientURL is the URL under which this machine reaches the server by TCP.
func (s *Server) ClientURL() string { return s.url }

// InProcessConn opens a connection that does not leave the process. It makes Server a nats.InProcessConnProvider.
func (s *Server) InProcessConn() (net.Conn, error) { return s.ns.InProcessConn() }

// Healthy returns nil while the server accepts clients and stores messages. JetStream turns itself off, and does
// not come back before a restart, when the disk is full or no longer writable.
func (s *Server) Healthy() error {
	switch {
	case !s.ns.Running():
		return errors.New("the embedded NATS server is not running")
	case !s.ns.JetStreamEnabled():
		return errors.New("the embedded NATS server has turned JetStream off, since its disk is full or not writable; mend that and restart")
	}
	return nil
}

// Shutdown stops the server and returns when it is down and the data directory is free, or with an error when ctx
// is done first; the shutdown then goes on. Later calls wait for the same end. A nil Server is down already.
func (s *Server) Shutdown(ctx context.Context) error {
	if s == nil {
		return nil
	}
	s.stop.Do(func() {
		go func() {
			defer close(s.down)
			s.ns.Shutdown()
			s.ns.WaitForShutdown()
			s.downErr = s.lock.release()
		}()
	})
	select {
	case <-s.down:
		return s.downErr
	case <-ctx.Done():
		return fmt.Errorf("embedded NATS server: not down yet when the time was up: %w", context.Cause(ctx))
	}
}
