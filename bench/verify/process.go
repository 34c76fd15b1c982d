package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// process runs `projector verify --all` as an operator does and prints the most resident memory
// that the system has seen of it.
func (b *bench) process(ctx context.Context, url string) error {
	args := []string{"verify", "--all", "--nats", url, "--workers", fmt.Sprint(b.Workers)}
	if b.LogOnly {
		args = append(args, "--log-only")
	}
	cmd := exec.CommandContext(ctx, b.Projector, args...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var most int64 // KiB
	for {
		select {
		case <-tick.C:
			most = max(most, highWater(cmd.Process.Pid))
			continue
		case err := <-ended:
			if err != nil {
				return fmt.Errorf("%s: %w: %s", b.Projector, err, out.Bytes())
			}
		}
		break
	}
	if b.JSON {
		return json.NewEncoder(b.out).Encode(map[string]any{"process": strings.TrimSpace(out.String()), "residentBytes": most << 10})
	}
	_, err := fmt.Fprintf(b.out, "process: %s: at most %d MiB resident\n", strings.TrimSpace(out.String()), most>>10)
	return err
}

// highWater is the most resident memory that a process had, in KiB; 0 where the system does not tell.
func highWater(pid int) (n int64) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(status)) {
		if _, err := fmt.Sscanf(line, "VmHWM: %d kB", &n); err == nil {
			return n
		}
	}
	return 0
}
