package sessionfile

import (
	"bytes"
	"encoding/json"
	"fmt"
	"iter"
	"strconv"
	"strings"

	"palimpsest/internal/events"
)

// What follows cuts JSON that is known to be valid into its tokens, which stay the bytes that
// stand in the text: encoding/json would change lone surrogates and the spelling of numbers.

// members yields the members of an object.
func members(obj []byte) iter.Seq2[[]byte, []byte] {
	return func(yield func(key, val []byte) bool) {
		for i := skipSpace(obj, 1); obj[i] == '"'; {
			end := skipToken(obj, i)
			key := obj[i:end]
			i = skipSpace(obj, skipSpace(obj, end)+len(":"))
			end = skipToken(obj, i)
			if !yield(key, obj[i:end]) {
				return
			}
			if i = skipSpace(obj, end); obj[i] == ',' {
				i = skipSpace(obj, i+1)
			}
		}
	}
}

// nextElement cuts the next value off an array, given from its bracket or from behind the
// value before. val is nil behind the last one.
func nextElement(arr []byte) (val, rest []byte) {
	i := skipSpace(arr, 0)
	if arr[i] == '[' || arr[i] == ',' {
		i = skipSpace(arr, i+1)
	}
	if arr[i] == ']' {
		return nil, arr[i:]
	}
	end := skipToken(arr, i)
	return arr[i:end], arr[end:]
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\t' || b[i] == '\n' || b[i] == '\r') {
		i++
	}
	return i
}

// skipToken returns the offset behind the value that starts at i.
func skipToken(b []byte, i int) int {
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
	default:
		for i < len(b) && !bytes.ContainsRune([]byte(",]} \t\n\r"), rune(b[i])) {
			i++
		}
		return i
	}
	for depth := 0; ; i++ {
		switch b[i] {
		case '"':
			i = skipString(b, i) - 1
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
}

func skipString(b []byte, i int) int {
	for i++; b[i] != '"'; i++ {
		if b[i] == '\\' {
			i++
		}
	}
	return i + 1
}

// says reports whether a string token means s.
func says(tok []byte, s string) bool {
	if bytes.IndexByte(tok, '\\') < 0 {
		return len(tok) == len(s)+2 && string(tok[1:len(tok)-1]) == s
	}
	var meant string
	return json.Unmarshal(tok, &meant) == nil && meant == s
}

// field is a member that an object may have.
type field struct {
	name     string
	val      *[]byte
	optional bool
}

// readFields fills in the values of an object's members, which must be the given ones, and
// says what is wrong with them, if anything.
func readFields(obj []byte, fields ...field) (problem string) {
	for key, val := range members(obj) {
		known := false
		for _, f := range fields {
			if !says(key, f.name) {
				continue
			}
			if *f.val != nil {
				return fmt.Sprintf("key %s is given twice", clip(key))
			}
			*f.val, known = val, true
		}
		if !known {
			names := make([]string, len(fields))
			for i, f := range fields {
				names[i] = f.name
			}
			return fmt.Sprintf("unknown key %s; expected %s", clip(key), strings.Join(names, ", "))
		}
	}
	for _, f := range fields {
		if *f.val == nil && !f.optional {
			return f.name + " is missing"
		}
	}
	return ""
}

// integer reads a number from 0 to 2^53-1, however it is written. The one parser of such
// numbers decides: it is an integer when an event can carry it as its time.
func integer(tok []byte) (int64, bool) {
	if len(tok) <= 15 && len(bytes.Trim(tok, "0123456789")) == 0 {
		n, err := strconv.ParseInt(string(tok), 10, 64)
		return n, err == nil
	}
	e, err := events.Parse(fmt.Appendf(nil, `{"type":"any","time":%s,"ignorable":true,"data":0}`, tok), events.Context{Vocabulary: events.DefaultVocabulary()})
	if err != nil {
		return 0, false
	}
	return e.Time, true
}

// isNumber, isString and so on look at a valid token's first byte.
func isNumber(tok []byte) bool { return tok[0] == '-' || tok[0] >= '0' && tok[0] <= '9' }
func isString(tok []byte) bool { return tok[0] == '"' }
func isArray(tok []byte) bool  { return tok[0] == '[' }
func isObject(tok []byte) bool { return tok[0] == '{' }

func clip(tok []byte) string {
	const most = 64
	if len(tok) > most {
		return string(bytes.ToValidUTF8(tok[:most], nil)) + "…"
	}
	return string(tok)
}
