package rules

import "net/netip"

// Where the chains of mode tproxy stand: after connection tracking, which tells
// what is taken, and before every nat chain. What keeps the packets of a taken
// connection comes after what takes its first.
const (
	nftPriorityTake = -150
	nftPriorityKeep = -149
)

// PlanTProxyNFT is what mode tproxy installs for s with nftables: the table of
// its generation, and with Refuse the guard.
//
// The first segment of a connection is given to the listener of its target and
// marked, and so is the connection; the mark leads to this host (TProxyRoutes).
// What the host's own processes send is marked in output, comes back by lo, and
// is given to the listener there. All later packets of the connection get the
// mark from it. Connections made before have none, and stay as they are.
//
// kube-proxy must not translate what is taken: the answers come from the address
// that the client knows. It is kept from that by a translation to what the
// address is already, at NFTPriority. To leave the connection untracked would do
// that too, but then nothing tells the later packets of a host's connection from
// those of one made before, and a firewall that lets established ones pass
// knows none of ours.
func PlanTProxyNFT(s State) []NFTTable {
	own := NFTTable{Name: NFTPrefix + s.Generation, Owner: true, Alive: true}
	own.Chains = append(own.Chains, nftBeatChain(NFTRule{Beat: NFTBeat(s.Generation), Mark: s.Mark, Mask: s.MarkMask}))
	for _, side := range nftSides(s) {
		own.Chains = append(own.Chains, tproxySide{side}.chains()...)
	}
	plan := PlanNFT(s)
	if len(plan) == 1 {
		return []NFTTable{own}
	}
	return []NFTTable{own, tproxyGuard(plan[1], nftSides(s))}
}

// PlanTProxyNFTLinger is the table of the generation when the agent has stopped
// diverting and serves what it holds: nothing but what keeps that. It has the
// chains that it had.
func PlanTProxyNFTLinger(s State) NFTTable {
	t := PlanTProxyNFT(s)[0]
	for i, c := range t.Chains {
		if c.Priority != nftPriorityKeep {
			t.Chains[i].Rules = nil
		}
	}
	return t
}

// tproxyGuard is the guard of mode nft, which sees nothing that is taken, and
// besides what was taken and is not any more: it must not go where it is
// addressed to, for want of an agent (stray) or of a route (lost).
func tproxyGuard(guard NFTTable, sides []nftSide) NFTTable {
	for _, side := range sides {
		if !side.guarded {
			continue
		}
		guard.Chains = append(guard.Chains, NFTChain{Name: side.name + "_stray", Type: "filter", Hook: side.hook, Priority: nftPriorityLate,
			Rules: []NFTRule{{NotLoopback: side.gate.NotLoopback, Taken: TakenNo, OfTaken: TakenYes, Goto: side.name + "_refuse"}}})
	}
	guard.Chains = append(guard.Chains, NFTChain{Name: "lost", Type: "filter", Hook: "postrouting", Priority: nftPriorityTake,
		Rules: []NFTRule{{ToOthers: true, Taken: TakenYes, OfTaken: TakenYes, Drop: true}}})
	return guard
}

// tproxySide is one of the two places where connections begin.
type tproxySide struct{ nftSide }

func (e tproxySide) host() bool { return e.hook == "output" }

func (e tproxySide) chains() []NFTChain {
	take := e.gate
	take.Alive, take.Taken, take.Goto = AliveYes, TakenNo, e.name+"_take"
	keep := NFTRule{NotLoopback: e.gate.NotLoopback, NotSYN: true, OfTaken: TakenYes, Keep: true}
	nat := e.gate
	nat.Alive, nat.Goto = AliveYes, e.name+"_refused"
	late := e.gate
	late.Taken, late.Seen, late.Goto = TakenNo, true, e.name+"_again"
	kind := "filter"
	if e.host() {
		kind = "route" // a new mark leads to a new route
	}
	all := []NFTChain{
		// What was first sent before we took connections may be translated.
		{Name: e.name + "_mangle", Type: kind, Hook: e.hook, Priority: nftPriorityTake,
			Rules: []NFTRule{{SYN: true, OfTaken: TakenNo, Seen: true}, take}},
		e.takes(),
		{Name: e.name + "_keep", Type: kind, Hook: e.hook, Priority: nftPriorityKeep, Rules: []NFTRule{keep}},
		{Name: e.name, Type: "nat", Hook: e.hook, Priority: NFTPriority, Rules: []NFTRule{
			{Taken: TakenYes, Dst: netip.MustParsePrefix("0.0.0.0/0"), AsItIs: true},
			{Taken: TakenYes, Dst: netip.MustParsePrefix("::/0"), AsItIs: true}, nat}},
		e.refused(),
		{Name: e.name + "_late", Type: "filter", Hook: e.hook, Priority: nftPriorityLate, Rules: []NFTRule{late}},
		e.again(),
	}
	if e.host() {
		all = append(all, NFTChain{Name: "host_back", Type: "filter", Hook: "prerouting", Priority: nftPriorityTake,
			Rules: []NFTRule{{Loopback: true, SYN: true, Taken: TakenYes, Goto: "host_assign"}}}, e.assigns("host_assign"))
	}
	return all
}

// takes decides as State.Match does: the first rule that matches.
func (e tproxySide) takes() NFTChain {
	c := e.assigns(e.name + "_take")
	for i, r := range c.Rules {
		if e.host() && r.Assign.IsValid() {
			c.Rules[i].Assign, c.Rules[i].Take = netip.AddrPort{}, true
		}
	}
	return c
}

// assigns leads to the listeners. Without one, or refused, the connection is
// left alone, or to the guard.
func (e tproxySide) assigns(name string) NFTChain {
	c := NFTChain{Name: name}
	for _, entry := range e.entries {
		for _, dst := range entry.divert.Entries {
			r := NFTRule{Dst: dst.Prefix, Port: dst.Port, Comment: nftComment(entry.divert.Name)}
			if to, ok := e.local(dst.Prefix, entry); ok && !entry.divert.Refused {
				r.Assign = to
			}
			c.Rules = append(c.Rules, r)
		}
	}
	return c
}

// refused answers for what is not taken.
func (e tproxySide) refused() NFTChain {
	c := NFTChain{Name: e.name + "_refused"}
	for _, entry := range e.entries {
		for _, dst := range entry.divert.Entries {
			if _, ok := e.local(dst.Prefix, entry); !ok || entry.divert.Refused {
				c.Rules = append(c.Rules, NFTRule{Dst: dst.Prefix, Port: dst.Port, Reject: entry.divert.Refused, Comment: nftComment(entry.divert.Name)})
			}
		}
	}
	return c
}

// again answers SYNs that are sent again and not taken, as lateSYNs does in
// mode nft: of a frozen agent's clients, and of those that began before us.
func (e tproxySide) again() NFTChain {
	notOurs := NFTRule{Alive: AliveNo, OfTaken: TakenNo, Comment: "not ours"}
	return NFTChain{Name: e.name + "_again", Rules: append([]NFTRule{notOurs}, e.resent()...)}
}
