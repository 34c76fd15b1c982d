package snapshot_test

import (
	"fmt"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

// What a flush writes per event does not depend on how long the session is, also where other
// events lie between the nodes. A session that has not filled its first page yet writes less.
func TestBytesPerEventAreFlat(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text    int
		surface int // of five events
		every   int // events a flush
		from    int
	}{{200, 5, 50, 10_000}, {2000, 5, 50, 100}, {400, 2, 50, 10_000}, {400, 2, 250, 10_000}} {
		t.Run(fmt.Sprintf("texts of %d bytes, %d of 5 events on the surface, a flush every %d", c.text, c.surface, c.every), func(t *testing.T) {
			t.Parallel()
			s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
			data := `{"id":"u","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"` + strings.Repeat("x", c.text) + `"}]}`
			total := 0
			upTo := func(n int) {
				for int(s.Next) < n {
					cm := &events.Commit{ID: "c", Session: sessionID, Format: events.Format3, First: s.Next, Last: s.Next + events.Seq(min(c.every, n-int(s.Next))) - 1, StreamSeq: s.StreamSeq + 1}
					for seq := cm.First; seq <= cm.Last; seq++ {
						if int(seq%5) < c.surface {
							cm.Body = fmt.Appendf(cm.Body, "{\"type\":\"user/message\",\"seq\":%d,\"time\":1767225604000,\"surfaceOp\":\"append\",\"data\":%s}\n", seq, data)
						} else {
							cm.Body = fmt.Appendf(cm.Body, "{\"type\":\"goal/change\",\"seq\":%d,\"time\":1767225604000,\"data\":1}\n", seq)
						}
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
				span := min(n, 5000)
				upTo(n - span)
				before := total
				upTo(n)
				if n >= c.from {
					per = append(per, float64(total-before)/float64(span))
				}
			}
			t.Logf("bytes written per event from %d events to %d: %.0f", c.from, longest, per)
			for _, p := range per {
				if p > 1.3*per[0] {
					t.Errorf("bytes written per event grow with the session: %.0f", per)
				}
			}
		})
	}
}
