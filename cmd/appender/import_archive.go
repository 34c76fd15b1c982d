package main

import (
	"context"
	"errors"
	"os"

	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/sessionfile"
)

// importArchive imports the sessions of an archive, once all its files are what its manifest
// says. told hears of each.
func importArchive(ctx context.Context, a *appender.Appender, path string, o sessionfile.Options, told func(*appender.ImportReport) error) error {
	dir, err := os.MkdirTemp("", "palimpsest-import-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ar, err := audit.OpenArchive(path, dir, 0)
	var bad *events.Error
	if errors.As(err, &bad) || errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
		return told(appender.Unreadable(path, err))
	}
	if err != nil {
		return err
	}
	o.Progress, o.IDFrom = nil, sessionfile.IDFromHeader // its files are numbered
	for _, s := range ar.Sessions {
		rep, err := a.Import(ctx, ar.Path(s.File), o)
		if err != nil {
			return err
		}
		rep.File = path + ":" + s.File
		if err := told(rep); err != nil {
			return err
		}
	}
	return nil
}
