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
	Token  tokenCmd  `cmd:"" help:"Bearer tokens of the HTTP APIs."`
	Health healthCmd `cmd:"" help:"Ask a running appender how it is. Exit code 1 unless it can serve."`
	Doctor doctorCmd `cmd:"" help:"Check connection, permissions, stream, buckets, replicas, clock and disk, and say what to mend. Exit code 1 when something must be."`
	Import importCmd `cmd:"" help:"Import session files and archives. Exit code 1 when any of them has a problem."`
	Erase  eraseCmd  `cmd:"" help:"Take a session away for good. Its log is overwritten, a tombstone stays."`
	Keygen keygenCmd `cmd:"" help:"Make a key that signs checkpoints, and print its public key."`

	EventTypes eventTypesCmd `cmd:"" help:"The log-only event types that the deployment added."`
}

func main() {
	os.Exit(platform.Main(context.Background(), func(ctx context.Context) error { return run(ctx, os.Args[1:]) }))
}

func run(ctx context.Context, args []string) error {
	var c cli
	k, err := kong.New(&c, kong.Name("appender"), kong.Description("Appends events to the sessions of LLM agents, kept on NATS JetStream."), kong.UsageOnError(),
		kong.Vars{"data": defaultData, "listen": defaultListen})
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
	err = kctx.Run()
	if kctx.Command() == "serve" { // until somebody ends it
		return err
	}
	return platform.ToTheEnd(ctx, err)
}
