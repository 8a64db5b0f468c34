package stories

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/kasway/kasway/tests/netns"
)

// repairedWithin is how soon what somebody removes is back.
const repairedWithin = 5 * time.Second

// meddling is what somebody does to the node, in a shell.
type meddling struct {
	name, script string
	// damage and suspect are parts of what is logged of it, if it is news.
	damage, suspect string
}

const takenOfKAS = `kasway_agent_intercept_taken_total{target="kas"}`

// repaired does it, and fails the test unless the agent has put everything back
// within 5 s: it has counted and logged a repair, and every client is served.
// On a machine that others keep busy the best of three times is measured.
func (s *scene) repaired(t *testing.T, mode string, m meddling) {
	t.Helper()
	log := len(s.agent.Log())
	var took time.Duration
	for range 3 {
		if took = s.meddle(t, mode, m); took <= repairedWithin {
			break
		}
	}
	t.Logf("%s, %s: back after %s", mode, m.name, took.Round(10*time.Millisecond))
	if took > repairedWithin {
		t.Errorf("%s: back after %s", m.name, took)
	}
	if m.damage != "" {
		logged(t, s.agent, log, "somebody has changed what is installed", m.damage, m.suspect)
	}
}

// meddle does it, and returns how long it has taken until it was undone.
func (s *scene) meddle(t *testing.T, mode string, m meddling) time.Duration {
	t.Helper()
	sample := fmt.Sprintf("kasway_agent_repairs_total{mode=%q}", mode)
	was := metric(t, s.agent, sample)
	begun := time.Now()
	if out, err := s.Node.Run("sh", "-c", m.script); err != nil {
		t.Fatalf("%s: %v: %s", m.name, err, out)
	}
	err := netns.Poll(3*patience, func() error {
		if n := metric(t, s.agent, sample); n == was {
			return fmt.Errorf("%s: %v repairs, as before", m.name, n)
		}
		return nil
	})
	took := time.Since(begun)
	if err != nil {
		t.Fatal(err)
	}
	taken := metric(t, s.agent, takenOfKAS)
	n := 0
	for _, h := range s.clients() {
		for _, to := range []netip.AddrPort{svc4, kas6} {
			s.served(t, h, to)
			n++
		}
	}
	rises(t, s.agent, takenOfKAS, taken, float64(n))
	return took
}

// untouched waits until the agent has looked again, and found nothing.
func (s *scene) untouched(t *testing.T, mode string) {
	t.Helper()
	sample := fmt.Sprintf("kasway_agent_repairs_total{mode=%q}", mode)
	was := metric(t, s.agent, sample)
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for range 20 { // a look every 2 s
		s.served(t, s.Node, svc4)
		<-tick.C
	}
	if now := metric(t, s.agent, sample); now != was {
		t.Errorf("%v repairs of what nobody has touched:\n%s", now-was, s.agent.Log())
	}
}

// both runs a command of iptables for both families.
func both(rest string) string { return "iptables " + rest + " && ip6tables " + rest }

// Whatever somebody does to the rules of mode iptables is undone.
func TestCase_B38_RepairIptables(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{RoutedPods: 1, BridgePods: 1})
	s.start(t, diverting("iptables"))
	s.untouched(t, "iptables")
	for _, m := range []meddling{
		{"deleted jump", both("-t nat -D OUTPUT 1"), "the jump from OUTPUT to KASWAY-OUT-", "iptables -F"},
		{"flush of nat", both("-F -t nat"), "the jump from PREROUTING to KASWAY-PRE-", "`nft flush ruleset`"},
		{"flush of filter", both("-F"), "the jump from OUTPUT to KASWAY-GUARD of table filter", "firewalld"},
		{"another jump first", both("-t nat -N STRANGE") + "; " + both("-t nat -I OUTPUT 1 -j STRANGE"), "stands behind the rule -j STRANGE", "Tailscale"},
		{"emptied sets", "ipset flush", "was emptied", "ipset flush"},
		{"destroyed sets", both("-F -t nat") + " && " + both("-F") + " && " + both("-X") + " && " + both("-t nat -X") + " && ipset destroy", "ipset kasway4-", "ipset destroy"},
		{"flushed ruleset", "nft flush ruleset", "", ""}, // the same damage again: said once
		{"deleted addresses", "ip addr del 169.254.77.1/32 dev lo", "node address 169.254.77.1 is gone", "systemd-networkd"},
	} {
		s.repaired(t, "iptables", m)
	}
}

// Its own table is nobody else's to touch in mode nft; its guard is, and the
// node's addresses.
func TestCase_B38_RepairNFT(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{RoutedPods: 1, BridgePods: 1})
	s.start(t, diverting("nft"))
	s.untouched(t, "nft")
	whole := s.guard(t)
	for _, m := range []meddling{
		{"flushed ruleset", "nft flush ruleset", "table inet kasway_guard is gone", "nftables.service"},
		{"deleted guard", "nft delete table inet kasway_guard", "", ""}, // the same damage again: said once
		{"emptied guard", "nft flush table inet kasway_guard", "rules are changed", "firewalld"},
		{"deleted addresses", "ip addr del 169.254.77.1/32 dev lo", "node address 169.254.77.1 is gone", "ip addr flush"},
	} {
		s.repaired(t, "nft", m)
		if guard := s.guard(t); guard != whole {
			t.Errorf("%s: the guard is\n%s\nand was\n%s", m.name, guard, whole)
		}
	}
	// What was put back does what it is for.
	if err := s.agent.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = s.agent.Wait() // reports the signal
	for _, h := range s.clients() {
		if err := s.ask(t, h, svc4); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s at %s: want ECONNREFUSED: %v", h.Label, svc4, err)
		}
	}
}

func (s *scene) guard(t *testing.T) string {
	t.Helper()
	out, err := s.Node.Run("nft", "list", "table", "inet", "kasway_guard")
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// Pins that are removed are made again in mode ebpf, and hooks that somebody has
// taken off are attached again.
func TestCase_B38_RepairEBPF(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{RoutedPods: 1, BridgePods: 1})
	if s.NodeCgroup() == "" {
		t.Skip("no cgroup 2 to attach to")
	}
	s.start(t, diverting("ebpf"))
	pins, err := s.BPFFS()
	if err != nil {
		t.Fatal(err)
	}
	s.untouched(t, "ebpf")
	for _, m := range []meddling{
		{"removed pin", "rm " + pins + "/kasway/*/connect4", "connect4 is missing", "remount of the bpffs"},
		{"removed pins", "rm -r " + pins + "/kasway/*", "connect6 is missing", "remount of the bpffs"},
		{"deleted addresses", "ip addr del 169.254.77.1/32 dev lo", "node address 169.254.77.1 is gone", "systemd-networkd"},
	} {
		s.repaired(t, "ebpf", m)
	}
	s.detach(t, pins, "connect4")
	logged(t, s.agent, 0, "program of connect4 is attached no longer", "bpftool link detach")
	for _, h := range s.clients() {
		s.servedAgain(t, h, svc4)
	}
}

// detach takes a hook off, as `bpftool link detach` does.
func (s *scene) detach(t *testing.T, pins, hook string) {
	t.Helper()
	found, err := filepath.Glob(pins + "/kasway/*/" + hook)
	if err != nil || len(found) != 1 {
		t.Fatalf("pins of %s: %v, %v", hook, found, err)
	}
	l, err := link.LoadPinnedLink(found[0], nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(l.Detach(), l.Close()); err != nil {
		t.Fatal(err)
	}
}

// A stranger's rule that takes connections before ours damages nothing, and the
// self-test shows it. While it stands the agent cannot help it, and is not
// ready.
func TestCase_B38_Overridden(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{RoutedPods: 1})
	s.start(t, diverting("nft"))
	stranger := "table ip stranger { chain out { type nat hook output priority -150; tcp dport 1 ip daddr 169.254.77.1 dnat to 127.0.0.1:9; }; }"
	if _, err := s.Node.RunInput(stranger, "nft", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	logged(t, s.agent, 0, "nat chain out of nftables table stranger stands before ours, at priority -150", "Tailscale")
	logged(t, s.agent, 0, "self-test connection to 169.254.77.1:1: it was not diverted", "policy route")
	if err := netns.Poll(4*patience, func() error {
		st := s.status(t)
		if st.Ready || !strings.Contains(st.NotReady, "what is put back does not hold: not diverted any more: self-test connection to 169.254.77.1:1") {
			return fmt.Errorf("ready: %v, %s", st.Ready, st.NotReady)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if _, err := s.Node.Run("nft", "delete", "table", "ip", "stranger"); err != nil {
		t.Fatal(err)
	}
	if err := netns.Poll(4*patience, func() error {
		if st := s.status(t); !st.Ready {
			return fmt.Errorf("%s", st.NotReady)
		}
		return nil
	}); err != nil {
		t.Errorf("the stranger is gone: %v", err)
	}
}

// Who removes it again and again is told of thinly, and the node is not ready.
func TestCase_B38_SomebodyInsists(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	s.start(t, diverting("iptables"))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for tick := time.NewTicker(500 * time.Millisecond); ctx.Err() == nil; <-tick.C {
			_, _ = s.Node.Run("iptables", "-t", "nat", "-F", "OUTPUT")
		}
	}()
	if err := netns.Poll(4*patience, func() error {
		if st := s.status(t); st.Ready || !strings.Contains(st.NotReady, "what is put back does not hold: the jump from OUTPUT to KASWAY-OUT-") {
			return fmt.Errorf("ready: %v, %s", st.Ready, st.NotReady)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	stop()
	<-done
	if n := strings.Count(s.agent.Log(), "somebody has changed what is installed"); n != 1 {
		t.Errorf("logged %d times", n)
	}
	if err := netns.Poll(4*patience, func() error {
		if st := s.status(t); !st.Ready {
			return fmt.Errorf("%s", st.NotReady)
		}
		return nil
	}); err != nil {
		t.Errorf("nobody insists any more: %v", err)
	}
}
