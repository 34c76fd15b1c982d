package audit_test

import (
	"fmt"
	"testing"

	"palimpsest/internal/appender"
	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/journal/journaltest"
)

// A fork is compared with its parent, and the index of children with what headers say.
func TestLineageIsVerified(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := journaltest.Context(t)
	w.append("parent", user("zero"), user("one"), user("two"))
	fork := func(parent, id string, at events.Seq) {
		t.Helper()
		if _, err := w.Fork(ctx, appender.ForkRequest{Parent: parent, ID: id, At: &at}); err != nil {
			t.Fatal(err)
		}
	}
	fork("parent", "good", 1)
	fork("good", "grandchild", 2)
	w.append("grandchild", user("mine"))
	fork("parent", "unlisted", 2)

	// A session that says that it is a fork, and whose first events are others'.
	forge := func(id, parent string, texts ...string) {
		t.Helper()
		raw := fmt.Appendf(nil, `{"version":3,"id":"%s","createdAt":1,"parentSession":"%s","isSeeded":true,"delegationDepth":0}`, id, parent)
		if _, _, err := w.Create(ctx, id, raw); err != nil {
			t.Fatal(err)
		}
		var raws []string
		for _, text := range texts {
			raws = append(raws, user(text))
		}
		w.append(id, append(raws, `{"type":"session/end-seed","data":{"inherited":true}}`)...)
	}
	forge("forged", "parent", "zero", "other")
	forge("longer", "parent", "zero", "one", "two", "three")
	forge("orphan", "nowhere", "zero")

	// What comes behind the inherited part does not keep a child from being compared.
	w.append("spoiled", user("zero"), user("one"))
	ack, err := w.js.Publish(ctx, w.log.Subject("spoiled"), []byte("hello"))
	if err != nil {
		t.Fatal(err)
	}
	fork("spoiled", "saved", 1)
	forge("spoiled-forged", "spoiled", "zero", "other")

	if kv, err := w.js.KeyValue(ctx, journal.HeadersBucket); err != nil {
		t.Fatal(err)
	} else if err := kv.Purge(ctx, "children.parent.unlisted"); err != nil {
		t.Fatal(err)
	}
	var got []place
	for _, f := range w.all(audit.Options{LogOnly: true}).Findings {
		got = append(got, placeOf(f))
	}
	want := []place{
		{"forged", audit.CheckLineage, 1, 0, "", ""},
		{"longer", audit.CheckLineage, 3, 0, "", ""},
		{"spoiled", audit.CheckMessage, events.NoSeq, ack.Sequence, "", ""},
		{"spoiled-forged", audit.CheckLineage, 1, 0, "", ""},
		{"unlisted", audit.CheckLineage, events.NoSeq, 0, "", ""},
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("found\n%+v\nwant\n%+v", got, want)
	}
}
