package intercepttest

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// reference is a mode made of nft commands: slow, and right unless one of its
// faults is switched on. The suite must pass it and notice every fault.
type reference struct {
	fault string

	mu    sync.Mutex // between Apply and the heartbeat
	state rules.State
	stop  chan struct{}
	wg    sync.WaitGroup
}

// The faults, one line each.
const (
	swapsTargets  = "swaps-targets"  // diverts to the other target's ports
	forgetsV6Pods = "forgets-v6pods" // pods are not diverted over v6
	noGuard       = "no-guard"       // nothing is in force once the agent is dead
	noExpiry      = "no-expiry"      // diverts though nobody lives
	takesMidway   = "takes-midway"   // diverts packets that are no SYN
	ignoresMark   = "ignores-mark"   // diverts the agent's own sockets
	leavesTable   = "leaves-table"   // Cleanup forgets the guard's table
	gap           = "gap"            // Apply removes before it installs
	portsAlone    = "ports-alone"    // diverts a port, whatever the address
	unreachable   = "unreachable"    // the guard answers by ICMP
	stopsFlows    = "stops-flows"    // Close ends what was taken
)

var faults = []string{swapsTargets, forgetsV6Pods, noGuard, noExpiry, takesMidway, ignoresMark, leavesTable, gap, portsAlone, unreachable, stopsFlows}

func referenceFactory(fault string) Factory {
	return Factory{
		Name: "reference" + fault,
		New: func(logrus.FieldLogger) (intercept.Mode, error) {
			return &reference{fault: fault}, nil
		},
		Cleanup: func(context.Context) error {
			if fault == leavesTable {
				return runNFT("table inet ref\ndelete table inet ref\n")
			}
			return runNFT("table inet ref\ndelete table inet ref\ntable inet refguard\ndelete table inet refguard\n")
		},
	}
}

func runNFT(script string) error {
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("nft: %w: %s", err, out)
	}
	return nil
}

func (r *reference) Preflight(context.Context) intercept.Report { return intercept.Report{} }

func (r *reference) Verify(context.Context) ([]intercept.Damage, error) { return nil, nil }

func (r *reference) Apply(_ context.Context, s rules.State) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.state = s
	if r.fault == gap {
		if err := runNFT("table inet ref\ndelete table inet ref\ntable inet refguard\ndelete table inet refguard\n"); err != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond) // makes the gap wide enough to be met every time
	}
	if err := runNFT(r.tables() + r.elements()); err != nil {
		return err
	}
	if r.stop == nil {
		r.stop = make(chan struct{})
		r.wg.Go(r.beat)
	}
	return nil
}

func (r *reference) beat() {
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-r.stop:
			return
		case <-tick.C:
			r.mu.Lock()
			_ = runNFT(r.elements())
			r.mu.Unlock()
		}
	}
}

func (r *reference) Close() error {
	if r.stop != nil {
		close(r.stop)
		r.wg.Wait()
		r.stop = nil
	}
	if r.fault == stopsFlows {
		return runNFT("table inet ref\ndelete table inet ref\ntable inet refguard {\nchain cut { type filter hook input priority 0; tcp dport 1024-65535 reject with tcp reset; }\n}\n")
	}
	return runNFT("table inet ref\ndelete table inet ref\nflush set inet refguard alive4\nflush set inet refguard alive6\n")
}

// tables declares everything; declaring again what exists changes nothing, so
// the chains are filled by flushing and adding in one transaction.
func (r *reference) tables() string {
	syn := "tcp flags & (fin|syn|rst|ack) == syn"
	if r.fault == takesMidway {
		syn = "meta l4proto tcp"
	}
	mark := "meta mark & 0x40 == 0x40 return"
	if r.fault == ignoresMark {
		mark = ""
	}
	pods6 := syn + " dnat ip6 to ip6 daddr . tcp dport map @pods6"
	if r.fault == forgetsV6Pods {
		pods6 = ""
	}
	answer := "tcp reset"
	if r.fault == unreachable {
		answer = "icmpx host-unreachable"
	}
	var b strings.Builder
	b.WriteString("table inet ref {\n")
	for _, side := range []string{"host", "pods"} {
		fmt.Fprintf(&b, "map %s4 { type ipv4_addr . inet_service : ipv4_addr . inet_service; flags timeout; }\n", side)
		fmt.Fprintf(&b, "map %s6 { type ipv6_addr . inet_service : ipv6_addr . inet_service; flags timeout; }\n", side)
	}
	fmt.Fprintf(&b, "chain pre { type nat hook prerouting priority -110; }\nchain out { type nat hook output priority -110; }\n}\n")
	fmt.Fprintf(&b, "flush chain inet ref pre\nflush chain inet ref out\ntable inet ref {\n")
	fmt.Fprintf(&b, "chain pre {\n%s dnat ip to ip daddr . tcp dport map @pods4\n%s\n}\n", syn, pods6)
	fmt.Fprintf(&b, "chain out {\n%s\n%s dnat ip to ip daddr . tcp dport map @host4\n%s dnat ip6 to ip6 daddr . tcp dport map @host6\n", mark, syn, syn)
	if r.fault == portsAlone {
		fmt.Fprintf(&b, "tcp dport 6443 dnat ip to 127.0.0.1:%d\n", r.state.Diverts[0].Ports.Host4)
	}
	b.WriteString("}\n}\n")
	b.WriteString("table inet refguard {\nset g4 { type ipv4_addr . inet_service; flags timeout; }\nset g6 { type ipv6_addr . inet_service; flags timeout; }\n")
	b.WriteString("set alive4 { type ipv4_addr . inet_service; flags timeout; }\nset alive6 { type ipv6_addr . inet_service; flags timeout; }\n")
	// The guard answers before any translation: the reset for a packet that has
	// come over a bridge is sent past conntrack and would keep the translated
	// source. Its nat chain, and the ct expression in it, keep connections
	// translated once the other table, perhaps the node's only one that needs
	// nat and conntrack, is gone.
	b.WriteString("chain pre { type filter hook prerouting priority -110; }\nchain out { type filter hook output priority -110; }\n")
	b.WriteString("chain keep { type nat hook output priority -110; ct status dnat return; }\n}\n")
	b.WriteString("flush chain inet refguard pre\nflush chain inet refguard out\ntable inet refguard {\n")
	for _, c := range []struct{ name, first string }{{"pre", ""}, {"out", mark}} {
		fmt.Fprintf(&b, "chain %s {\n%s\n", c.name, c.first)
		for _, family := range []string{"ip:4", "ip6:6"} {
			ip, n, _ := strings.Cut(family, ":")
			fmt.Fprintf(&b, "%[1]s daddr . tcp dport @alive%[2]s return\n", ip, n)
			fmt.Fprintf(&b, "tcp flags & (fin|syn|rst|ack) == syn %[1]s daddr . tcp dport @g%[2]s reject with %[3]s\n", ip, n, answer)
		}
		b.WriteString("}\n")
	}
	b.WriteString("}\n")
	return b.String()
}

// elements fills the maps anew, for the next 2 s: the command that does it may
// outlive a killed process for a while.
func (r *reference) elements() string {
	timeout := " timeout 2s"
	if r.fault == noExpiry {
		timeout = ""
	}
	var b strings.Builder
	for _, m := range []string{"ref host4", "ref pods4", "ref host6", "ref pods6"} {
		fmt.Fprintf(&b, "flush map inet %s\n", m)
	}
	for _, set := range []string{"g4", "g6", "alive4", "alive6"} {
		fmt.Fprintf(&b, "flush set inet refguard %s\n", set)
	}
	for i, d := range r.state.Diverts {
		ports := d.Ports
		if r.fault == swapsTargets {
			ports = r.state.Diverts[(i+1)%len(r.state.Diverts)].Ports
		}
		for _, e := range d.Entries {
			family, host, hostPort, pod, podPort := 4, netip.MustParseAddr("127.0.0.1"), ports.Host4, r.state.Node4, ports.Pod4
			if e.Prefix.Addr().Is6() {
				family, host, hostPort, pod, podPort = 6, netip.IPv6Loopback(), ports.Host6, r.state.Node6, ports.Pod6
			}
			key := fmt.Sprintf("%s . %d", e.Prefix.Addr(), e.Port)
			switch {
			case r.fault == noGuard:
			case r.state.WhenDown == rules.Refuse:
				fmt.Fprintf(&b, "add element inet refguard g%d { %s }\n", family, key)
			case d.Refused:
				fmt.Fprintf(&b, "add element inet refguard g%d { %s%s }\n", family, key, timeout)
			}
			if !d.Refused {
				fmt.Fprintf(&b, "add element inet refguard alive%d { %s%s }\n", family, key, timeout)
				fmt.Fprintf(&b, "add element inet ref host%d { %s%s : %s . %d }\n", family, key, timeout, host, hostPort)
				fmt.Fprintf(&b, "add element inet ref pods%d { %s%s : %s . %d }\n", family, key, timeout, pod, podPort)
			}
		}
	}
	return b.String()
}
