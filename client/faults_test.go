package client_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
)

// fault is what happens to one request. The zero fault lets it through.
type fault struct {
	name   string
	stored bool // the service is asked all the same
	answer func(*http.Request) (*http.Response, error)
}

// faulty is a network that loses answers. Each request takes the next fault, and is let through
// when there is none left.
type faulty struct {
	under http.RoundTripper

	mu   sync.Mutex // guards all below
	next []fault
	sent []*http.Request // what was sent so far
}

// expect sets the faults of the next requests.
func (f *faulty) expect(next ...fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.next, f.sent = next, nil
}

// requests are those that were sent since expect.
func (f *faulty) requests() []*http.Request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.sent
}

// RoundTrip sends a request, or not, and answers as the fault says.
func (f *faulty) RoundTrip(r *http.Request) (*http.Response, error) {
	f.mu.Lock()
	f.sent = append(f.sent, r)
	var now *fault
	if len(f.next) > 0 {
		now, f.next = &f.next[0], f.next[1:]
	}
	f.mu.Unlock()
	if now == nil || now.answer == nil {
		return f.under.RoundTrip(r)
	}
	if !now.stored {
		if r.Body != nil {
			_ = r.Body.Close()
		}
		return now.answer(r)
	}
	resp, err := f.under.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
	return now.answer(r)
}

// status answers with a status, headers and no problem document.
func status(code int, header ...string) func(*http.Request) (*http.Response, error) {
	return func(r *http.Request) (*http.Response, error) {
		return respond(r, code, "text/html", "<html>a proxy's page</html>", header...), nil
	}
}

// problem answers with a problem document.
func problem(code int, document string, header ...string) func(*http.Request) (*http.Response, error) {
	return func(r *http.Request) (*http.Response, error) {
		return respond(r, code, "application/problem+json", document, header...), nil
	}
}

func respond(r *http.Request, code int, contentType, body string, header ...string) *http.Response {
	h := http.Header{"Content-Type": {contentType}}
	for i := 0; i < len(header); i += 2 {
		h.Set(header[i], header[i+1])
	}
	return &http.Response{StatusCode: code, Status: http.StatusText(code), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body)), Request: r}
}

func lost(err error) func(*http.Request) (*http.Response, error) {
	return func(*http.Request) (*http.Response, error) { return nil, err }
}

// halfAnswered begins a receipt and breaks off.
func halfAnswered(r *http.Request) (*http.Response, error) {
	resp := respond(r, http.StatusCreated, "application/json", "")
	resp.Body = io.NopCloser(io.MultiReader(bytes.NewReader([]byte(`{"session":"x","firstSeq":0,"la`)), broken{}))
	resp.ContentLength = 200
	return resp, nil
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// silent answers nothing until whoever asked gives up.
func silent(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, context.Cause(r.Context())
}

const (
	overloaded  = `{"type":"urn:palimpsest:problem:overloaded","title":"Too many requests","status":429,"detail":"wait","code":"overloaded"}`
	unavailable = `{"type":"urn:palimpsest:problem:unavailable","title":"JetStream is away","status":503,"detail":"wait","code":"unavailable"}`
	undecided   = `{"type":"urn:palimpsest:problem:outcome-unknown","title":"The outcome is unknown","status":503,"detail":"wait","code":"outcome-unknown","commit":"C1"}`
)

// What can come between an append and its receipt.
var (
	refusedConnection = fault{"refused connection", false, lost(&net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED})}
	serviceAway       = fault{"503", false, problem(http.StatusServiceUnavailable, unavailable)}
	proxyAway         = fault{"503 by a proxy", false, status(http.StatusServiceUnavailable)}
	resetBefore       = fault{"reset before the service had it", false, lost(&net.OpError{Op: "write", Net: "tcp", Err: syscall.EPIPE})}
	resetAfter        = fault{"reset after it was stored", true, lost(&net.OpError{Op: "read", Net: "tcp", Err: syscall.ECONNRESET})}
	brokenOff         = fault{"half an answer after it was stored", true, halfAnswered}
	proxyPage         = fault{"200 with a page after it was stored", true, status(http.StatusOK)}
	through           fault

	faultTable = []fault{
		refusedConnection,
		serviceAway,
		proxyAway,
		resetBefore,
		{"429", false, problem(http.StatusTooManyRequests, overloaded)},
		{"429 by a proxy", false, status(http.StatusTooManyRequests)},
		{"502 by a proxy", false, status(http.StatusBadGateway)},
		{"outcome-unknown, not stored", false, problem(http.StatusServiceUnavailable, undecided)},

		resetAfter,
		brokenOff,
		proxyPage,
		{"end of the connection after it was stored", true, lost(io.ErrUnexpectedEOF)},
		{"502 by a proxy after it was stored", true, status(http.StatusBadGateway)},
		{"503 by a proxy after it was stored", true, status(http.StatusServiceUnavailable)},
		{"504 by a proxy after it was stored", true, status(http.StatusGatewayTimeout)},
		{"outcome-unknown, stored", true, problem(http.StatusServiceUnavailable, undecided)},
	}
)
