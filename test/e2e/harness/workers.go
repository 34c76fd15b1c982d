package harness

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// Workers answers GET /v1/workers of a projector.
type Workers struct {
	CaughtUp bool    `json:"caughtUp"`
	Lag      *uint64 `json:"lag"`
	Unowned  []int   `json:"unowned"`
	Workers  []struct {
		ID         string `json:"id"`
		Draining   bool   `json:"draining"`
		Partitions []int  `json:"partitions"`
	} `json:"workers"`
	Partitions []struct {
		Partition int     `json:"partition"`
		Worker    *string `json:"worker"`
		Error     string  `json:"error"`
	} `json:"partitions"`
}

// Loads is how many partitions each worker has; a worker without any is not in it.
func (w Workers) Loads() map[string]int {
	n := map[string]int{}
	for _, p := range w.Partitions {
		if p.Worker != nil {
			n[*p.Worker]++
		}
	}
	return n
}

// Workers reads who works what.
func (c *Client) Workers(ctx context.Context) (Workers, error) {
	var w Workers
	_, err := c.call(ctx, &w, http.MethodGet, "/v1/workers", nil)
	if err == nil && len(w.Partitions) != Partitions {
		err = fmt.Errorf("%d partitions, want %d", len(w.Partitions), Partitions)
	}
	return w, err
}

// Metric reads one metric without labels.
func (c *Client) Metric(ctx context.Context, name string) (float64, error) {
	a, err := c.Do(ctx, http.MethodGet, "/metrics", nil)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(a.Body)) {
		if value, ok := strings.CutPrefix(line, name+" "); ok {
			return strconv.ParseFloat(strings.TrimSpace(value), 64)
		}
	}
	return 0, fmt.Errorf("there is no metric %s", name)
}
