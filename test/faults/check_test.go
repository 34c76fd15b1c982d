package main

import (
	"fmt"
	"testing"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// logOf is a log of events with these marks, one a commit of that id; "" is one without a mark.
func logOf(t *testing.T, marks ...string) (events []harness.Event, commitOf []string) {
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
		events, commitOf = append(events, e), append(commitOf, fmt.Sprintf("c%d", i))
	}
	return events, commitOf
}

func TestTheCheckerFindsEachDamage(t *testing.T) {
	t.Parallel()
	stored := func(mark string, seq, call, end int64) op {
		return op{what: "append", mark: mark, events: 1, expected: -1, actual: -1, call: call, end: end, outcome: "stored",
			receipt: harness.Receipt{FirstSeq: seq, LastSeq: seq, Commit: fmt.Sprintf("c%d", seq)}}
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
		"a conflict with nobody":               {[]string{"a", "b"}, []op{a, b, {what: "append", mark: "c", events: 1, expected: 2, actual: 2, call: 4, end: 5, outcome: "refused"}}, false},
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
	for _, c := range []struct {
		told []int64
		good bool
	}{{[]int64{0, 2, 5}, true}, {[]int64{0, 5}, false}, {[]int64{0, 2, 2, 5}, false}, {[]int64{0, 2, 5, 6}, false}} {
		w := &watcher{seqs: c.told}
		if err := w.reached(t.Context(), []int64{0, 2, 5}); (err == nil) != c.good {
			t.Errorf("%v: %v", c.told, err)
		}
	}
}
