package journal

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
)

// StoredTypes returns the event types that the stream's vocabulary lists, sorted; none when there
// is no stream.
func StoredTypes(ctx context.Context, js jetstream.JetStream, cfg Config) ([]string, error) {
	s, err := js.Stream(ctx, cfg.WithDefaults().Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("journal: stream %s: %w", cfg.WithDefaults().Stream, err)
	}
	return strings.Fields(s.CachedInfo().Config.Metadata[metaVocabulary]), nil
}

// ForgetType takes a log-only type that a deployment added out of the stream's vocabulary. It
// reads the whole log, and refuses when an event of the type is stored: nobody could fold its
// session then. Events of the type that are ignorable stay opaque and are no obstacle. No
// process that was told of the type may run meanwhile or be started with it later: it would
// accept such events, and add the type again.
func (j *Journal) ForgetType(ctx context.Context, name string) error {
	bad := func(format string, args ...any) error {
		return &events.Error{Code: events.CodeBadRequest, Detail: fmt.Sprintf("event type %.130q: ", name) + fmt.Sprintf(format, args...)}
	}
	if slices.Contains(events.DefaultVocabulary().Types(), name) {
		return bad("is built in and cannot be removed")
	}
	stored, err := StoredTypes(ctx, j.js, j.cfg)
	if err != nil {
		return err
	}
	if !slices.Contains(stored, name) {
		return bad("is not in the vocabulary of stream %s; nothing is to be removed", j.cfg.Stream)
	}
	// Out of the vocabulary first, so that nobody who starts meanwhile learns it.
	if err := j.replaceType(ctx, name, false); err != nil {
		return err
	}
	session, seq, err := j.findType(ctx, name)
	if err == nil && session == "" {
		return nil
	}
	if err == nil {
		err = bad("is that of event %d of session %q; a type stays as long as an event of it is stored", seq, session)
	}
	// Whoever waits for the end of the scan may have given up; the vocabulary must be whole.
	return errors.Join(err, j.replaceType(context.WithoutCancel(ctx), name, true))
}

// replaceType adds a type to the stream's vocabulary, or takes it out.
func (j *Journal) replaceType(ctx context.Context, name string, add bool) error {
	ctx, cancel := context.WithTimeout(ctx, j.cfg.ReadTimeout)
	defer cancel()
	s, err := j.js.Stream(ctx, j.cfg.Stream)
	if err != nil {
		return j.unavailable(err)
	}
	sc := s.CachedInfo().Config
	types := slices.DeleteFunc(strings.Fields(sc.Metadata[metaVocabulary]), func(t string) bool { return t == name })
	if add {
		types = append(types, name)
	}
	v, err := events.NewVocabulary(types...)
	if err != nil {
		return err
	}
	sc.Metadata[metaVocabulary], sc.Metadata[metaHash] = strings.Join(v.Types(), " "), v.Hash()
	if _, err := j.js.UpdateStream(ctx, sc); err != nil {
		return fmt.Errorf("journal: changing the vocabulary of stream %s: %w", j.cfg.Stream, err)
	}
	return nil
}

// findType returns the first stored event of a type that is not ignorable; no session: there is none.
func (j *Journal) findType(ctx context.Context, name string) (session string, seq events.Seq, err error) {
	for from, more := uint64(1), true; more; {
		var msgs []*jetstream.RawStreamMsg
		if msgs, more, err = j.batchOf(ctx, j.cfg.Stream, j.cfg.Prefix+".>", readBatch, readBatchBytes, batchStart{Seq: from}); err != nil {
			return "", 0, err
		}
		for _, m := range msgs {
			from = m.Sequence + 1
			for body := m.Data; len(body) > 0; {
				var line []byte
				line, body = events.CutLine(body)
				if events.TextIs(events.Get(line, "type"), name) && string(events.Get(line, "ignorable")) != "true" {
					seq, _ = events.ParseSeq(string(events.Get(line, "seq")))
					if session, err = events.SessionOf(m.Subject[strings.LastIndexByte(m.Subject, '.')+1:]); err != nil {
						session, err = m.Subject, nil
					}
					return session, seq, nil
				}
			}
		}
	}
	return "", 0, nil
}
