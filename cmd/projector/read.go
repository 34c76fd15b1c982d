package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"palimpsest/internal/api"
	"palimpsest/internal/events"
	"palimpsest/internal/platform"
	"palimpsest/internal/projection"
)

// get answers a GET of the read API without a server, so that what the command line prints
// for pipes is what HTTP answers.
func (s *store) get(ctx context.Context, path string, q url.Values) ([]byte, error) {
	worker := projection.NewWorker(s.journal, s.buckets, projection.NewHeads(), projection.Config{})
	reader := s.reader()
	if s.fleet == nil { // kept from page to page
		s.fleet = projection.NewFleet(reader, projection.FleetConfig{})
	}
	h := api.NewProjector(reader, worker, projection.NewHubs(reader, s.conns.Publish[0]), s.auditor(), api.ProjectorConfig{Fleet: s.fleet})
	_, b, err := api.Local(ctx, h, path, q)
	return b, err
}

func sessionPath(id, tail string) string { return "/v1/sessions/" + url.PathEscape(id) + tail }

// viewFlags say which snapshot is read.
type viewFlags struct {
	storeFlags
	Session string        `arg:"" help:"Session id."`
	MinSeq  *int64        `help:"Wait until this seq is projected."`
	Timeout time.Duration `help:"How long to wait." default:"5s"`
	Fresh   bool          `help:"Fold what the log holds beyond the projection."`
	At      *int64        `help:"As of this seq."`
	JSON    bool          `name:"json" help:"Print what the HTTP API answers."`
}

// AfterApply says what is wrong with the flags, when the command line has been read.
func (f viewFlags) AfterApply() error {
	return errors.Join(f.NATSFlags.AfterApply(), seqs(map[string]*int64{"min-seq": f.MinSeq, "at": f.At}))
}

// seqs is a usage error that names the first flag that was given and is no seq.
func seqs(flags map[string]*int64) error {
	given := map[string]int64{}
	for name, v := range flags {
		if v != nil {
			given[name] = *v
		}
	}
	return platform.NotBelow(0, given)
}

// seqRange is a usage error unless a range that may have no end is one of seqs and does not end before it begins.
func seqRange(from int64, to *int64) error {
	err := seqs(map[string]*int64{"from": &from, "to": to})
	if err == nil && to != nil && *to < from {
		err = &platform.ExitError{Code: platform.ExitUsage, Err: fmt.Errorf("--from and --to: expected a seq, and one that is not before it, found %d and %d", from, *to)}
	}
	return err
}

func (f *viewFlags) query() url.Values {
	q := url.Values{"timeout": {f.Timeout.String()}}
	if f.MinSeq != nil {
		q.Set("minSeq", fmt.Sprint(*f.MinSeq))
	}
	if f.Fresh {
		q.Set("fresh", "true")
	}
	if f.At != nil {
		q.Set("at", fmt.Sprint(*f.At))
	}
	return q
}

// run prints an answer of the read API: as it is, or for people.
func (f *viewFlags) run(ctx context.Context, tail string, q url.Values, people func([]byte) error) error {
	return f.with(ctx, func(s *store) error {
		b, err := s.get(ctx, sessionPath(f.Session, tail), q)
		if err != nil {
			return err
		}
		if f.JSON {
			_, err = os.Stdout.Write(b)
			return err
		}
		return people(b)
	})
}

type messagesCmd struct {
	viewFlags
	Format string `help:"As a provider's API takes them: openai or anthropic, which print JSON." enum:"json,openai,anthropic" default:"json"`
}

func (c *messagesCmd) Run(ctx context.Context) error {
	q := c.query()
	if c.Format != "json" {
		c.JSON = true
		q.Set("format", c.Format)
	}
	return c.run(ctx, "/messages", q, func(b []byte) error {
		var v struct {
			Seq        events.Seq
			Generation int64 `json:"replaceGeneration"`
			Messages   []json.RawMessage
			Unpaired   []struct {
				Kind   string
				CallID string
				Seq    events.Seq
			}
			Quarantine *projection.Quarantine
		}
		if err := json.Unmarshal(b, &v); err != nil {
			return err
		}
		fmt.Printf("%d messages as of seq %d, %d replacements\n", len(v.Messages), v.Seq, v.Generation)
		printQuarantine(v.Quarantine)
		for i, m := range v.Messages {
			fmt.Printf("%4d  %s\n", i, describe(m))
		}
		for _, u := range v.Unpaired {
			fmt.Printf("unpaired %s %q at seq %d\n", u.Kind, u.CallID, u.Seq)
		}
		return nil
	})
}

func printQuarantine(q *projection.Quarantine) {
	if q != nil {
		fmt.Printf("IN QUARANTINE since %s: %s%s\n", time.UnixMilli(q.Time).UTC().Format(time.RFC3339), q.Detail, skippedNote(q))
	}
}

// describe shows a message in one line: its role and the beginnings of its blocks.
func describe(m json.RawMessage) string {
	type block struct {
		Type      string          `json:"type"`
		Text      string          `json:"text"`
		Name      string          `json:"name"`
		ID        string          `json:"id"`
		CallID    string          `json:"toolCallId"`
		Arguments string          `json:"arguments"`
		IsError   bool            `json:"isError"`
		Content   json.RawMessage `json:"content"`
	}
	var msg struct {
		Role    string  `json:"role"`
		Content []block `json:"content"`
	}
	if err := json.Unmarshal(m, &msg); err != nil {
		return string(m)
	}
	var parts []string
	for _, b := range msg.Content {
		switch b.Type {
		case "text":
			parts = append(parts, oneLine(b.Text))
		case "tool-call":
			parts = append(parts, fmt.Sprintf("→ %s(%s) [%s]", b.Name, oneLine(b.Arguments), b.ID))
		case "tool-result":
			mark := "←"
			if b.IsError {
				mark = "← error"
			}
			var inner []block
			text := string(b.Content)
			if json.Unmarshal(b.Content, &inner) == nil && len(inner) > 0 {
				text = inner[0].Text
			}
			parts = append(parts, fmt.Sprintf("%s [%s] %s", mark, b.CallID, oneLine(text)))
		default:
			parts = append(parts, "("+b.Type+")")
		}
	}
	return fmt.Sprintf("%-9s  %s", msg.Role, strings.Join(parts, "  "))
}

// oneLine shortens a text to what fits beside others.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > 100 {
		return string(r[:99]) + "…"
	}
	return s
}

type surfaceCmd struct{ viewFlags }

func (c *surfaceCmd) Run(ctx context.Context) error {
	return c.run(ctx, "/surface", c.query(), func(b []byte) error {
		var v struct {
			Seq        events.Seq
			Generation int64 `json:"replaceGeneration"`
			Nodes      []struct {
				Seq     events.Seq
				Type    string
				Bytes   int64
				Derives bool
			}
			Quarantine *projection.Quarantine
		}
		if err := json.Unmarshal(b, &v); err != nil {
			return err
		}
		fmt.Printf("%d nodes as of seq %d, %d replacements\n", len(v.Nodes), v.Seq, v.Generation)
		printQuarantine(v.Quarantine)
		for _, n := range v.Nodes {
			note := ""
			if !n.Derives {
				note = "  (derives no message)"
			}
			fmt.Printf("%8d  %-18s %8d bytes%s\n", n.Seq, n.Type, n.Bytes, note)
		}
		return nil
	})
}

// rangeFlags say which part of a log is read.
type rangeFlags struct {
	storeFlags
	Session string `arg:"" help:"Session id."`
	From    int64  `help:"First seq."`
	To      *int64 `help:"Last seq."`
	Limit   int    `help:"At most so many events; 0 for all."`
	JSON    bool   `name:"json" help:"Print JSON for pipes."`
}

// AfterApply says what is wrong with the flags, when the command line has been read.
func (f rangeFlags) AfterApply() error {
	limit := int64(f.Limit)
	return errors.Join(f.NATSFlags.AfterApply(), seqRange(f.From, f.To), seqs(map[string]*int64{"limit": &limit}))
}

// pages reads a paged answer of the read API to its end, or to the limit.
func (f *rangeFlags) pages(ctx context.Context, tail, list string, q url.Values, item func(json.RawMessage) error) error {
	return f.with(ctx, func(s *store) error {
		left := f.Limit
		q.Set("from", fmt.Sprint(f.From))
		if f.To != nil {
			q.Set("to", fmt.Sprint(*f.To))
		}
		for {
			if left > 0 {
				q.Set("limit", fmt.Sprint(min(left, 1000)))
			}
			b, err := s.get(ctx, sessionPath(f.Session, tail), q)
			if err != nil {
				return err
			}
			var page map[string]json.RawMessage
			var items []json.RawMessage
			if err := json.Unmarshal(b, &page); err != nil {
				return err
			}
			if err := json.Unmarshal(page[list], &items); err != nil {
				return err
			}
			for _, it := range items {
				if err := item(it); err != nil {
					return err
				}
			}
			left -= len(items)
			if page["next"] == nil || f.Limit > 0 && left <= 0 {
				return nil
			}
			q.Set("from", string(page["next"]))
		}
	})
}

type transcriptCmd struct{ rangeFlags }

func (c *transcriptCmd) Run(ctx context.Context) error {
	if c.JSON {
		return c.with(ctx, func(s *store) error {
			q := url.Values{"from": {fmt.Sprint(c.From)}}
			if c.Limit > 0 {
				q.Set("limit", fmt.Sprint(c.Limit))
			}
			if c.To != nil {
				q.Set("to", fmt.Sprint(*c.To))
			}
			b, err := s.get(ctx, sessionPath(c.Session, "/transcript"), q)
			if err != nil {
				return err
			}
			_, err = os.Stdout.Write(b)
			return err
		})
	}
	return c.pages(ctx, "/transcript", "messages", url.Values{}, func(it json.RawMessage) error {
		var m struct {
			Seq     events.Seq
			Time    int64
			Message json.RawMessage
		}
		if err := json.Unmarshal(it, &m); err != nil {
			return err
		}
		fmt.Printf("%8d  %s  %s\n", m.Seq, time.UnixMilli(m.Time).UTC().Format(time.RFC3339), describe(m.Message))
		return nil
	})
}

type eventsCmd struct {
	rangeFlags
	Type string `help:"Only these types, with commas between them." placeholder:"TYPE,…"`
}

func (c *eventsCmd) Run(ctx context.Context) error {
	q := url.Values{}
	if c.Type != "" {
		q.Set("type", c.Type)
	}
	return c.pages(ctx, "/events", "events", q, func(line json.RawMessage) error {
		if c.JSON {
			_, err := fmt.Printf("%s\n", line)
			return err
		}
		var e struct {
			Seq       events.Seq
			Time      int64
			Type      string
			SurfaceOp json.RawMessage
			Data      json.RawMessage
		}
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		op := string(e.SurfaceOp)
		if op != "" {
			op = " " + op
		}
		fmt.Printf("%8d  %s  %s%s  %s\n", e.Seq, time.UnixMilli(e.Time).UTC().Format(time.RFC3339), e.Type, op, oneLine(string(e.Data)))
		return nil
	})
}

// urlFlag says where a projector serves.
type urlFlag struct {
	URL   string `name:"url" help:"HTTP API of the projector." default:"http://127.0.0.1:8081"`
	Token string `help:"Bearer token for it; better given in the environment than here, where ps shows it." env:"PALIMPSEST_TOKEN" placeholder:"TOKEN"`
	api.TLSFlags
}

// call asks a running projector; a body is JSON.
func (f urlFlag) call(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	base, err := api.BaseURL(f.URL)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, method, base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if f.Token != "" {
		req.Header.Set("Authorization", "Bearer "+f.Token)
	}
	t, err := f.Transport()
	if err != nil {
		return nil, err
	}
	defer t.CloseIdleConnections()
	resp, err := (&http.Client{Transport: t}).Do(req)
	if err != nil {
		return nil, fmt.Errorf("%w; is a projector serving there?", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = api.ErrorIn(resp.StatusCode, b)
	}
	return b, err
}
