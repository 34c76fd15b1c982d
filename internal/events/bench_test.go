package events_test

import (
	"fmt"
	"strings"
	"testing"

	"palimpsest/internal/events"
)

// BenchmarkParse is a candidate as a caller writes it, to its canonical line.
func BenchmarkParse(b *testing.B) {
	for _, size := range []int{200, 20_000} {
		words := strings.Repeat("lorem \\n ", size/9)
		for name, raw := range map[string]string{
			"user":      `{"type":"user/message","surfaceOp":"append","data":` + strings.Replace(userData, "[]", `[{"type":"text","text":"`+words+`"}]`, 1) + `}`,
			"result":    `{"type":"tool/result","surfaceOp":"append","data":` + toolData("c", `[{"type":"text","text":"`+words+`"}]`) + `}`,
			"log-only":  `{"type":"assistant/chunk","data":{"turn":1,"step":1,"text":"` + words + `"}}`,
			"in spaces": `{ "type": "user/message", "surfaceOp": "append", "data": ` + strings.Replace(strings.Replace(userData, "[]", `[{"type":"text","text":"`+words+`"}]`, 1), ":", ": ", 4) + ` }`,
		} {
			b.Run(fmt.Sprintf("%s/data=%d", name, size), func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(len(raw)))
				c, text := at(7), []byte(raw)
				for b.Loop() {
					if _, err := events.Parse(text, c); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}

// BenchmarkFingerprint is what a writer computes for each tool result.
func BenchmarkFingerprint(b *testing.B) {
	for _, size := range []int{200, 20_000} {
		b.Run(fmt.Sprintf("data=%d", size), func(b *testing.B) {
			b.ReportAllocs()
			e := mustParse(b, surfaceEvent("tool/result", toolData("c", `[{"type":"text","text":"`+strings.Repeat("x", size)+`"}]`)), at(7))
			for b.Loop() {
				e.Fingerprint(events.Format3)
			}
		})
	}
	b.Run("1 MB of metadata, 500 levels deep", func(b *testing.B) {
		deep := strings.Repeat(`{"a":`, 500) + `"` + strings.Repeat("x", 1<<20) + `"` + strings.Repeat(`}`, 500)
		e := mustParse(b, surfaceEvent("tool/result", strings.Replace(toolData("c", "[]"), `{`, `{"x":`+deep+`,`, 1)), at(7))
		for b.Loop() {
			e.Fingerprint(events.Format3)
		}
	})
}

// BenchmarkStored is what a projector makes of a stored surface event: its message and, of a tool
// result, the fingerprint.
func BenchmarkStored(b *testing.B) {
	text := `[{"type":"text","text":"` + strings.Repeat("lorem \\n ", 40) + `"}]`
	for name, raw := range map[string]string{
		"user":   surfaceEvent("user/message", strings.Replace(userData, "[]", text, 1)),
		"result": surfaceEvent("tool/result", toolData("c", text)),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			line, v := mustParse(b, raw, at(7)).Line, events.DefaultVocabulary()
			var e events.Event
			for b.Loop() {
				if err := events.ParseCanonical(&e, line, events.Format3, v); err != nil {
					b.Fatal(err)
				}
				if err := e.Check(events.Format3); err != nil {
					b.Fatal(err)
				}
				if e.Message() == nil {
					b.Fatal("no message")
				}
				if name == "result" {
					e.Fingerprint(events.Format3)
				}
			}
		})
	}
}
