package events_test

import (
	"strings"
	"testing"

	"palimpsest/internal/events"
)

// TestStringsAreReadAlikeAtEveryOffset: they are scanned eight bytes at a time, so what means
// something is put at each place of a word, and behind the last whole one.
func TestStringsAreReadAlikeAtEveryOffset(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ piece, problem string }{
		{"\x7f", ""}, {" ", ""}, {"!", ""}, {"#", ""}, {"[", ""}, {"]", ""}, {"é", ""}, {"\u2028", ""}, {"🜚", ""},
		{`\"`, ""}, {`\\`, ""}, {`\u0000`, ""}, {`\ud800`, ""}, {`\n`, ""}, {"\u00a2\u00dc", ""}, {`é\"`, ""},
		{"\xff", "invalid UTF-8"}, {"\xa2", "invalid UTF-8"}, {"\xdc", "invalid UTF-8"}, {"\xed\xa0\x80", "invalid UTF-8"},
		{"\x00", "control character 0x00"}, {"\x1f", "control character 0x1f"}, {"\n", "control character 0x0a"},
		{`\x`, `unknown escape \x`}, {`\u12`, `four hex digits`}, {`"`, "expected ',' or ']'"}, {"\xff\x00", "invalid UTF-8"},
	} {
		for before := range 20 {
			for behind := range 10 {
				raw := `["` + strings.Repeat("x", before) + c.piece + strings.Repeat("y", behind) + `"]`
				out, err := events.Compact(nil, []byte(raw))
				switch {
				case c.problem == "" && (err != nil || string(out) != raw):
					t.Errorf("%q: %v, became %q", raw, err, out)
				case c.problem != "" && (err == nil || !strings.Contains(err.Error(), c.problem)):
					t.Errorf("%q: expected %s, found %v", raw, c.problem, err)
				}
			}
		}
	}
	for _, raw := range []string{`"`, `"x`, `"xxxxxxx`, `"xxxxxxxx`, `"xxxxxxxxx`, `"xxxxxxx\`, `"xxxxxxxx\`, "[\xff]", `"é`} {
		if _, err := events.Compact(nil, []byte(raw)); err == nil {
			t.Errorf("%q was taken for JSON", raw)
		}
	}
}
