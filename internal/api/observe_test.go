package api_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"palimpsest/internal/api"
	"palimpsest/internal/auth"
)

func TestDashboardsAlertsAndScalingNameMetricsThatThereAre(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	secret, line := token(t, "scraper", grant("none", auth.Read))
	edge := func() *api.Edge {
		return &api.Edge{Auth: authenticator(t, line), Access: api.NewAccessLog(w.js, api.AccessConfig{})}
	}
	there := map[string]bool{}
	for _, url := range []string{serve(t, w.appenderAPI(edge())), serve(t, w.projectorAPI(edge()))} {
		status, text := ask(t, "GET", url+"/metrics", secret, "")
		if status != 200 {
			t.Fatalf("status %d: %s", status, text)
		}
		for line := range strings.Lines(text) {
			if name, ok := strings.CutPrefix(line, "# TYPE "); ok {
				there[strings.Fields(name)[0]] = true
			}
		}
	}
	names := regexp.MustCompile(`\b(palimpsest_[a-z_]+|process_[a-z_]+|go_[a-z_]+)\b`)
	for _, file := range []string{"observe/dashboard.json", "observe/alerts.yaml", "k8s/palimpsest.yaml"} {
		b, err := os.ReadFile("../../deploy/" + file)
		if err != nil {
			t.Fatal(err)
		}
		found := names.FindAllString(string(b), -1)
		if len(found) == 0 {
			t.Errorf("%s: names no metric", file)
		}
		for _, name := range found {
			if !there[name] {
				t.Errorf("%s: %s is no metric of either program", file, name)
			}
		}
	}
}
