package snapshot

import (
	"encoding/json"
	"fmt"

	"palimpsest/internal/events"
	"palimpsest/internal/session"
)

// Heads and pages are read on every request for messages, and encoding/json reads each message
// in them twice. So they are read in the one form in which they are written; text in any other
// form, damaged or not, is left to encoding/json, which says what is wrong with it.

// parseHead reads a head that appendHead wrote; ok is false for any other text.
func parseHead(b []byte) (h *Head, ok bool) {
	h = new(Head)
	p := valueReader{b: b}
	h.V = int(p.integer(`{"v":`))
	h.Format = events.Format(p.integer(`,"format":`))
	h.Fold = int(p.integer(`,"fold":`))
	h.Session, _ = events.Text(p.value(`,"session":`))
	h.Seq = events.Seq(p.integer(`,"seq":`))
	h.StreamSeq = uint64(p.integer(`,"streamSeq":`))
	h.Digest = p.plain(`,"digest":"`)
	h.Chain = p.plain(`,"chain":"`)
	h.Time = p.integer(`,"time":`)
	h.LogBytes = p.integer(`,"logBytes":`)
	h.ReplaceGeneration = p.integer(`,"replaceGeneration":`)
	h.NodeCount = int(p.integer(`,"nodeCount":`))
	if p.has(`,"headType":"`) {
		h.HeadType = p.plain("")
	}
	h.Index = []int64{}
	p.list(`,"index":[`, func() { h.Index = append(h.Index, p.integer("")) })
	h.Pages = p.entries(`,"pages":[`)
	h.Tail = p.nodes(`,"tail":[`)
	h.NextPage = p.integer(`,"nextPage":`)
	life := p.value(`,"lifecycle":`)
	var writer []byte
	if p.has(`,"writer":`) {
		writer = p.value("")
	}
	if !p.end() || h.Session == "" || json.Unmarshal(life, &h.Lifecycle) != nil {
		return nil, false
	}
	if writer != nil {
		h.Writer = new(session.Writer)
		if writer[0] != '{' || json.Unmarshal(writer, h.Writer) != nil {
			return nil, false
		}
	}
	return h, true
}

// ParsePage reads the page of a key.
func ParsePage(b []byte, key string) (*Page, error) {
	if p, ok := parsePage(b); ok {
		return p, nil
	}
	p := new(Page)
	return p, unmarshal(b, key, p)
}

// ParseIndexPage reads the index page of a key.
func ParseIndexPage(b []byte, key string) (*IndexPage, error) {
	if ip, ok := parseIndexPage(b); ok {
		return ip, nil
	}
	ip := new(IndexPage)
	return ip, unmarshal(b, key, ip)
}

func unmarshal(b []byte, key string, into any) error {
	if err := json.Unmarshal(b, into); err != nil {
		return &events.Error{Code: events.CodeSnapshotDamaged, Detail: fmt.Sprintf("snapshot: key %s: %v", key, err)}
	}
	return nil
}

// parsePage reads a page that was written by values; ok is false for any other text.
func parsePage(b []byte) (pg *Page, ok bool) {
	p := valueReader{b: b}
	pg = &Page{V: int(p.integer(`{"v":`)), Nodes: p.nodes(`,"nodes":[`)}
	return pg, p.end()
}

// parseIndexPage reads an index page that was written by values; ok is false for any other text.
func parseIndexPage(b []byte) (ip *IndexPage, ok bool) {
	p := valueReader{b: b}
	ip = &IndexPage{V: int(p.integer(`{"v":`)), Pages: p.entries(`,"pages":[`)}
	return ip, p.end()
}

// valueReader reads literal pieces of a value from the left. A piece that is not there sets bad,
// and nothing is read from then on.
type valueReader struct {
	b   []byte
	i   int
	bad bool
}

// has reads a literal if it is next.
func (p *valueReader) has(s string) bool {
	if p.bad || len(p.b)-p.i < len(s) || string(p.b[p.i:p.i+len(s)]) != s {
		return false
	}
	p.i += len(s)
	return true
}

// must reads a literal.
func (p *valueReader) must(s string) bool {
	if !p.has(s) {
		p.bad = true
	}
	return !p.bad
}

// end reads the last brace and reports whether all was read well.
func (p *valueReader) end() bool { return p.must("}") && p.i == len(p.b) }

// integer reads a literal and the plain decimal behind it, of up to 18 digits.
func (p *valueReader) integer(s string) int64 {
	if !p.must(s) {
		return 0
	}
	neg := p.has("-")
	start := p.i
	n := int64(0)
	for p.i < len(p.b) && p.b[p.i] >= '0' && p.b[p.i] <= '9' {
		n = n*10 + int64(p.b[p.i]-'0')
		p.i++
	}
	if digits := p.i - start; digits == 0 || digits > 18 || p.b[start] == '0' && (digits > 1 || neg) {
		p.bad = true
	}
	if neg {
		return -n
	}
	return n
}

// plain reads a literal and a string without escapes behind it, up to and with its closing quote.
func (p *valueReader) plain(s string) string {
	if !p.must(s) {
		return ""
	}
	for start := p.i; p.i < len(p.b); p.i++ {
		switch c := p.b[p.i]; {
		case c == '"':
			p.i++
			return string(p.b[start : p.i-1])
		case c < ' ' || c == '\\' || c > '~':
			p.bad = true
			return ""
		}
	}
	p.bad = true
	return ""
}

// value reads a literal and the JSON value behind it, without white space between its tokens.
func (p *valueReader) value(s string) []byte {
	if !p.must(s) {
		return nil
	}
	n, ok := events.ScanValue(p.b[p.i:])
	if !ok {
		p.bad = true
		return nil
	}
	v := p.b[p.i : p.i+n : p.i+n]
	p.i += n
	return v
}

// list reads a literal that opens an array, and the elements behind it, each by f, to its end.
func (p *valueReader) list(s string, f func()) {
	if !p.must(s) || p.has("]") {
		return
	}
	for f(); !p.has("]") && p.must(","); {
		f()
	}
}

func (p *valueReader) nodes(s string) []PageNode {
	out := []PageNode{}
	p.list(s, func() {
		n := PageNode{Seq: events.Seq(p.integer(`{"seq":`)), At: uint64(p.integer(`,"at":`))}
		if !p.must(`,"type":"`) {
			return
		}
		n.Type = p.typeName()
		size := p.integer(`,"size":`)
		if n.Size = int32(size); int64(n.Size) != size {
			p.bad = true
		}
		if p.has(`,"fp":"`) {
			n.Fingerprint = p.plain("")
		}
		if p.has(`,"message":`) {
			n.Message = p.value("")
		}
		p.must("}")
		out = append(out, n)
	})
	return out
}

// typeName reads the type of a node without allocating for those that nodes have.
func (p *valueReader) typeName() string {
	for k := events.KindSystem; k <= events.KindDeveloper; k++ {
		if t := k.Type(); p.has(t) {
			p.must(`"`)
			return t
		}
	}
	return p.plain("")
}

func (p *valueReader) entries(s string) []PageEntry {
	out := []PageEntry{}
	p.list(s, func() {
		e := PageEntry{N: p.integer(`{"n":`), Count: int(p.integer(`,"count":`))}
		if e.Count < 0 || e.Count > PageTarget || len(out) == IndexEntries {
			p.bad = true
			return
		}
		e.Seqs = make(Runs, 0, e.Count)
		p.list(`,"seqs":[`, func() {
			if !p.has("[") {
				e.Seqs = append(e.Seqs, events.Seq(p.integer("")))
				return
			}
			from := p.integer("")
			to := p.integer(",")
			if p.must("]"); p.bad || from < 0 || to < from || to-from >= int64(e.Count-len(e.Seqs)) {
				p.bad = true
				return
			}
			for seq := from; seq <= to; seq++ {
				e.Seqs = append(e.Seqs, events.Seq(seq))
			}
		})
		e.Bytes = p.integer(`,"bytes":`)
		p.must("}")
		out = append(out, e)
	})
	return out
}
