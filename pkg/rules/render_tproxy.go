package rules

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Names and numbers of mode tproxy, besides those of the modes whose notation it
// uses.
const (
	// TProxyMark, under TProxyMask, is on the packets that are taken, and on the
	// connections that they are of. A whole byte, because others use single bits:
	// no packet that we must leave alone has it by chance. It does not hold the
	// bit of our own sockets.
	TProxyMark = 0x2b
	TProxyMask = 0xff
	// TProxyTable is the route table that leads what is marked to this host, and
	// TProxyPreference that of the rule that leads there. Of Kasway's are the
	// preferences up to TProxyLastPreference, where they lead to this table.
	TProxyTable           = 0x6b77
	TProxyFirstPreference = 90
	TProxyPreference      = 91
	TProxyLastPreference  = 92
	// TProxyDevice begins the name of the TUN device that the routes hang on; the
	// kernel numbers it.
	TProxyDevice = "kasway"
)

// TProxyRoutes are the destinations that TProxyTable leads to this host for s.
// They are those of targets and no default route: the kernel may look up the
// way back to a client with the mark of the client's own packet
// (net.ipv4.conf.*.src_valid_mark, tcp_fwmark_accept, fib expressions of
// firewalls), and must find the client.
func TProxyRoutes(s State) (all []netip.Prefix) {
	for _, side := range nftSides(s) {
		for _, entry := range side.entries {
			for _, e := range entry.divert.Entries {
				if _, ok := side.local(e.Prefix, entry); ok {
					all = append(all, e.Prefix)
				}
			}
		}
	}
	slices.SortFunc(all, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	return slices.Compact(all)
}

// RenderTProxyNFT prints what mode tproxy installs for s with nftables, in the
// notations of `ip -batch` and `nft -f`.
func RenderTProxyNFT(s State) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Kasway, mode tproxy, generation %s: %s.\n\n", s.Generation, nftSummary(s))
	renderTProxyPolicy(&b, s)
	for _, t := range PlanTProxyNFT(s) {
		b.WriteString("\n")
		t.render(&b)
	}
	return b.String()
}

// RenderTProxyIPTables is RenderTProxyNFT for a node without nftables.
func RenderTProxyIPTables(s State) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Kasway, mode tproxy by iptables, generation %s: %s.\n\n", s.Generation, nftSummary(s))
	renderTProxyPolicy(&b, s)
	return b.String() + "\n" + PlanTProxyIPTables(s).String()
}

func renderTProxyPolicy(b *strings.Builder, s State) {
	routes := TProxyRoutes(s)
	if len(routes) == 0 {
		return
	}
	const device = TProxyDevice + "0"
	fmt.Fprintf(b, "# ip -batch: the routes go with %s, a TUN device that the kernel removes when the agent ends\n", device)
	for _, v6 := range []bool{false, true} {
		family := map[bool]string{false: "-4", true: "-6"}[v6]
		if slices.ContainsFunc(routes, func(p netip.Prefix) bool { return p.Addr().Is6() == v6 }) {
			fmt.Fprintf(b, "%s rule add preference %d fwmark %#x/%#x lookup %d\n", family, TProxyPreference, TProxyMark, TProxyMask, TProxyTable)
		}
		for _, p := range routes {
			if p.Addr().Is6() == v6 {
				fmt.Fprintf(b, "%s route add local %s dev %s table %d\n", family, p, device, TProxyTable)
			}
		}
	}
}
