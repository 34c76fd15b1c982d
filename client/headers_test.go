package client_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
)

// A condition that is there and empty is a mistake of the caller's: taken for absent, it would
// let an append through that was meant to be conditional.
func TestEmptyConditionsAreRefused(t *testing.T) {
	t.Parallel()
	c := dial(t, nil)
	s := fresh(c, "conditions")
	for _, name := range []string{"If-Match", "Idempotency-Key", "Palimpsest-Writer-Epoch"} {
		for _, values := range [][]string{{""}, {`"0"`, `"0"`}} {
			r, err := http.NewRequestWithContext(within(t), "POST", appenderURL+"/v1/sessions/"+strings.ReplaceAll(s.ID(), " ", "%20")+"/events", strings.NewReader(`{"type":"todo/write","data":{}}`))
			if err != nil {
				t.Fatal(err)
			}
			r.Header[http.CanonicalHeaderKey(name)] = values
			r.Header.Set("Content-Type", "application/json")
			resp, err := http.DefaultClient.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || resp.StatusCode != http.StatusBadRequest || !strings.Contains(string(body), name+": expected ") {
				t.Errorf("%s %q: %d %s, %v", name, values, resp.StatusCode, body, err)
			}
		}
	}
	if _, err := s.Status(within(t)); err == nil {
		t.Error("something was stored")
	}
}
