package events

import (
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
)

// Kind says what the fold does with an event.
type Kind uint8

// The kinds. A kind is decided by type, format and vocabulary together.
const (
	KindLog       Kind = iota // known, not on the surface
	KindOpaque                // not known and ignorable: stored, never looked at
	KindSystem                // system/message
	KindUser                  // user/message
	KindAssistant             // assistant/message
	KindTool                  // tool/result
	KindDeveloper             // developer/message, format 4 only
)

// OnSurface reports whether events of this kind are surface events.
func (k Kind) OnSurface() bool { return k >= KindSystem }

// SurfaceKind returns the kind of a surface type, KindLog for any other.
func SurfaceKind(typ string) Kind { return surfaceKinds[typ] }

// Type returns the name of a surface kind's type, "" for other kinds.
func (k Kind) Type() string {
	switch k {
	case KindSystem:
		return TypeSystem
	case KindUser:
		return TypeUser
	case KindAssistant:
		return TypeAssistant
	case KindTool:
		return TypeTool
	case KindDeveloper:
		return TypeDeveloper
	}
	return ""
}

// Surface types.
const (
	TypeSystem    = "system/message"
	TypeUser      = "user/message"
	TypeAssistant = "assistant/message"
	TypeTool      = "tool/result"
	TypeDeveloper = "developer/message"
)

var surfaceKinds = map[string]Kind{
	TypeSystem: KindSystem, TypeUser: KindUser, TypeAssistant: KindAssistant,
	TypeTool: KindTool, TypeDeveloper: KindDeveloper,
}

//go:embed vocabulary.txt
var vocabularyText string

// Vocabulary is the set of event types that a deployment knows: the built-in ones and the
// log-only types that it added. It is immutable and only ever grows from one to the next.
type Vocabulary struct {
	known map[string]vocabularyEntry
	added []string // sorted
}

type vocabularyEntry struct {
	name    string // interned, so that parsing a type allocates nothing
	kind    Kind
	builtIn bool
}

// NewVocabulary returns the built-in types plus the given log-only ones. A type that breaks
// the pattern of type names is an error; one that is built in already is no addition.
func NewVocabulary(add ...string) (*Vocabulary, error) {
	v := &Vocabulary{known: map[string]vocabularyEntry{}}
	for line := range strings.Lines(vocabularyText) {
		name := strings.TrimSuffix(strings.TrimSpace(line), " *")
		if name != "" && !strings.HasPrefix(name, "#") {
			v.known[name] = vocabularyEntry{name, surfaceKinds[name], true}
		}
	}
	for _, name := range add {
		if !validType([]byte(name)) {
			return nil, fmt.Errorf("event type %q: expected %s", name, typePattern)
		}
		if _, ok := v.known[name]; !ok {
			v.known[name] = vocabularyEntry{name, KindLog, false}
			v.added = append(v.added, name)
		}
	}
	slices.Sort(v.added)
	return v, nil
}

// ParseVocabulary returns the vocabulary of a deployment that adds the log-only types of a list, with
// commas or spaces between them. A type that is built in is an error: whoever adds it takes it for
// another one.
func ParseVocabulary(list string) (*Vocabulary, error) {
	add := strings.FieldsFunc(list, func(r rune) bool { return r == ',' || r == ' ' })
	builtIn := DefaultVocabulary()
	for _, name := range add {
		if builtIn.Missing([]string{name}) == nil {
			return nil, fmt.Errorf("event type %q is built in; expected types of your own, so leave it out", name)
		}
	}
	return NewVocabulary(add...)
}

// DefaultVocabulary holds the built-in types alone.
func DefaultVocabulary() *Vocabulary {
	v, err := NewVocabulary()
	if err != nil {
		panic(err) // the embedded list is part of this program
	}
	return v
}

// With returns a vocabulary that knows the given log-only types too.
func (v *Vocabulary) With(add ...string) (*Vocabulary, error) {
	return NewVocabulary(append(slices.Clone(v.added), add...)...)
}

// Types returns every known type, sorted.
func (v *Vocabulary) Types() []string {
	out := make([]string, 0, len(v.known))
	for name := range v.known {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// Missing returns those of the given types that v does not know, sorted.
func (v *Vocabulary) Missing(types []string) []string {
	var out []string
	for _, t := range types {
		if _, ok := v.known[t]; !ok {
			out = append(out, t)
		}
	}
	slices.Sort(out)
	return out
}

// Hash is the hex SHA-256 of the sorted types, one a line.
func (v *Vocabulary) Hash() string {
	sum := sha256.Sum256([]byte(strings.Join(v.Types(), "\n") + "\n"))
	return hex.EncodeToString(sum[:])
}

// classify decides the kind of an event; known is false for a type that must be refused.
// An ignorable event of a type that is not built in is opaque, whether or not the deployment
// added the type since: what was stored opaque stays so.
func (v *Vocabulary) classify(typ []byte, f Format, ignorable bool) (name string, k Kind, known bool) {
	e, ok := v.known[string(typ)]
	if ok && f < Format4 && e.name == TypeDeveloper {
		ok = false
	}
	if !ok || (ignorable && !e.builtIn) {
		if !ok {
			e.name = string(typ)
		}
		return e.name, KindOpaque, ignorable
	}
	return e.name, e.kind, true
}

const typePattern = "[A-Za-z0-9@][A-Za-z0-9@._:/-]{0,127}"

// inType are the bytes of a type behind its first.
var inType = func() (t [256]bool) {
	for _, c := range []byte("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@._:/-") {
		t[c] = true
	}
	return t
}()

func validType(b []byte) bool {
	if len(b) == 0 || len(b) > 128 || strings.IndexByte("._:/-", b[0]) >= 0 {
		return false
	}
	for _, c := range b {
		if !inType[c] {
			return false
		}
	}
	return true
}
