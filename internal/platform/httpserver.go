package platform

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// Limits of every HTTP server of the process.
//
// There is no WriteTimeout and no ReadTimeout: an answer may wait for as long as a long poll or an event stream
// asks for, and a request may carry a body that takes its time. Handlers bound both for themselves; a peer that
// does not get its header across, or sits idle, is bounded here.
const (
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 64 << 10
)

// HTTPConfig describes an HTTP server.
type HTTPConfig struct {
	// Listen is "host:port"; port 0 takes a free one. Required.
	Listen string
	// Handler answers the requests. A request's context is cancelled with cause ErrStopping when the server stops,
	// so that long polls end at once: a handler whose work must not be cut short (it has a few seconds) uses
	// context.WithoutCancel. Required.
	Handler http.Handler
	// CertFile and KeyFile are PEM files that turn on TLS; both or neither. Defaults to none: plain HTTP.
	CertFile, KeyFile string
	// DrainTimeout bounds how long Stop waits for requests in flight before it cuts their connections. Defaults to
	// 15 s; the context of Stop can shorten it.
	DrainTimeout time.Duration
	// Logger takes the server's complaints. Defaults to slog.Default().
	Logger *slog.Logger
}

func (c HTTPConfig) withDefaults() HTTPConfig {
	if c.DrainTimeout == 0 {
		c.DrainTimeout = 15 * time.Second
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
	if c.DrainTimeout < 0 {
		errs = append(errs, fmt.Errorf("HTTP drain timeout is %s, expected a positive duration", c.DrainTimeout))
	}
	return errors.Join(errs...)
}

// HTTPServer is an HTTP server as a Service. Make one with Serve.
type HTTPServer struct {
	cfg    HTTPConfig
	srv    *http.Server
	runner *Runner

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
		ReadHeaderTimeout: readHeaderTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,
		BaseContext:       func(net.Listener) context.Context { return base },
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
		pair, err := tls.LoadX509KeyPair(h.cfg.CertFile, h.cfg.KeyFile)
		if err != nil {
			return fmt.Errorf("HTTP TLS certificate %s with key %s: %w; give two PEM files that belong together", h.cfg.CertFile, h.cfg.KeyFile, err)
		}
		h.srv.TLSConfig = &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}
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
			served <- h.srv.Serve(ln)
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
