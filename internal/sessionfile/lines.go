package sessionfile

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	"palimpsest/internal/events"
)

// line is one line of a file.
type line struct {
	text   []byte // without its line end; valid until the next one is read
	number int    // from 1
	offset int64  // bytes before it
	ended  bool   // by a LF
}

// lines cuts a file into lines at LF alone, so that U+2028 and its like stay text; a CR
// before the LF belongs to the line end.
type lines struct {
	r   *bufio.Reader
	max int // bytes of a line without its line end

	at   line // the last one that was read
	end  int64
	long []byte // holds a line that is longer than r's buffer
}

func newLines(r io.Reader, maxLine int) *lines {
	return &lines{r: bufio.NewReaderSize(r, 64<<10), max: maxLine}
}

// next returns the next line. It fails with io.EOF at the end, where a single blank line is
// allowed; any other blank line and a line that is too long are an *events.Error.
func (l *lines) next() (line, error) {
	l.at = line{number: l.at.number + 1, offset: l.end}
	text, err := l.read()
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return line{}, err
	case err != nil && len(text) == 0:
		return line{}, io.EOF
	}
	l.end += int64(len(text))
	if n := len(text) - 1; text[n] == '\n' {
		l.at.ended = true
		if text = text[:n]; n > 0 && text[n-1] == '\r' {
			text = text[:n-1]
		}
	}
	if len(text) > l.max {
		return line{}, l.tooLong(len(text), "it has")
	}
	if len(bytes.Trim(text, " \t\r")) == 0 {
		switch _, err := l.r.Peek(1); {
		case errors.Is(err, io.EOF):
			return line{}, io.EOF
		case err != nil:
			return line{}, err
		}
		return line{}, &events.Error{Code: CodeBlankLine, Detail: "expected an event, found a blank line; only the last line of a file may be blank"}
	}
	l.at.text = text
	return l.at, nil
}

// read returns the next line with its line end. Never more than a buffer beyond the limit is
// held in memory.
func (l *lines) read() ([]byte, error) {
	part, err := l.r.ReadSlice('\n')
	if !errors.Is(err, bufio.ErrBufferFull) {
		return part, err
	}
	l.long = l.long[:0]
	for {
		l.long = append(l.long, part...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return l.long, err
		}
		if len(l.long) > l.max+len("\r") {
			return nil, l.tooLong(len(l.long), "so far it has")
		}
		part, err = l.r.ReadSlice('\n')
	}
}

func (l *lines) tooLong(n int, has string) error {
	return &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("the line is too long: %s %d bytes, the limit for an event is %d", has, n, l.max)}
}
