// Package doctor looks at a deployment from where a program stands: connection, permissions,
// stream and buckets, replicas, versions, clocks and disk. It changes nothing, and says of
// everything that is off how to mend it.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/snapshot"
)

// Status is how bad a finding is.
type Status string

// The statuses, in rising order.
const (
	OK   Status = "ok"
	Warn Status = "warn" // it works, but not as well or as safely as it should
	Fail Status = "fail" // the program does not work like this
)

// Finding is what one check found.
type Finding struct {
	Check  string `json:"check"`
	Status Status `json:"status"`
	Found  string `json:"found"`
	Fix    string `json:"fix,omitempty"`
}

// Role is what a program does at NATS.
type Role string

// The roles with checks of their own.
const (
	Appender  Role = "appender"
	Projector Role = "projector"
)

// Config says what to expect.
type Config struct {
	Role Role
	// Journal is the log's configuration as the program would use it.
	Journal journal.Config
	// Vocabulary is what the program knows.
	Vocabulary *events.Vocabulary
	// Buckets that the program needs beside HEADERS, GENERATIONS and the bucket of snapshots
	// that serves.
	Buckets []string
	// Streams that are looked at where somebody uses them, and are nowhere else missed.
	Streams []string
	// Timeout bounds each question to the server. Defaults to 3 s.
	Timeout time.Duration
}

// Versions of nats-server that matter.
const (
	oldest   = "2.11" // per-key TTL of leases, batched direct gets
	maxClock = 2 * time.Second
)

// exam is one examination.
type exam struct {
	cfg      Config
	nc       *nats.Conn
	js       jetstream.JetStream
	findings []Finding

	mu      sync.Mutex // guards refused
	refused []string   // permission violations, newest last
}

// Run examines the deployment over a connection whose error handler it takes over.
func Run(ctx context.Context, nc *nats.Conn, cfg Config) ([]Finding, error) {
	cfg.Journal = cfg.Journal.WithDefaults()
	if cfg.Timeout == 0 {
		cfg.Timeout = 3 * time.Second
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	ex := &exam{cfg: cfg, nc: nc, js: js}
	before := nc.Opts.AsyncErrorCB
	nc.SetErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		ex.mu.Lock()
		defer ex.mu.Unlock()
		ex.refused = append(ex.refused, err.Error())
	})
	defer nc.SetErrorHandler(before)
	ex.program()
	ex.connection()
	if ex.account(ctx) {
		ex.log(ctx)
		serving := ex.serving(ctx)
		for _, b := range append([]string{journal.HeadersBucket, snapshot.GenerationsBucket, serving}, cfg.Buckets...) {
			ex.bucket(ctx, b)
		}
		for _, s := range cfg.Streams {
			ex.beside(ctx, s)
		}
		ex.permissions(ctx, serving)
	}
	return ex.findings, nil
}

// Worst is the worst status of findings.
func Worst(fs []Finding) Status {
	worst := OK
	for _, f := range fs {
		if f.Status == Fail || f.Status == Warn && worst == OK {
			worst = f.Status
		}
	}
	return worst
}

func (ex *exam) say(check string, s Status, found, fix string) {
	if s == OK {
		fix = ""
	}
	ex.findings = append(ex.findings, Finding{check, s, found, fix})
}

func (ex *exam) program() {
	version := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = info.Main.Version + " with " + info.GoVersion
	}
	ex.say("program", OK, version, "")
}

func (ex *exam) connection() {
	rtt, err := ex.nc.RTT()
	for range 4 { // the best of five: one may meet a machine that is busy
		if again, rerr := ex.nc.RTT(); rerr == nil {
			rtt = min(rtt, again)
		}
	}
	if err != nil {
		ex.say("connection", Fail, err.Error(), "see that the server runs and is reached")
		return
	}
	s, fix := OK, ""
	if rtt > 20*time.Millisecond {
		s, fix = Warn, "every commit waits for a round trip and more: move the program closer to the servers"
	}
	ex.say("connection", s, fmt.Sprintf("server %s, cluster %q, round trip %s", ex.nc.ConnectedServerName(), ex.nc.ConnectedClusterName(), rtt.Round(10*time.Microsecond)), fix)

	version := ex.nc.ConnectedServerVersion()
	s = OK
	if older(version, oldest) {
		s = Fail
	}
	ex.say("server version", s, version, "update nats-server to "+oldest+" or newer: leases need keys that expire")

	payload := ex.nc.MaxPayload()
	s = OK
	if payload < int64(ex.cfg.Journal.MaxMsgSize) {
		s = Warn
	}
	ex.say("max_payload", s, fmt.Sprintf("%d bytes", payload), fmt.Sprintf("larger events are refused: set max_payload to %d in the server's configuration", ex.cfg.Journal.MaxMsgSize+64<<10))

	_, tls := ex.nc.TLSConnectionState()
	s = OK
	if host := ex.nc.ConnectedAddr(); tls != nil && !strings.HasPrefix(host, "127.") && !strings.HasPrefix(host, "[::1]") {
		s = Warn
	}
	ex.say("transport", s, map[bool]string{true: "TLS", false: "no TLS"}[tls == nil], "give the servers certificates (tls { … }) and the program --tls-ca: sessions pass in the clear")
}

// older compares versions such as 2.11.3 by their first two numbers.
func older(version, than string) bool {
	number := func(v string) int {
		parts := strings.SplitN(v+".0", ".", 3)
		major, err1 := strconv.Atoi(parts[0])
		minor, err2 := strconv.Atoi(parts[1])
		if err1 != nil || err2 != nil {
			return 0
		}
		return major*1000 + minor
	}
	return number(version) < number(than)
}

// account reports whether JetStream answers.
func (ex *exam) account(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, ex.cfg.Timeout)
	defer cancel()
	info, err := ex.js.AccountInfo(ctx)
	if err != nil {
		ex.noJetStream(err)
		return false
	}
	used, most := info.Store, info.Limits.MaxStore
	found := fmt.Sprintf("%d bytes stored, %d streams, %d consumers", used, info.Streams, info.Consumers)
	s, fix := OK, ""
	if most > 0 {
		found += fmt.Sprintf(", at most %d bytes", most)
		if float64(used) > 0.85*float64(most) {
			s, fix = Warn, "the account's store is nearly full, and a full one refuses appends: raise max_file or the account's limit, or move sessions out (docs/operations.md)"
		}
	}
	ex.say("JetStream", s, found, fix)
	return true
}

// noJetStream says why JetStream did not answer. A server that has it and is in a cluster without a
// meta leader says so once it has run for a while, and nothing before.
func (ex *exam) noJetStream(err error) {
	const off = "turn JetStream on in the server (jetstream { store_dir: … })"
	const leaderless = "the cluster has no meta leader: a majority of its servers is away, or they have just started; bring them back (docs/operations.md, lost quorum) and ask again"
	found, refused := ex.why(err)
	var api *jetstream.APIError
	errors.As(err, &api)
	switch {
	case refused:
		ex.say("JetStream", Fail, found, "allow the user $JS.API.INFO")
	case errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount):
		ex.say("JetStream", Fail, found, "turn JetStream on for the account of this user")
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, nats.ErrNoResponders):
		ex.say("JetStream", Fail, found, off)
	case api != nil && api.Code == 503:
		ex.say("JetStream", Fail, found, leaderless)
	case ex.nc.ConnectedClusterName() != "":
		ex.say("JetStream", Fail, fmt.Sprintf("%s, from cluster %q", found, ex.nc.ConnectedClusterName()), leaderless)
	default:
		ex.say("JetStream", Fail, found, off+", and see that it is not overloaded")
	}
}

// stream reads a stream's state; nil when there is none that can be read.
func (ex *exam) stream(ctx context.Context, check, name string) *jetstream.StreamInfo {
	ctx, cancel := context.WithTimeout(ctx, ex.cfg.Timeout)
	defer cancel()
	s, err := ex.js.Stream(ctx, name)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		ex.say(check, Warn, "not there yet", "the first program that starts creates it; give --replicas 3 on a cluster")
		return nil
	case err != nil:
		found, _ := ex.why(err)
		ex.say(check, Fail, found, "see that a majority of the servers runs, and that the user may ask $JS.API.STREAM.INFO."+name)
		return nil
	}
	return s.CachedInfo()
}

func (ex *exam) log(ctx context.Context) {
	name := ex.cfg.Journal.Stream
	check := "stream " + name
	begun := time.Now()
	info := ex.stream(ctx, check, name)
	if info == nil {
		return
	}
	took := time.Since(begun)
	ex.say(check, OK, fmt.Sprintf("%d commits, %d bytes, %d sessions", info.State.Msgs, info.State.Bytes, info.State.NumSubjects), "")
	c := info.Config
	for _, w := range []struct {
		bad        bool
		status     Status
		found, fix string
	}{
		{c.Storage != jetstream.FileStorage, Fail, "its store is in memory", "create it anew on a file store: what is in memory is gone at a restart"},
		{c.Retention != jetstream.LimitsPolicy, Fail, fmt.Sprintf("its retention is %v", c.Retention), "set retention to limits: readers must not take commits away"},
		{c.MaxAge > 0, Fail, fmt.Sprintf("commits are dropped after %v", c.MaxAge), "set max_age to 0: a log without its beginning cannot be folded, verified or exported"},
		{c.MaxMsgsPerSubject > 0, Fail, fmt.Sprintf("a session keeps its last %d commits", c.MaxMsgsPerSubject), "set max_msgs_per_subject to -1: a log without its beginning cannot be folded, verified or exported"},
		{c.Discard != jetstream.DiscardNew && (c.MaxBytes > 0 || c.MaxMsgs > 0), Fail, "when it is full, the oldest commits are dropped", "set discard to new: a full stream must refuse appends"},
		{c.Discard != jetstream.DiscardNew, Warn, "its discard policy is old", "set discard to new, before anybody sets a limit"},
		{!c.AllowDirect, Warn, "direct gets are off", "set allow_direct: reads all go to the leader otherwise"},
		{c.RePublish != nil, Warn, "it publishes every commit again", "remove republish: it costs 14 to 20 % of publishing"},
		{c.NoAck, Fail, "it sends no acks", "set no_ack to false: nothing would ever be known to be committed"},
		{c.Duplicates < 30*time.Second, Warn, fmt.Sprintf("its duplicate window is %v", c.Duplicates), "set duplicate_window to 2m: a retry relies on it for as long as it may take"},
		{c.MaxMsgSize > 0 && int(c.MaxMsgSize) < ex.cfg.Journal.MaxMsgSize, Warn, fmt.Sprintf("its largest message has %d bytes", c.MaxMsgSize), "raise max_msg_size: larger events are refused"},
		{c.Metadata["palimpsest.partitions"] != strconv.Itoa(ex.cfg.Journal.Partitions), Fail, fmt.Sprintf("it has %q partitions, this program is set to %d", c.Metadata["palimpsest.partitions"], ex.cfg.Journal.Partitions), "give --partitions as the stream has it: the number is fixed at creation"},
	} {
		if w.bad {
			ex.say(check+": settings", w.status, w.found, w.fix)
		}
	}
	if ex.cfg.Vocabulary != nil {
		if missing := ex.cfg.Vocabulary.Missing(strings.Fields(c.Metadata["palimpsest.vocabulary"])); missing != nil {
			ex.say("vocabulary", Fail, "this program does not know "+strings.Join(missing, ", "), "give them with --event-types, or use the version of the program that added them")
		} else {
			ex.say("vocabulary", OK, "this program knows every type that the log may hold", "")
		}
	}
	ex.replicas(check, info)
	ex.clock(info.TimeStamp, begun, took)
}

func (ex *exam) replicas(check string, info *jetstream.StreamInfo) {
	if info.Cluster == nil || info.Cluster.Name == "" {
		s := OK
		if info.Config.Replicas > 1 {
			s = Warn
		}
		ex.say(check+": replicas", s, "a single server", "")
		return
	}
	s, fix := OK, ""
	found := fmt.Sprintf("%d, leader %s", info.Config.Replicas, info.Cluster.Leader)
	switch {
	case info.Config.Replicas < 3:
		s, fix = Warn, fmt.Sprintf("one server lost is the data lost: nats stream edit %s --replicas 3", info.Config.Name)
	case info.Cluster.Leader == "":
		s, found, fix = Fail, "no leader", "a majority of its servers is away: bring them back (docs/operations.md, lost quorum)"
	}
	for _, p := range info.Cluster.Replicas {
		if p.Offline || !p.Current {
			if s == OK {
				s = Warn
			}
			found += fmt.Sprintf(", %s %s", p.Name, map[bool]string{true: "is away", false: fmt.Sprintf("is %d behind", p.Lag)}[p.Offline])
			fix = "bring the server back or let it catch up; until then one more lost is a stop"
		}
	}
	ex.say(check+": replicas", s, found, fix)
}

func (ex *exam) clock(server, begun time.Time, took time.Duration) {
	if server.IsZero() {
		return
	}
	// The server read its clock somewhere within the question.
	off := server.Sub(begun.Add(took / 2))
	s := OK
	if off.Abs() > maxClock+took/2 {
		s = Warn
	}
	ex.say("clock", s, fmt.Sprintf("%s apart from the server's", off.Abs().Round(time.Millisecond)), "run a time service on both machines: commits carry the appender's time, and tokens end by it")
}

func (ex *exam) bucket(ctx context.Context, name string) {
	check := "bucket " + name
	info := ex.stream(ctx, check, "KV_"+name)
	if info == nil {
		return
	}
	c := info.Config
	ex.say(check, OK, fmt.Sprintf("%d keys, %d bytes", info.State.NumSubjects, info.State.Bytes), "")
	for _, w := range []struct {
		bad        bool
		status     Status
		found, fix string
	}{
		{c.Storage != jetstream.FileStorage, Fail, "its store is in memory", "create it anew on a file store"},
		{c.MaxAge > 0, Fail, fmt.Sprintf("its keys are dropped after %v", c.MaxAge), "set max_age to 0: what it holds is valid for ever"},
		{c.MaxMsgsPerSubject > 1 && name != snapshot.GenerationsBucket, Warn, fmt.Sprintf("it keeps %d values of a key", c.MaxMsgsPerSubject), "set its history to 1: old values are never read"},
		{c.MaxBytes > 0, Warn, fmt.Sprintf("it may have at most %d bytes", c.MaxBytes), "see that it is enough, or set max_bytes to -1: a full bucket stops projection"},
	} {
		if w.bad {
			ex.say(check+": settings", w.status, w.found, w.fix)
		}
	}
	ex.replicas(check, info)
}

// serving is the bucket whose snapshots serve.
func (ex *exam) serving(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, ex.cfg.Timeout)
	defer cancel()
	name, err := snapshot.Serving(ctx, ex.js)
	if err != nil {
		found, _ := ex.why(err)
		ex.say("generation", Fail, found, "see that the user may read bucket "+snapshot.GenerationsBucket+"; where its value is damaged, restore it, or put back what `projector rebuild --list` has shown before")
		return snapshot.Bucket
	}
	ex.say("generation", OK, "snapshots are served from bucket "+name, "")
	return name
}

// beside looks at a stream that not everybody uses.
func (ex *exam) beside(ctx context.Context, name string) {
	check := "stream " + name
	ctx, cancel := context.WithTimeout(ctx, ex.cfg.Timeout)
	defer cancel()
	s, err := ex.js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return
	}
	if err != nil {
		found, _ := ex.why(err)
		ex.say(check, Fail, found, "see that the user may ask $JS.API.STREAM.INFO."+name)
		return
	}
	info := s.CachedInfo()
	ex.say(check, OK, fmt.Sprintf("%d messages, %d bytes, %d sessions", info.State.Msgs, info.State.Bytes, info.State.NumSubjects), "")
	if c := info.Config; c.Storage != jetstream.FileStorage || c.MaxAge > 0 || !c.DenyDelete {
		ex.say(check+": settings", Fail, fmt.Sprintf("storage %v, max_age %v, deny_delete %v", c.Storage, c.MaxAge, c.DenyDelete), "it is evidence: keep it in a file store, without max_age and with deny_delete, which is set when it is created")
	}
	ex.replicas(check, info)
}

// permissions asks for what the role must be able to do, in such a way that nothing is stored:
// a publish that expects another stream is refused by JetStream, and one that is not allowed
// does not even come there.
func (ex *exam) permissions(ctx context.Context, serving string) {
	subjects := map[string]string{"sessions": ex.cfg.Journal.Prefix + ".0.doctor", "headers": "$KV." + journal.HeadersBucket + ".doctor"}
	if ex.cfg.Role == Projector {
		subjects = map[string]string{}
		for _, b := range append([]string{serving}, ex.cfg.Buckets...) {
			subjects[b] = "$KV." + b + ".doctor"
		}
	}
	bad := false
	for _, subject := range subjects {
		rctx, cancel := context.WithTimeout(ctx, ex.cfg.Timeout)
		m := nats.NewMsg(subject)
		m.Header.Set(nats.ExpectedStreamHdr, "no-such-stream")
		_, err := ex.nc.RequestMsgWithContext(rctx, m)
		cancel()
		if errors.Is(err, nats.ErrNoResponders) {
			continue // there is no such stream or bucket yet, which was said
		}
		if err != nil {
			bad = true
			found, _ := ex.why(err)
			ex.say("permissions", Fail, fmt.Sprintf("may not publish to %s: %s", subject, found), fmt.Sprintf("give the user the permissions in deploy/nats/%s.conf, and the program their --inbox-prefix", ex.cfg.Role))
		}
	}
	if !bad {
		ex.say("permissions", OK, "may write what a "+string(ex.cfg.Role)+" writes", "")
	}
}

// why is what the server refused last, where it did, and otherwise the error's text.
func (ex *exam) why(err error) (text string, refused bool) {
	ex.mu.Lock()
	defer ex.mu.Unlock()
	if n := len(ex.refused); n > 0 {
		text = ex.refused[n-1]
		ex.refused = nil
		return text, true
	}
	return err.Error(), false
}
