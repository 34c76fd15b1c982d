// Package provider owns what a session's derived messages look like to a model provider's
// API: OpenAI Chat Completions and Anthropic Messages (docs/providers.md has the mapping). A
// rendered list keeps the rules of its API whatever the messages hold: tool calls and results
// that lost each other are completed or left out, and everything that is not in the list as
// it was in the log is in the report.
//
// It is pure: no I/O, no clock, no goroutines. It knows neither sessions nor how messages are
// read or served. Messages must be valid, compact JSON, as surface.Node.Message returns them.
// Strings are spliced from them token by token and never decoded and encoded again.
package provider

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"

	"palimpsest/internal/events"
)

// Target is an API that messages are rendered for.
type Target string

// The targets.
const (
	OpenAI    Target = "openai"    // Chat Completions
	Anthropic Target = "anthropic" // Messages
)

// Message is one derived message of a session.
type Message struct {
	Seq  events.Seq  // of its node
	Kind events.Kind // of its node
	JSON []byte
}

// Action says what became of something that is not in the list as it was in the log.
type Action string

// The actions.
const (
	Synthesized Action = "synthesized" // the list has something that the log has not
	LeftOut     Action = "left-out"    // the API's rules do not let it stand
	Changed     Action = "changed"     // it is in the list in another form or place
	Unmapped    Action = "unmapped"    // the API has nothing that it could become
)

// Note is one entry of a report.
type Note struct {
	Seq   events.Seq `json:"seq"`             // of the message
	Index int        `json:"index"`           // of the message in the messages that were rendered
	Block *int       `json:"block,omitempty"` // in the message's content, or in the result's; nil for all of it
	// What is the type of the block, or of the event for a whole message, with the member
	// behind a dot where it is about one: text, tool-call.id, user/message.
	What   string `json:"what"`
	Action Action `json:"action"`
	Detail string `json:"detail"`
}

// Rendered is a list of messages in the form of a target.
type Rendered struct {
	System   json.RawMessage // Anthropic: text blocks for the parameter system, nil when there are none
	Messages json.RawMessage // the array for the parameter messages
	Report   []Note          // sorted by Index
}

// AppendJSON appends the members system (if any), messages and report to dst, separated by
// commas and without braces around them. It is how a Rendered should be written:
// json.Marshal would rewrite characters such as < in the raw messages.
func (r *Rendered) AppendJSON(dst []byte) []byte {
	if r.System != nil {
		dst = append(append(append(dst, `"system":`...), r.System...), ',')
	}
	dst = append(append(dst, `"messages":`...), r.Messages...)
	notes := r.Report
	if notes == nil {
		notes = []Note{}
	}
	report, err := json.Marshal(notes)
	if err != nil {
		panic(err) // strings and numbers always encode
	}
	return append(append(dst, `,"report":`...), report...)
}

// Render renders messages for a target. The error says that there is no such target; there is
// no message that cannot be rendered.
func Render(t Target, f events.Format, messages []Message) (Rendered, error) {
	r := &renderer{target: t, format: f, in: messages}
	var out Rendered
	switch t {
	case OpenAI:
		r.ids.most, r.nameMost = 40, 64
		out = r.openAI()
	case Anthropic:
		r.ids.strict, r.nameMost = true, 128
		out = r.anthropic()
	default:
		return Rendered{}, &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("format: expected %s or %s, found %q", OpenAI, Anthropic, string(t))}
	}
	slices.SortStableFunc(r.report, func(a, b Note) int { return cmp.Compare(a.Index, b.Index) })
	out.Report = r.report
	mendLone(out.System)
	mendLone(out.Messages)
	return out, nil
}

// renderer is one rendering. What both targets share stands here, in parts.go and in tools.go;
// openai.go and anthropic.go put the pieces in order.
type renderer struct {
	target   Target
	format   events.Format
	in       []Message
	report   []Note
	ids      idWriter
	nameMost int // characters of a tool's name
}

// wholeMessage is the block of a note about a message.
const wholeMessage = -1

func (r *renderer) note(m *message, block int, what string, a Action, format string, args ...any) {
	n := Note{Seq: m.seq, Index: m.index, What: what, Action: a, Detail: fmt.Sprintf(format, args...)}
	if block != wholeMessage {
		n.Block = &block
	}
	r.report = append(r.report, n)
}

// nothingLeft notes a message of which the list has nothing.
func (r *renderer) nothingLeft(m *message) {
	r.note(m, wholeMessage, m.kind.Type(), LeftOut, "nothing of this message can stand in the list")
}

// notOnSurface notes a message whose kind derives none.
func (r *renderer) notOnSurface(m *message) {
	r.note(m, wholeMessage, "message", LeftOut, "expected the message of a surface event")
}
