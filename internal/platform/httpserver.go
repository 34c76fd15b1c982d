package platform

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// HTTPConfig describes an HTTP server.
type HTTPConfig struct {
	// Listen is "host:port"; port 0 takes a free one. Required.
	Listen string
	// Handler answers the requests. A request's context is cancelled with cause ErrStopping when the server stops,
	// so that long polls end at once: a handler whose work must not be cut short (it has a few seconds) uses
	// context.WithoutCancel. Required.
	Handler http.Handler
	// CertFile and KeyFile are PEM files that turn on TLS, 1.2 at least; both or neither. Defaults to none: plain HTTP.
	CertFile, KeyFile string
	// ClientCAFile is a PEM file with the authorities of client certificates; every client must then have one. It
	// needs CertFile. Defaults to none: clients need no certificate.
	ClientCAFile string
	// HeaderTimeout is how long a client may take to send a request's header. Defaults to 10 s. There is no such
	// bound for bodies here, since they may take their time: handlers bound them.
	HeaderTimeout time.Duration
	// WriteTimeout is how long an answer may take from the request's header on. A handler that answers later, or at
	// length, moves its deadline as it goes (http.ResponseController). Defaults to 2 min.
	WriteTimeout time.Duration
	// IdleTimeout is how long a connection may wait for its next request. Defaults to 2 min.
	IdleTimeout time.Duration
	// MaxHeaderBytes bounds a request's header. Defaults to 64 KiB.
	MaxHeaderBytes int
	// DrainTimeout bounds how long Stop waits for requests in flight before it cuts their connections. Defaults to
	// 15 s; the context of Stop can shorten it.
	DrainTimeout time.Duration
	// Logger takes the server's complaints. Defaults to slog.Default().
	Logger *slog.Logger
}

func (c HTTPConfig) withDefaults() HTTPConfig {
	for _, d := range []struct {
		of    *time.Duration
		value time.Duration
	}{{&c.DrainTimeout, 15 * time.Second}, {&c.HeaderTimeout, 10 * time.Second}, {&c.WriteTimeout, 2 * time.Minute}, {&c.IdleTimeout, 2 * time.Minute}} {
		if *d.of == 0 {
			*d.of = d.value
		}
	}
	if c.MaxHeaderBytes == 0 {
		c.MaxHeaderBytes = 64 << 10
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Validate says what is wrong with the configuration, all of it at once.
func (c HTTPConfig) Validate() error {
	var errs []error
	if _, _, err := splitListen(c.Listen); err != nil {
		errs = append(errs, fmt.Errorf("HTTP listen address: %w", err))
	}
	if c.Handler == nil {
		errs = append(errs, errors.New("HTTP handler is missing; set HTTPConfig.Handler"))
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		errs = append(errs, fmt.Errorf("HTTP TLS has certificate %q and key %q, expected both or neither; give the missing file", c.CertFile, c.KeyFile))
	}
	if c.ClientCAFile != "" && c.CertFile == "" {
		errs = append(errs, fmt.Errorf("HTTP client authorities %s need TLS; give a certificate and its key", c.ClientCAFile))
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"drain", c.DrainTimeout}, {"header", c.HeaderTimeout}, {"write", c.WriteTimeout}, {"idle", c.IdleTimeout}} {
		if d.value < 0 {
			errs = append(errs, fmt.Errorf("HTTP %s timeout is %s, expected a positive duration", d.name, d.value))
		}
	}
	if c.MaxHeaderBytes < 0 {
		errs = append(errs, fmt.Errorf("HTTP header limit is %d bytes, expected a positive number", c.MaxHeaderBytes))
	}
	return errors.Join(errs...)
}

// HTTPServer is an HTTP server as a Service. Make one with Serve.
type HTTPServer struct {
	cfg    HTTPConfig
	srv    *http.Server
	runner *Runner
	tls    atomic.Pointer[tls.Config] // what the files said when they were read last

	mu   sync.Mutex // guards addr
	addr net.Addr   // nil until the listener is open
}

// Serve returns the service that serves cfg. Start opens the listener and fails when it cannot, or when cfg is not
// valid; Stop closes the listener, cancels the requests' contexts, waits for the requests in flight and at last
// cuts them off.
func Serve(cfg HTTPConfig) *HTTPServer {
	h := &HTTPServer{cfg: cfg.withDefaults()}
	base, cancel := context.WithCancelCause(context.Background())
	h.srv = &http.Server{
		Handler:           h.cfg.Handler,
		ReadHeaderTimeout: h.cfg.HeaderTimeout,
		WriteTimeout:      h.cfg.WriteTimeout,
		IdleTimeout:       h.cfg.IdleTimeout,
		MaxHeaderBytes:    h.cfg.MaxHeaderBytes,
		BaseContext:       func(net.Listener) context.Context { return base },
		ConnContext:       withConn,
		ErrorLog:          slog.NewLogLogger(h.cfg.Logger.Handler(), slog.LevelWarn),
	}
	// Runs after the listener is closed: no new request meets a context that is cancelled already.
	h.srv.RegisterOnShutdown(func() { cancel(ErrStopping) })
	h.runner = NewRunner(func(ctx context.Context, ready func()) error {
		defer cancel(ErrStopping)
		return h.serve(ctx, ready)
	})
	return h
}

func (h *HTTPServer) serve(ctx context.Context, ready func()) error {
	if err := h.cfg.Validate(); err != nil {
		return err
	}
	if h.cfg.CertFile != "" { // before the listener, so that a bad file fails Start
		if err := h.ReloadTLS(); err != nil {
			return err
		}
		h.srv.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"},
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return h.tls.Load(), nil }}
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", h.cfg.Listen)
	if err != nil {
		return fmt.Errorf("HTTP cannot listen on %s: %w; stop what listens there or choose another address (port 0 takes a free one)", h.cfg.Listen, err)
	}
	h.mu.Lock()
	h.addr = ln.Addr()
	h.mu.Unlock()

	served := make(chan error, 1)
	go func() {
		if h.srv.TLSConfig != nil {
			served <- h.srv.ServeTLS(ln, "", "")
		} else {
			served <- h.srv.Serve(gatheringListener{ln})
		}
	}()
	ready()

	select {
	case err := <-served:
		return fmt.Errorf("HTTP server on %s ended: %w", ln.Addr(), err)
	case <-ctx.Done():
	}
	drainCtx, done := context.WithTimeout(context.WithoutCancel(ctx), h.cfg.DrainTimeout)
	defer done()
	err = h.srv.Shutdown(drainCtx)
	if err != nil {
		_ = h.srv.Close()
		err = fmt.Errorf("HTTP requests on %s still ran after %s and were cut off", ln.Addr(), h.cfg.DrainTimeout)
	}
	<-served // ErrServerClosed, since Shutdown was called
	return err
}

// TLSFiles are the files that ReloadTLS reads, none without TLS.
func (h *HTTPServer) TLSFiles() []string {
	var out []string
	for _, f := range []string{h.cfg.CertFile, h.cfg.KeyFile, h.cfg.ClientCAFile} {
		if f != "" {
			out = append(out, f)
		}
	}
	return out
}

// ReloadTLS reads the certificate, its key and the client authorities again, for connections from now on. After an
// error those that were read before stay.
func (h *HTTPServer) ReloadTLS() error {
	pair, err := tls.LoadX509KeyPair(h.cfg.CertFile, h.cfg.KeyFile)
	if err != nil {
		return fmt.Errorf("HTTP TLS certificate %s with key %s: %w; give two PEM files that belong together", h.cfg.CertFile, h.cfg.KeyFile, err)
	}
	cfg := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2", "http/1.1"}}
	if h.cfg.ClientCAFile != "" {
		pem, err := os.ReadFile(h.cfg.ClientCAFile)
		if err != nil {
			return fmt.Errorf("HTTP client authorities: %w", err)
		}
		cfg.ClientCAs, cfg.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
		if !cfg.ClientCAs.AppendCertsFromPEM(pem) {
			return fmt.Errorf("HTTP client authorities %s: found no certificate, expected PEM", h.cfg.ClientCAFile)
		}
	}
	h.tls.Store(cfg)
	return nil
}

// Start opens the listener and returns once connections are accepted.
func (h *HTTPServer) Start(ctx context.Context) error { return h.runner.Start(ctx) }

// Done is closed when the server has ended.
func (h *HTTPServer) Done() <-chan struct{} { return h.runner.Done() }

// Err is the failure that ended the server, nil while it runs and after an ordered stop.
func (h *HTTPServer) Err() error { return h.runner.Err() }

// Stop ends the server gracefully, and at once when ctx is done.
func (h *HTTPServer) Stop(ctx context.Context) error {
	cut := context.AfterFunc(ctx, func() { _ = h.srv.Close() })
	defer cut()
	return h.runner.Stop(ctx)
}

// Addr is the address that the server listens on, nil before Start.
func (h *HTTPServer) Addr() net.Addr {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.addr
}

// URL is the base URL under which this machine reaches the server, "" before Start.
func (h *HTTPServer) URL() string {
	addr := h.Addr()
	if addr == nil {
		return ""
	}
	scheme := "http"
	if h.cfg.CertFile != "" {
		scheme = "https"
	}
	return scheme + "://" + reachable(addr)
}
