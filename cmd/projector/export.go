package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/term"

	"palimpsest/internal/events"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

type exportCmd struct {
	storeFlags
	All      bool     `help:"All sessions."`
	Archive  bool     `help:"Write one archive: a zstd tar of session files, their commits and attestations, and a manifest of hashes."`
	Out      string   `short:"o" help:"Where to write: a file, or with --all and without --archive a directory, which is created. Default: stdout." placeholder:"PATH" type:"path"`
	Sessions []string `arg:"" optional:"" name:"session" help:"Session id; several with --archive."`
	JSON     bool     `name:"json" hidden:"" help:"A session file is JSON lines anyway."`
}

func (c *exportCmd) Run(ctx context.Context) error {
	bad := func(text string) error {
		return &platform.ExitError{Code: platform.ExitUsage, Err: errors.New("export: " + text)}
	}
	switch {
	case c.All && len(c.Sessions) == 1 && c.Out == "" && !c.Archive: // export --all DIR
		c.Out, c.Sessions = c.Sessions[0], nil
	case c.All == (len(c.Sessions) > 0):
		return bad("expected a session id or --all, and not both")
	case !c.Archive && len(c.Sessions) > 1:
		return bad("expected one session id, or --archive for several")
	case c.All && !c.Archive && c.Out == "":
		return bad("expected a directory for --all")
	case c.Archive && c.Out == "" && term.IsTerminal(int(os.Stdout.Fd())):
		return bad("an archive is binary: give it a file with -o, or send it into a pipe")
	}
	return c.with(ctx, func(s *store) error {
		if c.All {
			var err error
			if c.Sessions, err = s.allSessions(ctx); err != nil {
				return err
			}
		}
		switch {
		case c.Archive:
			return toFile(c.Out, func(w io.Writer) error { return s.archive(ctx, w, c.Sessions) })
		case c.All:
			if err := os.MkdirAll(c.Out, 0o755); err != nil {
				return err
			}
			for _, id := range c.Sessions {
				err := toFile(filepath.Join(c.Out, fileName(id)), func(w io.Writer) error { return s.reader().Export(ctx, id, w) })
				if err != nil {
					return fmt.Errorf("session %s: %w", id, err)
				}
			}
			_, err := fmt.Fprintf(os.Stderr, "%d sessions written to %s\n", len(c.Sessions), c.Out)
			return err
		}
		return toFile(c.Out, func(w io.Writer) error { return s.reader().Export(ctx, c.Sessions[0], w) })
	})
}

func (s *store) allSessions(ctx context.Context) (ids []string, err error) {
	fleet := projection.NewFleet(s.reader(), projection.FleetConfig{})
	for cursor := ""; ; {
		page, err := fleet.List(ctx, projection.FleetFilter{}, cursor, 1000)
		if err != nil {
			return nil, err
		}
		for _, row := range page.Rows {
			ids = append(ids, row.Session)
		}
		if cursor = page.Cursor; cursor == "" {
			return ids, nil
		}
	}
}

func (s *store) archive(ctx context.Context, w io.Writer, ids []string) error {
	a, err := s.auditor().NewArchive(w, time.Now())
	if err != nil {
		return err
	}
	for _, id := range ids {
		if err := a.Add(ctx, id); err != nil {
			a.Abort()
			return fmt.Errorf("session %s: %w", id, err)
		}
	}
	return a.Close()
}

// fileName is a session's token, shortened where a file system would not take it.
func fileName(id string) string {
	const most = 200
	token := events.Token(id)
	if len(token) > most {
		sum := sha256.Sum256([]byte(id))
		token = token[:most-33] + "-" + hex.EncodeToString(sum[:16])
	}
	return token + ".jsonl"
}

// toFile writes a file that is there as a whole or not at all; stdout for "".
func toFile(path string, write func(io.Writer) error) error {
	if path == "" {
		return write(os.Stdout)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".export-*")
	if err != nil {
		return err
	}
	err = write(f)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}
