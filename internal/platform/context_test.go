package platform

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

func TestConnectByAContextOfTheNATSCommandLine(t *testing.T) {
	t.Parallel()
	s := startPlain(t, &server.Options{Username: "u", Password: "secret"})
	file := func(content string) string {
		path := filepath.Join(t.TempDir(), "context.json")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	nc, err := Connect(testContext(t), ConnConfig{Context: file(fmt.Sprintf(`{"url":%q,"user":"u","password":"secret"}`, s.ClientURL())), Name: "by context", InboxPrefix: "_INBOX_x"})
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if nc.Opts.Name != "by context" || !strings.HasPrefix(nc.NewInbox(), "_INBOX_x.") || nc.Opts.MaxReconnect != -1 {
		t.Errorf("what the program sets did not win: name %q, inbox %s, reconnects %d", nc.Opts.Name, nc.NewInbox(), nc.Opts.MaxReconnect)
	}
	for name, c := range map[string]struct{ context, want string }{
		"wrong password": {file(fmt.Sprintf(`{"url":%q,"user":"u","password":"other"}`, s.ClientURL())), "refused the connection"},
		"no such file":   {"/nonexistent/context.json", "nats context ls"},
		"no JSON":        {file("hello"), "nats context ls"},
		"domain":         {file(fmt.Sprintf(`{"url":%q,"user":"u","password":"secret","jetstream_domain":"hub"}`, s.ClientURL())), "not supported"},
		"nobody there":   {file(`{"url":"nats://127.0.0.1:1"}`), "within 50ms"},
	} {
		begin := time.Now()
		_, err := Connect(testContext(t), ConnConfig{Context: c.context, ConnectWait: 50 * time.Millisecond})
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") || time.Since(begin) > testDeadline/2 {
			t.Errorf("%s: %v after %s, want an error with %q", name, err, time.Since(begin), c.want)
		}
	}
	if err := (ConnConfig{Context: "x", URL: "nats://h:1"}).Validate(); err == nil {
		t.Error("a context and a URL: expected an error")
	}
}
