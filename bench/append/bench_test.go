package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	manySessions = 100
	goleak.VerifyTestMain(m)
}

// runJSON runs the program in JSON mode, briefly, and returns what it printed.
func runJSON(t *testing.T, args ...string) (out []line) {
	t.Helper()
	t.Setenv("TMPDIR", t.TempDir())
	t.Setenv("BENCH_JSON", "1")
	var stdout bytes.Buffer
	if err := run(context.Background(), args, &stdout, io.Discard); err != nil {
		t.Fatal(err)
	}
	for d := json.NewDecoder(&stdout); d.More(); {
		var l line
		if err := d.Decode(&l); err != nil {
			t.Fatalf("%v in %s", err, stdout.Bytes())
		}
		out = append(out, l)
	}
	left, err := os.ReadDir(os.TempDir())
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	return out
}

func TestEveryListedCaseIsPrintedWithItsBaseline(t *testing.T) {
	var names []string
	for _, l := range runJSON(t, "--rounds=1", "--cold=0", "--time=100ms", "--warmup=10ms") {
		names = append(names, l.Name)
		if l.Unit != "events/s" || l.Value <= 0 || l.Baseline <= 0 || l.Ratio <= 0 {
			t.Errorf("found %+v", l)
		}
	}
	want := []string{"append/api/single", "append/api/grouped16", "append/nats/single", "append/http/single", "append/http/ndjson100"}
	if !slices.Equal(names, want) {
		t.Errorf("expected %v, found %v", want, names)
	}
}

func TestFlatPrintsOneRatio(t *testing.T) {
	got := runJSON(t, "--flat", "--longest=2000", "--sessions=100")
	if len(got) != 1 || got[0].Name != "append/flat/1M" || got[0].Ratio <= 0 {
		t.Errorf("found %+v", got)
	}
}

func TestTelemetryIsMeasuredInEveryListedCase(t *testing.T) {
	var names []string
	for _, l := range runJSON(t, "--telemetry", "--rounds=1", "--time=100ms", "--warmup=10ms") {
		names = append(names, l.Name)
		if l.Unit != "events/s" || l.Value <= 0 || l.Baseline <= 0 || l.Ratio <= 0 {
			t.Errorf("found %+v", l)
		}
	}
	want := []string{"telemetry/append/api/single", "telemetry/append/api/grouped16", "telemetry/append/nats/single", "telemetry/append/http/single", "telemetry/append/http/ndjson100"}
	if !slices.Equal(names, want) {
		t.Errorf("expected %v, found %v", want, names)
	}
}

func TestALostEventFailsTheRun(t *testing.T) {
	r, err := newBed(t.Context(), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ts, err := r.sessions(t.Context(), "s", 2)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.verify(t.Context()); err != nil {
		t.Fatal(err)
	}
	ts[1].acked.Add(1)
	if err := r.verify(t.Context()); err == nil || !strings.Contains(err.Error(), ts[1].session) {
		t.Errorf("expected an error about session %s, found %v", ts[1].session, err)
	}
}

func TestQuantilesAreExactToOnePercent(t *testing.T) {
	var h histogram
	for i := range 100_000 {
		h.add(time.Duration(i) * time.Microsecond)
	}
	for _, q := range []float64{0.01, 0.5, 0.99} {
		want := time.Duration(q*100_000) * time.Microsecond
		if got := h.quantile(q); got > want || got < want*98/100 {
			t.Errorf("quantile %g: expected about %s, found %s", q, want, got)
		}
	}
}
