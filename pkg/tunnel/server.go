package tunnel

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"sync"
	"sync/atomic"

	"github.com/sirupsen/logrus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// Peer is an agent as its link shows it.
type Peer struct {
	Addr net.Addr
	// Certificates is the verified chain, the agent's own first; empty if it
	// showed none that was verified.
	Certificates []*x509.Certificate
	// Node is what the agent calls itself, made printable. It proves nothing.
	Node string
}

// Limits bound what agents may hold open; 0 is the default.
type Limits struct {
	Streams        int // of all links
	StreamsPerLink int
}

// ServerConfig is what a Server needs. Dial must be given.
type ServerConfig struct {
	// TLS is used with TLS 1.3 and HTTP/2 only, and without session tickets,
	// whatever it says about those. Whom it lets in, and whether it asks for a
	// certificate at all, is the caller's. nil is plain text.
	TLS *tls.Config
	// Admit says whether an agent may open what ctx is the context of, and
	// returns the one that Dial is to get. An error refuses, as dial.ErrDenied
	// unless it wraps another sentinel. nil admits everybody.
	Admit func(ctx context.Context, p Peer) (context.Context, error)
	// Dial is asked for every stream. Its context ends when the agent gives up.
	Dial dial.Func
	// Upstreams is what agents are told of each target; UpstreamsChanged returns
	// a channel that is closed at the next change. Both may be nil.
	Upstreams        func() map[string]bool
	UpstreamsChanged func() <-chan struct{}
	// ServerID and Version are what agents are told of this server.
	ServerID, Version string
	Limits            Limits
	Log               logrus.FieldLogger
	Metrics           *ServerMetrics
}

// Server accepts agents' links and dials what their streams ask for.
type Server struct {
	cfg  ServerConfig
	grpc *grpc.Server
	// quiet limits what strangers can make us log.
	quiet   *quietLog
	streams atomic.Int64
	// pipes counts what outlives its stream's handler for a moment.
	pipes sync.WaitGroup
}

// NewServer makes a Server that does nothing until Serve.
func NewServer(cfg ServerConfig) *Server {
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewServerMetrics(nil)
	}
	if cfg.Admit == nil {
		cfg.Admit = func(ctx context.Context, _ Peer) (context.Context, error) { return ctx, nil }
	}
	if cfg.Limits.Streams <= 0 {
		cfg.Limits.Streams = DefaultStreams
	}
	if cfg.Limits.StreamsPerLink <= 0 {
		cfg.Limits.StreamsPerLink = DefaultStreamsPerLink
	}
	s := &Server{cfg: cfg, quiet: &quietLog{log: cfg.Log, limit: rate.NewLimiter(1, 10)}}
	s.grpc = grpc.NewServer(append(serverOptions(cfg.Limits.StreamsPerLink), grpc.Creds(newServerCredentials(s)))...)
	// Answer is not registered: gRPC answers UNIMPLEMENTED for it.
	control, forward := controlStream, forwardStream
	control.Handler = func(_ any, stream grpc.ServerStream) error { return s.control(stream) }
	forward.Handler = func(_ any, stream grpc.ServerStream) error { return s.forward(stream) }
	s.grpc.RegisterService(&grpc.ServiceDesc{
		ServiceName: tunnelpb.Service,
		Streams:     []grpc.StreamDesc{control, forward},
	}, nil)
	return s
}

// Serve accepts links on lis, which it closes, until Stop, and then returns
// nil. It may be called for several listeners at once.
func (s *Server) Serve(lis net.Listener) error { return s.grpc.Serve(lis) }

// Stop closes all listeners and links and waits for their streams. Agents see
// lost links, and clients resets.
func (s *Server) Stop() {
	s.grpc.Stop()
	s.pipes.Wait()
}

// quietLog logs what anybody can cause at most once a second, and how many
// lines it left out.
type quietLog struct {
	log     logrus.FieldLogger
	limit   *rate.Limiter
	omitted atomic.Int64
}

func (q *quietLog) warn(fields logrus.Fields, text string) {
	if !q.limit.Allow() {
		q.omitted.Add(1)
		return
	}
	if n := q.omitted.Swap(0); n > 0 {
		fields["omitted"] = n
	}
	q.log.WithFields(fields).Warn(text)
}
