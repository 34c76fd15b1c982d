package audit

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"palimpsest/internal/events"
	"palimpsest/internal/journal"
)

// AttestationsStream holds signed checkpoints, on attestations.<token>.
const AttestationsStream = "ATTESTATIONS"

const attestationsPrefix = "attestations."

// Attestation is a signed checkpoint of a session: whoever holds the key says that the session's
// log, up to and including the commit that ends with Seq, had this digest and this chain.
type Attestation struct {
	V         int        `json:"v"`
	Session   string     `json:"session"`
	Seq       events.Seq `json:"seq"`       // last of a commit
	StreamSeq uint64     `json:"streamSeq"` // of that commit, when it was signed
	Digest    string     `json:"digest"`
	Chain     string     `json:"chain"`
	Time      string     `json:"time"` // RFC 3339, of the signer's clock
	Key       string     `json:"key"`  // public nkey
	Signature string     `json:"sig"`  // base64 of the ed25519 signature over SignedBytes
}

// SignedBytes is what is signed: seven lines, each with its line end.
func (t *Attestation) SignedBytes() []byte {
	return fmt.Appendf(nil, "palimpsest-attestation/1\n%s\n%d\n%d\n%s\n%s\n%s\n", events.Token(t.Session), t.Seq, t.StreamSeq, t.Digest, t.Chain, t.Time)
}

// Check says why the signature is not that of the key, nil when it is.
func (t *Attestation) Check() error {
	key, err := nkeys.FromPublicKey(t.Key)
	if err != nil {
		return fmt.Errorf("key %q: %w", t.Key, err)
	}
	sig, err := base64.StdEncoding.DecodeString(t.Signature)
	if err == nil {
		err = key.Verify(t.SignedBytes(), sig)
	}
	if err != nil {
		return fmt.Errorf("the signature is not one of key %s: %w", t.Key, err)
	}
	return nil
}

func parseAttestation(b []byte) (*Attestation, error) {
	t := new(Attestation)
	if err := json.Unmarshal(b, t); err != nil {
		return nil, fmt.Errorf("attestation: %w", err)
	}
	if t.V != 1 {
		return nil, fmt.Errorf("attestation: version: expected 1, found %d", t.V)
	}
	return t, nil
}

// ReadAttestations reads attestations as an archive holds them, one a line.
func ReadAttestations(r io.Reader) ([]*Attestation, error) {
	var out []*Attestation
	for d := json.NewDecoder(r); ; {
		var raw json.RawMessage
		if err := d.Decode(&raw); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, fmt.Errorf("attestations: %w", err)
		}
		t, err := parseAttestation(raw)
		if err != nil {
			return nil, err
		}
		out = append(out, t)
	}
}

// CheckPublicKey says why a text is no public nkey.
func CheckPublicKey(s string) error {
	if !nkeys.IsValidPublicKey(s) {
		return &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("trusted key: expected a public nkey such as appender keygen prints, found %q", s)}
	}
	return nil
}

// NewKeyFile makes a signing key and stores its seed in a new file that only its owner can read.
// It returns the public key.
func NewKeyFile(path string) (public string, err error) {
	key, err := nkeys.CreateUser()
	if err != nil {
		return "", err
	}
	defer key.Wipe()
	seed, err := key.Seed()
	if err != nil {
		return "", err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("%s exists already; a key is never written over", path)
	}
	if err != nil {
		return "", err
	}
	_, err = f.Write(append(seed, '\n'))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return "", err
	}
	return key.PublicKey()
}

// ReadKeyFile reads a seed. It refuses a file that others than its owner can read.
func ReadKeyFile(path string) (nkeys.KeyPair, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("signing key: %w", err)
	}
	if mode := st.Mode().Perm(); runtime.GOOS != "windows" && mode&0o077 != 0 {
		return nil, fmt.Errorf("signing key %s: expected a file that only its owner can read, found mode %#o; chmod 600 it", path, mode)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("signing key: %w", err)
	}
	key, err := nkeys.FromSeed([]byte(strings.TrimSpace(string(b))))
	if err != nil {
		return nil, fmt.Errorf("signing key %s: expected an nkey seed such as appender keygen makes: %w", path, err)
	}
	return key, nil
}

// AttestConfig is how an Attester attests.
type AttestConfig struct {
	// Keep is how many attestations of a session stay in the stream; used when it is created.
	// Defaults to 8.
	Keep int64
	// Now is the clock. Defaults to time.Now.
	Now func() time.Time
	// Logger hears of sessions that are not attested. Defaults to slog.Default().
	Logger *slog.Logger
}

// Attester signs what was committed. It signs nothing that does not continue, by its commit
// chain, what was signed of a session before. It is not safe for concurrent use.
type Attester struct {
	log     *journal.Journal
	headers *journal.Headers
	key     nkeys.KeyPair
	public  string
	cfg     AttestConfig
	js      jetstream.JetStream

	at      uint64          // everything up to this stream sequence is attested, or never will be
	pending map[string]bool // sessions that had no header when their commits were read
}

// NewAttester opens the stream of attestations and goes on behind the last one.
func NewAttester(ctx context.Context, j *journal.Journal, h *journal.Headers, key nkeys.KeyPair, cfg AttestConfig) (*Attester, error) {
	if cfg.Keep == 0 {
		cfg.Keep = 8
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	t := &Attester{log: j, headers: h, key: key, cfg: cfg, pending: map[string]bool{}}
	var err error
	if t.public, err = key.PublicKey(); err != nil {
		return nil, err
	}
	if t.js, err = jetstream.New(j.JetStream().Conn(), jetstream.WithPublishAsyncMaxPending(256), jetstream.WithPublishAsyncTimeout(j.Config().PublishTimeout)); err != nil {
		return nil, err
	}
	_, err = j.OpenStream(ctx, jetstream.StreamConfig{
		Name: AttestationsStream, Description: "Palimpsest: signed checkpoints of sessions, see docs/audit.md", Subjects: []string{attestationsPrefix + "*"},
		MaxMsgsPerSubject: cfg.Keep, Discard: jetstream.DiscardOld, DenyDelete: true,
	})
	if err != nil {
		return nil, err
	}
	// A round publishes in the order of the commits, so all before the last one are there.
	last, err := j.LastOn(ctx, AttestationsStream, attestationsPrefix+"*")
	if err != nil || last == nil {
		return t, err
	}
	a, err := parseAttestation(last)
	if err != nil {
		return nil, err
	}
	t.at = a.StreamSeq
	return t, nil
}

// PublicKey returns the public key.
func (t *Attester) PublicKey() string { return t.public }

// signedHead is how far a session is signed, and how far it can be.
type signedHead struct {
	session   string
	seq       events.Seq
	streamSeq uint64
	digest    events.Digest
	chain     events.Digest
	news      bool
	broken    bool
}

// Round attests every session that has changed since the last one, and returns how many.
func (t *Attester) Round(ctx context.Context) (signed int, err error) {
	info, err := t.log.Info(ctx)
	if err != nil {
		return 0, err
	}
	end := info.State.LastSeq
	heads := map[string]*signedHead{}
	take := func(session string) (*signedHead, error) {
		h := heads[session]
		if h == nil {
			if h, err = t.head(ctx, session); err != nil {
				return nil, err
			}
			heads[session] = h
		}
		return h, nil
	}
	for session := range t.pending {
		if _, err := t.headers.Get(ctx, session); err != nil {
			continue
		}
		h, err := take(session)
		if err != nil {
			return 0, err
		}
		if h != nil {
			if err := t.readOn(ctx, h, end); err != nil {
				return 0, err
			}
		}
	}
	err = t.log.Scan(ctx, t.at, end, func(d journal.Delivery) error {
		if d.Commit == nil {
			return nil // projectors and verify tell of it
		}
		h, err := take(d.Session)
		if err != nil || h == nil || h.broken || d.StreamSeq <= h.streamSeq {
			return err
		}
		if d.Commit.First != h.seq+1 { // behind a gap in what was read, which is not one in the log
			return t.readOn(ctx, h, d.StreamSeq)
		}
		t.follow(h, d.Commit)
		return nil
	})
	if err != nil {
		return 0, err
	}
	var changed []*signedHead
	for session, h := range heads {
		if h == nil {
			t.pending[session] = true
			continue
		}
		delete(t.pending, session)
		if h.news {
			changed = append(changed, h)
		}
	}
	slices.SortFunc(changed, func(x, y *signedHead) int { return int(int64(x.streamSeq) - int64(y.streamSeq)) })
	if err := t.publish(ctx, changed); err != nil {
		return 0, err
	}
	t.at = end
	return len(changed), nil
}

// head is where a session was signed last, or its beginning; nil when it has no header yet.
func (t *Attester) head(ctx context.Context, session string) (*signedHead, error) {
	last, err := t.log.LastOn(ctx, AttestationsStream, attestationsPrefix+events.Token(session))
	if err != nil {
		return nil, err
	}
	h := &signedHead{session: session, seq: events.NoSeq}
	if last == nil {
		header, err := t.headers.Get(ctx, session)
		if errors.Is(err, events.ErrSessionNotFound) {
			return nil, nil
		}
		var e *events.Error
		if errors.As(err, &e) && e.Code != events.CodeUnavailable {
			t.refuse(h, err.Error())
			return h, nil
		}
		if err != nil {
			return nil, err
		}
		h.digest, h.chain = events.SeedDigest(session), events.SeedChain(session, header.Raw)
		return h, nil
	}
	a, err := parseAttestation(last)
	if err == nil {
		err = a.Check()
	}
	if err == nil {
		h.seq, h.streamSeq = a.Seq, a.StreamSeq
		if h.digest, err = events.ParseDigest(a.Digest); err == nil {
			h.chain, err = events.ParseDigest(a.Chain)
		}
	}
	if err != nil {
		t.refuse(h, err.Error())
	}
	return h, nil
}

// readOn reads a session's log from where it was signed, up to a stream sequence.
func (t *Attester) readOn(ctx context.Context, h *signedHead, upTo uint64) error {
	err := t.log.ReadToEnd(ctx, h.session, h.streamSeq, func(c *events.Commit) error {
		if c.StreamSeq <= upTo && !h.broken {
			t.follow(h, c)
		}
		if c.StreamSeq >= upTo || h.broken {
			return errReached
		}
		return nil
	})
	var bad *journal.MalformedError
	if errors.Is(err, errReached) || errors.As(err, &bad) {
		return nil
	}
	return err
}

// follow takes a commit in if it continues what was signed.
func (t *Attester) follow(h *signedHead, c *events.Commit) {
	if c.First != h.seq+1 {
		t.refuse(h, fmt.Sprintf("expected a commit from seq %d on, found one from %d at stream sequence %d", h.seq+1, c.First, c.StreamSeq))
		return
	}
	chain := h.chain.NextChain(c)
	if chain != c.Chain {
		t.refuse(h, fmt.Sprintf("the commit of seq %d to %d at stream sequence %d does not continue the chain; expected %s, found %s", c.First, c.Last, c.StreamSeq, chain, c.Chain))
		return
	}
	h.seq, h.streamSeq, h.digest, h.chain, h.news = c.Last, c.StreamSeq, c.Digest, chain, true
}

func (t *Attester) refuse(h *signedHead, why string) {
	h.broken = true
	t.cfg.Logger.Error("the session is not attested from here on; run projector verify", "session", h.session, "seq", int64(h.seq), "why", why)
}

func (t *Attester) publish(ctx context.Context, heads []*signedHead) error {
	var acks []jetstream.PubAckFuture
	for _, h := range heads {
		a := Attestation{V: 1, Session: h.session, Seq: h.seq, StreamSeq: h.streamSeq, Digest: h.digest.String(), Chain: h.chain.String(), Time: events.FormatTime(t.cfg.Now()), Key: t.public}
		sig, err := t.key.Sign(a.SignedBytes())
		if err != nil {
			return err
		}
		a.Signature = base64.StdEncoding.EncodeToString(sig)
		b, err := events.Marshal(a)
		if err != nil {
			return err
		}
		ack, err := t.js.PublishAsync(attestationsPrefix+events.Token(h.session), b)
		if err != nil {
			return err
		}
		acks = append(acks, ack)
	}
	for _, ack := range acks {
		select {
		case <-ack.Ok():
		case err := <-ack.Err():
			return fmt.Errorf("storing an attestation: %w", err)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// Attestations returns the attestations that the store keeps of a session, in the order in
// which they were signed; of all sessions when it is "".
func (a *Auditor) Attestations(ctx context.Context, session string) (map[string][]*Attestation, error) {
	subject := attestationsPrefix + "*"
	if session != "" {
		subject = attestationsPrefix + events.Token(session)
	}
	out := map[string][]*Attestation{}
	err := a.log.Each(ctx, AttestationsStream, subject, func(m jetstream.Msg) error {
		id, err := events.SessionOf(strings.TrimPrefix(m.Subject(), attestationsPrefix))
		if err != nil {
			return nil // no session's
		}
		t, err := parseAttestation(m.Data())
		if err != nil {
			t = &Attestation{Session: id, Signature: err.Error()} // fails its check
		}
		out[id] = append(out[id], t)
		return nil
	})
	if journal.StreamMissing(err) {
		return out, nil // nobody attests here
	}
	return out, err
}
