package platform

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// ErrDataDirInUse is matched by the error of a data directory that another process, or another server of this
// process, holds.
var ErrDataDirInUse = errors.New("the data directory is in use")

// lockName is the file in a data directory whose lock says that somebody serves the store.
const lockName = "LOCK"

// dirLock is a held lock on a data directory. The kernel drops it when the process ends, however it ends, so a
// LOCK file that was left behind means nothing.
type dirLock struct{ file *os.File }

// lockDir takes the lock of an existing directory, or says who holds it.
func lockDir(dir string) (*dirLock, error) {
	path := filepath.Join(dir, lockName)
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock of data directory %s: %w; make the directory writable for this user", dir, err)
	}
	for {
		err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	switch {
	case errors.Is(err, syscall.EWOULDBLOCK):
		defer file.Close()
		return nil, fmt.Errorf("%w: %s is held by %s; stop that process, or use another directory", ErrDataDirInUse, path, holder(file))
	case err != nil:
		defer file.Close()
		return nil, fmt.Errorf("lock of data directory %s: %w; use a file system that supports flock", dir, err)
	}
	// Only for the message above; the lock does not depend on what is written here.
	note := fmt.Sprintf("process %d (%s) since %s\n", os.Getpid(), program(), time.Now().UTC().Format(time.RFC3339))
	if err := errors.Join(file.Truncate(0), writeAtStart(file, note)); err != nil {
		return nil, errors.Join(fmt.Errorf("lock of data directory %s: %w", dir, err), file.Close())
	}
	return &dirLock{file}, nil
}

func writeAtStart(file *os.File, text string) error {
	_, err := file.WriteAt([]byte(text), 0)
	return err
}

// holder is what the holder of the lock wrote about itself.
func holder(file *os.File) string {
	note, err := io.ReadAll(io.LimitReader(file, 256))
	if text := strings.TrimSpace(string(note)); err == nil && text != "" {
		return text
	}
	return "another process"
}

// release leaves the file where it is: removing it would let two processes lock two files of the same name.
func (l *dirLock) release() error { return l.file.Close() }
