package harness

import (
	"os"
	"syscall"
)

// childAttributes makes the kernel end a child when the test process dies,
// as it does without running cleanups when `go test` runs out of time.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// maxRSS is the most memory that a process that has ended had resident, in bytes.
func maxRSS(s *os.ProcessState) int {
	u, ok := s.SysUsage().(*syscall.Rusage)
	if !ok {
		return 0
	}
	return int(u.Maxrss) << 10
}
