package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"palimpsest/internal/audit"
	"palimpsest/internal/platform"
)

// attestFlags say whether signed checkpoints are made.
type attestFlags struct {
	AttestKey   string        `help:"Sign a checkpoint of every session that changed, with the seed in this file (appender keygen makes one). One appender of a deployment is enough." placeholder:"FILE" type:"path"`
	AttestEvery time.Duration `help:"How often checkpoints are signed." default:"1m"`
	AttestKeep  int64         `help:"Checkpoints of a session that are kept, when the stream of checkpoints is created." default:"8"`
}

// attester returns the service that signs, nil when it is not asked for.
func (f attestFlags) attester(ctx context.Context, s *store) (platform.Service, error) {
	if f.AttestKey == "" {
		return nil, nil
	}
	if f.AttestKeep < 1 {
		return nil, &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--attest-keep: expected more than 0, found %d", f.AttestKeep)}
	}
	key, err := audit.ReadKeyFile(f.AttestKey)
	if err != nil {
		return nil, err
	}
	t, err := audit.NewAttester(ctx, s.journal, s.headers, key, audit.AttestConfig{Keep: f.AttestKeep})
	if err != nil {
		return nil, err
	}
	slog.Info("signing checkpoints", "key", t.PublicKey(), "every", f.AttestEvery.String())
	return platform.NewRunner(func(ctx context.Context, ready func()) error {
		ready()
		tick := time.NewTicker(f.AttestEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				f.round(ctx, t)
			case <-ctx.Done(): // once more, with what was committed since
				last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastRound)
				defer cancel()
				f.round(last, t)
				return nil
			}
		}
	}), nil
}

// lastRound bounds signing at the end.
const lastRound = 5 * time.Second

func (f attestFlags) round(ctx context.Context, t *audit.Attester) {
	n, err := t.Round(ctx)
	switch {
	case err != nil && ctx.Err() == nil:
		slog.Warn("checkpoints were not signed; trying again", "err", err, "every", f.AttestEvery.String())
	case err == nil:
		slog.Debug("checkpoints signed", "sessions", n)
	}
}
