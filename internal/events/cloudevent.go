package events

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
)

// typePrefix is in front of an event's type in its CloudEvent: palimpsest.session.v3.user/message.
func typePrefix(f Format) string { return fmt.Sprintf("palimpsest.session.v%d.", f) }

// appendOp is the surfaceOp of an appended event, as a token.
const appendOp = `"append"`

// maxRFC3339 is the last millisecond that RFC 3339 can write (year 9999).
const maxRFC3339 = 253402300799999

// AppendCloudEvent appends the event as a CloudEvent in structured JSON. data stays token for token.
func (e *Event) AppendCloudEvent(dst []byte, session string, f Format) []byte {
	token := Token(session)
	dst = fmt.Appendf(dst, `{"specversion":"1.0","id":"%s/%d","source":"/sessions/%s","type":"%s%s","subject":%s`,
		token, e.Seq, token, typePrefix(f), e.Type, Quote(session))
	if e.Time <= maxRFC3339 {
		dst = fmt.Appendf(dst, `,"time":"%s"`, FormatTime(time.UnixMilli(e.Time)))
	}
	dst = fmt.Appendf(dst, `,"datacontenttype":"application/json","sequence":"%020d"`, e.Seq)
	// Metadata as it stands in the line, so that an opaque event's comes through, too.
	if op := get(e.Line, "surfaceOp"); string(op) == appendOp {
		dst = append(append(dst, `,"surfaceop":`...), op...)
	} else if op != nil {
		dst = append(append(dst, `,"surfaceop":`...), Quote(string(op))...)
	}
	if sources := get(e.Line, "sourceEventSeqs"); sources != nil {
		dst = append(append(dst, `,"sourceeventseqs":`...), Quote(string(sources))...)
	}
	if e.Ignorable {
		dst = append(dst, `,"ignorable":true`...)
	}
	dst = append(dst, `,"data":`...)
	dst = append(dst, e.Data()...)
	return append(dst, '}')
}

// FromCloudEvent turns a CloudEvent in structured JSON into the event that it carries, as
// raw text for Parse. data stays token for token; everything else about the CloudEvent is
// checked by the CloudEvents SDK.
func FromCloudEvent(raw []byte, f Format) ([]byte, error) {
	bad := func(format string, args ...any) error {
		return &Error{Code: CodeBadRequest, Detail: "CloudEvent: " + fmt.Sprintf(format, args...)}
	}
	b, err := compactDeep(raw)
	if err != nil {
		return nil, Violation(RuleJSONMalformed, NoSeq, "CloudEvent: "+err.Error())
	}
	if b[0] != '{' {
		return nil, bad("expected an object, found %s", kindOf(b))
	}
	if k := duplicateKey(b); k != "" {
		return nil, bad("attribute %q is given twice", k)
	}
	if _, ok := text(get(b, "specversion")); !ok {
		return nil, bad("specversion is missing")
	}
	ce := event.New()
	var seq, op, sources, ignorable, data []byte
	var problem error
	eachMember(b, func(k, v []byte) bool {
		name := string(unescape(nil, k))
		if name == "data" {
			data = v
			return true
		}
		if string(v) == "null" {
			return true // the JSON format's way to leave an attribute out
		}
		s, ok := text(v)
		switch name {
		case "specversion":
			ce.SetSpecVersion(s)
		case "id":
			ce.SetID(s)
		case "source":
			ce.SetSource(s)
		case "type":
			ce.SetType(s)
		case "subject":
			ce.SetSubject(s)
		case "dataschema":
			ce.SetDataSchema(s)
		case "datacontenttype":
			if s != "application/json" && !strings.HasPrefix(s, "application/json;") {
				problem = bad("datacontenttype: expected application/json, found %s", clip(v))
			}
		case "time":
			t, err := time.Parse(time.RFC3339, s)
			if err != nil || t.UnixMilli() < 0 {
				problem = bad("time: expected RFC 3339 from 1970 on, found %s", clip(v))
				return false
			}
			ce.SetTime(t)
		case "sequence":
			n := strings.TrimLeft(s, "0")
			if n == "" && s != "" {
				n = "0"
			}
			if _, num := parseInteger([]byte(n)); !ok || !num {
				problem = bad("sequence: expected a seq in decimal as a string, found %s", clip(v))
				return false
			}
			seq = []byte(n)
		case "surfaceop":
			op = v
			if inner, err := Compact(nil, []byte(s)); err == nil {
				op = inner
			} else if strings.HasPrefix(s, "{") {
				problem = bad("surfaceop: %v", err)
			}
		case "sourceeventseqs":
			if sources = v; ok {
				if sources, err = Compact(nil, []byte(s)); err != nil {
					problem = bad("sourceeventseqs: %v", err)
				}
			}
		case "ignorable":
			ignorable = v
		case "data_base64":
			problem = bad("data_base64: expected data as JSON")
		default:
			if ok {
				ce.SetExtension(name, s)
			}
		}
		return problem == nil
	})
	if problem != nil {
		return nil, problem
	}
	if err := ce.Validate(); err != nil {
		return nil, bad("%s", strings.TrimSpace(err.Error()))
	}
	typ, ok := strings.CutPrefix(ce.Type(), typePrefix(f))
	if !ok {
		return nil, bad("type: expected %s followed by an event type, found %q", typePrefix(f), ce.Type())
	}
	out := append([]byte(`{"type":`), Quote(typ)...)
	member := func(name string, v []byte) {
		if v != nil {
			out = append(append(append(append(out, `,"`...), name...), `":`...), v...)
		}
	}
	member("seq", seq)
	if !ce.Time().IsZero() {
		member("time", strconv.AppendInt(nil, ce.Time().UnixMilli(), 10))
	}
	member("surfaceOp", op)
	member("sourceEventSeqs", sources)
	member("ignorable", ignorable)
	member("data", data)
	return append(out, '}'), nil
}

// compactDeep is Compact for a text that wraps an event's data in levels of its own.
func compactDeep(b []byte) ([]byte, error) {
	spaces, err := scanText(b, MaxDepth+8, nil)
	if err != nil {
		return nil, err
	}
	return appendCompact(nil, b, spaces), nil
}

// SplitArray returns the elements of a JSON array as they stand in it, without white space.
func SplitArray(raw []byte) ([][]byte, error) {
	b, err := compactDeep(raw)
	if err != nil {
		return nil, Violation(RuleJSONMalformed, NoSeq, err.Error())
	}
	var out [][]byte
	if !eachElement(b, func(v []byte) bool { out = append(out, v); return true }) {
		return nil, &Error{Code: CodeBadRequest, Detail: "expected an array, found " + kindOf(b)}
	}
	return out, nil
}

// SplitObject returns the members of a JSON object by key, as they stand in it, without white
// space. A key given twice is an error.
func SplitObject(raw []byte) (map[string][]byte, error) {
	b, err := compactDeep(raw)
	if err != nil {
		return nil, Violation(RuleJSONMalformed, NoSeq, err.Error())
	}
	if b[0] != '{' {
		return nil, &Error{Code: CodeBadRequest, Detail: "expected an object, found " + kindOf(b)}
	}
	out := map[string][]byte{}
	eachMember(b, func(k, v []byte) bool { out[string(unescape(nil, k))] = v; return true })
	if k := duplicateKey(b); k != "" {
		return out, &Error{Code: CodeBadRequest, Detail: fmt.Sprintf("key %q is given twice", k)}
	}
	return out, nil
}

// Marshal is json.Marshal without changing the tokens of raw parts: encoding/json would escape
// <, > and & in them.
func Marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}

// ParseSeq reads a seq in decimal, as in a query parameter.
func ParseSeq(s string) (Seq, bool) {
	n, ok := parseInteger([]byte(s))
	return Seq(n), ok
}
