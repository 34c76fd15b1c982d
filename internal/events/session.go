package events

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxSessionID is the longest session id in bytes.
const MaxSessionID = 200

// CheckSessionID says why an id cannot name a session: it must be 1 to 200 bytes of printable
// UTF-8 and neither "." nor "..", which HTTP routers rewrite.
func CheckSessionID(id string) error {
	bad := func(format string, args ...any) error {
		return &Error{Code: CodeSessionID, Detail: "session id: " + fmt.Sprintf(format, args...)}
	}
	switch {
	case id == "":
		return bad("expected 1 to %d bytes, found an empty id", MaxSessionID)
	case len(id) > MaxSessionID:
		return bad("expected at most %d bytes, found %d", MaxSessionID, len(id))
	case !utf8.ValidString(id):
		return bad("expected UTF-8, found other bytes")
	case id == "." || id == "..":
		return bad("%q is refused since HTTP routers rewrite it", id)
	}
	for _, r := range id {
		if r >= ' ' && r <= '~' { // most ids are of such
			continue
		}
		if !unicode.IsPrint(r) {
			return bad("expected printable characters, found %U", r)
		}
	}
	return nil
}

// Token is the session id as one subject token, KV key and URI segment: every byte outside
// [A-Za-z0-9_-] is written as =XX.
func Token(session string) string {
	plain := true
	for i := 0; i < len(session) && plain; i++ {
		plain = plainInToken(session[i])
	}
	if plain {
		return session
	}
	var b strings.Builder
	for i := 0; i < len(session); i++ {
		c := session[i]
		if plainInToken(c) {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "=%02X", c)
		}
	}
	return b.String()
}

func plainInToken(c byte) bool {
	return isDigit(c) || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c == '_' || c == '-'
}

// SessionOf is the inverse of Token. It refuses a token that Token would not have written.
func SessionOf(token string) (string, error) {
	b := make([]byte, 0, len(token))
	for i := 0; i < len(token); i++ {
		if token[i] != '=' {
			b = append(b, token[i])
			continue
		}
		if i+2 >= len(token) {
			return "", fmt.Errorf("token %q: expected two hex digits after =", token)
		}
		n, err := strconv.ParseUint(token[i+1:i+3], 16, 8)
		if err != nil {
			return "", fmt.Errorf("token %q: expected two hex digits after =", token)
		}
		b = append(b, byte(n))
		i += 2
	}
	if id := string(b); Token(id) == token && CheckSessionID(id) == nil {
		return id, nil
	}
	return "", fmt.Errorf("token %q is not the token of a session id", token)
}

// Partition is the partition of a session: FNV-1a 32 of its token modulo n.
func Partition(token string, n int) int {
	h := uint32(2166136261) // FNV-1a's offset basis and prime
	for i := 0; i < len(token); i++ {
		h = (h ^ uint32(token[i])) * 16777619
	}
	return int(h % uint32(n))
}

// Header is a session's immutable header, kept as the bytes that were given.
type Header struct {
	Raw           []byte // compact JSON, token for token
	ID            string
	Format        Format // version
	CreatedAt     int64  // Unix ms
	ParentSession string
	IsSeeded      bool
}

// ParseHeader reads a session header, given as JSON. When id is not empty the header must
// carry that id or none, in which case it is added; likewise version and createdAt are added
// when absent. A member that is there is kept token for token.
func ParseHeader(raw []byte, id string, now int64) (*Header, error) {
	bad := func(format string, args ...any) error {
		return &Error{Code: CodeHeaderMalformed, Session: id, Detail: "session header: " + fmt.Sprintf(format, args...)}
	}
	b, err := Compact(nil, raw)
	if err != nil {
		return nil, bad("%v", err)
	}
	if b[0] != '{' {
		return nil, bad("expected an object, found %s", kindOf(b))
	}
	if k := duplicateKey(b); k != "" {
		return nil, bad("key %q is given twice", k)
	}
	h := &Header{Format: Format3, CreatedAt: now}
	if t := get(b, "type"); t != nil && string(t) != `"session"` {
		return nil, bad(`type: expected "session" or nothing at all, found %s`, clip(t))
	}
	if t := get(b, "version"); t != nil {
		n, ok := parseInteger(t)
		if h.Format = Format(n); !ok || h.Format != Format3 && h.Format != Format4 {
			return nil, bad("version: expected 3 or 4, found %s", clip(t))
		}
	} else {
		b = addMember(b, "version", []byte("3"))
	}
	if t := get(b, "id"); t != nil {
		var ok bool
		if h.ID, ok = text(t); !ok {
			return nil, bad("id: expected a string, found %s", kindOf(t))
		}
		if id != "" && h.ID != id {
			return nil, bad("id: expected %q, found %q", id, h.ID)
		}
	} else {
		h.ID = id
		b = addMember(b, "id", Quote(id))
	}
	if err := CheckSessionID(h.ID); err != nil {
		return nil, err
	}
	if t := get(b, "createdAt"); t != nil {
		var ok bool
		if h.CreatedAt, ok = parseInteger(t); !ok {
			return nil, bad("createdAt: expected Unix milliseconds from 0 to 2^53-1, found %s", clip(t))
		}
	} else {
		b = addMember(b, "createdAt", strconv.AppendInt(nil, now, 10))
	}
	if t := get(b, "isSeeded"); t != nil {
		if h.IsSeeded = string(t) == "true"; !h.IsSeeded && string(t) != "false" {
			return nil, bad("isSeeded: expected a boolean, found %s", clip(t))
		}
	} else {
		b = addMember(b, "isSeeded", []byte("false"))
	}
	if t := get(b, "delegationDepth"); t != nil {
		if _, ok := parseInteger(t); !ok {
			return nil, bad("delegationDepth: expected an integer from 0 to 2^53-1, found %s", clip(t))
		}
	} else {
		b = addMember(b, "delegationDepth", []byte("0"))
	}
	for _, name := range []string{"cwd", "origin", "agentPreset", "parentSession"} {
		t := get(b, name)
		s, ok := text(t)
		if t != nil && !ok {
			return nil, bad("%s: expected a string, found %s", name, kindOf(t))
		}
		if name == "parentSession" {
			h.ParentSession = s
		}
	}
	h.Raw = b
	return h, nil
}

// Matches reports whether a header as a caller gives it means this one: the same members with
// the same tokens, in any order, where createdAt may be left out. The "type":"session" that a
// session file has in it says nothing.
func (h *Header) Matches(given []byte) bool {
	want, err := ParseHeader(given, h.ID, h.CreatedAt)
	if err != nil {
		return false
	}
	n, same := 0, true
	eachMember(want.Raw, func(k, v []byte) bool {
		if keyIs(k, "type") {
			return true
		}
		n++
		same = bytes.Equal(get(h.Raw, string(unescape(nil, k))), v)
		return same
	})
	eachMember(h.Raw, func(k, _ []byte) bool {
		if !keyIs(k, "type") {
			n--
		}
		return true
	})
	return same && n == 0
}

// WithID returns the header's bytes with the value of id replaced, for an import that takes
// the id from elsewhere.
func (h *Header) WithID(id string) (*Header, error) {
	var b []byte
	tok := get(h.Raw, "id")
	at := cap(h.Raw) - cap(tok) // tok is a part of h.Raw
	b = append(b, h.Raw[:at]...)
	b = append(b, Quote(id)...)
	b = append(b, h.Raw[at+len(tok):]...)
	return ParseHeader(b, id, h.CreatedAt)
}

// FileLine is the header as the first line of a session file, without its line end: the
// stored bytes, behind a "type":"session" unless they say that already.
func (h *Header) FileLine() []byte {
	if get(h.Raw, "type") != nil {
		return h.Raw
	}
	return append([]byte(`{"type":"session",`), h.Raw[1:]...)
}

// addMember adds a member in front of the closing brace of a compact object.
func addMember(obj []byte, name string, val []byte) []byte {
	out := bytes.Clone(obj[:len(obj)-1])
	if len(out) > 1 {
		out = append(out, ',')
	}
	out = append(append(out, Quote(name)...), ':')
	return append(append(out, val...), '}')
}

// Quote writes a string as a JSON token. Unlike encoding/json it keeps a lone surrogate,
// which stands in a decoded string in its three-byte form.
func Quote(s string) []byte {
	b := []byte{'"'}
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < 0x20:
			b = fmt.Appendf(b, `\u%04x`, c)
		case c == 0xED && i+2 < len(s) && s[i+1] >= 0xA0:
			b = fmt.Appendf(b, `\u%04x`, 0xD000|rune(s[i+1]&0x3F)<<6|rune(s[i+2]&0x3F))
			i += 2
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}
