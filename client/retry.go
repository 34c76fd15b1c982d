package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"time"
)

// request is one call of a service, however often it is sent.
type request struct {
	base         string // base URL of the service
	method, path string
	query        url.Values
	header       http.Header
	body         []byte
	session      string

	// writes says that an attempt without an answer may have stored something. Sending the
	// request again must then be harmless.
	writes bool
	// recognised says that the service recognises a repeated request, so that its refusal
	// means that no attempt was stored. Without it a refusal may be due to an earlier attempt.
	recognised bool
	// key is the idempotency key that the request is recognised by, with nothing else; the
	// request is not repeated when the service may have forgotten it.
	key string
	// patience is how long the service itself was asked to wait.
	patience time.Duration
	// stream hands the body of the answer on unread; it is then the caller's to close.
	stream bool
}

// answer is a 2xx answer.
type answer struct {
	status int
	header http.Header
	body   []byte
	stream io.ReadCloser
}

// do sends a request until it is answered, and decodes the answer into out, unless that is nil.
func (c *Client) do(ctx context.Context, r *request, out any) (*answer, error) {
	if r.base == "" {
		return nil, bad(r.session, "%s %s needs a service whose URL was not given; set it in Config", r.method, r.path)
	}
	begun := time.Now()
	unknown := false // an attempt may have been stored
	var last *Error
	for attempts := 0; ; attempts++ {
		if ctx.Err() != nil {
			return nil, r.ended(ctx, last, unknown, attempts)
		}
		a, err := c.attempt(ctx, r, out)
		if err == nil {
			return a, nil
		}
		err.Attempts, err.IdempotencyKey = attempts+1, r.header.Get(headerKey)
		if err.Session == "" {
			err.Session = r.session
		}
		last = err
		next := c.judge(r, err)
		unknown = unknown || err.OutcomeUnknown
		if next == giveUp {
			err.OutcomeUnknown = unknown && !(r.recognised && settles(err))
			return nil, err
		}
		pause := c.backoff(attempts, err.RetryAfter)
		elapsed := time.Since(begun)
		switch {
		case ctx.Err() != nil: // it says why there was no answer
		case !unknown && elapsed+pause > c.cfg.RetryBudget:
			return nil, err
		case unknown && r.key != "" && elapsed+pause > c.cfg.KeyWindow/10*9:
			e := r.ended(ctx, last, unknown, attempts+1)
			e.Detail = "it may have been stored; the appender may have forgotten the idempotency key soon, so that it was not sent again: read the log"
			return nil, e
		default:
			wait(ctx, pause)
		}
	}
}

// verdict is what follows from a failed attempt.
type verdict int

const (
	giveUp verdict = iota
	again
)

// judge says whether to try again after a failed attempt, and notes in the error whether the
// attempt may have been stored.
func (c *Client) judge(r *request, e *Error) verdict {
	switch {
	case e.Status == 0: // no answer
		var cert *tls.CertificateVerificationError
		if errors.As(e.Cause, &cert) {
			return giveUp
		}
		e.OutcomeUnknown = r.writes && !unsent(e.Cause)
		return again
	case e.Code == codeBadAnswer: // 2xx, cut off or not what the service answers
		e.OutcomeUnknown = r.writes
		return again
	case e.Status == http.StatusTooManyRequests:
		return again
	case e.Code == codeOutcomeUnknown:
		return again
	case e.Status == http.StatusServiceUnavailable && !byProxy(e):
		return again
	case e.Status == http.StatusBadGateway, e.Status == http.StatusServiceUnavailable, e.Status == http.StatusGatewayTimeout && byProxy(e):
		// A proxy answers so, too, when it has lost a service that it had sent the request to.
		e.OutcomeUnknown = r.writes
		return again
	case e.Status >= http.StatusInternalServerError && (e.Code == "internal" || byProxy(e)):
		e.OutcomeUnknown = r.writes
	}
	return giveUp
}

// byProxy reports whether an answer is no problem document, so that none of ours wrote it.
func byProxy(e *Error) bool { return e.Title == "" }

// settles reports whether a refusal is the service's judgement of what was asked for, and not
// of who asks or where.
func settles(e *Error) bool {
	return !byProxy(e) && e.Status < http.StatusInternalServerError &&
		e.Status != http.StatusUnauthorized && e.Status != http.StatusForbidden
}

// unsent reports whether an attempt failed before anything was sent.
func unsent(err error) bool {
	var op *net.OpError
	var dns *net.DNSError
	return errors.As(err, &dns) || errors.As(err, &op) && op.Op == "dial"
}

// ended is the error of a call that was not answered before its time was over.
func (r *request) ended(ctx context.Context, last *Error, unknown bool, attempts int) *Error {
	e := &Error{Code: codeCanceled, Session: r.session, Attempts: attempts, IdempotencyKey: r.header.Get(headerKey),
		Cause: context.Cause(ctx), OutcomeUnknown: unknown, Detail: "nothing was stored"}
	switch {
	case last == nil:
	case e.Cause == nil:
		e.Status, e.Commit, e.Cause = last.Status, last.Commit, last
	default:
		e.Status, e.Commit, e.Cause = last.Status, last.Commit, fmt.Errorf("%w; the last attempt: %w", e.Cause, last)
	}
	if unknown {
		e.Code = codeOutcomeUnknown
		e.Detail = "it may have been stored; do the same again to find out, or read the log"
	} else if !r.writes {
		e.Detail = ""
	}
	return e
}

// attempt sends the request once.
func (c *Client) attempt(ctx context.Context, r *request, out any) (*answer, *Error) {
	ctx, cancel := context.WithCancelCause(ctx)
	most := c.cfg.AttemptTimeout + r.patience
	over := time.AfterFunc(most, func() { cancel(fmt.Errorf("no answer within %v", most)) })
	done := func() { over.Stop(); cancel(nil) }
	u := r.base + r.path
	if len(r.query) > 0 {
		u += "?" + r.query.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, r.method, u, bytes.NewReader(r.body))
	if err != nil {
		done()
		return nil, bad(r.session, "%v", err)
	}
	if r.body == nil {
		req.Body, req.GetBody = nil, nil
	}
	for k, v := range r.header {
		req.Header[k] = v
	}
	if c.cfg.Token != "" {
		req.Header.Set("Authorization", "Bearer "+c.cfg.Token)
	}
	resp, err := c.cfg.HTTPClient.Do(req)
	if err != nil {
		done()
		return nil, &Error{Code: codeUnavailable, Cause: err, Detail: "the service did not answer"}
	}
	if resp.StatusCode/100 != 2 {
		defer done()
		defer resp.Body.Close()
		body, _ := io.ReadAll(io.LimitReader(resp.Body, maxProblem)) // what can be read of it
		return nil, refusal(resp, body)
	}
	a := &answer{status: resp.StatusCode, header: resp.Header}
	if r.stream && over.Stop() {
		a.stream = &streamed{resp.Body, cancel}
		return a, nil
	}
	if r.stream {
		defer resp.Body.Close()
		return nil, &Error{Code: codeUnavailable, Cause: context.Cause(ctx), Detail: "the service did not answer"}
	}
	defer done()
	defer resp.Body.Close()
	if a.body, err = io.ReadAll(resp.Body); err == nil && out != nil {
		err = json.Unmarshal(a.body, out)
	}
	if v, ok := out.(validated); err == nil && ok {
		err = v.validate(r.session)
	}
	if err != nil {
		return nil, &Error{Status: resp.StatusCode, Code: codeBadAnswer, Cause: err, Detail: "the answer is cut off or not one of the service"}
	}
	return a, nil
}

// maxProblem bounds what is read of an answer that is an error, in bytes.
const maxProblem = 64 << 10

// validated is an answer that can say whether it is one.
type validated interface{ validate(session string) error }

// streamed is the body of an answer that is read while it comes.
type streamed struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
}

func (s *streamed) Close() error {
	s.cancel(nil)
	return s.ReadCloser.Close()
}

// backoff is the pause before the next attempt.
func (c *Client) backoff(attempts int, asked time.Duration) time.Duration {
	d := c.cfg.MinBackoff
	for ; attempts > 0 && d < c.cfg.MaxBackoff; attempts-- {
		d *= 2
	}
	d = min(d, c.cfg.MaxBackoff)
	jitter := time.Duration(rand.Int64N(int64(d/2) + 1))
	if asked > 0 { // never earlier, and not all at the same time
		return max(asked+jitter, d-jitter)
	}
	return d - jitter
}

// wait returns after a pause or when the context ends.
func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
