package journal

import (
	"strings"
	"testing"

	"palimpsest/internal/events"
)

// TestAShortBodyLetsGoOfItsMessage: headers are kept no longer than they are needed, and Held knows.
func TestAShortBodyLetsGoOfItsMessage(t *testing.T) {
	t.Parallel()
	j := &Journal{cfg: Config{Prefix: "p", Partitions: 1}}
	for _, n := range []int{1, copiedBody, copiedBody + 1} {
		body := []byte(strings.Repeat("x", n-1) + "\n")
		c := &events.Commit{ID: "c", Session: "s", Actor: events.NoActor, Time: "2026-01-01T00:00:00.000Z", Format: events.Format3, Body: body}
		got, err := j.commit(c.Header(), body, j.Subject("s"), 1)
		if err != nil {
			t.Fatal(err)
		}
		if shared, want := &got.Body[0] == &body[0], n > copiedBody; shared != want || string(got.Body) != string(body) {
			t.Errorf("%d bytes: shares the message's memory: %v, want %v", n, shared, want)
		}
		if held := Held(got); held < n || held < withBody && n > copiedBody {
			t.Errorf("%d bytes: held %d", n, held)
		}
	}
}
