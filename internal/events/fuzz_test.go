package events_test

import (
	"bytes"
	"encoding/json"
	"testing"
	"unicode/utf8"

	"palimpsest/internal/events"
)

// fuzzContext is at(7) in either format, with a type more in the vocabulary.
func fuzzContext(f *testing.F) func(four bool) events.Context {
	three := at(7)
	v, err := three.Vocabulary.With("added/type")
	if err != nil {
		f.Fatal(err)
	}
	three.Vocabulary = v
	return func(four bool) events.Context {
		c := three
		if four {
			c.Format = events.Format4
		}
		return c
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		`{"type":"todo/write","data":null}`,
		` { "data" : [ 1.10 , "\ud800" , -0e0 ] , "t\u0079pe" : "todo\/write" , "seq" : 7.0 , "time" : 1e3 } `,
		`{"type":"user/message","surfaceOp":"append","sourceEventSeqs":[1,2.0],"ignorable":true,"data":` + userData + `}`,
		`{"type":"user/message","surfaceOp":{"op":"replace","startSeq":1,"endSeq":20e-1},"sourceEventSeqs":[1,2],"data":` + userData + `}`,
		`{"type":"x/y","ignorable":true,"surfaceOp":{"a":[null]},"sourceEventSeqs":"x","data":1}`,
		`{"type":"added/type","data":1}`,
		`{"type":"tool/result","surfaceOp":"append","data":` + toolData("c", "[]") + `}`,
		`{"type":"tool/result","surfaceOp":"append","data":{"message":{"id":"r","role":"tool","source":{"kind":"tool","callId":"c"},"toolCallId":"c","isError":true,"content":[]},"error":{"code":"X"}}}`,
		`{"type":"assistant/message","surfaceOp":"append","data":{"message":{"id":"a","role":"assistant","source":{"kind":"model","provider":"p","model":"m"},"content":[{"type":"tool-call","id":"c"}]}}}`,
		`{"type":"developer/message","surfaceOp":"append","data":{"message":{"id":"d","role":"developer","source":{"kind":"x"},"content":[]}}}`,
		`{"type":"todo/write","time":1e999999999,"data":01}`,
		"\ufeff{\"type\":\"todo/write\",\"data\":\"\xff\"}",
	} {
		f.Add([]byte(seed), false)
		f.Add([]byte(seed), true)
	}
	context := fuzzContext(f)
	f.Fuzz(func(t *testing.T, raw []byte, four bool) {
		c := context(four)
		e, err := events.Parse(raw, c)
		if err != nil {
			if ruleOf(err) == "" {
				t.Fatalf("an error without a rule: %v", err)
			}
			if !json.Valid(raw) && ruleOf(err) != events.RuleJSONMalformed {
				t.Fatalf("no JSON, but %v", err)
			}
			return
		}
		if !json.Valid(raw) || !utf8.Valid(raw) {
			t.Fatal("taken, but no JSON in UTF-8")
		}
		if !json.Valid(e.Line) || bytes.ContainsAny(e.Line, "\n\r") {
			t.Fatalf("no line of JSON: %q", e.Line)
		}
		if want := compactData(t, raw); !bytes.Equal(e.Data(), want) {
			t.Fatalf("data\n got %s\nwant %s", e.Data(), want)
		}
		sameReadBack(t, e, c)
		if e.Time <= 253402300799999 {
			if back := throughCloudEvent(t, e, c); fields(back) != fields(e) {
				t.Fatalf("as a CloudEvent\n got %s\nwant %s", back.Line, e.Line)
			}
		}
		if m := e.Message(); m != nil && (!e.Kind.OnSurface() || !bytes.Contains(e.Data(), m)) {
			t.Fatalf("derives %s", m)
		}
		readAll(e, c.Format)
	})
}

// compactData finds data in the text of an event with encoding/json and takes its white space out.
func compactData(t *testing.T, raw []byte) []byte {
	t.Helper()
	var members map[string]json.RawMessage
	if err := json.Unmarshal(raw, &members); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if err := json.Compact(&b, members["data"]); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// readAll reads everything that can be read of an event that passed Parse or Check.
func readAll(e *events.Event, f events.Format) {
	e.Fields()
	e.Message()
	if e.Kind == events.KindAssistant {
		e.ToolCalls()
	}
	if e.Kind == events.KindTool {
		e.Fingerprint(f)
	}
}

func FuzzParseCanonical(f *testing.F) {
	for _, seed := range []string{
		`{"type":"todo/write","seq":0,"time":0,"data":0}`,
		`{"type":"todo/write","seq":7,"time":1000,"data":{"turn":1,"step":[{"a":"\\"},"x`,
		`{"type":"user/message","seq":7,"time":1000,"surfaceOp":"append","data":` + userData + `}`,
		`{"type":"user/message","seq":7,"time":1000,"surfaceOp":{"op":"replace","startSeq":1,"endSeq":2},"sourceEventSeqs":[1,2],"ignorable":true,"data":` + userData + `}`,
		`{"type":"x/y","seq":7,"time":1000,"surfaceOp":{"a":[null]},"sourceEventSeqs":"x","ignorable":true,"data":1}`,
		`{"type":"tool/result","seq":7,"time":1000,"surfaceOp":"append","data":` + toolData("c", "[]") + `}`,
		`{"type":"tool/result","seq":7,"time":1000,"surfaceOp":"append","data":[[[[[[[[[[[}`,
		`{"type":"assistant/message","seq":7,"time":1000,"surfaceOp":"append","data":{"message":{"content":[{"type":"tool-call","id":"c"}]}}}`,
		`{"type":"developer/message","seq":7,"time":1000,"surfaceOp":"append","data":{"message":{"id":"d","role":"developer","source":{"kind":"x"},"content":[]}}}`,
		`{"type":"`, `{`, ``,
	} {
		f.Add([]byte(seed), false)
		f.Add([]byte(seed), true)
	}
	context := fuzzContext(f)
	f.Fuzz(func(t *testing.T, line []byte, four bool) {
		c := context(four)
		var e events.Event
		if err := events.ParseCanonical(&e, line, c.Format, c.Vocabulary); err != nil {
			if ruleOf(err) == "" {
				t.Fatalf("an error without a rule: %v", err)
			}
			return
		}
		// What the fold reads of a line from the log before anybody has checked its data.
		e.Data()
		e.Fields()
		if e.Kind == events.KindAssistant {
			e.ToolCalls()
		}
		if err := e.Check(c.Format); err != nil {
			if ruleOf(err) == "" {
				t.Fatalf("an error without a rule: %v", err)
			}
			return
		}
		readAll(&e, c.Format)
		c.Next, c.EmptyCallID = e.Seq, true
		again, err := events.Parse(line, c)
		if err != nil {
			t.Fatalf("canonical, but no candidate: %v", err)
		}
		if fields(again) != fields(&e) {
			t.Fatalf("parsed\n got %s\nwant %s", fields(again), fields(&e))
		}
	})
}
