package intercept

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

// ForgetClosed lets the kernel forget connections to targets of s that do not
// lead to its listeners, and that are closed: those that an agent which died had
// taken, and those that passed while there was none. It is for the first Apply of modes that have the kernel
// translate addresses, in the calling thread's network namespace.
//
// The kernel remembers a connection that was reset by its server for 10 s. A
// client that happens on the same source port in that time is not asked about
// any rule: the connection is translated as the former one was, refused where
// nobody listens any more (seen with one of some 20,000 connects after a kill -9),
// or passes as it did (one of 10,000 with whenDown direct).
func ForgetClosed(s rules.State) (forgotten uint, err error) {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return 0, fmt.Errorf("opening netlink for conntrack: %w", err)
	}
	defer h.Close()
	closed := newClosedFlows(s)
	var errs []error
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		n, err := h.ConntrackDeleteFilters(netlink.ConntrackTable, family, closed)
		forgotten += n
		if err != nil {
			errs = append(errs, fmt.Errorf("forgetting closed connections: %w", err))
		}
	}
	return forgotten, errors.Join(errs...)
}

// closedFlows matches the connections that ForgetClosed is about. The kernel
// deletes one only if it still is the very same.
type closedFlows struct {
	state rules.State
	ours  map[netip.Addr]bool // addresses of our listeners
	ports map[uint16]bool     // theirs
}

func newClosedFlows(s rules.State) *closedFlows {
	c := &closedFlows{state: s, ports: map[uint16]bool{}, ours: map[netip.Addr]bool{
		netip.AddrFrom4([4]byte{127, 0, 0, 1}): true, netip.IPv6Loopback(): true, s.Node4: true, s.Node6: true,
	}}
	for _, d := range s.Diverts {
		for _, p := range []uint16{d.Ports.Host4, d.Ports.Host6, d.Ports.Pod4, d.Ports.Pod6} {
			c.ports[p] = true
		}
	}
	return c
}

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (c *closedFlows) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	tcp, ok := f.ProtoInfo.(*netlink.ProtoInfoTCP)
	if !ok || tcp.State != nl.TCP_CONNTRACK_CLOSE {
		return false
	}
	meant, ok1 := netip.AddrFromSlice(f.Forward.DstIP)
	got, ok2 := netip.AddrFromSlice(f.Reverse.SrcIP)
	if !ok1 || !ok2 || c.ours[got.Unmap()] && c.ports[f.Reverse.SrcPort] {
		return false
	}
	_, target := c.state.Match(netip.AddrPortFrom(meant.Unmap(), f.Forward.DstPort))
	return target
}
