package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// A projector killed twice in the middle of a stream of events must, started
// again, end with heads that equal a fresh fold of the log.
func TestProjectorKilledMidwayCatchesUp(t *testing.T) {
	t.Parallel()
	const (
		sessions = 100
		each     = 200
		batch    = 5
		writers  = 16
		total    = sessions * each
	)
	appender := harness.Appender{Invariants: "enforce"}.Start(t)
	client := appender.Client()
	name := func(i int) string { return fmt.Sprintf("midway-%03d", i) }
	scripts := make([]*harness.Script, sessions)
	for i := range scripts {
		scripts[i] = harness.NewScript(uint64(i), 60)
	}

	// Writers share out the sessions; all sessions grow side by side.
	var acknowledged atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for range each / batch {
				for i := w; i < sessions; i += writers {
					if _, err := client.AppendEvents(ctx, name(i), scripts[i].Next(batch)); err != nil {
						if ctx.Err() == nil {
							t.Errorf("append to %s: %v", name(i), err)
						}
						return
					}
					acknowledged.Add(batch)
				}
			}
		})
	}
	defer wg.Wait()
	defer cancel()
	reach := func(count int64) {
		t.Helper()
		harness.Until(t, 2*time.Minute, fmt.Sprintf("%d of %d events appended", count, total), func() error {
			if n := acknowledged.Load(); n < count {
				return fmt.Errorf("%d so far", n)
			}
			return nil
		})
	}

	projector := harness.Projector{NATS: appender.NATS}.Start(t)
	for _, share := range []int64{total * 3 / 10, total * 6 / 10} {
		reach(share)
		// It must have begun, or there is no middle to kill it in.
		if _, err := projector.Client().Messages(t.Context(), name(0), harness.MinSeq(0)); err != nil {
			t.Fatal(err)
		}
		projector.Kill()
		projector = harness.Projector{NATS: appender.NATS}.Start(t)
	}
	wg.Wait()
	reach(total)

	reader := projector.Client()
	log := harness.OpenLog(t, appender.NATS)
	for i := range sessions {
		if _, err := reader.Messages(t.Context(), name(i), harness.MinSeq(each-1)); err != nil {
			t.Fatalf("%s: %v", name(i), err)
		}
	}
	verifyAll(t, appender.NATS)
	for i := 0; i < sessions; i += 7 {
		if err := matchesFold(t.Context(), reader, name(i), each-1); err != nil {
			t.Errorf("%s: %v", name(i), err)
		}
		if err := headMatchesLog(t.Context(), log, name(i)); err != nil {
			t.Errorf("%s: %v", name(i), err)
		}
	}
}

// head is the part of a session's snapshot that these tests read.
type head struct {
	V                 int               `json:"v"`
	Format            int               `json:"format"`
	Session           string            `json:"session"`
	Seq               int64             `json:"seq"`
	StreamSeq         uint64            `json:"streamSeq"`
	Digest            string            `json:"digest"`
	Chain             string            `json:"chain"`
	ReplaceGeneration int               `json:"replaceGeneration"`
	NodeCount         int               `json:"nodeCount"`
	HeadType          string            `json:"headType"`
	Index             []int             `json:"index"`
	Pages             []struct{ N int } `json:"pages"`
	Tail              []snapshotNode    `json:"tail"`
}

type snapshotNode struct {
	Seq     int64           `json:"seq"`
	Type    string          `json:"type"`
	Message json.RawMessage `json:"message"`
}

// readHead reads a snapshot as any client of the bucket would: the head, then
// the pages that it names, then its tail.
func readHead(ctx context.Context, log *harness.Log, session string) (head, []snapshotNode, error) {
	var h head
	token := harness.Token(session)
	value, err := log.Value(ctx, harness.SurfaceBucket, token)
	if err != nil {
		return h, nil, err
	}
	if err := json.Unmarshal(value, &h); err != nil {
		return h, nil, fmt.Errorf("head: %w", err)
	}
	if len(h.Index) > 0 {
		return h, nil, fmt.Errorf("sealed index pages %v in so small a session", h.Index)
	}
	var nodes []snapshotNode
	for _, p := range h.Pages {
		key := token + "." + strconv.Itoa(p.N)
		value, err := log.Value(ctx, harness.SurfaceBucket, key)
		if err != nil {
			return h, nil, err
		}
		var page struct {
			V     int            `json:"v"`
			Nodes []snapshotNode `json:"nodes"`
		}
		if err := json.Unmarshal(value, &page); err != nil {
			return h, nil, fmt.Errorf("page %s: %w", key, err)
		}
		if page.V != 1 || len(page.Nodes) == 0 {
			return h, nil, fmt.Errorf("page %s: v %d with %d nodes", key, page.V, len(page.Nodes))
		}
		if len(value) > 160<<10 && len(page.Nodes) > 1 {
			return h, nil, fmt.Errorf("page %s of %d nodes has %d bytes", key, len(page.Nodes), len(value))
		}
		nodes = append(nodes, page.Nodes...)
	}
	return h, append(nodes, h.Tail...), nil
}

// headMatchesLog compares a snapshot with the session's messages in the
// stream, both read with the bare client.
func headMatchesLog(ctx context.Context, log *harness.Log, session string) error {
	commits, err := log.Commits(ctx, session)
	if err != nil {
		return err
	}
	header, err := log.Value(ctx, harness.HeaderBucket, harness.Token(session))
	if err != nil {
		return err
	}
	lines, err := harness.CheckChain(session, header, commits)
	if err != nil {
		return err
	}
	events := make([]harness.Event, len(lines))
	for i, line := range lines {
		if events[i], err = harness.ParseEvent(line); err != nil {
			return err
		}
	}
	folded, err := harness.Fold(3, events)
	if err != nil {
		return err
	}
	h, nodes, err := readHead(ctx, log, session)
	if err != nil {
		return err
	}
	last := commits[len(commits)-1]
	want := head{
		V: 1, Format: 3, Session: session, Seq: int64(len(lines) - 1), StreamSeq: last.StreamSeq,
		Digest: last.Attribute["digest"], Chain: last.Attribute["chain"],
		ReplaceGeneration: folded.Generation, NodeCount: len(folded.Nodes), HeadType: events[folded.Nodes[0]].Type,
	}
	got := h
	got.Index, got.Pages, got.Tail = nil, nil, nil
	if fmt.Sprint(got) != fmt.Sprint(want) {
		return fmt.Errorf("head\n got %+v\nwant %+v", got, want)
	}
	if len(nodes) != len(folded.Nodes) {
		return fmt.Errorf("%d nodes in pages and tail, want %d", len(nodes), len(folded.Nodes))
	}
	messages := map[int64]json.RawMessage{}
	for i, seq := range folded.MessageSeqs {
		messages[seq] = folded.Messages[i]
	}
	for i, n := range nodes {
		if n.Seq != folded.Nodes[i] || n.Type != events[n.Seq].Type {
			return fmt.Errorf("node %d is %d (%s), want %d", i, n.Seq, n.Type, folded.Nodes[i])
		}
		if string(n.Message) != string(messages[n.Seq]) {
			return fmt.Errorf("message of node %d:\n got %s\nwant %s", n.Seq, n.Message, messages[n.Seq])
		}
	}
	return nil
}

// A session of several pages, cut again and again by replacements, must be
// readable from the bucket alone.
func TestSnapshotIsReadableWithTheBareClient(t *testing.T) {
	t.Parallel()
	const rounds, batch = 40, 25
	s := startStack(t, "enforce")
	script := harness.NewScript(99, 3000)
	log := harness.OpenLog(t, s.nats)
	for round := range rounds {
		mustAppend(t, s.appender, "paged", script.Next(batch))
		if round%10 != 9 {
			continue
		}
		if _, err := s.projector.Messages(t.Context(), "paged", harness.MinSeq(int64(round+1)*batch-1)); err != nil {
			t.Fatal(err)
		}
		if err := headMatchesLog(t.Context(), log, "paged"); err != nil {
			t.Fatalf("after %d events: %v", (round+1)*batch, err)
		}
	}
	grow := make([]json.RawMessage, 60)
	for i := range grow {
		grow[i] = json.RawMessage(fmt.Sprintf(`{"type":"user/message","surfaceOp":"append","data":{"id":"big-%d","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":%q}]}}`, i, bigText(5000)))
	}
	mustAppend(t, s.appender, "paged", grow[:30])
	receipt := mustAppend(t, s.appender, "paged", grow[30:])
	if _, err := s.projector.Messages(t.Context(), "paged", harness.MinSeq(receipt.LastSeq)); err != nil {
		t.Fatal(err)
	}
	if err := headMatchesLog(t.Context(), log, "paged"); err != nil {
		t.Fatal(err)
	}
	h, _, err := readHead(t.Context(), log, "paged")
	if err != nil {
		t.Fatal(err)
	}
	if len(h.Pages) < 3 {
		t.Errorf("%d pages hold 300 KB of messages", len(h.Pages))
	}
}

func bigText(n int) string {
	text := make([]byte, n)
	for i := range text {
		text[i] = 'a' + byte(i%26)
	}
	return string(text)
}
