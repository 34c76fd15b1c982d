package sessionfile_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/klauspost/compress/zstd"

	"palimpsest/internal/events"
	"palimpsest/internal/sessionfile"
)

var encoder = sync.OnceValues(func() (*zstd.Encoder, error) { return zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1)) })

// frame compresses to one zstd frame.
func frame(t testing.TB, content []byte) []byte {
	t.Helper()
	e, err := encoder()
	if err != nil {
		t.Fatal(err)
	}
	return e.EncodeAll(content, nil)
}

// lineFrames compresses each line to a frame of its own, as a program does that appends.
func lineFrames(t testing.TB, content []byte) (all []byte, ends []int) {
	for line := range bytes.Lines(content) {
		all = append(all, frame(t, line)...)
		ends = append(ends, len(all))
	}
	return all, ends
}

func TestCompressedFilesAreReadAsWhatTheyHold(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	skippable := []byte{0x5a, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 'a', 'b', 'c'}
	for _, path := range files {
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		frames, _ := lineFrames(t, content)
		for name, data := range map[string][]byte{
			"one.jsonl.zst":       frame(t, content),
			"by its magic":        frame(t, content),
			"frames.zst":          frames,
			"skippable.jsonl.zst": bytes.Join([][]byte{frames, skippable, skippable}, skippable)[:len(frames)+len(skippable)],
			"first.jsonl.zst":     append(bytes.Clone(skippable), frames...),
		} {
			want, err := sessionfile.OpenBytes(name, content, sessionfile.Options{RepairTail: true}).Check(t.Context())
			if strings.HasSuffix(name, ".zst") { // the name alone makes a plain file a bad one
				want, err = sessionfile.OpenBytes("plain", content, sessionfile.Options{RepairTail: true}).Check(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			f := sessionfile.OpenBytes(name, data, sessionfile.Options{RepairTail: true})
			got, err := f.Check(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got.OK() != want.OK() || got.Events != want.Events || len(got.Warnings) != len(want.Warnings) || got.OK() && got.Compression != "zstd" {
				t.Errorf("%s as %s: expected %+v, got %+v", path, name, want, got)
			}
			if !want.OK() {
				if got.Problems[0].Line != want.Problems[0].Line || got.Problems[0].Detail != want.Problems[0].Detail {
					t.Errorf("%s as %s: expected %v, got %v", path, name, want.Problems, got.Problems)
				}
				continue
			}
			if g, w := export(t, f), export(t, checked(t, "plain", content, sessionfile.Options{RepairTail: true})); !bytes.Equal(g, w) {
				t.Errorf("%s as %s: expected\n%s\ngot\n%s", path, name, w, g)
			}
		}
	}
}

func zstdContent() []byte {
	return []byte(header + todo(90) + "\n" + todo(300) + "\n" + todo(31) + "\n")
}

func TestCompressedFileThatIsCutOff(t *testing.T) {
	t.Parallel()
	data, ends := lineFrames(t, zstdContent())
	for n := 1; n < len(data); n++ {
		r, err := sessionfile.OpenBytes("s.jsonl.zst", data[:n], sessionfile.Options{RepairTail: true}).Check(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		whole := 0
		for whole < len(ends) && ends[whole] <= n {
			whole++
		}
		if n == ends[max(whole-1, 0)] { // nothing says that there was more
			if !r.OK() || r.Events != int64(whole-1) {
				t.Errorf("cut behind frame %d: got %+v", whole, r)
			}
			continue
		}
		if len(r.Problems) != 1 || r.Problems[0].Code != sessionfile.CodeZstd || !strings.Contains(r.Problems[0].Detail, "cut off") {
			t.Errorf("cut at byte %d: expected %s, got %+v", n, sessionfile.CodeZstd, r.Problems)
		}
	}
}

func TestCompressedFileThatIsDamaged(t *testing.T) {
	t.Parallel()
	content := zstdContent()
	want := export(t, checked(t, "s", content, sessionfile.Options{}))
	data := frame(t, content)
	for i := range data {
		for _, flip := range []byte{1, 0x80, 0xFF} {
			bad := bytes.Clone(data)
			bad[i] ^= flip
			f := sessionfile.OpenBytes("s.jsonl.zst", bad, sessionfile.Options{})
			r, err := f.Check(t.Context())
			switch {
			case err != nil:
				t.Fatal(err)
			case r.OK() && !bytes.Equal(export(t, f), want):
				t.Errorf("byte %d ^ %x: other events were taken", i, flip)
			case !r.OK() && (len(r.Problems) != 1 || r.Problems[0].Code == events.CodeInternal || r.Problems[0].Detail == ""):
				t.Errorf("byte %d ^ %x: got %+v", i, flip, r.Problems)
			}
		}
	}
	for name, c := range map[string]struct {
		data  []byte
		words string
	}{
		"no zstd at all":        {content, "expected a zstd frame, found other bytes"},
		"other bytes behind it": {append(bytes.Clone(data), content...), "expected a zstd frame, found other bytes"},
		"a dictionary":          {[]byte{0x28, 0xb5, 0x2f, 0xfd, 0x21, 0x07, 0x00, 0x01, 0x00, 0x00}, "needs a dictionary"},
		"a wrong checksum":      {append(bytes.Clone(data[:len(data)-1]), data[len(data)-1]^1), "damaged"},
	} {
		r, err := sessionfile.OpenBytes("s.jsonl.zst", c.data, sessionfile.Options{}).Check(t.Context())
		if err != nil || len(r.Problems) != 1 || r.Problems[0].Code != sessionfile.CodeZstd || !strings.Contains(r.Problems[0].Detail, c.words) {
			t.Errorf("%s: expected %q, got %v, %v", name, c.words, r.Problems, err)
		}
	}
	r, err := sessionfile.OpenBytes("s.jsonl.zst", nil, sessionfile.Options{}).Check(t.Context())
	if err != nil || len(r.Problems) != 1 || r.Problems[0].Code != events.CodeHeaderMalformed {
		t.Errorf("an empty file: got %v, %v", r.Problems, err)
	}
}

// rawFrame is a zstd frame of one raw block that asks for a window of 2^log bytes.
func rawFrame(log int, content []byte) []byte {
	block := len(content)<<3 | 1 // the last one
	return append([]byte{0x28, 0xb5, 0x2f, 0xfd, 0, byte(log-10) << 3, byte(block), byte(block >> 8), byte(block >> 16)}, content...)
}

func TestCompressedFileWithAWideWindow(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		log, most int
		words     string
	}{
		{20, 1 << 20, ""},
		{21, 1 << 20, "window of more than 1048576 bytes"},
		{27, 0, ""}, // what zstd --long asks for
		{28, 0, "window of more than 134217728 bytes"},
		{41, 0, "window of more than 134217728 bytes"},
	} {
		r, err := sessionfile.OpenBytes("s.zst", rawFrame(c.log, zstdContent()), sessionfile.Options{MaxWindow: c.most}).Check(t.Context())
		switch {
		case err != nil:
			t.Fatal(err)
		case c.words == "" && !r.OK():
			t.Errorf("window of 2^%d: got %v", c.log, r.Problems)
		case c.words != "" && (len(r.Problems) != 1 || r.Problems[0].Code != sessionfile.CodeZstd || !strings.Contains(r.Problems[0].Detail, c.words)):
			t.Errorf("window of 2^%d: got %v", c.log, r.Problems)
		}
	}
}

// incompressible is n events of 4 KB that compress badly, so that their file has several blocks.
func incompressible(n int) []byte {
	random := rand.New(rand.NewPCG(1, 2))
	var b strings.Builder
	b.WriteString(header)
	for range n {
		text := make([]byte, 4000)
		for i := range text {
			text[i] = 'A' + byte(random.IntN(26))
		}
		b.WriteString(`{"type":"todo/write","data":"` + string(text) + `"}` + "\n")
	}
	return []byte(b.String())
}

func TestOtherCompressedBytesAreNeverHandedOut(t *testing.T) {
	t.Parallel()
	const n = 900
	whole := incompressible(n)
	data := frame(t, whole)
	path := filepath.Join(t.TempDir(), "s.jsonl.zst")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	var seen []int64
	r, f := check(t, path, sessionfile.Options{Progress: func(done, total int64) {
		if total != int64(len(data)) {
			t.Errorf("total: expected %d, got %d", len(data), total)
		}
		seen = append(seen, done)
	}})
	if !r.OK() || r.Events != n {
		t.Fatalf("got %+v", r)
	}
	if len(seen) < 3 || seen[len(seen)-1] != int64(len(data)) {
		t.Errorf("progress: expected several steps up to %d, got %v", len(data), seen)
	}
	// Other events of the same compressed size, at the end: the first blocks are the same.
	var handed bytes.Buffer
	overwrite(t, path, -5000, "yyyy")
	err := f.Events(t.Context(), func(e *events.Event) error { handed.Write(e.Data()); return nil })
	if !errors.Is(err, &events.Error{Code: sessionfile.CodeChanged}) {
		t.Errorf("expected %s, got %v", sessionfile.CodeChanged, err)
	}
	if handed.Len() == 0 || handed.Len() >= len(whole) {
		t.Errorf("expected the events of the blocks that are as they were, got %d bytes of %d", handed.Len(), len(whole))
	}
}

// TestMemoryOfCompressedFilesIsBounded reads 32 MB that are a few KB on disk. It is not
// parallel, since it looks at the heap of the whole process.
func TestMemoryOfCompressedFilesIsBounded(t *testing.T) {
	const most = 48 << 20 // the window of 4 MB among it
	data := append(frame(t, []byte(header)), bytes.Repeat(frame(t, []byte(strings.Repeat(todo(4096)+"\n", 1<<10))), 8)...)
	path := filepath.Join(t.TempDir(), "s.jsonl.zst")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	before, highest, seen := m.HeapInuse, uint64(0), 0
	r, f := check(t, path, sessionfile.Options{})
	if !r.OK() || r.Events != 8<<10 {
		t.Fatalf("got %+v", r)
	}
	err := f.Events(t.Context(), func(*events.Event) error {
		if seen++; seen%1000 == 0 {
			runtime.ReadMemStats(&m)
			highest = max(highest, m.HeapInuse)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if highest > before+most {
		t.Errorf("the heap grew from %d to %d MiB for %d bytes, expected %d MiB more at most", before>>20, highest>>20, len(data), most>>20)
	}
	// One endless line ends at the limit for an event, not at the limit of memory.
	bomb := bytes.Repeat(frame(t, bytes.Repeat([]byte("["), 1<<20)), 256)
	r, err = sessionfile.OpenBytes("s.zst", append(frame(t, []byte(header)), bomb...), sessionfile.Options{}).Check(t.Context())
	runtime.ReadMemStats(&m)
	if err != nil || len(r.Problems) != 1 || r.Problems[0].Code != events.CodeTooLarge || m.HeapInuse > before+2*most {
		t.Errorf("got %v, %v, heap %d MiB", r.Problems, err, m.HeapInuse>>20)
	}
}
