//go:build !race

package snapshot_test

const (
	longest = 100_000
	checks  = "40"
)
