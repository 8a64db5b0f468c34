package intercept

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// soOriginalDst is SO_ORIGINAL_DST and IP6T_SO_ORIGINAL_DST of the kernel's
// netfilter headers.
const soOriginalDst = 80

// Original is the address that the client of an accepted connection dialled, as
// connection tracking knows it, for people and the audit line alone. It is the
// zero value, without an error, where the kernel keeps no track.
func Original(c *net.TCPConn) (netip.AddrPort, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("original destination: %w", err)
	}
	var (
		dst  netip.AddrPort
		oerr error
	)
	// A v4-mapped socket is tracked as the IPv4 connection it is.
	get := original6
	if unmapped(c.LocalAddr()).Addr().Is4() {
		get = original4
	}
	if err := raw.Control(func(fd uintptr) { dst, oerr = get(int(fd)) }); err != nil {
		return netip.AddrPort{}, fmt.Errorf("original destination: %w", err)
	}
	return tracked(dst, oerr)
}

// tracked tells a connection that is not tracked from a failure.
func tracked(dst netip.AddrPort, err error) (netip.AddrPort, error) {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOPROTOOPT):
		// No entry; no connection tracking in this kernel.
		return netip.AddrPort{}, nil
	case err != nil:
		return netip.AddrPort{}, fmt.Errorf("original destination: %w", err)
	}
	return dst, nil
}

func original4(fd int) (netip.AddrPort, error) {
	// The only getter of package unix for a struct at level IP that is large
	// enough for a sockaddr_in: family, port, address.
	m, err := unix.GetsockoptIPv6Mreq(fd, unix.SOL_IP, soOriginalDst)
	if err != nil {
		return netip.AddrPort{}, err
	}
	sa := m.Multiaddr
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(sa[4:8])), binary.BigEndian.Uint16(sa[2:4])), nil
}

func original6(fd int) (netip.AddrPort, error) {
	// As above, for a sockaddr_in6.
	m, err := unix.GetsockoptIPv6MTUInfo(fd, unix.SOL_IPV6, soOriginalDst)
	if err != nil {
		return netip.AddrPort{}, err
	}
	port := (*[2]byte)(unsafe.Pointer(&m.Addr.Port)) // in network order
	return netip.AddrPortFrom(netip.AddrFrom16(m.Addr.Addr).Unmap(), binary.BigEndian.Uint16(port[:])), nil
}
