package doctor

import (
	"encoding/json"
	"fmt"
	"io"
	"syscall"
)

// Disk looks at the file system that holds a directory.
func Disk(dir string) Finding {
	f := Finding{Check: "disk of " + dir, Status: OK}
	var st syscall.Statfs_t
	if err := syscall.Statfs(dir, &st); err != nil {
		f.Status, f.Found, f.Fix = Warn, err.Error(), "name the directory of the store with --data"
		return f
	}
	free, all := st.Bavail*uint64(st.Bsize), st.Blocks*uint64(st.Bsize)
	f.Found = fmt.Sprintf("%d of %d MiB free", free>>20, all>>20)
	if all > 0 && (float64(free) < 0.1*float64(all) || free < 1<<30) {
		f.Status, f.Fix = Warn, "make room, or move the store: JetStream turns itself off when the disk is full"
	}
	return f
}

// Print writes findings as a table, or as one JSON document.
func Print(w io.Writer, fs []Finding, asJSON bool) error {
	if asJSON {
		return json.NewEncoder(w).Encode(struct {
			Status   Status    `json:"status"`
			Findings []Finding `json:"findings"`
		}{Worst(fs), fs})
	}
	for _, f := range fs {
		if _, err := fmt.Fprintf(w, "%-5s %-28s %s\n", f.Status, f.Check, f.Found); err != nil {
			return err
		}
		if f.Fix != "" {
			if _, err := fmt.Fprintf(w, "%-5s %-28s → %s\n", "", "", f.Fix); err != nil {
				return err
			}
		}
	}
	return nil
}
