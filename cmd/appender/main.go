// Command appender accepts events over HTTP, validates them and commits them to the log.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/alecthomas/kong"

	"palimpsest/internal/platform"
)

type cli struct {
	platform.LogFlags
	Serve  serveCmd  `cmd:"" help:"Serve the append API. Without --nats it runs an embedded NATS server."`
	Import importCmd `cmd:"" help:"Import session files. Exit code 1 when any of them has a problem."`

	EventTypes eventTypesCmd `cmd:"" help:"The log-only event types that the deployment added."`
}

func main() {
	os.Exit(platform.Main(context.Background(), func(ctx context.Context) error { return run(ctx, os.Args[1:]) }))
}

func run(ctx context.Context, args []string) error {
	var c cli
	k, err := kong.New(&c, kong.Name("appender"), kong.Description("Appends events to the sessions of LLM agents, kept on NATS JetStream."), kong.UsageOnError())
	if err != nil {
		return err
	}
	kctx, err := k.Parse(args)
	if err != nil {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("%w; appender --help shows what there is", err)}
	}
	if err := c.LogFlags.Setup(); err != nil {
		return err
	}
	kctx.BindTo(ctx, (*context.Context)(nil))
	return kctx.Run()
}
