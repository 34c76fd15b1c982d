package main

import (
	"fmt"
	"strconv"
	"strings"

	"palimpsest/internal/events"
)

// dataBytes is how many bytes the data of every event has.
const dataBytes = 512

// cycle is what happens in a turn, in the proportions of recorded sessions: two in five events
// are on the surface. CALL and TURN are filled in, PAD makes data dataBytes long.
var cycle = []struct{ typ, data string }{
	{"turn/start", `{"turn":TURN,"note":"PAD"}`},
	{"user/message", `{"id":"u-CALL","role":"user","content":[{"type":"text","text":"PAD"}],"source":{"kind":"user"}}`},
	{"step/start", `{"turn":TURN,"step":0,"note":"PAD"}`},
	{"assistant/chunk", `{"turn":TURN,"step":0,"text":"PAD"}`},
	{"assistant/chunk", `{"turn":TURN,"step":0,"text":"PAD"}`},
	{"assistant/message", `{"turn":TURN,"step":0,"message":{"id":"a-CALL","role":"assistant","content":[{"type":"text","text":"PAD"},{"type":"tool-call","id":"CALLa","name":"read","input":{}},{"type":"tool-call","id":"CALLb","name":"read","input":{}}],"source":{"kind":"model","provider":"p","model":"m"}}}`},
	{"tool/call", `{"turn":TURN,"step":0,"callId":"CALLa","name":"read","input":{"path":"PAD"}}`},
	{"tool/call", `{"turn":TURN,"step":0,"callId":"CALLb","name":"read","input":{"path":"PAD"}}`},
	{"tool/result", `{"turn":TURN,"step":0,"message":{"id":"r-CALLa","role":"user","content":[{"type":"tool-result","toolCallId":"CALLa","content":[{"type":"text","text":"PAD"}]}],"source":{"kind":"tool","callId":"CALLa"}}}`},
	{"tool/result", `{"turn":TURN,"step":0,"message":{"id":"r-CALLb","role":"user","content":[{"type":"tool-result","toolCallId":"CALLb","content":[{"type":"text","text":"PAD"}]}],"source":{"kind":"tool","callId":"CALLb"}}}`},
	{"step/end", `{"turn":TURN,"step":0,"note":"PAD"}`},
	{"step/start", `{"turn":TURN,"step":1,"note":"PAD"}`},
	{"assistant/chunk", `{"turn":TURN,"step":1,"text":"PAD"}`},
	{"assistant/message", `{"turn":TURN,"step":1,"message":{"id":"b-CALL","role":"assistant","content":[{"type":"text","text":"PAD"},{"type":"tool-call","id":"CALLc","name":"read","input":{}}],"source":{"kind":"model","provider":"p","model":"m"}}}`},
	{"tool/call", `{"turn":TURN,"step":1,"callId":"CALLc","name":"read","input":{"path":"PAD"}}`},
	{"tool/result", `{"turn":TURN,"step":1,"message":{"id":"r-CALLc","role":"user","content":[{"type":"tool-result","toolCallId":"CALLc","content":[{"type":"text","text":"PAD"}]}],"source":{"kind":"tool","callId":"CALLc"}}}`},
	{"user/message", `{"id":"v-CALL","role":"user","content":[{"type":"text","text":"PAD"}],"source":{"kind":"hook"}}`},
	{"assistant/message", `{"turn":TURN,"step":1,"message":{"id":"c-CALL","role":"assistant","content":[{"type":"text","text":"PAD"}],"source":{"kind":"model","provider":"p","model":"m"}}}`},
	{"step/end", `{"turn":TURN,"step":1,"note":"PAD"}`},
	{"turn/end", `{"turn":TURN,"note":"PAD"}`},
}

const text = "The quick brown fox jumps over the lazy dog, and \\\"so on\\\" as texts do; then it rests. "

var padding = strings.Repeat(text, 1+(64<<10)/len(text))

// appendEvent appends the canonical line of a session's event at seq, with its line end, whose
// data has size bytes or as few more as it takes.
func appendEvent(b []byte, seq, size int) []byte {
	c := cycle[seq%len(cycle)]
	turn := strconv.Itoa(seq / len(cycle))
	data := strings.ReplaceAll(strings.ReplaceAll(c.data, "TURN", turn), "CALL", "call-"+turn)
	pad := padding[:max(0, size-len(data)+len("PAD"))]
	if cut := strings.TrimRight(pad, `\`); len(cut) < len(pad) { // not in the midst of an escape
		pad = cut + strings.Repeat(".", len(pad)-len(cut))
	}
	op := ""
	if events.SurfaceKind(c.typ).OnSurface() {
		op = `,"surfaceOp":"append"`
	}
	b = fmt.Appendf(b, `{"type":"%s","seq":%d,"time":%d%s,"data":`, c.typ, seq, 1767225604000+seq, op)
	return append(append(b, strings.Replace(data, "PAD", pad, 1)...), "}\n"...)
}

// author writes the commits of one session as an appender would.
type author struct {
	session string
	next    events.Seq
	digest  events.Digest
	chain   events.Digest
	traced  bool // its commits tell of the span that stored them
}

func newAuthor(session string, header []byte) *author {
	return &author{session: session, digest: events.SeedDigest(session), chain: events.SeedChain(session, header)}
}

// commit makes the session's next commit of n events.
func (a *author) commit(n, size int) *events.Commit {
	c := &events.Commit{
		ID: fmt.Sprintf("bench-%s-%016d", a.session, a.next), Session: a.session, Actor: events.NoActor,
		Time: "2026-01-01T00:00:04.000Z", Format: events.Format3, First: a.next, Last: a.next + events.Seq(n) - 1,
	}
	if a.traced {
		c.Trace = fmt.Sprintf("00-%032x-%016x-01", int64(a.next)+1, int64(a.next)+1)
	}
	for range n {
		c.Body = appendEvent(c.Body, int(a.next), size)
		a.next++
	}
	for line := range c.Lines() {
		a.digest = a.digest.Next(line)
	}
	c.Digest = a.digest
	a.chain = a.chain.NextChain(c)
	c.Chain = a.chain
	return c
}
