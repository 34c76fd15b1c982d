package provider_test

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// The rules of the two APIs, as their documentation and their error messages give them. This
// file knows nothing of how messages are rendered: it decodes a list with encoding/json and
// names what an API would refuse.

var (
	openAIName    = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)
	anthropicName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,128}$`)
	anthropicID   = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)
	imageTypes    = []string{"image/jpeg", "image/png", "image/gif", "image/webp"}
)

type (
	object = map[string]any
	array  = []any
)

// checker collects what is wrong.
type checker struct {
	at    string
	wrong []string
}

func (c *checker) fail(format string, args ...any) {
	c.wrong = append(c.wrong, c.at+": "+fmt.Sprintf(format, args...))
}

// keys demands some keys of an object and lets others be.
func (c *checker) keys(o object, required, optional []string) {
	for _, k := range required {
		if _, ok := o[k]; !ok {
			c.fail("no %s", k)
		}
	}
	for k := range o {
		if !slices.Contains(required, k) && !slices.Contains(optional, k) {
			c.fail("unknown key %s", k)
		}
	}
}

func (c *checker) decode(raw []byte) array {
	var list array
	if err := json.Unmarshal(raw, &list); err != nil || list == nil {
		c.fail("expected an array: %v", err)
	}
	return list
}

func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

func isBlank(s string) bool { return strings.TrimFunc(s, isSpace) == "" }

func checkOpenAI(messages []byte) []string {
	c := &checker{at: "messages"}
	list := c.decode(messages)
	var waiting []string // ids of the last assistant message that no tool message has answered
	used := map[string]bool{}
	for i, v := range list {
		c.at = fmt.Sprintf("messages[%d]", i)
		m, _ := v.(object)
		role, _ := m["role"].(string)
		if role != "tool" && len(waiting) > 0 {
			c.fail("a %s message where tool messages must answer %q", role, waiting)
			waiting = nil
		}
		switch role {
		case "system", "developer":
			c.keys(m, []string{"role", "content"}, nil)
			c.openAIContent(m["content"], "text")
		case "user":
			c.keys(m, []string{"role", "content"}, nil)
			c.openAIContent(m["content"], "text", "image_url")
		case "tool":
			c.keys(m, []string{"role", "content", "tool_call_id"}, nil)
			c.openAIContent(m["content"], "text")
			id, _ := m["tool_call_id"].(string)
			n := slices.Index(waiting, id)
			if n < 0 {
				c.fail("tool_call_id %q, expected one of %q", id, waiting)
				continue
			}
			waiting = slices.Delete(waiting, n, n+1)
		case "assistant":
			c.keys(m, []string{"role", "content"}, []string{"tool_calls"})
			if m["content"] != nil {
				c.openAIContent(m["content"], "text")
			} else if m["tool_calls"] == nil {
				c.fail("neither content nor tool_calls")
			}
			if _, ok := m["tool_calls"]; ok {
				waiting = c.openAICalls(m["tool_calls"], used)
			}
		default:
			c.fail("role %q", role)
		}
	}
	if len(waiting) > 0 {
		c.fail("the end where tool messages must answer %q", waiting)
	}
	return c.wrong
}

func (c *checker) openAIContent(v any, types ...string) {
	if _, ok := v.(string); ok {
		return
	}
	parts, _ := v.(array)
	if len(parts) == 0 {
		c.fail("content: expected a string or parts")
	}
	for _, v := range parts {
		p, _ := v.(object)
		typ, _ := p["type"].(string)
		if !slices.Contains(types, typ) {
			c.fail("a part of type %q", typ)
			continue
		}
		c.keys(p, []string{"type", typ}, nil)
		switch typ {
		case "text":
			if s, _ := p["text"].(string); s == "" {
				c.fail("an empty text part")
			}
		case "image_url":
			image, _ := p["image_url"].(object)
			c.keys(image, []string{"url"}, []string{"detail"})
			url, _ := image["url"].(string)
			if head, data, ok := strings.Cut(url, ";base64,"); ok && strings.HasPrefix(head, "data:") {
				c.base64(strings.TrimPrefix(head, "data:"), data)
			} else if !strings.HasPrefix(url, "https://") && !strings.HasPrefix(url, "http://") {
				c.fail("image URL %q", url)
			}
		}
	}
}

func (c *checker) base64(media, data string) {
	if !slices.Contains(imageTypes, media) {
		c.fail("media type %q", media)
	}
	if _, err := base64.StdEncoding.DecodeString(data); err != nil || data == "" {
		c.fail("data %q: %v", data, err)
	}
}

func (c *checker) openAICalls(v any, used map[string]bool) (ids []string) {
	calls, _ := v.(array)
	if len(calls) == 0 {
		c.fail("tool_calls: expected at least one")
	}
	for _, v := range calls {
		call, _ := v.(object)
		c.keys(call, []string{"id", "type", "function"}, nil)
		if call["type"] != "function" {
			c.fail("tool call of type %v", call["type"])
		}
		f, _ := call["function"].(object)
		c.keys(f, []string{"name", "arguments"}, nil)
		if name, _ := f["name"].(string); !openAIName.MatchString(name) {
			c.fail("tool name %q", name)
		}
		if _, ok := f["arguments"].(string); !ok {
			c.fail("arguments: expected a string")
		}
		id, _ := call["id"].(string)
		if n := utf8.RuneCountInString(id); n == 0 || n > 40 {
			c.fail("id %q of %d characters", id, n)
		}
		if used[id] {
			c.fail("id %q is there twice", id)
		}
		used[id] = true
		ids = append(ids, id)
	}
	return ids
}

func checkAnthropic(system, messages []byte) []string {
	c := &checker{at: "system"}
	if system != nil {
		blocks := c.decode(system)
		if len(blocks) == 0 {
			c.fail("empty")
		}
		for _, b := range blocks {
			c.anthropicText(b)
		}
	}
	c.at = "messages"
	list := c.decode(messages)
	var waiting []string // tool_use ids of the message before
	used := map[string]bool{}
	for i, v := range list {
		c.at = fmt.Sprintf("messages.%d", i)
		m, _ := v.(object)
		c.keys(m, []string{"role", "content"}, nil)
		if want := []string{"user", "assistant"}[i%2]; m["role"] != want {
			c.fail("role %v, expected %s", m["role"], want)
		}
		blocks, _ := m["content"].(array)
		if len(blocks) == 0 {
			c.fail("content: expected blocks")
			continue
		}
		if m["role"] == "user" {
			c.anthropicUser(blocks, waiting)
			waiting = nil
			continue
		}
		waiting = c.anthropicAssistant(blocks, used)
		if i < len(list)-1 {
			continue
		}
		if len(waiting) > 0 {
			c.fail("no results for %q", waiting)
		}
		last, _ := blocks[len(blocks)-1].(object)
		if s, _ := last["text"].(string); s != strings.TrimRightFunc(s, isSpace) {
			c.fail("white space at the end of the last text")
		}
	}
	return c.wrong
}

func (c *checker) anthropicText(v any) {
	b, _ := v.(object)
	if b["type"] != "text" {
		c.fail("expected a text block, found %v", b["type"])
		return
	}
	c.keys(b, []string{"type", "text"}, nil)
	if s, _ := b["text"].(string); isBlank(s) {
		c.fail("a text block without text")
	}
}

func (c *checker) anthropicImage(b object) {
	c.keys(b, []string{"type", "source"}, nil)
	source, _ := b["source"].(object)
	switch source["type"] {
	case "base64":
		c.keys(source, []string{"type", "media_type", "data"}, nil)
		media, _ := source["media_type"].(string)
		data, _ := source["data"].(string)
		c.base64(media, data)
	case "url":
		c.keys(source, []string{"type", "url"}, nil)
		if url, _ := source["url"].(string); !strings.HasPrefix(url, "https://") {
			c.fail("image URL %q", url)
		}
	default:
		c.fail("image source of type %v", source["type"])
	}
}

func (c *checker) anthropicUser(blocks array, waiting []string) {
	waiting = slices.Clone(waiting)
	over := false // the results are over
	for _, v := range blocks {
		b, _ := v.(object)
		switch b["type"] {
		case "tool_result":
			c.keys(b, []string{"type", "tool_use_id"}, []string{"content", "is_error"})
			if over {
				c.fail("a tool_result behind other blocks")
			}
			id, _ := b["tool_use_id"].(string)
			n := slices.Index(waiting, id)
			if n < 0 {
				c.fail("tool_result for %q, expected one of %q", id, waiting)
				continue
			}
			waiting = slices.Delete(waiting, n, n+1)
			c.anthropicResult(b)
		case "image":
			over = true
			c.anthropicImage(b)
		default:
			over = true
			c.anthropicText(v)
		}
	}
	if len(waiting) > 0 {
		c.fail("no results for %q", waiting)
	}
}

func (c *checker) anthropicResult(b object) {
	isError, _ := b["is_error"].(bool)
	if _, ok := b["content"]; !ok {
		if isError {
			c.fail("an error without content")
		}
		return
	}
	content, _ := b["content"].(array)
	if len(content) == 0 {
		c.fail("tool_result.content: expected blocks")
	}
	for _, v := range content {
		if p, _ := v.(object); p["type"] == "image" && !isError {
			c.anthropicImage(p)
		} else {
			c.anthropicText(v)
		}
	}
}

func (c *checker) anthropicAssistant(blocks array, used map[string]bool) (ids []string) {
	for i, v := range blocks {
		b, _ := v.(object)
		switch b["type"] {
		case "thinking":
			c.keys(b, []string{"type", "thinking", "signature"}, nil)
			if s, _ := b["signature"].(string); s == "" {
				c.fail("thinking without a signature")
			}
			if i == len(blocks)-1 {
				c.fail("thinking at the end")
			}
		case "redacted_thinking":
			c.keys(b, []string{"type", "data"}, nil)
			if i == len(blocks)-1 {
				c.fail("thinking at the end")
			}
		case "tool_use":
			c.keys(b, []string{"type", "id", "name", "input"}, nil)
			id, _ := b["id"].(string)
			if !anthropicID.MatchString(id) {
				c.fail("id %q", id)
			}
			if used[id] {
				c.fail("id %q is there twice", id)
			}
			used[id] = true
			ids = append(ids, id)
			if name, _ := b["name"].(string); !anthropicName.MatchString(name) {
				c.fail("tool name %q", name)
			}
			if _, ok := b["input"].(object); !ok {
				c.fail("input: expected an object")
			}
		default:
			c.anthropicText(v)
		}
	}
	return ids
}

// TestRulesRefuse makes sure that the rules above are rules.
func TestRulesRefuse(t *testing.T) {
	t.Parallel()
	const openAICall = `{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":{"name":"n","arguments":"{}"}}]}`
	const use = `{"role":"user","content":[{"type":"text","text":"q"}]},{"role":"assistant","content":[{"type":"tool_use","id":"a","name":"n","input":{}}]}`
	user := func(blocks string) string { return `[{"role":"user","content":[` + blocks + `]}]` }
	said := func(blocks string) string {
		return `[{"role":"user","content":[{"type":"text","text":"q"}]},{"role":"assistant","content":[` + blocks + `]}]`
	}
	results := func(blocks string) string { return `[` + use + `,{"role":"user","content":[` + blocks + `]}]` }
	for list, ok := range map[string]bool{
		`[]`:                             true,
		`[{"role":"user","content":""}]`: true,
		`[` + openAICall + `,{"role":"tool","tool_call_id":"a","content":"x"}]`: true,
		`[` + openAICall + `]`: false,
		`[` + openAICall + `,{"role":"user","content":"x"},{"role":"tool","tool_call_id":"a","content":"x"}]`:                                       false,
		`[` + openAICall + `,{"role":"tool","tool_call_id":"b","content":"x"}]`:                                                                     false,
		`[` + openAICall + `,{"role":"tool","tool_call_id":"a","content":"x"},{"role":"tool","tool_call_id":"a","content":"x"}]`:                    false,
		`[` + openAICall + `,{"role":"tool","tool_call_id":"a","content":"x"},` + openAICall + `,{"role":"tool","tool_call_id":"a","content":"x"}]`: false,
		`[{"role":"tool","tool_call_id":"a","content":"x"}]`:                                                                                        false,
		`[{"role":"assistant","content":null}]`:                                                                                                     false,
		`[{"role":"assistant","content":"x","tool_calls":[]}]`:                                                                                      false,
		`[{"role":"user","content":[]}]`:                                                                                                            false,
		`[{"role":"user","content":[{"type":"text","text":""}]}]`:                                                                                   false,
		`[{"role":"robot","content":"x"}]`:                                                                                                          false,
		`[{"role":"system","content":[{"type":"image_url","image_url":{"url":"https://h/"}}]}]`:                                                     false,
		`[{"role":"user","content":[{"type":"image_url","image_url":{"url":"ftp://h/"}}]}]`:                                                         false,
		strings.Replace(`[`+openAICall+`,{"role":"tool","tool_call_id":"a","content":"x"}]`, `"{}"`, `{}`, 1):                                       false,
		strings.Replace(`[`+openAICall+`,{"role":"tool","tool_call_id":"a","content":"x"}]`, `"n"`, `"n.n"`, 1):                                     false,
		strings.ReplaceAll(`[`+openAICall+`,{"role":"tool","tool_call_id":"a","content":"x"}]`, `"a"`, `"`+strings.Repeat("a", 41)+`"`):             false,
	} {
		if wrong := checkOpenAI([]byte(list)); (wrong == nil) != ok {
			t.Errorf("OpenAI: %s: %q", list, wrong)
		}
	}
	for list, ok := range map[string]bool{
		`[]`:                               true,
		user(`{"type":"text","text":"x"}`): true,
		said(`{"type":"text","text":"x"}`): true,
		results(`{"type":"tool_result","tool_use_id":"a"}`):                                                               true,
		`[{"role":"assistant","content":[{"type":"text","text":"x"}]}]`:                                                   false,
		`[{"role":"user","content":[{"type":"text","text":"x"}]},{"role":"user","content":[{"type":"text","text":"x"}]}]`: false,
		user(``):                             false,
		user(`{"type":"text","text":" \n"}`): false,
		user(`{"type":"thinking","thinking":"x","signature":"x"}`):                                                                                  false,
		user(`{"type":"image","source":{"type":"url","url":"http://h/"}}`):                                                                          false,
		user(`{"type":"image","source":{"type":"base64","media_type":"image/png","data":"?"}}`):                                                     false,
		user(`{"type":"image","source":{"type":"base64","media_type":"image/bmp","data":"AAAA"}}`):                                                  false,
		user(`{"type":"tool_result","tool_use_id":"a"}`):                                                                                            false,
		said(`{"type":"text","text":"x "}`):                                                                                                         false,
		said(`{"type":"tool_use","id":"a","name":"n","input":{}}`):                                                                                  false,
		said(`{"type":"thinking","thinking":"x","signature":"x"}`):                                                                                  false,
		said(`{"type":"image","source":{"type":"url","url":"https://h/"}}`):                                                                         false,
		results(`{"type":"text","text":"x"}`):                                                                                                       false,
		results(`{"type":"text","text":"x"},{"type":"tool_result","tool_use_id":"a"}`):                                                              false,
		results(`{"type":"tool_result","tool_use_id":"a"},{"type":"tool_result","tool_use_id":"a"}`):                                                false,
		results(`{"type":"tool_result","tool_use_id":"a","is_error":true}`):                                                                         false,
		results(`{"type":"tool_result","tool_use_id":"a","content":[]}`):                                                                            false,
		results(`{"type":"tool_result","tool_use_id":"a","is_error":true,"content":[{"type":"image","source":{"type":"url","url":"https://h/"}}]}`): false,
		strings.ReplaceAll(results(`{"type":"tool_result","tool_use_id":"a"}`), `"a"`, `"a.b"`):                                                     false,
		strings.Replace(results(`{"type":"tool_result","tool_use_id":"a"}`), `{}`, `[]`, 1):                                                         false,
		strings.Replace(results(`{"type":"tool_result","tool_use_id":"a"}`), `"n"`, `""`, 1):                                                        false,
	} {
		if wrong := checkAnthropic(nil, []byte(list)); (wrong == nil) != ok {
			t.Errorf("Anthropic: %s: %q", list, wrong)
		}
	}
	for system, ok := range map[string]bool{`[{"type":"text","text":"x"}]`: true, `[]`: false, `[{"type":"text","text":""}]`: false} {
		if wrong := checkAnthropic([]byte(system), []byte(`[]`)); (wrong == nil) != ok {
			t.Errorf("Anthropic: system %s: %q", system, wrong)
		}
	}
}
