package session_test

import (
	"encoding/json"
	"fmt"
	"math/big"
	"reflect"
	"slices"
	"strings"

	"palimpsest/internal/events"
)

// candidate is an event to offer, in a form that the oracle can judge without the code under test.
type candidate struct {
	typ        string
	seq        events.Seq // given, or NoSeq
	op         bool
	replace    bool
	start, end events.Seq
	cites      []events.Seq // nil when there is no sourceEventSeqs
	turn       int
	callID     string
	text       string
	fixed      string // JSON of a member of a tool result that a rewrite must keep
	shuffled   bool   // its members in another order
	empty      bool   // empty content
	broken     bool   // no id
	data       string // of log-only types
}

func (c candidate) onSurface() bool {
	return slices.Contains([]string{events.TypeSystem, events.TypeUser, events.TypeAssistant, events.TypeTool}, c.typ)
}

// body is the candidate's data.
func (c candidate) body() string {
	id, content := "m", fmt.Sprintf(`[{"type":"text","text":%q}]`, c.text)
	if c.broken {
		id = ""
	}
	if c.empty {
		content = `[]`
	}
	message := func(role, source string) string {
		return fmt.Sprintf(`{"id":%q,"role":%q,"source":%s,"content":%s}`, id, role, source, content)
	}
	step := fmt.Sprintf(`"turn":%d,"step":1`, c.turn)
	switch c.typ {
	case events.TypeUser:
		return message("user", `{"kind":"user"}`)
	case events.TypeSystem:
		return `{` + step + `,"message":` + message("system", `{"kind":"plugin"}`) + `}`
	case events.TypeAssistant:
		return `{` + step + `,"message":` + message("assistant", `{"kind":"model","provider":"p","model":"m"}`) + `}`
	case events.TypeTool:
		content = fmt.Sprintf(`[{"type":"tool-result","toolCallId":%q,"isError":false,"content":%s}]`, c.callID, content)
		m := message("user", fmt.Sprintf(`{"kind":"tool","callId":%q}`, c.callID))
		if c.shuffled {
			return `{"meta":` + c.fixed + `,"message":` + m + `,` + step + `}`
		}
		return `{` + step + `,"message":` + m + `,"meta":` + c.fixed + `}`
	}
	return c.data
}

// raw is the candidate as a caller writes it.
func (c candidate) raw() string {
	var b strings.Builder
	fmt.Fprintf(&b, `{"data":%s,"type":%q`, c.body(), c.typ)
	if c.seq != events.NoSeq {
		fmt.Fprintf(&b, `,"seq":%d`, c.seq)
	}
	switch {
	case c.replace:
		fmt.Fprintf(&b, `,"surfaceOp":{"endSeq":%d,"op":"replace","startSeq":%d}`, c.end, c.start)
	case c.op:
		b.WriteString(`,"surfaceOp":"append"`)
	}
	if c.cites != nil {
		fmt.Fprintf(&b, `,"sourceEventSeqs":[%s]`, joinSeqs(c.cites))
	}
	return b.String() + `}`
}

// oracle keeps the whole log and answers everything by folding it again from its first event.
type oracle struct{ log []candidate }

// surface is the ordered list of nodes, with how many replacements there were.
func (o *oracle) surface() (nodes []events.Seq, generation int64) {
	for i, c := range o.log {
		seq := events.Seq(i)
		switch {
		case c.replace:
			from, to := slices.Index(nodes, c.start), slices.Index(nodes, c.end)
			nodes = slices.Concat(nodes[:from], []events.Seq{seq}, nodes[to+1:])
			generation++
		case c.op:
			nodes = append(nodes, seq)
		}
	}
	return nodes, generation
}

// messages derives the surface's messages.
func (o *oracle) messages() (out []string) {
	nodes, _ := o.surface()
	for _, seq := range nodes {
		c := o.log[seq]
		var data map[string]json.RawMessage
		if err := json.Unmarshal([]byte(c.body()), &data); err != nil {
			panic(err)
		}
		message := json.RawMessage(c.body())
		if c.typ != events.TypeUser {
			message = data["message"]
		}
		var m struct{ Content []json.RawMessage }
		if err := json.Unmarshal(message, &m); err != nil {
			panic(err)
		}
		if len(m.Content) == 0 && (c.typ == events.TypeSystem || c.typ == events.TypeAssistant) {
			continue
		}
		out = append(out, string(message))
	}
	return out
}

// judge names the first surface rule that a candidate breaks, "" when none.
func (o *oracle) judge(c candidate) events.Rule {
	next := events.Seq(len(o.log))
	if c.seq != events.NoSeq && c.seq != next {
		return "seq-not-contiguous"
	}
	if !c.onSurface() {
		switch {
		case c.typ == "x/opaque":
			return "unknown-type"
		case c.op || c.replace:
			return "surface-op-forbidden"
		case c.cites != nil:
			return "sources-forbidden"
		}
		return ""
	}
	if !c.op && !c.replace {
		return "surface-op-required"
	}
	if c.replace && (c.start >= next || c.end >= next) {
		return "replace-endpoint-not-earlier"
	}
	if c.cites != nil {
		switch {
		case c.typ == events.TypeAssistant:
			return "assistant-sources-forbidden"
		case len(c.cites) == 0:
			return "sources-empty"
		}
		seen := map[events.Seq]bool{}
		for _, s := range c.cites {
			if seen[s] {
				return "sources-duplicate"
			}
			seen[s] = true
		}
		for s := range seen {
			if s >= next {
				return "sources-not-earlier"
			}
		}
	}
	if c.broken {
		return "message-malformed"
	}
	if !c.replace {
		return ""
	}
	nodes, _ := o.surface()
	from, to := slices.Index(nodes, c.start), slices.Index(nodes, c.end)
	switch {
	case from < 0 || to < 0:
		return "replace-endpoint-not-on-surface"
	case from > to:
		return "replace-range-inverted"
	}
	for _, n := range nodes[from : to+1] {
		if !slices.Contains(c.cites, n) {
			return "replace-sources-incomplete"
		}
	}
	if c.typ == events.TypeTool {
		switch {
		case from != to:
			return "tool-result-rewrite-span"
		case o.log[nodes[from]].typ != events.TypeTool:
			return "tool-result-rewrite-target"
		case !reflect.DeepEqual(withoutContent(c), withoutContent(o.log[nodes[from]])):
			return "tool-result-rewrite-changes"
		}
	}
	if o.log[nodes[0]].typ == events.TypeSystem && from == 0 && (to != 0 || c.typ != events.TypeSystem) {
		return "system-head-protected"
	}
	return ""
}

// withoutContent is the value of a tool result's data without message.content[0].content.
func withoutContent(c candidate) any {
	d := json.NewDecoder(strings.NewReader(c.body()))
	d.UseNumber()
	var data map[string]any
	if err := d.Decode(&data); err != nil {
		panic(err)
	}
	block := data["message"].(map[string]any)["content"].([]any)[0].(map[string]any)
	delete(block, "content")
	return byValue(data)
}

// byValue replaces numbers by what they are worth.
func byValue(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = byValue(v[k])
		}
	case []any:
		for i := range v {
			v[i] = byValue(v[i])
		}
	case json.Number:
		r, _ := new(big.Rat).SetString(v.String())
		return "number " + r.String()
	}
	return v
}
