package journal

import (
	"slices"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
)

func TestATypeIsForgottenUnlessAnEventOfItIsStored(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	ctx := journaltest.Context(t)
	j := openAt(t, s.URL(), Config{}, vocabulary(t, "mistyped", "used", "opaque"))
	wr := journaltest.NewWriter("s 1", nil)
	at := store(t, j, 0, wr.Lines("c1", `{"type":"goal/change","seq":0,"time":1,"data":{"type":"mistyped"}}`, `{"type":"used","seq":1,"time":1,"data":{}}`))
	store(t, j, at, wr.Lines("c2", `{"type":"opaque","seq":2,"time":1,"ignorable":true,"data":{}}`))
	for name, parts := range map[string][]string{
		"used":         {"event 1", `"s 1"`},
		"user/message": {"built in"},
		"never/known":  {"not in the vocabulary"},
	} {
		err := j.ForgetType(ctx, name)
		if code(err) != events.CodeBadRequest {
			t.Errorf("%s: %v", name, err)
		}
		mentions(t, err, parts...)
	}
	if _, err := tryOpen(t, s, Config{}, vocabulary(t, "used")); err == nil {
		t.Error("a process that knows less than the vocabulary was let in")
	}
	for _, name := range []string{"mistyped", "opaque"} {
		if err := j.ForgetType(ctx, name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := tryOpen(t, s, Config{}, vocabulary(t, "used")); err != nil {
		t.Errorf("a process that knows what is left: %v", err)
	}
	stored, err := StoredTypes(ctx, j.JetStream(), Config{})
	if err != nil || !slices.Contains(stored, "used") || slices.Contains(stored, "mistyped") {
		t.Errorf("%v, %v", stored, err)
	}
}
