package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/platform"
)

// printJSON writes a value as one line of JSON.
func printJSON(v any) error {
	enc := json.NewEncoder(os.Stdout)
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// stepLine shows an event of a session's history in one line.
func stepLine(s *audit.Step) string {
	op := s.Op
	if n := len(s.Replaced); n > 0 {
		op = fmt.Sprintf("replace %d..%d", s.Replaced[0], s.Replaced[n-1])
		if n > 1 {
			op += fmt.Sprintf(" (%d nodes)", n)
		}
	}
	return strings.TrimRight(fmt.Sprintf("%d  %s  %s  %s  %s", s.Seq, time.UnixMilli(s.Time).UTC().Format(time.RFC3339), s.Type, op, s.Text), " ")
}

type explainCmd struct {
	storeFlags
	Session string `arg:"" help:"Session id."`
	Seq     int64  `arg:"" help:"Seq of the event."`
	Limit   int    `help:"At most so many events in the tree." default:"10000"`
	JSON    bool   `name:"json" help:"Print the explanation as JSON."`
}

func (c *explainCmd) Run(ctx context.Context) error {
	if err := platform.AboveZero(map[string]int64{"limit": int64(c.Limit)}); err != nil {
		return err
	}
	if c.Seq < 0 {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("explain: expected a seq, found %d", c.Seq)}
	}
	return c.with(ctx, func(s *store) error {
		x, err := s.auditor().Explain(ctx, c.Session, events.Seq(c.Seq), c.Limit)
		if err != nil {
			return err
		}
		if c.JSON {
			return printJSON(x)
		}
		switch {
		case x.OnSurface:
			fmt.Printf("seq %d is node %d of the surface as of seq %d\n", x.Seq, *x.Position, x.LastSeq)
		case len(x.Over) > 0:
			fmt.Printf("seq %d is not on the surface as of seq %d; above it:\n", x.Seq, x.LastSeq)
		default:
			fmt.Printf("seq %d never was on the surface\n", x.Seq)
		}
		for i := range x.Over {
			fmt.Printf("  shadowed by %s\n", stepLine(&x.Over[i]))
		}
		for i := range x.From {
			o := &x.From[i]
			mark := ""
			switch {
			case o.Repeated:
				mark = "  (as above)"
			case o.Role == "cited":
				mark = "  (cited)"
			}
			fmt.Printf("%s%s%s\n", strings.Repeat("  ", o.Depth), stepLine(&o.Step), mark)
		}
		if x.Truncated {
			fmt.Printf("… and more; --limit is %d\n", c.Limit)
		}
		return nil
	})
}

type diffCmd struct {
	storeFlags
	Session string `arg:"" help:"Session id."`
	From    int64  `arg:"" help:"Seq; -- -1 for the empty surface."`
	To      int64  `arg:"" help:"Seq that is not before it."`
	JSON    bool   `name:"json" help:"Print the difference as JSON."`
}

func (c *diffCmd) Run(ctx context.Context) error {
	if c.From < int64(events.NoSeq) || c.From > c.To {
		return &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("diff: expected -1 or a seq, and a seq that is not before it, found %d and %d", c.From, c.To)}
	}
	return c.with(ctx, func(s *store) error {
		d, err := s.auditor().Diff(ctx, c.Session, events.Seq(c.From), events.Seq(c.To))
		if err != nil {
			return err
		}
		if c.JSON {
			return printJSON(d)
		}
		fmt.Printf("surface of %s from seq %d to %d: %d nodes came, %d went, %d came and went again, %d replacements\n", d.Session, d.From, d.To, len(d.Came), len(d.Went), len(d.Passed), len(d.Did))
		for i := range d.Went {
			fmt.Printf("- %s  (shadowed by %d)\n", stepLine(&d.Went[i]), *d.Went[i].ShadowedBy)
		}
		for i := range d.Passed {
			fmt.Printf("± %s  (shadowed by %d)\n", stepLine(&d.Passed[i]), *d.Passed[i].ShadowedBy)
		}
		for i := range d.Came {
			fmt.Printf("+ %s\n", stepLine(&d.Came[i]))
		}
		return nil
	})
}

type blameCmd struct {
	storeFlags
	Session string `arg:"" help:"Session id."`
	Text    string `arg:"" help:"Text to look for in the strings of the messages."`
	JSON    bool   `name:"json" help:"Print the answer as JSON."`
}

func (c *blameCmd) Run(ctx context.Context) error {
	return c.with(ctx, func(s *store) error {
		b, err := s.auditor().Blame(ctx, c.Session, c.Text)
		if err != nil {
			return err
		}
		if c.JSON {
			return printJSON(b)
		}
		if len(b.Spans) == 0 {
			fmt.Printf("no message of %s has that text, up to seq %d\n", b.Session, b.LastSeq)
		}
		for _, sp := range b.Spans {
			if sp.To == nil {
				fmt.Printf("in the messages from seq %d on\n", sp.From)
			} else {
				fmt.Printf("in the messages from seq %d until seq %d\n", sp.From, *sp.To)
			}
		}
		for i := range b.Events {
			e := &b.Events[i]
			until := ""
			if e.ShadowedBy != nil {
				until = fmt.Sprintf("  (shadowed by %d)", *e.ShadowedBy)
			}
			fmt.Printf("  %s%s\n", stepLine(e), until)
		}
		return nil
	})
}

type replayCmd struct {
	storeFlags
	Session string        `arg:"" help:"Session id."`
	From    int64         `help:"First seq."`
	To      *int64        `help:"Last seq."`
	Speed   string        `help:"max, or a multiple of the recorded pace such as 1x." default:"1x"`
	MaxGap  time.Duration `help:"The longest time between two events, before speed; 0 for any."`
	Subject string        `help:"Publish the events to this NATS subject instead of printing them: a line a message, with headers session and seq." placeholder:"SUBJECT"`
	JSON    bool          `name:"json" hidden:"" help:"Events are JSON lines anyway."`
}

func (c *replayCmd) Run(ctx context.Context) error {
	speed, err := audit.ParseSpeed(c.Speed)
	if err != nil {
		return &platform.ExitError{Code: platform.ExitUsage, Err: err}
	}
	if err := errors.Join(platform.NotBelow(0, map[string]time.Duration{"max-gap": c.MaxGap}), seqRange(c.From, c.To)); err != nil {
		return err
	}
	if err := c.checkSubject(); err != nil {
		return &platform.ExitError{Code: platform.ExitUsage, Err: err}
	}
	r := audit.Replay{From: events.Seq(c.From), To: events.MaxSeq, Speed: speed, MaxGap: c.MaxGap}
	if c.To != nil {
		r.To = events.Seq(*c.To)
	}
	return c.with(ctx, func(s *store) error {
		nc, replayed := s.conns.Publish[0], 0
		err := s.auditor().Replay(ctx, c.Session, r, func(e *events.Event, _ *events.Commit) error {
			replayed++
			if c.Subject == "" {
				_, err := os.Stdout.Write(append(e.Line[:len(e.Line):len(e.Line)], '\n'))
				return err
			}
			m := nats.NewMsg(c.Subject)
			m.Header.Set("session", events.Token(c.Session))
			m.Header.Set("seq", e.Seq.String())
			m.Data = e.Line
			return nc.PublishMsg(m)
		})
		if c.Subject != "" {
			flush, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
			defer cancel()
			err = errors.Join(err, nc.FlushWithContext(flush))
		}
		if err == nil && replayed == 0 {
			fmt.Fprintf(os.Stderr, "session %s has no event from seq %d to %s\n", c.Session, r.From, c.last())
		}
		return err
	})
}

// last is the end of what is replayed, for people.
func (c *replayCmd) last() string {
	if c.To == nil {
		return "its end"
	}
	return fmt.Sprint(*c.To)
}

// checkSubject refuses subjects that are the product's own: what is published there would be taken for
// a commit, a snapshot or a request.
func (c *replayCmd) checkSubject() error {
	if c.Subject == "" {
		return nil
	}
	if strings.ContainsAny(c.Subject, "*> \t\r\n") {
		return fmt.Errorf("--subject: expected one subject without wildcards and spaces, found %q", c.Subject)
	}
	first, _, _ := strings.Cut(c.Subject, ".")
	switch {
	case strings.HasPrefix(first, "$"), strings.HasPrefix(first, "_INBOX"):
	case first == "sessions", first == "palimpsest", first == "access", first == "attestations", first == "erasures":
	default:
		return nil
	}
	return fmt.Errorf("--subject: %q is a subject of NATS or of Palimpsest itself, where a replay would do damage; expected one of your own, such as replay.%s", c.Subject, events.Token(c.Session))
}

type usageCmd struct {
	storeFlags
	All     bool   `help:"All sessions, and their sum."`
	Session string `arg:"" optional:"" help:"Session id."`
	JSON    bool   `name:"json" help:"Print the usage as JSON."`
}

func (c *usageCmd) Run(ctx context.Context) error {
	if c.All == (c.Session != "") {
		return &platform.ExitError{Code: platform.ExitUsage, Err: errors.New("usage: expected a session id or --all, and not both")}
	}
	return c.with(ctx, func(s *store) error {
		if !c.All {
			u, err := s.auditor().Usage(ctx, c.Session)
			if err != nil {
				return err
			}
			if c.JSON {
				return printJSON(u)
			}
			printUsage(os.Stdout, u.Session, &u.Usage)
			if u.Inherited != nil {
				printUsage(os.Stdout, "inherited, counted in its parent", u.Inherited)
			}
			for _, m := range slices.Sorted(maps.Keys(u.Models)) {
				fmt.Printf("  %s: %s\n", m, tokens(u.Models[m]))
			}
			return nil
		}
		f, err := s.auditor().Fleet(ctx)
		if err != nil {
			return err
		}
		if c.JSON {
			return printJSON(f)
		}
		for _, u := range f.Sessions {
			printUsage(os.Stdout, u.Session, &u.Usage)
		}
		printUsage(os.Stdout, fmt.Sprintf("%d sessions", len(f.Sessions)), &f.Usage)
		for _, m := range slices.Sorted(maps.Keys(f.Models)) {
			fmt.Printf("  %s: %s\n", m, tokens(f.Models[m]))
		}
		return nil
	})
}

func printUsage(w io.Writer, who string, u *audit.Usage) {
	note := ""
	if u.Unmetered > 0 {
		note = fmt.Sprintf(" (%d of them say no usage)", u.Unmetered)
	}
	fmt.Fprintf(w, "%s: %d assistant messages%s: %s\n", who, u.Messages, note, tokens(u.Tokens))
}

func tokens(t audit.Tokens) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(t)) {
		out = append(out, fmt.Sprintf("%s %d", name, t[name]))
	}
	if out == nil {
		return "no tokens"
	}
	return strings.Join(out, ", ")
}
