package harness

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Script writes a plausible session of format 3, event by event and the same
// for the same seed: turns of two steps, two parallel tool calls in the first,
// now and then a compaction and a pruned tool result. It keeps the lifecycle
// rules, so that it can be appended with invariants enforced.
type Script struct {
	random  *rand.Rand
	padding int
	pending []json.RawMessage // of the turn begun, not yet handed out

	seq, turn int
	surface   []scriptNode
}

type scriptNode struct {
	seq  int
	turn int             // in which it was appended
	rest json.RawMessage // of a tool result: callId, to be pruned later
}

// NewScript answers a script whose texts are about padding bytes long.
func NewScript(seed uint64, padding int) *Script {
	return &Script{random: rand.New(rand.NewPCG(seed, 1)), padding: padding}
}

// Next answers the next n events, each a canonical line with seq and time.
func (s *Script) Next(n int) []json.RawMessage {
	for len(s.pending) < n {
		s.writeTurn()
	}
	events := slices.Clone(s.pending[:n])
	s.pending = s.pending[n:]
	return events
}

var scriptWords = strings.Fields(`amber basalt "quoted" line\nbreak tab\there cedar <delta> & élan frost 12.50 gravel хлеб ivy 東京 juniper 🙂 kelp`)

func (s *Script) text() string {
	var b strings.Builder
	for b.Len() <= s.padding {
		b.WriteString(scriptWords[s.random.IntN(len(scriptWords))] + " ")
	}
	return quote(strings.TrimSpace(b.String()))
}

// emit adds one event and answers its seq.
func (s *Script) emit(kind, op string, sources []int, data string) int {
	seq := s.seq
	s.seq++
	e := Event{Type: kind, Seq: int64(seq), Time: 1767225600000 + int64(seq)*10, Data: json.RawMessage(data)}
	if op != "" {
		e.SurfaceOp = json.RawMessage(op)
	}
	if sources != nil {
		e.Sources = list(sources)
	}
	s.pending = append(s.pending, e.Canonical())
	return seq
}

func list(seqs []int) json.RawMessage {
	raw, _ := json.Marshal(seqs) // integers always encode
	return raw
}

const appendOp = `"append"`

func (s *Script) add(kind string, sources []int, data string, rest json.RawMessage) {
	seq := s.emit(kind, appendOp, sources, data)
	s.surface = append(s.surface, scriptNode{seq: seq, turn: s.turn, rest: rest})
}

// replace puts a new node in the place of surface[from..to].
func (s *Script) replace(kind string, from, to int, cited []int, data string, rest json.RawMessage) {
	for _, n := range s.surface[from : to+1] {
		cited = append(cited, n.seq)
	}
	op := fmt.Sprintf(`{"op":"replace","startSeq":%d,"endSeq":%d}`, s.surface[from].seq, s.surface[to].seq)
	seq := s.emit(kind, op, cited, data)
	s.surface = slices.Replace(s.surface, from, to+1, scriptNode{seq: seq, turn: s.turn, rest: rest})
}

func (s *Script) writeTurn() {
	s.turn++
	at := fmt.Sprintf(`"turn":%d,"step":1`, s.turn)
	s.emit("turn/start", "", nil, fmt.Sprintf(`{"turn":%d}`, s.turn))
	s.emit("step/start", "", nil, "{"+at+"}")
	if s.turn == 1 {
		s.add("system/message", nil, fmt.Sprintf(`{%s,"message":{"id":"sys","role":"system","source":{"kind":"plugin","plugin":"prompt"},"content":[{"type":"text","text":%s}]}}`, at, s.text()), nil)
	}
	s.add("user/message", nil, s.userMessage("user"), nil)

	calls := []string{fmt.Sprintf("call-%d-a", s.turn), fmt.Sprintf("call-%d-b", s.turn)}
	var blocks []string
	for _, id := range calls {
		blocks = append(blocks, fmt.Sprintf(`{"type":"tool-call","id":%q,"name":"shell","arguments":"{\"n\":1.10}"}`, id))
	}
	s.assistant(at, strings.Join(blocks, ","))
	started := make([]int, len(calls))
	for i, id := range calls {
		started[i] = s.emit("tool/call", "", nil, fmt.Sprintf(`{%s,"callId":%q,"name":"shell","arguments":"{\"n\":1.10}"}`, at, id))
	}
	for i, id := range calls {
		rest := json.RawMessage(fmt.Sprintf(`%s,"callId":%q`, at, id))
		s.add("tool/result", []int{started[i]}, resultData(at, id, s.text()), rest)
	}
	if s.turn%3 == 0 {
		s.prune()
	}
	s.emit("step/end", "", nil, "{"+at+"}")

	at = fmt.Sprintf(`"turn":%d,"step":2`, s.turn)
	s.emit("step/start", "", nil, "{"+at+"}")
	if s.turn%2 == 0 {
		s.compact()
	}
	s.emit("assistant/chunk", "", nil, fmt.Sprintf(`{%s,"chunk":{"type":"text-delta","index":0,"text":%s}}`, at, s.text()))
	s.assistant(at, `{"type":"text","text":`+s.text()+`}`)
	s.emit("step/end", "", nil, "{"+at+"}")
	s.emit("turn/end", "", nil, fmt.Sprintf(`{"turn":%d,"reason":{"kind":"completed"}}`, s.turn))
}

func (s *Script) userMessage(kind string) string {
	return fmt.Sprintf(`{"id":"u-%d","role":"user","source":{"kind":%q},"content":[{"type":"text","text":%s}]}`, s.seq, kind, s.text())
}

func (s *Script) assistant(at, blocks string) {
	s.add("assistant/message", nil, fmt.Sprintf(`{%s,"message":{"id":"a-%d","role":"assistant","source":{"kind":"model","provider":"mock","model":"mock-1"},"content":[%s]},"stream":[],"usage":{"cost":%.4f}}`,
		at, s.seq, blocks, s.random.Float64()), nil)
}

func resultData(at, call, text string) string {
	return fmt.Sprintf(`{%s,"message":{"id":"r-%s","role":"user","source":{"kind":"tool","callId":%q},"content":[{"type":"tool-result","toolCallId":%q,"isError":false,"content":[{"type":"text","text":%s}]}]}}`,
		at, call, call, call, text)
}

// prune shortens the newest tool result on the surface, in place.
func (s *Script) prune() {
	for i := len(s.surface) - 1; i >= 0; i-- {
		n := s.surface[i]
		if n.rest == nil {
			continue
		}
		at, call, _ := strings.Cut(string(n.rest), `,"callId":`)
		s.replace("tool/result", i, i, []int{}, resultData(at, strings.Trim(call, `"`), `"[pruned]"`), nil)
		return
	}
}

// compact replaces what earlier turns left behind the head by a summary.
func (s *Script) compact() {
	to := 1
	for to+1 < len(s.surface) && s.surface[to+1].turn < s.turn {
		to++
	}
	id := fmt.Sprintf(`"compactionId":"c-%d","turn":%d`, s.turn, s.turn)
	begun := s.emit("compaction/start", "", nil, "{"+id+"}")
	s.replace("user/message", 1, to, []int{begun}, s.userMessage("plugin"), nil)
	s.emit("compaction/end", "", nil, "{"+id+"}")
}
