package sessionfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"

	"palimpsest/internal/events"
)

// noVersion is the version of a file whose header does not say it.
const noVersion = -1

// readVersion reads a header's version. That of an error is what the file says, noVersion when
// it says none.
func readVersion(tok []byte) (int, error) {
	if _, err := strconv.ParseFloat(string(tok), 64); err != nil {
		return noVersion, malformed("version: expected 0 to 4, found %s", orNothing(tok))
	}
	version := noVersion
	if n, ok := integer(tok); ok {
		version = int(n)
	}
	if version < 0 || version > int(events.Format4) {
		return version, &events.Error{Code: CodeFormat, Detail: fmt.Sprintf("format %s is not supported by this build; session files of formats 0 to 4 are", clip(tok))}
	}
	return version, nil
}

func malformed(format string, args ...any) error {
	return &events.Error{Code: events.CodeHeaderMalformed, Detail: "session header: " + fmt.Sprintf(format, args...)}
}

// readHeader reads the first line. id, unless empty, takes the place of the header's own.
// The version is what the file says, noVersion when it says none.
func (p *pass) readHeader(id string) (version int, err error) {
	version = noVersion
	l, err := p.lines.next()
	if errors.Is(err, io.EOF) {
		return version, malformed(`the file is empty; expected a first line {"type":"session","version":3,…}`)
	}
	if err != nil {
		return version, err
	}
	if _, err := events.Compact(nil, l.text); err != nil {
		return version, malformed("%v", err)
	}
	var given map[string]json.RawMessage // exact keys, unlike a struct's
	if json.Unmarshal(l.text, &given) != nil || given == nil {
		return version, malformed(`expected a first line {"type":"session","version":3,…}, found something else`)
	}
	if t := given["type"]; string(t) != `"session"` {
		return version, malformed(`expected a first line of type "session", found %s`, orNothing(t))
	}
	if version, err = readVersion(given["version"]); err != nil {
		return version, err
	}
	text := l.text
	if version < int(events.Format3) {
		p.conv = &converter{}
		if text, err = p.conv.header(text, version); err != nil {
			return version, err
		}
	}
	_, hasID := given["id"]
	switch {
	case !hasID && id == "":
		return version, malformed("id is missing; take it from the file's name instead (id-from filename)")
	case !hasID || id == "":
		p.header, err = events.ParseHeader(text, id, 0)
	default:
		if p.header, err = events.ParseHeader(text, "", 0); err == nil {
			p.header, err = p.header.WithID(id)
		}
	}
	if err != nil {
		p.header = nil
		return version, err
	}
	_, p.dated = given["createdAt"]
	return version, nil
}

func orNothing(tok []byte) string {
	if tok == nil {
		return "nothing"
	}
	return clip(tok)
}
