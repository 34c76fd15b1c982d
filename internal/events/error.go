package events

import (
	"strings"
)

// Code says what went wrong, in one stable word: it is the `code` of a problem document,
// of a NATS service error and of a metric label.
type Code string

// The codes. Which HTTP status each one gets is package api's business.
const (
	CodeRuleViolation   Code = "rule-violation" // a surface rule; Error.Rule names it
	CodeInvariant       Code = "INVARIANT"      // a lifecycle rule; Error.Rule names it
	CodeSeqConflict     Code = "seq-conflict"
	CodeBadRequest      Code = "bad-request"
	CodeMediaType       Code = "unsupported-media-type"
	CodeTooLarge        Code = "too-large"
	CodeSessionID       Code = "session-id-malformed"
	CodeHeaderMalformed Code = "header-malformed"
	CodeSessionNotFound Code = "session-not-found"
	CodeSessionExists   Code = "session-exists"
	CodeSessionPending  Code = "session-pending"
	CodeErased          Code = "session-erased"
	CodeFenced          Code = "fenced" // the caller is not the session's writer (any more); Error.Epoch is the current one
	CodeKeyReused       Code = "key-reused"
	CodeOpenTurn        Code = "open-turn"
	CodeSplitsToolPair  Code = "splits-tool-pair"
	CodeNotProjected    Code = "not-yet-projected"
	CodeQuarantined     Code = "session-quarantined"
	CodeOutcomeUnknown  Code = "outcome-unknown"
	CodeOverloaded      Code = "overloaded"
	CodeUnavailable     Code = "unavailable"
	CodeNotFound        Code = "not-found"
	CodeMethod          Code = "method-not-allowed"
	CodeUnauthenticated Code = "unauthenticated" // who the caller is could not be told
	CodeForbidden       Code = "forbidden"       // the caller may not do that, whether or not the session exists
	CodeRateLimited     Code = "rate-limited"
	CodeCorrupt         Code = "log-corrupt"      // what is stored is not what an appender writes
	CodeSnapshotDamaged Code = "snapshot-damaged" // what the snapshot bucket holds is not what a projector writes
	CodeFoldVersion     Code = "fold-version"     // another version of the fold built the snapshot
	CodeInternal        Code = "internal"
)

// Rule is the name of a surface or lifecycle rule. Names are part of the API.
type Rule string

// The surface rules, in the order in which they are checked.
const (
	RuleSeqNotContiguous       Rule = "seq-not-contiguous"
	RuleJSONMalformed          Rule = "json-malformed"
	RuleEnvelopeMalformed      Rule = "envelope-malformed"
	RuleUnknownType            Rule = "unknown-type"
	RuleSurfaceOpForbidden     Rule = "surface-op-forbidden"
	RuleSourcesForbidden       Rule = "sources-forbidden"
	RuleSurfaceOpRequired      Rule = "surface-op-required"
	RuleSurfaceOpMalformed     Rule = "surface-op-malformed"
	RuleReplaceMalformed       Rule = "replace-malformed"
	RuleEndpointNotEarlier     Rule = "replace-endpoint-not-earlier"
	RuleAssistantSources       Rule = "assistant-sources-forbidden"
	RuleSourcesMalformed       Rule = "sources-malformed"
	RuleSourcesEmpty           Rule = "sources-empty"
	RuleSourcesDuplicate       Rule = "sources-duplicate"
	RuleSourcesNotEarlier      Rule = "sources-not-earlier"
	RuleMessageMalformed       Rule = "message-malformed"
	RuleToolErrorContradiction Rule = "tool-error-contradiction"
	RuleEndpointNotOnSurface   Rule = "replace-endpoint-not-on-surface"
	RuleRangeInverted          Rule = "replace-range-inverted"
	RuleSourcesIncomplete      Rule = "replace-sources-incomplete"
	RuleRewriteSpan            Rule = "tool-result-rewrite-span"
	RuleRewriteTarget          Rule = "tool-result-rewrite-target"
	RuleRewriteChanges         Rule = "tool-result-rewrite-changes"
	RuleSystemHeadProtected    Rule = "system-head-protected"
)

// RuleEventMutated is broken by an event that changed in memory after its commit. It is a
// lifecycle rule: its code is INVARIANT.
const RuleEventMutated Rule = "event-mutated"

// Error is the one error that crosses an edge of this product: Go API, HTTP problem, NATS
// service error and command line print the same fields. Unset fields are nil or empty.
type Error struct {
	Code   Code
	Rule   Rule
	Detail string // what was found, what was expected, what to do

	Index       *int   // position of the refused event within its request
	Session     string // session id
	Seq         *Seq   // seq of the event in question
	ExpectedSeq *Seq   // what the caller said or the rule wanted
	ActualSeq   *Seq   // the session's actual next seq
	Epoch       *Seq   // the session's current writer epoch, where the caller's is refused
	Commit      string // commit id, where an outcome is unknown
	Cause       error  // what lies below, for errors.Is and logs; not shown to callers
}

// Error returns code, rule, place and detail in one line.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(string(e.Code))
	if e.Rule != "" {
		b.WriteString(" " + string(e.Rule))
	}
	if e.Session != "" {
		b.WriteString(" session " + e.Session)
	}
	if e.Seq != nil {
		b.WriteString(" seq " + e.Seq.String())
	}
	b.WriteString(": " + e.Detail)
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Is reports whether target is an *Error of the same code (and the same rule, when target
// names one), so that errors.Is works with the sentinels below.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code && (t.Rule == "" || t.Rule == e.Rule) && t.Detail == ""
}

// Sentinels for errors.Is.
var (
	ErrSeqConflict     = &Error{Code: CodeSeqConflict}
	ErrSessionNotFound = &Error{Code: CodeSessionNotFound}
	ErrErased          = &Error{Code: CodeErased}
	ErrTooLarge        = &Error{Code: CodeTooLarge}
	ErrFenced          = &Error{Code: CodeFenced}
	ErrKeyReused       = &Error{Code: CodeKeyReused}
	ErrOutcomeUnknown  = &Error{Code: CodeOutcomeUnknown}
	ErrNotProjected    = &Error{Code: CodeNotProjected}
	ErrQuarantined     = &Error{Code: CodeQuarantined}
)

// Violation is an error of a surface rule for the event that should get seq.
// A seq that is not the next one is a conflict as much as a broken rule.
func Violation(rule Rule, seq Seq, detail string) *Error {
	e := &Error{Code: CodeRuleViolation, Rule: rule, Detail: detail}
	if seq >= 0 {
		e.Seq = &seq
	}
	if rule == RuleSeqNotContiguous {
		e.Code = CodeSeqConflict
	}
	return e
}
