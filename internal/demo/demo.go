// Package demo owns the session that is bundled with the product: a small session file with one
// of everything that makes a surface interesting. It knows nothing of how session files are
// read or where sessions are stored.
package demo

import _ "embed"

// ID is the id of the bundled session.
const ID = "demo-kiln"

//go:embed demo.jsonl
var session string

// Session returns the bundled session as a session file of format 3: its header, then its
// events in canonical form. Three turns, two tool calls in parallel, a tool result that was
// pruned in place, and a compaction of the first turn.
func Session() []byte { return []byte(session) }
