package audit

import (
	"errors"
	"sync"
	"sync/atomic"

	"palimpsest/internal/journal"
)

// Deliveries are handed on in batches of so many, or of so many bytes: a hop to another goroutine costs as
// much for many as for one.
const (
	batchDeliveries = 128
	batchBytes      = 256 << 10
)

// spread has several goroutines take deliveries, those of one partition in order by the same one. Reading a
// log takes about as much time as verifying it, so that both are done at once.
type spread struct {
	take   func(journal.Delivery) error
	lanes  []lane
	ended  sync.WaitGroup
	failed atomic.Pointer[error] // the first error of take, after which nothing more is taken
}

// lane is one of the goroutines. What is not handed on yet belongs to whoever adds to it.
type lane struct {
	full  chan []journal.Delivery
	next  []journal.Delivery
	bytes int
}

// newSpread starts n goroutines that call take, which must be ended by end.
func newSpread(n int, take func(journal.Delivery) error) *spread {
	s := &spread{take: take, lanes: make([]lane, n)}
	for i := range s.lanes {
		full := make(chan []journal.Delivery, 1)
		s.lanes[i].full = full
		s.ended.Go(func() {
			for batch := range full {
				for _, d := range batch {
					if s.failed.Load() != nil {
						break
					}
					if err := s.take(d); err != nil {
						first := err // on the heap then alone
						s.failed.CompareAndSwap(nil, &first)
					}
				}
			}
		})
	}
	return s
}

// add hands a delivery on, sooner or later. It is called by one goroutine at a time, and returns the
// first error of take.
func (s *spread) add(d journal.Delivery) error {
	if err := s.failed.Load(); err != nil {
		return *err
	}
	l := &s.lanes[d.Partition%len(s.lanes)]
	l.next = append(l.next, d)
	if d.Commit != nil {
		l.bytes += len(d.Commit.Body)
	}
	if len(l.next) == batchDeliveries || l.bytes >= batchBytes {
		l.hand()
	}
	return nil
}

func (l *lane) hand() {
	l.full <- l.next
	l.next, l.bytes = make([]journal.Delivery, 0, batchDeliveries), 0
}

// end waits until all that was added is taken, and returns err joined with the first error of take.
func (s *spread) end(err error) error {
	for i := range s.lanes {
		s.lanes[i].hand()
		close(s.lanes[i].full)
	}
	s.ended.Wait()
	if failed := s.failed.Load(); failed != nil && !errors.Is(err, *failed) {
		err = errors.Join(err, *failed)
	}
	return err
}
