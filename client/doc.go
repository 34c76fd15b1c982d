// Package client appends to the sessions of a Palimpsest deployment and reads what was derived
// from them, over the HTTP APIs of the appender and the projector.
//
//	c, err := client.New(client.Config{AppenderURL: "http://127.0.0.1:8080", ProjectorURL: "http://127.0.0.1:8081"})
//	…
//	s := c.Session("build-4711")
//	receipt, err := s.Append(ctx, []client.Event{{
//		Type:      "user/message",
//		SurfaceOp: client.Append(),
//		Data:      json.RawMessage(`{"id":"m1","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"Hello"}]}`),
//	}})
//	…
//	view, err := s.Messages(ctx, client.MinSeq(receipt.LastSeq))
//
// # Three promises
//
// A receipt says that the events are committed: they are in the log and will stay there. They
// are projected a moment later, and served when a read asks for it: [MinSeq] with a receipt's
// LastSeq reads what was written, [Fresh] reads as new as the log is.
//
// # Exactly once
//
// [Session.Append] tries again when the appender is overloaded or away and when an answer is
// lost, with growing pauses, and never stores events twice: all attempts of one append carry
// the same [ExpectedSeq] or, when the caller gives none, the same Idempotency-Key, by which the
// appender recognises what it stored already. An append whose outcome is not known is pursued
// until the context ends; a context without an end is pursued for ever. The error is then
// [ErrOutcomeUnknown], and carries what is needed to ask again later.
//
// What the appender refuses (any other 4xx) is never tried again.
//
// With [Session.TakeWriter] a process becomes the one writer of a session. Its [Writer] carries
// the epoch and the seq of each append, and is refused with [ErrFenced] from the moment on at
// which somebody else takes over.
//
// # Following
//
// [Session.Watch] gives each change of a session's surface, [Client.Feed] each session that goes
// on. Both are loops that end when they are left or their context does, and resume by
// themselves when a connection breaks.
//
// # Errors
//
// Every error of this package is an [*Error], with the fields of the problem document that the
// service answered. Branch with errors.Is and the Err… variables.
//
// # Bytes
//
// Data that is given as [encoding/json.RawMessage] is sent as it is, and messages and events
// are handed out token for token: numbers and strings keep their exact bytes, keys their order.
package client
