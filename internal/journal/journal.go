// Package journal owns the log on JetStream: the stream and its settings, subjects and
// partitions, publishing a commit with a known outcome, reading ranges and tails, and the
// bucket of session headers. It knows commits, not what their events mean.
package journal

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
)

// Config says where the log is and how it is treated.
type Config struct {
	// Stream is the name of the stream. Defaults to SESSIONS.
	Stream string
	// Prefix is the first token of the log's subjects. Defaults to sessions.
	Prefix string
	// Partitions is fixed when the stream is created. Defaults to 32.
	Partitions int
	// Replicas of stream and buckets, used when they are created. Defaults to 1.
	Replicas int
	// MaxMsgSize is the largest message of the stream in bytes, headers included; used when it
	// is created. A smaller one that the stream was created with counts. Defaults to 8 MiB.
	MaxMsgSize int
	// PublishTimeout is how long one publish waits for its ack. Defaults to 2 s.
	PublishTimeout time.Duration
	// RetryBudget is how long a publish whose outcome is not known is pursued. It should
	// outlast the election of a stream leader (6 s and more). Defaults to 20 s.
	RetryBudget time.Duration
	// ReadTimeout bounds one read request. Defaults to 5 s.
	ReadTimeout time.Duration
	// APIPrefix is where the JetStream API listens. Defaults to $JS.API.
	APIPrefix string
}

// WithDefaults fills in what is unset.
func (c Config) WithDefaults() Config {
	def := func(s *string, v string) {
		if *s == "" {
			*s = v
		}
	}
	def(&c.Stream, "SESSIONS")
	def(&c.Prefix, "sessions")
	def(&c.APIPrefix, "$JS.API")
	num := func(n *int, v int) {
		if *n == 0 {
			*n = v
		}
	}
	num(&c.Partitions, 32)
	num(&c.Replicas, 1)
	num(&c.MaxMsgSize, 8<<20)
	dur := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	dur(&c.PublishTimeout, 2*time.Second)
	dur(&c.RetryBudget, 20*time.Second)
	dur(&c.ReadTimeout, 5*time.Second)
	return c
}

// Pursuit is how long a publish takes at the most, whatever becomes of it: its first try, the time for
// which an outcome that is not known is pursued, and a try that begins when that time is nearly up.
func (c Config) Pursuit() time.Duration {
	c = c.WithDefaults()
	return c.RetryBudget + 2*c.PublishTimeout
}

// Keys of the stream's metadata.
const (
	metaPartitions = "palimpsest.partitions"
	metaVocabulary = "palimpsest.vocabulary"      // the known types, sorted, one space between them
	metaHash       = "palimpsest.vocabulary-hash" // hex SHA-256, so that a list cut short is noticed
)

// Conns are the connections that a journal uses.
type Conns struct {
	// Publish carries commits, and those that partitions are followed by. More than one spreads
	// the load of clients with many sessions. Without any, partitions are followed over Read.
	Publish []*nats.Conn
	// Read carries reads, the KV buckets and stream management.
	Read *nats.Conn
	// Made is how often the connections were made, all together: it MUST have grown before anything
	// comes over a new one. nil: the connections are asked, which costs a lock on each.
	Made *atomic.Uint64
}

// Journal is the log. It is safe for concurrent use.
type Journal struct {
	cfg    Config
	conns  Conns
	acks   []*acks // one for each of conns.Publish
	js     jetstream.JetStream
	bulk   []jetstream.JetStream // partitions are followed over these, conns.Publish
	vocab  atomic.Pointer[events.Vocabulary]
	Faults Faults
}

// Faults are points at which a test can get between the journal and the server. All are nil
// in production. A commit may be gone when the append is: who looks at it later copies it.
type Faults struct {
	// BeforePublish may replace the answer to a publish: a non-nil error is taken as the
	// publish's own and nothing is sent.
	BeforePublish func(c *events.Commit) error
	// AfterPublish may replace the answer after the server gave one.
	AfterPublish func(c *events.Commit, err error) error
}

// Open binds to the stream, creating it when it is not there. It refuses a stream with another
// partition count, and one whose vocabulary knows types that v does not; types that only v
// knows are added to the stream's vocabulary.
func Open(ctx context.Context, conns Conns, cfg Config, v *events.Vocabulary) (*Journal, error) {
	j := &Journal{cfg: cfg.WithDefaults(), conns: conns}
	for _, c := range conns.Publish {
		j.acks = append(j.acks, newAcks(c, j.cfg.PublishTimeout))
	}
	var err error
	if j.js, err = jetstream.New(conns.Read); err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	for _, c := range conns.Publish {
		js, err := jetstream.New(c)
		if err != nil {
			return nil, fmt.Errorf("journal: %w", err)
		}
		j.bulk = append(j.bulk, js)
	}
	if j.bulk == nil {
		j.bulk = []jetstream.JetStream{j.js}
	}
	j.vocab.Store(v)
	s, err := j.js.Stream(ctx, j.cfg.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		s, err = j.js.CreateStream(ctx, j.streamConfig(v))
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) { // another process was faster
			s, err = j.js.Stream(ctx, j.cfg.Stream)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("journal: stream %s: %w", j.cfg.Stream, err)
	}
	if err := j.checkStream(ctx, s.CachedInfo().Config); err != nil {
		return nil, err
	}
	return j, nil
}

func (j *Journal) streamConfig(v *events.Vocabulary) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:        j.cfg.Stream,
		Description: "Palimpsest: the event logs of agent sessions, one message a commit",
		Subjects:    []string{j.cfg.Prefix + ".*.*"},
		Storage:     jetstream.FileStorage,
		Retention:   jetstream.LimitsPolicy,
		Discard:     jetstream.DiscardNew, // a full stream refuses appends and never forgets
		AllowDirect: true,
		MaxMsgSize:  int32(j.cfg.MaxMsgSize),
		Replicas:    j.cfg.Replicas,
		Duplicates:  2 * time.Minute,
		Metadata: map[string]string{
			metaPartitions: strconv.Itoa(j.cfg.Partitions),
			metaVocabulary: strings.Join(v.Types(), " "),
			metaHash:       v.Hash(),
		},
	}
}

// checkStream compares an existing stream with what this process knows.
func (j *Journal) checkStream(ctx context.Context, sc jetstream.StreamConfig) error {
	if got := sc.Metadata[metaPartitions]; got != strconv.Itoa(j.cfg.Partitions) {
		return fmt.Errorf("journal: stream %s was created with partition count %q, this process is configured for %d; the count is fixed, so configure %q here", j.cfg.Stream, got, j.cfg.Partitions, got)
	}
	if most := int(sc.MaxMsgSize); most > 0 {
		j.cfg.MaxMsgSize = min(j.cfg.MaxMsgSize, most)
	}
	return j.shareVocabulary(ctx, sc)
}

// shareVocabulary makes sure that this process knows every type of the stream's vocabulary,
// and adds what only this process knows.
func (j *Journal) shareVocabulary(ctx context.Context, sc jetstream.StreamConfig) error {
	v := j.vocab.Load()
	stored := strings.Fields(sc.Metadata[metaVocabulary])
	if missing := v.Missing(stored); missing != nil {
		return fmt.Errorf("journal: the vocabulary of stream %s (hash %s) knows event types that this process (hash %s) does not: %s; start it with them added (--event-types), or take a mistyped one away with `appender event-types remove`", j.cfg.Stream, sc.Metadata[metaHash], v.Hash(), strings.Join(missing, ", "))
	}
	if len(stored) == len(v.Types()) {
		if got := sc.Metadata[metaHash]; got != v.Hash() {
			return fmt.Errorf("journal: the vocabulary of stream %s has hash %s, its types have hash %s; its metadata was changed by hand", j.cfg.Stream, got, v.Hash())
		}
		return nil
	}
	sc.Metadata[metaVocabulary], sc.Metadata[metaHash] = strings.Join(v.Types(), " "), v.Hash()
	if _, err := j.js.UpdateStream(ctx, sc); err != nil {
		return fmt.Errorf("journal: adding event types to the vocabulary of stream %s: %w", j.cfg.Stream, err)
	}
	// An update has no compare-and-set: see that another process, which added types of its
	// own at the same time, has not written over ours.
	s, err := j.js.Stream(ctx, j.cfg.Stream)
	if err != nil {
		return fmt.Errorf("journal: stream %s: %w", j.cfg.Stream, err)
	}
	if s.CachedInfo().Config.Metadata[metaHash] != v.Hash() {
		return j.shareVocabulary(ctx, s.CachedInfo().Config)
	}
	return nil
}

// Vocabulary returns the event types that are known at present.
func (j *Journal) Vocabulary() *events.Vocabulary { return j.vocab.Load() }

// RefreshVocabulary reads the stream's vocabulary again and takes over the log-only types that
// were added meanwhile. It reports whether there were any.
func (j *Journal) RefreshVocabulary(ctx context.Context) (bool, error) {
	s, err := j.js.Stream(ctx, j.cfg.Stream)
	if err != nil {
		return false, j.unavailable(err)
	}
	v := j.vocab.Load()
	missing := v.Missing(strings.Fields(s.CachedInfo().Config.Metadata[metaVocabulary]))
	if missing == nil {
		return false, nil
	}
	grown, err := v.With(missing...)
	if err != nil {
		return false, err
	}
	j.vocab.Store(grown)
	return true, nil
}

// JetStream returns the JetStream context of the reading connection.
func (j *Journal) JetStream() jetstream.JetStream { return j.js }

// Config returns the effective configuration.
func (j *Journal) Config() Config { return j.cfg }

// Partitions returns the partition count.
func (j *Journal) Partitions() int { return j.cfg.Partitions }

// Partition returns the partition of a session.
func (j *Journal) Partition(session string) int {
	return events.Partition(events.Token(session), j.cfg.Partitions)
}

// Subject returns the subject of a session's log.
func (j *Journal) Subject(session string) string {
	var store [320]byte
	return string(j.appendSubject(store[:0], session))
}

func (j *Journal) appendSubject(b []byte, session string) []byte {
	token := events.Token(session)
	b = append(append(b, j.cfg.Prefix...), '.')
	b = strconv.AppendInt(b, int64(events.Partition(token, j.cfg.Partitions)), 10)
	return append(append(b, '.'), token...)
}

// isSubject reports whether a subject is that of a session's log.
func (j *Journal) isSubject(subject, session string) bool {
	var store [320]byte
	return string(j.appendSubject(store[:0], session)) == subject
}

// SessionOfSubject returns the session whose log a subject carries.
func (j *Journal) SessionOfSubject(subject string) (string, error) {
	i := strings.LastIndexByte(subject, '.')
	id, err := events.SessionOf(subject[i+1:])
	if err != nil {
		return "", err
	}
	if want := j.Subject(id); want != subject {
		return "", fmt.Errorf("subject %s: session %q belongs on %s", subject, id, want)
	}
	return id, nil
}

// MaxCommit returns how many bytes of body a commit may have: the smaller of what the stream
// takes and what the server allows, less room for headers.
func (j *Journal) MaxCommit() int {
	most := j.cfg.MaxMsgSize
	if server := int(j.conns.Read.MaxPayload()); server > 0 && server < most {
		most = server
	}
	return most - events.HeaderReserve
}

// Transient reports whether an error of opening the log or its buckets may go away by itself: nobody
// answered, or the cluster has no leader, or too few servers for the replicas that are to be created.
func Transient(err error) bool {
	var e *events.Error
	if errors.As(err, &e) {
		return e.Code == events.CodeUnavailable
	}
	if errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) {
		return false
	}
	var api *jetstream.APIError
	if errors.As(err, &api) {
		return api.Code == 503 || api.ErrorCode == errNoPeers
	}
	for _, away := range []error{context.DeadlineExceeded, nats.ErrTimeout, nats.ErrNoResponders, jetstream.ErrNoStreamResponse,
		jetstream.ErrJetStreamNotEnabled, nats.ErrDisconnected, nats.ErrConnectionReconnecting, nats.ErrReconnectBufExceeded} {
		if errors.Is(err, away) {
			return true
		}
	}
	return false
}

// unavailable is the error of a request that JetStream did not answer.
func (j *Journal) unavailable(err error) error {
	var e *events.Error
	if errors.As(err, &e) {
		return err
	}
	if errors.Is(err, context.Canceled) {
		return err
	}
	return &events.Error{Code: events.CodeUnavailable, Cause: err,
		Detail: fmt.Sprintf("JetStream did not answer: %v; try again", err)}
}
