package iptables

import (
	"fmt"
	"strings"

	"github.com/google/nftables"
)

// rivals names the nat chains of nftables tables that may translate connections
// before us. At the priority of iptables the kernel asks first whoever came
// last, and nobody is asked after the first who translates.
func rivals() (notes []string) {
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
		switch *c.Hooknum {
		case *nftables.ChainHookPrerouting, *nftables.ChainHookOutput:
			notes = append(notes, fmt.Sprintf("chain %s of nftables table %s may translate connections before iptables can: use mode nft, which comes before both", c.Name, c.Table.Name))
		}
	}
	return notes
}
