package rules

import (
	"fmt"
	"net/netip"
	"strings"
)

// ipsetTimeout leaves the agent three missed beats of 0.5 s, and makes its
// absence felt after 2 s at the latest.
const ipsetTimeout = 2

// RenderIPTables says what mode iptables installs for s: for each family that
// a divert has entries of, an "alive" set, the nat chains that divert while it
// is filled, and the filter chains that refuse.
//
// Connections are told apart in table filter by what conntrack knows: the
// original destination says that a target was meant (kube-proxy may have
// rewritten it since), and "translated, and to one of our own addresses" says
// that it is on its way to us. Everything looks at SYNs only, so that
// connections made before stay as they are.
func RenderIPTables(s State) IPTables {
	var t IPTables
	for _, v6 := range []bool{false, true} {
		r := ipRenderer{State: s, v6: v6}
		if !r.any() {
			continue
		}
		t.Sets = append(t.Sets, r.alive())
		t.Families = append(t.Families, IPTablesFamily{V6: v6, Tables: []IPTable{r.nat(), r.filter()}})
	}
	return t
}

// ipRenderer renders one family of a State.
type ipRenderer struct {
	State
	v6 bool
}

// toUs is a place that connections are diverted to.
type toUs struct {
	addr netip.Addr
	port func(Ports) uint16
}

func (r ipRenderer) loopback() toUs {
	if r.v6 {
		return toUs{netip.IPv6Loopback(), func(p Ports) uint16 { return p.Host6 }}
	}
	return toUs{netip.AddrFrom4([4]byte{127, 0, 0, 1}), func(p Ports) uint16 { return p.Host4 }}
}

func (r ipRenderer) nodeLocal() toUs {
	if r.v6 {
		return toUs{r.Node6, func(p Ports) uint16 { return p.Pod6 }}
	}
	return toUs{r.Node4, func(p Ports) uint16 { return p.Pod4 }}
}

// entries are those of this family.
func (r ipRenderer) entries(d Divert) (own []Entry) {
	for _, e := range d.Entries {
		if e.Prefix.Addr().Is6() == r.v6 {
			own = append(own, e)
		}
	}
	return own
}

func (r ipRenderer) any() bool {
	for _, d := range r.Diverts {
		if len(r.entries(d)) > 0 {
			return true
		}
	}
	return false
}

// alive is the set that gates whatever must end with the agent. It holds the
// two halves of the address space instead of the targets: a beat costs two
// elements however many targets there are, and a new state leaves it alone.
// The chains name the targets, in the order that decides between them.
func (r ipRenderer) alive() IPSet {
	return IPSet{Name: r.set(), V6: r.v6, Timeout: ipsetTimeout, Elements: IPSetElements(r.v6)}
}

// IPSetElements are what the alive set of a family holds: no prefix of length 0
// fits into a set, two of length 1 do.
func IPSetElements(v6 bool) []netip.Prefix {
	if v6 {
		return []netip.Prefix{netip.MustParsePrefix("::/1"), netip.MustParsePrefix("8000::/1")}
	}
	return []netip.Prefix{netip.MustParsePrefix("0.0.0.0/1"), netip.MustParsePrefix("128.0.0.0/1")}
}

func (r ipRenderer) set() string {
	if r.v6 {
		return IPSet6Prefix + r.Generation
	}
	return IPSet4Prefix + r.Generation
}

// nat diverts. It is committed before filter: an address that becomes a target
// is never refused in between.
func (r ipRenderer) nat() IPTable {
	t := IPTable{Name: "nat"}
	add := func(hook string, c IPChain) {
		t.Chains = append(t.Chains, c)
		t.Jumps = append(t.Jumps, IPRule{hook, ipArgs("-p tcp --syn -j " + c.Name)})
	}
	dead := ipArgs("-m set ! --match-set " + r.set() + " dst -j RETURN")
	if guard := r.untranslated(); r.Clients.Pods && r.WhenDown == Refuse && len(guard.Rules) > 1 {
		add("PREROUTING", guard)
	}
	if pods := r.diverts(func(d Divert) bool { return d.Name != SelfTestName }, r.nodeLocal()); r.Clients.Pods && len(pods) > 0 {
		add("PREROUTING", IPChain{
			Name:    IPTablesPrefix + "PRE-" + r.Generation,
			Comment: "pods; not while the agent is dead, nor what other hosts send to this one by its own address",
			Rules:   append([][]string{dead, r.toThisHost()}, pods...),
		})
	}
	if host := r.diverts(func(d Divert) bool { return r.Clients.Host || d.Name == SelfTestName }, r.loopback()); len(host) > 0 {
		add("OUTPUT", IPChain{
			Name:    IPTablesPrefix + "OUT-" + r.Generation,
			Comment: "host processes; not the agent's own sockets, nor while the agent is dead",
			Rules:   append([][]string{r.ownMark(), dead}, host...),
		})
	}
	return t
}

// diverts are the rules of all diverts that want says yes to, in order. A
// refused one, or one without a listener, stays as it is for table filter to
// refuse: nothing behind our rules translates it.
func (r ipRenderer) diverts(want func(Divert) bool, to toUs) (rules [][]string) {
	for _, d := range r.Diverts {
		if !want(d) {
			continue
		}
		verdict := ""
		if port := to.port(d.Ports); !d.Refused && port != 0 && to.addr.IsValid() {
			verdict = "DNAT --to-destination " + netip.AddrPortFrom(to.addr, port).String()
		}
		for _, e := range r.entries(d) {
			if verdict == "" {
				rules = append(rules, asItIs(e))
				continue
			}
			rules = append(rules, ipArgs(fmt.Sprintf("-d %s -p tcp --dport %d -j %s", e.Prefix, e.Port, verdict)))
		}
	}
	return rules
}

// asItIs ends the translation of connects to e. A translation to what it is
// already also keeps the nat chains of nftables tables from it, which ACCEPT
// does not; services have single addresses.
func asItIs(e Entry) []string {
	verdict := "ACCEPT"
	if e.Prefix.IsSingleIP() {
		verdict = "DNAT --to-destination " + netip.AddrPortFrom(e.Prefix.Addr(), e.Port).String()
	}
	return ipArgs(fmt.Sprintf("-d %s -p tcp --dport %d -j %s", e.Prefix, e.Port, verdict))
}

// untranslated is the guard's part of table nat: nobody else translates what
// pods send to a target. The reset that refuses it would not be translated back
// for a pod on a bridge with bridge-nf-call-iptables=1 (the kernel sends it by
// the bridge port at once), and the pod would wait until its connect times out.
func (r ipRenderer) untranslated() IPChain {
	c := IPChain{
		Name:    IPTablesGuard,
		Comment: "pods' connects to targets, where they are not diverted: not translated by anybody",
		Rules:   [][]string{r.toThisHost()},
	}
	for _, e := range r.guarded() {
		c.Rules = append(c.Rules, asItIs(e))
	}
	return c
}

// toThisHost lets pass what comes in by a device that has the destination's
// address: other hosts on their way to a KAS that runs here.
func (r ipRenderer) toThisHost() []string {
	return ipArgs("-m addrtype --dst-type LOCAL --limit-iface-in -j RETURN")
}

// guarded are the entries of this family that clients may mean.
func (r ipRenderer) guarded() (all []Entry) {
	for _, d := range r.Diverts {
		if d.Name != SelfTestName {
			all = append(all, r.entries(d)...)
		}
	}
	return all
}

// filter refuses, as REJECT stands in no other table.
func (r ipRenderer) filter() IPTable {
	t := IPTable{Name: "filter"}
	if stale := r.stalled(); len(stale.Rules) > 1 {
		t.Chains = append(t.Chains, stale)
		t.Jumps = append(t.Jumps, IPRule{"INPUT", ipArgs("-p tcp --syn -m conntrack --ctstate DNAT -j " + stale.Name)})
	}
	var onTheWay [][]string
	for _, to := range []toUs{r.loopback(), r.nodeLocal()} {
		if to.addr.IsValid() {
			onTheWay = append(onTheWay, ipArgs(fmt.Sprintf("-d %s -m conntrack --ctstate DNAT -j RETURN", ipSingle(to.addr))))
		}
	}
	return r.guarding(t, r.guard(onTheWay))
}

// guarding adds the guard to table filter, if it refuses anything.
func (r ipRenderer) guarding(t IPTable, guard IPChain) IPTable {
	if len(guard.Rules) == 0 {
		return t
	}
	t.Chains = append(t.Chains, guard)
	if r.Clients.Host {
		t.Jumps = append(t.Jumps, IPRule{"OUTPUT", ipArgs("-p tcp --syn -j " + guard.Name)})
	}
	if r.Clients.Pods {
		t.Jumps = append(t.Jumps,
			IPRule{"FORWARD", ipArgs("-p tcp --syn -j " + guard.Name)},
			// Where the node itself has a target's address: but other hosts may
			// reach a KAS here by the address of the device they come in by.
			IPRule{"INPUT", ipArgs("! -i lo -p tcp --syn -m addrtype ! --dst-type LOCAL --limit-iface-in -j " + guard.Name)})
	}
	return t
}

// stalled refuses what was diverted to us before the agent froze and is still
// knocking: once its backlog is full nobody else would ever answer.
func (r ipRenderer) stalled() IPChain {
	c := IPChain{
		Name:    IPTablesPrefix + "IN-" + r.Generation,
		Comment: "connects diverted to listeners of an agent that has stopped answering",
		Rules:   [][]string{ipArgs("-m set --match-set " + r.set() + " dst -j RETURN")},
	}
	// A reset would not reach pods on a bridge, see untranslated; an ICMP error
	// does, though but some per second.
	unreachable := map[bool]string{false: "icmp-port-unreachable", true: "icmp6-port-unreachable"}[r.v6]
	for _, to := range []struct {
		toUs
		with string
	}{{r.loopback(), "tcp-reset"}, {r.nodeLocal(), unreachable}} {
		for _, d := range r.Diverts {
			if port := to.port(d.Ports); port != 0 && to.addr.IsValid() && !d.Refused && len(r.entries(d)) > 0 {
				c.Rules = append(c.Rules, ipArgs(fmt.Sprintf("-d %s -p tcp --dport %d -j REJECT --reject-with %s", ipSingle(to.addr), port, to.with)))
			}
		}
	}
	return c
}

// guard refuses every connect to a target, after the rules onTheWay have let
// pass what is on its way to us. With
// WhenDown Refuse it outlives the agent; with Direct it is gated like the
// diverts, and serves refused targets and connects that began before them.
func (r ipRenderer) guard(onTheWay [][]string) IPChain {
	c := IPChain{Name: r.guardName(), Comment: "refuses connects to targets that are not diverted, also while no agent lives"}
	if r.WhenDown != Refuse {
		c.Comment = "refuses connects to targets that are not diverted, while the agent lives"
	}
	if !r.Clients.Host && !r.Clients.Pods {
		return c
	}
	entries := r.guarded()
	if len(entries) == 0 {
		return c
	}
	if r.WhenDown != Refuse {
		c.Rules = append(c.Rules, ipArgs("-m set ! --match-set "+r.set()+" dst -j RETURN"))
	}
	c.Rules = append(append(c.Rules, r.ownMark()), onTheWay...)
	for _, e := range entries {
		c.Rules = append(c.Rules, ipArgs(fmt.Sprintf("-p tcp -m conntrack --ctorigdst %s --ctorigdstport %d -j REJECT --reject-with tcp-reset", e.Prefix, e.Port)))
	}
	return c
}

func (r ipRenderer) guardName() string {
	if r.WhenDown != Refuse {
		return IPTablesGuard + "-" + r.Generation
	}
	return IPTablesGuard
}

func (r ipRenderer) ownMark() []string {
	return ipArgs(fmt.Sprintf("-m mark --mark %#x/%#x -j RETURN", r.Mark, r.MarkMask))
}

func ipSingle(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// ipArgs splits a rule written as one line; no argument of ours holds a space.
func ipArgs(line string) []string { return strings.Fields(line) }
