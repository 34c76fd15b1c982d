package harness

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"sort"
	"strconv"
	"strings"
)

// Event is one event, read without any code of the product.
type Event struct {
	Type      string
	Seq, Time int64 // -1 when absent
	SurfaceOp json.RawMessage
	Sources   json.RawMessage
	Ignorable bool
	Data      json.RawMessage
	Line      []byte // as it was read
}

// ParseEvent reads one event in any key order.
func ParseEvent(line []byte) (Event, error) {
	e := Event{Seq: -1, Time: -1, Line: bytes.Clone(line)}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(line, &members); err != nil {
		return e, err
	}
	for key, raw := range members {
		var err error
		switch key {
		case "type":
			err = json.Unmarshal(raw, &e.Type)
		case "seq":
			e.Seq, err = integer(raw)
		case "time":
			e.Time, err = integer(raw)
		case "surfaceOp":
			e.SurfaceOp = raw
		case "sourceEventSeqs":
			e.Sources = raw
		case "ignorable":
			err = json.Unmarshal(raw, &e.Ignorable)
		case "data":
			e.Data = raw
		default:
			err = errors.New("unknown")
		}
		if err != nil {
			return e, fmt.Errorf("key %q: %w", key, err)
		}
	}
	return e, nil
}

// integer reads 2, 2.0 and 2e0 alike.
func integer(raw json.RawMessage) (int64, error) {
	var f float64
	if err := json.Unmarshal(raw, &f); err != nil {
		return 0, err
	}
	if f != float64(int64(f)) {
		return 0, fmt.Errorf("%s is no integer", raw)
	}
	return int64(f), nil
}

// ReadSessionFile reads a session file: its header and its events, the latter
// numbered from 0 and dated by the header where they say nothing.
func ReadSessionFile(file []byte) (header json.RawMessage, events []Event, err error) {
	for i, line := range bytes.Split(bytes.TrimSuffix(file, []byte("\n")), []byte("\n")) {
		line = bytes.TrimSuffix(line, []byte("\r"))
		if i == 0 {
			header = bytes.Clone(line)
			continue
		}
		e, err := ParseEvent(line)
		if err != nil {
			return nil, nil, fmt.Errorf("line %d: %w", i+1, err)
		}
		events = append(events, e)
	}
	var h struct {
		CreatedAt int64 `json:"createdAt"`
	}
	if err := json.Unmarshal(header, &h); err != nil {
		return nil, nil, fmt.Errorf("header: %w", err)
	}
	for i := range events {
		if events[i].Seq < 0 {
			events[i].Seq = int64(i)
		}
		if events[i].Time < 0 {
			events[i].Time = h.CreatedAt
		}
	}
	return header, events, nil
}

// Canonical is the event's one line of JSON, without its line end.
func (e Event) Canonical() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `{"type":%s,"seq":%d,"time":%d`, quote(e.Type), e.Seq, e.Time)
	if e.SurfaceOp != nil {
		b.WriteString(`,"surfaceOp":`)
		if op, ok := e.Replace(); ok {
			fmt.Fprintf(&b, `{"op":"replace","startSeq":%d,"endSeq":%d}`, op.Start, op.End)
		} else {
			b.Write(Compact(e.SurfaceOp))
		}
	}
	if e.Sources != nil {
		b.WriteString(`,"sourceEventSeqs":`)
		b.Write(Compact(e.Sources))
	}
	if e.Ignorable {
		b.WriteString(`,"ignorable":true`)
	}
	b.WriteString(`,"data":`)
	b.Write(Compact(e.Data))
	b.WriteString("}")
	return b.Bytes()
}

// Compact drops the insignificant white space of a JSON text and nothing else.
func Compact(raw []byte) []byte {
	var b bytes.Buffer
	if err := json.Compact(&b, raw); err != nil {
		return bytes.Clone(raw)
	}
	return b.Bytes()
}

// quote writes a string as JSON with no more escapes than JSON needs.
func quote(s string) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	_ = enc.Encode(s) // a string always encodes
	return strings.TrimSuffix(b.String(), "\n")
}

// ReplaceOp is a replacing event's range.
type ReplaceOp struct{ Start, End int64 }

// Replace answers the range of an event that replaces.
func (e Event) Replace() (ReplaceOp, bool) {
	var op struct {
		Op       string
		StartSeq json.RawMessage
		EndSeq   json.RawMessage
	}
	if len(e.SurfaceOp) == 0 || json.Unmarshal(e.SurfaceOp, &op) != nil || op.Op != "replace" {
		return ReplaceOp{}, false
	}
	start, err1 := integer(op.StartSeq)
	end, err2 := integer(op.EndSeq)
	return ReplaceOp{start, end}, err1 == nil && err2 == nil
}

// Replacement is one replacement and what it shadowed, in surface order.
type Replacement struct {
	Seq          int64   `json:"seq"`
	StartSeq     int64   `json:"startSeq"`
	EndSeq       int64   `json:"endSeq"`
	ShadowedSeqs []int64 `json:"shadowedSeqs"`
}

// Surface is what a log folds to.
type Surface struct {
	Nodes        []int64
	Generation   int
	Replacements []Replacement
	Messages     []json.RawMessage
	MessageSeqs  []int64 // the node of each message
	Transcript   []int64 // seqs of the appended surface events
}

// Fold is the deliberately dumb fold that the product is compared with: it
// keeps everything, searches from the start and trusts the log.
func Fold(format int, events []Event) (Surface, error) {
	s := Surface{Nodes: []int64{}, Replacements: []Replacement{}}
	bySeq := map[int64]Event{}
	for _, e := range events {
		bySeq[e.Seq] = e
		if !onSurface(format, e.Type) {
			continue
		}
		op, replaces := e.Replace()
		if !replaces {
			s.Nodes = append(s.Nodes, e.Seq)
			s.Transcript = append(s.Transcript, e.Seq)
			continue
		}
		from, to := slices.Index(s.Nodes, op.Start), slices.Index(s.Nodes, op.End)
		if from < 0 || to < from {
			return s, fmt.Errorf("event %d replaces %d..%d, not a range of the surface %v", e.Seq, op.Start, op.End, s.Nodes)
		}
		s.Replacements = append(s.Replacements, Replacement{e.Seq, op.Start, op.End, slices.Clone(s.Nodes[from : to+1])})
		s.Nodes = slices.Concat(s.Nodes[:from], []int64{e.Seq}, s.Nodes[to+1:])
		s.Generation++
	}
	for _, seq := range s.Nodes {
		message, err := derive(bySeq[seq])
		if err != nil {
			return s, fmt.Errorf("event %d: %w", seq, err)
		}
		if message != nil {
			s.Messages = append(s.Messages, message)
			s.MessageSeqs = append(s.MessageSeqs, seq)
		}
	}
	return s, nil
}

func onSurface(format int, kind string) bool {
	switch kind {
	case "system/message", "user/message", "assistant/message", "tool/result":
		return true
	case "developer/message":
		return format == 4
	}
	return false
}

// derive answers the message of a node, or nil when it gives none.
func derive(e Event) (json.RawMessage, error) {
	if e.Type == "user/message" {
		return e.Data, nil
	}
	var data struct {
		Message json.RawMessage `json:"message"`
	}
	if err := json.Unmarshal(e.Data, &data); err != nil {
		return nil, err
	}
	if e.Type == "tool/result" {
		return data.Message, nil
	}
	var message struct {
		Content []json.RawMessage `json:"content"`
	}
	if err := json.Unmarshal(data.Message, &message); err != nil {
		return nil, err
	}
	if len(message.Content) == 0 {
		return nil, nil
	}
	return data.Message, nil
}

// Digest is the digest chain over canonical lines: raw, before any event when
// there are none.
func Digest(session string, lines [][]byte) []byte {
	sum := sha256.Sum256([]byte("palimpsest/1 " + session))
	for _, line := range lines {
		sum = sha256.Sum256(append(sum[:], line...))
	}
	return sum[:]
}

// CommitChain is the chain before the first commit of a session.
func CommitChain(session string, header []byte) []byte {
	of := sha256.Sum256(header)
	sum := sha256.Sum256(append([]byte("palimpsest/1 "+session+"\n"), of[:]...))
	return sum[:]
}

// NextCommitChain is the chain after a commit.
func NextCommitChain(before []byte, id, actor, time, format, first, last string, digest []byte) []byte {
	text := strings.Join([]string{id, actor, time, format, first, last}, "\n") + "\n"
	sum := sha256.Sum256(slices.Concat(before, []byte(text), digest))
	return sum[:]
}

// Hex is how digests stand in headers and answers.
func Hex(sum []byte) string { return hex.EncodeToString(sum) }

// SameJSON compares two JSON texts as values and says where they differ.
// Numbers are compared as exact decimals.
func SameJSON(got, want []byte) error {
	g, err := decode(got)
	if err != nil {
		return fmt.Errorf("got %.200s: %w", got, err)
	}
	w, err := decode(want)
	if err != nil {
		return fmt.Errorf("want %.200s: %w", want, err)
	}
	return differ("$", g, w)
}

func decode(raw []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		return nil, err
	}
	if d.More() {
		return nil, errors.New("more than one value")
	}
	return v, nil
}

func differ(at string, got, want any) error {
	switch w := want.(type) {
	case map[string]any:
		g, ok := got.(map[string]any)
		if !ok {
			break
		}
		keys := map[string]bool{}
		for k := range g {
			keys[k] = true
		}
		for k := range w {
			keys[k] = true
		}
		sorted := make([]string, 0, len(keys))
		for k := range keys {
			sorted = append(sorted, k)
		}
		sort.Strings(sorted)
		for _, k := range sorted {
			gv, inGot := g[k]
			wv, inWant := w[k]
			if inGot != inWant {
				return fmt.Errorf("%s.%s: there in got %v, in want %v", at, k, inGot, inWant)
			}
			if err := differ(at+"."+k, gv, wv); err != nil {
				return err
			}
		}
		return nil
	case []any:
		g, ok := got.([]any)
		if !ok {
			break
		}
		if len(g) != len(w) {
			return fmt.Errorf("%s: %d elements, want %d", at, len(g), len(w))
		}
		for i := range w {
			if err := differ(at+"["+strconv.Itoa(i)+"]", g[i], w[i]); err != nil {
				return err
			}
		}
		return nil
	case json.Number:
		if g, ok := got.(json.Number); ok && sameNumber(g, w) {
			return nil
		}
	default:
		if got == want {
			return nil
		}
	}
	return fmt.Errorf("%s: got %.120v, want %.120v", at, got, want)
}

func sameNumber(a, b json.Number) bool {
	if a == b {
		return true
	}
	x, ok1 := new(big.Rat).SetString(a.String())
	y, ok2 := new(big.Rat).SetString(b.String())
	return ok1 && ok2 && x.Cmp(y) == 0
}

// SameMessages compares lists of messages as JSON values.
func SameMessages(got, want []json.RawMessage) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d messages, want %d", len(got), len(want))
	}
	for i := range want {
		if err := SameJSON(got[i], want[i]); err != nil {
			return fmt.Errorf("message %d: %w", i, err)
		}
	}
	return nil
}
