package api

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/pprof"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"palimpsest/internal/auth"
	"palimpsest/internal/events"
	"palimpsest/internal/platform"
	"palimpsest/internal/telemetry"
)

// EdgeFlags are the flags of what stands between callers and an API, for programs whose command
// line is read by reflection (the tags are kong's).
type EdgeFlags struct {
	TokenFile      string        `help:"File with the bearer tokens that are recognised, one JSON object a line (appender token new makes them)." placeholder:"FILE" env:"PALIMPSEST_TOKEN_FILE"`
	JWTKeys        string        `name:"jwt-keys" help:"File with the public keys of JWTs that are recognised: JWKS or PEM." placeholder:"FILE" env:"PALIMPSEST_JWT_KEYS"`
	JWTAudience    string        `name:"jwt-audience" help:"What aud of a JWT must contain; needed with --jwt-keys." env:"PALIMPSEST_JWT_AUDIENCE"`
	JWTIssuer      string        `name:"jwt-issuer" help:"What iss of a JWT must be. Default: anything." env:"PALIMPSEST_JWT_ISSUER"`
	InsecureNoAuth bool          `help:"Serve beyond loopback although nobody is asked who they are." env:"PALIMPSEST_INSECURE_NO_AUTH"`
	OpenMetrics    bool          `help:"Let everybody read /metrics, and not only recognised callers." env:"PALIMPSEST_OPEN_METRICS"`
	Rate           float64       `help:"Requests a second that one caller may send, where the token says nothing else; 0 for any number." default:"0"`
	Burst          int           `help:"Requests that one caller may send at once, where the token says nothing else; 0 for as many as a second brings." default:"0"`
	HTTPCert       string        `name:"http-cert" help:"PEM file with the certificate of the HTTP API; turns on TLS." placeholder:"FILE" env:"PALIMPSEST_HTTP_CERT"`
	HTTPKey        string        `name:"http-key" help:"PEM file with the certificate's key." placeholder:"FILE" env:"PALIMPSEST_HTTP_KEY"`
	HTTPClientCA   string        `name:"http-client-ca" help:"PEM file with the authorities of client certificates; clients must then have one." placeholder:"FILE" env:"PALIMPSEST_HTTP_CLIENT_CA"`
	HeaderTimeout  time.Duration `help:"How long a client may take to send a request's header." default:"10s"`
	AdminListen    string        `help:"Loopback address for profiles (/debug/pprof/). Default: none." placeholder:"ADDRESS" env:"PALIMPSEST_ADMIN_LISTEN"`
}

// Served is a program's HTTP side while it is put together.
type Served struct {
	Edge      *Edge // nil when there is nothing between callers and the API
	Registry  *prometheus.Registry
	Telemetry *telemetry.Telemetry // nil: none
	flags     EdgeFlags
	listen    string
	front     *front
	server    *platform.HTTPServer // nil until Listen
}

// asked reports whether callers are asked who they are.
func (f EdgeFlags) asked() bool { return f.TokenFile != "" || f.JWTKeys != "" }

// Check says what is wrong with the flags and the listen address. It reads no files.
func (f EdgeFlags) Check(listen string) error {
	usage := func(format string, args ...any) error {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf(format, args...)}
	}
	if err := platform.CheckListen(listen); err != nil {
		return usage("--listen: %w", err)
	}
	if f.AdminListen != "" {
		if err := platform.CheckListen(f.AdminListen); err != nil {
			return usage("--admin-listen: %w", err)
		}
	}
	switch {
	case f.Rate < 0 || f.Burst < 0:
		return usage("--rate %v and --burst %d: expected nothing below 0", f.Rate, f.Burst)
	case f.HeaderTimeout <= 0:
		return usage("--header-timeout: expected more than 0, found %v", f.HeaderTimeout)
	case f.Rate > 0 && !f.asked():
		return usage("--rate limits each caller, and nobody is asked who they are; give --token-file or --jwt-keys too")
	case f.JWTKeys == "" && (f.JWTAudience != "" || f.JWTIssuer != ""):
		return usage("--jwt-audience and --jwt-issuer need --jwt-keys")
	case !f.asked() && !f.InsecureNoAuth && !platform.Loopback(listen):
		return usage("--listen %s is reached from other machines, and nobody would be asked who they are; give --token-file or --jwt-keys, listen on 127.0.0.1, or say --insecure-no-auth", listen)
	case f.AdminListen != "" && !platform.Loopback(f.AdminListen):
		return usage("--admin-listen %s: expected a loopback address such as 127.0.0.1:6060, since profiles show what is in memory", f.AdminListen)
	}
	return nil
}

// Open checks the flags and reads the files that they name. What runs is added to the group.
func (f EdgeFlags) Open(ctx context.Context, service, listen string, g *platform.Group) (*Served, error) {
	err := f.Check(listen)
	if err != nil {
		return nil, err
	}
	s := &Served{Registry: prometheus.NewRegistry(), flags: f, listen: listen}
	if s.Telemetry, err = telemetry.Start(ctx, telemetry.Config{Service: service, Gatherer: s.Registry}); err != nil {
		return nil, err
	}
	if s.Telemetry != nil {
		g.Add("telemetry", platform.StopFunc(func(ctx context.Context) error {
			if err := s.Telemetry.Stop(ctx); err != nil { // a collector that is away is no failure of ours
				slog.Warn("the last spans and measurements were not exported", "err", err)
			}
			return nil
		}))
	}
	if f.asked() {
		a, err := auth.New(auth.Config{TokenFile: f.TokenFile, JWT: auth.JWTConfig{KeyFile: f.JWTKeys, Issuer: f.JWTIssuer, Audience: f.JWTAudience}})
		if err != nil {
			return nil, err
		}
		s.Edge = &Edge{Auth: a, OpenMetrics: f.OpenMetrics, Rate: f.Rate, Burst: f.Burst}
		g.Add("credentials", platform.ReloadOnChange(platform.ReloadConfig{Files: a.Files(), Reload: a.Reload}))
	} else if !platform.Loopback(listen) {
		slog.Warn("the HTTP API accepts anybody who reaches it", "listen", listen)
	}
	if s.Telemetry != nil {
		s.edge().Telemetry = s.Telemetry
	}
	return s, nil
}

func (s *Served) edge() *Edge {
	if s.Edge == nil {
		s.Edge = &Edge{}
	}
	return s.Edge
}

// Record has reads noted in the log of reads. It must be called before the API is made.
func (s *Served) Record(l *AccessLog) { s.edge().Access = l }

// Listen opens the server of the API, which answers that the program is alive and not ready until
// Serve says what it serves and Open lets it. Patience is how a start waits for what is away meanwhile.
// drain is how long requests in flight are waited for when the program stops; 0 for platform's default.
func (s *Served) Listen(ctx context.Context, within time.Duration, worth func(error) bool, drain time.Duration) (platform.Patience, error) {
	s.front = newFront()
	s.server = platform.Serve(platform.HTTPConfig{
		Listen: s.listen, Handler: s.front, HeaderTimeout: s.flags.HeaderTimeout,
		CertFile: s.flags.HTTPCert, KeyFile: s.flags.HTTPKey, ClientCAFile: s.flags.HTTPClientCA,
		DrainTimeout: drain,
	})
	return platform.Patience{Within: within, Worth: worth, Failed: s.front.waits}, s.server.Start(ctx)
}

// Serve adds the server of the API, which Listen opened, to the group: to be stopped in its turn.
func (s *Served) Serve(h http.Handler, g *platform.Group) *platform.HTTPServer {
	if s.flags.AdminListen != "" {
		g.Add("admin", platform.Serve(platform.HTTPConfig{Listen: s.flags.AdminListen, Handler: profiles()}))
	}
	srv := s.server
	g.Add("http", platform.Running{HTTPServer: srv})
	g.Add("front", platform.NewRunner(func(ctx context.Context, ready func()) error {
		s.front.open(h) // all that it needs has started
		ready()
		<-ctx.Done()
		return nil
	}))
	if files := srv.TLSFiles(); slices.Contains(files, s.flags.HTTPCert) && s.flags.HTTPCert != "" {
		g.Add("certificates", platform.ReloadOnChange(platform.ReloadConfig{Files: files, Reload: srv.ReloadTLS}))
	}
	return srv
}

// profiles answers with what runtime/pprof knows.
func profiles() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return mux
}

// VocabularyFlags are the flags of the types that a deployment adds (the tags are kong's).
type VocabularyFlags struct {
	EventTypes string `help:"Log-only event types that the deployment adds to the vocabulary, with commas between them." placeholder:"TYPE,…" env:"PALIMPSEST_EVENT_TYPES"`
}

// Vocabulary is the built-in types with those of the deployment. A list that cannot be one is a usage
// error.
func (f VocabularyFlags) Vocabulary() (*events.Vocabulary, error) {
	v, err := events.ParseVocabulary(f.EventTypes)
	if err != nil {
		return nil, &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--event-types: %w", err)}
	}
	return v, nil
}
