package intercept

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// DefaultNode4 is the node-local address pods are diverted to over IPv4.
var DefaultNode4 = netip.MustParseAddr("169.254.77.1")

// addressLabel tells our IPv4 addresses on lo from those of others.
const addressLabel = "lo:kasway"

// NodeAddress is an address that this node shall have.
type NodeAddress struct {
	Addr netip.Addr
	// Borrow uses the address where an interface has it already, and then
	// leaves it there at the end. Without it, an address that is somebody
	// else's is refused.
	Borrow bool
	// Setting names what an operator can change about it.
	Setting string
}

// NodeAddresses keeps addresses on lo, where only this node can reach them
// (and whoever addresses packets to them by hand: see Peers). What it has added
// is remembered in the state directory, so that CleanupAddresses takes away
// that and nothing else. One goroutine at a time may use it.
type NodeAddresses struct {
	state addressState
	log   logrus.FieldLogger
}

// NewNodeAddresses keeps its memory in stateDir, which is made when needed.
func NewNodeAddresses(stateDir string, log logrus.FieldLogger) *NodeAddresses {
	return &NodeAddresses{state: addressState{dir: stateDir}, log: log}
}

// Ensure puts what is missing on lo, in the calling thread's network namespace.
// Addresses of loopback networks need nothing. It is idempotent, and repairs
// what somebody has removed.
func (n *NodeAddresses) Ensure(want ...NodeAddress) error {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening netlink: %w", err)
	}
	defer nl.Close()
	for _, w := range want {
		if w.Addr.IsLoopback() {
			continue
		}
		if err := n.ensure(nl, w); err != nil {
			return fmt.Errorf("node address %s: %w", w.Addr, err)
		}
	}
	return nil
}

// suspectAddresses are known to take addresses of others from an interface.
const suspectAddresses = "`ip addr flush dev lo`; systemd-networkd, where a .network file matches lo; ifdown and ifupdown2; a CNI plugin that uses the address"

// Verify tells which addresses are missing that Ensure has put in place, in the
// calling thread's network namespace. It changes nothing.
func (n *NodeAddresses) Verify(want ...NodeAddress) (damage []Damage, err error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("opening netlink: %w", err)
	}
	defer nl.Close()
	for _, w := range want {
		if w.Addr.IsLoopback() {
			continue
		}
		holders, err := holdersOf(nl, w.Addr)
		if err != nil {
			return nil, fmt.Errorf("node address %s: %w", w.Addr, err)
		}
		what := ""
		for _, link := range holders {
			if link != "lo" && !w.Borrow {
				what = " is on " + link
			}
		}
		if len(holders) == 0 {
			what = " is gone"
		}
		if what != "" {
			damage = append(damage, Damage{What: "node address " + w.Addr.String() + what, Suspects: suspectAddresses})
		}
	}
	return damage, nil
}

// CheckNodeAddress reports why Ensure would refuse w in the calling thread's
// network namespace: it is somebody else's. It changes nothing.
func CheckNodeAddress(w NodeAddress) error {
	if w.Addr.IsLoopback() {
		return nil
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening netlink: %w", err)
	}
	defer nl.Close()
	_, err = available(nl, w)
	return err
}

// available reports whether an interface has w already, where it may be, or
// why it must not be used.
func available(nl *netlink.Handle, w NodeAddress) (there bool, err error) {
	holders, err := holdersOf(nl, w.Addr)
	if err != nil {
		return false, err
	}
	for _, link := range holders {
		if link != "lo" && !w.Borrow {
			return true, fmt.Errorf("%s has it already: choose another %s, or remove it there", link, w.Setting)
		}
	}
	if len(holders) > 0 || w.Borrow {
		return len(holders) > 0, nil
	}
	return false, unrouted(nl, w)
}

func (n *NodeAddresses) ensure(nl *netlink.Handle, w NodeAddress) error {
	there, err := available(nl, w)
	if err != nil || there {
		// It is there: we have added it before, or an operator has put it where
		// we would.
		return err
	}
	// Remembered first: if we crash in between, an address too many is looked
	// for at the end, instead of one too few.
	if err := n.state.add(w.Addr); err != nil {
		return err
	}
	if err := addToLo(nl, w.Addr); err != nil {
		return err
	}
	if err := usable(nl, w.Addr); err != nil {
		return err
	}
	n.log.WithField("address", w.Addr).Info("added a node-local address to lo")
	return nil
}

// ours tells an address of lo that we have added: by its label, by what it
// looks like, or by what the state directory says.
func ours(addr netlink.Addr, m addressMemory) bool {
	a, _ := netip.AddrFromSlice(addr.IP)
	return addr.Label == addressLabel || isOurULA(a.Unmap()) || m.owns(a.Unmap())
}

// holdersOf names the interfaces that have addr.
func holdersOf(nl *netlink.Handle, addr netip.Addr) ([]string, error) {
	links, err := settled(nl.LinkList)
	if err != nil {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	addrs, err := settled(func() ([]netlink.Addr, error) { return nl.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("listing addresses: %w", err)
	}
	var out []string
	for _, a := range addrs {
		if has, ok := netip.AddrFromSlice(a.IP); ok && has.Unmap() == addr {
			out = append(out, names[a.LinkIndex])
		}
	}
	return out, nil
}

// A route wider than this says nothing about a single address of it: many nodes
// have 169.254.0.0/16 on an interface, and none of its hosts.
const (
	widestClaim4 = 17
	widestClaim6 = 49
)

// unrouted refuses an address that a route leads to another place.
func unrouted(nl *netlink.Handle, w NodeAddress) error {
	widest := widestClaim4
	if w.Addr.Is6() {
		widest = widestClaim6
	}
	routes, err := settled(func() ([]netlink.Route, error) {
		return nl.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return fmt.Errorf("listing routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst == nil || r.Type == unix.RTN_BROADCAST || r.Type == unix.RTN_MULTICAST {
			continue
		}
		if bits, _ := r.Dst.Mask.Size(); bits >= widest && r.Dst.Contains(w.Addr.AsSlice()) {
			return fmt.Errorf("it is routed already, to %s: choose another %s, or remove the route", describeRoute(nl, r), w.Setting)
		}
	}
	return nil
}

func describeRoute(nl *netlink.Handle, r netlink.Route) string {
	s := r.Dst.String()
	if r.Gw != nil {
		s += " via " + r.Gw.String()
	}
	if l, err := nl.LinkByIndex(r.LinkIndex); err == nil {
		s += " dev " + l.Attrs().Name
	}
	return s
}

func addToLo(nl *netlink.Handle, addr netip.Addr) error {
	lo, err := nl.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("looking for lo: %w", err)
	}
	a := &netlink.Addr{IPNet: hostNet(addr)}
	if addr.Is4() {
		a.Scope, a.Label = unix.RT_SCOPE_HOST, addressLabel
	} else {
		// For ever valid, never preferred: the node must not begin to use it as
		// the source of its own connections to others.
		a.ValidLft, a.PreferedLft, a.Flags = math.MaxUint32, 0, unix.IFA_F_NODAD
	}
	switch err := nl.AddrAdd(lo, a); {
	case errors.Is(err, unix.EEXIST):
		return nil
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%w: adding it to lo: %w: run as root, or with CAP_NET_ADMIN (for IPv6, net.ipv6.conf.lo.disable_ipv6 must be 0)", ErrPrivilege, err)
	case err != nil:
		return fmt.Errorf("adding it to lo: %w", err)
	}
	return nil
}

// usable waits until addr can be connected to. The kernel takes an IPv6 address
// at once, but makes its route later, in a worker: until then a connect fails
// with ENETUNREACH although a listener can be bound.
func usable(nl *netlink.Handle, addr netip.Addr) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for range 2000 {
		routes, err := nl.RouteGet(addr.AsSlice())
		if err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL {
			return nil
		}
		<-tick.C
	}
	return errors.New("it is on lo, but no local route leads to it")
}

func hostNet(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}
}

// CleanupAddresses removes from lo what any NodeAddresses with this state
// directory has added, and its memory. It needs nothing of them, and may be
// called again. An error about a memory that could not be read comes after all
// that could be removed has been.
func CleanupAddresses(stateDir string) error {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening netlink: %w", err)
	}
	defer nl.Close()
	state := addressState{dir: stateDir}
	// A memory that cannot be read keeps nothing here: our addresses are told
	// by what they look like too, all but those of the configuration.
	m, unread := state.load()
	lo, err := nl.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("looking for lo: %w", err)
	}
	addrs, err := settled(func() ([]netlink.Addr, error) { return nl.AddrList(lo, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("listing addresses of lo: %w", err)
	}
	for _, a := range addrs {
		if !ours(a, m) {
			continue
		}
		if err := nl.AddrDel(lo, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("removing %s from lo: %w", strings.TrimSpace(a.String()), err)
		}
	}
	if err := state.remove(m); err != nil {
		return err
	}
	if unread != nil {
		return fmt.Errorf("the addresses and the state that can be told to be ours are removed; if intercept.nodeAddresses.ipv6 or intercept.bindAddress was set, look for that address on lo: %w", unread)
	}
	return nil
}
