package journal

import (
	"github.com/nats-io/nats.go"

	"palimpsest/internal/events"
)

// contendedPrefix is in front of the session's token in the subject on which an appender that
// keeps losing asks the others to leave it a gap. It is core NATS: who misses it loses nothing.
const contendedPrefix = "palimpsest.contended."

// AskForTurn tells other appenders that this one keeps being overtaken on a session.
func (j *Journal) AskForTurn(session string) error {
	return j.conns.Read.Publish(contendedPrefix+events.Token(session), nil)
}

// OnAskForTurn calls f with each session on which an appender, this one too, asks for a turn,
// until stop is called.
func (j *Journal) OnAskForTurn(f func(session string)) (stop func(), err error) {
	sub, err := j.conns.Read.Subscribe(contendedPrefix+"*", func(m *nats.Msg) {
		if id, err := events.SessionOf(m.Subject[len(contendedPrefix):]); err == nil {
			f(id)
		}
	})
	if err != nil {
		return nil, j.unavailable(err)
	}
	return func() { _ = sub.Unsubscribe() }, nil // fails only when the connection is gone
}
