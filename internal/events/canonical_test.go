package events_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"palimpsest/internal/events"
)

func TestParseWritesTheCanonicalLine(t *testing.T) {
	t.Parallel()
	nest := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	cases := []struct{ name, raw, want string }{
		{"minimal", `{"type":"todo/write","data":{}}`, `{"type":"todo/write","seq":7,"time":1000,"data":{}}`},
		{"every key, in another order",
			`{"data":` + userData + `,"ignorable":true,"sourceEventSeqs":[3,2],"surfaceOp":{"endSeq":5,"startSeq":4,"op":"replace"},"time":9,"seq":7,"type":"user/message"}`,
			`{"type":"user/message","seq":7,"time":9,"surfaceOp":{"op":"replace","startSeq":4,"endSeq":5},"sourceEventSeqs":[3,2],"ignorable":true,"data":` + userData + `}`},
		{"white space goes, but not from strings", " {\t\"type\" : \"todo/write\",\r\n\"data\" : [ 1 , { \"a b\" : \" \\t x \" } , [ ] , { } ] } \n",
			`{"type":"todo/write","seq":7,"time":1000,"data":[1,{"a b":" \t x "},[],{}]}`},
		{"white space within metadata", `{"type":"user/message","surfaceOp": { "op" : "replace" , "startSeq" : 0 , "endSeq" : 1 } ,"sourceEventSeqs": [ 0 , 1 ] ,"data":` + userData + `}`,
			`{"type":"user/message","seq":7,"time":1000,"surfaceOp":{"op":"replace","startSeq":0,"endSeq":1},"sourceEventSeqs":[0,1],"data":` + userData + `}`},
		{"integers in any spelling", `{"type":"user/message","seq":7.0,"time":20e-1,"surfaceOp":{"op":"replace","startSeq":2e0,"endSeq":0.3E+1},"sourceEventSeqs":[2.0,30e-1],"data":` + userData + `}`,
			`{"type":"user/message","seq":7,"time":2,"surfaceOp":{"op":"replace","startSeq":2,"endSeq":3},"sourceEventSeqs":[2,3],"data":` + userData + `}`},
		{"zero with any exponent", `{"type":"todo/write","time":0e999999999,"data":0}`, `{"type":"todo/write","seq":7,"time":0,"data":0}`},
		{"an integer with many zeros", `{"type":"todo/write","time":5.` + strings.Repeat("0", 500) + `,"data":0}`, `{"type":"todo/write","seq":7,"time":5,"data":0}`},
		{"an integer as many digits and a negative exponent", `{"type":"todo/write","time":5` + strings.Repeat("0", 500) + `e-500,"data":0}`, `{"type":"todo/write","seq":7,"time":5,"data":0}`},
		{"the largest time", `{"type":"todo/write","time":9007199254740991,"data":0}`, `{"type":"todo/write","seq":7,"time":9007199254740991,"data":0}`},
		{"type escaped", `{"type":"todo\/wr\u0069te","data":0}`, `{"type":"todo/write","seq":7,"time":1000,"data":0}`},
		{"keys escaped", `{"t\u0079pe":"todo/write","d\u0061ta":{"\u0061":1}}`, `{"type":"todo/write","seq":7,"time":1000,"data":{"\u0061":1}}`},
		{"op escaped", `{"type":"user/message","surfaceOp":"app\u0065nd","data":` + userData + `}`,
			`{"type":"user/message","seq":7,"time":1000,"surfaceOp":"append","data":` + userData + `}`},
		{"number tokens are kept", `{"type":"todo/write","data":[1.10,1e999999999,-0,-0.0e-0,123456789012345678901234567890.000000000000000000001,1E+2]}`,
			`{"type":"todo/write","seq":7,"time":1000,"data":[1.10,1e999999999,-0,-0.0e-0,123456789012345678901234567890.000000000000000000001,1E+2]}`},
		{"string tokens are kept", `{"type":"todo/write","data":["\ud800","\udc00\ud800","\ud83d\ude00","\u0000","\/","<&>","` + "\u2028\u2029\ufeff\U0001F600\x7f" + `"]}`,
			`{"type":"todo/write","seq":7,"time":1000,"data":["\ud800","\udc00\ud800","\ud83d\ude00","\u0000","\/","<&>","` + "\u2028\u2029\ufeff\U0001F600\x7f" + `"]}`},
		{"data null", `{"type":"todo/write","data":null}`, `{"type":"todo/write","seq":7,"time":1000,"data":null}`},
		{"512 levels", `{"type":"todo/write","data":` + nest(512) + `}`, `{"type":"todo/write","seq":7,"time":1000,"data":` + nest(512) + `}`},
		{"a key twice in what the fold does not read", `{"type":"user/message","surfaceOp":"append","data":{"id":"m1","role":"user","source":{"kind":"user"},"content":[],"x":{"a":1,"a":2}}}`,
			`{"type":"user/message","seq":7,"time":1000,"surfaceOp":"append","data":{"id":"m1","role":"user","source":{"kind":"user"},"content":[],"x":{"a":1,"a":2}}}`},
		{"keys that differ in case", `{"type":"user/message","surfaceOp":"append","data":{"ID":1,"id":"m1","role":"user","source":{"kind":"user"},"content":[]}}`,
			`{"type":"user/message","seq":7,"time":1000,"surfaceOp":"append","data":{"ID":1,"id":"m1","role":"user","source":{"kind":"user"},"content":[]}}`},
		{"opaque, its metadata token for token", `{"type":"x/y","ignorable":true,"sourceEventSeqs": { "a" : 2.0 },"surfaceOp":"\u0061ppend","data":1}`,
			`{"type":"x/y","seq":7,"time":1000,"surfaceOp":"\u0061ppend","sourceEventSeqs":{"a":2.0},"ignorable":true,"data":1}`},
		{"opaque, its metadata as deep as it may be", `{"type":"x/y","ignorable":true,"surfaceOp":` + nest(512) + `,"data":1}`,
			`{"type":"x/y","seq":7,"time":1000,"surfaceOp":` + nest(512) + `,"ignorable":true,"data":1}`},
		{"a type of 128 bytes", `{"type":"` + strings.Repeat("x", 128) + `","ignorable":true,"data":1}`,
			`{"type":"` + strings.Repeat("x", 128) + `","seq":7,"time":1000,"ignorable":true,"data":1}`},
		{"a type of every kind of character", `{"type":"@Az09._:/-@","ignorable":true,"data":1}`, `{"type":"@Az09._:/-@","seq":7,"time":1000,"ignorable":true,"data":1}`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			raw := []byte(c.raw)
			e := mustParse(t, c.raw, at(7))
			for i := range raw {
				raw[i] = 'x'
			}
			if string(e.Line) != c.want {
				t.Fatalf("line\n got %s\nwant %s", e.Line, c.want)
			}
			sameReadBack(t, e, at(7))
		})
	}
}

// sameReadBack reads an event's own line, as stored and as a candidate, and compares.
func sameReadBack(t *testing.T, e *events.Event, c events.Context) {
	t.Helper()
	var back events.Event
	if err := events.ParseCanonical(&back, bytes.Clone(e.Line), c.Format, c.Vocabulary); err != nil {
		t.Fatalf("%s\n%v", e.Line, err)
	}
	if err := back.Check(c.Format); err != nil {
		t.Fatalf("%s\n%v", e.Line, err)
	}
	if got, want := fields(&back), fields(e); got != want {
		t.Fatalf("read back\n got %s\nwant %s", got, want)
	}
	again := mustParse(t, string(e.Line), c)
	if got, want := fields(again), fields(e); got != want {
		t.Fatalf("parsed again\n got %s\nwant %s", got, want)
	}
	if !again.TimeGiven {
		t.Fatal("a line gives its time")
	}
}

// fields is everything of an event that two readings must agree on.
func fields(e *events.Event) string {
	return fmt.Sprintf("%s|%d|%d|%d|%v|%v %t|%t|%s|%s", e.Type, e.Kind, e.Seq, e.Time, e.Op, e.Sources, e.Sources == nil, e.Ignorable, e.Data(), e.Line)
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	nest := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	withTime := func(tok string) string { return `{"type":"todo/write","time":` + tok + `,"data":0}` }
	withType := func(tok string) string { return `{"type":` + tok + `,"ignorable":true,"data":0}` }
	withOp := func(tok string) string {
		return `{"type":"user/message","surfaceOp":` + tok + `,"data":` + userData + `}`
	}
	withSources := func(tok string) string {
		return `{"type":"user/message","surfaceOp":"append","sourceEventSeqs":` + tok + `,"data":` + userData + `}`
	}
	cases := []struct {
		raw  string
		rule events.Rule
	}{
		{``, events.RuleJSONMalformed},
		{` `, events.RuleJSONMalformed},
		{`{`, events.RuleJSONMalformed},
		{"\ufeff" + `{"type":"todo/write","data":0}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":0}` + "\x00", events.RuleJSONMalformed},
		{`{"type":"todo/write","data":0}{}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":"` + "\x00" + `"}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":"` + "\n" + `"}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":"` + "\xff" + `"}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":"` + "\xed\xa0\x80" + `"}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":"` + "\xc0\xaf" + `"}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":"\u12g4"}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":"\x"}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":"\`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":01}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":+1}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":1.}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":.5}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":1e}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":-}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":NaN}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":nul}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":truex}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":[1,]}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":[1 2]}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":{"a" 1}}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":{a:1}}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":{"a":1,}}`, events.RuleJSONMalformed},
		{`{'type':'todo/write'}`, events.RuleJSONMalformed},
		{`{"type":"todo/write",/**/"data":1}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":` + nest(513) + `}`, events.RuleJSONMalformed},
		{`{"type":"todo/write","data":` + strings.Repeat("[", 1<<20), events.RuleJSONMalformed},
		{`{"type":"x/y","ignorable":true,"surfaceOp":` + nest(513) + `,"data":1}`, events.RuleJSONMalformed},

		{`null`, events.RuleEnvelopeMalformed},
		{`[]`, events.RuleEnvelopeMalformed},
		{`"x"`, events.RuleEnvelopeMalformed},
		{`{}`, events.RuleEnvelopeMalformed},
		{`{"type":"todo/write"}`, events.RuleEnvelopeMalformed},
		{`{"data":1}`, events.RuleEnvelopeMalformed},
		{`{"type":"todo/write","data":1,"Seq":7}`, events.RuleEnvelopeMalformed},
		{`{"type":"todo/write","data":1,"":7}`, events.RuleEnvelopeMalformed},
		{`{"type":"todo/write","t\u0079pe":"todo/write","data":1}`, events.RuleEnvelopeMalformed},
		{`{"type":"todo/write","data":1,"data":1}`, events.RuleEnvelopeMalformed},
		{`{"type":"todo/write","seq":7,"s\u0065q":7,"data":1}`, events.RuleEnvelopeMalformed},
		{`{"type":"todo/write","seq":null,"data":1}`, events.RuleEnvelopeMalformed},
		{`{"type":"todo/write","ignorable":false,"data":1}`, events.RuleEnvelopeMalformed},
		{`{"type":"todo/write","ignorable":"true","data":1}`, events.RuleEnvelopeMalformed},
		{`{"type":"todo/write","ignorable":null,"data":1}`, events.RuleEnvelopeMalformed},
		{withTime(`-0`), events.RuleEnvelopeMalformed},
		{withTime(`-0.0`), events.RuleEnvelopeMalformed},
		{withTime(`-0e0`), events.RuleEnvelopeMalformed},
		{withTime(`-1`), events.RuleEnvelopeMalformed},
		{withTime(`1.5`), events.RuleEnvelopeMalformed},
		{withTime(`15e-1`), events.RuleEnvelopeMalformed},
		{withTime(`1e-1`), events.RuleEnvelopeMalformed},
		{withTime(`1e999999999`), events.RuleEnvelopeMalformed},
		{withTime(`1e99999999999999999999999`), events.RuleEnvelopeMalformed},
		{withTime(`1e-99999999999999999999999`), events.RuleEnvelopeMalformed},
		{withTime(`9007199254740992`), events.RuleEnvelopeMalformed},
		{withTime(`9007199254740991.5`), events.RuleEnvelopeMalformed},
		{withTime(`18446744073709551617`), events.RuleEnvelopeMalformed},
		{withTime(`1` + strings.Repeat("0", 1000)), events.RuleEnvelopeMalformed},
		{withTime(`"1"`), events.RuleEnvelopeMalformed},
		{withTime(`null`), events.RuleEnvelopeMalformed},
		{withTime(`[1]`), events.RuleEnvelopeMalformed},
		{withType(`""`), events.RuleEnvelopeMalformed},
		{withType(`null`), events.RuleEnvelopeMalformed},
		{withType(`"/x"`), events.RuleEnvelopeMalformed},
		{withType(`"a b"`), events.RuleEnvelopeMalformed},
		{withType(`"a\n"`), events.RuleEnvelopeMalformed},
		{withType(`"a\ud800"`), events.RuleEnvelopeMalformed},
		{withType(`"ä"`), events.RuleEnvelopeMalformed},
		{withType(`"` + strings.Repeat("x", 129) + `"`), events.RuleEnvelopeMalformed},

		{`{"type":"x/y","data":1}`, events.RuleUnknownType},
		{`{"type":"User/message","data":1}`, events.RuleUnknownType},
		{`{"type":"developer/message","data":1}`, events.RuleUnknownType},
		{`{"type":"todo/write","surfaceOp":null,"data":1}`, events.RuleSurfaceOpForbidden},
		{`{"type":"todo/write","sourceEventSeqs":null,"data":1}`, events.RuleSourcesForbidden},
		{`{"type":"todo/write","ignorable":true,"surfaceOp":"append","data":1}`, events.RuleSurfaceOpForbidden},
		{`{"type":"user/message","data":` + userData + `}`, events.RuleSurfaceOpRequired},
		{`{"type":"user/message","ignorable":true,"data":` + userData + `}`, events.RuleSurfaceOpRequired},
		{withOp(`null`), events.RuleSurfaceOpMalformed},
		{withOp(`"Append"`), events.RuleSurfaceOpMalformed},
		{withOp(`["append"]`), events.RuleSurfaceOpMalformed},
		{withOp(`true`), events.RuleSurfaceOpMalformed},
		{withOp(`{}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"append"}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"append","startSeq":1,"endSeq":1}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"replace","startSeq":1}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"replace","start":1,"end":1}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"replace","startSeq":1,"endSeq":1,"x":1}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"replace","startSeq":1,"startSeq":1,"endSeq":1}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"replace","startSeq":1,"start\u0053eq":1,"endSeq":1}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"replace","startSeq":"1","endSeq":1}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"replace","startSeq":-0,"endSeq":1}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"replace","startSeq":1,"endSeq":null}`), events.RuleReplaceMalformed},
		{withOp(`{"op":"replace","startSeq":7,"endSeq":1}`), events.RuleEndpointNotEarlier},
		{withOp(`{"op":"replace","startSeq":1,"endSeq":7}`), events.RuleEndpointNotEarlier},
		{withSources(`null`), events.RuleSourcesMalformed},
		{withSources(`{}`), events.RuleSourcesMalformed},
		{withSources(`1`), events.RuleSourcesMalformed},
		{withSources(`[ ]`), events.RuleSourcesEmpty},
		{withSources(`["1"]`), events.RuleSourcesMalformed},
		{withSources(`[1,-0]`), events.RuleSourcesMalformed},
		{withSources(`[1.5]`), events.RuleSourcesMalformed},
		{withSources(`[1,[2]]`), events.RuleSourcesMalformed},
		{withSources(`[1,1.0]`), events.RuleSourcesDuplicate},
		{withSources(`[3,2,1,3]`), events.RuleSourcesDuplicate},
		{withSources(`[7]`), events.RuleSourcesNotEarlier},
		{withSources(`[9,1]`), events.RuleSourcesNotEarlier},
	}
	for _, c := range cases {
		e, err := events.Parse([]byte(c.raw), at(7))
		if got := ruleOf(err); got != c.rule {
			t.Errorf("%.200q: rule %q, want %q (%v, %v)", c.raw, got, c.rule, err, e)
		}
	}
}

func TestParseNamesTheFirstBrokenRule(t *testing.T) {
	t.Parallel()
	// Each candidate breaks the rule that it must be refused by, and one or more of those behind it.
	cases := []struct {
		first, second events.Rule
		raw           string
	}{
		{events.RuleSeqNotContiguous, events.RuleEnvelopeMalformed, `{"type":"todo/write","seq":3,"note":1,"data":1}`},
		{events.RuleSeqNotContiguous, events.RuleEnvelopeMalformed, `{"seq":8.0,"time":-1}`},
		{events.RuleSeqNotContiguous, events.RuleUnknownType, `{"type":"x/y","seq":3,"data":1}`},
		{events.RuleJSONMalformed, events.RuleSeqNotContiguous, `{"type":"todo/write","seq":3,"data":1`},
		{events.RuleJSONMalformed, events.RuleEnvelopeMalformed, `{"note":1,"data":}`},
		{events.RuleEnvelopeMalformed, events.RuleUnknownType, `{"type":"x/y","note":1,"data":1}`},
		{events.RuleEnvelopeMalformed, events.RuleSurfaceOpForbidden, `{"type":"todo/write","surfaceOp":"append"}`},
		{events.RuleUnknownType, events.RuleSurfaceOpForbidden, `{"type":"x/y","surfaceOp":"append","data":1}`},
		{events.RuleSurfaceOpForbidden, events.RuleSourcesForbidden, `{"type":"todo/write","surfaceOp":"append","sourceEventSeqs":[],"data":1}`},
		{events.RuleSurfaceOpRequired, events.RuleAssistantSources, `{"type":"assistant/message","sourceEventSeqs":[1],"data":1}`},
		{events.RuleSurfaceOpRequired, events.RuleSourcesMalformed, `{"type":"user/message","sourceEventSeqs":1,"data":1}`},
		{events.RuleSurfaceOpRequired, events.RuleMessageMalformed, `{"type":"user/message","data":1}`},
		{events.RuleSurfaceOpMalformed, events.RuleSourcesMalformed, `{"type":"user/message","surfaceOp":1,"sourceEventSeqs":1,"data":1}`},
		{events.RuleReplaceMalformed, events.RuleEndpointNotEarlier, `{"type":"user/message","surfaceOp":{"op":"replace","startSeq":9},"data":1}`},
		{events.RuleReplaceMalformed, events.RuleAssistantSources, `{"type":"assistant/message","surfaceOp":{},"sourceEventSeqs":[1],"data":1}`},
		{events.RuleEndpointNotEarlier, events.RuleAssistantSources, `{"type":"assistant/message","surfaceOp":{"op":"replace","startSeq":7,"endSeq":7},"sourceEventSeqs":[1],"data":1}`},
		{events.RuleEndpointNotEarlier, events.RuleSourcesEmpty, `{"type":"user/message","surfaceOp":{"op":"replace","startSeq":7,"endSeq":7},"sourceEventSeqs":[],"data":1}`},
		{events.RuleAssistantSources, events.RuleSourcesMalformed, `{"type":"assistant/message","surfaceOp":"append","sourceEventSeqs":null,"data":1}`},
		{events.RuleAssistantSources, events.RuleSourcesEmpty, `{"type":"assistant/message","surfaceOp":"append","sourceEventSeqs":[],"data":1}`},
		{events.RuleSourcesEmpty, events.RuleMessageMalformed, `{"type":"user/message","surfaceOp":"append","sourceEventSeqs":[],"data":1}`},
		{events.RuleSourcesMalformed, events.RuleSourcesDuplicate, `{"type":"user/message","surfaceOp":"append","sourceEventSeqs":[1,1,"x"],"data":1}`},
		{events.RuleSourcesMalformed, events.RuleSourcesNotEarlier, `{"type":"user/message","surfaceOp":"append","sourceEventSeqs":[9,-1],"data":1}`},
		{events.RuleSourcesDuplicate, events.RuleSourcesNotEarlier, `{"type":"user/message","surfaceOp":"append","sourceEventSeqs":[9,9],"data":1}`},
		{events.RuleSourcesNotEarlier, events.RuleMessageMalformed, `{"type":"user/message","surfaceOp":"append","sourceEventSeqs":[9],"data":1}`},
		{events.RuleMessageMalformed, events.RuleToolErrorContradiction, `{"type":"tool/result","surfaceOp":"append","data":{"error":{},"message":{"id":"","role":"user","source":{"kind":"tool","callId":"c"},"content":[{"type":"tool-result","toolCallId":"c","isError":false,"content":[]}]}}}`},
		{events.RuleToolErrorContradiction, "", `{"type":"tool/result","surfaceOp":"append","data":{"error":{},"message":{"id":"r","role":"user","source":{"kind":"tool","callId":"c"},"content":[{"type":"tool-result","toolCallId":"c","isError":false,"content":[]}]}}}`},
	}
	for _, c := range cases {
		_, err := events.Parse([]byte(c.raw), at(7))
		if got := ruleOf(err); got != c.first {
			t.Errorf("%s: rule %q, want %q before %q", c.raw, got, c.first, c.second)
		}
	}
}

func TestSeqConflictCarriesBothSeqs(t *testing.T) {
	t.Parallel()
	_, err := events.Parse([]byte(`{"type":"todo/write","seq":3,"data":1}`), at(7))
	e := asError(err)
	if e.Code != events.CodeSeqConflict || *e.Seq != 3 || *e.ExpectedSeq != 3 || *e.ActualSeq != 7 || !errors.Is(err, events.ErrSeqConflict) {
		t.Errorf("got %#v", err)
	}
}

func TestParseCanonicalRefusesWhatAppendersDoNotWrite(t *testing.T) {
	t.Parallel()
	good := `{"type":"user/message","seq":7,"time":1000,"surfaceOp":{"op":"replace","startSeq":1,"endSeq":2},"sourceEventSeqs":[1,2],"ignorable":true,"data":` + userData + `}`
	read := func(line string) error {
		var e events.Event
		if err := events.ParseCanonical(&e, []byte(line), events.Format3, events.DefaultVocabulary()); err != nil {
			return err
		}
		return e.Check(events.Format3)
	}
	if err := read(good); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ old, new string }{
		{`{"type"`, ` {"type"`},
		{`"type":`, `"type": `},
		{`user/message`, `user\/message`},
		{`"seq":7`, `"seq":7.0`},
		{`"seq":7`, `"seq":07`},
		{`"seq":7`, `"seq":-0`},
		{`"seq":7`, `"seq":9007199254740992`},
		{`"seq":7`, `"seq":000000000000000007`},
		{`"seq":7,`, ``},
		{`,"time":1000`, ``},
		{`"time":1000`, `"time":1e3`},
		{`"op":"replace","startSeq":1,"endSeq":2`, `"startSeq":1,"endSeq":2,"op":"replace"`},
		{`"startSeq":1`, `"startSeq":1.0`},
		{`"startSeq":1`, `"startSeq": 1`},
		{`[1,2]`, `[1, 2]`},
		{`[1,2]`, `[1,2.0]`},
		{`,"sourceEventSeqs":[1,2],"ignorable":true`, `,"ignorable":true,"sourceEventSeqs":[1,2]`},
		{`"ignorable":true`, `"ignorable":false`},
		{`,"data":`, `,"data": `},
		{`,"data":`, `,"extra":1,"data":`},
		{userData + `}`, userData + `,"x":1}`},
		{userData + `}`, userData + `} `},
		{userData + `}`, userData + "}\r"},
		{userData + `}`, userData},
		{userData + `}`, `}`},
		{`"id":"m1"`, `"id": "m1"`},
		{`"id":"m1"`, `"id":"` + "\xff" + `"`},
		{`"id":"m1"`, `"id":"m1","\u0069d":"m1"`},
		{`"id":"m1"`, `"id":""`},
	} {
		bad := strings.Replace(good, c.old, c.new, 1)
		if bad == good {
			t.Fatalf("%s changes nothing", c.old)
		}
		if err := read(bad); ruleOf(err) == "" {
			t.Errorf("%s: %v, want a rule", bad, err)
		}
	}
	for n := range len(good) {
		if read(good[:n]) == nil {
			t.Errorf("the first %d bytes are taken for a line", n)
		}
	}
	opaque := `{"type":"x/y","seq":7,"time":1000,"surfaceOp":"` + "\xff" + `","ignorable":true,"data":1}`
	if ruleOf(read(opaque)) == "" {
		t.Error("invalid UTF-8 in the metadata of an opaque event is taken")
	}
}

func TestOpaqueStaysOpaque(t *testing.T) {
	t.Parallel()
	before := events.DefaultVocabulary()
	after, err := before.With("x/y")
	if err != nil {
		t.Fatal(err)
	}
	c := at(7)
	e := mustParse(t, `{"type":"x/y","ignorable":true,"surfaceOp":"append","sourceEventSeqs":[99],"data":{"turn":1}}`, c)
	if e.Kind != events.KindOpaque || e.Op.Kind != events.OpNone || e.Sources != nil || e.Message() != nil {
		t.Errorf("an unknown ignorable event touches the surface: %+v", e)
	}
	var back events.Event
	if err := events.ParseCanonical(&back, e.Line, c.Format, after); err != nil || back.Kind != events.KindOpaque {
		t.Errorf("kind %d once the type was added, %v", back.Kind, err)
	}
	c.Vocabulary = after
	if e := mustParse(t, `{"type":"x/y","data":1}`, c); e.Kind != events.KindLog {
		t.Errorf("kind %d of an added type", e.Kind)
	}
	if _, err := events.Parse([]byte(`{"type":"x/y","surfaceOp":"append","data":1}`), c); ruleOf(err) != events.RuleSurfaceOpForbidden {
		t.Errorf("an added type with surfaceOp: %v", err)
	}
	if e := mustParse(t, `{"type":"developer/message","ignorable":true,"data":1}`, c); e.Kind != events.KindOpaque {
		t.Errorf("kind %d of a developer/message in format 3", e.Kind)
	}
	c.Format = events.Format4
	if _, err := events.Parse([]byte(`{"type":"developer/message","ignorable":true,"data":1}`), c); ruleOf(err) != events.RuleSurfaceOpRequired {
		t.Errorf("a developer/message without surfaceOp in format 4: %v", err)
	}
}

func TestVocabularyGrows(t *testing.T) {
	t.Parallel()
	v := events.DefaultVocabulary()
	more, err := v.With("b/2", "a/1", "b/2", "user/message")
	if err != nil {
		t.Fatal(err)
	}
	if got := v.Missing(more.Types()); strings.Join(got, " ") != "a/1 b/2" {
		t.Errorf("missing %v", got)
	}
	if got := more.Missing(v.Types()); got != nil {
		t.Errorf("missing %v of what was known", got)
	}
	other, err := v.With("a/1")
	if err == nil {
		other, err = other.With("b/2")
	}
	if err != nil || other.Hash() != more.Hash() || more.Hash() == v.Hash() {
		t.Errorf("hash %s by another way to the same types, %s here, %s before (%v)", other.Hash(), more.Hash(), v.Hash(), err)
	}
	for _, bad := range []string{"", "/x", "a b", "a\n", strings.Repeat("x", 129)} {
		if _, err := v.With(bad); err == nil {
			t.Errorf("%q is taken for a type", bad)
		}
	}
}

func TestCutLine(t *testing.T) {
	t.Parallel()
	var got []string
	for line, rest := []byte(nil), []byte("a\n\u2028b\r\n\nc"); len(rest) > 0; {
		line, rest = events.CutLine(rest)
		got = append(got, string(line))
	}
	if want := "a|\u2028b\r||c"; strings.Join(got, "|") != want {
		t.Errorf("lines %q", got)
	}
}
