package stories

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// udpEcho answers each datagram with the address that it comes from.
func udpEcho(t *testing.T, h *netns.Host, at ...netip.AddrPort) []netip.AddrPort {
	t.Helper()
	for _, a := range at {
		var c *net.UDPConn
		err := h.Do(func() (err error) {
			c, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(a))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for b := make([]byte, 64); ; {
				_, from, err := c.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				_, _ = c.WriteToUDPAddrPort([]byte(from.String()), from)
			}
		}()
		t.Cleanup(func() {
			shut(c)
			<-done
		})
	}
	return at
}

// askUDP is who the echo sees; invalid, and the test has failed, if it does not
// answer.
func askUDP(t *testing.T, h *netns.Host, to netip.AddrPort) netip.AddrPort {
	t.Helper()
	c, err := h.Dial(t.Context(), "udp", to.String())
	if err != nil {
		t.Errorf("UDP from %s to %s: %v", h.Label, to, err)
		return netip.AddrPort{}
	}
	defer c.Close()
	answer := make([]byte, 64)
	for range 3 {
		deadline(t, c, time.Second)
		if _, err = c.Write([]byte("?")); err != nil {
			continue
		}
		var n int
		if n, err = c.Read(answer); err == nil {
			return netip.MustParseAddrPort(string(answer[:n]))
		}
	}
	t.Errorf("UDP from %s to %s: %v", h.Label, to, err)
	return netip.AddrPort{}
}

// withoutFirewall opens everything until the test ends.
func (s *scene) withoutFirewall(t *testing.T) {
	t.Helper()
	if err := s.firewall.Remove(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		var err error
		if s.firewall, err = s.ControlPlane.FirewallHere(stack.Port); err != nil {
			t.Error(err)
		}
	})
}

// nodeAddr is the node's address of like's family.
func (s *scene) nodeAddr(like netip.AddrPort) netip.Addr {
	if like.Addr().Is4() {
		return s.Node.Addr4
	}
	return s.Node.Addr6
}
