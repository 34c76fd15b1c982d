package projection

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"slices"
)

// assign shares partitions out over members by rendezvous hashing with bounded load: each
// partition goes to the member with the highest score for it that has fewer than
// ceil(partitions/members). Every member that knows the same members computes the same, and
// one that comes or goes moves few partitions.
func assign(members []string, partitions int) []string {
	owner := make([]string, partitions)
	if len(members) == 0 {
		return owner
	}
	type bid struct {
		score     uint64
		partition int
		member    string
	}
	bids := make([]bid, 0, partitions*len(members))
	for _, m := range members {
		for p := range partitions {
			bids = append(bids, bid{score(m, p), p, m})
		}
	}
	slices.SortFunc(bids, func(a, b bid) int {
		return cmp.Or(cmp.Compare(b.score, a.score), cmp.Compare(a.partition, b.partition), cmp.Compare(a.member, b.member))
	})
	most := (partitions + len(members) - 1) / len(members)
	load := map[string]int{}
	for _, b := range bids {
		if owner[b.partition] == "" && load[b.member] < most {
			owner[b.partition] = b.member
			load[b.member]++
		}
	}
	return owner
}

func score(member string, partition int) uint64 {
	h := fnv.New64a()
	h.Write([]byte(member))
	h.Write(binary.BigEndian.AppendUint32(nil, uint32(partition)))
	// FNV leaves the high bits of short inputs alike; mix them (splitmix64's finaliser).
	x := h.Sum64()
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}
