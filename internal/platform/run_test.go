package platform

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// childMain is the program that the signal tests run: the test binary, executed again.
func childMain(mode string) int {
	return Main(context.Background(), func(ctx context.Context) error {
		switch mode {
		case "fail":
			return errors.Join(errors.New("first"), errors.New("second"))
		case "drain", "drain-fails", "stuck", "to-the-end":
			fmt.Println("ready")
			<-ctx.Done()
			fmt.Println(context.Cause(ctx))
			if mode == "stuck" {
				select {}
			}
			if mode == "drain-fails" {
				return errors.Join(ctx.Err(), errors.New("two sessions were not flushed"))
			}
			if mode == "to-the-end" {
				return ToTheEnd(ctx, fmt.Errorf("exporting: %w", ctx.Err()))
			}
			return fmt.Errorf("serving: %w", ctx.Err())
		}
		return errors.New("no such mode")
	})
}

// child is a running childMain.
type child struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout *bufio.Reader
	stderr bytes.Buffer
}

func startChild(t *testing.T, mode string) *child {
	t.Helper()
	c := &child{t: t, cmd: exec.CommandContext(testContext(t), os.Args[0])}
	c.cmd.Env = append(os.Environ(), childMode+"="+mode)
	c.cmd.Stderr = &c.stderr
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.stdout = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *child) expectLine(want string) {
	c.t.Helper()
	line, err := c.stdout.ReadString('\n')
	if err != nil || line != want+"\n" {
		c.t.Fatalf("stdout line %q (%v), want %q; stderr %q", line, err, want, c.stderr.String())
	}
}

func (c *child) signal(sig syscall.Signal) {
	c.t.Helper()
	if err := c.cmd.Process.Signal(sig); err != nil {
		c.t.Fatal(err)
	}
}

func (c *child) expectExit(code int) {
	c.t.Helper()
	if _, err := io.Copy(io.Discard, c.stdout); err != nil { // Wait wants the pipe read to its end
		c.t.Fatal(err)
	}
	_ = c.cmd.Wait() // the code says it
	if got := c.cmd.ProcessState.ExitCode(); got != code {
		c.t.Errorf("exit code %d, want %d; stderr %q", got, code, c.stderr.String())
	}
}

func TestMainDrainsOnTheFirstSignal(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			c := startChild(t, "drain")
			c.expectLine("ready")
			c.signal(sig)
			c.expectLine(ErrStopping.Error())
			c.expectExit(ExitOK)
		})
	}
}

// A command whose output or work is cut off does not pass for one that was done.
func TestACommandThatIsInterruptedFails(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			c := startChild(t, "to-the-end")
			c.expectLine("ready")
			c.signal(sig)
			c.expectLine(ErrStopping.Error())
			c.expectExit(ExitFailed)
			if !strings.Contains(c.stderr.String(), "interrupted: ") {
				t.Errorf("stderr %q", c.stderr.String())
			}
		})
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	if err := ToTheEnd(ctx, nil); err != nil {
		t.Errorf("nobody stopped it: %v", err)
	}
	failed := errors.New("a finding")
	cancel(ErrStopping)
	if err := ToTheEnd(ctx, failed); err != failed {
		t.Errorf("another failure: %v", err)
	}
	if err := ToTheEnd(ctx, nil); err == nil {
		t.Error("a command that returned without error after it was told to stop passes")
	}
}

func TestMainEndsAtOnceOnTheSecondSignal(t *testing.T) {
	t.Parallel()
	for sig, code := range map[syscall.Signal]int{syscall.SIGINT: 130, syscall.SIGTERM: 143} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			c := startChild(t, "stuck")
			c.expectLine("ready")
			c.signal(syscall.SIGTERM)
			c.expectLine(ErrStopping.Error())
			c.signal(sig)
			c.expectExit(code)
		})
	}
}

func TestMainReportsAFailureDuringTheDrain(t *testing.T) {
	t.Parallel()
	c := startChild(t, "drain-fails")
	c.expectLine("ready")
	c.signal(syscall.SIGTERM)
	c.expectLine(ErrStopping.Error())
	c.expectExit(ExitFailed)
	if !strings.Contains(c.stderr.String(), "two sessions were not flushed") {
		t.Errorf("stderr %q", c.stderr.String())
	}
}

func TestMainPrintsAnErrorAsOneLine(t *testing.T) {
	t.Parallel()
	c := startChild(t, "fail")
	c.expectExit(ExitFailed)
	if want := program() + ": first; second\n"; c.stderr.String() != want {
		t.Errorf("stderr %q, want %q", c.stderr.String(), want)
	}
}

func TestMainReturnsTheCodeThatAnErrorAsksFor(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		err  error
		code int
		out  string
	}{
		{"nil", nil, ExitOK, ""},
		{"plain", errors.New("no"), ExitFailed, program() + ": no\n"},
		{"usage", fmt.Errorf("serve: %w", &ExitError{ExitUsage, errors.New("no such flag")}), ExitUsage, program() + ": serve: no such flag\n"},
		{"silent", &ExitError{Code: ExitFailed}, ExitFailed, ""},
		{"cancelled though nobody stopped it", context.Canceled, ExitFailed, program() + ": context canceled\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			if code := report(context.Background(), &out, c.err); code != c.code || out.String() != c.out {
				t.Errorf("report = %d, %q; want %d, %q", code, out.String(), c.code, c.out)
			}
		})
	}
}

func TestReadyLine(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := PrintReady(&out, Ready{HTTP: "http://127.0.0.1:8080", NATS: "nats://user:secret@127.0.0.1:4222"}); err != nil {
		t.Fatal(err)
	}
	want := `{"ready":true,"http":"http://127.0.0.1:8080","nats":"nats://127.0.0.1:4222"}` + "\n"
	if out.String() != want {
		t.Errorf("ready line %q, want %q", out.String(), want)
	}
}

func TestUserinfoIsNeverShown(t *testing.T) {
	t.Parallel()
	for given, want := range map[string]string{
		"nats://h:1":                           "nats://h:1",
		"nats://token@h:1":                     "nats://h:1",
		"nats://u:p@h:1, tls://u:p%zz@@h2:2":   "nats://h:1,tls://h2:2",
		"u:p@h":                                "h",
		"":                                     "",
		"nats://[::1]:4222,nats://u@[::1]:422": "nats://[::1]:4222,nats://[::1]:422",
	} {
		if got := withoutUserinfo(given); got != want {
			t.Errorf("withoutUserinfo(%q) = %q, want %q", given, got, want)
		}
	}
}

func TestLogConfig(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	cfg := LogConfig{Output: &out}
	flags := flag.NewFlagSet("serve", flag.ContinueOnError)
	cfg.RegisterFlags(flags)
	if err := flags.Parse([]string{"--log-format", "json", "--log-level", "warn"}); err != nil {
		t.Fatal(err)
	}
	logger, err := NewLogger(cfg)
	if err != nil {
		t.Fatal(err)
	}
	logger.Info("not this")
	logger.Warn("but this", slog.Int("n", 1))
	if got := out.String(); !strings.HasPrefix(got, `{"time":`) || strings.Contains(got, "not this") || strings.Count(got, "\n") != 1 {
		t.Errorf("log is %q", got)
	}

	err = LogConfig{Format: "xml", Level: "loud"}.Validate()
	if err == nil || !strings.Contains(err.Error(), `"xml"`) || !strings.Contains(err.Error(), `"loud"`) {
		t.Errorf("Validate = %v, want both mistakes named", err)
	}
	if err := (LogConfig{}).Validate(); err != nil {
		t.Errorf("the defaults are not valid: %v", err)
	}
}
