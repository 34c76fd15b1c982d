// Package audit owns the proof that what is stored is what appenders and projectors wrote. It
// reads, reports and never repairs.
package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// Checks that a finding names.
const (
	CheckHeader     = "header"       // the session's header
	CheckLineage    = "lineage"      // a fork against its parent, and the index of children
	CheckMessage    = "message"      // a message that is no commit of its session
	CheckCommit     = "commit"       // headers of a commit against its content
	CheckContiguity = "contiguity"   // seqs without holes, within and between commits
	CheckDigest     = "digest"       // the digest chain of the events
	CheckChain      = "commit-chain" // the chain of the commits, which binds who and when
	CheckRule       = "rule"         // a surface rule
	CheckHead       = "head"         // the head against a fresh fold
	CheckPage       = "page"         // a page or index page against a fresh fold
	CheckProjection = "projection"   // the head is not at the log's end
	CheckErasure    = "erasure"      // something is left of a session that was erased
	CheckAttested   = "attestation"  // a signed checkpoint against the log
)

// Finding is one thing that is not as it was written.
type Finding struct {
	Session   string      `json:"session"`
	Check     string      `json:"check"`
	Seq       *events.Seq `json:"seq,omitempty"`
	StreamSeq uint64      `json:"streamSeq,omitempty"`
	Key       string      `json:"key,omitempty"` // in the bucket of snapshots
	Rule      events.Rule `json:"rule,omitempty"`
	Expected  string      `json:"expected,omitempty"`
	Found     string      `json:"found,omitempty"`
	Detail    string      `json:"detail"`
}

// String returns the finding in one line.
func (f Finding) String() string {
	s := f.Check
	if f.Session != "" { // else it is about the store
		s = f.Session + ": " + s
	}
	if f.Rule != "" {
		s += " " + string(f.Rule)
	}
	if f.Seq != nil {
		s += fmt.Sprintf(" at seq %d", *f.Seq)
	}
	if f.StreamSeq > 0 {
		s += fmt.Sprintf(" (stream sequence %d)", f.StreamSeq)
	}
	if f.Key != "" {
		s += " key " + f.Key
	}
	s += ": " + f.Detail
	if f.Expected != "" || f.Found != "" {
		s += fmt.Sprintf("; expected %s, found %s", f.Expected, f.Found)
	}
	return s
}

// SessionReport is what was found about one session.
type SessionReport struct {
	Session string     `json:"session"`
	Events  int64      `json:"events"`
	Commits int64      `json:"commits"`
	LastSeq events.Seq `json:"lastSeq"`
	Digest  string     `json:"digest"`
	Chain   string     `json:"chain"`
	HeadSeq events.Seq `json:"headSeq"`
	// AttestedSeq is up to where a trusted key signed what the log holds; nil when it did not,
	// or was not asked for.
	AttestedSeq *events.Seq `json:"attestedSeq,omitempty"`
	Pages       int         `json:"pages"` // pages and index pages that were compared
	Findings    []Finding   `json:"findings"`
	// Erased says that the session was erased, when, by whom and why; then nothing else is said.
	Erased *events.Tombstone `json:"erased,omitempty"`
	// Violations counts the lifecycle rules that the log breaks. They are reported and no
	// finding: whether they are enforced is the appender's configuration.
	Violations map[events.Rule]int64 `json:"violations,omitempty"`
}

// Report is what was found about many sessions.
type Report struct {
	Sessions   int                   `json:"sessions"`
	Events     int64                 `json:"events"`
	Commits    int64                 `json:"commits"`
	Pages      int                   `json:"pages"`
	Findings   []Finding             `json:"findings"`
	Erased     []*events.Tombstone   `json:"erased,omitempty"` // by session
	Violations map[events.Rule]int64 `json:"violations,omitempty"`

	// With trusted keys: how many sessions are attested to their last event, in part, and not
	// at all. An empty session is none of them.
	Attested       int `json:"attested"`
	PartlyAttested int `json:"partlyAttested"`
	Unattested     int `json:"unattested"`
}

// OK reports whether nothing was found.
func (r *Report) OK() bool { return len(r.Findings) == 0 }

// Options say what is verified.
type Options struct {
	// LogOnly leaves heads and pages out.
	LogOnly bool
	// Wait is how long a projection may take to reach the log's end before its lag is a
	// finding; below 0 for no time at all. Defaults to 10 s.
	Wait time.Duration
	// Parallel is how many sessions are verified at a time, and by All how many partitions of
	// the log where it reads them one by one, at most. Defaults to 8.
	Parallel int
	// Memory is how many bytes of sessions All keeps at a time, about. Where they do not fit, it
	// reads the log a few times, or partitions one by one, and where the sessions of one do not
	// fit, that several times. Defaults to 256 MiB.
	Memory int64
	// Trusted are public nkeys: what they signed is compared with the log. Without any,
	// attestations are not looked at.
	Trusted []string
	// Copies are attestations that the caller has kept, by session, beside those of the store.
	Copies map[string][]*Attestation
	// Begin, when set, hears how many sessions there are before the first is verified, and how many
	// messages the log has where all of it is read.
	Begin func(sessions int, messages uint64)
	// Read, when set, hears how many more of these messages were read, one call at a time.
	Read func(messages int)
	// Each, when set, hears of every session as it is done, one at a time.
	Each func(*SessionReport)
}

// Auditor verifies sessions.
type Auditor struct {
	log     *journal.Journal
	headers *journal.Headers
	buckets *projection.Buckets
	rooms   sync.Pool // of *[]byte, in which heads are written that are compared
}

// New returns an auditor.
func New(j *journal.Journal, h *journal.Headers, b *projection.Buckets) *Auditor {
	return &Auditor{log: j, headers: h, buckets: b, rooms: sync.Pool{New: func() any { return new([]byte) }}}
}

// largestRoom is how large a head may be for its room to be kept for others, in bytes.
const largestRoom = 1 << 20

// All verifies every session that has a header, a log or a head. The error is trouble with
// JetStream; what is wrong with the sessions is in the report.
func (a *Auditor) All(ctx context.Context, o Options) (*Report, error) {
	ids, logged, stray, err := a.sessions(ctx, o)
	if err != nil {
		return nil, err
	}
	o = o.withDefaults()
	out := &collector{o: o, r: &Report{Findings: []Finding{}}}
	for _, s := range stray {
		out.r.Findings = append(out.r.Findings, Finding{Check: CheckMessage, Detail: "messages on subject " + s + ", which is no session's"})
	}
	if o.Begin != nil {
		var messages uint64
		for _, n := range logged {
			messages += n
		}
		o.Begin(len(ids), messages)
	}
	if len(o.Trusted) > 0 {
		if out.kept, err = a.Attestations(ctx, ""); err != nil {
			return nil, err
		}
	}
	err = a.stream(ctx, ids, logged, out)
	return out.end(), err
}

// Some verifies the given sessions.
func (a *Auditor) Some(ctx context.Context, ids []string, o Options) (*Report, error) {
	o = o.withDefaults()
	out := &collector{o: o, r: &Report{Findings: []Finding{}}}
	if o.Begin != nil {
		o.Begin(len(ids), 0)
	}
	err := parallel(ctx, o.Parallel, slices.Values(ids), func(id string) error {
		r, err := a.Session(ctx, id, o)
		if err == nil {
			out.add(r)
		}
		return err
	})
	return out.end(), err
}

func (o Options) withDefaults() Options {
	if o.Parallel == 0 {
		o.Parallel = 8
	}
	if o.Memory == 0 {
		o.Memory = 256 << 20
	}
	if o.Wait == 0 {
		o.Wait = 10 * time.Second
	}
	return o
}

// parallel calls f for each item, some at a time. All errors come back joined; one does not
// stop the others, the end of ctx does.
func parallel[T any](ctx context.Context, n int, items iter.Seq[T], f func(T) error) error {
	var mu sync.Mutex
	var wg sync.WaitGroup
	var failed error
	work := make(chan T)
	for range n {
		wg.Go(func() {
			for it := range work {
				if err := f(it); err != nil {
					mu.Lock()
					failed = errors.Join(failed, err)
					mu.Unlock()
				}
			}
		})
	}
	for it := range items {
		if ctx.Err() != nil {
			break
		}
		work <- it
	}
	close(work)
	wg.Wait()
	return errors.Join(failed, ctx.Err())
}

// collector gathers the reports of sessions.
type collector struct {
	o    Options
	kept map[string][]*Attestation // by the store
	mu   sync.Mutex
	r    *Report
}

func (c *collector) add(s *SessionReport) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.r.add(s)
	if c.o.Each != nil {
		c.o.Each(s)
	}
}

// read tells of messages that were read.
func (c *collector) read(messages int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.o.Read != nil {
		c.o.Read(messages)
	}
}

func (c *collector) end() *Report {
	slices.SortFunc(c.r.Erased, func(x, y *events.Tombstone) int { return strings.Compare(x.Session, y.Session) })
	slices.SortStableFunc(c.r.Findings, func(x, y Finding) int { return strings.Compare(x.Session, y.Session) })
	return c.r
}

func (r *Report) add(s *SessionReport) {
	r.Sessions++
	r.Events += s.Events
	r.Commits += s.Commits
	r.Pages += s.Pages
	if s.Erased != nil {
		r.Erased = append(r.Erased, s.Erased)
	}
	switch {
	case s.LastSeq == events.NoSeq:
	case s.AttestedSeq == nil:
		r.Unattested++
	case *s.AttestedSeq == s.LastSeq:
		r.Attested++
	default:
		r.PartlyAttested++
	}
	r.Findings = append(r.Findings, s.Findings...)
	for rule, n := range s.Violations {
		if r.Violations == nil {
			r.Violations = map[events.Rule]int64{}
		}
		r.Violations[rule] += n
	}
}

// sessions lists what there is to verify, with how many commits each has.
func (a *Auditor) sessions(ctx context.Context, o Options) (ids []string, logged map[string]uint64, stray []string, err error) {
	seen := map[string]bool{}
	logged, stray, err = a.log.Subjects(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	for id := range logged {
		seen[id] = true
	}
	lists := []func(context.Context) ([]string, error){a.headers.List}
	if !o.LogOnly {
		lists = append(lists, a.buckets.Snapshots.Sessions)
	}
	for _, list := range lists {
		more, err := list(ctx)
		if err != nil {
			return nil, nil, nil, err
		}
		for _, id := range more {
			seen[id] = true
		}
	}
	for id := range seen {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	slices.Sort(stray)
	return ids, logged, stray, nil
}

// Session verifies one session.
func (a *Auditor) Session(ctx context.Context, id string, o Options) (*SessionReport, error) {
	o = o.withDefaults()
	r, err := a.session(ctx, id, o)
	if err != nil {
		return nil, err
	}
	return a.settled(ctx, r, o)
}

// settled verifies a session anew in which something was found while it was being erased, until what is found stays
// the same for a while: the erasure was cut off then, or is over.
func (a *Auditor) settled(ctx context.Context, r *SessionReport, o Options) (*SessionReport, error) {
	const pause, while = 250 * time.Millisecond, 2 * time.Second
	for changed := time.Now(); len(r.Findings) > 0 && time.Since(changed) < while; {
		if _, err := a.log.LeaderLast(ctx, r.Session); !errors.Is(err, events.ErrErased) {
			return r, nil // trouble is met elsewhere
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		again, err := a.session(ctx, r.Session, o)
		if err != nil {
			return nil, err
		}
		if !reflect.DeepEqual(again.Findings, r.Findings) {
			changed = time.Now()
		}
		r = again
	}
	return r, nil
}

func (a *Auditor) session(ctx context.Context, id string, o Options) (*SessionReport, error) {
	v, err := a.begin(ctx, id, o)
	if err != nil {
		return nil, err
	}
	if len(o.Trusted) > 0 {
		kept, err := a.Attestations(ctx, id)
		if err != nil {
			return nil, err
		}
		v.trust(o, kept[id])
	}
	if err := v.read(ctx, 0, math.MaxUint64); err != nil {
		return nil, err
	}
	return v.finish(ctx, o, nil)
}

// begin reads a session's header, and makes sure that there is something to verify.
func (a *Auditor) begin(ctx context.Context, id string, o Options) (*verifier, error) {
	if err := events.CheckSessionID(id); err != nil {
		return nil, err
	}
	v := &verifier{a: a, id: id, logOnly: o.LogOnly, life: lifecycle.New(), inherited: events.NoSeq, digest: events.SeedDigest(id),
		r: &SessionReport{Session: id, LastSeq: events.NoSeq, HeadSeq: events.NoSeq, Findings: []Finding{}}}
	var err error
	v.header, err = a.headers.Get(ctx, id)
	switch {
	case errors.Is(err, events.ErrErased):
		v.buried = true
	case errors.Is(err, events.ErrSessionNotFound):
		if end, serr := v.end(ctx); serr != nil {
			return nil, serr
		} else if end == 0 {
			head, _, herr := a.buckets.Snapshots.Head(ctx, id)
			if herr != nil && !errors.Is(herr, &events.Error{Code: events.CodeSnapshotDamaged}) {
				return nil, herr
			}
			if head == nil && herr == nil {
				return nil, err
			}
		}
		v.find(Finding{Check: CheckHeader, Detail: "the session has events or a head but no header"})
	case errors.Is(err, &events.Error{Code: events.CodeCorrupt}):
		v.find(Finding{Check: CheckHeader, Detail: err.Error()})
	case err != nil:
		return nil, err
	}
	format := events.Format3
	if v.header != nil {
		format, v.chained = v.header.Format, true
		v.chain = events.SeedChain(id, v.header.Raw)
	}
	v.snap = snapshot.NewBare(id, format)
	return v, nil
}

// finish checks what only a log that was read to its end can be compared with. head is what the bucket
// held for the session a moment ago, nil when that is not known.
func (v *verifier) finish(ctx context.Context, o Options, head []byte) (*SessionReport, error) {
	if v.buried || v.tombstone != nil {
		return v.r, v.erasure(ctx)
	}
	if v.header != nil && v.header.ParentSession != "" {
		if err := v.lineage(ctx, v.header); err != nil {
			return nil, err
		}
	}
	if !v.logOnly && v.snap != nil {
		if err := v.projection(ctx, o.Wait, head); err != nil {
			return nil, err
		}
	}
	v.attestedBeyond()
	v.r.LastSeq = v.next - 1
	v.r.Digest, v.r.Chain = v.digest.String(), v.chain.String()
	return v.r, nil
}

// verifier verifies one session.
type verifier struct {
	a      *Auditor
	id     string
	header *events.Header // nil when there is none that can be read
	r      *SessionReport
	life   *lifecycle.State
	snap   *snapshot.Snapshot // a fresh fold of the log; nil once the log cannot be folded

	digest, chain events.Digest
	chained       bool // the header is known, so the commit chain can be checked
	next          events.Seq
	at            uint64 // stream sequence of the last message, while a partition is read

	attested []*Attestation // by trusted keys, by seq; those that the log has not reached yet

	buried    bool                    // a tombstone is in the header's place
	tombstone *journal.MalformedError // the one in the log
	left      int                     // messages of the log beside it

	inherited events.Seq    // the last seq that was inherited from the parent, NoSeq for none
	seed      events.Digest // of the event at inherited

	logOnly  bool        // heads and pages are left out
	messages messageSums // of the nodes, and of others that were some
}

func (v *verifier) find(f Finding) {
	f.Session = v.id
	v.r.Findings = append(v.r.Findings, f)
}

// read checks what the log holds behind a stream sequence, up to another one or to where the
// log ends now: what is appended meanwhile may come faster than it is checked.
func (v *verifier) read(ctx context.Context, after, upTo uint64) error {
	end, err := v.end(ctx)
	if err != nil {
		return err
	}
	upTo = min(upTo, end)
	stop := errors.New("stop")
	for after < upTo {
		err := v.a.log.ReadToEnd(ctx, v.id, after, func(c *events.Commit) error {
			if c.StreamSeq > upTo {
				return stop
			}
			after = c.StreamSeq
			if err := v.commit(ctx, c); err != nil {
				return err
			}
			if after == upTo {
				return stop
			}
			return nil
		})
		var bad *journal.MalformedError
		switch {
		case errors.As(err, &bad) && bad.StreamSeq <= upTo: // report it and read on behind it
			v.malformed(bad)
			after = bad.StreamSeq
			continue
		case err != nil && err != stop && bad == nil:
			return err
		}
		break
	}
	return nil
}

func (v *verifier) malformed(bad *journal.MalformedError) {
	if errors.Is(bad, events.ErrErased) {
		v.tombstone = bad
		return
	}
	v.find(Finding{Check: CheckMessage, StreamSeq: bad.StreamSeq, Detail: bad.Error()})
	v.snap = nil
}

// end is the stream sequence of the last message of the log, 0 when there is none.
func (v *verifier) end(ctx context.Context) (uint64, error) {
	last, err := v.a.log.LeaderLast(ctx, v.id)
	var bad *journal.MalformedError
	switch {
	case errors.As(err, &bad):
		return bad.StreamSeq, nil
	case err != nil || last == nil:
		return 0, err
	}
	return last.StreamSeq, nil
}

// parse reads an event in full. The vocabulary is read again before a type is called unknown.
func (v *verifier) parse(ctx context.Context, e *events.Event, line []byte, f events.Format) (bad, err error) {
	bad = events.ParseCanonical(e, line, f, v.a.log.Vocabulary())
	if errors.Is(bad, &events.Error{Code: events.CodeRuleViolation, Rule: events.RuleUnknownType}) {
		if _, err := v.a.log.RefreshVocabulary(ctx); err != nil {
			return nil, err
		}
		bad = events.ParseCanonical(e, line, f, v.a.log.Vocabulary())
	}
	if bad == nil {
		bad = e.Check(f)
	}
	return bad, nil
}

// commit checks one commit and folds it. An error is trouble with JetStream.
func (v *verifier) commit(ctx context.Context, c *events.Commit) error {
	if v.buried || v.tombstone != nil {
		v.left++
		return nil
	}
	if v.snap != nil && !v.chained && v.r.Commits == 0 { // no header says which format it is
		v.snap = snapshot.NewBare(v.id, c.Format)
	}
	if v.quick(c) {
		return nil
	}
	v.r.Commits++
	at := func(seq events.Seq) Finding { return Finding{Seq: &seq, StreamSeq: c.StreamSeq} }
	if c.First != v.next {
		f := at(c.First)
		f.Check, f.Detail = CheckContiguity, "a commit does not start where the one before it ended"
		f.Expected, f.Found = fmt.Sprintf("seq %d", v.next), fmt.Sprintf("seq %d", c.First)
		v.find(f)
		v.next, v.snap = c.First, nil
	}
	v.commitHeaders(c)
	good := true
	for line := range c.Lines() {
		v.r.Events++
		before := v.digest
		v.digest = v.digest.Next(line)
		e := new(events.Event)
		bad, err := v.parse(ctx, e, line, c.Format)
		if err != nil {
			return err
		}
		if bad != nil {
			v.broken(c, v.next, bad)
			good = false
		} else if e.Seq != v.next {
			f := at(e.Seq)
			f.Check, f.Detail = CheckContiguity, "an event does not follow the one before it"
			f.Expected, f.Found = fmt.Sprintf("seq %d", v.next), fmt.Sprintf("seq %d", e.Seq)
			v.find(f)
			good = false
		} else {
			v.good(e, before)
		}
		v.next++
	}
	v.life.Settle()
	if v.next != c.Last+1 {
		f := at(c.Last)
		f.Check, f.Detail = CheckContiguity, "the commit's header names another last seq than its body"
		f.Expected, f.Found = fmt.Sprintf("seq %d", c.Last), fmt.Sprintf("seq %d", v.next-1)
		v.find(f)
		v.next, good = c.Last+1, false
	}
	if v.digest != c.Digest {
		f := at(c.Last)
		f.Check, f.Detail = CheckDigest, "events of this commit were changed, or some before it are missing or in another order"
		f.Expected, f.Found = v.digest.String(), c.Digest.String()
		v.find(f)
		v.digest = c.Digest // what follows is judged by itself
		good = false        // a fold of changed events says nothing about heads
	}
	v.chainOn(c)
	if v.snap == nil {
		return nil
	}
	if !good {
		v.snap = nil
		return nil
	}
	if bad := v.fold(c, nil); bad != nil {
		v.broken(c, v.snap.Next, bad)
		v.snap = nil
	}
	return nil
}

// good takes in an event of which nothing bad can be said, behind the digest of the one before.
func (v *verifier) good(e *events.Event, before events.Digest) {
	v.lifecycle(e)
	if e.Type == typeEndSeed && e.Fields().Inherited {
		v.inherited, v.seed = e.Seq-1, before
	}
}

// chainOn checks the commit chain, and what was signed of it.
func (v *verifier) chainOn(c *events.Commit) {
	if v.chained {
		if v.chain = v.chain.NextChain(c); v.chain != c.Chain {
			last := c.Last
			v.find(Finding{Check: CheckChain, Seq: &last, StreamSeq: c.StreamSeq, Expected: v.chain.String(), Found: c.Chain.String(),
				Detail: "id, actor, time, format or seqs of this commit, one before it, or the header were changed"})
			v.chain = c.Chain
		}
	}
	v.attest(c)
}

func (v *verifier) broken(c *events.Commit, seq events.Seq, err error) {
	f := Finding{Check: CheckRule, Seq: &seq, StreamSeq: c.StreamSeq, Detail: err.Error()}
	var e *events.Error
	if errors.As(err, &e) {
		f.Rule, f.Detail = e.Rule, e.Detail
		if e.Seq != nil {
			f.Seq = e.Seq
		}
	}
	v.find(f)
}

func (v *verifier) lifecycle(e *events.Event) {
	if e.Kind == events.KindOpaque {
		return
	}
	if bad := v.life.Check(e); bad != nil {
		if v.r.Violations == nil {
			v.r.Violations = map[events.Rule]int64{}
		}
		v.r.Violations[bad.Rule]++
	}
	v.life.Apply(e)
}

// projection compares head, pages and index pages with the fresh fold. raw is the head as of a moment ago,
// nil when that is not known.
func (v *verifier) projection(ctx context.Context, wait time.Duration, raw []byte) error {
	if v.next == 0 {
		head, _, err := v.a.buckets.Snapshots.Head(ctx, v.id)
		if err != nil && !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) {
			return err
		}
		if head != nil || err != nil {
			v.find(Finding{Check: CheckHead, Key: snapshot.HeadKey(v.id), Detail: "the session has a head, but its log holds nothing"})
		}
		return nil
	}
	room := v.a.rooms.Get().(*[]byte)
	defer func() {
		if cap(*room) <= largestRoom {
			v.a.rooms.Put(room)
		}
	}()
	if raw != nil { // mostly the head that it should be: no need to parse it
		want, err := v.snap.ExpectHead((*room)[:0], (&retold{v: v, value: raw}).inPlace)
		if err == nil && bytes.Equal(want, raw) {
			*room = want
			v.r.HeadSeq = v.snap.Last()
			if again, err := v.compare(ctx, nil, raw, room); err != nil || !again {
				return err
			}
		}
	}
	deadline := time.Now().Add(wait)
	for {
		kv, err := v.a.buckets.Snapshots.KV().Get(ctx, snapshot.HeadKey(v.id))
		if err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
			return err
		}
		var head *snapshot.Head
		if err == nil {
			if head, err = snapshot.ParseHead(kv.Value(), v.id); err != nil {
				v.find(Finding{Check: CheckHead, Key: snapshot.HeadKey(v.id), Detail: err.Error()})
				return nil
			}
			v.r.HeadSeq = head.Seq
		}
		if head == nil || head.Seq < v.snap.Last() {
			if time.Now().Before(deadline) {
				select {
				case <-time.After(50 * time.Millisecond):
					continue
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			last := v.snap.Last()
			v.find(Finding{Check: CheckProjection, Seq: &last, Key: snapshot.HeadKey(v.id), Expected: fmt.Sprintf("a head at seq %d", last), Found: fmt.Sprintf("seq %d", v.r.HeadSeq),
				Detail: fmt.Sprintf("the projection did not reach the log's end within %v", max(wait, 0))})
			return nil
		}
		if head.Seq > v.snap.Last() {
			if more, err := v.foldOn(ctx, head.StreamSeq); err != nil || more {
				if err != nil {
					return err
				}
				if v.snap == nil {
					return nil
				}
				continue
			}
			last := v.snap.Last()
			v.find(Finding{Check: CheckHead, Seq: &last, Key: snapshot.HeadKey(v.id), Expected: fmt.Sprintf("at most seq %d, where the log ends", last), Found: fmt.Sprintf("seq %d", head.Seq),
				Detail: "the head is ahead of the log: events that were projected are gone from it"})
			return nil
		}
		again, err := v.compare(ctx, head, kv.Value(), room)
		if err != nil || !again {
			return err
		}
		if time.Now().After(deadline) {
			v.find(Finding{Check: CheckProjection, Key: snapshot.HeadKey(v.id), Detail: fmt.Sprintf("head and pages were found to differ from a fresh fold, but the head moved on each time they were compared, for %v", max(wait, 0))})
			return nil
		}
	}
}

// foldOn folds what was appended since the log was read, up to where a head says that it is.
func (v *verifier) foldOn(ctx context.Context, streamSeq uint64) (more bool, err error) {
	before := v.r.Commits
	err = v.read(ctx, v.snap.StreamSeq, streamSeq)
	return v.snap == nil || v.r.Commits > before, err
}

// nodesOf returns the nodes of a page, as far as it is one.
func nodesOf(page []byte) []snapshot.PageNode {
	if p, err := snapshot.ParsePage(page, ""); err == nil {
		return p.Nodes
	}
	return nil
}

// compare compares the stored values with what they should be. again reports that the head
// moved on while its pages were read. head is nil when raw is known to be what it should be; room is where
// that is written.
func (v *verifier) compare(ctx context.Context, head *snapshot.Head, raw []byte, room *[]byte) (again bool, err error) {
	var found []Finding
	key := snapshot.HeadKey(v.id)
	if head != nil {
		want, err := v.snap.ExpectHead((*room)[:0], (&retold{ctx: ctx, v: v, value: raw, nodes: head.Tail}).message)
		if err != nil {
			return false, err
		}
		*room = want
		if d := snapshot.Difference(want, raw); d != "" {
			last := v.snap.Last()
			found = append(found, Finding{Check: CheckHead, Seq: &last, Key: key, Detail: d})
		}
	}
	kv, pages := v.a.buckets.Snapshots.KV(), 0
	err = v.snap.ExpectPages(func(key string, value func(snapshot.Messages) ([]byte, error)) error {
		pages++
		got, err := kv.Get(ctx, key)
		if errors.Is(err, jetstream.ErrKeyNotFound) {
			found = append(found, Finding{Check: CheckPage, Key: key, Detail: "the page is missing"})
			return nil
		}
		if err != nil {
			return err
		}
		want, err := value((&retold{ctx: ctx, v: v, value: got.Value(), parse: nodesOf}).message)
		if err != nil {
			return err
		}
		if d := snapshot.Difference(want, got.Value()); d != "" {
			found = append(found, Finding{Check: CheckPage, Key: key, Detail: d})
		}
		return nil
	})
	if err != nil {
		return false, err
	}
	if found != nil {
		now, err := kv.Get(ctx, key)
		if err != nil && !errors.Is(err, jetstream.ErrKeyNotFound) {
			return false, err
		}
		if err == nil && string(now.Value()) != string(raw) {
			return true, nil
		}
	}
	v.r.Pages += pages
	for _, f := range found {
		v.find(f)
	}
	return false, nil
}
