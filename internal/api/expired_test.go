package api_test

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"palimpsest/internal/api"
	"palimpsest/internal/auth"
	"palimpsest/internal/journal/journaltest"
)

// A stream ends when the token that opened it does, and says so; one whose token has no end goes on.
func TestStreamsEndWithTheirToken(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	ctx := journaltest.Context(t)
	if _, err := w.appender.Append(ctx, appendOf("s")); err != nil {
		t.Fatal(err)
	}
	if _, err := w.reader.Projected(ctx, "s", journaltest.Deadline); err != nil {
		t.Fatal(err)
	}
	// stream opens a stream whose token ends after a while, and reads it to its end. The
	// authenticator's clock stands still, so that the request is let in however late it comes.
	stream := func(path string, after time.Duration) string {
		now := time.Now()
		secret, e, err := auth.NewToken("ann", []auth.Grant{grant("*", auth.Read)}, now.Add(after))
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "tokens")
		if err := os.WriteFile(file, []byte(e.Line()+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := auth.New(auth.Config{TokenFile: file, Now: func() time.Time { return now }})
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(ctx, "GET", serve(t, w.projectorAPI(&api.Edge{Auth: a}))+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+secret)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	for _, path := range []string{"/v1/sessions/s/watch?from=-1", "/v1/feed"} {
		// A machine that is busy may not have begun the answer when the token ends: then it has more time.
		var got string
		for after := time.Second; after < journaltest.Deadline/2 && !strings.Contains(got, "event: hello"); after *= 2 {
			got = stream(path, after)
		}
		before, end, _ := strings.Cut(got, "event: end\n")
		if !strings.Contains(before, "event: hello") || !strings.Contains(end, `"code":"token-expired"`) || strings.Contains(got, `"stopping"`) {
			t.Errorf("%s: %s", path, got)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}
