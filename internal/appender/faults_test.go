package appender_test

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// column is how a caller secures its appends.
type column struct{ expected, fenced, keyed bool }

func (c column) String() string {
	s := "plain"
	for name, on := range map[string]bool{"expected": c.expected, "fenced": c.fenced, "keyed": c.keyed} {
		if on {
			s = strings.TrimPrefix(s, "plain")
			s += "-" + name
		}
	}
	parts := strings.Split(strings.Trim(s, "-"), "-")
	slices.Sort(parts)
	return strings.Join(parts, "-")
}

// safe says that a retry of an append is recognised.
func (c column) safe() bool { return c.expected || c.keyed }

func columns() (out []column) {
	for i := range 8 {
		out = append(out, column{i&1 > 0, i&2 > 0, i&4 > 0})
	}
	return out
}

// ledger is what the callers know about one session's log, to be held against the log itself.
type ledger struct {
	w       *world
	auditor *audit.Auditor
	session string
	acked   map[events.Seq]string // a text of each acknowledged event
	open    []string              // texts of events of which nobody knows whether they are there

	foreign bool // what is there was not appended, so that nobody was told of it
}

func newLedger(w *world, p *process, session string) *ledger {
	return &ledger{w: w, auditor: audit.New(p.log, p.headers, &projection.Buckets{Snapshots: p.store}), session: session, acked: map[events.Seq]string{}}
}

// ack notes a receipt for events with the given texts. What was acknowledged before must be
// called a duplicate, and be the same events.
func (l *ledger) ack(t testing.TB, r *appender.Receipt, texts ...string) {
	t.Helper()
	if r.LastSeq-r.FirstSeq+1 != events.Seq(len(texts)) {
		t.Errorf("%s: receipt for seqs %d to %d, sent were %d events", l.session, r.FirstSeq, r.LastSeq, len(texts))
	}
	for i, text := range texts {
		seq := r.FirstSeq + events.Seq(i)
		before, twice := l.acked[seq]
		if twice && (!r.Duplicate || before != text) {
			t.Errorf("%s: seq %d was acknowledged for %s, now for %s (duplicate: %t)", l.session, seq, before, text, r.Duplicate)
		}
		l.acked[seq] = text
	}
}

// check checks the whole log: by the auditor, and by a reader that shares no code with it. Every
// acknowledged event is there at its seq, and nothing is there that nobody was told of.
func (l *ledger) check(t testing.TB) *journaltest.Log {
	t.Helper()
	log, err := l.compare(t)
	if err != nil {
		t.Fatalf("%s: %v", l.session, err)
	}
	return log
}

func (l *ledger) compare(t testing.TB) (*journaltest.Log, error) {
	t.Helper()
	log, err := l.w.read(t, l.session)
	if err != nil {
		return nil, err
	}
	r, err := l.auditor.Session(journaltest.Context(t), l.session, audit.Options{LogOnly: true})
	switch {
	case asError(err).Code == events.CodeSessionNotFound && len(log.Lines)+len(l.acked) == 0:
		return log, nil
	case err != nil:
		return nil, err
	case len(r.Findings) > 0:
		return nil, fmt.Errorf("the audit found %v", r.Findings)
	case len(r.Violations) > 0:
		return nil, fmt.Errorf("lifecycle rules are broken: %v", r.Violations)
	case r.LastSeq > log.Next()-1 && len(l.open) > 0:
		return l.compare(t) // what was open has arrived just now
	case r.LastSeq != log.Next()-1:
		return nil, fmt.Errorf("the audit read up to %d, the log ends at %d", r.LastSeq, log.Next()-1)
	}
	open := slices.Clone(l.open)
	for i, line := range log.Lines {
		text, ok := l.acked[events.Seq(i)]
		if ok && !strings.Contains(line, text) {
			return nil, fmt.Errorf("seq %d was acknowledged for %s, it holds %s", i, text, line)
		}
		if ok || l.foreign {
			continue
		}
		k := slices.IndexFunc(open, func(text string) bool { return strings.Contains(line, text) })
		if k < 0 {
			return nil, fmt.Errorf("seq %d holds %s, which nobody was told of", i, line)
		}
		open = slices.Delete(open, k, k+1)
	}
	for seq, text := range l.acked {
		if seq >= log.Next() {
			return nil, fmt.Errorf("%s was acknowledged at %d, the log ends at %d", text, seq, log.Next()-1)
		}
	}
	return log, nil
}

// bench is a session that meets a fault.
type bench struct {
	*ledger
	t        testing.TB
	column   column
	p, other *process // p meets the fault
	line     *line    // between p's publishes and the server, when the fault asks for it
	reads    *line    // between p's reads and the server
	epoch    *events.Seq
	next     events.Seq // as the caller knows it
	attempts atomic.Int64
}

// quoted is a text as it stands in the events of request.
func quoted(texts ...string) []string {
	out := make([]string, len(texts))
	for i, text := range texts {
		out[i] = fmt.Sprintf("%q", text)
	}
	return out
}

// request asks for notes, secured as the column says.
func (b *bench) request(texts ...string) appender.Request {
	r := to(b.session)
	for _, text := range texts {
		r.Events = append(r.Events, []byte(note(text)))
	}
	if b.column.expected {
		r = at(b.next, r)
	}
	if b.column.keyed {
		r.Key = "key of " + texts[0]
	}
	r.Epoch = b.epoch
	return r
}

// append asks as a good client does: again, while JetStream is away and nothing was stored.
func (b *bench) append(p *process, r appender.Request) (*appender.Receipt, error) {
	b.t.Helper()
	return p.persist(b.t, r, func() {
		b.settle()
		b.check(b.t)
	})
}

// persist appends until JetStream answers; it calls unavailable, if not nil, whenever it did not.
func (p *process) persist(t testing.TB, r appender.Request, unavailable func()) (*appender.Receipt, error) {
	t.Helper()
	ctx := journaltest.Context(t)
	for {
		receipt, err := p.Append(ctx, r)
		if asError(err).Code != events.CodeUnavailable || ctx.Err() != nil {
			return receipt, err
		}
		if unavailable != nil {
			unavailable()
		}
	}
}

// settle waits until the checker's own connection is over a restart.
func (b *bench) settle() {
	b.t.Helper()
	journaltest.Eventually(b.t, "the connection", func() bool { return b.w.nc.FlushTimeout(5*time.Second) == nil })
}

// must appends, notes the receipt and checks the log.
func (b *bench) must(what string, p *process, r appender.Request, texts ...string) *appender.Receipt {
	b.t.Helper()
	receipt, err := b.append(p, r)
	if err != nil {
		b.t.Fatalf("%s: %s: %v", b.session, what, err)
	}
	b.note(what, receipt, texts...)
	return receipt
}

func (b *bench) note(what string, receipt *appender.Receipt, texts ...string) {
	b.t.Helper()
	b.ack(b.t, receipt, quoted(texts...)...)
	b.next = max(b.next, receipt.LastSeq+1)
	b.settle()
	if _, err := b.compare(b.t); err != nil {
		b.t.Fatalf("%s: after %s: %v", b.session, what, err)
	}
}

// refused appends, expects a refusal and checks that the log is as it was.
func (b *bench) refused(what string, p *process, r appender.Request, code events.Code) *events.Error {
	b.t.Helper()
	receipt, err := b.append(p, r)
	return b.isRefusal(what, receipt, err, code)
}

func (b *bench) isRefusal(what string, receipt *appender.Receipt, err error, code events.Code) *events.Error {
	b.t.Helper()
	e := asError(err)
	if e.Code != code || receipt != nil {
		b.t.Fatalf("%s: %s: got %+v, %v; want %s", b.session, what, receipt, err, code)
	}
	b.settle()
	if _, err := b.compare(b.t); err != nil {
		b.t.Fatalf("%s: after %s: %v", b.session, what, err)
	}
	return e
}

// takeWriter makes somebody a session's writer.
func (p *process) takeWriter(t testing.TB, session, writer string) (*appender.Fence, error) {
	t.Helper()
	return p.TakeWriter(journaltest.Context(t), appender.WriterRequest{Session: session, Writer: writer})
}

// take makes somebody the session's writer, on behalf of the caller.
func (b *bench) take(p *process, writer string) events.Seq {
	b.t.Helper()
	f, err := p.takeWriter(b.t, b.session, writer)
	if err != nil {
		b.t.Errorf("%s: take the writer: %v", b.session, err)
		return 0
	}
	b.ack(b.t, f.Receipt, fmt.Sprintf(`"writer":%q,"epoch":%d`, writer, f.Epoch))
	return f.Epoch
}

// intrude appends by the other appender, with whatever the session asks for. Hooks call it.
func (b *bench) intrude(text string) {
	r := to(b.session, note(text))
	r.Epoch = b.epoch
	receipt, err := b.other.Append(journaltest.Context(b.t), r)
	if err != nil {
		b.t.Errorf("%s: the other appender: %v", b.session, err)
		return
	}
	b.ack(b.t, receipt, quoted(text)...)
}

// before and after set p's hooks: f gets the number of the attempt.
func (b *bench) before(f func(n int64, c *events.Commit) error) {
	b.p.log.Faults.BeforePublish = func(c *events.Commit) error { return f(b.attempts.Add(1), c) }
}

func (b *bench) after(f func(n int64, c *events.Commit, err error) error) {
	if b.p.log.Faults.BeforePublish == nil {
		b.before(func(int64, *events.Commit) error { return nil })
	}
	b.p.log.Faults.AfterPublish = func(c *events.Commit, err error) error { return f(b.attempts.Load(), c, err) }
}

// fault is one row of the table.
type fault struct {
	name string
	// strike arms the fault for the next append of p, and returns a function that says
	// afterwards whether the append met it.
	strike func(b *bench) (met func() bool)
	// refusal is what the append comes back with; nil or "": it is stored.
	refusal func(column) events.Code
	// spoil changes the request.
	spoil func(*appender.Request)
	// mend is what the caller does about the refusal before it asks again.
	mend func(b *bench, e *events.Error)
	log  journal.Config // time-outs default to those of tableConfig
	// slow says that the fault takes time; it meets four columns instead of eight.
	slow bool
}

func (f fault) columns() []column {
	if !f.slow {
		return columns()
	}
	return slices.DeleteFunc(columns(), func(c column) bool { return c.expected == c.keyed })
}

// tableConfig is short of breath, so that faults show.
func tableConfig(c journal.Config) journal.Config {
	if c.PublishTimeout == 0 {
		c.PublishTimeout = 150 * time.Millisecond
	}
	if c.ReadTimeout == 0 {
		c.ReadTimeout = 2 * time.Second
	}
	return c
}

func flag() (set func(), isSet func() bool) {
	var f atomic.Bool
	return func() { f.Store(true) }, f.Load
}

func isPublish(up bool, b []byte) bool { return up && bytes.Contains(b, []byte("HPUB sessions.")) }
func isAck(up bool, b []byte) bool     { return !up && bytes.Contains(b, []byte(`"stream":"SESSIONS"`)) }

func conflictIfExpected(c column) events.Code {
	if c.expected {
		return events.CodeSeqConflict
	}
	return ""
}

// reread is what a caller does about a seq-conflict: it reads what was appended and decides anew.
func reread(b *bench, e *events.Error) {
	b.t.Helper()
	if want := events.Seq(len(b.acked)); e.ExpectedSeq == nil || *e.ExpectedSeq != b.next || e.ActualSeq == nil || *e.ActualSeq != want {
		b.t.Errorf("%s: the conflict says %+v, expected was %d, the tail is %d", b.session, e, b.next, want)
	}
	b.next = *e.ActualSeq
}

var faults = []fault{
	{
		name:   "none",
		strike: func(*bench) func() bool { return func() bool { return true } },
	},
	{
		name: "timed out but stored",
		strike: func(b *bench) func() bool {
			set, met := flag()
			b.after(func(n int64, _ *events.Commit, err error) error {
				if n == 1 && err == nil {
					set()
					return nats.ErrTimeout
				}
				return err
			})
			return met
		},
	},
	{
		name: "timed out and not stored",
		strike: func(b *bench) func() bool {
			b.before(func(n int64, _ *events.Commit) error {
				if n == 1 {
					return nats.ErrTimeout
				}
				return nil
			})
			return func() bool { return b.attempts.Load() > 1 }
		},
	},
	{
		name: "timed out twice and stored by the second attempt",
		strike: func(b *bench) func() bool {
			set, met := flag()
			b.before(func(n int64, _ *events.Commit) error {
				if n == 1 {
					return nats.ErrTimeout
				}
				return nil
			})
			b.after(func(n int64, _ *events.Commit, err error) error {
				if n == 2 && err == nil {
					set()
					return nats.ErrTimeout
				}
				return err
			})
			return met
		},
	},
	{
		name: "another appender was first",
		strike: func(b *bench) func() bool {
			b.before(func(n int64, _ *events.Commit) error {
				if n == 1 {
					b.intrude("the other's")
				}
				return nil
			})
			return func() bool { return b.p.Stats().Conflicts.Load() > 0 }
		},
		refusal: conflictIfExpected, mend: reread,
	},
	{
		name: "another appender was first and the answer is lost",
		strike: func(b *bench) func() bool {
			set, met := flag()
			b.before(func(n int64, _ *events.Commit) error {
				if n == 1 {
					b.intrude("the other's")
					b.intrude("the other's second")
				}
				return nil
			})
			b.after(func(n int64, _ *events.Commit, err error) error {
				if n == 1 && err != nil {
					set()
					return nats.ErrTimeout
				}
				return err
			})
			return met
		},
		refusal: conflictIfExpected, mend: reread,
	},
	{
		name: "stored and another appender behind it and the ack is lost",
		strike: func(b *bench) func() bool {
			set, met := flag()
			b.after(func(n int64, c *events.Commit, err error) error {
				if n == 1 && err == nil {
					set()
					b.intrude("the other's")
					return nats.ErrTimeout
				}
				return err
			})
			return met
		},
	},
	{
		name: "stored by an attempt that was thought lost and sent again",
		strike: func(b *bench) func() bool {
			set, met := flag()
			commits := b.check(b.t).Commits
			last := commits[len(commits)-1].StreamSeq
			b.before(func(n int64, c *events.Commit) error {
				if n == 1 {
					same := *c
					if _, err := b.other.log.Publish(journaltest.Context(b.t), &same, last); err != nil {
						b.t.Errorf("%s: publish the same commit: %v", b.session, err)
					}
				}
				return nil
			})
			b.after(func(_ int64, _ *events.Commit, err error) error {
				if err != nil {
					set() // the server refuses it as a conflict, with itself
				}
				return err
			})
			return met
		},
	},
	{
		name: "connection lost with the request", slow: true,
		strike: func(b *bench) func() bool {
			return b.line.cutOnce(isPublish)
		},
	},
	{
		name: "connection lost with the ack", slow: true,
		strike: func(b *bench) func() bool {
			return b.line.cutOnce(isAck)
		},
	},
	{
		name: "server restarted before it stored", slow: true,
		strike: func(b *bench) func() bool {
			b.before(func(n int64, _ *events.Commit) error {
				if n == 1 {
					b.w.Restart()
				}
				return nil
			})
			return func() bool { return b.attempts.Load() > 0 }
		},
	},
	{
		name: "server restarted before the ack came", slow: true,
		strike: func(b *bench) func() bool {
			set, met := flag()
			b.after(func(n int64, _ *events.Commit, err error) error {
				if n == 1 && err == nil {
					set()
					b.w.Restart()
					return nats.ErrTimeout
				}
				return err
			})
			return met
		},
	},
	{
		name: "server away for two attempts",
		strike: func(b *bench) func() bool {
			b.before(func(n int64, _ *events.Commit) error {
				switch n {
				case 1:
					b.w.Down()
				case 3:
					b.w.Up()
				}
				return nil
			})
			return func() bool { return b.attempts.Load() >= 3 }
		},
		log:  journal.Config{PublishTimeout: 100 * time.Millisecond, ReadTimeout: 200 * time.Millisecond},
		slow: true,
	},
	{
		name: "slow server whose ack comes late", slow: true,
		strike: func(b *bench) func() bool {
			release, met := b.line.hold(isAck)
			b.t.Cleanup(release)
			b.after(func(n int64, _ *events.Commit, err error) error {
				if err != nil {
					release() // it comes when nobody waits for it any more
				}
				return err
			})
			return met
		},
	},
	{
		name: "slow server that gets the request three times at once", slow: true,
		strike: func(b *bench) func() bool {
			release, met := b.line.hold(isPublish)
			b.t.Cleanup(release)
			b.before(func(n int64, _ *events.Commit) error {
				if n == 3 {
					release()
				}
				return nil
			})
			return met
		},
	},
	{
		name: "slow server",
		strike: func(b *bench) func() bool {
			return b.line.delay(60 * time.Millisecond) // each way, so that an answer takes longer than the time-out
		},
		log: journal.Config{PublishTimeout: 100 * time.Millisecond},
	},
	{
		name:    "partial batch refused",
		strike:  func(*bench) func() bool { return func() bool { return true } },
		spoil:   func(r *appender.Request) { r.Events = append(r.Events, []byte(user("m", 77))) },
		refusal: func(column) events.Code { return events.CodeRuleViolation },
		mend: func(b *bench, e *events.Error) {
			if e.Rule != events.RuleEndpointNotEarlier || e.Index == nil || *e.Index != 2 {
				b.t.Errorf("%s: the refusal names %s of event %v", b.session, e.Rule, e.Index)
			}
		},
	},
	{
		name: "outcome unknown and stored late",
		strike: func(b *bench) func() bool {
			release, met := b.line.hold(isPublish)
			all, _ := b.reads.hold(func(bool, []byte) bool { return true })
			b.t.Cleanup(release)
			b.t.Cleanup(all)
			return func() bool {
				release()
				all()
				return met()
			}
		},
		refusal: func(column) events.Code { return events.CodeOutcomeUnknown },
		log:     journal.Config{RetryBudget: 300 * time.Millisecond, PublishTimeout: 100 * time.Millisecond, ReadTimeout: 200 * time.Millisecond},
		slow:    true,
	},
	{
		name: "outcome unknown and never stored",
		strike: func(b *bench) func() bool {
			b.before(func(int64, *events.Commit) error { return nats.ErrTimeout })
			return func() bool { return b.attempts.Load() > 1 }
		},
		refusal: func(column) events.Code { return events.CodeOutcomeUnknown },
		log:     journal.Config{RetryBudget: 100 * time.Millisecond},
	},
	{
		name: "another writer took over",
		strike: func(b *bench) func() bool {
			b.before(func(n int64, _ *events.Commit) error {
				if n == 1 {
					b.take(b.other, "usurper")
				}
				return nil
			})
			return func() bool { return b.p.Stats().Conflicts.Load() > 0 }
		},
		refusal: func(c column) events.Code {
			if c.expected && !c.fenced {
				return events.CodeSeqConflict
			}
			return events.CodeFenced
		},
		mend: func(b *bench, e *events.Error) {
			if e.Code == events.CodeSeqConflict {
				reread(b, e)
				return // with an expectedSeq it overlooks nothing, so that it needs no epoch
			}
			if e.Epoch == nil || b.epoch == nil && *e.Epoch != 1 || b.epoch != nil && *e.Epoch != *b.epoch+1 {
				b.t.Errorf("%s: the refusal tells epoch %v", b.session, e.Epoch)
			}
			mine := b.take(b.p, "back")
			b.epoch, b.next = &mine, events.Seq(len(b.acked))
		},
	},
}

// TestFaultTable meets every fault with every kind of append. After each step the whole log is
// checked; at the end a caller that retries has what it asked for exactly once, unless it gave
// nothing by which the retry could be recognised.
func TestFaultTable(t *testing.T) {
	t.Parallel()
	for _, f := range faults {
		t.Run(strings.ReplaceAll(f.name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			publishes, reads := w.startLine(t), w.startLine(t)
			other := w.start(t, appender.Config{Invariants: lifecycle.Enforce})
			for _, c := range f.columns() {
				t.Run(c.String(), func(t *testing.T) {
					p := w.startVia(t, publishes, reads, appender.Config{Invariants: lifecycle.Enforce}, tableConfig(f.log))
					b := &bench{ledger: newLedger(w, other, "s-"+c.String()), t: t, column: c, p: p, other: other, line: publishes, reads: reads}
					b.meet(f)
				})
			}
		})
	}
}

// meet is one cell of the table.
func (b *bench) meet(f fault) {
	b.must("the first append", b.p, b.request("first"), "first")
	if b.column.fenced {
		epoch := b.take(b.p, "me")
		b.epoch, b.next = &epoch, b.next+1
	}
	met := f.strike(b)
	texts := []string{"struck one", "struck two"}
	asked := b.request(texts...)
	if f.spoil != nil {
		f.spoil(&asked)
	}
	receipt, err := b.append(b.p, asked)
	if !met() {
		b.t.Fatalf("%s: the append did not meet the fault: %+v, %v", b.session, receipt, err)
	}
	b.p.log.Faults = journal.Faults{}
	b.line.clear()
	b.reads.clear()
	code := events.Code("")
	if f.refusal != nil {
		code = f.refusal(b.column)
	}
	switch {
	case code == events.CodeOutcomeUnknown:
		b.open = quoted(texts...)
		e := b.isRefusal("the struck append", receipt, err, code)
		if e.Commit == "" {
			b.t.Errorf("%s: the unknown outcome names no commit", b.session)
		}
		receipt = b.must("asking again after an unknown outcome", b.p, asked, texts...)
		if b.column.safe() {
			b.open = nil
			b.check(b.t) // exactly once
		}
	case code != "":
		e := b.isRefusal("the struck append", receipt, err, code)
		if f.mend != nil {
			f.mend(b, e)
		}
		asked = b.request(texts...)
		receipt = b.must("the append after the refusal", b.p, asked, texts...)
	case err != nil:
		b.t.Fatalf("%s: the struck append: %v", b.session, err)
	default:
		b.note("the struck append", receipt, texts...)
		b.next = events.Seq(len(b.acked)) // the caller reads on: another's may lie behind
	}

	// The caller never saw the receipt and asks again: here, elsewhere, and after more was appended.
	retry := func(what string, p *process) {
		b.t.Helper()
		again := b.must(what, p, asked, texts...)
		want := *receipt
		want.Duplicate = true
		if b.column.safe() && fmt.Sprint(*again) != fmt.Sprint(want) {
			b.t.Errorf("%s: %s answers %+v, the original was %+v", b.session, what, *again, *receipt)
		}
		if !b.column.safe() && again.Duplicate {
			b.t.Errorf("%s: %s is called a duplicate: %+v", b.session, what, *again)
		}
	}
	retry("the retry", b.p)
	retry("the retry at another appender", b.other)
	b.must("the other appender's next", b.other, b.request("next by the other"), "next by the other")
	b.must("the next", b.p, b.request("next"), "next")
	retry("the retry after more was appended", b.p)

	// The same place or key, other events.
	bad := asked
	bad.Events = [][]byte{[]byte(note("another"))}
	switch {
	case b.column.keyed:
		b.refused("other events under the key", b.p, bad, events.CodeKeyReused)
	case b.column.expected:
		b.refused("other events at the seq", b.p, bad, events.CodeSeqConflict)
	}
	if !b.column.fenced {
		return
	}
	// A stale writer may learn what became of its appends, and appends nothing any more.
	stale := b.request("stale")
	epoch := b.take(b.other, "successor")
	if b.column.safe() {
		retry("the stale writer's retry", b.p)
	}
	e := b.refused("the stale writer's append", b.p, stale, events.CodeFenced)
	if e.Epoch == nil || *e.Epoch != epoch {
		b.t.Errorf("%s: the stale writer is told epoch %v, it is %d", b.session, e.Epoch, epoch)
	}
	b.epoch, b.next = &epoch, events.Seq(len(b.acked))
	if !b.column.safe() { // some may have been stored and not acknowledged
		b.next = b.check(b.t).Next()
	}
	claim := b.request("successor")
	b.must("the successor's append", b.p, claim, "successor")
	if claim.Epoch = stale.Epoch; b.column.expected { // the same events there are not the stale writer's
		b.refused("the stale writer's claim on it", b.p, claim, events.CodeFenced)
	}
}

// TestPartialBatchRefusedInAGroup: of several callers' batches that wait for one commit, the one
// with a bad event leaves nothing, whatever the columns, and the others are stored.
func TestPartialBatchRefusedInAGroup(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := w.start(t, appender.Config{})
	for _, c := range columns() {
		t.Run(c.String(), func(t *testing.T) {
			p := w.start(t, appender.Config{Invariants: lifecycle.Enforce})
			b := &bench{ledger: newLedger(w, other, "s-"+c.String()), t: t, column: c, p: p, other: other}
			b.must("the first append", p, b.request("first"), "first")
			if c.fenced {
				epoch := b.take(p, "me")
				b.epoch, b.next = &epoch, b.next+1
			}
			g := p.hold(t)
			blocker := p.send(t, b.request("blocker"))
			journaltest.Await(t, "the publish", g.entered)
			b.next++
			before, bad := b.request("before one", "before two"), b.request("bad one", "bad two")
			bad.Events = append(bad.Events, []byte(turn("end", 1)), []byte(note("bad three")))
			if c.expected {
				bad = at(b.next+2, bad)
			}
			b.next += 2
			behind := b.request("behind")
			answers := []<-chan answer{blocker, p.queue(t, before), p.queue(t, bad), p.queue(t, behind)}
			g.release()
			got := make([]answer, len(answers))
			for i, a := range answers {
				got[i] = journaltest.Await(t, "an answer", a)
				if (got[i].err != nil) != (i == 2) {
					t.Fatalf("append %d: %+v, %v", i, got[i].Receipt, got[i].err)
				}
			}
			// It is judged by what is stored in the end, and then another has its seq.
			if e := asError(got[2].err); c.expected && e.Code != events.CodeSeqConflict ||
				!c.expected && (e.Code != events.CodeInvariant || e.Rule != lifecycle.RuleTurnMismatch || *e.Index != 2) {
				t.Errorf("the bad batch: %v", got[2].err)
			}
			b.ack(t, got[0].Receipt, quoted("blocker")...)
			b.ack(t, got[1].Receipt, quoted("before one", "before two")...)
			b.ack(t, got[3].Receipt, quoted("behind")...)
			if log := b.check(t); got[1].Commit != got[3].Commit || log.Commits[len(log.Commits)-1].ID != got[1].Commit {
				t.Errorf("%s and %s are not one commit", got[1].Commit, got[3].Commit)
			}
			b.next++
			b.must("the mended batch", other, b.request("bad one", "bad two"), "bad one", "bad two")
		})
	}
}

// TestConnectionLostWhileLoading: a session whose load loses its connection is not appended to
// and not stuck either.
func TestConnectionLostWhileLoading(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	p.must(t, to("s", note("a")))
	p.project(t, "s", events.Format3, -1)
	p.must(t, to("s", note("b")))
	for what, subject := range map[string]string{
		"header": "KV_HEADERS", "head": "KV_SURFACES", "log": "DIRECT.GET.SESSIONS", "tail": "STREAM.MSG.GET.SESSIONS",
	} {
		t.Run(what, func(t *testing.T) {
			reads := w.startLine(t)
			cfg := appender.Config{LoadTimeout: 20 * time.Second}
			if what == "head" {
				cfg.LoadTimeout = time.Second // nothing else bounds reading a snapshot
			}
			lost := w.startVia(t, nil, reads, cfg, journal.Config{ReadTimeout: 500 * time.Millisecond})
			met := reads.cutOnce(func(up bool, b []byte) bool { return up && bytes.Contains(b, []byte(subject)) })
			begun := time.Now()
			before := w.check(t, "s").Next()
			r, err := lost.Append(journaltest.Context(t), to("s", note(what)))
			if !met() {
				t.Fatalf("no request was lost: %+v, %v", r, err)
			}
			if took := time.Since(begun); took > 15*time.Second {
				t.Errorf("the append took %v", took)
			}
			if err != nil && asError(err).Code != events.CodeUnavailable {
				t.Errorf("got %v", err)
			}
			if err != nil {
				if n := w.check(t, "s").Next(); n != before {
					t.Errorf("the log ends at %d, want %d", n, before)
				}
				if r, err = lost.persist(t, to("s", note(what)), nil); err != nil {
					t.Fatal(err)
				}
			}
			if n := w.check(t, "s").Next(); n != r.LastSeq+1 {
				t.Errorf("the log ends at %d, want %d", n, r.LastSeq+1)
			}
		})
	}
}

// TestALookAtTheLogThatIsLostRefusesNoAppend: with a connection made anew the log is compared with the
// state, which takes as long as it takes.
func TestALookAtTheLogThatIsLostRefusesNoAppend(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	reads := w.startLine(t)
	p := w.startVia(t, nil, reads, appender.Config{}, journal.Config{ReadTimeout: 200 * time.Millisecond})
	p.must(t, to("s", note("a")))
	before := p.log.Reconnects()
	reads.cut()
	journaltest.Eventually(t, "the connection to be made anew", func() bool { return p.log.Reconnects() > before })
	met := reads.cutOnce(func(up bool, b []byte) bool { return up && bytes.Contains(b, []byte("STREAM.MSG.GET.SESSIONS")) })
	if r := p.must(t, to("s", note("b"))); r.FirstSeq != 1 || !met() {
		t.Errorf("%+v, a look was lost: %t", r, met())
	}
	w.check(t, "s")
}

// startVia starts an appender whose connections go through proxies; nil: directly.
func (w *world) startVia(t testing.TB, publishes, reads *line, cfg appender.Config, jc journal.Config) *process {
	t.Helper()
	dial := func(l *line) *nats.Conn {
		if l == nil {
			return w.Conn(t)
		}
		return journaltest.Dial(t, l.url())
	}
	p := new(process)
	ctx := journaltest.Context(t)
	var err error
	p.log, err = journal.Open(ctx, journal.Conns{Publish: []*nats.Conn{dial(publishes), dial(publishes)}, Read: dial(reads)}, jc, events.DefaultVocabulary())
	if err == nil {
		p.headers, err = p.log.OpenHeaders(ctx)
	}
	if err == nil {
		p.store, err = snapshot.Open(ctx, p.log.JetStream(), 1)
	}
	if err != nil {
		t.Fatal(err)
	}
	p.Appender = appender.New(p.log, p.headers, p.store, cfg)
	t.Cleanup(func() {
		if err := p.Close(journaltest.Context(t)); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return p
}

// line is a proxy in front of the server that can hold back, slow down and cut off what goes
// through it.
type line struct {
	ln     net.Listener
	target func() string
	quit   chan struct{} // closed at the end
	wg     sync.WaitGroup
	// pass sees every piece of traffic before it goes on, may hold it back, and cuts all
	// connections when it says false. nil: everything passes.
	pass atomic.Pointer[func(up bool, b []byte) bool]

	mu    sync.Mutex // guards the two below
	conns map[net.Conn]bool
	done  bool
}

// startLine starts a proxy; it stops with the test.
func (w *world) startLine(t testing.TB) *line {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &line{ln: ln, target: w.Addr, quit: make(chan struct{}), conns: map[net.Conn]bool{}}
	l.wg.Add(1)
	go l.accept()
	t.Cleanup(func() {
		ln.Close()
		close(l.quit)
		l.mu.Lock()
		l.done = true
		l.mu.Unlock()
		l.cut()
		l.wg.Wait()
	})
	return l
}

func (l *line) url() string { return "nats://" + l.ln.Addr().String() }

func (l *line) set(pass func(up bool, b []byte) bool) { l.pass.Store(&pass) }

// clear lets everything pass from now on; what is held stays held.
func (l *line) clear() { l.pass.Store(nil) }

// cutOnce loses the first piece of traffic that matches, and all connections with it.
func (l *line) cutOnce(match func(up bool, b []byte) bool) (met func() bool) {
	var n atomic.Int64
	l.set(func(up bool, b []byte) bool { return !match(up, b) || n.Add(1) > 1 })
	return func() bool { return n.Load() > 0 }
}

// hold keeps back traffic that matches, and what comes behind it on the same connection, until
// release.
func (l *line) hold(match func(up bool, b []byte) bool) (release func(), met func() bool) {
	open := make(chan struct{})
	set, met := flag()
	l.set(func(up bool, b []byte) bool {
		if match(up, b) {
			set()
			select {
			case <-open:
			case <-l.quit:
			}
		}
		return true
	})
	return sync.OnceFunc(func() { close(open) }), met
}

// delay makes all traffic late.
func (l *line) delay(d time.Duration) (met func() bool) {
	set, met := flag()
	l.set(func(bool, []byte) bool {
		set()
		late := time.NewTimer(d)
		defer late.Stop()
		select {
		case <-late.C:
		case <-l.quit:
		}
		return true
	})
	return met
}

func (l *line) accept() {
	defer l.wg.Done()
	for {
		client, err := l.ln.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", l.target())
		if err != nil {
			client.Close()
			continue
		}
		l.mu.Lock()
		if l.done {
			client.Close()
			server.Close()
		}
		l.conns[client], l.conns[server] = true, true
		l.wg.Add(2)
		l.mu.Unlock()
		go l.pipe(client, server, true)
		go l.pipe(server, client, false)
	}
}

func (l *line) pipe(from, to net.Conn, up bool) {
	defer l.wg.Done()
	defer l.forget(from, to)
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		if n > 0 {
			if pass := l.pass.Load(); pass != nil && !(*pass)(up, b[:n]) {
				l.cut()
				return
			}
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (l *line) forget(conns ...net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range conns {
		c.Close()
		delete(l.conns, c)
	}
}

func (l *line) cut() {
	l.mu.Lock()
	conns := slices.Collect(maps.Keys(l.conns))
	l.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
}
