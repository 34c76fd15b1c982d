package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
)

// maxFindings bounds what is kept of the findings; all are counted.
const maxFindings = 30

// tally counts what was done and keeps what was found.
type tally struct {
	mu       sync.Mutex // guards all below
	counts   map[string]int64
	findings []string
	all      int
}

func newTally() *tally { return &tally{counts: map[string]int64{}} }

func (t *tally) add(what string, n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.counts[what] += n
}

// finding notes that something is not as it must be.
func (t *tally) finding(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all++
	if len(t.findings) < maxFindings {
		t.findings = append(t.findings, fmt.Sprintf(format, args...))
	}
}

func (t *tally) found() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.all
}

func (t *tally) print(w io.Writer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, what := range slices.Sorted(maps.Keys(t.counts)) {
		fmt.Fprintf(w, "%10d  %s\n", t.counts[what], what)
	}
	for _, f := range t.findings {
		fmt.Fprintln(w, "FINDING:", f)
	}
	fmt.Fprintf(w, "%d findings\n", t.all)
}
