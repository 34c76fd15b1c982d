//go:build race

package snapshot_test

// How much the tests do here, where the race detector makes them slow and finds nothing: how
// long the longest session is, and how many cases a property is checked with.
const (
	longest = 20_000
	checks  = "12"
)
