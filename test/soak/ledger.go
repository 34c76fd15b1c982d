package main

import (
	"encoding/json"
	"regexp"
	"strings"
	"sync"

	"palimpsest/test/e2e/harness"
)

// ledger is what callers know of one session: what was acknowledged to them, and what may or
// must not be there.
type ledger struct {
	id     string
	parent *ledger // of a fork
	at     int64   // last seq that a fork inherited

	mu     sync.Mutex // guards all below
	acks   []ack
	maybe  map[string]bool // marks of requests of which nobody knows whether they were stored
	never  map[string]bool // marks of requests that were refused
	loose  int             // repairs of which nobody knows whether they were stored
	epochs map[int64]int64 // of the writers that were told theirs, by seq
}

// ack is one acknowledged request: the marks of its events, "" for those that the service made.
type ack struct {
	first, last int64
	commit      string
	marks       []string
}

func newLedger(id string) *ledger {
	return &ledger{id: id, maybe: map[string]bool{}, never: map[string]bool{}, epochs: map[int64]int64{}}
}

// ack notes a receipt. marks may be fewer than its events: the others were made by the service.
func (l *ledger) ack(r harness.Receipt, marks ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acks = append(l.acks, ack{r.FirstSeq, r.LastSeq, r.Commit, marks})
	for _, m := range marks {
		delete(l.maybe, m)
	}
}

func (l *ledger) unknown(marks ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range marks {
		l.maybe[m] = true
	}
}

func (l *ledger) refused(marks ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range marks {
		if m != "" {
			l.never[m] = true
		}
	}
}

// took notes which epoch a writer was told.
func (l *ledger) took(seq, epoch int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.epochs[seq] = epoch
}

func (l *ledger) unknownRepair() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.loose++
}

// A mark names one event of one request, so that it can be found again.
var (
	markPattern   = regexp.MustCompile(`"mark":"([^"]+)"`)
	prunedPattern = regexp.MustCompile(`pruned: (m-[0-9-]+)`)
)

// markOf is the mark of an event, "" when it has none.
func markOf(e harness.Event) string {
	pattern := markPattern
	if _, replaces := e.Replace(); replaces && e.Type == "tool/result" {
		pattern = prunedPattern // beside the mark of the result that it rewrites
	}
	if e.Type == "session/writer" {
		var data struct{ Writer string }
		if json.Unmarshal(e.Data, &data) == nil && strings.HasPrefix(data.Writer, "m-") {
			return data.Writer
		}
		return ""
	}
	if m := pattern.FindSubmatch(e.Data); m != nil {
		return string(m[1])
	}
	return ""
}
