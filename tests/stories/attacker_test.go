package stories

import (
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// attacked are modes that divert in different ways.
var attacked = []string{"nft", "ebpf"}

// What an attacker says to the KAS, and what shows that it was heard there.
const (
	toKAS   = "GET / HTTP/1.0\r\n\r"
	fromKAS = "HTTP/1.0 400"
)

// siege is a scene with an attacker in it.
type siege struct {
	*scene
	mode   string
	evil   *attacker
	victim *netns.Host
}

// A pod whose process is root in its own user and network namespaces may do
// there what it likes, and nothing to anybody else. Each attempt is seen to
// have its effect where it may.
func TestAttackersPod(t *testing.T) {
	t.Parallel()
	for _, mode := range attacked {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{RoutedPods: 2, Neighbour: true})
			if mode == "ebpf" && s.NodeCgroup() == "" {
				t.Skip("no cgroup 2 to attach to")
			}
			addr := netip.MustParseAddr("10.77.1.66")
			file := s.file(t, "agent.yaml", `apiVersion: kasway.dev/v1alpha1
kind: AgentConfig
guard:
  rules:
  - {action: deny, clients: [`+addr.String()+`], targets: [kas]}
`)
			stop, err := stack.Mirror(s.ControlPlane, raw4, raw6)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(stop)
			s.start(t, diverting(mode, "-f", file))
			if s.firewall, err = s.ControlPlane.FirewallHere(stack.Port); err != nil {
				t.Fatal(err)
			}
			a := siege{scene: s, mode: mode, victim: s.RoutedPods[0], evil: s.newAttacker(t, s.RoutedPods[1], addr)}
			t.Run("cannot reach what the guard denies", a.cannotReach)
			t.Run("cannot take the way of others", a.cannotForge)
			t.Run("cannot divert", a.cannotDivert)
			t.Run("cannot look or touch", a.cannotTouch)
			t.Run("cannot come from another node", a.cannotComeFromElsewhere)
			for _, h := range []*netns.Host{s.Node, a.victim} {
				s.served(t, h, svc4)
				s.served(t, h, svc6)
			}
		})
	}
}

// ports are the agent's listeners of a target.
func (a siege) ports(t *testing.T, target string) (pod, host uint16) {
	t.Helper()
	for _, d := range a.status(t).State.Diverts {
		if d.Name == target {
			return d.Ports.Pod4, d.Ports.Host4
		}
	}
	t.Fatalf("nothing is diverted for %s", target)
	return 0, 0
}

// heard tells whether the target has answered; the far side of "raw" repeats
// what it hears.
func (a siege) heard(t *testing.T, what attempt) outcome {
	t.Helper()
	o := a.evil.try(t, what)
	if o.ok() && !strings.HasPrefix(o.Out, fromKAS) && !strings.HasSuffix(o.Out, " raw") {
		t.Errorf("%s answers %q, which is neither target", what.To, o.Out)
	}
	return o
}

// isDenied fails the test unless the attempt is cut, or never arrives.
func (a siege) isDenied(t *testing.T, how string, what attempt) {
	t.Helper()
	what.Say = toKAS
	if o := a.heard(t, what); o.ok() {
		t.Errorf("%s: the KAS answers the attacker: %q", how, o.Out)
	} else {
		t.Logf("%s: %s", how, o.Error)
	}
}

// isServed is the twin of isDenied: the same attempt at another target.
func (a siege) isServed(t *testing.T, how string, what attempt) {
	t.Helper()
	what.Say = "raw"
	if o := a.heard(t, what); !o.ok() {
		t.Errorf("%s: the target that is not denied does not answer: %s", how, o.Error)
	}
}

// By the KAS's addresses, by the agent's listener, by its own mark, by the
// host's listener: none leads there.
func (a siege) cannotReach(t *testing.T) {
	kasPod, kasHost := a.ports(t, "kas")
	rawPod, rawHost := a.ports(t, "raw")
	node := a.status(t).State.Node4
	const counter = `kasway_agent_refused_total{reason="rule"}`
	was := metric(t, a.agent, counter)
	a.isDenied(t, "by the service's address", attempt{To: svc4})
	a.isDenied(t, "by the KAS's own address", attempt{To: kas4})
	a.isDenied(t, "by the listener for pods", attempt{To: netip.AddrPortFrom(node, kasPod)})
	rises(t, a.agent, counter, was, 3)
	a.isServed(t, "by its address", attempt{To: raw4})
	a.isServed(t, "by the listener for pods", attempt{To: netip.AddrPortFrom(node, rawPod)})

	// The mark takes a connection out of the way, if anything: towards the
	// firewall. The attacker may set it, but not on what enters the node.
	before := metric(t, a.agent, "kasway_agent_streams_opened_total")
	a.isDenied(t, "with the agent's mark", attempt{To: kas4, Mark: intercept.Mark})
	if o := a.evil.try(t, attempt{To: netip.AddrPortFrom(a.evil.addr, 1), Mark: intercept.Mark}); o.Errno != syscall.ECONNREFUSED {
		t.Errorf("the attacker cannot set the mark at all: %s", o.Error)
	}
	if now := metric(t, a.agent, "kasway_agent_streams_opened_total"); now != before {
		t.Errorf("%v streams were opened for the attacker's mark", now-before)
	}

	a.cannotReachLoopback(t, kasHost, rawHost)
}

// The host's listeners are on the node's loopback, where rules about uids hold.
// Whoever owns a network namespace can well send to 127.0.0.1 by a wire.
func (a siege) cannotReachLoopback(t *testing.T, ports ...uint16) {
	const dev = netns.Uplink
	a.evil.must(t, "sh", "-c", "for i in all "+dev+"; do echo 1 >/proc/sys/net/ipv4/conf/$i/route_localnet; done")
	a.evil.must(t, "ip", "rule", "add", "pref", "10", "lookup", "local")
	a.evil.must(t, "ip", "rule", "add", "pref", "5", "to", "127.0.0.1", "lookup", "66")
	a.evil.must(t, "ip", "route", "add", "127.0.0.1", "via", "169.254.1.1", "dev", dev, "table", "66")
	a.evil.must(t, "ip", "rule", "del", "pref", "0")
	defer a.evil.must(t, "sh", "-c", "ip rule add pref 0 lookup local && ip rule del pref 5 && ip rule del pref 10")
	sent := a.sent(t)
	for _, port := range ports {
		to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port)
		if o := a.heard(t, attempt{To: to, From: netip.AddrPortFrom(a.evil.addr, 0), Say: toKAS}); o.ok() {
			t.Errorf("the attacker reaches the host's listener %d: %q", port, o.Out)
		}
	}
	if now := a.sent(t); now < sent+len(ports) {
		t.Errorf("%d packets have left the attacker, so nothing was tried", now-sent)
	}
}

// sent is how many packets have left the attacker.
func (a siege) sent(t *testing.T) (n int) {
	t.Helper()
	o := a.evil.run(t, "cat", "/proc/net/dev")
	for line := range strings.Lines(o.Out) {
		if f := strings.Fields(line); len(f) > 10 && f[0] == netns.Uplink+":" {
			if _, err := fmt.Sscan(f[10], &n); err != nil {
				t.Fatal(err)
			}
		}
	}
	return n
}

// With the victim's address nothing arrives, since the answer goes to the victim.
func (a siege) cannotForge(t *testing.T) {
	other := a.victim.Addr4
	a.evil.must(t, "ip", "address", "add", other.String()+"/32", "dev", netns.Uplink)
	defer a.evil.must(t, "ip", "address", "del", other.String()+"/32", "dev", netns.Uplink)
	const sample = `kasway_agent_intercept_taken_total{target="kas"}`
	taken := metric(t, a.agent, sample)
	c := connect(t, a.victim, raw4)
	if _, err := stack.AskMirror(c, "hello", patience); err != nil {
		t.Fatal(err)
	}
	own := c.LocalAddr().(*net.TCPAddr).AddrPort().Port() // the victim uses it at this moment
	for _, port := range []uint16{own, own ^ 1} {
		from := netip.AddrPortFrom(other, port)
		a.isDenied(t, fmt.Sprintf("as %s", from), attempt{To: svc4, From: from})
	}
	if now := metric(t, a.agent, sample); now != taken {
		t.Errorf("%v connections were taken in the victim's name", now-taken)
	}
	// The same with its own address gets as far as the guard.
	a.isDenied(t, "in its own name", attempt{To: svc4, From: netip.AddrPortFrom(a.evil.addr, 0)})
	rises(t, a.agent, sample, taken, 1)
	if who, err := stack.AskMirror(c, "still", patience); err != nil {
		t.Errorf("the victim's connection: %s, %v", who, err)
	}
}

// Rules and a flush act on the attacker's own connections, and on nobody else's.
func (a siege) cannotDivert(t *testing.T) {
	a.isServed(t, "before", attempt{To: raw4})
	o := a.evil.try(t, attempt{Exec: []string{"nft", "-f", "-"}, Input: `table ip evil {
	chain out { type nat hook output priority -110; ip protocol tcp dnat to 127.0.0.1:1; }
	chain pre { type nat hook prerouting priority -110; ip protocol tcp dnat to 127.0.0.1:1; }
}`})
	if !o.ok() {
		t.Fatalf("the attacker may not even divert itself: %s %s", o.Error, o.Out)
	}
	if o := a.evil.try(t, attempt{To: raw4, Say: "raw"}); o.Errno != syscall.ECONNREFUSED {
		t.Errorf("the attacker's rules do not even divert its own connections: %s %s", o.Out, o.Error)
	}
	a.served(t, a.victim, svc4)
	a.served(t, a.Node, kas4)
	a.evil.must(t, "nft", "flush", "ruleset")
	a.isServed(t, "after its flush", attempt{To: raw4})
	a.served(t, a.victim, svc4)
	a.served(t, a.Node, kas4)
}

// What is the agent's and the node's is neither read nor written. Each twin is
// the same by root of the machine.
func (a siege) cannotTouch(t *testing.T) {
	pid := fmt.Sprint(a.agent.Process.Pid)
	ran := func(cmd []string) error {
		_, err := a.Node.Run(cmd[0], cmd[1:]...)
		return err
	}
	for what, cmd := range map[string][]string{
		"enter the node's network": {"nsenter", "--net=" + a.Node.Path(), "true"},
		"signal the agent":         {"kill", "-0", pid},
		"read the agent's key":     {"cat", a.Path("pki/agent-node.key")},
		"read the agent's memory":  {"head", "-c0", "/proc/" + pid + "/environ"},
		"list what is kept for it": {"ls", "/proc/" + pid + "/root" + a.Path("state")},
		"ask the agent's socket":   {"curl", "--silent", "--max-time", "5", "--unix-socket", a.Path("agent.sock"), "http://agent/status"},
		"leave its cgroup":         {"sh", "-c", "echo 0 >" + filepath.Join(a.NodeCgroup(), "cgroup.procs")},
		"look at what is pinned":   {"ls", "/proc/" + pid + "/root/sys/fs/bpf/"},
	} {
		if what == "leave its cgroup" && a.NodeCgroup() == "" {
			continue
		}
		if err := ran(cmd); err != nil {
			t.Errorf("root cannot %s either: %v", what, err)
		}
		if o := a.evil.run(t, cmd[0], cmd[1:]...); o.ok() {
			t.Errorf("the attacker can %s: %q", what, o.Out)
		}
	}
	if err := loadProgram(); err != nil {
		t.Errorf("root cannot load a program either: %v", err)
	}
	if o := a.evil.try(t, attempt{Load: true}); o.Errno != syscall.EPERM {
		t.Errorf("loading a program gives the attacker %q, want EPERM", o.Error)
	}
	// It removes everything of an agent's where it runs.
	o := a.evil.run(t, a.Binary("agent"), "cleanup", "--state-dir", "/nowhere", "--admin-socket", "/nowhere/agent.sock")
	t.Logf("the agent's cleanup, run by the attacker: %s %s", o.Error, strings.TrimSpace(o.Out))
	a.served(t, a.victim, svc4)
	a.served(t, a.Node, kas4)
}

// A host on the node's network sends to the listeners, and to what is diverted.
func (a siege) cannotComeFromElsewhere(t *testing.T) {
	for _, to := range a.listening(t, a.mode) {
		if a.mode == "ebpf" && slices.Contains([]netip.AddrPort{svc4, svc6, kas4, kas6}, to) {
			continue // what the node forwards is not diverted
		}
		a.isStranger(t, to)
	}
	state := a.status(t).State
	for _, d := range state.Diverts {
		if d.Name == "kas" {
			for _, to := range []netip.AddrPort{netip.AddrPortFrom(state.Node4, d.Ports.Pod4), netip.AddrPortFrom(state.Node6, d.Ports.Pod6)} {
				if _, err := a.client(t, a.victim, "https://"+kasName, to).Version(t.Context()); err != nil {
					t.Errorf("a pod of the node is not served at %s: %v", to, err)
				}
			}
		}
	}
}
