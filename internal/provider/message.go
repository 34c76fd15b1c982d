package provider

import (
	"bytes"
	"strings"
	"unicode/utf8"

	"palimpsest/internal/events"
)

// message is a derived message taken apart. Its tokens are those of the log.
type message struct {
	seq     events.Seq
	index   int
	kind    events.Kind
	claude  bool // an assistant message that an Anthropic model wrote
	isError bool // of a tool result
	blocks  []block
	strange string   // what is wrong with the content, "" for nothing
	extra   []string // members of a tool-result block that no target has
}

type form uint8

const (
	formOther form = iota
	formText
	formReasoning
	formRedacted // reasoning that only its provider can read
	formCall
	formImage
	formTools // says that tools came or went
)

// block is one element of a message's content.
type block struct {
	index int
	form  form
	typ   string // as the log has it
	raw   []byte

	text      []byte // of formText and formReasoning: the string; of formRedacted: its data
	signature []byte
	id        []byte
	name      []byte
	arguments []byte
	extra     []string // members that no target has
}

// read takes message i apart.
func (r *renderer) read(i int) *message {
	in := &r.in[i]
	m := &message{seq: in.Seq, index: i, kind: in.Kind}
	holder := in.JSON
	content := events.Get(holder, "content")
	switch in.Kind {
	case events.KindAssistant:
		source := events.Get(in.JSON, "source")
		m.claude = names(source, "provider", "anthropic") || names(source, "model", "claude")
	case events.KindTool:
		if !flat(r.format, in.JSON) {
			if b := m.resultBlock(content); b != nil {
				holder, content = b, events.Get(b, "content")
			}
		}
		m.isError = string(events.Get(holder, "isError")) == "true"
	}
	if len(content) > 0 && content[0] == '"' {
		m.blocks = []block{{form: formText, typ: "text", text: content}}
		return m
	}
	if !events.EachElement(content, func(b []byte) bool {
		m.blocks = append(m.blocks, readBlock(in.Kind, len(m.blocks), b))
		return true
	}) && m.strange == "" {
		m.strange = "expected an array as content"
	}
	return m
}

// resultBlock returns the block that holds a tool result, the only one of the message's
// content, or nil.
func (m *message) resultBlock(content []byte) (first []byte) {
	n := 0
	events.EachElement(content, func(b []byte) bool {
		if n++; n == 1 {
			first = b
		}
		return n < 2
	})
	if !events.TextIs(events.Get(first, "type"), "tool-result") {
		return nil
	}
	if n > 1 {
		m.strange = "what stands beside the tool-result block"
	}
	m.extra = unknown(first, "type", "toolCallId", "isError", "content")
	return first
}

// names reports whether a member of an assistant's source holds a word, in any case.
func names(source []byte, member, word string) bool {
	s, _ := events.Text(events.Get(source, member))
	return strings.Contains(strings.ToLower(s), word)
}

func readBlock(k events.Kind, index int, raw []byte) block {
	b := block{index: index, raw: raw}
	typ, _ := events.Text(events.Get(raw, "type"))
	b.typ = clip(typ)
	if typ == "" {
		b.typ = "block"
	}
	switch typ {
	case "text":
		if b.text = events.Get(raw, "text"); isText(b.text) {
			b.form = formText
			b.extra = unknown(raw, "type", "text")
		}
	case "reasoning", "thinking":
		b.form = formReasoning
		if b.text = events.Get(raw, "text"); b.text == nil {
			b.text = events.Get(raw, "thinking")
		}
		b.signature = events.Get(raw, "signature")
		b.extra = unknown(raw, "type", "text", "thinking", "signature")
	case "redacted-thinking", "redacted_thinking":
		b.form = formRedacted
		b.text = events.Get(raw, "data")
		b.extra = unknown(raw, "type", "data")
	case "tool-call":
		if k == events.KindAssistant {
			b.form = formCall
			b.id, b.name, b.arguments = events.Get(raw, "id"), events.Get(raw, "name"), events.Get(raw, "arguments")
			b.extra = unknown(raw, "type", "id", "name", "arguments")
		}
	case "image", "image_url":
		b.form = formImage
	case "tool-addition", "tool-removal":
		b.form = formTools
	}
	return b
}

// unknown returns the keys of an object that are none of the known ones, or that are one of
// them for the second time.
func unknown(object []byte, known ...string) (extra []string) {
	var seen uint
	events.EachMember(object, func(k, _ []byte) bool {
		for i, name := range known {
			if seen&(1<<i) == 0 && events.KeyIs(k, name) {
				seen |= 1 << i
				return true
			}
		}
		extra = append(extra, clip(string(k)))
		return true
	})
	return extra
}

func isText(tok []byte) bool { return len(tok) >= 2 && tok[0] == '"' }

// none reports whether a member is not there, or null.
func none(tok []byte) bool { return len(tok) == 0 || bytes.Equal(tok, []byte("null")) }

// clip shortens what a report or a placeholder quotes.
func clip(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	cut := most
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "…"
}
