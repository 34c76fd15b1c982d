package client

import (
	"crypto/rand"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// Config says where the services are and how patient a client is.
type Config struct {
	// AppenderURL is the base URL of the appender, such as http://127.0.0.1:8080. Calls that
	// write, and Status, need it.
	AppenderURL string
	// ProjectorURL is the base URL of the projector, such as http://127.0.0.1:8081. Calls that
	// read need it.
	ProjectorURL string
	// Token is sent as the bearer token of every request, to whichever service. Defaults to none.
	Token string
	// HTTPClient sends the requests. Redirects are errors unless its CheckRedirect says
	// otherwise. Defaults to one of the client's own, without a timeout.
	HTTPClient *http.Client

	// RetryBudget is how long a call is tried again while it is certain that nothing was
	// stored: the service is overloaded, away or cannot be reached. A negative one never tries
	// again. It does not end an append whose outcome is unknown: only the context does.
	// Defaults to 30 s.
	RetryBudget time.Duration
	// MinBackoff and MaxBackoff are the first and the longest pause before another attempt.
	// They double from the one to the other, shortened at random by up to a half; a longer
	// Retry-After is waited for in full. Default to 50 ms and 2 s.
	MinBackoff, MaxBackoff time.Duration
	// AttemptTimeout is how long one attempt waits for its answer, besides what a read asks
	// the projector to wait. It should exceed what the appender itself takes to find out
	// whether something was stored (20 s). Defaults to 60 s.
	AttemptTimeout time.Duration
	// KeyWindow is how long the appender recognises an idempotency key: an append without an
	// ExpectedSeq is not sent again when nine tenths of it have passed. It MUST NOT exceed the
	// appender's --key-window. Defaults to 10 min, as there.
	KeyWindow time.Duration
}

func (c Config) withDefaults() Config {
	if c.HTTPClient == nil {
		t := http.DefaultTransport.(*http.Transport).Clone()
		t.MaxIdleConnsPerHost = 64
		c.HTTPClient = &http.Client{Transport: t}
	}
	if c.HTTPClient.CheckRedirect == nil { // a redirected POST may become a GET
		own := *c.HTTPClient
		own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		c.HTTPClient = &own
	}
	for _, d := range []struct {
		of    *time.Duration
		value time.Duration
	}{
		{&c.RetryBudget, 30 * time.Second}, {&c.MinBackoff, 50 * time.Millisecond}, {&c.MaxBackoff, 2 * time.Second},
		{&c.AttemptTimeout, time.Minute}, {&c.KeyWindow, 10 * time.Minute},
	} {
		if *d.of == 0 {
			*d.of = d.value
		}
	}
	return c
}

func (c Config) validate() error {
	if c.AppenderURL == "" && c.ProjectorURL == "" {
		return bad("", "expected the URL of an appender, of a projector or of both, found neither")
	}
	for name, v := range map[string]string{"AppenderURL": c.AppenderURL, "ProjectorURL": c.ProjectorURL} {
		if u, err := url.Parse(v); v != "" && (err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "") {
			return bad("", "%s: expected http://host:port or https://host:port, found %q", name, v)
		}
	}
	for name, d := range map[string]time.Duration{"MinBackoff": c.MinBackoff, "MaxBackoff": c.MaxBackoff, "AttemptTimeout": c.AttemptTimeout, "KeyWindow": c.KeyWindow} {
		if d < 0 {
			return bad("", "%s: expected a positive duration, found %v", name, d)
		}
	}
	return nil
}

// Client talks to one deployment. It is safe for concurrent use.
type Client struct {
	cfg                 Config
	appender, projector string // base URLs without a slash at their end
}

// New returns a client. It sends nothing yet. The error says which field is not valid.
func New(cfg Config) (*Client, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	return &Client{cfg.withDefaults(), strings.TrimRight(cfg.AppenderURL, "/"), strings.TrimRight(cfg.ProjectorURL, "/")}, nil
}

// CloseIdleConnections closes the connections that are not in use.
func (c *Client) CloseIdleConnections() { c.cfg.HTTPClient.CloseIdleConnections() }

// Session returns the handle of a session, which need not exist. An id is 1 to 200 bytes of
// printable UTF-8, and neither "." nor "..".
func (c *Client) Session(id string) *Session { return &Session{c: c, id: id} }

// NewID returns a session id that nobody else makes up: 26 letters and digits from crypto/rand.
func NewID() string { return rand.Text() }

// Session is the handle of one session. It holds no state and is safe for concurrent use.
type Session struct {
	c  *Client
	id string
}

// ID returns the session's id.
func (s *Session) ID() string { return s.id }

// path is the path of a call on the session.
func (s *Session) path(call string) string {
	id := url.PathEscape(s.id)
	if s.id == "." || s.id == ".." { // for the service to refuse, not for a proxy to rewrite
		id = strings.ReplaceAll(s.id, ".", "%2E")
	}
	return fmt.Sprintf("/v1/sessions/%s%s", id, call)
}
