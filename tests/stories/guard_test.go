package stories

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// asUser is a request by a process of another user of the node.
func (s *scene) asUser(t *testing.T, uid uint32, to netip.AddrPort) (exit int) {
	t.Helper()
	c := s.Node.Command("curl", "--silent", "--show-error", "--insecure", "--max-time", "8", "https://"+to.String()+"/version")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	exit, out, err := stack.ExitOf(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("uid %d at %s: exit %d: %s", uid, to, exit, strings.TrimSpace(out))
	return exit
}

// The agent's own policy: a pod prefix and a user of the host are denied, on
// record and by reset; everybody else passes.
func TestAgentGuard(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nft", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{RoutedPods: 2})
			denied, other := s.RoutedPods[0], s.RoutedPods[1]
			file := s.file(t, "agent.yaml", `apiVersion: kasway.dev/v1alpha1
kind: AgentConfig
guard:
  rules:
  - {action: deny, clients: [`+denied.Addr4.String()+`, `+denied.Addr6.String()+`], targets: [kas]}
  - {action: deny, uids: [4321]}
`)
			s.start(t, diverting(mode, "-f", file))
			const counter = `kasway_agent_refused_total{reason="rule"}`
			was, same := metric(t, s.agent, counter), s.steady(t)
			for _, to := range []netip.AddrPort{svc4, svc6, kas4, kas6} {
				isCut(t, "the denied pod", denied, to)
				s.served(t, other, to)
				// Cut while it connects, or within TLS's handshake.
				if exit := s.asUser(t, 4321, to); exit != 7 && exit != 35 {
					t.Errorf("the denied user at %s: curl's exit code is %d, want 7 or 35", to, exit)
				}
				if exit := s.asUser(t, 4322, to); exit != 0 {
					t.Errorf("another user at %s: curl's exit code is %d", to, exit)
				}
			}
			rises(t, s.agent, counter, was, 8)
			logged(t, s.agent, 0, "refused by policy", denied.Addr4.String(), svc4.String(), `"reason":"rule"`)
			logged(t, s.agent, 0, "refused by policy", s.Node.Addr4.String(), `"reason":"rule"`)
			same()
		})
	}
}

// A policy that denies pods the KAS does not see what is diverted: the agent's
// guard does, by pod prefix and by user. A policy that allows nothing but the KAS
// stops what is diverted, until it allows what check names.
func TestCase_B98_GuardWherePoliciesDoNotSee(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nft", "ebpf"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{RoutedPods: 3})
			if mode == "ebpf" && s.NodeCgroup() == "" {
				t.Skip("no cgroup 2 to attach to")
			}
			free, denied, confined := s.RoutedPods[0], s.RoutedPods[1], s.RoutedPods[2]
			every := []netip.AddrPort{svc4, svc6, kas4, kas6}
			policy := func(p netns.Policy, to []netip.AddrPort, pods ...*netns.Host) {
				t.Helper()
				if err := s.Node.SetPolicy(netns.NFTables, p, to, pods...); err != nil {
					t.Fatal(err)
				}
			}
			stopped := func(when string, h *netns.Host) {
				t.Helper()
				for _, to := range every {
					if err := (netns.Probe{From: h, To: to}).Reach(500 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
						t.Errorf("%s, %s to %s: %v, want a time-out", when, h.Label, to, err)
					}
				}
			}
			served := func(all ...*netns.Host) {
				t.Helper()
				for _, h := range all {
					for _, to := range every {
						s.served(t, h, to)
					}
				}
			}
			// Nothing of Kasway runs yet: both policies do what they say.
			policy(netns.DenyKAS, every, free, denied)
			stopped("a policy that denies the KAS", free)
			served(confined)
			policy(netns.OnlyKAS, every, confined)
			served(free, denied, confined)

			file := s.file(t, "agent.yaml", `apiVersion: kasway.dev/v1alpha1
kind: AgentConfig
guard:
  rules:
  - {action: deny, clients: [`+denied.Addr4.String()+`, `+denied.Addr6.String()+`], targets: [kas]}
  - {action: deny, uids: [4321]}
`)
			flags := diverting(mode, "-f", file)
			s.start(t, flags)
			stopped("a policy that allows only the KAS", confined)
			state := s.status(t).State
			exits(t, s, 0, "agent", slices.Concat([]string{"check"}, s.AgentFlags(), flags),
				"NetworkPolicy, "+mode, "connect times out: allow egress to "+state.Node4.String(), "1 rule about pods; the agent itself enforces")
			allowed := every
			for _, d := range state.Diverts {
				if d.Name == "kas" {
					allowed = append(allowed, netip.AddrPortFrom(state.Node4, d.Ports.Pod4), netip.AddrPortFrom(state.Node6, d.Ports.Pod6))
				}
			}
			policy(netns.OnlyKAS, allowed, confined)
			served(confined)

			policy(netns.DenyKAS, every, free, denied)
			served(free) // whatever the policy says
			for _, to := range every {
				isCut(t, "the denied pod", denied, to)
				if exit := s.asUser(t, 4321, to); exit != 7 && exit != 35 {
					t.Errorf("the denied user at %s: curl's exit code is %d, want 7 or 35", to, exit)
				}
				if exit := s.asUser(t, 4322, to); exit != 0 {
					t.Errorf("another user at %s: curl's exit code is %d", to, exit)
				}
			}
		})
	}
}

// A host on the node's network sends packets to what the agent listens on, and
// to what it diverts: it is refused before any byte.
func TestCase_B87_NeighbourIsRefused(t *testing.T) {
	t.Parallel()
	for _, e := range everyScene {
		t.Run(e.mode, func(t *testing.T) {
			t.Parallel()
			s := e.scene.take(t)
			for _, to := range s.listening(t, e.mode) {
				s.isStranger(t, to)
			}
		})
	}
}

// listening is what a neighbour may try: the agent's listeners that are not on
// loopback, and the addresses of the KAS.
func (s *scene) listening(t *testing.T, mode string) []netip.AddrPort {
	t.Helper()
	if mode == "listen" {
		return []netip.AddrPort{netip.AddrPortFrom(bind, kasPort), netip.AddrPortFrom(bind, servicePort)}
	}
	at := []netip.AddrPort{svc4, svc6, kas4, kas6}
	state := s.status(t).State
	for _, d := range state.Diverts {
		at = append(at, netip.AddrPortFrom(state.Node4, d.Ports.Pod4), netip.AddrPortFrom(state.Node6, d.Ports.Pod6))
	}
	return at
}

func (s *scene) isStranger(t *testing.T, to netip.AddrPort) {
	t.Helper()
	via := s.Node.Addr4
	if to.Addr().Is6() {
		via = s.Node.Addr6
	}
	route := netip.PrefixFrom(to.Addr(), to.Addr().BitLen())
	_, _ = s.Neighbour.Run("ip", "route", "replace", route.String(), "via", via.String())
	const counter = `kasway_agent_intercept_refused_total{reason="stranger"}`
	was, opened := metric(t, s.agent, counter), metric(t, s.agent, "kasway_agent_streams_opened_total")
	isCut(t, "the neighbour at "+to.String(), s.Neighbour, to)
	rises(t, s.agent, counter, was, 1)
	if n := metric(t, s.agent, "kasway_agent_streams_opened_total"); n != opened {
		t.Errorf("%s: a stream was opened for the neighbour", to)
	}
}
