// Package nats_test runs what each role does against a server with the permissions that are
// delivered, and tries what it must not be able to do.
package nats_test

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/micro"
	"github.com/nats-io/nkeys"
	"go.uber.org/goleak"

	"palimpsest/internal/api"
	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/erasure"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/snapshot"
)

func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	goleak.VerifyTestMain(m)
}

// environment is what server.conf needs.
var environment = map[string]string{
	"SERVER_NAME": "one", "APPENDER_PASSWORD": "secret-appender", "PROJECTOR_PASSWORD": "secret-projector",
	"READER_PASSWORD": "secret-reader", "OPERATOR_PASSWORD": "secret-operator",
}

// start runs a server with the configuration that is delivered, on a free port.
func start(t *testing.T) (url string, users []*server.User) {
	t.Helper()
	for name, value := range environment {
		t.Setenv(name, value)
	}
	opts, err := server.ProcessConfigFile("server.conf")
	if err != nil {
		t.Fatal(err)
	}
	opts.Host, opts.Port, opts.HTTPPort, opts.StoreDir = "127.0.0.1", server.RANDOM_PORT, 0, t.TempDir()
	opts.NoSigs, opts.NoLog = true, true
	ns, err := server.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	t.Cleanup(func() {
		ns.Shutdown()
		ns.WaitForShutdown()
	})
	if !ns.ReadyForConnections(journaltest.Deadline) {
		t.Fatal("the server does not accept connections")
	}
	return ns.ClientURL(), opts.Users
}

// user is a connection of one role, with what it was refused.
type user struct {
	*nats.Conn
	mu       sync.Mutex // guards refusals
	refusals []string
}

func connect(t *testing.T, url, role string) *user {
	t.Helper()
	u := &user{}
	nc, err := nats.Connect(url, nats.UserInfo(role, "secret-"+role), nats.CustomInboxPrefix("_INBOX_"+role), nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.refusals = append(u.refusals, err.Error())
	}))
	if err != nil {
		t.Fatal(err)
	}
	u.Conn = nc
	t.Cleanup(nc.Close)
	return u
}

// said is what was refused since the last call. Refusals come in order, so that one that is
// provoked is behind all others.
func (u *user) said(t *testing.T) []string {
	t.Helper()
	const marker = "nobody.may.publish.this"
	if err := u.Publish(marker, nil); err != nil {
		t.Fatal(err)
	}
	var out []string
	journaltest.Eventually(t, "the refusal of the marker", func() bool {
		u.mu.Lock()
		defer u.mu.Unlock()
		n := len(u.refusals)
		if n == 0 || !strings.Contains(u.refusals[n-1], marker) {
			return false
		}
		out, u.refusals = u.refusals[:n-1], nil
		return true
	})
	return out
}

func (u *user) open(t *testing.T) (*journal.Journal, *journal.Headers) {
	t.Helper()
	ctx := journaltest.Context(t)
	v, err := events.NewVocabulary()
	if err != nil {
		t.Fatal(err)
	}
	j, err := journal.Open(ctx, journal.Conns{Publish: []*nats.Conn{u.Conn}, Read: u.Conn}, journal.Config{Partitions: 2, ReadTimeout: 2 * time.Second}, v)
	if err != nil {
		t.Fatal(err, u.said(t))
	}
	h, err := j.OpenHeaders(ctx)
	if err != nil {
		t.Fatal(err, u.said(t))
	}
	return j, h
}

const userEvent = `{"type":"user/message","surfaceOp":"append","data":{"id":"m","role":"user","content":[{"type":"text","text":"x"}],"source":{"kind":"user"}}}`

// must fails when an operation did, with what the server refused.
func must(t *testing.T, u *user, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v; refused: %v", what, err, u.said(t))
	}
}

func TestEachRoleCanDoItsWorkAndNoMore(t *testing.T) {
	url, users := start(t)
	ctx := journaltest.Context(t)
	w := connect(t, url, "appender")
	p := connect(t, url, "projector")
	r := connect(t, url, "reader")
	o := connect(t, url, "operator")

	// The appender: it creates what is not there, appends, forks, repairs, and answers over NATS.
	log, headers := w.open(t)
	snaps, err := snapshot.Open(ctx, log.JetStream(), 1)
	must(t, w, "snapshots", err)
	a := appender.New(log, headers, snaps, appender.Config{})
	stop, err := a.Listen()
	must(t, w, "contention", err)
	services := api.NewAppenderServices(w.Conn, a, api.ServiceConfig{})
	must(t, w, "services", services.Start(ctx))
	for i := range 3 {
		_, err = a.Append(ctx, appender.Request{Session: "s", Events: [][]byte{[]byte(userEvent)}})
		must(t, w, fmt.Sprintf("append %d", i), err)
	}
	_, err = a.Append(ctx, appender.Request{Session: "s", Events: [][]byte{[]byte(`{"type":"turn/start","data":{"turn":1}}`)}})
	must(t, w, "turn", err)
	_, err = a.Repair(ctx, "s", "")
	must(t, w, "repair", err)
	at := events.Seq(0)
	_, err = a.Fork(ctx, appender.ForkRequest{Parent: "s", ID: "c", At: &at})
	must(t, w, "fork", err)
	must(t, w, "contended", w.Publish("palimpsest.contended.s", nil))
	_, err = a.Append(ctx, appender.Request{Session: "gone", Events: [][]byte{[]byte(userEvent)}})
	must(t, w, "a session to be erased", err)
	key, err := nkeys.CreateUser()
	must(t, w, "key", err)
	signed, err := key.PublicKey()
	must(t, w, "key", err)
	attester, err := audit.NewAttester(ctx, log, headers, key, audit.AttestConfig{})
	must(t, w, "attester", err)
	_, err = attester.Round(ctx)
	must(t, w, "round of the attester", err)

	// The projector: it projects, serves all reads, and records them.
	plog, pheaders := p.open(t)
	buckets, err := projection.OpenBuckets(ctx, plog.JetStream(), 1)
	must(t, p, "buckets", err)
	heads := projection.NewHeads()
	worker := projection.NewWorker(plog, buckets, heads, projection.Config{})
	must(t, p, "worker", worker.Start(ctx))
	access := api.NewAccessLog(plog.JetStream(), api.AccessConfig{})
	must(t, p, "access log", access.Start(ctx))
	read(t, p, plog, pheaders, buckets, heads, signed)
	reader := projection.NewReader(plog, pheaders, buckets, heads)
	answers := api.NewProjectorServices(p.Conn, api.NewProjector(reader, worker, projection.NewHubs(reader, p.Conn), audit.New(plog, pheaders, buckets), api.ProjectorConfig{}), api.ServiceConfig{})
	must(t, p, "services", answers.Start(ctx))
	journaltest.Eventually(t, "the checkpoints", func() bool {
		for _, st := range worker.Status(ctx) {
			if st.Lag == nil || *st.Lag > 0 {
				return false
			}
		}
		return true
	})

	// The reader: the same reads without a worker, and a request to a service.
	rlog, rheaders := r.open(t)
	rbuckets, err := projection.OpenBuckets(ctx, rlog.JetStream(), 1)
	must(t, r, "buckets", err)
	read(t, r, rlog, rheaders, rbuckets, projection.NewHeads(), signed)
	for _, call := range []string{"status.s", "session.s", "messages.s", "surface.s", "sessions", "status"} {
		m, err := r.RequestWithContext(ctx, "palimpsest."+call, nil)
		must(t, r, call+" over NATS", err)
		if code := m.Header.Get("Nats-Service-Error-Code"); code != "" {
			t.Errorf("%s over NATS: %s %s", call, code, m.Data)
		}
	}

	calls, answered := checkServiceSubjects(t, r, users)

	// The operator: builds and drops generations, sweeps, erases, and finishes it.
	olog, oheaders := o.open(t)
	obuckets, err := projection.OpenBuckets(ctx, olog.JetStream(), 1)
	must(t, o, "buckets", err)
	read(t, o, olog, oheaders, obuckets, projection.NewHeads(), signed)
	_, err = projection.Rebuild(ctx, olog, obuckets, projection.RebuildOptions{Follow: journaltest.Deadline})
	must(t, o, "rebuild", err)
	_, err = projection.Rebuild(ctx, olog, obuckets, projection.RebuildOptions{Follow: journaltest.Deadline, Back: true})
	must(t, o, "rebuild --back", err)
	_, err = obuckets.DropPrevious(ctx)
	must(t, o, "drop of the generation from before", err)
	_, err = obuckets.Snapshots.Sweep(ctx, snapshot.Sweep{Grace: time.Millisecond})
	must(t, o, "sweep", err)
	eraser, err := erasure.New(ctx, olog, oheaders)
	must(t, o, "eraser", err)
	_, err = eraser.Erase(ctx, erasure.Request{Session: "gone", Reason: "a test", By: "operator"})
	must(t, o, "erase", err)
	_, err = eraser.Finish(ctx)
	must(t, o, "erase --finish", err)
	after, err := audit.New(olog, oheaders, obuckets).All(ctx, audit.Options{Wait: journaltest.Deadline, Trusted: []string{signed}})
	must(t, o, "verify", err)
	if !after.OK() {
		t.Errorf("findings after the operator's work: %v", after.Findings)
	}

	must(t, p, "end of the services", answers.Stop(ctx))
	must(t, p, "end of the worker", worker.Stop(ctx))
	must(t, p, "end of the access log", access.Stop(ctx))
	stop()
	must(t, w, "end of the services", services.Stop(ctx))
	must(t, w, "end of the appender", a.Close(ctx))
	for role, u := range map[string]*user{"appender": w, "projector": p, "reader": r, "operator": o} {
		for _, refusal := range u.said(t) {
			t.Errorf("%s was refused in its work: %s", role, refusal)
		}
	}

	// Every role, every call, sessions of its own making and others: what may be asked is a matter of
	// the role alone.
	for role, u := range map[string]*user{"appender": w, "projector": p, "reader": r, "operator": o} {
		for _, call := range calls {
			may := (role == "reader" || role == "operator") && slices.Contains(answered, call)
			for _, session := range []string{"s", "never-seen"} {
				subject := strings.Replace(call, "*", session, 1)
				must(t, u, subject, u.Publish(subject, nil))
				if said := u.said(t); may != (len(said) == 0) {
					t.Errorf("%s asked %s: refusals %v, may it: %t", role, subject, said, may)
				}
			}
		}
	}

	// What nobody may: change or delete the log but by appending, listen to the answers of others.
	nobody := []string{
		"$JS.API.STREAM.DELETE.SESSIONS", "$JS.API.STREAM.PURGE.SESSIONS", "$JS.API.STREAM.DELETE.KV_HEADERS", "$JS.API.STREAM.DELETE.ERASURES", "$JS.API.STREAM.DELETE.ATTESTATIONS", "$JS.API.STREAM.MSG.DELETE.ATTESTATIONS",
		"$JS.API.STREAM.NAMES", "$JS.API.CONSUMER.NAMES.SESSIONS", "$JS.API.STREAM.CREATE.OTHER", "$JS.API.STREAM.SNAPSHOT.SESSIONS", "$JS.API.STREAM.RESTORE.SESSIONS",
		"$JS.API.STREAM.UPDATE.KV_HEADERS", "other", "$SYS.REQ.SERVER.PING", "_INBOX.x",
	}
	for role, c := range map[string]struct {
		*user
		publish, subscribe []string
	}{
		"appender":  {w, []string{"$KV.SURFACES.s", "$KV.CHECKPOINTS.p0", "$KV.QUARANTINE.s", "$KV.WORKERS.lease.0", "access.list", "palimpsest.delta.s", "erasures.s", "$JS.API.STREAM.MSG.DELETE.SESSIONS", "$JS.API.STREAM.DELETE.KV_SURFACES"}, []string{"sessions.>", "$KV.>", "palimpsest.delta.*", ">"}},
		"projector": {p, []string{"sessions.0.s", "$KV.HEADERS.s", "palimpsest.append.s", "palimpsest.repair.s", "attestations.s", "erasures.s", "$JS.API.STREAM.MSG.DELETE.SESSIONS", "$JS.API.STREAM.DELETE.KV_SURFACES"}, []string{"sessions.>", "palimpsest.append.*", ">"}},
		"reader":    {r, []string{"sessions.0.s", "$KV.HEADERS.s", "$KV.SURFACES.s", "$KV.WORKERS.lease.0", "palimpsest.append.s", "palimpsest.create.s", "palimpsest.delta.s", "$JS.API.STREAM.UPDATE.SESSIONS", "access.list", "attestations.s", "erasures.s", "$JS.API.STREAM.MSG.DELETE.SESSIONS", "$JS.API.STREAM.DELETE.KV_SURFACES"}, []string{"sessions.>", "palimpsest.messages.*", "$SRV.>", ">"}},
		"operator":  {o, []string{"attestations.s", "access.list", "palimpsest.append.s", "palimpsest.create.s", "palimpsest.delta.s", "$JS.API.STREAM.DELETE.KV_CHECKPOINTS"}, []string{"sessions.>", "$KV.>", "palimpsest.append.*", "$SRV.>", ">"}},
	} {
		for _, subject := range append(c.publish, nobody...) {
			must(t, c.user, subject, c.Publish(subject, nil))
			if said := c.said(t); len(said) != 1 || !strings.Contains(strings.ToLower(said[0]), "permissions violation for publish") {
				t.Errorf("%s published to %s: refusals %v", role, subject, said)
			}
		}
		others := []string{"_INBOX.>"}
		for _, other := range []string{"appender", "projector", "reader", "operator"} {
			if other != role {
				others = append(others, "_INBOX_"+other+".>")
			}
		}
		for _, subject := range append(c.subscribe, others...) {
			sub, err := c.SubscribeSync(subject)
			must(t, c.user, subject, err)
			if said := c.said(t); len(said) != 1 || !strings.Contains(strings.ToLower(said[0]), "permissions violation for subscription") {
				t.Errorf("%s subscribed to %s: refusals %v", role, subject, said)
			}
			_ = sub.Unsubscribe() // was refused
		}
	}
}

// checkServiceSubjects compares what roles may ask and answer with the endpoints that the running
// services say they have: neither is one missing, nor is there one that nobody answers. It returns
// all calls, and those that readers and operators may make.
func checkServiceSubjects(t *testing.T, u *user, users []*server.User) (calls, answered []string) {
	t.Helper()
	const prefix = "palimpsest."
	endpoints := func(service string) (out []string) {
		m, err := u.RequestWithContext(journaltest.Context(t), "$SRV.INFO."+service, nil)
		must(t, u, service, err)
		var info micro.Info
		if err := json.Unmarshal(m.Data, &info); err != nil {
			t.Fatal(err)
		}
		for _, e := range info.Endpoints {
			out = append(out, e.Subject)
		}
		if len(out) == 0 {
			t.Errorf("%s has no endpoints", service)
		}
		return out
	}
	appends, reads := endpoints("palimpsest-appender"), endpoints("palimpsest-projector")
	answered = append([]string{prefix + "status.*"}, reads...) // the appender's one read, and the projector's
	news := []string{prefix + "workers", prefix + "worker.>"}
	const deltas, contended = prefix + "delta.*", prefix + "contended.*"
	want := map[string]struct{ publish, subscribe []string }{
		"appender":  {[]string{contended}, append(appends, contended)},
		"projector": {append(news, deltas), slices.Concat(reads, news, []string{deltas})},
		"reader":    {answered, []string{deltas}},
		"operator":  {append(answered, news...), []string{deltas, prefix + "workers"}},
	}
	for _, who := range users {
		for verb, side := range map[string]struct {
			found *server.SubjectPermission
			want  []string
		}{"publish to": {who.Permissions.Publish, want[who.Username].publish}, "subscribe to": {who.Permissions.Subscribe, want[who.Username].subscribe}} {
			for _, s := range side.found.Allow {
				if strings.HasPrefix(s, prefix) && !slices.Contains(side.want, s) {
					t.Errorf("%s may %s %s, which nobody answers or it has no use for", who.Username, verb, s)
				}
			}
			for _, s := range side.want {
				if !slices.Contains(side.found.Allow, s) {
					t.Errorf("%s may not %s %s", who.Username, verb, s)
				}
			}
		}
	}
	return slices.Compact(slices.Sorted(slices.Values(append(appends, reads...)))), answered
}

func TestAServerWithoutAVariableSaysWhichIsMissing(t *testing.T) {
	conf, err := os.ReadFile("server.conf")
	if err != nil {
		t.Fatal(err)
	}
	documented, _, _ := strings.Cut(string(conf), "\nserver_name")
	for missing := range environment {
		if !strings.Contains(documented, missing) {
			t.Errorf("the comment at the head of server.conf does not name %s", missing)
		}
		for name, value := range environment {
			t.Setenv(name, value) // is put back at the end
			if name == missing {
				if err := os.Unsetenv(name); err != nil {
					t.Fatal(err)
				}
			}
		}
		if _, err := server.ProcessConfigFile("server.conf"); err == nil || !strings.Contains(err.Error(), "'"+missing+"'") {
			t.Errorf("without %s: found %v, want an error that names it", missing, err)
		}
	}
}

func TestAPasswordOfDigitsOrAHashIsTakenWithQuotesOfItsOwn(t *testing.T) {
	for name, value := range environment {
		t.Setenv(name, value)
	}
	for _, password := range []string{"12345", "$2a$11$abcdefghijklmnopqrstuv"} {
		t.Setenv("OPERATOR_PASSWORD", `"`+password+`"`)
		opts, err := server.ProcessConfigFile("server.conf")
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(opts.Users, func(u *server.User) bool { return u.Username == "operator" })
		if found := opts.Users[i].Password; found != password {
			t.Errorf("found the password %q, want %q", found, password)
		}
	}
}

// read reads in every way that there is.
func read(t *testing.T, u *user, log *journal.Journal, headers *journal.Headers, buckets *projection.Buckets, heads *projection.Heads, signed string) {
	t.Helper()
	ctx := journaltest.Context(t)
	r := projection.NewReader(log, headers, buckets, heads)
	v, err := r.View(ctx, "s", projection.Want{MinSeq: 4, Timeout: journaltest.Deadline})
	must(t, u, "view", err)
	_, err = r.View(ctx, "s", projection.Want{MinSeq: events.NoSeq, Fresh: true})
	must(t, u, "fresh view", err)
	_, err = r.At(ctx, "s", 1)
	must(t, u, "view of the past", err)
	must(t, u, "export", r.Export(ctx, "s", io.Discard))
	fleet := projection.NewFleet(r, projection.FleetConfig{})
	list, err := fleet.List(ctx, projection.FleetFilter{}, "", 10)
	must(t, u, "sessions", err)
	children, err := fleet.List(ctx, projection.FleetFilter{Parent: "s"}, "", 10)
	must(t, u, "children", err)
	if len(list.Rows) != 3 || len(children.Rows) != 1 {
		t.Errorf("found %d sessions and %d children, want 3 and 1", len(list.Rows), len(children.Rows))
	}
	_, err = r.Quarantined(ctx)
	must(t, u, "quarantined", err)
	watch, err := projection.NewHubs(r, u.Conn).Watch(ctx, "s", v.Last()-2)
	must(t, u, "watch", err)
	watch.Close()
	auditor := audit.New(log, headers, buckets)
	_, err = auditor.Explain(ctx, "s", 1, 10)
	must(t, u, "explain", err)
	_, err = auditor.Diff(ctx, "s", 0, 1)
	must(t, u, "diff", err)
	_, err = auditor.Blame(ctx, "s", "x")
	must(t, u, "blame", err)
	_, err = auditor.Usage(ctx, "s")
	must(t, u, "usage", err)
	_, err = auditor.Fleet(ctx)
	must(t, u, "usage of all", err)
	feed, _, err := fleet.Feed(ctx, projection.FleetFilter{}, 0)
	must(t, u, "feed", err)
	_, err = feed.Next(ctx)
	must(t, u, "change of the feed", err)
	rep, err := auditor.All(ctx, audit.Options{Wait: journaltest.Deadline, Trusted: []string{signed}})
	must(t, u, "verify", err)
	if !rep.OK() {
		t.Errorf("findings: %v", rep.Findings)
	}
	_, err = u.RequestWithContext(ctx, "$JS.API.INFO", nil)
	must(t, u, "account info", err)
}
