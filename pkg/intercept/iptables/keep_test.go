package iptables

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// repaired is how long it may take until the keeper has seen and mended.
const repaired = keepInterval + 3*time.Second

// divertedWithin waits until every client is diverted at every address.
func (l *lab) divertedWithin(within time.Duration) {
	l.t.Helper()
	for name, c := range l.clients() {
		for _, a := range addresses {
			l.eventually(within, func() error {
				if got := l.sees(c, a); got != "kas" {
					return fmt.Errorf("%s at %s meets %s, want kas", name, a, got)
				}
				return nil
			})
		}
	}
}

// kube-proxy puts its jumps first when it starts, and a reload of a firewall
// flushes everything.
func TestKeep_RulesOfOthers(t *testing.T) {
	for name, meddle := range map[string][]string{
		"somebody puts a jump first": {"-I PREROUTING 1 -j KUBE-SERVICES", "-I OUTPUT 1 -j KUBE-SERVICES"},
		"somebody flushes":           {"-F"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			l.kubeProxy(netns.IptablesNFT)
			h := l.agent()
			l.apply(h, "g1", rules.Refuse)
			for _, m := range meddle {
				l.node("iptables-nft -t nat " + m)
				l.node("ip6tables-nft -t nat " + m)
			}
			l.divertedWithin(repaired)
		})
	}
}

// A reset of a whole firewall also destroys the sets, which it can once no rule
// refers to them.
func TestKeep_SetsOfOthers(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	h := l.agent()
	l.apply(h, "g1", rules.Refuse)
	for _, tool := range []string{"iptables-nft", "ip6tables-nft"} {
		for _, table := range []string{"filter", "nat"} {
			l.node(tool + " -t " + table + " -F")
			l.node(tool + " -t " + table + " -X")
		}
	}
	l.node("ipset destroy")
	l.divertedWithin(repaired)
}

// Where the node's programs start together, nobody has rules yet when the back
// end is chosen; then kube-proxy uses the other one, whose nat hook comes first.
func TestKeep_FollowsKubeProxy(t *testing.T) {
	l := newLab(t)
	h := l.agent()
	l.apply(h, "g1", rules.Refuse)
	l.all("before kube-proxy", "kas")
	l.kubeProxy(netns.IptablesLegacy)
	l.divertedWithin(repaired)
	l.eventually(repaired, func() error {
		if out := l.node("iptables-nft-save") + l.node("ip6tables-nft-save"); strings.Contains(out, rules.IPTablesPrefix) {
			return fmt.Errorf("rules of ours are still in the nft tables:\n%s", out)
		}
		return nil
	})
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	l.all("after Close", "refused")
}

// Two generations live beside each other while one takes over; who has died is
// swept away by who lives.
func TestGenerations(t *testing.T) {
	for name, end := range map[string]func(*intercepttest.Holder) error{
		"closed": (*intercepttest.Holder).Close, "killed": (*intercepttest.Holder).Kill,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			old, fresh := l.agent(), l.agent()
			l.apply(old, "old", rules.Refuse)
			s := l.apply(fresh, "new", rules.Refuse)
			l.all("both alive", "kas")
			// The old one looks after its own rules, and must not fight.
			for until := time.Now().Add(keepInterval + time.Second); time.Now().Before(until); {
				if !l.first(s) {
					t.Fatal("connections go to the old agent")
				}
			}
			if err := end(old); err != nil {
				t.Fatal(err)
			}
			l.all("the old one is "+name, "kas")
			l.eventually(repaired+keepInterval, func() error {
				if all := l.node("iptables-nft-save") + l.node("ip6tables-nft-save") + l.node("ipset save"); strings.Contains(all, "-old") {
					return fmt.Errorf("left of the old one:\n%s", all)
				}
				return nil
			})
			l.all("swept", "kas")
		})
	}
}

// first says whether connects of the host go to a listener of s: the first jump
// of OUTPUT is then that generation's.
func (l *lab) first(s rules.State) bool {
	first := strings.Split(l.node("iptables-nft -t nat -S OUTPUT 1"), "\n")[0]
	return strings.HasSuffix(first, "-OUT-"+s.Generation)
}

// A new generation adopts the guard of a dead one, and removes the rest.
func TestGenerations_LeftByACrash(t *testing.T) {
	l := newLab(t)
	dead := l.agent()
	l.apply(dead, "dead", rules.Refuse)
	if err := dead.Kill(); err != nil {
		t.Fatal(err)
	}
	l.eventually(3*time.Second, func() error {
		if out := l.node("ipset save"); strings.Contains(out, "add ") {
			return fmt.Errorf("still alive:\n%s", out)
		}
		return nil
	})
	l.all("dead", "refused")
	l.apply(l.agent(), "next", rules.Direct)
	if all := l.node("iptables-nft-save") + l.node("ip6tables-nft-save") + l.node("ipset save"); strings.Contains(all, "dead") {
		t.Errorf("left of the dead one:\n%s", all)
	}
	if strings.Contains(l.node("iptables-nft-save"), rules.IPTablesGuard+" ") {
		t.Error("the guard is in force though whenDown is direct now")
	}
	l.all("taken over", "kas")
}

// A frozen agent's backlog fills up, and nobody would ever answer those who
// come next: they are refused once the heartbeat has lapsed, also where the
// rest of the node goes direct.
func TestFrozen_FullBacklog(t *testing.T) {
	for _, when := range []rules.WhenDown{rules.Refuse, rules.Direct} {
		t.Run(string(when), func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			if err := l.Node.Sysctl("net/core/somaxconn", "4"); err != nil {
				t.Fatal(err)
			}
			h := l.agent()
			l.apply(h, "g1", when)
			l.all("alive", "kas")
			if err := h.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = h.Signal(syscall.SIGCONT) }()
			type end struct {
				took time.Duration
				err  error
			}
			ends := make(chan end)
			n := 0
			for _, c := range l.clients() {
				for range 5 {
					n++
					go func() {
						begun := time.Now()
						flow, err := intercepttest.Connect(c, endpoint4, false, 10*time.Second)
						if err == nil {
							defer flow.End()
						}
						ends <- end{time.Since(begun), err}
					}()
				}
			}
			refused := 0
			for range n {
				e := <-ends
				if e.took > 5*time.Second {
					t.Errorf("a connect to the frozen agent took %s: %v", e.took, e.err)
				}
				if e.err != nil {
					refused++
				}
			}
			if refused == 0 {
				t.Error("the backlog did not fill up: nothing shown")
			}
		})
	}
}

// What a later state does without is removed, and the rest stays.
func TestApply_LessThanBefore(t *testing.T) {
	l := newLab(t)
	h := l.agent()
	s := l.apply(h, "g1", rules.Direct)
	s.Clients.Pods = false
	s.Diverts[0].Entries = slices.DeleteFunc(s.Diverts[0].Entries, func(e rules.Entry) bool { return e.Prefix.Addr().Is6() })
	if _, err := h.Apply(s); err != nil {
		t.Fatal(err)
	}
	if out := l.node("iptables-nft-save"); strings.Contains(out, "KASWAY-PRE") || !strings.Contains(out, "KASWAY-OUT") {
		t.Errorf("want the chain for the host alone:\n%s", out)
	}
	if out := l.node("ip6tables-nft-save") + l.node("ipset save"); strings.Contains(out, "KASWAY") || strings.Contains(out, "kasway6") {
		t.Errorf("IPv6 is still there:\n%s", out)
	}
	for name, c := range l.clients() {
		want := map[bool]string{true: "kas", false: "KAS"}[name == "host"]
		if got := l.sees(c, cluster4); got != want {
			t.Errorf("%s meets %s, want %s", name, got, want)
		}
		if got := l.sees(c, cluster6); got != "KAS" {
			t.Errorf("%s meets %s by IPv6, want the KAS", name, got)
		}
	}
}
