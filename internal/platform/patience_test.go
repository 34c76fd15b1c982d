package platform

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func TestPatienceTriesAgainAndSaysWhy(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	var heard []string
	p := Patience{
		Worth:  func(err error) bool { return err.Error() != "hopeless" },
		Failed: func(err error) { heard = append(heard, err.Error()) },
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	}
	answers := []string{"no leader", "no leader", "no peers", ""}
	err := p.Do(testContext(t), "stream", func(context.Context) error {
		a := answers[0]
		answers = answers[1:]
		if a == "" {
			return nil
		}
		return errors.New(a)
	})
	if err != nil || len(answers) != 0 || strings.Join(heard, ",") != "no leader,no leader,no peers" {
		t.Errorf("%v, %q left, heard %q", err, answers, heard)
	}
	for text, want := range map[string]int{"no leader": 1, "no peers": 1, "is there": 1} { // the same one is not said again at once
		if got := strings.Count(log.String(), text); got != want {
			t.Errorf("%q is in the log %d times, want %d:\n%s", text, got, want, log.String())
		}
	}
}

func TestPatienceEnds(t *testing.T) {
	t.Parallel()
	away := errors.New("away")
	always := func(context.Context) error { return away }
	if err := (Patience{}).Do(testContext(t), "stream", always); err != away {
		t.Errorf("without patience: %v", err)
	}
	quiet := slog.New(slog.DiscardHandler)
	p := Patience{Within: 10 * time.Millisecond, Worth: func(error) bool { return true }, Logger: quiet}
	if err := p.Do(testContext(t), "stream", always); !errors.Is(err, away) || !strings.Contains(err.Error(), "stream: not there within 10ms") {
		t.Errorf("after its time: %v", err)
	}
	ctx, cancel := context.WithCancelCause(testContext(t))
	p = Patience{Worth: p.Worth, Failed: func(error) { cancel(ErrStopping) }, Logger: quiet}
	if err := p.Do(ctx, "stream", always); !onlySaysStopped(ctx, err) {
		t.Errorf("told to stop: %v", err)
	}
}
