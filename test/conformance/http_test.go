package conformance_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"palimpsest/test/conformance"
	"palimpsest/test/e2e/harness"
)

const (
	httpCasesAtOnce = 8               // how many cases run at the same time
	httpCasesLimit  = 2 * time.Minute // after which the rest of a kind fails
)

// TestHTTP runs every conformance case against the real programs: one appender
// for each mode of the invariants, both on one log, and one projector.
func TestHTTP(t *testing.T) {
	t.Parallel()
	off := harness.Appender{Invariants: "off"}.Start(t)
	enforcing := harness.Appender{NATS: off.NATS, Invariants: "enforce"}.Start(t)
	projector := harness.Projector{NATS: off.NATS}.Start(t)

	free := httpRun{appender: off.Client(), projector: projector.Client()}
	held := httpRun{appender: enforcing.Client(), projector: projector.Client()}

	t.Run("surface", func(t *testing.T) {
		t.Parallel()
		runHTTPCases(t, "surface", 200, conformance.Surface, func(c conformance.SurfaceCase) (string, func(context.Context) error) {
			return c.Name, func(ctx context.Context) error { return free.surface(ctx, c) }
		})
	})
	t.Run("envelope", func(t *testing.T) {
		t.Parallel()
		runHTTPCases(t, "envelope", 50, conformance.Envelope, func(c conformance.EnvelopeCase) (string, func(context.Context) error) {
			return c.Name, func(ctx context.Context) error { return free.envelope(ctx, c) }
		})
	})
	t.Run("lifecycle", func(t *testing.T) {
		t.Parallel()
		runHTTPCases(t, "lifecycle", 150, conformance.Lifecycle, func(c conformance.LifecycleCase) (string, func(context.Context) error) {
			return c.Name, func(ctx context.Context) error { return held.lifecycle(ctx, c) }
		})
	})
	t.Run("repair", func(t *testing.T) {
		t.Parallel()
		runHTTPCases(t, "repair", 150, conformance.Repair, func(c conformance.RepairCase) (string, func(context.Context) error) {
			return c.Name, func(ctx context.Context) error { return free.repair(ctx, c) }
		})
	})
}

// runHTTPCases runs all cases, a few at a time, and prints how many held.
func runHTTPCases[Case any](t *testing.T, kind string, count int, load func() ([]Case, error), bind func(Case) (string, func(context.Context) error)) {
	t.Helper()
	cases, err := load()
	if err != nil {
		t.Fatal(err)
	}
	if len(cases) != count {
		t.Errorf("%d cases, want %d", len(cases), count)
	}
	ctx, cancel := context.WithTimeout(t.Context(), httpCasesLimit)
	defer cancel()
	var held atomic.Int64
	var wg sync.WaitGroup
	slots := make(chan struct{}, httpCasesAtOnce)
	for _, c := range cases {
		name, run := bind(c)
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := run(ctx); err != nil {
				t.Errorf("%s: %v", name, err)
				return
			}
			held.Add(1)
		})
	}
	wg.Wait()
	t.Logf("%s %d/%d", kind, held.Load(), len(cases))
}

// httpRun is the pair of programs that cases are run against.
type httpRun struct{ appender, projector *harness.Client }

func (r httpRun) create(ctx context.Context, session string, format int) error {
	_, _, err := r.appender.Create(ctx, session, harness.NewHeader(session, format))
	return err
}

// offer appends candidates one after another and holds each to its verdict. It
// answers the events that were taken.
func (r httpRun) offer(ctx context.Context, session string, candidates []conformance.Candidate) ([]harness.Event, error) {
	var taken []harness.Event
	for i, c := range candidates {
		next := int64(len(taken))
		receipt, err := r.appender.Append(ctx, session, c.Event)
		if err := verdict(err, c.Accept, c.Rule); err != nil {
			return nil, fmt.Errorf("candidate %d: %w", i, err)
		}
		if !c.Accept {
			got, err := r.appender.NextSeq(ctx, session)
			if err != nil {
				return nil, err
			}
			if got != next {
				return nil, fmt.Errorf("candidate %d: next seq %d after a refusal, %d before", i, got, next)
			}
			continue
		}
		if receipt.FirstSeq != next || receipt.LastSeq != next {
			return nil, fmt.Errorf("candidate %d: receipt for %d..%d, want %d", i, receipt.FirstSeq, receipt.LastSeq, next)
		}
		e, err := harness.ParseEvent(c.Event)
		if err != nil {
			return nil, err
		}
		taken = append(taken, e)
	}
	return taken, nil
}

// verdict compares the outcome of an append with what a case expects.
func verdict(err error, accept bool, rule string) error {
	if accept {
		if err != nil {
			return fmt.Errorf("must be accepted: %w", err)
		}
		return nil
	}
	if err == nil {
		return fmt.Errorf("must be refused by %s", rule)
	}
	p := harness.AsRefused(err)
	if p == nil {
		return err
	}
	if p.Rule != rule {
		return fmt.Errorf("must be refused by %s: %w", rule, err)
	}
	if p.Index != nil && *p.Index != 0 {
		return fmt.Errorf("index %d for the only event of a request", *p.Index)
	}
	if problem := refusalForm(*p); problem != "" {
		return fmt.Errorf("%s: %w", problem, err)
	}
	return nil
}

var lifecycleRules = []string{
	"turn-overlap", "turn-mismatch", "turn-end-open-step", "step-outside-turn", "step-overlap", "step-mismatch", "outside-step",
	"tool-result-without-call", "rewrite-outside-turn", "agent-status-noop", "agent-status-after-disposed",
}

// refusalForm says what is wrong with the status or the code of a broken rule.
func refusalForm(p harness.Problem) string {
	status, code := http.StatusUnprocessableEntity, "rule-violation"
	switch {
	case p.Rule == "seq-not-contiguous":
		status, code = http.StatusConflict, "seq-conflict"
	case slices.Contains(lifecycleRules, p.Rule):
		code = "INVARIANT"
	case p.Rule == "json-malformed" || p.Rule == "envelope-malformed" || p.Rule == "unknown-type":
		// Unreadable, or a broken rule: both are fair.
		if p.Status != http.StatusBadRequest && p.Status != http.StatusUnprocessableEntity {
			return "want status 400 or 422"
		}
		return ""
	}
	if p.Status != status || p.Code != code {
		return fmt.Sprintf("want status %d and code %s", status, code)
	}
	return ""
}

// read answers what the log holds, once the projector has caught up with it.
func (r httpRun) read(ctx context.Context, session string, count int64) (harness.Messages, []harness.Event, error) {
	var options []harness.Option
	if count > 0 {
		options = append(options, harness.MinSeq(count-1))
	}
	messages, err := r.projector.Messages(ctx, session, options...)
	if err != nil {
		return messages, nil, err
	}
	if messages.Seq != count-1 {
		return messages, nil, fmt.Errorf("messages as of seq %d, want %d", messages.Seq, count-1)
	}
	events, err := r.projector.Events(ctx, session)
	if err == nil && int64(len(events)) != count {
		err = fmt.Errorf("%d events in the log, want %d", len(events), count)
	}
	return messages, events, err
}

func (r httpRun) surface(ctx context.Context, c conformance.SurfaceCase) error {
	session := "surface-" + c.Name
	if err := r.create(ctx, session, 3); err != nil {
		return err
	}
	taken, err := r.offer(ctx, session, c.Candidates)
	if err != nil {
		return err
	}
	messages, events, err := r.read(ctx, session, c.Expect.Events)
	if err != nil {
		return err
	}
	for i, e := range events {
		if want := taken[i].Canonical(); !bytes.Equal(e.Line, want) {
			return fmt.Errorf("event %d:\n got %s\nwant %s", i, e.Line, want)
		}
	}
	if err := harness.SameMessages(messages.Messages, c.Expect.Messages); err != nil {
		return err
	}
	view, err := r.projector.Surface(ctx, session)
	if err != nil {
		return err
	}
	if !slices.Equal(view.Seqs(), c.Expect.Nodes) {
		return fmt.Errorf("nodes %v, want %v", view.Seqs(), c.Expect.Nodes)
	}
	for _, generation := range []int{messages.ReplaceGeneration, view.ReplaceGeneration} {
		if generation != c.Expect.ReplaceGeneration {
			return fmt.Errorf("replaceGeneration %d, want %d", generation, c.Expect.ReplaceGeneration)
		}
	}
	for _, n := range view.Nodes {
		if n.Type != events[n.Seq].Type {
			return fmt.Errorf("node %d is a %s, the event a %s", n.Seq, n.Type, events[n.Seq].Type)
		}
	}
	folded, err := harness.Fold(3, events)
	if err != nil {
		return err
	}
	return sameReplacements(folded.Replacements, c.Expect.Replacements)
}

func sameReplacements(got []harness.Replacement, want []conformance.Replacement) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d replacements, want %d", len(got), len(want))
	}
	for i := range want {
		if !reflect.DeepEqual(got[i], harness.Replacement(want[i])) {
			return fmt.Errorf("replacement %d is %+v, want %+v", i, got[i], want[i])
		}
	}
	return nil
}

func (r httpRun) lifecycle(ctx context.Context, c conformance.LifecycleCase) error {
	session := "lifecycle-" + c.Name
	if err := r.create(ctx, session, 3); err != nil {
		return err
	}
	if _, err := r.offer(ctx, session, c.Candidates); err != nil {
		return err
	}
	if _, _, err := r.read(ctx, session, c.Expect.Events); err != nil {
		return err
	}
	for _, program := range []*harness.Client{r.appender, r.projector} {
		status, err := program.Status(ctx, session)
		if err != nil {
			return err
		}
		if *status.NextSeq != c.Expect.Events {
			return fmt.Errorf("next seq %d, want %d", *status.NextSeq, c.Expect.Events)
		}
		if !reflect.DeepEqual(status.OpenTurn, c.Expect.OpenTurn) || !reflect.DeepEqual(status.OpenStep, c.Expect.OpenStep) {
			return fmt.Errorf("open turn %s and step %s, want %s and %s",
				number(status.OpenTurn), number(status.OpenStep), number(c.Expect.OpenTurn), number(c.Expect.OpenStep))
		}
		if !slices.Equal(status.PendingCalls, c.Expect.PendingCalls) {
			return fmt.Errorf("pending calls %v, want %v", status.PendingCalls, c.Expect.PendingCalls)
		}
	}
	return nil
}

func number(n *int64) string {
	if n == nil {
		return "none"
	}
	return fmt.Sprint(*n)
}

func (r httpRun) envelope(ctx context.Context, c conformance.EnvelopeCase) error {
	session := "envelope-" + c.Name
	if err := r.create(ctx, session, c.Format); err != nil {
		return err
	}
	_, err := r.appender.Append(ctx, session, []byte(c.Raw))
	if err := verdict(err, c.Accept, c.Rule); err != nil {
		return err
	}
	next, err := r.appender.NextSeq(ctx, session)
	if err != nil {
		return err
	}
	if !c.Accept {
		if next != 0 {
			return fmt.Errorf("next seq %d after a refusal, want 0", next)
		}
		return nil
	}
	_, events, err := r.read(ctx, session, 1)
	if err != nil {
		return err
	}
	want, err := harness.ParseEvent([]byte(c.Raw))
	if err != nil {
		return err
	}
	want.Seq = 0
	if want.Time < 0 {
		want.Time = events[0].Time // the appender's clock
	}
	if got := events[0].Line; !bytes.Equal(got, want.Canonical()) {
		return fmt.Errorf("in the log:\n got %s\nwant %s", got, want.Canonical())
	}
	return nil
}

func (r httpRun) repair(ctx context.Context, c conformance.RepairCase) error {
	session := "repair-" + c.Name
	if err := r.create(ctx, session, 3); err != nil {
		return err
	}
	if len(c.Events) > 0 {
		if _, err := r.appender.AppendEvents(ctx, session, c.Events); err != nil {
			return err
		}
	}
	want := slices.Concat(c.Events, c.Closers)
	// The second repair finds the log balanced and must add nothing.
	for range 2 {
		if err := r.appender.Repair(ctx, session); err != nil {
			return err
		}
		_, events, err := r.read(ctx, session, int64(len(want)))
		if err != nil {
			return err
		}
		for i, e := range events {
			line := e.Line
			if i >= len(c.Events) {
				if line, err = withoutText(e); err != nil {
					return fmt.Errorf("closer %d: %w", i-len(c.Events), err)
				}
			}
			if err := harness.SameJSON(line, want[i]); err != nil {
				return fmt.Errorf("event %d: %w", i, err)
			}
		}
	}
	return nil
}

// withoutText answers the event with the text of a synthesized result, which
// is free but must be there, given as "*".
func withoutText(e harness.Event) ([]byte, error) {
	if e.Type != "tool/result" {
		return e.Line, nil
	}
	var data map[string]any
	d := json.NewDecoder(bytes.NewReader(e.Data))
	d.UseNumber()
	if err := d.Decode(&data); err != nil {
		return nil, err
	}
	block, err := firstOf(data["message"])
	if err != nil {
		return nil, err
	}
	text, err := firstOf(block)
	if err != nil {
		return nil, err
	}
	if s, ok := text["text"].(string); !ok || s == "" {
		return nil, errors.New("the result has no text")
	}
	text["text"] = "*"
	e.Data, err = json.Marshal(data)
	return e.Canonical(), err
}

// firstOf answers the first element of an object's content.
func firstOf(v any) (map[string]any, error) {
	object, _ := v.(map[string]any)
	content, _ := object["content"].([]any)
	if len(content) == 0 {
		return nil, fmt.Errorf("no content in %v", v)
	}
	first, ok := content[0].(map[string]any)
	if !ok {
		return nil, fmt.Errorf("%v is no block", content[0])
	}
	return first, nil
}
