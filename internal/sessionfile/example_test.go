package sessionfile_test

import (
	"context"
	"fmt"

	"palimpsest/internal/events"
	"palimpsest/internal/sessionfile"
)

func Example() {
	file := `{"type":"session","version":3,"id":"pear-tree","createdAt":1800000000000}
{"type":"turn/start","data":{"turn":1}}
{"type":"user/message","surfaceOp":"append","data":{"id":"u1","role":"user","content":[],"source":{"kind":"user"}}}
`
	ctx := context.Background()
	f := sessionfile.OpenBytes("pear-tree.jsonl", []byte(file), sessionfile.Options{})
	defer func() { _ = f.Close() }()

	report, err := f.Check(ctx) // pass one: validate everything
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(report.Session, "events:", report.Events, "nodes:", report.Nodes, "open turn:", *report.OpenTurn)

	err = f.Events(ctx, func(e *events.Event) error { // pass two: commit
		fmt.Println(e.Seq, e.Type, e.Time)
		return nil
	})
	fmt.Println(err)
	// Output:
	// pear-tree events: 2 nodes: 1 open turn: 1
	// 0 turn/start 1800000000000
	// 1 user/message 1800000000000
	// <nil>
}
