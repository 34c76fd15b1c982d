package sessionfile_test

import (
	"bytes"
	"errors"
	"io"
	"iter"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/sessionfile"
)

func given(ls ...string) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		for _, l := range ls {
			if !yield([]byte(l), nil) {
				return
			}
		}
	}
}

func theHeader(t *testing.T) *events.Header {
	t.Helper()
	h, err := events.ParseHeader([]byte(`{"version":3,"id":"s","createdAt":7,"isSeeded":false,"delegationDepth":0,"x":1.10}`), "", 0)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func TestWrite(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	if err := sessionfile.Write(&b, theHeader(t), given("{}", "[1]")); err != nil {
		t.Fatal(err)
	}
	want := `{"type":"session","version":3,"id":"s","createdAt":7,"isSeeded":false,"delegationDepth":0,"x":1.10}` + "\n{}\n[1]\n"
	if b.String() != want {
		t.Errorf("expected %q, got %q", want, b.String())
	}
}

func TestWriteRefusesWhatIsNotOneLine(t *testing.T) {
	t.Parallel()
	for _, l := range []string{"", "{}\n{}", "{}\n"} {
		var b bytes.Buffer
		err := sessionfile.Write(&b, theHeader(t), given("{}", l, "{}"))
		if !errors.Is(err, &events.Error{Code: events.CodeCorrupt}) {
			t.Errorf("%q: got %v", l, err)
		}
		if !bytes.HasSuffix(b.Bytes(), []byte("}\n{}\n")) {
			t.Errorf("%q: expected the file up to the bad line, got %q", l, b.String())
		}
	}
}

func TestWriteHandsErrorsOn(t *testing.T) {
	t.Parallel()
	err := sessionfile.Write(io.Discard, theHeader(t), func(yield func([]byte, error) bool) { yield(nil, errStop) })
	if err != errStop { //nolint:errorlint // the very error
		t.Errorf("expected the error of the lines as it is, got %v", err)
	}
	big := string(bytes.Repeat([]byte{'x'}, 100_000))
	for _, ls := range [][]string{{}, {big, big}} {
		err = sessionfile.Write(brokenWriter{}, theHeader(t), given(ls...))
		if !errors.Is(err, &events.Error{Code: events.CodeUnavailable}) || !errors.Is(err, errStop) {
			t.Errorf("expected %s with its cause, got %v", events.CodeUnavailable, err)
		}
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errStop }
