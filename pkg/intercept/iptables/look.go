package iptables

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/coreos/go-iptables/iptables"

	"github.com/kasway/kasway/pkg/rules"
)

// manyRules is from how many bytes of iptables-save on it is cheaper to ask for
// each chain by a command of its own: a dozen of them for each family, which
// take as long on a node with very many rules of others as on any.
const manyRules = 256 << 10

// standing is what one family's tables hold: the rules of the built-in chains
// that our jumps stand in, and of our own chains. A chain that is not there has
// no entry.
type standing map[place][]rules.IPRule

type place struct{ table, chain string }

// look reads what the family's State concerns.
func (t *tool) look(ctx context.Context, f rules.IPTablesFamily) (standing, error) {
	if !t.many {
		save, err := t.save(ctx)
		if err != nil {
			return nil, err
		}
		t.many = len(save) > manyRules
		return standingOf(save), nil
	}
	s := standing{}
	for _, table := range f.Tables {
		for _, at := range hooks[table.Name] {
			if !slices.ContainsFunc(table.Jumps, func(j rules.IPRule) bool { return j.Chain == at }) {
				continue
			}
			if err := t.read(s, place{table.Name, at}); err != nil {
				return nil, err
			}
		}
		for _, c := range table.Chains {
			if err := t.read(s, place{table.Name, c.Name}); err != nil {
				return nil, err
			}
		}
	}
	return s, nil
}

// standingOf reads the output of iptables-save.
func standingOf(save []byte) standing {
	s, table := standing{}, ""
	for line := range strings.Lines(string(save)) {
		f := strings.Fields(line)
		switch {
		case len(f) == 0:
		case strings.HasPrefix(f[0], "*"):
			table = f[0][1:]
		case strings.HasPrefix(f[0], ":"):
			if at := (place{table, f[0][1:]}); at.concerns() {
				s[at] = []rules.IPRule{}
			}
		case f[0] == "-A" && len(f) > 2 && place{table, f[1]}.concerns():
			at := place{table, f[1]}
			s[at] = append(s[at], rules.IPRule{Chain: f[1], Args: f[2:]})
		}
	}
	return s
}

func (p place) concerns() bool { return ours(p.chain) || slices.Contains(hooks[p.table], p.chain) }

// read is List, to which a chain that is missing is no error.
func (t *tool) read(s standing, at place) error {
	list, err := t.hook(at.table, at.chain)
	var missing *iptables.Error
	switch {
	case errors.As(err, &missing) && missing.ExitStatus() == 1:
		return nil
	case err != nil:
		return err
	}
	s[at] = list
	return nil
}
