package tproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"regexp"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// tunDevice makes TUN devices.
const tunDevice = "/dev/net/tun"

// Who is known to remove what.
const (
	suspectRules  = "systemd-networkd without ManageForeignRoutingPolicyRules=no; `ip rule flush`; NetworkManager; Tailscale or another VPN that writes policy rules anew"
	suspectRoutes = "systemd-networkd without ManageForeignRoutes=no; `ip route flush table all`"
	suspectDevice = "`ip link del`, or a network manager that takes TUN devices for its own"
)

// anchor is the policy route of one agent: a TUN device that nobody uses, the
// local routes on it, and the rule that leads there, which all agents of the
// node share. It belongs to the network namespace of the thread that made it.
// close may be called concurrently.
type anchor struct {
	nl     *netlink.Handle
	name   string
	index  int
	routes []netip.Prefix // as last ensured

	mu sync.Mutex
	fd int // of the device, which lives as long; -1: closed
}

// openAnchor makes the device. Its descriptor is a low one, so that a killed
// process loses it after what marks packets (see intercept.FirstReleased): what
// is marked without a route would leave for where it is addressed to.
func openAnchor() (*anchor, error) {
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("opening netlink: %w", err)
	}
	a := &anchor{nl: handle, fd: -1}
	if err := a.makeDevice(); err != nil {
		a.close()
		return nil, err
	}
	return a, nil
}

func (a *anchor) makeDevice() error {
	fd, err := unix.Open(tunDevice, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("making a TUN device: %w", &os.PathError{Op: "open", Path: tunDevice, Err: err})
	}
	a.fd = fd
	req, err := unix.NewIfreq(rules.TProxyDevice + "%d")
	if err != nil {
		return fmt.Errorf("making a TUN device: %w", err)
	}
	req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return fmt.Errorf("making a TUN device: %w", os.NewSyscallError("TUNSETIFF", err))
	}
	a.name = req.Name()
	link, err := a.nl.LinkByName(a.name)
	if err != nil {
		return fmt.Errorf("looking for %s: %w", a.name, err)
	}
	a.index = link.Attrs().Index
	// No address of its own, with which the host would take it for a network.
	// Where the kernel has no IPv6 that is so anyhow.
	_ = a.nl.LinkSetIP6AddrGenMode(link, nl.IN6_ADDR_GEN_MODE_NONE)
	if err := a.nl.LinkSetUp(link); err != nil {
		return fmt.Errorf("raising %s: %w", a.name, err)
	}
	return nil
}

// close removes the device and with it the routes; the rule stays, and leads
// nowhere.
func (a *anchor) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fd >= 0 {
		_ = unix.Close(a.fd) // nothing was ever written
	}
	a.fd = -1
	a.nl.Close()
}

// stands says whether the device is there and up.
func (a *anchor) stands() (bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.fd < 0 {
		return false, nil
	}
	link, err := a.nl.LinkByIndex(a.index)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking for %s: %w", a.name, err)
	}
	return link.Attrs().Flags&net.FlagUp != 0, nil
}

// ensure adds what is missing. Routes of earlier calls stay: connections taken
// live on when their target is a target no longer.
func (a *anchor) ensure(routes []netip.Prefix) error {
	for _, p := range routes {
		if err := a.nl.RouteAdd(a.route(p)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("adding the route local %s to table %d: %w", p, rules.TProxyTable, err)
		}
	}
	a.routes = routes
	for _, family := range families(routes) {
		there, err := a.hasRule(family)
		if err == nil && !there {
			err = a.nl.RuleAdd(rule(family))
		}
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("adding %s: %w", ruleName(family), err)
		}
	}
	return nil
}

// verify tells what of it is missing.
func (a *anchor) verify() (damage []intercept.Damage, err error) {
	there, err := a.stands()
	if err != nil {
		return nil, err
	}
	if !there {
		return []intercept.Damage{{What: "device " + a.name + " is gone or down", Suspects: suspectDevice}}, nil
	}
	have, err := a.nl.RouteListFiltered(netlink.FAMILY_ALL,
		&netlink.Route{Table: rules.TProxyTable, LinkIndex: a.index}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_OIF)
	if err != nil {
		return nil, fmt.Errorf("listing the routes of table %d: %w", rules.TProxyTable, err)
	}
	led := map[netip.Prefix]bool{}
	for _, r := range have {
		led[prefixOf(r)] = r.Type == unix.RTN_LOCAL
	}
	for _, p := range a.routes {
		if !led[p] {
			damage = append(damage, intercept.Damage{What: fmt.Sprintf("the route local %s of table %d is gone", p, rules.TProxyTable), Suspects: suspectRoutes})
		}
	}
	for _, family := range families(a.routes) {
		there, err := a.hasRule(family)
		if err != nil {
			return nil, fmt.Errorf("looking for %s: %w", ruleName(family), err)
		}
		if !there {
			damage = append(damage, intercept.Damage{What: ruleName(family) + " is gone", Suspects: suspectRules})
		}
	}
	return damage, nil
}

func (a *anchor) hasRule(family int) (bool, error) {
	all, err := a.nl.RuleList(family)
	if err != nil {
		return false, err
	}
	want := rule(family)
	for _, r := range all {
		if r.Priority == want.Priority && r.Table == want.Table && r.Mark == want.Mark && r.Mask != nil && *r.Mask == *want.Mask &&
			!r.Invert && r.Src == nil && r.Dst == nil && r.IifName == "" && r.OifName == "" {
			return true, nil
		}
	}
	return false, nil
}

// route has a metric of this device's own: another agent may have the same.
func (a *anchor) route(p netip.Prefix) *netlink.Route {
	return &netlink.Route{
		LinkIndex: a.index, Table: rules.TProxyTable, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Priority: a.index,
		Dst: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
	}
}

func prefixOf(r netlink.Route) netip.Prefix {
	if r.Dst == nil {
		if r.Family == netlink.FAMILY_V4 {
			return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		}
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	addr, _ := netip.AddrFromSlice(r.Dst.IP)
	bits, size := r.Dst.Mask.Size()
	if size == 32 {
		addr = addr.Unmap()
	}
	return netip.PrefixFrom(addr, bits)
}

func families(routes []netip.Prefix) (all []int) {
	for _, v6 := range []bool{false, true} {
		for _, p := range routes {
			if p.Addr().Is6() == v6 {
				all = append(all, map[bool]int{false: netlink.FAMILY_V4, true: netlink.FAMILY_V6}[v6])
				break
			}
		}
	}
	return all
}

func rule(family int) *netlink.Rule {
	mask := uint32(rules.TProxyMask)
	r := netlink.NewRule()
	r.Family, r.Priority, r.Table, r.Mark, r.Mask = family, rules.TProxyPreference, rules.TProxyTable, rules.TProxyMark, &mask
	return r
}

func ruleName(family int) string {
	version := 4
	if family == netlink.FAMILY_V6 {
		version = 6
	}
	return fmt.Sprintf("rule %d of IPv%d (fwmark %#x/%#x lookup %d)", rules.TProxyPreference, version, rules.TProxyMark, rules.TProxyMask, rules.TProxyTable)
}

// lingering are the anchors of this process that closed Modes have left, for
// the connections that they have taken.
var lingering struct {
	mu  sync.Mutex
	all map[*anchor]bool
}

func (a *anchor) linger(yes bool) {
	lingering.mu.Lock()
	defer lingering.mu.Unlock()
	if lingering.all == nil {
		lingering.all = map[*anchor]bool{}
	}
	if delete(lingering.all, a); yes {
		lingering.all[a] = true
	}
}

var deviceName = regexp.MustCompile(`^` + rules.TProxyDevice + `[0-9]+$`)

// Cleanup removes the policy rules and routes of ours, of any agent, in the
// network namespace of the calling thread; what takes connections is removed by
// the packages nft and iptables. It may be called any number of times. What a
// living agent has is an error, and stays.
func Cleanup(ctx context.Context) error {
	lingering.mu.Lock()
	for a := range lingering.all {
		a.close()
	}
	clear(lingering.all)
	lingering.mu.Unlock()

	if err := ctx.Err(); err != nil {
		return fmt.Errorf("tproxy: cleaning up: %w", err)
	}
	handle, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("tproxy: cleaning up: opening netlink: %w", err)
	}
	defer handle.Close()
	links, err := handle.LinkList()
	if err != nil {
		return fmt.Errorf("tproxy: cleaning up: listing interfaces: %w", err)
	}
	for _, l := range links {
		if l.Type() == "tuntap" && deviceName.MatchString(l.Attrs().Name) {
			return fmt.Errorf("tproxy: cleaning up: device %s belongs to an agent that is running: stop it first", l.Attrs().Name)
		}
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		if err := removeRules(handle, family); err != nil {
			return fmt.Errorf("tproxy: cleaning up: %w", err)
		}
	}
	return nil
}

func removeRules(handle *netlink.Handle, family int) error {
	all, err := handle.RuleList(family)
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EAFNOSUPPORT) {
		return nil // this kernel has no policy rules
	}
	if err != nil {
		return fmt.Errorf("listing policy rules: %w", err)
	}
	for _, r := range all {
		if r.Table != rules.TProxyTable || r.Priority < rules.TProxyFirstPreference || r.Priority > rules.TProxyLastPreference {
			continue
		}
		r.Family = family
		if err := handle.RuleDel(&r); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("removing %s: %w", r, err)
		}
	}
	return nil
}
