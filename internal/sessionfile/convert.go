package sessionfile

import (
	"encoding/json"
	"fmt"
	"strconv"
	"unicode/utf8"

	"palimpsest/internal/events"
)

// Converted counts what became of a file of format 0, 1 or 2 on its way to format 3.
type Converted struct {
	From int `json:"from"` // the format of the file
	To   int `json:"to"`
	// ExpandedRows are the packed rows of chunks, ExpandedEvents the assistant/chunk events for
	// which they stand.
	ExpandedRows   int64 `json:"expandedRows"`
	ExpandedEvents int64 `json:"expandedEvents"`
	// RenamedOps are the replacements whose start and end are startSeq and endSeq now.
	RenamedOps int64 `json:"renamedOps"`
	// DroppedSources are the assistant messages that lost their sourceEventSeqs.
	DroppedSources int64 `json:"droppedSources"`
	// ReshapedMessages are the messages that had no id, role and source of their own and have
	// them now, put together from what the event says, with an id made of its seq.
	ReshapedMessages int64 `json:"reshapedMessages"`
}

// converter spells the lines of a file of format 0, 1 or 2 as format 3 does, event by event.
type converter struct {
	Converted
	inherited events.Seq // how many events the header says were inherited; NoSeq when none
	row       packedRow  // what is left of the row that was read last
	out       []byte     // what next and event return
	did       Converted  // to that, to be counted once it is taken

	// origins are the tool results without an id that replace another: whose id each has.
	origins map[events.Seq]events.Seq
}

// header spells a header's line (a valid object) as format 3 does: the version is 3, and that
// events were inherited, which was said by their number, is said by isSeeded.
func (c *converter) header(text []byte, version int) ([]byte, error) {
	c.From, c.To = version, int(events.Format3)
	c.inherited = events.NoSeq
	out := []byte{'{'}
	seeded := false
	for key, val := range members(text[skipSpace(text, 0):]) {
		switch {
		case says(key, "version"):
			val = strconv.AppendInt(nil, int64(c.To), 10)
		case says(key, "isSeeded"):
			seeded = true
		case says(key, "seedLength"):
			n, ok := integer(val)
			if !ok {
				return nil, malformed("seedLength: expected an integer from 0 to 2^53-1, found %s", clip(val))
			}
			c.inherited = events.Seq(n)
		}
		out = appendMember(out, key, val)
	}
	if c.inherited != events.NoSeq && !seeded {
		out = append(out, `"isSeeded":true,`...)
	}
	out[len(out)-1] = '}'
	return out, nil
}

// event returns a line as format 3 spells it: of a packed row the first of its events, the
// others being next's. at is the seq that it gets, now the time when it has none. What is no
// event at all comes back as it is, to be refused as in any other file.
func (c *converter) event(text []byte, at events.Seq, now int64) ([]byte, error) {
	c.did = Converted{}
	if !json.Valid(text) || !utf8.Valid(text) {
		return text, nil
	}
	if text = text[skipSpace(text, 0):]; !isObject(text) {
		return text, nil
	}
	var typ, op, sources, data []byte
	for key, val := range members(text) {
		var slot *[]byte
		switch {
		case says(key, "type"):
			slot = &typ
		case says(key, "surfaceOp"):
			slot = &op
		case says(key, "sourceEventSeqs"):
			slot = &sources
		case says(key, "data"):
			slot = &data
		default:
			continue
		}
		if *slot != nil {
			return text, nil // given twice
		}
		*slot = val
	}
	if typ == nil || !isString(typ) {
		return text, nil
	}
	for _, shape := range packedShapes {
		if !says(typ, shape.name) {
			continue
		}
		if err := c.row.read(shape, text, at, now); err != nil {
			return nil, err
		}
		text = c.next()
		c.did.ExpandedRows++
		return text, nil
	}
	kind := surfaceKind(typ)
	if !kind.OnSurface() {
		return text, nil
	}
	newOp, start := rename(op)
	newData := c.reshape(kind, data, at, start)
	drop := kind == events.KindAssistant && sources != nil && isArray(sources)
	if newOp == nil && newData == nil && !drop {
		return text, nil
	}
	c.out = append(c.out[:0], '{')
	for key, val := range members(text) {
		switch {
		case drop && says(key, "sourceEventSeqs"):
			c.did.DroppedSources++
			continue
		case newOp != nil && says(key, "surfaceOp"):
			c.did.RenamedOps++
			val = newOp
		case newData != nil && says(key, "data"):
			c.did.ReshapedMessages++
			val = newData
		}
		c.out = appendMember(c.out, key, val)
	}
	c.out[len(c.out)-1] = '}'
	return c.out, nil
}

// next returns the next event of the row.
func (c *converter) next() []byte {
	c.did = Converted{ExpandedEvents: 1}
	c.out = c.row.next(c.out[:0])
	return c.out
}

// taken counts what was done to the event that was returned last.
func (c *converter) taken() {
	c.ExpandedRows += c.did.ExpandedRows
	c.ExpandedEvents += c.did.ExpandedEvents
	c.RenamedOps += c.did.RenamedOps
	c.DroppedSources += c.did.DroppedSources
	c.ReshapedMessages += c.did.ReshapedMessages
}

func surfaceKind(typ []byte) events.Kind {
	for k := events.KindSystem; k <= events.KindTool; k++ {
		if says(typ, k.Type()) {
			return k
		}
	}
	return events.KindLog
}

// rename returns a replacement with the keys of format 3, nil when it has not exactly those of
// the older ones, and the seq at which it starts, NoSeq when it replaces nothing.
func rename(op []byte) (renamed []byte, from events.Seq) {
	if op == nil || !isObject(op) {
		return nil, events.NoSeq
	}
	from = events.NoSeq
	for key, val := range members(op) {
		if n, ok := integer(val); ok && (says(key, "start") || says(key, "startSeq")) {
			from = events.Seq(n)
		}
	}
	var what, start, end []byte
	if readFields(op, field{"op", &what, false}, field{"start", &start, false}, field{"end", &end, false}) != "" {
		return nil, from
	}
	return fmt.Appendf(nil, `{"op":%s,"startSeq":%s,"endSeq":%s}`, what, start, end), from
}

// reshape returns the data of a surface event with a message as format 3 has it, nil when it
// is none of the oldest shape. That had neither id nor role, and the members of an assistant's
// or a tool's message stood in data itself. What there is to say is said by the same tokens.
func (c *converter) reshape(kind events.Kind, data []byte, at, replaces events.Seq) []byte {
	if data == nil || !isObject(data) {
		return nil
	}
	var content, source, provenance, callID, isError []byte
	for key, val := range members(data) {
		var slot *[]byte
		switch {
		case says(key, "id"), says(key, "role"), says(key, "message"):
			return nil
		case says(key, "content"):
			slot = &content
		case says(key, "source"):
			slot = &source
		case says(key, "provenance"):
			slot = &provenance
		case says(key, "callId"):
			slot = &callID
		case says(key, "isError"):
			slot = &isError
		default:
			continue
		}
		if *slot != nil {
			return nil // given twice
		}
		*slot = val
	}
	if content == nil {
		return nil
	}
	var message []byte // or, of a user, what is missing from it
	moved := []string{"content"}
	switch {
	case kind == events.KindUser && source != nil:
		message, moved = fmt.Appendf(nil, `"role":"user","id":"%s",`, messageID(at)), nil
	case kind == events.KindAssistant && provenance != nil && isObject(provenance):
		source = []byte(`{"kind":"model",`)
		for key, val := range members(provenance) {
			source = appendMember(source, key, val)
		}
		source[len(source)-1] = '}'
		message = fmt.Appendf(nil, `"message":{"role":"assistant","content":%s,"source":%s,"id":"%s"},`, content, source, messageID(at))
		moved = append(moved, "provenance")
	case kind == events.KindTool && callID != nil:
		block := fmt.Appendf(nil, `{"type":"tool-result","toolCallId":%s,"content":%s`, callID, content)
		if isError != nil {
			block = fmt.Appendf(block, `,"isError":%s`, isError)
		}
		message = fmt.Appendf(nil, `"message":{"source":{"kind":"tool","callId":%s},"content":[%s}],"role":"user","id":"%s"},`, callID, block, messageID(c.origin(at, replaces)))
		moved = append(moved, "callId", "isError")
	default:
		return nil
	}
	out := []byte{'{'}
	for key, val := range members(data) {
		switch {
		case !saysOne(key, moved):
			out = appendMember(out, key, val)
		case says(key, "content"):
			out = append(out, message...)
		}
	}
	if moved == nil {
		out = append(out, message...)
	}
	out[len(out)-1] = '}'
	return out
}

// origin is the seq whose id a tool result has: its own, or that of the one that it rewrites,
// since a rewrite may change nothing but the content.
func (c *converter) origin(at, replaces events.Seq) events.Seq {
	if replaces == events.NoSeq {
		return at
	}
	origin, ok := c.origins[replaces]
	if !ok {
		origin = replaces
	}
	if c.origins == nil {
		c.origins = map[events.Seq]events.Seq{}
	}
	c.origins[at] = origin
	return origin
}

// messageID is the id of a message that was recorded without one. It is the same whenever the
// file is imported, and in a fork that inherited the event.
func messageID(seq events.Seq) string { return "imported-message-" + seq.String() }

func appendMember(b, key, val []byte) []byte {
	b = append(append(b, key...), ':')
	return append(append(b, val...), ',')
}

func saysOne(tok []byte, of []string) bool {
	for _, s := range of {
		if says(tok, s) {
			return true
		}
	}
	return false
}
