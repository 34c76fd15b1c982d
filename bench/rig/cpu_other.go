//go:build !unix

package rig

import "time"

// CPUTime is not known here.
func CPUTime() time.Duration { return 0 }
