package netns

import (
	"fmt"
	"net/netip"
	"strings"
)

// KubeProxy is a kind of rules by which a node translates service addresses.
type KubeProxy string

// The stand-ins. Their rules have the shape of what kube-proxy installs for
// the service default/kubernetes.
const (
	NoKubeProxy    KubeProxy = "none"
	IptablesNFT    KubeProxy = "iptables-nft"
	IptablesLegacy KubeProxy = "iptables-legacy"
	NFTables       KubeProxy = "nftables"
)

// KubeProxies are all of them, in the order of the tables that tests print.
var KubeProxies = []KubeProxy{NoKubeProxy, IptablesNFT, IptablesLegacy, NFTables}

// Service is one service address and the endpoint that it stands for, both of
// the same family.
type Service struct {
	ClusterIP, Endpoint netip.AddrPort
	// Pods is the network whose traffic is not masqueraded.
	Pods netip.Prefix
}

// InstallKubeProxy installs the rules of one kube-proxy for services of both
// families on h, once per host.
func (h *Host) InstallKubeProxy(kind KubeProxy, services ...Service) error {
	switch kind {
	case NoKubeProxy:
		return nil
	case IptablesNFT, IptablesLegacy:
		for _, v6 := range []bool{false, true} {
			tool := strings.Replace(string(kind), "iptables", map[bool]string{false: "iptables", true: "ip6tables"}[v6], 1) + "-restore"
			if _, err := h.RunInput(iptablesServices(ofFamily(services, v6)), tool); err != nil {
				return err
			}
		}
		return nil
	case NFTables:
		_, err := h.RunInput(nftServices("ip", ofFamily(services, false))+nftServices("ip6", ofFamily(services, true)), "nft", "-f", "-")
		return err
	}
	return fmt.Errorf("netns: no kube-proxy is called %q", kind)
}

func ofFamily(all []Service, v6 bool) (some []Service) {
	for _, s := range all {
		if s.ClusterIP.Addr().Is6() == v6 {
			some = append(some, s)
		}
	}
	return some
}

// iptablesServices is the input of iptables-restore.
func iptablesServices(services []Service) string {
	var chains, portals, rest strings.Builder
	for i, s := range services {
		svc, sep := fmt.Sprintf("KUBE-SVC-NPX46M4PTMTKRN%d", i), fmt.Sprintf("KUBE-SEP-IT2ZTR26TO4XFPT%d", i)
		to := single(s.ClusterIP.Addr())
		fmt.Fprintf(&chains, ":%s - [0:0]\n:%s - [0:0]\n", svc, sep)
		fmt.Fprintf(&portals, "-A KUBE-SERVICES -d %s -p tcp -m comment --comment \"default/kubernetes:https cluster IP\" -m tcp --dport %d -j %s\n", to, s.ClusterIP.Port(), svc)
		if s.Pods.IsValid() {
			fmt.Fprintf(&rest, "-A %s ! -s %s -d %s -p tcp -m tcp --dport %d -j KUBE-MARK-MASQ\n", svc, s.Pods, to, s.ClusterIP.Port())
		}
		fmt.Fprintf(&rest, "-A %s -m comment --comment \"default/kubernetes:https -> %s\" -j %s\n", svc, s.Endpoint, sep)
		fmt.Fprintf(&rest, "-A %s -s %s -j KUBE-MARK-MASQ\n", sep, single(s.Endpoint.Addr()))
		fmt.Fprintf(&rest, "-A %s -p tcp -m comment --comment \"default/kubernetes:https\" -m tcp -j DNAT --to-destination %s\n", sep, s.Endpoint)
	}
	return `*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:KUBE-FIREWALL - [0:0]
:KUBE-FORWARD - [0:0]
-A INPUT -j KUBE-FIREWALL
-A OUTPUT -j KUBE-FIREWALL
-A FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-NODEPORTS - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-MARK-MASQ - [0:0]
` + chains.String() + `-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE
` + portals.String() + `-A KUBE-SERVICES -m comment --comment "kubernetes service nodeports; NOTE: this must be the last rule in this chain" -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
` + rest.String() + "COMMIT\n"
}

// nftServices is a table as kube-proxy's nftables mode makes it, in family ip
// or ip6.
func nftServices(family string, services []Service) string {
	addrType := map[string]string{"ip": "ipv4_addr", "ip6": "ipv6_addr"}[family]
	var chains, elements strings.Builder
	for i, s := range services {
		svc, ep := fmt.Sprintf("service-%d-ULMVA6XW-default/kubernetes/tcp/https", i), fmt.Sprintf("endpoint-%d-5OJB2KTY-default/kubernetes/tcp/https__%d", i, s.Endpoint.Port())
		if i > 0 {
			elements.WriteString(", ")
		}
		fmt.Fprintf(&elements, "%s . tcp . %d : goto %s", s.ClusterIP.Addr(), s.ClusterIP.Port(), svc)
		fmt.Fprintf(&chains, "\tchain %s {\n\t\tmeta l4proto tcp dnat to %s\n\t}\n", ep, s.Endpoint)
		fmt.Fprintf(&chains, "\tchain %s {\n", svc)
		if s.Pods.IsValid() {
			fmt.Fprintf(&chains, "\t\t%s daddr %s tcp dport %d %s saddr != %s jump mark-for-masquerade\n", family, s.ClusterIP.Addr(), s.ClusterIP.Port(), family, s.Pods)
		}
		fmt.Fprintf(&chains, "\t\tnumgen random mod 1 vmap { 0 : goto %s }\n\t}\n", ep)
	}
	ips := "\tmap service-ips { type " + addrType + " . inet_proto . inet_service : verdict; comment \"ClusterIP, ExternalIP and LoadBalancer IP traffic\";"
	if len(services) > 0 {
		ips += " elements = { " + elements.String() + " };"
	}
	return "table " + family + ` kube-proxy {
	comment "rules for kube-proxy";
	chain mark-for-masquerade { meta mark set meta mark or 0x4000; }
	chain masquerading { meta mark & 0x4000 == 0 return; meta mark set meta mark xor 0x4000; masquerade; }
` + chains.String() + ips + ` }
	chain services { ` + family + ` daddr . meta l4proto . th dport vmap @service-ips; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; policy accept; jump services; }
	chain nat-output { type nat hook output priority -100; policy accept; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; policy accept; jump masquerading; }
}
`
}
