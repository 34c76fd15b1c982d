package snapshot

import (
	"context"
	"errors"

	"github.com/nats-io/nats.go/jetstream"
)

// Serving returns the name of the bucket whose snapshots serve, and changes nothing: it is that
// of the first generation where none is on record yet.
func Serving(ctx context.Context, js jetstream.JetStream) (string, error) {
	kv, err := js.KeyValue(ctx, GenerationsBucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		return Bucket, nil
	}
	if err != nil {
		return "", unavailable(err)
	}
	g, err := (&register{js: js, kv: kv}).stored(ctx)
	if err != nil {
		return "", err
	}
	if g == nil {
		return Bucket, nil
	}
	return g.Current.Bucket, nil
}
