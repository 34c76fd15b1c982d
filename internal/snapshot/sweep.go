package snapshot

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
)

// Sweep says which pages are looked for, and what becomes of them.
type Sweep struct {
	// Session limits the sweep to one session. Defaults to all.
	Session string
	// Grace is how old a page must be to be looked at, and how long one that no head refers to
	// stays readable after it was found. Defaults to 30 s.
	Grace time.Duration
	// Erased are the sessions that were erased: all that is left of them goes. Defaults to none.
	Erased []string
	// Markers is how old the marker of a deleted key must be to be removed. Negative: all stay.
	// Defaults to 24 h.
	Markers time.Duration
	// DryRun finds and removes nothing.
	DryRun bool
	// Found, when given, is called for every page that no head refers to.
	Found func(key string)
}

// Swept is what a sweep found.
type Swept struct {
	Sessions     int `json:"sessions"`     // that have pages old enough
	Pages        int `json:"pages"`        // old enough, index pages too
	Unreferenced int `json:"unreferenced"` // of those
	Removed      int `json:"removed"`
	Erased       int `json:"erased"`  // keys of erased sessions that were removed
	Markers      int `json:"markers"` // of deleted keys, which were removed
	// Skipped are sessions whose pages stay since their head is damaged or not there.
	Skipped int `json:"skipped"`
}

// sweepPage is a page that may be in no head.
type sweepPage struct {
	key string
	n   int64
	rev uint64
}

// Sweep removes pages that the session's head does not refer to: a projector that stops within
// the grace time leaves them. A page whose number the head does not know yet stays, since a
// head that refers to it may be about to be written, and so does one that is written again
// meanwhile. What is left of erased sessions goes, and so do old markers of deleted keys, of which
// every page that went leaves one. It may run beside projectors. It takes about 100 bytes of memory
// for each page.
func (s *Store) Sweep(ctx context.Context, o Sweep) (*Swept, error) {
	s = s.Pin(ctx)
	if o.Grace == 0 {
		o.Grace = 30 * time.Second
	}
	if o.Markers == 0 {
		o.Markers = 24 * time.Hour
	}
	filter, all := "*.*", ">"
	if o.Session != "" {
		if err := events.CheckSessionID(o.Session); err != nil {
			return nil, err
		}
		filter, all = events.Token(o.Session)+".*", events.Token(o.Session)+".>"
	}
	out := &Swept{}
	if !o.DryRun {
		for _, id := range o.Erased {
			if o.Session != "" && o.Session != id {
				continue
			}
			n, err := s.Erase(ctx, id)
			if out.Erased += n; err != nil {
				return out, err
			}
		}
	}
	if o.Markers > 0 && !o.DryRun {
		var err error
		if out.Markers, err = s.removeMarkers(ctx, all, time.Now().Add(-o.Markers)); err != nil {
			return out, err
		}
	}
	pages, err := s.oldPages(ctx, filter, time.Now().Add(-o.Grace))
	if err != nil {
		return out, err
	}
	out.Sessions = len(pages)
	var found []sweepPage
	for _, token := range slices.Sorted(maps.Keys(pages)) {
		out.Pages += len(pages[token])
		referred, err := s.referred(ctx, token)
		switch {
		case errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}), errors.Is(err, errNoValue):
			out.Skipped++
			continue
		case err != nil:
			return nil, err
		}
		for _, p := range pages[token] {
			if p.n < referred.next && !referred.keys[p.key] {
				found = append(found, p)
				if o.Found != nil {
					o.Found(p.key)
				}
			}
		}
	}
	out.Unreferenced = len(found)
	if o.DryRun || len(found) == 0 {
		return out, nil
	}
	// A reader may have the head before in its hands.
	wait := time.NewTimer(o.Grace)
	defer wait.Stop()
	select {
	case <-wait.C:
	case <-ctx.Done():
		return out, context.Cause(ctx)
	}
	for _, p := range found {
		switch err := s.kv.Purge(ctx, p.key, jetstream.LastRevision(p.rev)); {
		case err == nil:
			out.Removed++
		case errors.Is(err, jetstream.ErrKeyNotFound), journal.WrongRevision(err): // gone, or written again
		default:
			return out, unavailable(err)
		}
	}
	return out, nil
}

// oldPages returns the pages that match a filter and were written before a time, by token.
func (s *Store) oldPages(ctx context.Context, filter string, before time.Time) (map[string][]sweepPage, error) {
	out := map[string][]sweepPage{}
	return out, s.keys(ctx, filter, func(e jetstream.KeyValueEntry) {
		token, number, _ := strings.Cut(e.Key(), ".")
		n, err := strconv.ParseInt(strings.TrimPrefix(number, "i"), 10, 64)
		if err == nil && e.Created().Before(before) {
			out[token] = append(out[token], sweepPage{e.Key(), n, e.Revision()})
		}
	}, jetstream.IgnoreDeletes())
}

// removeMarkers removes the markers of deleted keys that match a filter and are older than a time,
// and returns how many there were. What is written to such a key meanwhile stays.
func (s *Store) removeMarkers(ctx context.Context, filter string, before time.Time) (n int, err error) {
	type marker struct {
		key string
		rev uint64
	}
	var old []marker
	err = s.keys(ctx, filter, func(e jetstream.KeyValueEntry) {
		if e.Operation() != jetstream.KeyValuePut && e.Created().Before(before) {
			old = append(old, marker{e.Key(), e.Revision()})
		}
	})
	if err != nil || old == nil {
		return 0, err
	}
	stream, err := s.register.js.Stream(ctx, "KV_"+s.generation.Bucket)
	if err != nil {
		return 0, unavailable(err)
	}
	for _, m := range old {
		if err := stream.Purge(ctx, jetstream.WithPurgeSubject("$KV."+s.generation.Bucket+"."+m.key), jetstream.WithPurgeSequence(m.rev+1)); err != nil {
			return n, unavailable(err)
		}
		n++
	}
	return n, nil
}

// keys calls f for the newest entry of every key that matches a filter, without its value.
func (s *Store) keys(ctx context.Context, filter string, f func(jetstream.KeyValueEntry), opts ...jetstream.WatchOpt) error {
	w, err := s.kv.Watch(ctx, filter, append(opts, jetstream.MetaOnly())...)
	if err != nil {
		return unavailable(err)
	}
	defer func() { _ = w.Stop() }() // fails only when the connection is gone
	for {
		// A watch that is lost with its connection is silent.
		silent := time.NewTimer(readTimeout)
		select {
		case e := <-w.Updates():
			silent.Stop()
			if e == nil {
				return nil
			}
			f(e)
		case <-silent.C:
			return unavailable(fmt.Errorf("no key within %v", readTimeout))
		case <-ctx.Done():
			silent.Stop()
			return context.Cause(ctx)
		}
	}
}

// Unreferenced returns those of some keys of pages that the session's head does not refer to. Of a head
// that is damaged or not there nobody knows.
func (s *Store) Unreferenced(ctx context.Context, session string, keys []string) ([]string, error) {
	s = s.Pin(ctx)
	r, err := s.referred(ctx, events.Token(session))
	switch {
	case errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}), errors.Is(err, errNoValue):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(keys), func(k string) bool { return r.keys[k] }), nil
}

// references are the pages that a head knows.
type references struct {
	keys map[string]bool
	next int64 // numbers from here on may be those of a head to come
}

// referred reads what a session's head refers to; errNoValue when it has none, or when it moved
// on while it was read, so that it is worked on.
func (s *Store) referred(ctx context.Context, token string) (*references, error) {
	id, err := events.SessionOf(token)
	if err != nil {
		return nil, errNoValue
	}
	h, _, err := s.Head(ctx, id)
	if err == nil && h == nil {
		err = errNoValue
	}
	if err != nil {
		return nil, err
	}
	r := &references{map[string]bool{}, h.NextPage}
	entries := h.Pages
	for _, n := range h.Index {
		ip, err := s.indexPage(ctx, IndexKey(token, n))
		if err != nil {
			return nil, err
		}
		r.keys[IndexKey(token, n)] = true
		entries = append(entries, ip.Pages...)
	}
	for _, e := range entries {
		r.keys[PageKey(token, e.N)] = true
	}
	return r, nil
}
