package stories

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// inMode are flags for the target kas, and what clients dial, in any mode.
func inMode(mode string) (flags []string, to netip.AddrPort) {
	if mode == "listen" {
		return []string{"--mode", mode, "--bind-address", bind.String(), "--target", "6443:" + kas4.String()}, netip.AddrPortFrom(bind, kasPort)
	}
	return diverting(mode), kas4
}

var everyMode = []string{"nft", "iptables", "listen"}

// What an agent has installed is gone after cleanup, whether it was stopped or
// killed; and the comparison that says so sees leftovers of each kind.
func TestCase_B59_UninstallLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, mode := range everyMode {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{RoutedPods: 1})
			flags, to := inMode(mode)
			if err := s.startServer(); err != nil {
				t.Fatal(err)
			}
			around := netns.Around{BPF: []string{"kasway"}, Trees: []string{s.Dir}}
			before, err := s.Node.Snapshot(around)
			if err != nil {
				t.Fatal(err)
			}
			left := func() []string {
				now, err := s.Node.Snapshot(around)
				if err != nil {
					t.Fatal(err)
				}
				return before.Diff(now)
			}
			for _, signal := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
				s.startAgent(t, flags...)
				s.served(t, s.Node, to)
				if len(left()) == 0 {
					t.Error("a running agent is not seen: the comparison shows nothing")
				}
				if err := s.agent.Signal(signal); err != nil {
					t.Fatal(err)
				}
				if err := s.agent.Wait(); err != nil && signal == syscall.SIGTERM {
					t.Errorf("the agent ends with %v after SIGTERM", err)
				}
				if err := s.Cleanup(); err != nil {
					t.Error(err)
				}
				for _, line := range left() {
					t.Errorf("after %s and cleanup: %s", signal, line)
				}
			}
			for _, leftover := range [][2]string{
				{"nft add table inet kasway_left", "nft delete table inet kasway_left"},
				{"ipset create kasway4-left hash:ip,port timeout 3", "ipset destroy kasway4-left"},
				{"iptables -t nat -N KASWAY-GUARD", "iptables -t nat -X KASWAY-GUARD"},
				{"ip address add 169.254.77.1/32 dev lo", "ip address del 169.254.77.1/32 dev lo"},
				{"ip rule add pref 90 fwmark 0x40 lookup 27511", "ip rule del pref 90"},
				{"touch " + s.Path("agent.sock"), "rm " + s.Path("agent.sock")},
			} {
				plant, remove := strings.Fields(leftover[0]), strings.Fields(leftover[1])
				if _, err := s.Node.Run(plant[0], plant[1:]...); err != nil {
					t.Fatal(err)
				}
				if len(left()) == 0 {
					t.Errorf("%s: not seen", leftover[0])
				}
				if _, err := s.Node.Run(remove[0], remove[1:]...); err != nil {
					t.Fatal(err)
				}
			}
			for _, line := range left() {
				t.Errorf("at the end: %s", line)
			}
		})
	}
}

// Cleanup needs neither KAS nor tunnel: with both gone it ends soon, as often
// as it is asked, and the node's own ways are free again.
func TestCase_B60_CleanupWithoutKAS(t *testing.T) {
	t.Parallel()
	for _, mode := range everyMode {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{})
			flags, to := inMode(mode)
			s.start(t, flags)
			for _, p := range []*stack.Process{s.server, s.agent} {
				if err := p.Signal(syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
				_ = p.Wait()
			}
			if _, err := s.ControlPlane.FirewallHere(1); err != nil { // nothing answers any more
				t.Fatal(err)
			}
			if _, err := dial(t, s.Node, to); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("before cleanup the guard should refuse: %v", err)
			}
			for range 2 {
				start := time.Now()
				exits(t, s, 0, "agent", s.CleanupArgs(), "nothing of Kasway is left")
				if took := time.Since(start); took > 5*time.Second {
					t.Errorf("cleanup took %s", took)
				}
			}
			if mode == "listen" {
				return // its address is gone with the agent
			}
			if err := (netns.Probe{From: s.Node, To: to}).Reach(300 * time.Millisecond); errors.Is(err, syscall.ECONNREFUSED) {
				t.Error("the guard still refuses after cleanup")
			}
		})
	}
}

// A client that has tried since before there was an agent is served within 2 s
// of its start, and a connect that was under way does not hang.
func TestCase_B62_ClientBeforeAgent(t *testing.T) {
	t.Parallel()
	for _, mode := range everyMode {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{})
			if _, err := s.ControlPlane.FirewallHere(stack.Port); err != nil {
				t.Fatal(err)
			}
			if err := s.startServer(); err != nil {
				t.Fatal(err)
			}
			flags, to := inMode(mode)
			first, patient := make(chan time.Time, 1), make(chan error, 1)
			began := make(chan struct{})
			ctx, cancel := context.WithTimeout(t.Context(), 40*time.Second)
			defer cancel()
			go func() {
				for n := 0; ctx.Err() == nil; n++ {
					if n == 2 {
						close(began) // two tries have failed by now
					}
					if s.try(ctx, to, time.Second) == nil {
						first <- time.Now()
						return
					}
				}
			}()
			go func() {
				err := s.try(ctx, to, 30*time.Second)
				if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) {
					err = nil // told at once to try again, which is no hanging
				}
				patient <- err
			}()
			select {
			case <-began:
			case <-ctx.Done():
				t.Fatal("the client does not fail without an agent")
			}
			s.startAgent(t, flags...)
			ready := time.Now()
			select {
			case at := <-first:
				t.Logf("first success %s after the agent was ready", at.Sub(ready).Round(time.Millisecond))
				if at.Sub(ready) > 2*time.Second {
					t.Errorf("first success %s after the agent was ready", at.Sub(ready))
				}
			case <-ctx.Done():
				t.Fatal("the client is never served")
			}
			if mode == "listen" {
				return // what was sent to the network before lo had the address stays there
			}
			if err := <-patient; err != nil {
				t.Errorf("a connect begun before the agent: %v", err)
			}
			t.Logf("the connect begun before ended %s after the agent was ready", time.Since(ready).Round(time.Millisecond))
		})
	}
}

// try is one request on a new connection, as the kubelet makes it.
func (s *scene) try(ctx context.Context, to netip.AddrPort, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	c, err := s.kasClient("https://"+to.String(), func(ctx context.Context, network, _ string) (net.Conn, error) {
		return s.Node.Dial(ctx, network, to.String())
	})
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Version(ctx)
	return err
}

// A port that somebody has is named with its owner, and another one works.
func TestCase_B84_PortInUse(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	owner := "pid " + strconv.Itoa(os.Getpid()) + " (" + filepath.Base(os.Args[0])[:len("stories.test")] + ")"
	taken := func(h *netns.Host, at string) func() {
		l, err := h.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		return func() { l.Close() }
	}
	flags, to := inMode("listen")
	run := append(append([]string{"run"}, s.AgentFlags()...), flags...)
	serve := append(append([]string{"run"}, s.ServerFlags()...), "--allowed-destination", kas4.String())

	free := taken(s.Node, ":6443")
	exits(t, s, 1, "agent", run, bind.String()+":6443", "in use by "+owner)
	other := strings.Join(run, " ")
	free2 := taken(s.Node, stack.AgentOperators)
	exits(t, s, 1, "agent", strings.Fields(strings.Replace(other, "6443:172", "6445:172", 1)), stack.AgentOperators, "in use by "+owner, "--observe-address")
	free3 := taken(s.ControlPlane, ":8091")
	exits(t, s, 1, "server", serve, ":8091", "in use by "+owner, "--listen")
	free3()
	free4 := taken(s.ControlPlane, stack.ServerOperators)
	exits(t, s, 1, "server", serve, stack.ServerOperators, "in use by "+owner, "--observe-address")

	if err := s.startServer("--observe-address", "127.0.0.1:18095"); err != nil {
		t.Fatal(err)
	}
	s.startAgent(t, append(strings.Fields(strings.Replace(strings.Join(flags, " "), "6443:172", "6445:172", 1)), "--observe-address", "127.0.0.1:18094")...)
	s.served(t, s.Node, netip.AddrPortFrom(to.Addr(), 6445))
	free()
	free2()
	free4()
}

// The server stands at the very address that is diverted: the agent's link goes
// past its own rules, once, and clients are carried over it.
func TestCase_B44_ServerBehindTheCapturedAddress(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nft", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			plan := plan()
			plan.KAS = append(plan.KAS, netip.MustParseAddr("172.30.0.12"))
			s := newScene(t, netns.Spec{RoutedPods: 1, Plan: plan})
			vip := netip.MustParseAddrPort("172.30.0.12:8443")
			s.At = vip
			if err := s.startServer("--listen", vip.String()); err != nil {
				t.Fatal(err)
			}
			s.startAgent(t, "--mode", mode, "--clients", "host,pods", "--target", "kas="+vip.String())
			same := s.steady(t)
			for _, h := range s.clients() {
				for range 3 {
					s.served(t, h, vip)
				}
			}
			out, err := s.ControlPlane.Run("ss", "-Htn", "state", "established", "sport = :8443", "and", "src", vip.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			if n := strings.Count(out, "\n"); n != 1 {
				t.Errorf("%d connections to the server, want the link alone:\n%s", n, out)
			}
			for sample, want := range map[string]float64{"kasway_server_links_opened_total": 1, "kasway_server_links_up": 1} {
				if got := metric(t, s.server, sample); got != want {
					t.Errorf("%s is %v, want %v", sample, got, want)
				}
			}
			if n := metric(t, s.agent, `kasway_agent_intercept_refused_total{reason="own"}`); n != 0 {
				t.Errorf("the agent has taken %v connections of its own", n)
			}
			same()
			// The first link may be older than the rules; this one is not.
			if err := s.server.Signal(syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			_ = s.server.Wait()
			if err := s.startServer("--listen", vip.String()); err != nil {
				t.Fatal(err)
			}
			s.served(t, s.Node, vip)
		})
	}
}
