// Package lifecycle owns the rules of turns, steps, tool calls and agents, and the closers that
// repair a log which a crash cut off. It is pure: no I/O, no clock. It does not know of the
// surface, and whether its rules are enforced is its caller's choice.
package lifecycle

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"

	"palimpsest/internal/events"
)

// The lifecycle rules. Names are part of the API.
const (
	RuleTurnOverlap         events.Rule = "turn-overlap"
	RuleTurnMismatch        events.Rule = "turn-mismatch"
	RuleTurnEndOpenStep     events.Rule = "turn-end-open-step"
	RuleStepOutsideTurn     events.Rule = "step-outside-turn"
	RuleStepOverlap         events.Rule = "step-overlap"
	RuleStepMismatch        events.Rule = "step-mismatch"
	RuleOutsideStep         events.Rule = "outside-step"
	RuleResultWithoutCall   events.Rule = "tool-result-without-call"
	RuleRewriteOutsideTurn  events.Rule = "rewrite-outside-turn"
	RuleAgentNoop           events.Rule = "agent-status-noop"
	RuleAgentAfterDisposed  events.Rule = "agent-status-after-disposed"
	codeNotStarted                      = "TOOL_NOT_STARTED"
	codeOutcomeUnknown                  = "TOOL_OUTCOME_UNKNOWN"
	statusIdle                          = "idle"
	statusRunning                       = "running"
	statusDisposed                      = "disposed"
	maxUnread, maxUnreadLen             = 64, 256 << 10
)

// Mode says what is done about a broken lifecycle rule.
type Mode string

// The modes.
const (
	Off     Mode = "off"     // not checked
	Observe Mode = "observe" // checked, reported, let through
	Enforce Mode = "enforce" // refused
)

// ParseMode reads a mode as a flag gives it.
func ParseMode(s string) (Mode, error) {
	switch m := Mode(s); m {
	case Off, Observe, Enforce:
		return m, nil
	}
	return "", fmt.Errorf("invariants: expected off, observe or enforce, found %q", s)
}

// Call is a tool call of the open step.
type Call struct {
	ID string `json:"id"`
	// Seq is where the tool/call was recorded; nil while only an assistant message names it.
	Seq *events.Seq `json:"seq,omitempty"`
	// Unasked says that a tool/call was recorded that no assistant message of the step names.
	// Repair does not answer it, since its result would have no call in the messages.
	Unasked bool `json:"unasked,omitempty"`

	answered bool
}

// Snapshot is the lifecycle part of a head.
type Snapshot struct {
	Turn     *events.Seq       `json:"turn"` // number of the open turn, null when none is
	Step     *events.Seq       `json:"step"`
	Calls    []Call            `json:"calls"`              // unanswered ones, in the order of the assistant's blocks
	Answered []Call            `json:"answered,omitempty"` // calls of the open step that have a result
	Agents   map[string]string `json:"agents"`             // agents that are not idle, with their status
}

// State is the lifecycle of one session. It is not safe for concurrent use.
type State struct {
	turn, step events.Seq // numbers of the open ones; NoSeq when none is open
	calls      []Call
	byID       map[string]int // position in calls
	agents     map[string]string
	shared     bool // with a copy: calls, byID and agents must be cloned before they change

	// unread holds events of the open step whose data nobody needed yet: most steps end
	// before anybody asks, and then the data is never scanned.
	unread    []held
	unreadLen int
	freeze    bool
	mutated   *events.Error // set for good once a held event is found changed
}

// held is an event in memory, with the hash that it had when it was committed.
type held struct {
	*events.Event
	sum [sha256.Size]byte
}

// New returns the lifecycle of an empty session.
func New() *State {
	return &State{turn: events.NoSeq, step: events.NoSeq}
}

// Restore is the inverse of Snapshot.
func Restore(sn Snapshot) *State {
	s := New()
	if sn.Turn != nil {
		s.turn = *sn.Turn
	}
	if sn.Step != nil {
		s.step = *sn.Step
	}
	for _, c := range sn.Calls {
		s.addCall(c)
	}
	for _, c := range sn.Answered {
		c.answered = true
		s.addCall(c)
	}
	s.agents = maps.Clone(sn.Agents)
	return s
}

// Clone returns a copy that changes on its own. It is cheap: the copies share what they hold
// until one of them changes it.
func (s *State) Clone() *State {
	if !s.shared { // else it is not written: others may be copying it
		s.shared = true
	}
	c := *s
	c.unread = slices.Clip(s.unread)
	return &c
}

// own makes sure that no copy sees what is about to change.
func (s *State) own() {
	if s.shared {
		s.calls, s.byID, s.agents = slices.Clone(s.calls), maps.Clone(s.byID), maps.Clone(s.agents)
		s.shared = false
	}
}

// Freeze makes the state check the events that it holds against what was committed before it
// reads them. A changed one fails every Check from then on.
func (s *State) Freeze() { s.freeze = true }

// Mutated returns the error of an event that was changed in memory, nil when there is none.
func (s *State) Mutated() *events.Error { return s.mutated }

// Turn returns the number of the open turn.
func (s *State) Turn() (events.Seq, bool) { return s.turn, s.turn != events.NoSeq }

// Step returns the number of the open step.
func (s *State) Step() (events.Seq, bool) { return s.step, s.step != events.NoSeq }

// Snapshot returns the state as it stands in a head.
func (s *State) Snapshot() Snapshot {
	s.readOpenStep()
	sn := Snapshot{Calls: []Call{}, Agents: map[string]string{}}
	if s.turn != events.NoSeq {
		t := s.turn
		sn.Turn = &t
	}
	if s.step != events.NoSeq {
		t := s.step
		sn.Step = &t
	}
	for _, c := range s.calls {
		if c.answered {
			sn.Answered = append(sn.Answered, c)
		} else {
			sn.Calls = append(sn.Calls, c)
		}
	}
	maps.Copy(sn.Agents, s.agents)
	return sn
}

// PendingCalls returns the ids of recorded calls without a result, in order.
func (s *State) PendingCalls() []string {
	s.readOpenStep()
	out := []string{}
	for _, c := range s.calls {
		if c.Seq != nil && !c.answered {
			out = append(out, c.ID)
		}
	}
	return out
}

// Settle reads the events that the state still holds, for whoever has many states in memory.
func (s *State) Settle() { s.readOpenStep() }

// Bytes estimates the memory that the state holds.
func (s *State) Bytes() int { return 256 + 96*len(s.calls) + 64*len(s.agents) + s.unreadLen }

// Check says which lifecycle rule an event would break, nil when none. It changes nothing
// that anybody can see.
func (s *State) Check(e *events.Event) *events.Error {
	if s.mutated != nil {
		return s.mutated
	}
	switch e.Type {
	case "turn/start", "turn/end", "step/start", "step/end", "assistant/chunk", "assistant/attempt",
		events.TypeAssistant, "tool/call", events.TypeSystem, events.TypeTool, "agent/status":
	default:
		return nil
	}
	f := e.Fields()
	fail := func(r events.Rule, format string, args ...any) *events.Error {
		seq := e.Seq
		return &events.Error{Code: events.CodeInvariant, Rule: r, Seq: &seq, Detail: e.Type + ": " + fmt.Sprintf(format, args...)}
	}
	inTurn := s.turn != events.NoSeq && f.Turn == s.turn
	inStep := inTurn && s.step != events.NoSeq && f.Step == s.step
	switch e.Type {
	case "turn/start":
		if s.turn != events.NoSeq {
			return fail(RuleTurnOverlap, "turn %s starts while turn %d is open", number(f.Turn), s.turn)
		}
		if f.Turn == events.NoSeq {
			return fail(RuleTurnMismatch, "data.turn must be the number of the turn that starts")
		}
	case "turn/end":
		if !inTurn {
			return fail(RuleTurnMismatch, "names turn %s, but %s", number(f.Turn), s.open())
		}
		if s.step != events.NoSeq {
			return fail(RuleTurnEndOpenStep, "step %d of turn %d is still open", s.step, s.turn)
		}
	case "step/start":
		if !inTurn {
			return fail(RuleStepOutsideTurn, "names turn %s, but %s", number(f.Turn), s.open())
		}
		if s.step != events.NoSeq {
			return fail(RuleStepOverlap, "step %s starts while step %d is open", number(f.Step), s.step)
		}
		if f.Step == events.NoSeq {
			return fail(RuleStepMismatch, "data.step must be the number of the step that starts")
		}
	case "step/end":
		if !inStep {
			return fail(RuleStepMismatch, "names turn %s step %s, but %s", number(f.Turn), number(f.Step), s.open())
		}
	case "agent/status":
		return s.checkAgent(f, fail)
	default:
		if e.Kind == events.KindTool && e.Op.Kind == events.OpReplace {
			if s.turn == events.NoSeq {
				return fail(RuleRewriteOutsideTurn, "a tool result is rewritten while no turn is open")
			}
			return nil
		}
		if !inStep {
			return fail(RuleOutsideStep, "names turn %s step %s, but %s", number(f.Turn), number(f.Step), s.open())
		}
		if e.Kind == events.KindTool && f.ErrorCode != codeNotStarted {
			s.readOpenStep()
			if s.mutated != nil {
				return s.mutated
			}
			if i, ok := s.byID[f.CallID]; !ok || s.calls[i].Seq == nil {
				return fail(RuleResultWithoutCall, "no tool/call with callId %q in turn %d step %d", f.CallID, s.turn, s.step)
			}
		}
	}
	return nil
}

func (s *State) checkAgent(f events.Fields, fail func(events.Rule, string, ...any) *events.Error) *events.Error {
	was := s.agentStatus(f.Agent)
	switch {
	case f.Agent == "" || f.Status != statusIdle && f.Status != statusRunning && f.Status != statusDisposed:
		return nil // no transition of an agent: no rule speaks of it
	case was == statusDisposed:
		return fail(RuleAgentAfterDisposed, "agent %q was disposed and cannot become %s", f.Agent, f.Status)
	case was == f.Status:
		return fail(RuleAgentNoop, "agent %q is %s already", f.Agent, was)
	}
	return nil
}

func (s *State) agentStatus(agent string) string {
	if st, ok := s.agents[agent]; ok {
		return st
	}
	return statusIdle
}

// open says in words what is open.
func (s *State) open() string {
	switch {
	case s.turn == events.NoSeq:
		return "no turn is open"
	case s.step == events.NoSeq:
		return fmt.Sprintf("turn %d is open without a step", s.turn)
	}
	return fmt.Sprintf("turn %d step %d is open", s.turn, s.step)
}

func number(n events.Seq) string {
	if n == events.NoSeq {
		return "(none)"
	}
	return n.String()
}

// Apply moves the state on. In a log that breaks rules, starts win, ends count only when they
// name what is open, and a step outside its turn moves nothing.
func (s *State) Apply(e *events.Event) {
	switch e.Type {
	case "turn/start":
		if f := e.Fields(); f.Turn != events.NoSeq {
			s.turn = f.Turn
			s.closeStep()
		}
	case "turn/end":
		if f := e.Fields(); s.turn != events.NoSeq && f.Turn == s.turn {
			s.turn = events.NoSeq
			s.closeStep()
		}
	case "step/start":
		if f := e.Fields(); s.turn != events.NoSeq && f.Turn == s.turn && f.Step != events.NoSeq {
			s.closeStep()
			s.step = f.Step
		}
	case "step/end":
		if f := e.Fields(); s.step != events.NoSeq && f.Turn == s.turn && f.Step == s.step {
			s.closeStep()
		}
	case "agent/status":
		f := e.Fields()
		s.own()
		switch {
		case f.Agent == "":
		case f.Status == statusIdle:
			delete(s.agents, f.Agent)
		case f.Status == statusRunning || f.Status == statusDisposed:
			if s.agents == nil {
				s.agents = map[string]string{}
			}
			s.agents[f.Agent] = f.Status
		}
	case "session/end-seed":
		if e.Fields().Inherited {
			s.agents = nil
		}
	case events.TypeAssistant, "tool/call", events.TypeTool:
		if s.step == events.NoSeq || e.Op.Kind == events.OpReplace && e.Kind == events.KindTool {
			return
		}
		h := held{Event: e}
		if s.freeze {
			h.sum = sha256.Sum256(e.Line)
		}
		s.unread = append(s.unread, h)
		if s.unreadLen += len(e.Line); len(s.unread) >= maxUnread || s.unreadLen >= maxUnreadLen {
			s.readOpenStep()
		}
	}
}

func (s *State) closeStep() {
	s.step = events.NoSeq
	s.calls, s.byID, s.unread, s.unreadLen = nil, nil, nil, 0
}

// readOpenStep takes in the calls and results of the open step that are still unread.
func (s *State) readOpenStep() {
	if len(s.unread) == 0 {
		return
	}
	s.own()
	for _, e := range s.unread {
		if s.freeze && e.sum != sha256.Sum256(e.Line) {
			seq := e.Seq
			s.mutated = &events.Error{Code: events.CodeInvariant, Rule: events.RuleEventMutated, Seq: &seq,
				Detail: "the event in memory differs from the one that was committed; it is not folded"}
		}
		f := e.Fields()
		switch {
		case e.Kind == events.KindTool:
			s.answer(f.CallID)
		case f.Turn != s.turn || f.Step != s.step:
		case e.Type == "tool/call" && f.CallID != "":
			seq := e.Seq
			if i, ok := s.byID[f.CallID]; !ok {
				s.addCall(Call{ID: f.CallID, Seq: &seq, Unasked: true})
			} else if s.calls[i].Seq == nil {
				s.calls[i].Seq = &seq
			}
		case e.Kind == events.KindAssistant:
			for _, id := range e.ToolCalls() {
				s.askCall(id)
			}
		}
	}
	s.unread, s.unreadLen = nil, 0
}

// askCall notes a tool-call block. A call that was recorded before it moves behind the
// blocks so far, since the order is that of the blocks.
func (s *State) askCall(id string) {
	i, ok := s.byID[id]
	if !ok {
		s.addCall(Call{ID: id})
		return
	}
	if c := s.calls[i]; c.Unasked {
		c.Unasked = false
		s.calls = append(slices.Delete(s.calls, i, i+1), c)
		for k := i; k < len(s.calls); k++ {
			s.byID[s.calls[k].ID] = k
		}
	}
}

func (s *State) addCall(c Call) {
	if s.byID == nil {
		s.byID = map[string]int{}
	}
	s.byID[c.ID] = len(s.calls)
	s.calls = append(s.calls, c)
}

// answer notes a result. Only calls of the open step matter.
func (s *State) answer(id string) {
	if i, ok := s.byID[id]; ok {
		s.calls[i].answered = true
	}
}
