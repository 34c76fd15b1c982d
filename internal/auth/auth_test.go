package auth_test

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/MicahParks/jwkset"
	"github.com/golang-jwt/jwt/v5"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"palimpsest/internal/auth"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestAPatternCoversWhatItsStarsStandFor(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		pattern auth.Pattern
		session string
		want    bool
	}{
		{"*", "anything", true},
		{"team-a-*", "team-a-1", true},
		{"team-a-*", "team-a-", true},
		{"team-a-*", "team-b-1", false},
		{"team-a-*", "xteam-a-1", false},
		{"team-a", "team-a", true},
		{"team-a", "team-a-1", false},
		{"*-prod", "x-prod", true},
		{"*-prod", "x-prod-1", false},
		{"a*b*c", "a-b-c", true},
		{"a*b*c", "abc", true},
		{"a*b*c", "acb", false},
		{"a*a", "a", false}, // one byte is not both ends
		{"team/*", "team/a/b", true},
		{"a?c", "abc", false}, // only * is special
		{"A*", "a1", false},
	} {
		if got := c.pattern.Covers(c.session); got != c.want {
			t.Errorf("%q covers %q: %t, want %t", c.pattern, c.session, got, c.want)
		}
	}
}

// The oracle tries every split at every star.
func TestAPatternCoversLikeTheDumbMatcher(t *testing.T) {
	t.Parallel()
	var dumb func(p, s string) bool
	dumb = func(p, s string) bool {
		switch {
		case p == "":
			return s == ""
		case p[0] == '*':
			return dumb(p[1:], s) || s != "" && dumb(p, s[1:])
		}
		return s != "" && s[0] == p[0] && dumb(p[1:], s[1:])
	}
	rapid.Check(t, func(t *rapid.T) {
		p, s := rapid.StringMatching(`[ab*]{0,8}`).Draw(t, "pattern"), rapid.StringMatching(`[ab]{0,8}`).Draw(t, "session")
		if got, want := auth.Pattern(p).Covers(s), dumb(p, s); got != want {
			t.Fatalf("%q covers %q: %t, want %t", p, s, got, want)
		}
	})
}

func TestOneGrantsScopeDoesNotReachAnothersSessions(t *testing.T) {
	t.Parallel()
	c := &auth.Caller{Grants: []auth.Grant{
		{Scopes: []auth.Scope{auth.Append}, Sessions: []auth.Pattern{"mine-*"}},
		{Scopes: []auth.Scope{auth.Read}, Sessions: []auth.Pattern{"*"}},
	}}
	for _, x := range []struct {
		scope   auth.Scope
		session string
		want    bool
	}{
		{auth.Append, "mine-1", true}, {auth.Append, "yours-1", false}, {auth.Append, "", false},
		{auth.Read, "yours-1", true}, {auth.Read, "", true}, {auth.Erase, "mine-1", false}, {auth.Admin, "", false},
	} {
		if got := c.May(x.scope, x.session); got != x.want {
			t.Errorf("%s on %q: %t, want %t", x.scope, x.session, got, x.want)
		}
	}
	admin := &auth.Caller{Grants: []auth.Grant{{Scopes: []auth.Scope{auth.Admin}, Sessions: []auth.Pattern{"a-*"}}}}
	if !admin.May(auth.Erase, "a-1") || admin.May(auth.Erase, "b-1") || admin.May(auth.Admin, "") {
		t.Error("admin of some sessions: expected every scope on those, and none on others or on the service")
	}
}

func write(t *testing.T, content string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func grants() []auth.Grant {
	return []auth.Grant{{Scopes: []auth.Scope{auth.Append}, Sessions: []auth.Pattern{"a-*"}}}
}

func TestASecretIsKnownByItsLineAndTheLineHoldsNoSecret(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	secret, e, err := auth.NewToken("alice", grants(), now.Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(e.Line(), secret) || strings.Contains(e.Line(), strings.TrimPrefix(secret, "plmp_")) {
		t.Fatalf("the line holds the secret: %s", e.Line())
	}
	a, err := auth.New(auth.Config{TokenFile: write(t, "# people\n\n"+e.Line()+"\n"), Now: func() time.Time { return now }})
	if err != nil {
		t.Fatal(err)
	}
	c, err := a.Authenticate(secret)
	if err != nil || c.Name != "alice" || !c.May(auth.Append, "a-1") || c.May(auth.Read, "a-1") {
		t.Fatalf("found %+v, %v", c, err)
	}
	for _, other := range []string{"", secret + "x", e.SHA256, strings.ToUpper(secret)} {
		if _, err := a.Authenticate(other); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("token %q: error %v, expected one that does not repeat it", other, err)
		}
	}
	now = now.Add(time.Hour)
	if _, err := a.Authenticate(secret); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("after its end: error %v", err)
	}
}

func TestABadTokenFileIsRefusedAndTheOldOneStays(t *testing.T) {
	t.Parallel()
	secret, e, err := auth.NewToken("alice", grants(), time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	path := write(t, e.Line())
	a, err := auth.New(auth.Config{TokenFile: path})
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"secret in the file": secret,
		"no grants":          `{"name":"x","sha256":"` + e.SHA256 + `"}`,
		"no sessions":        `{"name":"x","sha256":"` + e.SHA256 + `","grants":[{"scopes":["read"]}]}`,
		"unknown scope":      `{"name":"x","sha256":"` + e.SHA256 + `","grants":[{"scopes":["write"],"sessions":["*"]}]}`,
		"unknown key":        `{"name":"x","sha256":"` + e.SHA256 + `","grant":[]}`,
		"short hash":         strings.Replace(e.Line(), e.SHA256, e.SHA256[:60], 1),
		"nobody's name":      strings.Replace(e.Line(), "alice", "-", 1),
		"twice":              e.Line() + "\n" + e.Line(),
		"two on a line":      e.Line() + " " + e.Line(),
	} {
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		err := a.Reload()
		if err == nil || !strings.Contains(err.Error(), "line ") || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: error %v, expected one that names the line and repeats no secret", name, err)
		}
		if _, err := a.Authenticate(secret); err != nil {
			t.Errorf("%s: the token that was known is refused: %v", name, err)
		}
	}
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := a.Reload(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Authenticate(secret); err == nil {
		t.Error("a token whose line was removed is still known")
	}
}

func sign(t *testing.T, method jwt.SigningMethod, key any, kid string, change func(jwt.MapClaims)) string {
	t.Helper()
	c := jwt.MapClaims{"sub": "bob", "aud": "palimpsest", "iss": "https://issuer", "exp": time.Now().Add(time.Hour).Unix(), "scope": "openid append read", "palimpsest_sessions": []string{"b-*"}}
	if change != nil {
		change(c)
	}
	tok := jwt.NewWithClaims(method, c)
	if kid != "" {
		tok.Header["kid"] = kid
	}
	s, err := tok.SignedString(key)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func publicPEM(t *testing.T, keys ...crypto.PublicKey) string {
	t.Helper()
	var b strings.Builder
	for _, k := range keys {
		der, err := x509.MarshalPKIXPublicKey(k)
		if err != nil {
			t.Fatal(err)
		}
		b.Write(pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}))
	}
	return b.String()
}

func TestAJWTIsKnownByKeyAudienceIssuerAndTime(t *testing.T) {
	t.Parallel()
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	ecKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	edPublic, edKey, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	_, stranger, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	pems := publicPEM(t, &rsaKey.PublicKey, &ecKey.PublicKey, edPublic)
	a, err := auth.New(auth.Config{JWT: auth.JWTConfig{KeyFile: write(t, pems), Audience: "palimpsest", Issuer: "https://issuer"}})
	if err != nil {
		t.Fatal(err)
	}
	for name, token := range map[string]string{
		"RS256": sign(t, jwt.SigningMethodRS256, rsaKey, "", nil),
		"ES256": sign(t, jwt.SigningMethodES256, ecKey, "", nil),
		"EdDSA": sign(t, jwt.SigningMethodEdDSA, edKey, "", nil),
		"grants": sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) {
			delete(c, "scope")
			delete(c, "palimpsest_sessions")
			c["palimpsest_grants"] = []any{map[string]any{"scopes": []string{"append"}, "sessions": []string{"b-*"}}}
		}),
	} {
		c, err := a.Authenticate(token)
		if err != nil || c.Name != "bob" || !c.May(auth.Append, "b-1") || c.May(auth.Append, "a-1") || c.May(auth.Admin, "") {
			t.Errorf("%s: found %+v, %v", name, c, err)
		}
	}
	for name, token := range map[string]string{
		"stranger's key":        sign(t, jwt.SigningMethodEdDSA, stranger, "", nil),
		"none":                  sign(t, jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, "", nil),
		"public key as secret":  sign(t, jwt.SigningMethodHS256, []byte(pems), "", nil),
		"other audience":        sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) { c["aud"] = "other" }),
		"no audience":           sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) { delete(c, "aud") }),
		"other issuer":          sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) { c["iss"] = "https://other" }),
		"expired":               sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) { c["exp"] = time.Now().Add(-time.Hour).Unix() }),
		"no end":                sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) { delete(c, "exp") }),
		"not yet":               sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) { c["nbf"] = time.Now().Add(time.Hour).Unix() }),
		"no subject":            sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) { delete(c, "sub") }),
		"nobody's name":         sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) { c["sub"] = "-" }),
		"header in the subject": sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) { c["sub"] = "x\r\nce-actor: root" }),
	} {
		if c, err := a.Authenticate(token); err == nil {
			t.Errorf("%s: taken as %+v", name, c)
		} else if strings.Contains(err.Error(), token) {
			t.Errorf("%s: the error repeats the token: %v", name, err)
		}
	}
	bare := sign(t, jwt.SigningMethodEdDSA, edKey, "", func(c jwt.MapClaims) { delete(c, "palimpsest_sessions") })
	if c, err := a.Authenticate(bare); err != nil || c.May(auth.Append, "b-1") || c.May(auth.Read, "") {
		t.Errorf("a scope without sessions: found %+v, %v, expected a caller without rights", c, err)
	}
}

func TestAJWKSNamesItsKeysAndASharedSecretIsRefused(t *testing.T) {
	t.Parallel()
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	jwks := func(key any, id string) string {
		k, err := jwkset.NewJWKFromKey(key, jwkset.JWKOptions{Metadata: jwkset.JWKMetadataOptions{KID: id}, Marshal: jwkset.JWKMarshalOptions{Private: true}})
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(map[string]any{"keys": []any{k.Marshal()}})
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	a, err := auth.New(auth.Config{JWT: auth.JWTConfig{KeyFile: write(t, jwks(public, "k1")), Audience: "palimpsest"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Authenticate(sign(t, jwt.SigningMethodEdDSA, key, "k1", nil)); err != nil {
		t.Error(err)
	}
	if _, err := a.Authenticate(sign(t, jwt.SigningMethodEdDSA, key, "k2", nil)); err == nil {
		t.Error("a token that names another key was taken")
	}
	for name, cfg := range map[string]auth.JWTConfig{
		"shared secret": {KeyFile: write(t, jwks([]byte("0123456789abcdef0123456789abcdef"), "s")), Audience: "palimpsest"},
		"no key":        {KeyFile: write(t, `{"keys":[]}`), Audience: "palimpsest"},
		"no audience":   {KeyFile: write(t, jwks(public, "k1"))},
		"not a file":    {KeyFile: "/nonexistent", Audience: "palimpsest"},
		"text":          {KeyFile: write(t, "hello"), Audience: "palimpsest"},
	} {
		if _, err := auth.New(auth.Config{JWT: cfg}); err == nil {
			t.Errorf("%s: expected an error", name)
		}
	}
}
