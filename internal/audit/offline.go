package audit

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"palimpsest/internal/events"
	"palimpsest/internal/lifecycle"
	"palimpsest/internal/sessionfile"
)

// Checks of files.
const (
	CheckFile    = "file"    // a session file that cannot be read, or breaks a rule
	CheckArchive = "archive" // an archive that is not as it was written
)

// IsFile reports whether a name is that of a session file or an archive that is there.
func IsFile(name string) bool {
	st, err := os.Stat(name)
	return NamesFile(name) && err == nil && st.Mode().IsRegular()
}

// NamesFile reports whether a name ends as session files and archives do. A session may have such
// an id, too.
func NamesFile(name string) bool {
	return slices.ContainsFunc([]string{".jsonl", ".jsonl.zst", ArchiveExt}, func(ext string) bool { return strings.HasSuffix(name, ext) })
}

// FilesIn lists the session files and archives in a directory, at any depth, in the order of their names.
func FilesIn(dir string) (files []string, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && NamesFile(path) {
			files = append(files, path)
		}
		return err
	})
	return files, err
}

// Files verifies session files and archives, without a store. A session file has its rules and
// the digest of its events; an archive also the chain of its commits and what was signed of it.
func Files(ctx context.Context, paths []string, v *events.Vocabulary, o Options) (*Report, error) {
	out := &collector{o: o.withDefaults(), r: &Report{Findings: []Finding{}}}
	for _, p := range paths {
		var err error
		if strings.HasSuffix(p, ArchiveExt) {
			err = verifyArchive(ctx, p, v, out)
		} else {
			err = verifyFile(ctx, p, p, nil, v, out)
		}
		if err != nil {
			return out.end(), err
		}
	}
	return out.end(), nil
}

func verifyArchive(ctx context.Context, file string, voc *events.Vocabulary, out *collector) error {
	dir, err := os.MkdirTemp("", "palimpsest-verify-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	a, err := OpenArchive(file, dir, 0)
	var bad *events.Error
	if errors.As(err, &bad) {
		out.r.Findings = append(out.r.Findings, Finding{Check: CheckArchive, Key: file, Detail: bad.Detail})
		return nil
	}
	if err != nil {
		return err
	}
	for i := range a.Sessions {
		s := &a.Sessions[i]
		if err := verifyFile(ctx, a.Path(s.File), filepath.Base(file)+":"+s.File, &archived{a, s}, voc, out); err != nil {
			return err
		}
	}
	return nil
}

// archived is a session in an archive.
type archived struct {
	a *Archive
	s *ArchivedSession
}

// open opens a file that lies beside the session file; nil when there is none.
func (s *archived) open(ext string) (io.ReadCloser, error) {
	f, err := os.Open(s.a.Path(strings.TrimSuffix(s.s.File, extEvents) + ext))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return f, err
}

// verifyFile verifies a session file; in is set for one of an archive.
func verifyFile(ctx context.Context, file, name string, in *archived, voc *events.Vocabulary, out *collector) error {
	f, err := sessionfile.Open(file, sessionfile.Options{Vocabulary: voc, Invariants: lifecycle.Observe})
	if err != nil {
		out.r.Findings = append(out.r.Findings, Finding{Check: CheckFile, Key: name, Detail: err.Error()})
		return nil
	}
	defer f.Close()
	rep, err := f.Check(ctx)
	if err != nil {
		return err
	}
	v := &verifier{id: rep.Session, r: &SessionReport{Session: rep.Session, LastSeq: events.NoSeq, HeadSeq: events.NoSeq, Findings: []Finding{}}}
	for _, p := range rep.Problems {
		v.find(Finding{Check: CheckFile, Key: name, Seq: p.Seq, Rule: p.Rule, Detail: p.String()})
	}
	for rule, n := range rep.Violations {
		if v.r.Violations == nil {
			v.r.Violations = map[events.Rule]int64{}
		}
		v.r.Violations[rule] = n.Count
	}
	if rep.OK() {
		c := &chainReader{v: v}
		if in != nil {
			if err := c.open(in, out.o); err != nil {
				return err
			}
			defer c.close()
		}
		v.digest = events.SeedDigest(v.id)
		err := f.Events(ctx, func(e *events.Event) error {
			v.digest = v.digest.Next(e.Line)
			v.next = e.Seq + 1
			v.r.Events++
			return c.event(e)
		})
		if err != nil {
			return err
		}
		v.r.LastSeq, v.r.Digest = v.next-1, v.digest.String()
		if in != nil {
			if err := c.end(in.s); err != nil {
				return err
			}
		}
	}
	out.add(v.r)
	return nil
}

// chainReader reads the commits of an archived session beside its events.
type chainReader struct {
	v      *verifier
	header []byte
	file   io.ReadCloser
	dec    *json.Decoder
	c      *events.Commit // that the next event belongs to; nil before the first and behind the last
	over   bool           // the commits can be followed no further
}

func (r *chainReader) open(in *archived, o Options) error {
	attested, err := in.open(extAttestations)
	if err != nil {
		return err
	}
	if attested != nil {
		list, err := ReadAttestations(attested)
		attested.Close()
		if err != nil {
			r.v.find(Finding{Check: CheckAttested, Seq: new(events.Seq), Detail: err.Error()})
		}
		r.v.trust(o, list)
	} else {
		r.v.trust(o, nil)
	}
	if r.file, err = in.open(extCommits); err != nil {
		return err
	}
	if r.file == nil {
		r.stop(CheckChain, nil, "the archive holds no commits of the session")
		return nil
	}
	r.dec = json.NewDecoder(r.file)
	r.header, err = firstLine(in.a.Path(in.s.File))
	return err
}

func firstLine(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	line, err := bufio.NewReader(f).ReadBytes('\n') // Check has accepted it, so it is not too long
	if err == io.EOF {
		err = nil
	}
	return bytes.TrimSuffix(line, []byte("\n")), err
}

func (r *chainReader) close() {
	if r.file != nil {
		r.file.Close()
	}
}

func (r *chainReader) stop(check string, seq *events.Seq, format string, args ...any) {
	r.over = true
	r.v.find(Finding{Check: check, Seq: seq, Detail: fmt.Sprintf(format, args...)})
}

// event goes on by one event, which v.digest holds already.
func (r *chainReader) event(e *events.Event) error {
	if r.dec == nil || r.over {
		return nil
	}
	seq := e.Seq
	if r.c == nil {
		var a ArchivedCommit
		if err := r.dec.Decode(&a); err != nil {
			r.stop(CheckContiguity, &seq, "expected a commit that holds the event, found none (%v)", err)
			return nil
		}
		c := &events.Commit{ID: a.ID, Session: r.v.id, Actor: a.Actor, Time: a.Time, Format: a.Format, First: a.First, Last: a.Last, StreamSeq: a.StreamSeq}
		var err error
		if c.Digest, err = events.ParseDigest(a.Digest); err == nil {
			c.Chain, err = events.ParseDigest(a.Chain)
		}
		if err != nil {
			r.stop(CheckChain, &seq, "a commit without digest or chain: %v", err)
			return nil
		}
		if c.First != seq || c.Last < c.First {
			r.stop(CheckContiguity, &seq, "expected a commit from seq %d on, found one from %d to %d", seq, c.First, c.Last)
			return nil
		}
		r.c = c
		r.v.r.Commits++
	}
	if seq < r.c.Last {
		return nil
	}
	c := r.c
	r.c = nil
	if c.Digest != r.v.digest {
		r.v.find(Finding{Check: CheckDigest, Seq: &seq, StreamSeq: c.StreamSeq, Expected: r.v.digest.String(), Found: c.Digest.String(), Detail: "events up to here were changed, or some are missing or in another order"})
		r.over = true
		return nil
	}
	before := []events.Digest{r.v.chain}
	if c.First == 0 { // an export may say "type":"session" where the stored header does not
		before = []events.Digest{events.SeedChain(r.v.id, r.header)}
		if rest, ok := bytes.CutPrefix(r.header, []byte(`{"type":"session",`)); ok {
			before = append(before, events.SeedChain(r.v.id, append([]byte("{"), rest...)))
		}
	}
	for _, b := range before {
		if r.v.chain = b.NextChain(c); r.v.chain == c.Chain {
			break
		}
	}
	if r.v.chain != c.Chain {
		r.v.find(Finding{Check: CheckChain, Seq: &seq, StreamSeq: c.StreamSeq, Expected: r.v.chain.String(), Found: c.Chain.String(), Detail: "id, actor, time, format or seqs of this commit, or the header were changed"})
		r.v.chain = c.Chain
	}
	r.v.attest(c)
	return nil
}

// end compares what was read with the manifest.
func (r *chainReader) end(s *ArchivedSession) error {
	v := r.v
	v.r.Chain = v.chain.String()
	if r.over {
		return nil
	}
	last := v.next - 1
	if r.dec != nil && (r.c != nil || r.dec.More()) {
		v.find(Finding{Check: CheckContiguity, Seq: &last, Detail: "the archive has commits of events that it does not hold: the end of the session file is gone"})
	}
	v.attestedBeyond()
	if s.Session != v.id || s.LastSeq != last || s.Digest != v.r.Digest || v.r.Commits > 0 && s.Chain != v.r.Chain {
		v.find(Finding{Check: CheckArchive, Seq: &last, Expected: fmt.Sprintf("session %q up to seq %d, digest %s, chain %s", s.Session, s.LastSeq, s.Digest, s.Chain),
			Found: fmt.Sprintf("session %q up to seq %d, digest %s, chain %s", v.id, last, v.r.Digest, v.r.Chain), Detail: "the session is not the one that the manifest lists"})
	}
	return nil
}
