package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"

	"palimpsest/internal/events"
)

// Local answers a GET of a handler without a server: for the command line and the NATS
// services, which so say what HTTP says. A problem comes back as the error that it stands for.
func Local(ctx context.Context, h http.Handler, path string, q url.Values) (header http.Header, body []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, path+"?"+q.Encode(), nil)
	if err != nil {
		return nil, nil, badRequest(err.Error())
	}
	rec := localAnswer{header: http.Header{}, status: http.StatusOK}
	defer func() {
		if p := recover(); p == http.ErrAbortHandler {
			header, body, err = nil, nil, &events.Error{Code: events.CodeInternal, Detail: "the answer broke off; the log says why"}
		} else if p != nil {
			panic(p)
		}
	}()
	h.ServeHTTP(&rec, req)
	if rec.status != http.StatusOK {
		return nil, nil, ErrorIn(rec.status, rec.body.Bytes())
	}
	return rec.header, rec.body.Bytes(), nil
}

// ErrorIn turns a problem document into the error that it stands for.
func ErrorIn(status int, body []byte) error {
	var p Problem
	if err := json.Unmarshal(body, &p); err != nil || p.Code == "" {
		return fmt.Errorf("status %d: %s", status, body)
	}
	return &events.Error{Code: p.Code, Rule: p.Rule, Detail: p.Detail, Index: p.Index, Session: p.Session, Seq: p.Seq,
		ExpectedSeq: p.ExpectedSeq, ActualSeq: p.ActualSeq, Epoch: p.Epoch, Commit: p.Commit}
}

// localAnswer is an answer in memory.
type localAnswer struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (a *localAnswer) Header() http.Header         { return a.header }
func (a *localAnswer) WriteHeader(status int)      { a.status = status }
func (a *localAnswer) Write(b []byte) (int, error) { return a.body.Write(b) }
