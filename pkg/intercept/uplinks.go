package intercept

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// uplinksTTL is how long the set of uplinks is taken for granted; looking
// through all routes is dear on a node that has many.
const uplinksTTL = 5 * time.Second

// uplinks knows the interfaces that lead to other hosts. Its user serialises.
type uplinks struct {
	nl         *netlink.Handle
	configured []string
	servers    func() []netip.Addr

	set   map[int]string // by index, the name
	until time.Time
}

// has reports whether the interface is an uplink, and its name.
func (u *uplinks) has(index int) (name string, yes bool, err error) {
	if now := time.Now(); u.set == nil || now.After(u.until) {
		set, err := u.find()
		switch {
		case err == nil:
			u.set = set
		case u.set == nil:
			return "", false, fmt.Errorf("finding the uplinks: %w", err)
		}
		// After a failure, which routes in motion can cause, the last set stays.
		u.until = now.Add(uplinksTTL)
	}
	name, yes = u.set[index]
	return name, yes, nil
}

func (u *uplinks) find() (map[int]string, error) {
	links, err := settled(u.nl.LinkList)
	if err != nil {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	leading := map[int]bool{}
	for _, l := range links {
		leading[l.Attrs().Index] = slices.Contains(u.configured, l.Attrs().Name)
	}
	// A configured interface that is not there, misspelt or renamed, must not
	// let in whoever comes by another.
	if len(u.configured) == 0 || len(missing(links, u.configured)) > 0 {
		if err := u.discover(links, leading); err != nil {
			return nil, err
		}
	}
	set := map[int]string{}
	for _, l := range links {
		if a := l.Attrs(); leading[a.Index] && a.Flags&net.FlagLoopback == 0 {
			set[a.Index] = a.Name
		}
	}
	return set, nil
}

// missing are the names that no link has.
func missing(links []netlink.Link, names []string) (out []string) {
	for _, name := range names {
		if !slices.ContainsFunc(links, func(l netlink.Link) bool { return l.Attrs().Name == name }) {
			out = append(out, name)
		}
	}
	return out
}

// MissingUplinks are those of the configured interfaces that are not there.
func MissingUplinks(names []string) ([]string, error) {
	links, err := settled(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	return missing(links, names), nil
}

// discover marks what leads to other hosts: hardware and what is built on it,
// the ends of tunnels, every interface by which a default route or a route with
// a gateway leaves, and the ways to the servers.
func (u *uplinks) discover(links []netlink.Link, leading map[int]bool) error {
	physical(links, leading)
	routes, err := settled(func() ([]netlink.Route, error) {
		return u.nl.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return fmt.Errorf("listing routes: %w", err)
	}
	for _, r := range routes {
		if r.Type != unix.RTN_UNICAST {
			continue
		}
		def := isDefault(r.Dst)
		if def || r.Gw != nil || r.Via != nil {
			leading[r.LinkIndex] = true
		}
		for _, hop := range r.MultiPath {
			if def || hop.Gw != nil || hop.Via != nil {
				leading[hop.LinkIndex] = true
			}
		}
	}
	if u.servers == nil {
		return nil
	}
	for _, s := range u.servers() {
		routes, err := u.nl.RouteGet(s.AsSlice())
		// Without a route to a server there is no interface to add, and lo, which
		// leads to one on this host, is never an uplink.
		if err == nil && len(routes) > 0 {
			leading[routes[0].LinkIndex] = true
		}
	}
	return nil
}

// physical marks the links that are hardware or tunnels to other hosts, then
// those that stand on a marked one: a vlan, and the bond or bridge that it is a
// port of.
func physical(links []netlink.Link, leading map[int]bool) {
	ends := []string{"device", "bond", "team", "vxlan", "geneve", "wireguard", "gre", "gretap", "ip6gre", "ip6gretap",
		"ipip", "ip6tnl", "sit", "vti", "vti6", "xfrm", "ppp", "wwan", "tun", "tuntap"}
	for _, l := range links {
		if slices.Contains(ends, l.Type()) && l.Attrs().Flags&net.FlagLoopback == 0 {
			leading[l.Attrs().Index] = true
		}
	}
	for again := true; again; {
		again = false
		for _, l := range links {
			a := l.Attrs()
			if l.Type() == "vlan" && leading[a.ParentIndex] && !leading[a.Index] {
				leading[a.Index], again = true, true
			}
			if leading[a.Index] && a.MasterIndex != 0 && !leading[a.MasterIndex] {
				leading[a.MasterIndex], again = true, true
			}
		}
	}
}

func isDefault(dst *net.IPNet) bool {
	if dst == nil {
		return true
	}
	ones, _ := dst.Mask.Size()
	return ones == 0
}

// settled lists something of the kernel's, again if it changed meanwhile.
func settled[T any](list func() ([]T, error)) (all []T, err error) {
	for range 5 {
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return all, err
}
