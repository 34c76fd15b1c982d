package events

import (
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"
)

// ErasedType is the CloudEvents type of a tombstone: the message that stands in the place of
// the log of a session that was erased. It is no commit.
const ErasedType = "palimpsest.session.erased.v1"

// Tombstone says that a session was erased, and what can still be said of it.
type Tombstone struct {
	V       int    `json:"v"`
	ID      string `json:"id"` // of the erasure
	Session string `json:"session"`
	By      string `json:"by"`
	Reason  string `json:"reason"`
	Time    string `json:"time"` // RFC 3339

	// Of the log that was there: its last seq, -1 for none, and the end of both chains.
	LastSeq Seq    `json:"lastSeq"`
	Digest  string `json:"digest"`
	Chain   string `json:"chain"`
}

// Message returns the tombstone as it is stored, without a subject.
func (t *Tombstone) Message() (*nats.Msg, error) {
	b, err := Marshal(t)
	if err != nil {
		return nil, err
	}
	h := nats.Header{}
	for name, v := range map[string]string{
		"specversion": ceVersion, "id": t.ID, "source": sourcePrefix + Token(t.Session), "type": ErasedType, "subject": t.Session,
		"time": t.Time, "datacontenttype": "application/json", "actor": t.By, "lastseq": strconv.FormatInt(int64(t.LastSeq), 10),
	} {
		h[cePrefix+name] = []string{percentEncode(v)}
	}
	return &nats.Msg{Header: h, Data: b}, nil
}

// IsTombstone reports whether a message's headers are those of a tombstone.
func IsTombstone(h nats.Header) bool {
	v := h[cePrefix+"type"]
	return len(v) > 0 && v[0] == ErasedType
}

// ParseTombstone reads a tombstone back.
func ParseTombstone(body []byte) (*Tombstone, error) {
	t := new(Tombstone)
	if err := json.Unmarshal(body, t); err != nil {
		return nil, &Error{Code: CodeCorrupt, Cause: err, Detail: "the tombstone cannot be read: " + err.Error()}
	}
	if t.V != 1 || CheckSessionID(t.Session) != nil {
		return nil, &Error{Code: CodeCorrupt, Detail: fmt.Sprintf("the tombstone cannot be read: version %d of session %q", t.V, t.Session)}
	}
	return t, nil
}

// Erased is the error of whoever asks for a session that was erased.
func Erased(session string) *Error {
	return &Error{Code: CodeErased, Session: session, Detail: "the session was erased; its id is not used again"}
}

// headerTombstone is what stands in the place of the header of a session that was erased. No
// stored header is without a version.
const headerTombstone = `{"erased":true}`

// HeaderTombstone returns what stands in the place of an erased session's header.
func HeaderTombstone() []byte { return []byte(headerTombstone) }

// IsHeaderTombstone reports whether a stored header is that of a session that was erased.
func IsHeaderTombstone(raw []byte) bool { return string(raw) == headerTombstone }
