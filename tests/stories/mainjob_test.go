package stories

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// cell is one way to the KAS: who dials which address, and whom the KAS must
// see.
type cell struct {
	from *netns.Host
	to   netip.AddrPort
	peer []netip.Addr // the server by its own address of either family
}

func (c cell) String() string { return fmt.Sprintf("%s to %s", c.from.Label, c.to) }

// cells are all of a scene.
func (s *scene) cells(mode string) (all []cell) {
	for _, h := range s.clients() {
		if mode == "listen" {
			for _, o := range offers {
				all = append(all, cell{h, netip.AddrPortFrom(bind, o.local), []netip.Addr{o.peer}})
			}
			continue
		}
		for _, to := range []netip.AddrPort{svc4, svc6, kas4, kas6} {
			all = append(all, cell{h, to, []netip.Addr{kas4.Addr()}})
		}
	}
	return all
}

// A node that can reach nothing but the server's port, and whose ranges overlap
// the control plane's, uses the KAS as if it were there.
func TestMainJob(t *testing.T) {
	t.Parallel()
	for _, e := range everyScene {
		t.Run(e.mode, func(t *testing.T) {
			t.Parallel()
			s := e.scene.take(t)
			same := s.steady(t)
			for _, c := range s.cells(e.mode) {
				for _, base := range []string{"https://" + c.to.String(), "https://" + kasName} {
					client := s.client(t, c.from, base, c.to)
					if _, err := client.Version(t.Context()); err != nil {
						t.Errorf("%s, certificate verified for %s: %v", c, base, err)
						continue
					}
					seen(t, c, client.WhoAmI)
					if w, err := client.Watch(t.Context(), "count=2&interval=10ms"); err != nil {
						t.Errorf("%s: watch: %v", c, err)
					} else {
						for range 2 {
							if _, err := w.Next(); err != nil {
								t.Errorf("%s: watch: %v", c, err)
							}
						}
						shut(w)
					}
					client.Close()
				}
			}
			same()
		})
	}
}

// seen fails the test unless the KAS sees the server, and nobody of the node.
func seen(t *testing.T, c cell, who func(ctx context.Context) (string, error)) {
	t.Helper()
	text, err := who(t.Context())
	if err != nil {
		t.Errorf("%s: %v", c, err)
		return
	}
	at, err := netip.ParseAddrPort(text)
	if err != nil || !slices.Contains(c.peer, at.Addr()) {
		t.Errorf("%s: the KAS sees %q, want one of %v", c, text, c.peer)
	}
}

// Certificates verify by every name, and not one byte is another at the far end.
func TestCase_B82_BytesAreNeverAltered(t *testing.T) {
	t.Parallel()
	for _, e := range everyScene {
		t.Run(e.mode, func(t *testing.T) {
			t.Parallel()
			s := e.scene.take(t)
			same := s.steady(t)
			for _, c := range s.cells(e.mode) {
				for _, base := range []string{"https://" + c.to.String(), "https://" + kasName} {
					client := s.client(t, c.from, base, c.to)
					if err := errors.Join(client.Upload(t.Context(), 300_000), client.Download(t.Context(), 300_000)); err != nil {
						t.Errorf("%s as %s: %v", c, base, err)
					}
					client.Close()
				}
			}
			// The verification above means something.
			if _, err := s.client(t, s.Node, "https://192.0.2.1", s.cells(e.mode)[0].to).Version(t.Context()); err == nil {
				t.Error("the certificate verifies for an address that the KAS does not have")
			}
			same()
		})
	}
}

// What is not meant for the KAS is left alone: UDP to the very same address and
// port, another port of the KAS, and another address with the KAS's port.
func TestTheRestIsLeftAlone(t *testing.T) {
	t.Parallel()
	for _, e := range everyScene[:2] {
		t.Run(e.mode, func(t *testing.T) {
			t.Parallel()
			s := e.scene.take(t)
			s.withoutFirewall(t)
			echo := udpEcho(t, s.ControlPlane, svc4, kas4, kas6)
			taken := metric(t, s.agent, `kasway_agent_intercept_taken_total{target="kas"}`)
			for _, h := range s.clients() {
				for _, to := range echo {
					// All leave the node by masquerading, so the node is whom the far side sees.
					if who := askUDP(t, h, to); who.IsValid() && who.Addr() != s.nodeAddr(to) {
						t.Errorf("UDP from %s to %s arrives from %s, want the node's own", h.Label, to, who)
					}
				}
				other := netip.AddrPortFrom(kas4.Addr(), servicePort)
				who, err := s.client(t, h, "https://"+other.String(), other).WhoAmI(t.Context())
				if at, perr := netip.ParseAddrPort(who); err != nil || perr != nil || at.Addr() != s.Node.Addr4 {
					t.Errorf("%s to another port of the KAS: it sees %q, %v; want the node's own address", h.Label, who, err)
				}
			}
			if now := metric(t, s.agent, `kasway_agent_intercept_taken_total{target="kas"}`); now != taken {
				t.Errorf("%v connections were taken meanwhile, want none", now-taken)
			}
		})
	}
}

// TestCase_B45: a host process connects to its own address on the captured port.
func TestCase_B45_OwnAddressOnTheCapturedPort(t *testing.T) {
	t.Parallel()
	for _, e := range everyScene {
		t.Run(e.mode, func(t *testing.T) {
			t.Parallel()
			s := e.scene.take(t)
			own := []netip.AddrPort{netip.AddrPortFrom(s.Node.Addr4, kasPort), netip.AddrPortFrom(s.Node.Addr6, kasPort),
				netip.MustParseAddrPort("127.0.0.1:6443"), netip.AddrPortFrom(s.Node.Addr4, servicePort)}
			stop, err := stack.Mirror(s.Node, own...)
			if err != nil {
				t.Fatal(err)
			}
			defer stop()
			for _, to := range own {
				for _, h := range s.clients() {
					if to.Addr().IsLoopback() && h != s.Node {
						continue
					}
					c := connect(t, h, to)
					who, err := stack.AskMirror(c, "mine", patience)
					if local := c.LocalAddr().(*net.TCPAddr).AddrPort(); err != nil || who != local {
						t.Errorf("%s to %s: the service sees %s, %v; want the client's own %s", h.Label, to, who, err, local)
					}
					shut(c)
				}
			}
		})
	}
}

// kube-proxy's table stands beside ours, unchanged, and the tools of others go
// on to understand what they find.
func TestCase_B42_BesideKubeProxyOfNftables(t *testing.T) {
	t.Parallel()
	s := nftScene.take(t)
	s.served(t, s.RoutedPods[0], svc4)
	now, err := s.Node.Snapshot(netns.Around{})
	if err != nil {
		t.Fatal(err)
	}
	ours := 0
	for _, line := range s.before.Diff(now) {
		if strings.HasPrefix(line, "nft: +table inet kasway_") || strings.HasPrefix(line, "nft: +table ip kasway_") || strings.HasPrefix(line, "nft: +table ip6 kasway_") {
			ours++
			continue
		}
		if strings.HasPrefix(line, "nft: ") {
			t.Errorf("besides our own tables: %s", line)
		}
	}
	if ours == 0 {
		t.Error("no table of ours is there: the story has shown nothing")
	}
	for _, tool := range []string{"iptables", "ip6tables"} {
		if _, err := s.Node.Run(tool, "-t", "nat", "-S"); err != nil {
			t.Errorf("%s does not understand the tables any more: %v", tool, err)
		}
	}
}

// Mode listen on an IPv6 address, for the target of the other family too.
func TestListenOnIPv6(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{RoutedPods: 1})
	var err error
	if s.server, err = s.Server(kas6.String(), "--allowed-destination", "localhost:6443"); err != nil {
		t.Fatal(err)
	}
	s.startAgent(t, "--mode", "listen", "--bind-address", bind6.String(), "--target", "443:"+kas6.String(), "--target", "6443:localhost:6443")
	same := s.steady(t)
	for _, h := range s.clients() {
		for port, peer := range map[uint16]netip.Addr{servicePort: kas6.Addr(), kasPort: netip.MustParseAddr("127.0.0.1")} {
			c := cell{h, netip.AddrPortFrom(bind6, port), []netip.Addr{peer}}
			client := s.client(t, h, "https://"+c.to.String(), c.to)
			seen(t, c, client.WhoAmI)
			client.Close()
		}
	}
	same()
}
