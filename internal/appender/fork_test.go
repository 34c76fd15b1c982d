package appender_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/appender"
	"palimpsest/internal/demo"
	"palimpsest/internal/erasure"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/projection"
	"palimpsest/internal/sessionfile"
)

// recorded are the sessions that are forked at every boundary: with compactions and prunes,
// packed rows, one that is a fork itself, and a replaced system message of format 4.
var recorded = []string{
	"v0-goal-multi-turn-actions", "v3-preview-showcase", "v3-preview-architecture-review-forked-child",
	"v3-agent-instructions-mid-step-compaction", "v4-semantic-checkpoint-system-replace",
}

// family is a parent session and what is needed to look at its children.
type family struct {
	w      *world
	p      *process
	reader *projection.Reader
	parent string
	lines  []string // the parent's log
}

func newFamily(t testing.TB, w *world, p *process, parent string) *family {
	t.Helper()
	b, err := projection.OpenBuckets(journaltest.Context(t), p.log.JetStream(), 1)
	if err != nil {
		t.Fatal(err)
	}
	return &family{w, p, projection.NewReader(p.log, p.headers, b, projection.NewHeads()), parent, w.check(t, parent).Lines}
}

// importFile imports a session file under the name of the file.
func (p *process) importFile(t testing.TB, path string) {
	t.Helper()
	r, err := p.Import(journaltest.Context(t), path, sessionfile.Options{IDFrom: sessionfile.IDFromFilename})
	if err != nil {
		t.Fatalf("import of %s: %v", path, err)
	}
	if !r.OK() && r.Problems[0].Code == sessionfile.CodeFormat {
		t.Skip(r.Problems[0].Detail)
	}
	if !r.OK() {
		t.Fatalf("import of %s: %+v", path, r.Problems)
	}
}

func TestForkAtEveryBoundary(t *testing.T) {
	t.Parallel()
	dir := filepath.Join("..", "..", "..", "shared", "sessions")
	for _, name := range append([]string{demo.ID}, recorded...) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			path := filepath.Join(dir, name+".jsonl")
			if name == demo.ID {
				path = filepath.Join(t.TempDir(), name+".jsonl")
				if err := os.WriteFile(path, demo.Session(), 0o600); err != nil {
					t.Fatal(err)
				}
			} else if _, err := os.Stat(path); err != nil {
				t.Skipf("no recorded session: %v", err)
			}
			w := newWorld(t)
			p := w.start(t, appender.Config{})
			p.importFile(t, path)
			newFamily(t, w, p, name).forkEverywhere(t)
		})
	}
}

// forkEverywhere forks the parent at every seq.
func (f *family) forkEverywhere(t *testing.T) {
	t.Helper()
	legal, refused, open := 0, 0, openTurns(t, f.lines)
	for i := range f.lines {
		at := events.Seq(i)
		if !open[i] {
			legal++
			f.fork(t, at)
			continue
		}
		// All of them in short sessions, those beside a boundary in long ones.
		if len(f.lines) > 100 && i%(len(f.lines)/40) > 0 && (i == 0 || open[i-1]) && (i+1 == len(f.lines) || open[i+1]) {
			continue
		}
		refused++
		_, err := f.p.Fork(journaltest.Context(t), appender.ForkRequest{Parent: f.parent, ID: fmt.Sprintf("illegal at %d", at), At: &at})
		if e := asError(err); e.Code != events.CodeOpenTurn || e.Seq == nil || *e.Seq != at || e.Session != f.parent {
			t.Errorf("at %d, inside a turn: %v", at, err)
		}
	}
	logs, _, err := f.p.log.Subjects(journaltest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	for id := range logs {
		if strings.HasPrefix(id, "illegal") {
			t.Errorf("%s has a log", id)
		}
	}
	if n := len(f.children(t, f.parent)); n != legal {
		t.Errorf("%d children, want %d", n, legal)
	}
	t.Logf("%d events: %d forks, %d refused", len(f.lines), legal, refused)
	if legal == 0 || refused == 0 {
		t.Errorf("%d legal boundaries, %d illegal", legal, refused)
	}
}

// fork forks the parent at a seq, and its child at the ends of what that inherited.
func (f *family) fork(t *testing.T, at events.Seq) {
	t.Helper()
	ctx := journaltest.Context(t)
	child := fmt.Sprintf("%s at %d", f.parent, at)
	r := appender.ForkRequest{Parent: f.parent, ID: child, At: &at}
	got, err := f.p.Fork(ctx, r)
	if err != nil {
		t.Fatalf("at %d: %v", at, err)
	}
	if got.Session != child || got.Parent != f.parent || got.At != at || got.LastSeq != at+1 || !got.Created {
		t.Errorf("at %d: %+v", at, got)
	}
	f.inherits(t, child, at, f.parent)
	f.looksLike(t, child, at)
	if again, err := f.p.Fork(ctx, r); err != nil || again.Created || !bytes.Equal(again.Header, got.Header) {
		t.Errorf("at %d, again: %+v, %v", at, again, err)
	}
	// Of the fork, behind all and at the same place.
	for name, from := range map[string]events.Seq{"behind": at + 1, "same": at} {
		if name == "same" && at%4 > 0 {
			continue
		}
		grandchild := child + " " + name
		if _, err := f.p.Fork(ctx, appender.ForkRequest{Parent: child, ID: grandchild, At: &from}); err != nil {
			t.Fatalf("fork of the fork at %d: %v", from, err)
		}
		f.inherits(t, grandchild, from, child)
		f.looksLike(t, grandchild, at)
	}
}

// inherits checks a child's log and header.
func (f *family) inherits(t *testing.T, child string, at events.Seq, parent string) {
	t.Helper()
	log := newLedgerOfAll(f.w, f.p, child).check(t)
	of := f.lines
	if parent != f.parent {
		of = f.w.check(t, parent).Lines
	}
	switch {
	case log.Next() != at+2:
		t.Fatalf("%s ends at %d, want %d", child, log.Next(), at+2)
	case !slices.Equal(log.Lines[:at+1], of[:at+1]):
		t.Errorf("%s does not hold its parent's lines", child)
	case !strings.HasPrefix(log.Lines[at+1], fmt.Sprintf(`{"type":"session/end-seed","seq":%d,`, at+1)) || !strings.HasSuffix(log.Lines[at+1], `"data":{"inherited":true}}`):
		t.Errorf("%s: the inherited part ends with %s", child, log.Lines[at+1])
	}
	var header struct {
		ID, ParentSession string
		IsSeeded          bool
	}
	if err := json.Unmarshal(f.w.header(t, child), &header); err != nil || header.ID != child || header.ParentSession != parent || !header.IsSeeded {
		t.Errorf("%s: header %+v, %v", child, header, err)
	}
}

func (f *family) children(t *testing.T, parent string) []string {
	t.Helper()
	list, err := f.p.headers.Children(journaltest.Context(t), parent)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// looksLike compares the messages that are served of a child with those that the parent's log
// derived as of a seq, byte for byte.
func (f *family) looksLike(t *testing.T, child string, at events.Seq) {
	t.Helper()
	v, err := f.reader.View(journaltest.Context(t), child, projection.Want{MinSeq: events.NoSeq, Fresh: true})
	if err != nil {
		t.Fatalf("%s: %v", child, err)
	}
	got, err := v.Surface.Messages()
	if err != nil {
		t.Fatalf("%s: %v", child, err)
	}
	want := refold(t, f.lines[:at+1])
	if len(got) != len(want) {
		t.Fatalf("%s has %d messages, the parent had %d at %d", child, len(got), len(want), at)
	}
	for i := range want {
		if !bytes.Equal(got[i], want[i]) {
			t.Errorf("%s: message %d is\n%s\nthe parent's at %d was\n%s", child, i, got[i], at, want[i])
		}
	}
}

// newLedgerOfAll is a ledger of a session whose events all came by other ways than appends.
func newLedgerOfAll(w *world, p *process, session string) *ledger {
	l := newLedger(w, p, session)
	l.foreign = true
	return l
}

// openTurns says for each seq whether a turn is open behind it.
func openTurns(t testing.TB, lines []string) []bool {
	t.Helper()
	out, open := make([]bool, len(lines)), false
	for i, line := range lines {
		switch {
		case strings.HasPrefix(line, `{"type":"turn/start",`):
			open = true
		case strings.HasPrefix(line, `{"type":"turn/end",`):
			open = false
		}
		out[i] = open
	}
	return out
}

// refold derives messages from a log in the plainest way there is, without any of the product's
// code.
func refold(t testing.TB, lines []string) (messages [][]byte) {
	t.Helper()
	type event struct {
		Type      string
		Seq       int
		SurfaceOp json.RawMessage
		Data      json.RawMessage
	}
	var surface []event
	for _, line := range lines {
		var e event
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Fatal(err)
		}
		var op struct{ StartSeq, EndSeq int }
		switch {
		case e.SurfaceOp == nil:
		case string(e.SurfaceOp) == `"append"`:
			surface = append(surface, e)
		default:
			if err := json.Unmarshal(e.SurfaceOp, &op); err != nil {
				t.Fatal(err)
			}
			from := slices.IndexFunc(surface, func(n event) bool { return n.Seq == op.StartSeq })
			to := slices.IndexFunc(surface, func(n event) bool { return n.Seq == op.EndSeq })
			surface = slices.Replace(surface, from, to+1, e)
		}
	}
	for _, e := range surface {
		var data struct{ Message json.RawMessage }
		var message struct{ Content []json.RawMessage }
		if e.Type == "user/message" {
			messages = append(messages, e.Data)
			continue
		}
		err := json.Unmarshal(e.Data, &data)
		if err == nil {
			err = json.Unmarshal(data.Message, &message)
		}
		if err != nil {
			t.Fatal(err)
		}
		if e.Type == "tool/result" || len(message.Content) > 0 {
			messages = append(messages, data.Message)
		}
	}
	return messages
}

// longParent makes a parent that a fork needs several commits for.
func longParent(t testing.TB, p *process, id string) {
	t.Helper()
	for i := range 6 {
		lines := []string{turn("start", i), step("start", i, 1), user(fmt.Sprint("m", i)), assistant(fmt.Sprint("a", i), i, 1)}
		for k := range 120 {
			lines = append(lines, note(fmt.Sprintf("%d-%d", i, k)))
		}
		p.must(t, to(id, append(lines, step("end", i, 1), turn("end", i))...))
	}
}

// TestForkCutOffInTheMiddle: what a fork leaves behind that ended early is nowhere to be seen,
// and the same request goes on from there.
func TestForkCutOffInTheMiddle(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{Invariants: lifecycle.Enforce})
	longParent(t, p, "parent")
	f := newFamily(t, w, p, "parent")
	at := events.Seq(len(f.lines) - 1)
	const commits = 3 // of at most 256 events
	for k := range commits + 1 {
		t.Run(fmt.Sprintf("after-%d-commits", k), func(t *testing.T) {
			child := fmt.Sprintf("child-%d", k)
			r := appender.ForkRequest{Parent: "parent", ID: child, At: &at}
			cut := w.start(t, appender.Config{}, journal.Config{RetryBudget: 50 * time.Millisecond})
			ctx, leave := context.WithCancel(journaltest.Context(t))
			n := 0
			cut.log.Faults.BeforePublish = func(*events.Commit) error {
				if n++; n > k {
					return nats.ErrTimeout
				}
				return nil
			}
			cut.log.Faults.AfterPublish = func(_ *events.Commit, err error) error {
				if n == commits {
					leave() // between the last commit and the header
				}
				return err
			}
			if got, err := cut.Fork(ctx, r); err == nil {
				t.Fatalf("the fork was not cut off: %+v", got)
			}
			if n := p.commits(t, child); n != k || w.header(t, child) != nil {
				t.Fatalf("it left %d commits and the header %s", n, w.header(t, child))
			}
			f.isInvisible(t, child, k > 0)
			f.isTaken(t, r) // others have no way to get in between, not even before the first commit

			// Another appender is asked for the same.
			got, err := p.Fork(journaltest.Context(t), r)
			if err != nil || !got.Created || got.LastSeq != at+1 {
				t.Fatalf("the same request: %+v, %v", got, err)
			}
			f.inherits(t, child, at, "parent")
			f.looksLike(t, child, at)
			if !slices.Contains(f.children(t, "parent"), child) {
				t.Error("the child is not listed as one")
			}
			if log := w.check(t, child); len(log.Commits) != commits {
				t.Errorf("%d commits, want %d", len(log.Commits), commits)
			}
			if again, err := cut.Fork(journaltest.Context(t), r); err != nil || again.Created {
				t.Errorf("and again: %+v, %v", again, err)
			}
			if r := p.must(t, to(child, turn("start", 9))); r.FirstSeq != at+2 {
				t.Errorf("the child's own first event is at %d", r.FirstSeq)
			}
		})
	}
}

// isInvisible checks that nobody sees a child that is not complete.
func (f *family) isInvisible(t *testing.T, child string, begun bool) {
	t.Helper()
	ctx := journaltest.Context(t)
	f.p.refused(t, to(child, note("too early")), events.CodeSessionPending, "")
	if begun {
		f.p.project(t, child, events.Format3, -1) // projectors fold it, and its head serves nobody
	}
	if _, err := f.p.Status(ctx, child); asError(err).Code != events.CodeSessionNotFound {
		t.Errorf("status: %v", err)
	}
	if _, err := f.p.Repair(ctx, child, ""); asError(err).Code != events.CodeSessionNotFound {
		t.Errorf("repair: %v", err)
	}
	for _, fresh := range []bool{false, true} {
		if v, err := f.reader.View(ctx, child, projection.Want{MinSeq: events.NoSeq, Fresh: fresh}); asError(err).Code != events.CodeSessionNotFound {
			t.Errorf("served (fresh=%t): %+v, %v", fresh, v, err)
		}
	}
	for _, parent := range []string{"", f.parent} {
		list, err := projection.NewFleet(f.reader, projection.FleetConfig{}).List(ctx, projection.FleetFilter{Parent: parent}, "", 1000)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range list.Rows {
			if s.Session == child {
				t.Errorf("the child is listed (parent %q)", parent)
			}
		}
	}
}

// isTaken checks that only the request that began a child can go on with it.
func (f *family) isTaken(t *testing.T, r appender.ForkRequest) {
	t.Helper()
	ctx := journaltest.Context(t)
	before := f.p.commits(t, r.ID)
	elsewhere := events.Seq(0)
	for i, open := range openTurns(t, f.lines) {
		if !open {
			elsewhere = events.Seq(i)
			break
		}
	}
	for what, other := range map[string]appender.ForkRequest{
		"another seq":    {Parent: r.Parent, ID: r.ID, At: &elsewhere},
		"another header": {Parent: r.Parent, ID: r.ID, At: r.At, Header: []byte(`{"cwd":"/elsewhere"}`)},
	} {
		if got, err := f.p.Fork(ctx, other); asError(err).Code != events.CodeSessionExists {
			t.Errorf("%s: %+v, %v", what, got, err)
		}
	}
	if h, created, err := f.p.Create(ctx, r.ID, nil); asError(err).Code != events.CodeSessionPending {
		t.Errorf("create: %+v, %t, %v", h, created, err)
	}
	if f.w.header(t, r.ID) != nil {
		t.Fatalf("the child got the header %s", f.w.header(t, r.ID))
	}
	if n := f.p.commits(t, r.ID); n != before {
		t.Errorf("the child had %d commits, it has %d", before, n)
	}
}

// commits is how many commits a session's log holds. Without the header they cannot be checked:
// their chain starts from it.
func (p *process) commits(t testing.TB, session string) int {
	t.Helper()
	all, _, err := p.log.Subjects(journaltest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	return int(all[session])
}

// TestForkBegunElsewhere: what was stored for one seq is not gone on with for another, even
// where both requests make the same header.
func TestForkBegunElsewhere(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{Now: fixed}) // the header's time is that of the last event
	p.must(t, to("parent", turn("start", 1), turn("end", 1), note("a"), note("b"), note("c")))
	at := func(seq events.Seq) appender.ForkRequest {
		return appender.ForkRequest{Parent: "parent", ID: "child", At: &seq}
	}
	cut := w.start(t, appender.Config{})
	ctx, leave := context.WithCancel(journaltest.Context(t))
	cut.log.Faults.AfterPublish = func(_ *events.Commit, err error) error {
		leave() // before the header
		return err
	}
	if got, err := cut.Fork(ctx, at(2)); err == nil {
		t.Fatalf("the fork was not cut off: %+v", got)
	}
	for _, other := range []events.Seq{1, 3, 4} {
		if got, err := p.Fork(journaltest.Context(t), at(other)); asError(err).Code != events.CodeSessionExists {
			t.Errorf("at %d: %+v, %v", other, got, err)
		}
	}
	if got, err := p.Fork(journaltest.Context(t), at(2)); err != nil || !got.Created {
		t.Fatalf("where it was begun: %+v, %v", got, err)
	}
	newFamily(t, w, p, "parent").inherits(t, "child", 2, "parent")
}

// TestForkAskedForTwiceAtOnce: both callers get the child, which is made once.
func TestForkAskedForTwiceAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ps := []*process{w.start(t, appender.Config{}), w.start(t, appender.Config{})}
	longParent(t, ps[0], "parent")
	f := newFamily(t, w, ps[0], "parent")
	at := events.Seq(len(f.lines) - 1)
	for round := range 10 {
		child := fmt.Sprintf("child-%d", round)
		var wg sync.WaitGroup
		got, errs := make([]*appender.Fork, len(ps)), make([]error, len(ps))
		for i, p := range ps {
			wg.Go(func() {
				got[i], errs[i] = p.Fork(journaltest.Context(t), appender.ForkRequest{Parent: "parent", ID: child, At: &at})
			})
		}
		wg.Wait()
		if errs[0] != nil || errs[1] != nil || got[0].Created == got[1].Created {
			t.Fatalf("%s: %+v, %v and %+v, %v", child, got[0], errs[0], got[1], errs[1])
		}
		f.inherits(t, child, at, "parent")
	}
	f.looksLike(t, "child-0", at)
}

// TestForkIsFree: the child has neither the parent's writer nor its agents' status.
func TestForkIsFree(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{Invariants: lifecycle.Enforce})
	ctx := journaltest.Context(t)
	running := logOnly("agent/status", `{"agent":"a","status":"running"}`)
	p.must(t, to("parent", running))
	for range 3 {
		if _, err := p.takeWriter(t, "parent", "w"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.Fork(ctx, appender.ForkRequest{Parent: "parent", ID: "child"}); err != nil {
		t.Fatal(err)
	}
	for _, p := range []*process{p, w.start(t, appender.Config{Invariants: lifecycle.Enforce})} {
		p.must(t, to("child", note("nobody fences me")))
	}
	p.must(t, to("child", running))
	if f, err := p.takeWriter(t, "child", "w"); err != nil || f.Epoch != 1 {
		t.Errorf("the child's first writer: %+v, %v", f, err)
	}
	p.refused(t, to("parent", note("the parent is as it was")), events.CodeFenced, "")
	w.check(t, "child")
	w.check(t, "parent")
}

// TestForkOfTheLatestIsRepeated: a request without a seq is known as the same again although the parent, or
// the child, went on since; for a fork that was cut off, for one of a fork, and by another appender.
func TestForkOfTheLatestIsRepeated(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p, other := w.start(t, appender.Config{}), w.start(t, appender.Config{})
	ctx := journaltest.Context(t)
	fork := func(p *process, parent, id string, at events.Seq, created bool) {
		t.Helper()
		f, err := p.Fork(ctx, appender.ForkRequest{Parent: parent, ID: id})
		if err != nil || f.At != at || f.LastSeq != at+1 || f.Created != created {
			t.Fatalf("%s of %s: %+v, %v", id, parent, f, err)
		}
	}
	p.must(t, to("parent", note("0"), note("1")))
	fork(p, "parent", "child", 1, true)
	p.must(t, to("parent", note("2")))
	fork(other, "parent", "child", 1, false)
	p.must(t, to("child", note("its own")))
	fork(p, "parent", "child", 1, false)
	fork(p, "child", "grandchild", 3, true) // has two end-seeds
	p.must(t, to("child", note("more")))
	p.must(t, to("grandchild", note("more")))
	fork(other, "child", "grandchild", 3, false)

	cut := w.start(t, appender.Config{})
	cctx, leave := context.WithCancel(ctx)
	cut.log.Faults.AfterPublish = func(_ *events.Commit, err error) error {
		leave() // before the header
		return err
	}
	if got, err := cut.Fork(cctx, appender.ForkRequest{Parent: "parent", ID: "late"}); err == nil {
		t.Fatalf("the fork was not cut off: %+v", got)
	}
	p.must(t, to("parent", note("3")))
	fork(p, "parent", "late", 2, true)
	fork(p, "parent", "late", 2, false)

	// Another one's is another one's.
	for parent, id := range map[string]string{"child": "late", "grandchild": "child"} {
		if f, err := p.Fork(ctx, appender.ForkRequest{Parent: parent, ID: id}); asError(err).Code != events.CodeSessionExists {
			t.Errorf("%s of %s: %+v, %v", id, parent, f, err)
		}
	}
	if _, err := p.Fork(ctx, appender.ForkRequest{Parent: "parent", ID: "child", Header: []byte(`{"cwd":"/x"}`)}); asError(err).Code != events.CodeSessionExists {
		t.Errorf("with another header: %v", err)
	}
}

// TestForkBeforeDamage: a session that took something which is no commit takes no more events, and can
// be forked before it, so that its agent goes on.
func TestForkBeforeDamage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{Invariants: lifecycle.Enforce})
	ctx := journaltest.Context(t)
	p.must(t, to("parent", note("0")))
	p.must(t, to("parent", note("1"), note("2")))
	if _, err := p.log.JetStream().Publish(ctx, p.log.Subject("parent"), []byte("hello")); err != nil {
		t.Fatal(err)
	}
	p = w.start(t, appender.Config{Invariants: lifecycle.Enforce}) // which remembers nothing
	p.refused(t, to("parent", note("3")), events.CodeCorrupt, "")
	behind := events.Seq(3)
	for _, at := range []*events.Seq{nil, &behind} {
		if _, err := p.Fork(ctx, appender.ForkRequest{Parent: "parent", ID: "none", At: at}); !errors.Is(err, &events.Error{Code: events.CodeCorrupt}) {
			t.Errorf("behind the damage: %v", err)
		}
	}
	for at := range events.Seq(3) {
		id := fmt.Sprint("child-", at)
		f, err := p.Fork(ctx, appender.ForkRequest{Parent: "parent", ID: id, At: &at})
		if err != nil || !f.Created || f.LastSeq != at+1 {
			t.Fatalf("at %d: %+v, %v", at, f, err)
		}
		if again, err := p.Fork(ctx, appender.ForkRequest{Parent: "parent", ID: id, At: &at}); err != nil || again.Created {
			t.Errorf("at %d, again: %+v, %v", at, again, err)
		}
		p.must(t, to(id, note("on")))
		if n := len(w.check(t, id).Lines); n != int(at)+3 {
			t.Errorf("%s has %d events", id, n)
		}
	}
}

// TestErasureFindsAForkInTheMaking: what a fork has read, or copied, of a session that is erased meanwhile
// does not stay behind unseen.
func TestErasureFindsAForkInTheMaking(t *testing.T) {
	t.Parallel()
	for _, withForks := range []bool{true, false} {
		t.Run(fmt.Sprint("with forks ", withForks), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ctx := journaltest.Context(t)
			p, forker := w.start(t, appender.Config{}), w.start(t, appender.Config{})
			p.must(t, to("parent", note("secret")))
			e, err := erasure.New(ctx, p.log, p.headers)
			if err != nil {
				t.Fatal(err)
			}
			erase := func(id string) *erasure.Receipt {
				t.Helper()
				r, err := e.Erase(ctx, erasure.Request{Session: id, Reason: "asked for", By: "ann", WithForks: withForks})
				if err != nil {
					t.Fatal(err)
				}
				return r
			}
			g := forker.hold(t)
			refusal := make(chan error, 1)
			go func() {
				_, err := forker.Fork(ctx, appender.ForkRequest{Parent: "parent", ID: "child"})
				refusal <- err
			}()
			journaltest.Await(t, "the fork's first publish", g.entered)
			r := erase("parent")
			if !slices.Equal(r.Children, []string{"child"}) || withForks != (len(r.Forks) == 1) {
				t.Errorf("the receipt has the children %q, and %d that were erased", r.Children, len(r.Forks))
			}
			g.release()
			if err := journaltest.Await(t, "the fork", refusal); !errors.Is(err, events.ErrErased) {
				t.Errorf("the fork: %v", err)
			}
			if _, err := p.headers.Get(ctx, "child"); !withForks && !errors.Is(err, journal.ErrReserved) {
				t.Errorf("the child's header: %v", err)
			}
			if !withForks { // what was under way is stored
				if r := erase("child"); r.Messages != 1 {
					t.Errorf("%d messages of the child were erased, want 1", r.Messages)
				}
			}
			if _, err := p.log.LeaderLast(ctx, "child"); !errors.Is(err, events.ErrErased) {
				t.Errorf("the child's log: %v", err)
			}
			if left, err := p.headers.Children(ctx, "parent"); err != nil || len(left) > 0 {
				t.Errorf("children that are left: %q, %v", left, err)
			}
		})
	}
}

// TestErasureGoesPastAChildThatNeverWas: its creation was cut off behind the entry in the index.
func TestErasureGoesPastAChildThatNeverWas(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	p := w.start(t, appender.Config{})
	p.must(t, to("parent", note("x")))
	if _, err := p.Fork(ctx, appender.ForkRequest{Parent: "parent", ID: "zwei"}); err != nil {
		t.Fatal(err)
	}
	kv, err := p.log.JetStream().KeyValue(ctx, journal.HeadersBucket)
	if err == nil {
		_, err = kv.Put(ctx, "children.parent.eins", nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	e, err := erasure.New(ctx, p.log, p.headers)
	if err != nil {
		t.Fatal(err)
	}
	r, err := e.Erase(ctx, erasure.Request{Session: "parent", Reason: "asked for", By: "ann", WithForks: true})
	if err != nil || len(r.Forks) != 1 || r.Forks[0].Session != "zwei" {
		t.Errorf("%+v, %v", r, err)
	}
}
