package audit_test

import (
	"bytes"
	"errors"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"palimpsest/internal/api"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

// What is left of a log from which messages were removed must not be taken for all of it: by nobody who
// reads it, and at no page of it.
func TestLogWithAHoleIsNotTakenForAWholeOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	for _, id := range []string{"holed", "beheaded"} {
		for range 6 { // seqs 0 and 1, 2 and 3, …
			w.append(id, user("a"), user("b"))
		}
	}
	w.projected("holed")
	w.settle("beheaded")
	reader := projection.NewReader(w.log, w.headers, w.buckets, projection.NewHeads())
	for id, seq := range map[string]events.Seq{"holed": 4, "beheaded": 0} {
		c, err := w.log.Locate(ctx, id, seq)
		if err != nil || c == nil {
			t.Fatalf("%v, %v", c, err)
		}
		w.remove(c.StreamSeq)
	}
	refused := func(what, id string, err error) {
		t.Helper()
		want := map[string][2]events.Seq{"holed": {4, 6}, "beheaded": {0, 2}}[id]
		var e *events.Error
		if !errors.As(err, &e) || e.Code != events.CodeCorrupt || e.Rule != events.RuleSeqNotContiguous || e.Session != id ||
			e.ExpectedSeq == nil || e.ActualSeq == nil || *e.ExpectedSeq != want[0] || *e.ActualSeq != want[1] || !strings.Contains(e.Detail, "projector verify") {
			t.Errorf("%s of %s: %v; want rule %s, seq %d expected and %d found", what, id, err, events.RuleSeqNotContiguous, want[0], want[1])
		}
	}

	for _, id := range []string{"holed", "beheaded"} {
		var file bytes.Buffer
		refused("export", id, reader.Export(ctx, id, &file))
		refused("replay", id, w.Replay(ctx, id, audit.Replay{To: events.MaxSeq}, func(*events.Event, *events.Commit) error { return nil }))
		a, err := w.NewArchive(&file, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		refused("archive", id, a.Add(ctx, id))
		a.Abort()
		_, err = w.Usage(ctx, id)
		refused("usage", id, err)
		_, err = w.Explain(ctx, id, 8, 0)
		refused("explanation", id, err)
	}
	_, err := reader.At(ctx, "holed", 5)
	refused("surface as of a seq in the hole", "holed", err)
	if _, err := w.Fleet(ctx); !errors.Is(err, &events.Error{Code: events.CodeCorrupt, Rule: events.RuleSeqNotContiguous}) {
		t.Errorf("usage of all: %v", err)
	}

	const end = events.NoSeq
	for _, c := range []struct {
		id          string
		from, to    events.Seq
		limit       int
		first, last events.Seq // of what is given; NoSeq: nothing
		next        events.Seq
		refused     bool
	}{
		{"holed", 0, events.MaxSeq, 0, 0, 3, end, true},
		{"holed", 0, events.MaxSeq, 100, 0, 3, 4, false}, // a page up to the hole, and more to come
		{"holed", 0, events.MaxSeq, 4, 0, 3, 4, false},
		{"holed", 2, events.MaxSeq, 1, 2, 2, 3, false},
		{"holed", 4, events.MaxSeq, 100, end, end, end, true},
		{"holed", 5, 5, 0, end, end, end, true},
		{"holed", 0, 3, 0, 0, 3, end, false}, // the hole is behind the range
		{"holed", 6, events.MaxSeq, 100, 6, 11, end, false},
		{"holed", 7, events.MaxSeq, 0, 7, 11, end, false}, // from the middle of a commit on
		{"holed", 12, events.MaxSeq, 0, end, end, end, false},
		{"beheaded", 0, events.MaxSeq, 100, end, end, end, true},
		{"beheaded", 1, 1, 0, end, end, end, true},
		{"beheaded", 2, events.MaxSeq, 0, 2, 11, end, false},
	} {
		var given []events.Seq
		next, err := reader.Events(ctx, c.id, projection.Range{From: c.from, To: c.to, Limit: c.limit}, func(e *events.Event, _ *events.Commit) error {
			given = append(given, e.Seq)
			return nil
		})
		var want []events.Seq
		for seq := c.first; seq != end && seq <= c.last; seq++ {
			want = append(want, seq)
		}
		if !slices.Equal(given, want) || next != c.next || (err != nil) != c.refused {
			t.Errorf("%+v: given %v, next %d, error %v", c, given, next, err)
		}
		if c.refused {
			refused("a range", c.id, err)
		}
	}

	h := api.NewProjector(reader, w.worker, projection.NewHubs(reader, w.srv.Conn(t)), w.Auditor, api.ProjectorConfig{})
	for _, path := range []string{"/events", "/transcript"} {
		_, b, err := api.Local(ctx, h, "/v1/sessions/holed"+path, url.Values{"limit": {"100"}})
		if err != nil || !strings.HasSuffix(string(b), `"next":4}`+"\n") {
			t.Errorf("%s: %v, %s", path, err, b)
		}
		_, _, err = api.Local(ctx, h, "/v1/sessions/holed"+path, url.Values{"from": {"4"}})
		refused(path, "holed", err)
	}
	_, _, err = api.Local(ctx, h, "/v1/sessions/beheaded/events", url.Values{"format": {"cloudevents"}})
	refused("events as CloudEvents", "beheaded", err)
	if _, b, err := api.Local(ctx, h, "/v1/sessions/holed/export", nil); err == nil {
		t.Errorf("an export over HTTP: %s", b)
	}
}
