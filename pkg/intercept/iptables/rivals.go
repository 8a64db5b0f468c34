package iptables

import (
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
)

// rival is a nat chain of an nftables table that may translate connections
// before us. At the priority of iptables the kernel asks first whoever came
// last, and nobody is asked after the first who translates.
type rival struct{ table, chain string }

// String says what it may do, and what helps.
func (r rival) String() string {
	return fmt.Sprintf("chain %s of nftables table %s may translate connections before iptables can: use mode nft, which comes before both", r.chain, r.table)
}

// kubeProxy says whether it certainly does, with service addresses.
func (r rival) kubeProxy() bool { return r.table == "kube-proxy" }

// rivals are those that there are.
func rivals() (all []rival) {
	conn, err := nftables.New()
	if err != nil {
		return nil
	}
	chains, err := conn.ListChains()
	if err != nil {
		return nil // no nftables, no rivals
	}
	for _, c := range chains {
		// Table nat of ip and ip6 is that of iptables; Kasway's own are an
		// agent's that is on its way out.
		if c.Type != nftables.ChainTypeNAT || c.Hooknum == nil || c.Priority == nil || *c.Priority > *nftables.ChainPriorityNATDest ||
			c.Table.Name == "nat" || strings.HasPrefix(c.Table.Name, "kasway_") {
			continue
		}
		r := rival{c.Table.Name, c.Name}
		if hook := *c.Hooknum; (hook == *nftables.ChainHookPrerouting || hook == *nftables.ChainHookOutput) && !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	return all
}
