package provider_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"palimpsest/internal/demo"
	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/provider"
	"palimpsest/internal/session"
	"palimpsest/internal/sessionfile"
	"palimpsest/internal/surface"
)

func TestRenderRefusesOtherTargets(t *testing.T) {
	t.Parallel()
	_, err := provider.Render("gemini", events.Format3, nil)
	var e *events.Error
	if !errors.As(err, &e) || e.Code != events.CodeBadRequest || !strings.Contains(e.Detail, `"gemini"`) {
		t.Fatalf("expected a bad request that names the target, got %v", err)
	}
}

func TestEmptyListIsEmpty(t *testing.T) {
	t.Parallel()
	for _, target := range targets {
		out := render(t, target, events.Format3, nil)
		if got := string(out.AppendJSON(nil)); got != `"messages":[],"report":[]` {
			t.Errorf("%s: got %s", target, got)
		}
	}
	if u := provider.Unpaired(events.Format3, nil); u == nil || len(u) != 0 {
		t.Errorf("expected an empty list that is no null, got %v", u)
	}
}

// TestUnpairedKeepsCallIDs pins that an id which encoding/json cannot write comes out as it was.
func TestUnpairedKeepsCallIDs(t *testing.T) {
	t.Parallel()
	m := provider.Message{Seq: 7, Kind: events.KindTool, JSON: []byte(toolResult(events.Format3, `<\ud800\"`, false, "[]"))}
	got, err := json.Marshal(provider.Unpaired(events.Format3, []provider.Message{m}))
	if want := `[{"kind":"result","callId":"\u003c\ud800\"","seq":7,"index":0}]`; err != nil || string(got) != want {
		t.Errorf("got %s, %v\nwant %s", got, err, want)
	}
}

// TestRecordedSessionsRender renders real sessions as they were after each of their events,
// which is what a crash at that point leaves behind.
func TestRecordedSessionsRender(t *testing.T) {
	t.Parallel()
	check := func(t *testing.T, f *sessionfile.File) events.Format {
		r, err := f.Check(t.Context())
		if err == nil {
			err = r.Err()
		}
		if err != nil {
			t.Fatal(err)
		}
		format := f.Header().Format
		s := session.New("s", format, nil, surface.KeepBodies)
		err = f.Events(t.Context(), func(e *events.Event) error {
			p, err := s.Plan(e, lifecycle.Off)
			if err != nil {
				return err
			}
			s.Apply(&p, 0)
			if !e.Kind.OnSurface() {
				return nil
			}
			messages := onSurface(t, s.Surface)
			checkUnpaired(t, format, messages)
			for _, target := range targets {
				checkReport(t, target, format, messages, render(t, target, format, messages))
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		// Each of them ends with its pairs in order.
		if u := provider.Unpaired(format, onSurface(t, s.Surface)); len(u) > 0 && r.OpenTurn == nil {
			t.Errorf("unpaired at the end: %+v", u)
		}
		return format
	}
	t.Run("demo", func(t *testing.T) {
		t.Parallel()
		check(t, sessionfile.OpenBytes("demo.jsonl", demo.Session(), sessionfile.Options{}))
	})
	files, err := filepath.Glob(filepath.Join("..", "..", "..", "shared", "sessions", "v[34]-*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	if len(files) == 0 {
		t.Skip("no recorded sessions at ../shared/sessions")
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".jsonl"), func(t *testing.T) {
			t.Parallel()
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			format := check(t, sessionfile.OpenBytes(file, content, sessionfile.Options{IDFrom: sessionfile.IDFromFilename}))
			if strings.HasPrefix(filepath.Base(file), "v4-") != (format == events.Format4) {
				t.Errorf("read as format %d", format)
			}
		})
	}
}

func onSurface(t *testing.T, s *surface.State) (out []provider.Message) {
	t.Helper()
	for i := range s.Len() {
		n := s.Node(i)
		m, err := n.Message(s.Format())
		if err != nil {
			t.Fatal(err)
		}
		if m != nil {
			out = append(out, provider.Message{Seq: n.Seq, Kind: n.Kind, JSON: m})
		}
	}
	return out
}

// checkReport checks that a block is in the list with the exact bytes of its strings, or else
// in the report.
func checkReport(t fataler, target provider.Target, f events.Format, messages []provider.Message, out provider.Rendered) {
	t.Helper()
	list := append(slices.Clone([]byte(out.System)), out.Messages...)
	named := map[[2]int]bool{}
	for _, n := range out.Report {
		switch {
		case n.Block != nil:
			named[[2]int{n.Index, *n.Block}] = true
		case n.Action == provider.LeftOut || n.Action == provider.Synthesized:
			named[[2]int{n.Index, -1}] = true
		}
	}
	for i, m := range messages {
		content := events.Get(m.JSON, "content")
		if m.Kind == events.KindTool && !(f == events.Format4 && events.TextIs(events.Get(m.JSON, "role"), "tool")) {
			events.EachElement(content, func(b []byte) bool { content = events.Get(b, "content"); return false })
		}
		n := 0
		empty := true
		events.EachElement(content, func(b []byte) bool {
			empty = false
			at := [2]int{i, n}
			n++
			if named[at] || named[[2]int{i, -1}] {
				return true
			}
			var tokens [][]byte
			switch typ, _ := events.Text(events.Get(b, "type")); typ {
			case "text":
				tokens = [][]byte{events.Get(b, "text")}
			case "thinking", "reasoning":
				tokens = [][]byte{events.Get(b, "text"), events.Get(b, "thinking"), events.Get(b, "signature")}
			case "tool-call":
				tokens = [][]byte{events.Get(b, "id"), events.Get(b, "name")}
				if target == provider.OpenAI {
					tokens = append(tokens, events.Get(b, "arguments"))
				}
			case "image":
				tokens = [][]byte{events.Get(b, "data"), events.Get(b, "url")}
			default:
				t.Fatalf("message %d, block %d: not in the report: %s\n%s", i, at[1], b, out.AppendJSON(nil))
			}
			for _, tok := range tokens {
				if tok != nil && !bytes.Contains(list, tok[1:len(tok)-1]) {
					t.Fatalf("message %d, block %d: neither in the list nor in the report: %s of %s\n%s", i, at[1], tok, b, out.AppendJSON(nil))
				}
			}
			return true
		})
		if empty && m.Kind != events.KindTool && !named[[2]int{i, -1}] {
			t.Fatalf("message %d without content: not in the report", i)
		}
	}
}

// checkUnpaired compares with a pairing that looks at everything for each result anew.
func checkUnpaired(t fataler, f events.Format, messages []provider.Message) {
	t.Helper()
	type call struct {
		message  int
		id       string
		answered bool
	}
	var calls []call
	want := []provider.UnpairedEntry{}
	for i, m := range messages {
		ids := idsOf(m)
		if m.Kind == events.KindAssistant {
			for _, id := range ids {
				calls = append(calls, call{message: i, id: id})
			}
		}
		if m.Kind != events.KindTool {
			continue
		}
		last := -1
		for _, c := range calls {
			if c.id == ids[0] {
				last = c.message
			}
		}
		n := slices.IndexFunc(calls, func(c call) bool { return c.id == ids[0] && c.id != "" && c.message == last && !c.answered })
		if n < 0 {
			want = append(want, provider.UnpairedEntry{Kind: "result", CallID: ids[0], Seq: m.Seq, Index: i})
			continue
		}
		calls[n].answered = true
	}
	for _, c := range calls {
		if !c.answered {
			want = append(want, provider.UnpairedEntry{Kind: "call", CallID: c.id, Seq: messages[c.message].Seq, Index: c.message})
		}
	}
	slices.SortStableFunc(want, func(a, b provider.UnpairedEntry) int { return a.Index - b.Index })
	if got := provider.Unpaired(f, messages); !slices.Equal(got, want) {
		t.Fatalf("unpaired\n got %+v\nwant %+v", got, want)
	}
}

// idsOf returns the ids of an assistant's calls, or the one that a result answers.
func idsOf(m provider.Message) (ids []string) {
	if m.Kind == events.KindTool {
		id, _ := events.Text(events.Get(events.Get(m.JSON, "source"), "callId"))
		return []string{id}
	}
	events.EachElement(events.Get(m.JSON, "content"), func(b []byte) bool {
		if events.TextIs(events.Get(b, "type"), "tool-call") {
			id, _ := events.Text(events.Get(b, "id"))
			ids = append(ids, id)
		}
		return true
	})
	return ids
}

// TestRandomListsRender renders random lists: orphans, split pairs, duplicates, odd ids, empty
// contents, blocks of every kind in every place.
func TestRandomListsRender(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(r *rapid.T) {
		g := generator{r: r}
		g.format = rapid.SampledFrom([]events.Format{events.Format3, events.Format4}).Draw(r, "format")
		for range rapid.IntRange(1, 3).Draw(r, "ids") {
			g.ids = append(g.ids, g.id())
		}
		var messages []provider.Message
		for i := range rapid.IntRange(0, 14).Draw(r, "messages") {
			messages = append(messages, g.message(events.Seq(10*i)))
		}
		checkUnpaired(r, g.format, messages)
		calls, results := 0, 0
		for _, u := range provider.Unpaired(g.format, messages) {
			if u.Kind == provider.UnpairedCall {
				calls++
			} else {
				results++
			}
		}
		for _, target := range targets {
			out := render(r, target, g.format, messages)
			checkReport(r, target, g.format, messages, out)
			synthesized, leftOut := 0, 0
			for _, n := range out.Report {
				switch {
				case n.What == "tool-call" && n.Action == provider.Synthesized:
					synthesized++
				case n.What == "tool/result" && n.Action == provider.LeftOut:
					leftOut++
				}
			}
			if synthesized != calls || leftOut != results {
				r.Fatalf("%s: %d calls and %d results are unpaired, the report has %d and %d", target, calls, results, synthesized, leftOut)
			}
			checkIDsStay(r, target, g.format, messages)
		}
	})
}

// checkIDsStay checks that what is appended to a list does not change how earlier calls are
// named, so that a provider's cache of the list holds.
func checkIDsStay(t fataler, target provider.Target, f events.Format, messages []provider.Message) {
	t.Helper()
	var before []string
	for i := range len(messages) + 1 {
		out := render(t, target, f, messages[:i])
		var ids []string
		events.EachElement(out.Messages, func(m []byte) bool {
			if !events.TextIs(events.Get(m, "role"), "assistant") {
				return true
			}
			for _, member := range []string{"tool_calls", "content"} {
				events.EachElement(events.Get(m, member), func(b []byte) bool {
					if id := events.Get(b, "id"); id != nil {
						ids = append(ids, string(id))
					}
					return true
				})
			}
			return true
		})
		if len(ids) < len(before) || !slices.Equal(ids[:len(before)], before) {
			t.Fatalf("%s: message %d changes ids from %q to %q", target, i-1, before, ids)
		}
		before = ids
	}
}

type generator struct {
	r      *rapid.T
	format events.Format
	ids    []string // few, so that calls and results meet
	n      int
}

func (g *generator) pick(label string, from ...string) string {
	return rapid.SampledFrom(from).Draw(g.r, label)
}

// word is a piece of text that stands nowhere else in the list.
func (g *generator) word() string {
	g.n++
	return fmt.Sprintf(`w%dw`, g.n)
}

func (g *generator) text() string {
	return g.pick("text", ``, ` \n\t`, `\u00a0`, `%`, ` %\n`, `\ud800%`, `%\udc00`, `\u0041<&>%\/`, "é\u2028%\\ud83d\\ude00 ")
}

func (g *generator) message(seq events.Seq) provider.Message {
	kinds := []events.Kind{events.KindUser, events.KindAssistant, events.KindAssistant, events.KindTool, events.KindTool, events.KindSystem}
	if g.format == events.Format4 {
		kinds = append(kinds, events.KindDeveloper)
	}
	k := rapid.SampledFrom(kinds).Draw(g.r, "kind")
	var blocks []string
	for range rapid.IntRange(0, 3).Draw(g.r, "blocks") {
		blocks = append(blocks, g.block(k))
	}
	content := "[" + strings.Join(blocks, ",") + "]"
	var text string
	switch k {
	case events.KindTool:
		f := g.format
		if rapid.IntRange(0, 3).Draw(g.r, "role") == 0 {
			f = events.Format3 // format 4 has results of role user, too
		}
		text = toolResult(f, g.pick("id", g.ids...), rapid.Bool().Draw(g.r, "error"), content)
	case events.KindAssistant:
		text = `{"id":"m","role":"assistant","content":` + content + `,"source":{"kind":"model","provider":"` + g.pick("provider", "p", "Anthropic") + `","model":"m"}}`
	default:
		text = `{"id":"m","role":"user","source":{"kind":"k"},"content":` + content + `}`
	}
	compact, err := events.Compact(nil, []byte(text))
	if err != nil {
		g.r.Fatalf("%s: %v", text, err)
	}
	return provider.Message{Seq: seq, Kind: k, JSON: compact}
}

func (g *generator) id() string {
	return g.pick("new id", "a", "a.b", "a_b", "a:b", "", `\ud800`, `\u0061`, "é", strings.Repeat("x", 41), strings.Repeat("x", 42))
}

func (g *generator) block(k events.Kind) string {
	types := []string{"text", "text", "image", "attachment", "other", "tool-addition", "members"}
	if k == events.KindAssistant {
		types = append(types, "tool-call", "tool-call", "tool-call", "tool-call", "thinking", "reasoning")
	}
	word := strings.ReplaceAll(g.text(), "%", g.word())
	switch typ := g.pick("block", types...); typ {
	case "text":
		return `{"type":"text","text":"` + word + `"}`
	case "members":
		return `{"type":"text","text":"` + word + `","x":1}`
	case "tool-call":
		args := g.pick("arguments", `,"arguments":"{}"`, `,"arguments":"{\"a\":\"\\ud800 1.0\"}"`, `,"arguments":"{\"a\":\"\ud800\"}"`, `,"arguments":"[]"`, `,"arguments":"{\"a\""`, `,"arguments":""`, `,"arguments":{"a":1.0}`, `,"arguments":[2.0]`, `,"arguments":null`, ``)
		return `{"type":"tool-call","id":"` + g.pick("id", g.ids...) + `","name":"` + g.pick("name", "n", "m.n", "", strings.Repeat("n", 65), strings.Repeat("n", 129)) + `"` + args + `}`
	case "thinking":
		return `{"type":"thinking","thinking":"` + word + `","signature":"` + g.pick("signature", "", "c2ln") + `"}`
	case "reasoning":
		return `{"type":"reasoning","text":"` + word + `"}`
	case "image":
		return `{"type":"image",` + g.pick("image", `"mediaType":"image/png","data":"AAAA"`, `"mediaType":"image/bmp","data":"AAAA"`, `"url":"https://h/1"`, `"url":"http://h/2"`, `"url":"x"`) + `}`
	case "attachment":
		return `{"type":"image","attachment":{"attachmentId":"` + word + `"}}`
	default:
		return `{"type":"` + typ + `","x":"` + word + `"}`
	}
}

// FuzzRender renders whatever is JSON. The first bytes of kinds say of which kinds the
// messages are.
func FuzzRender(f *testing.F) {
	kinds := []events.Kind{events.KindUser, events.KindAssistant, events.KindTool, events.KindSystem, events.KindDeveloper, events.KindLog, events.KindOpaque}
	f.Add([]byte(`[{"content":[{"type":"text","text":"go"}]},{"content":[{"type":"tool-call","id":"a.b","name":"n","arguments":"{\"a\":\"\\ud800\"}"},{"type":"image","data":"AAAA","mediaType":"image/png"}]},{"source":{"callId":"a.b"},"content":[{"type":"tool-result","isError":true,"content":[{"type":"image","url":"https://h/"}]}]}]`), []byte{0, 1, 2}, false)
	f.Add([]byte(`[{"source":{"provider":"anthropic"},"content":[{"type":"thinking","thinking":"t","signature":"s"},{"type":"text","text":" x\u0020\n"}]},{"content":[{"type":"text","text":"\u000b"}]}]`), []byte{1, 3}, false)
	f.Add([]byte(`[{"role":"tool","toolCallId":"a","content":[null,"x",{"type":"tool-addition"}]},{"content":"x"},[],7]`), []byte{2, 4, 0, 1}, true)
	f.Add([]byte(`[{"content":[{"type":"tool-call","id":"a","arguments":"{\"a\":\"\\\ud800\"}"},{"type":"tool-call","id":"a","arguments":[1]}]}]`), []byte{1}, true)
	f.Fuzz(func(t *testing.T, list, kindOf []byte, four bool) {
		compact, err := events.Compact(nil, list)
		if err != nil || len(kindOf) == 0 {
			return
		}
		format := events.Format3
		if four {
			format = events.Format4
		}
		var messages []provider.Message
		events.EachElement(compact, func(m []byte) bool {
			i := len(messages)
			messages = append(messages, provider.Message{Seq: events.Seq(i), Kind: kinds[int(kindOf[i%len(kindOf)])%len(kinds)], JSON: m})
			return true
		})
		for _, target := range targets {
			render(t, target, format, messages)
		}
		calls := 0
		for _, u := range provider.Unpaired(format, messages) {
			if _, err := u.MarshalJSON(); err != nil || u.Index >= len(messages) {
				t.Fatalf("%+v: %v", u, err)
			}
			if u.Kind == provider.UnpairedCall {
				calls++
			}
		}
		out, _ := provider.Render(provider.OpenAI, format, messages)
		for _, n := range out.Report {
			if n.What == "tool-call" && n.Action == provider.Synthesized {
				calls--
			}
		}
		if calls != 0 {
			t.Fatalf("%d calls are unpaired and have no result in the list", calls)
		}
	})
}
