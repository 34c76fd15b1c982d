package doctor_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"palimpsest/internal/audit"
	"palimpsest/internal/doctor"
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

func vocabulary(t *testing.T) *events.Vocabulary {
	t.Helper()
	v, err := events.NewVocabulary()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func config(t *testing.T, role doctor.Role) doctor.Config {
	return doctor.Config{Role: role, Vocabulary: vocabulary(t), Buckets: []string{projection.CheckpointsBucket, projection.QuarantineBucket, projection.WorkersBucket}, Streams: []string{audit.AttestationsStream, erasure.Stream}, Timeout: 500 * time.Millisecond}
}

// examine returns status and fix of each check.
func examine(t *testing.T, nc *nats.Conn, cfg doctor.Config) map[string][]doctor.Finding {
	t.Helper()
	fs, err := doctor.Run(journaltest.Context(t), nc, cfg)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]doctor.Finding{}
	for _, f := range fs {
		if (f.Status == doctor.OK) != (f.Fix == "") && !strings.HasSuffix(f.Check, "replicas") {
			t.Errorf("%+v: expected a fix with everything that is off, and none else", f)
		}
		out[f.Check] = append(out[f.Check], f)
	}
	return out
}

func open(t *testing.T, nc *nats.Conn, v *events.Vocabulary) *journal.Journal {
	t.Helper()
	ctx := journaltest.Context(t)
	j, err := journal.Open(ctx, journal.Conns{Publish: []*nats.Conn{nc}, Read: nc}, journal.Config{}, v)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := j.OpenHeaders(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := projection.OpenBuckets(ctx, j.JetStream(), 1); err != nil {
		t.Fatal(err)
	}
	return j
}

func TestAHealthyDeploymentHasNothingToMendAndIsNotChanged(t *testing.T) {
	t.Parallel()
	srv := journaltest.Start(t)
	nc := srv.Conn(t)
	j := open(t, nc, vocabulary(t))
	for _, role := range []doctor.Role{doctor.Appender, doctor.Projector} {
		fs, err := doctor.Run(journaltest.Context(t), nc, config(t, role))
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := doctor.Print(&out, fs, false); err != nil {
			t.Fatal(err)
		}
		for i := range fs {
			if fs[i].Check == "connection" && fs[i].Status == doctor.Warn { // slow, on a machine that is busy
				fs[i].Status = doctor.OK
			}
		}
		if doctor.Worst(fs) != doctor.OK || len(fs) < 10 {
			t.Errorf("%s: found\n%s", role, out.String())
		}
	}
	for _, name := range []string{"SESSIONS", "KV_HEADERS", "KV_SURFACES", "KV_CHECKPOINTS"} {
		s, err := j.JetStream().Stream(journaltest.Context(t), name)
		if err != nil {
			t.Fatal(err)
		}
		if n := s.CachedInfo().State.Msgs; n != 0 {
			t.Errorf("%s holds %d messages that the examination left", name, n)
		}
	}
}

func TestEachThingThatIsOffIsSaidWithItsRemedy(t *testing.T) {
	t.Parallel()
	srv := journaltest.Start(t)
	nc := srv.Conn(t)
	ctx := journaltest.Context(t)
	more, err := events.NewVocabulary("custom/type")
	if err != nil {
		t.Fatal(err)
	}
	j := open(t, nc, more)
	s, err := j.JetStream().Stream(ctx, "SESSIONS")
	if err != nil {
		t.Fatal(err)
	}
	c := s.CachedInfo().Config
	c.MaxAge, c.Discard, c.MaxBytes, c.AllowDirect, c.Duplicates = time.Hour, jetstream.DiscardOld, 1<<30, false, time.Second
	if _, err := j.JetStream().UpdateStream(ctx, c); err != nil {
		t.Fatal(err)
	}
	if err := j.JetStream().DeleteKeyValue(ctx, projection.QuarantineBucket); err != nil {
		t.Fatal(err)
	}
	cfg := config(t, doctor.Projector)
	cfg.Journal.Partitions = 16
	got := examine(t, nc, cfg)
	settings := fmt.Sprint(got["stream SESSIONS: settings"])
	for _, want := range []string{"max_age", "discard", "allow_direct", "duplicate_window", "--partitions"} {
		if !strings.Contains(settings, want) {
			t.Errorf("nothing about %s in %s", want, settings)
		}
	}
	if f := got["vocabulary"]; len(f) != 1 || f[0].Status != doctor.Fail || !strings.Contains(f[0].Found, "custom/type") {
		t.Errorf("vocabulary: %+v", f)
	}
	if f := got["bucket QUARANTINE"]; len(f) != 1 || f[0].Status != doctor.Warn {
		t.Errorf("a bucket that is not there: %+v", f)
	}
}

func TestTheGenerationThatServesAndStreamsInUseAreLookedAt(t *testing.T) {
	t.Parallel()
	srv := journaltest.Start(t)
	nc := srv.Conn(t)
	ctx := journaltest.Context(t)
	j := open(t, nc, vocabulary(t))
	before := examine(t, nc, config(t, doctor.Projector))
	if len(before["bucket WORKERS"]) != 1 || len(before["bucket GENERATIONS"]) != 1 || len(before["stream ERASURES"]) != 0 {
		t.Errorf("a new deployment: %+v", before)
	}
	if _, err := j.JetStream().CreateKeyValue(ctx, jetstream.KeyValueConfig{Bucket: "SURFACES_2", Storage: jetstream.MemoryStorage}); err != nil {
		t.Fatal(err)
	}
	kv, err := j.JetStream().KeyValue(ctx, snapshot.GenerationsBucket)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(ctx, snapshot.GenerationsKey, []byte(`{"v":1,"current":{"n":2,"bucket":"SURFACES_2","fold":1,"since":0},"last":2}`)); err != nil {
		t.Fatal(err)
	}
	for _, s := range []jetstream.StreamConfig{{Name: erasure.Stream, Subjects: []string{"erasures.*"}, DenyDelete: true}, {Name: audit.AttestationsStream, Subjects: []string{"attestations.*"}}} {
		if _, err := j.JetStream().CreateStream(ctx, s); err != nil {
			t.Fatal(err)
		}
	}
	got := examine(t, nc, config(t, doctor.Projector))
	if f := got["bucket SURFACES_2: settings"]; len(f) != 1 || f[0].Status != doctor.Fail || len(got["bucket SURFACES"]) != 0 {
		t.Errorf("expected the bucket that serves to be looked at and the first one not: %+v", got)
	}
	if len(got["stream ERASURES"]) != 1 || len(got["stream ERASURES: settings"]) != 0 {
		t.Errorf("erasures: %+v", got)
	}
	if f := got["stream ATTESTATIONS: settings"]; len(f) != 1 || f[0].Status != doctor.Fail {
		t.Errorf("attestations of which messages can be deleted: %+v", f)
	}
	if _, err := kv.Put(ctx, snapshot.GenerationsKey, []byte(`{}`)); err != nil {
		t.Fatal(err)
	}
	if f := examine(t, nc, config(t, doctor.Projector))["generation"]; len(f) != 1 || f[0].Status != doctor.Fail {
		t.Errorf("a register that cannot be read: %+v", f)
	}
}

func TestAMissingPermissionIsNamed(t *testing.T) {
	t.Parallel()
	ns := serve(t, &server.Options{
		JetStream: true,
		Users: []*server.User{
			{Username: "root", Password: "x"},
			{Username: "weak", Password: "x", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Allow: []string{"$JS.API.>"}}, Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX.>"}}}},
			{Username: "none", Password: "x", Permissions: &server.Permissions{Publish: &server.SubjectPermission{Allow: []string{"nothing"}}, Subscribe: &server.SubjectPermission{Allow: []string{"_INBOX.>"}}}},
		},
	})
	dial := func(user string) *nats.Conn {
		nc, err := nats.Connect(ns.ClientURL(), nats.UserInfo(user, "x"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	open(t, dial("root"), vocabulary(t))
	if f := examine(t, dial("root"), config(t, doctor.Appender))["permissions"]; len(f) != 1 || f[0].Status != doctor.OK {
		t.Errorf("root: %+v", f)
	}
	f := examine(t, dial("weak"), config(t, doctor.Appender))["permissions"]
	if len(f) != 2 || f[0].Status != doctor.Fail || !strings.Contains(fmt.Sprint(f), "sessions.0.doctor") || !strings.Contains(f[0].Fix, "deploy/nats/appender.conf") {
		t.Errorf("weak: %+v", f)
	}
	if f := examine(t, dial("none"), config(t, doctor.Appender))["JetStream"]; len(f) != 1 || f[0].Status != doctor.Fail || !strings.Contains(strings.ToLower(f[0].Found), "permissions violation") {
		t.Errorf("none: %+v", f)
	}
}

// serve starts a server with these options, on a free port and with a store of its own.
func serve(t *testing.T, o *server.Options) *server.Server {
	t.Helper()
	o.Host, o.Port, o.NoSigs, o.NoLog, o.StoreDir = "127.0.0.1", server.RANDOM_PORT, true, true, t.TempDir()
	ns, err := server.NewServer(o)
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
	return ns
}

// A cluster without a meta leader does not answer, or says that JetStream is away: turning it on is no
// remedy for that, and bringing servers back is none for a server without it.
func TestWithoutJetStreamTheRemedyFitsTheReason(t *testing.T) {
	t.Parallel()
	start := func(o *server.Options) *nats.Conn {
		t.Helper()
		nc, err := nats.Connect(serve(t, o).ClientURL())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	away, err := url.Parse("nats://127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	said := start(&server.Options{})
	sub, err := said.Subscribe("$JS.API.INFO", func(m *nats.Msg) { // as a server does that has run for a while
		_ = m.Respond([]byte(`{"type":"io.nats.jetstream.api.v1.account_info_response","error":{"code":503,"err_code":10008,"description":"JetStream system temporarily unavailable"}}`))
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	for name, c := range map[string]struct {
		nc   *nats.Conn
		want string
	}{
		"no JetStream": {start(&server.Options{}), "turn JetStream on"},
		"alone of a cluster": {start(&server.Options{JetStream: true, ServerName: "n1", Routes: []*url.URL{away},
			Cluster: server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: server.RANDOM_PORT}}), "no meta leader"},
		"said by a server": {said, "no meta leader"},
	} {
		f := examine(t, c.nc, config(t, doctor.Projector))["JetStream"]
		if len(f) != 1 || f[0].Status != doctor.Fail || !strings.Contains(f[0].Fix, c.want) || strings.Count(f[0].Fix, "turn JetStream on")+strings.Count(f[0].Fix, "no meta leader") != 1 {
			t.Errorf("%s: %+v, want a fix with %q", name, f, c.want)
		}
	}
}
