package sessionfile

import (
	"bufio"
	"bytes"
	"io"
	"iter"

	"palimpsest/internal/events"
)

// Write writes a session file: the header's line, then the canonical lines of its events,
// which come without their line ends. An error that comes instead of a line ends the file
// there and is returned as it is; w holds an incomplete file then, as it does when w itself
// fails, which is CodeUnavailable.
func Write(w io.Writer, h *events.Header, lines iter.Seq2[[]byte, error]) error {
	b := bufio.NewWriterSize(w, 64<<10)
	put := func(line []byte) error {
		_, _ = b.Write(line) // a bufio.Writer fails again, at the latest in Flush
		if err := b.WriteByte('\n'); err != nil {
			return unwritten(err)
		}
		return nil
	}
	if err := put(h.FileLine()); err != nil {
		return err
	}
	for line, err := range lines {
		if err == nil && (len(line) == 0 || bytes.IndexByte(line, '\n') >= 0) {
			err = &events.Error{Code: events.CodeCorrupt, Session: h.ID, Detail: "expected the line of one event to write, found an empty one or several"}
		}
		if err == nil {
			err = put(line)
		}
		if err != nil {
			_ = b.Flush() // what went before is good
			return err
		}
	}
	if err := b.Flush(); err != nil {
		return unwritten(err)
	}
	return nil
}

func unwritten(err error) error {
	return &events.Error{Code: events.CodeUnavailable, Detail: "writing the session file: " + err.Error(), Cause: err}
}
