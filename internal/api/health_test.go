package api_test

import (
	"encoding/pem"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"palimpsest/internal/api"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/platform"
)

// TestCommandsTrustTheAuthoritiesThatTheyAreGiven: a server whose certificate the system does not
// know is trusted for --ca-file alone, and a file that cannot be used is named.
func TestCommandsTrustTheAuthoritiesThatTheyAreGiven(t *testing.T) {
	t.Parallel()
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	srv.Config.ErrorLog = nil
	srv.StartTLS()
	defer srv.Close()
	dir := t.TempDir()
	ca, empty := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "empty.pem")
	for path, b := range map[string][]byte{ca: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), empty: nil} {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		flags api.TLSFlags
		want  string // in the error; "" for none
		code  int    // platform.ExitUsage, or 0
	}{
		"the right authority":    {flags: api.TLSFlags{CAFile: ca}},
		"the system's":           {want: "certificate"},
		"no such file":           {api.TLSFlags{CAFile: filepath.Join(dir, "none.pem")}, "--ca-file", platform.ExitUsage},
		"a file without any":     {api.TLSFlags{CAFile: empty}, "expected certificates", platform.ExitUsage},
		"half a pair":            {api.TLSFlags{Cert: ca}, "both or neither", platform.ExitUsage},
		"a pair without its key": {api.TLSFlags{Cert: ca, Key: ca}, "--cert and --key", platform.ExitUsage},
	} {
		err := api.HealthFlags{TLSFlags: c.flags, Timeout: journaltest.Deadline}.Check(t.Context(), srv.URL)
		var exit *platform.ExitError
		switch {
		case c.want == "" && err != nil, c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
			t.Errorf("%s: %v, want %q", name, err, c.want)
		case errors.As(err, &exit) != (c.code != 0), exit != nil && exit.Code != c.code:
			t.Errorf("%s: %v, want exit code %d", name, err, c.code)
		}
	}
	if err := (api.HealthFlags{Insecure: true, Timeout: time.Minute}).Check(t.Context(), srv.URL); err != nil {
		t.Errorf("not checked: %v", err)
	}
}
