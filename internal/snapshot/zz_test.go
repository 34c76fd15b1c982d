package snapshot_test

import (
	"fmt"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

func TestZZ(t *testing.T) {
	for _, every := range []int{50, 256} {
		s := snapshot.New(sessionID, events.Format3, surface.KeepBodies)
		data := `{"id":"u","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"` + strings.Repeat("x", 512-95) + `"}]}`
		total, mark := 0, 0
		for _, n := range []int{100, 1000, 10_000, 100_000, 1_000_000} {
			for int(s.Next) < n {
				k := min(every, n-int(s.Next))
				cm := &events.Commit{ID: "c", Session: sessionID, Format: events.Format3, First: s.Next, Last: s.Next + events.Seq(k) - 1, StreamSeq: s.StreamSeq + 1}
				for seq := cm.First; seq <= cm.Last; seq++ {
					if seq%5 < 2 {
						cm.Body = fmt.Appendf(cm.Body, "{\"type\":\"user/message\",\"seq\":%d,\"time\":1767225604000,\"surfaceOp\":\"append\",\"data\":%s}\n", seq, data)
					} else {
						cm.Body = fmt.Appendf(cm.Body, "{\"type\":\"goal/change\",\"seq\":%d,\"time\":1767225604000,\"data\":%s}\n", seq, data)
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
			t.Logf("every %d: up to %d: cumulative %.0f bytes/event", every, n, float64(total)/float64(n))
			_ = mark
		}
	}
}
