package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"palimpsest/internal/events"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// runJSON runs the program in JSON mode, briefly, and returns what it printed.
func runJSON(t *testing.T, args ...string) (out []line) {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	t.Setenv("BENCH_JSON", "1")
	var stdout bytes.Buffer
	if err := run(context.Background(), args, &stdout, io.Discard); err != nil {
		t.Fatal(err)
	}
	for d := json.NewDecoder(&stdout); d.More(); {
		var l line
		if err := d.Decode(&l); err != nil {
			t.Fatalf("%v in %s", err, stdout.Bytes())
		}
		out = append(out, l)
	}
	left, err := os.ReadDir(os.TempDir())
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	return out
}

func TestEveryCaseIsPrintedWithItsBaseline(t *testing.T) {
	nodesEach, foldSizes, readSizes = 100, []int{10, 100, 1000}, []int{20, 500}
	var names []string
	for _, l := range runJSON(t, "--rounds=1", "--events=2000", "--sessions=20", "--time=20ms", "--readers=4") {
		names = append(names, l.Name)
		if l.Unit == "" || l.Value <= 0 || l.Baseline <= 0 || l.Ratio <= 0 {
			t.Errorf("found %+v", l)
		}
	}
	want := []string{
		"project/packed1", "consumers/packed1", "unfiltered/packed1", "project/packed10", "consumers/packed10", "unfiltered/packed10",
		"fold/append", "fold/replace", "kvbytes/flat", "read/go/20", "read/http/20", "read/go/500", "read/http/500", "read/go", "read/http",
	}
	if !slices.Equal(names, want) {
		t.Errorf("expected %v, found %v", want, names)
	}
}

func TestFlatPrintsEachCadence(t *testing.T) {
	got := runJSON(t, "--flat", "--longest=20000")
	at := slices.IndexFunc(got, func(l line) bool { return l.Name == "kvbytes/flat" })
	if len(got) != 7 || at < 0 || got[at].Ratio <= 0 {
		t.Errorf("found %+v", got)
	}
}

func TestALostEventFailsTheRun(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	r, err := newBed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	l, err := r.newLog(t.Context(), "packed10", 10, 2, 20, false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.projectOnce(t.Context(), l, nil); err != nil {
		t.Fatal(err)
	}
	l.authors[1].next++
	if _, err := r.projectOnce(t.Context(), l, nil); err == nil || !strings.Contains(err.Error(), l.authors[1].session) {
		t.Errorf("expected an error about session %s, found %v", l.authors[1].session, err)
	}
}

// What is measured are sessions that an appender would store: every rule is kept.
func TestTheLogKeepsEveryRule(t *testing.T) {
	s := session.New("s", events.Format3, nil, surface.KeepBodies)
	a := newAuthor("s", nil)
	c := a.commit(200, dataBytes)
	if err := s.FoldCommit(c, events.DefaultVocabulary(), nil); err != nil {
		t.Fatal(err)
	}
	if n := s.Surface.Len(); n != 80 {
		t.Errorf("expected 80 of 200 events on the surface, found %d", n)
	}
	if _, err := s.Surface.Messages(); err != nil {
		t.Error(err)
	}
	for line := range c.Lines() {
		var e events.Event
		if err := events.ParseCanonical(&e, line, events.Format3, events.DefaultVocabulary()); err != nil {
			t.Fatal(err)
		}
		if err := e.Check(events.Format3); err != nil || len(e.Data()) != dataBytes {
			t.Errorf("%v, %d bytes of data: %s", err, len(e.Data()), fmt.Sprint(string(line)))
		}
	}
}

func TestTelemetryIsMeasuredInBothPackings(t *testing.T) {
	var names []string
	for _, l := range runJSON(t, "--telemetry", "--rounds=1", "--events=2000", "--sessions=20") {
		names = append(names, l.Name)
		if l.Unit != "events/s" || l.Value <= 0 || l.Baseline <= 0 || l.CPURatio <= 0 {
			t.Errorf("found %+v", l)
		}
	}
	if want := []string{"telemetry/project/packed1", "telemetry/project/packed10"}; !slices.Equal(names, want) {
		t.Errorf("expected %v, found %v", want, names)
	}
}
