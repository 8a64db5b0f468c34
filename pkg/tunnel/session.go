package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// session is one gRPC connection with a server, from its hello to the end of
// its last stream.
type session struct {
	link    *link
	raw     net.Conn // the socket, for its round trip
	cc      *grpc.ClientConn
	control grpc.ClientStream
	// peer, initial and helloTime are what the hello brought.
	peer      *tunnelpb.Hello
	initial   map[string]bool
	helloTime time.Duration

	// ctx ends with the connection; all streams are made from it.
	ctx    context.Context
	cancel context.CancelCauseFunc
	stop   func() bool // releases the context that bounds the session

	mu      sync.Mutex
	streams int
	retired bool
}

// addr is the address of something that only has a name.
type addr string

func (addr) Network() string  { return "kasway" }
func (a addr) String() string { return string(a) }

var errRetired = fmt.Errorf("%w: the link's last stream has ended", dial.ErrLost)

// open opens a stream. ctx bounds the opening alone. An error says that nothing
// has been sent.
func (s *session) open(ctx context.Context, t dial.Target, open string) (*Conn, error) {
	if !s.acquire() {
		return nil, dial.ErrNoLink
	}
	streamCtx, cancel := context.WithCancelCause(s.ctx)
	stop := context.AfterFunc(ctx, func() { cancel(ctx.Err()) })
	stream, err := s.cc.NewStream(metadata.AppendToOutgoingContext(streamCtx, tunnelpb.KeyOpen, open),
		&forwardStream, tunnelpb.MethodForward)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		cancel(err)
		s.release()
		if ctx.Err() != nil {
			return nil, dial.Classify(ctx.Err())
		}
		return nil, fmt.Errorf("%w: %w", dial.ErrNoLink, err)
	}
	m := &s.link.links.cfg.Metrics.streams
	m.opened.Inc()
	m.active.Inc()
	c := newAgentConn(streamCtx, cancel, stream, s.raw.LocalAddr(), addr(t.Name), m.bytes)
	context.AfterFunc(streamCtx, func() {
		m.active.Dec()
		m.ended.WithLabelValues(label(c.result())).Inc()
		s.release()
	})
	return c, nil
}

// acquire counts one more stream; false if the session takes none any more.
func (s *session) acquire() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.retired {
		return false
	}
	s.streams++
	return true
}

func (s *session) release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.streams--; s.retired && s.streams == 0 {
		s.cancel(errRetired)
	}
}

// retire lets the session end with its last stream.
func (s *session) retire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retired = true
	if s.streams == 0 {
		s.cancel(errRetired)
	}
}

// load is the number of streams.
func (s *session) load() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.streams
}

// rtt is the round trip to the server.
func (s *session) rtt() time.Duration {
	if d := roundTrip(s.raw); d > 0 {
		return d
	}
	return s.helloTime
}

// serve follows Control until the session can take no new streams, and says why.
func (s *session) serve() error {
	ended := make(chan error, 1)
	go func() { ended <- s.follow() }()
	leaving := make(chan struct{})
	go func() {
		defer close(leaving)
		// gRPC hands out streams a moment before it says that it is ready.
		state := connectivity.Ready
		for state == connectivity.Ready || state == connectivity.Connecting {
			if !s.cc.WaitForStateChange(s.ctx, state) {
				return
			}
			state = s.cc.GetState()
		}
	}()
	var err error
	select {
	case err = <-ended:
	case <-leaving:
		err = errors.New("the server takes no new streams")
	}
	if s.ctx.Err() != nil {
		return context.Cause(s.ctx)
	}
	return err
}

// follow receives on Control.
func (s *session) follow() error {
	for {
		var m tunnelpb.ToAgent
		if err := s.control.RecvMsg(&m); err != nil {
			if s.ctx.Err() != nil {
				return context.Cause(s.ctx)
			}
			return fmt.Errorf("control ended: %w", err)
		}
		// Messages of later releases are none of ours, and ignored.
		if u := m.GetUpstreams(); u != nil {
			s.link.setTargets(s, u.GetUp())
		}
	}
}

// drain lets the session's streams end, then closes it.
func (s *session) drain() {
	s.retire()
	<-s.ctx.Done()
	s.close()
}

// close ends the connection. s.ctx is done, so that its streams are over.
func (s *session) close() {
	s.stop()
	_ = s.cc.Close()
	_ = s.raw.Close()
}
