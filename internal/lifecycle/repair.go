package lifecycle

import (
	"encoding/json"
	"fmt"

	"palimpsest/internal/events"
)

// What the model is told about a call that a crash left without a result.
const (
	textOutcomeUnknown = "This tool call was recorded as started, but the session was interrupted before a result was stored. Whether it took effect is unknown. Check the state it would have changed before you call it again; a blind retry may do it twice."
	textNotStarted     = "This tool call was never started: the session was interrupted before it ran. It had no effect, so it is safe to call it again."
)

// Closers returns the events that close a log whose last turn is open, as raw text for
// events.Parse: an error result for each unanswered call in the order of the assistant's
// blocks, the end of the open step, the end of the turn. The first gets the seq next; all
// repeat the time of the log's last event. A balanced log gets none.
func (s *State) Closers(f events.Format, next events.Seq, time int64) [][]byte {
	if s.turn == events.NoSeq {
		return nil
	}
	s.readOpenStep()
	var out [][]byte
	add := func(typ string, rest map[string]any) {
		rest["type"], rest["seq"], rest["time"] = typ, next, time
		b, err := json.Marshal(rest)
		if err != nil {
			panic(err) // strings and numbers always encode
		}
		out = append(out, b)
		next++
	}
	if s.step != events.NoSeq {
		for _, c := range s.calls {
			if !c.answered && !c.Unasked {
				add(events.TypeTool, s.interruptedResult(f, c, next))
			}
		}
		add("step/end", map[string]any{"data": map[string]any{"turn": s.turn, "step": s.step}})
	}
	add("turn/end", map[string]any{"data": map[string]any{"turn": s.turn, "reason": map[string]any{"kind": "interrupted"}}})
	return out
}

func (s *State) interruptedResult(f events.Format, c Call, seq events.Seq) map[string]any {
	name, code, text := "ToolOutcomeUnknownError", codeOutcomeUnknown, textOutcomeUnknown
	if c.Seq == nil {
		name, code, text = "ToolNotStartedError", codeNotStarted, textNotStarted
	}
	id := json.RawMessage(events.Quote(c.ID))
	content := []any{map[string]any{"type": "text", "text": text}}
	msg := map[string]any{
		"id":     json.RawMessage(events.Quote(fmt.Sprintf("interrupted-tool-result-%s-%d", c.ID, seq))),
		"source": map[string]any{"kind": "tool", "callId": id},
	}
	if f >= events.Format4 {
		msg["role"], msg["toolCallId"], msg["isError"], msg["content"] = "tool", id, true, content
	} else {
		msg["role"] = "user"
		msg["content"] = []any{map[string]any{"type": "tool-result", "toolCallId": id, "isError": true, "content": content}}
	}
	e := map[string]any{
		"surfaceOp": "append",
		"data": map[string]any{"turn": s.turn, "step": s.step, "message": msg,
			"error": map[string]any{"name": name, "code": code}},
	}
	if c.Seq != nil {
		e["sourceEventSeqs"] = []events.Seq{*c.Seq}
	}
	return e
}
