package agent

import (
	"fmt"
	"net"
	"net/netip"
	"reflect"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// placement is where listeners are and which addresses that takes.
type placement struct {
	listen       []netip.Addr
	fixed        bool // mode listen
	node4, node6 netip.Addr
	addresses    []intercept.NodeAddress
}

// diverted are the targets whose addresses matter on this node: in mode listen
// clients dial ours, and what a target's name means is the server's business.
func (p placement) diverted(targets []rules.Target) []rules.Target {
	if p.fixed {
		return nil
	}
	return targets
}

// place decides on the placement; addresses makes the node's own IPv6 address
// where it is to be chosen.
func place(c config.Intercept, addresses *intercept.NodeAddresses) (placement, error) {
	if c.Mode == config.ModeListen {
		bind, err := netip.ParseAddr(c.BindAddress)
		if err != nil {
			return placement{}, fmt.Errorf("intercept.bindAddress: %w", err)
		}
		return placement{
			listen: []netip.Addr{bind}, fixed: true,
			addresses: []intercept.NodeAddress{{Addr: bind, Borrow: true, Setting: "intercept.bindAddress"}},
		}, nil
	}
	p := placement{node4: intercept.DefaultNode4}
	var err error
	if c.NodeIPv4 != "" {
		if p.node4, err = netip.ParseAddr(c.NodeIPv4); err != nil {
			return p, fmt.Errorf("intercept.nodeAddresses.ipv4: %w", err)
		}
	}
	p.addresses = append(p.addresses, intercept.NodeAddress{Addr: p.node4, Setting: "intercept.nodeAddresses.ipv4"})
	if intercept.HasIPv6() {
		if p.node6, err = node6(c, addresses); err != nil {
			return p, err
		}
		p.addresses = append(p.addresses, intercept.NodeAddress{Addr: p.node6, Setting: "intercept.nodeAddresses.ipv6"})
	}
	p.listen = intercept.Placement(c.Clients, p.node4, p.node6)
	return p, nil
}

func node6(c config.Intercept, addresses *intercept.NodeAddresses) (netip.Addr, error) {
	if c.NodeIPv6 == "" {
		return addresses.Node6()
	}
	a, err := netip.ParseAddr(c.NodeIPv6)
	if err != nil {
		return a, fmt.Errorf("intercept.nodeAddresses.ipv6: %w", err)
	}
	return a, nil
}

// state is what is to be installed at this moment.
func (a *Agent) state() rules.State {
	c := a.cfg.Agent.Intercept
	s := rules.State{
		Generation: a.cfg.Generation, Clients: c.Clients, WhenDown: c.WhenDown,
		Mark: intercept.Mark, MarkMask: intercept.Mark, Node4: a.placed.node4, Node6: a.placed.node6,
	}
	for _, t := range a.targets {
		d := rules.Divert{Name: t.Name, Ports: a.ports[t.Name]}
		if t.Name == intercept.SelfTestName {
			d.Entries = a.selfTestEntries()
		} else {
			d.Entries = a.resolver.Entries(t.Name)
			d.Refused = c.WhenUnreachable == config.WhenUnreachableRefuse && !a.cfg.Links.Carries(t.Name)
		}
		s.Diverts = append(s.Diverts, d)
	}
	return s
}

func (a *Agent) selfTestEntries() []rules.Entry {
	if !a.placed.fixed {
		return intercept.SelfTestEntries(a.placed.node4, a.placed.node6)
	}
	var out []rules.Entry
	for _, at := range intercept.Placed(a.placed.listen, a.ports[intercept.SelfTestName]) {
		out = append(out, rules.Entry{Prefix: netip.PrefixFrom(at.Addr(), at.Addr().BitLen()), Port: at.Port()})
	}
	return out
}

// open tells the gates what s says, and what the links carry.
func (a *Agent) open(s rules.State) {
	for _, d := range s.Diverts {
		switch {
		case d.Name == intercept.SelfTestName:
		case d.Refused:
			a.gates.Set(d.Name, intercept.Refused)
		case a.cfg.Links.Carries(d.Name):
			a.gates.Set(d.Name, intercept.Open)
		default:
			a.gates.Set(d.Name, intercept.Held)
		}
	}
}

func sameState(a, b rules.State) bool { return reflect.DeepEqual(a, b) }

// entries counts what is diverted, without the self-test.
func entries(s rules.State) (n int) {
	for _, d := range s.Diverts {
		if d.Name != intercept.SelfTestName {
			n += len(d.Entries)
		}
	}
	return n
}

// serverAddresses are the literal addresses among the servers', and those that
// names have led the links to.
func (a *Agent) serverAddresses() []netip.Addr {
	out := a.cfg.Own.Remotes()
	for _, s := range a.cfg.Agent.Links.Servers {
		host, _, err := net.SplitHostPort(s)
		if err != nil {
			continue
		}
		if addr, err := netip.ParseAddr(host); err == nil {
			out = append(out, addr)
		}
	}
	return out
}
