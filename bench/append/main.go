// Command append measures the appender against what JetStream itself can do: every case runs
// beside raw publishes of the same bytes to the same server, in turns, and the ratio of the two
// is what counts. It starts all that it needs, and leaves nothing behind.
package main

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/alecthomas/kong"

	"palimpsest/internal/platform"
)

func main() {
	os.Exit(platform.Main(context.Background(), func(ctx context.Context) error {
		return run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}))
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	b := bench{out: stdout, progress: stderr}
	k, err := kong.New(&b, kong.Name("append"), kong.Writers(stdout, stderr),
		kong.Description("Measures appends, beside raw publishes of the same bytes to the same server."))
	if err != nil {
		return err
	}
	if _, err := k.Parse(args); err != nil {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("%w; go run ./bench/append --help shows what there is", err)}
	}
	return b.run(ctx)
}
