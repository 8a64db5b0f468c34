package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/kasway/kasway/pkg/rules"
)

// ListenGuard is the dead-agent guard of mode listen, which owns its addresses
// and diverts nothing: connects to them are answered ECONNREFUSED while the
// agent is silent. It outlives the process. Its methods may be called
// concurrently; the caller calls Beat every intercept.HeartbeatInterval.
type ListenGuard struct {
	cfg Config

	mu   sync.Mutex
	sock *socket // nil: not armed
	plan rules.NFTTable

	// beating is as in Mode; who changes the pulse holds mu as well.
	beating sync.Mutex
	pulse   *pulse // nil: not armed
}

// The mark of heartbeats. Whatever mark our other sockets have, a guard of an
// older agent must know the heartbeat of a newer one.
const guardMark = 0x40

// NewListenGuard makes a guard that is not armed yet.
func NewListenGuard(cfg Config) *ListenGuard { return &ListenGuard{cfg: cfg.withDefaults()} }

// Arm guards addrs, and only them, in the network namespace of the thread that
// calls it first. It counts as a Beat.
func (g *ListenGuard) Arm(ctx context.Context, addrs []netip.AddrPort) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("nft: arming the guard: %w", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.arm(rules.PlanNFTListen(addrs, guardMark, guardMark)); err != nil {
		return fmt.Errorf("nft: arming the guard: %w", err)
	}
	return nil
}

func (g *ListenGuard) arm(plan rules.NFTTable) (err error) {
	if g.sock == nil {
		if g.sock, err = openSocket(); err != nil {
			return err
		}
	}
	p := g.pulse
	if p == nil {
		if p, err = openPulse(rules.NFTBeat(rules.NFTGuard), guardMark); err != nil {
			return err
		}
	}
	if err := g.rebuild(plan); err != nil {
		if g.pulse == nil {
			_ = p.close() // nothing was sent
		}
		return err
	}
	g.beating.Lock()
	defer g.beating.Unlock()
	g.plan, g.pulse = plan, p
	return nil
}

func (g *ListenGuard) rebuild(plan rules.NFTTable) error {
	var b batch
	b.rebuild(plan)
	return g.sock.commit(&b)
}

// Beat says that the agent lives. Before Arm it does nothing.
func (g *ListenGuard) Beat() error {
	if err := g.send(); !errors.Is(err, errPulse) {
		return err
	}
	if !g.mu.TryLock() {
		return nil // it is being armed anew, or closed
	}
	defer g.mu.Unlock()
	if g.plan.Name == "" {
		return nil // closed meanwhile
	}
	g.cfg.Log.Warn("nft: the table of the dead-agent guard was removed by somebody, putting it back")
	g.cfg.Metrics.repairs.Inc()
	return g.rebuild(g.plan)
}

// send sends a heartbeat, once armed.
func (g *ListenGuard) send() error {
	g.beating.Lock()
	defer g.beating.Unlock()
	if g.pulse == nil {
		return nil
	}
	return g.pulse.send()
}

// Close leaves the guard in force; rules.AliveTimeout after the last Beat it
// refuses. A second Close does nothing; Arm may follow.
func (g *ListenGuard) Close() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	var err error
	if g.sock != nil {
		err = g.sock.close()
	}
	g.beating.Lock()
	defer g.beating.Unlock()
	if g.pulse != nil {
		err = errors.Join(err, g.pulse.close())
	}
	g.sock, g.pulse, g.plan = nil, nil, rules.NFTTable{}
	if err != nil {
		return fmt.Errorf("nft: closing the guard: %w", err)
	}
	return nil
}
