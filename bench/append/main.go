// Command append measures the appender against what JetStream itself can do: every case runs
// beside raw publishes of the same bytes to the same server, in turns, and the ratio of the two
// is what counts. It starts all that it needs, and leaves nothing behind.
package main

import (
	"context"
	"io"
	"os"

	"palimpsest/bench/rig"
	"palimpsest/internal/platform"
)

func main() {
	os.Exit(platform.Main(context.Background(), func(ctx context.Context) error {
		return run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	b := bench{out: stdout, progress: stderr}
	if err := rig.Parse(&b, "append", "Measures appends, beside raw publishes of the same bytes to the same server.", args, stdout, stderr); err != nil {
		return err
	}
	return b.run(ctx)
}
