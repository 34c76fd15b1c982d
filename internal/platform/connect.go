package platform

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/synadia-io/orbit.go/natscontext"
)

const (
	reconnectWait   = 250 * time.Millisecond
	reconnectJitter = 100 * time.Millisecond
	dialTimeout     = 2 * time.Second
	// maxPingsOut unanswered pings end a connection.
	maxPingsOut = 2
	// sameErrorEvery is how often a connection logs the same asynchronous error.
	sameErrorEvery = 10 * time.Second
)

// ConnConfig describes a connection to NATS.
type ConnConfig struct {
	// URL is one URL or several with commas between them; the servers of one cluster. Required unless InProcess is
	// set.
	URL string
	// Context is a context of the nats command line: its name, or the absolute path of its file. It says where the
	// servers are and how to authenticate, in the place of URL; what is set here besides wins. Defaults to none.
	Context string
	// Name is what the server shows for the connection. Defaults to the program's name.
	Name string
	// CredsFile is a NATS credentials file (JWT and seed). Defaults to none.
	CredsFile string
	// NKeyFile is a file with an nkey seed. It excludes CredsFile. Defaults to none.
	NKeyFile string
	// CAFile is a PEM file with the authorities that may sign the server's certificate; it turns on TLS. Defaults to
	// the system's authorities, with TLS when the URL or the server asks for it.
	CAFile string
	// CertFile and KeyFile are the client's own certificate, PEM; both or neither. Defaults to none.
	CertFile, KeyFile string
	// InboxPrefix begins the subjects on which answers come. With one for each role, permissions can keep a client from
	// listening to the answers that others get. Defaults to _INBOX.
	InboxPrefix string
	// InProcess connects through a pipe to this server and not by TCP. Defaults to nil: TCP to URL, for an embedded
	// server as well (URL is then its ClientURL). That way one machine and a cluster take the same path: error 10158,
	// for a duplicate of a message that is still being stored, for instance is answered in process only.
	InProcess *Server
	// ConnectWait bounds how long Connect tries; servers are often started together. An attempt that hangs can add
	// 2 s to it. Defaults to 10 s.
	ConnectWait time.Duration
	// PingInterval is the time between pings. A connection whose other end has vanished without a word is given up
	// after three of them. Defaults to 5 s.
	PingInterval time.Duration
	// ReconnectBuffer is how many bytes are kept for sending while there is no connection; beyond them publishing
	// fails, and with a negative number at once. Defaults to 8 MiB.
	ReconnectBuffer int
	// DrainTimeout bounds how long Drain waits for subscriptions to work off what they were sent. Defaults to 10 s.
	DrainTimeout time.Duration
	// Made counts how often the connection was made, before anything comes over it. With a NATS
	// context, which may bring a dialer of its own, it is not counted. Defaults to nil: nobody counts.
	Made *atomic.Uint64
	// Logger takes disconnects, reconnects and asynchronous errors. Defaults to slog.Default().
	Logger *slog.Logger
}

// countedDialer and countedServer count the connections that they make.
type countedDialer struct {
	net.Dialer
	made *atomic.Uint64
}

func (d *countedDialer) Dial(network, address string) (net.Conn, error) {
	c, err := d.Dialer.Dial(network, address)
	if err == nil {
		d.made.Add(1)
	}
	return c, err
}

type countedServer struct {
	nats.InProcessConnProvider
	made *atomic.Uint64
}

func (s countedServer) InProcessConn() (net.Conn, error) {
	c, err := s.InProcessConnProvider.InProcessConn()
	if err == nil {
		s.made.Add(1)
	}
	return c, err
}

func (c ConnConfig) withDefaults() ConnConfig {
	if c.Name == "" {
		c.Name = program()
	}
	if c.ConnectWait == 0 {
		c.ConnectWait = 10 * time.Second
	}
	if c.PingInterval == 0 {
		c.PingInterval = 5 * time.Second
	}
	if c.ReconnectBuffer == 0 {
		c.ReconnectBuffer = nats.DefaultReconnectBufSize
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = 10 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return c
}

// Validate says what is wrong with the configuration, all of it at once. It does not read the files.
func (c ConnConfig) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if strings.Trim(c.URL, ", ") == "" && c.InProcess == nil && c.Context == "" {
		bad("the NATS URL is missing; give one such as nats://127.0.0.1:4222")
	}
	if c.Context != "" && (c.URL != "" || c.InProcess != nil) {
		bad("found the NATS context %s and a URL, expected one of them; leave one out", c.Context)
	}
	if c.URL != "" && c.InProcess != nil {
		bad("found the NATS URL %s and an in-process server, expected one of them; leave one out", withoutUserinfo(c.URL))
	}
	for part := range strings.SplitSeq(c.URL, ",") {
		if part = strings.TrimSpace(part); part != "" && !isNATSURL(part) {
			bad("found the NATS URL %q, expected nats://host:port (or tls, ws, wss)", withoutUserinfo(part))
		}
	}
	if c.CredsFile != "" && c.NKeyFile != "" {
		bad("found NATS credentials %s and nkey %s, expected one of them; leave one out", c.CredsFile, c.NKeyFile)
	}
	if (c.CertFile == "") != (c.KeyFile == "") {
		bad("NATS TLS has certificate %q and key %q, expected both or neither; give the missing file", c.CertFile, c.KeyFile)
	}
	for _, d := range []struct {
		name  string
		value time.Duration
	}{{"connect wait", c.ConnectWait}, {"ping interval", c.PingInterval}, {"drain timeout", c.DrainTimeout}} {
		if d.value < 0 {
			bad("NATS %s is %s, expected a positive duration", d.name, d.value)
		}
	}
	return errors.Join(errs...)
}

// isNATSURL is checked before the client does, whose error repeats the URL with its password.
func isNATSURL(text string) bool {
	if !strings.Contains(text, "://") {
		text = "nats://" + text
	}
	u, err := url.Parse(text)
	return err == nil && u.Host != "" && slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme)
}

// Connect connects to NATS. It tries again while nobody answers, for as long as cfg.ConnectWait; what more time
// cannot mend, such as refused credentials, is returned at once. A connection that was made once reconnects for
// ever: it ends only by Close or Drain.
func Connect(ctx context.Context, cfg ConnConfig) (*nats.Conn, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	where := withoutUserinfo(cfg.URL)
	switch {
	case cfg.InProcess != nil:
		where = "in process"
	case cfg.Context != "":
		where = "context " + cfg.Context
	}
	options, err := connOptions(cfg)
	if err != nil {
		return nil, fmt.Errorf("NATS connection (%s): %w", where, err)
	}

	waitCtx, done := context.WithTimeoutCause(ctx, cfg.ConnectWait, errConnectWait)
	defer done()
	for {
		nc, err := dial(cfg, options)
		if err == nil {
			return nc, nil
		}
		if errors.Is(err, errContext) {
			return nil, err
		}
		if hopeless(err) {
			return nil, fmt.Errorf("NATS at %s refused the connection: %w; check the credentials and certificates", where, err)
		}
		cfg.Logger.Debug("NATS does not answer yet", slog.String("nats", where), slog.Any("error", err))
		select {
		case <-waitCtx.Done():
			if errors.Is(context.Cause(waitCtx), errConnectWait) {
				return nil, &unreached{fmt.Errorf("no NATS server at %s within %s: %w; start one, or give another URL", where, cfg.ConnectWait, err)}
			}
			return nil, fmt.Errorf("connecting to NATS at %s was given up: %w", where, context.Cause(ctx))
		case <-time.After(reconnectWait + rand.N(reconnectJitter)):
		}
	}
}

// unreached is the error of Connect when nobody answered.
type unreached struct{ error }

func (e *unreached) Unwrap() error { return e.error }

// Unreached reports whether an error of Connect says that nobody answered: somebody may later.
func Unreached(err error) bool {
	var e *unreached
	return errors.As(err, &e)
}

// errContext says that a NATS context is not usable.
var errContext = errors.New("NATS context")

func dial(cfg ConnConfig, options []nats.Option) (*nats.Conn, error) {
	if cfg.Context == "" {
		return nats.Connect(cfg.URL, options...)
	}
	nc, settings, err := natscontext.Connect(cfg.Context, options...)
	var network *net.OpError
	switch {
	case err == nil && (settings.JSDomain != "" || settings.JSAPIPrefix != ""):
		nc.Close()
		return nil, fmt.Errorf("%w %s names a JetStream domain or API prefix, which is not supported; connect to the servers of the domain itself", errContext, cfg.Context)
	case err == nil, errors.Is(err, nats.ErrNoServers), errors.As(err, &network), hopeless(err):
		return nc, err
	}
	return nil, fmt.Errorf("%w %s: %w; `nats context ls` shows what there is", errContext, cfg.Context, err)
}

// errConnectWait tells the end of ConnectWait from the end of the caller's context.
var errConnectWait = errors.New("the connect wait is over")

// hopeless reports whether another attempt would fail in the same way.
func hopeless(err error) bool {
	var certificate *tls.CertificateVerificationError
	return errors.Is(err, nats.ErrAuthorization) || errors.Is(err, nats.ErrAuthExpired) || errors.Is(err, nats.ErrAuthRevoked) ||
		errors.Is(err, nats.ErrSecureConnRequired) || errors.Is(err, nats.ErrSecureConnWanted) ||
		errors.As(err, &certificate)
}

func connOptions(cfg ConnConfig) ([]nats.Option, error) {
	log := cfg.Logger.With(slog.String("connection", cfg.Name))
	repeated := &repeatFilter{}
	options := []nats.Option{
		nats.Name(cfg.Name),
		nats.Timeout(dialTimeout),        // for reconnecting as well, so not shortened by ConnectWait
		nats.RetryOnFailedConnect(false), // Connect retries, and can say in the end why it gave up
		nats.MaxReconnects(-1),
		nats.ReconnectWait(reconnectWait),
		nats.ReconnectJitter(reconnectJitter, reconnectJitter),
		// For ever means also while credentials are being replaced: the client would close itself otherwise.
		nats.IgnoreAuthErrorAbort(),
		nats.ReconnectBufSize(cfg.ReconnectBuffer),
		nats.PingInterval(cfg.PingInterval),
		nats.MaxPingsOutstanding(maxPingsOut),
		nats.DrainTimeout(cfg.DrainTimeout),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err == nil { // closed by us
				log.Debug("NATS disconnected")
				return
			}
			log.Warn("NATS disconnected, reconnecting", slog.Any("error", err))
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			log.Info("NATS reconnected", slog.String("nats", withoutUserinfo(nc.ConnectedUrl())), slog.Uint64("reconnects", nc.Stats().Reconnects))
		}),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			attrs := []any{slog.Any("error", err)}
			if sub != nil {
				attrs = append(attrs, slog.String("subject", sub.Subject))
				if dropped, dropErr := sub.Dropped(); dropErr == nil && dropped > 0 {
					attrs = append(attrs, slog.Int("dropped", dropped))
				}
			}
			if repeated.pass(err, time.Now()) {
				log.Warn("NATS error", attrs...)
			}
		}),
	}
	switch {
	case cfg.InProcess != nil && cfg.Made != nil:
		options = append(options, nats.InProcessServer(countedServer{cfg.InProcess, cfg.Made}))
	case cfg.InProcess != nil:
		options = append(options, nats.InProcessServer(cfg.InProcess))
	case cfg.Made != nil && cfg.Context == "":
		options = append(options, nats.SetCustomDialer(&countedDialer{net.Dialer{Timeout: dialTimeout}, cfg.Made}))
	}
	// The files are read here so that a missing one is named as such; the client reads them again on reconnect.
	switch {
	case cfg.CredsFile != "":
		if _, err := os.Stat(cfg.CredsFile); err != nil {
			return nil, fmt.Errorf("credentials file: %w", err)
		}
		options = append(options, nats.UserCredentials(cfg.CredsFile))
	case cfg.NKeyFile != "":
		option, err := nats.NkeyOptionFromSeed(cfg.NKeyFile)
		if err != nil {
			return nil, fmt.Errorf("nkey file %s: %w", cfg.NKeyFile, err)
		}
		options = append(options, option)
	}
	if cfg.InboxPrefix != "" {
		options = append(options, nats.CustomInboxPrefix(cfg.InboxPrefix))
	}
	if cfg.CAFile != "" {
		options = append(options, nats.RootCAs(cfg.CAFile))
	}
	if cfg.CertFile != "" {
		options = append(options, nats.ClientCert(cfg.CertFile, cfg.KeyFile))
	}
	for _, option := range options { // once on a scratch copy: a bad file is not "nobody answers"
		scratch := nats.GetDefaultOptions()
		if err := option(&scratch); err != nil {
			return nil, err
		}
	}
	return options, nil
}

// repeatFilter lets an error through once in sameErrorEvery, so that a connection in trouble does not flood the log.
type repeatFilter struct {
	mu   sync.Mutex // guards the two below
	text string
	last time.Time
}

func (f *repeatFilter) pass(err error, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if text := err.Error(); text != f.text || now.Sub(f.last) >= sameErrorEvery {
		f.text, f.last = text, now
		return true
	}
	return false
}

// Drain sends what is to be sent, lets subscriptions work off what they have, and closes the connection. When ctx
// is done first, or there is no server to send to, it closes the connection at once; losing unsent bytes is an
// error. It tolerates nil and a closed connection.
func Drain(ctx context.Context, nc *nats.Conn) error {
	if nc == nil {
		return nil
	}
	closed := nc.StatusChanged(nats.CLOSED)
	defer nc.RemoveStatusListener(closed)
	unsent, _ := nc.Buffered()
	switch err := nc.Drain(); {
	case errors.Is(err, nats.ErrConnectionClosed):
		return nil
	case errors.Is(err, nats.ErrConnectionReconnecting): // and closed by Drain
		if unsent > 0 {
			return fmt.Errorf("NATS connection %s was closed while there was no server: %d bytes were not sent", nc.Opts.Name, unsent)
		}
		return nil
	case err != nil:
		nc.Close()
		return fmt.Errorf("NATS connection %s: drain: %w", nc.Opts.Name, err)
	}
	select {
	case <-closed:
		return nil
	case <-ctx.Done():
		nc.Close()
		return fmt.Errorf("NATS connection %s was closed before it was drained: %w", nc.Opts.Name, context.Cause(ctx))
	}
}

// ConnsConfig describes a program's connections.
type ConnsConfig struct {
	// ConnConfig is what they share. To Name each adds what it is for.
	ConnConfig
	// Publishers is the number of publishing connections. Defaults to 2: one is bound by a single reader and writer,
	// and a third brings little.
	Publishers int
}

// Validate says what is wrong with the configuration, all of it at once.
func (c ConnsConfig) Validate() error {
	var errs []error
	if c.Publishers < 0 || c.Publishers > 64 {
		errs = append(errs, fmt.Errorf("number of publishing connections is %d, expected 1 to 64, or 0 for 2", c.Publishers))
	}
	return errors.Join(append(errs, c.ConnConfig.Validate())...)
}

// Conns are a program's connections to NATS.
type Conns struct {
	// Publish carry the bulk. What must stay in order among itself belongs on one of them.
	Publish []*nats.Conn
	// KV is for key-value buckets and leases, which must not wait behind the bulk.
	KV *nats.Conn
	// Made is how often they were made, all together; nil when that is not counted.
	Made *atomic.Uint64
}

// ConnectAll opens a program's connections, all or none.
func ConnectAll(ctx context.Context, cfg ConnsConfig) (*Conns, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if cfg.Publishers == 0 {
		cfg.Publishers = 2
	}
	name := cfg.ConnConfig.withDefaults().Name
	connect := func(purpose string) (*nats.Conn, error) {
		one := cfg.ConnConfig
		one.Name = name + "/" + purpose
		return Connect(ctx, one)
	}
	c := &Conns{}
	if cfg.Context == "" {
		c.Made = &atomic.Uint64{}
		cfg.Made = c.Made
	}
	for i := range cfg.Publishers {
		nc, err := connect(fmt.Sprintf("publish-%d", i))
		if err != nil {
			c.closeNow()
			return nil, err
		}
		c.Publish = append(c.Publish, nc)
	}
	kv, err := connect("kv")
	if err != nil {
		c.closeNow()
		return nil, err
	}
	c.KV = kv
	return c, nil
}

func (c *Conns) all() []*nats.Conn {
	return append(append([]*nats.Conn(nil), c.Publish...), c.KV)
}

// closeNow is for connections that nobody has used.
func (c *Conns) closeNow() {
	for _, nc := range c.all() {
		if nc != nil {
			nc.Close()
		}
	}
}

// Close drains all connections at once and returns when they are closed. It tolerates nil and a second call.
func (c *Conns) Close(ctx context.Context) error {
	if c == nil {
		return nil
	}
	all := c.all()
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, nc := range all {
		wg.Go(func() { errs[i] = Drain(ctx, nc) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
