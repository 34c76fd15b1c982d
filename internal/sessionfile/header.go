package sessionfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"palimpsest/internal/events"
)

// zstdMagic is what a zstd frame starts with.
var zstdMagic = []byte{0x28, 0xb5, 0x2f, 0xfd}

// noVersion is the version of a file whose header does not say it.
const noVersion = -1

// supported says why files of a version cannot be read. Whatever is to be converted on its
// way in starts here (versions) and in readHeader (compression); the layers above see lines
// of format 3 or 4.
func supported(version float64) error {
	if version == 3 || version == 4 {
		return nil
	}
	return &events.Error{Code: CodeFormat, Detail: fmt.Sprintf("format %v is not supported by this build; session files of formats 3 and 4 are", version)}
}

// readHeader reads the first line. id, unless empty, takes the place of the header's own.
// The version is what the file says, noVersion when it says none.
func (p *pass) readHeader(id string) (version int, err error) {
	bad := func(format string, args ...any) (int, error) {
		return version, &events.Error{Code: events.CodeHeaderMalformed, Detail: "session header: " + fmt.Sprintf(format, args...)}
	}
	version = noVersion
	if start, _ := p.lines.r.Peek(len(zstdMagic)); bytes.Equal(start, zstdMagic) {
		p.lines.at.number = 1
		return version, &events.Error{Code: CodeFormat, Detail: "zstd compression is not supported by this build; decompress the file first (zstd -d)"}
	}
	l, err := p.lines.next()
	if errors.Is(err, io.EOF) {
		return bad(`the file is empty; expected a first line {"type":"session","version":3,…}`)
	}
	if err != nil {
		return version, err
	}
	if _, err := events.Compact(nil, l.text); err != nil {
		return bad("%v", err)
	}
	var members map[string]json.RawMessage // exact keys, unlike a struct's
	if json.Unmarshal(l.text, &members) != nil || members == nil {
		return bad(`expected a first line {"type":"session","version":3,…}, found something else`)
	}
	if t := members["type"]; string(t) != `"session"` {
		return bad(`expected a first line of type "session", found %s`, orNothing(t))
	}
	v := members["version"]
	number, err := strconv.ParseFloat(string(v), 64)
	if err != nil {
		return bad("version: expected 3 or 4, found %s", orNothing(v))
	}
	if version = int(number); float64(version) != number {
		version = noVersion
	}
	if err := supported(number); err != nil {
		return version, err
	}
	_, hasID := members["id"]
	switch {
	case !hasID && id == "":
		return bad("id is missing; take it from the file's name instead (id-from filename)")
	case !hasID || id == "":
		p.header, err = events.ParseHeader(l.text, id, 0)
	default:
		if p.header, err = events.ParseHeader(l.text, "", 0); err == nil {
			p.header, err = p.header.WithID(id)
		}
	}
	if err != nil {
		p.header = nil
		return version, err
	}
	_, p.dated = members["createdAt"]
	return version, nil
}

func orNothing(tok []byte) string {
	const most = 64
	switch {
	case tok == nil:
		return "nothing"
	case len(tok) > most:
		return string(bytes.ToValidUTF8(tok[:most], nil)) + "…"
	}
	return string(tok)
}
