package projection

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unique"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/tidwall/btree"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/session"
	"palimpsest/internal/snapshot"
)

// SessionState is what a session is doing, in one word.
type SessionState string

// The states. A session in quarantine is in that state, whatever its turn, unless somebody
// decided to leave it so.
const (
	StateOpen        SessionState = "open" // a turn is open
	StateIdle        SessionState = "idle" // no turn is open
	StateQuarantined SessionState = "quarantined"
)

// FleetRow is what the buckets say of one session: its head in short, its header in short, its
// quarantine. Nothing is folded for it.
type FleetRow struct {
	Session string `json:"session"`
	// Rev is the revision of the head in SURFACES, 0 for a session without a head. In a later
	// generation of snapshots it is the revision in that one's bucket and 2^40 for each generation
	// before it, so that it grows from one to the next.
	Rev   uint64       `json:"rev"`
	State SessionState `json:"state"`
	Seq   events.Seq   `json:"seq"` // of the last projected event, -1 for none
	// Time is that of the last projected event, in Unix ms; before there is one, that of the
	// session's creation.
	Time     int64           `json:"time"`
	OpenTurn *events.Seq     `json:"openTurn"` // its number, null when none is open
	OpenStep *events.Seq     `json:"openStep"`
	Nodes    int             `json:"nodes"`
	LogBytes int64           `json:"logBytes"` // of all canonical lines
	Writer   *session.Writer `json:"writer,omitempty"`
	Parent   string          `json:"parent,omitempty"`
	Preset   string          `json:"agentPreset,omitempty"` // of the header
	Agents   []string        `json:"agents,omitempty"`      // those of the head that are not idle
	// Quarantine is why the projection stands still.
	Quarantine *Quarantine `json:"quarantine,omitempty"`
	// Erased says that the session was erased.
	Erased bool `json:"erased,omitempty"`
	// Pending says that the session has no header yet: it is a fork that is not complete.
	Pending bool `json:"pending,omitempty"`
}

// FleetFilter picks sessions. Unset fields pick all.
type FleetFilter struct {
	State SessionState
	// Since picks those with a last activity (FleetRow.Time) at or after it, in Unix ms.
	Since int64
	// Agent picks those whose header has it as agentPreset and those in whose head it is an
	// agent that is not idle.
	Agent string
	// Parent picks the forks and sub-agents of a session.
	Parent string
}

// Fleet is an index of all sessions in memory, made of the buckets SURFACES, HEADERS and
// QUARANTINE. It runs no goroutine: each Refresh reads what was written since the last one,
// so a head that was written many times meanwhile is read once. Its memory is about 400 bytes
// for each session, however long that is. It is safe for concurrent use.
type Fleet struct {
	log    *journal.Journal
	snaps  *snapshot.Store
	every  time.Duration
	behind time.Duration

	gate    chan struct{} // a token: held by the one refresh that runs
	begun   atomic.Uint64 // refreshes that have begun
	born    time.Time     // origin of clock
	last    atomic.Int64  // by clock, when the last good refresh began; 0: there is none
	visited atomic.Uint64 // messages read
	// These belong to the refresh that runs.
	generation snapshot.Generation
	positions  [3]uint64 // revision of the last message that was read of each bucket
	reconnects uint64
	relearn    map[*fleetRow]headPlace // heads to be read once more, as they were known
	relearnTo  uint64                  // revision up to which heads were known

	mu     sync.RWMutex // guards all below
	byID   *btree.BTreeG[*fleetRow]
	byRev  *btree.BTreeG[*fleetRow] // those with a head
	newest uint64                   // revision up to which heads were read
	losses []uint64                 // for each time that the bucket lost its end: the revision before it
	lossOf uint64                   // reconnects at the last of them
	// notes are rows that changed without a new head, the latest ones; the first has number noted.
	notes   []*fleetRow
	noted   uint64
	changed chan struct{} // closed and replaced when there is news
}

// headPlace is where a head lies in the bucket.
type headPlace struct {
	rev    uint64
	stored int64 // Unix ns
}

// keptNotes is how many changes without a new head are remembered for feeds.
const keptNotes = 4096

// fleetRow is a session in the index: a FleetRow in little memory.
type fleetRow struct {
	id string
	headPlace
	seq        events.Seq
	turn, step events.Seq // NoSeq when none is open
	time       int64
	logBytes   int64
	created    int64
	nodes      int32
	header     bool
	erased     bool
	parent     unique.Handle[string]
	preset     unique.Handle[string]
	agents     []unique.Handle[string]
	writer     *session.Writer
	quarantine *Quarantine
}

var noName = unique.Make("")

func newFleetRow(id string) *fleetRow {
	r := &fleetRow{id: id, parent: noName, preset: noName}
	r.noHead()
	return r
}

func (r *fleetRow) noHead() {
	r.headPlace, r.seq, r.turn, r.step = headPlace{}, events.NoSeq, events.NoSeq, events.NoSeq
	r.time, r.logBytes, r.nodes, r.agents, r.writer = 0, 0, 0, nil, nil
}

// FleetConfig is how a fleet is followed.
type FleetConfig struct {
	// Every is how often the buckets are asked for news while somebody follows a feed.
	// Defaults to 250 ms.
	Every time.Duration
	// Behind is how long a feed's reader may be behind before it is cut off. Defaults to 60 s.
	Behind time.Duration
}

// NewFleet returns an index that has read nothing yet.
func NewFleet(r *Reader, cfg FleetConfig) *Fleet {
	if cfg.Every == 0 {
		cfg.Every = 250 * time.Millisecond
	}
	if cfg.Behind == 0 {
		cfg.Behind = time.Minute
	}
	f := &Fleet{log: r.log, snaps: r.buckets.Snapshots, generation: r.buckets.generation(), every: cfg.Every, behind: cfg.Behind, born: time.Now(), gate: make(chan struct{}, 1), changed: make(chan struct{})}
	f.gate <- struct{}{}
	f.byID = btree.NewBTreeGOptions(func(a, b *fleetRow) bool { return a.id < b.id }, btree.Options{NoLocks: true})
	f.byRev = btree.NewBTreeGOptions(func(a, b *fleetRow) bool { return a.rev < b.rev || a.rev == b.rev && a.id < b.id }, btree.Options{NoLocks: true})
	return f
}

// FleetStats counts what an index holds and has read.
type FleetStats struct {
	Sessions int
	Read     uint64 // messages of the buckets
	Newest   uint64 // revision up to which heads were read
}

// Stats returns them.
func (f *Fleet) Stats() FleetStats {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return FleetStats{f.byID.Len(), f.visited.Load(), f.newest}
}

// fleetSource is a bucket that the index is made of.
type fleetSource struct {
	bucket string
	filter string                                                          // of its keys
	take   func(f *Fleet, id string, m *jetstream.RawStreamMsg, gone bool) // with mu held
}

// sources are what is read, in this order: a session's header is there before its first head.
func (f *Fleet) sources() [3]fleetSource {
	return [3]fleetSource{
		{journal.HeadersBucket, allHeads, (*Fleet).takeHeader},
		{f.generation.Bucket, allHeads, (*Fleet).takeHead},
		{QuarantineBucket, f.generation.Key(allHeads), (*Fleet).takeQuarantine},
	}
}

// base is what is added to the revisions of a generation's bucket.
func (f *Fleet) base() uint64 { return uint64(f.generation.N-1) << 40 }

// follow begins anew with the heads of the generation that serves, when that is another one now.
func (f *Fleet) follow(ctx context.Context) {
	g := f.snaps.Pin(ctx).Generation()
	if g.N == f.generation.N {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if g.N < f.generation.N { // what feeds have told has higher revisions
		f.losses = append(f.losses, 0)
	}
	f.generation, f.relearn = g, nil
	f.positions[1], f.positions[2] = 0, 0
	f.newest = f.base()
	f.byRev.Clear()
	f.byID.Scan(func(r *fleetRow) bool {
		r.noHead()
		r.quarantine = nil
		return true
	})
}

// Refresh reads what was written since the last refresh. When it returns, the index knows
// everything that a replica of the buckets held when it was called. Callers at the same time
// share one reading.
func (f *Fleet) Refresh(ctx context.Context) error {
	arrived := f.begun.Load()
	select {
	case <-f.gate:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { f.gate <- struct{}{} }()
	if f.begun.Load() > arrived && f.last.Load() > 0 { // one that began later has ended
		return nil
	}
	return f.refresh(ctx)
}

// refreshSince is Refresh for who is content with what was read within a duration.
func (f *Fleet) refreshSince(ctx context.Context, d time.Duration) error {
	fresh := func() bool {
		last := f.last.Load()
		return last > 0 && f.clock()-last < int64(d)
	}
	if fresh() {
		return nil
	}
	select {
	case <-f.gate:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { f.gate <- struct{}{} }()
	if fresh() {
		return nil
	}
	return f.refresh(ctx)
}

// clock is ns above 0 that nobody sets back: the time of day may be.
func (f *Fleet) clock() int64 { return max(1, int64(time.Since(f.born))) }

// refresh is Refresh with the gate's token held.
func (f *Fleet) refresh(ctx context.Context) error {
	began := f.clock()
	f.begun.Add(1)
	f.follow(ctx) // first: the bucket of the generation that served before may be gone
	if err := f.heal(ctx); err != nil {
		f.last.Store(0)
		return err
	}
	for i, s := range f.sources() {
		more, err := f.log.BucketHas(ctx, s.bucket, s.filter, f.positions[i]+1)
		for more && err == nil {
			more, err = f.read(ctx, i, s)
		}
		if err != nil {
			f.last.Store(0) // who waited for this one must read by itself
			return err
		}
	}
	f.relearned()
	f.last.Store(began)
	return nil
}

// allHeads matches the keys of one token: a head's has no dot, unlike those of its pages.
const allHeads = "*"

// fleetBatch is how many messages a refresh reads at a time, at most.
const fleetBatch = 16384

// read takes in the next batch of a bucket.
func (f *Fleet) read(ctx context.Context, i int, s fleetSource) (more bool, err error) {
	msgs, more, err := f.log.BucketBatch(ctx, s.bucket, s.filter, f.positions[i]+1, fleetBatch)
	if err != nil || len(msgs) == 0 {
		return false, err
	}
	f.visited.Add(uint64(len(msgs)))
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range msgs {
		f.positions[i] = m.Sequence
		id, err := events.SessionOf(m.Subject[strings.LastIndexByte(m.Subject, '.')+1:])
		if err != nil {
			continue // no session's key
		}
		op := m.Header.Get("KV-Operation")
		s.take(f, id, m, op == "DEL" || op == "PURGE")
	}
	close(f.changed)
	f.changed = make(chan struct{})
	return more, nil
}

// row returns a session's row, making it when there is none.
func (f *Fleet) row(id string) *fleetRow {
	if r, ok := f.byID.Get(&fleetRow{id: id}); ok {
		return r
	}
	r := newFleetRow(id)
	f.byID.Set(r)
	return r
}

// note remembers that a row changed without a new head.
func (f *Fleet) note(r *fleetRow) {
	if r.rev == 0 && !r.erased {
		return
	}
	f.notes = append(f.notes, r)
	if extra := len(f.notes) - keptNotes; extra > 0 {
		f.notes = slices.Delete(f.notes, 0, extra)
		f.noted += uint64(extra)
	}
}

func (f *Fleet) takeHeader(id string, m *jetstream.RawStreamMsg, gone bool) {
	r := f.row(id)
	h, err := events.ParseHeader(m.Data, id, 0)
	if events.IsHeaderTombstone(m.Data) {
		r.header, r.erased, r.quarantine = false, true, nil
		r.parent, r.preset = noName, noName
		f.note(r)
		return
	}
	if gone || err != nil {
		r.header = false
		return
	}
	late := !r.header
	r.header, r.created, r.parent = true, h.CreatedAt, unique.Make(h.ParentSession)
	preset, _ := events.Text(events.Get(h.Raw, "agentPreset"))
	r.preset = unique.Make(preset)
	if late { // a fork's header is written last
		f.note(r)
	}
}

func (f *Fleet) takeHead(id string, m *jetstream.RawStreamMsg, gone bool) {
	r := f.row(id)
	place := headPlace{f.base() + m.Sequence, m.Time.UnixNano()}
	if f.relearn != nil && place.rev <= f.relearnTo && f.relearn[r] != place {
		f.lose(place.rev - 1) // a revision that was used twice
	}
	delete(f.relearn, r)
	f.newest = max(f.newest, place.rev)
	if r.rev > 0 {
		f.byRev.Delete(r)
	}
	r.noHead()
	if gone {
		return
	}
	r.headPlace = place
	readHead(r, m.Data)
	f.byRev.Set(r)
}

// readHead takes from a head what a row has, in one walk over its text: most of it is messages
// that nobody needs here. What is damaged stays unset.
func readHead(r *fleetRow, head []byte) {
	number := func(val []byte) int64 {
		n, ok := events.ParseSeq(string(val))
		if !ok {
			return int64(events.NoSeq)
		}
		return int64(n)
	}
	events.EachMember(head, func(key, val []byte) bool {
		switch string(key) {
		case "seq":
			r.seq = events.Seq(number(val))
		case "time":
			r.time = max(0, number(val))
		case "logBytes":
			r.logBytes = max(0, number(val))
		case "nodeCount":
			r.nodes = int32(max(0, number(val)))
		case "lifecycle":
			r.turn, r.step = events.Seq(number(events.Get(val, "turn"))), events.Seq(number(events.Get(val, "step")))
			events.EachMember(events.Get(val, "agents"), func(name, _ []byte) bool {
				if s, ok := events.Text(slices.Concat([]byte{'"'}, name, []byte{'"'})); ok {
					r.agents = append(r.agents, unique.Make(s))
				}
				return true
			})
		case "writer":
			w := session.Writer{Epoch: events.Seq(number(events.Get(val, "epoch"))), Seq: events.Seq(number(events.Get(val, "seq")))}
			name, _ := events.Text(events.Get(val, "id"))
			w.ID = unique.Make(name).Value()
			r.writer = &w
		}
		return true
	})
}

func (f *Fleet) takeQuarantine(id string, m *jetstream.RawStreamMsg, gone bool) {
	r := f.row(id)
	var q *Quarantine
	if !gone {
		var err error
		if q, err = parseQuarantine(id, m.Data); err != nil {
			q = &Quarantine{Session: id, Code: events.CodeCorrupt, Detail: err.Error()}
		}
	}
	if !reflect.DeepEqual(q, r.quarantine) {
		r.quarantine = q
		f.note(r)
	}
}

// heal finds out whether the heads' bucket is still the one that was read, when the connection
// was lost meanwhile: a power cut takes the end of a bucket away, and its revisions are then
// used again. What lies behind the newest head that is still there is read once more, and
// what is not there any more is forgotten when that is done.
func (f *Fleet) heal(ctx context.Context) error {
	reconnects := f.log.JetStream().Conn().Stats().Reconnects
	if reconnects == f.reconnects {
		return nil
	}
	var rows []*fleetRow
	var places []headPlace
	f.mu.RLock()
	f.byRev.Reverse(func(r *fleetRow) bool {
		rows, places = append(rows, r), append(places, r.headPlace)
		return len(rows) < healLook
	})
	f.mu.RUnlock()
	good, err := f.stillThere(ctx, rows, places)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.relearn, f.relearnTo = map[*fleetRow]headPlace{}, f.newest
	f.byRev.Ascend(&fleetRow{headPlace: headPlace{rev: good + 1}}, func(r *fleetRow) bool {
		f.relearn[r] = r.headPlace
		return true
	})
	f.newest = max(good, f.base())
	f.positions = [3]uint64{1: f.newest - f.base()}
	f.reconnects = reconnects
	return nil
}

// healLook is how many of the newest heads are looked for before all are read anew.
const healLook = 64

// stillThere returns the revision of the first of some heads that lies where it was known to
// lie, 0 for none: a newer head took its place, or it was lost.
func (f *Fleet) stillThere(ctx context.Context, rows []*fleetRow, places []headPlace) (uint64, error) {
	if len(rows) == 0 {
		return 0, nil
	}
	ctx, cancel := context.WithTimeout(ctx, f.log.Config().ReadTimeout)
	defer cancel()
	stream, err := f.log.JetStream().Stream(ctx, "KV_"+f.generation.Bucket)
	if err != nil {
		return 0, unavailable("fleet", err)
	}
	for i, p := range places {
		m, err := stream.GetMsg(ctx, p.rev-f.base())
		switch {
		case errors.Is(err, jetstream.ErrMsgNotFound):
		case err != nil:
			return 0, unavailable("fleet", err)
		case m.Time.UnixNano() == p.stored && m.Subject == "$KV."+f.generation.Bucket+"."+events.Token(rows[i].id):
			return p.rev, nil
		}
	}
	return 0, nil
}

// relearned ends what heal began.
func (f *Fleet) relearned() {
	if f.relearn == nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for r := range f.relearn {
		f.byRev.Delete(r)
		r.noHead()
	}
	if f.newest < f.relearnTo {
		f.lose(f.newest)
	}
	f.relearn = nil
}

// lose notes that the bucket lost what was behind a revision. The caller holds mu.
func (f *Fleet) lose(rev uint64) {
	if f.lossOf == f.reconnects && len(f.losses) > 0 {
		return // of the same loss: heads are read in order, so this is further on
	}
	f.losses, f.lossOf = append(f.losses, rev), f.reconnects
}

// public makes a row to be handed out. The caller holds mu.
func (r *fleetRow) public() FleetRow {
	out := FleetRow{
		Session: r.id, Rev: r.rev, State: r.state(), Seq: r.seq, Time: r.activity(), Nodes: int(r.nodes), LogBytes: r.logBytes, Writer: r.writer,
		Parent: r.parent.Value(), Preset: r.preset.Value(), Quarantine: r.quarantine, Erased: r.erased, Pending: !r.header && !r.erased,
	}
	if r.turn != events.NoSeq {
		turn := r.turn
		out.OpenTurn = &turn
	}
	if r.step != events.NoSeq {
		step := r.step
		out.OpenStep = &step
	}
	for _, a := range r.agents {
		out.Agents = append(out.Agents, a.Value())
	}
	return out
}

func (r *fleetRow) state() SessionState {
	switch {
	case r.quarantine.Alerts():
		return StateQuarantined
	case r.turn != events.NoSeq:
		return StateOpen
	}
	return StateIdle
}

func (r *fleetRow) activity() int64 {
	if r.seq == events.NoSeq {
		return r.created
	}
	return r.time
}

// matcher is a filter that is ready to be used.
func (ff FleetFilter) matcher() func(*fleetRow) bool {
	agent, parent := unique.Make(ff.Agent), unique.Make(ff.Parent)
	return func(r *fleetRow) bool {
		return (ff.State == "" || r.state() == ff.State) &&
			(ff.Since == 0 || r.activity() >= ff.Since) &&
			(ff.Agent == "" || r.preset == agent || slices.Contains(r.agents, agent)) &&
			(ff.Parent == "" || r.parent == parent)
	}
}

// FleetPage is a page of sessions, in the order of their ids' bytes.
type FleetPage struct {
	Rows   []FleetRow
	Cursor string // the last id, when there are more; "" behind the last one
}

// List returns the sessions behind an id ("" for the first page) that a filter picks, after a
// refresh. A session is listed once it has a header. A session that was there all the time is
// on exactly one page, whatever comes meanwhile.
func (f *Fleet) List(ctx context.Context, ff FleetFilter, after string, limit int) (*FleetPage, error) {
	return f.ListWhere(ctx, ff, after, limit, nil)
}

// ListWhere is List of those ids that keep accepts, nil for all. No cursor names another.
func (f *Fleet) ListWhere(ctx context.Context, ff FleetFilter, after string, limit int, keep func(id string) bool) (*FleetPage, error) {
	if err := f.Refresh(ctx); err != nil {
		return nil, err
	}
	match := ff.matcher()
	page := new(FleetPage)
	f.mu.RLock()
	defer f.mu.RUnlock()
	f.byID.Ascend(&fleetRow{id: after}, func(r *fleetRow) bool {
		if !r.header || r.id == after || !match(r) || keep != nil && !keep(r.id) {
			return true
		}
		if len(page.Rows) == limit {
			page.Cursor = page.Rows[limit-1].Session
			return false
		}
		page.Rows = append(page.Rows, r.public())
		return true
	})
	return page, nil
}

// ParseSince reads a point in time as people write it, RFC 3339 or Unix milliseconds, as Unix ms.
func ParseSince(s string) (int64, error) {
	if n, ok := events.ParseSeq(s); ok {
		return int64(n), nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil || t.UnixMilli() < 0 {
		return 0, fmt.Errorf("since: expected a time such as 2026-01-31T09:30:00Z or Unix milliseconds, found %.100q", s)
	}
	return t.UnixMilli(), nil
}
