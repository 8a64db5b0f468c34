package tproxy

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// node is where the kernel tells of this node; tests put their own in place.
type node struct {
	proc, sys, tun string
	links          func() ([]netlink.Link, error)
}

var thisNode = node{proc: "/proc", sys: "/sys", tun: tunDevice, links: netlink.LinkList}

// obstacle is what keeps this mode from working here.
type obstacle struct{ what, remedy, suspects string }

// Hindered says whether something keeps this mode from working here for these
// clients whatever installs its rules, so that one answer is enough.
func Hindered(c rules.Clients) bool {
	found, err := thisNode.obstacles(c)
	return err == nil && (len(found) > 0 || thisNode.canRoute().Err != nil)
}

// Preflight implements intercept.Mode.
func (m *Mode) Preflight(ctx context.Context) intercept.Report {
	inner := m.rules.Preflight(ctx)
	if ctx.Err() != nil || errors.Is(inner.Err, intercept.ErrPrivilege) {
		return inner
	}
	found, err := m.node.obstacles(m.cfg.Clients)
	if err != nil {
		return intercept.Report{Err: err}
	}
	if len(found) > 0 {
		var what, remedies []string
		for _, o := range found {
			what, remedies = append(what, o.what), append(remedies, o.remedy)
		}
		return intercept.NotSupported(strings.Join(remedies, "; "), "%s", strings.Join(what, "; "))
	}
	if r := m.node.canRoute(); r.Err != nil {
		return r
	}
	if errors.Is(inner.Err, intercept.ErrNotSupported) {
		inner.Remedy += "; for tproxy also nft_tproxy and nft_chain_route, or for iptables xt_TPROXY, xt_connmark, xt_mark and xt_conntrack"
	}
	if inner.Err == nil {
		inner.Notes = append(inner.Notes, m.node.notes(m.cfg.Clients)...)
	}
	return inner
}

// canRoute looks at what the policy route needs.
func (n node) canRoute() intercept.Report {
	fd, err := unix.Open(n.tun, unix.O_RDWR|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return intercept.NotSupported("load the kernel's module tun, or mount the host's "+tunDevice+" into the container (hostPath, type CharDevice)",
			"there is no %s, on which the policy route hangs: %v", n.tun, err)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return intercept.Report{Err: fmt.Errorf("%w: opening %s, on which the policy route hangs: %w", intercept.ErrPrivilege, n.tun, err),
			Remedy: "allow the agent's container the device c 10:200, or run it privileged"}
	case err != nil:
		return intercept.Report{Err: fmt.Errorf("opening %s: %w", n.tun, err)}
	}
	_ = unix.Close(fd) // nothing was made with it
	if _, err := netlink.RuleList(netlink.FAMILY_V4); err != nil {
		return intercept.NotSupported("use a kernel with CONFIG_IP_MULTIPLE_TABLES", "listing policy rules: %v", err)
	}
	return intercept.Report{}
}

// obstacles are those that concern these clients.
func (n node) obstacles(c rules.Clients) (found []obstacle, err error) {
	if c.Pods {
		bridges, err := n.filteredBridges()
		if err != nil {
			return nil, err
		}
		if len(bridges) > 0 {
			found = append(found, obstacle{
				what: fmt.Sprintf("bridge %s has ports and bridge-nf-call-iptables or bridge-nf-call-ip6tables is 1: "+
					"packets of pods on a bridge lose the socket that tproxy gives them", strings.Join(bridges, ", ")),
				remedy: "set the sysctls net.bridge.bridge-nf-call-iptables and net.bridge.bridge-nf-call-ip6tables to 0 if kube-proxy and the network plugin can do without, " +
					"or use mode ebpf, nft or iptables, or only host in intercept.clients",
				suspects: "the module br_netfilter, loaded since; a network plugin or container runtime that sets the sysctl or makes a bridge",
			})
		}
	}
	services, err := n.ipvsServices()
	if err != nil {
		return nil, err
	}
	if services > 0 && (c.Pods || c.Host) {
		found = append(found, obstacle{
			what:     fmt.Sprintf("IPVS has virtual services (%d, by /proc/net/ip_vs): it takes what is addressed to a service before a listener gets it", services),
			remedy:   "let kube-proxy run with --proxy-mode nftables or iptables, or use mode ebpf or nft, which come before IPVS",
			suspects: "kube-proxy, started since with --proxy-mode ipvs; keepalived",
		})
	}
	return found, nil
}

// filteredBridges are the bridges with ports whose packets pass the host's
// filters.
func (n node) filteredBridges() (names []string, err error) {
	links, err := n.links()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	ports := map[int]int{}
	for _, l := range links {
		ports[l.Attrs().MasterIndex]++
	}
	all := n.isOne(n.proc, "sys/net/bridge/bridge-nf-call-iptables") || n.isOne(n.proc, "sys/net/bridge/bridge-nf-call-ip6tables")
	for _, l := range links {
		a := l.Attrs()
		own := filepath.Join("class/net", a.Name, "bridge/nf_call_")
		if l.Type() == "bridge" && ports[a.Index] > 0 && (all || n.isOne(n.sys, own+"iptables") || n.isOne(n.sys, own+"ip6tables")) {
			names = append(names, a.Name)
		}
	}
	return names, nil
}

// isOne says whether a file of the kernel's says 1. Without the file, which is
// there only with its module, it is not so.
func (n node) isOne(root, file string) bool {
	text, err := os.ReadFile(filepath.Join(root, file))
	return err == nil && strings.TrimSpace(string(text)) == "1"
}

// ipvsServices counts the services that IPVS has in this network namespace.
func (n node) ipvsServices() (count int, err error) {
	text, err := os.ReadFile(filepath.Join(n.proc, "thread-self/net/ip_vs"))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("asking for IPVS: %w", err)
	}
	for line := range strings.Lines(string(text)) {
		// TCP, UDP or SCTP, an address and a port, both in hexadecimal; FWM a mark.
		f := strings.Fields(line)
		if len(f) > 1 && (f[0] == "TCP" || f[0] == "UDP" || f[0] == "SCTP" || f[0] == "FWM") {
			count++
		}
	}
	return count, nil
}

// notes are what is worth knowing though it works.
func (n node) notes(c rules.Clients) (notes []string) {
	set, err := filepath.Glob(filepath.Join(n.proc, "sys/net/ipv4/conf/*/src_valid_mark"))
	if err != nil || !c.Pods {
		return nil
	}
	for _, file := range set {
		rel, err := filepath.Rel(n.proc, file)
		if err == nil && n.isOne(n.proc, rel) {
			return []string{"net.ipv4.conf." + filepath.Base(filepath.Dir(file)) + ".src_valid_mark is 1: " +
				"pods whose own address lies in a target's prefix cannot connect to it (single addresses of targets are no matter)"}
		}
	}
	return nil
}
