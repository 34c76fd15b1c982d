package harness

import (
	"os"
	"syscall"
)

// childAttributes makes the kernel end a child when the test process dies,
// as it does without running cleanups when `go test` runs out of time.
func childAttributes(a *syscall.SysProcAttr) *syscall.SysProcAttr {
	if a == nil {
		a = new(syscall.SysProcAttr)
	}
	a.Pdeathsig = syscall.SIGKILL
	return a
}

// maxRSS is the most memory that a process that has ended had resident, in bytes.
func maxRSS(s *os.ProcessState) int {
	u, ok := s.SysUsage().(*syscall.Rusage)
	if !ok {
		return 0
	}
	return int(u.Maxrss) << 10
}
