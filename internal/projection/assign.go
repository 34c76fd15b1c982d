package projection

import (
	"cmp"
	"hash/fnv"
	"slices"
	"strconv"
)

// assign shares out partitions 0..partitions-1 over members: owners[p] is the member that works
// p. It is a pure function of the count and the set of ids, so every worker that sees the same
// members comes to the same result. No member gets more than ceil(partitions/len(members)).
//
// It is rendezvous hashing with bounded load: of all pairs of partition and member the one with
// the highest score goes first, and a member that is full is passed over. When a member comes or
// goes, what moves is its own share and what the changed bound pushes on. Without members
// nobody owns anything and owners is nil.
func assign(partitions int, members []string) (owners []string) {
	if len(members) == 0 {
		return nil
	}
	type pair struct {
		score     uint64
		partition int
		member    string
	}
	pairs := make([]pair, 0, partitions*len(members))
	for _, m := range members {
		for p := range partitions {
			pairs = append(pairs, pair{score(p, m), p, m})
		}
	}
	slices.SortFunc(pairs, func(a, b pair) int {
		return cmp.Or(cmp.Compare(b.score, a.score), cmp.Compare(a.partition, b.partition), cmp.Compare(a.member, b.member))
	})
	most := (partitions + len(members) - 1) / len(members)
	owners = make([]string, partitions)
	load := make(map[string]int, len(members))
	for _, c := range pairs {
		if owners[c.partition] == "" && load[c.member] < most {
			owners[c.partition] = c.member
			load[c.member]++
		}
	}
	return owners
}

// score says how much a partition likes a member.
func score(partition int, member string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(strconv.Itoa(partition) + "/" + member)) // a hash takes everything
	// FNV leaves the high bits of short inputs alike; the finisher of MurmurHash3 spreads them.
	x := h.Sum64()
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
