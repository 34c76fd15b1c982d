package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// judge holds what is stored and served against what was acknowledged.
func (s *soak) judge(ctx context.Context) error {
	begun := time.Now()
	if err := s.projected(ctx); err != nil {
		return err
	}
	s.say("all is projected %v after the load; verifying", time.Since(begun).Round(time.Millisecond))
	out, err := s.stack.verify(ctx)
	s.say("projector verify --all: %s", lastLine(out))
	if err != nil {
		s.Finding("projector verify --all: %v\n%s", err, out)
	}
	ctx, cancel := context.WithTimeout(ctx, judgeTime)
	defer cancel()
	logs, err := readStream(ctx, s.stack.natsURL())
	if err != nil {
		return fmt.Errorf("reading the stream: %w", err)
	}
	s.say("comparing %d sessions", len(logs))
	ledgers := s.fleet.ledgers()
	children := map[string][]string{}
	known := map[string]bool{}
	for _, l := range ledgers {
		known[harness.Token(l.id)] = true
		if l.parent != nil {
			children[l.parent.id] = append(children[l.parent.id], l.id)
		}
	}
	for token := range logs {
		if !known[token] {
			s.Finding("session %s was made by nobody", token)
		}
	}
	work := make(chan *ledger)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for l := range work {
				if err := s.judgeOne(ctx, l, logs, children[l.id]); err != nil {
					s.Finding("%s: %v", l.id, err)
				}
			}
		})
	}
	for _, l := range ledgers {
		work <- l
	}
	close(work)
	wg.Wait()
	return ctx.Err()
}

// judgeOne judges one session.
func (s *soak) judgeOne(ctx context.Context, l *ledger, logs map[string]*storedLog, children []string) error {
	stored := logs[harness.Token(l.id)]
	if stored == nil {
		stored = new(storedLog)
	}
	log, err := stored.parse()
	if err != nil {
		return err
	}
	s.Add("events stored", int64(len(log.events)))
	s.Add("commits stored", int64(len(stored.commits)))
	if l.parent != nil {
		if err := inherits(l, log, logs[harness.Token(l.parent.id)]); err != nil {
			return err
		}
	}
	if err := s.holds(l, log); err != nil {
		return err
	}
	if err := closedOnce(log.events); err != nil {
		return err
	}
	if len(log.events) == 0 {
		return nil
	}
	return s.served(ctx, l, log.events, children)
}

func lastLine(text string) string { return text[strings.LastIndexByte(text, '\n')+1:] }

// projected waits until the projection has reached the log's end.
func (s *soak) projected(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, projectTime)
	defer cancel()
	last := ""
	for {
		r, err := s.fleet.reads.Do(ctx, "GET", "/v1/status", nil)
		last = fmt.Sprintf("%.300s %v", r.Body, err)
		var status struct {
			CaughtUp    bool
			Lag         *int64
			Quarantined []json.RawMessage
		}
		if err == nil && r.Status == 200 && json.Unmarshal(r.Body, &status) == nil {
			if len(status.Quarantined) > 0 {
				return fmt.Errorf("sessions in quarantine: %s", status.Quarantined)
			}
			if status.CaughtUp && status.Lag != nil && *status.Lag == 0 {
				return nil
			}
		}
		if !load.Wait(ctx, 100*time.Millisecond) {
			return fmt.Errorf("not projected within %v: %s", projectTime, last)
		}
	}
}

// storedLog is a session's messages as the bare client reads them.
type storedLog struct{ commits []storedCommit }

type storedCommit struct {
	id, first, last string // as the attributes say
	body            []byte
}

// parsedLog is a session's log, event by event.
type parsedLog struct {
	events []harness.Event
	commit []string // of each event, the id of its commit
}

// readStream reads the whole stream, by session token.
func readStream(ctx context.Context, natsURL string) (map[string]*storedLog, error) {
	nc, err := nats.Connect(natsURL)
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	stream, err := js.Stream(ctx, harness.Stream)
	if err != nil {
		return nil, err
	}
	out := map[string]*storedLog{}
	count := stream.CachedInfo().State.Msgs
	if count == 0 {
		return out, nil
	}
	consumer, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy})
	if err != nil {
		return nil, err
	}
	messages, err := consumer.Messages()
	if err != nil {
		return nil, err
	}
	defer messages.Stop()
	for n := range count {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, fmt.Errorf("after %d of %d messages: %w", n, count, err)
		}
		token := m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:]
		if out[token] == nil {
			out[token] = new(storedLog)
		}
		attribute := func(name string) string {
			v, uerr := url.PathUnescape(m.Headers().Get("ce-" + name))
			err = errors.Join(err, uerr)
			return v
		}
		c := storedCommit{attribute("id"), attribute("firstseq"), attribute("lastseq"), m.Data()}
		if err != nil {
			return nil, err
		}
		out[token].commits = append(out[token].commits, c)
	}
	return out, nil
}

// lines are the canonical lines of the log.
func (l *storedLog) lines(yield func(c storedCommit, line []byte) bool) {
	for _, c := range l.commits {
		for line := range bytes.Lines(c.body) {
			if !yield(c, bytes.TrimSuffix(line, []byte("\n"))) {
				return
			}
		}
	}
}

// parse reads the log and checks it by itself: seqs without holes, canonical lines, no commit
// twice.
func (l *storedLog) parse() (*parsedLog, error) {
	p := new(parsedLog)
	for c, line := range l.lines {
		e, err := harness.ParseEvent(line)
		switch {
		case err != nil:
			return nil, fmt.Errorf("seq %d: %w", len(p.events), err)
		case e.Seq != int64(len(p.events)):
			return nil, fmt.Errorf("seq %d where %d follows", e.Seq, len(p.events))
		case !bytes.Equal(e.Canonical(), line):
			return nil, fmt.Errorf("seq %d: not the canonical line: %s", e.Seq, line)
		}
		p.events, p.commit = append(p.events, e), append(p.commit, c.id)
	}
	next, ids := 0, map[string]bool{}
	for _, c := range l.commits {
		first := next
		next += bytes.Count(c.body, []byte("\n"))
		if c.first != strconv.Itoa(first) || c.last != strconv.Itoa(next-1) {
			return nil, fmt.Errorf("commit %s says %s to %s, it holds %d to %d", c.id, c.first, c.last, first, next-1)
		}
		if ids[c.id] {
			return nil, fmt.Errorf("commit %s is there twice", c.id)
		}
		ids[c.id] = true
	}
	return p, nil
}

// holds checks that every acknowledged event is in the log exactly once, at its seq and in its
// commit, and that nothing is there that nobody asked for.
func (s *soak) holds(l *ledger, log *parsedLog) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	inherited := 0
	if l.parent != nil {
		inherited = int(l.at) + 2
	}
	told := make([]bool, len(log.events))
	for _, a := range l.acks {
		if a.first < int64(inherited) || a.last >= int64(len(log.events)) {
			return fmt.Errorf("acknowledged were seqs %d to %d, the log holds %d to %d of its own", a.first, a.last, inherited, len(log.events)-1)
		}
		for seq := a.first; seq <= a.last; seq++ {
			mark := ""
			if i := int(seq - a.first); i < len(a.marks) {
				mark = a.marks[i]
			}
			if log.commit[seq] != a.commit {
				return fmt.Errorf("seq %d was acknowledged in commit %s, it is in %s", seq, a.commit, log.commit[seq])
			}
			if mark != "" && markOf(log.events[seq]) != mark {
				return fmt.Errorf("seq %d was acknowledged for %s, it holds %s", seq, mark, log.events[seq].Line)
			}
			told[seq] = true
		}
	}
	for seq, epoch := range l.epochs {
		if !bytes.Contains(log.events[seq].Data, fmt.Appendf(nil, `"epoch":%d}`, epoch)) {
			return fmt.Errorf("seq %d gave a writer epoch %d, it holds %s", seq, epoch, log.events[seq].Line)
		}
	}
	marks := map[string]int{}
	open := map[string]bool{} // commits of requests whose outcome was not known
	for seq := inherited; seq < len(log.events); seq++ {
		mark := markOf(log.events[seq])
		if mark == "" {
			continue
		}
		if before, twice := marks[mark]; twice {
			return fmt.Errorf("event %s is at %d and at %d", mark, before, seq)
		}
		marks[mark] = seq
		if l.never[mark] {
			return fmt.Errorf("event %s was refused and is at %d", mark, seq)
		}
		if !told[seq] && !l.maybe[mark] {
			return fmt.Errorf("seq %d holds %s, which nobody was told of", seq, log.events[seq].Line)
		}
		if !told[seq] {
			open[log.commit[seq]] = true
			s.Add("events stored without an answer", 1)
		}
	}
	for seq := inherited; seq < len(log.events); seq++ {
		if told[seq] || open[log.commit[seq]] {
			continue
		}
		if l.loose == 0 {
			return fmt.Errorf("seq %d holds %s, which nobody asked for", seq, log.events[seq].Line)
		}
		s.Add("events of repairs without an answer", 1)
	}
	return nil
}

// inherits checks the inherited part of a fork.
func inherits(l *ledger, log *parsedLog, parent *storedLog) error {
	switch {
	case parent == nil:
		return errors.New("its parent has no log")
	case int64(len(log.events)) < l.at+2:
		return fmt.Errorf("forked at %d, the log holds %d events", l.at, len(log.events))
	case log.events[l.at+1].Type != "session/end-seed":
		return fmt.Errorf("seq %d is no session/end-seed", l.at+1)
	}
	seq := int64(0)
	for _, line := range parent.lines {
		if seq > l.at {
			break
		}
		if !bytes.Equal(log.events[seq].Line, line) {
			return fmt.Errorf("seq %d is not the parent's line", seq)
		}
		seq++
	}
	if seq <= l.at {
		return fmt.Errorf("forked at %d, the parent's log ends at %d", l.at, seq-1)
	}
	return nil
}

// closedOnce checks that turns and steps begin and end in turn, whoever ended them, and that
// no call was answered twice.
func closedOnce(events []harness.Event) error {
	turn, step := false, false
	answered := map[string]bool{}
	for _, e := range events {
		bad := false
		switch e.Type {
		case "turn/start":
			bad, turn = turn, true
		case "turn/end":
			bad, turn = !turn || step, false
		case "step/start":
			bad, step = !turn || step, true
		case "step/end":
			bad, step = !step, false
		case "tool/result":
			var data struct {
				Message struct{ Source struct{ CallID string } }
			}
			if err := json.Unmarshal(e.Data, &data); err != nil {
				return err
			}
			if _, replaces := e.Replace(); !replaces {
				bad = answered[data.Message.Source.CallID]
				answered[data.Message.Source.CallID] = true
			}
		}
		if bad {
			return fmt.Errorf("seq %d: %s comes twice or out of place", e.Seq, e.Type)
		}
	}
	return nil
}

// served compares messages and surface of a session with a fold that shares no code with the
// programs, and its children with the forks.
func (s *soak) served(ctx context.Context, l *ledger, events []harness.Event, children []string) error {
	want, err := harness.Fold(3, events)
	if err != nil {
		return err
	}
	got, err := s.fleet.reads.Messages(ctx, l.id, harness.MinSeq(int64(len(events)-1)))
	if err != nil {
		return err
	}
	if got.Seq != int64(len(events)-1) || got.ReplaceGeneration != want.Generation || len(got.Messages) != len(want.Messages) {
		return fmt.Errorf("served are %d messages as of seq %d, generation %d; want %d as of %d, generation %d", len(got.Messages), got.Seq, got.ReplaceGeneration, len(want.Messages), len(events)-1, want.Generation)
	}
	for i := range want.Messages {
		if !bytes.Equal(got.Messages[i], want.Messages[i]) {
			return fmt.Errorf("message %d is %s, want %s", i, got.Messages[i], want.Messages[i])
		}
	}
	view, err := s.fleet.reads.Surface(ctx, l.id)
	if err != nil {
		return err
	}
	if !slices.Equal(view.Seqs(), want.Nodes) {
		return fmt.Errorf("nodes %v, want %v", view.Seqs(), want.Nodes)
	}
	s.Add("messages compared", int64(len(want.Messages)))
	if len(children) == 0 {
		return nil
	}
	var listed []string
	for cursor := ""; ; {
		options := []harness.Option{harness.Query("parent", l.id), harness.Query("limit", "100")}
		if cursor != "" {
			options = append(options, harness.Query("cursor", cursor))
		}
		page, err := s.fleet.reads.Sessions(ctx, options...)
		if err != nil {
			return err
		}
		for _, c := range page.Sessions {
			listed = append(listed, c.Session)
		}
		if cursor = page.Cursor; cursor == "" {
			break
		}
	}
	slices.Sort(listed)
	slices.Sort(children)
	if !slices.Equal(listed, children) {
		return fmt.Errorf("listed children %v, want %v", listed, children)
	}
	return nil
}
