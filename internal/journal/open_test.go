package journal

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
)

// tryOpen opens a journal that may be refused.
func tryOpen(t testing.TB, s *journaltest.Server, cfg Config, v *events.Vocabulary) (*Journal, error) {
	t.Helper()
	nc := s.Conn(t)
	return Open(journaltest.Context(t), Conns{Publish: []*nats.Conn{nc}, Read: nc}, cfg, v)
}

func vocabulary(t testing.TB, add ...string) *events.Vocabulary {
	t.Helper()
	v, err := events.NewVocabulary(add...)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// mentions checks that an error names everything that its reader needs.
func mentions(t testing.TB, err error, what ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("got no error, want one that names %q", what)
		return
	}
	for _, w := range what {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("the error does not name %q: %v", w, err)
		}
	}
}

func streamConfig(t testing.TB, j *Journal) jetstream.StreamConfig {
	t.Helper()
	info, err := j.Info(journaltest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	return info.Config
}

func TestOpenMakesTheStreamAsDesigned(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, Config{})
	c := streamConfig(t, j)
	if !slices.Equal(c.Subjects, []string{"sessions.*.*"}) || c.Storage != jetstream.FileStorage || c.Discard != jetstream.DiscardNew ||
		c.Retention != jetstream.LimitsPolicy || !c.AllowDirect || c.MaxMsgSize != 8<<20 || c.Replicas != 1 || c.RePublish != nil ||
		c.MaxMsgs > 0 || c.MaxBytes > 0 || c.MaxAge != 0 || c.MaxMsgsPerSubject > 0 {
		t.Errorf("stream: %+v", c)
	}
	if c.Metadata[metaPartitions] != "32" || c.Metadata[metaHash] != events.DefaultVocabulary().Hash() ||
		!slices.Equal(strings.Fields(c.Metadata[metaVocabulary]), events.DefaultVocabulary().Types()) {
		t.Errorf("metadata: %v", c.Metadata)
	}
	// Under another name and prefix there is another log.
	other := open(t, s, Config{Stream: "OTHER", Prefix: "other", Partitions: 4})
	store(t, other, 0, journaltest.NewWriter("s", nil).Commit("a", 1, 60))
	checkIDs(t, j, s.Conn(t), "s")
	checkIDs(t, other, s.Conn(t), "s", "a")
}

func TestOpenRefusesAnotherPartitionCount(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	open(t, s, Config{Partitions: 48})
	_, err := tryOpen(t, s, Config{Partitions: 17}, vocabulary(t))
	mentions(t, err, "SESSIONS", "48", "17")
	if got := streamConfig(t, open(t, s, Config{Partitions: 48})).Metadata[metaPartitions]; got != "48" {
		t.Errorf("the stream has partition count %s now", got)
	}
}

func TestOpenRefusesAStreamOfSomebodyElse(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	if _, err := s.JetStream(t).CreateStream(journaltest.Context(t), jetstream.StreamConfig{Name: "SESSIONS", Subjects: []string{"x"}}); err != nil {
		t.Fatal(err)
	}
	_, err := tryOpen(t, s, Config{}, vocabulary(t))
	mentions(t, err, "SESSIONS", "32")
}

func TestOpenRefusesToKnowLessThanTheStream(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	more, less := vocabulary(t, "our/one", "our/two", "our/three"), vocabulary(t, "our/two")
	if _, err := tryOpen(t, s, Config{}, more); err != nil {
		t.Fatal(err)
	}
	_, err := tryOpen(t, s, Config{}, less)
	mentions(t, err, "our/one", "our/three", more.Hash(), less.Hash())
	if err != nil && strings.Contains(err.Error(), "our/two") {
		t.Errorf("the error names a type that is known: %v", err)
	}
	// Nor does it help to know others besides.
	_, err = tryOpen(t, s, Config{}, vocabulary(t, "our/four", "our/five", "our/six", "our/seven"))
	mentions(t, err, "our/one", "our/two", "our/three")
}

func TestOpenAddsTheTypesThatItAloneKnows(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	running := open(t, s, Config{})
	more := vocabulary(t, "our/one", "our/two")
	grown, err := tryOpen(t, s, Config{}, more)
	if err != nil {
		t.Fatal(err)
	}
	if c := streamConfig(t, grown); c.Metadata[metaHash] != more.Hash() || !slices.Equal(strings.Fields(c.Metadata[metaVocabulary]), more.Types()) || c.Metadata[metaPartitions] != "32" {
		t.Errorf("metadata: %v", c.Metadata)
	}

	// A running process takes them over when it looks, once.
	if missing := running.Vocabulary().Missing([]string{"our/one", "our/two"}); len(missing) != 2 {
		t.Errorf("known before: %v", missing)
	}
	for _, want := range []bool{true, false} {
		if got, err := running.RefreshVocabulary(journaltest.Context(t)); got != want || err != nil {
			t.Errorf("RefreshVocabulary = %t, %v, want %t", got, err, want)
		}
	}
	if running.Vocabulary().Hash() != more.Hash() {
		t.Errorf("refreshed to %s, want %s", running.Vocabulary().Hash(), more.Hash())
	}
}

func TestOpenNoticesAVocabularyThatWasChangedByHand(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j, err := tryOpen(t, s, Config{}, vocabulary(t, "our/one"))
	if err != nil {
		t.Fatal(err)
	}
	c := streamConfig(t, j)
	c.Metadata[metaVocabulary] = strings.Replace(c.Metadata[metaVocabulary], " our/one", "", 1)
	if _, err := s.JetStream(t).UpdateStream(journaltest.Context(t), c); err != nil {
		t.Fatal(err)
	}
	_, err = tryOpen(t, s, Config{}, vocabulary(t))
	mentions(t, err, vocabulary(t, "our/one").Hash(), vocabulary(t).Hash())
}

// TestOpenAtOnce: processes that start together all come up, on one stream.
func TestOpenAtOnce(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	var wg sync.WaitGroup
	var js [6]*Journal
	var errs [6]error
	for i := range js {
		nc := s.Conn(t)
		ctx := journaltest.Context(t)
		wg.Go(func() {
			if js[i], errs[i] = Open(ctx, Conns{Publish: []*nats.Conn{nc}, Read: nc}, Config{}, events.DefaultVocabulary()); errs[i] == nil {
				_, errs[i] = js[i].OpenHeaders(ctx)
			}
		})
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Errorf("process %d: %v", i, err)
		}
	}
}

// TestLimitIsThatOfTheStream: what the stream was created with counts, whatever this process
// would have created.
func TestLimitIsThatOfTheStream(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	open(t, s, Config{MaxMsgSize: 100_000})
	j := open(t, s, Config{MaxMsgSize: 500_000})
	if want := 100_000 - events.HeaderReserve; j.MaxCommit() != want {
		t.Errorf("MaxCommit is %d, want %d", j.MaxCommit(), want)
	}
	if own := open(t, s, Config{MaxMsgSize: 50_000}); own.MaxCommit() != 50_000-events.HeaderReserve {
		t.Errorf("a smaller limit of its own became %d", own.MaxCommit())
	}
	c := journaltest.NewWriter("s", nil).Commit("big", 1, 150_000)
	_, err := j.Publish(journaltest.Context(t), c, 0)
	if code(err) != events.CodeTooLarge {
		t.Fatalf("got %v", err)
	}
	mentions(t, err, fmt.Sprint(100_000-events.HeaderReserve))
}

// oddIDs are session ids that stand for what subjects and keys cannot hold.
var oddIDs = []string{
	"s", "a.b", "a b", "*", ">", "a.*.>", "$SYS", "…", "é", "日本語", "a/b\\c", "=41", "%41", "-_", `"quoted"`, "a=b", ". .", "...", "~!@#^&()+{}|:<>?;',",
	strings.Repeat("x", 200), strings.Repeat("ü", 100), strings.Repeat("😀", 50), strings.Repeat("=", 200),
}

func TestSubjectsOfOddIDs(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j, nc := open(t, s, quick), s.Conn(t)
	seen := map[string]string{}
	for i, id := range oddIDs {
		subject := j.Subject(id)
		parts := strings.Split(subject, ".")
		if len(parts) != 3 || strings.ContainsAny(subject, " *>\t") || seen[subject] != "" {
			t.Fatalf("id %q has subject %s", id, subject)
		}
		seen[subject] = id
		if back, err := j.SessionOfSubject(subject); back != id || err != nil {
			t.Errorf("subject %s is of session %q, %v; want %q", subject, back, err, id)
		}
		if n := j.Partition(id); n < 0 || n >= 32 {
			t.Errorf("id %q is in partition %d", id, n)
		}
		c := journaltest.NewWriter(id, nil).Commit(string(rune('a'+i)), 1, 60)
		store(t, j, 0, c)
		checkIDs(t, j, nc, id, c.ID)
		got, err := j.LeaderLast(journaltest.Context(t), id)
		if err != nil || got == nil || got.Session != id || got.ID != c.ID {
			t.Errorf("id %q: read back %+v, %v", id, got, err)
		}
	}
	commits, stray, err := j.Subjects(journaltest.Context(t))
	if err != nil || len(stray) != 0 || len(commits) != len(oddIDs) {
		t.Fatalf("Subjects = %v, %v, %v", commits, stray, err)
	}
	for _, id := range oddIDs {
		if commits[id] != 1 {
			t.Errorf("session %q has %d commits, want 1", id, commits[id])
		}
	}
}

func TestSubjectsThatAreNoSession(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, Config{})
	right := j.Subject("a.b")
	for _, subject := range []string{
		"", "sessions", "sessions.0", "sessions.99.s", "other" + strings.TrimPrefix(right, "sessions"),
		strings.Replace(right, "=2E", "=2e", 1), // the same id in another spelling
		strings.Replace(right, "=2E", "=2", 1), strings.Replace(right, "=2E", "=", 1), strings.Replace(right, "a=2Eb", "=61=2Eb", 1),
		strings.Replace(right, "a=2Eb", "=2E", 1), "sessions.0.=00", "sessions.0." + strings.Repeat("x", 201), right + ".x",
	} {
		if id, err := j.SessionOfSubject(subject); err == nil {
			t.Errorf("subject %q became session %q", subject, id)
		}
	}
	// Messages on such subjects are found, and named.
	nc := s.Conn(t)
	for _, subject := range []string{"sessions.99.s", "sessions.0.=2e"} {
		if _, err := nc.Request(subject, []byte("x"), 5*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	commits, stray, err := j.Subjects(journaltest.Context(t))
	slices.Sort(stray)
	if err != nil || len(commits) != 0 || !slices.Equal(stray, []string{"sessions.0.=2e", "sessions.99.s"}) {
		t.Errorf("Subjects = %v, %v, %v", commits, stray, err)
	}
}
