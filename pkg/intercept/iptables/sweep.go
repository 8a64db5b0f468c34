package iptables

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// chainName takes the chains of ours apart: kind and generation. The guard that
// outlives the agent is of no generation.
var chainName = regexp.MustCompile(`^` + rules.IPTablesPrefix + `[A-Z]+(?:-([a-z0-9]+))?$`)

func chainGeneration(chain string) string {
	if m := chainName.FindStringSubmatch(chain); m != nil {
		return m[1]
	}
	return ""
}

// leftover is what one table holds of ours: chains, and jumps to them.
type leftover struct {
	table  string
	chains []string
	jumps  []rules.IPRule
}

// leftovers reads the output of iptables-save.
func leftovers(save []byte, gone func(table, chain string) bool) (found []leftover) {
	var at *leftover
	for line := range strings.Lines(string(save)) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "*"):
			found = append(found, leftover{table: line[1:]})
			at = &found[len(found)-1]
		case at == nil:
		case strings.HasPrefix(line, ":"+rules.IPTablesPrefix):
			if chain := strings.Fields(line)[0][1:]; gone(at.table, chain) {
				at.chains = append(at.chains, chain)
			}
		case strings.HasPrefix(line, "-A "):
			r := appended([]string{line})[0]
			if ours(r.Target()) && !ours(r.Chain) && gone(at.table, r.Target()) {
				at.jumps = append(at.jumps, r)
			}
		}
	}
	return slices.DeleteFunc(found, func(l leftover) bool { return len(l.chains)+len(l.jumps) == 0 })
}

// remove is the text for iptables-restore --noflush that removes l. It flushes
// chains of ours only.
func (l leftover) remove() string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%s\n", l.table)
	for _, j := range l.jumps {
		fmt.Fprintf(&b, "-D %s %s\n", j.Chain, strings.Join(j.Args, " "))
	}
	for _, c := range l.chains {
		fmt.Fprintf(&b, "-F %s\n", c)
	}
	for _, c := range l.chains {
		fmt.Fprintf(&b, "-X %s\n", c)
	}
	b.WriteString("COMMIT\n")
	return b.String()
}

// removeChains removes the chains of ours for which gone says yes, each table
// in one commit: filter first, so that nothing is refused for want of a divert.
// As in install, somebody may be at the same table.
func (t *tool) removeChains(ctx context.Context, gone func(table, chain string) bool) error {
	var err error
	for range 3 {
		var out []byte
		if out, err = t.save(ctx); err != nil {
			return err
		}
		found := leftovers(out, gone)
		if len(found) == 0 {
			return nil
		}
		slices.SortFunc(found, func(a, b leftover) int { return strings.Compare(a.table, b.table) })
		var text strings.Builder
		for _, l := range found {
			text.WriteString(l.remove())
		}
		if err = t.commit(ctx, text.String()); err == nil || ctx.Err() != nil {
			return err
		}
	}
	return err
}

// everyTool calls f with each tool that is installed, of both back ends.
func everyTool(r runner, f func(backEnd, *tool) error) error {
	var errs []error
	for _, b := range []backEnd{nft, legacy} {
		for _, v6 := range []bool{false, true} {
			t, err := findTool(b, v6, r)
			if errors.Is(err, exec.ErrNotFound) {
				continue // nothing can have been installed with it
			}
			if err == nil {
				err = f(b, t)
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// sweep removes everything of ours that is neither wanted nor another living
// agent's: chains of an earlier state, of dead generations, and of the back end
// that is no longer in use.
func (m *Mode) sweep(ctx context.Context) error {
	living, err := m.living()
	if err != nil {
		return err
	}
	err = everyTool(m.run, func(b backEnd, t *tool) error {
		return t.removeChains(ctx, func(table, chain string) bool {
			if b == m.back && m.wants(t.v6, table, chain) {
				return false
			}
			return !slices.Contains(living, chainGeneration(chain))
		})
	})
	if err != nil {
		return err
	}
	return m.destroySets(func(name string) bool {
		wanted := slices.ContainsFunc(m.want.Sets, func(s rules.IPSet) bool { return s.Name == name })
		return !wanted && !slices.Contains(living, setGeneration(name))
	})
}

func (m *Mode) wants(v6 bool, table, chain string) bool {
	for _, f := range m.want.Families {
		for _, t := range f.Tables {
			if f.V6 == v6 && t.Name == table && slices.ContainsFunc(t.Chains, func(c rules.IPChain) bool { return c.Name == chain }) {
				return true
			}
		}
	}
	return false
}

// living lists the other generations whose agent keeps its heartbeat. One that
// has died within the last 2 s is among them: it stays until a later sweep.
func (m *Mode) living() (generations []string, err error) {
	names, err := m.kernel.names()
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		g := setGeneration(name)
		if g == m.generation || slices.Contains(generations, g) {
			continue
		}
		alive, err := m.kernel.alive(name)
		if err != nil {
			return nil, err
		}
		if alive {
			generations = append(generations, g)
		}
	}
	return generations, nil
}

func (m *Mode) destroySets(gone func(name string) bool) error {
	names, err := m.kernel.names()
	errs := []error{err}
	for _, name := range names {
		if gone(name) {
			errs = append(errs, m.kernel.destroy(name))
		}
	}
	return errors.Join(errs...)
}

// removeOwn removes every chain and set for which gone says yes, in that order:
// a set can go only after the last rule that refers to it.
func (m *Mode) removeOwn(ctx context.Context, gone func(chain, generation string) bool) error {
	err := everyTool(m.run, func(_ backEnd, t *tool) error {
		return t.removeChains(ctx, func(_, chain string) bool { return gone(chain, chainGeneration(chain)) })
	})
	if err != nil {
		return err
	}
	return m.destroySets(func(name string) bool { return gone("", setGeneration(name)) })
}

// Cleanup removes every chain, jump and set of ours, of any generation, in both
// back ends and families of the calling thread's network namespace, and lifts
// the guard. It may be called any number of times, and does nothing where
// iptables is not installed. Without the privilege it is an error that wraps
// intercept.ErrPrivilege. A living agent would put its rules back: stop it
// first.
func Cleanup(ctx context.Context) error {
	if err := refusal(mayAct()).Err; errors.Is(err, intercept.ErrPrivilege) {
		return fmt.Errorf("iptables: cleaning up: %w: %s", err, remedyPrivilege)
	}
	m := New(Config{})
	kernel, err := openSets()
	if err != nil {
		return fmt.Errorf("iptables: cleaning up: %w", err)
	}
	m.kernel = kernel
	defer m.kernel.Close()
	if err := m.removeOwn(ctx, func(string, string) bool { return true }); err != nil {
		return fmt.Errorf("iptables: cleaning up: %w", err)
	}
	return nil
}
