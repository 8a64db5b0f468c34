package bed

import "net"

// The namespaces: the control plane, the switch between it and the nodes; each
// node's is named by netns.
const (
	prefix = "kasway-kube"
	nsCP   = prefix + "-cp"
	nsWire = prefix + "-wire"
)

// MaxNodes is how many nodes a bed can have.
const MaxNodes = 2

// address is what nodes have one of each, in both families: the node's own
// address, and its pods' range.
type address struct{ v4, v6, pods4, pods6 string }

var nodeAddresses = [MaxNodes]address{
	{"10.200.0.2", "fd00:200::2", "10.244.1.0/24", "fd00:244:1::/64"},
	{"10.200.0.3", "fd00:200::3", "10.244.2.0/24", "fd00:244:2::/64"},
}

// The addresses of a bed; those of IPv6 exist in a dual-stack bed only.
const (
	cp4, cp6           = "10.200.0.1", "fd00:200::1"
	services4          = "10.96.0.0/16"
	services6          = "fd00:96::/112"
	cluster4, cluster6 = "10.96.0.1", "fd00:96::1" // the KAS's ClusterIPs; Kubernetes itself makes only the first
	kasPort            = "6443"
	kaswayPort         = "8091" // the only port of the control plane that the node can reach
	kubeletPort        = "10250"
	agentOperator      = "127.0.0.1:8094"
	serverOperator     = "127.0.0.1:8095"
)

// WebURL is the Service of the workload.
const WebURL = "http://10.96.0.80/"

// Address of the KAS as clients know it, host:port.
func kasURL(host, port string) string { return "https://" + net.JoinHostPort(host, port) }

// ClusterURLs are the ClusterIPs under which clients of the node find the KAS.
func (b *Bed) ClusterURLs() []string {
	return b.families(kasURL(cluster4, "443"), kasURL(cluster6, "443"))
}

// KASURLs are the KAS's own addresses, which it advertises.
func (b *Bed) KASURLs() []string {
	return b.families(kasURL(cp4, kasPort), kasURL(cp6, kasPort))
}

// families is v4, and v6 as well where the bed has it.
func (b *Bed) families(v4, v6 string) []string {
	if b.DualStack {
		return []string{v4, v6}
	}
	return []string{v4}
}
