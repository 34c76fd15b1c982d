package provider

import (
	"cmp"
	"slices"
	"strconv"

	"palimpsest/internal/events"
)

// The kinds of an UnpairedEntry.
const (
	UnpairedCall   = "call"   // no result answers it
	UnpairedResult = "result" // it answers no call
)

// UnpairedEntry is a tool call without a result on the list, or a result without its call.
type UnpairedEntry struct {
	Kind   string     // UnpairedCall or UnpairedResult
	CallID string     // "" when the log has none
	Seq    events.Seq // of the message that holds it
	Index  int        // of that message in the list
}

// MarshalJSON writes the entry with its call id token for token.
func (u UnpairedEntry) MarshalJSON() ([]byte, error) {
	b := append([]byte(`{"kind":"`+u.Kind+`","callId":`), events.Quote(u.CallID)...)
	b = append(append(b, `,"seq":`...), u.Seq.String()...)
	b = strconv.AppendInt(append(b, `,"index":`...), int64(u.Index), 10)
	return append(b, '}'), nil
}

// Unpaired returns the tool calls and results on a list that lost each other, in list order.
// A result answers a call that stands before it: the first one of its id that is open in the
// last assistant message with that id. So a call that stays unanswered until its id is used
// again stays so for good, and a second result for one call is without a call. What has no id
// pairs with nothing. The answer is never nil.
func Unpaired(f events.Format, messages []Message) []UnpairedEntry {
	out := []UnpairedEntry{}
	p := pair(f, messages)
	for _, c := range p.calls {
		if c.result < 0 {
			out = append(out, UnpairedEntry{UnpairedCall, c.id, messages[c.message].Seq, c.message})
		}
	}
	for _, i := range p.orphans {
		out = append(out, UnpairedEntry{UnpairedResult, callID(f, messages[i].JSON), messages[i].Seq, i})
	}
	slices.SortStableFunc(out, func(a, b UnpairedEntry) int { return cmp.Compare(a.Index, b.Index) })
	return out
}

// Pair is a tool call and the result that answers it: the indexes of their messages.
type Pair struct {
	CallID       string
	Call, Result int
}

// Pairs returns the tool calls on a list that have a result on it, in list order, paired as
// Unpaired does.
func Pairs(f events.Format, messages []Message) []Pair {
	var out []Pair
	for _, c := range pair(f, messages).calls {
		if c.result >= 0 {
			out = append(out, Pair{c.id, c.message, c.result})
		}
	}
	return out
}

// call is one tool-call block of the list.
type call struct {
	message, block int
	id             string
	result         int    // index of the message that answers it; -1 for none
	out            []byte // the token of its id in the rendered list
}

type pairing struct {
	calls   []call // in list order
	orphans []int  // indexes of the results that answer no call
}

// pair finds out which result answers which call.
func pair(f events.Format, messages []Message) (p pairing) {
	// Per id the numbers of the calls of the last message that has it, as far as they are open.
	open := map[string][]int{}
	for i := range messages {
		m := &messages[i]
		switch m.Kind {
		case events.KindAssistant:
			eachCall(m.JSON, func(block int, b []byte) {
				id, _ := events.Text(events.Get(b, "id"))
				n := len(p.calls)
				p.calls = append(p.calls, call{message: i, block: block, id: id, result: -1})
				if id == "" {
					return
				}
				same := open[id]
				if len(same) > 0 && p.calls[same[0]].message != i {
					same = nil // the id is used again
				}
				open[id] = append(same, n)
			})
		case events.KindTool:
			id := callID(f, m.JSON)
			same := open[id]
			if len(same) == 0 {
				p.orphans = append(p.orphans, i)
				continue
			}
			p.calls[same[0]].result = i
			if open[id] = same[1:]; len(same) == 1 {
				delete(open, id)
			}
		}
	}
	return p
}

// eachCall calls f for the tool-call blocks of an assistant message.
func eachCall(msg []byte, f func(block int, b []byte)) {
	n := 0
	events.EachElement(events.Get(msg, "content"), func(b []byte) bool {
		if isCall(b) {
			f(n, b)
		}
		n++
		return true
	})
}

func isCall(block []byte) bool { return events.TextIs(events.Get(block, "type"), "tool-call") }

// callID returns the id of the call that a tool result answers.
func callID(f events.Format, msg []byte) string {
	tok := events.Get(events.Get(msg, "source"), "callId")
	if flat(f, msg) {
		tok = events.Get(msg, "toolCallId")
	}
	id, _ := events.Text(tok)
	return id
}

// flat reports whether a tool result carries its members itself (format 4, role tool) and not
// in a tool-result block.
func flat(f events.Format, msg []byte) bool {
	return f >= events.Format4 && events.TextIs(events.Get(msg, "role"), "tool")
}
