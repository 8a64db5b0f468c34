package rules

import (
	"fmt"
	"net/netip"
)

// tproxyKeep begins the name of the chain that keeps the packets of taken
// connections; see TProxyKeeps.
const tproxyKeep = IPTablesPrefix + "KEEP-"

// TProxyKeeps says whether a chain of PlanTProxyIPTables is to stay when the
// agent has stopped diverting and serves what it holds.
func TProxyKeeps(chain, generation string) bool { return chain == tproxyKeep+generation }

// PlanTProxyIPTables is what mode tproxy installs for s with iptables. It works
// as PlanTProxyNFT says; table mangle takes, table nat keeps others from
// translating, and table filter refuses as in mode iptables.
func PlanTProxyIPTables(s State) IPTables {
	var t IPTables
	for _, v6 := range []bool{false, true} {
		r := tproxyRenderer{ipRenderer{State: s, v6: v6}}
		if !r.any() {
			continue
		}
		t.Sets = append(t.Sets, r.alive())
		// Table nat first: what is taken must not be translated for a moment.
		t.Families = append(t.Families, IPTablesFamily{V6: v6, Tables: []IPTable{r.nat(), r.mangle(), r.filter()}})
	}
	return t
}

// tproxyRenderer renders one family of a State.
type tproxyRenderer struct{ ipRenderer }

var (
	tproxyMark  = fmt.Sprintf("%#x/%#x", TProxyMark, TProxyMask)
	tproxyTaken = "-m mark --mark " + tproxyMark
	tproxyOurs  = "-m connmark --mark " + tproxyMark
	// What was first sent before we took connections may be translated.
	tproxyBefore = ipArgs("-m conntrack --ctstatus CONFIRMED -m connmark ! --mark " + tproxyMark + " -j RETURN")
)

func (r tproxyRenderer) dead() []string {
	return ipArgs("-m set ! --match-set " + r.set() + " dst -j RETURN")
}

// pods and host are what each side's connections are taken for.
func (r tproxyRenderer) pods() []Divert {
	if !r.Clients.Pods {
		return nil
	}
	return r.with(func(d Divert) bool { return d.Name != SelfTestName })
}

func (r tproxyRenderer) host() []Divert {
	return r.with(func(d Divert) bool { return r.Clients.Host || d.Name == SelfTestName })
}

func (r tproxyRenderer) with(want func(Divert) bool) (some []Divert) {
	for _, d := range r.Diverts {
		if want(d) && len(r.entries(d)) > 0 {
			some = append(some, d)
		}
	}
	return some
}

// each makes rules of all entries; verdict is "" for what is not taken.
func (r tproxyRenderer) each(diverts []Divert, to toUs, verdict func(at netip.AddrPort) string) (rules [][]string) {
	for _, d := range diverts {
		then := "RETURN"
		if port := to.port(d.Ports); !d.Refused && port != 0 && to.addr.IsValid() {
			then = verdict(netip.AddrPortFrom(to.addr, port))
		}
		for _, e := range r.entries(d) {
			rules = append(rules, ipArgs(fmt.Sprintf("-d %s -p tcp --dport %d -j %s", e.Prefix, e.Port, then)))
		}
	}
	return rules
}

func assign(at netip.AddrPort) string {
	return fmt.Sprintf("TPROXY --on-ip %s --on-port %d --tproxy-mark %s", at.Addr(), at.Port(), tproxyMark)
}

func (r tproxyRenderer) mangle() IPTable {
	t := IPTable{Name: "mangle"}
	add := func(kind, comment string, rules [][]string, jumps ...string) {
		c := IPChain{Name: IPTablesPrefix + kind + r.Generation, Comment: comment, Rules: rules}
		t.Chains = append(t.Chains, c)
		for _, j := range jumps {
			words := ipArgs(j + " -j " + c.Name)
			t.Jumps = append(t.Jumps, IPRule{words[0], words[1:]})
		}
	}
	if pods := r.pods(); len(pods) > 0 {
		add("PRE-", "pods; not while the agent is dead, nor what other hosts send to this one by its own address",
			append([][]string{r.dead(), r.toThisHost(), tproxyBefore}, r.each(pods, r.nodeLocal(), assign)...),
			"PREROUTING ! -i lo -p tcp --syn")
	}
	if host := r.host(); len(host) > 0 {
		add("OUT-", "host processes; not the agent's own sockets, nor while the agent is dead",
			append([][]string{r.ownMark(), r.dead(), tproxyBefore},
				r.each(host, r.loopback(), func(netip.AddrPort) string { return "MARK --set-xmark " + tproxyMark })...),
			"OUTPUT -p tcp --syn")
		add("LO-", "host processes: what OUT has marked comes back by lo",
			r.each(host, r.loopback(), assign), "PREROUTING -i lo -p tcp --syn "+tproxyTaken)
	}
	add("KEEP-", "the later packets of taken connections",
		[][]string{ipArgs("-m conntrack --ctdir ORIGINAL -j MARK --set-xmark " + tproxyMark)},
		"PREROUTING -p tcp ! --syn "+tproxyOurs, "OUTPUT -p tcp ! --syn "+tproxyOurs)
	// A killed agent's rules act until its heartbeat lapses, and its route is gone
	// at once. What is dropped here is sent again, and then refused.
	lost := IPChain{Name: r.guardName(), Comment: "what was taken must not leave for want of a route to the agent",
		Rules: [][]string{ipArgs(tproxyOurs + " -m conntrack --ctdir ORIGINAL -j DROP")}}
	t.Chains = append(t.Chains, lost)
	t.Jumps = append(t.Jumps, IPRule{"POSTROUTING", ipArgs("! -o lo -p tcp " + tproxyTaken + " -j " + lost.Name)})
	return t
}

// nat keeps everybody from translating what is taken.
func (r tproxyRenderer) nat() IPTable {
	c := IPChain{Name: IPTablesPrefix + "NAT-" + r.Generation, Comment: "nobody translates what is taken",
		Rules: [][]string{ipArgs("-j CONNMARK --set-xmark " + tproxyMark)}}
	t := IPTable{Name: "nat"}
	for _, d := range r.Diverts {
		for _, e := range r.entries(d) {
			c.Rules = append(c.Rules, asItIs(e))
		}
	}
	t.Chains = append(t.Chains, c)
	for _, hook := range []string{"PREROUTING", "OUTPUT"} {
		t.Jumps = append(t.Jumps, IPRule{hook, ipArgs("-p tcp --syn " + tproxyTaken + " -j " + c.Name)})
	}
	return t
}

// filter is that of mode iptables, but for how what is on its way to us is told.
func (r tproxyRenderer) filter() IPTable {
	taken := ipArgs(tproxyTaken + " -j RETURN")
	again := IPChain{
		Name:    IPTablesPrefix + "IN-" + r.Generation,
		Comment: "connects that were taken and are not any more, as those of a frozen agent's clients that are still knocking",
		Rules:   [][]string{taken, ipArgs("-p tcp -j REJECT --reject-with tcp-reset")},
	}
	t := IPTable{Name: "filter", Chains: []IPChain{again}}
	for _, hook := range []string{"INPUT", "FORWARD", "OUTPUT"} {
		t.Jumps = append(t.Jumps, IPRule{hook, ipArgs("-p tcp --syn " + tproxyOurs + " -j " + again.Name)})
	}
	return r.guarding(t, r.guard([][]string{taken}))
}
