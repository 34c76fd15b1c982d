package sessionfile_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"palimpsest/internal/events"
	"palimpsest/internal/sessionfile"
)

// What follows says once more, as dumbly as can be, what a file of an older format stands for:
// everything is decoded and kept in memory, and nothing of it is checked.

type object = map[string]any

// dumbEvents are the events of format 3 that a file of format 0, 1 or 2 stands for.
func dumbEvents(content []byte) []object {
	lines := strings.Split(strings.TrimRight(string(content), " \t\r\n"), "\n")
	createdAt, ok := dumbDecode(lines[0])["createdAt"]
	if !ok {
		createdAt = json.Number("0")
	}
	var out []object
	origin := map[int64]int64{}
	for _, line := range lines[1:] {
		e := dumbDecode(line)
		data, _ := e["data"].(object)
		typ := e["type"].(string)
		at := int64(len(out))
		if kind, packed := map[string]string{"text-chunks": "text-delta", "reasoning-chunks": "reasoning-delta", "tool-call-chunks": "tool-call-delta"}[typ]; packed {
			time := dumbInt(e["time0"], createdAt)
			list, _ := data["texts"].([]any)
			if kind == "tool-call-delta" {
				list, _ = data["args"].([]any)
			}
			for i, element := range list {
				if i > 0 {
					time += dumbInt(data["dt"].([]any)[i-1], nil)
				}
				chunk := object{"type": kind, "index": data["index"]}
				if kind == "tool-call-delta" {
					chunk["argumentsDelta"] = element
					chunk["id"] = data["id"]
					if name, ok := data["name"]; ok {
						chunk["name"] = name
					}
				} else {
					chunk["text"] = element
				}
				out = append(out, object{"type": "assistant/chunk", "seq": at + int64(i), "time": time,
					"data": object{"turn": data["turn"], "step": data["step"], "chunk": chunk}})
			}
			continue
		}
		e["seq"], e["time"] = at, dumbInt(e["time"], createdAt)
		surface := slices.Contains([]string{"system/message", "user/message", "assistant/message", "tool/result"}, typ)
		from := int64(-1)
		if op, ok := e["surfaceOp"].(object); ok && surface {
			if start, ok := op["start"]; ok {
				op = object{"op": op["op"], "startSeq": start, "endSeq": op["end"]}
			}
			from = dumbInt(op["startSeq"], nil)
			e["surfaceOp"] = object{"op": "replace", "startSeq": from, "endSeq": dumbInt(op["endSeq"], nil)}
		}
		if sources, ok := e["sourceEventSeqs"].([]any); ok && surface {
			for i := range sources {
				sources[i] = dumbInt(sources[i], nil)
			}
		}
		if typ == "assistant/message" {
			delete(e, "sourceEventSeqs")
		}
		if surface && data["message"] == nil && data["id"] == nil && data["role"] == nil && data["content"] != nil {
			id := at
			if from >= 0 {
				id = from
				if first, ok := origin[from]; ok {
					id = first
				}
				origin[at] = id
			}
			message := object{"role": "user", "id": fmt.Sprintf("imported-message-%d", id), "content": data["content"]}
			switch typ {
			case "user/message":
				data["role"], data["id"] = message["role"], message["id"]
			case "assistant/message":
				message["role"], message["source"] = "assistant", object{"kind": "model"}
				for k, v := range data["provenance"].(object) {
					message["source"].(object)[k] = v
				}
				delete(data, "provenance")
			case "tool/result":
				message["source"] = object{"kind": "tool", "callId": data["callId"]}
				block := object{"type": "tool-result", "toolCallId": data["callId"], "content": data["content"]}
				if isError, ok := data["isError"]; ok {
					block["isError"] = isError
				}
				message["content"] = []any{block}
				delete(data, "callId")
				delete(data, "isError")
			}
			if typ != "user/message" {
				delete(data, "content")
				data["message"] = message
			}
		}
		out = append(out, e)
	}
	return out
}

func dumbDecode(line string) object {
	d := json.NewDecoder(strings.NewReader(line))
	d.UseNumber()
	var out object
	if err := d.Decode(&out); err != nil {
		panic(err)
	}
	return out
}

func dumbInt(v, fallback any) int64 {
	if v == nil {
		v = fallback
	}
	n, _ := v.(json.Number).Float64() // exact, for a number that was accepted
	return int64(n)
}

// sameEvents compares what pass two hands out with what the dumb reading gives, as values.
func sameEvents(t *testing.T, f *sessionfile.File, want []object) {
	t.Helper()
	n := 0
	err := f.Events(t.Context(), func(e *events.Event) error {
		if n >= len(want) {
			return fmt.Errorf("more than the %d events that the file stands for", len(want))
		}
		line, err := json.Marshal(want[n])
		if err != nil {
			return err
		}
		if got, want := dumbDecode(string(e.Line)), dumbDecode(string(line)); !reflect.DeepEqual(got, want) {
			return fmt.Errorf("event %d:\n got %s\nwant %s", n, e.Line, line)
		}
		n++
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if n != len(want) {
		t.Fatalf("%d events, the file stands for %d", n, len(want))
	}
}

// dumbFold folds events that keep all rules.
func dumbFold(all []object) (nodes []events.Seq, replacements []replacement, messages []any) {
	for _, e := range all {
		seq := events.Seq(e["seq"].(int64))
		switch op := e["surfaceOp"].(type) {
		case string:
			nodes = append(nodes, seq)
		case object:
			if e["ignorable"] == true {
				continue
			}
			r := replacement{Seq: seq, StartSeq: events.Seq(op["startSeq"].(int64)), EndSeq: events.Seq(op["endSeq"].(int64))}
			from, to := slices.Index(nodes, r.StartSeq), slices.Index(nodes, r.EndSeq)
			r.ShadowedSeqs = slices.Clone(nodes[from : to+1])
			nodes = slices.Concat(nodes[:from], []events.Seq{seq}, nodes[to+1:])
			replacements = append(replacements, r)
		}
	}
	for _, seq := range nodes {
		e := all[seq]
		message := e["data"].(object)
		if e["type"] != "user/message" {
			message = message["message"].(object)
		}
		if content := message["content"].([]any); len(content) > 0 || e["type"] == "user/message" || e["type"] == "tool/result" {
			messages = append(messages, any(message))
		}
	}
	return nodes, replacements, messages
}

// sameSurface compares what the events of pass two fold to with what the dumb fold gives.
func sameSurface(t *testing.T, f *sessionfile.File, all []object) {
	t.Helper()
	nodes, replacements, messages := dumbFold(all)
	got := fold(t, f)
	if !slices.Equal(got.nodes, nodes) {
		t.Errorf("nodes: expected %v, got %v", nodes, got.nodes)
	}
	if len(got.replacements)+len(replacements) > 0 && !reflect.DeepEqual(got.replacements, replacements) {
		t.Errorf("replacements: expected %v, got %v", replacements, got.replacements)
	}
	want, err := json.Marshal(messages)
	if err != nil {
		t.Fatal(err)
	}
	list := slices.Concat([]byte(`{"all":[`), bytes.Join(got.messages, []byte{','}), []byte("]}"))
	if !reflect.DeepEqual(dumbDecode(string(list))["all"], dumbDecode(`{"all":` + string(want) + `}`)["all"]) {
		t.Errorf("messages: expected %s, got %s", want, list)
	}
}
