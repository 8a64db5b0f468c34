package agent

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// What a running agent gets from the kernel, or makes for itself, stands for
// itself in a dry run.
const (
	DryRunGeneration = "dryrun"
	// DryRunPort is the first of the ports that listeners seem to have.
	DryRunPort = 40001
)

// dryRunNames is what looking up the targets' names may take: somebody waits
// at a terminal, and what is not known by then is said.
const dryRunNames = 3 * time.Second

var dryRunNode6 = netip.MustParseAddr("fd77::1")

// DryRun is the State that an agent of this configuration would install, less
// the self-test. It changes nothing, and asks nobody but the resolver for the
// targets' host names.
func DryRun(ctx context.Context, c config.Agent, log logrus.FieldLogger) (rules.State, error) {
	if c.Intercept.NodeIPv6 == "" {
		c.Intercept.NodeIPv6 = dryRunNode6.String()
	}
	p, err := place(c.Intercept, nil)
	if err != nil {
		return rules.State{}, err
	}
	r := rules.NewResolver(rules.ResolverConfig{Targets: p.diverted(c.Targets), Log: log})
	names, cancel := context.WithTimeout(ctx, dryRunNames)
	defer cancel()
	r.Resolve(names)
	s := rules.State{
		Generation: DryRunGeneration, Clients: c.Intercept.Clients, WhenDown: c.Intercept.WhenDown,
		Mark: intercept.Mark, MarkMask: intercept.Mark, Node4: p.node4, Node6: p.node6,
	}
	next := uint16(DryRunPort)
	for _, t := range c.Targets {
		ports := intercept.PortsAt(p.listen, func(netip.Addr) uint16 {
			if p.fixed {
				return t.Listen
			}
			next++
			return next - 1
		})
		s.Diverts = append(s.Diverts, rules.Divert{Name: t.Name, Entries: r.Entries(t.Name), Ports: ports})
	}
	return s, nil
}

// NodeAddresses are those that an agent of this configuration would put on lo,
// but for the IPv6 address that it would choose itself.
func NodeAddresses(c config.Intercept) ([]intercept.NodeAddress, error) {
	chosen := c.NodeIPv6 == ""
	if chosen {
		c.NodeIPv6 = dryRunNode6.String()
	}
	p, err := place(c, nil)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(p.addresses, func(a intercept.NodeAddress) bool { return chosen && a.Addr == dryRunNode6 }), nil
}
