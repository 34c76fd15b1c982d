package provider_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/provider"
)

var update = flag.Bool("update", false, "rewrite what the stories in testdata expect")

// TestStories runs the command files in testdata. A line that starts in the first column is a
// command, the indented lines behind it are what it must print. The first line of a file says
// which fault it guards against. Commands:
//
//	new 3|4                              an empty list of that format
//	system|developer|user CONTENT        a message with that array as content
//	assistant [MODEL] CONTENT            one that a model of that name wrote
//	result ID [error] CONTENT            the result of a tool call
//	raw TYPE JSON                        the message of an event of that type, as it is
//	openai / anthropic                   the list, one message a line, and the report
//	unpaired                             the calls and results that lost each other
//
// Message i gets seq 100+i. A note reads: seq, index with block, what, action, detail.
func TestStories(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob(filepath.Join("testdata", "*.txt"))
	if err != nil || len(files) == 0 {
		t.Fatalf("stories %v, %v", files, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			t.Parallel()
			old, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasPrefix(string(old), "# Guards against ") {
				t.Error("the first line does not say what the story guards against")
			}
			var b strings.Builder
			s := &story{t: t, format: events.Format3}
			for line := range strings.Lines(string(old)) {
				switch {
				case strings.HasPrefix(line, "  "):
				case strings.HasPrefix(line, "#") || strings.TrimSpace(line) == "":
					b.WriteString(line)
				default:
					b.WriteString(line)
					for out := range strings.Lines(s.run(strings.TrimSuffix(line, "\n"))) {
						b.WriteString("  " + strings.TrimSuffix(out, "\n") + "\n")
					}
				}
			}
			if *update {
				if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
					t.Fatal(err)
				}
			} else if b.String() != string(old) {
				t.Errorf("got\n%s", b.String())
			}
		})
	}
}

type story struct {
	t        *testing.T
	format   events.Format
	messages []provider.Message
}

func (s *story) run(line string) string {
	word, rest, _ := strings.Cut(line, " ")
	// The content starts at the first bracket; what stands before it are words.
	at := strings.IndexByte(rest, '[')
	var words []string
	content := ""
	if at >= 0 {
		words, content = strings.Fields(rest[:at]), rest[at:]
	}
	switch word {
	case "new":
		s.messages, s.format = nil, events.Format(rest[0]-'0')
	case "system", "developer", "user":
		s.add(word+"/message", `{"id":"m","role":"`+word+`","source":{"kind":"k"},"content":`+content+`}`)
	case "assistant":
		model := "m"
		if len(words) > 0 {
			model = words[0]
		}
		s.add("assistant/message", `{"id":"m","role":"assistant","source":{"kind":"model","provider":"p","model":"`+model+`"},"content":`+content+`}`)
	case "result":
		s.add("tool/result", toolResult(s.format, words[0], len(words) > 1, content))
	case "raw":
		typ, text, _ := strings.Cut(rest, " ")
		s.add(typ, text)
	case "openai", "anthropic":
		return s.list(render(s.t, provider.Target(word), s.format, s.messages))
	case "unpaired":
		var b strings.Builder
		for _, u := range provider.Unpaired(s.format, s.messages) {
			text, err := u.MarshalJSON()
			if err != nil {
				s.t.Fatal(err)
			}
			fmt.Fprintf(&b, "%s\n", text)
		}
		return b.String()
	default:
		s.t.Fatalf("no command %q", line)
	}
	return ""
}

func (s *story) add(typ, text string) {
	compact, err := events.Compact(nil, []byte(text))
	if err != nil {
		s.t.Fatalf("%s: %v", text, err)
	}
	s.messages = append(s.messages, provider.Message{Seq: events.Seq(100 + len(s.messages)), Kind: events.SurfaceKind(typ), JSON: compact})
}

func (s *story) list(out provider.Rendered) string {
	var b strings.Builder
	if out.System != nil {
		fmt.Fprintf(&b, "system %s\n", out.System)
	}
	events.EachElement(out.Messages, func(m []byte) bool {
		fmt.Fprintf(&b, "%s\n", m)
		return true
	})
	for _, n := range out.Report {
		at := fmt.Sprint(n.Index)
		if n.Block != nil {
			at += fmt.Sprintf(".%d", *n.Block)
		}
		fmt.Fprintf(&b, "note %d %s %s %s: %s\n", n.Seq, at, n.What, n.Action, n.Detail)
	}
	return b.String()
}

// toolResult is the message of a tool/result in the shape of its format.
func toolResult(f events.Format, id string, isError bool, content string) string {
	head := `{"id":"m","source":{"kind":"tool","callId":"` + id + `"},`
	body := fmt.Sprintf(`"toolCallId":"%s","isError":%t,"content":%s}`, id, isError, content)
	if f == events.Format4 {
		return head + `"role":"tool",` + body
	}
	return head + `"role":"user","content":[{"type":"tool-result",` + body + `]}`
}
