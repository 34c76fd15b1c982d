package client_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"palimpsest/client"
)

// always answers every request alike, on a clock that stands still unless somebody waits.
type always struct {
	answer func(*http.Request) (*http.Response, error)
	count  atomic.Int64
}

func (a *always) RoundTrip(r *http.Request) (*http.Response, error) {
	a.count.Add(1)
	if r.Body != nil {
		_ = r.Body.Close()
	}
	return a.answer(r)
}

// timed makes a client without a network.
func timed(t *testing.T, answer func(*http.Request) (*http.Response, error), change ...func(*client.Config)) (*client.Session, *always) {
	t.Helper()
	transport := &always{answer: answer}
	cfg := client.Config{AppenderURL: "http://appender", ProjectorURL: "http://projector", HTTPClient: &http.Client{Transport: transport}}
	for _, c := range change {
		c(&cfg)
	}
	c, err := client.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c.Session("timed"), transport
}

const receipt = `{"session":"timed","firstSeq":0,"lastSeq":0,"commit":"C","duplicate":false,"digest":"00"}`

// eventually answers with a receipt after some other answers.
func eventually(times int64, first func(*http.Request) (*http.Response, error)) func(*http.Request) (*http.Response, error) {
	var n atomic.Int64
	return func(r *http.Request) (*http.Response, error) {
		if n.Add(1) <= times {
			return first(r)
		}
		return respond(r, http.StatusCreated, "application/json", receipt), nil
	}
}

func TestRetryAfterIsHonoured(t *testing.T) {
	t.Parallel()
	for _, code := range []int{http.StatusTooManyRequests, http.StatusServiceUnavailable} {
		for _, form := range []string{"seconds", "date"} {
			t.Run(fmt.Sprintf("%d %s", code, form), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					begun := time.Now()
					value := "7"
					if form == "date" {
						value = begun.Add(7 * time.Second).UTC().Format(http.TimeFormat)
					}
					document := overloaded
					if code == http.StatusServiceUnavailable {
						document = unavailable
					}
					s, transport := timed(t, eventually(1, problem(code, document, "Retry-After", value)))
					if _, err := s.Append(t.Context(), []client.Event{note("a")}); err != nil {
						t.Fatal(err)
					}
					if waited := time.Since(begun); waited < 7*time.Second || waited > 8*time.Second {
						t.Errorf("waited %v, want 7 s", waited)
					}
					if n := transport.count.Load(); n != 2 {
						t.Errorf("%d requests", n)
					}
				})
			})
		}
	}
}

func TestPausesGrowAndDiffer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var at []time.Time
		s, _ := timed(t, func(r *http.Request) (*http.Response, error) {
			at = append(at, time.Now())
			return problem(http.StatusServiceUnavailable, unavailable)(r)
		})
		_, err := s.Append(t.Context(), []client.Event{note("a")})
		if !errors.Is(err, client.ErrUnavailable) || errors.Is(err, client.ErrOutcomeUnknown) {
			t.Fatalf("got %v", err)
		}
		if all := at[len(at)-1].Sub(at[0]); all > 30*time.Second || all < 25*time.Second {
			t.Errorf("tried for %v, want just under 30 s", all)
		}
		want := 50 * time.Millisecond
		for i := range len(at) - 1 {
			if pause := at[i+1].Sub(at[i]); pause > want || pause < want/2 {
				t.Errorf("pause %d took %v, want %v to %v", i, pause, want/2, want)
			}
			want = min(2*want, 2*time.Second)
		}
		if e := asError(t, err); e.Attempts != len(at) || e.Status != http.StatusServiceUnavailable {
			t.Errorf("got %+v after %d requests", e, len(at))
		}
	})
}

func TestBudgetEndsWhatIsCertain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer func(*http.Request) (*http.Response, error)
		budget time.Duration
		want   error
		most   time.Duration
	}{
		"overloaded":                {problem(429, overloaded), 5 * time.Second, client.ErrOverloaded, 5 * time.Second},
		"unreachable":               {refusedConnection.answer, 5 * time.Second, client.ErrUnavailable, 5 * time.Second},
		"no budget":                 {problem(429, overloaded), -1, client.ErrOverloaded, 0},
		"a pause beyond the budget": {problem(503, unavailable, "Retry-After", "600"), 5 * time.Second, client.ErrUnavailable, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				s, _ := timed(t, c.answer, func(cfg *client.Config) { cfg.RetryBudget = c.budget })
				_, err := s.Append(t.Context(), []client.Event{note("a")})
				if !errors.Is(err, c.want) || errors.Is(err, client.ErrOutcomeUnknown) {
					t.Errorf("got %v", err)
				}
				if took := time.Since(begun); took > c.most {
					t.Errorf("took %v, want at most %v", took, c.most)
				}
			})
		})
	}
}

func TestUnknownOutcomeIsPursued(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(*http.Request) (*http.Response, error){
		"by the service":        problem(503, undecided),
		"lost answers":          lost(syscall.ECONNRESET),
		"silence":               silent,
		"first lost, then away": nil,
	} {
		answer := func() func(*http.Request) (*http.Response, error) {
			if answer != nil {
				return answer
			}
			var n atomic.Int64
			return func(r *http.Request) (*http.Response, error) {
				if n.Add(1) == 1 {
					return nil, syscall.ECONNRESET
				}
				return problem(503, unavailable)(r)
			}
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			t.Run("with an expectedSeq until the context ends", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s, transport := timed(t, answer())
					ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
					defer cancel()
					begun := time.Now()
					_, err := s.Append(ctx, []client.Event{note("a")}, client.ExpectedSeq(0))
					if !errors.Is(err, client.ErrOutcomeUnknown) || !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("got %v", err)
					}
					if took := time.Since(begun); took != time.Hour {
						t.Errorf("took %v, want an hour", took)
					}
					if e := asError(t, err); int64(e.Attempts) != transport.count.Load() || e.IdempotencyKey != "" {
						t.Errorf("got %+v after %d requests", e, transport.count.Load())
					}
				})
			})
			t.Run("with a key no longer than the appender knows it", func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s, _ := timed(t, answer(), func(c *client.Config) { c.KeyWindow = 20 * time.Minute })
					begun := time.Now()
					_, err := s.Append(t.Context(), []client.Event{note("a")})
					if e := asError(t, err); !errors.Is(err, client.ErrOutcomeUnknown) || e.IdempotencyKey == "" {
						t.Errorf("got %v", err)
					}
					if took := time.Since(begun); took > 19*time.Minute || took < 16*time.Minute {
						t.Errorf("took %v, want 18 min and at most an attempt more", took)
					}
				})
			})
		})
	}
}

func TestSilentAttemptIsGivenUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, transport := timed(t, eventually(2, silent))
		begun := time.Now()
		if _, err := s.Append(t.Context(), []client.Event{note("a")}); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(begun); took < 2*time.Minute || took > 2*time.Minute+time.Second || transport.count.Load() != 3 {
			t.Errorf("%d requests took %v, want 3 in 2 min", transport.count.Load(), took)
		}
	})
}

// A read that waits at the projector is not given up before the projector does.
func TestReadsAreGivenTheTimeTheyAskFor(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		slow := func(r *http.Request) (*http.Response, error) {
			select {
			case <-time.After(55 * time.Second):
			case <-r.Context().Done():
				return nil, context.Cause(r.Context())
			}
			return respond(r, http.StatusOK, "application/json", `{"session":"timed","seq":3,"replaceGeneration":0,"messages":[]}`), nil
		}
		s, transport := timed(t, slow, func(c *client.Config) { c.AttemptTimeout = 10 * time.Second })
		if _, err := s.Messages(t.Context(), client.MinSeq(3), client.Timeout(50*time.Second)); err != nil {
			t.Error(err)
		}
		if n := transport.count.Load(); n != 1 {
			t.Errorf("%d requests, want 1", n)
		}
	})
}

func TestReadsEndWithTheBudget(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s, _ := timed(t, lost(syscall.ECONNRESET))
		begun := time.Now()
		_, err := s.Messages(t.Context())
		if !errors.Is(err, client.ErrUnavailable) || errors.Is(err, client.ErrOutcomeUnknown) || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("got %v", err)
		}
		if took := time.Since(begun); took > 30*time.Second || took < 25*time.Second {
			t.Errorf("took %v, want just under 30 s", took)
		}
	})
}
