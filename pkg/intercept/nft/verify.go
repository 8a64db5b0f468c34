package nft

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// Who is known to touch tables of others, and to come before them.
const (
	suspectFlush = "`nft flush ruleset` and what calls it, such as a restart of nftables.service; firewalld; a script that restores a saved ruleset"
	suspectRival = "Tailscale, Docker, or a firewall's own destination nat"
)

// footprint is what a plan's installation has left in the kernel, and what of
// others stood in its way then.
type footprint struct {
	tables []fingerprint
	rivals []string
}

// errMeddled is met if somebody changes our tables while they are made.
var errMeddled = errors.New("nftables: somebody has changed tables of ours while they were made")

// look is the present footprint of a plan.
func (s *socket) look(plan []rules.NFTTable) (f footprint, err error) {
	chains, err := s.chains()
	if err != nil {
		return f, err
	}
	for _, c := range chains {
		if c.rival() {
			f.rivals = append(f.rivals, fmt.Sprintf("nat chain %s of nftables table %s stands before ours, at priority %d", c.name, c.table, c.priority))
		}
	}
	for _, t := range plan {
		print, err := s.fingerprint(t.Name, chains)
		if err != nil {
			return f, err
		}
		f.tables = append(f.tables, print)
	}
	return f, nil
}

// leave looks at what was just installed: all of it, or somebody was quicker.
func (s *socket) leave(plan []rules.NFTTable) (footprint, error) {
	f, err := s.look(plan)
	if err != nil {
		return f, err
	}
	for i, t := range plan {
		if !f.tables[i].matches(t) {
			return footprint{}, errMeddled
		}
	}
	return f, nil
}

// rival says whether the chain translates connections before ours do; of two at
// one priority the kernel asks the newer one first.
func (c baseChain) rival() bool {
	return c.kind == "nat" && c.priority <= rules.NFTPriority && !strings.HasPrefix(c.table, rules.NFTPrefix) &&
		(c.hook == unix.NF_INET_PRE_ROUTING || c.hook == unix.NF_INET_LOCAL_OUT)
}

// Verify implements intercept.Mode. A nat chain that has come before ours is
// told of once: no Apply can help it, and whether it takes anything away only a
// connection shows.
func (m *Mode) Verify(ctx context.Context) ([]intercept.Damage, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("nft: verifying: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stop == nil {
		return nil, nil
	}
	damage, err := m.verify()
	if err != nil {
		return nil, fmt.Errorf("nft: verifying: %w", err)
	}
	return damage, nil
}

func (m *Mode) verify() (damage []intercept.Damage, err error) {
	if len(m.left.tables) != len(m.plan) {
		return []intercept.Damage{{What: "the last change of the tables was not completed"}}, nil
	}
	now, err := m.sock.look(m.plan)
	if err != nil {
		return nil, err
	}
	others, err := m.sock.others(m.plan[0].Name)
	if err != nil {
		return nil, err
	}
	for i, t := range m.plan {
		if t.Name == rules.NFTGuard && others && !now.tables[i].spoilt() {
			continue // the guard is shared, and this one may be the other agent's
		}
		damage = append(damage, flushed(m.left.tables[i].differences(t.Name, now.tables[i]))...)
	}
	for _, r := range now.rivals {
		if !slices.Contains(m.left.rivals, r) {
			damage = append(damage, intercept.Damage{What: r, Suspects: suspectRival})
		}
	}
	if len(damage) > 0 {
		return damage, nil
	}
	return m.verifyAlive(m.plan[0].Name)
}

// verifyAlive says whether heartbeats arrive in the set: they may be dropped on
// their way, which their sender cannot tell from their arrival.
func (m *Mode) verifyAlive(table string) ([]intercept.Damage, error) {
	m.beating.Lock()
	err := m.pulse.send()
	m.beating.Unlock()
	if err != nil {
		return nil, err
	}
	alive, err := m.sock.alive(table)
	if err != nil || alive {
		return nil, err
	}
	return []intercept.Damage{{
		What:     "set " + rules.NFTAlive + " of table inet " + table + " is empty though a heartbeat was sent",
		Suspects: "a rule that drops UDP to 127.64.0.0/10 in hook output before priority -350",
	}}, nil
}

func flushed(what []string) (damage []intercept.Damage) {
	for _, w := range what {
		damage = append(damage, intercept.Damage{What: w, Suspects: suspectFlush})
	}
	return damage
}

// spoilt says whether a guard cannot be that of any agent.
func (f fingerprint) spoilt() bool {
	for c := range f.chains {
		if len(f.rules[c]) == 0 {
			return true
		}
	}
	return !f.there || len(f.chains) == 0
}

// others says whether another agent of this node diverts.
func (s *socket) others(own string) (bool, error) {
	tables, err := s.tables()
	return slices.ContainsFunc(tables, func(t table) bool { return t.ours() && t.owned && t.name != own }), err
}
