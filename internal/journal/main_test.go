package journal

import (
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	goleak.VerifyTestMain(m)
}

// quick is a configuration for tests in which something does not answer, and which a busy
// machine must not mislead.
var quick = Config{PublishTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second, RetryBudget: 50 * time.Second}

// open opens the journal of a server over connections of its own.
func open(t testing.TB, s *journaltest.Server, cfg Config) *Journal {
	t.Helper()
	return openAt(t, s.URL(), cfg, events.DefaultVocabulary())
}

func openAt(t testing.TB, url string, cfg Config, v *events.Vocabulary) *Journal {
	t.Helper()
	conns := Conns{Publish: []*nats.Conn{journaltest.Dial(t, url), journaltest.Dial(t, url)}, Read: journaltest.Dial(t, url)}
	j, err := Open(journaltest.Context(t), conns, cfg, v)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// store publishes commits of one writer, one after another, and returns the last stream sequence. On a
// machine that is slow enough an ack comes too late, and the next attempt finds the commit stored.
func store(t testing.TB, j *Journal, after uint64, commits ...*events.Commit) uint64 {
	t.Helper()
	for _, c := range commits {
		if _, err := j.Publish(journaltest.Context(t), c, after); err != nil {
			t.Fatalf("publish %s: %v", c.ID, err)
		}
		after = c.StreamSeq
	}
	return after
}

// checkIDs checks a session's log as a whole and that it holds exactly these commits.
func checkIDs(t testing.TB, j *Journal, nc *nats.Conn, session string, want ...string) *journaltest.Log {
	t.Helper()
	log := journaltest.CheckLog(t, nc, j.Config().Stream, j.Subject(session), session, nil)
	if got := log.IDs(); !slices.Equal(got, append([]string{}, want...)) {
		t.Fatalf("session %s holds commits %v, want %v", session, got, want)
	}
	return log
}

// asError is err as one of ours, an empty one when it is not.
func asError(err error) *events.Error {
	if e, ok := errors.AsType[*events.Error](err); ok {
		return e
	}
	return new(events.Error)
}

func code(err error) events.Code { return asError(err).Code }

// collect gathers what one of the reading functions calls back with.
func collect(into *[]*events.Commit) func(*events.Commit) error {
	return func(c *events.Commit) error {
		*into = append(*into, c)
		return nil
	}
}

func ids(commits []*events.Commit) []string {
	out := []string{}
	for _, c := range commits {
		out = append(out, c.ID)
	}
	return out
}
