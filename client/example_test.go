package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"time"

	"palimpsest/client"
)

// A conversation is appended and read back as the model should see it.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.New(client.Config{AppenderURL: appenderURL, ProjectorURL: projectorURL})
	if err != nil {
		log.Fatal(err)
	}
	defer c.CloseIdleConnections()

	s := c.Session(client.NewID())
	receipt, err := s.Append(ctx, []client.Event{
		{Type: "turn/start", Data: map[string]int{"turn": 1}},
		{
			Type:      "user/message",
			SurfaceOp: client.Append(),
			Data:      json.RawMessage(`{"id":"m1","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"Hello"}]}`),
		},
		{Type: "turn/end", Data: json.RawMessage(`{"turn":1,"reason":{"kind":"completed"}}`)},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("committed:", receipt.FirstSeq, "to", receipt.LastSeq)

	view, err := s.Messages(ctx, client.MinSeq(receipt.LastSeq)) // what was just written
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range view.Messages {
		fmt.Printf("%s\n", m)
	}
	// Output:
	// committed: 0 to 2
	// {"id":"m1","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"Hello"}]}
}

// Writers that know what they have read say so: none overlooks another's events.
func ExampleExpectedSeq() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.New(client.Config{AppenderURL: appenderURL})
	if err != nil {
		log.Fatal(err)
	}
	defer c.CloseIdleConnections()

	s := c.Session(client.NewID())
	add := func(what string, next client.Seq) {
		receipt, err := s.Append(ctx, []client.Event{{Type: "todo/write", Data: what}}, client.ExpectedSeq(next))
		var e *client.Error
		switch {
		case errors.Is(err, client.ErrSeqConflict) && errors.As(err, &e):
			fmt.Printf("%s: conflict, the next seq is %d\n", what, *e.ActualSeq)
		case err != nil:
			log.Fatal(err)
		default:
			fmt.Printf("%s: seq %d, duplicate %t\n", what, receipt.FirstSeq, receipt.Duplicate)
		}
	}
	add("milk", 0)
	add("bread", 0)
	add("bread", 1)
	add("milk", 0) // the same again is no conflict, at any later time
	// Output:
	// milk: seq 0, duplicate false
	// bread: conflict, the next seq is 1
	// bread: seq 1, duplicate false
	// milk: seq 0, duplicate true
}

// A worker takes a session over from one that is thought dead, which can then do no harm.
func ExampleSession_TakeWriter() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.New(client.Config{AppenderURL: appenderURL})
	if err != nil {
		log.Fatal(err)
	}
	defer c.CloseIdleConnections()

	step := func(turn int) client.Event {
		return client.Event{Type: "turn/start", Data: map[string]int{"turn": turn}}
	}
	s := c.Session(client.NewID())
	old, err := s.TakeWriter(ctx, "worker-a")
	if err != nil {
		log.Fatal(err)
	}
	if _, err := old.Append(ctx, step(1)); err != nil {
		log.Fatal(err)
	}

	// worker-a is silent. worker-b closes what it left open and takes over.
	if _, err := s.Repair(ctx); err != nil {
		log.Fatal(err)
	}
	w, err := s.TakeWriter(ctx, "worker-b")
	if err != nil {
		log.Fatal(err)
	}
	receipt, err := w.Append(ctx, step(2))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("worker-b at seq", receipt.FirstSeq)

	if _, err := old.Append(ctx, step(3)); errors.Is(err, client.ErrFenced) {
		fmt.Println("worker-a is fenced")
	}
	// Output:
	// worker-b at seq 5
	// worker-a is fenced
}

// A summary takes the place of old messages; the log keeps them.
func ExampleSession_Compact() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.New(client.Config{AppenderURL: appenderURL, ProjectorURL: projectorURL})
	if err != nil {
		log.Fatal(err)
	}
	defer c.CloseIdleConnections()

	s := c.Session(client.NewID())
	say := func(id string) client.Event {
		return client.Event{Type: "user/message", SurfaceOp: client.Append(), Data: map[string]any{
			"id": id, "role": "user", "source": map[string]any{"kind": "user"}, "content": []any{map[string]any{"type": "text", "text": id}},
		}}
	}
	if _, err := s.Append(ctx, []client.Event{say("one"), say("two"), say("three")}); err != nil {
		log.Fatal(err)
	}
	if _, err := s.Compact(ctx, client.Compaction{Start: 0, End: 1, Summary: "They counted."}); err != nil {
		log.Fatal(err)
	}
	view, err := s.Surface(ctx, client.Fresh())
	if err != nil {
		log.Fatal(err)
	}
	for _, n := range view.Nodes {
		fmt.Println("node", n.Seq, n.Type)
	}
	for e, err := range s.Events(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("event", e.Seq, e.Type)
	}
	// Output:
	// node 5 user/message
	// node 2 user/message
	// event 0 user/message
	// event 1 user/message
	// event 2 user/message
	// event 3 compaction/start
	// event 4 compaction/summary
	// event 5 user/message
	// event 6 compaction/end
}

// A fork starts with its parent's events and goes its own way.
func ExampleSession_Fork() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.New(client.Config{AppenderURL: appenderURL, ProjectorURL: projectorURL})
	if err != nil {
		log.Fatal(err)
	}
	defer c.CloseIdleConnections()

	parent := c.Session(client.NewID())
	if _, err := parent.Append(ctx, []client.Event{{Type: "todo/write", Data: []string{"think"}, Time: time.UnixMilli(1767225600000)}}); err != nil {
		log.Fatal(err)
	}
	fork, err := parent.Fork(ctx, client.Fork{})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("takes over 0 to", fork.At)
	for in, err := range c.Sessions(ctx, client.Parent(parent.ID())) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("the parent lists it:", in.Session == fork.Session)
	}
	for e, err := range c.Session(fork.Session).Events(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%s\n", e.Line)
	}
	// Output:
	// takes over 0 to 0
	// the parent lists it: true
	// {"type":"todo/write","seq":0,"time":1767225600000,"data":["think"]}
	// {"type":"session/end-seed","seq":1,"time":1767225600000,"data":{"inherited":true}}
}

// A watch rebuilds a surface from its changes, over however many connections.
func ExampleSession_Watch() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.New(client.Config{AppenderURL: appenderURL, ProjectorURL: projectorURL})
	if err != nil {
		log.Fatal(err)
	}
	defer c.CloseIdleConnections()

	s := c.Session(client.NewID())
	if _, err := s.Append(ctx, []client.Event{say("one"), say("two"), say("three")}); err != nil {
		log.Fatal(err)
	}
	if _, err := s.Compact(ctx, client.Compaction{Start: 0, End: 1, Summary: "They counted."}); err != nil {
		log.Fatal(err)
	}
	var surface []client.Seq
	for delta, err := range s.Watch(ctx, client.NoSeq) {
		if err != nil {
			log.Fatal(err)
		}
		if surface, err = delta.Apply(surface); err != nil {
			log.Fatal(err)
		}
		fmt.Println(delta.Seq, delta.Type, delta.Shadowed, surface)
		if delta.Replaces { // all that this example waits for
			break
		}
	}
	// Output:
	// 0 user/message [] [0]
	// 1 user/message [] [0 1]
	// 2 user/message [] [0 1 2]
	// 5 user/message [0 1] [5 2]
}

// A feed tells of every session that goes on; with options, of those that are picked.
func ExampleClient_Feed() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.New(client.Config{AppenderURL: appenderURL, ProjectorURL: projectorURL})
	if err != nil {
		log.Fatal(err)
	}
	defer c.CloseIdleConnections()

	parent, id := client.NewID(), client.NewID()
	if _, err := c.Session(id).Create(ctx, map[string]any{"parentSession": parent}); err != nil {
		log.Fatal(err)
	}
	if _, err := c.Session(id).Append(ctx, []client.Event{{Type: "turn/start", Data: map[string]int{"turn": 1}}}); err != nil {
		log.Fatal(err)
	}
	for change, err := range c.Feed(ctx, 0, client.Parent(parent), client.InState(client.Open)) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(change.State, "at seq", change.Seq, "in turn", *change.OpenTurn)
		break // a program that goes on keeps change.Rev, to resume there
	}
	// Output:
	// open at seq 0 in turn 1
}
