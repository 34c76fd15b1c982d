package client

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"time"
)

// Seq is the position of an event in its session: 0, 1, 2, … without holes.
type Seq int64

// NoSeq is the seq of the last event of a session without events.
const NoSeq Seq = -1

// SurfaceOp says what a surface event does to the surface. The zero value does nothing: it is
// that of all other events.
type SurfaceOp struct {
	op         string
	start, end Seq
}

// Append adds the event's message behind all others.
func Append() SurfaceOp { return SurfaceOp{op: "append"} }

// Replace puts the event's message in the place of the nodes from start through end, in
// surface order. The event's Sources must name every node that it replaces.
func Replace(start, end Seq) SurfaceOp { return SurfaceOp{"replace", start, end} }

// IsAppend reports whether the op is that of Append.
func (o SurfaceOp) IsAppend() bool { return o.op == "append" }

// Range returns the range of a Replace; ok is false for any other op.
func (o SurfaceOp) Range() (start, end Seq, ok bool) { return o.start, o.end, o.op == "replace" }

// Event is an event to be appended. Its seq is the session's next.
type Event struct {
	// Type is the event's type, such as user/message. Required.
	Type string
	// Data is the event's content. A json.RawMessage is sent as it is, byte for byte; anything
	// else is encoded by encoding/json, without escaping <, > and &.
	Data any
	// SurfaceOp is required for surface events (messages and tool results) and forbidden for
	// others. Defaults to none.
	SurfaceOp SurfaceOp
	// Sources are the seqs of the events that this one was made from. Defaults to none.
	Sources []Seq
	// Ignorable stores an event of a type that the deployment does not know. Defaults to false.
	Ignorable bool
	// Time is when it happened, stored in whole milliseconds. Defaults to the appender's clock
	// when it takes the event.
	Time time.Time
}

// append writes the event as JSON.
func (e *Event) append(b []byte) ([]byte, error) {
	data, err := encode(e.Data)
	if err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	typ, err := encode(e.Type)
	if err != nil {
		return nil, err
	}
	b = append(append(b, `{"type":`...), typ...)
	if !e.Time.IsZero() {
		b = append(b, `,"time":`...)
		b = strconv.AppendInt(b, e.Time.UnixMilli(), 10)
	}
	if e.SurfaceOp.IsAppend() {
		b = append(b, `,"surfaceOp":"append"`...)
	} else if start, end, ok := e.SurfaceOp.Range(); ok {
		b = fmt.Appendf(b, `,"surfaceOp":{"op":"replace","startSeq":%d,"endSeq":%d}`, start, end)
	}
	if e.Sources != nil {
		sources, err := encode(e.Sources)
		if err != nil {
			return nil, err
		}
		b = append(append(b, `,"sourceEventSeqs":`...), sources...)
	}
	if e.Ignorable {
		b = append(b, `,"ignorable":true`...)
	}
	b = append(append(b, `,"data":`...), data...)
	return append(b, '}'), nil
}

// encodeEvents writes events as one JSON array.
func encodeEvents(session string, events []Event) ([]byte, error) {
	if len(events) == 0 {
		return nil, bad(session, "expected at least one event, found none")
	}
	b := []byte{'['}
	for i := range events {
		if i > 0 {
			b = append(b, ',')
		}
		var err error
		if b, err = events[i].append(b); err != nil {
			e := bad(session, "event %d: %v", i, err)
			e.Index = &i
			return nil, e
		}
	}
	return append(b, ']'), nil
}

// encode writes a value as JSON. Raw JSON is checked and stays as it is.
func encode(v any) (json.RawMessage, error) {
	if raw, ok := v.(json.RawMessage); ok {
		if !json.Valid(raw) {
			return nil, fmt.Errorf("expected JSON, found %.100q", raw)
		}
		return raw, nil
	}
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimRight(b.Bytes(), "\n"), nil
}

// StoredEvent is an event of a log.
type StoredEvent struct {
	Type      string
	Seq       Seq
	Time      time.Time // UTC, whole milliseconds
	SurfaceOp SurfaceOp
	Sources   []Seq // nil when absent
	Ignorable bool
	Data      json.RawMessage // token for token

	// Line is the event's canonical line, without a line end: what digests are computed from.
	// It is the whole truth about an event of an unknown type, whose metadata may be anything.
	Line json.RawMessage
}

// parseStored reads a canonical line.
func parseStored(line json.RawMessage) (StoredEvent, error) {
	var w struct {
		Type      string          `json:"type"`
		Seq       Seq             `json:"seq"`
		Time      int64           `json:"time"`
		SurfaceOp json.RawMessage `json:"surfaceOp"`
		Sources   json.RawMessage `json:"sourceEventSeqs"`
		Ignorable bool            `json:"ignorable"`
		Data      json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(line, &w); err != nil {
		return StoredEvent{}, err
	}
	e := StoredEvent{Type: w.Type, Seq: w.Seq, Time: time.UnixMilli(w.Time).UTC(), Ignorable: w.Ignorable, Data: w.Data, Line: line}
	var op struct {
		Op       string `json:"op"`
		StartSeq *Seq   `json:"startSeq"`
		EndSeq   *Seq   `json:"endSeq"`
	}
	switch {
	case string(w.SurfaceOp) == `"append"`:
		e.SurfaceOp = Append()
	case w.SurfaceOp != nil && json.Unmarshal(w.SurfaceOp, &op) == nil && op.Op == "replace" && op.StartSeq != nil && op.EndSeq != nil:
		e.SurfaceOp = Replace(*op.StartSeq, *op.EndSeq)
	}
	if w.Sources != nil && json.Unmarshal(w.Sources, &e.Sources) != nil {
		e.Sources = nil
	}
	return e, nil
}
