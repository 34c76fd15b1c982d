package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// Backup stores a stream as `nats stream backup` does, by the snapshot API of JetStream, and answers
// the size of the files.
func (l *Log) Backup(ctx context.Context, stream, dir string) (bytes int64, err error) {
	nc := l.js.Conn()
	sub, err := nc.SubscribeSync(nc.NewInbox())
	if err != nil {
		return 0, err
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := sub.SetPendingLimits(-1, -1); err != nil { // the server's window bounds it
		return 0, err
	}
	var made server.JSApiStreamSnapshotResponse
	if err := l.request(ctx, "$JS.API.STREAM.SNAPSHOT."+stream, server.JSApiStreamSnapshotRequest{DeliverSubject: sub.Subject, NoConsumers: true, CheckMsgs: true}, &made); err != nil {
		return 0, err
	}
	if made.Error != nil {
		return 0, made.Error
	}
	meta, err := json.Marshal(server.JSApiStreamRestoreRequest{Config: *made.Config, State: *made.State})
	if err != nil {
		return 0, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return 0, err
	}
	if err := os.WriteFile(filepath.Join(dir, "backup.json"), meta, 0o600); err != nil {
		return 0, err
	}
	out, err := os.Create(filepath.Join(dir, "stream.tar.s2"))
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	for {
		m, err := sub.NextMsgWithContext(ctx)
		if err != nil {
			return 0, fmt.Errorf("backup of %s behind %d bytes: %w", stream, bytes, err)
		}
		if len(m.Data) == 0 { // the end
			if status := m.Header.Get("Status"); status != "" && status != "204" {
				return 0, fmt.Errorf("backup of %s: %s %s", stream, status, m.Header.Get("Description"))
			}
			return bytes, nil
		}
		n, err := out.Write(m.Data)
		if bytes += int64(n); err == nil && m.Reply != "" {
			err = m.Respond(nil) // asks for more
		}
		if err != nil {
			return 0, err
		}
	}
}

// Restore makes a stream of what Backup stored, and answers how many messages it has.
func (l *Log) Restore(ctx context.Context, stream, dir string) (uint64, error) {
	meta, err := os.ReadFile(filepath.Join(dir, "backup.json"))
	if err != nil {
		return 0, err
	}
	var ready server.JSApiStreamRestoreResponse
	if err := l.request(ctx, "$JS.API.STREAM.RESTORE."+stream, json.RawMessage(meta), &ready); err != nil {
		return 0, err
	}
	if ready.Error != nil {
		return 0, ready.Error
	}
	in, err := os.Open(filepath.Join(dir, "stream.tar.s2"))
	if err != nil {
		return 0, err
	}
	defer in.Close()
	chunk := make([]byte, 512<<10)
	for {
		n, err := io.ReadFull(in, chunk)
		if n > 0 {
			var taken server.ApiResponse
			m, err := l.js.Conn().RequestWithContext(ctx, ready.DeliverSubject, chunk[:n])
			if err != nil {
				return 0, err
			}
			if len(m.Data) > 0 && json.Unmarshal(m.Data, &taken) == nil && taken.Error != nil {
				return 0, taken.Error
			}
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return 0, err
		}
	}
	m, err := l.js.Conn().RequestWithContext(ctx, ready.DeliverSubject, nil)
	if err != nil {
		return 0, err
	}
	var made server.JSApiStreamCreateResponse
	if err := json.Unmarshal(m.Data, &made); err != nil {
		return 0, err
	}
	if made.Error != nil {
		return 0, made.Error
	}
	if made.StreamInfo == nil || made.Config.Name != stream {
		return 0, fmt.Errorf("restore of %s: found the answer %s", stream, m.Data)
	}
	return made.State.Msgs, nil
}

// Wipe removes every stream, buckets too.
func (l *Log) Wipe(ctx context.Context) (streams []string, err error) {
	names := l.js.StreamNames(ctx)
	for name := range names.Name() {
		streams = append(streams, name)
	}
	if err := names.Err(); err != nil {
		return nil, err
	}
	for _, name := range streams {
		if err := l.js.DeleteStream(ctx, name); err != nil {
			return nil, err
		}
	}
	slices.Sort(streams)
	return streams, nil
}

func (l *Log) request(ctx context.Context, subject string, body, answer any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return err
	}
	m, err := l.js.Conn().RequestMsgWithContext(ctx, &nats.Msg{Subject: subject, Data: b})
	if err != nil {
		return err
	}
	return json.Unmarshal(m.Data, answer)
}

// Within is a context for what takes long.
func Within(t testing.TB, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}
