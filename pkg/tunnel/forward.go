package tunnel

import (
	"errors"
	"fmt"
	"net"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// forward handles one carried connection.
func (s *Server) forward(stream grpc.ServerStream) error {
	link := linkOf(stream.Context())
	m := &s.cfg.Metrics.streams
	m.opened.Inc()
	m.active.Inc()
	defer m.active.Dec()
	err := s.carry(link, stream)
	m.ended.WithLabelValues(label(err)).Inc()
	if err == nil {
		return nil
	}
	return toStatus(err)
}

// carry reads the OPEN, dials, and carries bytes until the stream is over.
func (s *Server) carry(link *peerLink, stream grpc.ServerStream) error {
	target, err := s.open(link, stream)
	if err != nil {
		return err
	}
	log := s.cfg.Log.WithFields(fields(target, link.peer().Node))
	if err := s.count(link); err != nil {
		s.quiet.warn(logrus.Fields{observe.FieldNode: link.peer().Node, logrus.ErrorKey: err}, "a stream was refused")
		return err
	}
	defer s.uncount(link)
	ctx, err := s.admit(stream.Context(), link)
	if err != nil {
		return err
	}
	up, err := s.cfg.Dial(ctx, target)
	if err != nil {
		if stream.Context().Err() != nil {
			err = link.lost() // whatever the dial function made of it
		}
		log.WithError(err).Debug("not dialled")
		return err
	}
	if err := stream.SendHeader(metadata.Pairs(tunnelpb.KeyAccepted, tunnelpb.ValueAccepted)); err != nil {
		up.Abort(errReset)
		return link.lost()
	}
	err = s.pipe(link, stream, target, up)
	log.WithField(observe.FieldReason, label(err)).Debug("connection ended")
	return err
}

// fields are what the log says of a stream. All of it is the agent's word.
func fields(t dial.Target, node string) logrus.Fields {
	who := observe.Who{Workload: t.Workload, Command: t.Command, PID: t.PID, UID: t.UID, UIDKnown: t.UIDKnown}
	return who.Fields(logrus.Fields{
		observe.FieldConn: observe.Text(t.ID), observe.FieldTarget: observe.Text(t.Name),
		observe.FieldClient: observe.Text(t.Client.String()), observe.FieldNode: node,
	})
}

// open reads and checks the OPEN; a bad one is counted and logged.
func (s *Server) open(link *peerLink, stream grpc.ServerStream) (dial.Target, error) {
	md, _ := metadata.FromIncomingContext(stream.Context())
	target, err := decodeOpen(md)
	if err == nil && !link.ready() {
		err = &openError{"no_hello", "Forward before the hello on Control"}
	}
	var bad *openError
	if errors.As(err, &bad) {
		p := link.peer()
		s.cfg.Metrics.badOpens.WithLabelValues(bad.kind).Inc()
		s.quiet.warn(logrus.Fields{
			observe.FieldAgent: p.Node, "from": p.Addr.String(), observe.FieldReason: bad.kind, logrus.ErrorKey: err,
		}, "a stream was refused")
	}
	return target, err
}

// count takes a stream's place in the limits.
func (s *Server) count(link *peerLink) error {
	if n := link.streams.Add(1); n > int64(s.cfg.Limits.StreamsPerLink) {
		link.streams.Add(-1)
		return fmt.Errorf("%w: the link has %d streams", dial.ErrLimit, s.cfg.Limits.StreamsPerLink)
	}
	if n := s.streams.Add(1); n > int64(s.cfg.Limits.Streams) {
		s.uncount(link)
		return fmt.Errorf("%w: the server has %d streams", dial.ErrLimit, s.cfg.Limits.Streams)
	}
	return nil
}

func (s *Server) uncount(link *peerLink) {
	link.streams.Add(-1)
	s.streams.Add(-1)
}

// pipe carries bytes between the stream and up. It returns as soon as the
// stream is over: only the handler's return interrupts a receive that waits for
// the agent, and tells the agent of a reset.
func (s *Server) pipe(link *peerLink, stream grpc.ServerStream, target dial.Target, up dial.Conn) error {
	remote := link.raw.RemoteAddr()
	if target.Client.IsValid() {
		remote = net.TCPAddrFromAddrPort(target.Client)
	}
	c := newServerConn(stream, link.lost, link.raw.LocalAddr(), remote, s.cfg.Metrics.streams.bytes)
	s.pipes.Go(func() { dial.Pipe(c, up) })
	<-c.ctx.Done()
	return c.result()
}
