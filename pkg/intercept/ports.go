package intercept

import (
	"net/netip"

	"github.com/kasway/kasway/pkg/rules"
)

// PortsAt are the Ports of one target whose listeners at the given addresses
// have the ports that port tells.
func PortsAt(at []netip.Addr, port func(netip.Addr) uint16) rules.Ports {
	var p rules.Ports
	for _, a := range at {
		*portOf(&p, a) = port(a)
	}
	return p
}
