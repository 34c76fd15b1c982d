package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"palimpsest/internal/auth"
	"palimpsest/internal/events"
	"palimpsest/internal/platform"
)

// AccessConfig describes the log of reads.
type AccessConfig struct {
	// Stream is its name. Defaults to ACCESS.
	Stream string
	// Prefix is the first token of its subjects: <prefix>.session.<token> and <prefix>.list.
	// Defaults to access.
	Prefix string
	// MaxAge is how long records stay, where the stream is created. Defaults to 90 days.
	MaxAge time.Duration
	// Replicas of the stream, where it is created. Defaults to 1.
	Replicas int
	// Queue is how many records may wait for JetStream; more are dropped and counted. Defaults to 4096.
	Queue int
	// Patience is how the start waits for the stream. Defaults to not at all.
	Patience platform.Patience
	// Logger hears of dropped records. Defaults to slog.Default().
	Logger *slog.Logger
}

// Access is a record of a read.
type Access struct {
	Time    string `json:"time"` // RFC 3339, when the answer was over
	Actor   string `json:"actor"`
	Session string `json:"session,omitempty"`
	Method  string `json:"method"`
	Path    string `json:"path"`            // as requested, still escaped
	Query   string `json:"query,omitempty"` // as requested
	Status  int    `json:"status"`
	Bytes   int64  `json:"bytes"` // of the body
	Remote  string `json:"remote"`
}

// AccessLog writes records of reads to a stream. Reads do not wait for it: a record that the
// stream does not take in time is dropped, counted and said in the log. It is a
// platform.Service.
type AccessLog struct {
	*platform.Runner
	cfg     AccessConfig
	js      jetstream.JetStream
	queue   chan Access
	stored  atomic.Int64
	dropped atomic.Int64
}

// NewAccessLog returns the log; the stream is created when it starts, unless it is there.
func NewAccessLog(js jetstream.JetStream, cfg AccessConfig) *AccessLog {
	if cfg.Stream == "" {
		cfg.Stream = "ACCESS"
	}
	if cfg.Prefix == "" {
		cfg.Prefix = "access"
	}
	if cfg.MaxAge == 0 {
		cfg.MaxAge = 90 * 24 * time.Hour
	}
	if cfg.Replicas == 0 {
		cfg.Replicas = 1
	}
	if cfg.Queue == 0 {
		cfg.Queue = 4096
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	l := &AccessLog{cfg: cfg, js: js, queue: make(chan Access, cfg.Queue)}
	l.Runner = platform.NewRunner(l.run)
	return l
}

func (l *AccessLog) run(ctx context.Context, ready func()) error {
	if err := l.cfg.Patience.Do(ctx, "stream of reads", l.bind); err != nil {
		return err
	}
	ready()
	for {
		select {
		case a := <-l.queue:
			l.store(context.WithoutCancel(ctx), a) // one that is being stored when the program stops is stored
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), accessTime)
			defer cancel()
			for { // the HTTP server has stopped by now: what waits is all there will be
				select {
				case a := <-l.queue:
					l.store(last, a)
				default:
					return nil
				}
			}
		}
	}
}

// bind creates the stream when it is not there.
func (l *AccessLog) bind(ctx context.Context) error {
	_, err := l.js.Stream(ctx, l.cfg.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		_, err = l.js.CreateStream(ctx, jetstream.StreamConfig{
			Name: l.cfg.Stream, Description: "Palimpsest: who read which session", Subjects: []string{l.cfg.Prefix + ".>"},
			Storage: jetstream.FileStorage, MaxAge: l.cfg.MaxAge, Replicas: l.cfg.Replicas,
		})
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			err = nil // another process was faster
		}
	}
	if err != nil {
		return fmt.Errorf("stream %s of the access log: %w", l.cfg.Stream, err)
	}
	return nil
}

// accessTime is how long JetStream may take for a record, and for all that wait when the program stops.
const accessTime = 5 * time.Second

func (l *AccessLog) store(ctx context.Context, a Access) {
	subject := l.cfg.Prefix + ".list"
	if a.Session != "" {
		subject = l.cfg.Prefix + ".session." + events.Token(a.Session)
	}
	b, err := json.Marshal(a)
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, accessTime)
		_, err = l.js.Publish(ctx, subject, b)
		cancel()
	}
	if err != nil {
		l.drop(a, err)
		return
	}
	l.stored.Add(1)
}

func (l *AccessLog) drop(a Access, err error) {
	l.dropped.Add(1)
	l.cfg.Logger.Error("a read was not recorded", "actor", a.Actor, "path", a.Path, "status", a.Status, "err", err)
}

// add takes a record without waiting.
func (l *AccessLog) add(a Access) {
	select {
	case l.queue <- a:
	default:
		l.drop(a, fmt.Errorf("%d records wait already", l.cfg.Queue))
	}
}

// record notes every read of sessions with what became of it.
func (e *Edge) record(rt *router, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path, session, err := splitPath(r)
		need := rightFor(r.Method, path)
		if err != nil || !rt.has(r.Method, path) || len(need.scopes) == 0 || need.scopes[0] != auth.Read || need.on == onAnything {
			next.ServeHTTP(w, r)
			return
		}
		counted := &countedWriter{ResponseWriter: w, status: http.StatusOK}
		defer func() { // also when the answer breaks off, which panics
			actor := events.NoActor
			if c := auth.From(r.Context()); c != nil {
				actor = c.Name
			}
			e.Access.add(Access{
				Time: events.FormatTime(time.Now()), Actor: actor, Session: session, Method: r.Method, Path: r.URL.EscapedPath(),
				Query: r.URL.RawQuery, Status: counted.status, Bytes: counted.bytes, Remote: r.RemoteAddr,
			})
		}()
		next.ServeHTTP(counted, r)
	})
}

// countedWriter notes status and bytes of an answer.
type countedWriter struct {
	http.ResponseWriter
	status int
	bytes  int64
}

func (w *countedWriter) WriteHeader(status int) {
	w.status = status
	w.ResponseWriter.WriteHeader(status)
}

func (w *countedWriter) Write(b []byte) (int, error) {
	n, err := w.ResponseWriter.Write(b)
	w.bytes += int64(n)
	return n, err
}

// Unwrap lets http.ResponseController reach the connection.
func (w *countedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
