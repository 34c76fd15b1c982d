// Package conformance holds the cases that every implementation of the rules
// must pass, and reads them.
package conformance

import (
	"bytes"
	"embed"
	"encoding/json"
	"fmt"
)

//go:embed *.jsonl
var files embed.FS

// Candidate is an event to append and what must become of it.
type Candidate struct {
	Event  json.RawMessage `json:"event"`
	Accept bool            `json:"accept"`
	Rule   string          `json:"rule"`
}

// Replacement is one replacement and what it shadowed, in surface order.
type Replacement struct {
	Seq          int64   `json:"seq"`
	StartSeq     int64   `json:"startSeq"`
	EndSeq       int64   `json:"endSeq"`
	ShadowedSeqs []int64 `json:"shadowedSeqs"`
}

// SurfaceCase is a line of surface.jsonl.
type SurfaceCase struct {
	Name       string      `json:"name"`
	Candidates []Candidate `json:"candidates"`
	Expect     struct {
		Events            int64             `json:"events"`
		Nodes             []int64           `json:"nodes"`
		ReplaceGeneration int               `json:"replaceGeneration"`
		Replacements      []Replacement     `json:"replacements"`
		Messages          []json.RawMessage `json:"messages"`
	} `json:"expect"`
}

// LifecycleCase is a line of lifecycle.jsonl.
type LifecycleCase struct {
	Name       string      `json:"name"`
	Candidates []Candidate `json:"candidates"`
	Expect     struct {
		Events       int64    `json:"events"`
		OpenTurn     *int64   `json:"openTurn"`
		OpenStep     *int64   `json:"openStep"`
		PendingCalls []string `json:"pendingCalls"`
	} `json:"expect"`
}

// EnvelopeCase is a line of envelope.jsonl.
type EnvelopeCase struct {
	Name   string `json:"name"`
	Format int    `json:"format"`
	Raw    string `json:"raw"`
	Accept bool   `json:"accept"`
	Rule   string `json:"rule"`
}

// RepairCase is a line of repair.jsonl.
type RepairCase struct {
	Name    string            `json:"name"`
	Events  []json.RawMessage `json:"events"`
	Closers []json.RawMessage `json:"closers"`
}

// Surface reads surface.jsonl.
func Surface() ([]SurfaceCase, error) { return read[SurfaceCase]("surface.jsonl") }

// Lifecycle reads lifecycle.jsonl.
func Lifecycle() ([]LifecycleCase, error) { return read[LifecycleCase]("lifecycle.jsonl") }

// Envelope reads envelope.jsonl.
func Envelope() ([]EnvelopeCase, error) { return read[EnvelopeCase]("envelope.jsonl") }

// Repair reads repair.jsonl.
func Repair() ([]RepairCase, error) { return read[RepairCase]("repair.jsonl") }

func read[Case any](name string) ([]Case, error) {
	file, err := files.ReadFile(name)
	if err != nil {
		return nil, err
	}
	var cases []Case
	for line := range bytes.Lines(file) {
		var c Case
		if err := json.Unmarshal(line, &c); err != nil {
			return nil, fmt.Errorf("%s: line %d: %w", name, len(cases)+1, err)
		}
		cases = append(cases, c)
	}
	return cases, nil
}
