package appender

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/nats-io/nuid"

	"palimpsest/internal/events"
	"palimpsest/internal/provider"
	"palimpsest/internal/snapshot"
	"palimpsest/internal/surface"
)

// AllowSplit is what a caller allows when a compaction may separate a tool call from its result, or from
// one that is still to come.
const AllowSplit = string(events.CodeSplitsToolPair)

// CompactRequest asks for a range of the surface to be replaced by a summary.
type CompactRequest struct {
	Session    string
	Start, End events.Seq // nodes, in surface order, inclusive
	// Summary is what replaces them: content blocks as JSON, or a text.
	Summary json.RawMessage
	// Extra are further members of compaction/summary, such as provider, model or usage.
	Extra map[string]json.RawMessage
	// Allow lists what is not to be refused: AllowSplit.
	Allow    []string
	Key      string // idempotency key, "" for none
	Expected *events.Seq
	Epoch    *events.Seq
	Actor    string
	Trace    string
}

// Compact replaces a range of the surface by a user/message, in one commit with the
// compaction events around it. All four are ordinary events, as any producer may append them.
func (a *Appender) Compact(ctx context.Context, r CompactRequest) (*Receipt, error) {
	content, err := blocks(r.Session, "summary", r.Summary)
	if err != nil {
		return nil, err
	}
	if err := checkSummary(r.Session, content); err != nil {
		return nil, err
	}
	if err := checkAllow(r.Session, r.Allow); err != nil {
		return nil, err
	}
	id := nuid.Next()
	return a.Append(ctx, Request{Session: r.Session, Key: r.Key, Expected: r.Expected, Epoch: r.Epoch, Actor: r.Actor, Trace: r.Trace, begins: "compaction/start", sameAt: 2,
		same: func(e *events.Event, _ events.Format) bool {
			return e.Op == events.Op{Kind: events.OpReplace, Start: r.Start, End: r.End} && bytes.Equal(events.Get(e.Data(), "content"), content)
		},
		derive: func(ctx context.Context, s *actor) ([][]byte, error) { return s.compaction(ctx, r, id, content) }})
}

// checkSummary refuses an array whose elements are no content blocks, or blank texts all of them: the range
// would be lost to the model.
func checkSummary(session string, content json.RawMessage) error {
	bad := func(expected string) error {
		return &events.Error{Code: events.CodeBadRequest, Session: session, Detail: fmt.Sprintf("summary: expected %s, found %s", expected, clip(content))}
	}
	var blocks []struct {
		Type string  `json:"type"`
		Text *string `json:"text"`
	}
	if err := json.Unmarshal(content, &blocks); err != nil {
		return bad(fmt.Sprintf("content blocks (%v)", err))
	}
	blank := true
	for _, b := range blocks {
		switch {
		case b.Type == "":
			return bad("content blocks, each with a type")
		case b.Type == "text" && b.Text == nil:
			return bad("a text in each block of type text")
		case b.Type != "text" || strings.TrimSpace(*b.Text) != "":
			blank = false
		}
	}
	if blank {
		return bad("a text or content blocks with something in it")
	}
	return nil
}

func checkAllow(session string, allow []string) error {
	for _, w := range allow {
		if w != AllowSplit {
			return &events.Error{Code: events.CodeBadRequest, Session: session, Detail: fmt.Sprintf("allow: expected %q, found %q", AllowSplit, clip([]byte(w)))}
		}
	}
	return nil
}

// blocks turns a text or an array of content blocks into an array of blocks.
func blocks(session, name string, raw json.RawMessage) (json.RawMessage, error) {
	bad := func(found string) error {
		return &events.Error{Code: events.CodeBadRequest, Session: session, Detail: fmt.Sprintf("%s: expected a text or an array of content blocks, found %s", name, found)}
	}
	b, err := events.Compact(nil, raw)
	if err != nil {
		return nil, bad(err.Error())
	}
	switch b[0] {
	case '[':
		return b, nil
	case '"':
		return fmt.Appendf(nil, `[{"type":"text","text":%s}]`, b), nil
	}
	return nil, bad(clip(b))
}

// isThere refuses what changes a surface where no session is.
func (s *actor) isThere() error {
	if s.unborn != nil {
		return &events.Error{Code: events.CodeSessionNotFound, Session: s.id, Detail: "there is no such session"}
	}
	return nil
}

// compaction makes the events of a compaction against the present surface.
func (s *actor) compaction(ctx context.Context, r CompactRequest, id string, content json.RawMessage) ([][]byte, error) {
	fail := func(rule events.Rule, format string, args ...any) error {
		e := events.Violation(rule, s.state.Next, fmt.Sprintf(format, args...))
		e.Session = s.id
		return e
	}
	if err := s.isThere(); err != nil {
		return nil, err
	}
	from, ok := s.state.Surface.Position(r.Start)
	if !ok {
		return nil, fail(events.RuleEndpointNotOnSurface, "startSeq %d is not a node of the surface", r.Start)
	}
	to, ok := s.state.Surface.Position(r.End)
	if !ok {
		return nil, fail(events.RuleEndpointNotOnSurface, "endSeq %d is not a node of the surface", r.End)
	}
	if from > to {
		return nil, fail(events.RuleRangeInverted, "startSeq %d stands behind endSeq %d on the surface", r.Start, r.End)
	}
	if !slices.Contains(r.Allow, AllowSplit) {
		if err := s.keepsPairs(ctx, from, to); err != nil {
			return nil, err
		}
	}
	next := s.state.Next
	shadowed := make([]events.Seq, 0, to-from+1)
	for i := from; i <= to; i++ {
		shadowed = append(shadowed, s.state.Surface.Node(i).Seq)
	}
	marker := map[string]any{"compactionId": id}
	if turn, open := s.state.Life.Turn(); open {
		marker["turn"] = turn
	}
	summary := map[string]any{}
	for k, v := range r.Extra {
		summary[k] = v
	}
	maps.Copy(summary, map[string]any{"compactionId": id, "summary": content,
		"shadowedRange": map[string]events.Seq{"start": r.Start, "end": r.End}, "shadowedSeqs": shadowed})
	message := map[string]any{"id": fmt.Sprintf("compaction-%s", id), "role": "user", "content": content,
		"source": map[string]any{"kind": "plugin", "plugin": "compact", "compactionId": id}}
	return encodeEvents(
		map[string]any{"type": "compaction/start", "data": marker},
		map[string]any{"type": "compaction/summary", "data": summary},
		map[string]any{"type": events.TypeUser, "data": message,
			"surfaceOp":       map[string]any{"op": "replace", "startSeq": r.Start, "endSeq": r.End},
			"sourceEventSeqs": append([]events.Seq{next, next + 1}, shadowed...)},
		map[string]any{"type": "compaction/end", "data": marker},
	)
}

// encodeEvents writes events as JSON; raw parts keep their tokens.
func encodeEvents(list ...map[string]any) ([][]byte, error) {
	out := make([][]byte, 0, len(list))
	for _, e := range list {
		b, err := events.Marshal(e)
		if err != nil {
			return nil, err
		}
		out = append(out, b)
	}
	return out, nil
}

// keepsPairs refuses a range that holds one half of a tool call and its result while the other
// half stays on the surface, or is still to come. A call is waited for while its step is open, and
// while no assistant message came behind it; one that was left unanswered for good is in nobody's way.
func (s *actor) keepsPairs(ctx context.Context, from, to int) error {
	view, err := s.view(ctx)
	if err != nil {
		return err
	}
	var list []provider.Message
	var positions []int
	newest := -1 // assistant message in list
	for i := range view.Surface.Len() {
		n := view.Surface.Node(i)
		if n.Kind != events.KindAssistant && n.Kind != events.KindTool {
			continue
		}
		m, err := n.Message(view.Format)
		if err != nil {
			return err
		}
		if m != nil {
			list = append(list, provider.Message{Seq: n.Seq, Kind: n.Kind, JSON: m})
			positions = append(positions, i)
			if n.Kind == events.KindAssistant {
				newest = len(list) - 1
			}
		}
	}
	inside := func(i int) bool { return positions[i] >= from && positions[i] <= to }
	for _, p := range provider.Pairs(view.Format, list) {
		if inside(p.Call) != inside(p.Result) {
			call, result := list[p.Call].Seq, list[p.Result].Seq
			return &events.Error{Code: events.CodeSplitsToolPair, Session: s.id, Seq: &call,
				Detail: fmt.Sprintf("the range would separate the tool call %q (node %d) from its result (node %d); take both in, leave both out, or allow %q", p.CallID, call, result, AllowSplit)}
		}
	}
	waited := map[string]bool{}
	for _, c := range s.state.Life.Snapshot().Calls {
		waited[c.ID] = true
	}
	for _, u := range provider.Unpaired(view.Format, list) {
		if u.Kind == provider.UnpairedCall && u.CallID != "" && inside(u.Index) && (u.Index == newest || waited[u.CallID]) {
			return &events.Error{Code: events.CodeSplitsToolPair, Session: s.id, Seq: &u.Seq,
				Detail: fmt.Sprintf("the tool call %q (node %d) has no result yet, and the range would take the call away from it; wait for it, leave the node out, or allow %q", u.CallID, u.Seq, AllowSplit)}
		}
	}
	return nil
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// view is the session's surface with its messages, as of the actor's state: the stored
// snapshot, and what the log holds behind it.
func (s *actor) view(ctx context.Context) (*snapshot.Snapshot, error) {
	snap, _, err := s.a.store.Full(ctx, s.id)
	if err != nil && !errors.Is(err, &events.Error{Code: events.CodeSnapshotDamaged}) {
		return nil, err
	}
	if snap == nil || snap.Next > s.state.Next || snap.Foldable() != nil {
		snap = snapshot.New(s.id, s.state.Format, surface.KeepBodies)
	}
	enough := errors.New("enough")
	err = s.a.log.ReadToEnd(ctx, s.id, snap.StreamSeq, func(c *events.Commit) error {
		if c.StreamSeq > s.state.StreamSeq {
			return enough
		}
		return snap.Fold(c, s.a.log.Vocabulary(), nil)
	})
	if err != nil && !errors.Is(err, enough) {
		return nil, err
	}
	if !slices.Equal(snap.Surface.Seqs(), s.state.Surface.Seqs()) {
		return nil, &events.Error{Code: events.CodeSnapshotDamaged, Session: s.id, Detail: "the snapshot's surface is not that of the log; run projector verify"}
	}
	return snap, nil
}

// PruneRequest asks for a tool result's content to be replaced.
type PruneRequest struct {
	Session string
	Seq     events.Seq // of the tool/result node
	// Content is what stands there from now on: content blocks as JSON, or a text. Defaults to
	// a text that says how much was pruned.
	Content  json.RawMessage
	Key      string // idempotency key, "" for none
	Expected *events.Seq
	Epoch    *events.Seq
	Actor    string
	Trace    string
}

// Prune replaces the content of a tool result in place and leaves all else of it as it is, so
// that call and result stay together.
func (a *Appender) Prune(ctx context.Context, r PruneRequest) (*Receipt, error) {
	var content json.RawMessage
	if len(r.Content) > 0 {
		var err error
		if content, err = blocks(r.Session, "content", r.Content); err != nil {
			return nil, err
		}
	}
	return a.Append(ctx, Request{Session: r.Session, Key: r.Key, Expected: r.Expected, Epoch: r.Epoch, Actor: r.Actor, Trace: r.Trace, begins: events.TypeTool,
		same: func(e *events.Event, f events.Format) bool {
			return e.Op == events.Op{Kind: events.OpReplace, Start: r.Seq, End: r.Seq} &&
				(content == nil || bytes.Equal(e.RewritableContent(f), content))
		},
		derive: func(ctx context.Context, s *actor) ([][]byte, error) { return s.prune(ctx, r, content) }})
}

func (s *actor) prune(ctx context.Context, r PruneRequest, content json.RawMessage) ([][]byte, error) {
	if err := s.isThere(); err != nil {
		return nil, err
	}
	if _, ok := s.state.Surface.Position(r.Seq); !ok {
		e := events.Violation(events.RuleEndpointNotOnSurface, s.state.Next, fmt.Sprintf("seq %d is not a node of the surface", r.Seq))
		e.Session = s.id
		return nil, e
	}
	target, _, err := s.a.readEvent(ctx, s.id, r.Seq, s.state.Format)
	if err != nil {
		return nil, err
	}
	if target == nil || target.Kind != events.KindTool {
		e := events.Violation(events.RuleRewriteTarget, s.state.Next, fmt.Sprintf("node %d is no tool/result; only those are pruned", r.Seq))
		e.Session = s.id
		return nil, e
	}
	if content == nil {
		content = fmt.Appendf(nil, `[{"type":"text","text":"[pruned: %d bytes]"}]`, len(target.RewritableContent(s.state.Format)))
	}
	return encodeEvents(map[string]any{"type": events.TypeTool, "data": json.RawMessage(target.Rewrite(s.state.Format, content)),
		"surfaceOp": map[string]any{"op": "replace", "startSeq": r.Seq, "endSeq": r.Seq}, "sourceEventSeqs": []events.Seq{r.Seq}})
}
