package client

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"net/url"
	"strconv"
	"time"
)

// Delta is one change of a session's surface.
type Delta struct {
	Seq      Seq    // of the event that made it, which is the new node
	Type     string // of the event
	Replaces bool   // the node takes the place of those in Shadowed; else it comes behind all others
	Shadowed []Seq  // in surface order
}

// Apply makes the change to the seqs of a surface as it was before. The error says that the
// delta does not fit: it belongs to another surface.
func (d *Delta) Apply(surface []Seq) ([]Seq, error) {
	if !d.Replaces {
		return append(surface, d.Seq), nil
	}
	for at := range surface {
		if len(d.Shadowed) == 0 || surface[at] != d.Shadowed[0] {
			continue
		}
		for i, s := range d.Shadowed {
			if at+i >= len(surface) || surface[at+i] != s {
				return nil, fmt.Errorf("delta %d replaces %v, which is not on the surface in this order", d.Seq, d.Shadowed)
			}
		}
		out := append(append([]Seq(nil), surface[:at]...), d.Seq)
		return append(out, surface[at+len(d.Shadowed):]...), nil
	}
	return nil, fmt.Errorf("delta %d replaces %v, which is not on the surface", d.Seq, d.Shadowed)
}

// Watch follows the session's surface: it gives each change behind an event, as it happens, in
// order, without gaps and repeats. from is the seq of the last event that is known, that of a
// Messages or Surface for one; NoSeq begins at the session's start.
//
// A watch that breaks off is resumed by itself, for ever as long as somebody answers within the
// retry budget. It ends when the loop does, and with an error: the context's (code canceled),
// ErrSessionNotFound, ErrUnavailable, ErrLogRewound, or what the session's log holds that
// cannot be folded. A delta may be a moment ahead of the projection: read the messages with
// MinSeq(delta.Seq).
func (s *Session) Watch(ctx context.Context, from Seq) iter.Seq2[Delta, error] {
	return func(yield func(Delta, error) bool) {
		in := &stream{c: s.c, path: s.path("/watch"), session: s.id, query: url.Values{"from": {strconv.FormatInt(int64(from), 10)}}}
		last := from
		err := in.each(ctx, func(e streamEvent) error {
			if e.name != "delta" {
				return nil
			}
			var w struct {
				Seq  Seq    `json:"seq"`
				Op   string `json:"op"`
				Node struct {
					Type string `json:"type"`
				} `json:"node"`
				Shadowed []Seq `json:"shadowed"`
			}
			if err := json.Unmarshal(e.data, &w); err != nil {
				return in.malformed(e, err)
			}
			if w.Seq <= last {
				return nil
			}
			last = w.Seq
			if !yield(Delta{w.Seq, w.Node.Type, w.Op == "replace", w.Shadowed}, nil) {
				return errEnough
			}
			return nil
		})
		if err != nil {
			yield(Delta{}, err)
		}
	}
}

// Change says how a session is now.
type Change struct {
	SessionInfo
	// Left says that the session is not, or no longer, one of those that were asked for.
	Left bool
}

// Feed follows all sessions, or those that the options pick: it gives each whose projection went
// on behind a revision, as it is now, in the order of the revisions. Changes that others
// overtook before they were read are left out; no session's last one ever is. from is the Rev
// of the last change that was seen, 0 to begin with every session. What became of a session's
// quarantine comes without an order of its own, and may come again.
//
// A feed that breaks off is resumed by itself, as a watch is. A Rev that is smaller than an
// earlier one says that the deployment lost its newest snapshots and tells everything anew.
// Takes InState, Since, Agent and Parent.
func (c *Client) Feed(ctx context.Context, from uint64, opts ...ListOption) iter.Seq2[Change, error] {
	return func(yield func(Change, error) bool) {
		q := url.Values{"from": {strconv.FormatUint(from, 10)}}
		for _, opt := range opts {
			opt(q)
		}
		in := &stream{c: c, path: "/v1/feed", query: q}
		err := in.each(ctx, func(e streamEvent) error {
			if e.name != "session" {
				return nil
			}
			var ch Change
			var left struct {
				Left bool `json:"left"`
			}
			err := json.Unmarshal(e.data, &ch.SessionInfo)
			if err == nil {
				err = json.Unmarshal(e.data, &left)
			}
			if err != nil {
				return in.malformed(e, err)
			}
			ch.Left = left.Left
			if !yield(ch, nil) {
				return errEnough
			}
			return nil
		})
		if err != nil {
			yield(Change{}, err)
		}
	}
}

// State is what a session is doing.
type State string

// The states. A session in quarantine is in that state, whatever its turn, unless an operator
// left it so on purpose.
const (
	Open        State = "open" // a turn is open
	Idle        State = "idle" // none is
	Quarantined State = "quarantined"
)

// InState lists the sessions in a state only.
func InState(s State) ListOption { return func(q url.Values) { q.Set("state", string(s)) } }

// Since lists the sessions whose last activity was at or after a time only.
func Since(t time.Time) ListOption {
	return func(q url.Values) { q.Set("since", strconv.FormatInt(t.UnixMilli(), 10)) }
}

// Agent lists the sessions of an agent only: those whose header has it as agentPreset, and those
// in which it is an agent that is not idle.
func Agent(name string) ListOption { return func(q url.Values) { q.Set("agent", name) } }

// SessionInfo is what a deployment tells of a session without folding it.
type SessionInfo struct {
	Session     string
	Header      json.RawMessage // nil in a Feed
	Rev         uint64          // revision of its head; 0 before it has one
	State       State
	Seq         Seq       // of the last projected event, NoSeq for none
	Time        time.Time // of that event, or of the session's creation
	OpenTurn    *Seq      // number of the open turn; nil when none is open
	OpenStep    *Seq
	Nodes       int   // of the surface
	LogBytes    int64 // of all canonical lines
	Writer      *WriterInfo
	Parent      string // "" for none
	AgentPreset string // of the header, "" for none
	Agents      []string
	Quarantine  *Quarantine
}

// UnmarshalJSON reads what the projector writes.
func (s *SessionInfo) UnmarshalJSON(b []byte) error {
	var w struct {
		Session  string          `json:"session"`
		Header   json.RawMessage `json:"header"`
		Rev      uint64          `json:"rev"`
		State    State           `json:"state"`
		Seq      Seq             `json:"seq"`
		Time     int64           `json:"time"`
		OpenTurn *Seq            `json:"openTurn"`
		OpenStep *Seq            `json:"openStep"`
		Nodes    int             `json:"nodes"`
		LogBytes int64           `json:"logBytes"`
		Writer   *struct {
			ID    string `json:"id"`
			Epoch Seq    `json:"epoch"`
		} `json:"writer"`
		Parent     string      `json:"parent"`
		Preset     string      `json:"agentPreset"`
		Agents     []string    `json:"agents"`
		Quarantine *Quarantine `json:"quarantine"`
	}
	if err := json.Unmarshal(b, &w); err != nil {
		return err
	}
	*s = SessionInfo{w.Session, w.Header, w.Rev, w.State, w.Seq, time.UnixMilli(w.Time).UTC(), w.OpenTurn, w.OpenStep, w.Nodes, w.LogBytes, nil,
		w.Parent, w.Preset, w.Agents, w.Quarantine}
	if w.Writer != nil {
		s.Writer = &WriterInfo{w.Writer.ID, w.Writer.Epoch}
	}
	return nil
}
