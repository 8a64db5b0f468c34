//go:build chaos

package chaos

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// kasPort is where the stand-in serves.
const kasPort = 6443

// bind is the address of mode listen.
var bind = netip.MustParseAddr("169.254.77.2")

// scene is a stack with its KAS, and what clients dial.
type scene struct {
	*stack.Stack
	mode, whenDown string
	clients        []*netns.Host
	to             []netip.AddrPort
	flags          []string
	around         netns.Around
	before         netns.Snapshot
}

// setUp starts everything but the agent, which is to run in this cgroup of the
// node.
func setUp(t *testing.T, mode, whenDown, cgroup string) *scene {
	t.Helper()
	topo := netns.New(t, spec(mode))
	kas4, kas6 := netip.AddrPortFrom(netns.KAS4, kasPort), netip.AddrPortFrom(netns.KAS6, kasPort)
	stop, err := stack.Mirror(topo.ControlPlane, kas4, kas6)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	dir, err := stack.TempDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	st, err := stack.New(topo, bin, dir)
	if err != nil {
		t.Fatal(err)
	}
	s := &scene{Stack: st, mode: mode, whenDown: whenDown, clients: []*netns.Host{topo.Node}}
	s.flags = []string{"--mode", mode, "--when-down", whenDown}
	if mode == "listen" {
		s.to = []netip.AddrPort{netip.AddrPortFrom(bind, kasPort)}
		s.flags = append(s.flags, "--bind-address", bind.String(), "--target", fmt.Sprintf("%d:%s", kasPort, kas4))
	} else {
		s.clients = slices.Concat(s.clients, topo.RoutedPods, topo.BridgedPods)
		s.to = []netip.AddrPort{kas4, kas6}
		s.flags = append(s.flags, "--clients", "host,pods", "--target", fmt.Sprintf("kas=%s,%s", kas4, kas6))
	}
	if _, err := s.Server(kas4.String()); err != nil {
		t.Fatal(err)
	}
	s.AgentCgroup = cgroup
	if _, err := s.Run("version"); err != nil { // the first to run there makes it
		t.Fatal(err)
	}
	if s.around, err = s.Around(s.Path("state")); err != nil {
		t.Fatal(err)
	}
	if s.before, err = s.Node.Snapshot(s.around); err != nil {
		t.Fatal(err)
	}
	return s
}

// spec is a node with every kind of client that the mode can carry.
func spec(mode string) netns.Spec {
	if mode == "tproxy" { // which refuses a bridge whose packets pass iptables
		return netns.Spec{RoutedPods: 2}
	}
	return netns.Spec{RoutedPods: 1, BridgePods: 1, BridgeNF: true}
}

// start starts an agent, which is ready when it returns.
func (s *scene) start(t *testing.T) *stack.Process {
	t.Helper()
	agent, err := s.Agent(s.flags...)
	if err != nil {
		t.Fatal(err)
	}
	return agent
}

// hooks are where mode ebpf attaches one program each.
var hooks = []string{"connect4", "connect6", "getpeername4", "getpeername6", "sockops"}

// attached demands one program at each hook of the mode's, each held by a link,
// and returns the links.
func (s *scene) attached(t *testing.T) (links []uint32) {
	t.Helper()
	all, err := netns.AttachedTo(s.NodeCgroup())
	if err != nil {
		t.Fatal(err)
	}
	var want, have []string
	if s.mode == "ebpf" {
		want = hooks
	}
	for _, a := range all {
		have = append(have, a.Hook)
		links = append(links, a.Link)
	}
	slices.Sort(have)
	if !slices.Equal(have, want) || slices.Contains(links, 0) {
		t.Errorf("attached to the node's cgroup are %+v, want one link at each of %v", all, want)
	}
	return links
}

// tidy stops the agent, sees that its guard outlives it, and proves that two
// cleanups leave the node as it was.
func (s *scene) tidy(t *testing.T, agent *stack.Process) {
	t.Helper()
	if err := agent.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := agent.Wait(); err != nil {
		t.Errorf("the agent ends with %v after SIGTERM\n%s", err, agent.Log())
	}
	for _, h := range s.clients {
		for _, to := range s.to {
			if c, want := one(h, to), down(s.whenDown); c.what != want {
				t.Errorf("after SIGTERM it should be %s: %s", want, c)
			}
		}
	}
	for range 2 {
		if err := s.Cleanup(); err != nil {
			t.Fatal(err)
		}
	}
	after, err := s.Node.Snapshot(s.around)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range s.before.Diff(after) {
		t.Errorf("left behind: %s", line)
	}
}

// down is what connects must meet without an agent.
func down(whenDown string) string {
	return map[string]string{"refuse": refused, "direct": direct}[whenDown]
}

// show fails t with the connects that break a rule, the first ten of them.
type show struct {
	t     *testing.T
	shown int
}

func (s *show) fail(rule string, c connect) {
	s.t.Helper()
	if s.shown++; s.shown <= 10 {
		s.t.Errorf("%s: %s", rule, c)
	}
}

// always holds whatever happens to the agent.
func (s *show) always(c connect, whenDown string) {
	s.t.Helper()
	switch {
	case c.blocked > within:
		s.fail("blocked in connect for longer than 3 s", c)
	case c.what == odd:
		s.fail("an errno other than ECONNREFUSED", c)
	case whenDown == "refuse" && c.what == direct:
		s.fail("escaped to the KAS", c)
	}
}

// within is how soon after the blow the state of whenDown must hold, and the
// longest that a connect may ever block.
const within = 3 * time.Second
