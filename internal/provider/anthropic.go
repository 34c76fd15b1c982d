package provider

import (
	"palimpsest/internal/events"
)

const textOpening = "[The conversation begins with the message below. Nothing before it is part of this list.]"

// turn is one message of the rendered list: what follows one another in the same role.
type turn struct {
	role  string
	parts []part
	last  *message // whose parts stand at the end
}

// anthropic renders the list for Messages: system messages at the head go to the parameter
// system, everything else to turns that alternate between user and assistant.
func (r *renderer) anthropic() Rendered {
	t := r.tools()
	var system []part
	var turns []turn
	add := func(role string, m *message, parts []part) {
		if n := len(turns); n > 0 && turns[n-1].role == role {
			turns[n-1].parts = append(turns[n-1].parts, parts...)
			turns[n-1].last = m
			return
		}
		if len(turns) == 0 && role != "user" {
			r.note(m, wholeMessage, m.kind.Type(), Synthesized, "a user message before it: the list must begin with one")
			turns = append(turns, turn{"user", []part{textPart(textOpening)}, m})
		}
		turns = append(turns, turn{role, parts, m})
	}
	head := true
	for i := range r.in {
		k := r.in[i].Kind
		head = head && k == events.KindSystem
		switch k {
		case events.KindSystem, events.KindDeveloper, events.KindUser:
			m := r.read(i)
			parts, _ := r.parts(m, place{images: k == events.KindUser}, nil)
			switch {
			case len(parts) == 0:
				r.nothingLeft(m)
			case head:
				system = append(system, parts...)
			case k == events.KindUser:
				add("user", m, parts)
			default:
				add("user", m, r.marked(m, parts))
			}
		case events.KindAssistant:
			m := r.read(i)
			calls := t.of(i)
			parts := r.anthropicAssistant(m, calls)
			if len(parts) == 0 {
				r.nothingLeft(m)
				continue
			}
			add("assistant", m, parts)
			answers, lifted := r.answers(t, m, calls, place{images: true})
			for _, a := range answers {
				add("user", m, []part{toolResult(a)})
			}
			if len(lifted) > 0 {
				add("user", m, lifted)
			}
		case events.KindTool: // stands behind its call, or nowhere
		default:
			r.notOnSurface(&message{seq: r.in[i].Seq, index: i})
		}
	}
	r.orphans(t)
	if n := len(turns); n > 0 && turns[n-1].role == "assistant" {
		r.trimLast(&turns[n-1])
	}
	out := Rendered{Messages: []byte{'['}}
	if system != nil {
		out.System = appendParts(nil, system)
	}
	for i, t := range turns {
		if i > 0 {
			out.Messages = append(out.Messages, ',')
		}
		out.Messages = append(out.Messages, `{"role":"`+t.role+`","content":`...)
		out.Messages = append(appendParts(out.Messages, t.parts), '}')
	}
	out.Messages = append(out.Messages, ']')
	return out
}

// marked renders what a system or developer message says as what a user says, and says so.
func (r *renderer) marked(m *message, parts []part) []part {
	name := "system-message"
	if m.kind == events.KindDeveloper {
		name = "developer-message"
	}
	r.note(m, wholeMessage, m.kind.Type(), Changed, "a user's text between <%s> tags: the API takes such a message at the head of a list only", name)
	for i := range parts {
		parts[i].text = wrap("<"+name+`>\n`, parts[i].text, `\n</`+name+">")
	}
	return parts
}

// anthropicAssistant renders an assistant message. It must not end with what was thought.
func (r *renderer) anthropicAssistant(m *message, calls []call) []part {
	n := 0
	parts, _ := r.parts(m, place{}, func(b *block) part {
		c := &calls[n]
		n++
		r.toolID(m, b, c)
		j := append(append([]byte(`{"type":"tool_use","id":`), c.out...), `,"name":`...)
		j = append(append(j, r.toolName(m, b)...), `,"input":`...)
		return part{block: b.index, form: formCall, json: append(append(j, r.anthropicInput(m, b)...), '}')}
	})
	for len(parts) > 0 {
		last := &parts[len(parts)-1]
		if last.form != formReasoning && last.form != formRedacted {
			break
		}
		r.note(m, last.block, m.blocks[last.block].typ, LeftOut, "a message must not end with thinking")
		parts = parts[:len(parts)-1]
	}
	return parts
}

// anthropicInput returns the arguments of a call as the object that the API wants.
func (r *renderer) anthropicInput(m *message, b *block) []byte {
	note := func(format string, args ...any) {
		r.note(m, b.index, "tool-call.arguments", Changed, format, args...)
	}
	switch {
	case none(b.arguments) || isText(b.arguments) && blank(b.arguments):
		note("expected an object, found nothing; written as {}")
		return []byte("{}")
	case isText(b.arguments):
		if object, ok := jsonInside(b.arguments); ok && object[0] == '{' {
			r.noteSurrogates(m, b, object)
			return object
		}
	case b.arguments[0] == '{':
		r.noteSurrogates(m, b, b.arguments)
		return b.arguments
	}
	note(`expected a JSON object, found something else; written as it was in the member "arguments" of one`)
	r.noteSurrogates(m, b, b.arguments)
	return append(append([]byte(`{"arguments":`), b.arguments...), '}')
}

// toolResult renders an answer as the block that the turn after its call begins with.
func toolResult(a answer) part {
	j := append([]byte(`{"type":"tool_result","tool_use_id":`), a.id...)
	if len(a.parts) > 0 {
		j = appendParts(append(j, `,"content":`...), a.parts)
	}
	if a.isError {
		j = append(j, `,"is_error":true`...)
	}
	return part{block: wholeMessage, json: append(j, '}')}
}

// trimLast cuts the white space off the end of a list that ends with an assistant's text: the
// API would have the model go on from there.
func (r *renderer) trimLast(t *turn) {
	last := &t.parts[len(t.parts)-1]
	if last.text == nil {
		return
	}
	var cut bool
	if last.text, cut = trimRight(last.text); cut {
		r.note(t.last, last.block, "text", Changed, "without the white space at its end, which the API refuses at the end of a list")
	}
}
