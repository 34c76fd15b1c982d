package journal

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/platform"
)

// interleave stores commits of several sessions in random order and returns them by session.
func interleave(t *testing.T, j *Journal, r *rand.Rand, commits int, sessions ...string) map[string][]*events.Commit {
	t.Helper()
	out, writers, after := map[string][]*events.Commit{}, map[string]*journaltest.Writer{}, map[string]uint64{}
	for i := range commits {
		id := sessions[r.IntN(len(sessions))]
		if writers[id] == nil {
			writers[id] = journaltest.NewWriter(id, nil)
		}
		n := 1 + r.IntN(3)
		if r.IntN(8) == 0 {
			n = 1 + r.IntN(25)
		}
		c := writers[id].Commit(fmt.Sprintf("%s-%d", id, i), n, 40+r.IntN(200))
		after[id] = store(t, j, after[id], c)
		out[id] = append(out[id], c)
	}
	return out
}

// TestLocateIsALinearScan: for every seq of every session the commit that bisecting finds is
// the one that a scan finds.
func TestLocateIsALinearScan(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, quick)
	r := rand.New(rand.NewPCG(3, 5))
	ctx := journaltest.Context(t)
	// "rare" has few commits far apart, "early" ends long before the others.
	store(t, j, 0, journaltest.NewWriter("early", nil).Commit("early", 3, 60))
	logs := interleave(t, j, r, 80, "a", "b", "a", "b", "a", "b", "c", "rare", "a", "b")
	for id, commits := range logs {
		i := 0
		last := commits[len(commits)-1].Last
		for seq := events.Seq(0); seq <= last; seq++ {
			for commits[i].Last < seq {
				i++
			}
			c, err := j.Locate(ctx, id, seq)
			if err != nil || c == nil || c.ID != commits[i].ID || c.StreamSeq != commits[i].StreamSeq || string(c.Body) != string(commits[i].Body) {
				t.Fatalf("session %s seq %d: got %+v, %v; want commit %s", id, seq, c, err, commits[i].ID)
			}
		}
		for _, seq := range []events.Seq{last + 1, last + 100, events.MaxSeq} {
			if c, err := j.Locate(ctx, id, seq); c != nil || err != nil {
				t.Errorf("session %s seq %d behind its end: %+v, %v", id, seq, c, err)
			}
		}
	}
	for seq, want := range map[events.Seq]bool{0: true, 2: true, 3: false} {
		if c, err := j.Locate(ctx, "early", seq); (c != nil) != want || err != nil {
			t.Errorf("early %d: %+v, %v", seq, c, err)
		}
	}
	if c, err := j.Locate(ctx, "nobody", 0); c != nil || err != nil {
		t.Errorf("a session without a log: %+v, %v", c, err)
	}
}

// TestLocateInAHole: that a log lacks seqs is an error, and neither its end nor an endless search.
func TestLocateInAHole(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, quick)
	w := journaltest.NewWriter("s", nil)
	a := w.Commit("a", 2, 60) // 0, 1
	w.Next = 5
	b := w.Commit("b", 2, 60) // 5, 6
	c := w.Commit("c", 2, 60) // 7, 8
	store(t, j, 0, a, b, c)
	for seq, want := range map[events.Seq]string{0: "a", 1: "a", 2: "", 4: "", 5: "b", 6: "b", 7: "c", 9: "", events.NoSeq: ""} {
		got, err := j.Locate(journaltest.Context(t), "s", seq)
		if in := seq >= 2 && seq < 5; in != errors.Is(err, &events.Error{Code: events.CodeCorrupt, Rule: events.RuleSeqNotContiguous}) || !in && err != nil || got == nil && want != "" || got != nil && got.ID != want {
			t.Errorf("seq %d: %+v, %v, want %q", seq, got, err, want)
		}
	}
}

// TestLocatePastMessagesThatAreNoCommits: such a message hides no commit before or behind it, and what may
// lie in it is neither absent nor a hole.
func TestLocatePastMessagesThatAreNoCommits(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, quick)
	other := journaltest.NewWriter("other", nil)
	var after uint64
	beside := func() { after = store(t, j, after, other.Commit(fmt.Sprint("o", after), 1, 60)) }
	raw := func() uint64 {
		ack, err := j.js.Publish(journaltest.Context(t), j.Subject("s"), []byte("hello"))
		if err != nil {
			t.Fatal(err)
		}
		return ack.Sequence
	}
	w := journaltest.NewWriter("s", nil)
	beside()
	first := raw()
	end := store(t, j, first, w.Commit("a", 2, 60), w.Commit("b", 1, 60)) // 0, 1; 2
	beside()
	store(t, j, raw(), w.Commit("c", 2, 60)) // 3, 4
	for range 3 {
		beside()
		raw()
	}
	raw()
	for seq, want := range map[events.Seq]string{0: "a", 1: "a", 2: "b", 3: "c", 4: "c", 5: "", 100: ""} {
		got, err := j.Locate(journaltest.Context(t), "s", seq)
		var bad *MalformedError
		if want == "" {
			if got != nil || !errors.As(err, &bad) {
				t.Errorf("seq %d: %+v, %v, want the error of one of the messages", seq, got, err)
			}
		} else if err != nil || got == nil || got.ID != want {
			t.Errorf("seq %d: %+v, %v, want %s", seq, got, err, want)
		}
	}
	if c, skipped, err := j.commitFrom(journaltest.Context(t), "s", first, end-1); err != nil || c == nil || c.ID != "a" || skipped == nil || skipped.StreamSeq != first {
		t.Errorf("%+v, %+v, %v", c, skipped, err)
	}
}

// TestReadingInParts: every way to read finds the same commits behind every one of them, over
// a log that takes several requests by number and by bytes.
func TestReadingInParts(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, Config{})
	ctx := journaltest.Context(t)
	w, other := journaltest.NewWriter("s", nil), journaltest.NewWriter("other", nil)
	var commits []*events.Commit
	var after, otherAfter uint64
	for i := range readBatch + 20 {
		size := 60
		switch i {
		case 6, 7:
			size = readBatchBytes/2 + 100 // the bytes end the answer before the number does
		case 8:
			size = readBatchBytes + 1000 // one alone is more than an answer should have
		}
		c := w.Commit(fmt.Sprintf("c%d", i), 1+i%2*min(1, 60/size), size)
		after = store(t, j, after, c)
		commits = append(commits, c)
		if i%7 == 0 {
			otherAfter = store(t, j, otherAfter, other.Commit(fmt.Sprintf("o%d", i), 1, 60))
		}
	}
	want := ids(commits)
	for name, how := range map[string]struct {
		read   func(context.Context, string, uint64, func(*events.Commit) error) error
		behind []int // how many commits
	}{
		"Read":       {j.Read, []int{0, 9, readBatch - 1, readBatch, readBatch + 1, len(commits) - 1, len(commits)}},
		"ReadToEnd":  {j.ReadToEnd, []int{9, readBatch, len(commits)}},
		"LeaderTail": {j.LeaderTail, []int{readBatch - 20, len(commits) - 1, len(commits)}},
	} {
		read := how.read
		for _, from := range how.behind {
			behind := uint64(0)
			if from > 0 {
				behind = commits[from-1].StreamSeq
			}
			var got []*events.Commit
			if err := read(ctx, "s", behind, collect(&got)); err != nil {
				t.Fatalf("%s behind %d: %v", name, from, err)
			}
			if !slices.Equal(ids(got), want[from:]) {
				t.Errorf("%s behind %d: %d commits, want %d", name, from, len(got), len(want)-from)
			}
			for i, c := range got {
				if w := commits[from+i]; string(c.Body) != string(w.Body) || c.StreamSeq != w.StreamSeq || c.Digest != w.Digest || c.First != w.First {
					t.Errorf("%s: commit %s differs from what was stored", name, c.ID)
				}
			}
		}
		var got []*events.Commit
		if err := read(ctx, "nobody", 0, collect(&got)); err != nil || got != nil {
			t.Errorf("%s of a session without a log: %v, %v", name, ids(got), err)
		}
		if err := read(ctx, "s", after+1000, collect(&got)); err != nil || got != nil {
			t.Errorf("%s behind the stream's end: %v, %v", name, ids(got), err)
		}
		// What the callback returns ends the reading there.
		stop := errors.New("stop")
		n := 0
		err := read(ctx, "s", commits[8].StreamSeq, func(*events.Commit) error {
			if n++; n == 3 {
				return stop
			}
			return nil
		})
		if !errors.Is(err, stop) || n != 3 {
			t.Errorf("%s: stopped with %v after %d", name, err, n)
		}
	}
}

// TestReadingTheLargestCommit: the leader's answer is larger than what a client may send.
func TestReadingTheLargestCommit(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t, func(c *platform.EmbedConfig) { c.MaxPayload = 1 << 20 })
	j := open(t, s, Config{})
	ctx := journaltest.Context(t)
	w := journaltest.NewWriter("s", nil)
	large := w.Commit("large", 1, j.MaxCommit()-100)
	store(t, j, 0, large, w.Commit("behind", 1, 60))
	var got []*events.Commit
	if err := errors.Join(j.Read(ctx, "s", 0, collect(&got)), j.LeaderTail(ctx, "s", 0, collect(&got))); err != nil || len(got) != 4 {
		t.Fatalf("%v, %v", ids(got), err)
	}
	located, err := j.Locate(ctx, "s", 0)
	if err != nil || located == nil {
		t.Fatal(err)
	}
	for _, c := range []*events.Commit{got[0], got[2], located} {
		if c.ID != "large" || string(c.Body) != string(large.Body) {
			t.Errorf("commit %s of %d bytes, want %d", c.ID, len(c.Body), len(large.Body))
		}
	}
}

// TestSinceStartsAtATime, by the server's clock.
func TestSinceStartsAtATime(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, quick)
	w, other := journaltest.NewWriter("s", nil), journaltest.NewWriter("other", nil)
	ctx := journaltest.Context(t)
	after := store(t, j, 0, w.Commit("a", 1, 60), w.Commit("b", 2, 60))
	info, err := j.Info(ctx)
	if err != nil {
		t.Fatal(err)
	}
	between := info.State.LastTime.Add(time.Nanosecond)
	store(t, j, 0, other.Commit("o", 1, 60))
	store(t, j, after, w.Commit("c", 1, 60), w.Commit("d", 1, 60))
	for name, c := range map[string]struct {
		since time.Time
		want  []string
	}{
		"long ago":   {time.Now().Add(-time.Hour), []string{"a", "b", "c", "d"}},
		"in between": {between, []string{"c", "d"}},
		"to come":    {time.Now().Add(time.Hour), nil},
	} {
		var got []*events.Commit
		if err := j.Since(ctx, "s", c.since, collect(&got)); err != nil || !slices.Equal(ids(got), append([]string{}, c.want...)) {
			t.Errorf("%s: %v, %v, want %v", name, ids(got), err, c.want)
		}
	}
}

// TestReadingWithoutAnAnswer: a server that is away is an error, and never the log's end.
func TestReadingWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, Config{ReadTimeout: 200 * time.Millisecond})
	h, err := j.OpenHeaders(journaltest.Context(t))
	if err != nil {
		t.Fatal(err)
	}
	store(t, j, 0, journaltest.NewWriter("s", nil).Commit("a", 1, 60))
	s.Down()
	journaltest.Eventually(t, "the connection to be lost", func() bool { return !j.conns.Read.IsConnected() })
	none := func(*events.Commit) error {
		t.Error("read something")
		return nil
	}
	short := func() context.Context {
		ctx, cancel := context.WithTimeout(journaltest.Context(t), 500*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	for name, call := range map[string]func() error{
		"Read":       func() error { return j.Read(journaltest.Context(t), "s", 0, none) },
		"Since":      func() error { return j.Since(journaltest.Context(t), "s", time.Now().Add(-time.Hour), none) },
		"ReadToEnd":  func() error { return j.ReadToEnd(journaltest.Context(t), "s", 0, none) },
		"LeaderTail": func() error { return j.LeaderTail(journaltest.Context(t), "s", 0, none) },
		"LeaderLast": func() error { _, err := j.LeaderLast(journaltest.Context(t), "s"); return err },
		"Locate":     func() error { _, err := j.Locate(journaltest.Context(t), "s", 0); return err },
		"Subjects":   func() error { _, _, err := j.Subjects(short()); return err },
		"Info":       func() error { _, err := j.Info(short()); return err },
		"Refresh":    func() error { _, err := j.RefreshVocabulary(short()); return err },
		"Header":     func() error { _, err := h.Get(short(), "s"); return err },
		"Follow": func() error {
			_, err := j.Follow(short(), 0, 0, 1, func(Delivery) {}, func(error) {})
			return err
		},
	} {
		if err := call(); code(err) != events.CodeUnavailable {
			t.Errorf("%s: %v, want unavailable", name, err)
		}
	}
	// A caller who goes away hears of just that.
	ctx, leave := context.WithCancel(journaltest.Context(t))
	leave()
	for name, call := range map[string]func() error{
		"Read":       func() error { return j.Read(ctx, "s", 0, none) },
		"LeaderTail": func() error { return j.LeaderTail(ctx, "s", 0, none) },
	} {
		if err := call(); !errors.Is(err, context.Canceled) {
			t.Errorf("%s of a caller who is gone: %v", name, err)
		}
	}
}

// garbage is what may lie on a session's subject when somebody writes around the appender.
func garbage(session string) map[string]*nats.Msg {
	header := func(change func(nats.Header)) nats.Header {
		h := journaltest.NewWriter(session, nil).Commit("forged", 1, 60).Header()
		change(h)
		return h
	}
	body := []byte(`{"type":"goal/change","seq":0,"time":1,"data":{}}` + "\n")
	return map[string]*nats.Msg{
		"no headers":                 {Data: []byte("hello")},
		"nothing at all":             {},
		"of another session":         {Header: journaltest.NewWriter("another", nil).Commit("forged", 1, 60).Header(), Data: body},
		"no id":                      {Header: header(func(h nats.Header) { delete(h, "ce-id") }), Data: body},
		"another type":               {Header: header(func(h nats.Header) { h["ce-type"] = []string{"com.example"} }), Data: body},
		"seq that is no number":      {Header: header(func(h nats.Header) { h["ce-firstseq"] = []string{"-1"} }), Data: body},
		"last before first":          {Header: header(func(h nats.Header) { h["ce-firstseq"] = []string{"5"} }), Data: body},
		"unknown format":             {Header: header(func(h nats.Header) { h["ce-format"] = []string{"9"} }), Data: body},
		"short digest":               {Header: header(func(h nats.Header) { h["ce-digest"] = []string{"ab"} }), Data: body},
		"appends that are no JSON":   {Header: header(func(h nats.Header) { h["ce-appends"] = []string{"["} }), Data: body},
		"a status of the server's":   {Header: nats.Header{"Status": {"404"}, "Description": {"No Messages"}}},
		"the end of a server's list": {Header: nats.Header{"Status": {"204"}, "Description": {"EOB"}}},
	}
}

// TestGarbageInTheLogIsNamed: whatever it is, the reader says where it lies, and what lies
// before and behind it is still read.
func TestGarbageInTheLogIsNamed(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j, nc := open(t, s, quick), s.Conn(t)
	ctx := journaltest.Context(t)
	i := 0
	for name, msg := range garbage("s") { // each in a session of its own
		i++
		session := fmt.Sprintf("session-%d", i)
		if msg.Header.Get("ce-subject") == "s" {
			msg.Header["ce-subject"] = []string{session}
		}
		w := journaltest.NewWriter(session, nil)
		before := store(t, j, 0, w.Commit(session+"-before", 1, 60))
		msg.Subject = j.Subject(session)
		ack, err := nc.RequestMsgWithContext(ctx, msg)
		if err != nil {
			t.Fatal(err)
		}
		at := before + 1
		if !strings.Contains(string(ack.Data), fmt.Sprintf(`"seq":%d`, at)) {
			t.Fatalf("%s: stored as %s", name, ack.Data)
		}
		last := w.Commit(session+"-behind", 1, 60)
		store(t, j, at, last)

		for how, read := range map[string]func(context.Context, string, uint64, func(*events.Commit) error) error{"ReadToEnd": j.ReadToEnd, "LeaderTail": j.LeaderTail} {
			var got []*events.Commit
			err := read(ctx, session, 0, collect(&got))
			bad, ok := errors.AsType[*MalformedError](err)
			if !ok || bad.StreamSeq != at || bad.Subject != msg.Subject || string(bad.Body) != string(msg.Data) || code(err) != events.CodeCorrupt || len(got) != 1 {
				t.Errorf("%s, %s: %v after %v", name, how, err, ids(got))
				continue
			}
			if !strings.Contains(err.Error(), fmt.Sprintf("stream sequence %d", at)) {
				t.Errorf("%s, %s: the error does not say where: %v", name, how, err)
			}
			if err := read(ctx, session, bad.StreamSeq, collect(&got)); err != nil || len(got) != 2 {
				t.Errorf("%s, %s: behind it: %v, %v", name, how, ids(got), err)
			}
		}
		// A writer who finds it in its way hears of it, and stores nothing.
		_, err = j.Publish(ctx, w.Fork().Commit(session+"-late", 1, 60), before)
		if code(err) != events.CodeCorrupt {
			t.Errorf("%s: a publish got %v", name, err)
		}
	}
}

// TestHeadersThatLookLikeTheServersFoolNobody: the server says in headers where a message of a
// batch lies, and puts them behind those of the message, which may have the same names.
func TestHeadersThatLookLikeTheServersFoolNobody(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, quick)
	ctx := journaltest.Context(t)
	for i, forged := range []nats.Header{
		{"Nats-Sequence": {"1"}},
		{"Nats-Sequence": {"no number"}},
		{"Nats-Sequence": {"9999999"}, "Nats-Last-Sequence": {"9999999"}},
		{"Nats-Num-Pending": {"0"}},
		{"Nats-Subject": {j.Subject("another")}, "Nats-Stream": {"OTHER"}},
		{"Nats-Time-Stamp": {"yesterday"}},
		{"Status": {"404"}, "Description": {"Message Not Found"}},
		{"Status": {"204"}, "Description": {"EOB"}},
		{"Nats-Sequence": {"1", "2"}, "Nats-Num-Pending": {"0", "0"}},
	} {
		session := fmt.Sprintf("session-%d", i)
		w := journaltest.NewWriter(session, nil)
		commits := []*events.Commit{w.Commit(session+"-a", 1, 60), w.Commit(session+"-b", 2, 60), w.Commit(session+"-c", 1, 60)}
		for _, c := range commits {
			msg := &nats.Msg{Subject: j.Subject(session), Header: c.Header(), Data: c.Body}
			if c == commits[1] {
				for name, v := range forged {
					msg.Header[name] = v
				}
			}
			if _, err := j.JetStream().PublishMsg(ctx, msg); err != nil {
				t.Fatal(err)
			}
		}
		for name, read := range map[string]func(func(*events.Commit) error) error{
			"Read":       func(f func(*events.Commit) error) error { return j.Read(ctx, session, 0, f) },
			"Since":      func(f func(*events.Commit) error) error { return j.Since(ctx, session, time.Now().Add(-time.Hour), f) },
			"LeaderTail": func(f func(*events.Commit) error) error { return j.LeaderTail(ctx, session, 0, f) },
		} {
			var got []*events.Commit
			if err := read(collect(&got)); err != nil || !slices.Equal(ids(got), ids(commits)) {
				t.Errorf("%v, %s: %v, %v, want %v", forged, name, ids(got), err, ids(commits))
			}
			for k := range got {
				if at := uint64(3*i + k + 1); got[k].StreamSeq != at {
					t.Errorf("%v, %s: commit %d at stream sequence %d, want %d", forged, name, k, got[k].StreamSeq, at)
				}
			}
		}
	}
	// Headers that no client can read: the message is named, and what lies behind it is read.
	w := journaltest.NewWriter("s", nil)
	at := store(t, j, 0, w.Commit("before", 1, 60)) + 1
	raw := "NATS/1.0\r\nno colon\r\n\r\n"
	conn, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, "CONNECT {\"verbose\":false,\"headers\":true}\r\nHPUB %s %d %d\r\n%shello\r\nPING\r\n", j.Subject("s"), len(raw), len(raw)+5, raw); err != nil {
		t.Fatal(err)
	}
	journaltest.Eventually(t, "the message to be stored", func() bool {
		_, err := j.Stored(ctx, "s", at)
		return code(err) == events.CodeCorrupt
	})
	store(t, j, at, w.Commit("behind", 1, 60))
	for name, read := range map[string]func(uint64, func(*events.Commit) error) error{
		"Read": func(after uint64, f func(*events.Commit) error) error { return j.Read(ctx, "s", after, f) },
		"Since": func(after uint64, f func(*events.Commit) error) error {
			if after > 0 {
				return j.Read(ctx, "s", after, f)
			}
			return j.Since(ctx, "s", time.Now().Add(-time.Hour), f)
		},
		"LeaderTail": func(after uint64, f func(*events.Commit) error) error { return j.LeaderTail(ctx, "s", after, f) },
	} {
		var got []*events.Commit
		err := read(0, collect(&got))
		bad, ok := errors.AsType[*MalformedError](err)
		if !ok || bad.StreamSeq != at || string(bad.Body) != "hello" || len(got) != 1 {
			t.Errorf("%s: %v after %v", name, err, ids(got))
			continue
		}
		if err := read(at, collect(&got)); err != nil || len(got) != 2 {
			t.Errorf("%s: behind it: %v, %v", name, ids(got), err)
		}
	}
}
