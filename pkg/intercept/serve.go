package intercept

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
)

// Side says whom a listener is for.
type Side string

// The two sides: listeners on loopback addresses serve processes of the host,
// those on node-local addresses serve pods (and in mode listen both).
const (
	HostSide Side = "host"
	PodSide  Side = "pods"
)

// Taken is one accepted connection. Whoever handles it closes Conn.
type Taken struct {
	Conn *net.TCPConn
	// Target is the name that the accepting listener stands for.
	Target string
	Side   Side
	// Peer is who connected, Local the listener's address, or, where that is
	// transparent, the one that the client dialled. IPv4 is never v4-mapped.
	Peer, Local netip.AddrPort
	// Transparent: see ListenersConfig.
	Transparent bool
	// FromHost says that Peer is an address of this host itself, and not of a
	// pod; Server.Admit finds out.
	FromHost bool
}

// Handler carries one connection to its end. When ctx ends the agent stops and
// the connection is to be aborted.
type Handler func(ctx context.Context, t Taken)

// ServerConfig is what a Server needs.
type ServerConfig struct {
	// MaxConnections bounds connections taken and not yet ended; one more is
	// reset at once. The last eighth is kept for the host's own processes, so
	// that pods cannot starve the kubelet.
	MaxConnections int
	// Admit may refuse a connection before anything is read or written, and
	// fills in Taken.FromHost; nil admits all. It must not block for long: the
	// listener waits for it.
	Admit func(*Taken) error
	// Handle gets each admitted connection in a goroutine of its own.
	Handle  Handler
	Log     logrus.FieldLogger
	Metrics *Metrics
}

// Server accepts on listeners and hands out what it takes. It is safe for
// concurrent use.
type Server struct {
	cfg    ServerConfig
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	quiet  rate.Sometimes

	mu    sync.Mutex
	taken int
}

// NewServer makes a Server that accepts nothing yet: Listeners feed it.
func NewServer(cfg ServerConfig) *Server {
	cfg.Metrics = orUnregistered(cfg.Metrics)
	ctx, cancel := context.WithCancel(context.Background())
	return &Server{cfg: cfg, ctx: ctx, cancel: cancel, quiet: rate.Sometimes{Interval: 10 * time.Second}}
}

// Shutdown waits until every listener is closed and every connection has
// ended. When ctx ends first, the connections that are left are aborted and
// Shutdown returns ctx's error after the last handler. Close the Listeners
// before, or it waits for ever.
func (s *Server) Shutdown(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		s.wg.Wait()
		close(done)
	}()
	select {
	case <-done:
		s.cancel()
		return nil
	case <-ctx.Done():
	}
	s.cancel()
	<-done
	return ctx.Err()
}

// serve starts to accept on l, until l is closed.
func (s *Server) serve(l *listener) {
	s.wg.Go(func() { s.accept(l) })
}

// Bounds of the pause after a failed accept. EMFILE passes when a connection
// ends; until then the kernel keeps the next client in the backlog.
const (
	minAcceptPause = 5 * time.Millisecond
	maxAcceptPause = 200 * time.Millisecond
)

func (s *Server) accept(l *listener) {
	var pause time.Duration
	for {
		c, err := l.tcp.AcceptTCP()
		switch {
		case err == nil:
			if pause > 0 {
				pause = 0
				s.cfg.Log.WithField(observe.FieldListener, l.addr).Info("accepting again")
			}
			s.take(c, l)
			continue
		case errors.Is(err, net.ErrClosed):
			return
		}
		s.cfg.Metrics.acceptErrors.Inc()
		if pause == 0 {
			pause = minAcceptPause
			s.cfg.Log.WithField(observe.FieldListener, l.addr).WithError(err).Error("cannot accept connections")
		} else {
			pause = min(2*pause, maxAcceptPause)
		}
		select {
		case <-time.After(pause):
		case <-l.closed:
			return
		}
	}
}

// backloggedFor is what no connection waits in the backlog of a process that
// runs.
const backloggedFor = time.Second

// waited is for how long at least a connection just accepted has been up: since
// the peer last acknowledged something, which was the handshake unless it has
// spoken.
func waited(c *net.TCPConn) (d time.Duration) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	// Without an answer nothing is counted.
	_ = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			d = time.Duration(info.Last_ack_recv) * time.Millisecond
		}
	})
	return d
}

// take admits one connection and starts its handler, or resets it.
func (s *Server) take(c *net.TCPConn, l *listener) {
	t := Taken{Conn: c, Target: l.at.target, Side: l.side, Peer: unmapped(c.RemoteAddr()), Local: unmapped(c.LocalAddr())}
	t.Transparent = t.Local != l.addr
	s.cfg.Metrics.taken.WithLabelValues(t.Target).Inc()
	if waited(c) >= backloggedFor {
		s.cfg.Metrics.backlogged.Inc()
	}
	err := s.admit(&t)
	if err == nil {
		err = s.start(t)
	}
	if err == nil {
		return
	}
	s.cfg.Metrics.refused.WithLabelValues(reason(err)).Inc()
	dial.NewTCP(c).Abort(err)
	s.quiet.Do(func() {
		s.cfg.Log.WithFields(logrus.Fields{
			observe.FieldTarget: t.Target, observe.FieldClient: t.Peer, observe.FieldListener: t.Local, observe.FieldReason: reason(err),
		}).WithError(err).Warn("connection refused; more of these are only counted for a while")
	})
}

func (s *Server) admit(t *Taken) error {
	if s.cfg.Admit == nil {
		return nil
	}
	return s.cfg.Admit(t)
}

// selfTestPlaces are beyond the limit: an agent that has its hands full is not
// one that nothing is diverted to.
const selfTestPlaces = 4

func (s *Server) start(t Taken) error {
	limit := s.cfg.MaxConnections
	switch {
	case !t.FromHost:
		limit -= limit / 8
	case t.Target == SelfTestName:
		limit += selfTestPlaces
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken >= limit {
		return dial.ErrLimit
	}
	s.taken++
	s.cfg.Metrics.active.Inc()
	s.wg.Go(func() {
		defer s.release()
		s.cfg.Handle(s.ctx, t)
	})
	return nil
}

func (s *Server) release() {
	s.cfg.Metrics.active.Dec()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken--
}

// unmapped is a TCP address of package net as the plain address it is.
func unmapped(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
