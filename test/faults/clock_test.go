package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestAProgramBuiltWithTheOverlayHasAWrongClock(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	overlay, err := clockOverlay(dir)
	if err != nil {
		t.Fatal(err)
	}
	source, program := filepath.Join(dir, "main.go"), filepath.Join(dir, "now")
	if err := os.WriteFile(source, []byte("package main\n\nimport (\n\t\"os\"\n\t\"strconv\"\n\t\"time\"\n)\n\nfunc main() { os.Stdout.WriteString(strconv.FormatInt(time.Now().Unix(), 10)) }\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-overlay", overlay, "-o", program, source).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, off := range []int64{0, -7200, 86400} {
		cmd := exec.CommandContext(t.Context(), program)
		cmd.Env = append(os.Environ(), clockEnv+"="+strconv.FormatInt(off, 10))
		from := time.Now().Unix()
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		to := time.Now().Unix()
		got, err := strconv.ParseInt(strings.TrimSpace(string(out)), 10, 64)
		if err != nil || got < from+off || got > to+off {
			t.Errorf("off by %d s: %q, want %d to %d (%v)", off, out, from+off, to+off, err)
		}
	}
}

// A key must be recognised whatever two clocks say, or what is stored twice is the schedule's fault.
func TestWrongClocksLeaveIdempotencyKeysTheirTime(t *testing.T) {
	t.Parallel()
	const keyWindow = 10 * time.Minute
	if apart := slices.Max(clocks) - slices.Min(clocks) + callTime; apart >= keyWindow {
		t.Errorf("clocks and a call with its retries are %v apart, keys are known for %v", apart, keyWindow)
	}
}
