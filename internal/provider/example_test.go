package provider_test

import (
	"fmt"

	"palimpsest/internal/events"
	"palimpsest/internal/provider"
)

// A crash left the call without a result. The list is one that the API takes all the same.
func ExampleRender() {
	messages := []provider.Message{
		{Seq: 4, Kind: events.KindUser, JSON: []byte(`{"id":"m1","role":"user","source":{"kind":"user"},"content":[{"type":"text","text":"What is in a.txt?"}]}`)},
		{Seq: 7, Kind: events.KindAssistant, JSON: []byte(`{"id":"m2","role":"assistant","source":{"kind":"model","provider":"p","model":"m"},"content":[{"type":"tool-call","id":"fs.read:0","name":"read","arguments":"{\"path\":\"a.txt\"}"}]}`)},
	}
	out, err := provider.Render(provider.Anthropic, events.Format3, messages)
	if err != nil {
		fmt.Println(err)
		return
	}
	events.EachElement(out.Messages, func(m []byte) bool {
		fmt.Printf("%s\n", m)
		return true
	})
	for _, n := range out.Report {
		fmt.Printf("seq %d: %s %s\n", n.Seq, n.What, n.Action)
	}
	// Output:
	// {"role":"user","content":[{"type":"text","text":"What is in a.txt?"}]}
	// {"role":"assistant","content":[{"type":"tool_use","id":"fs_read_0","name":"read","input":{"path":"a.txt"}}]}
	// {"role":"user","content":[{"type":"tool_result","tool_use_id":"fs_read_0","content":[{"type":"text","text":"No result of this tool call is on record, so its outcome is unknown. Check what it would have changed before you call it again."}],"is_error":true}]}
	// seq 7: tool-call.id changed
	// seq 7: tool-call synthesized
}

func ExampleUnpaired() {
	// A compaction took the call and left its result.
	messages := []provider.Message{
		{Seq: 12, Kind: events.KindUser, JSON: []byte(`{"id":"m1","role":"user","source":{"kind":"plugin"},"content":[{"type":"text","text":"So far: …"}]}`)},
		{Seq: 9, Kind: events.KindTool, JSON: []byte(`{"id":"m2","role":"user","source":{"kind":"tool","callId":"c1"},"content":[{"type":"tool-result","toolCallId":"c1","isError":false,"content":[]}]}`)},
	}
	for _, u := range provider.Unpaired(events.Format3, messages) {
		fmt.Printf("%+v\n", u)
	}
	// Output:
	// {Kind:result CallID:c1 Seq:9 Index:1}
}
