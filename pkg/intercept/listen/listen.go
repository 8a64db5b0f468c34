// Package listen is the mode in which nothing is diverted: clients are
// configured to dial a local address, which this node has for them on lo or
// another interface has already.
package listen

import (
	"context"
	"fmt"
	"net/netip"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// Name is the mode's name in configuration, logs and metrics.
const Name = "listen"

// Guard refuses connects to some addresses once it has not heard of us for
// intercept.HeartbeatTimeout: a frozen process's listeners would go on to
// accept into their backlog.
type Guard interface {
	// Arm guards exactly these addresses from now on.
	Arm(ctx context.Context, addrs []netip.AddrPort) error
	// Beat says that this process is alive.
	Beat() error
	// Verify tells what of the guard is not as the last Arm left it.
	Verify(ctx context.Context) ([]intercept.Damage, error)
	// Close stops to keep the guard; it stays in force.
	Close() error
}

// Config is what a Mode needs.
type Config struct {
	// Bind are the addresses that the listeners are on, and Addresses puts
	// those on lo that no interface has.
	Bind      []netip.Addr
	Addresses *intercept.NodeAddresses
	// Listeners are where refused targets are closed.
	Listeners *intercept.Listeners
	// Guard makes the guard, or says why this node can have none; nil: none.
	Guard   func() (Guard, error)
	Log     logrus.FieldLogger
	Metrics *intercept.Metrics
}

// Mode implements intercept.Mode.
type Mode struct {
	cfg   Config
	guard Guard
	err   error  // why there is no guard
	armed bool   // the guard
	stop  func() // of the heartbeat; nil: it does not run
}

var _ intercept.Mode = (*Mode)(nil)

// New makes a Mode. Its listeners must be open before Apply, and so its
// addresses before that: see Wanted.
func New(cfg Config) *Mode {
	m := &Mode{cfg: cfg}
	if cfg.Guard != nil {
		m.guard, m.err = cfg.Guard()
	}
	return m
}

// Wanted are the addresses that must be there before the listeners are opened.
// Nothing but intercept.CleanupAddresses takes them away again: while no agent
// lives, a connect must find the address to be refused at.
func Wanted(bind []netip.Addr) []intercept.NodeAddress {
	var want []intercept.NodeAddress
	for _, a := range bind {
		want = append(want, intercept.NodeAddress{Addr: a, Borrow: true, Setting: "intercept.bindAddress"})
	}
	return want
}

// Preflight implements intercept.Mode.
func (m *Mode) Preflight(context.Context) intercept.Report {
	if len(m.cfg.Bind) == 0 {
		return intercept.NotSupported("set intercept.bindAddress", "mode listen has no address to listen on")
	}
	var r intercept.Report
	switch {
	case m.err != nil:
		r.Notes = append(r.Notes, fmt.Sprintf("while the agent is frozen its clients wait instead of being refused, because there is no guard: %v", m.err))
	case m.guard == nil:
		r.Notes = append(r.Notes, "while the agent is frozen its clients wait instead of being refused, because there is no guard")
	}
	return r
}

// Apply implements intercept.Mode. Once the process is dead the kernel itself
// refuses, as nobody listens any more; the guard is for one that is frozen.
func (m *Mode) Apply(ctx context.Context, s rules.State) error {
	if s.WhenDown == rules.Direct {
		return fmt.Errorf("mode listen with whenDown: direct: %w: its clients dial this node's own address, and nothing else answers there", intercept.ErrNotSupported)
	}
	if err := m.cfg.Addresses.Ensure(Wanted(m.cfg.Bind)...); err != nil {
		return err
	}
	var (
		refused []string
		guarded []netip.AddrPort
	)
	for _, d := range s.Diverts {
		if d.Refused {
			refused = append(refused, d.Name)
		}
		// The self-test's port is any, and another process's tomorrow.
		if d.Name != intercept.SelfTestName {
			guarded = append(guarded, intercept.Placed(m.cfg.Bind, d.Ports)...)
		}
	}
	if err := m.cfg.Listeners.Refuse(ctx, refused); err != nil {
		return fmt.Errorf("opening the listeners again: %w", err)
	}
	if m.guard == nil {
		return nil
	}
	if err := m.guard.Arm(ctx, guarded); err != nil {
		return fmt.Errorf("arming the guard of a frozen agent: %w", err)
	}
	m.armed = true
	if m.stop == nil {
		m.stop = intercept.StartHeartbeat(intercept.HeartbeatInterval, m.guard.Beat, m.cfg.Log, m.cfg.Metrics)
	}
	return nil
}

// Verify implements intercept.Mode.
func (m *Mode) Verify(ctx context.Context) ([]intercept.Damage, error) {
	damage, err := m.cfg.Addresses.Verify(Wanted(m.cfg.Bind)...)
	damage = append(damage, m.cfg.Listeners.Verify()...)
	if err != nil || m.guard == nil {
		return damage, err
	}
	guard, err := m.guard.Verify(ctx)
	return append(damage, guard...), err
}

// Close implements intercept.Mode.
func (m *Mode) Close() error {
	if m.stop != nil {
		m.stop()
		m.stop = nil
	}
	if !m.armed {
		return nil
	}
	m.armed = false
	return m.guard.Close() // Apply, which may follow, arms it again
}
