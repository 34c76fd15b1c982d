package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"palimpsest/internal/demo"
)

// step is one replacement of the session with the surfaces around it.
type step struct {
	by            event // the event that replaces
	before, after []node
}

// demonstrate shows the bundled session from its import to the end of both programs.
func (s *stack) demonstrate(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, demoTime)
	defer cancel()
	if err := s.serve(ctx); err != nil {
		return err
	}
	fmt.Println("Palimpsest: an agent's session, from the log to the messages that the model sees")
	fmt.Println()
	fmt.Printf("  appender   %s, with an embedded NATS server at %s\n", s.appender.HTTP, s.appender.NATS)
	fmt.Printf("  projector  %s\n", s.projector.HTTP)
	fmt.Printf("  store      %s (removed at the end)\n", s.data)

	bundled, err := bundledEvents()
	if err != nil {
		return err
	}
	heading("1", "Import, in steps, so that the surface can be looked at in between")
	steps, err := s.importInSteps(ctx, bundled)
	if err != nil {
		return err
	}
	last := bundled[len(bundled)-1].Seq

	heading("2", "The log: what happened, one event a line. Nothing of it ever changes")
	log, err := s.events(ctx, demo.ID, 0, last)
	if err != nil {
		return err
	}
	if len(log) != len(bundled) {
		return fmt.Errorf("the log holds %d events, %d were imported", len(log), len(bundled))
	}
	printLog(log)

	for i, st := range steps {
		name := "compaction"
		if st.by.Type == "tool/result" {
			name = "prune"
		}
		heading(fmt.Sprint(3+i), fmt.Sprintf("The surface before and after the %s (event %d)", name, st.by.Seq))
		printChange(log, st)
	}

	heading("5", "The derived messages: what the model is sent next")
	if err := s.printMessages(ctx, last); err != nil {
		return err
	}
	heading("6", "What was written over can still be read")
	if err := s.printShadowed(ctx, bundled, steps); err != nil {
		return err
	}
	heading("7", "An append that breaks a rule is refused, and the log stays as it was")
	if err := s.refusals(ctx, steps[len(steps)-1].after, last); err != nil {
		return err
	}
	heading("8", "Checks")
	if err := s.checks(ctx, last); err != nil {
		return err
	}
	if err := s.stop(); err != nil {
		return err
	}
	fmt.Println("  SIGTERM to both programs    both drained and ended with exit code 0")
	fmt.Println("\nDone. make run keeps both programs up for trying by hand.")
	return nil
}

// bundledEvents are the events of the bundled session file.
func bundledEvents() ([]event, error) {
	var out []event
	lines := bytes.Split(bytes.TrimSuffix(demo.Session(), []byte("\n")), []byte("\n"))
	for _, line := range lines[1:] { // the first is the header
		e, err := parseEvent(line)
		if err != nil {
			return nil, err
		}
		out = append(out, e)
	}
	return out, nil
}

// importInSteps imports ever longer parts of the bundled session: up to each replacement, and
// the whole. An import of a longer version of a file goes on where the last one ended.
func (s *stack) importInSteps(ctx context.Context, all []event) ([]step, error) {
	var steps []step
	surfaceAt := func(n int) ([]node, error) {
		if err := s.importFirst(ctx, n); err != nil {
			return nil, err
		}
		return s.surface(ctx, demo.ID, int64(n-1))
	}
	for i, e := range all {
		if !e.replaces() {
			continue
		}
		before, err := surfaceAt(i)
		if err != nil {
			return nil, err
		}
		after, err := surfaceAt(i + 1)
		if err != nil {
			return nil, err
		}
		steps = append(steps, step{e, before, after})
	}
	if len(steps) != 2 {
		return nil, fmt.Errorf("the bundled session has %d replacements, expected a prune and a compaction", len(steps))
	}
	_, err := surfaceAt(len(all))
	return steps, err
}

// importFirst imports the first n events of the bundled session.
func (s *stack) importFirst(ctx context.Context, n int) error {
	file := filepath.Join(s.temp, demo.ID+".jsonl")
	lines := bytes.SplitAfterN(demo.Session(), []byte("\n"), n+2)
	if err := os.WriteFile(file, bytes.Join(lines[:n+1], nil), 0o600); err != nil {
		return err
	}
	out, err := s.run(ctx, "appender", "import", "--nats", s.appender.NATS, file)
	if err != nil {
		return err
	}
	fmt.Println("  " + strings.ReplaceAll(out, s.temp+string(filepath.Separator), ""))
	return nil
}

func (s *stack) printMessages(ctx context.Context, seq int64) error {
	var v struct {
		Seq        int64             `json:"seq"`
		Generation int64             `json:"replaceGeneration"`
		Messages   []json.RawMessage `json:"messages"`
	}
	if err := getJSON(ctx, fmt.Sprintf("%s/v1/sessions/%s/messages?minSeq=%d&timeout=10s", s.projector.HTTP, demo.ID, seq), &v); err != nil {
		return err
	}
	for i, m := range v.Messages {
		role, text := describe(m)
		fmt.Printf("  %2d  %-9s  %s\n", i+1, role, shorten(text, 96))
	}
	fmt.Printf("\n  %d messages as of event %d, after %d replacements.\n", len(v.Messages), v.Seq, v.Generation)
	return nil
}

// printShadowed reads every event that a replacement took off the surface and compares it
// with what was imported.
func (s *stack) printShadowed(ctx context.Context, bundled []event, steps []step) error {
	n := 0
	for _, st := range steps {
		for _, gone := range missing(st.before, st.after) {
			es, err := s.events(ctx, demo.ID, gone.Seq, gone.Seq)
			if err != nil {
				return err
			}
			if len(es) != 1 || es[0].line != bundled[gone.Seq].line {
				return fmt.Errorf("event %d was shadowed by %d and reads differently now: %v", gone.Seq, st.by.Seq, es)
			}
			_, text := es[0].what()
			fmt.Printf("  %3d  %-18s shadowed by %d  %s\n", gone.Seq, gone.Type, st.by.Seq, shorten(text, 74))
			n++
		}
	}
	fmt.Printf("\n  GET …/events?from=N&to=N: all %d are there, byte for byte as they were imported.\n", n)
	return nil
}

// refusals sends appends that break a rule.
func (s *stack) refusals(ctx context.Context, surface []node, last int64) error {
	var seqs []int64
	for _, n := range surface {
		seqs = append(seqs, n.Seq)
	}
	sources, err := json.Marshal(seqs)
	if err != nil {
		return err
	}
	for _, try := range []struct{ what, body, rule string }{
		{"replace everything, the system message too", fmt.Sprintf(`{"type":"user/message","surfaceOp":{"op":"replace","startSeq":%d,"endSeq":%d},"sourceEventSeqs":%s,"data":{"id":"u","role":"user","content":[],"source":{"kind":"user"}}}`,
			seqs[0], seqs[len(seqs)-1], sources), "system-head-protected"},
		{"end a turn that is not open", `{"type":"turn/end","data":{"turn":7}}`, "turn-mismatch"},
	} {
		status, b, err := request(ctx, http.MethodPost, fmt.Sprintf("%s/v1/sessions/%s/events", s.appender.HTTP, demo.ID), try.body)
		if err != nil {
			return err
		}
		var p problem
		if err := json.Unmarshal(b, &p); err != nil {
			return fmt.Errorf("status %d: %s", status, b)
		}
		if status != http.StatusUnprocessableEntity || p.Rule != try.rule {
			return fmt.Errorf("%s: expected status 422 and rule %s, got %d: %s", try.what, try.rule, status, b)
		}
		fmt.Printf("  %s\n      %d %s %s: %s\n", try.what, status, p.Code, p.Rule, p.Detail)
	}
	var v struct {
		NextSeq int64 `json:"nextSeq"`
	}
	if err := getJSON(ctx, fmt.Sprintf("%s/v1/sessions/%s", s.appender.HTTP, demo.ID), &v); err != nil {
		return err
	}
	if v.NextSeq != last+1 {
		return fmt.Errorf("the next seq is %d after refused appends, expected %d", v.NextSeq, last+1)
	}
	fmt.Printf("  the next seq is still %d\n", v.NextSeq)
	return nil
}

// checks compares the export with the file, the digest chain with one computed here, and the
// snapshot with a fresh fold.
func (s *stack) checks(ctx context.Context, last int64) error {
	export, err := get(ctx, fmt.Sprintf("%s/v1/sessions/%s/export", s.projector.HTTP, demo.ID))
	if err != nil {
		return err
	}
	if !bytes.Equal(export, demo.Session()) {
		return errors.New("the exported session file differs from the imported one")
	}
	fmt.Printf("  export against the file     the same %d bytes\n", len(export))

	var v struct {
		NextSeq int64  `json:"nextSeq"`
		Digest  string `json:"digest"`
	}
	if err := getJSON(ctx, fmt.Sprintf("%s/v1/sessions/%s", s.projector.HTTP, demo.ID), &v); err != nil {
		return err
	}
	if digest := digestOf(export); v.NextSeq != last+1 || v.Digest != digest {
		return fmt.Errorf("digest: expected %s at seq %d, the projector says %s at seq %d", digest, last, v.Digest, v.NextSeq-1)
	}
	fmt.Printf("  digest chain of the export  %s…, as in the head\n", v.Digest[:16])

	out, err := s.run(ctx, "projector", "verify", "--nats", s.appender.NATS, demo.ID)
	if err != nil {
		return err
	}
	fmt.Printf("  projector verify            %s\n", out)
	return nil
}

// digestOf computes the digest chain of a session file.
func digestOf(file []byte) string {
	d := sha256.Sum256([]byte("palimpsest/1 " + demo.ID))
	for _, line := range bytes.Split(bytes.TrimSuffix(file, []byte("\n")), []byte("\n"))[1:] {
		d = sha256.Sum256(slices.Concat(d[:], line))
	}
	return hex.EncodeToString(d[:])
}
