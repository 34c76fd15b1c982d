package platform

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Exit codes of Main. A process that was ended by a second signal has 128 plus the signal's number, as a shell
// would report it: 130 for SIGINT, 143 for SIGTERM.
const (
	ExitOK     = 0
	ExitFailed = 1
	ExitUsage  = 2
)

// ExitError makes Main return Code instead of ExitFailed. With a nil Err nothing is printed, for a command that
// has said on stdout what it found.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

func (e *ExitError) Unwrap() error { return e.Err }

// AboveZero is a usage error that names the first flag whose value is not above zero, nil when all
// are.
func AboveZero[T int64 | time.Duration](flags map[string]T) error {
	return first(flags, func(v T) bool { return v > 0 }, "more than 0")
}

// NotBelow is a usage error that names the first flag whose value is below what it may be, nil when
// none is.
func NotBelow[T int64 | time.Duration](least T, flags map[string]T) error {
	return first(flags, func(v T) bool { return v >= least }, fmt.Sprintf("%v or more", least))
}

// first is a usage error that names the first flag with a value that is not good.
func first[T int64 | time.Duration](flags map[string]T, good func(T) bool, expected string) error {
	for _, name := range slices.Sorted(maps.Keys(flags)) {
		if v := flags[name]; !good(v) {
			return &ExitError{Code: ExitUsage, Err: fmt.Errorf("--%s: expected %s, found %v", name, expected, v)}
		}
	}
	return nil
}

// Main runs a program and returns its exit code.
//
// The first SIGTERM or SIGINT cancels run's context with cause ErrStopping: time to drain and return. An error
// that says no more than that is success. A second signal ends the process at once, with exit code 143 for
// SIGTERM and 130 for SIGINT; nothing is flushed then. Any other error is printed to stderr as one line behind
// the program's name.
func Main(ctx context.Context, run func(ctx context.Context) error) int {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	signals := make(chan os.Signal, 2) // room for both signals, so that neither is lost
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	returned := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		for {
			select {
			case <-returned:
				return
			case sig := <-signals:
				if Stopping(ctx) {
					os.Exit(exitCodeOf(sig))
				}
				slog.Info("stopping; a second signal ends the process at once", slog.String("signal", sig.String()))
				cancel(ErrStopping)
			}
		}
	}()

	err := run(ctx)

	signal.Stop(signals)
	close(returned)
	<-watched
	return report(ctx, os.Stderr, err)
}

// ToTheEnd is the error of a command that should have run to its end: being told to stop is one, since
// what it printed or did by then is not all. For programs that run until they are stopped it is none.
func ToTheEnd(ctx context.Context, err error) error {
	if !Stopping(ctx) || err != nil && !onlySaysStopped(ctx, err) {
		return err
	}
	return &ExitError{Code: ExitFailed, Err: errors.New("interrupted: what was printed or done by then is not all")}
}

func exitCodeOf(sig os.Signal) int {
	if s, ok := sig.(syscall.Signal); ok {
		return 128 + int(s)
	}
	return ExitFailed
}

// report prints err unless there is nothing to say, and returns the exit code.
func report(ctx context.Context, stderr io.Writer, err error) int {
	if onlySaysStopped(ctx, err) {
		return ExitOK
	}
	code := ExitFailed
	var exit *ExitError
	if errors.As(err, &exit) {
		code = exit.Code
		if exit.Err == nil {
			return code
		}
	}
	fmt.Fprintf(stderr, "%s: %s\n", program(), oneLine(err))
	return code
}

// program is the name that the process was started under.
func program() string {
	return strings.TrimSuffix(filepath.Base(os.Args[0]), ".exe")
}

// oneLine keeps joined errors on one line, so that a log collector sees one entry.
func oneLine(err error) string {
	var parts []string
	for line := range strings.Lines(err.Error()) {
		if line = strings.TrimSpace(line); line != "" {
			parts = append(parts, line)
		}
	}
	return strings.Join(parts, "; ")
}

// Ready is what a program announces once it accepts requests.
type Ready struct {
	// HTTP is the base URL of the HTTP API, such as http://127.0.0.1:8080.
	HTTP string
	// NATS is the URL under which the same NATS is reached. Credentials in it are not printed.
	NATS string
}

// PrintReady writes the one line that whoever started the process waits for, in a single write:
//
//	{"ready":true,"http":"http://127.0.0.1:8080","nats":"nats://127.0.0.1:4222"}
//
// A program calls it once, with os.Stdout, when everything runs. Nothing else of a server goes to stdout.
func PrintReady(w io.Writer, r Ready) error {
	line, err := json.Marshal(struct {
		Ready bool   `json:"ready"`
		HTTP  string `json:"http"`
		NATS  string `json:"nats"`
	}{true, r.HTTP, withoutUserinfo(r.NATS)})
	if err != nil {
		return fmt.Errorf("ready line: %w", err)
	}
	if _, err := w.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("ready line: %w", err)
	}
	return nil
}
