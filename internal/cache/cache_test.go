package cache

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// held lists the keys that are there, of 0 to 99.
func held(c *Cache[int, string]) (keys []int) {
	for k := range 100 {
		if v, ok := c.Get(k); ok {
			if v != fmt.Sprint(k) {
				panic(fmt.Sprintf("key %d has %q", k, v))
			}
			keys = append(keys, k)
		}
	}
	return keys
}

func TestWhatWasNotUsedForLongestGoesFirst(t *testing.T) {
	t.Parallel()
	c := New[int, string](100)
	for k := range 10 {
		c.Put(k, fmt.Sprint(k), 10)
	}
	c.Get(0)
	c.Put(10, "10", 12)
	if got := held(c); !slices.Equal(got, []int{0, 3, 4, 5, 6, 7, 8, 9, 10}) || c.Bytes() != 92 {
		t.Errorf("found %v with %d bytes", got, c.Bytes())
	}
	c.Put(4, "4", 2) // instead of 10
	c.Delete(5)
	c.Delete(77)
	if c.Bytes() != 74 {
		t.Errorf("expected 74 bytes, found %d", c.Bytes())
	}
	c.Clear()
	if got := held(c); got != nil || c.Bytes() != 0 {
		t.Errorf("found %v with %d bytes", got, c.Bytes())
	}
}

func TestWhatIsTooLargeIsNotKept(t *testing.T) {
	t.Parallel()
	for _, limit := range []int{0, 100} {
		c := New[int, string](limit)
		c.Put(1, "1", 1)
		c.Put(1, "1", 13)
		if got := held(c); got != nil || c.Bytes() != 0 {
			t.Errorf("limit %d: found %v with %d bytes", limit, got, c.Bytes())
		}
	}
}

func TestConcurrentUseStaysWithinTheLimit(t *testing.T) {
	t.Parallel()
	c := New[int, string](500)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 100 {
				k := (i*7 + g) % 100
				c.Put(k, fmt.Sprint(k), 1+k%20)
				held(c)
				if i%50 == 0 {
					c.Delete(k)
				}
				if n := c.Bytes(); n > 500 {
					t.Errorf("%d bytes", n)
				}
			}
		})
	}
	wg.Wait()
}
