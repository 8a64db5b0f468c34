package stories

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

// While the server is away connections are held: those whose hold has not ended
// when it is back are served, the oldest first; the others are reset, when it
// ends and not before. Nobody sees any other error.
func TestHeldAndReleased(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nft", "iptables", "listen"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s, to := newHoldScene(t, mode)
			far := accepts(t, s.ControlPlane, raw4)
			c, f := pair(t, s.Node, to, far)
			shut(c, f)
			s.stopServer(t)

			// Not back in time: held for 5 s from the connect, then reset.
			early := []*net.TCPConn{connect(t, s.Node, to), connect(t, s.RoutedPods[0], to)}
			start := time.Now()
			for _, c := range early {
				isReset(t, "a client that nobody served", c, 8*time.Second)
				if took := time.Since(start); took < 4500*time.Millisecond {
					t.Errorf("reset after %s, want 5 s", took)
				}
			}

			// Back in time: served, the oldest first.
			late := holdMany(t, s, to, 5)
			if err := s.startServer("--allowed-destination", raw4.String()); err != nil {
				t.Fatal(err)
			}
			for i := range late {
				c := saying(t, far, "first words ")
				number := make([]byte, 1)
				if _, err := io.ReadFull(c, number); err != nil || number[0] != byte('0'+i) {
					t.Errorf("the connection served as number %d is %q, %v", i, number, err)
				}
				greet(t, c, "served")
			}
			for _, c := range late {
				hear(t, c, "served")
				shut(c)
			}
			rises(t, s.agent, `kasway_agent_intercept_refused_total{reason="held"}`, 0, 2)
		})
	}
}

// newHoldScene starts both processes in one mode and returns what clients dial.
func newHoldScene(t *testing.T, mode string) (*scene, netip.AddrPort) {
	t.Helper()
	s := newScene(t, netns.Spec{RoutedPods: 1})
	flags, to := diverting(mode), raw4
	if mode == "listen" {
		to = netip.AddrPortFrom(bind, rawPort)
		flags = []string{"--mode", mode, "--bind-address", bind.String(), "--target", "7000:" + raw4.String()}
	}
	s.start(t, flags, "--allowed-destination", raw4.String())
	return s, to
}

// holdMany connects n clients one after the other, who say who they are.
func holdMany(t *testing.T, s *scene, to netip.AddrPort, n int) (conns []*net.TCPConn) {
	t.Helper()
	for i := range n {
		h := s.clients()[i%2]
		c := connect(t, h, to)
		greet(t, c, fmt.Sprintf("first words %d", i))
		conns = append(conns, c)
		// The next one must be taken after it, or there is no order.
		rises(t, s.agent, "kasway_agent_intercept_held", 0, float64(i+1))
	}
	return conns
}

// stopServer ends the server as an operator does, and waits until the agent
// has noticed.
func (s *scene) stopServer(t *testing.T) {
	t.Helper()
	if err := s.server.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := s.server.Wait(); err != nil {
		t.Errorf("the server ends with %v after SIGTERM", err)
	}
	err := netns.Poll(patience, func() error {
		if s.agent.Ready() == nil {
			return errors.New("the agent is still ready")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// Whatever happens to server and upstream, a client's connect never fails with
// an errno that makes KAS clients list everything anew.
func TestNoErrnoThatRelists(t *testing.T) {
	t.Parallel()
	s := newPlainScene(t, "--hold", "300ms")
	ctx, cancel := context.WithCancel(t.Context())
	seen := make(chan error, 1)
	go func() { seen <- connects(ctx, s.Node, svc4) }()
	s.stopServer(t)
	if err := s.startServer(); err != nil {
		t.Error(err)
	}
	s.servedAgain(t, s.Node, svc4)
	if err := s.server.Signal(syscall.SIGKILL); err != nil {
		t.Error(err)
	}
	_ = s.server.Wait()
	if err := s.startServer(); err != nil {
		t.Error(err)
	}
	s.servedAgain(t, s.Node, svc4)
	cancel()
	if err := <-seen; err != nil {
		t.Error(err)
	}
}

// connects dials again and again. Connecting must work all the time: what can
// fail is the connection.
func connects(ctx context.Context, h *netns.Host, to netip.AddrPort) error {
	var errs []string
	for n := 0; ctx.Err() == nil; n++ {
		c, err := h.Dial(ctx, "tcp", to.String())
		switch {
		case err == nil:
			// Held, served or reset: all are fine. The KAS waits for us to speak.
			_ = c.SetDeadline(time.Now().Add(20 * time.Millisecond))
			_, _ = c.Read(make([]byte, 1))
			c.Close()
		case errors.Is(err, syscall.ECONNRESET), ctx.Err() != nil:
		default:
			errs = append(errs, fmt.Sprintf("connect %d: %v", n, err))
		}
	}
	if errs != nil {
		return errors.New(strings.Join(errs[:min(len(errs), 5)], "\n"))
	}
	return nil
}
