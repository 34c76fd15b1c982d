package sessionfile

import (
	"fmt"
	"strconv"

	"palimpsest/internal/events"
)

// packedShape says what the elements of a packed row are.
type packedShape struct {
	name  string // type of the row
	list  string // the member of data that holds them
	chunk string // type of the chunk that each becomes
	text  string // the chunk's member that it becomes
	call  bool   // chunks of a tool call, with its id and name
}

var packedShapes = [...]packedShape{
	{"text-chunks", "texts", "text-delta", "text", false},
	{"reasoning-chunks", "texts", "reasoning-delta", "text", false},
	{"tool-call-chunks", "args", "tool-call-delta", "argumentsDelta", true},
}

// packedRow is a line that stands for several assistant/chunk events. Each element of its list
// is one, with consecutive seqs from seq0 on. The first has time0, each other one the time of
// the one before plus its element of dt: there is one fewer of these.
type packedRow struct {
	left      int
	seq, time int64  // of the next event
	data      []byte // the event's data up to the element
	list, dt  []byte // arrays, without what was read
}

// read reads a row's line as far as needed to know that all of it can be expanded. A row
// without seq0 and time0 is numbered and dated as an event without seq and time is.
func (r *packedRow) read(shape packedShape, text []byte, at events.Seq, now int64) error {
	bad := func(format string, args ...any) error {
		return events.Violation(events.RuleEnvelopeMalformed, at, fmt.Sprintf("packed row "+shape.name+": "+format, args...))
	}
	var typ, seq0, time0, data []byte
	problem := readFields(text, field{"type", &typ, false}, field{"seq0", &seq0, true}, field{"time0", &time0, true}, field{"data", &data, false})
	r.seq, r.time = int64(at), now
	if seq0 != nil {
		n, ok := integer(seq0)
		if ok && n != int64(at) { // looked at before anything else, as in other events
			_, err := events.Parse(fmt.Appendf(nil, `{"type":"assistant/chunk","seq":%d,"data":0}`, n), events.Context{Vocabulary: events.DefaultVocabulary(), Next: at})
			return err
		}
		if !ok && problem == "" {
			problem = "seq0: expected an integer from 0 to 2^53-1, found " + clip(seq0)
		}
	}
	if time0 != nil && problem == "" {
		var ok bool
		if r.time, ok = integer(time0); !ok {
			problem = "time0: expected an integer from 0 to 2^53-1, found " + clip(time0)
		}
	}
	if problem != "" {
		return bad("%s", problem)
	}
	if !isObject(data) {
		return bad("data: expected an object, found %s", clip(data))
	}

	var turn, step, index, list, dt, id, call []byte
	fields := []field{{"turn", &turn, false}, {"step", &step, false}, {"index", &index, false}, {"dt", &dt, false}, {shape.list, &list, false}}
	if shape.call {
		fields = append(fields, field{"id", &id, false}, field{"name", &call, true})
	}
	if problem := readFields(data, fields...); problem != "" {
		return bad("data: %s", problem)
	}
	for _, f := range fields[:3] {
		if !isNumber(*f.val) {
			return bad("data.%s: expected a number, found %s", f.name, clip(*f.val))
		}
	}
	for _, f := range fields[5:] {
		if *f.val != nil && !isString(*f.val) {
			return bad("data.%s: expected a string, found %s", f.name, clip(*f.val))
		}
	}
	n, err := checkList(shape.list, list)
	if err == nil {
		err = checkTimes(dt, n, r.time)
	}
	if err != nil {
		return bad("data.%v", err)
	}
	r.left, r.list, r.dt = n, list, dt
	r.data = fmt.Appendf(r.data[:0], `{"turn":%s,"step":%s,"chunk":{"type":"%s","index":%s`, turn, step, shape.chunk, index)
	if shape.call {
		r.data = fmt.Appendf(r.data, `,"id":%s`, id)
	}
	if call != nil {
		r.data = fmt.Appendf(r.data, `,"name":%s`, call)
	}
	r.data = fmt.Appendf(r.data, `,"%s":`, shape.text)
	return nil
}

// checkList counts the elements of a row's list.
func checkList(name string, list []byte) (n int, err error) {
	if !isArray(list) {
		return 0, fmt.Errorf("%s: expected an array of strings, found %s", name, clip(list))
	}
	for val, rest := nextElement(list); val != nil; val, rest = nextElement(rest) {
		if !isString(val) {
			return 0, fmt.Errorf("%s[%d]: expected a string, found %s", name, n, clip(val))
		}
		n++
	}
	if n == 0 {
		return 0, fmt.Errorf("%s: expected at least one string, found none", name)
	}
	return n, nil
}

// checkTimes follows the times of a row's n events. A clock that was set back makes a step
// negative, but no time can be.
func checkTimes(dt []byte, n int, time int64) error {
	if !isArray(dt) {
		return fmt.Errorf("dt: expected an array of integers, found %s", clip(dt))
	}
	steps := 0
	for val, rest := nextElement(dt); val != nil; val, rest = nextElement(rest) {
		step, ok := signed(val)
		if !ok {
			return fmt.Errorf("dt[%d]: expected an integer, found %s", steps, clip(val))
		}
		if time += step; time < 0 || time > int64(events.MaxSeq) {
			return fmt.Errorf("dt[%d]: the time that it leads to, %d, is not between 0 and 2^53-1", steps, time)
		}
		steps++
	}
	if steps != n-1 {
		return fmt.Errorf("dt: expected %d steps between the times of %d events, found %d", n-1, n, steps)
	}
	return nil
}

// signed reads an integer that may be negative.
func signed(tok []byte) (int64, bool) {
	if tok[0] != '-' {
		return integer(tok)
	}
	n, ok := integer(tok[1:])
	return -n, ok && n > 0
}

// next appends the row's next event to b.
func (r *packedRow) next(b []byte) []byte {
	var text []byte
	text, r.list = nextElement(r.list)
	b = strconv.AppendInt(append(b, `{"type":"assistant/chunk","seq":`...), r.seq, 10)
	b = strconv.AppendInt(append(b, `,"time":`...), r.time, 10)
	b = append(b, `,"data":`...)
	b = append(append(append(b, r.data...), text...), "}}}"...)
	if r.left--; r.left > 0 {
		var step []byte
		step, r.dt = nextElement(r.dt)
		n, _ := signed(step) // was looked at before
		r.seq, r.time = r.seq+1, r.time+n
	}
	return b
}
