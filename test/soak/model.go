package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"palimpsest/test/e2e/harness"
)

// none is the number of a turn or step when none is open.
const none = -1

// maxLegal bounds how many boundaries a model remembers to fork at.
const maxLegal = 200

// model is what an agent knows of its session, from the events in its log.
type model struct {
	next       int64
	turn, step int64 // the open ones
	turns      int64 // the highest turn so far
	steps      int64 // of the open turn
	calls      []toolCall
	nodes      []node
	epoch      int64   // of the session's writer, 0 when it has none
	legal      []int64 // seqs behind which no turn is open
}

type toolCall struct {
	id                 string
	recorded, answered bool
}

type node struct {
	seq    int64
	kind   string
	pruned bool
}

func newModel() model { return model{turn: none, step: none} }

func (m *model) clone() model {
	c := *m
	c.calls, c.nodes, c.legal = slices.Clone(m.calls), slices.Clone(m.nodes), slices.Clone(m.legal)
	return c
}

// apply takes in the next event of the log.
func (m *model) apply(e harness.Event) error {
	var data struct {
		Turn, Step, Epoch int64
		CallID            string
		Inherited         bool
		Message           struct {
			Content []struct{ Type, ID string }
			Source  struct{ CallID string }
		}
	}
	if err := json.Unmarshal(e.Data, &data); err != nil {
		return fmt.Errorf("seq %d: %w", m.next, err)
	}
	switch e.Type {
	case "turn/start":
		m.turn, m.turns, m.steps = data.Turn, max(m.turns, data.Turn), 0
	case "turn/end":
		m.turn, m.step, m.calls = none, none, nil
	case "step/start":
		m.step, m.steps, m.calls = data.Step, m.steps+1, nil
	case "step/end":
		m.step, m.calls = none, nil
	case "assistant/message":
		for _, b := range data.Message.Content {
			if b.Type == "tool-call" {
				m.calls = append(m.calls, toolCall{id: b.ID})
			}
		}
	case "tool/call":
		for i := range m.calls {
			m.calls[i].recorded = m.calls[i].recorded || m.calls[i].id == data.CallID
		}
	case "session/writer":
		m.epoch = data.Epoch
	case "session/end-seed":
		if data.Inherited {
			m.epoch = 0
		}
	}
	if e.SurfaceOp != nil {
		n := node{seq: m.next, kind: e.Type}
		op, replaces := e.Replace()
		if !replaces {
			m.nodes = append(m.nodes, n)
			for i := range m.calls {
				m.calls[i].answered = m.calls[i].answered || e.Type == "tool/result" && m.calls[i].id == data.Message.Source.CallID
			}
		} else {
			from := slices.IndexFunc(m.nodes, func(n node) bool { return n.seq == op.Start })
			to := slices.IndexFunc(m.nodes, func(n node) bool { return n.seq == op.End })
			if from < 0 || to < from {
				return fmt.Errorf("seq %d replaces %d..%d, which is no range of the surface", m.next, op.Start, op.End)
			}
			n.pruned = e.Type == "tool/result"
			m.nodes = slices.Replace(m.nodes, from, to+1, n)
		}
	}
	if m.turn == none {
		m.legal = append(m.legal, m.next)
		if len(m.legal) > maxLegal {
			m.legal = slices.Delete(m.legal, 0, maxLegal/2)
		}
	}
	m.next++
	return nil
}

// event is one event as an agent sends it.
type event struct {
	raw  string
	mark string
}

func note(mark string) event {
	return event{fmt.Sprintf(`{"type":"goal/change","data":{"mark":%q}}`, mark), mark}
}

// write makes an event that is legal as things stand.
func (m *model) write(r *rand.Rand, mark string) event {
	at := fmt.Sprintf(`"turn":%d,"step":%d,"mark":%q`, m.turn, m.step, mark)
	logOnly := func(kind, data string) event {
		return event{fmt.Sprintf(`{"type":%q,"data":{%s}}`, kind, data), mark}
	}
	onSurface := func(kind, data string) event {
		return event{fmt.Sprintf(`{"type":%q,"surfaceOp":"append","data":{%s}}`, kind, data), mark}
	}
	text := func() string {
		words := 1 + r.IntN(60)
		if r.IntN(25) == 0 { // enough for sessions with pages of their own
			words *= 100
		}
		return fmt.Sprintf(`[{"type":"text","text":%q}]`, strings.Repeat("kiln ", words))
	}
	user := func() event {
		return onSurface("user/message", fmt.Sprintf(`"id":%q,"mark":%q,"role":"user","source":{"kind":"user"},"content":%s`, mark, mark, text()))
	}
	n := r.IntN(100)
	switch {
	case m.turn == none && n < 80:
		return logOnly("turn/start", fmt.Sprintf(`"turn":%d,"mark":%q`, m.turns+1, mark))
	case m.turn == none && n < 90:
		return user()
	case m.turn == none:
		return note(mark)
	case m.step == none && (n < 60 && m.steps < 4 || m.steps == 0):
		return logOnly("step/start", fmt.Sprintf(`"turn":%d,"step":%d,"mark":%q`, m.turn, m.steps+1, mark))
	case m.step == none && n < 90:
		return logOnly("turn/end", fmt.Sprintf(`"turn":%d,"reason":{"kind":"completed"},"mark":%q`, m.turn, mark))
	case m.step == none:
		return note(mark)
	case len(m.nodes) == 0:
		return onSurface("system/message", fmt.Sprintf(`%s,"message":{"id":%q,"role":"system","source":{"kind":"plugin","plugin":"prompt"},"content":%s}`, at, mark, text()))
	}
	for _, c := range m.calls {
		switch {
		case !c.recorded && r.IntN(2) == 0:
			return logOnly("tool/call", fmt.Sprintf(`%s,"callId":%q,"name":"run"`, at, c.id))
		case c.recorded && !c.answered && r.IntN(5) > 0:
			return onSurface("tool/result", fmt.Sprintf(`%s,"message":{"id":"r-%s","role":"user","source":{"kind":"tool","callId":%q},"content":[{"type":"tool-result","toolCallId":%q,"isError":false,"content":%s}]}`,
				at, mark, c.id, c.id, text()))
		}
	}
	switch {
	case n < 40:
		blocks := `{"type":"text","text":"I look into it."}`
		for i := range r.IntN(4) {
			blocks += fmt.Sprintf(`,{"type":"tool-call","id":"%s-c%d","name":"run","arguments":"{\"n\":1.10}"}`, mark, i)
		}
		return onSurface("assistant/message", fmt.Sprintf(`%s,"message":{"id":%q,"role":"assistant","source":{"kind":"model","provider":"mock","model":"mock-1"},"content":[%s]}`, at, mark, blocks))
	case n < 50:
		return user()
	case n < 60:
		return logOnly("assistant/chunk", at+`,"chunk":{"type":"text-delta","index":0,"text":"…"}`)
	case n < 70:
		return note(mark)
	}
	return logOnly("step/end", at)
}
