// Package harness runs the two programs as child processes and talks to them
// only from outside: command line, HTTP and NATS. It imports nothing of the
// product, so that a test written with it holds for any implementation of the
// same contract. What the contract leaves open is collected in shapes.go.
package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// built is what one test process builds, once.
var built struct {
	once sync.Once
	dir  string
	err  error
}

// Main runs a package's tests and removes the programs built for them. Every
// TestMain calls it: os.Exit(harness.Main(m)).
func Main(m *testing.M) int {
	code := m.Run()
	if built.dir != "" {
		if err := os.RemoveAll(built.dir); err != nil {
			fmt.Fprintln(os.Stderr, "harness:", err)
		}
	}
	return code
}

// program answers the path of a program, building all at first use.
func program(t testing.TB, name string) string {
	t.Helper()
	built.once.Do(func() { built.dir, built.err = build() })
	if built.err != nil {
		t.Fatalf("build the programs: %v", built.err)
	}
	return filepath.Join(built.dir, name)
}

func build() (string, error) {
	root, err := RepoRoot()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "palimpsest-bin-")
	if err != nil {
		return "", err
	}
	args := []string{"build"}
	if Race() {
		args = append(args, "-race")
	}
	args = append(args, "-o", dir+string(filepath.Separator), "./cmd/appender", "./cmd/projector", "./test/e2e/harness/natsd")
	cmd := exec.Command("go", args...)
	cmd.Dir = root
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return dir, fmt.Errorf("go %v: %w\n%s", args, err, out.String())
	}
	return dir, nil
}

// Race says whether the programs are built with the race detector
// (PALIMPSEST_RACE=1).
func Race() bool { return os.Getenv("PALIMPSEST_RACE") == "1" }

// Long says whether the tests that run for a time take the long one
// (PALIMPSEST_LONG=1).
func Long() bool { return os.Getenv("PALIMPSEST_LONG") == "1" }

// RepoRoot answers the nearest folder upwards that holds a go.mod.
func RepoRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("no go.mod in this folder or above")
		}
		dir = parent
	}
}
