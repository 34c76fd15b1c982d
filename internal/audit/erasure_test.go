package audit_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/erasure"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/snapshot"
)

// inFiles counts in which files of the store a text is, as it is or in compressed blocks.
func inFiles(t *testing.T, dir, text string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if bytes.Contains(b, []byte(text)) || bytes.Contains(plain(b), []byte(text)) {
			files = append(files, strings.TrimPrefix(path, dir))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// plain decodes a compressed block: "cmp", the algorithm, the length of the content as a varint,
// the content in S2, a checksum.
func plain(b []byte) []byte {
	if !bytes.HasPrefix(b, []byte("cmp")) || len(b) < 5 {
		return nil
	}
	_, n := binary.Uvarint(b[4:])
	out, _ := io.ReadAll(s2.NewReader(bytes.NewReader(b[4+max(n, 0):]))) // ends at the checksum, with an error
	return out
}

// A session that was compacted, forked, exported and attested is erased: its text is in no file of
// the store, late appends and a re-creation are refused, verify is content and tells of it.
func TestErasedSessionIsInNoFile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	const marker = "MARKER-7c1e93"
	if _, _, err := w.Create(ctx, "victim", []byte(`{"version":3,"cwd":"/home/`+marker+`"}`)); err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		w.append("victim", user(marker+strings.Repeat("x", i*200)), user("more "+marker))
		w.append("bystander", user("innocent "+strings.Repeat("y", i*100)))
	}
	w.append("victim", replace([]events.Seq{2, 3, 4, 5, 6, 7}, "summary of "+marker))
	if _, err := w.Fork(ctx, appender.ForkRequest{Parent: "victim", ID: "child"}); err != nil {
		t.Fatal(err)
	}
	w.append("child", user("the child's own"))
	at := w.attester(t)
	w.round(t, at, 3)
	w.archive(t, "victim")
	w.projected("victim")
	w.projected("child")
	w.projected("bystander")
	dir := filepath.Dir(filepath.Dir(w.srv.StreamDir("SESSIONS"))) // of the account
	if got := inFiles(t, dir, marker); len(got) < 3 {
		t.Fatalf("before: the marker is in %v", got)
	}
	e, err := erasure.New(ctx, w.log, w.headers)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []erasure.Request{{Session: "victim", By: "ann"}, {Session: "victim", Reason: "asked for"}} {
		if _, err := e.Erase(ctx, r); !errors.Is(err, &events.Error{Code: events.CodeBadRequest}) {
			t.Errorf("without reason or name: %v", err)
		}
	}
	if _, err := e.Erase(ctx, erasure.Request{Session: "nowhere", Reason: "r", By: "ann"}); !errors.Is(err, events.ErrSessionNotFound) {
		t.Errorf("a session that is not there: %v", err)
	}
	before := w.dumb("victim")
	r, err := e.Erase(ctx, erasure.Request{Session: "victim", Reason: "asked for", By: "ann"})
	if err != nil || len(r.Children) != 1 || r.Children[0] != "child" || r.Messages != 41 || r.LastSeq != events.Seq(len(before.lines)-1) || r.Keys < 2 {
		t.Fatalf("%v, %+v", err, r)
	}
	// The appender still has the session in memory.
	if _, err := w.Append(ctx, appender.Request{Session: "victim", Events: [][]byte{[]byte(user("late"))}}); !errors.Is(err, events.ErrErased) {
		t.Errorf("a late append: %v", err)
	}
	if _, _, err := w.Create(ctx, "victim", nil); !errors.Is(err, events.ErrErased) {
		t.Errorf("a re-creation: %v", err)
	}
	if _, err := w.Fork(ctx, appender.ForkRequest{Parent: "victim", ID: "late"}); !errors.Is(err, events.ErrErased) {
		t.Errorf("a late fork: %v", err)
	}
	if _, err := w.Explain(ctx, "victim", 0, 0); !errors.Is(err, events.ErrErased) {
		t.Errorf("an explanation: %v", err)
	}
	o := audit.Options{Wait: 20 * time.Second, Trusted: []string{at.PublicKey()}}
	check := func(when string, erased int) {
		t.Helper()
		rep := w.all(o)
		if !rep.OK() || len(rep.Erased) != erased || rep.Erased[len(rep.Erased)-1].Session != "victim" || rep.Erased[len(rep.Erased)-1].Reason != "asked for" || rep.Erased[len(rep.Erased)-1].Digest != r.Digest {
			t.Errorf("%s: erased %v, findings %v", when, rep.Erased, rep.Findings)
		}
	}
	check("after the erasure", 1)
	if f, err := w.Fleet(ctx); err != nil || len(f.Sessions) != 2 {
		t.Errorf("usage: %v, %+v", err, f)
	}
	again, err := e.Erase(ctx, erasure.Request{Session: "victim", Reason: "once more", By: "bob", WithForks: true})
	if err != nil || again.Reason != "asked for" || again.Messages != 0 || len(again.Forks) != 1 || again.Forks[0].Reason != "once more" {
		t.Errorf("erased again, with its fork: %v, %+v", err, again)
	}
	check("with the fork", 2)
	if got := inFiles(t, filepath.Join(dir, "streams", "SESSIONS"), marker); len(got) > 0 {
		t.Errorf("the log's files still hold it: %v", got)
	}
	t.Logf("before finishing the marker is in %v", inFiles(t, dir, marker))
	if _, err := e.Finish(ctx); err != nil {
		t.Fatal(err)
	}
	check("after finishing", 2)
	w.append("bystander", user("life goes on"))
	w.projected("bystander")
	check("after more appends", 2)
	w.stop()
	w.srv.Down() // what is in memory alone is written
	if got := inFiles(t, dir, marker); len(got) > 0 {
		t.Errorf("after finishing the marker is in %v", got)
	}
	if got := inFiles(t, dir, "innocent"); len(got) == 0 {
		t.Error("nothing is left of the others, or it was not looked for well")
	}
	w.srv.Up()
	check("after a restart", 2)
}

// The tombstone of a log that somebody damaged tells of what is good of it: of the last commit before
// the first message that is none, and of an empty log where there is none.
func TestTombstoneOfADamagedLogTellsOfWhatIsGood(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	e, err := erasure.New(ctx, w.log, w.headers)
	if err != nil {
		t.Fatal(err)
	}
	garbage := func(session string) {
		t.Helper()
		if _, err := w.log.JetStream().Publish(ctx, w.log.Subject(session), []byte("no commit")); err != nil {
			t.Fatal(err)
		}
	}
	for session, damage := range map[string]func(){
		"at the end": func() {
			w.append("at the end", user("0"), user("1"))
			w.append("at the end", user("2"))
			garbage("at the end")
		},
		"nothing but damage": func() {
			if _, _, err := w.Create(ctx, "nothing but damage", nil); err != nil {
				t.Fatal(err)
			}
			garbage("nothing but damage")
			garbage("nothing but damage")
		},
		"neither header nor commit": func() { garbage("neither header nor commit") },
	} {
		damage()
		want := events.Tombstone{LastSeq: events.NoSeq, Digest: events.SeedDigest(session).String()}
		if h, err := w.headers.Get(ctx, session); err == nil {
			want.Chain = events.SeedChain(session, h.Raw).String()
		}
		messages := 0
		if err := w.log.Each(ctx, w.log.Config().Stream, w.log.Subject(session), func(m jetstream.Msg) error {
			messages++
			if c, err := events.ParseCommit(m.Headers(), m.Data(), 0); err == nil {
				want.LastSeq, want.Digest, want.Chain = c.Last, c.Digest.String(), c.Chain.String()
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		r, err := e.Erase(ctx, erasure.Request{Session: session, Reason: "damaged", By: "ann"})
		if err != nil {
			t.Errorf("%s: %v", session, err)
			continue
		}
		if r.LastSeq != want.LastSeq || r.Digest != want.Digest || r.Chain != want.Chain || r.Messages != messages {
			t.Errorf("%s: the tombstone says %d %s %s, want %d %s %s; %d messages, want %d", session, r.LastSeq, r.Digest, r.Chain, want.LastSeq, want.Digest, want.Chain, r.Messages, messages)
		}
		if session == "at the end" && r.LastSeq != 2 {
			t.Errorf("%s: last seq %d", session, r.LastSeq)
		}
	}
	if rep := w.all(audit.Options{Wait: 20 * time.Second}); !rep.OK() || len(rep.Erased) != 3 {
		t.Errorf("erased %v, findings %v", rep.Erased, rep.Findings)
	}
}

// Finishing moves nothing while something is left of a session that was erased, and names the session:
// one whose erasure was cut off, one that has no more than its tombstone, one that a projector wrote
// behind. What is left would be in the new files, and nobody would look again.
func TestFinishRefusesWhileAnErasureIsNotComplete(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	for _, id := range []string{"cut-off", "buried", "written-behind", "whole", "bystander"} {
		for range 3 {
			w.append(id, user("a text of "+id))
		}
		w.projected(id)
	}
	w.stop()
	e, err := erasure.New(ctx, w.log, w.headers)
	if err != nil {
		t.Fatal(err)
	}
	erase := func(ctx context.Context, id string, progress func(string, int, int)) error {
		_, err := e.Erase(ctx, erasure.Request{Session: id, Reason: "asked for", By: "ann", Progress: progress})
		return err
	}
	var heard []int
	if err := erase(ctx, "whole", func(_ string, done, total int) { heard = append(heard, done, total) }); err != nil || !slices.Equal(heard, []int{0, 3, 1, 3, 2, 3, 3, 3}) {
		t.Fatalf("%v, progress %v", err, heard)
	}
	w.put(snapshot.HeadKey("whole"), "{}")
	w.purge(snapshot.HeadKey("whole")) // as a projector does that sees the tombstone: a marker stays
	cut, cancel := context.WithCancel(ctx)
	defer cancel()
	err = erase(cut, "cut-off", func(_ string, done, _ int) {
		if done == 1 {
			cancel()
		}
	})
	if err == nil {
		t.Fatal("an erasure that was cut off is no error")
	}
	last, err := w.log.LeaderLast(ctx, "buried")
	if err != nil {
		t.Fatal(err)
	}
	m, err := (&events.Tombstone{V: 1, ID: "by-hand", Session: "buried", By: "ann", Reason: "asked for", Time: events.FormatTime(time.Now()),
		LastSeq: last.Last, Digest: last.Digest.String(), Chain: last.Chain.String()}).Message()
	if err != nil {
		t.Fatal(err)
	}
	m.Subject = w.log.Subject("buried")
	if _, err := w.js.PublishMsg(ctx, m); err != nil {
		t.Fatal(err)
	}
	if err := erase(ctx, "written-behind", nil); err != nil {
		t.Fatal(err)
	}
	w.put(snapshot.HeadKey("written-behind"), "{}")

	end := func() uint64 {
		s, err := w.js.Stream(ctx, "KV_"+snapshot.Bucket)
		if err != nil {
			t.Fatal(err)
		}
		return s.CachedInfo().State.LastSeq
	}
	before := end()
	moved, err := e.Finish(ctx)
	if !errors.Is(err, &events.Error{Code: events.CodeSessionPending}) || moved != 0 || end() != before {
		t.Fatalf("%v; %d keys moved, the bucket went from %d to %d", err, moved, before, end())
	}
	for text, want := range map[string]bool{
		"cut-off: 2 messages of its log": true, "buried: 3 messages of its log, its header, no record": true, "written-behind: 1 keys": true, "appender erase": true,
		"whole": false, "bystander": false,
	} {
		if strings.Contains(err.Error(), text) != want {
			t.Errorf("%q in the error: %t, want %t: %v", text, !want, want, err)
		}
	}
	for _, id := range []string{"cut-off", "buried", "written-behind"} {
		if err := erase(ctx, id, nil); err != nil {
			t.Fatal(err)
		}
	}
	if moved, err := e.Finish(ctx); err != nil || moved == 0 {
		t.Errorf("when all is erased: %v, %d keys moved", err, moved)
	}
	if rep := w.all(audit.Options{Wait: 20 * time.Second}); !rep.OK() || len(rep.Erased) != 4 {
		t.Errorf("erased %v, findings %v", rep.Erased, rep.Findings)
	}
}

// Sessions that are each other's children, by headers or by an index that a cut-off creation left, are
// erased once each.
func TestErasureOfForksEndsWhereParentsGoInACircle(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	for id, parent := range map[string]string{"a": "b", "b": "a", "c": "b"} {
		if _, _, err := w.Create(ctx, id, []byte(`{"parentSession":"`+parent+`"}`)); err != nil {
			t.Fatal(err)
		}
		w.append(id, user("x"))
	}
	kv, err := w.js.KeyValue(ctx, journal.HeadersBucket)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"children.a.c", "children.c.a"} {
		if _, err := kv.Put(ctx, key, nil); err != nil {
			t.Fatal(err)
		}
	}
	e, err := erasure.New(ctx, w.log, w.headers)
	if err != nil {
		t.Fatal(err)
	}
	r, err := e.Erase(ctx, erasure.Request{Session: "a", Reason: "asked for", By: "ann", WithForks: true})
	if err != nil {
		t.Fatal(err)
	}
	var erased []string
	var walk func(*erasure.Receipt)
	walk = func(r *erasure.Receipt) {
		erased = append(erased, r.Session)
		for _, f := range r.Forks {
			walk(f)
		}
	}
	walk(r)
	if slices.Sort(erased); !slices.Equal(erased, []string{"a", "b", "c"}) {
		t.Errorf("erased %v", erased)
	}
}

// TestVerifyBesideErasuresFindsNothing: what goes away while it is looked at is no finding, and a page that is
// left of an erased session is one.
func TestVerifyBesideErasuresFindsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	ids := []string{"a", "b", "c", "d", "e", "f"}
	for _, id := range ids {
		for range 20 {
			w.append(id, user("a text of "+id))
		}
		w.projected(id)
	}
	e, err := erasure.New(ctx, w.log, w.headers)
	if err != nil {
		t.Fatal(err)
	}
	erased := make(chan error, 1)
	go func() {
		for _, id := range ids {
			if _, err := e.Erase(ctx, erasure.Request{Session: id, Reason: "asked for", By: "ann"}); err != nil {
				erased <- err
				return
			}
		}
		erased <- nil
	}()
	auditor := audit.New(w.log, w.headers, w.buckets)
	for done := false; !done; {
		select {
		case err := <-erased:
			if err != nil {
				t.Fatal(err)
			}
			done = true
		default:
		}
		report, err := auditor.All(ctx, audit.Options{})
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range report.Findings {
			t.Errorf("beside erasures: %+v", f)
		}
	}
	key := snapshot.PageKey("c", 3)
	w.put(key, "{}")
	report, err := auditor.Session(ctx, "c", audit.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Findings) != 1 || report.Findings[0].Check != audit.CheckErasure || report.Findings[0].Key != key {
		t.Errorf("a page that is left: found %+v", report.Findings)
	}
}
