package events

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// emptyContent is the content of a message that derives nothing.
const emptyContent = "[]"

// messageOf returns the token of the message that a surface event carries: data itself for
// user/message, data.message for the others, nil when there is none.
func (e *Event) messageOf() []byte {
	if e.Kind == KindUser {
		return e.Data()
	}
	return get(e.Data(), "message")
}

// Message returns the derived message of an event, token for token, or nil when it derives
// none: everything off the surface, and system, developer and assistant messages with empty
// content. The event must have passed Parse or Check.
func (e *Event) Message() []byte {
	switch e.Kind {
	case KindUser, KindTool:
		return e.messageOf()
	case KindSystem, KindDeveloper, KindAssistant:
		m := e.messageOf()
		if string(get(m, "content")) == emptyContent {
			return nil
		}
		return m
	}
	return nil
}

// checkMessage checks the shape that DESIGN gives messages: rules message-malformed and
// tool-error-contradiction. Data must be valid, compact JSON.
func (e *Event) checkMessage(f Format, emptyCallID bool) *Error {
	fail := func(format string, args ...any) *Error {
		return Violation(RuleMessageMalformed, e.Seq, e.Type+": "+fmt.Sprintf(format, args...))
	}
	data := e.Data()
	if data[0] != '{' {
		return fail("data: expected an object, found %s", kindOf(data))
	}
	if k := duplicateKey(data); k != "" {
		return fail("data: key %q is given twice", k)
	}
	msg, at := data, "data"
	if e.Kind != KindUser {
		msg, at = get(data, "message"), "data.message"
	}
	if len(msg) == 0 || msg[0] != '{' {
		return fail("%s: expected an object, found %s", at, kindOf(msg))
	}
	if k := duplicateKey(msg); k != "" {
		return fail("%s: key %q is given twice", at, k)
	}
	var id, role, content, source []byte
	eachMember(msg, func(k, v []byte) bool {
		switch {
		case keyIs(k, "id"):
			id = v
		case keyIs(k, "role"):
			role = v
		case keyIs(k, "content"):
			content = v
		case keyIs(k, "source"):
			source = v
		}
		return true
	})
	if s, ok := text(id); !ok || s == "" {
		return fail("%s.id: expected a non-empty string, found %s", at, kindOf(id))
	}
	r, _ := text(role)
	if want := roles[e.Kind]; !slices.Contains(want, r) {
		return fail("%s.role: expected %s, found %s", at, strings.Join(want, " or "), orNothing(role))
	}
	if len(content) == 0 || content[0] != '[' {
		return fail("%s.content: expected an array, found %s", at, kindOf(content))
	}
	if len(source) == 0 || source[0] != '{' {
		return fail("%s.source: expected an object, found %s", at, kindOf(source))
	}
	if k := duplicateKey(source); k != "" {
		return fail("%s.source: key %q is given twice", at, k)
	}
	kind, ok := text(get(source, "kind"))
	if !ok || kind == "" {
		return fail("%s.source.kind: expected a non-empty string, found %s", at, kindOf(get(source, "kind")))
	}
	switch e.Kind {
	case KindAssistant:
		if kind != "model" {
			return fail(`%s.source.kind: expected "model", found %q`, at, kind)
		}
		for _, name := range []string{"provider", "model"} {
			if _, ok := text(get(source, name)); !ok {
				return fail("%s.source.%s: expected a string, found %s", at, name, kindOf(get(source, name)))
			}
		}
	case KindTool:
		if kind != "tool" {
			return fail(`%s.source.kind: expected "tool", found %q`, at, kind)
		}
		return e.checkToolResult(f, msg, content, source, emptyCallID)
	}
	return nil
}

var roles = [...][]string{
	KindSystem: {"system"}, KindUser: {"user"}, KindAssistant: {"assistant"},
	KindTool: {"user", "tool"}, KindDeveloper: {"developer"},
}

func orNothing(tok []byte) string {
	if tok == nil {
		return "nothing"
	}
	return clip(tok)
}

func (e *Event) checkToolResult(f Format, msg, content, source []byte, emptyCallID bool) *Error {
	fail := func(format string, args ...any) *Error {
		return Violation(RuleMessageMalformed, e.Seq, e.Type+": data.message"+fmt.Sprintf(format, args...))
	}
	callID, ok := text(get(source, "callId"))
	if !ok || callID == "" && !emptyCallID {
		return fail(".source.callId: expected a non-empty string, found %s", orNothing(get(source, "callId")))
	}
	at, holder := "", msg
	if !flatToolResult(f, msg) {
		n := 0
		eachElement(content, func(v []byte) bool { n++; holder = v; return n < 2 })
		typ, _ := text(get(holder, "type"))
		if n != 1 || typ != "tool-result" {
			return fail(".content: expected exactly one block of type tool-result, found %d of which the last has type %q", n, typ)
		}
		at = ".content[0]"
		if k := duplicateKey(holder); k != "" {
			return fail("%s: key %q is given twice", at, k)
		}
		if c := get(holder, "content"); len(c) == 0 || c[0] != '[' {
			return fail("%s.content: expected an array, found %s", at, kindOf(c))
		}
	}
	if id, ok := text(get(holder, "toolCallId")); !ok || id != callID {
		return fail("%s.toolCallId: expected %q as in source.callId, found %s", at, callID, orNothing(get(holder, "toolCallId")))
	}
	isError := string(get(holder, "isError"))
	if isError != "" && isError != "true" && isError != "false" {
		return fail("%s.isError: expected a boolean, found %s", at, clip(get(holder, "isError")))
	}
	if err := get(e.Data(), "error"); err != nil && string(err) != "null" && isError != "true" {
		return Violation(RuleToolErrorContradiction, e.Seq, fmt.Sprintf("data.error is set, so data.message%s.isError must be true, found %s", at, orNothing(get(holder, "isError"))))
	}
	return nil
}

// flatToolResult reports whether a tool result carries toolCallId and isError on the message
// itself (format 4, role tool) and not in a block of its content.
func flatToolResult(f Format, msg []byte) bool {
	role, _ := text(get(msg, "role"))
	return f >= Format4 && role == "tool"
}

// duplicateKey returns a key that the object b has twice, or "".
func duplicateKey(b []byte) string {
	var store [16]string
	keys := store[:0]
	dup := ""
	eachMember(b, func(k, _ []byte) bool {
		keys = append(keys, string(unescape(nil, k)))
		return true
	})
	if len(keys) > 16 {
		slices.Sort(keys)
		for i := 1; i < len(keys); i++ {
			if keys[i] == keys[i-1] {
				return keys[i]
			}
		}
		return ""
	}
	for i, k := range keys {
		if slices.Contains(keys[:i], k) {
			dup = k
			break
		}
	}
	return dup
}

// Fingerprint identifies everything of a tool/result's data that a rewrite must not change:
// the hex SHA-256 of data with keys in canonical order, strings and numbers by value, and
// without the content that a rewrite may change. It is `fp` in a page. The event must have
// passed Parse or Check.
func (e *Event) Fingerprint(f Format) string {
	data := e.Data()
	skip := rewritable(f, get(data, "message"))
	h := canonicalValue(nil, data, skip)
	sum := sha256.Sum256(h)
	return hex.EncodeToString(sum[:])
}

// rewritable returns the token that a rewrite of a tool result may change.
func rewritable(f Format, msg []byte) []byte {
	content := get(msg, "content")
	if flatToolResult(f, msg) {
		return content
	}
	var block []byte
	eachElement(content, func(v []byte) bool { block = v; return false })
	return get(block, "content")
}

// canonicalValue appends v in a form that is equal for structurally equal values: keys sorted,
// strings unescaped, numbers as ±digits e exponent. The token skip (the same memory, not an
// equal value) is left out.
func canonicalValue(dst, v, skip []byte) []byte {
	if len(v) == 0 || len(skip) > 0 && &v[0] == &skip[0] {
		return append(dst, '~')
	}
	switch {
	case v[0] == '{':
		type kv struct {
			key string
			val []byte
		}
		var ms []kv
		eachMember(v, func(k, val []byte) bool {
			ms = append(ms, kv{string(unescape(nil, k)), val})
			return true
		})
		slices.SortStableFunc(ms, func(a, b kv) int { return strings.Compare(a.key, b.key) })
		dst = append(dst, '{')
		for _, m := range ms {
			dst = appendLengthed(dst, m.key)
			dst = canonicalValue(dst, m.val, skip)
		}
		return append(dst, '}')
	case v[0] == '[':
		dst = append(dst, '[')
		eachElement(v, func(el []byte) bool {
			dst = canonicalValue(dst, el, skip)
			return true
		})
		return append(dst, ']')
	case v[0] == '"':
		s, _ := text(v)
		return appendLengthed(append(dst, '"'), s)
	case v[0] == '-' || isDigit(v[0]):
		neg, digits, exp, ok := decimal(v)
		if !ok {
			return append(append(append(dst, '#'), v...), ';')
		}
		if neg && len(digits) > 0 {
			dst = append(dst, '-')
		}
		dst = append(append(append(dst, '+'), digits...), 'e')
		return append(strconv.AppendInt(dst, int64(exp), 10), ';')
	}
	return append(dst, v[0]) // true, false, null
}

func appendLengthed(dst []byte, s string) []byte {
	dst = strconv.AppendInt(dst, int64(len(s)), 10)
	return append(append(dst, ':'), s...)
}

// Fields are the members of an event's data that the lifecycle rules and repair read.
// Numbers that are absent or no seq are NoSeq.
type Fields struct {
	Turn, Step Seq
	CallID     string // of a tool/call: callId; of a tool/result: message.source.callId
	ErrorCode  string // of a tool/result: error.code
	Agent      string // of an agent/status
	Status     string
	Writer     string // of a session/writer
	Epoch      Seq
	Inherited  bool // of a session/end-seed
}

// Fields reads data once. It tolerates data of any shape: what is not there stays empty.
func (e *Event) Fields() Fields {
	f := Fields{Turn: NoSeq, Step: NoSeq, Epoch: NoSeq}
	number := func(tok []byte) Seq {
		if n, ok := parseInteger(tok); ok {
			return Seq(n)
		}
		return NoSeq
	}
	eachMember(e.Data(), func(k, v []byte) bool {
		switch {
		case keyIs(k, "turn"):
			f.Turn = number(v)
		case keyIs(k, "step"):
			f.Step = number(v)
		case keyIs(k, "callId") && e.Kind != KindTool:
			f.CallID, _ = text(v)
		case keyIs(k, "message") && e.Kind == KindTool:
			f.CallID, _ = text(get(get(v, "source"), "callId"))
		case keyIs(k, "error"):
			f.ErrorCode, _ = text(get(v, "code"))
		case keyIs(k, "agent"):
			f.Agent, _ = text(v)
		case keyIs(k, "status"):
			f.Status, _ = text(v)
		case keyIs(k, "writer"):
			f.Writer, _ = text(v)
		case keyIs(k, "epoch"):
			f.Epoch = number(v)
		case keyIs(k, "inherited"):
			f.Inherited = string(v) == "true"
		}
		return true
	})
	return f
}

// ToolCalls returns the ids of the tool-call blocks of an assistant/message, in order.
func (e *Event) ToolCalls() []string {
	var ids []string
	eachElement(get(e.messageOf(), "content"), func(v []byte) bool {
		if t, _ := text(get(v, "type")); t == "tool-call" {
			if id, ok := text(get(v, "id")); ok && id != "" {
				ids = append(ids, id)
			}
		}
		return true
	})
	return ids
}
