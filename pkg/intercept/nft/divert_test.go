package nft

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// Everybody on the node is diverted, whatever kube-proxy is there, refused
// once the agent has left, and free again after cleanup.
func TestDivertRefuseCleanup(t *testing.T) {
	for _, kp := range netns.KubeProxies {
		t.Run(string(kp), func(t *testing.T) {
			w := newWorld(t, netns.Spec{RoutedPods: 1, BridgePods: 1, BridgeNF: true})
			if err := w.Node.InstallKubeProxy(kp, netns.Service{ClusterIP: svc4, Endpoint: kas4}, netns.Service{ClusterIP: svc6, Endpoint: kas6}); err != nil {
				t.Fatal(err)
			}
			everybody := func(want func(*netns.Host, netip.AddrPort) string) {
				t.Helper()
				for _, h := range []*netns.Host{w.Node, w.RoutedPods[0], w.BridgedPods[0]} {
					for _, to := range []netip.AddrPort{kas4, kas6, svc4, svc6} {
						w.want(h, to, want(h, to))
					}
				}
			}
			reachable := func(want string) func(*netns.Host, netip.AddrPort) string {
				return func(_ *netns.Host, to netip.AddrPort) string {
					if kp == netns.NoKubeProxy && to.Port() == 443 && want == "kas" {
						return "refused" // the control plane routes it to itself and does not listen
					}
					return want
				}
			}
			if kp == netns.NoKubeProxy {
				for _, a := range []netip.Addr{svc4.Addr(), svc6.Addr()} {
					if err := w.ControlPlane.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())); err != nil {
						t.Fatal(err)
					}
				}
			}
			everybody(reachable("kas"))
			m := w.apply(w.state(nil))
			everybody(w.side)
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
			everybody(func(*netns.Host, netip.AddrPort) string { return "refused" })
			w.cleanup()
			everybody(reachable("kas"))
		})
	}
}

func TestCase_B37_BridgePodsWithAndWithoutBridgeNF(t *testing.T) {
	for name, nf := range map[string]bool{"bridge-nf=0": false, "bridge-nf=1": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, netns.Spec{BridgePods: 1, BridgeNF: nf})
			pod := w.BridgedPods[0]
			w.want(pod, kas4, "kas")
			m := w.apply(w.state(nil))
			w.want(pod, kas4, "pods4")
			w.want(pod, kas6, "pods6")
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
			w.want(pod, kas4, "refused")
			w.want(pod, kas6, "refused")
		})
	}
}

// Other nft users are left alone, and iptables-nft can still list its tables.
func TestCase_B42_KubeProxyNftablesPresent(t *testing.T) {
	w := newWorld(t, netns.Spec{RoutedPods: 1})
	if err := w.Node.InstallKubeProxy(netns.NFTables, netns.Service{ClusterIP: svc4, Endpoint: kas4}); err != nil {
		t.Fatal(err)
	}
	list := func() string {
		t.Helper()
		out, err := w.Node.Run("nft", "list", "table", "ip", "kube-proxy")
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	before := list()
	w.apply(w.state(nil))
	w.want(w.RoutedPods[0], svc4, "pods4")
	if diff := cmp.Diff(before, list()); diff != "" {
		t.Errorf("kube-proxy's table changed (-before +after)\n%s", diff)
	}
	for _, tool := range []string{"iptables-nft", "iptables-legacy"} {
		out, err := w.Node.Run(tool, "-t", "nat", "-S")
		if err != nil || !strings.Contains(out, "-P OUTPUT ACCEPT") {
			t.Errorf("%s -t nat -S: %q, %v", tool, out, err)
		}
	}
}

// A process that connects to an address of the node itself on a captured port
// means the node, unless the address is a target's.
func TestCase_B45_OwnAddressIsNotCaptured(t *testing.T) {
	w := newWorld(t, netns.Spec{RoutedPods: 1})
	own := netip.AddrPortFrom(w.Node.Addr4, kas4.Port())
	w.listen(w.Node, own, "own")
	w.apply(w.state(nil))
	w.want(w.Node, own, "own")
	w.want(w.RoutedPods[0], own, "own")
	w.want(w.Node, kas4, "host4")
}

func TestClientsChooseTheSides(t *testing.T) {
	w := newWorld(t, netns.Spec{RoutedPods: 1})
	pod := w.RoutedPods[0]
	self := netip.MustParseAddrPort("198.18.0.1:1")
	state := func(c rules.Clients) rules.State {
		return w.state(func(s *rules.State) {
			s.Clients = c
			s.Diverts = append(s.Diverts, rules.Divert{Name: rules.SelfTestName, Entries: entries(self), Ports: w.ports})
		})
	}
	m := w.apply(state(rules.Clients{Host: true}))
	w.want(w.Node, kas4, "host4")
	w.want(pod, kas4, "kas")
	w.reapply(m, state(rules.Clients{Pods: true}))
	w.want(w.Node, kas4, "kas")
	w.want(pod, kas4, "pods4")
	w.want(w.Node, self, "host4") // the self-test is on the host's side always
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	w.want(w.Node, kas4, "kas")
	w.want(pod, kas4, "refused")
}

func TestRefusedDivertAndItsReopening(t *testing.T) {
	for _, down := range []rules.WhenDown{rules.Refuse, rules.Direct} {
		w := newWorld(t, netns.Spec{RoutedPods: 1})
		refused := w.state(func(s *rules.State) { s.WhenDown, s.Diverts[0].Refused = down, true })
		open := w.state(func(s *rules.State) { s.WhenDown = down })
		m := w.apply(refused)
		for _, h := range []*netns.Host{w.Node, w.RoutedPods[0]} {
			w.want(h, kas4, "refused")
			w.want(h, kas6, "refused")
		}
		w.reapply(m, open)
		w.want(w.Node, kas4, "host4")
		w.want(w.RoutedPods[0], kas6, "pods6")
		w.reapply(m, refused)
		w.want(w.Node, kas6, "refused")
	}
}

// Connections made before stay on their way, and so do their later segments.
func TestOpenConnectionsAreUntouched(t *testing.T) {
	w := newWorld(t, netns.Spec{RoutedPods: 1, BridgePods: 1, BridgeNF: true})
	var conns []net.Conn
	for _, h := range []*netns.Host{w.Node, w.RoutedPods[0], w.BridgedPods[0]} {
		for _, to := range []netip.AddrPort{kas4, kas6} {
			c, err := h.Dial(context.Background(), "tcp", to.String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if got := banner(c); got != "kas" {
				t.Fatalf("%s: %q", h.Label, got)
			}
			conns = append(conns, c)
		}
	}
	still := func(when string) {
		t.Helper()
		for i, c := range conns {
			if err := echo(c); err != nil {
				t.Errorf("%s: connection %d: %v", when, i, err)
			}
		}
	}
	m := w.apply(w.state(nil))
	still("diverting")
	taken, err := w.Node.Dial(context.Background(), "tcp", kas4.String())
	if err != nil || banner(taken) != "host4" {
		t.Fatalf("not diverted: %v", err)
	}
	defer taken.Close()
	conns = append(conns, taken)
	w.reapply(m, w.state(func(s *rules.State) { s.Diverts[0].Refused = true }))
	still("refused")
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	still("guarded")
}

// Where nothing guards and nobody else has a nat chain, the kernel would stop
// translating the connections that are taken.
func TestTakenConnectionsOutliveClose(t *testing.T) {
	w := newWorld(t, netns.Spec{RoutedPods: 1})
	direct := w.state(func(s *rules.State) { s.WhenDown = rules.Direct })
	m := w.apply(direct)
	var conns []net.Conn
	for _, h := range []*netns.Host{w.Node, w.RoutedPods[0]} {
		for _, to := range []netip.AddrPort{kas4, kas6} {
			c, err := h.Dial(context.Background(), "tcp", to.String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			if got := banner(c); got != w.side(h, to) {
				t.Fatalf("answered by %q", got)
			}
			conns = append(conns, c)
		}
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	w.want(w.Node, kas4, "kas")
	w.want(w.RoutedPods[0], kas6, "kas")
	for _, c := range conns {
		if err := echo(c); err != nil {
			t.Error(err)
		}
	}
	w.reapply(m, direct) // a closed Mode may be used again
	w.want(w.Node, kas4, "host4")
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	w.cleanup()
	if out, err := w.Node.Run("nft", "list", "ruleset"); err != nil || out != "" {
		t.Errorf("left over: %v\n%s", err, out)
	}
}

// TestCase_B44_OwnDialsAreNotCaptured: a marked socket reaches the captured
// address itself, diverting, refused and guarded.
func TestCase_B44_OwnDialsAreNotCaptured(t *testing.T) {
	w := newWorld(t, netns.Spec{})
	own := ownDialer()
	check := func(when string) {
		t.Helper()
		for _, to := range []netip.AddrPort{kas4, kas6} {
			if got := askWith(w.Node, own, to); got != "kas" {
				t.Errorf("%s: our own socket to %s: %q", when, to, got)
			}
		}
	}
	m := w.apply(w.state(nil))
	check("diverting")
	w.want(w.Node, kas4, "host4")
	w.reapply(m, w.state(func(s *rules.State) { s.Diverts[0].Refused = true }))
	check("refused")
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	w.want(w.Node, kas4, "refused")
	check("guarded")
}

// ownDialer marks its sockets as the agent's own.
func ownDialer() *net.Dialer {
	return &net.Dialer{Timeout: 5 * time.Second, Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark) }); e != nil {
			return e
		}
		return err
	}}
}

// A target's address may be the node's own, as on a control plane: what the
// host sends there comes in again by lo, and was decided when it left.
func TestTargetOnTheNodeItself(t *testing.T) {
	w := newWorld(t, netns.Spec{RoutedPods: 1})
	for _, a := range []netip.AddrPort{svc4, svc6} {
		w.addLocal(a)
		w.listen(w.Node, a, "local")
	}
	m := w.apply(w.state(nil))
	for _, a := range []netip.AddrPort{svc4, svc6} {
		w.want(w.Node, a, w.side(w.Node, a))
		w.want(w.RoutedPods[0], a, w.side(w.RoutedPods[0], a))
		if got := askWith(w.Node, ownDialer(), a); got != "local" {
			t.Errorf("our own socket to %s: %q", a, got)
		}
	}
	w.reapply(m, w.state(func(s *rules.State) { s.Clients.Host = false }))
	w.want(w.Node, svc4, "local")
	w.want(w.Node, svc6, "local")
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	w.want(w.Node, svc4, "local")
	w.want(w.RoutedPods[0], svc4, "refused")
}

// Other hosts reach a KAS that runs on the node by the node's own address,
// whatever becomes of the agent; pods and the host itself are diverted.
func TestOtherHostsReachAKASOnTheNode(t *testing.T) {
	w := newWorld(t, netns.Spec{RoutedPods: 1, BridgePods: 1, Neighbour: true})
	own4, own6 := netip.AddrPortFrom(w.Node.Addr4, 6443), netip.AddrPortFrom(w.Node.Addr6, 6443)
	w.listen(w.Node, own4, "local")
	w.listen(w.Node, own6, "local")
	m := w.apply(w.state(func(s *rules.State) { s.Diverts[0].Entries = entries(own4, own6) }))
	for _, to := range []netip.AddrPort{own4, own6} {
		w.want(w.Neighbour, to, "local")
		for _, from := range []*netns.Host{w.Node, w.RoutedPods[0], w.BridgedPods[0]} {
			w.want(from, to, w.side(from, to))
		}
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	for _, to := range []netip.AddrPort{own4, own6} {
		w.want(w.Neighbour, to, "local")
		for _, from := range []*netns.Host{w.Node, w.RoutedPods[0], w.BridgedPods[0]} {
			w.want(from, to, "refused")
		}
	}
}
