package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"palimpsest/client"
)

// note is a user message whose text is its id.
func note(id string) client.Event {
	return client.Event{Type: "user/message", SurfaceOp: client.Append(), Data: message(id, id)}
}

func message(id, text string) map[string]any {
	return map[string]any{"id": id, "role": "user", "source": map[string]any{"kind": "user"},
		"content": []any{map[string]any{"type": "text", "text": text}}}
}

// ids are the notes in a session's log, in order.
func ids(t *testing.T, s *client.Session) []string {
	t.Helper()
	var out []string
	for e, err := range s.Events(within(t), client.Types("user/message")) {
		if err != nil {
			t.Fatal(err)
		}
		var data struct{ ID string }
		if err := json.Unmarshal(e.Data, &data); err != nil {
			t.Fatal(err)
		}
		out = append(out, data.ID)
	}
	return out
}

func asError(t *testing.T, err error) *client.Error {
	t.Helper()
	var e *client.Error
	if !errors.As(err, &e) {
		t.Fatalf("got %v, want an *Error", err)
	}
	return e
}

func bodyOf(t *testing.T, r *http.Request) string {
	t.Helper()
	b, err := r.GetBody()
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(b)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestAppendIsStoredOnceWhateverIsLost(t *testing.T) {
	t.Parallel()
	ways := map[string]func(*testing.T, *client.Session) func(context.Context, client.Event) (*client.Receipt, error){
		"nothing given": func(_ *testing.T, s *client.Session) func(context.Context, client.Event) (*client.Receipt, error) {
			return func(ctx context.Context, e client.Event) (*client.Receipt, error) {
				return s.Append(ctx, []client.Event{e})
			}
		},
		"expectedSeq": func(_ *testing.T, s *client.Session) func(context.Context, client.Event) (*client.Receipt, error) {
			return func(ctx context.Context, e client.Event) (*client.Receipt, error) {
				return s.Append(ctx, []client.Event{e}, client.ExpectedSeq(1))
			}
		},
		"expectedSeq and key": func(_ *testing.T, s *client.Session) func(context.Context, client.Event) (*client.Receipt, error) {
			return func(ctx context.Context, e client.Event) (*client.Receipt, error) {
				return s.Append(ctx, []client.Event{e}, client.ExpectedSeq(1), client.IdempotencyKey("k"))
			}
		},
		"writer": func(t *testing.T, s *client.Session) func(context.Context, client.Event) (*client.Receipt, error) {
			w, err := s.TakeWriter(within(t), "w")
			if err != nil {
				t.Fatal(err)
			}
			return func(ctx context.Context, e client.Event) (*client.Receipt, error) { return w.Append(ctx, e) }
		},
	}
	for way, prepare := range ways {
		for i, f := range faultTable {
			t.Run(way+"/"+f.name, func(t *testing.T) {
				t.Parallel()
				faults := new(faulty)
				c := dial(t, faults)
				s := fresh(c, fmt.Sprintf("once/%s/%d", way, i))
				if _, err := s.Append(within(t), []client.Event{note("before")}); err != nil {
					t.Fatal(err)
				}
				appendOne := prepare(t, s)
				faults.expect(f)
				r, err := appendOne(within(t), note("it"))
				if err != nil {
					t.Fatal(err)
				}
				if r.Duplicate != f.stored {
					t.Errorf("duplicate %t, want %t", r.Duplicate, f.stored)
				}
				if got, want := ids(t, s), []string{"before", "it"}; !slices.Equal(got, want) {
					t.Errorf("the log holds %q, want %q", got, want)
				}
				attempts := attemptsOf(faults.requests())
				if len(attempts) < 2 {
					t.Fatalf("sent %d times, want another attempt", len(attempts))
				}
				for _, a := range attempts[1:] {
					for _, h := range []string{"Idempotency-Key", "Palimpsest-Writer-Epoch"} {
						if got, want := a.Header.Get(h), attempts[0].Header.Get(h); got != want {
							t.Errorf("%s %q in a later attempt, %q in the first", h, got, want)
						}
					}
					if a.URL.String() != attempts[0].URL.String() || bodyOf(t, a) != bodyOf(t, attempts[0]) {
						t.Errorf("a later attempt differs: %s %s", a.URL, bodyOf(t, a))
					}
				}
				if attempts[0].Header.Get("Idempotency-Key") == "" && !attempts[0].URL.Query().Has("expectedSeq") {
					t.Error("sent with neither key nor expectedSeq")
				}
			})
		}
	}
}

// attemptsOf are the requests that append.
func attemptsOf(sent []*http.Request) (out []*http.Request) {
	for _, r := range sent {
		if strings.HasSuffix(r.URL.Path, "/events") && r.Method == http.MethodPost {
			out = append(out, r)
		}
	}
	return out
}

func TestSilenceAfterItWasStored(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	s := fresh(dial(t, faults, func(c *client.Config) { c.AttemptTimeout = time.Second }), "silence")
	faults.expect(fault{stored: true, answer: silent})
	r, err := s.Append(within(t), []client.Event{note("a")})
	if err != nil || !r.Duplicate {
		t.Errorf("got %+v, %v", r, err)
	}
	if got := ids(t, s); !slices.Equal(got, []string{"a"}) {
		t.Errorf("the log holds %q", got)
	}
}

func TestManyFaultsLeaveTheLogAsItWasMeant(t *testing.T) {
	t.Parallel()
	const rounds = 60
	for _, way := range []string{"keys", "writer"} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			faults := new(faulty)
			s := fresh(dial(t, faults), "many/"+way)
			send := func(e client.Event) (*client.Receipt, error) { return s.Append(within(t), []client.Event{e}) }
			if way == "writer" {
				w, err := s.TakeWriter(within(t), "w")
				if err != nil {
					t.Fatal(err)
				}
				send = func(e client.Event) (*client.Receipt, error) { return w.Append(within(t), e) }
			}
			var want []string
			for n := range rounds {
				var next []fault
				for range random.IntN(4) {
					next = append(next, faultTable[random.IntN(len(faultTable))])
				}
				faults.expect(next...)
				id := fmt.Sprintf("n%d", n)
				if _, err := send(note(id)); err != nil {
					t.Fatalf("seed %d, round %d: %v", seed, n, err)
				}
				want = append(want, id)
			}
			if got := ids(t, s); !slices.Equal(got, want) {
				t.Errorf("seed %d: the log holds %q, want %q", seed, got, want)
			}
		})
	}
}

func TestRefusalsAreNotTriedAgain(t *testing.T) {
	t.Parallel()
	for _, code := range []int{400, 401, 403, 404, 405, 409, 410, 413, 415, 422, 500, 501} {
		t.Run(fmt.Sprint(code), func(t *testing.T) {
			t.Parallel()
			faults := new(faulty)
			s := fresh(dial(t, faults), fmt.Sprintf("refused/%d", code))
			document := fmt.Sprintf(`{"title":"No","status":%d,"detail":"d","code":"some-code"}`, code)
			faults.expect(fault{answer: problem(code, document)})
			_, err := s.Append(within(t), []client.Event{note("a")})
			e := asError(t, err)
			if e.Status != code || e.Code != "some-code" || e.Detail != "d" || e.Attempts != 1 || len(faults.requests()) != 1 {
				t.Errorf("got %+v after %d requests", e, len(faults.requests()))
			}
			if e.OutcomeUnknown {
				t.Error("what the service refused is called unknown")
			}
			faults.expect(fault{answer: status(code)})
			_, err = s.Append(within(t), []client.Event{note("a")})
			if e := asError(t, err); e.Code != fmt.Sprintf("http-%d", code) || len(faults.requests()) != 1 {
				t.Errorf("got %+v after %d requests", e, len(faults.requests()))
			}
		})
	}
}

func TestRefusalsCarryTheProblem(t *testing.T) {
	t.Parallel()
	c := dial(t, nil)
	ctx := within(t)
	s := fresh(c, "problems")
	if _, err := s.Append(ctx, []client.Event{note("a"), note("b")}, client.ExpectedSeq(0), client.IdempotencyKey("first")); err != nil {
		t.Fatal(err)
	}
	unknownType := client.Event{Type: "acme/unheard-of", Data: 1}
	for name, c := range map[string]struct {
		err  func() error
		want error
		rule string
		more func(*client.Error) bool
	}{
		"seq-conflict": {
			func() error {
				_, err := s.Append(ctx, []client.Event{note("x")}, client.ExpectedSeq(7))
				return err
			},
			client.ErrSeqConflict, "",
			func(e *client.Error) bool { return *e.ExpectedSeq == 7 && *e.ActualSeq == 2 && e.Session == s.ID() },
		},
		"a broken rule names the event": {
			func() error { _, err := s.Append(ctx, []client.Event{note("x"), unknownType}); return err },
			client.ErrRuleViolation, "unknown-type",
			func(e *client.Error) bool { return *e.Index == 1 && *e.Seq == 3 },
		},
		"the same key with other events": {
			func() error {
				_, err := s.Append(ctx, []client.Event{note("x")}, client.IdempotencyKey("first"))
				return err
			},
			client.ErrKeyReused, "",
			func(e *client.Error) bool { return *e.Seq == 0 && e.IdempotencyKey == "first" },
		},
		"a session that is not there": {
			func() error { _, err := c.Session("nobody").Status(ctx); return err },
			client.ErrSessionNotFound, "", func(e *client.Error) bool { return e.Session == "nobody" },
		},
		"an event that is too large": {
			func() error {
				_, err := s.Append(ctx, []client.Event{{Type: "todo/write", Data: strings.Repeat("x", 9<<20)}})
				return err
			},
			client.ErrTooLarge, "", func(e *client.Error) bool { return e.Status == http.StatusRequestEntityTooLarge },
		},
		"another header": {
			func() error { _, err := s.Create(ctx, map[string]any{"cwd": "/elsewhere"}); return err },
			client.ErrSessionExists, "", func(*client.Error) bool { return true },
		},
		"an id that is none": {
			func() error { _, err := c.Session("..").Append(ctx, []client.Event{note("x")}); return err },
			&client.Error{Code: "session-id-malformed"}, "", func(e *client.Error) bool { return e.Status == http.StatusBadRequest },
		},
		"no events": {
			func() error { _, err := s.Append(ctx, nil); return err },
			client.ErrBadRequest, "", func(e *client.Error) bool { return e.Attempts == 0 },
		},
		"data that is no JSON": {
			func() error {
				_, err := s.Append(ctx, []client.Event{note("x"), {Type: "todo/write", Data: json.RawMessage(`1},{"type":"x"`)}})
				return err
			},
			client.ErrBadRequest, "", func(e *client.Error) bool { return e.Attempts == 0 && *e.Index == 1 },
		},
		"data that cannot be encoded": {
			func() error {
				_, err := s.Append(ctx, []client.Event{{Type: "todo/write", Data: func() {}}})
				return err
			},
			client.ErrBadRequest, "", func(e *client.Error) bool { return e.Attempts == 0 },
		},
		"a key that is none": {
			func() error {
				_, err := s.Append(ctx, []client.Event{note("x")}, client.IdempotencyKey("a\nb"))
				return err
			},
			client.ErrBadRequest, "", func(e *client.Error) bool { return e.Attempts == 0 },
		},
		"an id that is no UTF-8": {
			func() error { _, err := c.Session("a\xff").Create(ctx, nil); return err },
			client.ErrBadRequest, "", func(e *client.Error) bool { return e.Attempts == 0 },
		},
		"a seq that is not on the surface": {
			func() error { _, err := s.Prune(ctx, 77, nil); return err },
			client.ErrRuleViolation, "replace-endpoint-not-on-surface", func(*client.Error) bool { return true },
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := c.err()
			e := asError(t, err)
			if !errors.Is(err, c.want) || e.Rule != c.rule || !c.more(e) {
				t.Errorf("got %#v: %v", e, e)
			}
			if c.rule != "" && !errors.Is(err, &client.Error{Rule: c.rule}) {
				t.Errorf("does not match its rule: %v", err)
			}
			for _, other := range []error{client.ErrFenced, client.ErrOutcomeUnknown, client.ErrOverloaded, &client.Error{Rule: "turn-overlap"}, &client.Error{}} {
				if errors.Is(err, other) {
					t.Errorf("matches %v, too: %v", other, err)
				}
			}
		})
	}
	if got := ids(t, s); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("refused appends left %q", got)
	}
}

func TestUnknownOutcomeCanBeAskedForAgain(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	c := dial(t, faults)
	for _, stored := range []bool{true, false} {
		s := fresh(c, fmt.Sprintf("again/%t", stored))
		ctx, cancel := context.WithCancelCause(within(t))
		why := errors.New("the user left")
		faults.expect(fault{stored: stored, answer: func(r *http.Request) (*http.Response, error) {
			cancel(why)
			return nil, syscall.ECONNRESET
		}})
		_, err := s.Append(ctx, []client.Event{note("a")})
		e := asError(t, err)
		if !errors.Is(err, client.ErrOutcomeUnknown) || !errors.Is(err, why) || e.IdempotencyKey == "" || e.Attempts != 1 {
			t.Fatalf("got %#v", e)
		}
		r, err := s.Append(within(t), []client.Event{note("a")}, client.IdempotencyKey(e.IdempotencyKey))
		if err != nil || r.Duplicate != stored {
			t.Errorf("asked again: %+v, %v", r, err)
		}
		if got := ids(t, s); !slices.Equal(got, []string{"a"}) {
			t.Errorf("the log holds %q", got)
		}
	}
}

func TestWhatIsCancelledBeforeItIsSentIsNotUnknown(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	s := fresh(dial(t, faults), "cancelled")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := s.Append(ctx, []client.Event{note("a")})
	if errors.Is(err, client.ErrOutcomeUnknown) || !errors.Is(err, context.Canceled) || len(faults.requests()) != 0 {
		t.Errorf("got %v after %d requests", err, len(faults.requests()))
	}
	// Refused connections prove that nothing was stored.
	ctx, cancel = context.WithCancel(t.Context())
	faults.expect(refusedConnection, fault{answer: func(r *http.Request) (*http.Response, error) {
		cancel()
		return refusedConnection.answer(r)
	}})
	_, err = s.Append(ctx, []client.Event{note("a")})
	if errors.Is(err, client.ErrOutcomeUnknown) || !errors.Is(err, context.Canceled) || len(faults.requests()) != 2 {
		t.Errorf("got %v after %d requests", err, len(faults.requests()))
	}
}

// A conflict that follows a lost answer is the service's word that the lost attempt was not
// stored: it would have recognised it.
func TestConflictAfterALostAnswerSettlesIt(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	c := dial(t, faults)
	s := fresh(c, "settled")
	other := dial(t, nil).Session(s.ID())
	faults.expect(fault{answer: func(r *http.Request) (*http.Response, error) {
		if _, err := other.Append(r.Context(), []client.Event{note("other")}, client.ExpectedSeq(0)); err != nil {
			t.Error(err)
		}
		return nil, syscall.ECONNRESET
	}})
	_, err := s.Append(within(t), []client.Event{note("mine")}, client.ExpectedSeq(0))
	if !errors.Is(err, client.ErrSeqConflict) || errors.Is(err, client.ErrOutcomeUnknown) {
		t.Errorf("got %v", err)
	}
	if got := ids(t, s); !slices.Equal(got, []string{"other"}) {
		t.Errorf("the log holds %q", got)
	}
	// The word of somebody on the way says nothing about it.
	faults.expect(resetAfter, fault{answer: status(http.StatusForbidden)})
	_, err = s.Append(within(t), []client.Event{note("mine")}, client.ExpectedSeq(1))
	if e := asError(t, err); e.Status != http.StatusForbidden || !errors.Is(err, client.ErrOutcomeUnknown) {
		t.Errorf("got %v", err)
	}
}

func TestConcurrentAppendsAreAllStored(t *testing.T) {
	t.Parallel()
	faults := new(faulty)
	c := dial(t, faults)
	s := fresh(c, "concurrent")
	var next []fault
	for range 40 {
		next = append(next, resetAfter, proxyAway)
	}
	faults.expect(next...)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 10 {
				if _, err := s.Append(within(t), []client.Event{note(fmt.Sprintf("w%d-%d", i, n))}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	got := ids(t, s)
	last := map[string]int{}
	for _, id := range got {
		var w, n int
		if _, err := fmt.Sscanf(id, "w%d-%d", &w, &n); err != nil {
			t.Fatal(err)
		}
		who := fmt.Sprint(w)
		if want := last[who]; n != want {
			t.Fatalf("%s where w%d-%d follows: %q", id, w, want, got)
		}
		last[who]++
	}
	if len(got) != 80 {
		t.Errorf("%d events, want 80", len(got))
	}
}

func TestTimeAndSourcesAreStored(t *testing.T) {
	t.Parallel()
	s := fresh(dial(t, nil), "fields")
	at := time.Date(2026, 1, 2, 3, 4, 5, 678_900_000, time.FixedZone("", 3600))
	r, err := s.Append(within(t), []client.Event{
		{Type: "todo/write", Data: json.RawMessage(`{"n":1.10}`), Time: at},
		note("a"),
		{Type: "user/message", SurfaceOp: client.Replace(1, 1), Sources: []client.Seq{0, 1}, Data: message("b", "<&>"), Time: at},
		{Type: "acme/thing", Ignorable: true, Data: nil},
	}, client.ExpectedSeq(0))
	if err != nil {
		t.Fatal(err)
	}
	if r.FirstSeq != 0 || r.LastSeq != 3 || r.Duplicate || len(r.Digest) != 64 || r.Session != s.ID() {
		t.Errorf("receipt %+v", r)
	}
	var got []client.StoredEvent
	for e, err := range s.Events(within(t)) {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, e)
	}
	if len(got) != 4 {
		t.Fatalf("%d events", len(got))
	}
	if e := got[0]; e.Type != "todo/write" || e.Seq != 0 || !e.Time.Equal(at.Truncate(time.Millisecond)) || string(e.Data) != `{"n":1.10}` || e.SurfaceOp != (client.SurfaceOp{}) {
		t.Errorf("event 0: %+v", e)
	}
	if e := got[1]; !e.SurfaceOp.IsAppend() || e.Sources != nil || time.Since(e.Time) > time.Hour {
		t.Errorf("event 1: %+v", e)
	}
	start, end, ok := got[2].SurfaceOp.Range()
	if !ok || start != 1 || end != 1 || !slices.Equal(got[2].Sources, []client.Seq{0, 1}) || !strings.Contains(string(got[2].Line), "<&>") {
		t.Errorf("event 2: %+v %s", got[2], got[2].Line)
	}
	if e := got[3]; !e.Ignorable || e.Type != "acme/thing" || string(e.Data) != "null" {
		t.Errorf("event 3: %+v", e)
	}
}
