package session_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

// benchEvents is how many events a session of a benchmark has before it begins anew.
const benchEvents = 4096

// benchData is the data of a user/message of about n bytes.
func benchData(n int) string {
	data := `{"id":"m","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"*"}]}`
	return strings.Replace(data, "*", strings.Repeat("lorem \\n ", max(0, n-len(data))/9), 1)
}

// fold reads the events of a body as a projector does, one after another and for ever.
func fold(b *testing.B, body []byte, keep surface.Keep) {
	b.ReportAllocs()
	s := session.New(sessionID, events.Format3, nil, keep)
	var line []byte
	rest := body
	for b.Loop() {
		if len(rest) == 0 {
			rest, s = body, session.New(sessionID, events.Format3, nil, keep)
		}
		line, rest = events.CutLine(rest)
		e := new(events.Event)
		if err := events.ParseCanonical(e, line, events.Format3, vocabulary); err != nil {
			b.Fatal(err)
		}
		p, err := s.Plan(e, lifecycle.Off)
		if err != nil {
			b.Fatal(err)
		}
		s.Apply(&p, 1)
	}
}

// BenchmarkFoldAppend is an appended event, from its canonical line to its node.
func BenchmarkFoldAppend(b *testing.B) {
	for _, size := range []int{200, 20_000} {
		data := benchData(size)
		var body bytes.Buffer
		for seq := range benchEvents {
			fmt.Fprintf(&body, `{"type":"user/message","seq":%d,"time":1767225604000,"surfaceOp":"append","data":%s}`+"\n", seq, data)
		}
		b.Run(fmt.Sprintf("data=%d", size), func(b *testing.B) { fold(b, body.Bytes(), surface.KeepBodies) })
	}
}

// BenchmarkFoldReplace is an event that replaces the newest nodes: the one before it, or a range
// of eight of which seven were appended since.
func BenchmarkFoldReplace(b *testing.B) {
	for _, span := range []int{1, 8} {
		for _, size := range []int{200, 20_000} {
			data := benchData(size)
			var body bytes.Buffer
			var nodes []string
			for seq := range benchEvents {
				op := `"append"`
				if len(nodes) >= span {
					cited := nodes[len(nodes)-span:]
					op = fmt.Sprintf(`{"op":"replace","startSeq":%s,"endSeq":%s},"sourceEventSeqs":[%s]`, cited[0], cited[span-1], strings.Join(cited, ","))
					nodes = nodes[:len(nodes)-span]
				}
				nodes = append(nodes, fmt.Sprint(seq))
				fmt.Fprintf(&body, `{"type":"user/message","seq":%d,"time":1767225604000,"surfaceOp":%s,"data":%s}`+"\n", seq, op, data)
			}
			b.Run(fmt.Sprintf("span=%d/data=%d", span, size), func(b *testing.B) { fold(b, body.Bytes(), surface.KeepBodies) })
		}
	}
}
