package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/v2/event"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// StandaloneNATS runs a stock nats-server with a file store in the test
// process until the test ends, and answers its URL.
func StandaloneNATS(t testing.TB) string {
	t.Helper()
	s, err := server.NewServer(&server.Options{
		Host:      "127.0.0.1",
		Port:      server.RANDOM_PORT,
		JetStream: true,
		StoreDir:  t.TempDir(),
		NoSigs:    true,
		NoLog:     true,
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(func() {
		s.Shutdown()
		s.WaitForShutdown()
	})
	if !s.ReadyForConnections(readyLimit) {
		t.Fatal("nats-server was not ready")
	}
	return s.ClientURL()
}

// Log reads and writes the product's stream and buckets with the bare client.
type Log struct{ js jetstream.JetStream }

// OpenLog connects to a NATS server until the test ends.
func OpenLog(t testing.TB, natsURL string) *Log {
	t.Helper()
	nc, err := nats.Connect(natsURL, nats.MaxReconnects(-1), nats.ReconnectWait(100*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	return &Log{js: js}
}

// Subject is the subject of a session's commits.
func Subject(id string) string {
	token := Token(id)
	sum := fnv.New32a()
	sum.Write([]byte(token))
	return SubjectsPrefix + strconv.Itoa(int(sum.Sum32()%Partitions)) + "." + token
}

// Commit is one message of the stream, its ce-* headers decoded.
type Commit struct {
	StreamSeq uint64
	MsgID     string
	Event     event.Event
	Attribute map[string]string // by attribute name
	Body      []byte
}

// Lines are the commit's events, one canonical line each without its line end.
func (c Commit) Lines() [][]byte {
	return bytes.Split(bytes.TrimSuffix(c.Body, []byte("\n")), []byte("\n"))
}

// Commits reads a session's messages in order, each as a CloudEvent in binary
// mode.
func (l *Log) Commits(ctx context.Context, id string) ([]Commit, error) {
	count, err := l.Count(ctx, id)
	if err != nil || count == 0 {
		return nil, err
	}
	consumer, err := l.js.OrderedConsumer(ctx, Stream, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{Subject(id)},
		DeliverPolicy:  jetstream.DeliverAllPolicy,
	})
	if err != nil {
		return nil, err
	}
	messages, err := consumer.Messages()
	if err != nil {
		return nil, err
	}
	defer messages.Stop()
	commits := make([]Commit, 0, count)
	for range count {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, fmt.Errorf("after %d of %d messages: %w", len(commits), count, err)
		}
		c, err := readCommit(m)
		if err != nil {
			return nil, fmt.Errorf("message %d of %s: %w", len(commits), Subject(id), err)
		}
		commits = append(commits, c)
	}
	return commits, nil
}

// Count is how many messages a session's subject holds.
func (l *Log) Count(ctx context.Context, id string) (uint64, error) {
	stream, err := l.js.Stream(ctx, Stream)
	if err != nil {
		return 0, err
	}
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(Subject(id)))
	if err != nil {
		return 0, err
	}
	return info.State.Subjects[Subject(id)], nil
}

// Delete removes one message from the stream.
func (l *Log) Delete(ctx context.Context, streamSeq uint64) error {
	stream, err := l.js.Stream(ctx, Stream)
	if err != nil {
		return err
	}
	return stream.DeleteMsg(ctx, streamSeq)
}

// valueTries is how often a bucket is asked that does not answer: it may have no leader for a moment.
const valueTries = 8

// Value reads a key of a bucket.
func (l *Log) Value(ctx context.Context, bucket, key string) (value []byte, err error) {
	for range valueTries {
		value, err = l.value(ctx, bucket, key)
		if ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			break
		}
	}
	return value, err
}

func (l *Log) value(ctx context.Context, bucket, key string) ([]byte, error) {
	kv, err := l.js.KeyValue(ctx, bucket)
	if err != nil {
		return nil, fmt.Errorf("bucket %s: %w", bucket, err)
	}
	entry, err := kv.Get(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("key %s of bucket %s: %w", key, bucket, err)
	}
	return entry.Value(), nil
}

// Put overwrites a key of a bucket, whatever its revision.
func (l *Log) Put(ctx context.Context, bucket, key string, value []byte) error {
	kv, err := l.js.KeyValue(ctx, bucket)
	if err != nil {
		return fmt.Errorf("bucket %s: %w", bucket, err)
	}
	_, err = kv.Put(ctx, key, value)
	return err
}

func readCommit(m jetstream.Msg) (Commit, error) {
	c := Commit{Attribute: map[string]string{}, Body: m.Data(), Event: event.New()}
	meta, err := m.Metadata()
	if err != nil {
		return c, err
	}
	c.StreamSeq = meta.Sequence.Stream
	c.MsgID = m.Headers().Get(jetstream.MsgIDHeader)
	for key, values := range m.Headers() {
		name, ok := strings.CutPrefix(key, "ce-")
		if !ok {
			continue
		}
		value, err := url.PathUnescape(values[0])
		if err != nil {
			return c, fmt.Errorf("header %s: %w", key, err)
		}
		c.Attribute[name] = value
		if err := setAttribute(&c.Event, name, value); err != nil {
			return c, fmt.Errorf("header %s: %w", key, err)
		}
	}
	return c, nil
}

// setAttribute builds the sdk's event from one header.
func setAttribute(e *event.Event, name, value string) error {
	switch name {
	case "specversion":
		e.SetSpecVersion(value)
	case "id":
		e.SetID(value)
	case "source":
		e.SetSource(value)
	case "type":
		e.SetType(value)
	case "subject":
		e.SetSubject(value)
	case "datacontenttype":
		e.SetDataContentType(value)
	case "dataschema":
		e.SetDataSchema(value)
	case "time":
		at, err := time.Parse(time.RFC3339Nano, value)
		if err != nil {
			return err
		}
		e.SetTime(at)
	default:
		e.SetExtension(name, value)
	}
	return nil
}

// CheckChain holds a session's commits to the contract: contiguous, every
// digest and chain value recomputed. It answers the canonical lines.
func CheckChain(id string, header []byte, commits []Commit) ([][]byte, error) {
	var lines [][]byte
	chain := CommitChain(id, header)
	for i, c := range commits {
		first := len(lines)
		lines = append(lines, c.Lines()...)
		last := len(lines) - 1
		for seq := first; seq <= last; seq++ {
			e, err := ParseEvent(lines[seq])
			if err != nil {
				return nil, fmt.Errorf("commit %d: event %d: %w", i, seq, err)
			}
			if e.Seq != int64(seq) {
				return nil, fmt.Errorf("commit %d: seq %d where %d follows", i, e.Seq, seq)
			}
			if want := e.Canonical(); !bytes.Equal(lines[seq], want) {
				return nil, fmt.Errorf("commit %d: not the canonical line:\n got %s\nwant %s", i, lines[seq], want)
			}
		}
		digest := Digest(id, lines)
		at := c.Attribute
		chain = NextCommitChain(chain, at["id"], at["actor"], at["time"], at["format"], at["firstseq"], at["lastseq"], digest)
		for _, check := range []struct{ name, want string }{
			{"firstseq", strconv.Itoa(first)},
			{"lastseq", strconv.Itoa(last)},
			{"sequence", fmt.Sprintf("%020d", first)},
			{"digest", Hex(digest)},
			{"chain", Hex(chain)},
		} {
			if at[check.name] != check.want {
				return nil, fmt.Errorf("commit %d (%d..%d): ce-%s is %q, want %q", i, first, last, check.name, at[check.name], check.want)
			}
		}
	}
	return lines, nil
}
