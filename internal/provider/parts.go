package provider

import (
	"strings"

	"palimpsest/internal/events"
)

// part is one piece of a rendered message: a text, or a block in the target's form.
type part struct {
	block int    // of the message; wholeMessage for words of ours
	text  []byte // the string token of a text, nil for a block
	json  []byte
	form  form
}

// textPart is a text of ours.
func textPart(s string) part { return part{block: wholeMessage, text: quote(s), form: formText} }

// place is where the parts of a message will stand.
type place struct {
	images bool // images may stand here
	lift   bool // images that must not stand here can stand behind the tool results
}

// parts renders the content of a message, call after call through tool. Lifted are the images
// that stand elsewhere.
func (r *renderer) parts(m *message, at place, tool func(*block) part) (out, lifted []part) {
	if m.strange != "" {
		r.note(m, wholeMessage, m.kind.Type(), LeftOut, "%s", m.strange)
	}
	if m.extra != nil {
		r.note(m, wholeMessage, m.kind.Type(), Unmapped, "no place for %s", strings.Join(m.extra, ", "))
	}
	for i := range m.blocks {
		b := &m.blocks[i]
		switch b.form {
		case formText:
			if r.target == Anthropic && blank(b.text) {
				r.note(m, b.index, b.typ, LeftOut, "a text must have more than white space")
				continue
			}
			r.noteSurrogates(m, b, b.text)
			out = append(out, part{block: b.index, text: b.text, form: formText})
		case formCall:
			out = append(out, tool(b))
		case formImage:
			p, up := r.image(m, b, at)
			if out = append(out, p); up != nil {
				lifted = append(lifted, *up)
			}
			continue
		case formReasoning, formRedacted:
			p, ok := r.reasoning(m, b)
			if !ok {
				continue
			}
			out = append(out, p)
		case formTools:
			r.note(m, b.index, b.typ, Unmapped, "tools come and go with the request's parameter tools")
			continue
		default:
			r.note(m, b.index, b.typ, Unmapped, "no part of the API is like it")
			if m.kind != events.KindAssistant { // or the model would learn to write it
				out = append(out, textPart("[Something of type "+b.typ+" stood here. It cannot be shown.]"))
			}
			continue
		}
		if b.extra != nil {
			r.note(m, b.index, b.typ, Unmapped, "no place for %s", strings.Join(b.extra, ", "))
		}
	}
	return out, lifted
}

// noteSurrogates reports strings in which mendLone replaces something.
func (r *renderer) noteSurrogates(m *message, b *block, tok []byte) {
	if lone(tok) {
		r.note(m, b.index, b.typ, Changed, "a lone surrogate escape, for which an API refuses the whole request, became U+FFFD")
	}
}

// image renders an image block, or words in its place and, where it can stand, the image itself.
func (r *renderer) image(m *message, b *block, at place) (p part, lifted *part) {
	img, why := readImage(b.raw)
	if why == "" {
		why = img.refusedBy(r.target)
	}
	p = part{block: b.index, form: formImage}
	switch {
	case why == "" && at.images:
		p.json = img.render(r.target)
		return p, nil
	case why == "" && at.lift:
		r.note(m, b.index, b.typ, Changed, "moved behind the tool results: the API does not take it in this one")
		up := p
		up.json = img.render(r.target)
		return textPart("[An image stood here. It stands behind the tool results.]"), &up
	case why == "":
		why = "the API takes images from users and tools only"
	}
	r.note(m, b.index, b.typ, Unmapped, "a text says that it stood here: %s", why)
	return textPart("[An image" + img.describe() + " stood here. It cannot be shown.]"), nil
}

// reasoning renders what a model thought. Only an Anthropic model's own signature lets it back in.
func (r *renderer) reasoning(m *message, b *block) (part, bool) {
	p := part{block: b.index, form: b.form}
	switch {
	case r.target == OpenAI:
		r.note(m, b.index, b.typ, Unmapped, "Chat Completions takes no reasoning back")
		return p, false
	case m.claude && b.form == formRedacted && isText(b.text):
		p.json = append(append([]byte(`{"type":"redacted_thinking","data":`), b.text...), '}')
	case m.claude && b.form == formReasoning && isText(b.text) && isText(b.signature) && len(b.signature) > 2:
		r.noteSurrogates(m, b, b.text)
		p.json = append(append([]byte(`{"type":"thinking","thinking":`), b.text...), `,"signature":`...)
		p.json = append(append(p.json, b.signature...), '}')
	default:
		r.note(m, b.index, b.typ, Unmapped, "only what an Anthropic model signed can go back as thinking")
		return p, false
	}
	return p, true
}

// appendTextBlock appends a text in the form that both targets have.
func appendTextBlock(dst, tok []byte) []byte {
	return append(append(append(dst, `{"type":"text","text":`...), tok...), '}')
}

// appendParts appends parts as an array.
func appendParts(dst []byte, parts []part) []byte {
	dst = append(dst, '[')
	for i := range parts {
		if i > 0 {
			dst = append(dst, ',')
		}
		if p := &parts[i]; p.text != nil {
			dst = appendTextBlock(dst, p.text)
		} else {
			dst = append(dst, p.json...)
		}
	}
	return append(dst, ']')
}
