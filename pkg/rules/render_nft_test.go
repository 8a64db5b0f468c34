package rules

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
)

func nftEntries(dst ...string) (all []Entry) {
	for _, d := range dst {
		at := strings.LastIndex(d, ":")
		port := netip.MustParseAddrPort("0.0.0.0" + d[at:]).Port()
		all = append(all, Entry{netip.MustParsePrefix(d[:at]).Masked(), port})
	}
	return all
}

var (
	nftKAS      = Divert{Name: "kas", Entries: nftEntries("10.96.0.1/32:443", "fd00:96::1/128:443"), Ports: Ports{40001, 40002, 40003, 40004}}
	nftSelfTest = Divert{Name: SelfTestName, Entries: nftEntries("198.18.0.1/32:1", "2001:2::1/128:1"), Ports: Ports{40005, 40006, 0, 0}}
)

// nftState changes the common case: both clients, both families, refuse.
func nftState(change func(*State)) State {
	s := State{Generation: "g1", Clients: Clients{Host: true, Pods: true}, WhenDown: Refuse, Mark: 0x40, MarkMask: 0x40,
		Node4: netip.MustParseAddr("169.254.77.1"), Node6: netip.MustParseAddr("fd6b:7700::1"),
		Diverts: []Divert{nftSelfTest, nftKAS}}
	change(&s)
	return s
}

func nftStates() map[string]State {
	only := func(v6 bool) func(*State) {
		return func(s *State) {
			kas, addr := Divert{Name: "kas", Entries: nftKAS.Entries[:1], Ports: Ports{Host4: 40001, Pod4: 40003}}, &s.Node6
			if v6 {
				kas, addr = Divert{Name: "kas", Entries: nftKAS.Entries[1:], Ports: Ports{Host6: 40002, Pod6: 40004}}, &s.Node4
			}
			s.Diverts, *addr = []Divert{kas}, netip.Addr{}
		}
	}
	return map[string]State{
		"dual":    nftState(func(*State) {}),
		"v4":      nftState(only(false)),
		"v6":      nftState(only(true)),
		"refused": nftState(func(s *State) { s.Diverts[1].Refused = true }),
		"direct":  nftState(func(s *State) { s.WhenDown = Direct }),
		"pods":    nftState(func(s *State) { s.Clients.Host = false }),
		"host":    nftState(func(s *State) { s.Clients.Pods = false }),
		"nobody":  nftState(func(s *State) { s.Clients = Clients{} }),
		"prefixes": nftState(func(s *State) {
			s.Diverts = []Divert{
				{Name: "one:6443", Entries: nftEntries("10.9.1.7/32:6443"), Ports: Ports{41001, 0, 41002, 0}},
				{Name: `odd "näme"`, Entries: nftEntries("10.9.0.0/16:6443", "10.8.0.0/13:6443", "fd00:9::/52:6443"), Ports: Ports{41003, 41004, 41005, 41006}},
				{Name: "all", Entries: nftEntries("0.0.0.0/0:7443", "::/0:7443"), Ports: Ports{41007, 41008, 41009, 41010}},
			}
		}),
	}
}

func TestRenderNFTGolden(t *testing.T) {
	for name, s := range nftStates() {
		t.Run(name, func(t *testing.T) {
			got := RenderNFT(s)
			golden(t, filepath.Join("nft", name+".nft"), got)
			if again := RenderNFT(s); again != got {
				t.Error("two renderings differ")
			}
		})
	}
}

// nftSimulate walks a chain as the kernel does for a fresh SYN to dst.
func nftSimulate(t *testing.T, table NFTTable, chain string, dst netip.AddrPort) NFTRule {
	t.Helper()
	for _, c := range table.Chains {
		if c.Name != chain {
			continue
		}
		for _, r := range c.Rules {
			if r.Dst.Contains(dst.Addr()) && r.Port == dst.Port() {
				return r
			}
		}
		return NFTRule{}
	}
	t.Fatalf("no chain %s", chain)
	return NFTRule{}
}

// The rules decide as the reference does, the refused and the overlapping
// included.
func TestPlanNFTFollowsMatch(t *testing.T) {
	for name, s := range nftStates() {
		if name == "nobody" {
			continue
		}
		own := PlanNFT(s)[0]
		for _, addr := range []string{"10.96.0.1", "10.9.1.7", "10.9.1.8", "10.10.0.1", "198.18.0.1", "fd00:96::1", "fd00:9:0:fff::1", "fd00:9:1::", "2001:2::1", "8.8.8.8"} {
			for _, port := range []uint16{1, 443, 6443, 7443} {
				dst := netip.AddrPortFrom(netip.MustParseAddr(addr), port)
				want, found := s.Match(dst)
				for side, ports := range map[string]func(Ports) (uint16, uint16){
					"host": func(p Ports) (uint16, uint16) { return p.Host4, p.Host6 },
					"pods": func(p Ports) (uint16, uint16) { return p.Pod4, p.Pod6 },
				} {
					applies := found && (side == "host" && (s.Clients.Host || want.Name == SelfTestName) || side == "pods" && s.Clients.Pods && want.Name != SelfTestName)
					if side == "pods" && !s.Clients.Pods {
						continue
					}
					got := nftSimulate(t, own, side+"_divert", dst)
					var port uint16
					if applies && !want.Refused {
						p4, p6 := ports(want.Ports)
						if port = p6; dst.Addr().Is4() {
							port = p4
						}
					}
					if got.To.Port() != port || got.Reject != (applies && want.Refused) {
						t.Errorf("%s: %s to %s: got %q, want port %d", name, side, dst, got, port)
					}
				}
			}
		}
	}
}

// The guard refuses what clients mean for a target, and nothing of the
// self-test or of sides that are not diverted.
func TestPlanNFTGuard(t *testing.T) {
	for name, s := range nftStates() {
		plan := PlanNFT(s)
		if s.WhenDown == Direct {
			if len(plan) != 1 {
				t.Errorf("%s: a guard though WhenDown is direct", name)
			}
			continue
		}
		guard, chains := plan[1], map[string]bool{}
		if guard.Owner || guard.Name != NFTGuard {
			t.Errorf("%s: the guard is %+v", name, guard)
		}
		for _, c := range guard.Chains {
			chains[c.Name] = true
			refused := 0
			for _, r := range c.Rules {
				if r.Reject {
					refused++
				}
				if r.Reject && r.Comment == SelfTestName {
					t.Errorf("%s: the guard refuses the self-test: %s", name, r)
				}
			}
			if strings.HasSuffix(c.Name, "_refuse") && refused == 0 {
				t.Errorf("%s: %s refuses nothing", name, c.Name)
			}
		}
		if chains["host"] != s.Clients.Host || chains["pods"] != s.Clients.Pods {
			t.Errorf("%s: guarded %v, clients %+v", name, chains, s.Clients)
		}
	}
}
