//go:build !linux

package harness

import (
	"os"
	"syscall"
)

func childAttributes() *syscall.SysProcAttr { return nil }

func maxRSS(*os.ProcessState) int { return 0 }
