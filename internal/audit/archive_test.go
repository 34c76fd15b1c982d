package audit_test

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"palimpsest/internal/audit"
	"palimpsest/internal/events"
	"palimpsest/internal/journal/journaltest"
	"palimpsest/internal/projection"
	"palimpsest/internal/sessionfile"
)

func (w *world) export(t *testing.T, id string) []byte {
	t.Helper()
	var b bytes.Buffer
	r := projection.NewReader(w.log, w.headers, w.buckets, projection.NewHeads())
	if err := r.Export(journaltest.Context(t), id, &b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// archive writes an archive of some sessions.
func (w *world) archive(t *testing.T, ids ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a.tar.zst")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	a, err := w.NewArchive(f, time.UnixMilli(1767225600000))
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range ids {
		if err := a.Add(journaltest.Context(t), id); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(a.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}

// For every recorded session, an export is what was imported, in canonical form, and importing it
// elsewhere gives the same events with the same digests, from a file as from an archive.
func TestImportAndExportAreAFixedPoint(t *testing.T) {
	t.Parallel()
	one, two, three := newWorld(t), newWorld(t), newWorld(t)
	ctx := journaltest.Context(t)
	ids := one.imported(t, "v[0-9]*.jsonl")
	dir := t.TempDir()
	path := one.archive(t, ids...)
	ar, err := audit.OpenArchive(path, t.TempDir(), 0)
	if err != nil || len(ar.Sessions) != len(ids) {
		t.Fatalf("%v, %d sessions", err, len(ar.Sessions))
	}
	for i, id := range ids {
		// What the file says, as pass two of a reading gives it.
		f, err := sessionfile.Open(filepath.Join(recorded, id+".jsonl"), sessionfile.Options{IDFrom: sessionfile.IDFromFilename, RepairTail: true})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.Check(ctx); err != nil {
			t.Fatal(err)
		}
		want := append(f.Header().FileLine(), '\n')
		digest := events.SeedDigest(id)
		if err := f.Events(ctx, func(e *events.Event) error {
			want = append(append(want, e.Line...), '\n')
			digest = digest.Next(e.Line)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		exported := one.export(t, id)
		if !bytes.Equal(exported, want) {
			t.Errorf("%s: the export is not what was imported", id)
		}
		file := filepath.Join(dir, fmt.Sprintf("%d.jsonl", i))
		if err := os.WriteFile(file, exported, 0o600); err != nil {
			t.Fatal(err)
		}
		for name, again := range map[string]struct {
			w    *world
			path string
		}{"the export": {two, file}, "the archive": {three, ar.Path(ar.Sessions[i].File)}} {
			rep, err := again.w.Import(ctx, again.path, sessionfile.Options{})
			if err != nil || !rep.OK() || rep.Session != id {
				t.Fatalf("%s: import of %s: %v, %+v", id, name, err, rep)
			}
			last, err := again.w.log.LeaderLast(ctx, id)
			if err != nil || last.Digest != digest || ar.Sessions[i].Digest != digest.String() {
				t.Errorf("%s: digest after the import of %s is another", id, name)
			}
			if !bytes.Equal(again.w.export(t, id), exported) {
				t.Errorf("%s: the export of what %s gave is another", id, name)
			}
		}
	}
	for _, w := range []*world{one, two, three} {
		if r := w.all(audit.Options{Wait: 45 * time.Second}); !r.OK() || r.Sessions != len(ids) {
			t.Errorf("%d sessions, findings %v", r.Sessions, r.Findings)
		}
	}
	if r, err := audit.Files(ctx, []string{path, filepath.Join(dir, "0.jsonl")}, one.log.Vocabulary(), audit.Options{}); err != nil || !r.OK() || r.Sessions != len(ids)+1 {
		t.Errorf("offline: %v, %+v", err, r)
	}
}

// repack changes the files of an archive; a nil content takes one out. With the manifest made
// anew, only what the files say about each other is left.
func repack(t *testing.T, path string, change func(name string, b []byte) []byte) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	z, err := zstd.NewReader(bytes.NewReader(b))
	if err != nil {
		t.Fatal(err)
	}
	defer z.Close()
	var out bytes.Buffer
	zw, err := zstd.NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	tw := tar.NewWriter(zw)
	for tr := tar.NewReader(z); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(tr)
		if err != nil {
			t.Fatal(err)
		}
		if b = change(h.Name, b); b == nil {
			continue
		}
		h.Size = int64(len(b))
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := tw.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(tw.Close(), zw.Close()); err != nil {
		t.Fatal(err)
	}
	changed := filepath.Join(t.TempDir(), "changed.tar.zst")
	if err := os.WriteFile(changed, out.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return changed
}

// What is done to an archive is found without a store, also when the manifest was made to fit.
func TestTamperedArchiveIsFound(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.append("s", user("zero"), user("one"))
	w.append("s", user("two"))
	at := w.attester(t)
	w.round(t, at, 1)
	path := w.archive(t, "s")
	ctx := journaltest.Context(t)
	o := audit.Options{Trusted: []string{at.PublicKey()}}
	r, err := audit.Files(ctx, []string{path}, w.log.Vocabulary(), o)
	if err != nil || !r.OK() || r.Attested != 1 || r.Commits != 2 || r.Events != 3 {
		t.Fatalf("before anything was done: %v, %+v", err, r)
	}
	const file, commits, attestations = "sessions/000001.jsonl", "sessions/000001.commits.jsonl", "sessions/000001.attestations.jsonl"
	edit := func(which, old, with string) func(string, []byte) []byte {
		return func(name string, b []byte) []byte {
			if name == which {
				return bytes.Replace(b, []byte(old), []byte(with), 1)
			}
			return b
		}
	}
	drop := func(which string) func(string, []byte) []byte {
		return func(name string, b []byte) []byte {
			if name == which {
				return nil
			}
			return b
		}
	}
	for name, c := range map[string]struct {
		change func(string, []byte) []byte
		fit    bool // the manifest is made to fit
		want   []string
	}{
		"a byte of an event":          {edit(file, "one", "uno"), false, []string{audit.CheckArchive}},
		"a file taken out":            {drop(attestations), false, []string{audit.CheckArchive}},
		"no manifest":                 {drop("manifest.json"), false, []string{audit.CheckArchive}},
		"a path that leads elsewhere": {edit("manifest.json", file, "sessions/../../x.jsonl"), false, []string{audit.CheckArchive}},

		"a byte of an event, fit":      {edit(file, "one", "uno"), true, []string{audit.CheckDigest}},
		"a header, fit":                {edit(file, `"isSeeded":false`, `"isSeeded":true`), true, []string{audit.CheckChain}},
		"an actor, fit":                {edit(commits, `"actor":"ann"`, `"actor":"bob"`), true, []string{audit.CheckChain}},
		"a commit taken out, fit":      {func(n string, b []byte) []byte { return cutFirst(n == commits, b) }, true, []string{audit.CheckContiguity}},
		"an event taken out, fit":      {func(n string, b []byte) []byte { return cutLast(n == file, b) }, true, []string{audit.CheckContiguity}},
		"an attestation changed, fit":  {edit(attestations, `"seq":2`, `"seq":1`), true, []string{audit.CheckAttested}},
		"no session file that is one":  {edit(file, `{"type":"session"`, `{"type":"x"`), true, []string{audit.CheckFile}},
		"an event that breaks a rule":  {edit(file, `"role":"user"`, `"role":"usr"`), true, []string{audit.CheckFile}},
		"the attestations, fit":        {drop(attestations), true, nil}, // nothing is attested then, and nothing wrong
		"the last commit's chain, fit": {edit(commits, `"lastSeq":1,"digest"`, `"lastSeq":1,"x":1,"digest"`), true, nil},
	} {
		changed := repack(t, path, c.change)
		if c.fit {
			changed = refit(t, changed)
		}
		r, err := audit.Files(ctx, []string{changed}, w.log.Vocabulary(), o)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		kinds := map[string]bool{}
		for _, f := range r.Findings {
			kinds[f.Check] = true
		}
		got := slices.Sorted(maps.Keys(kinds))
		for _, want := range c.want {
			if !kinds[want] {
				t.Errorf("%s: found %v, want %s", name, r.Findings, want)
			}
		}
		if c.want == nil && len(got) > 0 {
			t.Errorf("%s: found %v", name, r.Findings)
		}
	}
	if _, err := audit.OpenArchive(path, t.TempDir(), 100); !errors.Is(err, events.ErrTooLarge) {
		t.Errorf("an archive that is too large: %v", err)
	}
}

func cutFirst(do bool, b []byte) []byte {
	if do {
		return b[bytes.IndexByte(b, '\n')+1:]
	}
	return b
}

func cutLast(do bool, b []byte) []byte {
	if do {
		return b[:bytes.LastIndexByte(b[:len(b)-1], '\n')+1]
	}
	return b
}

// refit makes the manifest of an archive say what its files are.
func refit(t *testing.T, path string) string {
	t.Helper()
	var files []string
	return repack(t, path, func(name string, b []byte) []byte {
		if name != "manifest.json" {
			files = append(files, fmt.Sprintf(`{"name":"%s","bytes":%d,"sha256":"%x"}`, name, len(b), sum256(b)))
			return b
		}
		head, _, _ := strings.Cut(string(b), `"files"`)
		return []byte(head + `"files":[` + strings.Join(files, ",") + `]}`)
	})
}

func sum256(b []byte) [32]byte { return sha256.Sum256(b) }
