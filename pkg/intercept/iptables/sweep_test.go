package iptables

import (
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

const foreign = `*nat
:DOCKER - [0:0]
-A PREROUTING -m addrtype --dst-type LOCAL -m comment --comment "not ours: KASWAY-PRE-x" -j DOCKER
-A DOCKER -p tcp -m tcp --dport 8080 -j RETURN
COMMIT
*filter
:KASWAYNOT - [0:0]
-A FORWARD -j KASWAYNOT
-A KASWAYNOT -j RETURN
COMMIT
`

// Leftovers of several generations in both back ends and families, with sets
// that rules refer to, among rules of others.
func TestCleanup_Everything(t *testing.T) {
	l := newLab(t)
	for _, b := range []backEnd{nft, legacy} {
		for _, v6 := range []bool{false, true} {
			if _, err := l.Node.RunInput(foreign, toolName(b, v6)+"-restore", "--noflush"); err != nil {
				t.Fatal(err)
			}
		}
	}
	l.node("ipset create kaswayX hash:ip")
	before := l.snapshot()
	for i, g := range []string{"one", "two"} {
		s := probeState(false)
		s.Diverts = append(s.Diverts, probeState(true).Diverts...)
		s.Node6 = probeState(true).Node6
		s.Generation = g
		if i == 0 {
			s.WhenDown = rules.Refuse
		}
		l.plant(rules.RenderIPTables(s), []backEnd{nft, legacy}[i])
	}
	if diff := before.Diff(l.snapshot()); len(diff) == 0 {
		t.Fatal("nothing was planted")
	}
	for range 2 {
		if err := l.Node.Do(func() error { return Cleanup(context.Background()) }); err != nil {
			t.Fatal(err)
		}
		if diff := before.Diff(l.snapshot()); len(diff) > 0 {
			t.Errorf("not as before:\n%s", strings.Join(diff, "\n"))
		}
	}
}

// plant installs by the very text that is printed.
func (l *lab) plant(r rules.IPTables, b backEnd) {
	l.t.Helper()
	sets, _, _ := strings.Cut(r.String(), "\n\n")
	if _, err := l.Node.RunInput(sets+"\n", "ipset", "restore"); err != nil {
		l.t.Fatal(err)
	}
	for _, f := range r.Families {
		if _, err := l.Node.RunInput(f.Restore(nil), toolName(b, f.V6)+"-restore", "--noflush"); err != nil {
			l.t.Fatal(err)
		}
	}
}

// Where iptables is not installed nothing of ours can be.
func TestCleanup_WithoutBinaries(t *testing.T) {
	l := newLab(t)
	t.Setenv("PATH", t.TempDir())
	for range 2 {
		if err := l.Node.Do(func() error { return Cleanup(context.Background()) }); err != nil {
			t.Error(err)
		}
	}
}

func TestLeftovers(t *testing.T) {
	save := `# Generated
*nat
:PREROUTING ACCEPT [0:0]
:KASWAY-PRE-a - [0:0]
:KASWAY-PRE-b - [0:0]
:KASWAYNOT - [0:0]
-A PREROUTING -p tcp -j KASWAY-PRE-a
-A PREROUTING -p tcp -j KASWAY-PRE-b
-A PREROUTING -m comment --comment "x -j y" -j KASWAYNOT
-A KASWAY-PRE-a -d 10.0.0.1/32 -j RETURN
COMMIT
*filter
:KASWAY-GUARD - [0:0]
-A OUTPUT -j OTHER
COMMIT
`
	var got []string
	for _, l := range leftovers([]byte(save), func(_, chain string) bool { return chain != "KASWAY-PRE-b" }) {
		got = append(got, l.remove())
	}
	want := []string{
		"*nat\n-D PREROUTING -p tcp -j KASWAY-PRE-a\n-F KASWAY-PRE-a\n-X KASWAY-PRE-a\nCOMMIT\n",
		"*filter\n-F KASWAY-GUARD\n-X KASWAY-GUARD\nCOMMIT\n",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("removes (-want +got):\n%s", diff)
	}
}

func TestGenerationOfNames(t *testing.T) {
	for chain, want := range map[string]string{
		"KASWAY-PRE-a1": "a1", "KASWAY-GUARD-a1": "a1", "KASWAY-GUARD": "", "KASWAY-IN-conformance": "conformance", "OTHER-a": "",
	} {
		if got := chainGeneration(chain); got != want {
			t.Errorf("generation of chain %s is %q, want %q", chain, got, want)
		}
	}
	for set, want := range map[string]string{"kasway4-a1": "a1", "kasway6-a1": "a1", "kasway4": "", "other": "", "KUBE-kasway4-a": ""} {
		if got := setGeneration(set); got != want {
			t.Errorf("generation of set %s is %q, want %q", set, got, want)
		}
	}
}

// What `rules` prints is what is installed: every line of it is found.
func TestInstallsWhatIsPrinted(t *testing.T) {
	for proxy, b := range map[netns.KubeProxy]backEnd{netns.IptablesNFT: nft, netns.IptablesLegacy: legacy} {
		for _, when := range []rules.WhenDown{rules.Refuse, rules.Direct} {
			t.Run(string(b)+"/"+string(when), func(t *testing.T) {
				t.Parallel()
				l := newLab(t)
				l.kubeProxy(proxy)
				s := l.apply(l.agent(), "g1", when)
				printed := rules.RenderIPTables(s).String()
				v6, table, chains := false, "", 0
				for line := range strings.Lines(printed) {
					f := strings.Fields(line)
					switch {
					case len(f) == 0:
					case strings.HasPrefix(line, "# ip6tables-restore"):
						v6 = true
					case line[0] == '*':
						table = f[0][1:]
					case f[0] == "-A":
						l.node(toolName(b, v6) + " -t " + table + " -C " + strings.Join(f[1:], " "))
					case f[0] == "-I":
						l.node(toolName(b, v6) + " -t " + table + " -C " + f[1] + " " + strings.Join(f[3:], " "))
					case f[0][0] == ':':
						chains++
						got := strings.Count(l.node(toolName(b, v6)+" -t "+table+" -S "+f[0][1:]), "\n-A ")
						if want := strings.Count(section(printed, v6, table), "-A "+f[0][1:]+" "); got != want {
							t.Errorf("chain %s has %d rules, %d are printed", f[0][1:], got, want)
						}
					case f[0] == "create":
						if out := l.node("ipset save " + f[1]); !strings.Contains(out, "timeout "+f[len(f)-1]) || strings.Count(out, "add ") != 2 {
							t.Errorf("set %s is\n%s", f[1], out)
						}
					}
				}
				if chains == 0 {
					t.Error("nothing printed")
				}
			})
		}
	}
}

// section is what is printed for one table of one family.
func section(printed string, v6 bool, table string) string {
	families := strings.Split(printed, "tables-restore --noflush")
	_, rest, _ := strings.Cut(families[map[bool]int{false: 1, true: 2}[v6]], "*"+table+"\n")
	rest, _, _ = strings.Cut(rest, "COMMIT")
	return rest
}
