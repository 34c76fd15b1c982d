package sessionfile_test

import (
	"bufio"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/sessionfile"
)

// TestMemoryIsBounded reads 64 MB in both passes. It is not parallel, since it looks at the
// heap of the whole process.
func TestMemoryIsBounded(t *testing.T) {
	const total, most = 64 << 20, 24 << 20
	path := filepath.Join(t.TempDir(), "big.jsonl")
	out, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	w := bufio.NewWriter(out)
	text := strings.Repeat("x", 4000)
	written, _ := w.WriteString(header)
	n := 0
	for ; written < total; n++ {
		if n == 5000 {
			text = strings.Repeat("y", 2<<20) // a few long ones among them
		} else if n == 5003 {
			text = text[:4000]
		}
		m, err := fmt.Fprintf(w, `{"type":"user/message","surfaceOp":"append","data":{"id":"u%d","role":"user","content":[{"type":"text","text":"%s"}],"source":{"kind":"user"}}}`+"\n", n, text)
		if err != nil {
			t.Fatal(err)
		}
		written += m
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}

	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	before, highest := m.HeapInuse, uint64(0)
	r, f := check(t, path, sessionfile.Options{Progress: func(int64, int64) {
		runtime.ReadMemStats(&m)
		highest = max(highest, m.HeapInuse)
	}})
	if !r.OK() || r.Events != int64(n) || r.Nodes != n {
		t.Fatalf("expected %d events, got %+v", n, r)
	}
	seen := 0
	if err := f.Events(t.Context(), func(*events.Event) error { seen++; return nil }); err != nil {
		t.Fatal(err)
	}
	if seen != n {
		t.Errorf("expected %d events, got %d", n, seen)
	}
	if highest > before+most {
		t.Errorf("the heap grew from %d to %d MiB for a file of %d MiB, expected %d MiB more at most", before>>20, highest>>20, written>>20, most>>20)
	}
	t.Logf("heap: %d KiB before, %d KiB at most", before>>10, highest>>10)
}
