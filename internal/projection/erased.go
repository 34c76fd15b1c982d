package projection

import (
	"context"
	"errors"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
)

// erased deals with a session of which something cannot be folded since it was erased: its
// snapshot goes. A session whose log is being erased has gaps before its end.
func (p *partition) erased(ctx context.Context, session string, cause error) (bool, error) {
	if !errors.Is(cause, events.ErrErased) {
		if _, err := p.w.log.LeaderLast(ctx, session); !errors.Is(err, events.ErrErased) {
			return false, nil
		}
	}
	if e := p.sessions[session]; e != nil {
		if err := p.awaitWrite(ctx, e); err != nil && !errors.Is(err, errDropped) {
			return true, err
		}
		if p.sessions[session] == e {
			p.drop(e)
		}
	}
	delete(p.lost, session)
	kv := p.b.Snapshots.KV()
	token := events.Token(session)
	l, err := kv.ListKeysFiltered(ctx, token, token+".*")
	if err != nil && !errors.Is(err, jetstream.ErrNoKeysFound) {
		return true, unavailable("snapshots", err)
	}
	if l != nil {
		for key := range l.Keys() {
			if err := kv.Purge(ctx, key); err != nil {
				return true, unavailable("snapshots", err)
			}
		}
	}
	p.w.cfg.Logger.Info("session was erased", "session", session)
	return true, nil
}
