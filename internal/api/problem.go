// Package api owns HTTP: routes, bodies, limits and problem documents of both programs. What is
// asked for is done by packages appender, projection and audit.
package api

import (
	"errors"
	"net/http"
	"strconv"

	"palimpsest/internal/events"
)

// Problem is an error as an application/problem+json document (RFC 9457).
type Problem struct {
	Type        string      `json:"type"` // urn:palimpsest:problem:<code>
	Title       string      `json:"title"`
	Status      int         `json:"status"`
	Detail      string      `json:"detail"`
	Code        events.Code `json:"code"`
	Rule        events.Rule `json:"rule,omitempty"`
	Index       *int        `json:"index,omitempty"` // of the refused event in the request
	Session     string      `json:"session,omitempty"`
	Seq         *events.Seq `json:"seq,omitempty"`
	ExpectedSeq *events.Seq `json:"expectedSeq,omitempty"`
	ActualSeq   *events.Seq `json:"actualSeq,omitempty"`
	Epoch       *events.Seq `json:"epoch,omitempty"` // the session's current writer epoch
	Commit      string      `json:"commit,omitempty"`
}

// kinds gives each code its status and title.
var kinds = map[events.Code]struct {
	status int
	title  string
}{
	events.CodeRuleViolation:   {http.StatusUnprocessableEntity, "A surface rule is broken"},
	events.CodeInvariant:       {http.StatusUnprocessableEntity, "A lifecycle rule is broken"},
	events.CodeSeqConflict:     {http.StatusConflict, "The session went on"},
	events.CodeBadRequest:      {http.StatusBadRequest, "The request is not readable"},
	events.CodeMediaType:       {http.StatusUnsupportedMediaType, "The content type is not supported"},
	events.CodeTooLarge:        {http.StatusRequestEntityTooLarge, "Too large"},
	events.CodeSessionID:       {http.StatusBadRequest, "The session id is malformed"},
	events.CodeHeaderMalformed: {http.StatusUnprocessableEntity, "The session header is malformed"},
	events.CodeSessionNotFound: {http.StatusNotFound, "No such session"},
	events.CodeSessionExists:   {http.StatusConflict, "The session exists with another header"},
	events.CodeSessionPending:  {http.StatusConflict, "The session is not complete yet"},
	events.CodeErased:          {http.StatusGone, "The session was erased"},
	events.CodeFenced:          {http.StatusConflict, "Another writer has the session"},
	events.CodeKeyReused:       {http.StatusUnprocessableEntity, "The idempotency key was used for other events"},
	events.CodeOpenTurn:        {http.StatusConflict, "A turn is open there"},
	events.CodeSplitsToolPair:  {http.StatusUnprocessableEntity, "A tool call would be separated from its result"},
	events.CodeNotProjected:    {http.StatusGatewayTimeout, "Not yet projected"},
	events.CodeQuarantined:     {http.StatusConflict, "The session is in quarantine"},
	events.CodeOutcomeUnknown:  {http.StatusServiceUnavailable, "The outcome is unknown"},
	events.CodeOverloaded:      {http.StatusTooManyRequests, "Too many requests"},
	events.CodeUnavailable:     {http.StatusServiceUnavailable, "JetStream is away"},
	events.CodeNotFound:        {http.StatusNotFound, "Not found"},
	events.CodeMethod:          {http.StatusMethodNotAllowed, "The method is not allowed"},
	events.CodeUnauthenticated: {http.StatusUnauthorized, "Who are you?"},
	events.CodeForbidden:       {http.StatusForbidden, "Not allowed"},
	events.CodeRateLimited:     {http.StatusTooManyRequests, "Too many requests of one caller"},
	events.CodeCorrupt:         {http.StatusInternalServerError, "The log is corrupt"},
	events.CodeFoldVersion:     {http.StatusServiceUnavailable, "Another version of the fold built the snapshots"},
	events.CodeSnapshotDamaged: {http.StatusServiceUnavailable, "The snapshot is damaged"},
	events.CodeInternal:        {http.StatusInternalServerError, "Internal error"},
}

// ProblemOf turns any error into a problem. Errors that are no *events.Error are internal.
func ProblemOf(err error) Problem {
	var e *events.Error
	if !errors.As(err, &e) {
		e = &events.Error{Code: events.CodeInternal, Detail: err.Error()}
	}
	k, ok := kinds[e.Code]
	if !ok {
		k = kinds[events.CodeInternal]
	}
	p := Problem{
		Type: "urn:palimpsest:problem:" + string(e.Code), Title: k.title, Status: k.status, Detail: e.Detail,
		Code: e.Code, Rule: e.Rule, Index: e.Index, Session: e.Session, Seq: e.Seq,
		ExpectedSeq: e.ExpectedSeq, ActualSeq: e.ActualSeq, Epoch: e.Epoch, Commit: e.Commit,
	}
	if e.Rule == events.RuleJSONMalformed {
		p.Status, p.Title = http.StatusBadRequest, "The JSON is not readable"
	}
	return p
}

// retryAfter is how many seconds a client should wait before it tries again.
const retryAfter = 1

// retriable reports whether the same request may succeed after a while.
func (p Problem) retriable() bool {
	return p.Status == http.StatusTooManyRequests || p.Status == http.StatusServiceUnavailable
}

func writeProblem(w http.ResponseWriter, err error) {
	p := ProblemOf(err)
	w.Header().Set("Content-Type", "application/problem+json")
	w.Header().Set("X-Content-Type-Options", "nosniff") // also of what no router saw
	if p.retriable() {
		w.Header().Set("Retry-After", strconv.Itoa(retryAfter))
	}
	w.WriteHeader(p.Status)
	if b, err := events.Marshal(p); err == nil {
		_, _ = w.Write(append(b, '\n')) // the client may be gone
	}
}

func badRequest(detail string) error {
	return &events.Error{Code: events.CodeBadRequest, Detail: detail}
}
