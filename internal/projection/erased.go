package projection

import (
	"context"
	"errors"
	"time"

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
	if _, err := p.b.Snapshots.Erase(ctx, session); err != nil {
		return true, err
	}
	p.w.cfg.Logger.Info("session was erased", "session", session)
	return true, nil
}

// takeBack takes away what this worker wrote of a session that was erased meanwhile. Who works the
// partition sees the tombstone behind all that it writes, and needs no such look; who lost the
// partition, or stops, while a write was under way does not.
func (p *partition) takeBack(ctx context.Context, session string) {
	if p.holds() && ctx.Err() == nil && !p.draining.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, err := p.w.log.LeaderLast(ctx, session)
	switch {
	case errors.Is(err, events.ErrErased):
		_, err = p.b.Snapshots.Erase(ctx, session)
	case errors.Is(err, &events.Error{Code: events.CodeCorrupt}):
		err = nil
	}
	if err != nil {
		p.w.cfg.Logger.Warn("it is not known whether a session was erased while its snapshot was written; `projector sweep` finds what is left", "session", session, "err", err)
	}
}
