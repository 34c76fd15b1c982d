// Command natsd is one server of a NATS cluster on loopback, with JetStream on a file store. It
// is a process of its own so that a test can kill it.
package main

import (
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

func main() {
	host := flag.String("host", "127.0.0.1", "address that it listens on")
	always := flag.Bool("sync-always", false, "sync each write to disk, instead of each second")
	name := flag.String("name", "", "name of the server")
	port := flag.Int("port", 0, "port for clients")
	clusterPort := flag.Int("cluster-port", 0, "port for the other servers")
	httpPort := flag.Int("http-port", 0, "port for monitoring; 0 for none")
	routes := flag.String("routes", "", "URLs of the other servers, with commas between them")
	// Servers tell each other and their clients where further servers are; with links that can be
	// cut, only the links that were given may be used.
	alone := flag.Bool("no-gossip", false, "use the given routes alone, and tell clients of no other server")
	verbose := flag.Bool("verbose", false, "write warnings and notices to standard error, and not only errors")
	store := flag.String("store", "", "directory of the store")
	flag.Parse()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)

	opts := &server.Options{
		ServerName: *name, Host: *host, Port: *port, JetStream: true, StoreDir: *store, NoSigs: true, NoLog: true,
		HTTPHost: *host, HTTPPort: *httpPort,
		Cluster: server.ClusterOpts{Name: "e2e", Host: *host, Port: *clusterPort},
		Routes:  server.RoutesFromStr(*routes), SyncInterval: time.Second, SyncAlways: *always,
	}
	if *alone {
		opts.Cluster.NoAdvertise, opts.Cluster.Advertise = true, "127.0.0.1:1" // nobody listens there
	}
	s, err := server.NewServer(opts)
	if err != nil {
		log.Fatal(err)
	}
	s.SetLoggerV2(errorLog{*verbose}, false, false, false)
	s.Start()
	if !s.ReadyForConnections(30 * time.Second) {
		log.Fatal("not ready for connections")
	}
	fmt.Printf("{\"ready\":true,\"nats\":\"nats://%s:%d\"}\n", *host, *port)
	<-stop
	s.Shutdown()
	s.WaitForShutdown()
}

// errorLog writes errors to standard error, and warnings and notices when it is to.
type errorLog struct{ verbose bool }

func (errorLog) Errorf(format string, v ...any) { log.Printf(format, v...) }
func (errorLog) Fatalf(format string, v ...any) { log.Fatalf(format, v...) }
func (errorLog) Debugf(string, ...any)          {}
func (errorLog) Tracef(string, ...any)          {}

func (l errorLog) Warnf(format string, v ...any) {
	if l.verbose {
		log.Printf(format, v...)
	}
}

func (l errorLog) Noticef(format string, v ...any) { l.Warnf(format, v...) }
