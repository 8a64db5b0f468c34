package intercept

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

var (
	node4 = netip.MustParseAddr("169.254.77.1")
	node6 = netip.MustParseAddr("fdff::6b61:7377:6179")
)

// nodeRig is a node with listeners on its loopback and node-local addresses.
type nodeRig struct {
	*netns.Topology
	ports   rules.Ports
	metrics values
	guarded atomic.Bool
}

func newNodeRig(t *testing.T) *nodeRig {
	t.Helper()
	topo := netns.New(t, netns.Spec{RoutedPods: 1, BridgePods: 1, Neighbour: true})
	// Each host keeps what it dials with, from its first dial on.
	for _, h := range slices.Concat([]*netns.Host{topo.Node, topo.Neighbour}, topo.RoutedPods, topo.BridgedPods) {
		if got := try(t, h, netip.MustParseAddrPort("127.0.0.1:1")); !strings.Contains(got, "refused") {
			t.Fatalf("%s dials a closed port: %s", h.Label, got)
		}
	}
	backToBase(t)
	r := &nodeRig{Topology: topo}
	r.guarded.Store(true)
	m, v := metrics(t)
	r.metrics = v
	log, _ := logs(t)
	err := topo.Node.Do(func() error {
		if err := NewNodeAddresses(t.TempDir(), log).Ensure(NodeAddress{Addr: node4}, NodeAddress{Addr: node6}); err != nil {
			return err
		}
		peers, err := NewPeers(PeersConfig{})
		if err != nil {
			return err
		}
		t.Cleanup(peers.Close)
		server := NewServer(ServerConfig{MaxConnections: 100, Handle: echo, Log: log, Metrics: m, Admit: func(tk *Taken) error {
			if err := peers.Admit(tk); r.guarded.Load() {
				return err
			}
			return nil
		}})
		all := Placement(rules.Clients{Host: true, Pods: true}, node4, node6)
		ls := NewListeners(ListenersConfig{Addresses: all, Server: server})
		t.Cleanup(func() { ls.Close(); _ = server.Shutdown(context.Background()) })
		ports, err := ls.Set(t.Context(), []rules.Target{target("kas")})
		r.ports = ports["kas"]
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// try reports whether from gets an answer at the address: "echo", "reset"
// before any byte, or an error.
func try(t *testing.T, from *netns.Host, at netip.AddrPort) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	c, err := from.Dial(ctx, "tcp", at.String())
	if errors.Is(err, syscall.ECONNRESET) {
		return "reset"
	}
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return err.Error()
	}
	b := make([]byte, 4)
	_, err = c.Write([]byte("echo"))
	if err == nil {
		_, err = c.Read(b)
	}
	switch {
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return "reset"
	case err != nil:
		return err.Error()
	}
	return string(b)
}

func TestCase_B87_NeighbourIsRefused(t *testing.T) {
	r := newNodeRig(t)
	uplink := r.Node.Addr4
	at := map[string]netip.AddrPort{
		"host4": netip.AddrPortFrom(loopback()[0], r.ports.Host4), "host6": netip.AddrPortFrom(loopback()[1], r.ports.Host6),
		"pod4": netip.AddrPortFrom(node4, r.ports.Pod4), "pod6": netip.AddrPortFrom(node6, r.ports.Pod6),
	}
	// A neighbour may send to any address of ours by way of the uplink, and to
	// 127.0.0.1 where route_localnet is set, as kube-proxy does.
	for _, h := range []*netns.Host{r.Node, r.Neighbour} {
		for _, dev := range []string{"all", netns.Uplink} {
			if err := h.Sysctl("net/ipv4/conf/"+dev+"/route_localnet", "1"); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, cmd := range []string{
		"ip addr del 127.0.0.1/8 dev lo",
		"ip route add 127.0.0.1 via " + uplink.String() + " dev " + netns.Uplink + " src " + r.Neighbour.Addr4.String(),
		"ip route add " + node4.String() + " via " + uplink.String(),
		"ip -6 route add " + node6.String() + " via " + r.Node.Addr6.String(),
	} {
		f := strings.Fields(cmd)
		if _, err := r.Neighbour.Run(f[0], f[1:]...); err != nil {
			t.Fatal(err)
		}
	}
	check := func(from *netns.Host, want string, keys ...string) {
		t.Helper()
		for _, k := range keys {
			if got := try(t, from, at[k]); got != want {
				t.Errorf("%s to %s (%s): %s, want %s", from.Label, k, at[k], got, want)
			}
		}
	}
	r.guarded.Store(false)
	check(r.Neighbour, "echo", "host4", "pod4", "pod6") // nothing else keeps it out
	r.guarded.Store(true)
	before := r.metrics.of("refused_total stranger")
	check(r.Neighbour, "reset", "host4", "pod4", "pod6")
	if got := r.metrics.of("refused_total stranger") - before; got != 3 {
		t.Errorf("%v strangers counted, want 3", got)
	}
	check(r.Node, "echo", "host4", "host6", "pod4", "pod6")
	check(r.RoutedPods[0], "echo", "pod4", "pod6")
	check(r.BridgedPods[0], "echo", "pod4", "pod6")
}

func TestPeersWhereFrom(t *testing.T) {
	topo := netns.New(t, netns.Spec{RoutedPods: 1, Neighbour: true})
	far := netip.MustParseAddr("192.0.2.7")
	ask := func(cfg PeersConfig, side Side, addr netip.Addr) (Taken, error) {
		t.Helper()
		tk := Taken{Side: side, Peer: netip.AddrPortFrom(addr, 4242)}
		var admit error
		err := topo.Node.Do(func() error {
			p, err := NewPeers(cfg)
			if err != nil {
				return err
			}
			defer p.Close()
			admit = p.Admit(&tk)
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return tk, admit
	}
	pod := topo.RoutedPods[0]
	for _, c := range []struct {
		name         string
		cfg          PeersConfig
		side         Side
		addr         netip.Addr
		host, refuse bool
	}{
		{name: "host on its own side", side: HostSide, addr: topo.Node.Addr4, host: true},
		{name: "host by loopback", side: HostSide, addr: netip.IPv6Loopback(), host: true},
		{name: "host on the pods' side", side: PodSide, addr: topo.Node.Addr6, host: true},
		{name: "pod", side: PodSide, addr: pod.Addr4},
		{name: "pod, v6", side: PodSide, addr: pod.Addr6},
		{name: "pod on the host's side", side: HostSide, addr: pod.Addr4, refuse: true},
		{name: "neighbour", side: PodSide, addr: topo.Neighbour.Addr4, refuse: true},
		{name: "neighbour, link-local", side: PodSide, addr: netip.MustParseAddr("fe80::42%eth0"), refuse: true},
		{name: "behind a gateway", side: PodSide, addr: far, refuse: true},
		{name: "uplinks by name", cfg: PeersConfig{Uplinks: []string{"cali0"}}, side: PodSide, addr: pod.Addr4, refuse: true},
		{name: "uplinks by name, another", cfg: PeersConfig{Uplinks: []string{"cali0"}}, side: PodSide, addr: topo.Neighbour.Addr4},
		{name: "uplinks by a name that nothing has", cfg: PeersConfig{Uplinks: []string{"nope0"}}, side: PodSide, addr: topo.Neighbour.Addr4, refuse: true},
		{name: "uplinks by a name that nothing has, pod", cfg: PeersConfig{Uplinks: []string{"nope0"}}, side: PodSide, addr: pod.Addr4},
		{name: "way to a server", cfg: PeersConfig{Servers: func() []netip.Addr { return []netip.Addr{pod.Addr4} }}, side: PodSide, addr: pod.Addr6, refuse: true},
		{name: "server on this host", cfg: PeersConfig{Servers: func() []netip.Addr { return []netip.Addr{topo.Node.Addr4} }}, side: PodSide, addr: pod.Addr6},
	} {
		tk, err := ask(c.cfg, c.side, c.addr)
		if tk.FromHost != c.host || errors.Is(err, ErrStranger) != c.refuse {
			t.Errorf("%s: host %v, %v", c.name, tk.FromHost, err)
		}
	}
}

func TestPeersNoRoute(t *testing.T) {
	topo := netns.New(t, netns.Spec{})
	err := topo.Node.Do(func() error {
		p, err := NewPeers(PeersConfig{})
		if err != nil {
			return err
		}
		defer p.Close()
		for _, r := range []string{
			"-4 route add unreachable 192.0.2.0/24", "-4 route add blackhole 198.51.100.0/24",
			"-6 route add unreachable 2001:db8:1::/64", "-6 route add blackhole 2001:db8:2::/64",
		} {
			if _, err := topo.Node.Run("ip", strings.Fields(r)...); err != nil {
				return err
			}
		}
		for _, a := range []string{"192.0.2.1", "198.51.100.1", "2001:db8:1::1", "2001:db8:2::1"} {
			if err := p.Admit(&Taken{Side: PodSide, Peer: netip.AddrPortFrom(netip.MustParseAddr(a), 1)}); !errors.Is(err, ErrStranger) {
				t.Errorf("%s: %v, want ErrStranger", a, err)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestPeersCacheIsBounded(t *testing.T) {
	p, err := NewPeers(PeersConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for i := range maxPeerCache + 10 {
		p.ask(netip.AddrFrom4([4]byte{127, 1, byte(i >> 8), byte(i)}))
	}
	if n := len(p.cache); n > maxPeerCache {
		t.Errorf("%d answers kept, want at most %d", n, maxPeerCache)
	}
}

func TestPhysicalLinks(t *testing.T) {
	attrs := func(index int, name string) netlink.LinkAttrs { return netlink.LinkAttrs{Index: index, Name: name} }
	child := func(index int, name string, parent, master int) netlink.LinkAttrs {
		return netlink.LinkAttrs{Index: index, Name: name, ParentIndex: parent, MasterIndex: master}
	}
	lo := attrs(1, "lo")
	lo.Flags = net.FlagLoopback
	links := []netlink.Link{
		&netlink.Device{LinkAttrs: lo},
		&netlink.Vlan{LinkAttrs: child(2, "br1.7", 3, 0)}, // before what it stands on
		&netlink.Bridge{LinkAttrs: attrs(3, "br1")},
		&netlink.Device{LinkAttrs: child(4, "eth1", 0, 3)},
		&netlink.Device{LinkAttrs: attrs(5, "eth0")},
		&netlink.Bridge{LinkAttrs: attrs(6, "cni0")},
		&netlink.Veth{LinkAttrs: child(7, "veth0", 0, 6)},
		&netlink.Vlan{LinkAttrs: child(8, "cni0.7", 6, 0)},
		&netlink.Wireguard{LinkAttrs: attrs(9, "wg0")},
		&netlink.Dummy{LinkAttrs: attrs(10, "dummy0")},
	}
	leading := map[int]bool{}
	physical(links, leading)
	var got []int
	for i, l := range leading {
		if l {
			got = append(got, i)
		}
	}
	slices.Sort(got)
	if want := []int{2, 3, 4, 5, 9}; !slices.Equal(got, want) {
		t.Errorf("uplinks %v, want %v", got, want)
	}
}
