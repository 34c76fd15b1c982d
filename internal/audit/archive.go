package audit

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"

	"palimpsest/internal/events"
	"palimpsest/internal/sessionfile"
)

// ArchiveExt is how the name of an archive ends.
const ArchiveExt = ".tar.zst"

// manifestName is the last file of an archive.
const manifestName = "manifest.json"

// Names of a session's files in an archive, behind sessions/<number>.
const (
	extEvents       = ".jsonl"              // the session file
	extCommits      = ".commits.jsonl"      // what the commit chain is made of
	extAttestations = ".attestations.jsonl" // signed checkpoints, as the store keeps them
)

var archiveNames = regexp.MustCompile(`^sessions/[0-9]{6,12}(\.jsonl|\.commits\.jsonl|\.attestations\.jsonl)$`)

// Manifest lists what an archive holds.
type Manifest struct {
	V        int               `json:"v"`
	Made     string            `json:"made"` // RFC 3339
	Sessions []ArchivedSession `json:"sessions"`
	Files    []ArchivedFile    `json:"files"`
}

// ArchivedSession is one session of an archive.
type ArchivedSession struct {
	Session      string     `json:"session"`
	File         string     `json:"file"` // its session file; the others are named alike
	Events       int64      `json:"events"`
	Commits      int64      `json:"commits"`
	LastSeq      events.Seq `json:"lastSeq"`
	Digest       string     `json:"digest"`
	Chain        string     `json:"chain"`
	Attestations int        `json:"attestations"`
}

// ArchivedFile is one file of an archive.
type ArchivedFile struct {
	Name   string `json:"name"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// ArchivedCommit is a commit without its events, as an archive holds it: all that the commit
// chain binds.
type ArchivedCommit struct {
	ID        string        `json:"id"`
	Actor     string        `json:"actor"`
	Time      string        `json:"time"`
	Format    events.Format `json:"format"`
	First     events.Seq    `json:"firstSeq"`
	Last      events.Seq    `json:"lastSeq"`
	Digest    string        `json:"digest"`
	Chain     string        `json:"chain"`
	StreamSeq uint64        `json:"streamSeq"`
}

// ArchiveWriter writes an archive. It keeps one session at a time in a temporary file, since a
// tar says the length of a file before the file.
type ArchiveWriter struct {
	a    *Auditor
	z    *zstd.Encoder
	t    *tar.Writer
	m    Manifest
	made time.Time
	dir  string
}

// NewArchive starts an archive.
func (a *Auditor) NewArchive(w io.Writer, now time.Time) (*ArchiveWriter, error) {
	dir, err := os.MkdirTemp("", "palimpsest-archive-")
	if err != nil {
		return nil, err
	}
	z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return &ArchiveWriter{a: a, z: z, t: tar.NewWriter(z), made: now, dir: dir,
		m: Manifest{V: 1, Made: events.FormatTime(now), Sessions: []ArchivedSession{}, Files: []ArchivedFile{}}}, nil
}

// Add adds a session as its log is now.
func (w *ArchiveWriter) Add(ctx context.Context, id string) error {
	if err := events.CheckSessionID(id); err != nil {
		return err
	}
	h, err := w.a.headers.Get(ctx, id)
	if err != nil {
		return err
	}
	base := fmt.Sprintf("sessions/%06d", len(w.m.Sessions)+1)
	s := ArchivedSession{Session: id, File: base + extEvents, LastSeq: events.NoSeq, Digest: events.SeedDigest(id).String(), Chain: events.SeedChain(id, h.Raw).String()}
	lines, err := os.Create(filepath.Join(w.dir, "events"))
	if err != nil {
		return err
	}
	defer lines.Close()
	commits, err := os.Create(filepath.Join(w.dir, "commits"))
	if err != nil {
		return err
	}
	defer commits.Close()
	cw := bufio.NewWriter(commits)
	stop := errors.New("stop")
	err = sessionfile.Write(lines, h, func(yield func([]byte, error) bool) {
		err := w.a.log.ReadOn(ctx, id, 0, 0, func(c *events.Commit) error {
			for line := range c.Lines() {
				if !yield(line, nil) {
					return stop
				}
			}
			s.Commits++
			s.Events += int64(c.Last-c.First) + 1
			s.LastSeq, s.Digest, s.Chain = c.Last, c.Digest.String(), c.Chain.String()
			b, err := events.Marshal(ArchivedCommit{c.ID, c.Actor, c.Time, c.Format, c.First, c.Last, c.Digest.String(), c.Chain.String(), c.StreamSeq})
			if err == nil {
				_, err = cw.Write(append(b, '\n'))
			}
			return err
		})
		if err != nil && !errors.Is(err, stop) {
			yield(nil, err)
		}
	})
	if err == nil {
		err = cw.Flush()
	}
	if err != nil {
		return err
	}
	kept, err := w.a.Attestations(ctx, id)
	if err != nil {
		return err
	}
	var attested []byte
	for _, t := range kept[id] {
		b, err := events.Marshal(t)
		if err != nil {
			return err
		}
		attested = append(append(attested, b...), '\n')
		s.Attestations++
	}
	for _, f := range []*os.File{lines, commits} {
		name := base + extEvents
		if f == commits {
			name = base + extCommits
		}
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			return err
		}
		st, err := f.Stat()
		if err != nil {
			return err
		}
		if err := w.put(name, f, st.Size()); err != nil {
			return err
		}
	}
	if attested != nil {
		if err := w.put(base+extAttestations, bytes.NewReader(attested), int64(len(attested))); err != nil {
			return err
		}
	}
	w.m.Sessions = append(w.m.Sessions, s)
	return nil
}

// put writes a file and notes its hash.
func (w *ArchiveWriter) put(name string, r io.Reader, size int64) error {
	if err := w.t.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: size, ModTime: w.made.UTC().Truncate(time.Second), Format: tar.FormatPAX}); err != nil {
		return err
	}
	h := sha256.New()
	n, err := io.Copy(w.t, io.TeeReader(io.LimitReader(r, size), h))
	if err != nil {
		return err
	}
	w.m.Files = append(w.m.Files, ArchivedFile{name, n, hex.EncodeToString(h.Sum(nil))})
	return nil
}

// Close ends the archive with its manifest.
func (w *ArchiveWriter) Close() error {
	b, err := json.MarshalIndent(w.m, "", " ")
	if err == nil {
		err = w.put(manifestName, bytes.NewReader(b), int64(len(b)))
	}
	return errors.Join(err, w.t.Close(), w.z.Close(), os.RemoveAll(w.dir))
}

// Abort gives an archive up.
func (w *ArchiveWriter) Abort() {
	_ = w.z.Close() // what was written is of no use anyway
	_ = os.RemoveAll(w.dir)
}

// Archive is an archive that was unpacked into a directory, with every file as its manifest
// says.
type Archive struct {
	Manifest
	Dir string
}

// MaxArchive is how many bytes the files of an archive may have unless told otherwise.
const MaxArchive = 64 << 30

func archiveDamaged(format string, args ...any) error {
	return &events.Error{Code: CodeArchive, Detail: "archive: " + fmt.Sprintf(format, args...)}
}

// CodeArchive is the code of an archive that is not as it was written.
const CodeArchive events.Code = "archive-damaged"

// OpenArchive unpacks an archive into a directory, which must be empty, and compares every file
// with the manifest. Its files may have maxBytes in all; 0 means MaxArchive.
func OpenArchive(file, dir string, maxBytes int64) (*Archive, error) {
	if maxBytes == 0 {
		maxBytes = MaxArchive
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	z, err := zstd.NewReader(f, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(sessionfile.DefaultMaxWindow))
	if err != nil {
		return nil, archiveDamaged("%v", err)
	}
	defer z.Close()
	if err := os.MkdirAll(filepath.Join(dir, "sessions"), 0o700); err != nil {
		return nil, err
	}
	sums := map[string]ArchivedFile{}
	left := maxBytes
	var manifest []byte
	for t := tar.NewReader(z); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, archiveDamaged("%v", err)
		}
		switch _, twice := sums[h.Name]; {
		case manifest != nil:
			return nil, archiveDamaged("%q stands behind the manifest, which is the last file", short(h.Name))
		case h.Typeflag != tar.TypeReg || h.Name != manifestName && !archiveNames.MatchString(h.Name):
			return nil, archiveDamaged("%q is no file of an archive", short(h.Name))
		case twice:
			return nil, archiveDamaged("%s is there twice", h.Name)
		case h.Size > left:
			return nil, &events.Error{Code: events.CodeTooLarge, Detail: fmt.Sprintf("archive: its files have more than %d bytes in all", maxBytes)}
		}
		left -= h.Size
		if h.Name == manifestName {
			if manifest, err = io.ReadAll(t); err != nil {
				return nil, archiveDamaged("%v", err)
			}
			continue
		}
		out, err := os.OpenFile(filepath.Join(dir, filepath.FromSlash(h.Name)), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil, err
		}
		hash := sha256.New()
		n, err := io.Copy(out, io.TeeReader(t, hash))
		if cerr := out.Close(); cerr != nil {
			return nil, cerr
		}
		if err != nil {
			return nil, archiveDamaged("%s: %v", h.Name, err)
		}
		sums[h.Name] = ArchivedFile{h.Name, n, hex.EncodeToString(hash.Sum(nil))}
	}
	if manifest == nil {
		return nil, archiveDamaged("it ends without %s: it was cut off", manifestName)
	}
	a := &Archive{Dir: dir}
	if err := json.Unmarshal(manifest, &a.Manifest); err != nil {
		return nil, archiveDamaged("%s: %v", manifestName, err)
	}
	if a.V != 1 {
		return nil, archiveDamaged("%s: version: expected 1, found %d", manifestName, a.V)
	}
	listed := map[string]bool{}
	for _, want := range a.Files {
		got, ok := sums[want.Name]
		switch {
		case !ok:
			return nil, archiveDamaged("%s is in the manifest and not in the archive", short(want.Name))
		case got != want:
			return nil, archiveDamaged("%s was changed: expected SHA-256 %s of %d bytes, found %s of %d", want.Name, short(want.SHA256), want.Bytes, got.SHA256, got.Bytes)
		}
		listed[want.Name] = true
	}
	for name := range sums {
		if !listed[name] {
			return nil, archiveDamaged("%s is not in the manifest", name)
		}
	}
	for _, s := range a.Sessions {
		if !listed[s.File] || !strings.HasSuffix(s.File, extEvents) || path.Dir(s.File) != "sessions" {
			return nil, archiveDamaged("session %q: its file %q is not in the archive", short(s.Session), short(s.File))
		}
	}
	return a, nil
}

func short(s string) string {
	if len(s) > 100 {
		return s[:100] + "…"
	}
	return s
}

// Path is where a file of the archive lies.
func (a *Archive) Path(name string) string { return filepath.Join(a.Dir, filepath.FromSlash(name)) }
