package intercepttest

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

// OpenListeners opens host listeners on 127.0.0.1 and ::1 and pod listeners on
// the node-local addresses of s, putting these on lo, as d's ports say (0: the
// kernel chooses), and enters the ports into d.
func OpenListeners(s *rules.State, d *rules.Divert) ([]Listener, error) {
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
		ln, err := listenOn(netip.AddrPortFrom(l.addr, *l.port))
		if err != nil {
			return nil, errors.Join(err, closeAll(open))
		}
		*l.port = addrPort(ln.Addr()).Port()
		open = append(open, Listener{ln, l.side})
	}
	return open, nil
}

// OpenAtEntries opens listeners at the very addresses of d's entries (single
// ones), whether or not they are on the node yet: for modes that own the
// targets' addresses.
func OpenAtEntries(_ *rules.State, d *rules.Divert) ([]Listener, error) {
	var open []Listener
	for _, e := range d.Entries {
		ln, err := listenOn(netip.AddrPortFrom(e.Prefix.Addr(), e.Port))
		if err != nil {
			return nil, errors.Join(err, closeAll(open))
		}
		open = append(open, Listener{ln, ""})
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

func listenOn(addr netip.AddrPort) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		control := raw.Control(func(fd uintptr) {
			if addr.Addr().Is4() {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_FREEBIND, 1)
			} else {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_FREEBIND, 1)
			}
		})
		return errors.Join(control, os.NewSyscallError("freebind", err))
	}}
	lc.SetMultipathTCP(false)
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
