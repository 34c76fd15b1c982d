package client_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"

	"palimpsest/client"
)

// toolTurn is a turn with one tool call and its result; done leaves it closed.
func toolTurn(turn int, done bool) []client.Event {
	at := fmt.Sprintf(`"turn":%d,"step":1`, turn)
	call := fmt.Sprintf("call-%d", turn)
	raw := func(format string, args ...any) json.RawMessage { return fmt.Appendf(nil, format, args...) }
	events := []client.Event{
		{Type: "turn/start", Data: raw(`{"turn":%d}`, turn)},
		{Type: "step/start", Data: raw(`{%s}`, at)},
		note(fmt.Sprintf("ask-%d", turn)),
		{Type: "assistant/message", SurfaceOp: client.Append(), Data: raw(`{%s,"message":{"id":"a-%d","role":"assistant","source":{"kind":"model","provider":"p","model":"m"},"content":[{"type":"tool-call","id":%q,"name":"shell","arguments":"{}"}]},"stream":[]}`, at, turn, call)},
		{Type: "tool/call", Data: raw(`{%s,"callId":%q,"name":"shell","arguments":"{}"}`, at, call)},
	}
	if !done {
		return events
	}
	return append(events,
		client.Event{Type: "tool/result", SurfaceOp: client.Append(), Data: raw(`{%s,"message":{"id":"r-%d","role":"user","source":{"kind":"tool","callId":%q},"content":[{"type":"tool-result","toolCallId":%q,"isError":false,"content":[{"type":"text","text":"a long result"}]}]}}`, at, turn, call, call)},
		client.Event{Type: "step/end", Data: raw(`{%s}`, at)},
		client.Event{Type: "turn/end", Data: raw(`{"turn":%d,"reason":{"kind":"completed"}}`, turn)},
	)
}

func mustAppend(t *testing.T, s *client.Session, events ...client.Event) *client.Receipt {
	t.Helper()
	r, err := s.Append(within(t), events)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func nodes(t *testing.T, s *client.Session) []client.Seq {
	t.Helper()
	v, err := s.Surface(within(t), client.Fresh())
	if err != nil {
		t.Fatal(err)
	}
	var out []client.Seq
	for _, n := range v.Nodes {
		out = append(out, n.Seq)
	}
	return out
}

func TestMessagesKeepTheirTokens(t *testing.T) {
	t.Parallel()
	data := json.RawMessage(`{"id":"t","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"lone \ud83d, pair \ud83d\ude00, <&> \u2028 \/ é"}],"z":1.10,"a":1e2,"big":123456789012345678901234567890}`)
	s := fresh(dial(t, nil), "tokens")
	r := mustAppend(t, s, client.Event{Type: "user/message", SurfaceOp: client.Append(), Data: data})
	for _, opts := range [][]client.ReadOption{{client.MinSeq(r.LastSeq)}, {client.Fresh()}} {
		m, err := s.Messages(within(t), opts...)
		if err != nil {
			t.Fatal(err)
		}
		if m.Seq != 0 || len(m.Messages) != 1 || !bytes.Equal(m.Messages[0], data) || m.ReplaceGeneration != 0 || m.Quarantine != nil {
			t.Errorf("got %+v\n%s", m, m.Messages)
		}
	}
	for e, err := range s.Events(within(t)) {
		if err != nil || !bytes.Equal(e.Data, data) || !bytes.HasSuffix(e.Line, append([]byte(`"data":`), append(data, '}')...)) {
			t.Errorf("got %s, %v", e.Line, err)
		}
	}
	for e, err := range s.Transcript(within(t)) {
		if err != nil || !bytes.Equal(e.Message, data) || e.Type != "user/message" || e.Seq != 0 || e.Time.IsZero() {
			t.Errorf("got %+v, %v", e, err)
		}
	}
	var file bytes.Buffer
	if err := s.Export(within(t), &file); err != nil || !bytes.HasSuffix(file.Bytes(), append(data, "}\n"...)) || bytes.Count(file.Bytes(), []byte("\n")) != 2 {
		t.Errorf("got %s, %v", &file, err)
	}
}

func TestReadsSayWhatIsMissing(t *testing.T) {
	t.Parallel()
	c := dial(t, nil)
	s := fresh(c, "missing")
	if _, err := s.Messages(within(t)); !errors.Is(err, client.ErrSessionNotFound) {
		t.Errorf("got %v", err)
	}
	if err := s.Export(within(t), io.Discard); !errors.Is(err, client.ErrSessionNotFound) {
		t.Errorf("got %v", err)
	}
	for _, err := range s.Events(within(t)) {
		if !errors.Is(err, client.ErrSessionNotFound) {
			t.Errorf("got %v", err)
		}
	}
	if made, err := s.Create(within(t), nil); err != nil || !made.Created {
		t.Fatalf("got %+v, %v", made, err)
	}
	m, err := s.Messages(within(t), client.MinSeq(client.NoSeq))
	if err != nil || m.Seq != client.NoSeq || len(m.Messages) != 0 {
		t.Errorf("got %+v, %v", m, err)
	}
	for range s.Events(within(t)) {
		t.Error("an event of a session without events")
	}
	for range s.Transcript(within(t)) {
		t.Error("a message of a session without events")
	}
	_, err = s.Messages(within(t), client.MinSeq(5), client.Timeout(1))
	if e := asError(t, err); !errors.Is(err, client.ErrNotProjected) || *e.ExpectedSeq != 5 || *e.ActualSeq != -1 {
		t.Errorf("got %v", err)
	}
	if st, err := s.Status(within(t)); err != nil || st.NextSeq != 0 || !st.Time.IsZero() || st.Writer != nil || st.OpenTurn != nil {
		t.Errorf("got %+v, %v", st, err)
	}
}

func TestPagesAreReadToTheirEnd(t *testing.T) {
	t.Parallel()
	c := dial(t, nil)
	s := fresh(c, "paged")
	var all []client.Event
	for i := range 25 {
		all = append(all, note(fmt.Sprint(i)), client.Event{Type: "todo/write", Data: i})
	}
	mustAppend(t, s, all...)
	for _, q := range []struct {
		opts  []client.RangeOption
		first client.Seq
		count int
	}{
		{nil, 0, 50},
		{[]client.RangeOption{client.PageSize(7)}, 0, 50},
		{[]client.RangeOption{client.PageSize(50)}, 0, 50},
		{[]client.RangeOption{client.PageSize(1), client.From(10), client.To(19)}, 10, 10},
		{[]client.RangeOption{client.PageSize(4), client.Types("todo/write"), client.From(2)}, 3, 24},
		{[]client.RangeOption{client.From(50)}, 0, 0},
		{[]client.RangeOption{client.To(1000), client.From(49)}, 49, 1},
	} {
		read := s.Events(within(t), q.opts...)
		for range 2 { // an iterator can be read again
			count, last := 0, client.NoSeq
			for e, err := range read {
				if err != nil {
					t.Fatal(err)
				}
				if count == 0 && e.Seq != q.first || e.Seq <= last {
					t.Errorf("seq %d behind %d", e.Seq, last)
				}
				last = e.Seq
				count++
			}
			if count != q.count {
				t.Errorf("%d events, want %d", count, q.count)
			}
		}
	}
	count := 0
	for range s.Events(within(t), client.PageSize(3)) {
		if count++; count == 5 {
			break
		}
	}
	seen := 0
	for e, err := range s.Transcript(within(t), client.PageSize(3)) {
		if err != nil || e.Seq != client.Seq(2*seen) {
			t.Fatalf("got %+v, %v", e, err)
		}
		seen++
	}
	if seen != 25 {
		t.Errorf("a transcript of %d messages", seen)
	}
}

func TestReadsAreTriedAgain(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	s := fresh(dial(t, faults), "read-again")
	var all []client.Event
	for i := range 20 {
		all = append(all, note(fmt.Sprint(i)))
	}
	mustAppend(t, s, all...)
	faults.expect(resetAfter, serviceAway, through, proxyAway, brokenOff, proxyPage, through, refusedConnection)
	n := 0
	for e, err := range s.Events(within(t), client.PageSize(4)) {
		if err != nil || e.Seq != client.Seq(n) {
			t.Fatalf("got %+v, %v", e, err)
		}
		n++
	}
	if n != 20 {
		t.Errorf("%d events", n)
	}
	faults.expect(serviceAway, resetBefore, proxyAway)
	if err := s.Export(within(t), io.Discard); err != nil {
		t.Error(err)
	}
}

func TestExportThatBreaksOffIsAnError(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	s := fresh(dial(t, faults), "broken-off")
	mustAppend(t, s, note("a"))
	faults.expect(fault{answer: func(r *http.Request) (*http.Response, error) {
		resp := respond(r, http.StatusOK, "application/x-ndjson", "")
		resp.Body = io.NopCloser(io.MultiReader(strings.NewReader("{\"type\":\"session\"}\n"), broken{}))
		return resp, nil
	}})
	var file bytes.Buffer
	if err := s.Export(within(t), &file); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("got %v after %q", err, &file)
	}
}

func TestCreateAndSessions(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	c := dial(t, faults)
	header := json.RawMessage(`{"createdAt":1767225600000,"cwd":"/w","x-rate":1.10}`)
	parent := client.NewID()
	made, err := c.Session(parent).Create(within(t), header)
	if err != nil || !made.Created || !bytes.Contains(made.Header, []byte(`"x-rate":1.10`)) {
		t.Fatalf("got %+v, %v", made, err)
	}
	if made, err := c.Session(parent).Create(within(t), header); err != nil || made.Created {
		t.Errorf("got %+v, %v", made, err)
	}
	want := []string{}
	for i := range 5 {
		id := fmt.Sprintf("%s-child-%d", parent, i)
		faults.expect(resetAfter)
		if _, err := c.Session(id).Create(within(t), map[string]any{"parentSession": parent, "delegationDepth": 1}); err != nil {
			t.Fatal(err)
		}
		want = append(want, id)
	}
	var got []string
	for in, err := range c.Sessions(within(t), client.Parent(parent), client.ListPageSize(2)) {
		if err != nil {
			t.Fatal(err)
		}
		var h struct{ ParentSession string }
		if err := json.Unmarshal(in.Header, &h); err != nil || h.ParentSession != parent {
			t.Errorf("header %s, %v", in.Header, err)
		}
		got = append(got, in.Session)
	}
	if !slices.Equal(got, want) {
		t.Errorf("children %q, want %q", got, want)
	}
	found := false
	for in, err := range c.Sessions(within(t), client.ListPageSize(3)) {
		if err != nil {
			t.Fatal(err)
		}
		found = found || in.Session == parent
	}
	if !found {
		t.Error("the session is not in the list of all")
	}
}

func TestRepairClosesWhatACrashLeftOpen(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	s := fresh(dial(t, faults), "crashed")
	w := take(t, s, "crashed-one")
	if _, err := w.Append(within(t), toolTurn(1, false)...); err != nil {
		t.Fatal(err)
	}
	st, err := s.Status(within(t))
	if err != nil || st.OpenTurn == nil || *st.OpenTurn != 1 || *st.OpenStep != 1 || !slices.Equal(st.PendingCalls, []string{"call-1"}) || st.Writer == nil || st.Writer.Name != "crashed-one" {
		t.Fatalf("got %+v, %v", st, err)
	}
	r, err := s.Repair(within(t))
	if err != nil || r == nil || r.FirstSeq != 6 || r.LastSeq != 9 { // a new epoch, the result, both ends
		t.Fatalf("got %+v, %v", r, err)
	}
	if r, err := s.Repair(within(t)); err != nil || r != nil {
		t.Errorf("the second repair: %+v, %v", r, err)
	}
	if _, err := w.Append(within(t), note("late")); !errors.Is(err, client.ErrFenced) {
		t.Errorf("got %v", err)
	}
	// A repair whose answer is lost is not made twice.
	mustRepairOnce(t, fresh(dial(t, faults), "crashed-2"), faults)
}

func mustRepairOnce(t *testing.T, s *client.Session, faults *faulty) {
	t.Helper()
	mustAppend(t, s, toolTurn(1, false)...)
	faults.expect(resetAfter)
	if r, err := s.Repair(within(t)); err != nil || r != nil {
		t.Errorf("got %+v, %v", r, err)
	}
	if st, err := s.Status(within(t)); err != nil || st.NextSeq != 8 || st.OpenTurn != nil {
		t.Errorf("got %+v, %v", st, err)
	}
}

func TestForkStartsWhereItsParentWas(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	c := dial(t, faults)
	s := fresh(c, "trunk")
	mustAppend(t, s, toolTurn(1, true)...)
	mustAppend(t, s, toolTurn(2, false)...)
	three := client.Seq(3)
	if _, err := s.Fork(within(t), client.Fork{At: &three}); !errors.Is(err, client.ErrOpenTurn) {
		t.Errorf("got %v", err)
	}
	if _, err := s.Fork(within(t), client.Fork{}); !errors.Is(err, client.ErrOpenTurn) {
		t.Errorf("got %v", err)
	}
	at, id := client.Seq(7), client.NewID()
	faults.expect(resetAfter)
	f, err := s.Fork(within(t), client.Fork{ID: id, At: &at, Header: map[string]any{"cwd": "/b"}})
	if err != nil || f.Session != id || f.Parent != s.ID() || f.At != 7 || f.LastSeq != 8 || !bytes.Contains(f.Header, []byte(`"cwd":"/b"`)) {
		t.Fatalf("got %+v, %v", f, err)
	}
	branch := c.Session(id)
	m, err := branch.Messages(within(t), client.MinSeq(8))
	if err != nil || len(m.Messages) != 3 {
		t.Errorf("got %+v, %v", m, err)
	}
	// An unnamed fork of the parent's end, while an answer is lost and the parent goes on.
	faults.expect(through, fault{stored: true, answer: func(r *http.Request) (*http.Response, error) {
		if _, err := dial(t, nil).Session(id).Append(r.Context(), []client.Event{note("goes on")}); err != nil {
			t.Error(err)
		}
		return nil, syscall.ECONNRESET
	}})
	f, err = branch.Fork(within(t), client.Fork{})
	if err != nil || f.At != 8 || f.Session == "" || f.Created {
		t.Errorf("got %+v, %v", f, err)
	}
	var children []string
	for in, err := range c.Sessions(within(t), client.Parent(id)) {
		if err != nil {
			t.Fatal(err)
		}
		children = append(children, in.Session)
	}
	if !slices.Equal(children, []string{f.Session}) {
		t.Errorf("children %q, want one", children)
	}
	if _, err := c.Session("nobody-forks").Fork(within(t), client.Fork{}); !errors.Is(err, client.ErrSessionNotFound) {
		t.Errorf("got %v", err)
	}
}

func TestCompactAndPrune(t *testing.T) {
	t.Parallel()
	s := fresh(dial(t, nil), "compacted")
	mustAppend(t, s, toolTurn(1, true)...) // nodes 2 3 5
	mustAppend(t, s, toolTurn(2, true)...) // nodes 10 11 13
	_, err := s.Compact(within(t), client.Compaction{Start: 2, End: 3, Summary: "s"})
	if !errors.Is(err, client.ErrSplitsToolPair) {
		t.Errorf("got %v", err)
	}
	if _, err := s.Prune(within(t), 5, nil, client.ExpectedSeq(3)); !errors.Is(err, client.ErrSeqConflict) {
		t.Errorf("got %v", err)
	}
	if r, err := s.Prune(within(t), 5, "short", client.ExpectedSeq(16)); err != nil || r.FirstSeq != 16 {
		t.Fatalf("got %+v, %v", r, err)
	}
	r, err := s.Compact(within(t), client.Compaction{Start: 2, End: 16, Summary: "what was said <so far>", Extra: map[string]any{"provider": "p", "usage": json.RawMessage(`{"cost":1.10}`)}})
	if err != nil || r.FirstSeq != 17 || r.LastSeq != 20 {
		t.Fatalf("got %+v, %v", r, err)
	}
	if got := nodes(t, s); !slices.Equal(got, []client.Seq{19, 10, 11, 13}) {
		t.Errorf("nodes %v", got)
	}
	for e, err := range s.Events(within(t), client.Types("compaction/summary")) {
		if err != nil || !bytes.Contains(e.Data, []byte(`"cost":1.10`)) || !bytes.Contains(e.Data, []byte("<so far>")) {
			t.Errorf("got %s, %v", e.Data, err)
		}
	}
	if _, err := s.Compact(within(t), client.Compaction{Start: 10, End: 11, Summary: "split", AllowSplit: true}); err != nil {
		t.Error(err)
	}
	if _, err := s.Compact(within(t), client.Compaction{Start: 13, End: 13, Summary: "x", Extra: map[string]any{"allow": 1}}); !errors.Is(err, client.ErrBadRequest) {
		t.Errorf("got %v", err)
	}
	w := take(t, s, "w")
	if _, err := w.Prune(within(t), 13, nil); err != nil {
		t.Error(err)
	}
	if _, err := w.Compact(within(t), client.Compaction{Start: 19, End: 19, Summary: []any{map[string]any{"type": "text", "text": "again"}}}); err != nil {
		t.Error(err)
	}
	if _, err := s.Prune(within(t), 13, nil); !errors.Is(err, client.ErrFenced) {
		t.Errorf("got %v", err)
	}
}

func TestCompactionWhoseAnswerIsLostIsMadeOnce(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	s := fresh(dial(t, faults), "compacted-once")
	mustAppend(t, s, note("a"), note("b"), note("c"))
	faults.expect(resetAfter)
	if r, err := s.Compact(within(t), client.Compaction{Start: 0, End: 1, Summary: "s"}); err != nil || !r.Duplicate || r.FirstSeq != 3 {
		t.Errorf("got %+v, %v", r, err)
	}
	if got := nodes(t, s); !slices.Equal(got, []client.Seq{5, 2}) {
		t.Errorf("nodes %v", got)
	}
	// With an expected seq it is not known again.
	faults.expect(resetAfter)
	_, err := s.Compact(within(t), client.Compaction{Start: 5, End: 2, Summary: "t"}, client.ExpectedSeq(7))
	if !errors.Is(err, client.ErrOutcomeUnknown) || !errors.Is(err, client.ErrSeqConflict) {
		t.Errorf("got %v", err)
	}
	// Other arguments under a key that was used are no repetition.
	if _, err := s.Compact(within(t), client.Compaction{Start: 9, End: 9, Summary: "u"}, client.IdempotencyKey("k")); err != nil {
		t.Error(err)
	}
	if _, err := s.Compact(within(t), client.Compaction{Start: 13, End: 13, Summary: "v"}, client.IdempotencyKey("k")); !errors.Is(err, client.ErrKeyReused) {
		t.Errorf("got %v", err)
	}
}

func TestOddSessionIDs(t *testing.T) {
	t.Parallel()
	c := dial(t, nil)
	for _, id := range []string{"a/b", "a%2Fb", "spaces and ?query=1&x#frag", "東京 🙂", "=41", "*", ">", "a.b", "...", `quote"back\slash`, strings.Repeat("é", 100)} {
		s := c.Session(id)
		r, err := s.Append(within(t), []client.Event{note("a")}, client.ExpectedSeq(0))
		if err != nil || r.Session != id {
			t.Errorf("%q: %+v, %v", id, r, err)
			continue
		}
		if m, err := s.Messages(within(t), client.MinSeq(0)); err != nil || m.Session != id || len(m.Messages) != 1 {
			t.Errorf("%q: %+v, %v", id, m, err)
		}
		if st, err := s.Status(within(t)); err != nil || st.Session != id || st.NextSeq != 1 {
			t.Errorf("%q: %+v, %v", id, st, err)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	t.Parallel()
	for _, cfg := range []client.Config{
		{},
		{AppenderURL: "127.0.0.1:8080"},
		{AppenderURL: "nats://127.0.0.1:4222"},
		{ProjectorURL: "http://"},
		{ProjectorURL: "http://x?y=1"},
		{AppenderURL: "http://x", MinBackoff: -1},
		{AppenderURL: "http://x", AttemptTimeout: -1},
	} {
		if _, err := client.New(cfg); !errors.Is(err, client.ErrBadRequest) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	c, err := client.New(client.Config{AppenderURL: appenderURL + "/"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseIdleConnections()
	if _, err := c.Session("half-configured").Append(within(t), []client.Event{note("a")}); err != nil {
		t.Error(err)
	}
	if _, err := c.Session("half-configured").Messages(within(t)); !errors.Is(err, client.ErrBadRequest) {
		t.Errorf("got %v", err)
	}
}

func TestRedirectsAreErrors(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	s := fresh(dial(t, faults), "redirected")
	faults.expect(fault{answer: status(http.StatusMovedPermanently, "Location", projectorURL+"/v1/sessions")})
	_, err := s.Append(within(t), []client.Event{note("a")})
	if e := asError(t, err); e.Code != "http-301" || len(faults.requests()) != 1 {
		t.Errorf("got %v", err)
	}
}
