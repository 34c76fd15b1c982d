package audit

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
)

// Tokens are the counters of an assistant's usage, by the names that the events give them, such
// as inputTokens, outputTokens, cacheReadTokens. Cached and reasoning tokens may be parts of
// the others: that is the provider's to say.
type Tokens map[string]int64

func (t *Tokens) add(o Tokens) {
	for name, n := range o {
		if *t == nil {
			*t = Tokens{}
		}
		(*t)[name] += n
	}
}

// Usage is what assistant messages say about the tokens that they took.
type Usage struct {
	Messages  int64             `json:"messages"`  // assistant messages
	Unmetered int64             `json:"unmetered"` // those among them without a usage
	Tokens    Tokens            `json:"tokens"`
	Models    map[string]Tokens `json:"models"` // by provider/model
}

func (u *Usage) add(o *Usage) {
	u.Messages += o.Messages
	u.Unmetered += o.Unmetered
	u.Tokens.add(o.Tokens)
	for model, t := range o.Models {
		if u.Models == nil {
			u.Models = map[string]Tokens{}
		}
		m := u.Models[model]
		m.add(t)
		u.Models[model] = m
	}
}

// SessionUsage is the usage of one session.
type SessionUsage struct {
	Session string     `json:"session"`
	LastSeq events.Seq `json:"lastSeq"`
	Usage              // of its own messages
	// Inherited is what the part that was copied from its parent says; it is the parent's.
	Inherited *Usage `json:"inherited,omitempty"`
}

// FleetUsage is the usage of all sessions.
type FleetUsage struct {
	Usage
	Sessions []*SessionUsage `json:"sessions"` // by id
}

// usageCounter counts one session's usage.
type usageCounter struct {
	u   *SessionUsage
	own Usage // since the last end of an inherited part

	// Where the log has a hole: the commit behind it, and the seq that should have come.
	behind *events.Commit
	next   events.Seq
}

func newUsageCounter(id string) *usageCounter {
	return &usageCounter{u: &SessionUsage{Session: id, LastSeq: events.NoSeq}}
}

// take counts a commit. Only the lines of assistant messages and of ends of inherited parts
// are read.
func (n *usageCounter) take(c *events.Commit, v *events.Vocabulary) error {
	for line := range c.Lines() {
		isSeed := bytes.HasPrefix(line, []byte(`{"type":"`+typeEndSeed+`"`))
		if !isSeed && !bytes.HasPrefix(line, []byte(`{"type":"`+events.TypeAssistant+`"`)) {
			continue
		}
		e := new(events.Event)
		if err := events.ParseCanonical(e, line, c.Format, v); err != nil {
			return err
		}
		switch {
		case isSeed && e.Kind == events.KindLog && e.Fields().Inherited: // all before it is the parent's
			if n.u.Inherited == nil {
				n.u.Inherited = &Usage{}
			}
			n.u.Inherited.add(&n.own)
			n.own = Usage{}
		case e.Kind == events.KindAssistant:
			n.own.Messages++
			var t Tokens
			events.EachMember(events.Get(e.Data(), "usage"), func(k, val []byte) bool {
				if count, ok := events.ParseSeq(string(val)); ok {
					t.add(Tokens{string(k): int64(count)})
				}
				return true
			})
			if t == nil {
				n.own.Unmetered++
				continue
			}
			source := events.Get(events.Get(e.Data(), "message"), "source")
			provider, _ := events.Text(events.Get(source, "provider"))
			model, _ := events.Text(events.Get(source, "model"))
			n.own.add(&Usage{Tokens: t, Models: map[string]Tokens{provider + "/" + model: t}})
		}
	}
	n.u.LastSeq = c.Last
	return nil
}

func (n *usageCounter) end() *SessionUsage {
	n.u.Usage = n.own
	if n.u.Tokens == nil {
		n.u.Tokens = Tokens{}
	}
	if n.u.Models == nil {
		n.u.Models = map[string]Tokens{}
	}
	return n.u
}

// Usage counts the tokens of one session.
func (a *Auditor) Usage(ctx context.Context, id string) (*SessionUsage, error) {
	if err := events.CheckSessionID(id); err != nil {
		return nil, err
	}
	if _, err := a.headers.Get(ctx, id); err != nil {
		return nil, err
	}
	n := newUsageCounter(id)
	err := a.log.ReadOn(ctx, id, 0, 0, func(c *events.Commit) error { return n.take(c, a.log.Vocabulary()) })
	if err != nil {
		return nil, err
	}
	return n.end(), nil
}

// Fleet counts the tokens of all sessions. What a fork inherited is counted where it was
// spent, in the session that it was forked from, and nowhere else.
func (a *Auditor) Fleet(ctx context.Context) (*FleetUsage, error) {
	logged, _, err := a.log.Subjects(ctx)
	if err != nil {
		return nil, err
	}
	info, err := a.log.Info(ctx)
	if err != nil {
		return nil, err
	}
	busy := map[int]bool{}
	for id := range logged {
		busy[a.log.Partition(id)] = true
	}
	var parts []int
	for p := range busy {
		parts = append(parts, p)
	}
	const atATime = 4
	var mu sync.Mutex
	out := &FleetUsage{Usage: Usage{Tokens: Tokens{}, Models: map[string]Tokens{}}, Sessions: []*SessionUsage{}}
	err = parallel(ctx, atATime, slices.Values(parts), func(p int) error {
		ns := map[string]*usageCounter{}
		complete, err := a.partitions(ctx, []int{p}, info.State.LastSeq, pullOf(info, atATime), func(d journal.Delivery) error {
			if d.Err != nil && errors.Is(d.Err, events.ErrErased) {
				delete(ns, d.Session)
				return nil
			}
			if d.Err != nil {
				return d.Err
			}
			n := ns[d.Session]
			if n == nil {
				n = newUsageCounter(d.Session)
				ns[d.Session] = n
			}
			if next := n.u.LastSeq + 1; d.Commit.First != next && n.behind == nil {
				n.behind, n.next = d.Commit, next
			}
			return n.take(d.Commit, a.log.Vocabulary())
		})
		if err == nil && !complete {
			err = &events.Error{Code: events.CodeUnavailable, Detail: "the log changed while it was read; try again"}
		}
		if err != nil {
			return err
		}
		for id, n := range ns {
			if n.behind == nil {
				continue
			}
			err := a.log.Hole(ctx, n.behind, n.next)
			if !errors.Is(err, events.ErrErased) {
				return err
			}
			delete(ns, id)
		}
		mu.Lock()
		defer mu.Unlock()
		for _, n := range ns {
			u := n.end()
			out.Sessions = append(out.Sessions, u)
			out.add(&u.Usage)
		}
		return nil
	})
	slices.SortFunc(out.Sessions, func(x, y *SessionUsage) int { return strings.Compare(x.Session, y.Session) })
	return out, err
}
