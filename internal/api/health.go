package api

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
)

// HealthFlags are the flags of a health check by command, for images that hold nothing else
// that could make a request.
type HealthFlags struct {
	Live     bool          `help:"Ask only whether the program is alive, and not whether it can serve."`
	Timeout  time.Duration `help:"How long to wait for an answer." default:"3s"`
	Insecure bool          `help:"Do not check the server's certificate: it hardly names a loopback address."`
	Cert     string        `help:"PEM file with a client certificate, where the server wants one." placeholder:"FILE"`
	Key      string        `help:"PEM file with its key." placeholder:"FILE"`
}

// Check asks the program at a base URL how it is. The error says what it answered.
func (f HealthFlags) Check(ctx context.Context, url string) error {
	t := &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: f.Insecure}} // chosen by whoever asks
	if f.Cert != "" || f.Key != "" {
		pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
		if err != nil {
			return fmt.Errorf("client certificate: %w", err)
		}
		t.TLSClientConfig.Certificates = []tls.Certificate{pair}
	}
	path := "/readyz"
	if f.Live {
		path = "/healthz"
	}
	ctx, cancel := context.WithTimeout(ctx, f.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(url, "/")+path, nil)
	if err != nil {
		return err
	}
	resp, err := t.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("%s did not answer: %w", url, err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 4096)) // only to be shown
	if resp.StatusCode != http.StatusOK {
		return errors.New(strings.TrimSpace(fmt.Sprintf("%s%s answered %d: %s", url, path, resp.StatusCode, b)))
	}
	return nil
}
