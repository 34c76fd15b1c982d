package auth

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"time"
)

// secretPrefix lets scanners for leaked secrets know one of ours.
const secretPrefix = "plmp_"

// Entry is a line of a token file.
type Entry struct {
	Name    string     `json:"name"`
	SHA256  string     `json:"sha256"` // of the secret, hex; the secret itself is in no file
	Grants  []Grant    `json:"grants"`
	Rate    float64    `json:"rate,omitempty"`  // requests a second; 0 for the program's --rate
	Burst   int        `json:"burst,omitempty"` // 0 for the program's --burst
	Expires *time.Time `json:"expires,omitempty"`
}

// NewToken makes a secret of 256 random bits and the entry that recognises it.
func NewToken(name string, grants []Grant, expires time.Time) (secret string, e Entry, err error) {
	if err := checkName(name); err != nil {
		return "", Entry{}, err
	}
	if err := checkGrants(grants); err != nil {
		return "", Entry{}, err
	}
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	secret = secretPrefix + base64.RawURLEncoding.EncodeToString(b[:])
	sum := sha256.Sum256([]byte(secret))
	e = Entry{Name: name, SHA256: hex.EncodeToString(sum[:]), Grants: grants}
	if !expires.IsZero() {
		expires = expires.UTC().Truncate(time.Second)
		e.Expires = &expires
	}
	return secret, e, nil
}

// Line is the entry as a line of a token file, without its line end.
func (e Entry) Line() string {
	b, err := json.Marshal(e)
	if err != nil {
		panic(err) // strings, numbers and a time in range always encode
	}
	return string(b)
}

// tokens finds callers by the hash of their secrets. What an attacker can time is a look-up of
// a hash that they cannot choose.
type tokens map[[sha256.Size]byte]*Caller

func readTokens(path string) (tokens, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("token file: %w", err)
	}
	out := tokens{}
	n := 0
	for line := range bytes.Lines(b) {
		n++
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		key, c, err := readEntry(line)
		if err == nil && out[key] != nil {
			err = fmt.Errorf("the same secret as that of %q", out[key].Name)
		}
		if err != nil { // the line is not repeated: it may be a secret that was put there by mistake
			return nil, fmt.Errorf("token file %s, line %d: %w; `appender token new` prints lines to add", path, n, err)
		}
		out[key] = c
	}
	return out, nil
}

func readEntry(line []byte) (key [sha256.Size]byte, c *Caller, err error) {
	var e Entry
	dec := json.NewDecoder(bytes.NewReader(line))
	dec.DisallowUnknownFields()
	if dec.Decode(&e) != nil || dec.More() {
		return key, nil, fmt.Errorf(`expected one JSON object {"name","sha256","grants":[{"scopes","sessions"}]} and at most rate, burst and expires besides`)
	}
	sum, err := hex.DecodeString(e.SHA256)
	if err != nil || len(sum) != sha256.Size {
		return key, nil, fmt.Errorf("sha256 of %q: expected 64 hexadecimal digits", cut(e.Name))
	}
	if err := checkName(e.Name); err != nil {
		return key, nil, err
	}
	if err := checkGrants(e.Grants); err != nil {
		return key, nil, fmt.Errorf("%q: %w", e.Name, err)
	}
	if e.Rate < 0 || e.Burst < 0 {
		return key, nil, fmt.Errorf("%q: rate %v and burst %d, expected nothing below 0", e.Name, e.Rate, e.Burst)
	}
	c = &Caller{Name: e.Name, Grants: e.Grants, Rate: e.Rate, Burst: e.Burst}
	if e.Expires != nil {
		c.Expires = *e.Expires
	}
	return [sha256.Size]byte(sum), c, nil
}
