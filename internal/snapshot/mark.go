package snapshot

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/events"
)

// Mark remembers a head that was written, to tell later whether the bucket lost its end since.
type Mark struct {
	Revision uint64 `json:"revision"`
	Session  string `json:"session,omitempty"` // "" when it is not known whose the revision is
	Chain    string `json:"chain,omitempty"`   // of the head
}

// Mark is that of a flush that was written.
func (f *Flush) Mark(revision uint64) *Mark {
	return &Mark{revision, f.session, f.chain.String()}
}

// stream is the bucket's stream, with its state as it is now.
func (s *Store) stream(ctx context.Context) (jetstream.Stream, error) {
	st, err := s.register.js.Stream(ctx, "KV_"+s.generation.Bucket)
	if err != nil {
		return nil, unavailable(err)
	}
	return st, nil
}

// End is the mark of whatever was written last.
func (s *Store) End(ctx context.Context) (*Mark, error) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	st, err := s.Pin(ctx).stream(ctx)
	if err != nil {
		return nil, err
	}
	return &Mark{Revision: st.CachedInfo().State.LastSeq}, nil
}

// Lost reports whether the bucket has less than when a mark was made (nil for none), or something else
// in its place. A head that a newer one took the place of is not lost.
func (s *Store) Lost(ctx context.Context, m *Mark) (bool, error) {
	if m == nil || m.Revision == 0 {
		return false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	s = s.Pin(ctx)
	st, err := s.stream(ctx)
	if err != nil {
		return false, err
	}
	if st.CachedInfo().State.LastSeq < m.Revision {
		return true, nil
	}
	if m.Session == "" {
		return false, nil
	}
	msg, err := st.GetMsg(ctx, m.Revision)
	switch {
	case errors.Is(err, jetstream.ErrMsgNotFound):
		return false, nil
	case err != nil:
		return false, unavailable(err)
	}
	var head struct{ Chain string }
	return msg.Subject != "$KV."+s.generation.Bucket+"."+events.Token(m.Session) || json.Unmarshal(msg.Data, &head) != nil || head.Chain != m.Chain, nil
}
