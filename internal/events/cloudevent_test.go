package events_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/cloudevents/sdk-go/v2/event"

	"palimpsest/internal/events"
)

// throughCloudEvent sends an event out as a CloudEvent and takes it in again.
func throughCloudEvent(t testing.TB, e *events.Event, c events.Context) *events.Event {
	t.Helper()
	ce := e.AppendCloudEvent([]byte("kept:"), `s/1 "ö"`, c.Format)
	ce, ok := cut(ce, "kept:")
	if !ok || !json.Valid(ce) {
		t.Fatalf("no JSON: %s", ce)
	}
	raw, err := events.FromCloudEvent(ce, c.Format)
	if err != nil {
		t.Fatalf("%s\n%v", ce, err)
	}
	back, err := events.Parse(raw, c)
	if err != nil {
		t.Fatalf("%s\n%s\n%v", ce, raw, err)
	}
	return back
}

func cut(b []byte, prefix string) ([]byte, bool) {
	s, ok := strings.CutPrefix(string(b), prefix)
	return []byte(s), ok
}

func TestCloudEventRoundTrip(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{
		`{"type":"todo/write","data":null}`,
		`{"type":"todo/write","time":0,"data":[1.10,"\ud800","ä\u0000"]}`,
		`{"type":"user/message","time":253402300799999,"surfaceOp":"append","sourceEventSeqs":[3,1],"ignorable":true,"data":` + userData + `}`,
		`{"type":"user/message","surfaceOp":{"op":"replace","startSeq":1,"endSeq":2},"sourceEventSeqs":[1,2],"data":` + userData + `}`,
		`{"type":"x/y","ignorable":true,"data":1}`,
		`{"type":"x/y","ignorable":true,"surfaceOp":"append","sourceEventSeqs":[],"data":1}`,
		`{"type":"x/y","ignorable":true,"surfaceOp":"\u0061ppend","sourceEventSeqs":"x","data":1}`,
		`{"type":"x/y","ignorable":true,"surfaceOp":null,"sourceEventSeqs":null,"data":1}`,
		`{"type":"x/y","ignorable":true,"surfaceOp":"{}","sourceEventSeqs":{"a":[1.0,"\ud800"]},"data":1}`,
		`{"type":"x/y","ignorable":true,"surfaceOp":{"op":"other"},"sourceEventSeqs":true,"data":1}`,
		`{"type":"x/y","ignorable":true,"surfaceOp":5.0,"sourceEventSeqs":"[1]","data":1}`,
	} {
		c := at(7)
		e := mustParse(t, raw, c)
		c.Now = 2000 // the time must come from the CloudEvent
		if back := throughCloudEvent(t, e, c); fields(back) != fields(e) {
			t.Errorf("round trip\n got %s\nwant %s", back.Line, e.Line)
		}
		var ce event.Event
		if err := json.Unmarshal(e.AppendCloudEvent(nil, "s", c.Format), &ce); err != nil {
			t.Errorf("the SDK does not read it: %v", err)
		} else if err := ce.Validate(); err != nil || ce.ID() != "s/7" || ce.Source() != "/sessions/s" || ce.Type() != "palimpsest.session.v3."+e.Type {
			t.Errorf("%v\n%v", ce, err)
		}
	}
}

func TestCloudEventBeyondTheYear9999HasNoTime(t *testing.T) {
	t.Parallel()
	e := mustParse(t, `{"type":"todo/write","time":253402300800000,"data":1}`, at(7))
	if ce := e.AppendCloudEvent(nil, "s", events.Format3); strings.Contains(string(ce), `"time"`) || !json.Valid(ce) {
		t.Errorf("%s", ce)
	}
}

func TestFromCloudEvent(t *testing.T) {
	t.Parallel()
	const start = `{"specversion":"1.0","id":"1","source":"/x","type":"palimpsest.session.v3.todo/write"`
	for _, c := range []struct{ ce, want string }{
		{start + `,"data":{"a":1.0}}`, `{"type":"todo/write","data":{"a":1.0}}`},
		{start + `,"data":1,"time":"2026-01-01T01:00:00.5+01:00"}`, `{"type":"todo/write","time":1767225600500,"data":1}`},
		{start + `,"data":1,"sequence":"00000000000000000000"}`, `{"type":"todo/write","seq":0,"data":1}`},
		{start + `,"data":1,"sequence":"00000000000000000120"}`, `{"type":"todo/write","seq":120,"data":1}`},
		{start + `,"data":1,"surfaceop":"append","sourceeventseqs":"[1, 2]","ignorable":true}`, `{"type":"todo/write","surfaceOp":"append","sourceEventSeqs":[1,2],"ignorable":true,"data":1}`},
		{start + `,"data":1,"surfaceop":"bogus"}`, `{"type":"todo/write","surfaceOp":"bogus","data":1}`},
		{start + `,"data":1,"traceparent":"00-1","comexampleother":5,"subject":"s","dataschema":"http://x/y","datacontenttype":"application/json; charset=utf-8"}`, `{"type":"todo/write","data":1}`},
		{start + `,"data":1,"time":null,"subject":null,"sequence":null,"surfaceop":null,"sourceeventseqs":null,"ignorable":null,"datacontenttype":null}`, `{"type":"todo/write","data":1}`},
		{start + `}`, `{"type":"todo/write"}`},
	} {
		got, err := events.FromCloudEvent([]byte(c.ce), events.Format3)
		if err != nil || string(got) != c.want {
			t.Errorf("%s\n got %s (%v)\nwant %s", c.ce, got, err, c.want)
		}
	}
	for _, bad := range []string{
		`null`, `[]`, `"x"`, `{}`,
		start + `,"data":1,"id":"2"}`, start + `,"data":1,"\u0069d":"2"}`,
		strings.Replace(start, `"1.0"`, `"2.0"`, 1) + `,"data":1}`,
		strings.Replace(start, `"1.0"`, `1.0`, 1) + `,"data":1}`,
		strings.Replace(start, `"specversion":"1.0",`, ``, 1) + `,"data":1}`,
		strings.Replace(start, `"id":"1",`, ``, 1) + `,"data":1}`,
		strings.Replace(start, `"id":"1"`, `"id":1`, 1) + `,"data":1}`,
		strings.Replace(start, `"id":"1"`, `"id":null`, 1) + `,"data":1}`,
		strings.Replace(start, `"source":"/x",`, ``, 1) + `,"data":1}`,
		strings.Replace(start, `v3.todo`, `v4.todo`, 1) + `,"data":1}`,
		strings.Replace(start, `palimpsest.`, ``, 1) + `,"data":1}`,
		start + `,"data":1,"time":"yesterday"}`, start + `,"data":1,"time":5}`, start + `,"data":1,"time":"1969-12-31T23:59:59Z"}`,
		start + `,"data":1,"sequence":""}`, start + `,"data":1,"sequence":"x"}`, start + `,"data":1,"sequence":"-1"}`, start + `,"data":1,"sequence":5}`,
		start + `,"data":1,"sequence":"5."}`, start + `,"data":1,"sequence":"5e"}`, start + `,"data":1,"sequence":"9007199254740992"}`,
		start + `,"data":1,"surfaceop":"{"}`, start + `,"data":1,"sourceeventseqs":"[1"}`,
		start + `,"data":1,"datacontenttype":"text/plain"}`, start + `,"data":1,"datacontenttype":5}`, start + `,"data_base64":"MQ=="}`,
		start + `,"data":1,"not-a-name":"x"}`,
	} {
		if got, err := events.FromCloudEvent([]byte(bad), events.Format3); asError(err).Code != events.CodeBadRequest {
			t.Errorf("%s\ngives %s, %v", bad, got, err)
		}
	}
	for _, bad := range []string{``, start, start + `,"data":"` + "\xff" + `"}`, start + `,"data":` + strings.Repeat("[", 1<<20)} {
		if _, err := events.FromCloudEvent([]byte(bad), events.Format3); ruleOf(err) != events.RuleJSONMalformed {
			t.Errorf("%.100s: %v", bad, err)
		}
	}
}

func TestSplit(t *testing.T) {
	t.Parallel()
	list, err := events.SplitArray([]byte(` [ 1.0 , {"a" : [ ] } , "x ,]" , [ ] ] `))
	var got []string
	for _, v := range list {
		got = append(got, string(v))
	}
	if err != nil || strings.Join(got, "|") != `1.0|{"a":[]}|"x ,]"|[]` {
		t.Errorf("%q, %v", got, err)
	}
	if list, err := events.SplitArray([]byte(`[]`)); err != nil || len(list) != 0 {
		t.Errorf("%q, %v", list, err)
	}
	members, err := events.SplitObject([]byte(`{ "a\u0062" : "}" , "" : null, "n" : {"a":[1, 2]} }`))
	if err != nil || len(members) != 3 || string(members["ab"]) != `"}"` || string(members[""]) != `null` || string(members["n"]) != `{"a":[1,2]}` {
		t.Errorf("%q, %v", members, err)
	}
	for _, bad := range []string{`{}`, `1`, `null`} {
		if _, err := events.SplitArray([]byte(bad)); asError(err).Code != events.CodeBadRequest {
			t.Errorf("%s as an array: %v", bad, err)
		}
	}
	for _, bad := range []string{`[]`, `1`, `{"a":1,"\u0061":2}`} {
		if _, err := events.SplitObject([]byte(bad)); asError(err).Code != events.CodeBadRequest {
			t.Errorf("%s as an object: %v", bad, err)
		}
	}
	for _, bad := range []string{``, `[1,]`, `{"a":1`} {
		_, a := events.SplitArray([]byte(bad))
		_, o := events.SplitObject([]byte(bad))
		if ruleOf(a) != events.RuleJSONMalformed || ruleOf(o) != events.RuleJSONMalformed {
			t.Errorf("%s: %v, %v", bad, a, o)
		}
	}
}

func TestMarshalKeepsRawParts(t *testing.T) {
	t.Parallel()
	raw := json.RawMessage("{\"a\":\"<&>\\ud800\u2028\",\"n\":1.10}")
	got, err := events.Marshal(map[string]any{"raw": raw, "text": "<"})
	if want := `{"raw":` + string(raw) + `,"text":"<"}`; err != nil || string(got) != want {
		t.Errorf("got %s (%v), want %s", got, err, want)
	}
}

func TestParseSeq(t *testing.T) {
	t.Parallel()
	if n, ok := events.ParseSeq("42"); !ok || n != 42 {
		t.Errorf("42 is %d, %t", n, ok)
	}
	for _, bad := range []string{"", "-1", "x", " 1", "1 ", "+1", "1.", "1e", "9007199254740992"} {
		if n, ok := events.ParseSeq(bad); ok {
			t.Errorf("%q is %d", bad, n)
		}
	}
}
