package e2e_test

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"palimpsest/test/e2e/harness"
)

// The packages that docs/examples/surface.mjs needs.
var nodePackages = []string{"@nats-io/transport-node@3.0.2", "@nats-io/kv@3.0.2"}

// exampleSession is one with pages and replacements, and what HTTP serves of it.
func exampleSession(t *testing.T, s stack) (session string, want []any) {
	t.Helper()
	session = "kiln"
	script := harness.NewScript(17, 20000)
	for range 12 {
		mustAppend(t, s.appender, session, script.Next(6))
	}
	v, err := s.projector.Messages(t.Context(), session, harness.MinSeq(71))
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range v.Messages {
		var decoded any
		if err := json.Unmarshal(m, &decoded); err != nil {
			t.Fatal(err)
		}
		want = append(want, decoded)
	}
	return session, want
}

// printsMessages runs an example and compares what it prints, a message a line.
func printsMessages(t *testing.T, cmd *exec.Cmd, want []any) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	var got []any
	for line := range strings.Lines(string(out)) {
		var m any
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatalf("%v printed %q: %v", cmd.Args, line, err)
		}
		got = append(got, m)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v printed %d messages, want %d", cmd.Args, len(got), len(want))
	}
}

// The docs show the very files that are run here.
func TestDocsShowTheExamples(t *testing.T) {
	t.Parallel()
	layout, err := os.ReadFile("../../docs/kv-layout.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"surface.mjs", "surface.py"} {
		example, err := os.ReadFile(filepath.Join("../../docs/examples", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(layout, append(example, "```"...)) {
			t.Errorf("docs/kv-layout.md does not show %s as it is", name)
		}
	}
}

func TestSurfaceIsReadWithTheNodeClient(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"node", "npm"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("no %s on this machine: %v", name, err)
		}
	}
	dir := t.TempDir()
	install := exec.CommandContext(t.Context(), "npm", append([]string{"install", "--no-audit", "--no-fund", "--no-package-lock", "--prefer-offline", "--prefix", dir}, nodePackages...)...)
	if out, err := install.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", install.Args, err, out)
	}
	example, err := os.ReadFile("../../docs/examples/surface.mjs")
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(dir, "surface.mjs")
	if err := os.WriteFile(script, example, 0o600); err != nil {
		t.Fatal(err)
	}
	s := startStack(t, "off")
	session, want := exampleSession(t, s)
	printsMessages(t, exec.CommandContext(t.Context(), "node", script, session, s.nats), want)
	for _, args := range [][]string{{"rebuild"}, {"rebuild", "--drop-previous"}} { // SURFACES is gone then
		if r := harness.Run(t, "projector", append(args, "--nats", s.nats)...); r.Code != 0 {
			t.Fatalf("%v: exit code %d\n%s", args, r.Code, r.Output())
		}
	}
	printsMessages(t, exec.CommandContext(t.Context(), "node", script, session, s.nats), want)
}

func TestSurfaceIsReadWithThePythonClient(t *testing.T) {
	t.Parallel()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 on this machine")
	}
	if out, err := exec.CommandContext(t.Context(), python, "-c", "import nats").CombinedOutput(); err != nil {
		t.Skipf("python3 has no package nats (pip install nats-py): %s", out)
	}
	s := startStack(t, "off")
	session, want := exampleSession(t, s)
	printsMessages(t, exec.CommandContext(t.Context(), python, "../../docs/examples/surface.py", session, s.nats), want)
}
