package audit_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/snapshot"
)

// Nothing is found where nothing is wrong.
func TestCleanSessionsHaveNoFindings(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const sessions = 1000
	var total int64
	var wg sync.WaitGroup
	for lane := range 4 {
		wg.Go(func() {
			for i := lane; i < sessions; i += 4 {
				id := fmt.Sprintf("session %d/ü", i)
				if i%5 == 0 {
					if _, _, err := w.Create(journaltest.Context(t), id, []byte(`{"version":4,"cwd":"/tmp","origin":"test"}`)); err != nil {
						t.Error(err)
						return
					}
				}
				raws := []string{user("a"), user("b"), `{"type":"x/opaque","ignorable":true,"data":[1.10,"\ud800"]}`}
				for range i % 4 {
					raws = append(raws, user(strings.Repeat("x", i%10*3<<10)))
				}
				raws = append(raws, replace([]events.Seq{0, 1}, "summary"))
				if i%4 > 0 { // all as one commit
					w.append(id, raws...)
					continue
				}
				for _, raw := range raws {
					w.append(id, raw)
				}
			}
		})
	}
	wg.Wait()
	for i := range sessions {
		total += int64(4 + i%4)
	}
	heard := 0
	r := w.all(audit.Options{Wait: 45 * time.Second, Each: func(s *audit.SessionReport) {
		heard++
		if s.LastSeq != s.HeadSeq || s.Events != int64(s.LastSeq)+1 || s.Digest == "" || s.Chain == "" || s.Findings == nil {
			t.Errorf("%+v", s)
		}
	}})
	if !r.OK() || r.Sessions != sessions || heard != sessions || r.Events != total || r.Pages == 0 {
		t.Errorf("%d sessions (%d heard of), %d events, %d pages, findings %v; want %d sessions, %d events", r.Sessions, heard, r.Events, r.Pages, r.Findings, sessions, total)
	}
	w.stop()
	if r := w.all(audit.Options{LogOnly: true}); !r.OK() || r.Sessions != sessions || r.Pages != 0 {
		t.Errorf("the log alone: %+v", r)
	}
}

// A session that is appended to, projected and rewritten all the while has no findings either.
func TestMovingSessionsHaveNoFindings(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append("hot", user("zero"))
	done := make(chan struct{})
	go func() {
		defer close(done)
		nodes := []events.Seq{0}
		for n := events.Seq(1); n < 400; n++ {
			if len(nodes) > 20 {
				w.append("hot", replace(nodes[3:12], "summary"))
				nodes = slices.Concat(nodes[:3], []events.Seq{n}, nodes[12:])
				continue
			}
			w.append("hot", user(strings.Repeat("x", int(n)%5*9000+10)))
			nodes = append(nodes, n)
		}
	}()
	rounds := 0
	for moving := true; moving; rounds++ {
		select {
		case <-done:
			moving = false
		default:
		}
		r, err := w.Some(journaltest.Context(t), []string{"hot"}, audit.Options{Wait: 45 * time.Second})
		if err != nil || !r.OK() || !moving && r.Events != 400 {
			t.Errorf("%v, %+v", err, r)
			break
		}
	}
	<-done
	t.Logf("verified %d times", rounds)
}

// victim is a session that is tampered with: five commits, of seqs 0-2, 3, 4-6, 7 and 8. Each of
// its large messages, 3, 4 and 7, has a page of its own: page 0 holds 0-2, page 1 3, page 2 4,
// page 3 5 and 6, page 4 7, and 8 is the tail.
type victim struct {
	*world
	id string
	at []uint64 // stream sequences of its commits, and of what tampering added
}

func (w *world) victim(id string) {
	w.append(id, user("zero"), user("one"), user("two"))
	w.append(id, user(strings.Repeat("3", 70<<10)))
	w.append(id, user(strings.Repeat("4", 70<<10)), user("five"), user("six"))
	w.append(id, user(strings.Repeat("7", 70<<10)))
	w.append(id, user("eight"))
}

// add stores a commit with one line behind the victim's log, around the appender.
func (v *victim) add(raw func(seq events.Seq) string, change func(*events.Commit)) {
	v.at = append(v.at, v.store(v.id, raw, change))
}

// raw stores a message behind the victim's log.
func (v *victim) raw(h nats.Header, body string) {
	v.t.Helper()
	ack, err := v.js.PublishMsg(journaltest.Context(v.t), &nats.Msg{Subject: v.log.Subject(v.id), Header: h, Data: []byte(body)})
	if err != nil {
		v.t.Fatal(err)
	}
	v.at = append(v.at, ack.Sequence)
}

// edit changes a value of the bucket.
func (v *victim) edit(key, old, with string) {
	v.t.Helper()
	was := v.get(key)
	is := strings.Replace(was, old, with, 1)
	if is == was {
		v.t.Fatalf("%s is not in %s: %.300s", old, key, was)
	}
	v.put(key, is)
}

// tampering is one row: what is done to a victim, and where that must be found.
type tampering struct {
	log    func(ms []*jetstream.RawStreamMsg) // changes its messages, before the stream is made anew
	bucket func(v *victim)                    // changes anything else, after that
	// want has, for a stream sequence, the ordinal of the message in the session's log, from 1;
	// for a session and a key nothing: the victim's, and its head's or the page's number.
	want []place
}

func body(ordinal int, change func([]byte) []byte) func([]*jetstream.RawStreamMsg) {
	return func(ms []*jetstream.RawStreamMsg) { ms[ordinal-1].Data = change(ms[ordinal-1].Data) }
}

func swap(old, with string) func([]byte) []byte {
	return func(b []byte) []byte { return bytes.Replace(b, []byte(old), []byte(with), 1) }
}

func header(ordinal int, name, value string) func([]*jetstream.RawStreamMsg) {
	return func(ms []*jetstream.RawStreamMsg) { ms[ordinal-1].Header[name] = []string{value} }
}

func at(check string, seq events.Seq, ordinal uint64) place {
	return place{check: check, seq: seq, streamSeq: ordinal}
}

func rule(r events.Rule, seq events.Seq, ordinal uint64) place {
	return place{check: audit.CheckRule, seq: seq, streamSeq: ordinal, rule: r}
}

func page(n int) place {
	return place{check: audit.CheckPage, seq: events.NoSeq, key: fmt.Sprintf(".%d", n)}
}

// head is a finding about the head, which names the seq at which the log ends, NoSeq when it
// cannot be read.
func head(seq events.Seq) place { return place{check: audit.CheckHead, seq: seq, key: "head"} }

// behind is the finding that the head does not reach the log's end.
func behind(seq events.Seq) place { return place{check: audit.CheckProjection, seq: seq, key: "head"} }

func evil(seq events.Seq) string {
	return line("user/message", seq, `,"surfaceOp":"append"`, message("evil"))
}

var tamperings = map[string]tampering{
	"nothing": {},

	"a byte of a message":            {log: body(3, swap("five", "fife")), want: []place{at(audit.CheckDigest, 6, 3)}},
	"a byte of the last message":     {log: body(5, swap("eight", "night")), want: []place{at(audit.CheckDigest, 8, 5)}},
	"a digit of an event's time":     {log: body(2, swap(`"time":1`, `"time":2`)), want: []place{at(audit.CheckDigest, 3, 2)}},
	"a byte that breaks the JSON":    {log: body(1, swap(`"role"`, `"role`)), want: []place{rule(events.RuleJSONMalformed, 0, 1), at(audit.CheckDigest, 2, 1)}},
	"a byte that breaks the message": {log: body(1, swap(`"id":"u"`, `"ie":"u"`)), want: []place{rule(events.RuleMessageMalformed, 0, 1), at(audit.CheckDigest, 2, 1)}},
	"white space":                    {log: body(4, swap(`"data":{`, `"data":{ `)), want: []place{rule(events.RuleEnvelopeMalformed, 7, 4), at(audit.CheckDigest, 7, 4)}},
	"an event's seq":                 {log: body(3, swap(`"seq":5`, `"seq":9`)), want: []place{at(audit.CheckContiguity, 9, 3), at(audit.CheckDigest, 6, 3)}},
	"an event taken out": {
		log:  body(3, func(b []byte) []byte { return b[bytes.IndexByte(b, '\n')+1:] }),
		want: []place{at(audit.CheckContiguity, 5, 3), at(audit.CheckContiguity, 6, 3), at(audit.CheckContiguity, 6, 3), at(audit.CheckDigest, 6, 3)},
	},
	"the last event of a commit taken out": {
		log:  body(3, func(b []byte) []byte { return b[:bytes.LastIndexByte(b[:len(b)-1], '\n')+1] }),
		want: []place{at(audit.CheckContiguity, 6, 3), at(audit.CheckDigest, 6, 3)},
	},
	"two messages swapped": {
		log: func(ms []*jetstream.RawStreamMsg) { *ms[2], *ms[3] = *ms[3], *ms[2] },
		want: []place{
			at(audit.CheckContiguity, 7, 3), at(audit.CheckDigest, 7, 3), at(audit.CheckChain, 7, 3),
			at(audit.CheckContiguity, 4, 4), at(audit.CheckDigest, 6, 4), at(audit.CheckChain, 6, 4),
			at(audit.CheckContiguity, 8, 5), at(audit.CheckDigest, 8, 5), at(audit.CheckChain, 8, 5),
		},
	},
	"a message removed": {
		bucket: func(v *victim) { v.remove(v.at[2]) },
		want:   []place{at(audit.CheckContiguity, 7, 4), at(audit.CheckDigest, 7, 4), at(audit.CheckChain, 7, 4)},
	},
	"the first message removed": {
		bucket: func(v *victim) { v.remove(v.at[0]) },
		want:   []place{at(audit.CheckContiguity, 3, 2), at(audit.CheckDigest, 3, 2), at(audit.CheckChain, 3, 2)},
	},
	"a stream truncated under a newer head": {
		bucket: func(v *victim) {
			v.remove(v.at[3])
			v.remove(v.at[4])
		},
		want: []place{head(6)},
	},
	"the last message removed": {bucket: func(v *victim) { v.remove(v.at[4]) }, want: []place{head(7)}},
	"a message given twice": {
		bucket: func(v *victim) {
			m := v.message(v.at[4])
			v.raw(ceHeaders(m.Header), string(m.Data))
		},
		want: []place{at(audit.CheckContiguity, 8, 6), at(audit.CheckDigest, 8, 6), at(audit.CheckChain, 8, 6)},
	},

	"the actor":            {log: header(3, "ce-actor", "bob"), want: []place{at(audit.CheckChain, 6, 3)}},
	"the time of a commit": {log: header(5, "ce-time", "2020-01-01T00:00:00.000Z"), want: []place{at(audit.CheckChain, 8, 5)}},
	"the id of a commit":   {log: header(1, "ce-id", "x"), want: []place{at(audit.CheckChain, 2, 1)}},
	"the chain":            {log: header(2, "ce-chain", strings.Repeat("ab", 32)), want: []place{at(audit.CheckChain, 3, 2), at(audit.CheckChain, 6, 3)}},
	"the digest": {
		log:  header(2, "ce-digest", strings.Repeat("ab", 32)),
		want: []place{at(audit.CheckDigest, 3, 2), at(audit.CheckChain, 3, 2), at(audit.CheckDigest, 6, 3)},
	},
	"the first seq": {
		log: header(3, "ce-firstseq", "5"),
		want: []place{
			at(audit.CheckContiguity, 5, 3), at(audit.CheckCommit, 6, 3), at(audit.CheckContiguity, 4, 3), at(audit.CheckContiguity, 5, 3), at(audit.CheckContiguity, 6, 3),
			at(audit.CheckContiguity, 6, 3), at(audit.CheckChain, 6, 3),
		},
	},
	"the last seq": {
		log:  header(3, "ce-lastseq", "7"),
		want: []place{at(audit.CheckContiguity, 7, 3), at(audit.CheckChain, 7, 3), at(audit.CheckContiguity, 7, 4)},
	},
	"the source of a commit":    {log: header(3, "ce-source", "/sessions/x"), want: []place{at(audit.CheckCommit, 6, 3)}},
	"the sequence of a commit":  {log: header(4, "ce-sequence", "00000000000000000008"), want: []place{at(audit.CheckCommit, 7, 4)}},
	"the media type":            {log: header(1, "ce-datacontenttype", "text/plain"), want: []place{at(audit.CheckCommit, 2, 1)}},
	"a key of another's events": {log: header(4, "ce-appends", `[{%22key%22:%22k%22,%22first%22:0,%22last%22:7}]`), want: []place{at(audit.CheckCommit, 7, 4)}},
	"the format":                {log: header(3, "ce-format", "4"), want: []place{at(audit.CheckChain, 6, 3), rule("", 4, 3)}},
	"the session of a commit": {
		log:  header(4, "ce-subject", "other"),
		want: []place{at(audit.CheckMessage, events.NoSeq, 4), at(audit.CheckContiguity, 8, 5), at(audit.CheckDigest, 8, 5), at(audit.CheckChain, 8, 5)},
	},
	"the type of the last commit": {log: header(5, "ce-type", "x"), want: []place{at(audit.CheckMessage, events.NoSeq, 5)}},

	"an event written around the appender": {
		bucket: func(v *victim) {
			v.add(evil, func(c *events.Commit) { c.Digest, c.Chain = events.Digest{1}, events.Digest{2} })
		},
		want: []place{at(audit.CheckDigest, 9, 6), at(audit.CheckChain, 9, 6)},
	},
	"an event that breaks a rule, well chained": {
		bucket: func(v *victim) {
			v.add(func(seq events.Seq) string {
				return line("user/message", seq, `,"surfaceOp":{"op":"replace","startSeq":5,"endSeq":2},"sourceEventSeqs":[2,3,4,5]`, message("evil"))
			}, nil)
		},
		want: []place{rule(events.RuleRangeInverted, 9, 6)},
	},
	"an event of an unknown type, well chained": {
		bucket: func(v *victim) {
			v.add(func(seq events.Seq) string { return line("x/unknown", seq, "", "1") }, nil)
		},
		want: []place{rule(events.RuleUnknownType, 9, 6)},
	},
	"a good event, well chained, that no projector saw": {bucket: func(v *victim) { v.add(evil, nil) }, want: []place{behind(9)}},
	"something that is no commit":                       {bucket: func(v *victim) { v.raw(nil, "hello") }, want: []place{at(audit.CheckMessage, events.NoSeq, 6)}},

	"the session's header": {
		bucket: func(v *victim) {
			v.setHeader(v.id, `{"version":3,"id":"`+v.id+`","createdAt":1,"isSeeded":false,"delegationDepth":0}`)
		},
		want: []place{at(audit.CheckChain, 2, 1)},
	},
	"the session's header taken away": {bucket: func(v *victim) { v.setHeader(v.id, "") }, want: []place{at(audit.CheckHeader, events.NoSeq, 0)}},
	"the session's header damaged":    {bucket: func(v *victim) { v.setHeader(v.id, "{") }, want: []place{at(audit.CheckHeader, events.NoSeq, 0)}},

	"the head's seq, ahead":       {bucket: func(v *victim) { v.edit(v.id, `"seq":8,`, `"seq":9,`) }, want: []place{head(8)}},
	"the head's seq, behind":      {bucket: func(v *victim) { v.edit(v.id, `"seq":8,`, `"seq":7,`) }, want: []place{behind(8)}},
	"the head's digest":           {bucket: func(v *victim) { v.edit(v.id, `"digest":"`, `"digest":"0`) }, want: []place{head(8)}},
	"the head's chain":            {bucket: func(v *victim) { v.edit(v.id, `"chain":"`, `"chain":"0`) }, want: []place{head(8)}},
	"the head's stream sequence":  {bucket: func(v *victim) { v.edit(v.id, `"streamSeq":`, `"streamSeq":1`) }, want: []place{head(8)}},
	"the head's node count":       {bucket: func(v *victim) { v.edit(v.id, `"nodeCount":9`, `"nodeCount":8`) }, want: []place{head(8)}},
	"a message in the tail":       {bucket: func(v *victim) { v.edit(v.id, "eight", "night") }, want: []place{head(8)}},
	"the head's spelling":         {bucket: func(v *victim) { v.edit(v.id, `"v":1,`, `"v":1, `) }, want: []place{head(8)}},
	"the head is no JSON":         {bucket: func(v *victim) { v.put(v.id, "{") }, want: []place{head(events.NoSeq)}},
	"the head of another session": {bucket: func(v *victim) { v.edit(v.id, `"session":"`, `"session":"x`) }, want: []place{head(events.NoSeq)}},
	"the head taken away":         {bucket: func(v *victim) { v.purge(v.id) }, want: []place{behind(8)}},

	"two pages swapped": {
		bucket: func(v *victim) {
			a, b := v.get(v.id+".1"), v.get(v.id+".2")
			v.put(v.id+".1", b)
			v.put(v.id+".2", a)
		},
		want: []place{page(1), page(2)},
	},
	"a byte of a page":          {bucket: func(v *victim) { v.edit(v.id+".3", "five", "fife") }, want: []place{page(3)}},
	"a page that is no JSON":    {bucket: func(v *victim) { v.put(v.id+".0", "") }, want: []place{page(0)}},
	"a page taken away":         {bucket: func(v *victim) { v.purge(v.id + ".4") }, want: []place{page(4)}},
	"a page that no head names": {bucket: func(v *victim) { v.put(v.id+".77", "x") }},
	"a page and the head": {
		bucket: func(v *victim) {
			v.edit(v.id, "eight", "night")
			v.purge(v.id + ".2")
		},
		want: []place{head(8), page(2)},
	},
}

// What is tampered with is named, and nothing else is.
func TestTamperingIsNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	names := slices.Sorted(maps.Keys(tamperings))
	var wg sync.WaitGroup
	for lane := range 4 {
		wg.Go(func() {
			for i := lane; i < len(names); i += 4 {
				w.victim(fmt.Sprintf("victim-%d", i))
			}
		})
	}
	wg.Wait()
	victims := map[string]*victim{} // by subject
	for i, name := range names {
		v := &victim{world: w, id: fmt.Sprintf("victim-%d", i)}
		victims[w.log.Subject(v.id)] = v
		if _, ok := tamperings[name]; !ok {
			t.Fatal(name)
		}
	}
	if r := w.all(audit.Options{Wait: 45 * time.Second}); !r.OK() || r.Pages != 5*len(names) {
		t.Fatalf("before anything was done: %d pages, %v", r.Pages, r.Findings)
	}
	w.stop()
	w.rewrite(func(all []*jetstream.RawStreamMsg) {
		own := map[string][]*jetstream.RawStreamMsg{}
		for _, m := range all {
			own[m.Subject] = append(own[m.Subject], m)
			victims[m.Subject].at = append(victims[m.Subject].at, m.Sequence)
		}
		for i, name := range names {
			if change := tamperings[name].log; change != nil {
				change(own[w.log.Subject(fmt.Sprintf("victim-%d", i))])
			}
		}
	})
	for i, name := range names {
		if change := tamperings[name].bucket; change != nil {
			change(victims[w.log.Subject(fmt.Sprintf("victim-%d", i))])
		}
	}
	r := w.all(audit.Options{Wait: 300 * time.Millisecond})
	for i, name := range names {
		v := victims[w.log.Subject(fmt.Sprintf("victim-%d", i))]
		var got, want []place
		for _, f := range r.Findings {
			if f.Session != v.id {
				continue
			}
			got = append(got, placeOf(f))
			if f.Detail == "" || !strings.HasPrefix(f.String(), v.id+": "+f.Check) {
				t.Errorf("%s: it is told as %q", name, f.String())
			}
		}
		for _, p := range tamperings[name].want {
			p.session = v.id
			if p.streamSeq > 0 {
				p.streamSeq = v.at[p.streamSeq-1]
			}
			switch {
			case p.key == "head":
				p.key = v.id
			case p.key != "":
				p.key = v.id + p.key
			}
			want = append(want, p)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: found\n%+v\nwant\n%+v", name, got, want)
		}
	}
}

// What belongs to no session is told too.
func TestStrayThingsAreNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append("other", user("zero"))
	w.settle("other")
	ctx := journaltest.Context(t)
	if _, err := w.js.Publish(ctx, w.log.Config().Prefix+".1.=zz", []byte("hello")); err != nil {
		t.Fatal(err)
	}
	w.put("ghost", "{")
	if _, _, err := w.Create(ctx, "empty", nil); err != nil {
		t.Fatal(err)
	}
	w.put("empty", strings.Replace(w.get("other"), `"session":"other"`, `"session":"empty"`, 1))
	var got []place
	for _, f := range w.all(audit.Options{}).Findings {
		got = append(got, placeOf(f))
	}
	want := []place{
		{"", audit.CheckMessage, events.NoSeq, 0, "", ""},
		{"empty", audit.CheckHead, events.NoSeq, 0, "empty", ""},
		{"ghost", audit.CheckHeader, events.NoSeq, 0, "", ""},
		{"ghost", audit.CheckHead, events.NoSeq, 0, "ghost", ""},
	}
	if !slices.Equal(got, want) {
		t.Errorf("found\n%+v\nwant\n%+v", got, want)
	}
}

// An index page is compared too.
func TestTamperedIndexPageIsNamed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	raws := []string{}
	for range 7 {
		raws = append(raws, user(strings.Repeat("x", 33<<10)))
	}
	for range 38 {
		w.append("wide", raws...)
	}
	// Its ends lie in pages that the auditor has let go of by then.
	w.append("wide", replace([]events.Seq{1, 2, 3}, "summary"))
	w.append("wide", raws...)
	w.settle("wide")
	if r := w.all(audit.Options{}); !r.OK() || r.Pages < 257 {
		t.Fatalf("%d pages, %v", r.Pages, r.Findings)
	}
	h, err := snapshot.ParseHead([]byte(w.get("wide")), "wide")
	if err != nil || len(h.Index) != 1 || h.ReplaceGeneration != 1 {
		t.Fatalf("%v, %+v", err, h)
	}
	key := snapshot.IndexKey("wide", h.Index[0])
	w.put(key, strings.Replace(w.get(key), `"bytes":`, `"bytes":1`, 1))
	r := w.all(audit.Options{})
	if len(r.Findings) != 1 || r.Findings[0].Key != key || r.Findings[0].Check != audit.CheckPage {
		t.Errorf("found %v", r.Findings)
	}
	w.purge(key)
	if r = w.all(audit.Options{}); len(r.Findings) != 1 || r.Findings[0].Key != key || r.Findings[0].Detail != "the page is missing" {
		t.Errorf("found %v", r.Findings)
	}
}

// A session whose header is gone is folded in the format that its commits say.
func TestHeaderOfFormat4TakenAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if _, _, err := w.Create(journaltest.Context(t), "four", []byte(`{"version":4}`)); err != nil {
		t.Fatal(err)
	}
	w.append("four", `{"type":"developer/message","surfaceOp":"append","data":{"message":{"id":"d","role":"developer","source":{"kind":"x"},"content":[1]}}}`)
	w.settle("four")
	w.setHeader("four", "")
	r := w.all(audit.Options{})
	if len(r.Findings) != 1 || r.Findings[0].Check != audit.CheckHeader {
		t.Errorf("found %v", r.Findings)
	}
}

// A type that another process added to the vocabulary since the auditor started is known.
func TestVocabularyIsReadAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append("s", user("zero"))
	w.journal("x/new")
	w.store("s", func(seq events.Seq) string { return line("x/new", seq, "", "1") }, nil)
	w.stop()
	stale := w.all(audit.Options{LogOnly: true})
	if !stale.OK() || stale.Events != 2 {
		t.Errorf("%+v", stale)
	}
}

// Broken lifecycle rules are counted, and are no findings.
func TestLifecycleIsReported(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append("a", `{"type":"turn/start","data":{"turn":1}}`, `{"type":"turn/start","data":{"turn":2}}`, `{"type":"step/end","data":{"turn":2,"step":9}}`)
	w.append("b", `{"type":"turn/start","data":{"turn":1}}`, `{"type":"turn/start","data":{"turn":2}}`)
	r := w.all(audit.Options{})
	if !r.OK() || r.Violations["turn-overlap"] != 2 || r.Violations["step-mismatch"] != 1 || len(r.Violations) != 2 {
		t.Errorf("findings %v, violations %v", r.Findings, r.Violations)
	}
}

// A head that is still to come is waited for.
func TestLagIsWaitedFor(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.stop()
	w.append("s", user("zero"))
	ctx := journaltest.Context(t)
	r, err := w.Some(ctx, []string{"s"}, audit.Options{Wait: time.Millisecond})
	if err != nil || len(r.Findings) != 1 || r.Findings[0].Check != audit.CheckProjection {
		t.Fatalf("%v, %v", err, r)
	}
	type answer struct {
		r   *audit.Report
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		r, err := w.Some(ctx, []string{"s"}, audit.Options{Wait: time.Minute})
		answers <- answer{r, err}
	}()
	if err := w.worker.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if a := journaltest.Await(t, "the report", answers); a.err != nil || !a.r.OK() {
		t.Errorf("%v, %v", a.err, a.r)
	}
}

// What is no session is an error, and so is trouble with JetStream; neither is a finding.
func TestTroubleIsNoFinding(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	if _, err := w.Session(ctx, "nowhere", audit.Options{}); !errors.Is(err, events.ErrSessionNotFound) {
		t.Errorf("a session that is not there: %v", err)
	}
	if _, err := w.Session(ctx, "a\nb", audit.Options{}); !errors.Is(err, &events.Error{Code: events.CodeSessionID}) {
		t.Errorf("a bad id: %v", err)
	}
	for i := range 20 {
		w.append("s"+strconv.Itoa(i), user("zero"))
	}
	if r, err := w.Some(ctx, []string{"s1", "nowhere", "s2"}, audit.Options{}); !errors.Is(err, events.ErrSessionNotFound) || r.Sessions != 2 {
		t.Errorf("with one that is not there: %v, %+v", err, r)
	}
	if _, _, err := w.Create(ctx, "empty", nil); err != nil {
		t.Fatal(err)
	}
	if r, err := w.Session(ctx, "empty", audit.Options{}); err != nil || len(r.Findings) != 0 || r.LastSeq != events.NoSeq {
		t.Errorf("an empty session: %v, %+v", err, r)
	}
	gone, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := w.All(gone, audit.Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that went away: %v", err)
	}
	if r, err := w.Repair(ctx, "s1", ""); err != nil || r != (*appender.Receipt)(nil) {
		t.Errorf("repair of a balanced log: %v, %v", r, err)
	}
	w.stop()
	w.srv.Down()
	short, cancel2 := context.WithTimeout(ctx, 200*time.Millisecond)
	defer cancel2()
	if r, err := w.Some(short, []string{"s1"}, audit.Options{}); err == nil || len(r.Findings) != 0 {
		t.Errorf("with the server away: %v, %+v", err, r)
	}
	w.srv.Up()
}

// However little memory there is, all sessions are verified: then one after the other.
func TestAllWithLittleMemoryFindsTheSame(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for i := range 12 {
		w.append(fmt.Sprintf("s%d", i), user("zero"), user(strings.Repeat("x", 70<<10)), user("two"))
	}
	for i := range 12 {
		w.projected(fmt.Sprintf("s%d", i))
	}
	w.put(snapshot.PageKey("s7", 0), `{"v":1,"nodes":[]}`)
	want := w.all(audit.Options{})
	if want.Sessions != 12 || want.Pages == 0 || len(want.Findings) != 1 {
		t.Fatalf("%+v", want)
	}
	for _, o := range []audit.Options{{Memory: 1}, {Memory: 200 << 10, Parallel: 3}, {Memory: 1, Parallel: 1}} {
		got := w.all(o)
		if got.Sessions != 12 || got.Events != want.Events || got.Pages != want.Pages || len(got.Findings) != 1 {
			t.Errorf("%+v: %+v, want %+v", o, got, want)
			continue
		}
		if f, w := got.Findings[0], want.Findings[0]; f.Session != w.Session || f.Check != w.Check || f.Key != w.Key {
			t.Errorf("%+v: found %v, want %v", o, f, w)
		}
	}
}

// Sessions of many partitions that do not fit into memory together are verified in a few readings of the
// log, each of which leaves out the partitions of the others.
func TestAllReadsTheLogAFewTimes(t *testing.T) {
	t.Parallel()
	w := newWorldOf(t, 64)
	for i := range 30 {
		w.append(fmt.Sprintf("s%d", i), user("zero"), user("one"))
	}
	for i := range 30 {
		w.append(fmt.Sprintf("s%d", i), user("two"))
		w.projected(fmt.Sprintf("s%d", i))
	}
	(&victim{world: w, id: "s7"}).edit("s7", "two", "too")
	for _, memory := range []int64{0, 60 << 10, 30 << 10, 10 << 10} {
		var messages int
		r := w.all(audit.Options{Memory: memory, Read: func(n int) { messages += n }})
		if r.Sessions != 30 || r.Events != 90 || r.Commits != 60 || messages != 60 || len(r.Findings) != 1 {
			t.Errorf("with memory of %d bytes, %d messages read: %+v", memory, messages, r)
			continue
		}
		if f := r.Findings[0]; f.Session != "s7" || f.Check != audit.CheckHead || f.Key != "s7" || !strings.HasPrefix(f.Detail, "tail: ") {
			t.Errorf("with memory of %d bytes: %v", memory, f)
		}
	}
}

// Of a session that is rewritten again and again, what is kept is what is on the surface.
func TestSessionThatIsRewrittenOften(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var next events.Seq
	var nodes []events.Seq
	for round := range 8 {
		var raws []string
		for i := range 30 {
			raws = append(raws, user(fmt.Sprintf("%d of round %d", i, round)))
			nodes = append(nodes, next)
			next++
		}
		w.append("s", append(raws, replace(nodes[1:], fmt.Sprintf("summary of round %d", round)))...)
		nodes = []events.Seq{nodes[0], next}
		next++
	}
	w.append("s", user("the last"))
	w.settle("s")
	if r := w.all(audit.Options{}); !r.OK() || r.Events != int64(next)+1 {
		t.Fatalf("%+v", r)
	}
	v := &victim{world: w, id: "s"}
	was := v.get("s")
	for _, text := range []string{"0 of round 0", "summary of round 7", "the last"} {
		v.edit("s", text, "something else")
		if r := w.all(audit.Options{}); len(r.Findings) != 1 || r.Findings[0].Check != audit.CheckHead {
			t.Errorf("%s changed: %+v", text, r)
		}
		v.put("s", was)
	}
}
