package projection

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"palimpsest/internal/events"
	"palimpsest/internal/session"
	"palimpsest/internal/snapshot"
)

const (
	// leaseMargin is how long before its lease ends a holder stops by itself.
	leaseMargin = 500 * time.Millisecond
	// leastLease is the shortest lease: the server counts whole seconds, and what is left of one
	// second after the margin is too little for a tick and an answer.
	leastLease = 2 * time.Second
	// guardEvery is how often a worker looks whether a lease ended.
	guardEvery = 50 * time.Millisecond
	// longestTick is the longest time between two renewals: a long lease is to outlive the
	// election of a leader, and should be fresh when that begins.
	longestTick = 2 * time.Second
	// turnPause is the shortest time between two turns, however often others nudge.
	turnPause = 20 * time.Millisecond
	// mostWrites is how many keys of the roster a worker writes at the same time: so many that
	// one slow answer does not keep other leases from being renewed.
	mostWrites = 64
)

// Causes of the end of a partition's work.
var (
	errHandOver = errors.New("projection: the partition is another worker's now")
	errLost     = errors.New("projection: the lease of the partition ended")
)

// running is a partition at work, with its lease.
type running struct {
	p     *partition
	end   context.CancelCauseFunc
	ended error // why it was told to end; nil while it works. Belongs to the sharing goroutine and Stop
	since int64 // Unix ms

	rev   uint64       // of the lease's key; belongs to the sharing goroutine
	until atomic.Int64 // by the worker's clock, when it must have stopped
}

// sighting is since when a key of another worker has not changed here.
type sighting struct {
	rev uint64
	at  time.Duration // by the worker's clock
}

// share is how a worker shares the partitions with others. Everything in it that has no lock
// belongs to the goroutine in keep.
type share struct {
	w      *Worker
	roster *Roster
	run    string
	began  int64 // Unix ms
	ttl    time.Duration
	stream jetstream.Stream

	memberRev uint64
	renewed   time.Duration // by the worker's clock, when keys were last renewed
	failed    atomic.Bool   // a request of the last turn got no answer
	seen      map[string]sighting
	told      map[string]bool // strange keys that were logged

	joined   atomic.Int64 // by the worker's clock, until when the member key is known to live; 0: not joined
	draining atomic.Bool
	writes   atomic.Int64 // generation of snapshots that is written here
	foreign  atomic.Bool  // another version of the fold builds the snapshots that serve
	address  atomic.Pointer[string]
	reported atomic.Pointer[[]PartitionStatus]
	last     atomic.Pointer[roll]
	lagTotal atomic.Pointer[uint64] // nil while it is not known
	trouble  atomic.Pointer[string]

	wake chan struct{} // capacity 1: something changed
	left chan struct{} // closed when keep has returned
}

// clock is the worker's monotonic clock. It goes on while the process is stopped.
func (w *Worker) clock() time.Duration { return time.Since(w.born) }

// DefaultWorkerID is an id that no other process has: host, pid and something random.
func DefaultWorkerID() string {
	host, _ := os.Hostname() // without one the rest is unique enough
	host = strings.Map(func(c rune) rune {
		if CheckWorkerID(string(c)) != nil {
			return '-'
		}
		return c
	}, host)
	return fmt.Sprintf("%s-%d-%s", host[:min(len(host), 80)], os.Getpid(), strings.ToLower(nuid.Next()[16:]))
}

// CheckLease refuses a length of leases that the server cannot keep.
func CheckLease(d time.Duration) error {
	if d < leastLease || d%time.Second != 0 {
		return &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("lease: expected whole seconds, at least %v, found %v", leastLease, d)}
	}
	return nil
}

// valid reports whether the partition's holder may still write.
func (r *running) valid(w *Worker) bool { return r.until.Load() > int64(w.clock()) }

// hold prolongs a lease that was renewed by a request sent at a time.
func (r *running) hold(sent, ttl time.Duration) { r.until.Store(int64(sent + ttl - leaseMargin)) }

// join announces the worker. An id that another process has and renews is refused; a key that
// a dead one left is waited for.
func (s *share) join(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*s.ttl+2*time.Second)
	defer cancel()
	ticker := time.NewTicker(s.ttl / 6)
	defer ticker.Stop()
	s.writes.Store(int64(s.w.buckets.Pin(ctx).generation().N))
	key := memberKey(s.w.cfg.ID)
	var other Member
	var otherRev uint64
	for {
		v, err := s.read(ctx)
		if err != nil {
			return err
		}
		m, there := v.members[s.w.cfg.ID]
		rev := v.revs[key]
		switch {
		case there && m.Run == other.Run && rev != otherRev: // renewed
			return &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("worker id %q is that of a worker that runs (started %s, %s); give each worker an id of its own, or none", m.ID, time.UnixMilli(m.Started).UTC().Format(time.RFC3339), m.HTTP)}
		case there && !s.stale(key, rev, m.TTLMs):
			other, otherRev = m, rev
		default:
			if err := s.announce(ctx, rev); !errors.Is(err, errTaken) {
				return err
			}
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return unavailable("workers", fmt.Errorf("worker id %q could not be announced: %w", s.w.cfg.ID, context.Cause(ctx)))
		}
	}
}

// announce writes the member's key over a revision.
func (s *share) announce(ctx context.Context, rev uint64) error {
	m := Member{V: rosterVersion, ID: s.w.cfg.ID, Run: s.run, Started: s.began, Renewed: time.Now().UnixMilli(), TTLMs: s.ttl.Milliseconds(),
		Draining: s.draining.Load(), Partitions: []PartitionStatus{}, Fold: session.FoldVersion, Generation: int(s.writes.Load())}
	if a := s.address.Load(); a != nil {
		m.HTTP = *a
	}
	if ps := s.reported.Load(); ps != nil {
		m.Partitions = *ps
	}
	ctx, cancel := context.WithTimeout(ctx, s.patience())
	defer cancel()
	sent := s.w.clock()
	next, err := s.roster.put(ctx, memberKey(s.w.cfg.ID), m, rev, s.ttl)
	if err == nil {
		if s.memberRev == 0 {
			s.roster.nudge()
		}
		s.memberRev = next
		s.joined.Store(int64(sent + s.ttl))
	}
	return err
}

// generation is the one that all partitions held here write; while some still write an earlier one,
// it is that.
func (s *share) generation() int {
	n := s.w.buckets.generation().N
	for _, r := range s.held() {
		if g := r.p.b.generation().N; g != n {
			return g
		}
	}
	return n
}

// patience is how long one request about the roster may take: a tick, so that another one fits
// in before a lease ends.
func (s *share) patience() time.Duration { return s.tick() }

// keep takes part until the worker drains and holds nothing any more.
func (s *share) keep(ctx context.Context) {
	defer close(s.left)
	ticker := time.NewTicker(s.tick())
	defer ticker.Stop()
	s.turn(ctx)
	for {
		if s.draining.Load() && s.idle() {
			s.leave(ctx)
			return
		}
		var again <-chan time.Time
		if s.failed.Load() {
			again = time.After(retryPause)
		}
		select {
		case <-ticker.C:
		case <-again:
		case <-s.wake:
			pause := time.NewTimer(turnPause) // more nudges may come
			<-pause.C
			select {
			case <-s.wake:
			default:
			}
		}
		s.turn(ctx)
	}
}

func (s *share) idle() bool {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	return len(s.w.partitions) == 0
}

// wakeUp has the next turn come at once.
func (s *share) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// turn brings what is held in line with who is there.
func (s *share) turn(ctx context.Context) {
	if s.draining.Load() {
		s.handOver(nil) // also while JetStream is away
	}
	s.reap(ctx)
	now := s.w.clock()
	due := s.failed.Swap(false) || now-s.renewed >= s.tick()*5/6 // a ticker's tick, not a nudge
	if due {
		s.renewed = now
		s.renewLeases(ctx)
	}
	v, err := s.read(ctx)
	if err != nil {
		s.troubled(err)
		return
	}
	s.last.Store(v)
	s.writes.Store(int64(s.generation()))
	s.beMember(ctx, v, due)
	g := s.w.buckets.generation()
	mine := s.mine(v, g)
	s.handOver(mine)
	s.follow(g)
	s.acquire(ctx, mine, v)
	if !s.failed.Load() {
		s.trouble.Store(nil)
	}
}

// tick is the time between two renewals.
func (s *share) tick() time.Duration { return min(s.ttl/3, longestTick) }

func (s *share) troubled(err error) {
	s.failed.Store(true)
	text := err.Error()
	if old := s.trouble.Swap(&text); old == nil || *old != text {
		s.w.cfg.Logger.Warn("projection: sharing partitions", "worker", s.w.cfg.ID, "err", err)
	}
}

// read reads the roster and notes since when its keys have not changed.
func (s *share) read(ctx context.Context) (*roll, error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience())
	defer cancel()
	v, err := s.roster.read(ctx, s.w.log.Partitions())
	if err != nil {
		return nil, err
	}
	now, seen := s.w.clock(), make(map[string]sighting, len(v.revs))
	for key, rev := range v.revs {
		if at, ok := s.seen[key]; ok && at.rev == rev {
			seen[key] = at
		} else {
			seen[key] = sighting{rev, now}
		}
	}
	s.seen = seen
	for _, key := range v.strange {
		if !s.told[key] {
			s.told[key] = true
			s.w.cfg.Logger.Warn("projection: a value in the bucket of workers is none that this version writes; its worker is left out of account", "key", key)
		}
	}
	return v, nil
}

// stale reports whether a key was not renewed for half as long again as it lives. The server
// removes such a key earlier; this is for a server that does not.
func (s *share) stale(key string, rev uint64, ttlMs int64) bool {
	at, ok := s.seen[key]
	return ok && at.rev == rev && s.w.clock()-at.at > time.Duration(ttlMs)*time.Millisecond*3/2
}

// beMember renews the member's key, or announces the worker again when it ran out.
func (s *share) beMember(ctx context.Context, v *roll, due bool) {
	key := memberKey(s.w.cfg.ID)
	m, there := v.members[s.w.cfg.ID]
	rev := s.memberRev
	switch {
	case there && m.Run != s.run && !s.stale(key, v.revs[key], m.TTLMs):
		s.memberRev = 0
		s.joined.Store(0)
		s.troubled(fmt.Errorf("worker id %q was taken by another process while this one was away; give each worker an id of its own", s.w.cfg.ID))
		return
	case there && m.Run == s.run && v.revs[key] >= s.memberRev:
		rev = v.revs[key] // also after a renewal that went through without an answer
	case v.revs[key] > s.memberRev || s.memberRev == 0: // it ran out
		s.memberRev, rev = 0, v.revs[key]
	}
	if !due && s.memberRev != 0 && there && m.Draining == s.draining.Load() {
		return
	}
	if err := s.announce(ctx, rev); err != nil {
		if errors.Is(err, errTaken) && there && m.Run == s.run {
			s.memberRev = v.revs[key] // the next read tells
		}
		s.troubled(err)
		return
	}
	if s.draining.Load() && !m.Draining {
		s.roster.nudge() // the others take over
	}
}

// live are the ids of the members that take partitions of snapshots that a version of the fold builds,
// this worker among them.
func (s *share) live(v *roll, fold int) []string {
	var ids []string
	for id, m := range v.members {
		if id != s.w.cfg.ID && !m.Draining && m.Fold == fold && !s.stale(memberKey(id), v.revs[memberKey(id)], m.TTLMs) {
			ids = append(ids, id)
		}
	}
	if s.joined.Load() != 0 && !s.draining.Load() && session.FoldVersion == fold {
		ids = append(ids, s.w.cfg.ID)
	}
	slices.Sort(ids)
	return ids
}

// mine are the partitions that are assigned to this worker.
func (s *share) mine(v *roll, g snapshot.Generation) map[int]bool {
	out := map[int]bool{}
	for p, owner := range assign(s.w.log.Partitions(), s.live(v, g.Fold)) {
		if owner == s.w.cfg.ID {
			out[p] = true
		}
	}
	return out
}

// held returns what runs here.
func (s *share) held() map[int]*running {
	s.w.mu.Lock()
	defer s.w.mu.Unlock()
	out := make(map[int]*running, len(s.w.partitions))
	for n, r := range s.w.partitions {
		out[n] = r
	}
	return out
}

// renewLeases renews all leases that are still held. One that another worker has, or that ran
// out, is lost.
func (s *share) renewLeases(ctx context.Context) {
	s.each(s.held(), func(n int, r *running) {
		if !r.valid(s.w) {
			return
		}
		for try := 0; ; try++ {
			err := s.putLease(ctx, n, r, r.rev)
			if err == nil {
				return
			}
			if !errors.Is(err, errTaken) { // the next tick tries again, until the lease ends
				s.troubled(fmt.Errorf("renewing leases: %w", err))
				return
			}
			rev, ours := s.look(ctx, n)
			if !ours || try == 1 {
				s.lose(r)
				s.w.cfg.Logger.Warn("projection: the lease was taken or ran out", "worker", s.w.cfg.ID, "partition", n)
				return
			}
			r.rev = rev // an earlier renewal went through without an answer
		}
	})
}

// putLease writes the lease of a partition over a revision.
func (s *share) putLease(ctx context.Context, n int, r *running, rev uint64) error {
	ctx, cancel := context.WithTimeout(ctx, s.patience())
	defer cancel()
	sent := s.w.clock()
	next, err := s.roster.put(ctx, leaseKey(n), Lease{V: rosterVersion, Worker: s.w.cfg.ID, Run: s.run, Since: r.since, TTLMs: s.ttl.Milliseconds()}, rev, s.ttl)
	if err != nil {
		return err
	}
	r.rev = next
	r.hold(sent, s.ttl)
	return nil
}

// look reads whether a lease is this run's, and its revision.
func (s *share) look(ctx context.Context, n int) (rev uint64, ours bool) {
	ctx, cancel := context.WithTimeout(ctx, s.patience())
	defer cancel()
	v := &roll{members: map[string]Member{}, leases: map[int]Lease{}, revs: map[string]uint64{}}
	if err := s.roster.readInto(ctx, v, rosterSubject(leaseKey(n))); err != nil {
		return 0, false
	}
	return v.revs[leaseKey(n)], v.leases[n].Run == s.run
}

// lose abandons a partition: what was folded and not written is the next holder's concern.
func (s *share) lose(r *running) {
	r.until.Store(0)
	r.end(errLost)
	s.w.stats.Lost.Add(1)
}

// guard abandons partitions whose leases end, whatever keeps the rest from renewing them.
func (s *share) guard(ctx context.Context) {
	ticker := time.NewTicker(guardEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
		var lost []int
		for n, r := range s.held() {
			select {
			case <-r.p.done:
			default:
				if until := r.until.Load(); until != 0 && until <= int64(s.w.clock()) {
					s.lose(r)
					lost = append(lost, n)
				}
			}
		}
		if lost != nil {
			slices.Sort(lost)
			s.w.cfg.Logger.Warn("projection: leases could not be renewed in time; giving the partitions up as they are", "worker", s.w.cfg.ID, "partitions", lost)
			s.wakeUp()
		}
	}
}

// reap forgets partitions that have ended and frees the leases of those that drained.
func (s *share) reap(ctx context.Context) {
	over := map[int]*running{}
	for n, r := range s.held() {
		select {
		case <-r.p.done:
			over[n] = r
		default:
		}
	}
	if len(over) == 0 {
		return
	}
	s.each(over, func(n int, r *running) {
		if !r.valid(s.w) {
			return
		}
		rctx, cancel := context.WithTimeout(ctx, s.patience())
		defer cancel()
		if err := s.roster.remove(rctx, leaseKey(n), r.rev); err != nil && !errors.Is(err, errTaken) {
			s.troubled(fmt.Errorf("freeing leases: %w", err)) // they end by themselves
		}
	})
	s.w.mu.Lock()
	for n := range over {
		delete(s.w.partitions, n)
	}
	s.w.mu.Unlock()
	s.w.cfg.Logger.Info("projection: partitions given up", "worker", s.w.cfg.ID, "partitions", slices.Sorted(maps.Keys(over)))
	s.roster.nudge()
}

// handOver has the partitions that are assigned to others drained; reap frees their leases.
func (s *share) handOver(mine map[int]bool) {
	for n, r := range s.held() {
		if !mine[n] && r.ended == nil {
			r.ended = errHandOver
			r.end(errHandOver)
		}
	}
}

// follow has partitions that write another generation of snapshots than the one that serves drained.
// Whoever they are assigned to, this worker again as a rule, goes on in the one that serves.
func (s *share) follow(g snapshot.Generation) {
	if s.foreign.Swap(g.Foldable() != nil) != (g.Foldable() != nil) && g.Foldable() != nil {
		s.w.cfg.Logger.Error("projection: this worker takes no partitions", "worker", s.w.cfg.ID, "err", g.Foldable())
	}
	for _, r := range s.held() {
		if r.p.b.generation().N != g.N && r.ended == nil {
			r.ended = errHandOver
			r.end(errHandOver)
		}
	}
}

// acquire takes the leases that are free and starts their partitions.
func (s *share) acquire(ctx context.Context, mine map[int]bool, v *roll) {
	held, free := s.held(), map[int]*running{}
	for n := range mine {
		l, there := v.leases[n]
		key := leaseKey(n)
		// One of this run that is not held was taken by a request whose answer was lost.
		if held[n] == nil && (!there || l.Run == s.run || s.stale(key, v.revs[key], l.TTLMs)) {
			free[n] = &running{since: time.Now().UnixMilli()}
		}
	}
	if len(free) == 0 {
		return
	}
	var mu sync.Mutex
	var got []int
	s.each(free, func(n int, r *running) {
		err := s.putLease(ctx, n, r, v.revs[leaseKey(n)])
		switch {
		case err == nil:
			mu.Lock()
			got = append(got, n)
			mu.Unlock()
		case !errors.Is(err, errTaken): // else another one was faster, or this was read from a replica that lags
			s.troubled(fmt.Errorf("taking leases: %w", err))
		}
	})
	if len(got) == 0 {
		return
	}
	slices.Sort(got)
	s.w.cfg.Logger.Info("projection: partitions taken", "worker", s.w.cfg.ID, "partitions", got)
	// Behind the leases, so that what an earlier holder put aside is known.
	b := s.w.buckets.known()
	prepare := s.w.prepareOnce(b, s.stream)
	s.w.commons.expect(ctx, len(got))
	for _, n := range got {
		s.w.start(ctx, b, n, free[n], s.stream, prepare, s.wakeUp)
	}
}

// each calls f for all, a few at a time, and returns when all are done.
func (s *share) each(all map[int]*running, f func(int, *running)) {
	var wg sync.WaitGroup
	tokens := make(chan struct{}, mostWrites)
	for n, r := range all {
		tokens <- struct{}{}
		wg.Go(func() {
			defer func() { <-tokens }()
			f(n, r)
		})
	}
	wg.Wait()
}

// leave takes the member's key away.
func (s *share) leave(ctx context.Context) {
	s.joined.Store(0)
	ctx, cancel := context.WithTimeout(ctx, s.patience())
	defer cancel()
	if err := s.roster.remove(ctx, memberKey(s.w.cfg.ID), s.memberRev); err != nil {
		s.w.cfg.Logger.Info("projection: leaving", "worker", s.w.cfg.ID, "err", err) // the key runs out
	}
	s.roster.nudge()
}

// report asks the partitions again and again how far they are, for the member's key and the
// metrics. It has a goroutine of its own, since a partition's answer may take longer than a
// lease has time.
func (s *share) report(ctx context.Context) {
	ticker := time.NewTicker(s.tick())
	defer ticker.Stop()
	for {
		before := s.w.buckets.generation().N
		if s.w.buckets.Pin(ctx).generation().N != before { // it may wait for an answer, which a turn must not
			s.wakeUp()
		}
		ps := s.w.Status(ctx)
		if ctx.Err() != nil {
			return
		}
		s.reported.Store(&ps)
		s.lagTotal.Store(s.w.sumLag(ctx, s.last.Load(), ps))
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// listen takes nudges and requests until the returned function is called.
func (s *share) listen(conn *nats.Conn) (stop func(), err error) {
	nudges, err := conn.Subscribe(turnSubject, func(*nats.Msg) { s.wakeUp() })
	if err != nil {
		return nil, unavailable("workers", err)
	}
	retries, err := conn.Subscribe(retrySubject(s.w.cfg.ID), s.w.answerRetry)
	if err != nil {
		_ = nudges.Unsubscribe() // fails only when the connection is gone
		return nil, unavailable("workers", err)
	}
	return func() {
		_ = nudges.Unsubscribe()
		_ = retries.Unsubscribe()
	}, nil
}

// retryAnswer is what a worker answers to a request to take a session out of quarantine.
// Without a code it was done.
type retryAnswer struct {
	Code   events.Code `json:"code,omitempty"`
	Rule   events.Rule `json:"rule,omitempty"`
	Seq    *events.Seq `json:"seq,omitempty"`
	Detail string      `json:"detail,omitempty"`
}

// retryWithin bounds taking a session out of quarantine for another process.
const retryWithin = 30 * time.Second

// answerRetry takes a session, whose id is the message, out of quarantine.
func (w *Worker) answerRetry(m *nats.Msg) {
	ctx, cancel := context.WithTimeout(context.Background(), retryWithin)
	defer cancel()
	session := string(m.Data)
	err := events.CheckSessionID(session)
	if err == nil {
		err = w.retryHere(ctx, session)
	}
	var a retryAnswer
	var e *events.Error
	switch {
	case errors.As(err, &e):
		a = retryAnswer{e.Code, e.Rule, e.Seq, e.Detail}
	case err != nil:
		a = retryAnswer{Code: events.CodeUnavailable, Detail: err.Error()}
	}
	b, err := json.Marshal(a)
	if err == nil {
		err = m.Respond(b)
	}
	if err != nil {
		w.cfg.Logger.Warn("projection: answering a retry", "session", session, "err", err)
	}
}

// retryThere asks the worker that holds the session's partition.
func (w *Worker) retryThere(ctx context.Context, session string) error {
	ctx, cancel := context.WithTimeout(ctx, retryWithin)
	defer cancel()
	n := w.log.Partition(session)
	v, err := w.buckets.Workers.read(ctx, w.log.Partitions())
	if err != nil {
		return err
	}
	l, ok := v.leases[n]
	if !ok {
		return &events.Error{Code: events.CodeUnavailable, Session: session, Detail: fmt.Sprintf("no worker has partition %d at the moment; try again, or start a projector", n)}
	}
	m, err := w.buckets.Workers.js.Conn().RequestWithContext(ctx, retrySubject(l.Worker), []byte(session))
	if err != nil {
		return &events.Error{Code: events.CodeUnavailable, Session: session, Cause: err, Detail: fmt.Sprintf("worker %s, which has partition %d, did not answer: %v; try again", l.Worker, n, err)}
	}
	var a retryAnswer
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return fmt.Errorf("answer of worker %s: %w", l.Worker, err)
	}
	if a.Code != "" {
		return &events.Error{Code: a.Code, Rule: a.Rule, Seq: a.Seq, Session: session, Detail: a.Detail}
	}
	return nil
}

// prepared is what partitions that start need to know.
type prepared struct {
	quarantined map[int]map[string]bool
	end         uint64 // of the stream
}

// prepareOnce returns a function that reads it for all partitions that start together. After an
// error it may be called again.
func (w *Worker) prepareOnce(b *Buckets, stream jetstream.Stream) func(context.Context) (*prepared, error) {
	var mu sync.Mutex
	var done *prepared
	return func(ctx context.Context) (*prepared, error) {
		mu.Lock()
		defer mu.Unlock()
		if done != nil {
			return done, nil
		}
		q, err := w.readQuarantine(ctx, b)
		if err != nil {
			return nil, err
		}
		info, err := stream.Info(ctx)
		if err != nil {
			return nil, unavailable("stream", err)
		}
		done = &prepared{quarantined: q, end: info.State.LastSeq}
		return done, nil
	}
}

// start works a partition in the background. ended is called when it has ended.
func (w *Worker) start(ctx context.Context, b *Buckets, n int, r *running, stream jetstream.Stream, prepare func(context.Context) (*prepared, error), ended func()) {
	run, end := context.WithCancelCause(ctx)
	r.p, r.end = newPartition(w, b, n, stream, nil), end
	r.p.holds = func() bool { return r.valid(w) }
	w.mu.Lock()
	w.partitions[n] = r
	w.mu.Unlock()
	w.running.Add(1)
	go func() {
		defer w.running.Done()
		defer ended()
		defer end(nil)
		if r.p.prepare(run, prepare) {
			r.p.run(run)
		}
	}()
}

// prepare finds out where the partition begins. It reports false when ctx ended before that.
func (p *partition) prepare(ctx context.Context, read func(context.Context) (*prepared, error)) bool {
	for ctx.Err() == nil {
		known, err := read(ctx)
		if err == nil {
			err = p.readCheckpoint(ctx, known.end)
		}
		if err == nil {
			for session := range known.quarantined[p.n] {
				p.quarantined[session] = true
			}
			p.aside.Store(int64(len(p.quarantined)))
			return true
		}
		p.w.commons.came(p)
		if ctx.Err() == nil {
			p.troubled(err)
			p.pause(ctx)
		}
	}
	p.w.commons.came(p)
	close(p.done)
	return false
}
