package appender

import (
	"context"

	"palimpsest/internal/events"
)

// traced begins the span of a commit that carries what several callers append.
func (s *actor) traced(ctx context.Context, c *events.Commit, in []*share) (end func(error)) {
	callers := make([]string, len(in))
	for i, sh := range in {
		callers[i] = sh.w.Trace
	}
	return s.a.cfg.Telemetry.Publish(ctx, c, s.a.log.Subject(s.id), callers)
}
