package netns

import (
	"fmt"
	"net/netip"
	"strings"
)

// Policy is a network policy for what a pod sends.
type Policy string

// The policies of the laboratory. As with the plugins that enforce such
// policies, the node judges what a pod sends to others and to the node itself,
// by the address that it has once services are translated, and answers nothing.
const (
	NoPolicy Policy = "none"
	// DenyKAS lets the pod reach everything but the KAS.
	DenyKAS Policy = "denies the KAS"
	// OnlyKAS lets the pod reach nothing but the KAS.
	OnlyKAS Policy = "only the KAS"
)

// SetPolicy puts p into force for pods in the place of any that it has set
// before, by rules of the kind that kube-proxy has (iptables' where there is
// none). kas are the KAS's addresses.
func (h *Host) SetPolicy(kind KubeProxy, p Policy, kas []netip.AddrPort, pods ...*Host) error {
	if kind == NFTables {
		return h.nftPolicy(p, kas, pods)
	}
	if kind == NoKubeProxy {
		kind = IptablesNFT
	}
	for _, v6 := range []bool{false, true} {
		tool := string(kind)
		if v6 {
			tool = strings.Replace(tool, "iptables", "ip6tables", 1)
		}
		if _, err := h.RunInput(iptablesPolicy(p, v6, kas, pods), tool+"-restore", "--noflush"); err != nil {
			return err
		}
	}
	return nil
}

const policyChain = "LAB-POLICY"

// iptablesPolicy is the input of iptables-restore.
func iptablesPolicy(p Policy, v6 bool, kas []netip.AddrPort, pods []*Host) string {
	var b strings.Builder
	b.WriteString("*filter\n:" + policyChain + " - [0:0]\n")
	if p != NoPolicy {
		b.WriteString("-A " + policyChain + " -m conntrack --ctstate ESTABLISHED,RELATED -j RETURN\n")
		if v6 { // neighbour discovery is the wire's own business
			b.WriteString("-A " + policyChain + " -p ipv6-icmp -j RETURN\n")
		}
	}
	for _, pod := range pods {
		from := pod.Addr4
		if v6 {
			from = pod.Addr6
		}
		for _, to := range kas {
			if to.Addr().Is6() == v6 && p != NoPolicy {
				fmt.Fprintf(&b, "-A %s -s %s -d %s -p tcp --dport %d -j %s\n", policyChain, from, to.Addr(), to.Port(),
					map[Policy]string{DenyKAS: "DROP", OnlyKAS: "RETURN"}[p])
			}
		}
		if p == OnlyKAS {
			fmt.Fprintf(&b, "-A %s -s %s -j DROP\n", policyChain, from)
		}
	}
	// Appended once more with each policy, which changes nothing.
	fmt.Fprintf(&b, "-A FORWARD -j %[1]s\n-A INPUT -j %[1]s\nCOMMIT\n", policyChain)
	return b.String()
}

func (h *Host) nftPolicy(p Policy, kas []netip.AddrPort, pods []*Host) error {
	var b strings.Builder
	b.WriteString("table inet lab_policy\ndelete table inet lab_policy\n")
	if p != NoPolicy {
		b.WriteString("table inet lab_policy {\n\tchain judge {\n\t\tct state established,related accept\n\t\tmeta l4proto ipv6-icmp accept\n")
		for _, pod := range pods {
			for _, to := range kas {
				from, family := pod.Addr4, "ip"
				if to.Addr().Is6() {
					from, family = pod.Addr6, "ip6"
				}
				fmt.Fprintf(&b, "\t\t%[1]s saddr %[2]s %[1]s daddr %[3]s tcp dport %[4]d %[5]s\n", family, from, to.Addr(), to.Port(),
					map[Policy]string{DenyKAS: "drop", OnlyKAS: "accept"}[p])
			}
			if p == OnlyKAS {
				fmt.Fprintf(&b, "\t\tip saddr %s drop\n\t\tip6 saddr %s drop\n", pod.Addr4, pod.Addr6)
			}
		}
		b.WriteString("\t}\n")
		for _, hook := range []string{"forward", "input"} {
			fmt.Fprintf(&b, "\tchain %[1]s { type filter hook %[1]s priority 0; jump judge; }\n", hook)
		}
		b.WriteString("}\n")
	}
	_, err := h.RunInput(b.String(), "nft", "-f", "-")
	return err
}
