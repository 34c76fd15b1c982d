package surface_test

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"palimpsest/internal/events"
	"palimpsest/internal/surface"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var vocabulary = events.DefaultVocabulary()

func parse(t testing.TB, raw string, next events.Seq) *events.Event {
	t.Helper()
	e, err := events.Parse([]byte(raw), events.Context{Format: events.Format3, Vocabulary: vocabulary, Next: next})
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// stored is the event as it is read from the log: its data is not checked.
func stored(t testing.TB, line string) *events.Event {
	t.Helper()
	e := new(events.Event)
	if err := events.ParseCanonical(e, []byte(line), events.Format3, vocabulary); err != nil {
		t.Fatal(err)
	}
	return e
}

const appended = `"append"`

func user(op string) string {
	return `{"type":"user/message","surfaceOp":` + op + `,"data":{"id":"u","role":"user","source":{"kind":"user"},"content":[]}}`
}

func result(op, text string) string {
	return `{"type":"tool/result","surfaceOp":` + op + `,"data":{"message":{"id":"r","role":"user","source":{"kind":"tool","callId":"c"},"content":[{"type":"tool-result","toolCallId":"c","content":[{"text":"` + text + `"}]}]}}}`
}

// replaced is the surfaceOp and the sources of a replacement of a range that holds cited.
func replaced(start, end events.Seq, cited ...events.Seq) string {
	sources := strings.ReplaceAll(fmt.Sprint(cited), " ", ",")
	return fmt.Sprintf(`{"op":"replace","startSeq":%d,"endSeq":%d},"sourceEventSeqs":%s`, start, end, sources)
}

// apply plans and applies an event.
func apply(t testing.TB, s *surface.State, e *events.Event) surface.Change {
	t.Helper()
	c, err := s.Plan(e)
	if err != nil {
		t.Fatal(err)
	}
	s.Apply(&c)
	return c
}

func TestReplaceAtBothEndsAndUndo(t *testing.T) {
	t.Parallel()
	for from := range events.Seq(10) {
		for to := from; to < 10; to++ {
			s := surface.New(events.Format3, surface.KeepFingerprints)
			for seq := range events.Seq(10) {
				apply(t, s, parse(t, user(appended), seq))
			}
			before := s.Seqs()
			cited := before[from : to+1]
			change := apply(t, s, parse(t, user(replaced(from, to, cited...)), 10))
			want := slices.Concat(before[:from], []events.Seq{10}, before[to+1:])
			if got := s.Seqs(); !slices.Equal(got, want) || s.Generation() != 1 {
				t.Fatalf("replace %d..%d: surface %v, want %v", from, to, got, want)
			}
			var shadowed []events.Seq
			for _, n := range change.Shadowed() {
				shadowed = append(shadowed, n.Seq)
			}
			if !slices.Equal(shadowed, cited) || change.Position != int(from) || change.Removed != len(cited) {
				t.Fatalf("replace %d..%d: shadowed %v at %d", from, to, shadowed, change.Position)
			}
			for i, seq := range want {
				if at, ok := s.Position(seq); !ok || at != i {
					t.Fatalf("replace %d..%d: position of %d is %d, %t", from, to, seq, at, ok)
				}
			}
			last := apply(t, s, parse(t, user(appended), 11))
			s.Undo(&last)
			s.Undo(&change)
			if got := s.Seqs(); !slices.Equal(got, before) || s.Generation() != 0 {
				t.Fatalf("undo of %d..%d: surface %v", from, to, got)
			}
		}
	}
}

func TestPlanAsksForWhatItMisses(t *testing.T) {
	t.Parallel()
	s := surface.Restore(events.Format3, surface.KeepFingerprints, 3, []surface.Node{{Seq: 0}, {Seq: 7}, {Seq: 4}, {Seq: 9}})
	missing := func(e *events.Event) int {
		t.Helper()
		_, err := s.Plan(e)
		m, ok := errors.AsType[*surface.MissingError](err)
		if !ok {
			return -1
		}
		return m.Position
	}
	if at := missing(parse(t, user(appended), 10)); at != -1 {
		t.Errorf("an append asks for position %d", at)
	}
	if at := missing(parse(t, user(replaced(7, 9, 4, 7, 9)), 10)); at != -1 {
		t.Errorf("a replacement away from the head asks for position %d", at)
	}
	covers := parse(t, user(replaced(0, 7, 0, 7)), 10)
	if at := missing(covers); at != 0 {
		t.Errorf("a replacement of the head asks for position %d", at)
	}
	s.Node(0).Kind = events.KindUser
	if _, err := s.Plan(covers); err != nil {
		t.Error(err)
	}
	prune := parse(t, result(replaced(4, 4, 4), "new"), 10)
	if at := missing(prune); at != 2 {
		t.Errorf("a prune asks for position %d", at)
	}
	s.Node(2).Kind = events.KindTool
	if at := missing(prune); at != 2 {
		t.Errorf("a prune without a fingerprint asks for position %d", at)
	}
	s.Node(2).Body = surface.NewBody(nil, parse(t, result(appended, "old"), 0).Fingerprint(events.Format3))
	apply(t, s, prune)
	if got := s.Seqs(); !slices.Equal(got, []events.Seq{0, 7, 10, 9}) || s.Generation() != 4 {
		t.Errorf("surface %v, generation %d", got, s.Generation())
	}
	if err := (&surface.MissingError{Position: 2}).Error(); !strings.Contains(err, "position 2") {
		t.Error(err)
	}
}

func TestUncheckedDataIsCheckedBeforeUse(t *testing.T) {
	t.Parallel()
	bad := `{"type":"tool/result","seq":0,"time":1,"surfaceOp":"append","data":{"message":1}}`
	deep := `{"type":"tool/result","seq":0,"time":1,"surfaceOp":"append","data":` + strings.Repeat("[", 4<<20) + `}`
	for _, line := range []string{bad, deep} {
		writer := surface.New(events.Format3, surface.KeepFingerprints)
		var e *events.Error
		if _, err := writer.Plan(stored(t, line)); !errors.As(err, &e) || e.Rule == "" || writer.Len() != 0 {
			t.Errorf("a fingerprint of %.80s: %v", line, err)
		}
		reader := surface.New(events.Format3, surface.KeepBodies)
		apply(t, reader, stored(t, line))
		if _, err := reader.Messages(); !errors.As(err, &e) || e.Rule == "" {
			t.Errorf("a message of %.80s: %v", line, err)
		}
		if _, err := reader.Node(0).Fingerprint(events.Format3); !errors.As(err, &e) {
			t.Errorf("a fingerprint of %.80s: %v", line, err)
		}
	}
}

func TestFrozenBodiesTellAMutatedEvent(t *testing.T) {
	t.Parallel()
	isMutated := func(err error) bool {
		e, ok := errors.AsType[*events.Error](err)
		return ok && e.Code == events.CodeInvariant && e.Rule == events.RuleEventMutated && *e.Seq == 0
	}
	// read is everything that folds or serves the node at position 0.
	read := func(s *surface.State) (errs []error) {
		_, messages := s.Messages()
		_, message := s.Node(0).Message(events.Format3)
		_, fingerprint := s.Node(0).Fingerprint(events.Format3)
		_, plan := s.Plan(parse(t, result(replaced(0, 0, 0), "new"), 1))
		return []error{messages, message, fingerprint, plan, s.Node(0).Body.Frozen()}
	}
	for _, readBefore := range []bool{false, true} {
		for _, keep := range []surface.Keep{surface.KeepFrozenBodies, surface.KeepBodies} {
			s := surface.New(events.Format3, keep)
			e := parse(t, result(appended, "old"), 0)
			apply(t, s, e)
			if readBefore {
				for _, err := range read(s) {
					if err != nil {
						t.Fatal(err)
					}
				}
			}
			copy(e.Line[bytes.Index(e.Line, []byte("old")):], "OLD")
			for i, err := range read(s) {
				if keep == surface.KeepFrozenBodies && !isMutated(err) {
					t.Errorf("read before %t, reader %d: %v, want event-mutated", readBefore, i, err)
				}
				if keep == surface.KeepBodies && err != nil {
					t.Errorf("without freeze, reader %d: %v", i, err)
				}
			}
		}
	}
}

func TestMessagesAreKeptTokenForToken(t *testing.T) {
	t.Parallel()
	s := surface.New(events.Format3, surface.KeepFrozenBodies)
	message := `{"id":"u","role":"user","source":{"kind":"user"},"content":["\ud800",1.10,1e999]}`
	apply(t, s, parse(t, `{"type":"user/message","surfaceOp":"append","data":`+message+`}`, 0))
	apply(t, s, parse(t, `{"type":"assistant/message","surfaceOp":"append","data":{"message":{"id":"a","role":"assistant","source":{"kind":"model","provider":"","model":""},"content":[]}}}`, 1))
	for range 2 {
		got, err := s.Messages()
		if err != nil || len(got) != 1 || string(got[0]) != message {
			t.Errorf("%q, %v", got, err)
		}
	}
	if n := s.Node(1); s.Len() != 2 || n.Kind != events.KindAssistant || int(n.Size) == 0 {
		t.Errorf("the node without a message is %+v", n)
	}
}
