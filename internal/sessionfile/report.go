package sessionfile

import (
	"fmt"
	"strings"

	"palimpsest/internal/events"
)

// What a report lists at most, so that its size does not depend on the file's.
const (
	mostWarnings   = 100
	mostViolations = 3 // of each rule
)

// Report is what Check found in a file.
type Report struct {
	File         string `json:"file"`
	Session      string `json:"session,omitempty"` // its id; empty when the header has none that is usable
	Version      int    `json:"version"`           // as the header says, -1 when it does not
	Events       int64  `json:"events"`            // how many were read and are good
	Bytes        int64  `json:"bytes"`             // of their canonical lines, with their line ends
	Nodes        int    `json:"nodes"`             // of the surface behind them
	Replacements int64  `json:"replacements"`

	Compression string     `json:"compression,omitempty"` // "zstd" or nothing
	Converted   *Converted `json:"converted,omitempty"`   // nil when the file's format is one that is stored

	Warnings     []Problem `json:"warnings"` // the first hundred
	MoreWarnings int       `json:"moreWarnings,omitempty"`
	Problems     []Problem `json:"problems"` // none: the file is good
	Branches     []Branch  `json:"branches,omitempty"`

	// Violations are the lifecycle rules that were broken and let through.
	Violations map[events.Rule]*Violations `json:"violations"`
	// InheritedThrough is the seq of the last end-seed that closes an inherited part: all up to
	// it was copied from the session's parent.
	InheritedThrough *events.Seq `json:"inheritedThrough,omitempty"`
	// OpenTurn is the number of the turn that is open behind the last event.
	OpenTurn *events.Seq `json:"openTurn"`
}

// Problem is one thing that is wrong with a file, or a warning.
type Problem struct {
	Line   int         `json:"line"` // from 1; 0 when it is not a line's
	Seq    *events.Seq `json:"seq,omitempty"`
	Code   events.Code `json:"code"`
	Rule   events.Rule `json:"rule,omitempty"`
	Detail string      `json:"detail"`

	// Of a crash tail alone: where it starts in the file, and how long it is.
	Offset *int64 `json:"offset,omitempty"`
	Bytes  *int64 `json:"bytes,omitempty"`
}

// Branch is a run of lines with ascending seqs, one of two that start at the same seq.
type Branch struct {
	FirstLine int        `json:"firstLine"`
	FirstSeq  events.Seq `json:"firstSeq"`
	LastLine  int        `json:"lastLine"`
	LastSeq   events.Seq `json:"lastSeq"`
}

// Violations are how often one lifecycle rule was broken, and the first few times.
type Violations struct {
	Count int64     `json:"count"`
	First []Problem `json:"first"`
}

// OK reports whether the file can be used: Events yields something only then.
func (r *Report) OK() bool { return len(r.Problems) == 0 }

// Err returns the problem that makes the file unusable as an *events.Error, nil when it is good.
func (r *Report) Err() error {
	if r.OK() {
		return nil
	}
	p := r.Problems[0]
	at := r.File
	if p.Line > 0 {
		at = fmt.Sprintf("%s: line %d", r.File, p.Line)
	}
	return &events.Error{Code: p.Code, Rule: p.Rule, Session: r.Session, Seq: p.Seq, Detail: at + ": " + p.Detail}
}

// String returns the problem in one line: its place, its rule or code, its detail.
func (p Problem) String() string {
	var b strings.Builder
	if p.Line > 0 {
		fmt.Fprintf(&b, "line %d: ", p.Line)
	}
	if p.Seq != nil {
		fmt.Fprintf(&b, "seq %d: ", *p.Seq)
	}
	name := string(p.Rule)
	if name == "" {
		name = string(p.Code)
	}
	return b.String() + name + ": " + p.Detail
}

func (r *Report) warn(p Problem) {
	if len(r.Warnings) == mostWarnings {
		r.MoreWarnings++
		return
	}
	r.Warnings = append(r.Warnings, p)
}

func (r *Report) observe(p Problem) {
	v := r.Violations[p.Rule]
	if v == nil {
		v = &Violations{}
		r.Violations[p.Rule] = v
	}
	if v.Count++; len(v.First) < mostViolations {
		v.First = append(v.First, p)
	}
}
