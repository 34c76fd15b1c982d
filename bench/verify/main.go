// Command verify measures `projector verify --all` against reading the same log with one bare
// filtered consumer a partition. Both run in turns on the same server, each first in every other
// round, and the median of the ratios is what counts. It starts all that it needs, and leaves
// nothing behind.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/alecthomas/kong"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/bench/rig"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

// bench is what the command line asks for.
type bench struct {
	Events    int    `help:"Events of the log." default:"200000"`
	Length    int    `help:"Events of a session." default:"200"`
	PerCommit int    `help:"Events of a commit." default:"1"`
	Text      int    `help:"Bytes of a message's text." default:"200"`
	Rounds    int    `help:"Rounds; each runs the baseline and verify, in turns which of them first." default:"5"`
	Workers   int    `help:"Partitions of the log that are verified at a time, at most." default:"8"`
	LogOnly   bool   `help:"Leave heads and pages out: then nothing is projected."`
	JSON      bool   `help:"Print one JSON object a line." env:"BENCH_JSON"`
	Projector string `help:"Program that verifies once more, in a process of its own, for the most memory that it takes." placeholder:"FILE"`
	Profile   string `help:"Write profiles of the last round: of CPU time to FILE.verify and FILE.baseline, of allocations since the start to FILE.allocs." placeholder:"FILE"`

	out io.Writer
}

const stopWithin = 30 * time.Second

func main() {
	os.Exit(platform.Main(context.Background(), func(ctx context.Context) error {
		b := bench{out: os.Stdout}
		k, err := kong.New(&b, kong.Name("verify"), kong.Description("Measures verify --all beside 32 bare filtered consumers of the same log."))
		if err != nil {
			return err
		}
		if _, err := k.Parse(os.Args[1:]); err != nil {
			return &platform.ExitError{Code: platform.ExitUsage, Err: err}
		}
		slog.SetDefault(slog.New(slog.DiscardHandler))
		if b.Rounds < 1 {
			return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--rounds: expected at least 1, found %d", b.Rounds)}
		}
		return b.run(ctx)
	}))
}

func (b *bench) run(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp("", "palimpsest-bench-verify-")
	if err != nil {
		return err
	}
	var g platform.Group
	defer func() {
		stop, cancel := context.WithTimeout(context.Background(), stopWithin)
		defer cancel()
		err = errors.Join(err, g.Stop(stop), os.RemoveAll(dir))
	}()
	server, err := platform.StartServer(platform.EmbedConfig{DataDir: dir, Listen: "127.0.0.1:0"})
	if err != nil {
		return err
	}
	g.Add("server", platform.StopFunc(server.Shutdown))
	conns, err := platform.ConnectAll(ctx, platform.ConnsConfig{ConnConfig: platform.ConnConfig{URL: server.ClientURL(), Name: "bench"}})
	if err != nil {
		return err
	}
	g.Add("conns", platform.StopFunc(conns.Close))
	if err := g.Start(ctx); err != nil {
		return err
	}
	j, err := journal.Open(ctx, journal.Conns{Publish: conns.Publish, Read: conns.KV, Made: conns.Made}, journal.Config{}, events.DefaultVocabulary())
	if err != nil {
		return err
	}
	headers, err := j.OpenHeaders(ctx)
	if err != nil {
		return err
	}
	buckets, err := projection.OpenBuckets(ctx, j.JetStream(), 1)
	if err != nil {
		return err
	}
	if err := b.fill(ctx, j, headers); err != nil {
		return err
	}
	if !b.LogOnly {
		if err := b.project(ctx, j, buckets); err != nil {
			return err
		}
	}
	if b.Projector != "" {
		if err := b.process(ctx, server.ClientURL()); err != nil {
			return err
		}
	}
	a := audit.New(j, headers, buckets)
	cases := []func() (int64, error){
		func() (int64, error) { return consume(ctx, j) },
		func() (int64, error) {
			rep, err := a.All(ctx, audit.Options{LogOnly: b.LogOnly, Parallel: b.Workers})
			if err != nil {
				return 0, err
			}
			if !rep.OK() {
				return 0, fmt.Errorf("%d findings, the first: %v", len(rep.Findings), rep.Findings[0])
			}
			return rep.Events, nil
		},
	}
	var ratios, byCPU []float64
	for round := range b.Rounds {
		var results [2]result
		for i := range results {
			which := (round + i) % 2
			if results[which], err = b.measure([...]string{"baseline", "verify"}[which], round == b.Rounds-1, cases[which]); err != nil {
				return err
			}
		}
		base, ver := results[0], results[1]
		if base.events == 0 || ver.events != int64(b.Events) {
			return fmt.Errorf("expected %d events, the baseline read %d messages and verify %d events", b.Events, base.events, ver.events)
		}
		base.events = ver.events // the same events, in messages of several
		ratios, byCPU = append(ratios, ver.perSecond()/base.perSecond()), append(byCPU, ver.perCPUSecond()/base.perCPUSecond())
		if err := b.report(round, base, ver); err != nil {
			return err
		}
	}
	if b.Profile != "" {
		if err := writeProfile("allocs", b.Profile+".allocs"); err != nil {
			return err
		}
	}
	return b.summary(ratios, byCPU)
}

func writeProfile(name, path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(pprof.Lookup(name).WriteTo(f, 0), f.Close())
}

// result is one measurement.
type result struct {
	events int64
	wall   time.Duration
	cpu    time.Duration // of this process, which holds the server too
	heap   uint64        // most bytes in use, sampled
}

func (r result) perSecond() float64    { return float64(r.events) / r.wall.Seconds() }
func (r result) perCPUSecond() float64 { return float64(r.events) / r.cpu.Seconds() }

func (b *bench) measure(name string, last bool, f func() (int64, error)) (r result, err error) {
	debug.FreeOSMemory()
	if last && b.Profile != "" {
		out, err := os.Create(b.Profile + "." + name)
		if err != nil {
			return r, err
		}
		defer func() { err = errors.Join(err, out.Close()) }()
		if err := pprof.StartCPUProfile(out); err != nil {
			return r, err
		}
		defer pprof.StopCPUProfile()
	}
	stop, sampled := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(sampled)
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			r.heap = max(r.heap, m.HeapInuse)
			select {
			case <-tick.C:
			case <-stop:
				return
			}
		}
	}()
	cpu, began := rig.CPUTime(), time.Now()
	n, err := f()
	r.events, r.wall, r.cpu = n, time.Since(began), rig.CPUTime()-cpu
	close(stop)
	<-sampled
	return r, err
}

func (b *bench) report(round int, base, ver result) error {
	if b.JSON {
		return json.NewEncoder(b.out).Encode(map[string]any{
			"round": round, "events": ver.events, "baselinePerSecond": base.perSecond(), "verifyPerSecond": ver.perSecond(),
			"ratio": ver.perSecond() / base.perSecond(), "cpuRatio": ver.perCPUSecond() / base.perCPUSecond(), "heapBytes": ver.heap,
		})
	}
	_, err := fmt.Fprintf(b.out, "round %d: %d events   32 bare consumers %8.0f/s   verify %8.0f/s   ratio %.2f, by CPU time %.2f   heap %d MiB (baseline %d MiB)\n",
		round, ver.events, base.perSecond(), ver.perSecond(), ver.perSecond()/base.perSecond(), ver.perCPUSecond()/base.perCPUSecond(), ver.heap>>20, base.heap>>20)
	return err
}

// summary prints the medians of all rounds.
func (b *bench) summary(ratios, byCPU []float64) error {
	r, c := median(ratios), median(byCPU)
	if b.JSON {
		return json.NewEncoder(b.out).Encode(map[string]any{"rounds": len(ratios), "medianRatio": r, "medianCPURatio": c})
	}
	_, err := fmt.Fprintf(b.out, "median of %d rounds: ratio %.2f (%.2f to %.2f), by CPU time %.2f\n", len(ratios), r, slices.Min(ratios), slices.Max(ratios), c)
	return err
}

func median(v []float64) float64 {
	s := slices.Sorted(slices.Values(v))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// fill writes the log: the sessions go on in turns, as those of a fleet do.
func (b *bench) fill(ctx context.Context, j *journal.Journal, headers *journal.Headers) error {
	js, err := jetstream.New(j.JetStream().Conn(), jetstream.WithPublishAsyncMaxPending(1024))
	if err != nil {
		return err
	}
	type writer struct {
		id            string
		next          events.Seq
		digest, chain events.Digest
	}
	var ws []*writer
	for i := range (b.Events + b.Length - 1) / b.Length {
		w := &writer{id: fmt.Sprintf("session-%06d", i)}
		h, err := events.ParseHeader([]byte("{}"), w.id, 1767225600000)
		if err != nil {
			return err
		}
		if _, _, err := headers.Create(ctx, h); err != nil {
			return err
		}
		w.digest, w.chain = events.SeedDigest(w.id), events.SeedChain(w.id, h.Raw)
		ws = append(ws, w)
	}
	text := strings.Repeat("x", b.Text)
	left := b.Events
	for n := 0; left > 0; n++ {
		w := ws[n%len(ws)]
		c := &events.Commit{ID: fmt.Sprintf("%s-%d", w.id, w.next), Session: w.id, Actor: events.NoActor, Time: "2026-01-01T00:00:00.000Z", Format: events.Format3, First: w.next}
		for range min(b.PerCommit, left, b.Length-int(w.next)) {
			line := fmt.Appendf(nil, `{"type":"user/message","seq":%d,"time":1767225604000,"surfaceOp":"append","data":{"id":"u%d","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"%s"}]}}`, w.next, w.next, text)
			w.digest = w.digest.Next(line)
			c.Body = append(append(c.Body, line...), '\n')
			w.next++
			left--
		}
		c.Last, c.Digest = w.next-1, w.digest
		c.Chain = w.chain.NextChain(c)
		w.chain = c.Chain
		if _, err := js.PublishMsgAsync(message(j, c), jetstream.WithStallWait(time.Minute)); err != nil {
			return err
		}
	}
	select {
	case <-js.PublishAsyncComplete():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// project has a worker make the heads, and stops it again.
func (b *bench) project(ctx context.Context, j *journal.Journal, buckets *projection.Buckets) error {
	// Heads are written seldom: how they came about is not measured.
	w := projection.NewWorker(j, buckets, projection.NewHeads(), projection.Config{FlushAfter: 5 * time.Second, FlushBehind: time.Minute, FlushEvents: 1 << 30, UnflushedBytes: 1 << 30})
	if err := w.Start(ctx); err != nil {
		return err
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for done := false; !done; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		done = true
		for _, p := range w.Status(ctx) {
			done = done && p.Lag != nil && *p.Lag == 0 && p.OldestUnflushedMs == 0
		}
	}
	stop, cancel := context.WithTimeout(ctx, stopWithin)
	defer cancel()
	return w.Stop(stop)
}

// consume reads the log with one ordered consumer a partition, and looks at nothing.
func consume(ctx context.Context, j *journal.Journal) (int64, error) {
	info, err := j.Info(ctx)
	if err != nil {
		return 0, err
	}
	var n atomic.Int64
	done := make(chan struct{})
	want := int64(info.State.Msgs)
	for p := range j.Partitions() {
		cons, err := j.JetStream().OrderedConsumer(ctx, j.Config().Stream, jetstream.OrderedConsumerConfig{
			FilterSubjects: []string{fmt.Sprintf("%s.%d.*", j.Config().Prefix, p)}, InactiveThreshold: 30 * time.Second,
		})
		if err != nil {
			return 0, err
		}
		run, err := cons.Consume(func(jetstream.Msg) {
			if n.Add(1) == want {
				close(done)
			}
		}, jetstream.PullMaxMessages(256))
		if err != nil {
			return 0, err
		}
		defer run.Stop()
	}
	select {
	case <-done:
		return n.Load(), nil
	case <-ctx.Done():
		return n.Load(), ctx.Err()
	}
}

// message is a commit as an appender publishes it.
func message(j *journal.Journal, c *events.Commit) *nats.Msg {
	return &nats.Msg{Subject: j.Subject(c.Session), Header: c.Header(), Data: c.Body}
}
