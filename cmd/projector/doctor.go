package main

import (
	"context"
	"os"

	"palimpsest/internal/audit"
	"palimpsest/internal/doctor"
	"palimpsest/internal/erasure"
	"palimpsest/internal/journal"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

type doctorCmd struct {
	storeFlags
	JSON bool `name:"json" help:"Print the findings as JSON."`
}

func (c *doctorCmd) Run(ctx context.Context) error {
	vocabulary, err := c.Vocabulary()
	if err != nil {
		return err
	}
	cc := c.NATSFlags.Config("palimpsest-doctor")
	if cc.URL == "" && cc.Context == "" {
		cc.URL = defaultURL
	}
	nc, err := platform.Connect(ctx, cc)
	if err != nil {
		return err
	}
	defer nc.Close()
	fs, err := doctor.Run(ctx, nc, doctor.Config{
		Role: doctor.Projector, Vocabulary: vocabulary,
		Buckets: []string{projection.CheckpointsBucket, projection.QuarantineBucket, projection.WorkersBucket},
		Streams: []string{audit.AttestationsStream, erasure.Stream}, Journal: journal.Config{Partitions: c.Partitions},
	})
	if err != nil {
		return err
	}
	if err := doctor.Print(os.Stdout, fs, c.JSON); err != nil {
		return err
	}
	if doctor.Worst(fs) == doctor.Fail {
		return &platform.ExitError{Code: platform.ExitFailed}
	}
	return nil
}
