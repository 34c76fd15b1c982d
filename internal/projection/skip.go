package projection

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
)

// Longest texts of a Skipped, in bytes.
const (
	maxSkippedBy     = 200
	maxSkippedReason = 1000
)

// standsStill says why a session's projection does.
func (q *Quarantine) standsStill() string {
	why := "the session is in quarantine and its projection stands still: " + q.Detail
	if q.Skipped != nil {
		why += fmt.Sprintf("; %s left it so: %s", q.Skipped.By, q.Skipped.Reason)
	}
	return why
}

// Skip notes in a session's record that somebody decided to leave it in quarantine: it no longer
// counts as something to be looked after. Its snapshot stays where it is, and reads go on to say
// so. A retry ends the decision, whatever becomes of it. A session that is not in quarantine is
// not-found.
func (r *Reader) Skip(ctx context.Context, session, by, reason string) (*Quarantine, error) {
	if err := events.CheckSessionID(session); err != nil {
		return nil, err
	}
	for name, c := range map[string]struct {
		text string
		most int
	}{"by": {by, maxSkippedBy}, "reason": {reason, maxSkippedReason}} {
		if err := checkLine(c.text, c.most); err != nil {
			return nil, &events.Error{Code: events.CodeBadRequest, Session: session, Detail: name + ": " + err.Error()}
		}
	}
	b := r.buckets.Pin(ctx)
	kv, key := b.Quarantine, b.quarantineKey(session)
	for {
		e, err := kv.Get(ctx, key)
		switch {
		case errors.Is(err, jetstream.ErrKeyNotFound):
			return nil, &events.Error{Code: events.CodeNotFound, Session: session, Detail: "the session is not in quarantine"}
		case err != nil:
			return nil, unavailable("quarantine", err)
		}
		q, err := parseQuarantine(session, e.Value())
		if err != nil {
			return nil, err
		}
		q.Skipped = &Skipped{By: by, Reason: reason, Time: time.Now().UnixMilli()}
		b, err := json.Marshal(q)
		if err != nil {
			return nil, err
		}
		_, err = kv.Update(ctx, key, b, e.Revision())
		if journal.WrongRevision(err) {
			continue // retried or recorded meanwhile: look again
		}
		if err != nil {
			return nil, unavailable("quarantine", err)
		}
		return q, nil
	}
}

// checkLine accepts a line of printable text.
func checkLine(s string, most int) error {
	if s == "" || len(s) > most || !utf8.ValidString(s) {
		return fmt.Errorf("expected 1 to %d bytes of UTF-8, found %d", most, len(s))
	}
	for _, c := range s {
		if !unicode.IsPrint(c) {
			return fmt.Errorf("expected printable text, found %q", c)
		}
	}
	return nil
}
