package events

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// Names on the wire. Attributes are percent-encoded headers with the prefix ce-, after the
// NATS protocol binding for CloudEvents (binary content mode).
const (
	CommitType        = "palimpsest.session.commit.v1"
	CommitContentType = "application/x-ndjson"
	ceVersion         = "1.0"
	cePrefix          = "ce-"
	traceParentHeader = "traceparent"
	sourcePrefix      = "/sessions/" // of ce-source, before the session's token

	// NoActor is the actor of a commit whose caller was not authenticated.
	NoActor = "-"
)

// HeaderReserve bounds the bytes that a commit's headers take, idempotency keys apart, for any
// session id and actors of up to 256 bytes.
const HeaderReserve = 4096

// KeyReserve bounds the bytes that an idempotency key takes in a commit's headers.
func KeyReserve(key string) int {
	if key == "" {
		return 0
	}
	return 3*len(key) + 192
}

// AppendSpan says which seqs of a commit a caller's idempotency key covers.
type AppendSpan struct {
	Key   string `json:"key"`
	First Seq    `json:"first"`
	Last  Seq    `json:"last"`
}

// Commit is what one append stores atomically: consecutive events of one session, one
// JetStream message, one CloudEvent.
type Commit struct {
	ID      string
	Session string
	Actor   string // the authenticated caller; NoActor when there is none
	Time    string // RFC 3339, when the appender made the commit
	Format  Format
	First   Seq
	Last    Seq
	Digest  Digest // of the last event
	Chain   Digest
	Appends []AppendSpan
	Trace   string // W3C traceparent, may be empty

	// Body is the canonical lines, each with its line end.
	Body []byte

	// StreamSeq is the stream sequence of a stored commit; 0 before it is stored.
	StreamSeq uint64

	// Stray are headers of a stored commit that say something else than the commit: those that no
	// reader needs, and spans of idempotency keys that lie outside of it. nil: none.
	Stray []Difference
}

// Lines yields the commit's canonical lines, without their line ends. They are parts of Body.
func (c *Commit) Lines() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for line, rest := []byte(nil), c.Body; len(rest) > 0; {
			if line, rest = CutLine(rest); !yield(line) {
				return
			}
		}
	}
}

// FormatTime writes a point in time as the time of a commit.
func FormatTime(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }

// headerNames are the headers of a commit's message.
var headerNames = [...]string{
	headerSpecVersion: "ce-specversion", headerType: "ce-type", headerContentType: "ce-datacontenttype",
	headerID: "ce-id", headerSource: "ce-source", headerSubject: "ce-subject", headerTime: "ce-time", headerSequence: "ce-sequence",
	headerFirst: "ce-firstseq", headerLast: "ce-lastseq", headerFormat: "ce-format", headerActor: "ce-actor",
	headerDigest: "ce-digest", headerChain: "ce-chain",
	headerAppends: "ce-appends", headerTrace: traceParentHeader,
}

// Positions in headerNames: what all commits have in common, what each has of its own, and from
// firstOptionalHeader on what is left out when it is empty.
const (
	headerSpecVersion = iota
	headerType
	headerContentType
	headerID
	headerSource
	headerSubject
	headerTime
	headerSequence
	headerFirst
	headerLast
	headerFormat
	headerActor
	headerDigest
	headerChain
	headerAppends
	headerTrace

	firstOptionalHeader = headerAppends
)

// CommitHeader is the headers of a message that carries a commit. It can be filled in again for
// another one: the map costs more to make than all that is in it.
type CommitHeader struct {
	nats.Header
	values [len(headerNames)]string
}

// NewCommitHeader returns headers to be filled in.
func NewCommitHeader() *CommitHeader {
	h := &CommitHeader{Header: make(nats.Header, len(headerNames)+2)}
	h.values[headerSpecVersion], h.values[headerType], h.values[headerContentType] = ceVersion, CommitType, CommitContentType
	for i, name := range headerNames[:firstOptionalHeader] {
		h.Header[name] = h.values[i : i+1 : i+1]
	}
	return h
}

// Fill sets every header to what the commit says, and leaves those alone that are not the
// commit's.
func (h *CommitHeader) Fill(c *Commit) {
	v := &h.values
	v[headerID], v[headerActor] = percentEncode(c.ID), percentEncode(c.Actor)
	v[headerSubject], v[headerTime] = percentEncode(c.Session), percentEncode(c.Time)
	v[headerFormat] = strconv.Itoa(int(c.Format))
	// The others are parts of one string.
	made := [...]int{headerSource, headerSequence, headerFirst, headerLast, headerDigest, headerChain}
	var ends [len(made)]int
	var store [512]byte
	sequence := c.sequenceDigits()
	b := append(append(store[:0], sourcePrefix...), Token(c.Session)...)
	ends[0] = len(b)
	b = append(b, sequence[:]...)
	ends[1] = len(b)
	b = strconv.AppendInt(b, int64(c.First), 10)
	ends[2] = len(b)
	b = strconv.AppendInt(b, int64(c.Last), 10)
	ends[3] = len(b)
	b = hex.AppendEncode(b, c.Digest[:])
	ends[4] = len(b)
	b = hex.AppendEncode(b, c.Chain[:])
	ends[5] = len(b)
	all, start := string(b), 0
	for i, name := range made {
		v[name], start = all[start:ends[i]], ends[i]
	}
	appends := ""
	if len(c.Appends) > 0 {
		b, err := json.Marshal(c.Appends)
		if err != nil {
			panic(err) // strings and numbers always encode
		}
		appends = percentEncode(string(b))
	}
	h.setOptional(headerAppends, appends)
	h.setOptional(headerTrace, c.Trace)
}

// setOptional sets a header that is there only when it says something. The map changes only when it must.
func (h *CommitHeader) setOptional(i int, to string) {
	switch had, has := h.values[i] != "", to != ""; {
	case has && !had:
		h.Header[headerNames[i]] = h.values[i : i+1 : i+1]
	case had && !has:
		delete(h.Header, headerNames[i])
	}
	h.values[i] = to
}

// Header returns the headers of the message that carries the commit.
func (c *Commit) Header() nats.Header {
	h := NewCommitHeader()
	h.Fill(c)
	return h.Header
}

// sequence is the first seq with 20 digits, which sorts as text.
func (c *Commit) sequence() string {
	b := c.sequenceDigits()
	return string(b[:])
}

func (c *Commit) sequenceDigits() (b [20]byte) {
	for i, n := len(b)-1, c.First; i >= 0; i, n = i-1, n/10 {
		b[i] = byte('0' + n%10)
	}
	return b
}

// ParseCommit reads a stored message back. It checks the headers, not the events; an
// *Error of code log-corrupt says which header is not what an appender writes. A tombstone is
// an *Error of code session-erased.
func ParseCommit(h nats.Header, body []byte, streamSeq uint64) (*Commit, error) {
	c := &Commit{Body: body, StreamSeq: streamSeq}
	bad := func(name, format string, args ...any) error {
		return &Error{Code: CodeCorrupt, Session: c.Session, Detail: fmt.Sprintf("stream sequence %d: header %s%s: ", streamSeq, cePrefix, name) + fmt.Sprintf(format, args...)}
	}
	get := func(header string) string { // whole names: joining them takes longer than looking them up
		if v := h[header]; len(v) > 0 {
			return percentDecode(v[0])
		}
		return ""
	}
	c.Session = get("ce-subject")
	if err := CheckSessionID(c.Session); err != nil {
		return nil, bad("subject", "%v", err)
	}
	if IsTombstone(h) {
		return nil, Erased(c.Session)
	}
	if t := get("ce-type"); t != CommitType {
		return nil, bad("type", "expected %s, found %q", CommitType, t)
	}
	c.ID, c.Actor, c.Time = get("ce-id"), get("ce-actor"), get("ce-time")
	if c.ID == "" {
		return nil, bad("id", "expected a commit id, found nothing")
	}
	integer := func(header string, into *Seq) error {
		v := get(header)
		n, ok := parseInteger([]byte(v))
		if !ok {
			return bad(header[len(cePrefix):], "expected a seq, found %q", v)
		}
		*into = Seq(n)
		return nil
	}
	if err := integer("ce-firstseq", &c.First); err != nil {
		return nil, err
	}
	if err := integer("ce-lastseq", &c.Last); err != nil {
		return nil, err
	}
	var format Seq
	if err := integer("ce-format", &format); err != nil {
		return nil, err
	}
	if c.Format = Format(format); c.Format != Format3 && c.Format != Format4 {
		return nil, bad("format", "expected 3 or 4, found %d", c.Format)
	}
	if c.Last < c.First {
		return nil, bad("lastseq", "expected at least %d, found %d", c.First, c.Last)
	}
	var err error
	if c.Digest, err = ParseDigest(get("ce-digest")); err != nil {
		return nil, bad("digest", "%v", err)
	}
	if c.Chain, err = ParseDigest(get("ce-chain")); err != nil {
		return nil, bad("chain", "%v", err)
	}
	if s := get("ce-appends"); s != "" {
		if err := json.Unmarshal([]byte(s), &c.Appends); err != nil {
			return nil, bad("appends", "%v", err)
		}
	}
	if v := h[traceParentHeader]; len(v) > 0 {
		c.Trace = v[0]
	}
	c.findStray(h)
	return c, nil
}

// Difference is a header of a commit that is not what its writer gave it.
type Difference struct{ Name, Expected, Found string }

// findStray compares the headers that ParseCommit does not need with the commit.
func (c *Commit) findStray(h nats.Header) {
	first := func(name string) string {
		if v := h[name]; len(v) > 0 {
			return v[0]
		}
		return ""
	}
	note := func(name, expected, found string) {
		c.Stray = append(c.Stray, Difference{name, expected, found})
	}
	if v := first("ce-specversion"); v != ceVersion {
		note("ce-specversion", ceVersion, v)
	}
	token := Token(c.Session)
	if v, ok := strings.CutPrefix(first("ce-source"), sourcePrefix); !ok || v != token {
		note("ce-source", sourcePrefix+token, first("ce-source"))
	}
	if v := first("ce-datacontenttype"); v != CommitContentType {
		note("ce-datacontenttype", CommitContentType, v)
	}
	if v, want := first("ce-sequence"), c.sequenceDigits(); v != string(want[:]) {
		note("ce-sequence", c.sequence(), v)
	}
	for _, a := range c.Appends {
		if a.First < c.First || a.Last < a.First || a.Last > c.Last {
			note("ce-appends", fmt.Sprintf("spans from seq %d to %d", c.First, c.Last), fmt.Sprintf("one from %d to %d", a.First, a.Last))
			break
		}
	}
}

// CommitID returns the id in a message's headers without reading the rest.
func CommitID(h nats.Header) string {
	if v := h[cePrefix+"id"]; len(v) > 0 {
		return percentDecode(v[0])
	}
	return ""
}

// percentEncode writes an attribute value as a header value: space, double quote, percent and
// everything outside U+0021..U+007E as %XX (CloudEvents NATS protocol binding, 3.1.3.2).
func percentEncode(s string) string {
	plain := true
	for i := 0; i < len(s) && plain; i++ {
		plain = plainInHeader(s[i])
	}
	if plain {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if plainInHeader(s[i]) {
			b.WriteByte(s[i])
		} else {
			fmt.Fprintf(&b, "%%%02X", s[i])
		}
	}
	return b.String()
}

func plainInHeader(c byte) bool { return c > ' ' && c <= '~' && c != '"' && c != '%' }

// percentDecode is the inverse; a % without two hex digits stays as it is.
func percentDecode(s string) string {
	if strings.IndexByte(s, '%') < 0 {
		return s
	}
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) && isHex(s[i+1]) && isHex(s[i+2]) {
			n, _ := strconv.ParseUint(s[i+1:i+3], 16, 8)
			b = append(b, byte(n))
			i += 2
			continue
		}
		b = append(b, s[i])
	}
	return string(b)
}
