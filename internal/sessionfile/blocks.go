package sessionfile

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
)

// blockSize is how many bytes are read, hashed and handed on at a time.
const blockSize = 1 << 20

// sum is the hash of a block. Check keeps one for each: 32 bytes a MiB.
type sum = [sha256.Size]byte

// blocks reads a file's bytes block by block. Check notes the hash of each block, Events
// compares it before it hands out a single byte of the block, so that what is committed is
// what was validated, whoever writes to the file meanwhile.
type blocks struct {
	f       *File
	compare bool

	buf, rest []byte
	off       int64
	n         int // blocks read
	fail      error
}

func (b *blocks) Read(dst []byte) (int, error) {
	if _, err := b.start(); err != nil {
		return 0, err
	}
	n := copy(dst, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

// start returns bytes that Read will return next.
func (b *blocks) start() ([]byte, error) {
	if len(b.rest) == 0 {
		if err := b.fill(); err != nil {
			if !errors.Is(err, io.EOF) {
				b.fail = err
			}
			return nil, err
		}
	}
	return b.rest, nil
}

func (b *blocks) fill() error {
	left := b.f.version.size - b.off
	if left == 0 {
		return io.EOF
	}
	if b.buf == nil {
		b.buf = make([]byte, min(left, blockSize))
	}
	block := b.buf[:min(left, int64(len(b.buf)))]
	n, err := b.f.src.ReadAt(block, b.off)
	if n < len(block) {
		if err == nil || errors.Is(err, io.EOF) {
			return b.f.changed(fmt.Sprintf("it had %d bytes and ends at %d", b.f.version.size, b.off+int64(n)))
		}
		return unreadable(err)
	}
	switch h := sha256.Sum256(block); {
	case !b.compare:
		b.f.sums = append(b.f.sums, h)
	case b.n >= len(b.f.sums) || b.f.sums[b.n] != h:
		return b.f.changed(fmt.Sprintf("there are other bytes than before from byte %d to %d", b.off, b.off+int64(n)))
	}
	b.n++
	b.off += int64(n)
	b.rest = block
	b.f.o.Progress(b.off, b.f.version.size)
	return nil
}
