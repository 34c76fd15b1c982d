package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/bench/rig"
	"palimpsest/internal/api"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

// readSizes are surfaces, in messages.
var readSizes = []int{20, 500, 5000}

// nodesEach is how many nodes the sessions of one size have together, at the least.
var nodesEach = 40_000

// target is a session that is read.
type target struct {
	session string
	keys    []string // of its head and pages
	request []byte   // that asks for its messages over HTTP
}

// shelf is sessions of one size, projected and ready to be read.
type shelf struct {
	size    int
	targets []*target
	kv      jetstream.KeyValue // of a bare client
	reader  *projection.Reader
	addr    string     // of the HTTP API
	conns   []*webConn // of the readers over HTTP
}

// newShelf stores sessions with surfaces of n messages and projects them.
func (r *bed) newShelf(ctx context.Context, n int) (*shelf, error) {
	l, err := r.openLog(ctx, fmt.Sprintf("read%d", n))
	if err != nil {
		return nil, err
	}
	headers, err := l.journal.OpenHeaders(ctx)
	if err != nil {
		return nil, err
	}
	for i := range max(8, nodesEach/n) {
		raw := fmt.Appendf(nil, `{"version":3,"id":"%s-%04d","createdAt":1767225604000,"isSeeded":false}`, l.name, i)
		h, err := events.ParseHeader(raw, fmt.Sprintf("%s-%04d", l.name, i), 0)
		if err != nil {
			return nil, err
		}
		if _, _, err := headers.Create(ctx, h); err != nil {
			return nil, err
		}
		a := newAuthor(h.ID, h.Raw)
		l.authors = append(l.authors, a)
		for nodes := 0; nodes < n; {
			const per = 5
			for seq := a.next; seq < a.next+per; seq++ {
				if events.SurfaceKind(cycle[int(seq)%len(cycle)].typ).OnSurface() {
					nodes++
				}
			}
			if err := l.publish(r.js, a.commit(per, dataBytes)); err != nil {
				return nil, err
			}
		}
	}
	if err := l.finish(ctx, r.js); err != nil {
		return nil, err
	}
	if _, err := r.projectOnce(ctx, l, nil); err != nil {
		return nil, err
	}
	return r.openShelf(ctx, l, n)
}

// openShelf puts together what serves a log that was projected, as `projector serve` does.
func (r *bed) openShelf(ctx context.Context, l *recorded, n int) (*shelf, error) {
	headers, err := l.journal.OpenHeaders(ctx)
	if err != nil {
		return nil, err
	}
	buckets, err := projection.OpenBuckets(ctx, l.journal.JetStream(), 1)
	if err != nil {
		return nil, err
	}
	heads := projection.NewHeads()
	s := &shelf{size: n, reader: projection.NewReader(l.journal, headers, buckets, heads)}
	if s.kv, err = r.js.KeyValue(ctx, snapshot.Bucket); err != nil {
		return nil, err
	}
	w := projection.NewWorker(l.journal, buckets, heads, projection.Config{Logger: quiet}) // only its counters are asked for
	web := platform.Serve(platform.HTTPConfig{Listen: "127.0.0.1:0", Handler: api.NewProjector(s.reader, w,
		projection.NewHubs(s.reader, r.Conns.Publish[0]), audit.New(l.journal, headers, buckets), api.ProjectorConfig{})})
	if err := web.Start(ctx); err != nil {
		return nil, err
	}
	r.OnStop(web.Stop)
	r.OnStop(func(context.Context) error { s.hangUp(); return nil })
	s.addr = strings.TrimPrefix(web.URL(), "http://")
	for _, a := range l.authors {
		snap, _, err := buckets.Snapshots.Load(ctx, a.session, 0)
		if err != nil {
			return nil, err
		}
		t := &target{session: a.session, keys: []string{snapshot.HeadKey(a.session)},
			request: fmt.Appendf(nil, "GET /v1/sessions/%s/messages HTTP/1.1\r\nHost: %s\r\n\r\n", a.session, s.addr)}
		for _, p := range snap.Pages() {
			t.keys = append(t.keys, snapshot.PageKey(events.Token(a.session), p))
		}
		s.targets = append(s.targets, t)
	}
	return s, nil
}

// readRaw is the baseline: the values of the same keys, by a client that knows them beforehand.
func (s *shelf) readRaw(ctx context.Context, _ int, t *target) error {
	for _, k := range t.keys {
		e, err := s.kv.Get(ctx, k)
		if err != nil {
			return fmt.Errorf("%s: %w", k, err)
		}
		if len(e.Value()) == 0 {
			return fmt.Errorf("%s is empty", k)
		}
	}
	return nil
}

// readGo reads the messages in this process and writes them as they are served.
func (s *shelf) readGo(ctx context.Context, _ int, t *target) error {
	v, err := s.reader.View(ctx, t.session, projection.Want{MinSeq: events.NoSeq})
	if err != nil {
		return err
	}
	if n := v.Surface.Len(); n < s.size {
		return fmt.Errorf("session %s: expected %d messages, found %d", t.session, s.size, n)
	}
	return api.WriteMessages(io.Discard, v)
}

// webConn is a reader's connection to the HTTP API. The request is written as bytes that were
// made beforehand, and not by http.Client, whose share of the work would be large: what is to
// be measured is the server.
type webConn struct {
	conn    net.Conn
	answers *bufio.Reader
}

func (s *shelf) readHTTP(ctx context.Context, i int, t *target) error {
	c := s.conns[i]
	if c == nil {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.addr)
		if err != nil {
			return err
		}
		c = &webConn{conn, bufio.NewReaderSize(conn, 64<<10)}
		s.conns[i] = c
	}
	if _, err := c.conn.Write(t.request); err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.answers, nil)
	if err != nil {
		return err
	}
	n, err := io.Copy(io.Discard, resp.Body)
	if err == nil && (resp.StatusCode != http.StatusOK || n < int64(s.size)) {
		err = fmt.Errorf("session %s: answer %s with %d bytes", t.session, resp.Status, n)
	}
	return err
}

func (s *shelf) hangUp() {
	for _, c := range s.conns {
		if c != nil {
			c.conn.Close()
		}
	}
	s.conns = nil
}

// reads is one measurement.
type reads struct {
	times  []time.Duration // ascending
	cpuPer float64         // µs of processor time a read, of the whole process
}

func (m *reads) quantile(q float64) time.Duration {
	return m.times[min(int(q*float64(len(m.times))), len(m.times)-1)].Round(time.Microsecond)
}

// measure lets readers read one session after another for a time. What was begun is finished.
func (s *shelf) measure(ctx context.Context, readers int, d time.Duration, read func(context.Context, int, *target) error) (*reads, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	if len(s.conns) < readers {
		s.conns = append(s.conns, make([]*webConn, readers-len(s.conns))...)
	}
	times := make([][]time.Duration, readers)
	runtime.GC() // so that nobody pays for the garbage of the one before
	cpu, end := rig.CPUTime(), time.Now().Add(d)
	var wg sync.WaitGroup
	for i := range readers {
		wg.Go(func() {
			for k := i; ctx.Err() == nil; k += 7 { // not all in step
				start := time.Now()
				if start.After(end) && len(times[i]) > 0 {
					return
				}
				if err := read(ctx, i, s.targets[k%len(s.targets)]); err != nil {
					cancel(err)
					return
				}
				times[i] = append(times[i], time.Since(start))
			}
		})
	}
	wg.Wait()
	cpu = rig.CPUTime() - cpu
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return nil, err
	} else if err != nil {
		return nil, err
	}
	m := &reads{times: slices.Concat(times...)}
	slices.Sort(m.times)
	m.cpuPer = rig.Us(cpu) / float64(len(m.times))
	return m, nil
}

// read measures reads of every size in turns with the baseline.
func (b *bench) read(ctx context.Context, r *bed) ([]line, error) {
	var out []line
	worst := map[string]*line{}
	for _, n := range readSizes {
		b.say("reads of %d messages: making sessions", n)
		s, err := r.newShelf(ctx, n)
		if err != nil {
			return nil, err
		}
		b.say("reads of %d messages: %d rounds", n, b.Rounds)
		got := map[string][]*reads{}
		cases := []struct {
			name string
			read func(context.Context, int, *target) error
		}{{"raw", s.readRaw}, {"read/go", s.readGo}, {"read/http", s.readHTTP}}
		for round := range b.Rounds + 1 {
			for _, c := range cases {
				m, err := s.measure(ctx, b.Readers, b.Time, c.read)
				if err != nil {
					return nil, fmt.Errorf("%s of %d messages: %w", c.name, n, err)
				}
				if round > 0 { // the first warms up
					got[c.name] = append(got[c.name], m)
				}
			}
		}
		s.hangUp()
		at := func(name string, q float64) float64 {
			return rig.Median(got[name], func(m *reads) float64 { return rig.Us(m.quantile(q)) })
		}
		cpu := func(name string) float64 { return rig.Median(got[name], func(m *reads) float64 { return m.cpuPer }) }
		for _, c := range cases[1:] {
			l := line{
				Name: fmt.Sprintf("%s/%d", c.name, n), Unit: "µs",
				Value: rig.Round(at(c.name, 0.5), 1), Baseline: rig.Round(at("raw", 0.5), 1), Ratio: rig.Round(at(c.name, 0.5)/at("raw", 0.5), 1000),
				P99: rig.Round(at(c.name, 0.99), 1), P99Baseline: rig.Round(at("raw", 0.99), 1), P99Ratio: rig.Round(at(c.name, 0.99)/at("raw", 0.99), 1000),
				CPURatio: rig.Round(cpu(c.name)/cpu("raw"), 1000), us: cpu(c.name),
				about: fmt.Sprintf("%d sessions of %d keys each", len(s.targets), len(s.targets[0].keys)),
			}
			out = append(out, l)
			if w := worst[c.name]; w == nil || l.Ratio > w.Ratio {
				worst[c.name] = &l
			}
		}
	}
	for _, name := range []string{"read/go", "read/http"} {
		l := *worst[name]
		l.about = "the size with the worst ratio, " + l.Name
		l.Name = name
		out = append(out, l)
	}
	return out, nil
}
