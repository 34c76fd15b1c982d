package journal

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/journal/journaltest"
)

func TestAnOutboxSendsWhatManySendersGiveIt(t *testing.T) {
	t.Parallel()
	conn := journaltest.Start(t).Conn(t)
	sub, err := conn.SubscribeSync("here")
	if err != nil {
		t.Fatal(err)
	}
	o := NewOutbox(conn, func(m *nats.Msg, err error) { t.Errorf("%s: %v", m.Data, err) })
	const senders, each = 32, 50
	var wg sync.WaitGroup
	want := map[string]bool{}
	for s := range senders {
		for i := range each {
			want[fmt.Sprintf("%d/%d", s, i)] = true
		}
		wg.Go(func() {
			for i := range each {
				o.Publish(&nats.Msg{Subject: "here", Data: fmt.Appendf(nil, "%d/%d", s, i)})
			}
		})
	}
	wg.Wait() // whoever left a message to another has returned, and so has the other
	for range senders * each {
		m, err := sub.NextMsgWithContext(journaltest.Context(t))
		if err != nil {
			t.Fatalf("%v; %d messages are missing", err, len(want))
		}
		if !want[string(m.Data)] {
			t.Errorf("%s came twice", m.Data)
		}
		delete(want, string(m.Data))
	}
}

func TestAnOutboxNamesEachMessageThatItsConnectionRefuses(t *testing.T) {
	t.Parallel()
	conn := journaltest.Start(t).Conn(t)
	conn.Close()
	var mu sync.Mutex
	var refused []string
	o := NewOutbox(conn, func(m *nats.Msg, err error) {
		mu.Lock()
		defer mu.Unlock()
		refused = append(refused, fmt.Sprintf("%s: %v", m.Data, err))
	})
	var wg sync.WaitGroup
	for i := range 3 {
		wg.Go(func() { o.Publish(&nats.Msg{Subject: "here", Data: fmt.Append(nil, i)}) })
	}
	wg.Wait()
	slices.Sort(refused)
	if want := []string{"0: nats: connection closed", "1: nats: connection closed", "2: nats: connection closed"}; !slices.Equal(refused, want) {
		t.Errorf("expected %q, found %q", want, refused)
	}
}

func TestASecondConnectionIsTakenWhenTheFirstIsBusy(t *testing.T) {
	t.Parallel()
	s := journaltest.Start(t)
	first, second := newAcks(s.Conn(t), time.Second), newAcks(s.Conn(t), time.Second)
	j := &Journal{acks: []*acks{first, second}}
	for _, c := range []struct {
		first, second int64
		want          *acks
	}{{0, 0, first}, {enough - 1, 0, first}, {enough, 0, second}, {enough, enough - 1, second}, {enough, enough, first}, {enough + 1, enough, second}} {
		first.flying.Store(c.first)
		second.flying.Store(c.second)
		if got := j.conn(); got != c.want {
			t.Errorf("%d and %d in flight: the wrong connection was taken", c.first, c.second)
		}
	}
}
