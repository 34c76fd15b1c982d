package main

import "syscall"

// childAttributes makes the kernel end a child when this program dies.
func childAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
