package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/format"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// clockEnv holds by how many seconds the clock of a program is off that was built with clockOverlay.
const clockEnv = "FAULTS_CLOCK"

// clockOverlay writes a file for go build -overlay that puts another time.Now in the place of the
// standard library's: the wall clock is off by as much as clockEnv says, the monotonic one is not.
// So programs and servers have wrong clocks without a word about it in their own source.
func clockOverlay(dir string) (string, error) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return "", err
	}
	file := filepath.Join(strings.TrimSpace(string(root)), "src", "time", "time.go")
	source, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	const now = "func Now() Time {\n\tsec, nsec, mono := runtimeNow()\n"
	if strings.Count(string(source), now) != 1 {
		return "", fmt.Errorf("%s has no time.Now as it is known here", file)
	}
	changed := strings.Replace(string(source), now, now+"\tsec += faultsClock\n", 1)
	changed = strings.Replace(changed, "import (\n", "import (\n\t\"syscall\"\n", 1)
	changed += `
var faultsClock = func() (sec int64) {
	text, _ := syscall.Getenv("` + clockEnv + `")
	sign := int64(1)
	for i, c := range []byte(text) {
		if i == 0 && c == '-' {
			sign = -1
			continue
		}
		sec = 10*sec + int64(c-'0')
	}
	return sign * sec
}()
`
	return writeOverlay(dir, file, []byte(changed))
}

// writeOverlay writes a file for go build -overlay that puts another content in the place of a file's.
func writeOverlay(dir, file string, changed []byte) (string, error) {
	dir = filepath.Join(dir, "_overlay") // ./... does not take it for a package
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	replaced, overlay := filepath.Join(dir, filepath.Base(file)), filepath.Join(dir, "overlay.json")
	b, err := json.Marshal(map[string]map[string]string{"Replace": {file: replaced}})
	if err != nil {
		return "", err
	}
	if changed, err = format.Source(changed); err != nil { // whoever looks for what is not formatted finds it
		return "", err
	}
	return overlay, errors.Join(writeNew(replaced, changed), writeNew(overlay, b))
}

// writeNew writes a file unless it holds that already: another run may be reading it.
func writeNew(file string, content []byte) error {
	if b, err := os.ReadFile(file); err == nil && bytes.Equal(b, content) {
		return nil
	}
	return os.WriteFile(file, content, 0o600)
}
