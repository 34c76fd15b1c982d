// Command projector folds the log into snapshots and serves what was derived.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/alecthomas/kong"

	"palimpsest/internal/events"
	"palimpsest/internal/platform"
)

type cli struct {
	platform.LogFlags
	Serve      serveCmd      `cmd:"" help:"Project the log and serve the read API."`
	Health     healthCmd     `cmd:"" help:"Ask a running projector how it is. Exit code 1 unless it can serve."`
	Doctor     doctorCmd     `cmd:"" help:"Check connection, permissions, stream, buckets, replicas and clock, and say what to mend. Exit code 1 when something must be."`
	Sessions   sessionsCmd   `cmd:"" help:"List sessions and what they are doing."`
	Feed       feedCmd       `cmd:"" help:"Show changes of all sessions as they happen, until Ctrl-C."`
	Messages   messagesCmd   `cmd:"" help:"Print the messages that the model should see."`
	Surface    surfaceCmd    `cmd:"" help:"Print the nodes of the surface."`
	Watch      watchCmd      `cmd:"" help:"Show changes of the surface as they happen, until Ctrl-C."`
	Transcript transcriptCmd `cmd:"" help:"Print what a human saw, replacements left out."`
	Events     eventsCmd     `cmd:"" help:"Print events of the log, shadowed ones too."`
	Export     exportCmd     `cmd:"" help:"Write a session's file to stdout."`
	Explain    explainCmd    `cmd:"" help:"Show where an event came from, and what shadows it."`
	Diff       diffCmd       `cmd:"" help:"Show which nodes of the surface came and went between two seqs."`
	Blame      blameCmd      `cmd:"" help:"Show which events put a text into the messages and took it out."`
	Replay     replayCmd     `cmd:"" help:"Print events at the pace at which they were recorded."`
	Usage      usageCmd      `cmd:"" help:"Sum up the tokens that assistant messages tell of."`
	Verify     verifyCmd     `cmd:"" help:"Check logs and snapshots. Exit code 1 on any finding."`
	Quarantine quarantineCmd `cmd:"" help:"Sessions whose log holds what cannot be folded."`
	Rebuild    rebuildCmd    `cmd:"" help:"Fold all snapshots anew beside the ones that serve, and switch."`
	Sweep      sweepCmd      `cmd:"" help:"Remove pages of snapshots that no head refers to. May run beside projectors."`
	Status     statusCmd     `cmd:"" help:"Show which workers there are and how far each partition is."`
}

func main() {
	os.Exit(platform.Main(context.Background(), func(ctx context.Context) error { return run(ctx, os.Args[1:]) }))
}

func run(ctx context.Context, args []string) error {
	var c cli
	k, err := kong.New(&c, kong.Name("projector"), kong.Description("Projects the sessions of LLM agents and serves their messages."), kong.UsageOnError())
	if err != nil {
		return err
	}
	kctx, err := k.Parse(args)
	if err != nil {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("%w; projector --help shows what there is", err)}
	}
	if err := c.LogFlags.Setup(); err != nil {
		return err
	}
	kctx.BindTo(ctx, (*context.Context)(nil))
	if err = kctx.Run(); errors.Is(err, &events.Error{Code: events.CodeBadRequest}) {
		err = &platform.ExitError{Code: platform.ExitUsage, Err: err}
	}
	switch strings.Fields(kctx.Command())[0] {
	case "serve", "watch", "feed": // until somebody ends them
		return err
	}
	return platform.ToTheEnd(ctx, err)
}
