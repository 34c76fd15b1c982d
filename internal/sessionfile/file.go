// Package sessionfile owns session files: a header line, then one event a line. It reads them
// in two passes with bounded memory, validates every event through the one fold before the
// first is handed out, and writes the files that an export is. Files of formats 0 to 2 are read
// as the files of format 3 that they stand for. It does not know where events are stored, how
// they are committed, or who asks.
//
// Reading is layered: bytes (blocks.go), text (zstd.go), lines (lines.go), header (header.go),
// lines of format 3 or 4 (convert.go), events (pass.go). Each layer knows only the one below it.
package sessionfile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
)

// What Options say by default.
const (
	DefaultMaxEvent  = 8 << 20   // bytes of the longest line that is read
	DefaultMaxWindow = 128 << 20 // bytes that the decoder of a compressed file may look back
)

// The codes of this package's own problems. All others are those of the broken rules.
const (
	CodeUnreadable  events.Code = "file-unreadable"
	CodeChanged     events.Code = "file-changed" // since it was checked
	CodeFormat      events.Code = "format-unsupported"
	CodeZstd        events.Code = "zstd-malformed"
	CodeCrashTail   events.Code = "crash-tail"
	CodeBlankLine   events.Code = "blank-line"
	CodeNoLineEnd   events.Code = "no-line-end"        // a warning
	CodeEmptyCallID events.Code = "empty-call-id"      // a warning
	CodeNoCreatedAt events.Code = "created-at-missing" // a warning
)

// IDFrom says where a session's id comes from.
type IDFrom string

// The places of an id. That of the file name is its last element without .zst and .jsonl.
const (
	IDFromHeader   IDFrom = "header"
	IDFromFilename IDFrom = "filename"
)

// ParseIDFrom reads an IDFrom as a flag gives it.
func ParseIDFrom(s string) (IDFrom, error) {
	switch v := IDFrom(s); v {
	case IDFromHeader, IDFromFilename:
		return v, nil
	}
	return "", &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("id-from: expected header or filename, found %q", s)}
}

// Options are how a file is read. The zero value is ready to use.
type Options struct {
	// IDFrom defaults to IDFromHeader.
	IDFrom IDFrom
	// MaxEvent is the most bytes that a line, as it stands in the file and in canonical form,
	// may have without its line end. Defaults to DefaultMaxEvent.
	MaxEvent int
	// MaxWindow is the most bytes that a zstd frame may ask the decoder to keep in memory.
	// Defaults to DefaultMaxWindow.
	MaxWindow int
	// RepairTail drops an incomplete last line, with a warning. Defaults to false: then it
	// is a problem.
	RepairTail bool
	// Invariants says what is done about broken lifecycle rules. Defaults to lifecycle.Observe.
	Invariants lifecycle.Mode
	// Vocabulary defaults to the built-in types.
	Vocabulary *events.Vocabulary
	// Progress, when set, is called as a pass reads on, with the bytes of the file read so far
	// in this pass and in all.
	Progress func(done, total int64)
}

func (o *Options) setDefaults() {
	if o.IDFrom == "" {
		o.IDFrom = IDFromHeader
	}
	if o.MaxEvent <= 0 {
		o.MaxEvent = DefaultMaxEvent
	}
	if o.MaxWindow <= 0 {
		o.MaxWindow = DefaultMaxWindow
	}
	if o.Invariants == "" {
		o.Invariants = lifecycle.Observe
	}
	if o.Vocabulary == nil {
		o.Vocabulary = events.DefaultVocabulary()
	}
	if o.Progress == nil {
		o.Progress = func(int64, int64) {}
	}
}

// File is a session file that is open for its two passes: Check, then Events. It must be
// closed, and is not safe for concurrent use.
type File struct {
	name string
	src  source
	o    Options

	// What Check saw; Events must see the same.
	version   version
	sums      []sum
	canonical bool // all lines are canonical ones
	header    *events.Header
	report    *Report
}

// version is what tells cheaply that a file is not the one it was.
type version struct {
	size     int64
	modified time.Time
}

// source is what a file's bytes are read from.
type source interface {
	io.ReaderAt
	io.Closer
	version() (version, error)
}

// Open opens a session file. It must be a regular file, since it is read twice. Nothing is
// read yet: what is wrong with the content is for Check to say.
func Open(path string, o Options) (*File, error) {
	st, err := os.Stat(path) // before it is opened: opening a pipe would wait for its writer
	if err != nil {
		return nil, unreadable(err)
	}
	if !st.Mode().IsRegular() {
		return nil, &events.Error{Code: CodeUnreadable, Detail: fmt.Sprintf("%s: expected a regular file, since it is read twice, found %s", path, kindOfFile(st.Mode()))}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, unreadable(err)
	}
	o.setDefaults()
	return &File{name: path, src: diskFile{f}, o: o}, nil
}

// OpenBytes is Open for a file whose content is in memory; it must not be changed.
func OpenBytes(name string, content []byte, o Options) *File {
	o.setDefaults()
	return &File{name: name, src: memoryFile{bytes.NewReader(content)}, o: o}
}

// Close closes the file.
func (f *File) Close() error {
	if err := f.src.Close(); err != nil {
		return unreadable(err)
	}
	return nil
}

// Header returns the session's header, with the id that Options ask for. It is nil before
// Check, and when Check found no usable one.
func (f *File) Header() *events.Header { return f.header }

// Events is pass two: it calls yield with each event in order, in exactly the form that Check
// accepted. A file that Check did not accept yields nothing and returns its first problem. No
// event is yielded from bytes that differ from those that Check read: a file that was changed
// meanwhile ends in an error of CodeChanged. An error of yield ends the pass and is returned
// as it is; when ctx ends, its cause is returned.
func (f *File) Events(ctx context.Context, yield func(*events.Event) error) error {
	if f.report == nil {
		return &events.Error{Code: events.CodeInternal, Detail: f.name + ": Events was called before Check"}
	}
	if err := f.report.Err(); err != nil {
		return err
	}
	if err := f.unchanged(); err != nil {
		return err
	}
	p := f.newPass(true)
	defer p.close()
	if _, err := p.readHeader(f.id()); err != nil {
		return err
	}
	for int64(p.next) < f.report.Events {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		e, err := p.event()
		if errors.Is(err, io.EOF) {
			return f.changed("it ends early")
		}
		if err != nil {
			return err
		}
		if err := yield(e); err != nil {
			return err
		}
	}
	return f.unchanged()
}

// id is the id that the file's name gives, or "" when it is the header's to say.
func (f *File) id() string {
	if f.o.IDFrom != IDFromFilename {
		return ""
	}
	return strings.TrimSuffix(strings.TrimSuffix(filepath.Base(f.name), ".zst"), ".jsonl")
}

// unchanged compares size and time of the file with those that Check saw.
func (f *File) unchanged() error {
	v, err := f.src.version()
	switch {
	case err != nil:
		return unreadable(err)
	case v.size != f.version.size:
		return f.changed(fmt.Sprintf("it had %d bytes and has %d now", f.version.size, v.size))
	case !v.modified.Equal(f.version.modified):
		return f.changed(fmt.Sprintf("it was last written at %s and again at %s", f.version.modified.Format(time.RFC3339Nano), v.modified.Format(time.RFC3339Nano)))
	}
	return nil
}

func (f *File) changed(how string) error {
	return &events.Error{Code: CodeChanged, Detail: fmt.Sprintf("%s was changed while it was read: %s; wait until nothing writes to it, then start again", f.name, how)}
}

func unreadable(err error) *events.Error {
	e := &events.Error{Code: CodeUnreadable, Detail: err.Error(), Cause: err}
	if errors.Is(err, fs.ErrNotExist) {
		e.Code = events.CodeNotFound
	}
	return e
}

func kindOfFile(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a directory"
	case m&fs.ModeNamedPipe != 0:
		return "a pipe"
	}
	return "a special file"
}

type diskFile struct{ *os.File }

func (d diskFile) version() (version, error) {
	st, err := d.Stat()
	if err != nil {
		return version{}, err
	}
	return version{st.Size(), st.ModTime()}, nil
}

type memoryFile struct{ *bytes.Reader }

func (m memoryFile) version() (version, error) { return version{size: m.Size()}, nil }
func (m memoryFile) Close() error              { return nil }
