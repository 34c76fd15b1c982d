package projection

import (
	"palimpsest/internal/events"
	"palimpsest/internal/surface"
)

// Delta is one change of a session's surface.
type Delta struct {
	Seq  events.Seq `json:"seq"`
	Op   string     `json:"op"` // append or replace
	Node DeltaNode  `json:"node"`
	// Shadowed are the nodes that a replacement took off, in surface order. The new node takes
	// their place.
	Shadowed []events.Seq `json:"shadowed,omitempty"`
}

// DeltaNode is the node that a delta adds. Its message is not in it: it may be larger than
// what a subscriber takes.
type DeltaNode struct {
	Seq  events.Seq `json:"seq"`
	Type string     `json:"type"`
}

// deltaOf is what an applied change did to the surface; ok is false when it did nothing.
func deltaOf(c *surface.Change) (d Delta, ok bool) {
	if c.Node.Kind == events.KindLog {
		return d, false
	}
	d = Delta{Seq: c.Node.Seq, Op: "append", Node: DeltaNode{c.Node.Seq, c.Node.Kind.Type()}}
	if c.Replace {
		d.Op = "replace"
		for i := range c.Shadowed() {
			d.Shadowed = append(d.Shadowed, c.Shadowed()[i].Seq)
		}
	}
	return d, true
}

// deltaMessage is what a partition's owner publishes when it has flushed a session.
type deltaMessage struct {
	Session string     `json:"session"`
	From    events.Seq `json:"from"` // seq of the head before
	To      events.Seq `json:"to"`   // seq of the head now
	// StreamSeq is the stream sequence of the head's last commit.
	StreamSeq uint64 `json:"streamSeq"`
	// Digest is that of the event at To. A watcher knows by it whether the log is still the one
	// that it followed.
	Digest string `json:"digest"`
	// Deltas are all that came between; nil when they are too many, and must be read from the log.
	Deltas []Delta `json:"deltas"`
}

const (
	// deltaPrefix is in front of the session's token in the subject of its deltas.
	deltaPrefix = "palimpsest.delta."
	// maxDeltas is how many deltas one message carries.
	maxDeltas = 512
	// maxDeltaSeqs is how many shadowed seqs the deltas of one message carry.
	maxDeltaSeqs = 4096
)

// DeltaSubject is the core NATS subject of a session's deltas.
func DeltaSubject(session string) string { return deltaPrefix + events.Token(session) }
