package events

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// emptyContent is the content of a message that derives nothing.
const emptyContent = "[]"

// messageOf returns the token of the message that a surface event carries: data itself for
// user/message, data.message for the others, nil when there is none.
func (e *Event) messageOf() []byte {
	if f := &e.found; f.msgEnd > 0 {
		return e.Data()[f.msg:f.msgEnd]
	}
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
		if e.found.msgEnd > 0 && !e.found.empty || e.found.msgEnd == 0 && string(get(m, "content")) != emptyContent {
			return m
		}
		return nil
	}
	return nil
}

// checkMessage checks the shape that DESIGN gives messages: rules message-malformed and
// tool-error-contradiction. Data must be valid, compact JSON, and ofData its members. It notes
// where the message's parts are.
func (e *Event) checkMessage(f Format, emptyCallID bool, ofData []member) *Error {
	fail := func(format string, args ...any) *Error {
		return Violation(RuleMessageMalformed, e.Seq, e.Type+": "+fmt.Sprintf(format, args...))
	}
	data := e.Data()
	if data[0] != '{' {
		return fail("data: expected an object, found %s", kindOf(data))
	}
	var msgStore [12]member
	if k := givenTwice(ofData); k != "" {
		return fail("data: key %q is given twice", k)
	}
	msg, ofMsg, at := data, ofData, "data"
	if e.Kind != KindUser {
		msg, at = named(ofData, "message"), "data.message"
		if len(msg) == 0 || msg[0] != '{' {
			return fail("%s: expected an object, found %s", at, kindOf(msg))
		}
		ofMsg = appendMembers(msgStore[:0], msg)
		if k := givenTwice(ofMsg); k != "" {
			return fail("%s: key %q is given twice", at, k)
		}
	}
	id, role, content, source := named(ofMsg, "id"), named(ofMsg, "role"), named(ofMsg, "content"), named(ofMsg, "source")
	if !isText(id) || isEmptyText(id) {
		return fail("%s.id: expected a non-empty string, found %s", at, kindOf(id))
	}
	if want := roles[e.Kind]; !slices.ContainsFunc(want, func(r string) bool { return textIs(role, r) }) {
		return fail("%s.role: expected %s, found %s", at, strings.Join(want, " or "), orNothing(role))
	}
	if len(content) == 0 || content[0] != '[' {
		return fail("%s.content: expected an array, found %s", at, kindOf(content))
	}
	if len(source) == 0 || source[0] != '{' {
		return fail("%s.source: expected an object, found %s", at, kindOf(source))
	}
	var sourceStore [6]member
	ofSource := appendMembers(sourceStore[:0], source)
	if k := givenTwice(ofSource); k != "" {
		return fail("%s.source: key %q is given twice", at, k)
	}
	kind := named(ofSource, "kind")
	if !isText(kind) || isEmptyText(kind) {
		return fail("%s.source.kind: expected a non-empty string, found %s", at, kindOf(kind))
	}
	switch e.Kind {
	case KindAssistant:
		if !textIs(kind, "model") {
			return fail(`%s.source.kind: expected "model", found %s`, at, clip(kind))
		}
		for _, name := range []string{"provider", "model"} {
			if tok := named(ofSource, name); !isText(tok) {
				return fail("%s.source.%s: expected a string, found %s", at, name, kindOf(tok))
			}
		}
	case KindTool:
		if !textIs(kind, "tool") {
			return fail(`%s.source.kind: expected "tool", found %s`, at, clip(kind))
		}
		free, err := e.checkToolResult(f, role, ofMsg, named(ofSource, "callId"), named(ofData, "error"), emptyCallID)
		if err != nil {
			return err
		}
		e.found.free = int32(cap(data) - cap(free)) // a part of data
	}
	e.found.msg = int32(cap(data) - cap(msg)) // likewise
	e.found.msgEnd, e.found.empty = e.found.msg+int32(len(msg)), string(content) == emptyContent
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

// checkToolResult returns the content that a rewrite may change.
func (e *Event) checkToolResult(f Format, role []byte, ofMsg []member, callTok, errTok []byte, emptyCallID bool) ([]byte, *Error) {
	fail := func(format string, args ...any) ([]byte, *Error) {
		return nil, Violation(RuleMessageMalformed, e.Seq, e.Type+": data.message"+fmt.Sprintf(format, args...))
	}
	callID, ok := text(callTok)
	if !ok || callID == "" && !emptyCallID {
		return fail(".source.callId: expected a non-empty string, found %s", orNothing(callTok))
	}
	at, ofHolder := "", ofMsg
	free := named(ofMsg, "content")
	if f < Format4 || !textIs(role, "tool") { // see flatToolResult
		n, block := 0, []byte(nil)
		eachElement(free, func(v []byte) bool { n++; block = v; return n < 2 })
		var store [12]member
		ofHolder = appendMembers(store[:0], block)
		if typ := named(ofHolder, "type"); n != 1 || !textIs(typ, "tool-result") {
			return fail(".content: expected exactly one block of type tool-result, found %d of which the last has type %s", n, orNothing(typ))
		}
		at = ".content[0]"
		if k := givenTwice(ofHolder); k != "" {
			return fail("%s: key %q is given twice", at, k)
		}
		if free = named(ofHolder, "content"); len(free) == 0 || free[0] != '[' {
			return fail("%s.content: expected an array, found %s", at, kindOf(free))
		}
	}
	if tok := named(ofHolder, "toolCallId"); !textIs(tok, callID) {
		return fail("%s.toolCallId: expected %q as in source.callId, found %s", at, callID, orNothing(tok))
	}
	isError := named(ofHolder, "isError")
	if s := string(isError); s != "" && s != "true" && s != "false" {
		return fail("%s.isError: expected a boolean, found %s", at, clip(isError))
	}
	if errTok != nil && string(errTok) != "null" && string(isError) != "true" {
		return nil, Violation(RuleToolErrorContradiction, e.Seq, fmt.Sprintf("data.error is set, so data.message%s.isError must be true, found %s", at, orNothing(isError)))
	}
	return free, nil
}

// flatToolResult reports whether a tool result carries toolCallId and isError on the message
// itself (format 4, role tool) and not in a block of its content.
func flatToolResult(f Format, msg []byte) bool {
	return f >= Format4 && textIs(get(msg, "role"), "tool")
}

// Fingerprint identifies everything of a tool/result's data that a rewrite must not change:
// the hex SHA-256 of data with keys in canonical order, strings and numbers by value, and
// without the content that a rewrite may change. It is `fp` in a page. The event must have
// passed Parse or Check.
func (e *Event) Fingerprint(f Format) string {
	w := fingerprinters.Get().(*fingerprinter)
	defer w.release()
	w.b, w.i, w.skip = e.Data(), 0, -1
	if e.found.free > 0 {
		w.skip = int(e.found.free)
	} else if skip := rewritable(f, e.messageOf()); skip != nil {
		w.skip = cap(w.b) - cap(skip) // skip is a part of data
	}
	w.value()
	sum := sha256.Sum256(w.out)
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

// RewritableContent returns the content of a tool/result that a rewrite may change.
func (e *Event) RewritableContent(f Format) []byte { return rewritable(f, get(e.Data(), "message")) }

// Rewrite returns the data of a tool/result with the content that a rewrite may change
// replaced, and all else token for token as it was.
func (e *Event) Rewrite(f Format, content []byte) []byte {
	data, old := e.Data(), e.RewritableContent(f)
	if old == nil {
		return data
	}
	at := cap(data) - cap(old) // old is a part of data
	out := append([]byte(nil), data[:at]...)
	out = append(out, content...)
	return append(out, data[at+len(old):]...)
}

// fingerprinter writes a valid, compact text in a form that is equal for structurally equal
// values: keys sorted, strings unescaped, numbers as ±digits e exponent, all in one pass.
type fingerprinter struct {
	b       []byte
	i       int
	skip    int // offset of the value that is left out
	out     []byte
	members []memberSpan // of the objects that are open
	scratch []byte
}

// fingerprinters are used again for what they have grown to.
var fingerprinters = sync.Pool{New: func() any { return &fingerprinter{out: make([]byte, 0, 1024)} }}

// release gives the fingerprinter back, unless it has grown large.
func (w *fingerprinter) release() {
	const large = 64 << 10
	w.b, w.out, w.members = nil, w.out[:0], w.members[:0]
	if cap(w.out) <= large && cap(w.scratch) <= large && cap(w.members) <= large/32 {
		fingerprinters.Put(w)
	}
}

// memberSpan is where a member stands in out: its key from key to val, all of it from start to end.
type memberSpan struct{ start, key, val, end int }

func (w *fingerprinter) value() {
	if w.i == w.skip {
		w.out = append(w.out, '~')
		w.i = skipValue(w.b, w.i)
		return
	}
	switch c := w.b[w.i]; {
	case c == '{':
		w.object()
	case c == '[':
		w.out = append(w.out, '[')
		for w.i++; w.b[w.i] != ']'; {
			w.value()
			if w.b[w.i] == ',' {
				w.i++
			}
		}
		w.i++
		w.out = append(w.out, ']')
	case c == '"':
		w.out = append(w.out, '"')
		w.str()
	case c == '-' || isDigit(c):
		end := skipValue(w.b, w.i)
		w.number(w.b[w.i:end])
		w.i = end
	default:
		w.out = append(w.out, c) // true, false, null
		w.i = skipValue(w.b, w.i)
	}
}

func (w *fingerprinter) object() {
	w.out = append(w.out, '{')
	first, sorted := len(w.members), true
	for w.i++; w.b[w.i] != '}'; {
		m := memberSpan{start: len(w.out)}
		m.key = w.str()
		m.val = len(w.out)
		w.i++ // the colon
		w.value()
		m.end = len(w.out)
		if len(w.members) > first {
			sorted = sorted && bytes.Compare(w.key(w.members[len(w.members)-1]), w.key(m)) <= 0
		}
		w.members = append(w.members, m)
		if w.b[w.i] == ',' {
			w.i++
		}
	}
	w.i++
	if ms := w.members[first:]; !sorted {
		slices.SortStableFunc(ms, func(a, b memberSpan) int { return bytes.Compare(w.key(a), w.key(b)) })
		w.scratch = w.scratch[:0]
		start := len(w.out)
		for _, m := range ms {
			w.scratch = append(w.scratch, w.out[m.start:m.end]...)
			start = min(start, m.start)
		}
		copy(w.out[start:], w.scratch)
	}
	w.members = w.members[:first]
	w.out = append(w.out, '}')
}

func (w *fingerprinter) key(m memberSpan) []byte { return w.out[m.key:m.val] }

// str writes a string behind its length and returns where it starts.
func (w *fingerprinter) str() int {
	end := skipString(w.b, w.i)
	s := w.b[w.i+1 : end-1]
	w.i = end
	if bytes.IndexByte(s, '\\') >= 0 {
		s = unescape(nil, s)
	}
	w.out = append(strconv.AppendInt(w.out, int64(len(s)), 10), ':')
	w.out = append(w.out, s...)
	return len(w.out) - len(s)
}

func (w *fingerprinter) number(tok []byte) {
	neg, digits, exp, ok := decimal(tok)
	if !ok {
		w.out = append(append(append(w.out, '#'), tok...), ';')
		return
	}
	if neg && len(digits) > 0 {
		w.out = append(w.out, '-')
	}
	w.out = append(append(append(w.out, '+'), digits...), 'e')
	w.out = append(strconv.AppendInt(w.out, int64(exp), 10), ';')
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
func (e *Event) ToolCalls() []string { return toolCalls(e.messageOf()) }

// ToolIDs returns the tool calls that a derived message makes, and the call that it answers.
func ToolIDs(k Kind, msg []byte) (calls []string, result string) {
	switch k {
	case KindAssistant:
		return toolCalls(msg), ""
	case KindTool:
		result, _ = text(get(get(msg, "source"), "callId"))
	}
	return nil, result
}

func toolCalls(msg []byte) []string {
	var ids []string
	eachElement(get(msg, "content"), func(v []byte) bool {
		if textIs(get(v, "type"), "tool-call") {
			if id, ok := text(get(v, "id")); ok && id != "" {
				ids = append(ids, id)
			}
		}
		return true
	})
	return ids
}
