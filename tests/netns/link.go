package netns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func (h *Host) up(dev string) error {
	link, err := h.nl.LinkByName(dev)
	if err != nil {
		return fmt.Errorf("netns: %s of %s: %w", dev, h.Label, err)
	}
	if err := h.nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("netns: raising %s of %s: %w", dev, h.Label, err)
	}
	return nil
}

// AddAddr gives dev an address, usable at once (no duplicate detection).
func (h *Host) AddAddr(dev string, p netip.Prefix) error {
	link, err := h.nl.LinkByName(dev)
	if err != nil {
		return fmt.Errorf("netns: %s of %s: %w", dev, h.Label, err)
	}
	addr := &netlink.Addr{IPNet: ipnet(p)}
	if p.Addr().Is6() {
		addr.Flags = unix.IFA_F_NODAD
	}
	if err := h.nl.AddrAdd(link, addr); err != nil {
		return fmt.Errorf("netns: address %s on %s of %s: %w", p, dev, h.Label, err)
	}
	return nil
}

// AddRoute adds a route. An invalid via makes it link-scoped, an empty dev
// leaves the device to the kernel.
func (h *Host) AddRoute(dst netip.Prefix, via netip.Addr, dev string) error {
	r := &netlink.Route{Dst: ipnet(dst.Masked())}
	if via.IsValid() {
		r.Gw = via.AsSlice()
	} else if dst.Addr().Is4() {
		r.Scope = netlink.SCOPE_LINK
	}
	if dev != "" {
		link, err := h.nl.LinkByName(dev)
		if err != nil {
			return fmt.Errorf("netns: %s of %s: %w", dev, h.Label, err)
		}
		r.LinkIndex = link.Attrs().Index
	}
	if err := h.nl.RouteAdd(r); err != nil {
		return fmt.Errorf("netns: route %s via %s dev %q of %s: %w", dst, via, dev, h.Label, err)
	}
	return nil
}

// veth joins a and b by a pair of devices, both up. They are created where
// they belong, so their names need not be unique on the machine.
func veth(a *Host, devA string, b *Host, devB string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = devA
	v := &netlink.Veth{LinkAttrs: attrs, PeerName: devB, PeerNamespace: netlink.NsFd(int(b.ns))}
	if err := a.nl.LinkAdd(v); err != nil {
		return fmt.Errorf("netns: veth %s of %s to %s of %s: %w", devA, a.Label, devB, b.Label, err)
	}
	return errors.Join(a.up(devA), b.up(devB))
}

// bridge adds a bridge device, up.
func (h *Host) bridge(dev string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = dev
	if err := h.nl.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return fmt.Errorf("netns: bridge %s of %s: %w", dev, h.Label, err)
	}
	return h.up(dev)
}

// enslave makes dev a port of the bridge br.
func (h *Host) enslave(dev, br string) error {
	d, err := h.nl.LinkByName(dev)
	if err != nil {
		return fmt.Errorf("netns: %s of %s: %w", dev, h.Label, err)
	}
	b, err := h.nl.LinkByName(br)
	if err != nil {
		return fmt.Errorf("netns: %s of %s: %w", br, h.Label, err)
	}
	if err := h.nl.LinkSetMaster(d, b); err != nil {
		return fmt.Errorf("netns: %s into %s of %s: %w", dev, br, h.Label, err)
	}
	return nil
}

func (h *Host) mac(dev string) (net.HardwareAddr, error) {
	link, err := h.nl.LinkByName(dev)
	if err != nil {
		return nil, fmt.Errorf("netns: %s of %s: %w", dev, h.Label, err)
	}
	return link.Attrs().HardwareAddr, nil
}

func ipnet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// single is the prefix that holds addr alone.
func single(addr netip.Addr) netip.Prefix { return netip.PrefixFrom(addr, addr.BitLen()) }
