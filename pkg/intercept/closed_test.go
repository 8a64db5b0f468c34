package intercept

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/kasway/kasway/pkg/rules"
)

// Only what is closed, meant a target, and led to a listener that is no longer
// ours may be forgotten: the others are somebody's, or alive.
func TestForgetClosedMatches(t *testing.T) {
	node4, node6 := netip.MustParseAddr("169.254.77.1"), netip.MustParseAddr("fd77::1")
	c := newClosedFlows(rules.State{Node4: node4, Node6: node6, Diverts: []rules.Divert{{
		Name: "kas", Ports: rules.Ports{Host4: 1001, Host6: 1002, Pod4: 1003, Pod6: 1004},
		Entries: []rules.Entry{{Prefix: netip.MustParsePrefix("172.30.0.0/24"), Port: 6443}, {Prefix: netip.MustParsePrefix("fd00:30::10/128"), Port: 6443}},
	}}})
	flow := func(meant string, port uint16, got string, from uint16, state uint8) *netlink.ConntrackFlow {
		return &netlink.ConntrackFlow{
			Forward:   netlink.IPTuple{DstIP: net.ParseIP(meant), DstPort: port},
			Reverse:   netlink.IPTuple{SrcIP: net.ParseIP(got), SrcPort: from},
			ProtoInfo: &netlink.ProtoInfoTCP{State: state},
		}
	}
	const closed, established = nl.TCP_CONNTRACK_CLOSE, nl.TCP_CONNTRACK_ESTABLISHED
	for name, x := range map[string]struct {
		flow *netlink.ConntrackFlow
		want bool
	}{
		"a dead agent's, of the host":   {flow("172.30.0.10", 6443, "127.0.0.1", 999, closed), true},
		"a dead agent's, of the host 6": {flow("fd00:30::10", 6443, "::1", 999, closed), true},
		"a dead agent's, of a pod":      {flow("172.30.0.11", 6443, "169.254.77.1", 999, closed), true},
		"a dead agent's, of a pod 6":    {flow("fd00:30::10", 6443, "fd77::1", 999, closed), true},
		"it lives":                      {flow("172.30.0.10", 6443, "127.0.0.1", 999, established), false},
		"ours":                          {flow("172.30.0.10", 6443, "127.0.0.1", 1001, closed), false},
		"ours, of a pod":                {flow("172.30.0.10", 6443, "169.254.77.1", 1003, closed), false},
		"passed without an agent":       {flow("172.30.0.10", 6443, "172.30.0.10", 6443, closed), true},
		"somebody else's translation":   {flow("10.0.0.1", 80, "127.0.0.1", 8080, closed), false},
		"another port":                  {flow("172.30.0.10", 443, "127.0.0.1", 999, closed), false},
		"no TCP":                        {&netlink.ConntrackFlow{}, false},
	} {
		if got := c.MatchConntrackFlow(x.flow); got != x.want {
			t.Errorf("%s: forgotten: %v, want %v", name, got, x.want)
		}
	}
}
