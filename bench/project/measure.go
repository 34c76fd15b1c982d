package main

import (
	"slices"
	"syscall"
	"time"
)

// cpuTime is what the process has used so far.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // fails for other arguments alone
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// median of one number of each sample.
func median[T any](all []T, of func(T) float64) float64 {
	v := make([]float64, len(all))
	for i, s := range all {
		v[i] = of(s)
	}
	slices.Sort(v)
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}

func us(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }

func round(v, parts float64) float64 { return float64(int64(v*parts+0.5)) / parts }
