package nft

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// Preflight implements intercept.Mode. It has the kernel make everything that
// Apply needs, and remove it in the same transaction: nobody ever sees it.
func (m *Mode) Preflight(ctx context.Context) intercept.Report {
	if err := ctx.Err(); err != nil {
		return intercept.Report{Err: err}
	}
	r := classify(m.probe())
	if r.Err == nil {
		r.Notes = append(r.Notes, namespaceNote("/proc/thread-self/ns/net", "/proc/1/ns/net")...)
		r.Notes = append(r.Notes, earlierNAT()...)
	}
	return r
}

// probe tries a state with everything in it. No generation has a '_' in its
// name, so that the tables are nobody's.
func (m *Mode) probe() error {
	sock, err := openSocket()
	if err != nil {
		return err
	}
	addr4, addr6 := netip.MustParsePrefix("192.0.2.1/32"), netip.MustParsePrefix("2001:db8::1/128")
	plan := m.cfg.Plan(rules.State{
		Generation: "probe_own", Clients: rules.Clients{Host: true, Pods: true}, WhenDown: rules.Refuse,
		Mark: 0x40, MarkMask: 0x40, Node4: addr4.Addr(), Node6: addr6.Addr(),
		Diverts: []rules.Divert{
			{Name: "open", Entries: []rules.Entry{{Prefix: addr4, Port: 1}, {Prefix: addr6, Port: 1}}, Ports: rules.Ports{Host4: 1, Host6: 1, Pod4: 1, Pod6: 1}},
			{Name: "refused", Entries: []rules.Entry{{Prefix: addr4, Port: 2}, {Prefix: addr6, Port: 2}}, Refused: true},
		},
	})
	plan[1].Name = rules.NFTPrefix + "probe_guard"
	var b batch
	for _, t := range plan {
		b.rebuild(t)
		b.deleteTable(unix.NFPROTO_INET, t.Name)
	}
	return errors.Join(sock.commit(&b), sock.close())
}

// classify tells apart what cannot be, what may not be, and what is not known.
func classify(err error) intercept.Report {
	is := func(errnos ...unix.Errno) bool {
		for _, e := range errnos {
			if errors.Is(err, e) {
				return true
			}
		}
		return false
	}
	switch {
	case err == nil:
		return intercept.Report{}
	case is(unix.EPERM, unix.EACCES):
		return intercept.Report{Err: fmt.Errorf("%w: %w", intercept.ErrPrivilege, err),
			Remedy: "run the agent as root or with CAP_NET_ADMIN over its network namespace"}
	case is(unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.ESOCKTNOSUPPORT):
		return intercept.NotSupported("use a kernel with CONFIG_NETFILTER_NETLINK", "%v", err)
	case is(unix.EOPNOTSUPP, unix.EINVAL):
		return intercept.NotSupported("use Linux 5.12 or newer, whose tables can be owned by a process", "%v", err)
	case is(unix.ENOENT):
		return intercept.NotSupported("load the kernel's modules nf_tables, nft_chain_nat, nft_nat, nft_ct, nft_fib_inet and nft_reject_inet", "%v", err)
	}
	return intercept.Report{Err: err, Remedy: "look for what the kernel log says of nf_tables"}
}

// namespaceNote compares two links to network namespaces. Without the host's
// pid namespace process 1 is our own, and says nothing.
func namespaceNote(own, host string) []string {
	a, errA := os.Readlink(own)
	b, errB := os.Readlink(host)
	if errA != nil || errB != nil || a == b {
		return nil
	}
	return []string{fmt.Sprintf("the network namespace (%s) is not that of process 1 (%s): on a node the agent needs hostNetwork", a, b)}
}

// earlierNAT names the nat chains that may take connections before ours.
func earlierNAT() (notes []string) {
	conn, err := nftables.New()
	if err != nil {
		return nil
	}
	chains, err := conn.ListChains()
	if err != nil {
		return []string{fmt.Sprintf("could not list the nat chains of others: %v", err)}
	}
	for _, c := range chains {
		if c.Type != nftables.ChainTypeNAT || c.Hooknum == nil || c.Priority == nil || *c.Priority > rules.NFTPriority || strings.HasPrefix(c.Table.Name, rules.NFTPrefix) {
			continue
		}
		switch *c.Hooknum {
		case *nftables.ChainHookPrerouting, *nftables.ChainHookOutput:
			notes = append(notes, fmt.Sprintf("nat chain %s of table %s has priority %d and may take connections before Kasway's at %d", c.Name, c.Table.Name, *c.Priority, rules.NFTPriority))
		}
	}
	return notes
}
