package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/platform"
)

// A fault gets between one publish and its answer. arm prepares it for the next publish of j.
type fault struct {
	name string
	arm  func(t *testing.T, j *Journal, s *journaltest.Server, p *journaltest.Proxy)

	// sent says that the first attempt reaches the server although its answer is not seen, so
	// that a commit that wins is found rather than acknowledged.
	sent bool
	// own gives every case a server of its own, since the fault stops it; proxied puts a proxy
	// in front of the publishing connection.
	own, proxied bool
}

// once replaces the answer to the first attempt; nothing is sent.
func once(err error) func(*testing.T, *Journal, *journaltest.Server, *journaltest.Proxy) {
	return func(_ *testing.T, j *Journal, _ *journaltest.Server, _ *journaltest.Proxy) {
		var n atomic.Int64
		j.Faults.BeforePublish = func(*events.Commit) error {
			if n.Add(1) == 1 {
				return err
			}
			return nil
		}
	}
}

// atFirst calls f before the first attempt (or behind it), which takes its course.
func atFirst(behind bool, f func(j *Journal, s *journaltest.Server, p *journaltest.Proxy) error) func(*testing.T, *Journal, *journaltest.Server, *journaltest.Proxy) {
	return func(_ *testing.T, j *Journal, s *journaltest.Server, p *journaltest.Proxy) {
		var n atomic.Int64
		if behind {
			j.Faults.AfterPublish = func(_ *events.Commit, err error) error {
				if n.Add(1) == 1 {
					return f(j, s, p)
				}
				return err
			}
			return
		}
		j.Faults.BeforePublish = func(*events.Commit) error {
			if n.Add(1) == 1 {
				return f(j, s, p)
			}
			return nil
		}
	}
}

var faults = []fault{
	{name: "none", arm: func(*testing.T, *Journal, *journaltest.Server, *journaltest.Proxy) {}},
	{name: "10071", arm: once(&apiError{Code: 400, ErrCode: errWrongLastSeq, Description: "wrong last sequence: 7"})},
	{name: "10164", arm: once(&apiError{Code: 400, ErrCode: errWrongLastSeqConstant, Description: "wrong last sequence"})},
	{name: "10158", arm: once(&apiError{Code: 409, ErrCode: errDuplicateInFlight, Description: "duplicate message id is in process"})},
	{name: "JetStream away", arm: once(&apiError{Code: 503, ErrCode: 10008, Description: "JetStream system temporarily unavailable"})},
	{name: "no responders", arm: once(nats.ErrNoResponders)},
	{name: "timeout, not stored", arm: once(nats.ErrTimeout)},
	{name: "timeout, but stored", sent: true, arm: atFirst(true, func(*Journal, *journaltest.Server, *journaltest.Proxy) error {
		return nats.ErrTimeout
	})},
	{name: "10158, but stored", sent: true, arm: atFirst(true, func(*Journal, *journaltest.Server, *journaltest.Proxy) error {
		return &apiError{Code: 409, ErrCode: errDuplicateInFlight, Description: "duplicate message id is in process"}
	})},
	{name: "connection lost before the commit arrives", proxied: true, arm: atFirst(false, func(_ *Journal, _ *journaltest.Server, p *journaltest.Proxy) error {
		p.LoseWhen(func(up bool, b []byte) bool { return up && bytes.Contains(b, []byte("HPUB sessions.")) })
		return nil
	})},
	{name: "connection lost before the answer arrives", proxied: true, sent: true, arm: atFirst(false, func(_ *Journal, _ *journaltest.Server, p *journaltest.Proxy) error {
		p.LoseWhen(func(up bool, b []byte) bool { return !up && bytes.Contains(b, []byte("MSG _INBOX.")) })
		return nil
	})},
	{name: "server restarted before the commit arrives", own: true, arm: atFirst(false, func(_ *Journal, s *journaltest.Server, _ *journaltest.Proxy) error {
		s.Restart()
		return nil
	})},
	{name: "server restarted before the answer arrives", own: true, sent: true, arm: atFirst(true, func(_ *Journal, s *journaltest.Server, _ *journaltest.Proxy) error {
		s.Restart()
		return nats.ErrTimeout
	})},
}

// An outcome is what the log holds behind the commit that the writer takes for the last, at
// the time of the publish.
type outcome struct {
	name string
	// prepare stores what is there, and returns the ids that the log must hold in the end.
	prepare func(t *testing.T, other *Journal, mine, theirs *events.Commit, after uint64) []string
	won     bool // mine is committed in the end
	before  bool // and was so before the publish
}

var outcomes = []outcome{
	{name: "nothing", won: true, prepare: func(_ *testing.T, _ *Journal, mine, _ *events.Commit, _ uint64) []string {
		return []string{mine.ID}
	}},
	{name: "another's commit", prepare: func(t *testing.T, other *Journal, _, theirs *events.Commit, after uint64) []string {
		store(t, other, after, theirs)
		return []string{theirs.ID}
	}},
	{name: "ours", won: true, before: true, prepare: func(t *testing.T, other *Journal, mine, _ *events.Commit, after uint64) []string {
		c := *mine
		store(t, other, after, &c)
		return []string{mine.ID}
	}},
	{name: "ours and another's", won: true, before: true, prepare: func(t *testing.T, other *Journal, mine, theirs *events.Commit, after uint64) []string {
		c := *mine
		w := journaltest.NewWriter(mine.Session, nil)
		w.Next, w.Digest, w.Chain = mine.Last+1, mine.Digest, mine.Chain
		behind := w.Commit(theirs.ID, 2, 80)
		store(t, other, store(t, other, after, &c), behind)
		return []string{mine.ID, theirs.ID}
	}},
}

// TestPublishFindsOutWhatBecameOfACommit walks through fault × what the log holds. However a
// publish is disturbed, its outcome is that of the log, and a commit is in it once at most.
func TestPublishFindsOutWhatBecameOfACommit(t *testing.T) {
	t.Parallel()
	for _, f := range faults {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			shared := journaltest.Start(t)
			for i, o := range outcomes {
				s := shared
				if f.own {
					s = journaltest.Start(t)
				}
				session := fmt.Sprintf("case %d", i)
				other, nc := open(t, s, quick), s.Conn(t)
				cfg := quick
				if f.own { // what is written to a server that goes down gets no answer
					cfg.PublishTimeout, cfg.ReadTimeout = time.Second, time.Second
				}
				if f.proxied {
					cfg.PublishTimeout = 400 * time.Millisecond // waited for in full
				}
				j := open(t, s, cfg)
				var p *journaltest.Proxy
				if f.proxied {
					p = s.StartProxy(t)
					j.acks = []*acks{newAcks(journaltest.Dial(t, p.URL()), j.cfg.PublishTimeout)}
				}
				w := journaltest.NewWriter(session, nil)
				base := w.Commit(session+" base", 3, 100)
				after := store(t, other, 0, base)
				theirs := w.Fork().Commit(session+" theirs", 1, 60)
				mine := w.Commit(session+" mine", 2, 120)
				want := append([]string{base.ID}, o.prepare(t, other, mine, theirs, after)...)
				f.arm(t, j, s, p)

				dup, err := j.Publish(journaltest.Context(t), mine, after)
				if p != nil && p.Armed() {
					t.Fatalf("%s: the connection was not lost", o.name)
				}
				log := checkIDs(t, j, nc, session, want...)
				conflict, _ := errors.AsType[*ConflictError](err)
				switch {
				case !o.won:
					if conflict == nil || conflict.Rewound || dup || len(conflict.Commits) != 1 || conflict.Commits[0].ID != theirs.ID {
						t.Errorf("%s: duplicate %t, %v; want a conflict with theirs", o.name, dup, err)
					}
					if mine.StreamSeq != 0 {
						t.Errorf("%s: a commit that lost got stream sequence %d", o.name, mine.StreamSeq)
					}
				case err != nil:
					t.Errorf("%s: %v", o.name, err)
				default:
					// Behind a lost connection or server the first answer may be the retry's.
					if want := o.before || f.sent; dup != want && !(f.own || f.proxied && !o.before) {
						t.Errorf("%s: duplicate is %t, want %t", o.name, dup, want)
					}
					if at := log.Commits[1]; mine.StreamSeq != at.StreamSeq {
						t.Errorf("%s: stream sequence %d, the log has it at %d", o.name, mine.StreamSeq, at.StreamSeq)
					}
				}
				// The same once more, as who heard of no outcome would: the answer is the same
				// for ever, and the log does not change.
				again := *mine
				again.StreamSeq = 0
				dup, err = j.Publish(journaltest.Context(t), &again, after)
				if o.won && (err != nil || !dup || again.StreamSeq != mine.StreamSeq) || !o.won && !errors.As(err, &conflict) {
					t.Errorf("%s: the same publish again: duplicate %t, at %d, %v", o.name, dup, again.StreamSeq, err)
				}
				checkIDs(t, j, nc, session, want...)
			}
		})
	}
}

// TestPublishLeavesAnOutcomeOpenOnlyWhenTheBudgetIsSpent: with no server to ask nobody can know.
// The error says which commit it is about, and the same publish again settles it.
func TestPublishLeavesAnOutcomeOpenOnlyWhenTheBudgetIsSpent(t *testing.T) {
	t.Parallel()
	for _, sent := range []bool{false, true} {
		t.Run(fmt.Sprintf("stored=%t", sent), func(t *testing.T) {
			t.Parallel()
			s := journaltest.Start(t)
			other := open(t, s, quick)
			type attempt struct {
				outcome
				j            *Journal
				session      string
				after        uint64
				mine, theirs *events.Commit
				want         []string
			}
			var attempts []*attempt
			for i, o := range outcomes {
				a := &attempt{outcome: o, session: fmt.Sprintf("case-%d", i), j: open(t, s, Config{PublishTimeout: 200 * time.Millisecond, ReadTimeout: 200 * time.Millisecond, RetryBudget: 700 * time.Millisecond})}
				w := journaltest.NewWriter(a.session, nil)
				base := w.Commit(a.session+" base", 1, 100)
				a.after = store(t, other, 0, base)
				a.theirs = w.Fork().Commit(a.session+" theirs", 1, 60)
				a.mine = w.Commit(a.session+" mine", 2, 120)
				a.want = append([]string{base.ID}, o.prepare(t, other, a.mine, a.theirs, a.after)...)
				attempts = append(attempts, a)
			}
			var down sync.Once
			arrived := make(chan struct{}, len(attempts))
			var wg sync.WaitGroup
			for _, a := range attempts {
				hook := func() {
					arrived <- struct{}{}
					if len(arrived) == cap(arrived) {
						down.Do(s.Down)
					}
				}
				var n atomic.Int64
				gate := func() error {
					if n.Add(1) == 1 {
						hook()
						journaltest.Eventually(t, "the server to be down", func() bool { return !a.j.conns.Read.IsConnected() })
					}
					return nats.ErrTimeout
				}
				if sent {
					a.j.Faults.AfterPublish = func(*events.Commit, error) error { return gate() }
				} else {
					a.j.Faults.BeforePublish = func(*events.Commit) error { return gate() }
				}
				wg.Go(func() {
					dup, err := a.j.Publish(journaltest.Context(t), a.mine, a.after)
					e := asError(err)
					if !errors.Is(err, events.ErrOutcomeUnknown) || dup || e.Commit != a.mine.ID || e.Session != a.session || a.mine.StreamSeq != 0 {
						t.Errorf("%s: duplicate %t, %v, want outcome-unknown for its commit", a.name, dup, err)
					}
					if !strings.Contains(e.Detail, "expectedSeq") {
						t.Errorf("%s: the detail does not say what to do: %s", a.name, e.Detail)
					}
				})
			}
			wg.Wait()
			s.Up()
			nc := s.Conn(t)
			for _, a := range attempts {
				a.j.Faults = Faults{}
				a.j.cfg = quick.WithDefaults()
				a.j.acks = []*acks{newAcks(a.j.conns.Publish[0], a.j.cfg.PublishTimeout)}
				before := slices.Clone(a.want)
				if a.won && !a.before && !sent {
					before = before[:1]
				}
				checkIDs(t, a.j, nc, a.session, before...)
				dup, err := a.j.Publish(journaltest.Context(t), a.mine, a.after)
				conflict, _ := errors.AsType[*ConflictError](err)
				if a.won && (err != nil || dup != (a.before || sent)) || !a.won && conflict == nil {
					t.Errorf("%s: the same publish again: duplicate %t, %v", a.name, dup, err)
				}
				checkIDs(t, a.j, nc, a.session, a.want...)
			}
		})
	}
}

// TestPublishIsPursuedWhenTheCallerGoesAway: a commit that was sent has an outcome, whoever
// still wants to know.
func TestPublishIsPursuedWhenTheCallerGoesAway(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, quick)
	w := journaltest.NewWriter("s", nil)
	ctx, leave := context.WithCancel(journaltest.Context(t))
	var attempts atomic.Int64
	j.Faults.BeforePublish = func(*events.Commit) error {
		leave()
		if attempts.Add(1) < 3 {
			return nats.ErrTimeout
		}
		return nil
	}
	first := w.Commit("a", 1, 60)
	if dup, err := j.Publish(ctx, first, 0); dup || err != nil {
		t.Fatalf("duplicate %t, %v", dup, err)
	}
	// Before anything is sent, it counts that the caller is gone.
	if _, err := j.Publish(ctx, w.Commit("b", 1, 60), first.StreamSeq); !errors.Is(err, context.Canceled) {
		t.Fatalf("publish of a caller who is gone: %v", err)
	}
	if attempts.Load() != 3 {
		t.Errorf("%d attempts, want 3", attempts.Load())
	}
	checkIDs(t, j, s.Conn(t), "s", "a")
}

// TestPublishTellsALogThatWentBack: the writer knows a commit that the log has lost.
func TestPublishTellsALogThatWentBack(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, quick)
	w := journaltest.NewWriter("s", nil)
	a := w.Commit("a", 2, 60)
	store(t, j, 0, a)
	lost := w.Commit("lost", 1, 60)
	store(t, j, a.StreamSeq, lost)
	stream, err := j.js.Stream(journaltest.Context(t), "SESSIONS")
	if err == nil {
		err = stream.DeleteMsg(journaltest.Context(t), lost.StreamSeq)
	}
	if err != nil {
		t.Fatal(err)
	}
	_, err = j.Publish(journaltest.Context(t), w.Commit("b", 1, 60), lost.StreamSeq)
	if c, ok := errors.AsType[*ConflictError](err); !ok || !c.Rewound || c.Commits != nil {
		t.Fatalf("got %v", err)
	}
	checkIDs(t, j, s.Conn(t), "s", "a")
}

// TestPublishOverAPowerCutDoesNotFollowAnothersCommit: while the writer waits for an answer, a power cut
// takes the commit that it knows for the last, and another's commit gets its stream sequence.
func TestPublishOverAPowerCutDoesNotFollowAnothersCommit(t *testing.T) {
	t.Parallel()
	for _, sent := range []bool{false, true} { // whether the cut comes behind the first attempt
		t.Run(fmt.Sprint("sent before ", sent), func(t *testing.T) {
			t.Parallel()
			s := journaltest.Start(t)
			j, other := open(t, s, quick), open(t, s, quick)
			w := journaltest.NewWriter("s", nil)
			a := w.Commit("a", 1, 60)
			store(t, j, 0, a)
			theirs := w.Fork().Commit("theirs", 3, 60)
			s.Down()
			restore := s.SaveStream("SESSIONS")
			s.Up()
			lost := w.Commit("lost", 1, 60)
			store(t, j, a.StreamSeq, lost)
			cut := atFirst(sent, func(*Journal, *journaltest.Server, *journaltest.Proxy) error {
				s.Down()
				restore()
				s.Up()
				store(t, other, a.StreamSeq, theirs)
				return map[bool]error{true: nats.ErrTimeout}[sent]
			})
			cut(t, j, s, nil)
			_, err := j.Publish(journaltest.Context(t), w.Commit("b", 1, 60), lost.StreamSeq)
			if c, ok := errors.AsType[*ConflictError](err); !ok || !c.Rewound {
				t.Fatalf("got %v", err)
			}
			checkIDs(t, j, s.Conn(t), "s", "a", "theirs")
		})
	}
}

// TestNothingWaitsInTheClientForAConnection: what it sends then comes before anybody looks whether the
// log is still the same.
func TestNothingWaitsInTheClientForAConnection(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	j := open(t, s, Config{})
	s.Down()
	conn := j.conns.Publish[0]
	journaltest.Eventually(t, "the connection to be lost", func() bool { return !conn.IsConnected() })
	if _, err := newAcks(conn, time.Minute).send(&nats.Msg{Subject: "sessions.0.s"}); !errors.Is(err, nats.ErrConnectionReconnecting) {
		t.Errorf("got %v", err)
	}
}

// TestPublishHasOneWinner: of many writers with the same expectation one wins, and each of the
// others hears who it was.
func TestPublishHasOneWinner(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	const writers, rounds = 4, 30
	var js [writers]*Journal
	for i := range js {
		js[i] = open(t, s, quick)
	}
	w := journaltest.NewWriter("s", nil)
	var after uint64
	var want []string
	for round := range rounds {
		var commits [writers]*events.Commit
		var ends [writers]*journaltest.Writer
		var errs [writers]error
		var wg sync.WaitGroup
		for i := range writers {
			ends[i] = w.Fork()
			commits[i] = ends[i].Commit(fmt.Sprintf("r%d-w%d", round, i), 1+i, 64)
			wg.Go(func() { _, errs[i] = js[i].Publish(journaltest.Context(t), commits[i], after) })
		}
		wg.Wait()
		winner := slices.Index(errs[:], nil)
		if winner < 0 {
			t.Fatalf("round %d: nobody won: %v", round, errs)
		}
		for i, err := range errs {
			c, _ := errors.AsType[*ConflictError](err)
			if i != winner && (c == nil || len(c.Commits) != 1 || c.Commits[0].ID != commits[winner].ID) {
				t.Fatalf("round %d: writer %d got %v, the winner is %s", round, i, err, commits[winner].ID)
			}
		}
		w, after = ends[winner], commits[winner].StreamSeq
		want = append(want, commits[winner].ID)
	}
	checkIDs(t, js[0], s.Conn(t), "s", want...)
}

// TestPublishRefusesWhatIsTooLarge, whether the client, the server or the stream finds it so,
// and names what was found and what is taken.
func TestPublishRefusesWhatIsTooLarge(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t, func(c *platform.EmbedConfig) { c.MaxPayload = 100_000 })
	for name, c := range map[string]struct {
		cfg  Config
		most int
	}{
		"for the server": {quick, 100_000 - events.HeaderReserve},
		"for the stream": {Config{Stream: "SMALL", Prefix: "small", MaxMsgSize: 50_000}, 50_000 - events.HeaderReserve},
	} {
		j := open(t, s, c.cfg)
		if j.MaxCommit() != c.most {
			t.Errorf("%s: MaxCommit is %d, want %d", name, j.MaxCommit(), c.most)
		}
		w := journaltest.NewWriter("s", nil)
		big := w.Fork().Commit("big", 1, 120_000)
		_, err := j.Publish(journaltest.Context(t), big, 0)
		if e := asError(err); !errors.Is(err, events.ErrTooLarge) || !strings.Contains(e.Detail, fmt.Sprint(len(big.Body))) || !strings.Contains(e.Detail, fmt.Sprint(c.most)) {
			t.Errorf("%s: %v; want too-large with %d and %d", name, err, len(big.Body), c.most)
		}
		checkIDs(t, j, s.Conn(t), "s")
		// What just fits is taken.
		id := "fits " + name
		fits := w.Commit(id, 1, 100)
		grow := c.most - len(fits.Body)
		fits = journaltest.NewWriter("s", nil).Commit(id, 1, 100+grow)
		if len(fits.Body) != c.most {
			t.Fatalf("made %d bytes, wanted %d", len(fits.Body), c.most)
		}
		store(t, j, 0, fits)
		checkIDs(t, j, s.Conn(t), "s", id)
	}
}

// TestCommitOfTheLargestSizeFitsWhateverTheNames: the room that is kept for headers is enough
// for the longest id, actor and trace.
func TestCommitOfTheLargestSizeFitsWhateverTheNames(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t, func(c *platform.EmbedConfig) { c.MaxPayload = 64 << 10 })
	j := open(t, s, quick)
	for i, session := range []string{"s", strings.Repeat("ü", 100), strings.Repeat("%", 200)} {
		w := journaltest.NewWriter(session, nil)
		id := fmt.Sprintf("012345678901234567890%d", i)
		probe := w.Fork().Commit(id, 1, 100)
		c := w.Commit(id, 1, 100+j.MaxCommit()-len(probe.Body))
		c.Trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		if len(c.Body) != j.MaxCommit() {
			t.Fatalf("made %d bytes, wanted %d", len(c.Body), j.MaxCommit())
		}
		store(t, j, 0, c)
		checkIDs(t, j, s.Conn(t), session, c.ID)
	}
}

// TestPublishRefusesAtOnceWhatTheStreamDoesNotTake: a refusal that no retry changes is no open
// outcome.
func TestPublishRefusesAtOnceWhatTheStreamDoesNotTake(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*jetstream.StreamConfig){
		"sealed": func(c *jetstream.StreamConfig) { c.Sealed = true },
		"full":   func(c *jetstream.StreamConfig) { c.MaxMsgs = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := journaltest.Start(t)
			j := open(t, s, Config{RetryBudget: 2 * time.Second})
			w := journaltest.NewWriter("s", nil)
			after := store(t, j, 0, w.Commit("a", 1, 60))
			stream, err := j.js.Stream(journaltest.Context(t), "SESSIONS")
			if err != nil {
				t.Fatal(err)
			}
			cfg := stream.CachedInfo().Config
			change(&cfg)
			if _, err := j.js.UpdateStream(journaltest.Context(t), cfg); err != nil {
				t.Fatal(err)
			}
			if _, err = j.Publish(journaltest.Context(t), w.Commit("b", 1, 60), after); code(err) != events.CodeUnavailable {
				t.Errorf("got %v", err)
			}
			checkIDs(t, j, s.Conn(t), "s", "a")
		})
	}
}
