package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/kasway/kasway/pkg/intercept"
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
	left footprint // what the last Arm has left in the kernel

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

func (g *ListenGuard) rebuild(plan rules.NFTTable) (err error) {
	var b batch
	b.rebuild(plan)
	if err := g.sock.commit(&b); err != nil {
		return err
	}
	g.left, err = g.sock.leave([]rules.NFTTable{plan})
	return err
}

// Beat says that the agent lives. Before Arm it does nothing. That nobody took
// the heartbeat is no error: while the guard is missing it refuses nothing, and
// Verify tells of it.
func (g *ListenGuard) Beat() error {
	g.beating.Lock()
	defer g.beating.Unlock()
	if g.pulse == nil {
		return nil
	}
	if err := g.pulse.send(); !errors.Is(err, errPulse) {
		return err
	}
	return nil
}

// Verify tells what of the guard is not as Arm left it, and changes nothing.
func (g *ListenGuard) Verify(ctx context.Context) ([]intercept.Damage, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("nft: verifying the guard: %w", err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.plan.Name == "" {
		return nil, nil
	}
	now, err := g.sock.look([]rules.NFTTable{g.plan})
	if err != nil {
		return nil, fmt.Errorf("nft: verifying the guard: %w", err)
	}
	return flushed(g.left.tables[0].differences(g.plan.Name, now.tables[0])), nil
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
