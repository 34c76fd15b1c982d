package provider

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"palimpsest/internal/events"
)

const (
	textOutcomeUnknown = "No result of this tool call is on record, so its outcome is unknown. Check what it would have changed before you call it again."
	textErrorEmpty     = "The tool call failed and said nothing more."
	unknownTool        = "unknown_tool"
)

// tools walks the calls of a list in order, with the message that they stand in.
type tools struct {
	pairing
	next    int   // the first call of the messages still to come
	between []int // between[i] is how many of the first i messages are no tool results
}

func (r *renderer) tools() *tools {
	t := &tools{pairing: pair(r.format, r.in), between: make([]int, len(r.in)+1)}
	for i := range r.in {
		t.between[i+1] = t.between[i]
		if r.in[i].Kind != events.KindTool {
			t.between[i+1]++
		}
	}
	return t
}

// of returns the calls of message i. It must be asked for each message with calls, in order.
func (t *tools) of(i int) []call {
	from := t.next
	for t.next < len(t.calls) && t.calls[t.next].message == i {
		t.next++
	}
	return t.calls[from:t.next]
}

// moved reports whether anything but tool results stands between a call and its result.
func (t *tools) moved(c *call) bool { return t.between[c.result] > t.between[c.message+1] }

// orphans notes the results that answer no call.
func (r *renderer) orphans(t *tools) {
	for _, i := range t.pairing.orphans {
		m := &message{seq: r.in[i].Seq, index: i, kind: events.KindTool}
		r.note(m, wholeMessage, m.kind.Type(), LeftOut, "no call on the list that it could answer: %s", named(callID(r.format, r.in[i].JSON)))
	}
}

// answer is a tool result as it follows its call.
type answer struct {
	id      []byte // token of the call's id in the list
	parts   []part
	isError bool
}

// answers renders what follows the calls of message m: the results in the order of the list,
// then the ones that say that there is none; and the images that stand behind all of them.
func (r *renderer) answers(t *tools, m *message, calls []call, at place) (out []answer, lifted []part) {
	order := make([]*call, 0, len(calls))
	for i := range calls {
		if calls[i].result >= 0 {
			order = append(order, &calls[i])
		}
	}
	slices.SortFunc(order, func(a, b *call) int { return cmp.Compare(a.result, b.result) })
	for _, c := range order {
		res := r.read(c.result)
		if t.moved(c) {
			r.note(res, wholeMessage, res.kind.Type(), Changed, "moved directly behind its call in seq %d", m.seq)
		}
		here := at
		if res.isError && r.target == Anthropic {
			here = place{lift: true} // an error is text alone
		}
		parts, up := r.parts(res, here, nil)
		if res.isError && r.target == OpenAI {
			r.note(res, wholeMessage, res.kind.Type()+".isError", Unmapped, "a tool message cannot say that it is an error; its content is as it was")
		}
		if res.isError && !speaks(parts) {
			r.note(res, wholeMessage, res.kind.Type(), Synthesized, "an error without content says that it says nothing")
			parts = []part{textPart(textErrorEmpty)}
		}
		if r.target == OpenAI {
			parts = r.dropEmpty(res, parts)
		}
		if len(up) > 0 {
			id, _ := events.Text(c.out) // as the model knows it
			lifted = append(lifted, textPart("[From the result of the tool call "+clip(id)+":]"))
			lifted = append(lifted, up...)
		}
		out = append(out, answer{c.out, parts, res.isError})
	}
	for i := range calls {
		if c := &calls[i]; c.result < 0 {
			r.note(m, c.block, "tool-call", Synthesized, "no result on the list answers it, so one says that the outcome is unknown: %s", named(c.id))
			out = append(out, answer{c.out, []part{textPart(textOutcomeUnknown)}, true})
		}
	}
	return out, lifted
}

// speaks reports whether any part is more than an empty text.
func speaks(parts []part) bool {
	for _, p := range parts {
		if p.text == nil || len(p.text) > 2 {
			return true
		}
	}
	return false
}

// named is a call id for a text of ours.
func named(id string) string {
	if id == "" {
		return "a call without an id"
	}
	return clip(id)
}

// toolID decides the token of a call's id in the list.
func (r *renderer) toolID(m *message, b *block, c *call) {
	id, written := r.ids.write(b.id, c.id)
	if c.out = id; written != "" {
		r.note(m, b.index, "tool-call.id", Changed, "%s is written %s: %s", named(c.id), inside(id), written)
	}
}

// toolName returns the token of a tool's name.
func (r *renderer) toolName(m *message, b *block) []byte {
	name, _ := events.Text(b.name)
	if name == "" {
		r.note(m, b.index, "tool-call.name", Changed, "expected a name, written %s", unknownTool)
		return quote(unknownTool)
	}
	if plain(name) && len(name) <= r.nameMost {
		return b.name
	}
	to := sanitize(name, r.nameMost)
	r.note(m, b.index, "tool-call.name", Changed, "%s is written %s: the API takes letters, digits, _ and -, at most %d", clip(name), to, r.nameMost)
	return quote(to)
}

// idWriter decides how the ids of tool calls are written, so that each is valid and none is
// there twice. What it decides for a list it decides alike for every longer one.
type idWriter struct {
	strict bool // letters, digits, _ and - only
	most   int  // characters; 0 for no limit
	used   map[string]bool
	next   map[string]int // per base the next suffix to try
}

// write returns the token of an id, and why it is not the given one.
func (w *idWriter) write(tok []byte, id string) (out []byte, why string) {
	if w.used == nil {
		w.used, w.next = map[string]bool{}, map[string]int{}
	}
	switch {
	case id == "":
		why = "a call needs an id"
	case w.strict && !plain(id):
		why = "the API takes letters, digits, _ and - only"
	case !utf8.ValidString(id):
		why = "it holds a lone surrogate"
	case w.most > 0 && utf8.RuneCountInString(id) > w.most:
		why = "the API takes at most " + strconv.Itoa(w.most) + " characters"
	case w.used[id]:
		why = "an earlier call has the id"
	default:
		w.used[id] = true
		return tok, ""
	}
	base := sanitize(id, w.most)
	if base == "" {
		base = "call"
	}
	to := base
	for w.used[to] {
		w.next[base]++
		suffix := "_" + strconv.Itoa(w.next[base]+1)
		to = base + suffix
		if w.most > 0 && len(to) > w.most {
			to = base[:w.most-len(suffix)] + suffix
		}
	}
	w.used[to] = true
	return quote(to), why
}

// plain reports whether s is letters, digits, _ and - alone.
func plain(s string) bool {
	for i := range len(s) {
		if !plainByte(s[i]) {
			return false
		}
	}
	return true
}

func plainByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-'
}

// sanitize writes every other character as _ and cuts what is longer than most.
func sanitize(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r < utf8.RuneSelf && plainByte(byte(r)) {
			return r
		}
		return '_'
	}, s)
	if most > 0 && len(s) > most {
		s = s[:most]
	}
	return s
}
