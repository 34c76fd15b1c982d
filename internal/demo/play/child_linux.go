package main

import "syscall"

// processAttributes puts a child into a process group of its own, and has it told to stop
// should this program be killed.
func processAttributes() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}
