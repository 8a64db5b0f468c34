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

// repaired is how long it may take until what others have done is seen.
const repaired = 3 * time.Second

// repair wants damage of which each of what is part to be told of, and then
// nothing to be wrong any more.
func (l *lab) repair(h *intercepttest.Holder, what ...string) {
	l.t.Helper()
	damage, err := h.Repair()
	if err != nil {
		l.t.Fatal(err)
	}
	all := fmt.Sprint(damage)
	for _, w := range what {
		if !strings.Contains(all, w) {
			l.t.Errorf("told of %q, want %q in it", all, w)
		}
	}
	for _, d := range damage {
		if d.Suspects == "" {
			l.t.Errorf("nobody is suspected of %q", d.What)
		}
	}
	if damage, err = h.Verify(); err != nil || damage != nil {
		l.t.Errorf("repaired, and told of as %v, %v", damage, err)
	}
	l.all("repaired", "kas")
}

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

// Whatever others do to the rules and sets is told of, and the next Apply puts
// it right.
func TestVerify_RulesOfOthers(t *testing.T) {
	for name, c := range map[string]struct{ meddle, want []string }{
		"somebody puts a jump first": {
			[]string{"tables -t nat -I PREROUTING 1 -j KUBE-SERVICES", "tables -t nat -I OUTPUT 1 -j KUBE-SERVICES"},
			[]string{"the jump from OUTPUT to KASWAY-OUT-g1 of table nat (IPv4) stands behind the rule -j KUBE-SERVICES", "PREROUTING", "(IPv6)"}},
		"somebody flushes nat": {
			[]string{"tables -t nat -F"},
			[]string{"the jump from OUTPUT to KASWAY-OUT-g1 of table nat (IPv4) is gone", "rules of chain KASWAY-PRE-g1 of table nat (IPv6) are changed"}},
		"somebody flushes filter": {
			[]string{"tables -F"},
			[]string{"the jump from FORWARD to KASWAY-GUARD of table filter (IPv4) is gone", "rules of chain KASWAY-GUARD of table filter (IPv6) are changed"}},
		"somebody deletes a jump": {
			[]string{"tables -t nat -D OUTPUT 1"},
			[]string{"the jump from OUTPUT to KASWAY-OUT-g1 of table nat (IPv6) is gone"}},
		"somebody deletes a rule of ours": {
			[]string{"tables -t nat -D KASWAY-OUT-g1 3"},
			[]string{"rules of chain KASWAY-OUT-g1 of table nat (IPv4) are changed"}},
		"somebody opens the guard": {
			[]string{"tables -I KASWAY-GUARD 1 -j RETURN"},
			[]string{"rules of chain KASWAY-GUARD of table filter (IPv6) are changed"}},
		"somebody removes everything": {
			[]string{"tables -F", "tables -X", "tables -t nat -F", "tables -t nat -X", "ipset destroy"},
			[]string{"chain KASWAY-GUARD of table filter (IPv4) is gone", "ipset kasway4-g1 is gone", "ipset kasway6-g1 is gone"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			l.kubeProxy(netns.IptablesNFT)
			h := l.agent()
			l.apply(h, "g1", rules.Refuse)
			if damage, err := h.Verify(); err != nil || damage != nil {
				t.Errorf("untouched, and told of as %v, %v", damage, err)
			}
			for _, m := range c.meddle {
				if rest, ok := strings.CutPrefix(m, "tables"); ok {
					// What refers to each other goes at once or not at all; kube-proxy's
					// own chains are as good as ours to meddle with.
					_, _ = l.Node.Run("sh", "-c", "iptables-nft"+rest)
					_, _ = l.Node.Run("sh", "-c", "ip6tables-nft"+rest)
				} else {
					l.node(m)
				}
			}
			l.repair(h, c.want...)
		})
	}
}

// The heartbeat fills an emptied set again before anybody looks, and yet it is
// told of.
func TestVerify_EmptiedSet(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	h := l.agent()
	l.apply(h, "g1", rules.Refuse)
	l.node("ipset flush kasway6-g1")
	l.eventually(repaired, func() error {
		damage, err := h.Verify()
		if err == nil && (len(damage) != 1 || damage[0].What != "ipset kasway6-g1 was emptied") {
			err = fmt.Errorf("told of %v", damage)
		}
		return err
	})
	l.all("filled again", "kas")
}

// A frozen agent's sets lapse by themselves, which is nobody's doing.
func TestVerify_LapsedSet(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	h := l.agent()
	l.apply(h, "g1", rules.Refuse)
	if err := h.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	l.eventually(patience, func() error {
		if out := l.node("ipset save"); strings.Contains(out, "add ") {
			return fmt.Errorf("still filled:\n%s", out)
		}
		return nil
	})
	if err := h.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	l.divertedWithin(repaired)
	if damage, err := h.Verify(); err != nil || damage != nil {
		t.Errorf("lapsed, and told of as %v, %v", damage, err)
	}
}

// Where the node's programs start together, nobody has rules yet when the back
// end is chosen; then kube-proxy uses the other one, whose nat hook comes first.
func TestVerify_FollowsKubeProxy(t *testing.T) {
	l := newLab(t)
	h := l.agent()
	l.apply(h, "g1", rules.Refuse)
	l.all("before kube-proxy", "kas")
	l.kubeProxy(netns.IptablesLegacy)
	l.repair(h, "kube-proxy uses the legacy back end")
	if out := l.node("iptables-nft-save") + l.node("ip6tables-nft-save"); strings.Contains(out, rules.IPTablesPrefix) {
		t.Errorf("rules of ours are still in the nft tables:\n%s", out)
	}
	if err := h.Close(); err != nil {
		t.Error(err)
	}
	l.all("after Close", "refused")
}

// A kube-proxy of mode nftables that starts after us comes before us, for good:
// it is named for as long as it does.
func TestVerify_NamesKubeProxyOfNftables(t *testing.T) {
	l := newLab(t)
	h := l.agent()
	l.apply(h, "g1", rules.Refuse)
	l.kubeProxy(netns.NFTables)
	for range 2 {
		damage, err := h.Repair()
		if err != nil || !strings.Contains(fmt.Sprint(damage), "nftables table kube-proxy may translate") {
			t.Errorf("told of %v, %v", damage, err)
		}
	}
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
			for range 3 {
				for _, h := range []*intercepttest.Holder{old, fresh} {
					if damage, err := h.Repair(); err != nil || damage != nil {
						t.Errorf("side by side, and told of as %v, %v", damage, err)
					}
				}
				if !l.first(s) {
					t.Fatal("connections go to the old agent")
				}
			}
			if err := end(old); err != nil {
				t.Fatal(err)
			}
			l.all("the old one is "+name, "kas")
			l.eventually(repaired, func() error {
				if _, err := fresh.Repair(); err != nil {
					return err
				}
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
