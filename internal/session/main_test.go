package session_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const sessionID = "s"

var vocabulary = events.DefaultVocabulary()

func parse(raw string, f events.Format, next events.Seq) (*events.Event, error) {
	return events.Parse([]byte(raw), events.Context{Format: f, Vocabulary: vocabulary, Next: next, Now: 1000})
}

// ruleOf is the rule that an error names, "" when there is no error.
func ruleOf(err error) events.Rule {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*events.Error](err); ok && e.Rule != "" {
		return e.Rule
	}
	return events.Rule("no rule: " + err.Error())
}

// offer parses, plans and applies one candidate.
func offer(s *session.State, raw string, mode lifecycle.Mode) error {
	e, err := parse(raw, s.Format, s.Next)
	if err != nil {
		return err
	}
	p, err := s.Plan(e, mode)
	if err != nil {
		return err
	}
	s.Apply(&p, 0)
	s.Digest = s.Digest.Next(e.Line)
	return nil
}

// commitOf is a stored commit with the given lines, of which the first has seq first.
func commitOf(first events.Seq, streamSeq uint64, before events.Digest, lines ...string) *events.Commit {
	c := &events.Commit{ID: fmt.Sprintf("c%d", first), Session: sessionID, Actor: events.NoActor, Format: events.Format3,
		First: first, Last: first + events.Seq(len(lines)) - 1, Digest: before, StreamSeq: streamSeq}
	for _, line := range lines {
		c.Digest = c.Digest.Next([]byte(line))
		c.Body = append(append(c.Body, line...), '\n')
	}
	return c
}

// view is everything but bodies that can be seen of a state, in comparable form.
type view struct {
	Next       events.Seq
	Time       int64
	StreamSeq  uint64
	LogBytes   int64
	Digest     events.Digest
	Chain      events.Digest
	Seqs       []events.Seq
	Generation int64
	Life       lifecycle.Snapshot
	Writer     *session.Writer
}

func viewOf(s *session.State) view {
	return view{s.Next, s.Time, s.StreamSeq, s.LogBytes, s.Digest, s.Chain, s.Surface.Seqs(), s.Surface.Generation(), s.Life.Snapshot(), s.Writer}
}

func sameView(t fataler, what string, s *session.State, want view) {
	t.Helper()
	if got := viewOf(s); !reflect.DeepEqual(got, want) {
		t.Fatalf("%s:\n got %+v\nwant %+v", what, got, want)
	}
}

// fataler is what *testing.T and *rapid.T have in common here.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

func joinSeqs(seqs []events.Seq) string {
	out := make([]string, len(seqs))
	for i, s := range seqs {
		out[i] = s.String()
	}
	return strings.Join(out, ",")
}
