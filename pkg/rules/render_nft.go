package rules

import (
	"fmt"
	"net/netip"
	"strings"
)

// RenderNFT prints what mode nft installs for s, as text that `nft -f` loads.
// The flag owner stands there as a comment: a table with it lives no longer
// than the process that made it, and nft would load it for a moment only.
func RenderNFT(s State) string {
	var b strings.Builder
	fmt.Fprintf(&b, "# Kasway, mode nft, generation %s: %s.\n", s.Generation, nftSummary(s))
	for _, t := range PlanNFT(s) {
		b.WriteString("\n")
		t.render(&b)
	}
	return b.String()
}

func nftSummary(s State) string {
	var who []string
	if s.Clients.Host {
		who = append(who, "host processes")
	}
	if s.Clients.Pods {
		who = append(who, "pods")
	}
	if len(who) == 0 {
		who = append(who, "nobody")
	}
	down := "connects pass untouched"
	if s.WhenDown == Refuse {
		down = "connects are refused"
	}
	return "diverts " + strings.Join(who, " and ") + "; without an agent " + down
}

// String is the table as text that `nft -f` loads.
func (t NFTTable) String() string {
	var b strings.Builder
	t.render(&b)
	return b.String()
}

func (t NFTTable) render(b *strings.Builder) {
	if !t.Owner {
		b.WriteString("# Outlives the agent; `kasway-agent cleanup` removes it.\n")
	}
	fmt.Fprintf(b, "table inet %s {\n", t.Name)
	if t.Owner {
		b.WriteString("\t# flags owner: the kernel removes this table when the agent ends\n")
	}
	if t.Alive {
		b.WriteString("\t# the agent is alive: renewed by a heartbeat every 0.5 s\n")
		fmt.Fprintf(b, "\tset %s {\n\t\ttype mark; size %d; flags dynamic,timeout; timeout %dms;\n\t\telements = { 0x0 }\n\t}\n", NFTAlive, NFTAliveSize, AliveTimeout.Milliseconds())
	}
	// A chain must be known before another goes to it.
	for _, base := range []bool{false, true} {
		for _, c := range t.Chains {
			if (c.Hook != "") == base {
				c.render(b)
			}
		}
	}
	b.WriteString("}\n")
}

func (c NFTChain) render(b *strings.Builder) {
	fmt.Fprintf(b, "\tchain %s {\n", c.Name)
	if c.Hook != "" {
		fmt.Fprintf(b, "\t\ttype %s hook %s priority %d; policy accept;\n", c.Type, c.Hook, c.Priority)
	}
	for _, r := range c.Rules {
		fmt.Fprintf(b, "\t\t%s\n", r)
	}
	b.WriteString("\t}\n")
}

// nftZero is 0, which nft has no plainer way to look up.
const nftZero = "meta mark & 0x00000000"

// String is the rule in the syntax of nft.
func (r NFTRule) String() string {
	var w []string
	add := func(format string, a ...any) { w = append(w, fmt.Sprintf(format, a...)) }
	if r.Beat.IsValid() {
		return fmt.Sprintf("meta mark & %#08x == %#08x ip daddr %s udp dport %d update @%s { %s } drop", r.Mask, r.Mark, r.Beat.Addr(), r.Beat.Port(), NFTAlive, nftZero)
	}
	if r.NotLoopback {
		add(`iif != "lo"`)
	}
	if r.Loopback {
		add(`iif "lo"`)
	}
	if r.ToOthers {
		add(`oif != "lo"`)
	}
	if r.SYN {
		add("tcp flags & (fin | syn | rst | ack) == syn")
	}
	if r.NotSYN {
		add("tcp flags & (fin | syn | rst | ack) != syn")
	}
	if r.NotForDevice {
		add("fib daddr . iif type != local")
	}
	switch r.Alive {
	case AliveYes:
		add("%s @%s", nftZero, NFTAlive)
	case AliveNo:
		add("%s != @%s", nftZero, NFTAlive)
	}
	if r.Mask != 0 {
		add("meta mark & %#08x != %#08x", r.Mask, r.Mark)
	}
	w = append(w, r.taken()...)
	if r.New {
		add("ct state new")
	}
	if r.Seen {
		add("ct status confirmed")
	}
	if r.From.IsValid() {
		add("ct reply %s saddr %s", nftFamily(r.From), r.From)
	}
	if r.NotFrom.IsValid() {
		add("ct reply %s saddr != %s", nftFamily(r.NotFrom), r.NotFrom)
	}
	w = append(append(w, r.destination()...), r.verdict())
	if r.Comment != "" {
		add("comment %q", r.Comment)
	}
	return strings.Join(w, " ")
}

func (r NFTRule) verdict() string {
	switch {
	case r.To.IsValid():
		return fmt.Sprintf("dnat %s to %s", nftFamily(r.To.Addr()), r.To)
	case r.Goto != "":
		return "goto " + r.Goto
	case r.Reject:
		return "reject with tcp reset"
	case r.Drop:
		return "drop"
	case r.Assign.IsValid():
		return fmt.Sprintf("tproxy %s to %s %s accept", nftFamily(r.Assign.Addr()), r.Assign, nftTake("meta"))
	case r.Take:
		return nftTake("meta") + " accept"
	case r.Keep:
		return nftTake("meta")
	case r.AsItIs:
		return fmt.Sprintf("%s dnat %[2]s to %[2]s daddr", nftTake("ct"), nftFamily(r.Dst.Addr()))
	}
	return "return"
}

// nftTake sets the mark of what mode tproxy takes.
func nftTake(where string) string {
	return fmt.Sprintf("%[1]s mark set %[1]s mark & %#08[2]x | %#08[3]x", where, ^uint32(TProxyMask), uint32(TProxyMark))
}

func (r NFTRule) taken() (w []string) {
	for _, c := range []struct {
		of   string
		want NFTTaken
	}{{"meta", r.Taken}, {"ct", r.OfTaken}} {
		switch c.want {
		case TakenYes:
			w = append(w, fmt.Sprintf("%s mark & %#08x == %#08x", c.of, uint32(TProxyMask), uint32(TProxyMark)))
		case TakenNo:
			w = append(w, fmt.Sprintf("%s mark & %#08x != %#08x", c.of, uint32(TProxyMask), uint32(TProxyMark)))
		}
	}
	if r.OfTaken == TakenYes {
		w = append(w, "ct direction original")
	}
	return w
}

func (r NFTRule) destination() (w []string) {
	switch {
	case r.Dst.IsValid() && r.Dst.Bits() == 0:
		w = append(w, "meta nfproto "+nftProto(r.Dst.Addr()))
	case r.Dst.IsValid():
		w = append(w, nftFamily(r.Dst.Addr())+" daddr "+prefixText(r.Dst))
	}
	if r.Dst.IsValid() && r.Port != 0 {
		w = append(w, fmt.Sprintf("tcp dport %d", r.Port))
	}
	return w
}

func nftFamily(a netip.Addr) string {
	if a.Is4() {
		return "ip"
	}
	return "ip6"
}

func nftProto(a netip.Addr) string {
	if a.Is4() {
		return "ipv4"
	}
	return "ipv6"
}

// prefixText writes a single address without its length, as people and nft do.
func prefixText(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}
