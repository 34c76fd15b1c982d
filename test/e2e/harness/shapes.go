package harness

import (
	"encoding/json"
	"fmt"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// This file holds every shape that the tests need and the design leaves open
// or names only in part. When the product decides otherwise, this is the one
// place to change.

// Receipt answers an append.
type Receipt struct {
	Session   string `json:"session"`
	FirstSeq  int64  `json:"firstSeq"`
	LastSeq   int64  `json:"lastSeq"`
	Commit    string `json:"commit"`
	Duplicate bool   `json:"duplicate"`
	Digest    string `json:"digest"` // hex, of the event LastSeq
}

// Problem is a problem document. ActualSeq is the seq that the next event will
// get, as ExpectedSeq is the one that the caller wanted it to get.
type Problem struct {
	Type        string `json:"type"`
	Title       string `json:"title"`
	Status      int    `json:"status"`
	Detail      string `json:"detail"`
	Code        string `json:"code"`
	Rule        string `json:"rule"`
	Index       *int   `json:"index"`
	Session     string `json:"session"`
	Seq         *int64 `json:"seq"`
	ExpectedSeq *int64 `json:"expectedSeq"`
	ActualSeq   *int64 `json:"actualSeq"`
}

// Status answers GET /v1/sessions/{id}, on both programs. A session without
// events has NextSeq 0; OpenTurn and OpenStep are null or absent when none is
// open; PendingCalls are the ids of the open step's recorded calls without a
// result, in log order.
type Status struct {
	Session      string          `json:"session"`
	Header       json.RawMessage `json:"header"`
	NextSeq      *int64          `json:"nextSeq"`
	OpenTurn     *int64          `json:"openTurn"`
	OpenStep     *int64          `json:"openStep"`
	PendingCalls []string        `json:"pendingCalls"`
	Digest       string          `json:"digest"`
}

// Messages answers GET …/messages. Seq is the last seq folded into it, -1 for
// a session without events.
type Messages struct {
	Session           string            `json:"session"`
	Seq               int64             `json:"seq"`
	ReplaceGeneration int               `json:"replaceGeneration"`
	Messages          []json.RawMessage `json:"messages"`

	ETag string `json:"-"`
}

// SurfaceView answers GET …/surface.
type SurfaceView struct {
	Session           string `json:"session"`
	Seq               int64  `json:"seq"`
	ReplaceGeneration int    `json:"replaceGeneration"`
	Nodes             []struct {
		Seq  int64  `json:"seq"`
		Type string `json:"type"`
	} `json:"nodes"`
}

// Seqs are the seqs of the nodes in surface order.
func (v SurfaceView) Seqs() []int64 {
	seqs := make([]int64, len(v.Nodes))
	for i, n := range v.Nodes {
		seqs[i] = n.Seq
	}
	return seqs
}

// Transcript answers GET …/transcript.
type Transcript struct {
	Session  string `json:"session"`
	Seq      int64  `json:"seq"`
	Messages []struct {
		Seq     int64           `json:"seq"`
		Time    int64           `json:"time"`
		Type    string          `json:"type"`
		Message json.RawMessage `json:"message"`
	} `json:"messages"`
}

// EventPage answers GET …/events: canonical events from `from` through `to`,
// both inclusive. Next is the `from` of the next page, absent on the last one.
type EventPage struct {
	Session string            `json:"session"`
	Events  []json.RawMessage `json:"events"`
	Next    *int64            `json:"next"`
}

// SessionPage answers GET /v1/sessions. Cursor is empty on the last page.
type SessionPage struct {
	Sessions []struct {
		Session string `json:"session"`
	} `json:"sessions"`
	Cursor string `json:"cursor"`
}

// Created answers POST /v1/sessions.
type Created struct {
	Session string `json:"session"`
}

// ImportReport is what `appender import --json` prints on its standard output.
// Status is "imported" for a file that is now in the log. InheritedThrough is
// the seq at which the part that a fork inherited ends, absent when none did.
type ImportReport struct {
	Files []struct {
		File             string `json:"file"`
		Session          string `json:"session"`
		Status           string `json:"status"`
		InheritedThrough *int64 `json:"inheritedThrough"`
	} `json:"files"`
}

const importedStatus = "imported"

// Imported says which files the report calls imported, by base name.
func (r ImportReport) Imported() map[string]bool {
	done := map[string]bool{}
	for _, f := range r.Files {
		done[filepath.Base(f.File)] = f.Status == importedStatus
	}
	return done
}

// SessionOfFile is the session id that `--id-from filename` gives a file.
func SessionOfFile(file string) string {
	return strings.TrimSuffix(filepath.Base(file), ".jsonl")
}

// Token is the session id as it stands in subjects and keys.
func Token(id string) string {
	var b strings.Builder
	for _, c := range []byte(id) {
		switch {
		case c >= 'A' && c <= 'Z', c >= 'a' && c <= 'z', c >= '0' && c <= '9', c == '_', c == '-':
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "=%02X", c)
		}
	}
	return b.String()
}

// Names of the stream and the buckets.
const (
	Stream         = "SESSIONS"
	HeaderBucket   = "HEADERS"
	SurfaceBucket  = "SURFACES"
	Partitions     = 32
	SubjectsPrefix = "sessions."
)

// NewHeader is a whole session header of a format.
func NewHeader(id string, format int) json.RawMessage {
	return fmt.Appendf(nil, `{"version":%d,"id":%s,"createdAt":1767225600000,"isSeeded":false,"delegationDepth":0}`, format, quote(id))
}

// createBody is the body of POST /v1/sessions; empty parts are left out.
func createBody(id string, header json.RawMessage) []byte {
	var parts []string
	if id != "" {
		parts = append(parts, `"id":`+quote(id))
	}
	if header != nil {
		parts = append(parts, `"header":`+string(header))
	}
	return []byte("{" + strings.Join(parts, ",") + "}")
}

// awaitQuery is the query of a read that waits for a seq.
func awaitQuery(seq int64, limit time.Duration) url.Values {
	return url.Values{"minSeq": {strconv.FormatInt(seq, 10)}, "timeout": {limit.String()}}
}

// Content types of POST …/events.
const (
	TypeJSON       = "application/json"
	TypeNDJSON     = "application/x-ndjson"
	TypeEvent      = "application/cloudevents+json"
	TypeEventBatch = "application/cloudevents-batch+json"
	TypeProblem    = "application/problem+json"
)
