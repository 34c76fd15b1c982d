// Command play runs both programs of bin/ on the bundled session and shows what they make of
// it. It talks to them only as a user would: command line, ready lines, HTTP, signals. With
// --keep it starts them on their default ports and leaves them up until Ctrl-C.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

// Bounds of every wait.
const (
	demoTime    = 2 * time.Minute  // the whole demonstration, without its end
	startTime   = 30 * time.Second // until a program prints its ready line
	commandTime = 30 * time.Second // one command, such as an import
	requestTime = 15 * time.Second // one HTTP request
	stopTime    = 40 * time.Second // from SIGTERM to the end; the programs drain for 30 s at most
)

func main() {
	// Children are started by this thread, and on Linux they are told when it ends.
	runtime.LockOSThread()
	os.Exit(run())
}

func run() int {
	bin := flag.String("bin", "bin", "`directory` that holds appender and projector (make build)")
	keep := flag.Bool("keep", false, "keep both programs up on their default ports until Ctrl-C")
	data := flag.String("data", "data", "`directory` of the store, with --keep; the demonstration uses a temporary one")
	flag.Parse()
	if flag.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "play: unexpected argument %q; -h shows what there is\n", flag.Arg(0))
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()

	do := func(s *stack) error { return s.demonstrate(ctx) }
	s := &stack{bin: *bin, listen: "127.0.0.1:0", projectorListen: "127.0.0.1:0", natsListen: "127.0.0.1:0"}
	if *keep {
		do = func(s *stack) error { return s.keepUp(ctx) }
		s.listen, s.projectorListen, s.natsListen = "127.0.0.1:8080", "127.0.0.1:8081", "127.0.0.1:4222"
		s.data, s.log = *data, os.Stderr
	}
	err := s.with(do)
	switch {
	case err == nil:
		return 0
	case ctx.Err() != nil && errors.Is(err, context.Canceled) && !errors.Is(err, errUnclean):
		fmt.Fprintln(os.Stderr, "\nplay: interrupted; everything is stopped")
	default:
		fmt.Fprintln(os.Stderr, "\nplay:", err)
	}
	return 1
}

// errUnclean says that something did not end as it should, or is left behind.
var errUnclean = errors.New("at the end")

// with makes the temporary directory, runs do, and ends and removes whatever was started and
// made, however do ended.
func (s *stack) with(do func(*stack) error) (err error) {
	for _, name := range []string{"appender", "projector"} {
		if _, err := os.Stat(filepath.Join(s.bin, name)); err != nil {
			return fmt.Errorf("%w; run make build first", err)
		}
	}
	if s.temp, err = os.MkdirTemp("", "palimpsest-demo-"); err != nil {
		return err
	}
	defer func() {
		if end := errors.Join(s.stop(), os.RemoveAll(s.temp)); end != nil {
			err = errors.Join(err, fmt.Errorf("%w: %w", errUnclean, end))
		}
	}()
	if s.data == "" {
		s.data = filepath.Join(s.temp, "store")
	}
	return do(s)
}
