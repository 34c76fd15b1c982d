package client

import (
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Codes that this package gives to errors that no service answered. All others are the
// service's own: seq-conflict, fenced, too-large and so on.
const (
	codeBadRequest     = "bad-request" // the arguments cannot be sent
	codeUnavailable    = "unavailable" // nobody answered, and nothing was stored
	codeOutcomeUnknown = "outcome-unknown"
	codeCanceled       = "canceled" // the context ended, and nothing was stored
	codeBadAnswer      = "bad-answer"
)

// Error is the one error type of this package. Fields that do not apply are zero.
type Error struct {
	Status int    // HTTP status of the last answer; 0 when there was none
	Code   string // what went wrong in one stable word, such as seq-conflict
	Rule   string // the broken surface or lifecycle rule
	Title  string // the code in words
	Detail string // what was found, what was expected, what to do

	Index       *int   // position of the refused event among those that were given
	Session     string // session id
	Seq         *Seq   // seq of the event in question
	ExpectedSeq *Seq   // what the caller said
	ActualSeq   *Seq   // the session's next seq (for reads: the last projected seq)
	Epoch       *Seq   // the session's current writer epoch
	Commit      string // commit id of which the outcome is unknown

	// OutcomeUnknown says that an attempt was sent whose answer never came: it may have been
	// stored, or may be yet. errors.Is(err, ErrOutcomeUnknown) says the same.
	OutcomeUnknown bool
	// IdempotencyKey is the key that an append carried. The same events under the same key
	// are stored once, within the appender's window for keys (10 minutes unless configured).
	IdempotencyKey string
	// RetryAfter is the pause that the service asked for; 0 when it asked for none.
	RetryAfter time.Duration
	// Attempts is how many requests were sent.
	Attempts int
	// Cause is the error below, such as a lost connection or the context's. May be nil.
	Cause error
}

// Error returns code, rule, place and detail in one line.
func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString("palimpsest: " + e.Code)
	if e.Rule != "" {
		b.WriteString(" " + e.Rule)
	}
	if e.Session != "" {
		fmt.Fprintf(&b, " session %q", e.Session)
	}
	if e.Seq != nil {
		fmt.Fprintf(&b, " seq %d", *e.Seq)
	}
	if e.Detail != "" {
		b.WriteString(": " + e.Detail)
	}
	if e.Cause != nil {
		b.WriteString(": " + e.Cause.Error())
	}
	if e.OutcomeUnknown && e.Code != codeOutcomeUnknown {
		b.WriteString(" (an earlier attempt may have been stored)")
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Is reports whether target is one of the Err… variables that e matches. An *Error with just a
// Rule matches the errors of that rule.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	if !ok || t.Detail != "" || t.Code == "" && t.Rule == "" {
		return false
	}
	if t.Code == codeOutcomeUnknown && t.Rule == "" && e.OutcomeUnknown {
		return true
	}
	return (t.Code == "" || t.Code == e.Code) && (t.Rule == "" || t.Rule == e.Rule)
}

// What errors.Is can tell apart.
var (
	// ErrSeqConflict: the session's next seq is another than the expected one. ActualSeq is it.
	ErrSeqConflict error = &Error{Code: "seq-conflict"}
	// ErrFenced: somebody else is the session's writer. Epoch is the current one.
	ErrFenced error = &Error{Code: "fenced"}
	// ErrKeyReused: the idempotency key was used for other events.
	ErrKeyReused error = &Error{Code: "key-reused"}
	// ErrRuleViolation: an event breaks a surface rule; Rule names it, Index the event.
	ErrRuleViolation error = &Error{Code: "rule-violation"}
	// ErrInvariant: an event breaks a lifecycle rule; Rule names it, Index the event.
	ErrInvariant error = &Error{Code: "INVARIANT"}
	// ErrSplitsToolPair: a compaction would separate a tool call from its result, or from one that is
	// still to come.
	ErrSplitsToolPair error = &Error{Code: "splits-tool-pair"}
	// ErrOpenTurn: a turn is open at the seq at which a fork was asked for.
	ErrOpenTurn error = &Error{Code: "open-turn"}
	// ErrTooLarge: an event, an append, a header or the session exceeds its limit.
	ErrTooLarge error = &Error{Code: "too-large"}
	// ErrSessionNotFound: there is no such session.
	ErrSessionNotFound error = &Error{Code: "session-not-found"}
	// ErrSessionExists: the session exists with another header.
	ErrSessionExists error = &Error{Code: "session-exists"}
	// ErrSessionPending: the fork that makes the session is not complete; repeat it.
	ErrSessionPending error = &Error{Code: "session-pending"}
	// ErrSessionErased: the session was erased; its id is not used again.
	ErrSessionErased error = &Error{Code: "session-erased"}
	// ErrNotProjected: the seq that was waited for is not projected yet.
	ErrNotProjected error = &Error{Code: "not-yet-projected"}
	// ErrQuarantined: the session's log holds what cannot be folded; its projection stands still.
	ErrQuarantined error = &Error{Code: "session-quarantined"}
	// ErrLogRewound: the log lost its end in a power cut, and what a watch told of it is gone.
	// Read the surface again, and watch from its seq.
	ErrLogRewound error = &Error{Code: "log-rewound"}
	// ErrOutcomeUnknown: what was asked for may have been stored or not.
	ErrOutcomeUnknown error = &Error{Code: codeOutcomeUnknown}
	// ErrOverloaded: too much is waiting, for longer than the retry budget. Nothing was stored.
	ErrOverloaded error = &Error{Code: "overloaded"}
	// ErrUnavailable: nobody could serve the request within the retry budget. Nothing was stored.
	ErrUnavailable error = &Error{Code: codeUnavailable}
	// ErrBadRequest: the arguments are not valid.
	ErrBadRequest error = &Error{Code: codeBadRequest}
)

// problem is a problem document as the services write it.
type problem struct {
	Title       string `json:"title"`
	Detail      string `json:"detail"`
	Code        string `json:"code"`
	Rule        string `json:"rule"`
	Index       *int   `json:"index"`
	Session     string `json:"session"`
	Seq         *Seq   `json:"seq"`
	ExpectedSeq *Seq   `json:"expectedSeq"`
	ActualSeq   *Seq   `json:"actualSeq"`
	Epoch       *Seq   `json:"epoch"`
	Commit      string `json:"commit"`
}

// refusal reads an answer other than 2xx. Answers without a problem document, as proxies give
// them, get a code after their status, http-502 for one.
func refusal(resp *http.Response, body []byte) *Error {
	e := &Error{Status: resp.StatusCode, RetryAfter: retryAfter(resp.Header, time.Now())}
	var p problem
	media, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if media == "application/problem+json" && json.Unmarshal(body, &p) == nil && p.Code != "" {
		e.Title, e.Detail, e.Code, e.Rule, e.Index, e.Session = p.Title, p.Detail, p.Code, p.Rule, p.Index, p.Session
		e.Seq, e.ExpectedSeq, e.ActualSeq, e.Epoch, e.Commit = p.Seq, p.ExpectedSeq, p.ActualSeq, p.Epoch, p.Commit
		e.OutcomeUnknown = p.Code == codeOutcomeUnknown
		return e
	}
	e.Code = fmt.Sprintf("http-%d", resp.StatusCode)
	e.Detail = fmt.Sprintf("expected a problem document, found %s: %.200q", resp.Header.Get("Content-Type"), body)
	return e
}

// retryAfter reads how long the service asks to wait: seconds, or a date.
func retryAfter(h http.Header, now time.Time) time.Duration {
	v := h.Get("Retry-After")
	if n, err := strconv.Atoi(v); err == nil && n >= 0 && n <= 24*60*60 {
		return time.Duration(n) * time.Second
	}
	if t, err := http.ParseTime(v); err == nil {
		return max(0, t.Sub(now))
	}
	return 0
}

// bad is the error of arguments that cannot be sent.
func bad(session, format string, args ...any) *Error {
	return &Error{Code: codeBadRequest, Session: session, Detail: fmt.Sprintf(format, args...)}
}
