//go:build !linux

package main

import "syscall"

// processAttributes puts a child into a process group of its own.
func processAttributes() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
