package platform

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
)

// serverLog routes nats-server's log into slog, and keeps what a failed start has to say.
type serverLog struct {
	out *slog.Logger

	mu       sync.Mutex // guards the two below
	fatal    string     // the first one
	warnings []string   // of the start, at most maxStartWarnings
}

const maxStartWarnings = 64

func newServerLog(out *slog.Logger) *serverLog {
	return &serverLog{out: out.With(slog.String("component", "nats-server"))}
}

func (l *serverLog) firstFatal() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatal
}

func (l *serverLog) startWarnings() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.warnings
}

func (l *serverLog) write(level slog.Level, format string, v []any) string {
	if level < slog.LevelWarn && !l.out.Enabled(context.Background(), level) {
		return ""
	}
	text := strings.TrimSpace(fmt.Sprintf(format, v...))
	l.out.Log(context.Background(), level, text)
	return text
}

// Noticef is for progress, which at level info would drown what the program itself has to say.
func (l *serverLog) Noticef(format string, v ...any) { l.write(slog.LevelDebug, format, v) }

func (l *serverLog) Debugf(format string, v ...any) { l.write(slog.LevelDebug, format, v) }

func (l *serverLog) Tracef(format string, v ...any) { l.write(slog.LevelDebug, format, v) }

func (l *serverLog) Warnf(format string, v ...any) {
	if strings.HasPrefix(format, "Maximum payloads over") {
		l.write(slog.LevelDebug, format, v) // ours is meant
		return
	}
	l.keep(l.write(slog.LevelWarn, format, v))
}

func (l *serverLog) Errorf(format string, v ...any) { l.keep(l.write(slog.LevelError, format, v)) }

func (l *serverLog) keep(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.warnings) < maxStartWarnings {
		l.warnings = append(l.warnings, text)
	}
}

// Fatalf must return: nats-server's own logger would end the process here. Start returns after it.
func (l *serverLog) Fatalf(format string, v ...any) {
	text := strings.TrimSpace(fmt.Sprintf(format, v...))
	l.out.Debug(text) // StartServer returns it
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fatal == "" {
		l.fatal = text
	}
}
