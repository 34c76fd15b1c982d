package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// A store is backed up as docs/operations.md says, all of it is removed, and what was backed up is
// restored: every session is there to its last event, everything derived is folded anew, and appends
// go on where they were. RESTORE_EVENTS says how many events the store has.
func TestAStoreIsRestoredFromItsBackup(t *testing.T) {
	t.Parallel()
	const per, commits = 50, 5 // times perCommit events of a session, and commits
	events := 20000
	if v := os.Getenv("RESTORE_EVENTS"); v != "" {
		var err error
		if events, err = strconv.Atoi(v); err != nil || events < per*perCommit {
			t.Fatalf("RESTORE_EVENTS: expected a number of at least %d, found %q", per*perCommit, v)
		}
	}
	const limit = 30 * time.Minute
	ctx := harness.Within(t, limit)
	url := harness.StandaloneNATS(t)
	store := harness.OpenLog(t, url)
	sessions := events / (per * perCommit)
	events = sessions * per * perCommit
	name := func(i int) string { return fmt.Sprintf("kept-%06d", i) }

	appender := harness.Appender{NATS: url}.Start(t)
	client := appender.Client()
	began := time.Now()
	lap := func(what string) {
		t.Helper()
		t.Logf("%s after %.1f s", what, time.Since(began).Seconds())
		began = time.Now()
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make([]error, 8)
	for w := range errs {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < sessions && errs[w] == nil; i = int(next.Add(1)) - 1 {
				for commit := range commits {
					var lines []byte
					for round := range per / commits {
						lines = append(lines, fleetLines(i, commit*per/commits+round)...)
					}
					if errs[w] = appendLines(ctx, client, name(i), lines); errs[w] != nil {
						return
					}
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
	lap(fmt.Sprintf("%d sessions with %d events stored", sessions, events))
	projector := harness.Projector{NATS: url}.Start(t)
	harness.Until(t, limit, "all is projected", func() error { return caughtUp(ctx, projector.Client()) })
	lap("projected")
	before, err := projector.Client().Messages(ctx, name(sessions-1), harness.MinSeq(per*perCommit-1))
	if err != nil {
		t.Fatal(err)
	}

	dir := t.TempDir()
	streams := []string{"SESSIONS", "KV_HEADERS"} // the log first
	for _, s := range streams {
		bytes, err := store.Backup(ctx, s, filepath.Join(dir, s))
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("backup of %s: %.1f MiB", s, float64(bytes)/(1<<20))
	}
	lap("backed up")
	// What comes after the backup is lost with the store.
	mustAppend(t, appender.Client(), name(0), notes("late"))
	appender.Term(t)
	projector.Term(t)
	wiped, err := store.Wipe(ctx)
	if err != nil || len(wiped) < 6 || !strings.Contains(strings.Join(wiped, " "), "KV_SURFACES") {
		t.Fatalf("removed %v, %v; want the log and the buckets", wiped, err)
	}
	lap("programs stopped and store wiped")

	for _, s := range []string{"KV_HEADERS", "SESSIONS"} {
		n, err := store.Restore(ctx, s, filepath.Join(dir, s))
		if err != nil || n == 0 {
			t.Fatalf("restore of %s: %d messages, %v", s, n, err)
		}
	}
	lap("restored")
	verify := func(args ...string) {
		t.Helper()
		r := harness.RunFor(t, limit, "projector", append([]string{"verify", "--all", "--json", "--nats", url}, args...)...)
		var report struct{ Sessions, Events int64 }
		if err := json.Unmarshal([]byte(r.Stdout), &report); err != nil || r.Code != 0 || report.Events != int64(events) || report.Sessions != int64(sessions) {
			t.Fatalf("projector verify %v: exit code %d, %d sessions, %d events, %v, want %d and %d\n%.2000s", args, r.Code, report.Sessions, report.Events, err, sessions, events, r.Output())
		}
		lap(fmt.Sprint("verify --all ", args))
	}
	verify("--log-only")
	projector = harness.Projector{NATS: url}.Start(t)
	harness.Until(t, limit, "all is projected anew", func() error { return caughtUp(ctx, projector.Client()) })
	lap("projected anew")
	verify()
	after, err := projector.Client().Messages(ctx, name(sessions-1), harness.MinSeq(per*perCommit-1))
	if err != nil {
		t.Fatal(err)
	}
	if err := harness.SameMessages(after.Messages, before.Messages); err != nil {
		t.Errorf("messages of %s: %v", name(sessions-1), err)
	}
	appender = harness.Appender{NATS: url}.Start(t)
	if r := mustAppend(t, appender.Client(), name(0), notes("on"), harness.ExpectedSeq(per*perCommit)); r.FirstSeq != per*perCommit {
		t.Errorf("the next event got seq %d, want %d", r.FirstSeq, per*perCommit)
	}
	if _, err := projector.Client().Messages(context.WithoutCancel(ctx), name(0), harness.MinSeq(per*perCommit)); err != nil {
		t.Errorf("the event behind the restore: %v", err)
	}
}
