package projection

import (
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// drawMembers draws ids as --id and its default have them, all different and none empty.
func drawMembers(t *rapid.T, least int) []string {
	return rapid.SliceOfNDistinct(rapid.StringMatching(`[a-z]{1,8}-[0-9]{1,5}-[0-9a-z]{4}`), least, 40, rapid.ID[string]).Draw(t, "members")
}

func loads(owners []string) map[string]int {
	n := map[string]int{}
	for _, o := range owners {
		n[o]++
	}
	return n
}

func TestEveryPartitionHasOneOwnerWithinTheBound(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		partitions := rapid.IntRange(1, 128).Draw(t, "partitions")
		members := drawMembers(t, 1)
		owners := assign(partitions, members)
		if len(owners) != partitions {
			t.Fatalf("%d owners of %d partitions", len(owners), partitions)
		}
		most := (partitions + len(members) - 1) / len(members)
		for m, n := range loads(owners) {
			if !slices.Contains(members, m) {
				t.Fatalf("%q owns partitions and is no member", m)
			}
			if n > most {
				t.Fatalf("%s has %d partitions, more than %d", m, n, most)
			}
		}
	})
}

func TestAssignmentDoesNotDependOnTheOrderOfMembers(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		members := drawMembers(t, 1)
		want := assign(32, members)
		if got := assign(32, rapid.Permutation(members).Draw(t, "shuffled")); !slices.Equal(got, want) {
			t.Fatalf("in another order: %v, want %v", got, want)
		}
	})
}

// When a member joins n others, its own share, at most ceil(P/(n+1)), has to move. Besides, the
// lower bound pushes partitions off members that were full: seldom a quarter of all, and a third
// is the bound here. A member that leaves undoes that.
func TestFewPartitionsMoveWhenAMemberComesOrGoes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		partitions := rapid.IntRange(32, 128).Draw(t, "partitions")
		members := drawMembers(t, 2)
		before, after := assign(partitions, members[1:]), assign(partitions, members)
		moved := 0
		for p := range before {
			if before[p] != after[p] {
				moved++
			}
		}
		share := (partitions + len(members) - 1) / len(members)
		if most := share + partitions/3 + 2; moved > most {
			t.Fatalf("%d of %d partitions move when a member joins %d others; at most %d expected", moved, partitions, len(members)-1, most)
		}
	})
}

func TestThirtyTwoPartitionsOnThreeWorkers(t *testing.T) {
	t.Parallel()
	got := loads(assign(32, []string{"a", "b", "c"}))
	if most := slices.Max(slices.Collect(maps.Values(got))); most != 11 || len(got) != 3 {
		t.Errorf("loads %v: want three members with at most 11 each", got)
	}
	if assign(32, nil) != nil {
		t.Error("partitions are owned though nobody is there")
	}
}
