package events_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/url"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/nats-io/nats.go"

	"palimpsest/internal/events"
)

func TestDigestAndChainByHand(t *testing.T) {
	t.Parallel()
	const id = "a/b ä"
	header := []byte(`{"version":3,"id":"a/b ä"}`)
	sum := func(parts ...string) string {
		s := sha256.Sum256([]byte(strings.Join(parts, "")))
		return string(s[:])
	}
	same := func(what string, got events.Digest, want string) {
		t.Helper()
		if got.String() != hex.EncodeToString([]byte(want)) {
			t.Errorf("%s is %s", what, got)
		}
	}
	digest := sum("palimpsest/1 ", id)
	d := events.SeedDigest(id)
	same("digest(-1)", d, digest)
	for i, line := range []string{`{"type":"todo/write","seq":0,"time":1,"data":1}`, `{"type":"todo/write","seq":1,"time":1,"data":"ä"}`} {
		digest, d = sum(digest, line), d.Next([]byte(line))
		same(fmt.Sprintf("digest(%d)", i), d, digest)
	}
	chain := sum("palimpsest/1 ", id, "\n", sum(string(header)))
	c := events.SeedChain(id, header)
	same("chain(-1)", c, chain)
	commit := &events.Commit{ID: "c 1", Actor: "Zoë \"%\"\nx", Time: "2026-01-01T00:00:00.000Z", Format: 3, First: 0, Last: 1, Digest: d}
	next := c.NextChain(commit)
	same("chain(0)", next, sum(chain, "c%201\nZo%C3%AB%20%22%25%22%0Ax\n2026-01-01T00:00:00.000Z\n3\n0\n1\n", digest))
	same("chain(-1) after its use", c, chain)
	for _, change := range []func(*events.Commit){
		func(c *events.Commit) { c.ID = "c2" }, func(c *events.Commit) { c.Actor = "-" }, func(c *events.Commit) { c.Time = "x" },
		func(c *events.Commit) { c.Format = 4 }, func(c *events.Commit) { c.First = 1 }, func(c *events.Commit) { c.Last = 2 },
		func(c *events.Commit) { c.Digest[5] ^= 1 },
	} {
		other := *commit
		change(&other)
		if c.NextChain(&other) == next {
			t.Errorf("%+v has the same chain", other)
		}
	}
	back, err := events.ParseDigest(d.String())
	if err != nil || back != d {
		t.Errorf("%s reads back as %s, %v", d, back, err)
	}
	for _, bad := range []string{"", "00", d.String()[1:], d.String() + "0", strings.Repeat("g", 64)} {
		if _, err := events.ParseDigest(bad); err == nil {
			t.Errorf("%q is taken for a digest", bad)
		}
	}
}

// commits is a commit for each kind of value that headers must carry.
func commits() []*events.Commit {
	var out []*events.Commit
	for _, actor := range []string{"-", "alice", "Alice B", `100%`, `a"b`, "a\nb\r\n: x", "Zoë Ångström", "\U0001F600", "%41", "a%", "%%4", "\x7f", "CN=x,O=y"} {
		out = append(out, &events.Commit{
			ID: "0197-" + actor, Session: "s/ö 1", Actor: actor, Time: events.FormatTime(time.UnixMilli(1767225604123)), Format: events.Format4,
			First: 41, Last: 43, Digest: events.SeedDigest("x"), Chain: events.SeedDigest("y"), Body: []byte("{}\n"), StreamSeq: 9,
		})
	}
	full := *out[0]
	full.Appends = []events.AppendSpan{{Key: "k \"1\" ä%\n<&>", First: 41, Last: 41}, {Key: "k2", First: 42, Last: 43}}
	full.Trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	return append(out, &full)
}

func TestCommitHeadersRoundTrip(t *testing.T) {
	t.Parallel()
	for _, c := range commits() {
		h := c.Header()
		for name, values := range h {
			for i := range len(values[0]) {
				if b := values[0][i]; b < 0x21 || b > 0x7e || b == '"' {
					t.Fatalf("header %s holds byte 0x%02x: %q", name, b, values[0])
				}
			}
		}
		back, err := events.ParseCommit(h, c.Body, c.StreamSeq)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(back, c) {
			t.Errorf("read back\n got %+v\nwant %+v", back, c)
		}
		if events.CommitID(h) != c.ID {
			t.Errorf("commit id %q, want %q", events.CommitID(h), c.ID)
		}
		size := 0
		for name, values := range h {
			size += len(name) + len(values[0]) + len(": \r\n")
		}
		if size > events.HeaderReserve {
			t.Errorf("%d bytes of headers, %d are reserved", size, events.HeaderReserve)
		}
	}
}

// TestHeadersFilledAgainKeepNothing: what an earlier commit had and the next has not must go.
func TestHeadersFilledAgainKeepNothing(t *testing.T) {
	t.Parallel()
	all := commits()
	full, plain := all[len(all)-1], all[0]
	h := events.NewCommitHeader()
	h.Header["Another"] = []string{"stays"}
	for _, c := range []*events.Commit{full, plain, plain, full, full, plain} {
		h.Fill(c)
		want := c.Header()
		want["Another"] = []string{"stays"}
		if !reflect.DeepEqual(h.Header, want) {
			t.Errorf("filled again\n got %v\nwant %v", h.Header, want)
		}
	}
}

// TestCommitIsACloudEvent builds the event that the headers mean with the CloudEvents SDK.
func TestCommitIsACloudEvent(t *testing.T) {
	t.Parallel()
	for _, c := range commits() {
		ce := event.New("1.0")
		for name, values := range c.Header() {
			attribute, ok := strings.CutPrefix(name, "ce-")
			if !ok {
				if name != "traceparent" {
					t.Errorf("header %s is neither an attribute nor the trace", name)
				}
				continue
			}
			v, err := url.PathUnescape(values[0])
			if err != nil {
				t.Fatal(err)
			}
			switch attribute {
			case "specversion":
				ce.SetSpecVersion(v)
			case "id":
				ce.SetID(v)
			case "source":
				ce.SetSource(v)
			case "type":
				ce.SetType(v)
			case "subject":
				ce.SetSubject(v)
			case "datacontenttype":
				ce.SetDataContentType(v)
			case "time":
				at, err := time.Parse(time.RFC3339, v)
				if err != nil {
					t.Fatal(err)
				}
				ce.SetTime(at)
			default:
				ce.SetExtension(attribute, v)
			}
		}
		if err := ce.SetData("application/x-ndjson", c.Body); err != nil {
			t.Fatal(err)
		}
		if err := ce.Validate(); err != nil {
			t.Errorf("actor %q: %v", c.Actor, err)
		}
		want := map[string]any{"sequence": "00000000000000000041", "firstseq": "41", "lastseq": "43", "format": "4", "actor": c.Actor,
			"digest": c.Digest.String(), "chain": c.Chain.String()}
		got := ce.Extensions()
		delete(got, "appends")
		if !reflect.DeepEqual(got, want) {
			t.Errorf("extensions\n got %v\nwant %v", got, want)
		}
		if ce.ID() != c.ID || ce.Source() != "/sessions/s=2F=C3=B6=201" || ce.Type() != "palimpsest.session.commit.v1" || ce.Subject() != c.Session || ce.Time().UnixMilli() != 1767225604123 {
			t.Errorf("attributes %v", ce)
		}
	}
}

func TestParseCommitRefuses(t *testing.T) {
	t.Parallel()
	good := commits()[1]
	for name, values := range map[string][]string{
		"ce-subject":  {"", "..", "%0A"},
		"ce-type":     {"", "palimpsest.session.commit.v2"},
		"ce-id":       {""},
		"ce-firstseq": {"", "-1", "x", "44", "9007199254740992", "4.", "4e"},
		"ce-lastseq":  {"", "40", "1e99"},
		"ce-format":   {"", "2", "5", "x"},
		"ce-digest":   {"", "00"},
		"ce-chain":    {"", "zz"},
		"ce-appends":  {"{", "1"},
	} {
		for _, v := range values {
			h := nats.Header{}
			for k, old := range good.Header() {
				h[k] = old
			}
			h[name] = []string{v}
			if _, err := events.ParseCommit(h, nil, 1); asError(err).Code != events.CodeCorrupt {
				t.Errorf("%s: %q: %v", name, v, err)
			}
			delete(h, name)
			if _, err := events.ParseCommit(h, nil, 1); asError(err).Code != events.CodeCorrupt && name != "ce-appends" {
				t.Errorf("without %s: %v", name, err)
			}
		}
	}
	if _, err := events.ParseCommit(nil, nil, 1); err == nil {
		t.Error("a message without headers is taken for a commit")
	}
}
