package main

import (
	"encoding/json"
	"fmt"
	"testing"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// logOf is a log of events with these marks, one a commit of that id; "" is one without a mark.
func logOf(t *testing.T, marks ...string) (events []harness.Event, commitOf []harness.Commit) {
	t.Helper()
	for i, mark := range marks {
		data := "{}"
		if mark != "" {
			data = fmt.Sprintf(`{"mark":%q}`, mark)
		}
		e, err := harness.ParseEvent(fmt.Appendf(nil, `{"type":"goal/change","seq":%d,"time":1,"data":%s}`, i, data))
		if err != nil {
			t.Fatal(err)
		}
		events, commitOf = append(events, e), append(commitOf, harness.Commit{Attribute: map[string]string{"id": fmt.Sprintf("c%d", i), "digest": fmt.Sprintf("d%d", i)}})
	}
	return events, commitOf
}

func TestTheCheckerFindsEachDamage(t *testing.T) {
	t.Parallel()
	stored := func(mark string, seq, call, end int64) op {
		return op{what: "append", mark: mark, events: 1, expected: -1, actual: -1, call: call, end: end, outcome: "stored",
			receipt: harness.Receipt{FirstSeq: seq, LastSeq: seq, Commit: fmt.Sprintf("c%d", seq), Digest: fmt.Sprintf("d%d", seq)}}
	}
	sent := func(o op, marks ...string) op {
		for _, mark := range marks {
			o.sent = append(o.sent, fmt.Appendf(nil, `{"type":"goal/change","data":{"mark":%q}}`, mark))
		}
		return o
	}
	read := func(seq, call, end int64) op {
		return op{what: "fresh read", expected: -1, actual: -1, call: call, end: end, outcome: "read", receipt: harness.Receipt{LastSeq: seq}}
	}
	with := func(o op, change func(*op)) op {
		change(&o)
		return o
	}
	a, b := stored("a", 0, 0, 1), stored("b", 1, 2, 3)
	unknown := func(mark string) op {
		return op{what: "append", mark: mark, events: 1, expected: -1, actual: -1, call: 4, end: 5, outcome: "unknown"}
	}
	for name, c := range map[string]struct {
		log  []string
		ops  []op
		good bool
	}{
		"all is well":                          {[]string{"a", "b"}, []op{a, b}, true},
		"unknown and stored":                   {[]string{"a", "b", "c"}, []op{a, b, unknown("c")}, true},
		"unknown and not stored":               {[]string{"a", "b"}, []op{a, b, unknown("c")}, true},
		"made by a call that nobody answered":  {[]string{"a", "b", ""}, []op{a, b, unknown("")}, true},
		"an acknowledged event is lost":        {[]string{"a"}, []op{a, b}, false},
		"another event is at its seq":          {[]string{"a", "c"}, []op{a, b, unknown("c")}, false},
		"it is there twice":                    {[]string{"a", "b", "a"}, []op{a, b}, false},
		"it is in another commit":              {[]string{"a", "b"}, []op{a, with(b, func(o *op) { o.receipt.Commit = "c7" })}, false},
		"two calls were told of the same seq":  {[]string{"a", "b"}, []op{a, b, with(b, func(o *op) { o.mark = "" })}, false},
		"what was refused is there":            {[]string{"a", "b"}, []op{a, with(b, func(o *op) { o.outcome = "refused" })}, false},
		"nobody asked for it":                  {[]string{"a", "b", ""}, []op{a, b}, false},
		"a mark that nobody sent":              {[]string{"a", "b", "c"}, []op{a, b, unknown("")}, false},
		"it is not where it was expected":      {[]string{"a", "b"}, []op{a, with(b, func(o *op) { o.expected = 0 })}, false},
		"it came before what was there before": {[]string{"a", "b"}, []op{stored("a", 0, 5, 6), stored("b", 1, 2, 3)}, false},
		"as it was sent":                       {[]string{"a", "b"}, []op{a, sent(b, "b")}, true},
		"other than it was sent":               {[]string{"a", "b"}, []op{a, sent(b, "x")}, false},
		"unknown, stored, other than sent":     {[]string{"a", "b", "c"}, []op{a, b, sent(unknown("c"), "x")}, false},
		"with another digest":                  {[]string{"a", "b"}, []op{a, with(b, func(o *op) { o.receipt.Digest = "d7" })}, false},
		"made other than was asked for": {[]string{"a", "b"}, []op{a, with(b, func(o *op) {
			o.mark, o.made = "", func(_ op, events []harness.Event) error { return types(events, "session/writer") }
		})}, false},
		"a read of the end":             {[]string{"a", "b"}, []op{a, b, read(1, 4, 5)}, true},
		"a read beside an append":       {[]string{"a", "b"}, []op{a, b, read(0, 2, 3)}, true},
		"a read that is old":            {[]string{"a", "b"}, []op{a, b, read(0, 4, 5)}, false},
		"a read that is older than one": {[]string{"a", "b"}, []op{a, with(b, func(o *op) { o.end = 9 }), read(1, 3, 4), read(0, 5, 6)}, false},
		"a read of what comes later":    {[]string{"a", "b"}, []op{a, with(b, func(o *op) { o.call, o.end = 6, 7 }), read(1, 2, 3)}, false},
		"a conflict with nobody":        {[]string{"a", "b"}, []op{a, b, {what: "append", mark: "c", events: 1, expected: 2, actual: 2, call: 4, end: 5, outcome: "refused"}}, false},
	} {
		events, commitOf := logOf(t, c.log...)
		s := &suite{Tally: new(load.Tally)}
		err := s.checkHistory(&session{id: "s", ops: c.ops}, events, commitOf, 0)
		if (err == nil) != c.good {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestAWatchWithAGapOrARepeatIsFound(t *testing.T) {
	t.Parallel()
	zero, two, five := newDelta(0, nil), newDelta(2, nil), newDelta(5, []int64{0, 2})
	for _, c := range []struct {
		told []delta
		good bool
	}{
		{[]delta{zero, two, five}, true}, {[]delta{zero, five}, false}, {[]delta{zero, two, two, five}, false},
		{[]delta{zero, two, five, newDelta(6, nil)}, false}, {[]delta{zero, two, newDelta(5, []int64{2})}, false}, {[]delta{zero, two, newDelta(5, nil)}, false},
	} {
		w := &watcher{deltas: c.told}
		if err := w.reached(t.Context(), []delta{zero, two, five}); (err == nil) != c.good {
			t.Errorf("%v: %v", c.told, err)
		}
	}
}

func TestAnAnswerThatTheLogDoesNotGiveIsFound(t *testing.T) {
	t.Parallel()
	message := `{"id":"u","role":"user","source":{"kind":"user"},"content":[]}`
	var events []harness.Event
	for seq := range 2 {
		e, err := harness.ParseEvent(fmt.Appendf(nil, `{"type":"user/message","seq":%d,"time":1,"surfaceOp":"append","data":%s}`, seq, message))
		if err != nil {
			t.Fatal(err)
		}
		events = append(events, e)
	}
	one, two := []json.RawMessage{[]byte(message)}, []json.RawMessage{[]byte(message), []byte(message)}
	for name, c := range map[string]struct {
		v    view
		good bool
	}{
		"the first":                  {messagesView(0, 0, one), true},
		"both":                       {messagesView(1, 0, two), true},
		"nodes":                      {nodesView(1, 0, []int64{0, 1}), true},
		"older than it says":         {messagesView(1, 0, one), false},
		"newer than it says":         {messagesView(0, 0, two), false},
		"another generation":         {messagesView(1, 1, two), false},
		"other nodes":                {nodesView(1, 0, []int64{1, 0}), false},
		"of what the log never held": {messagesView(2, 0, two), false},
	} {
		s, session := &suite{Tally: new(load.Tally)}, &session{id: "s"}
		session.saw(c.v, "read")
		if err := s.checkViews(session, events); (err == nil) != c.good {
			t.Errorf("%s: %v", name, err)
		}
	}
}
