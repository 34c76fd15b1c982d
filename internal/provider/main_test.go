package provider_test

import (
	"bytes"
	"encoding/json"
	"testing"

	"go.uber.org/goleak"

	"palimpsest/internal/events"
	"palimpsest/internal/provider"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var targets = []provider.Target{provider.OpenAI, provider.Anthropic}

// render renders messages and checks what every rendering must be: valid for its API, compact,
// with a report that stays within the list, and equal to the second rendering of the same.
func render(t fataler, target provider.Target, f events.Format, messages []provider.Message) provider.Rendered {
	t.Helper()
	out, err := provider.Render(target, f, messages)
	if err != nil {
		t.Fatalf("%s: %v", target, err)
	}
	object := append(out.AppendJSON([]byte{'{'}), '}')
	if !json.Valid(object) {
		t.Fatalf("%s: no JSON: %s", target, object)
	}
	if compact, err := events.Compact(nil, out.Messages); err == nil && !bytes.Equal(compact, out.Messages) {
		t.Fatalf("%s: not compact: %s", target, out.Messages)
	}
	var wrong []string
	if target == provider.OpenAI {
		wrong = checkOpenAI(out.Messages)
		if out.System != nil {
			wrong = append(wrong, "a parameter system")
		}
	} else {
		wrong = checkAnthropic(out.System, out.Messages)
	}
	if wrong != nil {
		t.Fatalf("%s: %q\n%s", target, wrong, object)
	}
	last := 0
	for _, n := range out.Report {
		if n.Index < last || n.Index >= len(messages) || n.Seq != messages[n.Index].Seq || n.What == "" || n.Detail == "" {
			t.Fatalf("%s: note %+v behind index %d", target, n, last)
		}
		last = n.Index
	}
	again, _ := provider.Render(target, f, messages)
	if !bytes.Equal(append(again.AppendJSON([]byte{'{'}), '}'), object) {
		t.Fatalf("%s: rendered twice, and not alike", target)
	}
	return out
}

// fataler is what *testing.T and *rapid.T have in common here.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}
