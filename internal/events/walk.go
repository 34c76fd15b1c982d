package events

// Walking JSON text token by token, for packages that splice messages together without
// decoding them. The text must be valid and compact, as the data of every checked event is;
// on other text the answers are meaningless but stay within bounds.

// Get returns the value of the first member called name of the object b, or nil.
func Get(b []byte, name string) []byte { return get(b, name) }

// ValueEnd returns the offset behind the value that starts at offset i of b.
func ValueEnd(b []byte, i int) int { return skipValue(b, i) }

// EachMember calls f for every member of the object b, the key as it stands in the text
// without its quotes, until f answers false. It answers false when b is no object.
func EachMember(b []byte, f func(key, val []byte) bool) bool { return eachMember(b, f) }

// EachElement calls f for every element of the array b until f answers false. It answers
// false when b is no array.
func EachElement(b []byte, f func(val []byte) bool) bool { return eachElement(b, f) }

// KeyIs reports whether a key as EachMember gives it means name.
func KeyIs(key []byte, name string) bool { return keyIs(key, name) }

// Text decodes a string token; ok is false when tok is no string. A lone surrogate escape
// becomes its three-byte form, which Quote turns back into the escape.
func Text(tok []byte) (s string, ok bool) { return text(tok) }

// TextIs reports whether tok is a string that means s. It decodes nothing that holds no escape.
func TextIs(tok []byte, s string) bool { return textIs(tok, s) }
