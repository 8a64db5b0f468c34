package netns

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"

	"github.com/vishvananda/netlink"
)

// What a routed pod believes its gateway to be, as with Calico.
var (
	podGateway4 = netip.MustParseAddr("169.254.1.1")
	podGateway6 = netip.MustParseAddr("fe80::1")
)

// AddRoutedPod adds a pod whose veth ends on the node itself; the node has a
// route to the pod's single address and no address on its end of the veth.
func (t *Topology) AddRoutedPod(label string, a4, a6 netip.Addr) (*Host, error) {
	pod, err := t.newHost(label, (*Host).becomesPod)
	if err != nil {
		return nil, err
	}
	pod.Addr4, pod.Addr6 = a4, a6
	dev := "cali" + strconv.Itoa(len(t.RoutedPods))
	t.RoutedPods = append(t.RoutedPods, pod)
	if err := veth(pod, Uplink, t.Node, dev); err != nil {
		return nil, err
	}
	return pod, errors.Join(
		pod.AddAddr(Uplink, single(a4)), pod.AddAddr(Uplink, single(a6)),
		t.Node.AddAddr(dev, netip.PrefixFrom(podGateway6, 64)),
		t.Node.AddRoute(single(a4), netip.Addr{}, dev), t.Node.AddRoute(single(a6), netip.Addr{}, dev),
		pod.AddRoute(single(podGateway4), netip.Addr{}, Uplink),
		pod.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), podGateway4, Uplink),
		pod.AddRoute(netip.MustParsePrefix("::/0"), podGateway6, Uplink),
		pod.knows(podGateway4, t.Node, dev))
}

// AddBridgePod adds a pod behind the node's bridge cni0.
func (t *Topology) AddBridgePod(label string, a4, a6 netip.Addr) (*Host, error) {
	pod, err := t.newHost(label, (*Host).becomesPod)
	if err != nil {
		return nil, err
	}
	pod.Addr4, pod.Addr6 = a4, a6
	dev := "veth" + strconv.Itoa(len(t.BridgedPods))
	t.BridgedPods = append(t.BridgedPods, pod)
	if err := errors.Join(veth(pod, Uplink, t.Node, dev), t.Node.enslave(dev, "cni0")); err != nil {
		return nil, err
	}
	return pod, errors.Join(
		pod.AddAddr(Uplink, netip.PrefixFrom(a4, t.Plan.Bridge4.Bits())),
		pod.AddAddr(Uplink, netip.PrefixFrom(a6, t.Plan.Bridge6.Bits())),
		pod.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), host(t.Plan.Bridge4, 1), Uplink),
		pod.AddRoute(netip.MustParsePrefix("::/0"), host(t.Plan.Bridge6, 1), Uplink))
}

// knows gives h a permanent neighbour entry for addr at the device of another
// host, which has no such address to answer for.
func (h *Host) knows(addr netip.Addr, at *Host, dev string) error {
	mac, err := at.mac(dev)
	if err != nil {
		return err
	}
	link, err := h.nl.LinkByName(Uplink)
	if err != nil {
		return fmt.Errorf("netns: %s of %s: %w", Uplink, h.Label, err)
	}
	err = h.nl.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT,
		IP: addr.AsSlice(), HardwareAddr: mac})
	if err != nil {
		return fmt.Errorf("netns: neighbour %s of %s: %w", addr, h.Label, err)
	}
	return nil
}
