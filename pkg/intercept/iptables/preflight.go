package iptables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

const (
	remedyInstall   = "install the iptables package in the node's or the agent's image, with iptables-nft, iptables-legacy and their ip6tables"
	remedyPrivilege = "run the agent as root, or with CAP_NET_ADMIN and CAP_NET_RAW (matching an ipset needs the second) over its network namespace"
	remedyModules   = "load the kernel's modules for iptables, or use another mode"
)

// errTable marks the error of a table that cannot be written.
type errTable struct {
	table string
	back  backEnd
	err   error
}

// locked says whether the command may have failed for want of the lock alone;
// only the legacy back end has one, and uses this exit code for nothing else.
func (e *errTable) locked() bool {
	var exit *exec.ExitError
	return e.back == legacy && errors.As(e.err, &exit) && exit.ExitCode() == 4
}

func (e *errTable) Error() string {
	return fmt.Sprintf("table %s cannot be used: %v", e.table, e.err)
}
func (e *errTable) Unwrap() error { return e.err }

// choose finds the commands and picks the back end that everything of this Mode
// goes to, until kube-proxy turns up in the other one.
func (m *Mode) choose(ctx context.Context) error {
	found := map[backEnd]tools{}
	in := map[backEnd]holding{}
	var missing []error
	for _, b := range []backEnd{nft, legacy} {
		t, err := findTools(b, m.run)
		if errors.Is(err, exec.ErrNotFound) {
			missing = append(missing, err)
			continue
		}
		if err == nil {
			in[b], err = t.look(ctx)
		}
		if err != nil {
			return err
		}
		found[b] = t
	}
	if len(found) == 0 {
		return errors.Join(missing...)
	}
	b, why := choose(in[nft], in[legacy])
	if _, ok := found[b]; !ok {
		// What nobody can look at may hold rules all the same.
		why = fmt.Sprintf("%s is not installed", toolName(b, false))
		b = other(b)
	}
	m.back, m.tools = b, found[b]
	m.cfg.Log.Infof("iptables: back end %s: %s", b, why)
	return nil
}

// Preflight implements intercept.Mode. It writes what Apply would, under a
// generation of its own and without jumps, reads it back and removes it.
func (m *Mode) Preflight(ctx context.Context) intercept.Report {
	if err := ctx.Err(); err != nil {
		return intercept.Report{Err: err}
	}
	if err := mayAct(); err != nil {
		return refusal(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.back == "" {
		if err := m.choose(ctx); err != nil {
			return refusal(err)
		}
	}
	r := refusal(m.probe(ctx, false))
	if r.Err != nil {
		return r
	}
	if m.tools.v6 == nil {
		r.Notes = append(r.Notes, fmt.Sprintf("%s is not installed: IPv6 addresses of targets cannot be diverted", toolName(m.back, true)))
	} else if err := m.probe(ctx, true); err != nil {
		m.tools.v6 = nil
		r.Notes = append(r.Notes, fmt.Sprintf("IPv6 addresses of targets cannot be diverted: %v", err))
	}
	if m.back == legacy {
		r.Notes = append(r.Notes, "the legacy back end is in use: /run/xtables.lock must be the host's, or changes of kube-proxy and ours may undo each other")
	}
	for _, rival := range rivals() {
		r.Notes = append(r.Notes, rival.String())
	}
	return r
}

// refusal makes a Report of an error: what cannot be, what may not be, and what
// could not be found out.
func refusal(err error) intercept.Report {
	var table *errTable
	var exit *exec.ExitError
	switch {
	case err == nil:
		return intercept.Report{}
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return intercept.Report{Err: fmt.Errorf("%w: %w", intercept.ErrPrivilege, err), Remedy: remedyPrivilege}
	case errors.Is(err, exec.ErrNotFound):
		return intercept.NotSupported(remedyInstall, "%v", err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
	case errors.As(err, &table) && errors.As(err, &exit) && !table.locked():
		return intercept.NotSupported(remedyModules, "%v", err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EPROTONOSUPPORT):
		return intercept.NotSupported("load the kernel's modules ip_set, ip_set_hash_net and xt_set, or use another mode", "%v", err)
	}
	return intercept.Report{Err: err, Remedy: "look for who holds /run/xtables.lock, and for what the kernel log says of iptables"}
}

// mayAct tries the two privileges. The commands would tell by text only.
func mayAct() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return fmt.Errorf("opening a raw socket, as iptables does: %w", err)
	}
	_ = unix.Close(fd)
	kernel, err := openSets()
	if err != nil {
		return err
	}
	defer kernel.Close()
	if _, _, err := kernel.IpsetProtocol(); err != nil {
		return fmt.Errorf("asking the kernel for ipset: %w", err)
	}
	return nil
}

// probeTables tries those of a state with everything in it that are wanted, in
// the thread's network namespace.
func (m *Mode) probeTables(ctx context.Context, v6 bool, wanted func(rules.IPTable) bool) (err error) {
	kernel, err := openSets()
	if err != nil {
		return err
	}
	defer kernel.Close()
	want := m.cfg.Plan(probeState(v6))
	for _, s := range want.Sets {
		if err := kernel.fill(s); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, kernel.destroy(s.Name)) }()
	}
	for _, f := range want.Families {
		// The last table is tried first: that table filter works and nat does
		// not is worth a message of its own.
		for i := len(f.Tables) - 1; i >= 0; i-- {
			table := f.Tables[i]
			if !wanted(table) {
				continue
			}
			table.Jumps = nil
			if err := m.tools.of(v6).try(ctx, table); err != nil {
				return &errTable{table.Name, m.back, err}
			}
		}
	}
	return nil
}

// try writes the table, reads it back and removes it.
func (t *tool) try(ctx context.Context, table rules.IPTable) (err error) {
	mine := func(_, chain string) bool { return isProbe(table, chain) }
	if err := t.commit(ctx, rules.IPTablesFamily{V6: t.v6, Tables: []rules.IPTable{table}}.Restore(nil)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.removeChains(ctx, mine)) }()
	for _, c := range table.Chains {
		got, err := t.hook(table.Name, c.Name)
		if err != nil {
			return err
		}
		if len(got) != len(c.Rules) {
			return fmt.Errorf("%d rules written to chain %s of table %s, %d read back", len(c.Rules), c.Name, table.Name, len(got))
		}
	}
	return nil
}

func isProbe(table rules.IPTable, chain string) bool {
	for _, c := range table.Chains {
		if c.Name == chain {
			return true
		}
	}
	return false
}

// probeState has an open and a refused divert of the family. Its names hold
// this process's id: two agents may be looking at once.
func probeState(v6 bool) rules.State {
	addr := netip.MustParseAddr("192.0.2.1")
	if v6 {
		addr = netip.MustParseAddr("2001:db8::1")
	}
	entry := func(port uint16) []rules.Entry {
		return []rules.Entry{{Prefix: netip.PrefixFrom(addr, addr.BitLen()), Port: port}}
	}
	s := rules.State{
		Generation: "probe" + strconv.Itoa(os.Getpid()), Clients: rules.Clients{Host: true, Pods: true}, WhenDown: rules.Direct,
		Mark: 0x40, MarkMask: 0x40,
		Diverts: []rules.Divert{
			{Name: "open", Entries: entry(1), Ports: rules.Ports{Host4: 1, Host6: 1, Pod4: 1, Pod6: 1}},
			{Name: "refused", Entries: entry(2), Refused: true},
		},
	}
	if v6 {
		s.Node6 = addr
	} else {
		s.Node4 = addr
	}
	return s
}
