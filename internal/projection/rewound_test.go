package projection_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
)

// A power cut takes events that watchers were told of, and their seqs are given to others: a
// watch ends with the reason, and does not go on as if nothing had been.
func TestWatchOfALogThatLostItsEndEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	const id = "cut"
	k := w.worker(projection.Config{})
	k.wrote(id, w.fill(id, 3, 10))
	k.stop()
	w.srv.Down()
	restore := w.srv.SaveStream(w.log.Config().Stream)
	w.srv.Up()
	k = w.worker(projection.Config{})
	k.wrote(id, w.fill(id, 4, 10))
	hs, _ := w.hubs()
	watch := w.watch(hs, id, 2)
	defer watch.Close()
	b := rebuild(nil, 2)
	if err := b.until(ctx, watch, func() bool { return b.at == 6 }); err != nil {
		t.Fatal(err)
	}
	k.stop()
	w.srv.Down()
	restore()
	w.srv.Up()
	w.worker(projection.Config{})
	w.restartAppender()
	for n := range 4 { // the same seqs, at the same stream sequences
		w.append(id, user(fmt.Sprint("other ", n)))
	}
	if ds, err := watch.Next(ctx); !errors.Is(err, projection.ErrRewound) {
		t.Fatalf("%v, %v", ds, err)
	}
	// The next watch is of the new log.
	again := w.watch(hs, id, 2)
	defer again.Close()
	b = rebuild(nil, 2)
	if err := b.until(ctx, again, func() bool { return b.at == 6 }); err != nil {
		t.Fatal(err)
	}
}

// A watch from beyond the log's end says so: the log may have lost what its caller was told.
func TestWatchFromBeyondTheLogsEnd(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	const id = "short"
	k := w.worker(projection.Config{})
	k.wrote(id, w.fill(id, 3, 10))
	srv := w.serve(k)
	hs, _ := w.hubs()
	at := w.watch(hs, id, 2) // the very end; its hub is the next one's, too
	defer at.Close()
	beyond := w.watch(hs, id, 3)
	defer beyond.Close()
	if ds, err := beyond.Next(ctx); !errors.Is(err, projection.ErrRewound) || !strings.Contains(err.Error(), "behind seq 3, and the log ends with seq 2") {
		t.Errorf("%v, %v", ds, err)
	}
	if got := srv.body("GET", "/v1/sessions/"+id+"/watch?from=3", 200); !strings.Contains(got, "event: end\n") || !strings.Contains(got, `"code":"log-rewound"`) || strings.Contains(got, "event: delta") {
		t.Errorf("the answer is %s", got)
	}
	w.append(id, user("3"))
	b := rebuild(nil, 2)
	if err := b.until(ctx, at, func() bool { return b.at == 3 }); err != nil {
		t.Error(err)
	}
}

// A connection that was lost and a snapshot that was mended are no reason to end a watch.
func TestWatchSurvivesReconnectAndMending(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	const id = "mended"
	k := w.worker(projection.Config{})
	k.wrote(id, w.fill(id, 3, 10))
	hs, _ := w.hubs()
	watch := w.watch(hs, id, 2)
	defer watch.Close()
	k.stop()
	w.srv.Restart()
	w.putHead(id, "{}")
	w.restartAppender()
	k = w.worker(projection.Config{})
	k.wrote(id, w.append(id, user("3")))
	b := rebuild(nil, 2)
	if err := b.until(ctx, watch, func() bool { return b.at == 3 }); err != nil {
		t.Fatal(err)
	}
	w.append(id, user("4"))
	if err := b.until(ctx, watch, func() bool { return b.at == 4 }); err != nil {
		t.Fatal(err)
	}
}

func isNotFound(err error) bool { return errors.Is(err, &events.Error{Code: events.CodeNotFound}) }

func TestSkippedSessionAlertsNobodyUntilItIsRetried(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	k := w.worker(projection.Config{})
	srv := w.serve(k)
	if _, err := w.reader.Skip(ctx, sick, "me", "why"); !isNotFound(err) {
		t.Errorf("a session that is not in quarantine: %v", err)
	}
	w.append(sick, user("0"))
	bad := w.raw(sick, nil, "hello")
	k.record()
	contains := func(what, got string, parts ...string) {
		t.Helper()
		for _, p := range parts {
			if !strings.Contains(got, p) {
				t.Errorf("%s: %s, expected %s", what, got, p)
			}
		}
	}
	contains("metrics", srv.body("GET", "/metrics", 200), "palimpsest_projector_quarantined_sessions 1\n", "palimpsest_projector_skipped_sessions 0\n")
	for body, part := range map[string]string{`{"by":"me"}`: "reason", `{"by":"","reason":"x"}`: "by", `{"by":"a\nb","reason":"x"}`: "printable", `{"why":1}`: "why", `{"by":1,"reason":"x"}`: "by"} {
		contains(body, srv.send("/v1/sessions/"+sick+"/skip", body, 400), part)
	}
	contains("skip", srv.send("/v1/sessions/"+sick+"/skip", `{"by":"ops","reason":"an old test session"}`, 200), `"skipped":{"by":"ops","reason":"an old test session","time":`)
	contains("metrics", srv.body("GET", "/metrics", 200), "palimpsest_projector_quarantined_sessions 0\n", "palimpsest_projector_skipped_sessions 1\n")
	contains("status", srv.body("GET", "/v1/status", 200), `"quarantined":[],"skipped":[{"session":"sick"`)
	contains("messages", srv.body("GET", "/v1/sessions/"+sick+"/messages", 200), `"seq":0,`, `"quarantine":{`, `"by":"ops"`)
	contains("a wait", srv.body("GET", "/v1/sessions/"+sick+"/messages?minSeq=5", 409), "ops left it so: an old test session")
	contains("sessions", srv.body("GET", "/v1/sessions?state=idle", 200), `"session":"sick"`)
	// A worker that starts takes no notice of the session, nor of the decision.
	k.stop()
	k = w.worker(projection.Config{})
	k.wrote("other", w.append("other", user("0")))
	if q := w.getRecord(sick); q == nil || q.Skipped == nil {
		t.Fatalf("record %+v", q)
	}
	if err := k.Retry(ctx, sick); err == nil {
		t.Fatal("the retry went well")
	}
	if q := w.getRecord(sick); q == nil || q.Skipped != nil {
		t.Errorf("behind a retry the record is %+v", q)
	}
	if _, err := w.reader.Skip(ctx, sick, "me", "again"); err != nil {
		t.Error(err)
	}
	w.remove(bad)
	if err := k.Retry(ctx, sick); err != nil {
		t.Error(err)
	}
	if q := w.getRecord(sick); q != nil {
		t.Errorf("the record is %+v", q)
	}
}
