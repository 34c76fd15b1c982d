package conformance_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
	"palimpsest/test/conformance"
)

// TestPackages runs every conformance case through the packages that decide: events, surface,
// lifecycle and the fold of session, by each of the ways in which they are used.
func TestPackages(t *testing.T) {
	t.Parallel()
	t.Run("surface", func(t *testing.T) {
		t.Parallel()
		runPackageCases(t, "surface", 200, conformance.Surface, packageSurface)
	})
	t.Run("lifecycle", func(t *testing.T) {
		t.Parallel()
		runPackageCases(t, "lifecycle", 150, conformance.Lifecycle, packageLifecycle)
	})
	t.Run("envelope", func(t *testing.T) {
		t.Parallel()
		runPackageCases(t, "envelope", 50, conformance.Envelope, packageEnvelope)
	})
	t.Run("repair", func(t *testing.T) {
		t.Parallel()
		runPackageCases(t, "repair", 150, conformance.Repair, packageRepair)
	})
}

// runPackageCases runs all cases and prints how many held.
func runPackageCases[Case any](t *testing.T, kind string, count int, load func() ([]Case, error), run func(Case) error) {
	t.Helper()
	cases, err := load()
	if err != nil {
		t.Fatal(err)
	}
	if len(cases) != count {
		t.Errorf("%d cases, want %d", len(cases), count)
	}
	held := 0
	for _, c := range cases {
		if err := run(c); err != nil {
			t.Errorf("%s: %v", reflect.ValueOf(c).FieldByName("Name"), err)
			continue
		}
		held++
	}
	t.Logf("%s %d/%d", kind, held, len(cases))
}

const packageSession = "case"

// folded is everything that a reader of a state can see, in comparable form.
type folded struct {
	Next       events.Seq
	Time       int64
	Digest     string
	Seqs       []events.Seq
	Generation int64
	Messages   []string
	Life       lifecycle.Snapshot
	Writer     *session.Writer
}

func foldedOf(s *session.State) (folded, error) {
	f := folded{Next: s.Next, Time: s.Time, Digest: s.Digest.String(), Seqs: s.Surface.Seqs(),
		Generation: s.Surface.Generation(), Life: s.Life.Snapshot(), Writer: s.Writer}
	messages, err := s.Surface.Messages()
	for _, m := range messages {
		f.Messages = append(f.Messages, string(m))
	}
	return f, err
}

// sameFolded says how two states differ.
func sameFolded(what string, got *session.State, want folded) error {
	f, err := foldedOf(got)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if !reflect.DeepEqual(f, want) {
		return fmt.Errorf("%s:\n got %+v\nwant %+v", what, f, want)
	}
	return nil
}

// packageRun is one session that candidates are offered to.
type packageRun struct {
	format       events.Format
	mode         lifecycle.Mode
	vocabulary   *events.Vocabulary
	state        *session.State
	taken        []*events.Event
	replacements []conformance.Replacement
}

func newPackageRun(f events.Format, mode lifecycle.Mode) *packageRun {
	return &packageRun{format: f, mode: mode, vocabulary: events.DefaultVocabulary(),
		state: session.New(packageSession, f, nil, surface.KeepBodies)}
}

func (r *packageRun) parse(raw []byte, next events.Seq) (*events.Event, error) {
	return events.Parse(raw, events.Context{Format: r.format, Vocabulary: r.vocabulary, Next: next, Now: 1})
}

// offer plans one candidate and applies it when it is fine.
func (r *packageRun) offer(raw []byte) error {
	e, err := r.parse(raw, r.state.Next)
	if err != nil {
		return err
	}
	p, err := r.state.Plan(e, r.mode)
	if err != nil {
		return err
	}
	r.state.Apply(&p, 0)
	r.state.Digest = r.state.Digest.Next(e.Line)
	r.taken = append(r.taken, e)
	if p.Change.Replace {
		n := conformance.Replacement{Seq: int64(e.Seq), StartSeq: int64(e.Op.Start), EndSeq: int64(e.Op.End), ShadowedSeqs: []int64{}}
		for _, s := range p.Change.Shadowed() {
			n.ShadowedSeqs = append(n.ShadowedSeqs, int64(s.Seq))
		}
		r.replacements = append(r.replacements, n)
	}
	return r.sameCanonical(e)
}

// sameCanonical reads an event's line back and compares.
func (r *packageRun) sameCanonical(e *events.Event) error {
	var back events.Event
	if err := events.ParseCanonical(&back, e.Line, r.format, r.vocabulary); err != nil {
		return fmt.Errorf("its canonical line: %w", err)
	}
	if err := back.Check(r.format); err != nil {
		return fmt.Errorf("its canonical line: %w", err)
	}
	if !bytes.Equal(back.Data(), e.Data()) {
		return fmt.Errorf("data of its canonical line:\n got %s\nwant %s", back.Data(), e.Data())
	}
	for i, got := range []any{back.Type, back.Kind, back.Seq, back.Time, back.Op, back.Sources, back.Ignorable} {
		if want := []any{e.Type, e.Kind, e.Seq, e.Time, e.Op, e.Sources, e.Ignorable}[i]; !reflect.DeepEqual(got, want) {
			return fmt.Errorf("its canonical line reads %v, want %v", got, want)
		}
	}
	again, err := r.parse(e.Line, e.Seq)
	if err != nil {
		return fmt.Errorf("its canonical line as a candidate: %w", err)
	}
	if !bytes.Equal(again.Line, e.Line) {
		return fmt.Errorf("its canonical line as a candidate:\n got %s\nwant %s", again.Line, e.Line)
	}
	return nil
}

// offerAll offers candidates one after another and holds each to its verdict.
func (r *packageRun) offerAll(candidates []conformance.Candidate) error {
	for i, c := range candidates {
		before, err := foldedOf(r.state)
		if err != nil {
			return err
		}
		if err := packageVerdict(r.offer(c.Event), c.Accept, c.Rule); err != nil {
			return fmt.Errorf("candidate %d: %w", i, err)
		}
		if !c.Accept {
			if err := sameFolded("after a refusal", r.state, before); err != nil {
				return fmt.Errorf("candidate %d: %w", i, err)
			}
		}
	}
	return errors.Join(r.sameByBatch(candidates), r.sameByFold())
}

// packageVerdict compares the outcome of a candidate with what a case expects.
func packageVerdict(err error, accept bool, rule string) error {
	if accept {
		return err
	}
	if err == nil {
		return fmt.Errorf("taken, must be refused by %s", rule)
	}
	if e, ok := errors.AsType[*events.Error](err); !ok || string(e.Rule) != rule {
		return fmt.Errorf("must be refused by %s: %w", rule, err)
	}
	return nil
}

// sameByBatch puts the candidates into a batch: the end state is the same, a rewind in the
// middle changes nothing in the end, and a rollback leaves no trace.
func (r *packageRun) sameByBatch(candidates []conformance.Candidate) error {
	want, err := foldedOf(r.state)
	if err != nil {
		return err
	}
	s := session.New(packageSession, r.format, nil, surface.KeepBodies)
	empty, err := foldedOf(s)
	if err != nil {
		return err
	}
	b := s.Begin(r.mode)
	add := func(from int) error {
		for i, c := range candidates[from:] {
			e, err := r.parse(c.Event, s.Next)
			if err == nil {
				err = b.Add(e)
			}
			if err := packageVerdict(err, c.Accept, c.Rule); err != nil {
				return fmt.Errorf("candidate %d in a batch: %w", from+i, err)
			}
		}
		return nil
	}
	if err := add(0); err != nil {
		return err
	}
	if err := sameFolded("a batch", s, want); err != nil {
		return err
	}
	b.Rollback()
	if err := sameFolded("a batch rolled back", s, empty); err != nil {
		return err
	}
	middle := len(candidates) / 2
	rest := candidates
	candidates = rest[:middle]
	if err := add(0); err != nil {
		return err
	}
	mark := b.Mark()
	half, err := foldedOf(s)
	if err != nil {
		return err
	}
	candidates = rest
	for range 2 {
		if err := add(middle); err != nil {
			return err
		}
		if err := sameFolded("a batch with a rewind", s, want); err != nil {
			return err
		}
		b.Rewind(mark)
		if err := sameFolded("a batch rewound", s, half); err != nil {
			return err
		}
	}
	b.Rollback()
	return sameFolded("a batch rolled back from its middle", s, empty)
}

// sameByFold folds the canonical lines, as one commit and as one commit each.
func (r *packageRun) sameByFold() error {
	if len(r.taken) == 0 {
		return nil
	}
	want, err := foldedOf(r.state)
	if err != nil {
		return err
	}
	whole := session.New(packageSession, r.format, nil, surface.KeepFrozenBodies)
	single := session.New(packageSession, r.format, nil, surface.KeepBodies)
	writer := session.New(packageSession, r.format, nil, surface.KeepFingerprints)
	all := &events.Commit{ID: "all", Session: packageSession, Format: r.format, First: 0, Last: r.state.Last(), Digest: r.state.Digest}
	digest := events.SeedDigest(packageSession)
	for _, e := range r.taken {
		digest = digest.Next(e.Line)
		body := append(bytes.Clone(e.Line), '\n')
		all.Body = append(all.Body, body...)
		c := &events.Commit{ID: e.Seq.String(), Session: packageSession, Format: r.format, First: e.Seq, Last: e.Seq, Digest: digest, Body: body}
		if err := single.FoldCommit(c, r.vocabulary, nil); err != nil {
			return fmt.Errorf("fold of single commits: %w", err)
		}
	}
	if err := whole.FoldCommit(all, r.vocabulary, nil); err != nil {
		return fmt.Errorf("fold of one commit: %w", err)
	}
	if err := writer.FoldCommit(all, r.vocabulary, nil); err != nil {
		return fmt.Errorf("fold without bodies: %w", err)
	}
	if !slices.Equal(writer.Surface.Seqs(), want.Seqs) || !reflect.DeepEqual(writer.Life.Snapshot(), want.Life) {
		return fmt.Errorf("fold without bodies: nodes %v, want %v", writer.Surface.Seqs(), want.Seqs)
	}
	return errors.Join(sameFolded("fold of single commits", single, want), sameFolded("fold of one commit", whole, want))
}

func packageSurface(c conformance.SurfaceCase) error {
	r := newPackageRun(events.Format3, lifecycle.Off)
	if err := r.offerAll(c.Candidates); err != nil {
		return err
	}
	got, err := foldedOf(r.state)
	if err != nil {
		return err
	}
	want := c.Expect
	if int64(got.Next) != want.Events {
		return fmt.Errorf("%d events, want %d", got.Next, want.Events)
	}
	if nodes := sliceOf[int64](got.Seqs); !slices.Equal(nodes, want.Nodes) {
		return fmt.Errorf("nodes %v, want %v", nodes, want.Nodes)
	}
	if got.Generation != int64(want.ReplaceGeneration) {
		return fmt.Errorf("replaceGeneration %d, want %d", got.Generation, want.ReplaceGeneration)
	}
	if len(r.replacements)+len(want.Replacements) > 0 && !reflect.DeepEqual(r.replacements, want.Replacements) {
		return fmt.Errorf("replacements %+v, want %+v", r.replacements, want.Replacements)
	}
	if len(got.Messages) != len(want.Messages) {
		return fmt.Errorf("%d messages, want %d", len(got.Messages), len(want.Messages))
	}
	for i, m := range got.Messages {
		if err := sameValue([]byte(m), want.Messages[i]); err != nil {
			return fmt.Errorf("message %d: %w", i, err)
		}
	}
	return nil
}

func packageLifecycle(c conformance.LifecycleCase) error {
	r := newPackageRun(events.Format3, lifecycle.Enforce)
	if err := r.offerAll(c.Candidates); err != nil {
		return err
	}
	if int64(r.state.Next) != c.Expect.Events {
		return fmt.Errorf("%d events, want %d", r.state.Next, c.Expect.Events)
	}
	for _, life := range []*lifecycle.State{r.state.Life, lifecycle.Restore(r.state.Life.Snapshot())} {
		open := func(n events.Seq, ok bool) *int64 {
			if !ok {
				return nil
			}
			v := int64(n)
			return &v
		}
		turn, step, calls := open(life.Turn()), open(life.Step()), life.PendingCalls()
		if !reflect.DeepEqual(turn, c.Expect.OpenTurn) || !reflect.DeepEqual(step, c.Expect.OpenStep) {
			return fmt.Errorf("open turn %s and step %s, want %s and %s", number(turn), number(step), number(c.Expect.OpenTurn), number(c.Expect.OpenStep))
		}
		if !slices.Equal(calls, c.Expect.PendingCalls) {
			return fmt.Errorf("pending calls %v, want %v", calls, c.Expect.PendingCalls)
		}
	}
	return nil
}

func packageEnvelope(c conformance.EnvelopeCase) error {
	r := newPackageRun(events.Format(c.Format), lifecycle.Off)
	return r.offerAll([]conformance.Candidate{{Event: json.RawMessage(c.Raw), Accept: c.Accept, Rule: c.Rule}})
}

func packageRepair(c conformance.RepairCase) error {
	r := newPackageRun(events.Format3, lifecycle.Off)
	var candidates []conformance.Candidate
	for _, e := range c.Events {
		candidates = append(candidates, conformance.Candidate{Event: e, Accept: true})
	}
	if err := r.offerAll(candidates); err != nil {
		return err
	}
	s := r.state
	closers := s.Life.Closers(r.format, s.Next, s.Time)
	fromHead := lifecycle.Restore(s.Life.Snapshot()).Closers(r.format, s.Next, s.Time)
	if !reflect.DeepEqual(closers, fromHead) {
		return fmt.Errorf("closers from a head:\n got %s\nwant %s", fromHead, closers)
	}
	if len(closers) != len(c.Closers) {
		return fmt.Errorf("%d closers, want %d:\n%s", len(closers), len(c.Closers), bytes.Join(closers, []byte("\n")))
	}
	r.mode = lifecycle.Enforce // repair keeps the rules, too
	for i, raw := range closers {
		if err := r.offer(raw); err != nil {
			return fmt.Errorf("closer %d: %w", i, err)
		}
		line, err := withFreeText(r.taken[len(r.taken)-1])
		if err != nil {
			return fmt.Errorf("closer %d: %w", i, err)
		}
		if err := sameValue(line, c.Closers[i]); err != nil {
			return fmt.Errorf("closer %d: %w", i, err)
		}
	}
	if more := s.Life.Closers(r.format, s.Next, s.Time); len(more) != 0 {
		return fmt.Errorf("a repaired log gets %d closers more", len(more))
	}
	return r.sameByFold()
}

// withFreeText answers the event's line with `*` for the text of a synthesized result.
func withFreeText(e *events.Event) ([]byte, error) {
	if e.Kind != events.KindTool {
		return e.Line, nil
	}
	text := e.Data()
	for _, step := range []string{"message", "content", "", "content", "", "text"} {
		var err error
		if text, err = below(text, step); err != nil {
			return nil, err
		}
	}
	if len(text) < len(`"x"`) || bytes.Count(e.Line, text) != 1 {
		return nil, fmt.Errorf("the text of the result is %s", text)
	}
	return bytes.Replace(e.Line, text, []byte(`"*"`), 1), nil
}

// below answers a member of an object, or the first element of an array for "".
func below(raw json.RawMessage, name string) (json.RawMessage, error) {
	if name == "" {
		var list []json.RawMessage
		if err := json.Unmarshal(raw, &list); err != nil || len(list) == 0 {
			return nil, fmt.Errorf("no elements in %s", raw)
		}
		return list[0], nil
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil || members[name] == nil {
		return nil, fmt.Errorf("no %s in %s", name, raw)
	}
	return members[name], nil
}

// sameValue compares two JSON texts as values; numbers by what is written.
func sameValue(got, want []byte) error {
	value := func(b []byte) (v any, err error) {
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber()
		err = d.Decode(&v)
		return v, err
	}
	g, err := value(got)
	if err != nil {
		return err
	}
	w, err := value(want)
	if err != nil {
		return err
	}
	if !reflect.DeepEqual(g, w) {
		return fmt.Errorf("\n got %s\nwant %s", got, want)
	}
	return nil
}

func sliceOf[To, From ~int64](in []From) []To {
	out := make([]To, len(in))
	for i, v := range in {
		out[i] = To(v)
	}
	return out
}
