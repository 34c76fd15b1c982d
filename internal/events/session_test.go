package events_test

import (
	"encoding/json"
	"strings"
	"testing"

	"palimpsest/internal/events"
)

func TestSessionIDs(t *testing.T) {
	t.Parallel()
	tokens := map[string]string{
		"a": "a", "Az09_-": "Az09_-", "a.b": "a=2Eb", "a b": "a=20b", "a/b": "a=2Fb", "=": "=3D", "=2E": "=3D2E",
		"ä": "=C3=A4", "…": "=E2=80=A6", "\U0001F600": "=F0=9F=98=80", "*": "=2A", ">": "=3E", "...": "=2E=2E=2E", "%41": "=2541", "-": "-",
		strings.Repeat("x", 200): strings.Repeat("x", 200),
	}
	for id, want := range tokens {
		if err := events.CheckSessionID(id); err != nil {
			t.Errorf("%q: %v", id, err)
		}
		if got := events.Token(id); got != want {
			t.Errorf("token of %q is %q, want %q", id, got, want)
		}
		if back, err := events.SessionOf(want); err != nil || back != id {
			t.Errorf("session of %q is %q, %v, want %q", want, back, err, id)
		}
	}
	for _, id := range []string{"", ".", "..", "a\nb", "a\x00", "\x7f", "a\u200bb", "a\ufeff", "\xff", "\xed\xa0\x80", strings.Repeat("x", 201), strings.Repeat("ä", 101)} {
		if e := asError(events.CheckSessionID(id)); e.Code != events.CodeSessionID {
			t.Errorf("%q is taken for a session id", id)
		}
	}
	for _, token := range []string{"", "=", "=2", "a=2e", "=2E", "=41", "=GG", "a.b", "a b", "=FF", "ä", "=+1", "=0A"} {
		if id, err := events.SessionOf(token); err == nil {
			t.Errorf("%q is taken for the token of %q", token, id)
		}
	}
}

func TestPartition(t *testing.T) {
	t.Parallel()
	// FNV-1a 32, written out again.
	sum := func(s string) uint32 {
		h := uint32(2166136261)
		for i := range len(s) {
			h = (h ^ uint32(s[i])) * 16777619
		}
		return h
	}
	hit := map[int]bool{}
	for i := range 500 {
		token := events.Token(strings.Repeat("s", i%7) + string(rune('a'+i%26)) + strings.Repeat("·", i%5))
		got := events.Partition(token, 32)
		if want := int(sum(token) % 32); got != want {
			t.Fatalf("partition of %s is %d, want %d", token, got, want)
		}
		hit[got] = true
	}
	if len(hit) < 24 {
		t.Errorf("only %d of 32 partitions are hit", len(hit))
	}
	if got := events.Partition("foobar", 1<<30); got != 0xbf9cf968%(1<<30) {
		t.Errorf("the published test vector of FNV-1a gives %d", got)
	}
}

func TestHeaderIsKeptAsGiven(t *testing.T) {
	t.Parallel()
	cases := []struct{ name, raw, id, want string }{
		{"empty", `{}`, "s", `{"version":3,"id":"s","createdAt":5,"isSeeded":false,"delegationDepth":0}`},
		{"unknown members stay, token for token", ` { "id" : "s", "x" : [ 1.10, "\ud800" ], "version":4.0 ,"createdAt":1e3,"isSeeded":true,"delegationDepth":2}`, "s",
			`{"id":"s","x":[1.10,"\ud800"],"version":4.0,"createdAt":1e3,"isSeeded":true,"delegationDepth":2}`},
		{"id escaped", `{"i\u0064":"\u0073","version":3,"createdAt":1,"isSeeded":false,"delegationDepth":0}`, "s", `{"i\u0064":"\u0073","version":3,"createdAt":1,"isSeeded":false,"delegationDepth":0}`},
		{"id in need of escapes", `{"version":3,"createdAt":1,"isSeeded":false,"delegationDepth":0}`, `a"\ä`, `{"version":3,"createdAt":1,"isSeeded":false,"delegationDepth":0,"id":"a\"\\ä"}`},
		{"id from the header", `{"id":"h","version":3,"createdAt":1,"isSeeded":false,"delegationDepth":0}`, "", `{"id":"h","version":3,"createdAt":1,"isSeeded":false,"delegationDepth":0}`},
	}
	for _, c := range cases {
		h, err := events.ParseHeader([]byte(c.raw), c.id, 5)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if string(h.Raw) != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, h.Raw, c.want)
		}
		again, err := events.ParseHeader(h.Raw, h.ID, 99)
		if err != nil || string(again.Raw) != c.want {
			t.Errorf("%s: read again %v, %v", c.name, again, err)
		}
	}
	h, err := events.ParseHeader([]byte(`{"version":4,"createdAt":7,"parentSession":"p","isSeeded":true,"cwd":"/","origin":"o","agentPreset":"a"}`), "s", 5)
	if err != nil || h.ID != "s" || h.Format != events.Format4 || h.CreatedAt != 7 || h.ParentSession != "p" || !h.IsSeeded {
		t.Errorf("header %+v, %v", h, err)
	}
}

func TestHeaderRefused(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{
		``, `null`, `[]`, `"x"`, `{"id":"s"`, `{"id":"s","\u0069d":"s"}`, `{"id":"other"}`, `{"id":5}`, `{"id":null}`,
		`{"version":2}`, `{"version":5}`, `{"version":"3"}`, `{"version":3.5}`, `{"version":null}`,
		`{"createdAt":-1}`, `{"createdAt":"2026-01-01T00:00:00Z"}`, `{"isSeeded":1}`, `{"delegationDepth":-1}`, `{"cwd":1}`, `{"parentSession":{}}`, `{"type":"event"}`,
	} {
		if h, err := events.ParseHeader([]byte(raw), "s", 5); asError(err).Code != events.CodeHeaderMalformed {
			t.Errorf("%s: %+v, %v", raw, h, err)
		}
	}
	for _, raw := range []string{`{}`, `{"id":""}`, `{"id":".."}`, `{"id":"\ud800"}`, `{"id":"a\nb"}`} {
		if h, err := events.ParseHeader([]byte(raw), "", 5); asError(err).Code != events.CodeSessionID {
			t.Errorf("%s: %+v, %v", raw, h, err)
		}
	}
}

func TestHeaderWithIDAndFileLine(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{
		`{"x":{"id":"inner"},"id":"one","version":3,"createdAt":1,"isSeeded":false,"delegationDepth":0,"y":1.0}`,
		`{"type":"session","version":4,"id":"one","createdAt":1,"isSeeded":false,"delegationDepth":0}`,
		`{"version":3,"createdAt":1,"isSeeded":false,"delegationDepth":0,"\u0069d":"one"}`,
	} {
		h, err := events.ParseHeader([]byte(raw), "", 5)
		if err != nil {
			t.Fatal(err)
		}
		other, err := h.WithID(`tw"o`)
		if err != nil || other.ID != `tw"o` || other.CreatedAt != 1 || other.Format != h.Format {
			t.Fatalf("%+v, %v", other, err)
		}
		if want := strings.Replace(raw, `"one"`, `"tw\"o"`, 1); string(other.Raw) != want {
			t.Errorf("with another id\n got %s\nwant %s", other.Raw, want)
		}
		if string(h.Raw) != raw {
			t.Errorf("the first header became %s", h.Raw)
		}
		line := string(h.FileLine())
		want := raw
		if !strings.Contains(raw, `"type"`) {
			want = `{"type":"session",` + raw[1:]
		}
		if line != want {
			t.Errorf("file line\n got %s\nwant %s", line, want)
		}
		back, err := events.ParseHeader([]byte(line), "", 5)
		if err != nil || back.ID != h.ID || !json.Valid([]byte(line)) {
			t.Errorf("the file line reads %+v, %v", back, err)
		}
		if string(back.FileLine()) != line {
			t.Errorf("export after import is %s", back.FileLine())
		}
	}
	if _, err := (&events.Header{Raw: []byte(`{"id":"a"}`)}).WithID(".."); err == nil {
		t.Error("an id that cannot name a session is taken")
	}
}

func TestQuoteKeepsLoneSurrogates(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ in, want string }{
		{"a\"\\\n\x00", `"a\"\\\u000a\u0000"`},
		{"ä\U0001F600\ufffd\ud7ff", "\"ä\U0001F600\ufffd\ud7ff\""},
		{"\xed\xa0\x80", `"\ud800"`},
		{"x\xed\xbf\xbfy", `"x\udfffy"`},
	} {
		if got := string(events.Quote(c.in)); got != c.want {
			t.Errorf("%q is %s, want %s", c.in, got, c.want)
		}
	}
}

// A session that was made over HTTP can be imported from its own export, whose header line has
// a type besides.
func TestHeaderOfAnExportMatchesTheStoredOne(t *testing.T) {
	t.Parallel()
	h, err := events.ParseHeader([]byte(`{"cwd":"/srv"}`), "s", 7)
	if err != nil {
		t.Fatal(err)
	}
	if !h.Matches(h.FileLine()) {
		t.Errorf("%s does not match %s", h.FileLine(), h.Raw)
	}
	imported, err := events.ParseHeader(h.FileLine(), "s", 0)
	if err != nil {
		t.Fatal(err)
	}
	if !imported.Matches(h.Raw) || imported.Matches([]byte(`{"cwd":"/other"}`)) {
		t.Errorf("%s against %s", imported.Raw, h.Raw)
	}
}
