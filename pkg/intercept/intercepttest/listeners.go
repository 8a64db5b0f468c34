package intercepttest

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// OpenListeners opens host listeners on 127.0.0.1 and ::1 and pod listeners on
// the node-local addresses of s, putting these on lo, as d's ports say (0: the
// kernel chooses), and enters the ports into d.
func OpenListeners(s *rules.State, d *rules.Divert) ([]Listener, error) {
	return openListeners(s, d, false)
}

// OpenTransparentListeners opens the same for a mode that takes connections as
// they are (see intercept.SetTransparent).
func OpenTransparentListeners(s *rules.State, d *rules.Divert) ([]Listener, error) {
	return openListeners(s, d, true)
}

func openListeners(s *rules.State, d *rules.Divert, transparent bool) ([]Listener, error) {
	if err := addNodeLocal(s.Node4, s.Node6); err != nil {
		return nil, err
	}
	var open []Listener
	for _, l := range []struct {
		side string
		addr netip.Addr
		port *uint16
	}{
		{"host", netip.MustParseAddr("127.0.0.1"), &d.Ports.Host4},
		{"host", netip.IPv6Loopback(), &d.Ports.Host6},
		{"pods", s.Node4, &d.Ports.Pod4},
		{"pods", s.Node6, &d.Ports.Pod6},
	} {
		ln, err := listenOn(netip.AddrPortFrom(l.addr, *l.port), transparent)
		if err != nil {
			return nil, errors.Join(err, closeAll(open))
		}
		*l.port = addrPort(ln.Addr()).Port()
		open = append(open, Listener{ln, l.side})
	}
	return open, nil
}

func closeAll(open []Listener) error {
	var errs []error
	for _, l := range open {
		errs = append(errs, l.Close())
	}
	return errors.Join(errs...)
}

func listenOn(addr netip.AddrPort, transparent bool) (net.Listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	if transparent {
		lc.Control = intercept.SetTransparent
	}
	return lc.Listen(context.Background(), "tcp", addr.String())
}

// addNodeLocal puts the addresses on lo where they are missing.
func addNodeLocal(addrs ...netip.Addr) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	for _, a := range addrs {
		err := netlink.AddrAdd(lo, nodeLocal(a))
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return nil
}

// removeNodeLocal takes the addresses off lo.
func removeNodeLocal(addrs ...netip.Addr) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	for _, a := range addrs {
		err := netlink.AddrDel(lo, nodeLocal(a))
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return err
		}
	}
	return nil
}

func nodeLocal(a netip.Addr) *netlink.Addr {
	n := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}}
	if a.Is6() {
		n.Flags = unix.IFA_F_NODAD
	}
	return n
}
