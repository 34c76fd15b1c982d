package e2e_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"palimpsest/test/e2e/harness"
)

// TestAPI walks through what the two programs answer when all is well, and the
// refusals that are part of normal use. Sessions are apart, so all run at once
// on one pair of programs.
func TestAPI(t *testing.T) {
	t.Parallel()
	s := startStack(t, "off")
	for name, run := range map[string]func(*testing.T, stack){
		"create is idempotent":                 createIsIdempotent,
		"create without an id":                 createWithoutID,
		"every form of append":                 everyFormOfAppend,
		"an append creates its session":        appendCreatesSession,
		"expectedSeq in query, header, body":   expectedSeqEverywhere,
		"a retry with expectedSeq":             retryWithExpectedSeq,
		"minSeq waits, and says when it can't": minSeqWaits,
		"ETag and If-None-Match":               etags,
		"fresh reads what was just written":    freshReads,
		"not there and empty are two answers":  notThereAndEmpty,
		"sessions are listed in pages":         sessionsInPages,
		"events are read in pages":             eventsInPages,
		"replaced events stay readable":        replacedEventsStayReadable,
		"data is kept token for token":         dataTokenForToken,
		"single events as CloudEvents":         singleEventsAsCloudEvents,
		"the command line prints the same":     commandLinePrintsTheSame,
		"a session of format 4":                sessionOfFormat4,
		"repair adds nothing to a whole log":   repairOfAWholeLog,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			run(t, s)
		})
	}
}

func createIsIdempotent(t *testing.T, s stack) {
	header := json.RawMessage(`{"version":3,"id":"created","createdAt":1767225600000,"isSeeded":false,"delegationDepth":0,"agentPreset":"standard","x-rate":1.10}`)
	for i, want := range []int{http.StatusCreated, http.StatusOK} {
		if _, status, err := s.appender.Create(t.Context(), "created", header); err != nil || status != want {
			t.Errorf("call %d: status %d (%v), want %d", i, status, err, want)
		}
	}
	_, _, err := s.appender.Create(t.Context(), "created", bytes.Replace(header, []byte("standard"), []byte("other"), 1))
	refused(t, err, http.StatusConflict, "session-exists")
	// Creating it again is still fair once it holds events.
	mustAppend(t, s.appender, "created", notes("a"))
	if _, status, err := s.appender.Create(t.Context(), "created", header); err != nil || status != http.StatusOK {
		t.Errorf("status %d (%v), want 200", status, err)
	}
	if _, err := s.projector.Messages(t.Context(), "created", harness.MinSeq(0)); err != nil {
		t.Fatal(err)
	}
	for _, program := range []*harness.Client{s.appender, s.projector} {
		status, err := program.Status(t.Context(), "created")
		if err != nil {
			t.Fatal(err)
		}
		if err := harness.SameJSON(status.Header, header); err != nil || !bytes.Contains(status.Header, []byte("1.10")) {
			t.Errorf("header %s (%v), want %s", status.Header, err, header)
		}
	}
}

func createWithoutID(t *testing.T, s stack) {
	first, status, err := s.appender.Create(t.Context(), "", nil)
	if err != nil || status != http.StatusCreated {
		t.Fatalf("status %d (%v), want 201", status, err)
	}
	second, _, err := s.appender.Create(t.Context(), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if first.Session == second.Session {
		t.Errorf("both sessions are called %s", first.Session)
	}
	if r := mustAppend(t, s.appender, first.Session, notes("a")); r.FirstSeq != 0 {
		t.Errorf("the first event got seq %d", r.FirstSeq)
	}
}

func everyFormOfAppend(t *testing.T, s stack) {
	const session = "forms"
	cloud := func(id string) string {
		return fmt.Sprintf(`{"specversion":"1.0","id":%q,"source":"/sessions/forms","type":"palimpsest.session.v3.user/message","datacontenttype":"application/json","surfaceop":"append","data":{"id":%q,"role":"user","source":{"kind":"user"},"content":[{"type":"text","text":%q}]}}`, id, id, id)
	}
	var ids []string
	for _, c := range []struct {
		name, contentType, body string
		ids                     []string
	}{
		{"one event", harness.TypeJSON, string(note("single")), []string{"single"}},
		{"one event, charset given", harness.TypeJSON + "; charset=utf-8", string(note("charset")), []string{"charset"}},
		{"an array", harness.TypeJSON, string(harness.Array(notes("a0", "a1"))), []string{"a0", "a1"}},
		{"an object", harness.TypeJSON, `{"events":` + string(harness.Array(notes("o0", "o1"))) + `}`, []string{"o0", "o1"}},
		{"NDJSON", harness.TypeNDJSON, string(note("n0")) + "\n" + string(note("n1")) + "\n", []string{"n0", "n1"}},
		{"NDJSON without the last line end", harness.TypeNDJSON, string(note("n2")) + "\n" + string(note("n3")), []string{"n2", "n3"}},
		{"a CloudEvent", harness.TypeEvent, cloud("c0"), []string{"c0"}},
		{"a batch of CloudEvents", harness.TypeEventBatch, "[" + cloud("c1") + "," + cloud("c2") + "]", []string{"c1", "c2"}},
	} {
		first := int64(len(ids))
		ids = append(ids, c.ids...)
		r, err := s.appender.Append(t.Context(), session, []byte(c.body), harness.ContentType(c.contentType))
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if r.FirstSeq != first || r.LastSeq != int64(len(ids)-1) || r.Duplicate {
			t.Errorf("%s: receipt %+v, want seqs %d..%d", c.name, r, first, len(ids)-1)
		}
	}
	if err := matchesFold(t.Context(), s.projector, session, int64(len(ids)-1)); err != nil {
		t.Fatal(err)
	}
	events, err := s.projector.Events(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now().UnixMilli()
	for i, e := range events {
		if id, err := noteID(e); err != nil || id != ids[i] {
			t.Errorf("event %d is %s (%v), want %s", i, id, err, ids[i])
		}
		if e.Time < now-10*60_000 || e.Time > now+60_000 {
			t.Errorf("event %d was given the time %d, it is %d", i, e.Time, now)
		}
		if !bytes.Equal(e.Line, e.Canonical()) {
			t.Errorf("event %d is not canonical: %s", i, e.Line)
		}
	}
}

func appendCreatesSession(t *testing.T, s stack) {
	mustAppend(t, s.appender, "implied", notes("a"))
	status, err := s.appender.Status(t.Context(), "implied")
	if err != nil {
		t.Fatal(err)
	}
	var header struct {
		Version   int
		ID        string
		CreatedAt int64
		IsSeeded  *bool
	}
	if err := json.Unmarshal(status.Header, &header); err != nil {
		t.Fatal(err)
	}
	if header.Version != 3 || header.ID != "implied" || header.CreatedAt == 0 || header.IsSeeded == nil || *header.IsSeeded {
		t.Errorf("default header %s", status.Header)
	}
}

func expectedSeqEverywhere(t *testing.T, s stack) {
	const session = "expected"
	body := func(seq int64, id string) []byte {
		return []byte(fmt.Sprintf(`{"events":[%s],"expectedSeq":%d}`, note(id), seq))
	}
	for i, give := range []func(seq int64, id string) ([]byte, []harness.Option){
		func(seq int64, id string) ([]byte, []harness.Option) {
			return note(id), []harness.Option{harness.ExpectedSeq(seq)}
		},
		func(seq int64, id string) ([]byte, []harness.Option) {
			return note(id), []harness.Option{harness.With("If-Match", fmt.Sprintf(`"%d"`, seq))}
		},
		func(seq int64, id string) ([]byte, []harness.Option) { return body(seq, id), nil },
	} {
		next := int64(i)
		for _, wrong := range []int64{next + 1, next + 7, next - 1} {
			if wrong < 0 {
				continue
			}
			content, options := give(wrong, fmt.Sprintf("wrong-%d-%d", i, wrong))
			_, err := s.appender.Append(t.Context(), session, content, options...)
			p := refused(t, err, http.StatusConflict, "seq-conflict")
			if p.ExpectedSeq == nil || *p.ExpectedSeq != wrong || p.ActualSeq == nil || *p.ActualSeq != next {
				t.Errorf("way %d: expectedSeq %s and actualSeq %s, want %d and %d", i, deref(p.ExpectedSeq), deref(p.ActualSeq), wrong, next)
			}
		}
		content, options := give(next, fmt.Sprintf("right-%d", i))
		r, err := s.appender.Append(t.Context(), session, content, options...)
		if err != nil {
			t.Fatalf("way %d: %v", i, err)
		}
		if r.FirstSeq != next {
			t.Errorf("way %d: seq %d, want %d", i, r.FirstSeq, next)
		}
	}
}

func retryWithExpectedSeq(t *testing.T, s stack) {
	const session = "retried"
	first := mustAppend(t, s.appender, session, notes("a", "b"), harness.ExpectedSeq(0))
	mustAppend(t, s.appender, session, notes("c"), harness.ExpectedSeq(2))
	again := mustAppend(t, s.appender, session, notes("a", "b"), harness.ExpectedSeq(0))
	if !again.Duplicate {
		t.Error("the retry is not called a duplicate")
	}
	again.Duplicate = first.Duplicate
	if again != first {
		t.Errorf("the retry is answered %+v, the original was %+v", again, first)
	}
	_, err := s.appender.AppendEvents(t.Context(), session, notes("a", "x"), harness.ExpectedSeq(0))
	p := refused(t, err, http.StatusConflict, "seq-conflict")
	if p.ActualSeq == nil || *p.ActualSeq != 3 {
		t.Errorf("actualSeq %s, want 3", deref(p.ActualSeq))
	}
	if next, err := s.appender.NextSeq(t.Context(), session); err != nil || next != 3 {
		t.Errorf("next seq %d (%v), want 3", next, err)
	}
}

func minSeqWaits(t *testing.T, s stack) {
	const session = "awaited"
	mustAppend(t, s.appender, session, notes("a"))
	begun := time.Now()
	_, err := s.projector.Messages(t.Context(), session, harness.Query("minSeq", "5"), harness.Query("timeout", "300ms"))
	refused(t, err, http.StatusGatewayTimeout, "not-yet-projected")
	if waited := time.Since(begun); waited < 250*time.Millisecond {
		t.Errorf("gave up after %v, asked to wait 300ms", waited)
	}

	// A read that waits is answered when the event arrives.
	type answer struct {
		messages harness.Messages
		err      error
	}
	answered := make(chan answer, 1)
	go func() {
		m, err := s.projector.Messages(t.Context(), session, harness.MinSeq(2))
		answered <- answer{m, err}
	}()
	mustAppend(t, s.appender, session, notes("b"))
	mustAppend(t, s.appender, session, notes("c"))
	a := <-answered
	if a.err != nil {
		t.Fatal(a.err)
	}
	if a.messages.Seq < 2 || len(a.messages.Messages) != 3 {
		t.Errorf("as of seq %d with %d messages, want 2 with 3", a.messages.Seq, len(a.messages.Messages))
	}
}

func etags(t *testing.T, s stack) {
	const session = "tagged"
	mustAppend(t, s.appender, session, notes("a"))
	first, err := s.projector.Messages(t.Context(), session, harness.MinSeq(0))
	if err != nil {
		t.Fatal(err)
	}
	if first.ETag == "" {
		t.Fatal("messages come without an ETag")
	}
	path := harness.SessionPath(session, "/messages")
	a, err := s.projector.Do(t.Context(), http.MethodGet, path, nil, harness.With("If-None-Match", first.ETag))
	if err != nil {
		t.Fatal(err)
	}
	if a.Status != http.StatusNotModified || len(a.Body) != 0 {
		t.Errorf("unchanged: status %d with %d bytes, want 304 with none", a.Status, len(a.Body))
	}
	mustAppend(t, s.appender, session, notes("b"))
	second, err := s.projector.Messages(t.Context(), session, harness.MinSeq(1), harness.With("If-None-Match", first.ETag))
	if err != nil {
		t.Fatal(err)
	}
	if second.ETag == first.ETag || len(second.Messages) != 2 {
		t.Errorf("changed: ETag %s as before, %d messages", second.ETag, len(second.Messages))
	}
}

func freshReads(t *testing.T, s stack) {
	const session = "fresh"
	for i := range 30 {
		r := mustAppend(t, s.appender, session, notes(fmt.Sprintf("f%d", i)))
		m, err := s.projector.Messages(t.Context(), session, harness.Query("fresh", "true"))
		if err != nil {
			t.Fatal(err)
		}
		if m.Seq != r.LastSeq || len(m.Messages) != i+1 {
			t.Fatalf("a fresh read as of seq %d with %d messages, want %d with %d", m.Seq, len(m.Messages), r.LastSeq, i+1)
		}
	}
}

func notThereAndEmpty(t *testing.T, s stack) {
	for _, call := range []string{"", "/messages", "/messages?fresh=true", "/surface", "/transcript", "/events", "/export"} {
		a, err := s.projector.Do(t.Context(), http.MethodGet, harness.SessionPath("nobody", call), nil)
		if p := clientProblem(t, a, err); p.Status != http.StatusNotFound || p.Code != "session-not-found" {
			t.Errorf("GET nobody%s: %d %s, want 404 session-not-found", call, p.Status, p.Code)
		}
	}
	_, err := s.appender.Status(t.Context(), "nobody")
	refused(t, err, http.StatusNotFound, "session-not-found")
	refused(t, s.appender.Repair(t.Context(), "nobody"), http.StatusNotFound, "session-not-found")

	const session = "empty"
	if _, _, err := s.appender.Create(t.Context(), session, harness.NewHeader(session, 3)); err != nil {
		t.Fatal(err)
	}
	for _, options := range [][]harness.Option{nil, {harness.Query("fresh", "true")}} {
		m, err := s.projector.Messages(t.Context(), session, options...)
		if err != nil {
			t.Fatal(err)
		}
		if m.Seq != -1 || len(m.Messages) != 0 || m.ReplaceGeneration != 0 {
			t.Errorf("messages of an empty session: %+v", m)
		}
	}
	view, err := s.projector.Surface(t.Context(), session)
	if err != nil || view.Seq != -1 || len(view.Nodes) != 0 {
		t.Errorf("surface of an empty session: %+v (%v)", view, err)
	}
	events, err := s.projector.Events(t.Context(), session)
	if err != nil || len(events) != 0 {
		t.Errorf("%d events of an empty session (%v)", len(events), err)
	}
	exported, err := s.projector.Export(t.Context(), session)
	if err != nil || bytes.Count(exported, []byte("\n")) != 1 || !bytes.HasSuffix(exported, []byte("\n")) {
		t.Errorf("export of an empty session: %q (%v)", exported, err)
	}
	for _, program := range []*harness.Client{s.appender, s.projector} {
		status, err := program.Status(t.Context(), session)
		if err != nil {
			t.Fatal(err)
		}
		if *status.NextSeq != 0 || status.Digest != harness.Hex(harness.Digest(session, nil)) {
			t.Errorf("status of an empty session: next seq %d, digest %s", *status.NextSeq, status.Digest)
		}
	}
}

func sessionsInPages(t *testing.T, s stack) {
	const count = 7
	want := map[string]bool{}
	for i := range count {
		id := fmt.Sprintf("listed-%d", i)
		mustAppend(t, s.appender, id, notes(id))
		want[id] = true
	}
	for id := range want {
		if _, err := s.projector.Messages(t.Context(), id, harness.MinSeq(0)); err != nil {
			t.Fatal(err)
		}
	}
	// Others are made meanwhile: each of ours must still come once.
	found := map[string]int{}
	options := []harness.Option{harness.Query("limit", "2")}
	for pages := 0; ; pages++ {
		if pages > 200 {
			t.Fatal("the list does not end")
		}
		page, err := s.projector.Sessions(t.Context(), options...)
		if err != nil {
			t.Fatal(err)
		}
		if len(page.Sessions) > 2 {
			t.Fatalf("a page of %d, asked for 2", len(page.Sessions))
		}
		for _, entry := range page.Sessions {
			found[entry.Session]++
		}
		if page.Cursor == "" {
			break
		}
		options = []harness.Option{harness.Query("limit", "2"), harness.Query("cursor", page.Cursor)}
	}
	for id := range want {
		if found[id] != 1 {
			t.Errorf("%s was listed %d times", id, found[id])
		}
	}
	_, err := s.projector.Sessions(t.Context(), harness.Query("cursor", "\x01no cursor"))
	if p := harness.AsRefused(err); p == nil || p.Status != http.StatusBadRequest {
		t.Errorf("a cursor that is none: %v", err)
	}
}

func eventsInPages(t *testing.T, s stack) {
	const session, count = "pages", 60
	script := harness.NewScript(11, 20)
	var lines []json.RawMessage
	for len(lines) < count {
		batch := script.Next(6)
		mustAppend(t, s.appender, session, batch)
		lines = append(lines, batch...)
	}
	if _, err := s.projector.Messages(t.Context(), session, harness.MinSeq(count-1)); err != nil {
		t.Fatal(err)
	}
	read := func(query ...string) harness.EventPage {
		t.Helper()
		var options []harness.Option
		for i := 0; i < len(query); i += 2 {
			options = append(options, harness.Query(query[i], query[i+1]))
		}
		page, err := s.projector.EventPage(t.Context(), session, options...)
		if err != nil {
			t.Fatalf("events %v: %v", query, err)
		}
		return page
	}
	same := func(what string, got, want []json.RawMessage) {
		t.Helper()
		if !slices.EqualFunc(got, want, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
			t.Errorf("%s:\n got %s\nwant %s", what, got, want)
		}
	}
	all, err := s.projector.Events(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	var raw []json.RawMessage
	for _, e := range all {
		raw = append(raw, e.Line)
	}
	same("all", raw, lines)
	same("from 7 through 20", read("from", "7", "to", "20").Events, lines[7:21])
	same("one event", read("from", "59", "to", "59").Events, lines[59:60])
	same("to beyond the end", read("from", "55", "to", "1000").Events, lines[55:])
	if page := read("from", "60"); len(page.Events) != 0 || page.Next != nil {
		t.Errorf("beyond the end: %d events, next %s", len(page.Events), deref(page.Next))
	}

	page := read("from", "10", "limit", "4")
	same("a page of 4", page.Events, lines[10:14])
	if page.Next == nil || *page.Next != 14 {
		t.Errorf("after a page of 4 from 10, next is %s, want 14", deref(page.Next))
	}

	var want, got []json.RawMessage
	for _, e := range all {
		if e.Type == "user/message" {
			want = append(want, e.Line)
		}
	}
	for from := int64(0); ; {
		page := read("type", "user/message", "limit", "3", "from", strconv.FormatInt(from, 10))
		got = append(got, page.Events...)
		if page.Next == nil {
			break
		}
		if *page.Next <= from {
			t.Fatalf("the page from %d says next %d", from, *page.Next)
		}
		from = *page.Next
	}
	same("of one type", got, want)
}

func replacedEventsStayReadable(t *testing.T, s stack) {
	const session = "palimpsest"
	mustAppend(t, s.appender, session, notes("keep", "old-1", "old-2", "last"))
	summary := json.RawMessage(`{"type":"user/message","surfaceOp":{"op":"replace","startSeq":1,"endSeq":2},"sourceEventSeqs":[1,2],"data":{"id":"summary","role":"user","source":{"kind":"plugin"},"content":[{"type":"text","text":"what was said"}]}}`)
	mustAppend(t, s.appender, session, []json.RawMessage{summary})
	if err := matchesFold(t.Context(), s.projector, session, 4); err != nil {
		t.Fatal(err)
	}
	view, err := s.projector.Surface(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(view.Seqs(), []int64{0, 4, 3}) || view.ReplaceGeneration != 1 || view.Seq != 4 {
		t.Errorf("surface %+v, want nodes 0 4 3 and generation 1", view)
	}
	transcript, err := s.projector.Transcript(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	var seqs []int64
	for _, m := range transcript.Messages {
		seqs = append(seqs, m.Seq)
		if m.Type != "user/message" || m.Time == 0 || !bytes.Contains(m.Message, []byte(`"role":"user"`)) {
			t.Errorf("transcript entry %+v", m)
		}
	}
	if !slices.Equal(seqs, []int64{0, 1, 2, 3}) {
		t.Errorf("transcript of %v, want 0 1 2 3: what a person saw, no replacements", seqs)
	}
	page, err := s.projector.EventPage(t.Context(), session, harness.Query("from", "1"), harness.Query("to", "2"))
	if err != nil {
		t.Fatal(err)
	}
	if len(page.Events) != 2 || !bytes.Contains(page.Events[0], []byte("old-1")) || !bytes.Contains(page.Events[1], []byte("old-2")) {
		t.Errorf("the shadowed events read back as %s", page.Events)
	}
	exported, err := s.projector.Export(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Count(exported, []byte("\n")) != 6 || !bytes.Contains(exported, []byte("old-1")) {
		t.Errorf("the export is no whole log:\n%s", exported)
	}
}

func dataTokenForToken(t *testing.T, s stack) {
	const session = "tokens"
	data := `{"id":"t","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"lone \ud83d, low \ude00, pair \ud83d\ude00, <&> \u2028 ` + "\u2028" + ` \/ \u0000 \u00e9 é"}],` +
		`"z":1.10,"a":1e2,"m":-0.0,"big":123456789012345678901234567890,"tiny":1E-7,"exp":1.0e+05,"y":0.10000000000000000555,"empty":{},"list":[ ]}`
	spaced := strings.NewReplacer(`,"`, " ,\n\t\"", `":`, "\" :\r\n ").Replace(data)
	event := func(data string) json.RawMessage {
		return json.RawMessage(`{"data":` + data + `,"time":5,"surfaceOp":"append","type":"user\/message"}`)
	}
	mustAppend(t, s.appender, session, []json.RawMessage{event(data)})
	mustAppend(t, s.appender, session, []json.RawMessage{event(spaced)})

	messages, err := s.projector.Messages(t.Context(), session, harness.MinSeq(1))
	if err != nil {
		t.Fatal(err)
	}
	page, err := s.projector.EventPage(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	exported, err := s.projector.Export(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	lines := bytes.Split(exported, []byte("\n"))
	if len(page.Events) != 2 || len(messages.Messages) != 2 || len(lines) != 4 {
		t.Fatalf("%d events, %d messages, %d lines", len(page.Events), len(messages.Messages), len(lines))
	}
	kept := harness.Compact([]byte(data))
	for seq := range 2 {
		want := fmt.Sprintf(`{"type":"user/message","seq":%d,"time":5,"surfaceOp":"append","data":%s}`, seq, kept)
		for where, got := range map[string][]byte{"events": page.Events[seq], "export": lines[seq+1]} {
			if string(got) != want {
				t.Errorf("event %d in %s:\n got %s\nwant %s", seq, where, got, want)
			}
		}
		if !bytes.Equal(messages.Messages[seq], kept) {
			t.Errorf("message %d:\n got %s\nwant %s", seq, messages.Messages[seq], kept)
		}
	}
}

func singleEventsAsCloudEvents(t *testing.T, s stack) {
	const session = "cloud"
	lines := harness.NewScript(21, 20).Next(80)
	lines = append(lines, json.RawMessage(`{"type":"acme/metric","seq":80,"time":1767225700000,"ignorable":true,"data":{"n":1.10}}`))
	mustAppend(t, s.appender, session, lines)
	if _, err := s.projector.Messages(t.Context(), session, harness.MinSeq(80)); err != nil {
		t.Fatal(err)
	}
	a, err := s.projector.Do(t.Context(), http.MethodGet, harness.SessionPath(session, "/events?format=cloudevents&limit=1000"), nil)
	if err != nil {
		t.Fatal(err)
	}
	var batch []map[string]json.RawMessage
	if a.Status != http.StatusOK || !strings.HasPrefix(a.Header.Get("Content-Type"), harness.TypeEventBatch) {
		t.Fatalf("status %d, Content-Type %s: %.300s", a.Status, a.Header.Get("Content-Type"), a.Body)
	}
	if err := json.Unmarshal(a.Body, &batch); err != nil {
		t.Fatal(err)
	}
	if len(batch) != len(lines) {
		t.Fatalf("%d CloudEvents for %d events", len(batch), len(lines))
	}
	for i, e := range batch {
		original, err := harness.ParseEvent(lines[i])
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]string{
			"specversion": "1.0",
			"id":          fmt.Sprintf("%s/%d", harness.Token(session), i),
			"type":        "palimpsest.session.v3." + original.Type,
		} {
			var got string
			if err := json.Unmarshal(e[name], &got); err != nil || got != want {
				t.Errorf("CloudEvent %d: %s is %s, want %q", i, name, e[name], want)
			}
		}
		if err := harness.SameJSON(e["data"], original.Data); err != nil {
			t.Errorf("CloudEvent %d: data: %v", i, err)
		}
	}

	// What was read as CloudEvents can be appended as such: the same log. The
	// copy goes to a session of another name, so the names are changed first.
	const copied = "cloud-copy"
	body := bytes.ReplaceAll(a.Body, []byte(`"`+harness.Token(session)+`/`), []byte(`"`+copied+`/`))
	body = bytes.ReplaceAll(body, []byte(`"/sessions/`+harness.Token(session)+`"`), []byte(`"/sessions/`+copied+`"`))
	body = bytes.ReplaceAll(body, []byte(`"subject":"`+session+`"`), []byte(`"subject":"`+copied+`"`))
	if _, err := s.appender.Append(t.Context(), copied, body, harness.ContentType(harness.TypeEventBatch)); err != nil {
		t.Fatal(err)
	}
	if err := matchesFold(t.Context(), s.projector, copied, 80); err != nil {
		t.Fatal(err)
	}
	events, err := s.projector.Events(t.Context(), copied)
	if err != nil {
		t.Fatal(err)
	}
	for i, e := range events {
		if !bytes.Equal(e.Line, lines[i]) {
			t.Errorf("event %d of the copy:\n got %s\nwant %s", i, e.Line, lines[i])
		}
	}
}

func commandLinePrintsTheSame(t *testing.T, s stack) {
	const session = "printed"
	mustAppend(t, s.appender, session, harness.NewScript(31, 20).Next(70))
	if err := matchesFold(t.Context(), s.projector, session, 69); err != nil {
		t.Fatal(err)
	}
	for _, call := range []string{"messages", "surface", "transcript"} {
		a, err := s.projector.Do(t.Context(), http.MethodGet, harness.SessionPath(session, "/"+call), nil)
		if err != nil {
			t.Fatal(err)
		}
		r := harness.Run(t, "projector", call, "--nats", s.nats, "--json", session)
		if r.Code != 0 {
			t.Errorf("projector %s: exit code %d\n%s", call, r.Code, r.Output())
			continue
		}
		if err := harness.SameJSON([]byte(r.Stdout), a.Body); err != nil {
			t.Errorf("projector %s --json and GET %s: %v", call, call, err)
		}
		r = harness.Run(t, "projector", call, "--nats", s.nats, session)
		if r.Code != 0 || strings.TrimSpace(r.Stdout) == "" {
			t.Errorf("projector %s for people: exit code %d\n%s", call, r.Code, r.Output())
		}
	}
	exported, err := s.projector.Export(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	if r := harness.Run(t, "projector", "export", "--nats", s.nats, session); r.Code != 0 || r.Stdout != string(exported) {
		t.Errorf("projector export: exit code %d, %d bytes; GET export has %d\n%s", r.Code, len(r.Stdout), len(exported), r.Stderr)
	}
	// In a pipe, events are the canonical lines.
	_, lines, _ := strings.Cut(string(exported), "\n")
	if r := harness.Run(t, "projector", "events", "--nats", s.nats, "--json", session); r.Code != 0 || r.Stdout != lines {
		t.Errorf("projector events --json: exit code %d, %d bytes, want the %d bytes of the log\n%s", r.Code, len(r.Stdout), len(lines), r.Stderr)
	}
	for _, call := range []string{"messages", "surface", "transcript", "events", "export", "verify"} {
		r := harness.Run(t, "projector", call, "--nats", s.nats, "nobody")
		if r.Code == 0 || r.Stderr == "" {
			t.Errorf("projector %s of no session: exit code %d, stderr %q", call, r.Code, r.Stderr)
		}
	}
}

func sessionOfFormat4(t *testing.T, s stack) {
	const session = "four"
	if _, _, err := s.appender.Create(t.Context(), session, harness.NewHeader(session, 4)); err != nil {
		t.Fatal(err)
	}
	result := func(id, op, cite, text string) json.RawMessage {
		return json.RawMessage(fmt.Sprintf(`{"type":"tool/result","surfaceOp":%s,"sourceEventSeqs":%s,"data":{"turn":1,"step":1,"message":{"id":%q,"role":"tool","toolCallId":"c1","isError":false,"source":{"kind":"tool","callId":"c1"},"content":[{"type":"text","text":%q}]}}}`, op, cite, id, text))
	}
	mustAppend(t, s.appender, session, []json.RawMessage{
		json.RawMessage(`{"type":"turn/start","data":{"turn":1}}`),
		json.RawMessage(`{"type":"step/start","data":{"turn":1,"step":1}}`),
		json.RawMessage(`{"type":"developer/message","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"d","role":"developer","source":{"kind":"tool-registry"},"content":[{"type":"tool-addition","toolName":"x"}]}}}`),
		json.RawMessage(`{"type":"assistant/message","surfaceOp":"append","data":{"turn":1,"step":1,"message":{"id":"a","role":"assistant","source":{"kind":"model","provider":"p","model":"m"},"content":[{"type":"tool-call","id":"c1","name":"x","arguments":"{}"},{"type":"tool-call","id":"c2","name":"x","arguments":"{}"}]},"stream":[]}}`),
		json.RawMessage(`{"type":"tool/call","data":{"turn":1,"step":1,"callId":"c1","name":"x","arguments":"{}"}}`),
		result("r", `"append"`, `[4]`, "a long result"),
		result("r", `{"op":"replace","startSeq":5,"endSeq":5}`, `[5]`, "[pruned]"),
	})
	_, err := s.appender.Append(t.Context(), session, result("other", `{"op":"replace","startSeq":6,"endSeq":6}`, `[6]`, "[pruned]"))
	if p := refused(t, err, http.StatusUnprocessableEntity, "rule-violation"); p.Rule != "tool-result-rewrite-changes" {
		t.Errorf("rule %s, want tool-result-rewrite-changes", p.Rule)
	}
	// The open call is closed in the format's own shape.
	if err := s.appender.Repair(t.Context(), session); err != nil {
		t.Fatal(err)
	}
	if _, err := s.projector.Messages(t.Context(), session, harness.MinSeq(9)); err != nil {
		t.Fatal(err)
	}
	events, err := s.projector.Events(t.Context(), session)
	if err != nil {
		t.Fatal(err)
	}
	if len(events) != 10 {
		t.Fatalf("%d events after the repair, want 10", len(events))
	}
	var closer struct {
		Message struct {
			ID         string
			Role       string
			ToolCallID string
			IsError    bool
			Content    []struct{ Type, Text string }
		}
		Error struct{ Code string }
	}
	if err := json.Unmarshal(events[7].Data, &closer); err != nil {
		t.Fatal(err)
	}
	m := closer.Message
	if m.ID != "interrupted-tool-result-c2-7" || m.Role != "tool" || m.ToolCallID != "c2" || !m.IsError || closer.Error.Code != "TOOL_NOT_STARTED" ||
		len(m.Content) != 1 || m.Content[0].Type != "text" || m.Content[0].Text == "" {
		t.Errorf("closer %s", events[7].Line)
	}
	if events[8].Type != "step/end" || events[9].Type != "turn/end" {
		t.Errorf("closed by %s and %s", events[8].Type, events[9].Type)
	}
	folded, err := harness.Fold(4, events)
	if err != nil {
		t.Fatal(err)
	}
	messages, err := s.projector.Messages(t.Context(), session, harness.MinSeq(9))
	if err != nil {
		t.Fatal(err)
	}
	if err := harness.SameMessages(messages.Messages, folded.Messages); err != nil {
		t.Error(err)
	}
}

func repairOfAWholeLog(t *testing.T, s stack) {
	const session = "whole"
	mustAppend(t, s.appender, session, []json.RawMessage{
		json.RawMessage(`{"type":"turn/start","data":{"turn":1}}`),
		json.RawMessage(`{"type":"turn/end","data":{"turn":1,"reason":{"kind":"completed"}}}`),
	})
	if err := s.appender.Repair(t.Context(), session); err != nil {
		t.Fatal(err)
	}
	if next, err := s.appender.NextSeq(t.Context(), session); err != nil || next != 2 {
		t.Errorf("next seq %d (%v), want 2", next, err)
	}
}
