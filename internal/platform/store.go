package platform

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// ErrStoreDamaged is matched by the error of a store that holds messages which nats-server cannot read.
//
// By itself the server warns, goes on without the stream, and lets an empty one of the same name be created over
// it. So StartServer compares what it finds on disk with what was recovered. It does not find damage inside a
// stream: the server then answers "message not found", or cuts a block at the first record that it cannot read.
// Finding that takes what the messages say about each other.
var ErrStoreDamaged = errors.New("the store is damaged")

// checkWithin bounds asking the server for the streams that it has recovered.
const checkWithin = 30 * time.Second

// storedStream is a stream that has messages on disk.
type storedStream struct{ name, dir string }

// storedStreams lists them. A folder without messages is not one: the creation of a stream can be cut short.
func storedStreams(dataDir string) ([]storedStream, error) {
	root := filepath.Join(dataDir, server.JetStreamStoreDir, server.DEFAULT_GLOBAL_ACCOUNT, "streams")
	entries, err := os.ReadDir(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w; check the rights of %s", ErrStoreDamaged, err, root)
	}
	var streams []storedStream
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), ".") { // half deleted
			continue
		}
		dir := filepath.Join(root, entry.Name())
		has, err := hasMessages(dir)
		if err != nil {
			return nil, fmt.Errorf("%w: %w; check the rights of %s", ErrStoreDamaged, err, dir)
		}
		if has {
			streams = append(streams, storedStream{entry.Name(), dir})
		}
	}
	return streams, nil
}

func hasMessages(streamDir string) (bool, error) {
	blocks, err := os.ReadDir(filepath.Join(streamDir, "msgs"))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, block := range blocks {
		if info, err := block.Info(); err == nil && filepath.Ext(block.Name()) == ".blk" && info.Size() > 0 {
			return true, nil
		}
	}
	return false, nil
}

// checkRecovered returns ErrStoreDamaged when the server does not have all of the stored streams.
func (s *Server) checkRecovered(stored []storedStream, warnings []string) error {
	if len(stored) == 0 {
		return nil
	}
	ctx, done := context.WithTimeout(context.Background(), checkWithin)
	defer done()
	nc, err := nats.Connect("", nats.Name("store check"), nats.InProcessServer(s))
	if err != nil {
		return fmt.Errorf("store check: %w", err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return fmt.Errorf("store check: %w", err)
	}
	var lost []string
	for _, stream := range stored {
		_, err := js.Stream(ctx, stream.name)
		if err == nil {
			continue
		}
		if ctx.Err() != nil {
			return fmt.Errorf("store check: the server did not answer within %s: %w", checkWithin, err)
		}
		lost = append(lost, fmt.Sprintf("stream %s in %s was not recovered (%s)", stream.name, stream.dir, reason(stream, warnings, err)))
	}
	if len(lost) > 0 {
		return fmt.Errorf("%w: %s; restore the directory from a backup, or move it away to go on without what it holds",
			ErrStoreDamaged, strings.Join(lost, ", "))
	}
	return nil
}

// reason is the server's warning about the stream, or else how it answered.
func reason(stream storedStream, warnings []string, answer error) string {
	i := slices.IndexFunc(warnings, func(w string) bool {
		return strings.Contains(w, stream.dir) || strings.Contains(w, `"`+stream.name+`"`) || strings.Contains(w, "> "+stream.name+"'")
	})
	if i < 0 {
		return answer.Error()
	}
	return warnings[i]
}
