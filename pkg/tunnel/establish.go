package tunnel

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

var (
	errHelloTimeout = fmt.Errorf("%w: no answer to the hello within %v", dial.ErrTimeout, helloTimeout)
	errNotKasway    = errors.New("the peer is no Kasway server")
)

// establish makes a session: TCP, TLS, HTTP/2, hello. It does the first two
// itself, so that their errors keep their types and the socket its options.
func (l *link) establish(ctx context.Context) (*session, error) {
	connectCtx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	raw, err := l.links.cfg.DialContext(connectCtx, "tcp", l.server)
	if err != nil {
		return nil, &linkError{stepConnect, dial.Classify(err)}
	}
	tune(raw)
	conn, err := l.secure(ctx, raw)
	if err != nil {
		_ = raw.Close()
		return nil, &linkError{stepTLS, err}
	}
	s, err := newSession(ctx, l, raw, conn)
	if err != nil {
		_ = raw.Close()
		return nil, &linkError{stepHello, err}
	}
	if err := s.hello(); err != nil {
		s.cancel(err)
		s.close()
		return nil, err
	}
	return s, nil
}

// secure does the TLS handshake.
func (l *link) secure(ctx context.Context, raw net.Conn) (net.Conn, error) {
	if l.links.cfg.TLS == nil {
		return raw, nil
	}
	cfg := harden(l.links.cfg.TLS)
	if cfg.ServerName == "" {
		host, _, err := net.SplitHostPort(l.server)
		if err != nil {
			return nil, fmt.Errorf("server %q: %w", l.server, err)
		}
		cfg.ServerName = host
	}
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	conn := tls.Client(raw, cfg)
	if err := conn.HandshakeContext(ctx); err != nil {
		var record tls.RecordHeaderError
		if errors.As(err, &record) {
			return nil, fmt.Errorf("%w: it does not speak TLS: %w", errNotKasway, err)
		}
		return nil, fmt.Errorf("handshake: %w", err)
	}
	if p := conn.ConnectionState().NegotiatedProtocol; p != tunnelpb.ALPN {
		return nil, fmt.Errorf("%w: it agreed to the protocol %q, not %q", errNotKasway, p, tunnelpb.ALPN)
	}
	return conn, nil
}

// harden returns a copy of cfg that allows what a link uses and nothing older.
func harden(cfg *tls.Config) *tls.Config {
	cfg = cfg.Clone()
	cfg.MinVersion = tls.VersionTLS13
	cfg.NextProtos = []string{tunnelpb.ALPN}
	return cfg
}

// newSession starts HTTP/2 on a connection, which it owns when it succeeds.
func newSession(ctx context.Context, l *link, raw, conn net.Conn) (*session, error) {
	s := &session{link: l, raw: raw}
	// Not bound to ctx: a session ends in order, by serve and drain.
	s.ctx, s.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	s.stop = context.AfterFunc(ctx, func() {
		s.cancel(fmt.Errorf("%w: the agent stops", dial.ErrLost))
	})
	w := &watched{Conn: conn, dead: func(err error) {
		// Not wrapped: an io.EOF of the link is no end of a connection.
		s.cancel(fmt.Errorf("%w: link to %s: %v", dial.ErrLost, l.server, err))
	}}
	var used atomic.Bool
	// The connection is made already; gRPC gets no second one, so that it never
	// reconnects, resolves or sends a stream again on its own.
	once := func(context.Context, string) (net.Conn, error) {
		if used.Swap(true) {
			return nil, errors.New("the link's connection is over")
		}
		return w, nil
	}
	cc, err := grpc.NewClient("passthrough:///link", append(linkOptions(),
		grpc.WithContextDialer(once),
		grpc.WithAuthority(l.server),
		grpc.WithUserAgent("kasway"),
		grpc.WithTransportCredentials(&linkCredentials{tls: l.links.cfg.TLS != nil}),
	)...)
	if err != nil {
		s.stop()
		return nil, err
	}
	s.cc = cc
	return s, nil
}

// hello opens Control and exchanges the first messages.
func (s *session) hello() error {
	timer := time.AfterFunc(helloTimeout, func() { s.cancel(errHelloTimeout) })
	defer timer.Stop()
	start := time.Now()
	if err := s.greet(); err != nil {
		return s.helloError(err)
	}
	s.helloTime = time.Since(start)
	if !timer.Stop() {
		return s.helloError(errHelloTimeout)
	}
	return nil
}

func (s *session) greet() error {
	cfg := &s.link.links.cfg
	control, err := s.cc.NewStream(s.ctx, &controlStream, tunnelpb.MethodControl, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	s.control = control
	own := newHello(cfg.Version, cfg.Node)
	if err := control.SendMsg(&tunnelpb.ToServer{Message: &tunnelpb.ToServer_Hello{Hello: own}}); err != nil && !isEnd(err) {
		return err // io.EOF: receiving says why
	}
	var m tunnelpb.ToAgent
	if err := control.RecvMsg(&m); err != nil {
		return err
	}
	if s.peer = m.GetHello(); s.peer == nil {
		return fmt.Errorf("%w: its first message is no hello", errNotKasway)
	}
	if err := checkHello("agent", own, "server", s.peer); err != nil {
		return err
	}
	s.peer.Version, s.peer.Name = clean(s.peer.GetVersion()), clean(s.peer.GetName())
	// The upstreams' state follows at once, so that a new link never looks
	// better than it is.
	var state tunnelpb.ToAgent
	if err := control.RecvMsg(&state); err != nil {
		return err
	}
	s.initial = state.GetUpstreams().GetUp()
	return nil
}

// helloError says at which step a hello failed.
func (s *session) helloError(err error) error {
	var version *versionError
	switch st, ok := status.FromError(err); {
	case s.ctx.Err() != nil:
		return &linkError{stepHello, context.Cause(s.ctx)}
	case errors.As(err, &version):
		return &linkError{stepVersion, err}
	case !ok || errors.Is(err, errNotKasway):
		return &linkError{stepHello, err}
	case reasonOf(st) == tunnelpb.ReasonVersion:
		return &linkError{stepVersion, errors.New(st.Message())}
	case reasonOf(st) == tunnelpb.ReasonDenied:
		return &linkError{stepDenied, fromStatus(err)}
	case reasonOf(st) == "" && st.Code() == codes.Unimplemented:
		return &linkError{stepHello, fmt.Errorf("%w: it speaks gRPC but does not know %s", errNotKasway, tunnelpb.Service)}
	case reasonOf(st) == "" && st.Code() != codes.Unavailable:
		return &linkError{stepHello, fmt.Errorf("%w: %s", errNotKasway, st.Message())}
	}
	return &linkError{stepHello, fromStatus(err)}
}

// linkCredentials tell gRPC what the handshake, done already, led to.
type linkCredentials struct{ tls bool }

func (c *linkCredentials) ClientHandshake(_ context.Context, _ string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return conn, authInfo{c.tls}, nil
}

func (*linkCredentials) ServerHandshake(net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("credentials of an agent's link used by a server")
}

func (c *linkCredentials) Info() credentials.ProtocolInfo {
	if c.tls {
		return credentials.ProtocolInfo{SecurityProtocol: "tls"} // makes the scheme https
	}
	return credentials.ProtocolInfo{SecurityProtocol: "insecure"}
}

func (c *linkCredentials) Clone() credentials.TransportCredentials { d := *c; return &d }
func (*linkCredentials) OverrideServerName(string) error           { return nil }

type authInfo struct{ tls bool }

func (a authInfo) AuthType() string {
	if a.tls {
		return "tls"
	}
	return "insecure"
}
