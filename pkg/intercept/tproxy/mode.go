package tproxy

import (
	"context"
	"fmt"
	"io"
	"net/netip"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/iptables"
	"github.com/kasway/kasway/pkg/intercept/nft"
	"github.com/kasway/kasway/pkg/rules"
)

// Config is what a Mode needs of its surroundings; the zero value takes nobody's
// connections.
type Config struct {
	// Clients are those that will be taken, which decides what Preflight asks.
	Clients rules.Clients
	// IPTables installs the rules with iptables, and not with nftables.
	IPTables bool
	// Log may be nil.
	Log logrus.FieldLogger
	// Heartbeat may be nil.
	Heartbeat *intercept.Metrics
}

// Mode implements intercept.Mode with transparent listeners (see
// intercept.ListenersConfig.Transparent), in the network namespace of the thread
// that calls its first Apply.
type Mode struct {
	cfg    Config
	rules  intercept.Mode // what marks
	node   node
	anchor *anchor // where the mark leads; nil: not applied
	closed bool
}

var _ intercept.Mode = (*Mode)(nil)

// New makes a Mode that has installed nothing yet.
func New(cfg Config) *Mode {
	if cfg.Log == nil {
		l := logrus.New()
		l.SetOutput(io.Discard)
		cfg.Log = l
	}
	m := &Mode{cfg: cfg, node: thisNode}
	if cfg.IPTables {
		m.rules = iptables.New(iptables.Config{Log: cfg.Log, Heartbeat: cfg.Heartbeat, Plan: rules.PlanTProxyIPTables, Lingers: rules.TProxyKeeps})
	} else {
		m.rules = nft.New(nft.Config{Log: cfg.Log, Heartbeat: cfg.Heartbeat, Plan: rules.PlanTProxyNFT, Linger: rules.PlanTProxyNFTLinger})
	}
	return m
}

// Apply implements intercept.Mode. A failed Apply leaves what was in force. The
// route comes first: what is marked without one is lost.
func (m *Mode) Apply(ctx context.Context, s rules.State) error {
	if rules.TProxyMark&s.MarkMask == s.Mark&s.MarkMask {
		return fmt.Errorf("tproxy: applying: mark %#x/%#x of our own sockets is also that of what is taken (%#x): choose another", s.Mark, s.MarkMask, rules.TProxyMark)
	}
	if err := m.lead(rules.TProxyRoutes(s)); err != nil {
		return fmt.Errorf("tproxy: applying: %w", err)
	}
	if err := m.rules.Apply(ctx, s); err != nil {
		return fmt.Errorf("tproxy: applying: %w", err)
	}
	m.closed = false
	return nil
}

// lead has routes for what is marked, on the device that there is, or a new one.
func (m *Mode) lead(routes []netip.Prefix) error {
	if m.anchor != nil {
		there, err := m.anchor.stands()
		if err != nil {
			return err
		}
		if there {
			m.anchor.linger(false)
			return m.anchor.ensure(routes)
		}
	}
	fresh, err := openAnchor()
	if err != nil {
		return err
	}
	if err := fresh.ensure(routes); err != nil {
		fresh.close()
		return err
	}
	if m.anchor != nil {
		m.anchor.linger(false)
		m.anchor.close()
	}
	m.anchor = fresh
	return nil
}

// Verify implements intercept.Mode. What Preflight would refuse is told of too:
// it may have come since.
func (m *Mode) Verify(ctx context.Context) ([]intercept.Damage, error) {
	if m.anchor == nil || m.closed {
		return nil, nil
	}
	damage, err := m.rules.Verify(ctx)
	if err != nil {
		return nil, fmt.Errorf("tproxy: %w", err)
	}
	led, err := m.anchor.verify()
	if err != nil {
		return nil, fmt.Errorf("tproxy: verifying: %w", err)
	}
	damage = append(damage, led...)
	found, err := m.node.obstacles(m.cfg.Clients)
	if err != nil {
		return nil, fmt.Errorf("tproxy: verifying: %w", err)
	}
	for _, o := range found {
		damage = append(damage, intercept.Damage{What: o.what, Suspects: o.suspects})
	}
	return damage, nil
}

// Close implements intercept.Mode. A second Close does nothing; Apply may
// follow. The route stays, for the connections taken, until the process ends.
func (m *Mode) Close() error {
	if m.anchor == nil || m.closed {
		return m.rules.Close()
	}
	m.closed = true
	m.anchor.linger(true)
	return m.rules.Close()
}
