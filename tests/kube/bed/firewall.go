package bed

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"time"
)

// rules are the firewall of the control plane: from outside only Kasway's port
// can be reached, and nothing outside can be. What it drops is counted and noted,
// so that a client that took another way shows.
const rules = `
table inet fw {
	counter in { }
	counter out { }
	counter through { }
	set dropped4 { type ipv4_addr . inet_service . ipv4_addr . inet_service; flags dynamic; size 1024; }
	set dropped6 { type ipv6_addr . inet_service . ipv6_addr . inet_service; flags dynamic; size 1024; }
	chain direct { }
	chain input {
		type filter hook input priority 0; policy accept
		iifname != "cp0" accept
		jump direct
		ct state established accept
		tcp dport ` + kaswayPort + ` accept
		icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit, mld-listener-report, mld2-listener-report } accept
		counter name in jump note
	}
	chain output {
		type filter hook output priority 0; policy accept
		oifname != "cp0" accept
		jump direct
		ct state { established, related } accept
		icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit, mld-listener-report, mld2-listener-report } accept
		counter name out jump note
	}
	chain forward {
		type filter hook forward priority 0; policy accept
		counter name through jump note
	}
	chain note {
		add @dropped4 { ip saddr . th sport . ip daddr . th dport }
		add @dropped6 { ip6 saddr . th sport . ip6 daddr . th dport }
		drop
	}
}
`

// firewallUp turns the firewall on between two rounds of probes: what is said
// to be closed was open before.
func (b *Bed) firewallUp(ctx context.Context) error {
	const probe = "probe"
	for _, n := range b.Nodes {
		for _, addr := range n.kubeletAddresses() {
			if err := b.start(probe+addr, place{netns: n.netns()}, nil, b.bin.Box, "serve", addr); err != nil {
				return err
			}
		}
	}
	if err := poll(ctx, 20*time.Millisecond, func() error { return b.reachable(ctx, true) }); err != nil {
		return fmt.Errorf("before the firewall is on: %w", err)
	}
	if err := nft(ctx, rules); err != nil {
		return err
	}
	if err := b.reachable(ctx, false); err != nil {
		return fmt.Errorf("with the firewall: %w", err)
	}
	for _, n := range b.Nodes {
		for _, addr := range n.kubeletAddresses() {
			if err := b.Kill(probe + addr); err != nil {
				return err
			}
		}
	}
	d, err := Dropped(ctx)
	if err != nil {
		return err
	}
	if want := 2 * len(b.Nodes) * len(b.families("", "")); len(d.Connections) != want {
		return fmt.Errorf("the firewall dropped %d probes and noted %v", want, d)
	}
	return nft(ctx, "reset counters table inet fw\nflush set inet fw dropped4\nflush set inet fw dropped6")
}

// reachable fails unless a direct connection node → KAS, and one KAS → kubelet,
// is possible (want) or is not.
func (b *Bed) reachable(ctx context.Context, want bool) error {
	type way struct {
		from string
		to   []string
	}
	var ways []way
	for _, n := range b.Nodes {
		ways = append(ways,
			way{n.netns(), b.families(net.JoinHostPort(cp4, kasPort), net.JoinHostPort(cp6, kasPort))},
			way{nsCP, n.kubeletAddresses()})
	}
	for _, way := range ways {
		for _, addr := range way.to {
			ctx, cancel := context.WithTimeout(ctx, 500*time.Millisecond)
			c, err := dialIn(ctx, way.from, "tcp", addr)
			cancel()
			if err == nil {
				// A reset leaves nothing to send: the firewall, which has not
				// seen this connection begin, would drop and count its end.
				_ = c.(*net.TCPConn).SetLinger(0)
				c.Close()
			}
			if (err == nil) != want {
				return fmt.Errorf("%s from %s: reachable is %t, want %t (%v)", addr, way.from, err == nil, want, err)
			}
		}
	}
	return nil
}

// Drops is what the firewall has dropped since it was turned on, but for the
// probes.
type Drops struct {
	Packets     uint64
	Connections []string // each once, however often it was tried: FROM PORT TO PORT
}

// Dropped reads the firewall's counters and notes.
func Dropped(ctx context.Context) (d Drops, err error) {
	out, err := run(ctx, place{netns: nsCP}.argv([]string{"nft", "-j", "list", "table", "inet", "fw"})...)
	if err != nil {
		return d, err
	}
	var list struct {
		Nftables []struct {
			Counter *struct{ Packets uint64 }
			Set     *struct {
				Elem []struct{ Concat []any }
			}
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return d, err
	}
	counters := 0
	for _, o := range list.Nftables {
		if o.Counter != nil {
			counters++
			d.Packets += o.Counter.Packets
		}
		if o.Set == nil {
			continue
		}
		for _, e := range o.Set.Elem {
			d.Connections = append(d.Connections, strings.Trim(fmt.Sprint(e.Concat), "[]"))
		}
	}
	if counters != 3 {
		return d, fmt.Errorf("the firewall has %d counters", counters)
	}
	return d, nil
}

// OpenDirect lets nodes reach the KAS past Kasway, as those of FormDaemonSet do
// at first.
func (b *Bed) OpenDirect(ctx context.Context) error {
	return nft(ctx, "add rule inet fw direct tcp dport "+kasPort+" accept")
}

// CloseDirect ends that: connections of that way are reset when the node sends
// its next packet, be it for what it gets, and new ones dropped like everything
// else. The KAS learns of it by the node's own answer.
func (b *Bed) CloseDirect(ctx context.Context) error {
	return nft(ctx, `flush chain inet fw direct
		add rule inet fw direct tcp dport `+kasPort+` tcp flags rst accept
		add rule inet fw direct tcp dport `+kasPort+` tcp flags & (syn | ack) != syn reject with tcp reset
		add rule inet fw direct tcp sport `+kasPort+` accept`)
}

// RefuseUpstream takes the KAS from Kasway's server: connections that it has are
// reset and new ones refused. Its other clients use another address of it.
func (b *Bed) RefuseUpstream(ctx context.Context) error {
	return nft(ctx, `table inet refused {
		chain output {
			type filter hook output priority -10; policy accept
			oifname "lo" ip daddr `+cp4+` tcp dport `+kasPort+` reject with tcp reset
		}
	}`)
}

// AdmitUpstream undoes RefuseUpstream.
func (b *Bed) AdmitUpstream(ctx context.Context) error { return nft(ctx, "delete table inet refused") }

// nft gives its commands to nft in the control plane.
func nft(ctx context.Context, commands string) error {
	argv := place{netns: nsCP}.argv([]string{"nft", "-f", "-"})
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(commands + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	return nil
}
