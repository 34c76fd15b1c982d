//go:build !linux

package harness

import "syscall"

func childAttributes() *syscall.SysProcAttr { return nil }
