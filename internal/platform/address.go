package platform

import (
	"fmt"
	"net"
	"strconv"
	"strings"
)

// splitListen takes a listen address apart. An empty host means every interface.
func splitListen(listen string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(listen)
	if err == nil {
		port, err = strconv.Atoi(p)
	}
	if err != nil || port < 0 || port > 65535 {
		return "", 0, fmt.Errorf("found %q, expected host:port with a port of 0 to 65535, such as 127.0.0.1:0", listen)
	}
	return host, port, nil
}

// CheckListen says what is wrong with a listen address.
func CheckListen(listen string) error {
	_, _, err := splitListen(listen)
	return err
}

// reachable is the host:port under which this machine reaches a listener; the wildcard is no destination.
func reachable(addr net.Addr) string {
	host, port, err := net.SplitHostPort(addr.String())
	if err != nil {
		return addr.String()
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1" // Go's wildcard listeners take both families
	}
	return net.JoinHostPort(host, port)
}

// onLoopback reports whether only this machine reaches a listener.
func onLoopback(addr net.Addr) bool {
	host, _, err := net.SplitHostPort(addr.String())
	ip := net.ParseIP(host)
	return err == nil && ip != nil && ip.IsLoopback()
}

// withoutUserinfo drops user names, passwords and tokens from NATS URLs, for logs, errors and the ready line.
func withoutUserinfo(urls string) string {
	parts := strings.Split(urls, ",")
	for i, part := range parts {
		scheme, rest, found := strings.Cut(strings.TrimSpace(part), "://")
		if !found {
			scheme, rest = "", scheme
		} else {
			scheme += "://"
		}
		// By hand and not by url.Parse, because a URL that does not parse can hold a password as well.
		parts[i] = scheme + rest[strings.LastIndex(rest, "@")+1:]
	}
	return strings.Join(parts, ",")
}

// Loopback reports whether only this machine reaches a listen address such as 127.0.0.1:8080. A host name other than
// localhost is taken to be reached by others.
func Loopback(listen string) bool {
	host, _, err := splitListen(listen)
	if err != nil {
		return false
	}
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// WithoutSecrets drops user names, passwords and tokens from NATS URLs, for logs.
func WithoutSecrets(urls string) string { return withoutUserinfo(urls) }
