// Command balance shares TCP connections among the addresses of a host name, for compose.yaml:
// several appenders behind one port, without pulling an image. It knows nothing of HTTP; a real
// deployment has a load balancer already.
//
//	balance 0.0.0.0:8080=appender:8080 0.0.0.0:8081=projector:8081
package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// dialTime bounds each attempt to reach one address, so that one that is gone costs little.
const dialTime = time.Second

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "balance:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, pairs []string) error {
	if len(pairs) == 0 {
		return fmt.Errorf("expected listen=host:port, such as 0.0.0.0:8080=appender:8080")
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, p := range pairs {
		listen, to, ok := strings.Cut(p, "=")
		host, port, err := net.SplitHostPort(to)
		if !ok || err != nil {
			return fmt.Errorf("found %q, expected listen=host:port", p)
		}
		ln, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
		if err != nil {
			return err
		}
		context.AfterFunc(ctx, func() { _ = ln.Close() })
		wg.Go(func() { accept(ctx, ln, host, port) })
	}
	return nil
}

func accept(ctx context.Context, ln net.Listener, host, port string) {
	var next atomic.Uint64
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		client, err := ln.Accept()
		if err != nil {
			return
		}
		wg.Go(func() {
			defer client.Close()
			server, err := dial(ctx, host, port, next.Add(1))
			if err != nil {
				slog.Warn("nobody answers", "host", host, "err", err)
				return
			}
			defer server.Close()
			cut := context.AfterFunc(ctx, func() { client.Close(); server.Close() })
			defer cut()
			join(client, server)
		})
	}
}

// dial tries the host's addresses, beginning with another one each time.
func dial(ctx context.Context, host, port string, turn uint64) (net.Conn, error) {
	addrs, err := net.DefaultResolver.LookupHost(ctx, host)
	if err != nil {
		return nil, err
	}
	d := net.Dialer{Timeout: dialTime}
	for i := range addrs {
		var c net.Conn
		if c, err = d.DialContext(ctx, "tcp", net.JoinHostPort(addrs[(turn+uint64(i))%uint64(len(addrs))], port)); err == nil {
			return c, nil
		}
	}
	return nil, err
}

// join hands on what either side sends until both have ended.
func join(a, b net.Conn) {
	var wg sync.WaitGroup
	pass := func(to, from net.Conn) {
		_, _ = io.Copy(to, from) // either end may go at any time
		if t, ok := to.(*net.TCPConn); ok {
			_ = t.CloseWrite()
		}
	}
	wg.Go(func() { pass(a, b) })
	pass(b, a)
	wg.Wait()
}
