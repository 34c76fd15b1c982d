package platform

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// authority signs certificates for 127.0.0.1.
type authority struct {
	t    *testing.T
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pool *x509.CertPool
	file string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, pool: x509.NewCertPool(), file: filepath.Join(t.TempDir(), "ca.pem")}
	der, key := a.sign("authority")
	a.key = key
	a.cert, _ = x509.ParseCertificate(der)
	a.pool.AddCert(a.cert)
	a.write(a.file, "CERTIFICATE", der)
	return a
}

// sign makes a certificate: the authority's own while it has none.
func (a *authority) sign(name string) ([]byte, *ecdsa.PrivateKey) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		BasicConstraintsValid: true, IsCA: a.cert == nil,
	}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	return der, key
}

func (a *authority) write(path, kind string, der []byte) {
	a.t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		a.t.Fatal(err)
	}
}

// issue writes a certificate and its key.
func (a *authority) issue(name, cert, key string) {
	a.t.Helper()
	der, k := a.sign(name)
	b, err := x509.MarshalECPrivateKey(k)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(cert, "CERTIFICATE", der)
	a.write(key, "EC PRIVATE KEY", b)
}

// served is the name in the certificate that the server shows.
func served(addr string, cfg *tls.Config) (string, error) {
	conn, err := tls.Dial("tcp", addr, cfg)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	name := conn.ConnectionState().PeerCertificates[0].Subject.CommonName
	// Under TLS 1.3 a refused client certificate shows only when something is read.
	_ = conn.SetDeadline(time.Now().Add(testDeadline))
	if _, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"); err != nil {
		return "", err
	}
	_, err = io.ReadAll(conn)
	return name, err
}

func TestACertificateThatChangesIsServedAndABrokenOneIsNot(t *testing.T) {
	t.Parallel()
	ca, dir := newAuthority(t), t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	ca.issue("first", cert, key)
	h := Serve(HTTPConfig{Listen: "127.0.0.1:0", CertFile: cert, KeyFile: key, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})})
	if err := h.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Stop(testContext(t)) })
	var failed atomic.Int64
	r := ReloadOnChange(ReloadConfig{Files: h.TLSFiles(), Every: 5 * time.Millisecond, Reload: func() error {
		err := h.ReloadTLS()
		if err != nil {
			failed.Add(1)
		}
		return err
	}})
	if err := r.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Stop(testContext(t)) })
	trust := &tls.Config{RootCAs: ca.pool}
	if name, err := served(h.Addr().String(), trust); name != "first" || err != nil {
		t.Fatalf("found %q, %v", name, err)
	}
	if err := os.WriteFile(cert, []byte("half a certif"), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the broken file to be noticed", func() bool { return failed.Load() > 0 })
	if name, err := served(h.Addr().String(), trust); name != "first" || err != nil {
		t.Errorf("with a broken file: found %q, %v", name, err)
	}
	ca.issue("second", cert, key)
	eventually(t, "the new certificate", func() bool { name, _ := served(h.Addr().String(), trust); return name == "second" })
	if _, err := served(h.Addr().String(), &tls.Config{RootCAs: ca.pool, MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}); err == nil {
		t.Error("TLS 1.1 was accepted")
	}
}

func TestWithClientAuthoritiesOnlyTheirCertificatesGetIn(t *testing.T) {
	t.Parallel()
	ca, others, dir := newAuthority(t), newAuthority(t), t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	ca.issue("server", path("s.pem"), path("s.key"))
	ca.issue("client", path("c.pem"), path("c.key"))
	others.issue("stranger", path("x.pem"), path("x.key"))
	h := Serve(HTTPConfig{Listen: "127.0.0.1:0", CertFile: path("s.pem"), KeyFile: path("s.key"), ClientCAFile: ca.file, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})})
	if err := h.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Stop(testContext(t)) })
	for name, want := range map[string]bool{"c": true, "x": false, "": false} {
		cfg := &tls.Config{RootCAs: ca.pool}
		if name != "" {
			pair, err := tls.LoadX509KeyPair(path(name+".pem"), path(name+".key"))
			if err != nil {
				t.Fatal(err)
			}
			cfg.Certificates = []tls.Certificate{pair}
		}
		if _, err := served(h.Addr().String(), cfg); (err == nil) != want {
			t.Errorf("client certificate %q: error %v, let in should be %t", name, err, want)
		}
	}
}

func TestAHangupReadsFilesAgain(t *testing.T) { // not parallel: the signal is the process's
	calls := make(chan struct{}, 16)
	r := ReloadOnChange(ReloadConfig{Every: time.Hour, Reload: func() error { calls <- struct{}{}; return errors.New("refused") }})
	if err := r.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	for range 2 { // an error does not end it
		if err := syscall.Kill(syscall.Getpid(), syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		await(t, "the reload", calls)
	}
	if err := r.Stop(testContext(t)); err != nil {
		t.Fatal(err)
	}
}

func TestAClientThatDribblesItsHeaderIsCutOff(t *testing.T) {
	t.Parallel()
	h := Serve(HTTPConfig{Listen: "127.0.0.1:0", HeaderTimeout: 100 * time.Millisecond, Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("the request came through") })})
	if err := h.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Stop(testContext(t)) })
	conn, err := net.Dial("tcp", h.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		_, _ = io.Copy(io.Discard, conn)
	}()
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\n")
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(testDeadline)
	for i := 0; ; i++ {
		select {
		case <-closed:
			return
		case <-tick.C:
			_, _ = fmt.Fprintf(conn, "X-%d: y\r\n", i) // one header after the other, and never the last
		case <-deadline:
			t.Fatal("the connection is still open")
		}
	}
}

func TestAClientThatStopsReadingIsCutOff(t *testing.T) {
	t.Parallel()
	failed := make(chan error, 1)
	h := Serve(HTTPConfig{Listen: "127.0.0.1:0", WriteTimeout: 200 * time.Millisecond, Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		piece := []byte(strings.Repeat("x", 1<<20))
		for {
			if _, err := w.Write(piece); err != nil {
				failed <- err
				return
			}
		}
	})})
	if err := h.Start(testContext(t)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.Stop(testContext(t)) })
	conn, err := net.Dial("tcp", h.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	if _, err := bufio.NewReader(conn).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	await(t, "the write to fail", failed)
}
