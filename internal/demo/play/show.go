package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"
)

func heading(number, text string) { fmt.Printf("\n%s. %s\n\n", number, text) }

// printLog prints one event a line.
func printLog(log []event) {
	for _, e := range log {
		op, text := e.what()
		fmt.Printf("  %3d  %s  %-18s %-14s %s\n", e.Seq, time.UnixMilli(e.Time).UTC().Format("15:04:05"), e.Type, op, shorten(text, 72))
	}
}

// what says in short what an event does to the surface and what it holds.
func (e *event) what() (op, text string) {
	text = string(e.Data)
	message := e.Data
	if e.Type != "user/message" {
		var d struct{ Message json.RawMessage }
		_ = json.Unmarshal(e.Data, &d) // what is no message is shown as it is
		message = d.Message
	}
	switch {
	case e.SurfaceOp == nil:
		return "", text
	case e.replaces():
		var r struct{ StartSeq, EndSeq int64 }
		_ = json.Unmarshal(e.SurfaceOp, &r)
		op = fmt.Sprintf("replace %d..%d", r.StartSeq, r.EndSeq)
		if r.StartSeq == r.EndSeq {
			op = fmt.Sprintf("replace %d", r.StartSeq)
		}
	default:
		op = "append"
	}
	_, text = describe(message)
	return op, text
}

// describe says in short what a message holds.
func describe(message json.RawMessage) (role, text string) {
	var m struct {
		Role    string
		Content []struct {
			Type, Text, Name, Arguments string
			Content                     []struct{ Text string }
		}
	}
	if err := json.Unmarshal(message, &m); err != nil {
		return "?", string(message)
	}
	var parts []string
	for _, b := range m.Content {
		switch b.Type {
		case "text":
			parts = append(parts, b.Text)
		case "tool-call":
			parts = append(parts, fmt.Sprintf("→ %s %s", b.Name, b.Arguments))
		case "tool-result":
			for _, c := range b.Content {
				parts = append(parts, "← "+c.Text)
			}
		default:
			parts = append(parts, "("+b.Type+")")
		}
	}
	if len(parts) > 1 { // what is said before a call must not hide the call
		parts[0] = shorten(parts[0], 30)
	}
	return m.Role, strings.Join(parts, "  ")
}

// printChange prints two surfaces, the nodes that went marked with - and those that came with +.
func printChange(log []event, st step) {
	print := func(title, mark string, nodes, other []node) {
		bytes := 0
		for _, n := range nodes {
			bytes += n.Bytes
		}
		fmt.Printf("  %s: %d nodes, %d bytes\n", title, len(nodes), bytes)
		changed := missing(nodes, other)
		for _, n := range nodes {
			m := " "
			if slices.Contains(changed, n) {
				m = mark
			}
			_, text := log[n.Seq].what()
			fmt.Printf("  %s %3d  %-18s %5d bytes  %s\n", m, n.Seq, n.Type, n.Bytes, shorten(text, 70))
		}
	}
	print("before", "-", st.before, st.after)
	fmt.Println()
	print("after", "+", st.after, st.before)
}

// missing are the nodes of a that b does not have.
func missing(a, b []node) (out []node) {
	for _, n := range a {
		if !slices.Contains(b, n) {
			out = append(out, n)
		}
	}
	return out
}

// shorten makes one line of at most n characters of a text.
func shorten(s string, n int) string {
	s = strings.Join(strings.Fields(s), " ")
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}
