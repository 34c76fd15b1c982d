package auth

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/golang-jwt/jwt/v5"
)

// JWTConfig says which JWTs are recognised.
type JWTConfig struct {
	// KeyFile holds the issuer's public keys: a JWKS (JSON), or one or more PEM blocks with
	// public keys or certificates. RSA, ECDSA and Ed25519; a shared secret is refused.
	// Defaults to none: no JWT is recognised.
	KeyFile string
	// Issuer is what `iss` must be. Defaults to whatever it is.
	Issuer string
	// Audience is what `aud` must contain. Required with KeyFile: a token that was made for
	// another service must not open this one.
	Audience string
	// Leeway is how far clocks may be apart. Defaults to 30 s.
	Leeway time.Duration
}

// asymmetric are the algorithms that a public key verifies.
var asymmetric = []string{"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}

// claims are what a JWT says. Either grants are given in full, or one grant as scope and
// palimpsest_sessions.
type claims struct {
	jwt.RegisteredClaims
	Scope    string    `json:"scope"` // names with spaces between them (RFC 8693); others than ours are ignored
	Sessions []Pattern `json:"palimpsest_sessions"`
	Grants   []Grant   `json:"palimpsest_grants"`
}

// verifier recognises JWTs.
type verifier struct {
	keys   map[string]any // by key id
	all    []jwt.VerificationKey
	parser *jwt.Parser
}

func newVerifier(cfg JWTConfig) (*verifier, error) {
	if cfg.Audience == "" {
		return nil, errors.New("JWT: the audience is missing; name what `aud` must contain, so that a token made for another service is refused")
	}
	b, err := os.ReadFile(cfg.KeyFile)
	if err != nil {
		return nil, fmt.Errorf("JWT key file: %w", err)
	}
	if cfg.Leeway == 0 {
		cfg.Leeway = 30 * time.Second
	}
	v := &verifier{keys: map[string]any{}}
	if b = bytes.TrimSpace(b); len(b) > 0 && b[0] == '{' {
		err = v.readJWKS(b)
	} else {
		err = v.readPEM(b)
	}
	if err == nil && len(v.all) == 0 {
		err = errors.New("found no public key, expected a JWKS or PEM blocks")
	}
	if err != nil {
		return nil, fmt.Errorf("JWT key file %s: %w", cfg.KeyFile, err)
	}
	options := []jwt.ParserOption{jwt.WithValidMethods(asymmetric), jwt.WithExpirationRequired(), jwt.WithAudience(cfg.Audience), jwt.WithLeeway(cfg.Leeway), jwt.WithStrictDecoding()}
	if cfg.Issuer != "" {
		options = append(options, jwt.WithIssuer(cfg.Issuer))
	}
	v.parser = jwt.NewParser(options...)
	return v, nil
}

// add takes a key that may verify.
func (v *verifier) add(id string, key any) error {
	switch key.(type) {
	case *rsa.PublicKey, *ecdsa.PublicKey, ed25519.PublicKey:
	default:
		return fmt.Errorf("found a key of type %T, expected the public half of an RSA, ECDSA or Ed25519 key", key)
	}
	v.all = append(v.all, key)
	if id != "" {
		v.keys[id] = key
	}
	return nil
}

func (v *verifier) readJWKS(b []byte) error {
	var set struct {
		Keys []json.RawMessage `json:"keys"`
	}
	if err := json.Unmarshal(b, &set); err != nil {
		return fmt.Errorf("expected a JWKS: %w", err)
	}
	for i, raw := range set.Keys {
		k, err := jwkset.NewJWKFromRawJSON(raw, jwkset.JWKMarshalOptions{}, jwkset.JWKValidateOptions{})
		if err == nil && k.Marshal().USE == jwkset.UseEnc {
			continue
		}
		if err == nil {
			err = v.add(k.Marshal().KID, k.Key())
		}
		if err != nil {
			return fmt.Errorf("key %d: %w", i, err)
		}
	}
	return nil
}

func (v *verifier) readPEM(b []byte) error {
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			return nil
		}
		var key any
		var err error
		switch block.Type {
		case "CERTIFICATE":
			var cert *x509.Certificate
			if cert, err = x509.ParseCertificate(block.Bytes); err == nil {
				key = cert.PublicKey
			}
		case "PUBLIC KEY":
			key, err = x509.ParsePKIXPublicKey(block.Bytes)
		case "RSA PUBLIC KEY":
			key, err = x509.ParsePKCS1PublicKey(block.Bytes)
		default:
			err = fmt.Errorf("found a PEM block %q, expected PUBLIC KEY or CERTIFICATE", block.Type)
		}
		if err == nil {
			err = v.add("", key)
		}
		if err != nil {
			return err
		}
	}
}

// key finds the key that a token names; one that names none may be signed with any.
func (v *verifier) key(t *jwt.Token) (any, error) {
	if id, _ := t.Header["kid"].(string); id != "" && len(v.keys) > 0 {
		key, ok := v.keys[id]
		if !ok {
			return nil, errors.New("signed with a key that is not in the key file")
		}
		return key, nil
	}
	return jwt.VerificationKeySet{Keys: v.all}, nil
}

// caller reads a token. The error is fit for the caller.
func (v *verifier) caller(token string) (*Caller, error) {
	var c claims
	if _, err := v.parser.ParseWithClaims(token, &c, v.key); err != nil {
		return nil, fmt.Errorf("JWT refused: %s", reason(err))
	}
	if err := checkName(c.Subject); err != nil {
		return nil, fmt.Errorf("JWT refused: sub: %w", err)
	}
	grants := c.Grants
	if grants == nil {
		var scopes []Scope
		for _, name := range strings.Fields(c.Scope) {
			if s, err := ParseScopes([]string{name}); err == nil {
				scopes = append(scopes, s...)
			}
		}
		grants = []Grant{{scopes, c.Sessions}}
	} else if err := checkGrants(grants); err != nil {
		return nil, fmt.Errorf("JWT refused: palimpsest_grants: %w", err)
	}
	return &Caller{Name: c.Subject, Grants: grants, Expires: c.ExpiresAt.Time}, nil
}

// reason says why a token was refused in words that do not repeat it.
func reason(err error) string {
	for _, r := range []struct {
		is   error
		text string
	}{
		{jwt.ErrTokenExpired, "it has expired; get a new one"},
		{jwt.ErrTokenNotValidYet, "it is not valid yet; check the clocks"},
		{jwt.ErrTokenUsedBeforeIssued, "it was issued in the future; check the clocks"},
		{jwt.ErrTokenInvalidAudience, "it is for another audience"},
		{jwt.ErrTokenInvalidIssuer, "it is from another issuer"},
		{jwt.ErrTokenRequiredClaimMissing, "a required claim is missing; expected exp, aud and sub"},
		{jwt.ErrTokenMalformed, "it is malformed"},
	} {
		if errors.Is(err, r.is) {
			return r.text
		}
	}
	return "its signature is not by a known key"
}
