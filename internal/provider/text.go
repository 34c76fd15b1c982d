package provider

import (
	"bytes"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"palimpsest/internal/events"
)

// unit reads one character of the inside of a JSON string at i: what it is and how many bytes
// it takes. A lone surrogate escape is the surrogate itself.
func unit(s []byte, i int) (r rune, size int) {
	if s[i] != '\\' || i+1 >= len(s) {
		return utf8.DecodeRune(s[i:])
	}
	switch s[i+1] {
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'n':
		return '\n', 2
	case 'r':
		return '\r', 2
	case 't':
		return '\t', 2
	case 'u':
		r, size = hex4(s, i+2), 6
		if utf16.IsSurrogate(r) && i+12 <= len(s) && s[i+6] == '\\' && s[i+7] == 'u' {
			if pair := utf16.DecodeRune(r, hex4(s, i+8)); pair != utf8.RuneError {
				return pair, 12
			}
		}
		return r, min(size, len(s)-i)
	}
	return rune(s[i+1]), 2
}

// hex4 reads the four hex digits of a valid escape.
func hex4(s []byte, i int) (r rune) {
	for _, c := range s[min(i, len(s)):min(i+4, len(s))] {
		r <<= 4
		switch {
		case c >= '0' && c <= '9':
			r |= rune(c - '0')
		case c >= 'a' && c <= 'f':
			r |= rune(c - 'a' + 10)
		case c >= 'A' && c <= 'F':
			r |= rune(c - 'A' + 10)
		}
	}
	return r
}

// inside returns a string token without its quotes.
func inside(tok []byte) []byte { return tok[1 : len(tok)-1] }

// isSpace is what providers strip: Unicode's white space and the ASCII separators.
func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

// blank reports whether a string token holds nothing but white space.
func blank(tok []byte) bool { return textEnd(tok, true) == 0 }

// trimRight returns a string token without the white space at its end, and whether there was any.
func trimRight(tok []byte) (trimmed []byte, cut bool) {
	end := textEnd(tok, false)
	if end == len(tok)-2 {
		return tok, false
	}
	return append(append([]byte{}, tok[:1+end]...), '"'), true
}

// textEnd returns how many bytes of the inside of a string token stand before the white space
// at its end. With first it stops at the first character that is none.
func textEnd(tok []byte, first bool) (end int) {
	s := inside(tok)
	for i := 0; i < len(s); {
		r, size := unit(s, i)
		if i += size; !isSpace(r) {
			if end = i; first {
				return end
			}
		}
	}
	return end
}

// lone reports whether JSON text holds a lone surrogate escape in one of its strings.
func lone(tok []byte) bool {
	if !bytes.Contains(tok, []byte(`\ud`)) && !bytes.Contains(tok, []byte(`\uD`)) {
		return false
	}
	for i := 0; i < len(tok); {
		r, size := unit(tok, i)
		if utf16.IsSurrogate(r) {
			return true
		}
		i += size
	}
	return false
}

// mendLone replaces every lone surrogate escape of a JSON text by \ufffd, in place: APIs refuse
// the whole request for one, and it stands for no character.
func mendLone(text []byte) {
	if !lone(text) {
		return
	}
	for i := 0; i < len(text); {
		r, size := unit(text, i)
		if utf16.IsSurrogate(r) {
			copy(text[i:], `\ufffd`)
		}
		i += size
	}
}

// jsonInside returns the JSON text that a string token holds, as arguments do. A lone
// surrogate escape stays one: within a string of that text it means the same.
func jsonInside(tok []byte) (text []byte, ok bool) {
	s := inside(tok)
	escaping := false // behind an odd number of backslashes
	for i := 0; i < len(s); {
		r, size := unit(s, i)
		switch {
		case !utf16.IsSurrogate(r):
			text = utf8.AppendRune(text, r)
		case escaping:
			return nil, false
		default:
			text = append(text, s[i:i+size]...)
		}
		escaping = r == '\\' && !escaping
		i += size
	}
	text, err := events.Compact(nil, text)
	return text, err == nil
}

// wrap puts words of ours, which need no escapes but \n, around the inside of a string token.
func wrap(before string, tok []byte, behind string) []byte {
	out := make([]byte, 0, len(tok)+len(before)+len(behind))
	out = append(append(out, '"'), before...)
	out = append(append(out, inside(tok)...), behind...)
	return append(out, '"')
}

// quote writes words of ours as a string token. They may quote the log, with lone surrogates.
func quote(s string) []byte { return events.Quote(strings.ToValidUTF8(s, "\ufffd")) }
