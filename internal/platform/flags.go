package platform

import (
	"fmt"
	"time"
)

// NATSFlags are the flags that say how to reach NATS, for programs whose command line is read
// by reflection (the tags are kong's).
type NATSFlags struct {
	NATS        string        `name:"nats" help:"URL of NATS, several with commas between them. Without it the appender embeds a server, and a projector uses nats://127.0.0.1:4222." placeholder:"URL" env:"PALIMPSEST_NATS"`
	Context     string        `name:"nats-context" help:"Context of the nats command line, by name or path, in the place of --nats." placeholder:"NAME" env:"PALIMPSEST_NATS_CONTEXT"`
	Creds       string        `help:"NATS credentials file." placeholder:"FILE" env:"PALIMPSEST_NATS_CREDS"`
	NKey        string        `name:"nkey" help:"File with an nkey seed." placeholder:"FILE" env:"PALIMPSEST_NATS_NKEY"`
	TLSCA       string        `name:"tls-ca" help:"PEM file with the authorities that may sign the server's certificate." placeholder:"FILE"`
	TLSCert     string        `name:"tls-cert" help:"PEM file with the client's certificate." placeholder:"FILE"`
	TLSKey      string        `name:"tls-key" help:"PEM file with the client's key." placeholder:"FILE"`
	InboxPrefix string        `help:"Beginning of the subjects on which answers come; permissions may ask for one of its own for each role." placeholder:"SUBJECT" env:"PALIMPSEST_NATS_INBOX_PREFIX"`
	ConnectWait time.Duration `help:"How long to try to connect at start; a program that serves tries again for as long as --start-wait, and no longer." default:"10s"`
}

// AfterApply says what is wrong with the flags, when the command line has been read.
func (f NATSFlags) AfterApply() error {
	return NotBelow(0, map[string]time.Duration{"connect-wait": f.ConnectWait})
}

// Config returns the connection that the flags describe.
func (f NATSFlags) Config(name string) ConnConfig {
	return ConnConfig{
		URL: f.NATS, Context: f.Context, Name: name, CredsFile: f.Creds, NKeyFile: f.NKey,
		CAFile: f.TLSCA, CertFile: f.TLSCert, KeyFile: f.TLSKey, InboxPrefix: f.InboxPrefix, ConnectWait: f.ConnectWait,
	}
}

// StartFlags are the flags of how long a program that serves waits for what is away when it starts.
type StartFlags struct {
	StartWait time.Duration `help:"How long a start waits for NATS, for leaders of stream and buckets, and for servers to create them on, before it ends with an error; /readyz and the log say what is missing. 0: for ever." default:"0s" env:"PALIMPSEST_START_WAIT"`
}

// Check says what is wrong with the flags.
func (f StartFlags) Check() error {
	if f.StartWait < 0 {
		return &ExitError{Code: ExitUsage, Err: fmt.Errorf("--start-wait: expected 0, for ever, or more, found %v", f.StartWait)}
	}
	return nil
}

// Bound has one try to connect end when the start has waited for long enough, should that be earlier.
func (f StartFlags) Bound(n *NATSFlags) {
	if f.StartWait > 0 && (n.ConnectWait == 0 || n.ConnectWait > f.StartWait) {
		n.ConnectWait = f.StartWait
	}
}

// LogFlags are the flags of logging.
type LogFlags struct {
	LogFormat string `help:"Log as json or text, to stderr." enum:"json,text" default:"json" env:"PALIMPSEST_LOG_FORMAT"`
	LogLevel  string `help:"Least level that is logged: debug, info, warn or error." enum:"debug,info,warn,error" default:"info" env:"PALIMPSEST_LOG_LEVEL"`
}

// Setup makes the flags' logger the default one.
func (f LogFlags) Setup() error {
	return SetupLogging(LogConfig{Format: f.LogFormat, Level: f.LogLevel})
}
