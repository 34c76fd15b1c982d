//go:build !linux

package harness

import (
	"os"
	"syscall"
)

func childAttributes(a *syscall.SysProcAttr) *syscall.SysProcAttr { return a }

func maxRSS(*os.ProcessState) int { return 0 }
