package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/access"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/dial"
)

// ErrConfig marks an error that only a change of the configuration, or of a
// file that it names, can mend.
var ErrConfig = errors.New("configuration")

// stopTimeout bounds how long the links' end is waited for, so that whoever
// stops the process need not kill it.
const stopTimeout = 10 * time.Second

// Tunnel carries agents' connections to the server.
type Tunnel interface {
	// Serve accepts links until Stop, and then returns nil. It closes l.
	Serve(l net.Listener) error
	// Stop ends every link and connection, and waits for them.
	Stop()
}

// Carry is what a Tunnel asks of the server.
type Carry struct {
	// TLS lets in only agents with a verified certificate; nil is plain text,
	// which needs config.Listen.InsecureAgents.
	TLS *tls.Config
	// Admit finds out who an agent is from its verified certificates, its own
	// first. What it returns is the context for Dial.
	Admit func(ctx context.Context, certificates []*x509.Certificate) (context.Context, error)
	Dial  dial.Func
	// Upstreams says which targets' upstreams are up; Changed returns a
	// channel that is closed when that may have changed.
	Upstreams func() map[string]bool
	Changed   func() <-chan struct{}
}

// Options are what Run needs.
type Options struct {
	Config config.Server
	// NewTunnel makes the tunnel.
	NewTunnel func(Carry) Tunnel
	// Resolver resolves the names of destinations and upstreams.
	Resolver access.Resolver
	// Dialer makes the connections to destinations and upstreams.
	Dialer   *net.Dialer
	Log      logrus.FieldLogger
	Registry *prometheus.Registry
	// Explain says more about why a port could not be listened on, such as who
	// has it, and keeps what the error is; nil: nothing more is said.
	Explain func(error) error
	// Listening, if not nil, is told the agents' and the operators' address
	// (nil: none) once both are served.
	Listening func(agents, operators net.Addr)
}
