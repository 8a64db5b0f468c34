package rules

import (
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
)

func TestRenderTProxyGolden(t *testing.T) {
	for name, s := range nftStates() {
		for ending, render := range map[string]func(State) string{".nft": RenderTProxyNFT, ".txt": RenderTProxyIPTables} {
			t.Run(name+ending, func(t *testing.T) {
				got := render(s)
				golden(t, filepath.Join("tproxy", name+ending), got)
				if again := render(s); again != got {
					t.Error("two renderings differ")
				}
			})
		}
	}
}

// Both notations take what the reference says, by its first rule, and refuse
// the rest of what is a target's.
func TestPlanTProxyFollowsMatch(t *testing.T) {
	for name, s := range nftStates() {
		if name == "nobody" {
			continue
		}
		own := PlanTProxyNFT(s)[0]
		for _, addr := range []string{"10.96.0.1", "10.9.1.7", "10.9.1.8", "10.10.0.1", "198.18.0.1", "fd00:96::1", "fd00:9:0:fff::1", "fd00:9:1::", "2001:2::1", "8.8.8.8"} {
			for _, port := range []uint16{1, 443, 6443, 7443} {
				dst := netip.AddrPortFrom(netip.MustParseAddr(addr), port)
				d, found := s.Match(dst)
				for _, side := range []string{"host", "pods"} {
					if side == "pods" && !s.Clients.Pods {
						continue
					}
					var want netip.AddrPort
					self := found && d.Name == SelfTestName
					refused := false
					if found && (side == "host" && (s.Clients.Host || self) || side == "pods" && !self) {
						want, refused = tproxyListener(s, *d, side, dst.Addr()), d.Refused
					}
					if refused {
						want = netip.AddrPort{}
					}
					chain := map[string]string{"host": "host_assign", "pods": "pods_take"}[side]
					if got := nftSimulate(t, own, chain, dst); got.Assign != want {
						t.Errorf("%s: %s to %s: got %q, want %s", name, side, dst, got, want)
					}
					if got := nftSimulate(t, own, side+"_refused", dst); got.Reject != refused {
						t.Errorf("%s: %s to %s: refused by %q, want refused=%t", name, side, dst, got, refused)
					}
					if side == "host" {
						if got := nftSimulate(t, own, "host_take", dst); got.Take != want.IsValid() {
							t.Errorf("%s: the host to %s: marked by %q, want %s", name, dst, got, want)
						}
					}
					if got := iptablesSimulate(PlanTProxyIPTables(s), map[string]string{"host": "LO-", "pods": "PRE-"}[side]+s.Generation, dst); got != want {
						t.Errorf("%s: %s to %s by iptables: got %s, want %s", name, side, dst, got, want)
					}
					if routed := slices.ContainsFunc(TProxyRoutes(s), func(p netip.Prefix) bool { return p.Contains(dst.Addr()) }); want.IsValid() && !routed {
						t.Errorf("%s: no route for %s", name, dst)
					}
				}
			}
		}
	}
}

func tproxyListener(s State, d Divert, side string, family netip.Addr) netip.AddrPort {
	to := map[string][2]netip.AddrPort{
		"host": {netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), d.Ports.Host4), netip.AddrPortFrom(netip.IPv6Loopback(), d.Ports.Host6)},
		"pods": {netip.AddrPortFrom(s.Node4, d.Ports.Pod4), netip.AddrPortFrom(s.Node6, d.Ports.Pod6)},
	}[side]
	at := to[1]
	if family.Is4() {
		at = to[0]
	}
	if at.Port() == 0 || !at.Addr().IsValid() {
		return netip.AddrPort{}
	}
	return at
}

// iptablesSimulate walks a chain of table mangle for a fresh SYN to dst.
func iptablesSimulate(all IPTables, chain string, dst netip.AddrPort) netip.AddrPort {
	for _, f := range all.Families {
		for _, c := range f.Tables[1].Chains {
			if c.Name != IPTablesPrefix+chain || f.V6 == dst.Addr().Is4() {
				continue
			}
			for _, r := range c.Rules {
				if r[0] != "-d" || !netip.MustParsePrefix(r[1]).Contains(dst.Addr()) || r[5] != strconv.Itoa(int(dst.Port())) {
					continue
				}
				if r[7] != "TPROXY" {
					return netip.AddrPort{}
				}
				return netip.MustParseAddrPort(net.JoinHostPort(r[9], r[11]))
			}
		}
	}
	return netip.AddrPort{}
}

// What stays for connections that are served to their end has the shape that
// the table had, so that no packet meets neither, and takes nothing.
func TestPlanTProxyLinger(t *testing.T) {
	for name, s := range nftStates() {
		before, after := PlanTProxyNFT(s)[0], PlanTProxyNFTLinger(s)
		kept := 0
		for i, c := range after.Chains {
			if was := before.Chains[i]; c.Name != was.Name || c.Hook != was.Hook || c.Priority != was.Priority || c.Type != was.Type {
				t.Errorf("%s: chain %s has become %+v", name, was.Name, c)
			}
			for _, r := range c.Rules {
				if !r.Keep || !r.NotSYN {
					t.Errorf("%s: chain %s still has %s", name, c.Name, r)
				}
				kept++
			}
		}
		if sides := len(nftSides(s)); kept != sides || len(after.Chains) != len(before.Chains) {
			t.Errorf("%s: %d rules stay for %d sides", name, kept, sides)
		}
	}
}
