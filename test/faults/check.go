package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/test/e2e/harness"
	"palimpsest/test/load"
)

// check holds what is stored and served against what was acknowledged.
func (s *suite) check(ctx context.Context) error {
	begun := time.Now()
	if err := s.inStep(ctx); err != nil {
		s.Finding("%v", err)
		s.keep(s.target.states(ctx))
	}
	if err := s.projected(ctx); err != nil {
		s.keep(s.target.states(ctx))
		return err
	}
	s.say("all is projected %v after the load; verifying", time.Since(begun).Round(time.Millisecond))
	vctx, cancel := context.WithTimeout(ctx, verifyTime)
	defer cancel()
	url, err := s.target.nats(ctx)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(vctx, s.target.program("projector"), "verify", "--all", "--wait", "60s", "--nats", url, "--inbox-prefix", inboxPrefix, "--replicas", "3", "--log-level", "warn")
	cmd.Env = load.Environment()
	out, err := cmd.CombinedOutput()
	text := strings.TrimSpace(string(out))
	s.say("projector verify --all: %s", text[strings.LastIndexByte(text, '\n')+1:])
	if err != nil {
		s.Finding("projector verify --all: %v\n%s", err, text)
	}
	s.Add("check: verify --all", 1)

	ctx, cancel = context.WithTimeout(ctx, checkTime)
	defer cancel()
	logs, headers, err := s.stored(ctx)
	if err != nil {
		return fmt.Errorf("reading the store: %w", err)
	}
	served, err := s.target.served(ctx)
	if err != nil {
		return err
	}
	for _, one := range s.callers.all() {
		if err := s.checkOne(ctx, one, served, logs, headers); err != nil {
			s.Finding("%s: %v", one.id, err)
		}
	}
	for _, what := range mustHappen {
		if s.Get(what) == 0 {
			s.Finding("not once: %s", what)
		}
	}
	return ctx.Err()
}

// mustHappen are counts of which none may be zero: a run that did nothing has found nothing.
var mustHappen = []string{
	atTheirSeq, linearizable, headsEqual, viewsEqual, watchesWhole, notOlder, freshNotOlder,
	"check: chain recomputed", "check: appenders know the log's end", "stored: append with key", "stored: append with expectedSeq",
}

// Counts of checks.
const (
	atTheirSeq    = "check: acknowledged events at their seq once, as they were sent"
	linearizable  = "check: histories linearizable"
	headsEqual    = "check: head equal to the fold"
	viewsEqual    = "check: different answers under load equal to the fold as of their seq"
	watchesWhole  = "check: watch without gap or repeat, and each delta right"
	notOlder      = "check: read not older than it waited for"
	freshNotOlder = "check: fresh read not older than what was acknowledged"
)

// inboxPrefix is what the permissions of deploy/nats let an operator listen to.
const inboxPrefix = "_INBOX_operator"

// connect connects to the servers.
func (s *suite) connect(ctx context.Context) (*nats.Conn, jetstream.JetStream, error) {
	url, err := s.target.nats(ctx)
	if err != nil {
		return nil, nil, err
	}
	nc, err := nats.Connect(url, nats.MaxReconnects(-1), nats.CustomInboxPrefix(inboxPrefix))
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
	}
	return nc, js, err
}

// inStep waits until every stream has a leader, and replicas on the other servers that are in step.
func (s *suite) inStep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, healTime)
	defer cancel()
	nc, js, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer nc.Close()
	for {
		one, stop := context.WithTimeout(ctx, 5*time.Second)
		streams, err := s.target.streams(one, js)
		stop()
		if err == nil && len(streams) == 0 {
			err = errors.New("no streams")
		}
		for _, info := range streams {
			if info.Cluster == nil || info.Cluster.Leader == "" || len(info.Cluster.Replicas) != len(serverNames)-1 ||
				slices.ContainsFunc(info.Cluster.Replicas, func(r *jetstream.PeerInfo) bool { return !r.Current || r.Offline }) {
				b, _ := json.Marshal(info.Cluster) // to be shown
				err = errors.Join(err, fmt.Errorf("%s: %s", info.Config.Name, b))
			}
		}
		if err == nil {
			s.Add("check: streams whose replicas are in step", int64(len(streams)))
			return nil
		}
		if !load.Wait(ctx, 500*time.Millisecond) {
			return fmt.Errorf("replicas are not in step within %v: %w", healTime, err)
		}
	}
}

// projected waits until every projector says that all is in heads.
func (s *suite) projected(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, healTime)
	defer cancel()
	served, err := s.target.served(ctx)
	if err != nil {
		return err
	}
	for _, c := range served {
		for {
			a, err := c.Do(ctx, "GET", "/v1/status", nil)
			var status struct {
				CaughtUp    bool
				Quarantined []json.RawMessage
			}
			if err == nil && a.Status == 200 && json.Unmarshal(a.Body, &status) == nil {
				if len(status.Quarantined) > 0 {
					return fmt.Errorf("sessions in quarantine: %s", status.Quarantined)
				}
				if status.CaughtUp {
					break
				}
			}
			if !load.Wait(ctx, 100*time.Millisecond) {
				return fmt.Errorf("not projected within %v: %.500s %w", healTime, a.Body, err)
			}
		}
	}
	return nil
}

// stored reads log and headers with the bare client, by session token.
func (s *suite) stored(ctx context.Context) (logs map[string][]harness.Commit, headers map[string][]byte, err error) {
	nc, js, err := s.connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer nc.Close()
	logs, headers = map[string][]harness.Commit{}, map[string][]byte{}
	err = each(ctx, js, harness.Stream, func(m jetstream.Msg) error {
		c := harness.Commit{MsgID: m.Headers().Get(jetstream.MsgIDHeader), Attribute: map[string]string{}, Body: m.Data()}
		for key, values := range m.Headers() {
			if name, ok := strings.CutPrefix(key, "ce-"); ok {
				v, err := url.PathUnescape(values[0])
				if err != nil {
					return err
				}
				c.Attribute[name] = v
			}
		}
		token := m.Subject()[strings.LastIndexByte(m.Subject(), '.')+1:]
		logs[token] = append(logs[token], c)
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	err = each(ctx, js, "KV_"+harness.HeaderBucket, func(m jetstream.Msg) error {
		headers[strings.TrimPrefix(m.Subject(), "$KV."+harness.HeaderBucket+".")] = m.Data()
		return nil
	})
	return logs, headers, err
}

func each(ctx context.Context, js jetstream.JetStream, stream string, f func(jetstream.Msg) error) error {
	st, err := js.Stream(ctx, stream)
	if err != nil {
		return err
	}
	consumer, err := st.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{DeliverPolicy: jetstream.DeliverAllPolicy})
	if err != nil {
		return err
	}
	messages, err := consumer.Messages()
	if err != nil {
		return err
	}
	defer messages.Stop()
	for n := range st.CachedInfo().State.Msgs {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return fmt.Errorf("%s, after %d messages: %w", stream, n, err)
		}
		if err := f(m); err != nil {
			return err
		}
	}
	return nil
}

// checkOne checks one session.
func (s *suite) checkOne(ctx context.Context, one *session, served []*harness.Client, logs map[string][]harness.Commit, headers map[string][]byte) error {
	token := harness.Token(one.id)
	commits := logs[token]
	if len(commits) == 0 {
		if one.acked >= 0 {
			return fmt.Errorf("acknowledged up to seq %d, and there is no log", one.acked)
		}
		return nil
	}
	lines, err := harness.CheckChain(one.id, headers[token], commits)
	if err != nil {
		return fmt.Errorf("chain: %w", err)
	}
	s.Add("check: chain recomputed", 1)
	s.Add("events stored", int64(len(lines)))
	own := 0
	if one.parent != nil {
		var parent [][]byte
		for _, c := range logs[harness.Token(one.parent.id)] {
			parent = append(parent, c.Lines()...)
		}
		own = int(one.at) + 2
		if len(lines) < own || len(parent) < own-1 || !slices.EqualFunc(lines[:own-1], parent[:own-1], bytes.Equal) {
			return fmt.Errorf("its first %d events are not those of %s", own-1, one.parent.id)
		}
		s.Add("check: fork holds its parent's events", 1)
	}
	var events []harness.Event
	var commitOf []harness.Commit
	ids := map[string]bool{}
	for _, c := range commits {
		if id := c.Attribute["id"]; ids[id] {
			return fmt.Errorf("commit %s is there twice", id)
		}
		ids[c.Attribute["id"]] = true
		for _, line := range c.Lines() {
			e, err := harness.ParseEvent(line)
			if err != nil {
				return err
			}
			events, commitOf = append(events, e), append(commitOf, c)
		}
	}
	if err := s.checkHistory(one, events, commitOf, int64(own)); err != nil {
		return err
	}
	if err := s.checkViews(one, events); err != nil {
		return err
	}
	return s.checkServed(ctx, one, served, events)
}

// markOf is the mark of an event, "" when it has none.
func markOf(e harness.Event) string {
	var data struct{ Mark string }
	_ = json.Unmarshal(e.Data, &data) // what is no object has none
	return data.Mark
}

// asAsked says whether events are those that a call asked for.
func (o op) asAsked(events []harness.Event) error {
	if o.sent == nil {
		if o.made == nil {
			return nil
		}
		return o.made(o, events)
	}
	if len(events) != len(o.sent) {
		return fmt.Errorf("%d events, want %d", len(events), len(o.sent))
	}
	for i, raw := range o.sent {
		want, err := harness.ParseEvent(raw)
		if err != nil {
			return err
		}
		want.Seq, want.Time = events[i].Seq, events[i].Time // which the service gives
		if !bytes.Equal(want.Canonical(), events[i].Line) {
			return fmt.Errorf("%s, want %s", events[i].Line, want.Canonical())
		}
	}
	return nil
}

// checkHistory checks that each acknowledged event is in the log once, at its seq, in its commit, as it
// was sent; that nothing is there that was refused or that nobody asked for; and that all calls together
// look as if each had happened at one moment between its beginning and its end.
func (s *suite) checkHistory(one *session, events []harness.Event, commitOf []harness.Commit, own int64) error {
	one.mu.Lock()
	defer one.mu.Unlock()
	at := map[string]int64{}
	for seq := own; seq < int64(len(events)); seq++ {
		if mark := markOf(events[seq]); mark != "" {
			if before, twice := at[mark]; twice {
				return fmt.Errorf("event %s is at %d and at %d", mark, before, seq)
			}
			at[mark] = seq
		}
	}
	told := make([]string, len(events)) // by which call each event came
	tell := func(o op, first, last int64) error {
		for seq := first; seq <= last; seq++ {
			if told[seq] != "" {
				return fmt.Errorf("seq %d was acknowledged for %s and for %s", seq, told[seq], o.what)
			}
			told[seq] = o.what
		}
		return nil
	}
	var history []porcupine.Operation
	made := int64(math.MaxInt64) // when the first call began whose events the service made and nobody was told of
	for _, o := range one.ops {
		first, stored := int64(-1), false
		if o.mark != "" {
			first, stored = at[o.mark]
		}
		h := porcupine.Operation{ClientId: o.client, Input: o, Call: o.call, Return: o.end}
		switch o.outcome {
		case "stored":
			r := o.receipt
			if r.FirstSeq < own || r.LastSeq >= int64(len(events)) {
				return fmt.Errorf("%s was acknowledged at %d to %d, the log holds %d to %d of its own", o.what, r.FirstSeq, r.LastSeq, own, len(events)-1)
			}
			if o.mark != "" && (!stored || first != r.FirstSeq) {
				return fmt.Errorf("%s was acknowledged at %d, its event %s is at %d (there: %v)", o.what, r.FirstSeq, o.mark, first, stored)
			}
			for seq := r.FirstSeq; seq <= r.LastSeq; seq++ {
				if c := commitOf[seq].Attribute; c["id"] != r.Commit || c["digest"] != r.Digest {
					return fmt.Errorf("seq %d was acknowledged in commit %s with digest %s, it is in %s with %s", seq, r.Commit, r.Digest, c["id"], c["digest"])
				}
			}
			if err := o.asAsked(events[r.FirstSeq : r.LastSeq+1]); err != nil {
				return fmt.Errorf("%s was acknowledged at %d to %d, which hold %w", o.what, r.FirstSeq, r.LastSeq, err)
			}
			if o.expected >= 0 && r.FirstSeq != o.expected {
				return fmt.Errorf("%s expected seq %d and got %d", o.what, o.expected, r.FirstSeq)
			}
			if err := tell(o, r.FirstSeq, r.LastSeq); err != nil {
				return err
			}
			s.Add(atTheirSeq, r.LastSeq-r.FirstSeq+1)
			h.Output = step{first: r.FirstSeq, events: r.LastSeq - r.FirstSeq + 1}
		case "refused":
			if stored {
				return fmt.Errorf("%s was refused, and its event %s is at %d", o.what, o.mark, first)
			}
			if o.expected < 0 || o.actual < 0 {
				continue
			}
			h.Output = step{conflict: true, expected: o.expected, actual: o.actual}
		case "read":
			h.Output = step{read: true, first: o.receipt.LastSeq + 1}
		default:
			if o.mark == "" {
				made = min(made, o.call)
				continue
			}
			if !stored {
				continue
			}
			if last := first + o.events - 1; last >= int64(len(events)) {
				return fmt.Errorf("the %d events of %s begin at %d, and the log ends at %d", o.events, o.what, first, len(events)-1)
			}
			if err := o.asAsked(events[first : first+o.events]); err != nil {
				return fmt.Errorf("%s is at %d and holds %w", o.what, first, err)
			}
			if err := tell(o, first, first+o.events-1); err != nil {
				return err
			}
			s.Add("events stored of which nobody was told", o.events)
			h.Return, h.Output = math.MaxInt64, step{first: first, events: o.events}
		}
		history = append(history, h)
	}
	for seq := own; seq < int64(len(events)); seq++ {
		if told[seq] != "" {
			continue
		}
		if made == math.MaxInt64 || markOf(events[seq]) != "" {
			return fmt.Errorf("seq %d holds %s, which nobody asked for", seq, events[seq].Line)
		}
		first := seq
		for seq+1 < int64(len(events)) && told[seq+1] == "" {
			seq++
		}
		s.Add("events stored of which nobody was told", seq-first+1)
		history = append(history, porcupine.Operation{ClientId: -1, Call: made, Return: math.MaxInt64, Input: op{what: "made"}, Output: step{first: first, events: seq - first + 1}})
	}
	switch r := porcupine.CheckOperationsTimeout(register(own), history, 20*time.Second); r {
	case porcupine.Ok:
		s.Add(linearizable, 1)
		s.Add("check: calls in them", int64(len(history)))
	case porcupine.Unknown:
		return errors.New("whether its calls are linearizable could not be found out in 20 s; run for a shorter time")
	default:
		return errors.New("its calls are not linearizable")
	}
	return nil
}

// step is what one call did to the length of a log, or saw of it.
type step struct {
	first, events    int64
	read, conflict   bool
	expected, actual int64
}

// register is the model: a log is as long as it is. An append begins where the log ended, and a
// conflict says that the log did not end where the caller expected, and how far it went at least. A read
// of its end saw how long it was.
func register(length int64) porcupine.Model {
	return porcupine.Model{
		Init: func() any { return length },
		Step: func(state, _, output any) (bool, any) {
			n, did := state.(int64), output.(step)
			switch {
			case did.conflict:
				return n != did.expected && n >= did.actual, n
			case did.read:
				return n == did.first, n
			}
			return n == did.first, n + did.events
		},
	}
}

// checkViews compares what reads answered while there were faults with a fold as of the same seq.
func (s *suite) checkViews(one *session, events []harness.Event) error {
	one.mu.Lock()
	defer one.mu.Unlock()
	for v, what := range one.views {
		if v.seq >= int64(len(events)) {
			return fmt.Errorf("%s was answered as of seq %d, the log ends at %d", what, v.seq, len(events)-1)
		}
		want, err := harness.Fold(3, events[:v.seq+1])
		if err != nil {
			return err
		}
		as := messagesView(v.seq, want.Generation, want.Messages)
		if v.kind == as.kind && v != as || v.kind != as.kind && v != nodesView(v.seq, want.Generation, want.Nodes) {
			return fmt.Errorf("%s was answered with other %s than those of the log as of seq %d, or another generation: %d, want %d", what, v.kind, v.seq, v.generation, want.Generation)
		}
		s.Add(viewsEqual, 1)
	}
	return nil
}

// checkServed compares what each projector serves with a fold that shares no code with the
// programs, and what watchers were told with the log.
func (s *suite) checkServed(ctx context.Context, one *session, served []*harness.Client, events []harness.Event) error {
	want, err := harness.Fold(3, events)
	if err != nil {
		return err
	}
	last := int64(len(events) - 1)
	for _, c := range s.callers.writes {
		switch next, err := c.NextSeq(ctx, one.id); {
		case err != nil:
			return err
		case next != last+1:
			return fmt.Errorf("%s takes %d for the next seq, want %d", c.Base, next, last+1)
		}
		s.Add("check: appenders know the log's end", 1)
	}
	for _, c := range served {
		got, err := c.Messages(ctx, one.id, harness.MinSeq(last))
		if err != nil {
			return err
		}
		if got.Seq != last || got.ReplaceGeneration != want.Generation || !slices.EqualFunc(got.Messages, want.Messages, func(a, b json.RawMessage) bool { return bytes.Equal(a, b) }) {
			return fmt.Errorf("served are %d messages as of seq %d, generation %d; want %d as of %d, generation %d", len(got.Messages), got.Seq, got.ReplaceGeneration, len(want.Messages), last, want.Generation)
		}
		view, err := c.Surface(ctx, one.id)
		if err != nil {
			return err
		}
		if !slices.Equal(view.Seqs(), want.Nodes) {
			return fmt.Errorf("nodes %v, want %v", view.Seqs(), want.Nodes)
		}
		s.Add(headsEqual, 1)
	}
	shadowed := map[int64][]int64{}
	for _, r := range want.Replacements {
		shadowed[r.Seq] = r.ShadowedSeqs
	}
	var deltas []delta
	for _, e := range events {
		if e.SurfaceOp != nil {
			deltas = append(deltas, newDelta(e.Seq, shadowed[e.Seq]))
		}
	}
	for _, w := range one.watchers {
		wctx, cancel := context.WithTimeout(ctx, time.Minute)
		err := w.reached(wctx, deltas)
		cancel()
		w.stop()
		<-w.done
		if err != nil {
			return err
		}
		s.Add(watchesWhole, 1)
		s.Add("check: deltas in them", int64(len(deltas)))
	}
	return nil
}
