package session

import "palimpsest/internal/events"

// Summary is what both programs tell of a session's state.
type Summary struct {
	NextSeq           events.Seq  `json:"nextSeq"` // the seq that the next event gets
	Time              int64       `json:"time"`    // Unix ms, of the last event
	Digest            string      `json:"digest"`  // of the last event
	Chain             string      `json:"chain"`   // of the last commit
	OpenTurn          *events.Seq `json:"openTurn"`
	OpenStep          *events.Seq `json:"openStep"`
	PendingCalls      []string    `json:"pendingCalls"` // recorded calls of the open step without a result
	Nodes             int         `json:"nodes"`
	LogBytes          int64       `json:"logBytes"` // of all canonical lines
	ReplaceGeneration int64       `json:"replaceGeneration"`
	Writer            *Writer     `json:"writer,omitempty"`
}

// Summary returns the state in short.
func (s *State) Summary() Summary {
	life := s.Life.Snapshot()
	return Summary{
		NextSeq: s.Next, Time: s.Time, Digest: s.Digest.String(), Chain: s.Chain.String(),
		OpenTurn: life.Turn, OpenStep: life.Step, PendingCalls: s.Life.PendingCalls(),
		Nodes: s.Surface.Len(), LogBytes: s.LogBytes, ReplaceGeneration: s.Surface.Generation(), Writer: s.Writer,
	}
}
