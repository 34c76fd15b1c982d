package harness

import "syscall"

// childAttributes makes the kernel end a child when the test process dies,
// as it does without running cleanups when `go test` runs out of time.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
