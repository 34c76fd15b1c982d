package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"palimpsest/client"
)

// cutting is a network that breaks every answer of a stream off after some bytes.
type cutting struct {
	under http.RoundTripper
	mu    sync.Mutex // guards the two below
	rng   *rand.Rand
	most  int // bytes
	cuts  int
}

func (c *cutting) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := c.under.RoundTrip(r)
	if err != nil || !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		return resp, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cuts++
	resp.Body = &cutBody{resp.Body, 1 + c.rng.IntN(c.most)}
	return resp, nil
}

type cutBody struct {
	io.ReadCloser
	left int
}

func (b *cutBody) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, io.ErrUnexpectedEOF
	}
	n, err := b.ReadCloser.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

func say(id string) client.Event {
	return client.Event{Type: "user/message", SurfaceOp: client.Append(), Data: map[string]any{
		"id": id, "role": "user", "source": map[string]any{"kind": "user"}, "content": []any{map[string]any{"type": "text", "text": id}},
	}}
}

func TestWatchResumesWithoutGapsAndRepeats(t *testing.T) {
	t.Parallel()
	cut := &cutting{rng: rand.New(rand.NewPCG(1, 2)), most: 900}
	c := dial(t, nil, func(cfg *client.Config) {
		cut.under = cfg.HTTPClient.Transport
		cfg.HTTPClient = &http.Client{Transport: cut}
	})
	s := fresh(c, "watched")
	first, err := s.Append(within(t), []client.Event{say("0"), say("1"), say("2")})
	if err != nil {
		t.Fatal(err)
	}
	const rounds = 30
	go func() {
		for i := range rounds {
			if _, err := s.Append(within(t), []client.Event{say("x"), say("y")}); err != nil {
				t.Error(err)
				return
			}
			if i%5 == 4 {
				v, err := s.Surface(within(t), client.Fresh())
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := s.Compact(within(t), client.Compaction{Start: v.Nodes[0].Seq, End: v.Nodes[2].Seq, Summary: "less"}); err != nil {
					t.Error(err)
					return
				}
			}
		}
		if _, err := s.Append(within(t), []client.Event{{Type: "system/message", SurfaceOp: client.Append(), Data: map[string]any{"turn": 1, "step": 1,
			"message": map[string]any{"id": "end", "role": "system", "source": map[string]any{"kind": "system"}, "content": []any{map[string]any{"type": "text", "text": "end"}}}}}}); err != nil {
			t.Error(err)
		}
	}()
	surface := []client.Seq{0, 1, 2}
	last := first.LastSeq
	for d, err := range s.Watch(within(t), first.LastSeq) {
		if err != nil {
			t.Fatal(err)
		}
		if d.Seq <= last {
			t.Fatalf("delta %d came behind %d", d.Seq, last)
		}
		last = d.Seq
		if surface, err = d.Apply(surface); err != nil {
			t.Fatal(err)
		}
		if d.Type == "system/message" {
			break
		}
	}
	v, err := s.Surface(within(t), client.MinSeq(last))
	if err != nil {
		t.Fatal(err)
	}
	var want []client.Seq
	for _, n := range v.Nodes {
		want = append(want, n.Seq)
	}
	if !slices.Equal(surface, want) {
		t.Errorf("rebuilt %v, the surface is %v", surface, want)
	}
	if cut.cuts < 5 {
		t.Errorf("only %d connections", cut.cuts)
	}
}

func TestWatchEndsWithItsContextAndWithASessionThatIsNotThere(t *testing.T) {
	t.Parallel()
	c := dial(t, nil)
	s := fresh(c, "quiet")
	if _, err := s.Append(within(t), []client.Event{say("0")}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(within(t))
	seen := 0
	for d, err := range s.Watch(ctx, client.NoSeq) {
		if err == nil {
			seen++
			cancel()
			continue
		}
		if !errors.Is(err, context.Canceled) || d.Seq != 0 {
			t.Errorf("ended with %v", err)
		}
	}
	if seen != 1 {
		t.Errorf("%d deltas", seen)
	}
	cancel()
	for _, err := range fresh(c, "nowhere").Watch(within(t), 0) {
		if !errors.Is(err, client.ErrSessionNotFound) {
			t.Errorf("a session that is not there: %v", err)
		}
	}
}

func TestFeedResumesAndTellsTheLastState(t *testing.T) {
	t.Parallel()
	cut := &cutting{rng: rand.New(rand.NewPCG(3, 4)), most: 4000}
	c := dial(t, nil, func(cfg *client.Config) {
		cut.under = cfg.HTTPClient.Transport
		cfg.HTTPClient = &http.Client{Transport: cut}
	})
	parent := "fleet " + client.NewID()
	const sessions, rounds = 6, 10
	last := map[string]client.Seq{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range sessions {
		wg.Go(func() {
			s := c.Session(fmt.Sprintf("%s %d", parent, i))
			if _, err := s.Create(within(t), map[string]any{"parentSession": parent, "agentPreset": "scout"}); err != nil {
				t.Error(err)
				return
			}
			for range rounds {
				r, err := s.Append(within(t), []client.Event{say("x")})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				last[s.ID()] = r.LastSeq
				mu.Unlock()
			}
		})
	}
	written := make(chan struct{})
	go func() { wg.Wait(); close(written) }()
	got := map[string]client.Seq{}
	for ch, err := range c.Feed(within(t), 0, client.Parent(parent), client.Agent("scout"), client.InState(client.Idle)) {
		if err != nil {
			t.Fatal(err)
		}
		if ch.Seq < got[ch.Session] || ch.Left || ch.AgentPreset != "scout" {
			t.Errorf("told %+v behind seq %d", ch, got[ch.Session])
		}
		got[ch.Session] = ch.Seq
		if len(got) == sessions && !slices.ContainsFunc([]string{"0", "1", "2", "3", "4", "5"}, func(i string) bool { return got[parent+" "+i] < rounds-1 }) {
			break
		}
	}
	<-written
	for id, seq := range last {
		if got[id] != seq {
			t.Errorf("%s is at seq %d, told %d", id, seq, got[id])
		}
	}
}

func TestReadsOfThePastAndForProviders(t *testing.T) {
	t.Parallel()
	c := dial(t, nil)
	s := fresh(c, "past")
	if _, err := s.Append(within(t), []client.Event{say("0"), say("1")}); err != nil {
		t.Fatal(err)
	}
	r, err := s.Append(within(t), []client.Event{{Type: "assistant/message", SurfaceOp: client.Append(), Data: map[string]any{"turn": 1, "step": 1, "message": map[string]any{
		"id": "a", "role": "assistant", "source": map[string]any{"kind": "model", "provider": "p", "model": "m"},
		"content": []any{map[string]any{"type": "tool-call", "id": "c1", "name": "clock", "arguments": "{}"}}}}}})
	if err != nil {
		t.Fatal(err)
	}
	now, err := s.Messages(within(t), client.MinSeq(r.LastSeq))
	if err != nil || len(now.Unpaired) != 1 || now.Unpaired[0] != (client.Unpaired{Kind: "call", CallID: "c1", Seq: 2, Index: 2}) {
		t.Errorf("now: %+v, %v", now, err)
	}
	then, err := s.Messages(within(t), client.At(0))
	if err != nil || then.Seq != 0 || len(then.Messages) != 1 {
		t.Errorf("then: %+v, %v", then, err)
	}
	rendered, err := s.Messages(within(t), client.Format(client.OpenAI), client.At(2))
	if err != nil || len(rendered.Messages) != 4 || len(rendered.Report) != 1 || rendered.Report[0].What != "tool-call" {
		t.Errorf("openai: %+v, %v", rendered, err)
	}
	since := time.Now().Add(time.Hour)
	for in, err := range c.Sessions(within(t), client.Since(since)) {
		t.Errorf("listed since %v: %+v, %v", since, in, err)
	}
	if _, err := s.Surface(within(t), client.At(0), client.Fresh()); !errors.Is(err, client.ErrBadRequest) {
		t.Errorf("at and fresh: %v", err)
	}
}
