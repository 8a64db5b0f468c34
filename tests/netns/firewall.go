package netns

import (
	"encoding/json"
	"fmt"
)

// Firewall stands on one host's uplink and lets nothing pass but one TCP port
// of the control plane, in both directions. Every packet it drops is counted.
type Firewall struct {
	host *Host
	// toward is true if the control plane is across the uplink (we stand on
	// the node), false if it is this host.
	toward bool
	// Port is the open one.
	Port uint16
}

const firewallTable = "lab_firewall"

// FirewallHere puts the firewall on the host that has the open port.
func (h *Host) FirewallHere(port uint16) (*Firewall, error) { return h.firewall(port, false) }

// FirewallToward puts the firewall on a host that may reach only that port of
// whatever is across its uplink.
func (h *Host) FirewallToward(port uint16) (*Firewall, error) { return h.firewall(port, true) }

func (h *Host) firewall(port uint16, toward bool) (*Firewall, error) {
	in, out := "dport", "sport"
	if toward {
		in, out = out, in
	}
	// Neighbour discovery and multicast reports are the wire's own business;
	// ARP never comes here.
	const wire = `icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit, nd-router-advert, mld-listener-query, mld-listener-report, mld-listener-done, mld2-listener-report } accept`
	_, err := h.RunInput(fmt.Sprintf(`table inet %[1]s {
	counter dropped_in {}
	counter dropped_out {}
	chain arriving { %[2]s
		tcp %[4]s %[3]d accept
		counter name dropped_in drop
	}
	chain leaving { %[2]s
		tcp %[5]s %[3]d accept
		counter name dropped_out drop
	}
	chain input { type filter hook input priority -10; iifname %[6]q jump arriving; }
	chain output { type filter hook output priority -10; oifname %[6]q jump leaving; }
	chain forward { type filter hook forward priority -10;
		iifname %[6]q jump arriving
		oifname %[6]q jump leaving
	}
}`, firewallTable, wire, port, in, out, Uplink), "nft", "-f", "-")
	if err != nil {
		return nil, err
	}
	return &Firewall{host: h, toward: toward, Port: port}, nil
}

// Remove opens everything again.
func (f *Firewall) Remove() error {
	_, err := f.host.Run("nft", "delete", "table", "inet", firewallTable)
	return err
}

// Drops counts the packets dropped so far, arriving at the host by its uplink
// and leaving it.
func (f *Firewall) Drops() (in, out uint64, err error) {
	text, err := f.host.Run("nft", "-j", "list", "counters", "table", "inet", firewallTable)
	if err != nil {
		return 0, 0, err
	}
	var list struct {
		Nftables []struct {
			Counter struct {
				Name    string
				Packets uint64
			}
		}
	}
	if err := json.Unmarshal([]byte(text), &list); err != nil {
		return 0, 0, fmt.Errorf("netns: counters of %s: %w", f.host.Label, err)
	}
	for _, n := range list.Nftables {
		switch n.Counter.Name {
		case "dropped_in":
			in = n.Counter.Packets
		case "dropped_out":
			out = n.Counter.Packets
		}
	}
	return in, out, nil
}
