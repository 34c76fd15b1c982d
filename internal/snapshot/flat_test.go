package snapshot_test

import (
	"fmt"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

// What a flush every 50 events writes per event does not depend on how long the session is. A
// session that has not filled its first page yet writes less.
func TestBytesPerEventAreFlat(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ text, from int }{{200, 10_000}, {2000, 100}} {
		t.Run(fmt.Sprintf("texts of %d bytes", c.text), func(t *testing.T) {
			t.Parallel()
			s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
			data := `,"time":1767225604000,"surfaceOp":"append","data":{"id":"u","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"` + strings.Repeat("x", c.text) + `"}]}}`
			total := 0
			upTo := func(n int) {
				for int(s.Next) < n {
					cm := &events.Commit{ID: "c", Session: sessionID, Format: events.Format3, First: s.Next, Last: s.Next + 49, StreamSeq: s.StreamSeq + 1}
					for seq := cm.First; seq <= cm.Last; seq++ {
						cm.Body = fmt.Appendf(cm.Body, "{\"type\":\"user/message\",\"seq\":%d%s\n", seq, data)
					}
					if err := s.Fold(cm, vocabulary, nil); err != nil {
						t.Fatal(err)
					}
					f, err := s.Flush()
					if err != nil {
						t.Fatal(err)
					}
					for _, p := range append(f.Pages, f.Head) {
						total += len(p.Value)
					}
				}
			}
			var per []float64
			for _, n := range []int{100, 10_000, longest} {
				span := min(n, 1000)
				upTo(n - span)
				before := total
				upTo(n)
				if n >= c.from {
					per = append(per, float64(total-before)/float64(span))
				}
			}
			t.Logf("bytes written per event from %d nodes to %d: %.0f", c.from, longest, per)
			for _, p := range per {
				if p > 1.3*per[0] {
					t.Errorf("bytes written per event grow with the session: %.0f", per)
				}
			}
		})
	}
}
