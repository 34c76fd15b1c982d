package audit

import (
	"cmp"
	"fmt"
	"slices"

	"palimpsest/internal/events"
)

// trust takes in the attestations of a session that trusted keys signed.
func (v *verifier) trust(o Options, kept []*Attestation) {
	for _, t := range slices.Concat(kept, o.Copies[v.id]) {
		if !slices.Contains(o.Trusted, t.Key) && t.Key != "" {
			continue // says nothing to who does not trust the key
		}
		seq := t.Seq
		f := Finding{Check: CheckAttested, Seq: &seq, StreamSeq: t.StreamSeq}
		if err := t.Check(); err != nil {
			f.Detail = "an attestation that was changed, or forged: " + err.Error()
			v.find(f)
			continue
		}
		if t.Session != v.id {
			f.Detail = fmt.Sprintf("an attestation of session %q is kept as one of this session", t.Session)
			v.find(f)
			continue
		}
		v.attested = append(v.attested, t)
	}
	slices.SortStableFunc(v.attested, func(x, y *Attestation) int { return cmp.Compare(x.Seq, y.Seq) })
}

// attest compares what was signed with a commit of the log.
func (v *verifier) attest(c *events.Commit) {
	for len(v.attested) > 0 && v.attested[0].Seq <= c.Last {
		t := v.attested[0]
		v.attested = v.attested[1:]
		seq := t.Seq
		f := Finding{Check: CheckAttested, Seq: &seq, StreamSeq: c.StreamSeq}
		switch {
		case t.Seq != c.Last:
			f.Detail = fmt.Sprintf("the log is not the one that key %s signed at %s: a commit ended here", t.Key, t.Time)
			f.Expected, f.Found = fmt.Sprintf("a commit that ends with seq %d", t.Seq), fmt.Sprintf("one from %d to %d", c.First, c.Last)
		case t.Chain != c.Chain.String():
			f.Detail = fmt.Sprintf("the log up to here is not the one that key %s signed at %s: events, commits or the header were rewritten", t.Key, t.Time)
			f.Expected, f.Found = "chain "+t.Chain, c.Chain.String()
		case t.Digest != c.Digest.String():
			f.Detail = fmt.Sprintf("the events up to here are not those that key %s signed at %s", t.Key, t.Time)
			f.Expected, f.Found = "digest "+t.Digest, c.Digest.String()
		default:
			v.r.AttestedSeq = &seq
			continue
		}
		v.find(f)
	}
}

// attestedBeyond finds what was signed behind the log's end.
func (v *verifier) attestedBeyond() {
	for _, t := range v.attested {
		seq := t.Seq
		v.find(Finding{Check: CheckAttested, Seq: &seq, StreamSeq: t.StreamSeq, Expected: fmt.Sprintf("a log that reaches seq %d", t.Seq), Found: fmt.Sprintf("one that ends at seq %d", v.next-1),
			Detail: fmt.Sprintf("the log was longer when key %s signed it at %s: its end is gone", t.Key, t.Time)})
	}
	v.attested = nil
}
