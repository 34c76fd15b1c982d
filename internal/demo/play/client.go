package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
)

// event is one event of the log with the line that it stands in.
type event struct {
	Seq       int64           `json:"seq"`
	Time      int64           `json:"time"`
	Type      string          `json:"type"`
	SurfaceOp json.RawMessage `json:"surfaceOp"`
	Data      json.RawMessage `json:"data"`
	line      string
}

// replaces reports whether the event takes the place of others on the surface.
func (e *event) replaces() bool { return bytes.HasPrefix(e.SurfaceOp, []byte("{")) }

func parseEvent(line []byte) (event, error) {
	e := event{line: string(line)}
	err := json.Unmarshal(line, &e)
	return e, err
}

// node is one node of a surface.
type node struct {
	Seq   int64  `json:"seq"`
	Type  string `json:"type"`
	Bytes int    `json:"bytes"`
}

// problem is what an API answers instead of what was asked for.
type problem struct {
	Status int    `json:"status"`
	Code   string `json:"code"`
	Rule   string `json:"rule"`
	Detail string `json:"detail"`
}

// request sends a request and returns the answer's status and body.
func request(ctx context.Context, method, url, body string) (int, []byte, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, nil, fmt.Errorf("%s %s: %w", method, url, err)
	}
	return resp.StatusCode, b, nil
}

// get reads what must be there.
func get(ctx context.Context, url string) ([]byte, error) {
	status, b, err := request(ctx, http.MethodGet, url, "")
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("GET %s: status %d: %s", url, status, b)
	}
	return b, err
}

func getJSON(ctx context.Context, url string, into any) error {
	b, err := get(ctx, url)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("GET %s: %w", url, err)
	}
	return nil
}

// events reads the events from one seq through another.
func (s *stack) events(ctx context.Context, id string, from, to int64) ([]event, error) {
	var page struct {
		Events []json.RawMessage `json:"events"`
	}
	if err := getJSON(ctx, fmt.Sprintf("%s/v1/sessions/%s/events?from=%d&to=%d", s.projector.HTTP, id, from, to), &page); err != nil {
		return nil, err
	}
	out := make([]event, len(page.Events))
	for i, line := range page.Events {
		var err error
		if out[i], err = parseEvent(line); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// surface reads the surface once it holds an event.
func (s *stack) surface(ctx context.Context, id string, seq int64) ([]node, error) {
	var v struct {
		Nodes []node `json:"nodes"`
	}
	err := getJSON(ctx, fmt.Sprintf("%s/v1/sessions/%s/surface?minSeq=%d&timeout=10s", s.projector.HTTP, id, seq), &v)
	return v.Nodes, err
}
