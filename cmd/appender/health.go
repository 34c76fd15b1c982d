package main

import (
	"context"

	"palimpsest/internal/api"
)

type healthCmd struct {
	api.HealthFlags
	URL string `name:"url" help:"HTTP API of the appender." default:"http://127.0.0.1:8080"`
}

func (c *healthCmd) Run(ctx context.Context) error { return c.Check(ctx, c.URL) }
