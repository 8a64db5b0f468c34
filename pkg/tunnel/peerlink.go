package tunnel

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/peer"

	"github.com/kasway/kasway/pkg/dial"
)

// peerLink is one agent's connection on the server. It travels as gRPC's
// AuthInfo, from which every stream finds it.
type peerLink struct {
	server       *Server
	raw          net.Conn
	certificates []*x509.Certificate
	streams      atomic.Int64
	// dead is closed with the connection.
	dead chan struct{}
	// helloTimer ends a link whose agent does not say hello.
	helloTimer *time.Timer

	mu      sync.Mutex
	state   linkState
	node    string
	refused bool // what is wrong was reported already
}

// linkState is where a link is in the protocol.
type linkState int

const (
	linkNew    linkState = iota
	linkHello            // Control is open, the hello not checked yet
	linkReady            // streams are welcome, also after Control has ended
	linkClosed           // the connection is gone
)

var (
	errLinkLost = fmt.Errorf("%w: link to the agent lost", dial.ErrLost)
	errNoHello  = errors.New("no hello")
)

func newPeerLink(s *Server, raw net.Conn) *peerLink {
	return &peerLink{server: s, raw: raw, dead: make(chan struct{})}
}

// AuthType implements credentials.AuthInfo.
func (l *peerLink) AuthType() string { return authInfo{l.server.cfg.TLS != nil}.AuthType() }

// linkOf finds the link of a stream's context.
func linkOf(ctx context.Context) *peerLink {
	p, _ := peer.FromContext(ctx)
	return p.AuthInfo.(*peerLink)
}

// watch wraps the link's connection and starts the wait for the hello.
func (l *peerLink) watch(conn net.Conn) net.Conn {
	l.helloTimer = time.AfterFunc(helloTimeout, func() { _ = l.raw.Close() })
	return &watched{Conn: conn, dead: l.closed}
}

// closed is told once that the connection is over.
func (l *peerLink) closed(err error) {
	l.helloTimer.Stop()
	l.mu.Lock()
	was, reported := l.state, l.refused
	l.state = linkClosed
	l.mu.Unlock()
	close(l.dead)
	switch {
	case was == linkReady:
		l.server.cfg.Metrics.links.Dec()
	case !reported:
		l.server.refused(l.raw.RemoteAddr(), refusedNoHello, fmt.Errorf("%w: %w", errNoHello, err))
	}
}

// beginHello is the one Control of a link.
func (l *peerLink) beginHello() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != linkNew {
		return false
	}
	l.state = linkHello
	return true
}

// named takes the agent's name, before it is admitted.
func (l *peerLink) named(node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.node = node
}

// welcome lets the link carry streams; false if it is gone already.
func (l *peerLink) welcome() bool {
	l.helloTimer.Stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != linkHello {
		return false
	}
	l.state = linkReady
	l.server.cfg.Metrics.links.Inc()
	l.server.cfg.Metrics.opened.Inc()
	return true
}

// refuse reports why a link is not welcome; the agent closes it.
func (l *peerLink) refuse(reason string, err error) {
	l.mu.Lock()
	reported := l.refused
	l.refused = true
	l.mu.Unlock()
	if !reported {
		l.server.refused(l.raw.RemoteAddr(), reason, err)
	}
}

func (l *peerLink) ready() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == linkReady
}

// peer describes the agent.
func (l *peerLink) peer() Peer {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Peer{Addr: l.raw.RemoteAddr(), Certificates: l.certificates, Node: l.node}
}

// lost says why a stream's context ended before the stream did.
func (l *peerLink) lost() error {
	select {
	case <-l.dead:
		return errLinkLost
	default:
		return errReset
	}
}
