package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"palimpsest/internal/api"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

type statusCmd struct {
	storeFlags
	URL   string `name:"url" help:"Ask the projector that serves there; without it the buckets are read, and no projector need run." placeholder:"URL"`
	Token string `help:"Bearer token for --url; better given in the environment than here, where ps shows it." env:"PALIMPSEST_TOKEN" placeholder:"TOKEN"`
	api.TLSFlags
	JSON bool `name:"json" help:"Print what the HTTP API answers."`
}

func (c *statusCmd) Run(ctx context.Context) error {
	const path = "/v1/workers"
	if c.URL == "" {
		given := c.Given()
		if c.Token != "" && c.Token != os.Getenv("PALIMPSEST_TOKEN") {
			given = "--token"
		}
		if given != "" {
			return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("status: %s goes with --url, and without it the buckets are read over NATS; give --url, or --tls-ca and its like for NATS", given)}
		}
	}
	if c.URL != "" {
		b, err := urlFlag{c.URL, c.Token, c.TLSFlags}.call(ctx, http.MethodGet, path, nil)
		if err != nil {
			return err
		}
		return c.print(b)
	}
	return c.with(ctx, func(s *store) error {
		b, err := s.get(ctx, path, url.Values{})
		if err != nil {
			return err
		}
		return c.print(b)
	})
}

// print shows who works what, and how far it is.
func (c *statusCmd) print(b []byte) error {
	if c.JSON {
		_, err := os.Stdout.Write(b)
		return err
	}
	var st struct {
		projection.Overview
		Quarantined []projection.Quarantine
	}
	if err := json.Unmarshal(b, &st); err != nil {
		return err
	}
	fmt.Printf("caught up: %t   lag: %s commits   oldest unflushed: %d ms   quarantined: %d   unowned partitions: %d\n",
		st.CaughtUp, count(st.Lag), st.OldestUnflushedMs, len(st.Quarantined), len(st.Unowned))
	fmt.Printf("workers: %d\n", len(st.Workers))
	for _, w := range st.Workers {
		notes := []string{w.HTTP, fmt.Sprintf("%d of %d partitions", len(w.Partitions), w.Assigned), "renewed " + time.UnixMilli(w.Renewed).UTC().Format(time.RFC3339)}
		if w.Silent {
			notes = append(notes, fmt.Sprintf("SILENT for %v", time.Duration(w.SilentMs)*time.Millisecond))
		}
		if w.Draining {
			notes = append(notes, "draining")
		}
		fmt.Printf("  %s  %s\n", w.ID, strings.Join(notes, "  "))
	}
	fmt.Printf("%9s %12s %12s %8s %9s %9s %12s %11s  %s\n", "partition", "read", "checkpoint", "lag", "unflushed", "sessions", "bytes", "quarantined", "worker")
	for _, p := range st.Partitions {
		worker := "nobody"
		if p.Worker != nil {
			worker = *p.Worker
		}
		fmt.Printf("%9d %12d %12d %8s %6d ms %9d %12d %11d  %s", p.Partition, p.Read, p.Checkpoint, count(p.Lag), p.OldestUnflushedMs, p.Sessions, p.Bytes, p.Quarantined, worker)
		if p.SilentSince != nil {
			fmt.Printf("  silent since %s; the lag is counted from the checkpoint on", time.UnixMilli(*p.SilentSince).UTC().Format(time.RFC3339))
		}
		if p.Error != "" {
			fmt.Printf("  %s", p.Error)
		}
		fmt.Println()
	}
	for i := range st.Quarantined {
		if err := printRecord(&st.Quarantined[i], false); err != nil {
			return err
		}
	}
	return nil
}

func count(n *uint64) string {
	if n == nil {
		return "?"
	}
	return fmt.Sprint(*n)
}
