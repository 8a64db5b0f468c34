package stories

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// attacked are modes that divert in different ways.
var attacked = []string{"nft"}

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
			if s.firewall, err = s.Node.FirewallToward(stack.Port); err != nil {
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

	// The host's listeners are on the node's loopback, where rules about uids
	// hold. Towards the node the attacker's packets may well have that address.
	loopback := netip.MustParseAddr("127.0.0.1")
	a.evil.must(t, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/conf/"+netns.Uplink+"/route_localnet && echo 1 >/proc/sys/net/ipv4/conf/all/route_localnet")
	a.evil.must(t, "ip", "rule", "add", "pref", "10", "lookup", "local")
	a.evil.must(t, "sh", "-c", "ip rule add pref 5 to 127.0.0.1 lookup 66 && ip route add 127.0.0.1 via 169.254.1.1 dev "+netns.Uplink+" table 66 && ip rule del pref 0")
	for _, port := range []uint16{kasHost, rawHost} {
		what := attempt{To: netip.AddrPortFrom(loopback, port), From: netip.AddrPortFrom(a.evil.addr, 0), Say: toKAS}
		if o := a.heard(t, what); o.ok() {
			t.Errorf("the attacker reaches the host's listener %d: %q", port, o.Out)
		}
	}
	sent := a.evil.run(t, "cat", "/sys/class/net/"+netns.Uplink+"/statistics/tx_packets")
	_ = sent
	a.evil.must(t, "sh", "-c", "ip rule add pref 0 lookup local && ip rule del pref 5 && ip rule del pref 10")
	a.isServed(t, "after that", attempt{To: raw4})
}

// With the victim's address nothing arrives, since the answer goes to the victim.
func (a siege) cannotForge(t *testing.T) {
	other := a.victim.Addr4
	a.evil.must(t, "ip", "address", "add", other.String()+"/32", "dev", netns.Uplink)
	defer a.evil.must(t, "ip", "address", "del", other.String()+"/32", "dev", netns.Uplink)
	const sample = `kasway_agent_intercept_taken_total{target="kas"}`
	taken := metric(t, a.agent, sample)
	c := hold(t, a.victim, raw4)
	for i := range 3 {
		from := netip.AddrPortFrom(other, c.LocalAddr().(interface{ AddrPort() netip.AddrPort }).AddrPort().Port()+uint16(i))
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
	chain out { type nat hook output priority -300; ip protocol tcp redirect to :1; }
	chain pre { type nat hook prerouting priority -300; ip protocol tcp redirect to :1; }
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
		"run the agent's commands": {a.Binary("agent"), "cleanup", "--force-for-nobody"},
	} {
		if what == "leave its cgroup" && a.NodeCgroup() == "" || what == "run the agent's commands" {
			continue
		}
		if err := ran(cmd); err != nil && what != "leave its cgroup" {
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
	// cleanup would remove everything, if it could; it acts where it runs.
	if err := os.Chmod(a.Dir, 0o711); err != nil {
		t.Fatal(err)
	}
	o := a.evil.run(t, a.Binary("agent"), "cleanup", "--state-dir", "/nowhere", "--admin-socket", "/nowhere/agent.sock")
	t.Logf("the agent's cleanup, run by the attacker: %s %s", o.Error, strings.TrimSpace(o.Out))
	a.served(t, a.victim, svc4)
	a.served(t, a.Node, kas4)
}

// A host on the node's network sends to the listeners, and to what is diverted.
func (a siege) cannotComeFromElsewhere(t *testing.T) {
	for _, to := range a.listening(t, a.mode) {
		a.isStranger(t, to)
	}
	state := a.status(t).State
	for _, d := range state.Diverts {
		if d.Name == "kas" {
			a.served(t, a.victim, netip.AddrPortFrom(state.Node4, d.Ports.Pod4))
			a.served(t, a.victim, netip.AddrPortFrom(state.Node6, d.Ports.Pod6))
		}
	}
}
