package api

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"unsafe"

	"palimpsest/internal/cache"
	"palimpsest/internal/events"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
	"palimpsest/internal/provider"
)

// messageList is an answer of messages that is ready to be written: what stands before the
// messages, the messages token for token, and what stands behind them.
type messageList struct {
	before, behind []byte
	messages       []provider.Message
}

// newMessageList reads the messages of a view.
func newMessageList(v *projection.View) (*messageList, error) {
	messages, err := derived(v)
	if err != nil {
		return nil, err
	}
	l := &messageList{messages: messages, before: append(open(v), `,"messages":[`...)}
	l.behind, err = behindMessages(v, messages)
	return l, err
}

// surfaceID names what a view's messages are: the digest says which log they were derived from.
type surfaceID struct {
	digest   events.Digest
	seq      events.Seq
	messages int
}

// behinds are what stands behind the messages of the surfaces that were read last, since telling which calls
// and results are unpaired takes reading all of them. Some 40,000 fit in.
var behinds = cache.New[surfaceID, []byte](8 << 20)

// behindMessages is the end of an answer, with what is unpaired.
func behindMessages(v *projection.View, messages []provider.Message) ([]byte, error) {
	id := surfaceID{v.Digest, v.Last(), len(messages)}
	if b, ok := behinds.Get(id); ok {
		return b, nil
	}
	b := []byte(`]`)
	if unpaired := provider.Unpaired(v.Format, messages); len(unpaired) > 0 {
		u, err := events.Marshal(unpaired)
		if err != nil {
			return nil, err
		}
		b = append(append(b, `,"unpaired":`...), u...)
	}
	b = append(b, "}\n"...)
	behinds.Put(id, b, len(b)+int(unsafe.Sizeof(id))+128)
	return b, nil
}

// derived returns the messages of a view's surface.
func derived(v *projection.View) ([]provider.Message, error) {
	list := make([]provider.Message, 0, v.Surface.Len())
	for i := range v.Surface.Len() {
		n := v.Surface.Node(i)
		m, err := n.Message(v.Format)
		if err != nil {
			return nil, err
		}
		if m != nil {
			list = append(list, provider.Message{Seq: n.Seq, Kind: n.Kind, JSON: m})
		}
	}
	return list, nil
}

// size is how many bytes writeTo writes.
func (l *messageList) size() int {
	n := len(l.before) + len(l.behind) + max(0, len(l.messages)-1)
	for i := range l.messages {
		n += len(l.messages[i].JSON)
	}
	return n
}

// writers are buffers between many short messages and a connection.
var writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, 64<<10) }}

func (l *messageList) writeTo(w io.Writer) error {
	buf := writers.Get().(*bufio.Writer)
	defer writers.Put(buf)
	buf.Reset(w)
	defer buf.Reset(nil)
	_, _ = buf.Write(l.before) // a failed write fails all that follow
	for i := range l.messages {
		if i > 0 {
			_ = buf.WriteByte(',')
		}
		_, _ = buf.Write(l.messages[i].JSON)
	}
	_, _ = buf.Write(l.behind)
	return buf.Flush()
}

// WriteMessages writes the messages of a view as GET …/messages serves them.
func WriteMessages(w io.Writer, v *projection.View) error {
	l, err := newMessageList(v)
	if err != nil {
		return err
	}
	return l.writeTo(w)
}

func (s *projectorAPI) messages(w http.ResponseWriter, r *http.Request, id string) error {
	v, err := s.view(w, r, id, "format")
	if err != nil || v == nil {
		return err
	}
	if f := r.URL.Query().Get("format"); f != "" && f != "json" {
		if t := provider.Target(f); t != provider.OpenAI && t != provider.Anthropic {
			return badRequest(fmt.Sprintf("format: expected json, %s or %s, found %q", provider.OpenAI, provider.Anthropic, f))
		}
		list, err := derived(v)
		if err != nil {
			return err
		}
		rendered, err := provider.Render(provider.Target(f), v.Format, list)
		if err != nil {
			return err
		}
		return writeBody(w, typeJSON, append(rendered.AppendJSON(append(open(v), ',')), "}\n"...))
	}
	l, err := newMessageList(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", typeJSON)
	w.Header().Set("Content-Length", strconv.Itoa(l.size()))
	platform.SendTogether(r.Context(), w, func() {
		w.WriteHeader(http.StatusOK)
		_ = l.writeTo(w) // the client may be gone
	})
	return nil
}
