package audit

import (
	"context"
	"errors"
	"fmt"

	"palimpsest/internal/erasure"
	"palimpsest/internal/events"
	"palimpsest/internal/journal"
	"palimpsest/internal/snapshot"
)

// erasure checks that nothing is left of a session that was erased.
func (v *verifier) erasure(ctx context.Context) error {
	again := "; erase the session again to finish it"
	if v.tombstone == nil {
		v.find(Finding{Check: CheckErasure, Detail: "a tombstone is in the header's place, and none in the log: the session was not erased by this program"})
		return nil
	}
	at := v.tombstone.StreamSeq
	t, err := events.ParseTombstone(v.tombstone.Body)
	if err != nil {
		v.find(Finding{Check: CheckErasure, StreamSeq: at, Detail: err.Error()})
		return nil
	}
	v.r.Erased = t
	v.r.Findings = v.r.Findings[:0] // what was found about a log that is going away
	if !v.buried {
		v.find(Finding{Check: CheckErasure, StreamSeq: at, Detail: "the log has a tombstone, but the session's header is still there" + again})
	}
	if n := v.left + int(v.r.Commits); n > 0 {
		v.find(Finding{Check: CheckErasure, StreamSeq: at, Expected: "a tombstone alone", Found: fmt.Sprintf("%d more messages", n), Detail: "the log of an erased session is not empty" + again})
	}
	if last, err := v.a.log.LastOn(ctx, erasure.Stream, erasure.Subject(v.id)); err != nil && !journal.StreamMissing(err) {
		return err
	} else if last == nil {
		v.find(Finding{Check: CheckErasure, StreamSeq: at, Detail: "the erasure is not on record in stream " + erasure.Stream + again})
	}
	head, _, err := v.a.buckets.Snapshots.Head(ctx, v.id)
	if err != nil && !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) {
		return err
	}
	if head != nil || err != nil {
		v.find(Finding{Check: CheckErasure, StreamSeq: at, Key: snapshot.HeadKey(v.id), Detail: "an erased session has a head" + again})
	}
	pages, err := v.a.buckets.Snapshots.KV().ListKeysFiltered(ctx, snapshot.HeadKey(v.id)+".>")
	if err != nil {
		return err
	}
	defer pages.Stop()
	for key := range pages.Keys() {
		v.find(Finding{Check: CheckErasure, StreamSeq: at, Key: key, Detail: "an erased session has a page" + again})
	}
	return nil
}
