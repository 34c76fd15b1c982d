package events_test

import (
	"errors"
	"testing"

	"go.uber.org/goleak"

	"palimpsest/internal/events"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// userData is the smallest data of a user/message.
const userData = `{"id":"m1","role":"user","source":{"kind":"user"},"content":[]}`

// toolData is the data of a tool/result with the given callId and content of its block.
func toolData(callID, content string) string {
	return `{"turn":1,"step":1,"message":{"id":"r1","role":"user","source":{"kind":"tool","callId":"` + callID +
		`"},"content":[{"type":"tool-result","toolCallId":"` + callID + `","isError":false,"content":` + content + `}]}}`
}

// at is the place at which a candidate is parsed, unless a test says otherwise.
func at(next events.Seq) events.Context {
	return events.Context{Format: events.Format3, Vocabulary: events.DefaultVocabulary(), Next: next, Now: 1000}
}

func mustParse(t testing.TB, raw string, c events.Context) *events.Event {
	t.Helper()
	e, err := events.Parse([]byte(raw), c)
	if err != nil {
		t.Fatalf("%s\n%v", raw, err)
	}
	return e
}

// asError is err as one of ours, an empty one when it is not.
func asError(err error) *events.Error {
	if e, ok := errors.AsType[*events.Error](err); ok {
		return e
	}
	return new(events.Error)
}

// ruleOf is the rule that an error names.
func ruleOf(err error) events.Rule { return asError(err).Rule }
