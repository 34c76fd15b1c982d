package sessionfile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"path/filepath"

	"github.com/klauspost/compress/zstd"

	"palimpsest/internal/events"
)

// zstdMagic is what a zstd frame starts with.
var zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}

// content reads a file's text as a stream: its bytes, or what they decode to when they are
// zstd data of any number of frames. Decoding the same bytes gives the same text, so that what
// blocks makes sure of holds for the text too.
type content struct {
	f    *File
	b    *blocks
	zstd *zstd.Decoder // nil unless the file is compressed
	open bool
	n    int64 // bytes of text read
	fail error // of zstd, io.EOF included
}

func (c *content) Read(dst []byte) (int, error) {
	if !c.open {
		if err := c.start(); err != nil {
			return 0, err
		}
	}
	if c.zstd == nil {
		return c.b.Read(dst)
	}
	if c.fail != nil {
		return 0, c.fail
	}
	n, err := c.zstd.Read(dst)
	c.n += int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		err = c.explain(err)
	}
	c.fail = err
	return n, err
}

// start looks at the first bytes: a file is compressed when they say so, or its name does.
func (c *content) start() error {
	first, err := c.b.start()
	if err != nil {
		return err
	}
	c.open = true
	if filepath.Ext(c.f.name) != ".zst" && !bytes.HasPrefix(first, zstdMagic) {
		return nil
	}
	c.zstd, err = zstd.NewReader(c.b, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(uint64(c.f.o.MaxWindow)))
	return err
}

func (c *content) close() {
	if c.zstd != nil {
		c.zstd.Close()
	}
}

// explain says what is wrong with the zstd data, unless reading the file itself failed.
func (c *content) explain(err error) error {
	if c.b.fail != nil {
		return c.b.fail
	}
	bad := func(format string, args ...any) error {
		return &events.Error{Code: CodeZstd, Cause: err, Detail: fmt.Sprintf(format, args...) + fmt.Sprintf("; %d bytes of text were read from the frames before", c.n)}
	}
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return bad("the zstd data ends in the middle of a frame: the file was cut off. Copy it again, or save what is left with zstd -dc and import that with repair-tail")
	case errors.Is(err, zstd.ErrMagicMismatch):
		return bad("expected a zstd frame, found other bytes")
	case errors.Is(err, zstd.ErrWindowSizeExceeded), errors.Is(err, zstd.ErrDecoderSizeExceeded):
		return bad("the zstd data needs a window of more than %d bytes; decompress the file first (zstd -d)", c.f.o.MaxWindow)
	case errors.Is(err, zstd.ErrUnknownDictionary):
		return bad("the zstd data needs a dictionary; decompress the file first (zstd -d -D)")
	}
	return bad("the zstd data is damaged: %v", err)
}
