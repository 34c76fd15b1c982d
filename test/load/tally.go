// Package load is what the programs share that load and hurt real programs for a time and then check
// what is stored: counts and findings, processes that are started again and again, and waiting.
package load

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
)

// maxFindings bounds what is kept of the findings; all are counted.
const maxFindings = 50

// Tally counts what was done and keeps what was found. The zero value is empty.
type Tally struct {
	mu       sync.Mutex // guards all below
	counts   map[string]int64
	findings []string
	all      int
}

// Add counts.
func (t *Tally) Add(what string, n int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.counts == nil {
		t.counts = map[string]int64{}
	}
	t.counts[what] += n
}

// Get is a count.
func (t *Tally) Get(what string) int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.counts[what]
}

// Finding notes that something is not as it must be.
func (t *Tally) Finding(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all++
	if len(t.findings) < maxFindings {
		t.findings = append(t.findings, fmt.Sprintf(format, args...))
	}
}

// Found is the number of findings.
func (t *Tally) Found() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.all
}

// Print writes counts and findings.
func (t *Tally) Print(w io.Writer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, what := range slices.Sorted(maps.Keys(t.counts)) {
		fmt.Fprintf(w, "%10d  %s\n", t.counts[what], what)
	}
	for _, f := range t.findings {
		fmt.Fprintln(w, "FINDING:", f)
	}
	if more := t.all - len(t.findings); more > 0 {
		fmt.Fprintf(w, "… and %d more\n", more)
	}
	fmt.Fprintf(w, "%d findings\n", t.all)
}
