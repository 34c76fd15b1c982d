package api_test

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/api"
	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/platform"
	"palimpsest/internal/snapshot"
)

// An appender whose server is away ends within its drain: what still loads is answered with 503 and
// may be sent to another appender, over HTTP and over NATS.
func TestAnAppenderWithoutItsServerDrainsInTime(t *testing.T) {
	t.Parallel()
	ctx := journaltest.Context(t)
	srv, services := journaltest.Start(t), journaltest.Start(t) // what is away, and what carries the services
	const never = 10 * time.Minute
	jc := journal.Config{ReadTimeout: never, RetryBudget: time.Second, PublishTimeout: time.Second}
	cfg := appender.Config{LoadTimeout: never, StopGrace: 100 * time.Millisecond}
	j, err := journal.Open(ctx, journal.Conns{Publish: []*nats.Conn{srv.Conn(t)}, Read: srv.Conn(t)}, jc, events.DefaultVocabulary())
	if err != nil {
		t.Fatal(err)
	}
	headers, err := j.OpenHeaders(ctx)
	if err != nil {
		t.Fatal(err)
	}
	snaps, err := snapshot.Open(ctx, j.JetStream(), 1)
	if err != nil {
		t.Fatal(err)
	}
	a := appender.New(j, headers, snaps, cfg)
	edge := platform.Serve(platform.HTTPConfig{Listen: "127.0.0.1:0", Handler: api.NewAppender(a, api.AppenderConfig{}), DrainTimeout: cfg.Drain(jc)})
	if err := edge.Start(ctx); err != nil {
		t.Fatal(err)
	}
	micro := api.NewAppenderServices(services.Conn(t), a, api.ServiceConfig{})
	if err := micro.Start(ctx); err != nil {
		t.Fatal(err)
	}
	srv.Down()

	type answer struct {
		status, retry, body string
		err                 error
	}
	answers := make(chan answer, 2)
	go func() {
		resp, err := http.Post(edge.URL()+"/v1/sessions/s/compact", "application/json", strings.NewReader(`{"startSeq":0,"endSeq":1,"summary":"x"}`))
		if err != nil {
			answers <- answer{err: err}
			return
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		answers <- answer{resp.Status[:3], resp.Header.Get("Retry-After"), string(b), err}
	}()
	asker := services.Conn(t)
	go func() {
		m, err := asker.RequestWithContext(ctx, "palimpsest.repair.t", nil) // looks for its header first, past the actors
		if err != nil {
			answers <- answer{err: err}
			return
		}
		answers <- answer{m.Header.Get("Nats-Service-Error-Code"), m.Header.Get("Retry-After"), string(m.Data), nil}
	}()
	// The compaction loads, and the service has its request.
	journaltest.Eventually(t, "the compaction to load", func() bool { return a.Stats().Loads.Load() == 1 })
	journaltest.Eventually(t, "the repair to be begun", func() bool { return micro.Active() == 1 })
	a.GiveUp()
	if err := edge.Stop(ctx); err != nil {
		t.Errorf("HTTP did not drain: %v", err)
	}
	if err := micro.Stop(ctx); err != nil {
		t.Errorf("the services did not end: %v", err)
	}
	for range 2 {
		got := journaltest.Await(t, "an answer", answers)
		var p struct{ Code string }
		if got.err != nil || json.Unmarshal([]byte(got.body), &p) != nil || got.status != "503" || got.retry == "" || p.Code != "unavailable" {
			t.Errorf("answered %+v; want 503 unavailable with Retry-After", got)
		}
	}
	if err := a.Close(ctx); err != nil {
		t.Errorf("the appender did not end: %v", err)
	}
	if err := context.Cause(ctx); err != nil {
		t.Errorf("the test's time was up: %v", err)
	}
}
