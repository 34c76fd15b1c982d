package session_test

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/session"
	"palimpsest/internal/surface"
)

var update = flag.Bool("update", false, "rewrite what the stories in testdata expect")

// TestStories runs the command files in testdata. A line that starts in the first column is a
// command, the indented lines behind it are what it must print. The first line of a file says
// which fault it guards against. Commands:
//
//	mode off|observe|enforce         what is done about broken lifecycle rules
//	system|user|assistant [k=v…]     append a message: text=, calls=a,b, empty
//	call ID / result ID [k=v…]       append a tool/call or tool/result: text=, error=
//	log TYPE JSON                    append a log-only event
//	… over=A..B cites=A,B            replace instead of append
//	begin / commit                   what lies between becomes one commit
//	mark / rewind / rollback         of an open batch
//	repair                           append the closers
//	crash                            forget everything, and fold what is stored
//	deliver N [from=OLD to=NEW]      fold stored commit N into the reader, its body changed
//	show / reader / messages         the writer's state, the reader's, the derived messages
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
			s := newStory()
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

// story is one session, what is stored of it, and a reader that follows.
type story struct {
	mode   lifecycle.Mode
	writer *session.State
	reader *session.State
	stored []*events.Commit
	batch  *session.Batch
	marks  []int
	open   bool // between begin and commit
}

func newStory() *story {
	return &story{mode: lifecycle.Enforce,
		writer: session.New(sessionID, events.Format3, nil, surface.KeepFingerprints),
		reader: session.New(sessionID, events.Format3, nil, surface.KeepFrozenBodies)}
}

func (s *story) run(line string) string {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case "mode":
		s.mode = lifecycle.Mode(rest)
		return ""
	case "begin":
		s.batch, s.open, s.marks = s.writer.Begin(s.mode), true, nil
		return ""
	case "mark":
		s.marks = append(s.marks, s.batch.Mark())
		return ""
	case "rewind":
		s.batch.Rewind(s.marks[len(s.marks)-1])
		return s.state(s.writer)
	case "rollback":
		s.batch.Rollback()
		s.open = false
		return s.state(s.writer)
	case "commit":
		s.open = false
		return s.commit()
	case "repair":
		return s.repair()
	case "crash":
		s.writer, s.open = session.New(sessionID, events.Format3, nil, surface.KeepFingerprints), false
		for _, c := range s.stored {
			if err := s.writer.FoldCommit(c, vocabulary, nil); err != nil {
				return err.Error()
			}
		}
		return s.state(s.writer)
	case "deliver":
		return s.deliver(rest)
	case "show":
		return s.state(s.writer)
	case "reader":
		return s.state(s.reader)
	case "messages":
		return s.messages()
	}
	return s.offer(storyEvent(word, rest))
}

// offer adds an event to the open batch, or makes a commit of its own of it.
func (s *story) offer(raw string) string {
	alone := !s.open
	if alone {
		s.batch = s.writer.Begin(s.mode)
	}
	e, err := parse(raw, events.Format3, s.writer.Next)
	before := len(s.batch.Violations())
	if err == nil {
		err = s.batch.Add(e)
	}
	if err != nil {
		return err.Error()
	}
	out := fmt.Sprintf("seq %d", e.Seq)
	if alone {
		out += ", " + s.commit()
	}
	for _, v := range s.batch.Violations()[before:] {
		out += "\nobserved " + v.Error()
	}
	return out
}

// commit stores the batch.
func (s *story) commit() string {
	c := &events.Commit{ID: fmt.Sprintf("c%d", len(s.stored)), Actor: events.NoActor, Format: events.Format3}
	s.batch.Seal(c)
	c.StreamSeq = uint64(10 * (len(s.stored) + 1))
	s.batch.Commit(c)
	s.stored = append(s.stored, c)
	return fmt.Sprintf("commit %d with %d..%d", len(s.stored)-1, c.First, c.Last)
}

func (s *story) repair() string {
	closers := s.writer.Life.Closers(events.Format3, s.writer.Next, s.writer.Time)
	if len(closers) == 0 {
		return "the log is balanced"
	}
	s.batch, s.open = s.writer.Begin(s.mode), true
	var out []string
	for _, raw := range closers {
		e, err := parse(string(raw), events.Format3, s.writer.Next)
		if err != nil {
			return err.Error()
		}
		f := e.Fields()
		closer := strings.TrimRight(fmt.Sprintf("%s %s %s", e.Type, f.CallID, f.ErrorCode), " ")
		if e.Sources != nil {
			closer += " cites " + joinSeqs(e.Sources)
		}
		out = append(out, closer)
		if err := s.batch.Add(e); err != nil {
			return err.Error()
		}
	}
	s.open = false
	return strings.Join(append(out, s.commit()), "\n")
}

func (s *story) deliver(rest string) string {
	words := strings.Fields(rest)
	n, err := strconv.Atoi(words[0])
	if err != nil || n >= len(s.stored) {
		return "there is no commit " + words[0]
	}
	c := *s.stored[n]
	args := arguments(words[1:])
	if args["from"] != "" {
		c.Body = []byte(strings.Replace(string(c.Body), args["from"], args["to"], 1))
	}
	var seen []events.Seq
	err = s.reader.FoldCommit(&c, vocabulary, func(p *session.Plan) { seen = append(seen, p.Event.Seq) })
	out := fmt.Sprintf("folds [%s]\n", joinSeqs(seen))
	if err != nil {
		out += err.Error() + "\n"
	}
	return out + s.state(s.reader)
}

func (s *story) state(st *session.State) string {
	sn := st.Life.Snapshot()
	var b strings.Builder
	fmt.Fprintf(&b, "next %d, surface [%s], generation %d, stream sequence %d", st.Next, joinSeqs(st.Surface.Seqs()), st.Surface.Generation(), st.StreamSeq)
	if sn.Turn != nil {
		fmt.Fprintf(&b, "\nturn %d is open", *sn.Turn)
		if sn.Step != nil {
			fmt.Fprintf(&b, ", step %d", *sn.Step)
		}
		if p := st.Life.PendingCalls(); len(p) > 0 {
			fmt.Fprintf(&b, ", waits for %s", strings.Join(p, ", "))
		}
	}
	if len(sn.Agents) > 0 {
		fmt.Fprintf(&b, "\nagents %v", sn.Agents)
	}
	if st.Writer != nil {
		fmt.Fprintf(&b, "\nwriter %s with epoch %d", st.Writer.ID, st.Writer.Epoch)
	}
	digest := events.SeedDigest(sessionID)
	next := events.Seq(0)
	for _, c := range s.stored {
		for line, rest := []byte(nil), c.Body; len(rest) > 0 && next < st.Next; next++ {
			line, rest = events.CutLine(rest)
			digest = digest.Next(line)
		}
	}
	if !s.open && digest != st.Digest {
		b.WriteString("\nthe digest is not that of the log")
	}
	return b.String()
}

// messages are those of a reader that has folded everything.
func (s *story) messages() string {
	r := session.New(sessionID, events.Format3, nil, surface.KeepBodies)
	for _, c := range s.stored {
		if err := r.FoldCommit(c, vocabulary, nil); err != nil {
			return err.Error()
		}
	}
	messages, err := r.Surface.Messages()
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, m := range messages {
		fmt.Fprintf(&b, "%s\n", m)
	}
	return b.String()
}

func arguments(words []string) map[string]string {
	args := map[string]string{}
	for _, w := range words {
		k, v, ok := strings.Cut(w, "=")
		if !ok {
			v = "true"
		}
		args[k] = v
	}
	return args
}

// storyEvent is the event that a command appends.
func storyEvent(word, rest string) string {
	if word == "log" {
		typ, data, _ := strings.Cut(rest, " ")
		return fmt.Sprintf(`{"type":%q,"data":%s}`, typ, data)
	}
	words := strings.Fields(rest)
	id := ""
	if word == "call" || word == "result" {
		id, words = words[0], words[1:]
	}
	args := arguments(words)
	var blocks []string
	if args["empty"] == "" && word != "call" {
		text := args["text"]
		if text == "" {
			text = word
		}
		blocks = append(blocks, fmt.Sprintf(`{"type":"text","text":%q}`, text))
	}
	for _, c := range strings.FieldsFunc(args["calls"], func(r rune) bool { return r == ',' }) {
		blocks = append(blocks, fmt.Sprintf(`{"type":"tool-call","id":%q}`, c))
	}
	content := "[" + strings.Join(blocks, ",") + "]"
	step := `"turn":1,"step":` + func() string {
		if args["step"] != "" {
			return args["step"]
		}
		return "1"
	}()
	message := func(role, source string) string {
		return fmt.Sprintf(`{"id":%q,"role":%q,"source":%s,"content":%s}`, word, role, source, content)
	}
	op := `"append"`
	if from, to, ok := strings.Cut(args["over"], ".."); ok {
		op = fmt.Sprintf(`{"op":"replace","startSeq":%s,"endSeq":%s}`, from, to)
	}
	meta := `,"surfaceOp":` + op
	if args["cites"] != "" {
		meta += `,"sourceEventSeqs":[` + args["cites"] + `]`
	}
	typ, data := "", ""
	switch word {
	case "user":
		typ, data = "user/message", message("user", `{"kind":"user"}`)
	case "system":
		typ, data = "system/message", `{`+step+`,"message":`+message("system", `{"kind":"plugin"}`)+`}`
	case "assistant":
		typ, data = "assistant/message", `{`+step+`,"message":`+message("assistant", `{"kind":"model","provider":"p","model":"m"}`)+`}`
	case "call":
		typ, data, meta = "tool/call", fmt.Sprintf(`{%s,"callId":%q}`, step, id), ""
	case "result":
		typ, content = "tool/result", fmt.Sprintf(`[{"type":"tool-result","toolCallId":%q,"isError":%t,"content":%s}]`, id, args["error"] != "", content)
		data = `{` + step + `,"message":` + message("user", fmt.Sprintf(`{"kind":"tool","callId":%q}`, id))
		if args["error"] != "" {
			data += fmt.Sprintf(`,"error":{"name":"E","code":%q}`, args["error"])
		}
		data += `}`
	default:
		panic(errors.New("unknown command " + word))
	}
	return fmt.Sprintf(`{"type":%q%s,"data":%s}`, typ, meta, data)
}
