package api

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestBeforeAnAPIIsThereOnlyTheProbesSayHowItIs(t *testing.T) {
	t.Parallel()
	f := newFront()
	get := func(path string) (int, string) {
		w := httptest.NewRecorder()
		f.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		return w.Code, w.Body.String()
	}
	f.waits(errors.New("stream SESSIONS has no leader"))
	for _, c := range []struct {
		path   string
		status int
		says   string
	}{
		{"/healthz", 200, "ok"},
		{"/readyz", 503, "stream SESSIONS has no leader"},
		{"/v1/sessions/s", 503, `"code":"unavailable"`},
		{"/metrics", 503, "the program starts"},
	} {
		status, body := get(c.path)
		if status != c.status || !strings.Contains(body, c.says) {
			t.Errorf("%s: %d %s, want %d with %q", c.path, status, body, c.status, c.says)
		}
		if c.path != "/readyz" && strings.Contains(body, "SESSIONS") {
			t.Errorf("%s tells everybody what is missing: %s", c.path, body)
		}
	}
	f.open(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	if status, _ := get("/readyz"); status != http.StatusTeapot {
		t.Errorf("opened, the API does not answer: %d", status)
	}
}
