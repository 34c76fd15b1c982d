package api

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"palimpsest/internal/platform"
)

// TLSFlags say how a command and a program that serves over TLS know each other.
type TLSFlags struct {
	CAFile string `name:"ca-file" help:"PEM file with the authorities of the certificate that is served under --url. Default: the system's." placeholder:"FILE" env:"PALIMPSEST_CA_FILE"`
	Cert   string `help:"PEM file with a client certificate, where the server wants one." placeholder:"FILE" env:"PALIMPSEST_CLIENT_CERT"`
	Key    string `help:"PEM file with its key." placeholder:"FILE" env:"PALIMPSEST_CLIENT_KEY"`
}

// Given is the first of the flags that was given on the command line and not by the environment, "" for
// none.
func (f TLSFlags) Given() string {
	for _, flag := range []struct{ name, value, env string }{
		{"--ca-file", f.CAFile, "PALIMPSEST_CA_FILE"}, {"--cert", f.Cert, "PALIMPSEST_CLIENT_CERT"}, {"--key", f.Key, "PALIMPSEST_CLIENT_KEY"},
	} {
		if flag.value != "" && flag.value != os.Getenv(flag.env) {
			return flag.name
		}
	}
	return ""
}

// BaseURL checks the URL of a program's HTTP API as --url gives it, and returns it without a slash at its end.
func BaseURL(text string) (string, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return "", &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--url: expected http://HOST:PORT or https://HOST:PORT, found %q", text)}
	}
	return strings.TrimSuffix(text, "/"), nil
}

// Transport returns the transport for requests. A file that cannot be used is a usage error.
func (f TLSFlags) Transport() (*http.Transport, error) {
	usage := func(format string, args ...any) (*http.Transport, error) {
		return nil, &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf(format, args...)}
	}
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	if f.CAFile != "" {
		b, err := os.ReadFile(f.CAFile)
		if err != nil {
			return usage("--ca-file: %w", err)
		}
		if t.TLSClientConfig.RootCAs = x509.NewCertPool(); !t.TLSClientConfig.RootCAs.AppendCertsFromPEM(b) {
			return usage("--ca-file %s: expected certificates in PEM, found none", f.CAFile)
		}
	}
	if f.Cert != "" || f.Key != "" {
		if f.Cert == "" || f.Key == "" {
			return usage("--cert %q and --key %q: expected both or neither", f.Cert, f.Key)
		}
		pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		if err != nil {
			return usage("--cert and --key: %w", err)
		}
		t.TLSClientConfig.Certificates = []tls.Certificate{pair}
	}
	return t, nil
}

// HealthFlags are the flags of a health check by command, for images that hold nothing else
// that could make a request.
type HealthFlags struct {
	TLSFlags
	Live     bool          `help:"Ask only whether the program is alive, and not whether it can serve."`
	Timeout  time.Duration `help:"How long to wait for an answer." default:"3s"`
	Insecure bool          `help:"Do not check the server's certificate: it hardly names a loopback address."`
}

// Check asks the program at a base URL how it is. The error says what it answered.
func (f HealthFlags) Check(ctx context.Context, base string) error {
	if err := platform.AboveZero(map[string]time.Duration{"timeout": f.Timeout}); err != nil {
		return err
	}
	base, err := BaseURL(base)
	if err != nil {
		return err
	}
	t, err := f.Transport()
	if err != nil {
		return err
	}
	t.Proxy, t.DisableKeepAlives, t.TLSClientConfig.InsecureSkipVerify = nil, true, f.Insecure // chosen by whoever asks
	path := "/readyz"
	if f.Live {
		path = "/healthz"
	}
	ctx, cancel := context.WithTimeout(ctx, f.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path, nil)
	if err != nil {
		return err
	}
	resp, err := t.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("%s did not answer: %w", base, err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // only to be shown
	if resp.StatusCode != http.StatusOK {
		return errors.New(strings.TrimSpace(fmt.Sprintf("%s%s answered %d: %s", base, path, resp.StatusCode, b)))
	}
	return nil
}
