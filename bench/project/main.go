// Command project measures the projector against what JetStream itself can do: folding a log
// into snapshots beside bare consumers and bare KV writes of the same bytes, and reading a
// session's messages beside bare KV reads of the same keys. What is compared runs in turns on
// the same server, and the ratio of the two is what counts. It starts all that it needs, and
// leaves nothing behind.
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
	if err := rig.Parse(&b, "project", "Measures projection and reads, beside bare consumers, KV writes and KV reads of the same bytes at the same server.", args, stdout, stderr); err != nil {
		return err
	}
	return b.run(ctx)
}
