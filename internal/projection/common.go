package projection

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"palimpsest/internal/journal"
)

// A consumer for each partition makes the server look at each message of the log for several of them.
// While a worker is far behind with most of the log, one common reader without a filter reads for all
// of its partitions. Each keeps its fold, its checkpoint and its lease: only where messages come from is
// another place, and a partition may leave it at any time and read on by itself behind what it dealt with.

const (
	// mostTaken is how many messages a partition takes from the common reader before it looks at
	// everything else.
	mostTaken = 64
	// waitForOthers is how long a partition that starts waits for those that start with it, when they
	// are still asking where they begin.
	waitForOthers = 20 * time.Second
	// commonCheck is how often the common reader looks at the connection, also when nothing comes.
	commonCheck = 500 * time.Millisecond
	// msgOverhead is about what a message takes in memory beside its body: what its headers say.
	msgOverhead = 1 << 10
)

// commons decides whether a worker's partitions read together.
type commons struct {
	w *Worker

	mu     sync.Mutex          // guards all below
	coming int                 // partitions that start and did not ask yet
	end    uint64              // of the stream, as far as is known
	now    *common             // nil when each reads for itself
	all    map[*partition]bool // at work; true: it waits for an offer
	timer  *time.Timer
	run    context.Context // of the worker
	next   time.Duration   // by the worker's clock, when to consider again
}

// expect notes that n partitions start now.
func (m *commons) expect(ctx context.Context, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.coming += n
	m.run = ctx
}

// enter takes note of a partition at work.
func (m *commons) enter(p *partition) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all[p] = false
}

// came notes that one of them asked, or will not soon.
func (m *commons) came(p *partition) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !p.here {
		p.here = true
		m.coming--
	}
	m.answer(false)
}

// ask registers a partition that has nothing to read from yet: an offer follows, nil for none.
// It reports false when the partition is to read for itself.
func (m *commons) ask(ctx context.Context, p *partition) (bool, error) {
	if p.w.cfg.CatchUpBytes < 0 {
		return false, nil
	}
	info, err := p.w.log.Info(ctx)
	if err != nil {
		return false, err
	}
	end, read := info.State.LastSeq, p.read.Load()
	if end < read+uint64(p.w.cfg.CatchUpFrom) {
		return false, nil
	}
	n, err := p.w.log.Behind(ctx, p.n, read)
	if err != nil || n == 0 {
		return false, err
	}
	p.behind.Store(n)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.end = end
	m.all[p] = true
	if m.timer == nil {
		m.timer = time.AfterFunc(waitForOthers, func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			m.answer(true)
		})
	}
	return true, nil
}

// forget keeps offers from a partition that ends.
func (m *commons) forget(p *partition) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.all, p)
	p.refuse()
}

// consider has partitions that fell behind while each read for itself read together, if that is
// worth it.
func (m *commons) consider(ctx context.Context) {
	m.mu.Lock()
	due := m.now == nil && m.w.clock() >= m.next
	if due {
		m.next = m.w.clock() + m.w.cfg.CatchUpEvery
	}
	m.mu.Unlock()
	if !due || m.w.cfg.CatchUpBytes < 0 {
		return
	}
	info, err := m.w.log.Info(ctx)
	if err != nil {
		return // and considered again
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.end = info.State.LastSeq
	m.answer(true)
}

// answer decides for all partitions that wait, once nobody else is to come or it is late. The
// caller holds mu.
func (m *commons) answer(late bool) {
	waits := false
	for _, w := range m.all {
		waits = waits || w
	}
	if !late && (m.coming > 0 || !waits) {
		return
	}
	if m.timer != nil {
		m.timer.Stop()
		m.timer = nil
	}
	if m.now == nil && m.run.Err() == nil {
		if chosen := m.choose(); chosen != nil {
			m.begin(chosen)
		}
	}
	for p, waits := range m.all {
		if waits {
			m.all[p] = false
			p.offer(nil)
		}
	}
}

// choose returns the partitions for which most of the log behind the one that is furthest back is to
// be read; nil when there are none.
func (m *commons) choose() []*partition {
	type candidate struct {
		p            *partition
		read, behind uint64
	}
	var all []candidate
	total := uint64(0)
	for p := range m.all {
		if n := p.behind.Load(); n > 0 && p.holds() {
			all = append(all, candidate{p, p.read.Load(), n})
			total += n
		}
	}
	slices.SortFunc(all, func(a, b candidate) int { return cmp.Compare(a.read, b.read) })
	for i, c := range all {
		// A message costs the common reader half of what it costs one with a filter.
		if len(all)-i > 1 && total >= uint64(m.w.cfg.CatchUpFrom) && c.read < m.end && 3*total >= 2*(m.end-c.read) {
			var out []*partition
			for _, c := range all[i:] {
				out = append(out, c.p)
			}
			return out
		}
		total -= c.behind
	}
	return nil
}

// begin has partitions read together. The caller holds mu.
func (m *commons) begin(ps []*partition) {
	c := &common{m: m, ctx: m.run, conn: m.w.log.Reconnects(), seats: make([]*seat, m.w.log.Partitions()), limit: m.w.catchUpBytes(), ended: make(chan struct{})}
	c.room = sync.NewCond(&c.mu)
	c.after = ^uint64(0)
	for _, p := range ps {
		c.after = min(c.after, p.read.Load())
	}
	for _, p := range ps {
		s := &seat{c: c, p: p, news: make(chan struct{}, 1)}
		c.seats[p.n] = s
		c.taken++
		m.all[p] = false
		p.offer(s)
	}
	c.atFirst = c.taken
	m.now = c
	m.w.cfg.Logger.Info("projection: partitions that are far behind read together", "worker", m.w.cfg.ID, "partitions", c.taken, "behind", c.after, "end", m.end)
	m.w.running.Go(func() {
		c.run(c.ctx)
		m.mu.Lock()
		defer m.mu.Unlock()
		m.now, m.next = nil, m.w.clock()+m.w.cfg.CatchUpEvery
	})
}

// common is one consumer that reads for several partitions.
type common struct {
	m     *commons
	ctx   context.Context // of the worker
	after uint64          // where it began
	limit int             // bytes of messages that wait for partitions

	mu      sync.Mutex // guards all below, and the seats
	room    *sync.Cond // bytes were given back, or a seat, or all
	seats   []*seat    // by partition; nil: none
	taken   int
	atFirst int
	bytes   int
	full    bool // the reader waits for half of it to be free
	over    bool
	ended   chan struct{} // closed when over
	last    witness       // the last message that was read and has an id
	conn    uint64        // how often the connection was made anew when it was last known to be there
}

// seat is a partition's place at the common reader.
type seat struct {
	c    *common
	p    *partition
	news chan struct{} // capacity 1: there is something to take, or it is over

	queue []journal.Delivery
	out   int // bytes of what was taken and is being dealt with
}

// run reads until the end of the log is near, or it is no longer worth it.
func (c *common) run(ctx context.Context) {
	defer c.end(false)
	f, err := c.m.w.log.FollowAll(ctx, c.after, c.wanted, c.take, c.failed)
	if err != nil {
		c.failed(err)
		return
	}
	defer f.Stop()
	defer c.end(false) // before Stop, which waits for a delivery
	ticker := time.NewTicker(commonCheck)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			c.still(ctx, c.m.w.log.Reconnects())
		case <-c.ended:
			return
		case <-ctx.Done():
			return
		}
	}
}

// failed tells all who read of trouble.
func (c *common) failed(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.seats {
		if s != nil {
			s.p.fail(err)
		}
	}
}

// still ends the reading when the log lost what was read last: the consumer waits behind it then, and
// misses what is stored in its place. conn is how often the connection was made anew by now.
func (c *common) still(ctx context.Context, conn uint64) bool {
	c.mu.Lock()
	last, known, over := c.last, c.conn == conn, c.over
	c.mu.Unlock()
	if known {
		return !over
	}
	for last.ID != "" {
		id, err := c.m.w.log.CommitID(ctx, last.StreamSeq)
		if err == nil && id != last.ID {
			c.m.w.cfg.Logger.Warn("projection: the log lost what was read together; each partition reads for itself", "streamSeq", last.StreamSeq)
			c.end(true)
			return false
		}
		if err == nil {
			break
		}
		c.failed(err)
		select {
		case <-time.After(retryPause):
		case <-c.ended:
			return false
		case <-ctx.Done():
			return false
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last == last {
		c.conn = conn
	}
	return !c.over
}

// wanted takes note of a message and reports whether a partition takes it.
func (c *common) wanted(d journal.Delivery) bool {
	if !c.still(c.ctx, d.Conn) {
		return false
	}
	if s := c.m.w.cfg.Signals.Read; s != nil {
		s(d.StreamSeq)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seats[d.Partition] != nil {
		return true
	}
	c.passed(d)
	return false
}

// passed takes note that everything up to a message was handed on. The caller holds mu.
func (c *common) passed(d journal.Delivery) {
	if d.ID != "" {
		c.last = witness{d.StreamSeq, d.ID}
	}
	if d.Pending <= uint64(c.m.w.cfg.CatchUpFrom)/64 {
		c.finish(false)
	}
}

func size(d *journal.Delivery) int {
	if d.Err != nil {
		return msgOverhead + len(d.Err.Body)
	}
	return msgOverhead + journal.Held(d.Commit)
}

// take puts a message where its partition finds it, once there is room.
func (c *common) take(d journal.Delivery) {
	n := size(&d)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.bytes > 0 && c.bytes+n > c.limit {
		c.full = true
	}
	for c.full && !c.over && c.seats[d.Partition] != nil {
		c.room.Wait()
	}
	s := c.seats[d.Partition]
	if c.over {
		return
	}
	if s != nil {
		s.queue = append(s.queue, d)
		c.bytes += n
		s.wake()
	}
	c.passed(d)
}

func (s *seat) wake() {
	select {
	case s.news <- struct{}{}:
	default:
	}
}

// free gives bytes back. The caller holds mu.
func (c *common) free(n int) {
	if c.bytes -= n; c.full && c.bytes <= c.limit/2 {
		c.full = false
		c.room.Broadcast()
	}
}

// end ends the reading. What was handed on is dealt with by the partitions, unless the log lost it.
func (c *common) end(lost bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.finish(lost)
}

// finish is end. The caller holds mu.
func (c *common) finish(lost bool) {
	if c.over {
		return
	}
	c.over = true
	if lost {
		c.last = witness{}
	}
	close(c.ended)
	c.room.Broadcast()
	for _, s := range c.seats {
		if s == nil {
			continue
		}
		if lost {
			s.queue = nil
		}
		s.wake()
	}
}

// leave gives the seat back, and what was handed on and not dealt with.
func (s *seat) leave() {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.seats[s.p.n] != s {
		return
	}
	n := s.out
	for i := range s.queue {
		n += size(&s.queue[i])
	}
	c.seats[s.p.n], s.queue, s.out = nil, nil, 0
	c.free(n)
	c.room.Broadcast() // a message may be waiting for this very seat
	if c.taken--; 2*c.taken < c.atFirst {
		c.finish(false) // what is read for nobody costs as much
	}
}

// next takes the messages that follow, a few at the most, into the space of those that were dealt with.
// Without any, and when it is over, upTo is a message of whatever partition up to which no others are,
// known to be in the log when the connection had been made anew conn times. over says that no more will come.
func (s *seat) next(into []journal.Delivery) (ds []journal.Delivery, upTo witness, conn uint64, over bool) {
	c := s.c
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(into[:cap(into)]) // lets go of bodies
	c.free(s.out)
	s.out = 0
	n := min(len(s.queue), mostTaken)
	ds = append(into[:0], s.queue[:n]...)
	for i := range ds {
		s.out += size(&ds[i])
	}
	clear(s.queue[:n])
	if s.queue = s.queue[n:]; len(s.queue) > 0 {
		s.wake()
	} else {
		over = c.over
	}
	if n == 0 || over {
		upTo = c.last
	}
	return ds, upTo, c.conn, over
}

// pass takes note that a partition has nothing up to a message of another one, when that is far from
// what it read last: who starts behind it has less to look through.
func (p *partition) pass(ctx context.Context, w witness, conn uint64) {
	if ctx.Err() != nil { // what came before may not have been dealt with
		return
	}
	if w.StreamSeq <= p.read.Load()+much {
		return
	}
	if follows, err := p.look(ctx, conn); !follows || err != nil {
		return // looked again with the next one
	}
	p.read.Store(w.StreamSeq)
	p.newest = w
}

// catchUpBytes is Config.CatchUpBytes, but enough for the largest message.
func (w *Worker) catchUpBytes() int {
	return max(w.cfg.CatchUpBytes, w.log.MaxCommit()+msgOverhead)
}

// offer hands a partition a seat, nil for none.
func (p *partition) offer(s *seat) {
	p.refuse() // one of a reader that is no more
	p.offers <- s
}

// refuse gives back what was offered and not looked at.
func (p *partition) refuse() {
	select {
	case s := <-p.offers:
		if s != nil {
			s.leave()
		}
	default:
	}
}

// sit takes a seat that was offered. One whose reader began behind what the partition read is none.
func (p *partition) sit(s *seat) *seat {
	if s.c.after > p.read.Load() {
		s.leave()
		return nil
	}
	p.counted.Store(nil)
	p.together(true)
	return s
}

// together notes whether the partition reads with others.
func (p *partition) together(yes bool) {
	if p.seated.Swap(yes) != yes {
		if s := p.w.cfg.Signals.Together; s != nil {
			s(p.n, yes)
		}
	}
}

// takeSome deals with what the common reader has for the partition, and reports whether that was all
// that there ever will be. taken is space.
func (p *partition) takeSome(ctx context.Context, at *seat, taken []journal.Delivery) (_ []journal.Delivery, over bool) {
	taken, upTo, conn, over := at.next(taken)
	p.arrived.Add(uint64(len(taken)))
	for _, d := range taken {
		p.deliver(ctx, d)
	}
	if len(taken) == 0 || over {
		p.pass(ctx, upTo, conn)
	}
	return taken, over && ctx.Err() == nil
}

// fail hands trouble with reading to the partition's goroutine.
func (p *partition) fail(err error) {
	select {
	case p.failures <- err:
	default:
	}
}
