package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
)

// Plan is the addressing of a topology. All prefixes are those of networks.
type Plan struct {
	// Uplink4 and Uplink6 join the hosts: the control plane is .1, the node
	// .10, the neighbour .20.
	Uplink4, Uplink6 netip.Prefix
	// Routed and bridged pods take their addresses from .2 on; .1 is the bridge.
	Routed4, Routed6, Bridge4, Bridge6 netip.Prefix
	// KAS are addresses of the control plane that it serves on, kept on lo.
	KAS []netip.Addr
	// Inside are networks within the control plane. Where one overlaps a pod
	// network the control plane has no route back to those pods, as it is with
	// two sites that chose their ranges separately.
	Inside []netip.Prefix
}

// Addresses that DefaultPlan gives the control plane, and the services that
// stand for them.
var (
	KAS4       = netip.MustParseAddr("172.30.0.10")
	KAS6       = netip.MustParseAddr("fd00:30::10")
	ClusterIP4 = netip.MustParseAddr("10.96.0.1")
	ClusterIP6 = netip.MustParseAddr("fd00:96::1")
)

// DefaultPlan is a plan without overlaps.
func DefaultPlan() Plan {
	return Plan{
		Uplink4: netip.MustParsePrefix("192.168.77.0/24"), Uplink6: netip.MustParsePrefix("fd00:77::/64"),
		Routed4: netip.MustParsePrefix("10.77.1.0/24"), Routed6: netip.MustParsePrefix("fd00:77:1::/64"),
		Bridge4: netip.MustParsePrefix("10.77.2.0/24"), Bridge6: netip.MustParsePrefix("fd00:77:2::/64"),
		KAS: []netip.Addr{KAS4, KAS6},
	}
}

// Spec says which hosts there are.
type Spec struct {
	// RoutedPods is how many pods the node has that are reached by a route to
	// a single address over their own veth.
	RoutedPods int
	// BridgePods is how many pods hang on the node's bridge cni0, with
	// bridge-nf-call-iptables as BridgeNF says.
	BridgePods int
	BridgeNF   bool
	// Neighbour adds a host on the uplink network that is none of ours.
	Neighbour bool
	// Masquerade lets pods leave the node with the node's address.
	Masquerade bool
	// Plan is the addressing; nil means DefaultPlan.
	Plan *Plan
}

// Topology is a Lab with its hosts by role.
type Topology struct {
	*Lab
	Plan                    Plan
	Node, ControlPlane      *Host
	Neighbour               *Host // nil without Spec.Neighbour
	RoutedPods, BridgedPods []*Host

	uplink *Host
}

// Uplink is the device by which hosts reach each other.
const Uplink = "eth0"

// New builds a topology for a test and removes it with the test. It skips
// where namespaces cannot be made (see Require).
func New(t T, spec Spec) *Topology {
	t.Helper()
	Require(t)
	topo, err := Build(spec)
	if err != nil {
		t.Fatalf("building the topology: %v", err)
	}
	t.Cleanup(func() {
		if err := topo.Close(); err != nil {
			t.Logf("removing the topology: %v", err)
		}
	})
	return topo
}

// Build builds a topology for a program, which closes it.
func Build(spec Spec) (*Topology, error) {
	lab, err := Open()
	if err != nil {
		return nil, err
	}
	t := &Topology{Lab: lab, Plan: DefaultPlan()}
	if spec.Plan != nil {
		t.Plan = *spec.Plan
	}
	if err := t.build(spec); err != nil {
		return nil, errors.Join(err, lab.Close())
	}
	return t, nil
}

func (t *Topology) build(spec Spec) (err error) {
	if t.uplink, err = t.Host("uplink"); err != nil {
		return err
	}
	if err := errors.Join(t.uplink.bridge("br0"), t.uplink.bridgeNF(false)); err != nil {
		return err
	}
	if t.ControlPlane, err = t.Join("cp", 1); err != nil {
		return err
	}
	if t.Node, err = t.Join("node", 10); err != nil {
		return err
	}
	if spec.Neighbour {
		if t.Neighbour, err = t.Join("neighbour", 20); err != nil {
			return err
		}
	}
	if err := errors.Join(t.buildControlPlane(), t.buildNode(spec)); err != nil {
		return err
	}
	for i := range spec.RoutedPods {
		if _, err := t.AddRoutedPod("routed"+strconv.Itoa(i), host(t.Plan.Routed4, 2+i), host(t.Plan.Routed6, 2+i)); err != nil {
			return err
		}
	}
	for i := range spec.BridgePods {
		if _, err := t.AddBridgePod("bridged"+strconv.Itoa(i), host(t.Plan.Bridge4, 2+i), host(t.Plan.Bridge6, 2+i)); err != nil {
			return err
		}
	}
	return nil
}

// Join adds a host on the uplink network, with the n-th address of it.
func (t *Topology) Join(label string, n int) (*Host, error) {
	h, err := t.Host(label)
	if err != nil {
		return nil, err
	}
	port := "p" + strconv.Itoa(n)
	if err := errors.Join(veth(h, Uplink, t.uplink, port), t.uplink.enslave(port, "br0")); err != nil {
		return nil, err
	}
	a4, a6 := host(t.Plan.Uplink4, n), host(t.Plan.Uplink6, n)
	h.Addr4, h.Addr6 = a4, a6
	return h, errors.Join(
		h.AddAddr(Uplink, netip.PrefixFrom(a4, t.Plan.Uplink4.Bits())),
		h.AddAddr(Uplink, netip.PrefixFrom(a6, t.Plan.Uplink6.Bits())))
}

func (t *Topology) buildControlPlane() error {
	cp, p := t.ControlPlane, t.Plan
	errs := []error{cp.forward()}
	for _, a := range p.KAS {
		errs = append(errs, cp.AddAddr("lo", single(a)))
	}
	for _, n := range p.Inside {
		errs = append(errs, cp.AddAddr("lo", netip.PrefixFrom(host(n, 1), n.Bits())))
	}
	for _, pods := range []netip.Prefix{p.Routed4, p.Routed6, p.Bridge4, p.Bridge6} {
		if !overlapsAny(pods, p.Inside) {
			errs = append(errs, cp.AddRoute(pods, t.uplinkAddr(pods, 10), Uplink))
		}
	}
	return errors.Join(errs...)
}

func (t *Topology) buildNode(spec Spec) error {
	n := t.Node
	// Made now, so that the first agent adds nothing to what there is.
	_, err := t.mkdirCgroup(n.base + "/" + AgentUnit)
	errs := []error{err, n.forward(),
		n.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), host(t.Plan.Uplink4, 1), Uplink),
		n.AddRoute(netip.MustParsePrefix("::/0"), host(t.Plan.Uplink6, 1), Uplink)}
	if spec.BridgePods > 0 {
		errs = append(errs, n.bridge("cni0"), n.bridgeNF(spec.BridgeNF),
			n.AddAddr("cni0", netip.PrefixFrom(host(t.Plan.Bridge4, 1), t.Plan.Bridge4.Bits())),
			n.AddAddr("cni0", netip.PrefixFrom(host(t.Plan.Bridge6, 1), t.Plan.Bridge6.Bits())))
	}
	if spec.Masquerade {
		_, err := n.RunInput(fmt.Sprintf(`table inet lab_masquerade {
	chain post { type nat hook postrouting priority 100;
		oifname %[1]q ip saddr { %[2]s, %[3]s } masquerade
		oifname %[1]q ip6 saddr { %[4]s, %[5]s } masquerade
	}
}`, Uplink, t.Plan.Routed4, t.Plan.Bridge4, t.Plan.Routed6, t.Plan.Bridge6), "nft", "-f", "-")
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// uplinkAddr is the n-th uplink address of like's family.
func (t *Topology) uplinkAddr(like netip.Prefix, n int) netip.Addr {
	if like.Addr().Is4() {
		return host(t.Plan.Uplink4, n)
	}
	return host(t.Plan.Uplink6, n)
}

func overlapsAny(p netip.Prefix, in []netip.Prefix) bool {
	for _, q := range in {
		if p.Overlaps(q) {
			return true
		}
	}
	return false
}

func (h *Host) forward() error {
	return errors.Join(h.Sysctl("net/ipv4/ip_forward", "1"), h.Sysctl("net/ipv6/conf/all/forwarding", "1"))
}

// bridgeNF says whether bridged packets pass iptables and nftables ip hooks.
func (h *Host) bridgeNF(on bool) error {
	v := "0"
	if on {
		v = "1"
	}
	return errors.Join(h.Sysctl("net/bridge/bridge-nf-call-iptables", v), h.Sysctl("net/bridge/bridge-nf-call-ip6tables", v))
}

// host is the n-th address of p (n < 256).
func host(p netip.Prefix, n int) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	b[len(b)-1] += byte(n)
	a, _ := netip.AddrFromSlice(b)
	return a
}
