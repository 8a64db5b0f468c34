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

// policed is a scene with policies on its pods.
type policed struct {
	*scene
	mode                   string
	free, denied, confined *netns.Host
}

// everyWay are the addresses of the KAS.
var everyWay = []netip.AddrPort{svc4, svc6, kas4, kas6}

// policy is enforced where most plugins do, in netfilter's filter hooks.
func (p policed) policy(t *testing.T, kind netns.Policy, to []netip.AddrPort, pods ...*netns.Host) {
	t.Helper()
	if err := p.Node.SetPolicy(netns.NFTables, kind, to, pods...); err != nil {
		t.Fatal(err)
	}
}

// stopped fails the test unless every connect of h times out.
func (p policed) stopped(t *testing.T, when string, h *netns.Host) {
	t.Helper()
	for _, to := range everyWay {
		if err := (netns.Probe{From: h, To: to}).Reach(500 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s, %s to %s: %v, want a time-out", when, h.Label, to, err)
		}
	}
}

func (p policed) servedAll(t *testing.T, pods ...*netns.Host) {
	t.Helper()
	for _, h := range pods {
		for _, to := range everyWay {
			p.served(t, h, to)
		}
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
			p := policed{s, mode, s.RoutedPods[0], s.RoutedPods[1], s.RoutedPods[2]}
			// Nothing of Kasway runs yet: both policies do what they say.
			p.policy(t, netns.DenyKAS, everyWay, p.free, p.denied)
			p.stopped(t, "a policy that denies the KAS", p.free)
			p.servedAll(t, p.confined)
			p.policy(t, netns.OnlyKAS, everyWay, p.confined)
			p.servedAll(t, p.free, p.denied, p.confined)

			file := s.file(t, "agent.yaml", `apiVersion: kasway.dev/v1alpha1
kind: AgentConfig
guard:
  rules:
  - {action: deny, clients: [`+p.denied.Addr4.String()+`, `+p.denied.Addr6.String()+`], targets: [kas]}
  - {action: deny, uids: [4321]}
`)
			flags := diverting(mode, "-f", file)
			s.start(t, flags)
			p.isConfined(t, flags)
			p.isFree(t)
			p.isDenied(t)
		})
	}
}

// isConfined: a policy that allows only the KAS drops what is diverted, and
// serves again with what check tells to allow.
func (p policed) isConfined(t *testing.T, flags []string) {
	p.stopped(t, "a policy that allows only the KAS", p.confined)
	state := p.status(t).State
	exits(t, p.scene, 0, "agent", slices.Concat([]string{"check"}, p.AgentFlags(), flags),
		"NetworkPolicy, "+p.mode, "connect times out: allow egress to "+state.Node4.String(), "1 rule about pods; the agent itself enforces")
	allowed := slices.Clone(everyWay)
	for _, d := range state.Diverts {
		if d.Name == "kas" {
			allowed = append(allowed, netip.AddrPortFrom(state.Node4, d.Ports.Pod4), netip.AddrPortFrom(state.Node6, d.Ports.Pod6))
		}
	}
	p.policy(t, netns.OnlyKAS, allowed, p.confined)
	p.servedAll(t, p.confined)
}

// isFree: a policy that denies the KAS is not enforced in the filter hooks; at
// the pod's interface, and in prerouting before any translation, it is where the
// mode translates only then.
func (p policed) isFree(t *testing.T) {
	p.policy(t, netns.DenyKAS, everyWay, p.free, p.denied)
	p.servedAll(t, p.free)
	for _, hook := range []string{`netdev lab_early { chain c { type filter hook ingress device "cali0" priority 0;`, "inet lab_early { chain c { type filter hook prerouting priority -300;"} {
		rules := "table " + hook + `
	ip saddr ` + p.free.Addr4.String() + ` ip daddr { 10.96.0.1, 172.30.0.10 } drop
	ip6 saddr ` + p.free.Addr6.String() + ` ip6 daddr { fd00:96::1, fd00:30::10 } drop
}
}`
		if _, err := p.Node.RunInput(rules, "nft", "-f", "-"); err != nil {
			t.Fatal(err)
		}
		if p.mode == "ebpf" {
			p.servedAll(t, p.free)
		} else {
			p.stopped(t, "a policy enforced early", p.free)
		}
		family, _, _ := strings.Cut(hook, " ")
		if _, err := p.Node.Run("nft", "delete", "table", family, "lab_early"); err != nil {
			t.Fatal(err)
		}
	}
}

// isDenied: the guard denies what the policies do not.
func (p policed) isDenied(t *testing.T) {
	for _, to := range everyWay {
		// A busy machine may take longer than isCut waits.
		if c, err := dial(t, p.denied, to); err == nil {
			isReset(t, "the denied pod", c, patience)
			shut(c)
		} else if !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the denied pod: %v, want a reset", err)
		}
		if exit := p.asUser(t, 4321, to); exit != 7 && exit != 35 {
			t.Errorf("the denied user at %s: curl's exit code is %d, want 7 or 35", to, exit)
		}
		if exit := p.asUser(t, 4322, to); exit != 0 {
			t.Errorf("another user at %s: curl's exit code is %d", to, exit)
		}
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
