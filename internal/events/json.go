package events

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"unicode/utf8"
)

// MaxDepth is how many levels of arrays and objects an event's data may nest.
const MaxDepth = 512

// syntaxError is why a text is not JSON, with the byte offset at which that showed.
type syntaxError struct {
	offset int
	reason string
}

func (e *syntaxError) Error() string {
	return fmt.Sprintf("%s at byte %d", e.reason, e.offset)
}

// scanner validates JSON text (RFC 8259) without decoding it, so that every token can be
// kept as it was written. encoding/json is no help here: it turns a lone surrogate escape
// into U+FFFD, loses the spelling of numbers and folds the case of keys.
type scanner struct {
	b        []byte
	i        int
	maxDepth int
	spaces   bool   // insignificant white space was seen
	seen     uint64 // bytes of strings, or-ed together: whether there are any beyond ASCII
}

func (s *scanner) fail(format string, args ...any) error {
	return &syntaxError{offset: s.i, reason: fmt.Sprintf(format, args...)}
}

func (s *scanner) found() string {
	if s.i >= len(s.b) {
		return "the end of the text"
	}
	r, n := utf8.DecodeRune(s.b[s.i:])
	if r == utf8.RuneError && n <= 1 {
		return fmt.Sprintf("byte 0x%02x", s.b[s.i])
	}
	return strconv.QuoteRune(r)
}

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\n', '\r':
			s.spaces = true
			s.i++
		default:
			return
		}
	}
}

// value validates one value that starts at s.i.
func (s *scanner) value(depth int) error {
	if s.i >= len(s.b) {
		return s.fail("expected a value, found the end of the text")
	}
	switch c := s.b[s.i]; {
	case c == '{':
		return s.object(depth, nil)
	case c == '[':
		return s.array(depth)
	case c == '"':
		return s.str()
	case c == '-' || isDigit(c):
		return s.number()
	case c == 't':
		return s.word("true")
	case c == 'f':
		return s.word("false")
	case c == 'n':
		return s.word("null")
	}
	return s.fail("expected a value, found %s", s.found())
}

// member is one key and value of an object as they stand in the text, the key without its quotes.
type member struct{ key, val []byte }

// memberList takes the members of an object. What a pointer to a slice leads to would have to
// be on the heap; a list with room of its own can be on the stack.
type memberList struct {
	few  [8]member
	n    int // in few
	more []member
}

func (l *memberList) add(m member) {
	if l.more == nil && l.n < len(l.few) {
		l.few[l.n] = m
		l.n++
		return
	}
	if l.more == nil {
		l.more = append(make([]member, 0, 4*len(l.few)), l.few[:]...)
	}
	l.more = append(l.more, m)
}

func (l *memberList) all() []member {
	if l.more != nil {
		return l.more
	}
	return l.few[:l.n]
}

// object validates an object; each member goes to rec when there is one.
func (s *scanner) object(depth int, rec *memberList) error {
	if depth >= s.maxDepth {
		return s.fail("nested deeper than %d levels", MaxDepth)
	}
	s.i++
	s.space()
	if s.i < len(s.b) && s.b[s.i] == '}' {
		s.i++
		return nil
	}
	for {
		if s.i >= len(s.b) || s.b[s.i] != '"' {
			return s.fail("expected a key in double quotes, found %s", s.found())
		}
		ks := s.i
		if err := s.str(); err != nil {
			return err
		}
		key := s.b[ks+1 : s.i-1]
		s.space()
		if s.i >= len(s.b) || s.b[s.i] != ':' {
			return s.fail("expected ':' after a key, found %s", s.found())
		}
		s.i++
		s.space()
		vs := s.i
		if err := s.value(depth + 1); err != nil {
			return err
		}
		if rec != nil {
			rec.add(member{key, s.b[vs:s.i]})
		}
		s.space()
		if s.i >= len(s.b) {
			return s.fail("expected ',' or '}', found the end of the text")
		}
		switch s.b[s.i] {
		case ',':
			s.i++
			s.space()
		case '}':
			s.i++
			return nil
		default:
			return s.fail("expected ',' or '}', found %s", s.found())
		}
	}
}

func (s *scanner) array(depth int) error {
	if depth >= s.maxDepth {
		return s.fail("nested deeper than %d levels", MaxDepth)
	}
	s.i++
	s.space()
	if s.i < len(s.b) && s.b[s.i] == ']' {
		s.i++
		return nil
	}
	for {
		if err := s.value(depth + 1); err != nil {
			return err
		}
		s.space()
		if s.i >= len(s.b) {
			return s.fail("expected ',' or ']', found the end of the text")
		}
		switch s.b[s.i] {
		case ',':
			s.i++
			s.space()
		case ']':
			s.i++
			return nil
		default:
			return s.fail("expected ',' or ']', found %s", s.found())
		}
	}
}

// inString are the bytes that mean something inside a string.
var inString = func() (t [256]bool) {
	for c := range 0x20 {
		t[c] = true
	}
	t['"'], t['\\'] = true, true
	return t
}()

// Eight bytes with 0x01 in each, and with 0x80.
const (
	ones  = 0x0101010101010101
	highs = 0x80 * ones
)

// plainPrefix is how many of eight bytes come before the first that means something inside a
// string. Subtracting one sets the high bit of a byte that was zero; the borrow can go wrong
// in bytes behind the first match alone.
func plainPrefix(w uint64) int {
	quote, backslash := w^'"'*ones, w^'\\'*ones
	match := (w-0x20*ones)&^w | (quote-ones)&^quote | (backslash-ones)&^backslash
	return bits.TrailingZeros64(match&highs) / 8
}

func (s *scanner) str() error {
	b := s.b
	for i := s.i + 1; i < len(b); {
		for n := 8; n == 8 && len(b)-i >= 8; i += n {
			w := binary.LittleEndian.Uint64(b[i:])
			s.seen |= w
			n = plainPrefix(w)
		}
		for i < len(b) && !inString[b[i]] {
			s.seen |= uint64(b[i])
			i++
		}
		if i == len(b) {
			break
		}
		c := b[i]
		switch {
		case c == '"':
			s.i = i + 1
			return nil
		case c < 0x20:
			s.i = i
			return s.fail("control character 0x%02x inside a string must be written as an escape", c)
		default: // a backslash
			if i+1 >= len(b) {
				s.i = len(b)
				return s.fail("unterminated string")
			}
			switch b[i+1] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
				i += 2
			case 'u':
				if i+6 > len(b) || !isHex(b[i+2]) || !isHex(b[i+3]) || !isHex(b[i+4]) || !isHex(b[i+5]) {
					s.i = i
					return s.fail(`expected four hex digits after \u`)
				}
				i += 6
			default:
				s.i = i
				return s.fail(`unknown escape \%c in a string`, b[i+1])
			}
		}
	}
	s.i = len(b)
	return s.fail("unterminated string")
}

func (s *scanner) digits() bool {
	start := s.i
	for s.i < len(s.b) && isDigit(s.b[s.i]) {
		s.i++
	}
	return s.i > start
}

func (s *scanner) number() error {
	if s.b[s.i] == '-' {
		s.i++
	}
	if s.i < len(s.b) && s.b[s.i] == '0' {
		s.i++
		if s.i < len(s.b) && isDigit(s.b[s.i]) {
			return s.fail("a number must not have leading zeros")
		}
	} else if !s.digits() {
		return s.fail("expected a digit, found %s", s.found())
	}
	if s.i < len(s.b) && s.b[s.i] == '.' {
		s.i++
		if !s.digits() {
			return s.fail("expected a digit after the decimal point, found %s", s.found())
		}
	}
	if s.i < len(s.b) && (s.b[s.i] == 'e' || s.b[s.i] == 'E') {
		s.i++
		if s.i < len(s.b) && (s.b[s.i] == '+' || s.b[s.i] == '-') {
			s.i++
		}
		if !s.digits() {
			return s.fail("expected a digit in the exponent, found %s", s.found())
		}
	}
	return nil
}

func (s *scanner) word(w string) error {
	if bytes.HasPrefix(s.b[s.i:], []byte(w)) {
		s.i += len(w)
		return nil
	}
	return s.fail("expected a value, found %s", s.found())
}

// scanText validates b as one JSON text of at most depth levels and reports whether it holds
// insignificant white space. The members of an object go to rec, when there is one.
func scanText(b []byte, depth int, rec *memberList) (spaces bool, err error) {
	s := scanner{b: b, maxDepth: depth}
	s.space()
	if rec != nil && s.i < len(b) && b[s.i] == '{' {
		err = s.object(0, rec)
	} else {
		err = s.value(0)
	}
	if s.space(); err == nil && s.i != len(b) {
		err = s.fail("expected the end of the text, found %s", s.found())
	}
	if err != nil || s.seen&highs != 0 { // bytes beyond ASCII outside of strings are an error too
		if off := invalidUTF8(b); off >= 0 {
			err = &syntaxError{off, "invalid UTF-8"}
		}
	}
	return s.spaces && err == nil, err
}

// invalidUTF8 is the offset of the first byte that is not UTF-8, -1 when all are.
func invalidUTF8(b []byte) int {
	if utf8.Valid(b) {
		return -1
	}
	off := 0
	for {
		r, n := utf8.DecodeRune(b[off:])
		if r == utf8.RuneError && n <= 1 {
			return off
		}
		off += n
	}
}

// Compact validates b as one JSON text and appends it to dst without its insignificant
// white space; strings and numbers keep their exact bytes. The error says what is wrong and where.
func Compact(dst, b []byte) ([]byte, error) {
	spaces, err := scanText(b, MaxDepth, nil)
	if err != nil {
		return dst, err
	}
	return appendCompact(dst, b, spaces), nil
}

// appendCompact is Compact for text that is known to be valid.
func appendCompact(dst, b []byte, spaces bool) []byte {
	if !spaces {
		return append(dst, b...)
	}
	start := 0
	for i := 0; i < len(b); {
		switch b[i] {
		case '"':
			i = skipString(b, i)
		case ' ', '\t', '\n', '\r':
			dst = append(dst, b[start:i]...)
			i++
			start = i
		default:
			i++
		}
	}
	return append(dst, b[start:]...)
}

// compacted is b without white space: b itself when it holds none, as canonical text does.
func compacted(b []byte) []byte {
	if bytes.IndexByte(b, ' ') < 0 && !bytes.ContainsAny(b, "\t\r\n") {
		return b
	}
	return appendCompact(nil, b, true)
}

// skipString returns the offset behind the string that starts at i, or len(b) when it has no end.
func skipString(b []byte, i int) int {
	i++
	for {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			return len(b)
		}
		end := i + n
		k := end
		for k > i && b[k-1] == '\\' {
			k--
		}
		if (end-k)%2 == 0 {
			return end + 1
		}
		i = end + 1
	}
}

// skipValue returns the offset behind the value that starts at i. The text must be valid
// and compact; on other text the answer is meaningless but within bounds.
func skipValue(b []byte, i int) int {
	if i >= len(b) {
		return len(b)
	}
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		depth := 0
		for i < len(b) {
			switch b[i] {
			case '"':
				i = skipString(b, i)
				continue
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1
				}
			}
			i++
		}
		return len(b)
	}
	for i < len(b) {
		switch b[i] {
		case ',', '}', ']':
			return i
		}
		i++
	}
	return i
}

// eachMember calls f for every member of the object b (valid and compact) until f answers
// false. It answers false when b is no object.
func eachMember(b []byte, f func(key, val []byte) bool) bool {
	if len(b) < 2 || b[0] != '{' {
		return false
	}
	for i := 1; i < len(b) && b[i] == '"'; {
		ke := skipString(b, i)
		if ke+1 >= len(b) {
			return true
		}
		ve := skipValue(b, ke+1)
		if !f(b[i+1:ke-1], b[ke+1:ve]) {
			return true
		}
		i = ve + 1
	}
	return true
}

// eachElement calls f for every element of the array b (valid and compact) until f answers
// false. It answers false when b is no array.
func eachElement(b []byte, f func(val []byte) bool) bool {
	if len(b) < 2 || b[0] != '[' {
		return false
	}
	for i := 1; i < len(b) && b[i] != ']'; {
		ve := skipValue(b, i)
		if !f(b[i:ve]) {
			return true
		}
		i = ve + 1
	}
	return true
}

// appendMembers appends the members of the object b (valid and compact), their keys unescaped.
func appendMembers(ms []member, b []byte) []member {
	eachMember(b, func(k, v []byte) bool {
		if bytes.IndexByte(k, '\\') >= 0 {
			k = unescape(nil, k)
		}
		ms = append(ms, member{k, v})
		return true
	})
	return ms
}

// unescapeKeys makes the keys of members say what they mean.
func unescapeKeys(ms []member) []member {
	for i := range ms {
		if bytes.IndexByte(ms[i].key, '\\') >= 0 {
			ms[i].key = unescape(nil, ms[i].key)
		}
	}
	return ms
}

// named returns the value of the first member of that name, or nil.
func named(ms []member, name string) []byte {
	for i := range ms {
		if string(ms[i].key) == name {
			return ms[i].val
		}
	}
	return nil
}

// givenTwice returns a key that two members have, or "".
func givenTwice(ms []member) string {
	const few = 16
	if len(ms) > few {
		keys := make([][]byte, len(ms))
		for i := range ms {
			keys[i] = ms[i].key
		}
		slices.SortFunc(keys, bytes.Compare)
		for i := 1; i < len(keys); i++ {
			if bytes.Equal(keys[i], keys[i-1]) {
				return string(keys[i])
			}
		}
		return ""
	}
	for i := range ms {
		for k := range ms[:i] {
			if bytes.Equal(ms[i].key, ms[k].key) {
				return string(ms[i].key)
			}
		}
	}
	return ""
}

// duplicateKey returns a key that the object b has twice, or "".
func duplicateKey(b []byte) string {
	var store [16]member
	return givenTwice(appendMembers(store[:0], b))
}

// keyIs reports whether a key as it stands in the text, without its quotes, means name.
func keyIs(key []byte, name string) bool {
	if bytes.IndexByte(key, '\\') < 0 {
		return string(key) == name
	}
	return string(unescape(nil, key)) == name
}

// get returns the value of the member called name of the object b (valid and compact), or nil.
func get(b []byte, name string) []byte {
	var out []byte
	eachMember(b, func(k, v []byte) bool {
		if keyIs(k, name) {
			out = v
			return false
		}
		return true
	})
	return out
}

// text decodes a JSON string token; ok is false when tok is no string.
func text(tok []byte) (string, bool) {
	if len(tok) < 2 || tok[0] != '"' {
		return "", false
	}
	s := tok[1 : len(tok)-1]
	if bytes.IndexByte(s, '\\') < 0 {
		return string(s), true
	}
	return string(unescape(nil, s)), true
}

// isText reports whether tok is a string, isEmptyText whether it is the empty one, textIs
// whether it means s. They decode nothing.
func isText(tok []byte) bool { return len(tok) >= 2 && tok[0] == '"' }

func isEmptyText(tok []byte) bool { return string(tok) == `""` }

func textIs(tok []byte, s string) bool { return isText(tok) && keyIs(tok[1:len(tok)-1], s) }

// unescape appends what the inside of a valid JSON string means to dst. A lone surrogate
// escape becomes its three-byte form (as in WTF-8), so that different strings stay different.
func unescape(dst, s []byte) []byte {
	for i := 0; i < len(s); {
		if s[i] != '\\' || i+1 >= len(s) {
			dst = append(dst, s[i])
			i++
			continue
		}
		switch c := s[i+1]; c {
		case 'b':
			dst = append(dst, '\b')
		case 'f':
			dst = append(dst, '\f')
		case 'n':
			dst = append(dst, '\n')
		case 'r':
			dst = append(dst, '\r')
		case 't':
			dst = append(dst, '\t')
		case 'u':
			r, ok := hex4(s, i+2)
			if !ok {
				return append(dst, s[i:]...)
			}
			i += 6
			if r >= 0xD800 && r < 0xDC00 && i+1 < len(s) && s[i] == '\\' && s[i+1] == 'u' {
				if lo, ok := hex4(s, i+2); ok && lo >= 0xDC00 && lo < 0xE000 {
					dst = utf8.AppendRune(dst, (r-0xD800)<<10+(lo-0xDC00)+0x10000)
					i += 6
					continue
				}
			}
			if r >= 0xD800 && r < 0xE000 {
				dst = append(dst, byte(0xE0|r>>12), byte(0x80|(r>>6)&0x3F), byte(0x80|r&0x3F))
			} else {
				dst = utf8.AppendRune(dst, r)
			}
			continue
		default:
			dst = append(dst, c)
		}
		i += 2
	}
	return dst
}

func hex4(s []byte, i int) (rune, bool) {
	if i+4 > len(s) {
		return 0, false
	}
	var r rune
	for _, c := range s[i : i+4] {
		switch {
		case isDigit(c):
			r = r<<4 | rune(c-'0')
		case c >= 'a' && c <= 'f':
			r = r<<4 | rune(c-'a'+10)
		case c >= 'A' && c <= 'F':
			r = r<<4 | rune(c-'A'+10)
		default:
			return 0, false
		}
	}
	return r, true
}

func isHex(c byte) bool {
	return isDigit(c) || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

// kindOf names the JSON type of a token, for error texts.
func kindOf(tok []byte) string {
	if len(tok) == 0 {
		return "nothing"
	}
	switch tok[0] {
	case '{':
		return "an object"
	case '[':
		return "an array"
	case '"':
		return "a string"
	case 't', 'f':
		return "a boolean"
	case 'n':
		return "null"
	}
	return "a number"
}

// clip shortens a token for an error text.
func clip(tok []byte) string {
	const most = 64
	if len(tok) <= most {
		return string(tok)
	}
	cut := most
	for cut > 0 && !utf8.RuneStart(tok[cut]) {
		cut--
	}
	return string(tok[:cut]) + "…"
}
