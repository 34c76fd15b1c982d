// Package auth owns who a caller is and what a caller may do: bearer tokens from a file, JWTs,
// scopes and the session ids that they are limited to. It knows neither HTTP routes nor NATS.
package auth

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"palimpsest/internal/events"
)

// Scope is a kind of call.
type Scope string

// The scopes. None of them contains another but Admin, which contains all.
const (
	Append Scope = "append" // create, append, writer, compact, prune; the child of a fork
	Read   Scope = "read"   // everything that answers what is stored; the parent of a fork
	Repair Scope = "repair" // close an interrupted turn; have a session in quarantine folded again
	Erase  Scope = "erase"  // remove a session for good
	Admin  Scope = "admin"  // what concerns the service and not a session; also every other scope
)

// Scopes lists them all.
var Scopes = []Scope{Append, Read, Repair, Erase, Admin}

// ParseScopes reads names of scopes.
func ParseScopes(names []string) ([]Scope, error) {
	var out []Scope
	for _, n := range names {
		if !slices.Contains(Scopes, Scope(n)) {
			return nil, fmt.Errorf("found scope %q, expected some of append, read, repair, erase, admin", n)
		}
		out = append(out, Scope(n))
	}
	return out, nil
}

// Pattern is a session id in which every * stands for any bytes, none included. There is no
// way to name a * itself. "*" covers every session and what concerns no session.
type Pattern string

// All is the pattern that covers everything.
const All Pattern = "*"

// Covers reports whether the pattern names a session.
func (p Pattern) Covers(session string) bool {
	head, rest, star := strings.Cut(string(p), "*")
	if !star {
		return string(p) == session
	}
	session, ok := strings.CutPrefix(session, head)
	if !ok {
		return false
	}
	parts := strings.Split(rest, "*")
	for _, part := range parts[:len(parts)-1] { // the leftmost place is as good as any
		i := strings.Index(session, part)
		if i < 0 {
			return false
		}
		session = session[i+len(part):]
	}
	return strings.HasSuffix(session, parts[len(parts)-1])
}

// Grant allows some kinds of calls on some sessions.
type Grant struct {
	Scopes   []Scope   `json:"scopes"`
	Sessions []Pattern `json:"sessions"`
}

// Caller is somebody who was recognised.
type Caller struct {
	// Name becomes the actor of what the caller commits: 1 to 256 bytes of printable UTF-8.
	Name   string
	Grants []Grant
	// Rate is how many requests a second the caller may send, 0 for what is usual here.
	Rate float64
	// Burst is how many may come at once; 0 for what is usual here.
	Burst int
	// Expires is when the credential ends; zero for never. Whoever holds a request open is cut off then.
	Expires time.Time
}

// May reports whether the caller may make a kind of call on a session. The session "" stands
// for what concerns no session: only grants on all sessions cover that.
func (c *Caller) May(scope Scope, session string) bool {
	for _, g := range c.Grants {
		if !slices.Contains(g.Scopes, scope) && !slices.Contains(g.Scopes, Admin) {
			continue
		}
		for _, p := range g.Sessions {
			if p == All || session != "" && p.Covers(session) {
				return true
			}
		}
	}
	return false
}

// checkName says what is wrong with a caller's name.
func checkName(name string) error {
	odd := func(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) }
	if name == "" || len(name) > 256 || name == events.NoActor || strings.ContainsFunc(name, odd) {
		return fmt.Errorf("found the name %q, expected 1 to 256 bytes of printable UTF-8, and not %q, which stands for nobody", cut(name), events.NoActor)
	}
	return nil
}

func checkGrants(grants []Grant) error {
	if len(grants) == 0 {
		return fmt.Errorf("found no grants, expected at least one")
	}
	for i, g := range grants {
		names := make([]string, len(g.Scopes))
		for k, s := range g.Scopes {
			names[k] = string(s)
		}
		if _, err := ParseScopes(names); err != nil {
			return fmt.Errorf("grant %d: %w", i, err)
		}
		if len(g.Sessions) == 0 || slices.Contains(g.Sessions, "") {
			return fmt.Errorf("grant %d: found %q, expected patterns of session ids; * covers all", i, g.Sessions)
		}
	}
	return nil
}

// cut shortens what an error repeats of foreign text.
func cut(s string) string {
	if len(s) > 64 {
		return strings.ToValidUTF8(s[:64], "") + "…"
	}
	return s
}

type callerKey struct{}

// With returns a context that carries the caller.
func With(ctx context.Context, c *Caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// From returns the caller, nil when nobody was asked who they are.
func From(ctx context.Context) *Caller {
	c, _ := ctx.Value(callerKey{}).(*Caller)
	return c
}
