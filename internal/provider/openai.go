package provider

import (
	"palimpsest/internal/events"
)

// openAI renders the list for Chat Completions: one message for each of the log's, with the
// results of tool calls directly behind the message that makes the calls.
func (r *renderer) openAI() Rendered {
	t := r.tools()
	out := []byte{'['}
	begin := func(role string) {
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(append(out, `{"role":"`...), role...), `",`...)
	}
	for i := range r.in {
		switch k := r.in[i].Kind; k {
		case events.KindSystem, events.KindDeveloper, events.KindUser:
			m := r.read(i)
			parts, _ := r.parts(m, place{images: k == events.KindUser}, nil)
			parts = r.dropEmpty(m, parts)
			if len(parts) == 0 {
				r.nothingLeft(m)
				continue
			}
			begin(openAIRoles[k])
			out = append(appendContent(out, parts), '}')
		case events.KindAssistant:
			m := r.read(i)
			calls := t.of(i)
			content, made := r.openAIAssistant(m, calls)
			if len(content) == 0 && len(made) == 0 {
				r.nothingLeft(m)
				continue
			}
			begin("assistant")
			if len(content) == 0 {
				out = append(out, `"content":null`...)
			} else {
				out = appendContent(out, content)
			}
			if len(made) > 0 {
				out = appendParts(append(out, `,"tool_calls":`...), made)
			}
			out = append(out, '}')
			answers, lifted := r.answers(t, m, calls, place{lift: true})
			for _, a := range answers {
				begin("tool")
				out = append(append(append(out, `"tool_call_id":`...), a.id...), ',')
				out = append(appendContent(out, a.parts), '}')
			}
			if len(lifted) > 0 {
				begin("user")
				out = append(appendContent(out, lifted), '}')
			}
		case events.KindTool: // stands behind its call, or nowhere
		default:
			r.notOnSurface(&message{seq: r.in[i].Seq, index: i})
		}
	}
	r.orphans(t)
	return Rendered{Messages: append(out, ']')}
}

var openAIRoles = map[events.Kind]string{
	events.KindSystem: "system", events.KindDeveloper: "developer", events.KindUser: "user",
}

// openAIAssistant renders an assistant message: its texts, and its calls.
func (r *renderer) openAIAssistant(m *message, calls []call) (content, made []part) {
	n := 0
	parts, _ := r.parts(m, place{}, func(b *block) part {
		c := &calls[n]
		n++
		r.toolID(m, b, c)
		j := append(append([]byte(`{"id":`), c.out...), `,"type":"function","function":{"name":`...)
		j = append(append(j, r.toolName(m, b)...), `,"arguments":`...)
		return part{block: b.index, form: formCall, json: append(append(j, r.openAIArguments(m, b)...), "}}"...)}
	})
	parts = r.dropEmpty(m, parts)
	for _, p := range parts {
		switch {
		case p.form == formCall:
			made = append(made, p)
		case made != nil && p.block != wholeMessage:
			r.note(m, p.block, "text", Changed, "stands before the tool calls that it followed")
			fallthrough
		default:
			content = append(content, p)
		}
	}
	return content, made
}

// openAIArguments returns the arguments of a call as the string that the API wants.
func (r *renderer) openAIArguments(m *message, b *block) []byte {
	switch {
	case isText(b.arguments):
		r.noteSurrogates(m, b, b.arguments)
		return b.arguments
	case none(b.arguments):
		r.note(m, b.index, "tool-call.arguments", Changed, "expected a string, found none; written as {}")
		return []byte(`"{}"`)
	}
	r.note(m, b.index, "tool-call.arguments", Changed, "expected a string, found JSON; written as a string that holds it")
	return events.Quote(string(b.arguments))
}

// dropEmpty leaves out empty texts, unless a message would have nothing then: the API takes
// an empty string as content, but no list of parts with one.
func (r *renderer) dropEmpty(m *message, parts []part) []part {
	keep := !speaks(parts)
	out := parts[:0]
	for _, p := range parts {
		if p.text == nil || len(p.text) > 2 || keep {
			out = append(out, p)
			keep = false
			continue
		}
		r.note(m, p.block, "text", LeftOut, "an empty text beside other content")
	}
	return out
}

// appendContent appends the member content: a string where one text is all there is.
func appendContent(dst []byte, parts []part) []byte {
	dst = append(dst, `"content":`...)
	switch {
	case len(parts) == 0:
		return append(dst, `""`...)
	case len(parts) == 1 && parts[0].text != nil:
		return append(dst, parts[0].text...)
	}
	return appendParts(dst, parts)
}
