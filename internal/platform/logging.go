package platform

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
)

// LogConfig says how a process logs.
type LogConfig struct {
	// Format is "text" (key=value) or "json", one record a line. Defaults to "text".
	Format string
	// Level is the least level that is logged: "debug", "info", "warn" or "error". Defaults to "info".
	Level string
	// Output receives the records. Defaults to os.Stderr, because stdout belongs to results.
	Output io.Writer
}

// RegisterFlags adds --log-format and --log-level to a command's flags.
func (c *LogConfig) RegisterFlags(flags *flag.FlagSet) {
	d := c.withDefaults()
	flags.StringVar(&c.Format, "log-format", d.Format, "format of the log on stderr: text or json")
	flags.StringVar(&c.Level, "log-level", d.Level, "least level that is logged: debug, info, warn or error")
}

func (c LogConfig) withDefaults() LogConfig {
	if c.Format == "" {
		c.Format = "text"
	}
	if c.Level == "" {
		c.Level = "info"
	}
	if c.Output == nil {
		c.Output = os.Stderr
	}
	return c
}

// Validate says what is wrong with the configuration, all of it at once.
func (c LogConfig) Validate() error {
	c = c.withDefaults()
	var errs []error
	if c.Format != "text" && c.Format != "json" {
		errs = append(errs, fmt.Errorf("log format is %q, expected text or json; set --log-format", c.Format))
	}
	if _, ok := logLevels[c.Level]; !ok {
		errs = append(errs, fmt.Errorf("log level is %q, expected debug, info, warn or error; set --log-level", c.Level))
	}
	return errors.Join(errs...)
}

var logLevels = map[string]slog.Level{
	"debug": slog.LevelDebug,
	"info":  slog.LevelInfo,
	"warn":  slog.LevelWarn,
	"error": slog.LevelError,
}

// NewLogger returns the logger that cfg describes.
func NewLogger(cfg LogConfig) (*slog.Logger, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	options := &slog.HandlerOptions{Level: logLevels[cfg.Level]}
	if cfg.Format == "json" {
		return slog.New(traceHandler{slog.NewJSONHandler(cfg.Output, options)}), nil
	}
	return slog.New(traceHandler{slog.NewTextHandler(cfg.Output, options)}), nil
}

// SetupLogging makes the logger that cfg describes the process's default, which also takes what packages write
// with the log package.
func SetupLogging(cfg LogConfig) error {
	logger, err := NewLogger(cfg)
	if err != nil {
		return err
	}
	slog.SetDefault(logger)
	return nil
}
