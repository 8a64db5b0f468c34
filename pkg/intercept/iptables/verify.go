package iptables

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// Who is known to do what to the rules and sets of others.
const (
	suspectFlush = "`iptables -F` or an iptables-restore without --noflush; a reload of firewalld or ufw; `nft flush ruleset`; `netfilter-persistent reload`"
	suspectFirst = "kube-proxy and Docker, which put their jumps first when they start; Tailscale, which keeps its own first; firewalld"
	suspectSets  = "`ipset flush` or `ipset destroy`, as a firewall's restart runs it"
	suspectKube  = "kube-proxy, started after the agent or with another --proxy-mode"
)

// Verify implements intercept.Mode.
func (m *Mode) Verify(ctx context.Context) ([]intercept.Damage, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("iptables: verifying: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stop == nil {
		return nil, nil
	}
	damage, err := m.verify(ctx)
	if err != nil {
		return nil, fmt.Errorf("iptables: verifying: %w", err)
	}
	return damage, nil
}

func (m *Mode) verify(ctx context.Context) ([]intercept.Damage, error) {
	moved, err := m.elsewhere()
	if err != nil {
		return nil, err
	}
	if moved != nil {
		return []intercept.Damage{{
			What:     fmt.Sprintf("kube-proxy uses the %s back end of iptables, and our rules are in the other", moved.back),
			Suspects: suspectKube,
		}}, nil
	}
	damage, err := m.verifySets()
	if err != nil {
		return nil, err
	}
	living, err := m.living()
	if err != nil {
		return nil, err
	}
	if len(m.left) != len(m.want.Families) {
		return append(damage, intercept.Damage{What: "the last change of the rules was not completed"}), nil
	}
	for i, f := range m.want.Families {
		now, err := m.tools.of(f.V6).look(ctx, f)
		if err != nil {
			return nil, err
		}
		damage = append(damage, m.left[i].differences(f, now, len(living) > 0)...)
	}
	for _, r := range rivals() {
		if r.kubeProxy() && !slices.Contains(m.rivals, r) {
			damage = append(damage, intercept.Damage{What: r.String(), Suspects: suspectKube})
		}
	}
	return damage, nil
}

// verifySets also tells of what a heartbeat has mended, and of sets that an
// agent which has died has left: both are for Apply to clear up.
func (m *Mode) verifySets() (damage []intercept.Damage, err error) {
	there, err := m.kernel.names()
	if err != nil {
		return nil, err
	}
	for _, s := range m.want.Sets {
		if !slices.Contains(there, s.Name) {
			damage = append(damage, intercept.Damage{What: "ipset " + s.Name + " is gone", Suspects: suspectSets})
		}
	}
	if damage != nil {
		return damage, nil // a heartbeat would fail
	}
	if err := m.beat(); err != nil {
		return nil, err
	}
	for _, name := range m.takeEmptied() {
		damage = append(damage, intercept.Damage{What: "ipset " + name + " was emptied", Suspects: suspectSets})
	}
	dead, err := m.deadSets()
	for _, name := range dead {
		damage = append(damage, intercept.Damage{What: "ipset " + name + " is left", Suspects: "an agent that has died"})
	}
	return damage, err
}

func (m *Mode) takeEmptied() (names []string) {
	m.beating.Lock()
	defer m.beating.Unlock()
	names, m.emptied = m.emptied, nil
	return names
}

// deadSets are those of other generations that nobody renews.
func (m *Mode) deadSets() (dead []string, err error) {
	names, err := m.kernel.names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if setGeneration(name) == m.generation {
			continue
		}
		alive, err := m.kernel.alive(name)
		if err != nil {
			return nil, err
		}
		if !alive {
			dead = append(dead, name)
		}
	}
	return dead, nil
}

// errMeddled is met if somebody changes our chains while they are made.
var errMeddled = errors.New("somebody has changed chains of ours while they were made")

// leave looks at what was just installed: all of it, or somebody was quicker.
func (t tools) leave(ctx context.Context, want rules.IPTables) (left []standing, err error) {
	for _, f := range want.Families {
		s, err := t.of(f.V6).look(ctx, f)
		if err != nil {
			return nil, err
		}
		for _, table := range f.Tables {
			for _, c := range table.Chains {
				if len(s[place{table.Name, c.Name}]) != len(c.Rules) {
					return nil, fmt.Errorf("chain %s of table %s: %w", c.Name, table.Name, errMeddled)
				}
			}
		}
		left = append(left, s)
	}
	return left, nil
}

// differences says what of the family is not as it was left. Beside another
// agent that lives the guard may be that one's.
func (s standing) differences(f rules.IPTablesFamily, now standing, beside bool) (damage []intercept.Damage) {
	family := "IPv4"
	if f.V6 {
		family = "IPv6"
	}
	for _, table := range f.Tables {
		in := " of table " + table.Name + " (" + family + ")"
		for _, j := range table.Jumps {
			if what, who := wrong(now[place{table.Name, j.Chain}], j); what != "" {
				damage = append(damage, intercept.Damage{What: "the jump from " + j.Chain + " to " + j.Target() + in + what, Suspects: who})
			}
		}
		for _, c := range table.Chains {
			at := place{table.Name, c.Name}
			is, there := now[at]
			switch {
			case !there:
				damage = append(damage, intercept.Damage{What: "chain " + c.Name + in + " is gone", Suspects: suspectFlush})
			case beside && c.Name == rules.IPTablesGuard && len(is) > 0:
			case !slices.EqualFunc(s[at], is, func(a, b rules.IPRule) bool { return slices.Equal(a.Args, b.Args) }):
				damage = append(damage, intercept.Damage{What: "rules of chain " + c.Name + in + " are changed", Suspects: suspectFlush})
			}
		}
	}
	return damage
}

// wrong says what is wrong with jump j among the rules of its chain: it is not
// there, or not before everybody else's. Those of another generation of ours
// may be in front.
func wrong(list []rules.IPRule, j rules.IPRule) (what, who string) {
	at := slices.IndexFunc(list, func(r rules.IPRule) bool { return r.Target() == j.Target() })
	if at < 0 {
		return " is gone", suspectFlush
	}
	first := slices.IndexFunc(list, func(r rules.IPRule) bool { return !ours(r.Target()) })
	if first < 0 || at < first {
		return "", ""
	}
	return " stands behind the rule " + strings.Join(list[first].Args, " "), suspectFirst
}
