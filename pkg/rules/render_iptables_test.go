package rules

import (
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
)

// iptablesState has one target of both families and the self-test; tests
// change what they are about.
func iptablesState() State {
	return State{
		Generation: "g1", Clients: Clients{Host: true, Pods: true}, WhenDown: Refuse,
		Mark: 0x40, MarkMask: 0x40,
		Node4: netip.MustParseAddr("169.254.77.1"), Node6: netip.MustParseAddr("fd4b:6177::1"),
		Diverts: []Divert{
			{Name: "kas", Entries: iptablesEntries("10.96.0.1/32 443", "172.30.0.10/32 6443", "fd00:96::1/128 443"),
				Ports: Ports{Host4: 4001, Host6: 4002, Pod4: 4003, Pod6: 4004}},
			{Name: SelfTestName, Entries: iptablesEntries("192.0.2.1/32 1"), Ports: Ports{Host4: 4005}},
		},
	}
}

func iptablesEntries(lines ...string) (all []Entry) {
	for _, l := range lines {
		prefix, port, _ := strings.Cut(l, " ")
		p := netip.MustParseAddrPort("0.0.0.0:" + port).Port()
		all = append(all, Entry{Prefix: netip.MustParsePrefix(prefix), Port: p})
	}
	return all
}

func TestRenderIPTables_Goldens(t *testing.T) {
	for name, change := range map[string]func(*State){
		"dual": func(*State) {},
		"v4": func(s *State) {
			s.Diverts[0].Entries = iptablesEntries("10.96.0.1/32 443")
		},
		"v6": func(s *State) {
			s.Diverts = s.Diverts[:1]
			s.Diverts[0].Entries = iptablesEntries("fd00:96::1/128 443")
		},
		"refused": func(s *State) { s.Diverts[0].Refused = true },
		"direct":  func(s *State) { s.WhenDown = Direct },
		"pods-only": func(s *State) {
			s.Clients.Host = false
			s.Diverts[0].Entries = iptablesEntries("10.96.0.1/32 443")
		},
		"host-only": func(s *State) {
			s.Clients.Pods = false
			s.Diverts[0].Entries = iptablesEntries("10.96.0.1/32 443")
		},
		"prefixes": func(s *State) {
			// The first that matches wins, whatever is longer.
			s.Diverts = []Divert{
				{Name: "one", Refused: true, Entries: iptablesEntries("10.9.1.0/24 6443")},
				{Name: "all", Entries: iptablesEntries("10.9.0.0/16 6443", "10.9.1.0/24 6443"), Ports: Ports{Host4: 4001, Pod4: 4003}},
				{Name: "v6", Entries: iptablesEntries("fd00::/64 6443"), Ports: Ports{Host6: 4002}},
			}
		},
		"longest-generation": func(s *State) {
			s.Generation = strings.Repeat("g", 15)
			s.WhenDown = Direct
			s.Diverts[0].Entries = iptablesEntries("10.96.0.1/32 443")
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := iptablesState()
			change(&s)
			golden(t, filepath.Join("iptables", name+".txt"), RenderIPTables(s).String())
		})
	}
}

// The kernel cuts names without a word, or refuses the whole table.
func TestRenderIPTables_NamesFit(t *testing.T) {
	s := iptablesState()
	s.Generation = strings.Repeat("x", 15)
	for _, s.WhenDown = range []WhenDown{Refuse, Direct} {
		r := RenderIPTables(s)
		for _, set := range r.Sets {
			if len(set.Name) > 31 {
				t.Errorf("set %s has %d characters, 31 fit", set.Name, len(set.Name))
			}
		}
		for _, f := range r.Families {
			for _, table := range f.Tables {
				for _, c := range table.Chains {
					if len(c.Name) > 28 || !strings.HasPrefix(c.Name, IPTablesPrefix) {
						t.Errorf("chain %s: want at most 28 characters and %s in front", c.Name, IPTablesPrefix)
					}
				}
			}
		}
	}
}

// What a rule sends a connect to must be what Match says, for every address
// that tells two prefixes apart.
func TestRenderIPTables_AgreesWithMatch(t *testing.T) {
	s := iptablesState()
	s.Diverts = []Divert{
		{Name: "a", Entries: iptablesEntries("10.9.1.0/24 6443"), Ports: Ports{Host4: 1}},
		{Name: "b", Entries: iptablesEntries("10.9.0.0/16 6443", "10.9.1.0/24 443"), Ports: Ports{Host4: 2}},
		{Name: "c", Entries: iptablesEntries("10.9.1.7/32 6443", "0.0.0.0/0 8443"), Ports: Ports{Host4: 3}},
	}
	byPort := map[string]string{"127.0.0.1:1": "a", "127.0.0.1:2": "b", "127.0.0.1:3": "c"}
	for _, dst := range []string{"10.9.1.7:6443", "10.9.2.7:6443", "10.9.1.7:443", "10.9.2.7:443", "8.8.8.8:8443", "8.8.8.8:6443"} {
		want := ""
		if d, ok := s.Match(netip.MustParseAddrPort(dst)); ok {
			want = d.Name
		}
		if got := byPort[simulateOutput(t, RenderIPTables(s), netip.MustParseAddrPort(dst))]; got != want {
			t.Errorf("%s is diverted to %q, Match says %q", dst, got, want)
		}
	}
}

// simulateOutput walks the IPv4 output chain as the kernel does for an
// unmarked connect while the agent lives.
func simulateOutput(t *testing.T, r IPTables, dst netip.AddrPort) string {
	t.Helper()
	for _, c := range r.Families[0].Tables[0].Chains {
		if !strings.HasPrefix(c.Name, "KASWAY-OUT-") {
			continue
		}
		for _, rule := range c.Rules {
			if rule[0] != "-d" {
				continue
			}
			line := strings.Join(rule, " ")
			if netip.MustParsePrefix(rule[1]).Contains(dst.Addr()) && strings.Contains(line, "--dport "+netip.AddrPortFrom(dst.Addr(), dst.Port()).String()[len(dst.Addr().String())+1:]+" ") {
				_, to, _ := strings.Cut(line, "--to-destination ")
				return to
			}
		}
		return ""
	}
	t.Fatal("no output chain")
	return ""
}

// Old and new jump change places in one commit, or there would be a gap.
func TestIPTablesFamily_RestoreDropsInTheSameCommit(t *testing.T) {
	f := RenderIPTables(iptablesState()).Families[0]
	text := f.Restore(map[string][]IPRule{"nat": {{Chain: "OUTPUT", Args: []string{"-p", "tcp", "-j", "KASWAY-OUT-g1"}}}})
	nat, _, _ := strings.Cut(text, "COMMIT")
	if !strings.Contains(nat, "-D OUTPUT -p tcp -j KASWAY-OUT-g1\n") || !strings.Contains(nat, "-I OUTPUT 1 -p tcp --syn -j KASWAY-OUT-g1\n") {
		t.Errorf("want -D and -I before the first COMMIT:\n%s", text)
	}
	if strings.Contains(text, "-F ") {
		t.Errorf("flushes something:\n%s", text)
	}
}

func TestIPRule_Target(t *testing.T) {
	for line, want := range map[string]string{"-p tcp -j X": "X", "-p tcp": "", "-j": "", "-j X --to-destination Y": "X"} {
		if got := (IPRule{Args: strings.Fields(line)}).Target(); got != want {
			t.Errorf("target of %q is %q, want %q", line, got, want)
		}
	}
}
