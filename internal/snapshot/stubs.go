package snapshot

import "palimpsest/internal/surface"

// Stubs returns the nodes of a page as they are in memory, with or without their details and
// bodies, for whoever Fills the page from somewhere else than the bucket. An unknown page has none.
func (s *Snapshot) Stubs(n int64) []surface.Node {
	first := 0
	for g := 0; g <= len(s.groups); g++ {
		for _, p := range s.pagesOf(g) {
			if p.n == n {
				out := make([]surface.Node, p.count)
				for i := range out {
					out[i] = *s.Surface.Node(first + i)
				}
				return out
			}
			first += p.count
		}
	}
	return nil
}
