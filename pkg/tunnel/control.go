package tunnel

import (
	"context"
	"errors"
	"fmt"

	"github.com/sirupsen/logrus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// control handles a link's Control.
func (s *Server) control(stream grpc.ServerStream) error {
	link := linkOf(stream.Context())
	if !link.beginHello() {
		return status.Error(codes.FailedPrecondition, "a link has one Control, opened once")
	}
	if err := s.greet(link, stream); err != nil {
		return err
	}
	p := link.peer()
	log := s.cfg.Log.WithFields(logrus.Fields{observe.FieldNode: p.Node, observe.FieldFrom: p.Addr.String()})
	log.Info("link is up")
	err := s.inform(link, stream)
	log.WithError(link.lost()).Info("the link takes no new streams")
	return err
}

// greet exchanges the hellos and admits the agent. Its errors are statuses.
func (s *Server) greet(link *peerLink, stream grpc.ServerStream) error {
	var m tunnelpb.ToServer
	if err := stream.RecvMsg(&m); err != nil {
		return err // reported when the link closes
	}
	hello := m.GetHello()
	if hello == nil {
		err := errors.New("the first message on Control is no hello")
		link.refuse(refusedProtocol, err)
		return status.Error(codes.InvalidArgument, err.Error())
	}
	link.named(clean(hello.GetName()))
	// The agent gets our hello in any case, so that it can name both versions.
	own := newHello(s.cfg.Version, s.cfg.ServerID)
	if err := stream.SendMsg(&tunnelpb.ToAgent{Message: &tunnelpb.ToAgent_Hello{Hello: own}}); err != nil {
		return err
	}
	if err := checkHello("server", own, "agent", hello); err != nil {
		link.refuse(refusedProtocol, err)
		return withReason(codes.FailedPrecondition, tunnelpb.ReasonVersion, err.Error())
	}
	if _, err := s.admit(stream.Context(), link); err != nil {
		link.refuse(refusedDenied, err)
		return toStatus(err)
	}
	if !link.welcome() {
		return toStatus(errLinkLost)
	}
	return nil
}

// admit asks whether the link's agent is let in.
func (s *Server) admit(ctx context.Context, link *peerLink) (context.Context, error) {
	ctx, err := s.cfg.Admit(ctx, link.peer())
	if err == nil {
		return ctx, nil
	}
	if !hasReason(err) {
		err = fmt.Errorf("%w: %w", dial.ErrDenied, err)
	}
	return nil, err
}

// inform tells the agent the state of the upstreams, now and at each change,
// until the link or its Control ends.
func (s *Server) inform(link *peerLink, stream grpc.ServerStream) error {
	ended := make(chan error, 1)
	go func() { ended <- receiveIgnored(stream) }()
	for {
		var changed <-chan struct{}
		if s.cfg.UpstreamsChanged != nil {
			changed = s.cfg.UpstreamsChanged() // before Upstreams, so that no change is missed
		}
		up := &tunnelpb.Upstreams{}
		if s.cfg.Upstreams != nil {
			up.Up = s.cfg.Upstreams()
		}
		if err := stream.SendMsg(&tunnelpb.ToAgent{Message: &tunnelpb.ToAgent_Upstreams{Upstreams: up}}); err != nil {
			return toStatus(link.lost())
		}
		select {
		case <-changed:
		case err := <-ended:
			return err
		}
	}
}

// receiveIgnored receives what agents of later releases may send, and returns
// how Control ended.
func receiveIgnored(stream grpc.ServerStream) error {
	for {
		var m tunnelpb.ToServer
		if err := stream.RecvMsg(&m); err != nil {
			if isEnd(err) {
				return nil
			}
			return err
		}
	}
}
