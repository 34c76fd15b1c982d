package events

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
)

// Digest is one link of a hash chain: SHA-256, 32 bytes.
type Digest [sha256.Size]byte

// chainSeed is what both chains of a session start from.
const chainSeed = "palimpsest/1 "

// SeedDigest is digest(-1) of a session: SHA-256("palimpsest/1 " ‖ session id).
func SeedDigest(session string) Digest {
	return sha256.Sum256([]byte(chainSeed + session))
}

// Next is digest(n) = SHA-256(digest(n-1) ‖ the canonical line without its line end).
func (d Digest) Next(line []byte) Digest {
	h := sha256.New()
	h.Write(d[:])
	h.Write(line)
	var out Digest
	h.Sum(out[:0])
	return out
}

// SeedChain is chain(-1) of a session: SHA-256("palimpsest/1 " ‖ session id ‖ "\n" ‖
// SHA-256 of the header's bytes).
func SeedChain(session string, header []byte) Digest {
	sum := sha256.Sum256(header)
	return sha256.Sum256(append([]byte(chainSeed+session+"\n"), sum[:]...))
}

// NextChain is chain(k) = SHA-256(chain(k-1) ‖ "id\nactor\ntime\nformat\nfirstseq\nlastseq\n" ‖
// digest of the commit's last event), with the values as they stand in the message's headers.
func (d Digest) NextChain(c *Commit) Digest {
	var store [256]byte
	b := append(store[:0], d[:]...)
	for _, v := range [...]string{c.ID, c.Actor, c.Time} {
		b = append(append(b, percentEncode(v)...), '\n')
	}
	for _, n := range [...]int64{int64(c.Format), int64(c.First), int64(c.Last)} {
		b = append(strconv.AppendInt(b, n, 10), '\n')
	}
	return sha256.Sum256(append(b, c.Digest[:]...))
}

// String returns the digest in lower-case hex.
func (d Digest) String() string {
	var b [2 * len(d)]byte
	hex.Encode(b[:], d[:])
	return string(b[:])
}

// ParseDigest reads the hex form.
func ParseDigest(s string) (Digest, error) {
	var d Digest
	if len(s) == 2*len(d) {
		var text [2 * len(d)]byte
		copy(text[:], s)
		if _, err := hex.Decode(d[:], text[:]); err == nil {
			return d, nil
		}
	}
	return Digest{}, fmt.Errorf("digest %q: expected %d hex digits", s, 2*len(d))
}
