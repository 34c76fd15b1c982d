package appender_test

import (
	"encoding/json"
	"testing"

	"palimpsest/internal/appender"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
)

// What changes a surface needs a session: one that is not there is not made by it.
func TestCompactAndPruneOfNoSession(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	p := w.start(t, appender.Config{})
	ctx := journaltest.Context(t)
	for range 2 { // known to no actor, then to one
		if _, err := p.Compact(ctx, appender.CompactRequest{Session: "nowhere", Summary: json.RawMessage(`"x"`)}); asError(err).Code != events.CodeSessionNotFound {
			t.Errorf("compact: %v", err)
		}
		if _, err := p.Prune(ctx, appender.PruneRequest{Session: "nowhere", Key: "k"}); asError(err).Code != events.CodeSessionNotFound {
			t.Errorf("prune: %v", err)
		}
	}
	if _, err := p.Status(ctx, "nowhere"); asError(err).Code != events.CodeSessionNotFound {
		t.Errorf("status: %v", err)
	}
	p.must(t, to("nowhere", user("u0")))
	if r, err := p.Compact(ctx, appender.CompactRequest{Session: "nowhere", Summary: json.RawMessage(`"x"`)}); err != nil || r.FirstSeq != 1 {
		t.Errorf("compact of a session that came: %+v, %v", r, err)
	}
}
