package main

import (
	"context"
	"fmt"

	"palimpsest/internal/demo"
)

// keepUp starts both programs on their default ports, imports the bundled session and waits
// for Ctrl-C.
func (s *stack) keepUp(ctx context.Context) error {
	if err := s.serve(ctx); err != nil {
		return err
	}
	bundled, err := bundledEvents()
	if err != nil {
		return err
	}
	fmt.Printf("appender   %s, with an embedded NATS server at %s\n", s.appender.HTTP, s.appender.NATS)
	fmt.Printf("projector  %s\n", s.projector.HTTP)
	fmt.Printf("store      %s (kept)\n\n", s.data)
	if err := s.importFirst(ctx, len(bundled)); err != nil {
		return err
	}
	fmt.Printf(tryThese, s.appender.HTTP, s.projector.HTTP, demo.ID, s.bin)
	select {
	case <-ctx.Done():
		fmt.Println("\nStopping.")
	case <-s.appender.ended: // stop says how
	case <-s.projector.ended:
	}
	return s.stop()
}

// tryThese is formatted with the URLs of both programs, the session and the directory of both.
const tryThese = `
Try in another terminal:

  # append a message, to a session that needs not exist before
  curl -s %[1]s/v1/sessions/hello/events --json '{"type":"user/message","surfaceOp":"append","data":{"id":"u1","role":"user","content":[{"type":"text","text":"Hello"}],"source":{"kind":"user"}}}'

  # what the model should see, once event 0 is projected
  curl -s '%[2]s/v1/sessions/hello/messages?minSeq=0'

  # the bundled session: surface, an event that was shadowed, state
  curl -s %[2]s/v1/sessions/%[3]s/surface
  curl -s '%[2]s/v1/sessions/%[3]s/events?from=26&to=26'
  curl -s %[1]s/v1/sessions/%[3]s

  # the same on the command line, and the checker
  %[4]s/projector messages %[3]s
  %[4]s/projector verify --all

Ctrl-C stops both programs.
`
