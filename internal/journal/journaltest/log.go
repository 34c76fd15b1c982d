package journaltest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
)

// Log is a session's log as the bare client reads it.
type Log struct {
	Commits []Commit
	Lines   []string // of all events
}

// Commit is one message of a log.
type Commit struct {
	ID, Actor, Digest, Chain string
	First, Last              int64
	StreamSeq                uint64
	Lines                    []string
}

// IDs returns the ids of the commits, in order.
func (l *Log) IDs() []string {
	ids := []string{}
	for _, c := range l.Commits {
		ids = append(ids, c.ID)
	}
	return ids
}

// Next is the seq that the next event gets.
func (l *Log) Next() events.Seq { return events.Seq(len(l.Lines)) }

// Count is how many lines contain all of the texts.
func (l *Log) Count(texts ...string) int {
	n := 0
	for _, line := range l.Lines {
		if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
			n++
		}
	}
	return n
}

// CheckLog reads a session's log from its subject and checks it as an auditor would who has
// nothing but the documentation: seqs without holes, no commit twice, the digest of every
// event and the chain over the commits, which starts from the bytes of the session's header.
func CheckLog(t testing.TB, nc *nats.Conn, stream, subject, session string, header []byte) *Log {
	t.Helper()
	log, err := ReadLog(t, nc, stream, subject, session, header)
	if err != nil {
		t.Fatalf("session %q: %v", session, err)
	}
	return log
}

// ReadLog is CheckLog for a test that expects something to be wrong.
func ReadLog(t testing.TB, nc *nats.Conn, stream, subject, session string, header []byte) (*Log, error) {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	ctx := Context(t)
	s, err := js.Stream(ctx, stream)
	if err != nil {
		t.Fatal(err)
	}
	headerSum := sha256.Sum256(header)
	digest := sha256.Sum256([]byte("palimpsest/1 " + session))
	chain := sha256.Sum256(slices.Concat([]byte("palimpsest/1 "+session+"\n"), headerSum[:]))
	log, seen := &Log{}, map[string]bool{}
	for at := uint64(1); ; {
		m, err := s.GetMsg(ctx, at, jetstream.WithGetMsgSubject(subject))
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			return log, nil
		}
		if err != nil {
			t.Fatal(err)
		}
		at = m.Sequence + 1
		c := Commit{StreamSeq: m.Sequence}
		bad := func(format string, args ...any) error {
			return fmt.Errorf("stream sequence %d: "+format, append([]any{m.Sequence}, args...)...)
		}
		attr := func(name string) string {
			v, derr := url.PathUnescape(m.Header.Get("ce-" + name))
			if derr != nil {
				err = derr
			}
			return v
		}
		c.ID, c.Actor, c.Digest, c.Chain = attr("id"), attr("actor"), attr("digest"), attr("chain")
		if _, serr := fmt.Sscan(attr("firstseq"), &c.First); serr != nil {
			return log, bad("firstseq: %v", serr)
		}
		if _, serr := fmt.Sscan(attr("lastseq"), &c.Last); serr != nil {
			return log, bad("lastseq: %v", serr)
		}
		switch {
		case err != nil:
			return log, bad("%v", err)
		case attr("subject") != session:
			return log, bad("a commit of session %q", attr("subject"))
		case c.ID == "" || seen[c.ID]:
			return log, bad("commit %q for the second time", c.ID)
		case c.First != int64(len(log.Lines)):
			return log, bad("expected firstseq %d, found %d", len(log.Lines), c.First)
		}
		seen[c.ID] = true
		for line := range bytes.Lines(m.Data) {
			line = bytes.TrimSuffix(line, []byte("\n"))
			var e struct{ Seq *int64 }
			if err := json.Unmarshal(line, &e); err != nil || e.Seq == nil || *e.Seq != int64(len(log.Lines)) {
				return log, bad("expected the event of seq %d, found %s (%v)", len(log.Lines), line, err)
			}
			digest = sha256.Sum256(slices.Concat(digest[:], line))
			c.Lines = append(c.Lines, string(line))
			log.Lines = append(log.Lines, string(line))
		}
		if c.Last != int64(len(log.Lines))-1 {
			return log, bad("expected lastseq %d, found %d", len(log.Lines)-1, c.Last)
		}
		if got := hex.EncodeToString(digest[:]); got != c.Digest {
			return log, bad("expected digest %s, found %s", got, c.Digest)
		}
		chain = sha256.Sum256(slices.Concat(chain[:], fmt.Appendf(nil, "%s\n%s\n%s\n%s\n%d\n%d\n", m.Header.Get("ce-id"), m.Header.Get("ce-actor"),
			m.Header.Get("ce-time"), m.Header.Get("ce-format"), c.First, c.Last), digest[:]))
		if got := hex.EncodeToString(chain[:]); got != c.Chain {
			return log, bad("expected chain %s, found %s", got, c.Chain)
		}
		log.Commits = append(log.Commits, c)
	}
}

// Writer makes commits of a session, one after another.
type Writer struct {
	session string

	// The session's end, as of the newest commit.
	Next          events.Seq
	Digest, Chain events.Digest
}

// NewWriter returns the writer of an empty session whose header has the given bytes.
func NewWriter(session string, header []byte) *Writer {
	return &Writer{session: session, Digest: events.SeedDigest(session), Chain: events.SeedChain(session, header)}
}

// Commit makes the next commit of n events, whose data is size bytes large. label makes its id,
// which the session must not have yet.
func (w *Writer) Commit(label string, n, size int) *events.Commit {
	lines := make([]string, n)
	for i := range lines {
		pad := strings.Repeat("x", max(0, size-len(`{"label":"","pad":""}`)-len(label)))
		lines[i] = fmt.Sprintf(`{"type":"goal/change","seq":%d,"time":%d,"data":{"label":"%s","pad":"%s"}}`, w.Next+events.Seq(i), 1000+int64(w.Next)+int64(i), label, pad)
	}
	return w.Lines(label, lines...)
}

// Lines makes the next commit of the given lines.
func (w *Writer) Lines(label string, lines ...string) *events.Commit {
	c := &events.Commit{ID: label, Session: w.session, Actor: events.NoActor, Time: "2026-01-01T00:00:00.000Z", Format: events.Format3,
		First: w.Next, Last: w.Next + events.Seq(len(lines)) - 1}
	for _, line := range lines {
		w.Digest = w.Digest.Next([]byte(line))
		c.Body = append(append(c.Body, line...), '\n')
	}
	c.Digest = w.Digest
	c.Chain = w.Chain.NextChain(c)
	w.Chain, w.Next = c.Chain, c.Last+1
	return c
}

// Fork returns a writer that goes on from the same end independently.
func (w *Writer) Fork() *Writer {
	c := *w
	return &c
}
