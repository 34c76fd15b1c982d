package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// diskBytes is the size of a server's disk when disks are filled.
const diskBytes = 192 << 20

// mountDisk gives a directory a small disk of its own, in memory. It needs root.
func mountDisk(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", diskBytes)); err != nil {
		return fmt.Errorf("mount a tmpfs on %s: %w; it needs root, leave -disk out without", dir, err)
	}
	return nil
}

func unmountDisk(dir string) error { return syscall.Unmount(dir, syscall.MNT_DETACH) }

const filler = "filler"

// fillDisk leaves no byte free.
func fillDisk(dir string) error {
	f, err := os.Create(filepath.Join(dir, filler))
	if err != nil {
		return err
	}
	defer f.Close()
	for size := 1 << 20; size > 0; size /= 4 {
		b := make([]byte, size)
		for err = nil; err == nil; {
			_, err = f.Write(b)
		}
		if !errors.Is(err, syscall.ENOSPC) {
			return err
		}
	}
	return nil
}

func freeDisk(dir string) error { return os.Remove(filepath.Join(dir, filler)) }
