package rules

import (
	"hash/fnv"
	"net/netip"
	"strings"
	"time"
)

// Names and numbers of what mode nft installs.
const (
	// NFTPrefix starts the name of every nftables table of ours.
	NFTPrefix = "kasway_"
	// NFTGuard is the table of the dead-agent guard, shared by all generations.
	NFTGuard = NFTPrefix + "guard"
	// NFTAlive is the set whose one element, 0, lapses when the agent's
	// heartbeats end. Everything under the mask 0 is 0 and may be looked up.
	NFTAlive = "alive"
	// AliveTimeout is how long a heartbeat lasts in the kernel: with one every
	// 0.5 s four may be missed, and 3 s after the last nothing is diverted.
	AliveTimeout = 2500 * time.Millisecond
	// NFTAliveSize is how many elements NFTAlive may hold.
	NFTAliveSize = 16
	// NFTPriority is where our nat chains stand: before kube-proxy's at -100.
	NFTPriority = -110
)

// Where our other base chains stand. All nat chains, ours and kube-proxy's, run
// inside one hook of the kernel's at -100, ordered by their own priority; a
// filter chain before it sees a diverted packet's old address, and refuses what
// is about to be diverted. So the guard is a nat chain, between our own and
// kube-proxy's: it sees what we have left alone, and nobody has changed yet.
const (
	nftPriorityGuard = -105
	// Before the nat hook. A reset must be made while the packet still has the
	// address that its sender knows: on a bridge it leaves past conntrack.
	nftPriorityLate = -105
	// Before anybody's filter and before conntrack: a heartbeat must arrive,
	// and leave no trace.
	nftPriorityBeat = -350
)

// nftBeatPort is where heartbeats go to, in 127.0.0.0/8.
const nftBeatPort = 0x6b77

// NFTBeat is where the heartbeats of a generation go to: an address of the
// loopback network for each. Nobody need listen there.
func NFTBeat(generation string) netip.AddrPort {
	h := fnv.New32a()
	h.Write([]byte(generation))
	sum := h.Sum32()
	// 127.64.0.0/10, away from 127.0.0.1 and from what distributions use.
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 64 | byte(sum>>16)&63, byte(sum >> 8), byte(sum)}), nftBeatPort)
}

// NFTTable is one table of mode nft as data: the text of RenderNFT and the
// netlink messages of mode nft are both made from it. Family inet.
type NFTTable struct {
	Name string
	// Owner: the kernel removes the table when the agent's socket closes.
	Owner bool
	// Alive: the table holds the set NFTAlive with its element.
	Alive  bool
	Chains []NFTChain
}

// NFTChain is a base chain (Hook not "") or one that others go to.
type NFTChain struct {
	Name string
	// Type is "nat", "filter" or "route", Hook "output", "prerouting" or
	// "postrouting".
	Type, Hook string
	Priority   int
	Rules      []NFTRule
}

// NFTAliveness is what a rule asks of the set NFTAlive.
type NFTAliveness int

// A rule may not ask, or want the agent alive, or silent.
const (
	AliveAny NFTAliveness = iota
	AliveYes
	AliveNo
)

// NFTTaken is what a rule asks of a mark of mode tproxy.
type NFTTaken int

// A rule may not ask, or want the mark, or its absence.
const (
	TakenAny NFTTaken = iota
	TakenYes
	TakenNo
)

// NFTRule is a rule: conditions, tested in the order of the fields, then one
// verdict. A field's zero value is no condition.
type NFTRule struct {
	// Beat: the packet is a heartbeat to this address, with Mark under Mask.
	// The verdict is to renew NFTAlive and to drop it, which its sender sees.
	Beat netip.AddrPort
	// NotLoopback: the packet did not come in by lo; Loopback: it did; ToOthers:
	// it does not leave by lo.
	NotLoopback, Loopback, ToOthers bool
	// SYN: the segment opens a connection; NotSYN: it does not.
	SYN, NotSYN bool
	// NotForDevice: the destination is no address of the device that the packet
	// came in by.
	NotForDevice bool
	Alive        NFTAliveness
	// Mark: the packet does not carry Mark under Mask.
	Mark, Mask uint32
	// Taken asks for the mark of what mode tproxy takes, on the packet; OfTaken on
	// the connection, whose client has then sent it.
	Taken, OfTaken NFTTaken
	// New: the packet is the first of a connection.
	New bool
	// Seen: the connection's first packet has passed through before.
	Seen bool
	// From: nat has given the connection this destination, and its answers
	// come from there. NotFrom: another one, or none, of the same family.
	From, NotFrom netip.Addr
	// Dst and Port are the destination at this point; Port 0: any.
	Dst  netip.Prefix
	Port uint16

	// To is the verdict dnat, Goto goto; Reject answers with a TCP reset, Drop
	// with nothing. None of them: return.
	To           netip.AddrPort
	Goto         string
	Reject, Drop bool
	// Those of mode tproxy. Assign gives the packet to a transparent listener
	// and marks it, Take marks it; both accept. Keep marks it and goes on. AsItIs,
	// of a nat chain, marks the connection, and lets nobody translate it.
	Assign             netip.AddrPort
	Take, Keep, AsItIs bool
	Comment            string
}

// PlanNFT is what mode nft installs for s: the table of its generation, and
// with Refuse the guard.
func PlanNFT(s State) []NFTTable {
	own := NFTTable{Name: NFTPrefix + s.Generation, Owner: true, Alive: true}
	own.Chains = append(own.Chains, nftBeatChain(NFTRule{Beat: NFTBeat(s.Generation), Mark: s.Mark, Mask: s.MarkMask}))
	guard := NFTTable{Name: NFTGuard}
	for _, side := range nftSides(s) {
		own.Chains = append(own.Chains, side.divert(), side.late(), side.diverts(), side.lateSYNs())
		if side.guarded {
			guard.Chains = append(guard.Chains, side.guard(), side.refuse())
		}
	}
	if s.WhenDown != Refuse {
		return []NFTTable{own}
	}
	return []NFTTable{own, guard}
}

func nftBeatChain(beat NFTRule) NFTChain {
	return NFTChain{Name: "beat", Type: "filter", Hook: "output", Priority: nftPriorityBeat, Rules: []NFTRule{beat}}
}

// PlanNFTLinger is what takes the place of the generation's table when the
// agent has stopped diverting and serves what it holds: a connection that was
// given another destination needs somebody's nat chain, and connection
// tracking, to the end.
func PlanNFTLinger(generation string) NFTTable {
	return NFTTable{Name: NFTPrefix + generation, Owner: true, Chains: []NFTChain{
		{Name: "linger", Type: "nat", Hook: "output", Priority: NFTPriority, Rules: []NFTRule{{New: true}}}}}
}

// PlanNFTListen is the guard of mode listen: connects to addrs are answered
// ECONNREFUSED while no agent sends heartbeats to NFTBeat(NFTGuard), marked.
func PlanNFTListen(addrs []netip.AddrPort, mark, mask uint32) NFTTable {
	t := NFTTable{Name: NFTGuard, Alive: true, Chains: []NFTChain{
		nftBeatChain(NFTRule{Beat: NFTBeat(NFTGuard), Mark: mark, Mask: mask})}}
	for _, hook := range []string{"output", "prerouting"} {
		t.Chains = append(t.Chains, NFTChain{Name: hook, Type: "filter", Hook: hook, Priority: nftPriorityGuard,
			Rules: []NFTRule{{SYN: true, Alive: AliveNo, Goto: "refuse"}}})
	}
	refuse := NFTChain{Name: "refuse"}
	for _, a := range addrs {
		addr := a.Addr().Unmap().WithZone("")
		refuse.Rules = append(refuse.Rules, NFTRule{Dst: netip.PrefixFrom(addr, addr.BitLen()), Port: a.Port(), Reject: true})
	}
	t.Chains = append(t.Chains, refuse)
	return t
}

// nftSide is one of the two places where connections begin: the host's own
// sockets (hook output) and everybody else's (prerouting).
type nftSide struct {
	name, hook string
	gate       NFTRule    // the conditions common to the side's base chains
	to4, to6   netip.Addr // what its clients are diverted to
	guarded    bool       // its clients are diverted, not the self-test alone
	entries    []nftEntry
}

type nftEntry struct {
	divert       *Divert
	port4, port6 uint16 // listener; 0: none
}

func nftSides(s State) []nftSide {
	host := nftSide{name: "host", hook: "output", guarded: s.Clients.Host,
		gate: NFTRule{SYN: true, Mark: s.Mark, Mask: s.MarkMask},
		to4:  netip.AddrFrom4([4]byte{127, 0, 0, 1}), to6: netip.IPv6Loopback()}
	// What comes by lo has been decided on output.
	pods := nftSide{name: "pods", hook: "prerouting", guarded: s.Clients.Pods,
		gate: NFTRule{NotLoopback: true, SYN: true}, to4: s.Node4, to6: s.Node6}
	for i := range s.Diverts {
		d := &s.Diverts[i]
		if s.Clients.Host || d.Name == SelfTestName {
			host.entries = append(host.entries, nftEntry{d, d.Ports.Host4, d.Ports.Host6})
		}
		if d.Name != SelfTestName {
			pods.entries = append(pods.entries, nftEntry{d, d.Ports.Pod4, d.Ports.Pod6})
		}
	}
	var sides []nftSide
	if len(host.entries) > 0 {
		sides = append(sides, host)
	}
	if s.Clients.Pods {
		// What comes to its device's own address is of other hosts, on their way
		// to a KAS that runs here: no agent may stand in between, dead or alive.
		pods.gate.NotForDevice = true
		sides = append(sides, pods)
	}
	return sides
}

func (e nftSide) divert() NFTChain {
	r := e.gate
	r.Alive, r.Goto = AliveYes, e.name+"_divert"
	return NFTChain{Name: e.name, Type: "nat", Hook: e.hook, Priority: NFTPriority, Rules: []NFTRule{r}}
}

func (e nftSide) late() NFTChain {
	r := e.gate
	r.Seen, r.Goto = true, e.name+"_again"
	return NFTChain{Name: e.name + "_late", Type: "filter", Hook: e.hook, Priority: nftPriorityLate, Rules: []NFTRule{r}}
}

// guard asks for conntrack: without it the kernel runs no nat chain.
func (e nftSide) guard() NFTChain {
	r := e.gate
	r.New, r.Goto = true, e.name+"_refuse"
	return NFTChain{Name: e.name, Type: "nat", Hook: e.hook, Priority: nftPriorityGuard, Rules: []NFTRule{r}}
}

// local is the address and port that connections to p are diverted to, if there is one.
func (e nftSide) local(p netip.Prefix, entry nftEntry) (netip.AddrPort, bool) {
	to, port := e.to6, entry.port6
	if p.Addr().Is4() {
		to, port = e.to4, entry.port4
	}
	return netip.AddrPortFrom(to, port), to.IsValid() && port != 0
}

// diverts decides as State.Match does: the first rule that matches. Without a
// listener the connection is left alone, or to the guard.
func (e nftSide) diverts() NFTChain {
	c := NFTChain{Name: e.name + "_divert"}
	for _, entry := range e.entries {
		for _, dst := range entry.divert.Entries {
			r := NFTRule{Dst: dst.Prefix, Port: dst.Port, Comment: nftComment(entry.divert.Name)}
			switch to, ok := e.local(dst.Prefix, entry); {
			case entry.divert.Refused:
				r.Reject = true
			case ok:
				r.To = to
			}
			c.Rules = append(c.Rules, r)
		}
	}
	return c
}

// lateSYNs answers SYNs that are sent again, which nat does not look at any
// more, and whose clients would hang: the one that a frozen agent's full
// backlog drops, and the one first sent before we diverted.
func (e nftSide) lateSYNs() NFTChain {
	c := NFTChain{Name: e.name + "_again"}
	for _, to := range []netip.Addr{e.to4, e.to6} {
		if to.IsValid() {
			c.Rules = append(c.Rules, NFTRule{Alive: AliveYes, From: to, Comment: "diverted"},
				NFTRule{Alive: AliveNo, NotFrom: to, Comment: "not ours"})
		}
	}
	c.Rules = append(c.Rules, e.resent()...)
	return c
}

// resent rejects what we divert, or refuse.
func (e nftSide) resent() (all []NFTRule) {
	for _, entry := range e.entries {
		for _, dst := range entry.divert.Entries {
			if _, ok := e.local(dst.Prefix, entry); ok || entry.divert.Refused {
				all = append(all, NFTRule{Dst: dst.Prefix, Port: dst.Port, Reject: true, Comment: nftComment(entry.divert.Name)})
			}
		}
	}
	return all
}

// refuse refuses what clients mean for a target.
func (e nftSide) refuse() NFTChain {
	c := NFTChain{Name: e.name + "_refuse"}
	for _, entry := range e.entries {
		if entry.divert.Name == SelfTestName {
			continue
		}
		for _, dst := range entry.divert.Entries {
			c.Rules = append(c.Rules, NFTRule{Dst: dst.Prefix, Port: dst.Port, Reject: true, Comment: nftComment(entry.divert.Name)})
		}
	}
	return c
}

// nftComment makes a name fit for a comment: nft knows no escapes, and keeps
// 128 bytes.
func nftComment(name string) string {
	if len(name) > 120 {
		name = name[:120]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || r == '"' || r == '\\' {
			return '_'
		}
		return r
	}, name)
}
