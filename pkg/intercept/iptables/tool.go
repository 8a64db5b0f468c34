package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/go-iptables/iptables"

	"github.com/kasway/kasway/pkg/rules"
)

// lockWait is how many seconds an iptables command waits for the lock of the
// legacy back end (/run/xtables.lock) before it gives up.
const lockWait = 5

// backEnd is one of the two implementations of iptables: they show each other's
// rules to nobody, and both act on packets.
type backEnd string

const (
	nft    backEnd = "nft"
	legacy backEnd = "legacy"
)

func other(b backEnd) backEnd {
	if b == nft {
		return legacy
	}
	return nft
}

// runner runs a command with the given input and returns its standard output.
// Tests put their own in place to force what a kernel would have answered.
type runner func(ctx context.Context, input, name string, args ...string) ([]byte, error)

func run(ctx context.Context, input, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		said := strings.Join(strings.Fields(stderr.String()), " ")
		return nil, fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, said)
	}
	return stdout.Bytes(), nil
}

// tool is the commands of one back end for one family.
type tool struct {
	name string // "iptables-nft"
	v6   bool
	ipt  *iptables.IPTables
	run  runner
	// many: the tables hold so many rules that looking asks for single chains.
	many bool
}

// toolName is how distributions call the command of a back end.
func toolName(b backEnd, v6 bool) string {
	if v6 {
		return "ip6tables-" + string(b)
	}
	return "iptables-" + string(b)
}

// findTool looks for the commands; the error wraps exec.ErrNotFound if one of
// them is not installed.
func findTool(b backEnd, v6 bool, r runner) (*tool, error) {
	t := &tool{name: toolName(b, v6), v6: v6, run: r}
	for _, suffix := range []string{"-save", "-restore"} {
		if _, err := exec.LookPath(t.name + suffix); err != nil {
			return nil, fmt.Errorf("looking for %s%s: %w", t.name, suffix, err)
		}
	}
	protocol := iptables.ProtocolIPv4
	if v6 {
		protocol = iptables.ProtocolIPv6
	}
	var err error
	t.ipt, err = iptables.New(iptables.IPFamily(protocol), iptables.Path(t.name), iptables.Timeout(lockWait))
	if err != nil {
		return nil, fmt.Errorf("looking for %s: %w", t.name, err)
	}
	return t, nil
}

// tools are the commands of one back end; v6 is nil where only those for IPv4
// are installed, or IPv6 does not work.
type tools struct{ v4, v6 *tool }

func (t tools) of(v6 bool) *tool {
	if v6 {
		return t.v6
	}
	return t.v4
}

func findTools(b backEnd, r runner) (t tools, err error) {
	if t.v4, err = findTool(b, false, r); err != nil {
		return tools{}, err
	}
	if t.v6, err = findTool(b, true, r); err != nil && !errors.Is(err, exec.ErrNotFound) {
		return tools{}, err
	}
	return t, nil
}

// commit runs iptables-restore: each table of text changes at once or not at
// all, and what text does not name stays.
func (t *tool) commit(ctx context.Context, text string) error {
	_, err := t.run(ctx, text, t.name+"-restore", "--noflush", "--wait", strconv.Itoa(lockWait))
	return err
}

// save lists all tables that exist. Unlike -S and -L it makes none.
func (t *tool) save(ctx context.Context) ([]byte, error) {
	return t.run(ctx, "", t.name+"-save")
}

// hook lists a built-in chain, without its policy.
func (t *tool) hook(table, chain string) ([]rules.IPRule, error) {
	lines, err := t.ipt.List(table, chain)
	if err != nil {
		return nil, err
	}
	return appended(lines), nil
}

// appended are the rules among lines of -S or of iptables-save.
func appended(lines []string) (found []rules.IPRule) {
	for _, line := range lines {
		// Our own rules hold no quotes and are read whole; of others only the
		// chain and, for most, the target matter.
		if f := strings.Fields(line); len(f) > 2 && f[0] == "-A" {
			found = append(found, rules.IPRule{Chain: f[1], Args: f[2:]})
		}
	}
	return found
}

// ours says whether a chain's name is one of Kasway's.
func ours(chain string) bool { return strings.HasPrefix(chain, rules.IPTablesPrefix) }

// hooks are the built-in chains that jumps of any state stand in.
var hooks = map[string][]string{
	"nat": {"PREROUTING", "OUTPUT"}, "filter": {"INPUT", "FORWARD", "OUTPUT"}, "mangle": {"PREROUTING", "OUTPUT", "POSTROUTING"},
}

// install installs everything, one family after the other.
func (t tools) install(ctx context.Context, want rules.IPTables) error {
	for _, f := range want.Families {
		if err := t.of(f.V6).install(ctx, f); err != nil {
			return err
		}
	}
	return nil
}

// install commits a family. Jumps to the same chains that are there already are
// replaced in the same commit. Somebody may change a chain between looking and
// committing; then the commit fails as a whole and is tried again.
func (t *tool) install(ctx context.Context, f rules.IPTablesFamily) error {
	var err error
	for range 3 {
		var drop map[string][]rules.IPRule
		if drop, err = t.jumps(f); err != nil {
			return err
		}
		if err = t.commit(ctx, f.Restore(drop)); err == nil || ctx.Err() != nil {
			break
		}
	}
	return err
}

// jumps finds the jumps to the family's chains that are in place, by table: also
// where an earlier state wanted them and this one does not.
func (t *tool) jumps(f rules.IPTablesFamily) (map[string][]rules.IPRule, error) {
	found := map[string][]rules.IPRule{}
	for _, table := range f.Tables {
		for _, hook := range hooks[table.Name] {
			list, err := t.hook(table.Name, hook)
			if err != nil {
				return nil, err
			}
			for _, r := range list {
				if slices.ContainsFunc(table.Chains, func(c rules.IPChain) bool { return c.Name == r.Target() }) {
					found[table.Name] = append(found[table.Name], r)
				}
			}
		}
	}
	return found, nil
}
