package e2e_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"palimpsest/test/e2e/harness"
)

// A value that cannot be meant is a usage error that says what was expected, before anything is
// connected to and with nothing on stdout, which a pipe would take for a result.
func TestFlagsThatCannotBeMeantAreUsageErrors(t *testing.T) {
	t.Parallel()
	empty := t.TempDir()
	for _, c := range []struct {
		name, args string
		want       string // in what is said
	}{
		{"projector", "watch s --from=-2", "--from: expected -1 or more, found -2"},
		{"projector", "verify --all --wait=-1s", "--wait: expected 0s or more, found -1s"},
		{"projector", "verify " + empty, "no session files"},
		{"projector", "replay s --max-gap=-5s", "--max-gap: expected 0s or more, found -5s"},
		{"projector", "sessions --since foo", "expected a time"},
		{"projector", "sessions --parent ..", "session id"},
		{"projector", "sessions --limit=-1", "--limit: expected 0 or more, found -1"},
		{"projector", "events s --limit=-1", "--limit: expected 0 or more, found -1"},
		{"projector", "transcript s --json --limit=-1", "--limit: expected 0 or more, found -1"},
		{"projector", "events s --from=-1", "--from: expected 0 or more, found -1"},
		{"projector", "transcript s --to=-1", "--to: expected 0 or more, found -1"},
		{"projector", "replay s --from=-1", "--from: expected 0 or more, found -1"},
		{"projector", "messages s --at=-1", "--at: expected 0 or more, found -1"},
		{"projector", "events s --from=5 --to=3", "--from and --to: expected a seq, and one that is not before it, found 5 and 3"},
		{"projector", "transcript s --json --from=5 --to=3", "--from and --to"},
		{"projector", "replay s --from=5 --to=3", "--from and --to"},
		{"projector", "diff s 5 3", "expected -1 or a seq, and a seq that is not before it, found 5 and 3"},
		{"projector", "diff s -- -2 3", "found -2 and 3"},
		{"projector", "explain s -- -1", "explain: expected a seq, found -1"},
		{"projector", "explain s 1 --limit=0", "--limit: expected more than 0, found 0"},
		{"projector", "health --timeout=-1s", "--timeout: expected more than 0, found -1s"},
		{"appender", "health --timeout=0s", "--timeout"},
		{"projector", "surface s --min-seq=-1", "--min-seq: expected 0 or more, found -1"},
		{"projector", "sessions --connect-wait=-1s", "--connect-wait: expected 0s or more, found -1s"},
		{"appender", "erase --finish --by ann --data " + filepath.Join(empty, "none"), "there is no store at " + filepath.Join(empty, "none")},
		{"appender", "erase --finish --by ann --data " + empty, "there is no store at " + empty},
		{"appender", "serve --nats nats://127.0.0.1:1 --data " + empty, "--data is about the embedded NATS server"},
		{"appender", "serve --nats nats://127.0.0.1:1 --nats-listen 127.0.0.1:0 --data data", "--nats-listen is about the embedded NATS server"},
		{"appender", "import x --nats nats://127.0.0.1:1 --data " + empty, "--data is about the embedded NATS server"},
		{"appender", "import x --connect-wait=-1s", "--connect-wait: expected 0s or more, found -1s"},
		{"projector", "sessions --event-types user/message", `"user/message" is built in`},
		{"projector", "sessions --event-types a/b,turn/start", `"turn/start" is built in`},
		{"projector", "sessions --event-types a/b,-", `"-"`},
		{"projector", "doctor --event-types turn/start", "built in"},
		{"appender", "serve --event-types user/message", "built in"},
		{"appender", "doctor --event-types user/message", "built in"},
		{"projector", "serve --start-wait=-1s", "--start-wait"},
		{"appender", "serve --start-wait=-1s", "--start-wait"},
		{"projector", "status --url 127.0.0.1:8081", "expected http://HOST:PORT or https://HOST:PORT"},
		{"projector", "status --url localhost:8081", "expected http://HOST:PORT or https://HOST:PORT"},
		{"projector", "quarantine retry s --url ftp://127.0.0.1", "expected http://HOST:PORT or https://HOST:PORT"},
		{"projector", "quarantine skip-session s --reason r --by ann --url 127.0.0.1", "expected http://HOST:PORT or https://HOST:PORT"},
		{"projector", "health --url 127.0.0.1:8081", "expected http://HOST:PORT or https://HOST:PORT"},
		{"appender", "health --url //127.0.0.1:8080", "expected http://HOST:PORT or https://HOST:PORT"},
		{"projector", "status --ca-file ca.pem", "--ca-file goes with --url"},
		{"projector", "status --token secret", "--token goes with --url"},
	} {
		t.Run(c.name+" "+c.args, func(t *testing.T) {
			t.Parallel()
			args := strings.Fields(c.args)
			if words := args[0] + " "; !strings.Contains(c.args, "--data") && !strings.Contains(words+args[1], "health") && args[0] != "quarantine" {
				away := []string{args[0], "--nats", "nats://127.0.0.1:1"} // where nobody answers
				if !strings.Contains(c.args, "--connect-wait") {
					away = append(away, "--connect-wait", "1ms")
				}
				args = append(away, args[1:]...)
			}
			r := harness.Run(t, c.name, args...)
			if r.Code != 2 || !strings.Contains(r.Stderr, c.want) || r.Stdout != "" {
				t.Errorf("exit code %d, want 2 and %q\n%s", r.Code, c.want, r.Output())
			}
		})
	}
}

// What goes with --url may be in the environment of whoever asks over NATS.
func TestStatusTakesEnvironmentOfURL(t *testing.T) {
	t.Setenv("PALIMPSEST_CA_FILE", "ca.pem")
	t.Setenv("PALIMPSEST_TOKEN", "secret")
	r := harness.Run(t, "projector", "status", "--nats", "nats://127.0.0.1:1", "--connect-wait", "1ms")
	if r.Code != 1 || !strings.Contains(r.Stderr, "no NATS server") {
		t.Errorf("exit code %d\n%s", r.Code, r.Output())
	}
}

// A start that may wait less long than one try to connect ends when its own time is up.
func TestStartWaitBoundsTheTryToConnect(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"appender", "projector"} {
		r := harness.Run(t, name, "serve", "--listen", "127.0.0.1:0", "--nats", "nats://127.0.0.1:1", "--connect-wait", "1h", "--start-wait", "100ms")
		if r.Code != 1 || !strings.Contains(r.Stderr, "within 100ms") {
			t.Errorf("%s: exit code %d\n%s", name, r.Code, r.Output())
		}
	}
}

// A directory of exports is verified as the files in it are.
func TestVerifyOfADirectory(t *testing.T) {
	t.Parallel()
	s := startStack(t, "off")
	mustAppend(t, s.appender, "one", notes("a"))
	mustAppend(t, s.appender, "two", notes("b", "c"))
	nats, dir := "--nats="+s.nats, t.TempDir()
	run(t, 0, "projector", "export", nats, "--all", filepath.Join(dir, "deep"))
	if err := os.WriteFile(filepath.Join(dir, "README"), []byte("no session file"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := run(t, 0, "projector", "verify", dir); !strings.Contains(got, "sessions 2, commits 0, events 3") {
		t.Errorf("verify of a directory: %s", got)
	}
	run(t, 2, "projector", "verify", nats, dir, "one")
	if got := run(t, 1, "projector", "verify", nats, "--ids", dir); !strings.Contains(got, "session-not-found") {
		t.Errorf("with --ids: %s", got)
	}
}
