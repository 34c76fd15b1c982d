package platform

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// ReloadConfig describes files that a program reads again while it runs.
type ReloadConfig struct {
	// Files are watched by their size, time and identity; links are followed, so that a mounted
	// secret that is swapped is noticed. Required.
	Files []string
	// Reload reads them. After an error the program goes on with what it had; the error is
	// logged, and Reload is called again when the files change once more. Required.
	Reload func() error
	// Every is the time between looks at the files. Defaults to 2 s.
	Every time.Duration
	// Logger hears of every reload. Defaults to slog.Default().
	Logger *slog.Logger
}

// ReloadOnChange returns the service that calls cfg.Reload when a file has changed, and on SIGHUP.
func ReloadOnChange(cfg ReloadConfig) *Runner {
	if cfg.Every == 0 {
		cfg.Every = 2 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	before := fingerprint(cfg.Files) // now, and not when it starts: the files have just been read
	return NewRunner(func(ctx context.Context, ready func()) error {
		hangups := make(chan os.Signal, 1)
		signal.Notify(hangups, syscall.SIGHUP)
		defer signal.Stop(hangups)
		tick := time.NewTicker(cfg.Every)
		defer tick.Stop()
		ready()
		for {
			why := "SIGHUP"
			select {
			case <-ctx.Done():
				return nil
			case <-hangups:
			case <-tick.C:
				why = "changed"
				if fingerprint(cfg.Files) == before {
					continue
				}
			}
			before = fingerprint(cfg.Files)
			if err := cfg.Reload(); err != nil {
				cfg.Logger.Error("files were not taken over; what was read before stays in force", "files", cfg.Files, "why", why, "err", err)
				continue
			}
			cfg.Logger.Info("files were read again", "files", cfg.Files, "why", why)
		}
	})
}

// fingerprint changes when one of the files does.
func fingerprint(files []string) string {
	var b strings.Builder
	for _, f := range files {
		st, err := os.Stat(f)
		if err != nil {
			fmt.Fprintf(&b, "%v;", err)
			continue
		}
		fmt.Fprintf(&b, "%d %d %v;", st.Size(), st.ModTime().UnixNano(), identity(st))
	}
	return b.String()
}

// identity is the inode: a file that was replaced by one of the same size and time is another.
func identity(st os.FileInfo) uint64 {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return s.Ino
	}
	return 0
}
