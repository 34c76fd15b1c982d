package auth

import (
	"crypto/sha256"
	"errors"
	"strings"
	"sync/atomic"
	"time"
)

// Config says who is recognised.
type Config struct {
	// TokenFile holds the entries of bearer tokens, one JSON object a line; blank lines and
	// those that begin with # are skipped. Defaults to none.
	TokenFile string
	// JWT says which JWTs are recognised. Defaults to none.
	JWT JWTConfig
	// Now is the clock for expiry. Defaults to time.Now.
	Now func() time.Time
}

// Authenticator recognises callers by their bearer tokens. It is safe for concurrent use.
type Authenticator struct {
	cfg   Config
	known atomic.Pointer[known]
}

// known is what the files said when they were read last.
type known struct {
	tokens tokens
	jwt    *verifier // nil: no JWT is recognised
}

// New reads the files of cfg. At least one of them MUST be named.
func New(cfg Config) (*Authenticator, error) {
	if cfg.TokenFile == "" && cfg.JWT.KeyFile == "" {
		return nil, errors.New("found neither a token file nor a JWT key file, expected one of them")
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	a := &Authenticator{cfg: cfg}
	return a, a.Reload()
}

// Files are what Reload reads.
func (a *Authenticator) Files() []string {
	var out []string
	for _, f := range []string{a.cfg.TokenFile, a.cfg.JWT.KeyFile} {
		if f != "" {
			out = append(out, f)
		}
	}
	return out
}

// Reload reads the files again. After an error what was known before stays known.
func (a *Authenticator) Reload() error {
	var k known
	var err error
	if a.cfg.TokenFile != "" {
		if k.tokens, err = readTokens(a.cfg.TokenFile); err != nil {
			return err
		}
	}
	if a.cfg.JWT.KeyFile != "" {
		if k.jwt, err = newVerifier(a.cfg.JWT); err != nil {
			return err
		}
	}
	a.known.Store(&k)
	return nil
}

// Authenticate recognises the bearer of a token. The error is fit for the caller and repeats
// nothing of the token.
func (a *Authenticator) Authenticate(token string) (*Caller, error) {
	k := a.known.Load()
	if c := k.tokens[sha256.Sum256([]byte(token))]; c != nil {
		if !c.Expires.IsZero() && !a.cfg.Now().Before(c.Expires) {
			return nil, errors.New("the token has expired; ask for a new one")
		}
		return c, nil
	}
	if k.jwt != nil && strings.Count(token, ".") == 2 {
		return k.jwt.caller(token)
	}
	return nil, errors.New("the token is not known here")
}
