package tunnel

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"syscall"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc/credentials"

	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// serverCredentials do the handshake of every link, report those that fail, and
// give each connection its peerLink.
type serverCredentials struct {
	server *Server
	tls    *tls.Config // nil for plain text
}

func newServerCredentials(s *Server) *serverCredentials {
	c := &serverCredentials{server: s}
	if s.cfg.TLS == nil {
		return c
	}
	c.tls = hardenServer(s.cfg.TLS)
	inner := s.cfg.TLS.GetConfigForClient
	c.tls.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		if seen, ok := hello.Context().Value(seenKey{}).(*seenHello); ok {
			seen.hello, seen.tls13 = true, slices.Contains(hello.SupportedVersions, tls.VersionTLS13)
			seen.alpn = slices.Contains(hello.SupportedProtos, tunnelpb.ALPN)
		}
		if inner == nil {
			return nil, nil
		}
		cfg, err := inner(hello)
		if cfg == nil || err != nil {
			return nil, err
		}
		return hardenServer(cfg), nil
	}
	return c
}

// hardenServer also switches off session tickets: a resumed session would not
// look at the CA again, and a link is made too rarely to gain from one.
func hardenServer(cfg *tls.Config) *tls.Config {
	cfg = harden(cfg)
	cfg.SessionTicketsDisabled = true
	return cfg
}

// seenHello is what a client's first message said, as far as it tells why a
// handshake failed.
type seenHello struct{ hello, tls13, alpn bool }

type seenKey struct{}

var errALPN = fmt.Errorf("the client did not offer the protocol %q", tunnelpb.ALPN)

// ServerHandshake implements credentials.TransportCredentials. gRPC bounds it
// by handshakeTimeout, with a deadline on raw.
func (c *serverCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	tune(raw)
	link := newPeerLink(c.server, raw)
	if c.tls == nil {
		return link.watch(raw), link, nil
	}
	var seen seenHello
	conn := tls.Server(raw, c.tls)
	err := conn.HandshakeContext(context.WithValue(context.Background(), seenKey{}, &seen))
	state := conn.ConnectionState()
	if err == nil && state.NegotiatedProtocol != tunnelpb.ALPN {
		err = errALPN
	}
	if err != nil {
		reason := handshakeReason(err, seen)
		if reason == refusedClosed && errors.Is(err, io.EOF) { // not in the middle of a hello
			c.server.probed(raw.RemoteAddr())
		} else {
			c.server.refused(raw.RemoteAddr(), reason, err)
		}
		_ = raw.Close()
		return nil, nil, err
	}
	if len(state.VerifiedChains) > 0 {
		link.certificates = state.VerifiedChains[0]
	}
	return link.watch(conn), link, nil
}

// probed counts a connection that ended before it said anything, as those of
// health checks do.
func (s *Server) probed(from net.Addr) {
	s.cfg.Metrics.handshakes.WithLabelValues(refusedClosed).Inc()
	s.cfg.Log.WithField(observe.FieldFrom, from.String()).Debug("a connection to the agents' port ended without a word")
}

// refused reports a connection that did not become a link.
func (s *Server) refused(from net.Addr, reason string, err error) {
	s.cfg.Metrics.handshakes.WithLabelValues(reason).Inc()
	s.quiet.warn(logrus.Fields{
		observe.FieldFrom: from.String(), observe.FieldReason: reason, logrus.ErrorKey: err,
	}, "a connection to the agents' port did not become a link")
}

// Reasons of connections that did not become links, labels of a metric.
const (
	refusedTimeout   = "timeout"
	refusedClosed    = "closed"
	refusedNotTLS    = "not_tls"
	refusedVersion   = "tls_version"
	refusedALPN      = "alpn"
	refusedUnknownCA = "unknown_ca"
	refusedExpired   = "expired"
	refusedBadCert   = "bad_certificate"
	refusedNoCert    = "no_certificate"
	refusedByPeer    = "refused_by_agent"
	refusedNoHello   = "no_hello"
	refusedProtocol  = "protocol"
	refusedDenied    = "denied"
)

// handshakeReason names why a TLS handshake failed, by the error's type and
// what the client had sent.
func handshakeReason(err error, seen seenHello) string {
	var (
		record    tls.RecordHeaderError
		cert      *tls.CertificateVerificationError
		authority x509.UnknownAuthorityError
		invalid   x509.CertificateInvalidError
		op        *net.OpError
	)
	switch {
	case errors.As(err, &authority):
		return refusedUnknownCA
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return refusedExpired
	case errors.As(err, &cert):
		return refusedBadCert
	case errors.As(err, &record):
		return refusedNotTLS
	case errors.Is(err, os.ErrDeadlineExceeded):
		return refusedTimeout
	case errors.As(err, &op) && op.Op == "remote error": // an alert
		return refusedByPeer
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return refusedClosed
	case !seen.hello:
		return refusedNotTLS
	case !seen.tls13:
		return refusedVersion
	case !seen.alpn:
		return refusedALPN
	}
	// What is left of a hello that was fine is a certificate that is missing.
	return refusedNoCert
}

// ClientHandshake is not for servers.
func (*serverCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("credentials of a server used by an agent's link")
}

// Info implements credentials.TransportCredentials.
func (c *serverCredentials) Info() credentials.ProtocolInfo {
	return (&linkCredentials{tls: c.tls != nil}).Info()
}

// Clone implements credentials.TransportCredentials; the value is never changed.
func (c *serverCredentials) Clone() credentials.TransportCredentials { return c }

// OverrideServerName implements credentials.TransportCredentials.
func (*serverCredentials) OverrideServerName(string) error { return nil }
