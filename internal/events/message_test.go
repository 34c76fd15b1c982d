package events_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"palimpsest/internal/events"
)

// surfaceEvent is an appended event of a type with the given data.
func surfaceEvent(typ, data string) string {
	return `{"type":"` + typ + `","surfaceOp":"append","data":` + data + `}`
}

func TestMessageShapes(t *testing.T) {
	t.Parallel()
	user := func(id, role, source, content string) string {
		return `{"id":` + id + `,"role":` + role + `,"source":` + source + `,"content":` + content + `}`
	}
	assistant := func(source string) string {
		return `{"message":` + user(`"a"`, `"assistant"`, source, `[]`) + `}`
	}
	block := `{"type":"tool-result","toolCallId":"c","isError":true,"content":[]}`
	tool := func(role, source, content, rest string) string {
		return `{"message":` + user(`"r"`, role, source, content) + rest + `}`
	}
	flat := func(members string) string {
		return `{"message":{"id":"r","role":"tool","source":{"kind":"tool","callId":"c"},` + members + `}}`
	}
	const toolSource = `{"kind":"tool","callId":"c"}`
	cases := []struct {
		format events.Format
		typ    string
		data   string
		rule   events.Rule
	}{
		{3, "user/message", user(`"m"`, `"user"`, `{"kind":"user"}`, `[]`), ""},
		{3, "user/message", user(`"m"`, `"u\u0073er"`, `{"kind":"x"}`, `[1,"a"]`), ""},
		{3, "user/message", user(`""`, `"user"`, `{"kind":"user"}`, `[]`), "message-malformed"},
		{3, "user/message", user(`5`, `"user"`, `{"kind":"user"}`, `[]`), "message-malformed"},
		{3, "user/message", user(`"m"`, `"system"`, `{"kind":"user"}`, `[]`), "message-malformed"},
		{3, "user/message", user(`"m"`, `null`, `{"kind":"user"}`, `[]`), "message-malformed"},
		{3, "user/message", user(`"m"`, `"user"`, `{"kind":""}`, `[]`), "message-malformed"},
		{3, "user/message", user(`"m"`, `"user"`, `{"kind":5}`, `[]`), "message-malformed"},
		{3, "user/message", user(`"m"`, `"user"`, `{}`, `[]`), "message-malformed"},
		{3, "user/message", user(`"m"`, `"user"`, `"user"`, `[]`), "message-malformed"},
		{3, "user/message", user(`"m"`, `"user"`, `{"kind":"user"}`, `{}`), "message-malformed"},
		{3, "user/message", user(`"m"`, `"user"`, `{"kind":"user","k\u0069nd":"user"}`, `[]`), "message-malformed"},
		{3, "user/message", `{"message":` + userData + `}`, "message-malformed"},
		{3, "user/message", `{}`, "message-malformed"},
		{3, "user/message", `[]`, "message-malformed"},
		{3, "user/message", `null`, "message-malformed"},
		{3, "user/message", strings.Replace(userData, `{`, `{"x":1,"x":1,`, 1), "message-malformed"},
		{3, "system/message", `{"message":` + user(`"s"`, `"system"`, `{"kind":"x"}`, `[]`) + `}`, ""},
		{3, "system/message", `{"message":` + user(`"s"`, `"user"`, `{"kind":"x"}`, `[]`) + `}`, "message-malformed"},
		{3, "system/message", `{"turn":1,"turn":1,"message":` + user(`"s"`, `"system"`, `{"kind":"x"}`, `[]`) + `}`, "message-malformed"},
		{3, "system/message", user(`"s"`, `"system"`, `{"kind":"x"}`, `[]`), "message-malformed"},
		{3, "assistant/message", assistant(`{"kind":"model","provider":"p","model":"m"}`), ""},
		{3, "assistant/message", assistant(`{"kind":"model","provider":"","model":""}`), ""},
		{3, "assistant/message", assistant(`{"kind":"model","provider":"p"}`), "message-malformed"},
		{3, "assistant/message", assistant(`{"kind":"model","model":"m"}`), "message-malformed"},
		{3, "assistant/message", assistant(`{"kind":"user","provider":"p","model":"m"}`), "message-malformed"},
		{3, "tool/result", tool(`"user"`, toolSource, `[`+block+`]`, ``), ""},
		{3, "tool/result", tool(`"tool"`, toolSource, `[`+block+`]`, ``), ""},
		{3, "tool/result", tool(`"user"`, toolSource, `[`+block+`]`, `,"error":{"code":"X"}`), ""},
		{3, "tool/result", tool(`"user"`, toolSource, `[`+strings.Replace(block, "true", "false", 1)+`]`, ``), ""},
		{3, "tool/result", tool(`"user"`, toolSource, `[`+strings.Replace(block, `"isError":true,`, ``, 1)+`]`, ``), ""},
		{3, "tool/result", tool(`"assistant"`, toolSource, `[`+block+`]`, ``), "message-malformed"},
		{3, "tool/result", tool(`"user"`, `{"kind":"model","callId":"c"}`, `[`+block+`]`, ``), "message-malformed"},
		{3, "tool/result", tool(`"user"`, `{"kind":"tool"}`, `[`+block+`]`, ``), "message-malformed"},
		{3, "tool/result", tool(`"user"`, `{"kind":"tool","callId":""}`, `[`+strings.Replace(block, `"c"`, `""`, 1)+`]`, ``), "message-malformed"},
		{3, "tool/result", tool(`"user"`, `{"kind":"tool","callId":"d"}`, `[`+block+`]`, ``), "message-malformed"},
		{3, "tool/result", tool(`"user"`, toolSource, `[]`, ``), "message-malformed"},
		{3, "tool/result", tool(`"user"`, toolSource, `[`+block+`,`+block+`]`, ``), "message-malformed"},
		{3, "tool/result", tool(`"user"`, toolSource, `[`+strings.Replace(block, "tool-result", "text", 1)+`]`, ``), "message-malformed"},
		{3, "tool/result", tool(`"user"`, toolSource, `[`+strings.Replace(block, "[]", `"x"`, 1)+`]`, ``), "message-malformed"},
		{3, "tool/result", tool(`"user"`, toolSource, `[`+strings.Replace(block, "true", `"true"`, 1)+`]`, ``), "message-malformed"},
		{3, "tool/result", tool(`"user"`, toolSource, `[`+strings.Replace(block, "true", "false", 1)+`]`, `,"error":{}`), "tool-error-contradiction"},
		{3, "tool/result", tool(`"user"`, toolSource, `[`+strings.Replace(block, `"isError":true,`, ``, 1)+`]`, `,"error":"x"`), "tool-error-contradiction"},
		{4, "tool/result", tool(`"user"`, toolSource, `[`+block+`]`, ``), ""},
		{4, "tool/result", flat(`"toolCallId":"c","isError":false,"content":[{"type":"text"}]`), ""},
		{4, "tool/result", flat(`"toolCallId":"c","isError":false,"content":[]`), ""},
		{4, "tool/result", flat(`"toolCallId":"d","isError":false,"content":[]`), "message-malformed"},
		{4, "tool/result", flat(`"isError":false,"content":[]`), "message-malformed"},
		{4, "tool/result", strings.Replace(flat(`"toolCallId":"c","isError":false,"content":[]`), `{"message"`, `{"error":{},"message"`, 1), "tool-error-contradiction"},
		{3, "tool/result", flat(`"toolCallId":"c","isError":false,"content":[]`), "message-malformed"},
		{4, "developer/message", `{"message":` + user(`"d"`, `"developer"`, `{"kind":"x"}`, `[]`) + `}`, ""},
		{4, "developer/message", `{"message":` + user(`"d"`, `"system"`, `{"kind":"x"}`, `[]`) + `}`, "message-malformed"},
	}
	for _, c := range cases {
		place := at(7)
		place.Format = c.format
		e, err := events.Parse([]byte(surfaceEvent(c.typ, c.data)), place)
		if got := ruleOf(err); got != c.rule || err != nil && c.rule == "" {
			t.Errorf("format %d %s %s: %v, want %q", c.format, c.typ, c.data, err, c.rule)
		}
		if err == nil {
			sameReadBack(t, e, place)
		}
	}
	place := at(7)
	place.EmptyCallID = true
	mustParse(t, surfaceEvent("tool/result", toolData("", "[]")), place)
}

func TestMessageIsDerived(t *testing.T) {
	t.Parallel()
	inMessage := func(role, source, content string) string {
		return `{"turn":1,"message":{"id":"m","role":"` + role + `","source":` + source + `,"content":` + content + `}}`
	}
	const model = `{"kind":"model","provider":"p","model":"m"}`
	cases := []struct{ typ, data, want string }{
		{"user/message", userData, userData},
		{"system/message", inMessage("system", `{"kind":"x"}`, `["\ud800",1.0]`), `{"id":"m","role":"system","source":{"kind":"x"},"content":["\ud800",1.0]}`},
		{"system/message", inMessage("system", `{"kind":"x"}`, `[ ]`), ""},
		{"developer/message", inMessage("developer", `{"kind":"x"}`, `[1]`), `{"id":"m","role":"developer","source":{"kind":"x"},"content":[1]}`},
		{"developer/message", inMessage("developer", `{"kind":"x"}`, `[]`), ""},
		{"assistant/message", inMessage("assistant", model, `[{}]`), `{"id":"m","role":"assistant","source":` + model + `,"content":[{}]}`},
		{"assistant/message", inMessage("assistant", model, `[]`), ""},
		{"tool/result", `{"message":{"id":"m","role":"tool","source":{"kind":"tool","callId":"c"},"toolCallId":"c","content":[]}}`, `{"id":"m","role":"tool","source":{"kind":"tool","callId":"c"},"toolCallId":"c","content":[]}`},
	}
	place := at(7)
	place.Format = events.Format4
	for _, c := range cases {
		e := mustParse(t, surfaceEvent(c.typ, c.data), place)
		if got := e.Message(); string(got) != c.want || (got == nil) != (c.want == "") {
			t.Errorf("%s %s derives %s, want %s", c.typ, c.data, got, c.want)
		}
	}
	if m := mustParse(t, `{"type":"todo/write","data":`+userData+`}`, place).Message(); m != nil {
		t.Errorf("a log-only event derives %s", m)
	}
}

func TestFingerprint(t *testing.T) {
	t.Parallel()
	of := func(f events.Format, data string) string {
		place := at(7)
		place.Format = f
		e := mustParse(t, surfaceEvent("tool/result", data), place)
		var stored events.Event
		if err := events.ParseCanonical(&stored, e.Line, f, place.Vocabulary); err != nil {
			t.Fatal(err)
		}
		if err := stored.Check(f); err != nil {
			t.Fatal(err)
		}
		if stored.Fingerprint(f) != e.Fingerprint(f) {
			t.Errorf("%s has another fingerprint once it is stored", data)
		}
		return e.Fingerprint(f)
	}
	with := func(rest, blockRest, content string) string {
		return `{"message":{"id":"r","role":"user","source":{"kind":"tool","callId":"c"},"content":[{"type":"tool-result","toolCallId":"c"` + blockRest + `,"content":` + content + `}]}` + rest + `}`
	}
	flat := func(role, content string) string {
		return `{"message":{"id":"r","role":"` + role + `","source":{"kind":"tool","callId":"c"},"toolCallId":"c","content":` + content + `}}`
	}
	base := with(`,"x":{"a":1.10,"b":["é",null]}`, ``, `[]`)
	for _, same := range []string{
		with(`,"x":{"a":1.10,"b":["é",null]}`, ``, `[{"type":"text","text":"other"}]`),
		with(`,"x":{"b":["é",null],"a":1.1}`, ``, `[]`),
		with(`,"x":{"\u0061":11e-1,"b":["\u00E9",null]}`, ``, `[]`),
		`{"x":{"a":0.11E1,"b":["é",null]},` + with(``, ``, `[]`)[1:],
	} {
		if of(3, same) != of(3, base) {
			t.Errorf("%s differs from %s", same, base)
		}
	}
	for _, other := range []string{
		with(`,"x":{"a":1.11,"b":["é",null]}`, ``, `[]`),
		with(`,"x":{"a":"1.10","b":["é",null]}`, ``, `[]`),
		with(`,"x":{"a":-1.10,"b":["é",null]}`, ``, `[]`),
		with(`,"x":{"a":11.0,"b":["é",null]}`, ``, `[]`),
		with(`,"x":{"a":1.10,"b":[null,"é"]}`, ``, `[]`),
		with(`,"x":{"a":1.10,"b":["e\u0301",null]}`, ``, `[]`),
		with(`,"x":{"a":1.10,"b":["é",null,null]}`, ``, `[]`),
		with(`,"x":{"a":1.10,"b":["é"]}`, ``, `[]`),
		with(`,"x":{"A":1.10,"b":["é",null]}`, ``, `[]`),
		with(`,"x":{"a":1.10,"b":["é",null]}`, `,"isError":false`, `[]`),
		with(`,"x":{"a":1.10,"b":["é",null]},"content":[]`, ``, `[]`),
		with(``, ``, `[]`),
	} {
		if of(3, other) == of(3, base) {
			t.Errorf("%s is taken for %s", other, base)
		}
	}
	distinct := map[string]string{}
	for _, v := range []string{`0`, `1`, `10`, `-1`, `"1"`, `1e7`, `1e1000000`, `1e1000001`, `1e-1000001`, `[]`, `{}`, `[[]]`, `null`, `true`, `false`, `""`, `"~"`, `"\ud800"`, `"\ud801"`, `"\ufffd"`, `"\ud83d"`, `"\ud83d\ude00"`,
		`["1:a"]`, `["1","a"]`, `[1,2]`, `[12]`, `[1,[2]]`, `[[1,2]]`, `{"a":{"b":1}}`, `{"a":{},"b":1}`, `[1e1000001,1]`, `[{"a":1}]`, `{"a":[1]}`, `9007199254740993`, `9007199254740992`} {
		fp := of(3, with(`,"x":`+v, ``, `[]`))
		if old, ok := distinct[fp]; ok {
			t.Errorf("%s is taken for %s", v, old)
		}
		distinct[fp] = v
	}
	for _, pair := range [][2]string{{`0`, `-0`}, {`0`, `0e1000001`}, {`0`, `0.000`}, {`1e2`, `100`}, {`100.0`, `1E+2`}, {`"\ud83d\ude00"`, "\"\U0001F600\""}, {`"\/"`, `"/"`}} {
		if of(3, with(`,"x":`+pair[0], ``, `[]`)) != of(3, with(`,"x":`+pair[1], ``, `[]`)) {
			t.Errorf("%s differs from %s", pair[0], pair[1])
		}
	}
	if of(4, flat("tool", `[]`)) != of(4, flat("tool", `[{"type":"text","text":"x"}]`)) {
		t.Error("in format 4 the content of a message of role tool may change")
	}
	if of(4, with(``, ``, `[]`)) != of(4, with(``, ``, `[1]`)) {
		t.Error("in format 4 the content of a block may change, too")
	}
}

func TestFields(t *testing.T) {
	t.Parallel()
	none := events.Fields{Turn: events.NoSeq, Step: events.NoSeq, Epoch: events.NoSeq}
	edit := func(change func(*events.Fields)) events.Fields {
		f := none
		change(&f)
		return f
	}
	cases := []struct {
		raw  string
		want events.Fields
	}{
		{`{"type":"turn/start","data":{"turn":2.0,"step":0e5}}`, edit(func(f *events.Fields) { f.Turn, f.Step = 2, 0 })},
		{`{"type":"turn/start","data":{"turn":"2","step":-0}}`, none},
		{`{"type":"turn/start","data":[1]}`, none},
		{`{"type":"turn/start","data":"turn"}`, none},
		{`{"type":"turn/start","data":{"x":{"turn":1},"\u0074urn":3}}`, edit(func(f *events.Fields) { f.Turn = 3 })},
		{`{"type":"tool/call","data":{"callId":"c\u0031","message":{"source":{"callId":"other"}}}}`, edit(func(f *events.Fields) { f.CallID = "c1" })},
		{`{"type":"agent/status","data":{"agent":"a","status":"idle"}}`, edit(func(f *events.Fields) { f.Agent, f.Status = "a", "idle" })},
		{`{"type":"session/writer","data":{"writer":"w","epoch":3},"ignorable":true}`, edit(func(f *events.Fields) { f.Writer, f.Epoch = "w", 3 })},
		{`{"type":"session/end-seed","data":{"inherited":true}}`, edit(func(f *events.Fields) { f.Inherited = true })},
		{`{"type":"session/end-seed","data":{"inherited":"true"}}`, none},
		{surfaceEvent("tool/result", strings.Replace(toolData("c", "[]"), `{`, `{"callId":"other","error":null,`, 1)), edit(func(f *events.Fields) { f.Turn, f.Step, f.CallID = 1, 1, "c" })},
		{surfaceEvent("tool/result", strings.TrimSuffix(strings.Replace(toolData("c", "[]"), `false`, `true`, 1), `}`)+`,"error":{"code":"X"},"callId":"other"}`),
			edit(func(f *events.Fields) { f.Turn, f.Step, f.CallID, f.ErrorCode = 1, 1, "c", "X" })},
	}
	for _, c := range cases {
		if got := mustParse(t, c.raw, at(7)).Fields(); got != c.want {
			t.Errorf("%s\n got %+v\nwant %+v", c.raw, got, c.want)
		}
	}
}

func TestToolCalls(t *testing.T) {
	t.Parallel()
	message := func(content string) string {
		return surfaceEvent("assistant/message", `{"message":{"id":"a","role":"assistant","source":{"kind":"model","provider":"p","model":"m"},"content":`+content+`}}`)
	}
	for content, want := range map[string][]string{
		`[]`: nil,
		`[{"type":"text","id":"x"},{"type":"tool-call","id":"b"},{"id":"\u0061","type":"tool-c\u0061ll"},{"type":"tool-call"},{"type":"tool-call","id":""},{"type":"tool-call","id":5},"tool-call",null]`: {"b", "a"},
	} {
		if got := mustParse(t, message(content), at(7)).ToolCalls(); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %q, want %q", content, got, want)
		}
	}
}

func TestRewriteKeepsAllElse(t *testing.T) {
	t.Parallel()
	flat := `{"message":{"id":"r","role":"tool","source":{"kind":"tool","callId":"c"},"toolCallId":"c","content":[1.0]},"x":[1.10,"\ud800"]}`
	for _, c := range []struct {
		format    events.Format
		data, old string
	}{
		{events.Format3, strings.TrimSuffix(toolData("c", `[{"content":[5]}]`), `}`) + `,"x":[1.10,"\ud800"]}`, `[{"content":[5]}]`},
		{events.Format4, flat, `[1.0]`},
	} {
		place := at(7)
		place.Format = c.format
		e := mustParse(t, surfaceEvent("tool/result", c.data), place)
		if got := string(e.RewritableContent(c.format)); got != c.old {
			t.Errorf("format %d: %s may change, want %s", c.format, got, c.old)
		}
		got := string(e.Rewrite(c.format, []byte(`["new"]`)))
		if want := strings.Replace(c.data, c.old, `["new"]`, 1); got != want {
			t.Errorf("format %d:\n got %s\nwant %s", c.format, got, want)
		}
		if mustParse(t, surfaceEvent("tool/result", got), place).Fingerprint(c.format) != e.Fingerprint(c.format) {
			t.Errorf("format %d: a rewrite breaks the rule for rewrites", c.format)
		}
		if calls, result := events.ToolIDs(e.Kind, e.Message()); calls != nil || result != "c" {
			t.Errorf("the result answers %q and calls %q", result, calls)
		}
	}
	calls, result := events.ToolIDs(events.KindAssistant, []byte(`{"content":[{"type":"tool-call","id":"a"},{"type":"text"}]}`))
	if !reflect.DeepEqual(calls, []string{"a"}) || result != "" {
		t.Errorf("an assistant message answers %q and calls %q", result, calls)
	}
}

func TestErrorSaysWhatAndWhere(t *testing.T) {
	t.Parallel()
	_, err := events.Parse([]byte(`{"type":"x/y","data":1}`), at(7))
	if got := fmt.Sprint(err); !strings.HasPrefix(got, `rule-violation unknown-type seq 7: type "x/y" is not in the vocabulary of format 3`) || !strings.Contains(got, `"ignorable":true`) {
		t.Error(got)
	}
}
