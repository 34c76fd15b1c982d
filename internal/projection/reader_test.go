package projection_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

func texts(t testing.TB, v *projection.View) []string {
	t.Helper()
	raws, err := v.Surface.Messages()
	if err != nil {
		t.Fatal(err)
	}
	out := []string{}
	for _, m := range raws {
		_, rest, _ := strings.Cut(string(m), `"text":"`)
		text, _, _ := strings.Cut(rest, `"`)
		out = append(out, text)
	}
	return out
}

var now = projection.Want{MinSeq: events.NoSeq}

// Not there, not projected yet and empty are three answers.
func TestThreeAnswers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	for _, want := range []projection.Want{now, {MinSeq: 3}, {MinSeq: events.NoSeq, Fresh: true}} {
		if _, err := w.reader.View(ctx, "nowhere", want); !errors.Is(err, events.ErrSessionNotFound) {
			t.Errorf("a session that is not there, %+v: %v", want, err)
		}
	}
	if _, _, err := w.Create(ctx, "empty", nil); err != nil {
		t.Fatal(err)
	}
	for _, want := range []projection.Want{now, {MinSeq: events.NoSeq, Fresh: true}} {
		v, err := w.reader.View(ctx, "empty", want)
		if err != nil || v.Last() != events.NoSeq || len(texts(t, v)) != 0 {
			t.Errorf("an empty session, %+v: %v", want, err)
		}
	}
	w.append("behind", user("0"), user("1"))
	_, err := w.reader.View(ctx, "behind", now)
	var e *events.Error
	if !errors.As(err, &e) || e.Code != events.CodeNotProjected || e.ActualSeq == nil || *e.ActualSeq != events.NoSeq {
		t.Errorf("a session that is not projected yet: %v", err)
	}
	if _, err := w.reader.View(ctx, "empty", projection.Want{MinSeq: 0, Timeout: time.Millisecond}); !errors.Is(err, events.ErrNotProjected) {
		t.Errorf("an empty session that is to have an event: %v", err)
	}
	// Fresh needs no projector.
	v, err := w.reader.View(ctx, "behind", projection.Want{MinSeq: 1, Fresh: true})
	if err != nil || !slices.Equal(texts(t, v), []string{"0", "1"}) {
		t.Errorf("a fresh view: %v", err)
	}
	if _, err := w.reader.View(ctx, "behind", projection.Want{MinSeq: 2, Fresh: true}); !errors.Is(err, events.ErrNotProjected) {
		t.Errorf("a fresh view of what is not there: %v", err)
	}
	if _, err := w.reader.View(ctx, "a\x00b", now); !errors.Is(err, &events.Error{Code: events.CodeSessionID}) {
		t.Errorf("a bad id: %v", err)
	}
	w.worker(projection.Config{}).wrote("behind", 1)
	if v, err = w.reader.View(ctx, "behind", now); err != nil || v.Last() != 1 {
		t.Errorf("projected: %v", err)
	}
	// Beyond the head, but not of the log: fresh folds on from the head.
	for _, k := range []int{1, 2} {
		w.append("behind", user(fmt.Sprint("later ", k)))
	}
	if v, err = w.reader.View(ctx, "behind", projection.Want{MinSeq: 3, Fresh: true}); err != nil || v.Last() != 3 || len(texts(t, v)) != 4 {
		t.Errorf("fresh on top of a head: %v", err)
	}
}

// Whoever waits for a seq is woken when its head is written here, is told after the time that
// it is not, and goes when the caller goes.
func TestWaitingForASeq(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	k := w.worker(projection.Config{})
	k.wrote("s", w.append("s", user("0")))
	held, release := make(chan struct{}, 100), make(chan struct{})
	k.tap.set(func(op, bucket, key string) error {
		if op == "update" && bucket == snapshot.Bucket && key == "s" {
			held <- struct{}{}
			<-release
		}
		return nil
	})
	w.append("s", user("1"))
	journaltest.Await(t, "the write of the head", held)

	_, err := w.reader.View(ctx, "s", projection.Want{MinSeq: 1, Timeout: 30 * time.Millisecond})
	var e *events.Error
	if !errors.As(err, &e) || e.Code != events.CodeNotProjected || seqOf(e.ExpectedSeq) != 1 || seqOf(e.ActualSeq) != 0 {
		t.Errorf("when the time is over: %v", err)
	}
	gone, cancel := context.WithCancelCause(ctx)
	cause := errors.New("the caller went away")
	cancel(cause)
	if _, err := w.reader.View(gone, "s", projection.Want{MinSeq: 1, Timeout: time.Hour}); err == nil {
		t.Errorf("a caller that went away got a view")
	}

	type answer struct {
		v   *projection.View
		err error
	}
	answers := make(chan answer, 8)
	for range cap(answers) {
		go func() {
			v, err := w.reader.View(ctx, "s", projection.Want{MinSeq: 1, Timeout: time.Hour})
			answers <- answer{v, err}
		}()
	}
	close(release)
	for range cap(answers) {
		a := journaltest.Await(t, "a reader to wake", answers)
		if a.err != nil || a.v.Last() < 1 {
			t.Errorf("a reader woke with %v", a.err)
		}
	}
	// Another process writes: found by looking.
	k.stop()
	other := w.worker(projection.Config{}, w.journal(nil))
	seq := w.append("s", user("2"))
	if v, err := w.reader.View(ctx, "s", projection.Want{MinSeq: seq, Timeout: time.Hour}); err != nil || v.Last() != seq {
		t.Errorf("what another process projected: %v", err)
	}
	other.stop()
}

// A page that goes away between the reads of the head and of the page makes the reader start
// over.
func TestReaderStartsOverWhenAPageGoes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	k := w.worker(projection.Config{Grace: time.Millisecond})
	k.wrote("s", w.fill("s", 4, 40<<10))
	taps := &tap{JetStream: w.js}
	buckets, err := projection.OpenBuckets(journaltest.Context(t), taps, 1)
	if err != nil {
		t.Fatal(err)
	}
	heads, moved := 0, false
	taps.set(func(_, _, key string) error {
		if isHead(key) {
			heads++
		}
		return nil
	})
	buckets.Snapshots.OnRead(func(keys []string) {
		if slices.Contains(keys, "s.1") && !moved {
			moved = true
			k.wrote("s", w.append("s", replace([]events.Seq{1, 2}, "summary")))
			journaltest.Eventually(t, "the page to go", func() bool {
				_, err := w.buckets.Snapshots.KV().Get(journaltest.Context(t), "s.1")
				return err != nil
			})
		}
	})
	v, err := projection.NewReader(w.log, w.headers, buckets, projection.NewHeads()).View(journaltest.Context(t), "s", now)
	if err != nil {
		t.Fatal(err)
	}
	if got := v.Surface.Seqs(); !slices.Equal(got, []events.Seq{0, 4, 3}) || heads < 2 || texts(t, v)[1] != "summary" {
		t.Errorf("the surface is %v after %d reads of keys without a dot", got, heads)
	}
}

func TestEventsAreGivenInPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	w.append("s", user("0"), `{"type":"goal/change","data":1}`, user("2"))
	w.append("s", user("3"))
	w.append("s", user("4"), user("5"))
	w.store("s", func(seq events.Seq) string { return line("x/unknown", seq, "", "1") })
	for name, c := range map[string]struct {
		rg   projection.Range
		want []events.Seq
		next events.Seq
	}{
		"all":                  {projection.Range{From: 0, To: events.MaxSeq}, []events.Seq{0, 1, 2, 3, 4, 5, 6}, events.NoSeq},
		"a part":               {projection.Range{From: 2, To: 4}, []events.Seq{2, 3, 4}, events.NoSeq},
		"one type":             {projection.Range{From: 0, To: events.MaxSeq, Types: []string{"goal/change"}}, []events.Seq{1}, events.NoSeq},
		"what nobody knows":    {projection.Range{From: 6, To: events.MaxSeq}, []events.Seq{6}, events.NoSeq},
		"two":                  {projection.Range{From: 1, To: events.MaxSeq, Limit: 2}, []events.Seq{1, 2}, 3},
		"exactly the rest":     {projection.Range{From: 5, To: events.MaxSeq, Limit: 2}, []events.Seq{5, 6}, events.NoSeq},
		"at least one":         {projection.Range{From: 3, To: events.MaxSeq, MaxBytes: 1}, []events.Seq{3}, 4},
		"beyond the end":       {projection.Range{From: 7, To: events.MaxSeq}, nil, events.NoSeq},
		"the wrong way around": {projection.Range{From: 4, To: 2}, nil, events.NoSeq},
	} {
		var got []events.Seq
		next, err := w.reader.Events(ctx, "s", c.rg, func(e *events.Event, cm *events.Commit) error {
			if e.Seq < cm.First || e.Seq > cm.Last {
				t.Errorf("%s: event %d in commit %d..%d", name, e.Seq, cm.First, cm.Last)
			}
			got = append(got, e.Seq)
			return nil
		})
		if err != nil || !slices.Equal(got, c.want) || next != c.next {
			t.Errorf("%s: %v, next %d, %v; want %v, next %d", name, got, next, err, c.want, c.next)
		}
	}
	boom := errors.New("boom")
	if _, err := w.reader.Events(ctx, "s", projection.Range{To: 9}, func(*events.Event, *events.Commit) error { return boom }); !errors.Is(err, boom) {
		t.Errorf("the caller's error became %v", err)
	}
	if _, err := w.reader.Events(ctx, "nowhere", projection.Range{To: 9}, nil); !errors.Is(err, events.ErrSessionNotFound) {
		t.Errorf("a session that is not there: %v", err)
	}
	var file bytes.Buffer
	if err := w.reader.Export(ctx, "s", &file); err != nil || bytes.Count(file.Bytes(), []byte("\n")) != 8 {
		t.Errorf("the export has %d lines, %v", bytes.Count(file.Bytes(), []byte("\n")), err)
	}
}

func TestSessionsAreListedInPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	for _, id := range []string{"b", "a", "ü", "c d"} {
		header := ""
		if id != "a" {
			header = `{"parentSession":"a"}`
		}
		if _, _, err := w.Create(ctx, id, []byte(header)); err != nil {
			t.Fatal(err)
		}
	}
	fleet := projection.NewFleet(w.reader, projection.FleetConfig{})
	list := func(parent string) (out []string) {
		for cursor := ""; ; {
			l, err := fleet.List(ctx, projection.FleetFilter{Parent: parent}, cursor, 2)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range l.Rows {
				out = append(out, r.Session)
			}
			if cursor = l.Cursor; cursor == "" {
				return out
			}
		}
	}
	if got := list(""); !slices.Equal(got, []string{"a", "b", "c d", "ü"}) {
		t.Errorf("all: %q", got)
	}
	if got := list("a"); !slices.Equal(got, []string{"b", "c d", "ü"}) {
		t.Errorf("children of a: %q", got)
	}
	if got := list("b"); len(got) != 0 {
		t.Errorf("children of b: %q", got)
	}
}
